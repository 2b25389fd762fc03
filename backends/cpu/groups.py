"""The forms as lists of matrices: which rows and columns belong to which group, read at each launch.

Sizes on the CPU are host memory, so the walk over groups starts from their current contents. The
clamps are the contract's: start to [0, T], end to [start, T], so offsets that lie stay inside the
operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.layouts import Operands

Index = npt.NDArray[np.int64]


class Group(NamedTuple):
    """One product: out = act(alpha * a @ b + beta * c + bias)."""

    a: Tensor
    b: Tensor
    out: Tensor
    c: Tensor | None
    bias: Tensor | None


class Spans:
    """Reads `ends` (and the element before it) where it lies; the contents may change between launches."""

    def __init__(self, ops: Operands, total: int) -> None:
        assert ops.ends is not None
        ends, self._total = ops.ends.detach(), total
        self._ends = ends.numpy()
        self._head = None
        if ops.head:
            step = ends.stride(0) if ends.shape[0] > 1 else 1
            self._head = ends.as_strided((1,), (1,), ends.storage_offset() - step).numpy()

    def read(self) -> tuple[Index, Index]:
        """Clamped starts and ends, as fresh int64 arrays."""
        ends = self._ends.astype(np.int64)
        start = np.empty_like(ends)
        if len(ends):
            start[0] = 0 if self._head is None else self._head[0]
            start[1:] = ends[:-1]
        np.clip(start, 0, self._total, out=start)
        np.clip(ends, start, self._total, out=ends)
        return start, ends


def bare(operand: Any) -> Any:
    """The same memory without a graph behind it, so that writing into `out` is not recorded."""
    if operand is None:
        return None
    return operand.detach() if isinstance(operand, Tensor) else [matrix.detach() for matrix in operand]


def _each(operand: Any, g: int, dims: int = 3) -> Any:
    """Group g's part of an operand that may be a list, a stack, shared by all groups, or absent."""
    if operand is None or (isinstance(operand, Tensor) and operand.dim() < dims):
        return operand
    return operand[g]


def valid_rows(ops: Operands, limit: int) -> Index:
    """The rows that count in each group of a masked problem, clamped to [0, M]."""
    assert ops.valid_rows is not None
    return np.clip(ops.valid_rows.detach().numpy().astype(np.int64), 0, limit)


def _walk_jagged(ops: Operands, start: list[int], end: list[int]) -> Iterator[Group]:
    a, b, out, c, bias = ops.a, ops.b, ops.out, ops.c, ops.bias
    assert isinstance(a, Tensor) and isinstance(b, Tensor) and isinstance(out, Tensor)
    assert not isinstance(c, list) and not isinstance(bias, list)
    for g, (lo, hi) in enumerate(zip(start, end, strict=True)):
        row = _each(bias, g, 2)
        if ops.spec.form == "jagged_m":
            yield Group(a[lo:hi], _each(b, g), out[lo:hi], None if c is None else c[lo:hi], row)
        elif ops.spec.form == "jagged_n":
            width = None if row is None else (row[lo:hi] if row.shape[0] == b.shape[1] else row)
            yield Group(_each(a, g), b[:, lo:hi], out[:, lo:hi], None if c is None else c[:, lo:hi], width)
        else:
            yield Group(a[:, lo:hi], b[lo:hi], out[g], _each(c, g), row)


def walk(ops: Operands, start: Index | None, end: Index | None) -> Iterator[Group]:
    """All groups. `end` of a masked problem holds its valid rows; other dense forms take None."""
    if ops.spec.jagged:
        assert start is not None and end is not None
        yield from _walk_jagged(ops, start.tolist(), end.tolist())
        return
    for g in range(ops.spec.groups):
        a, b, out, c, bias = ops.a[g], ops.b[g], ops.out[g], _each(ops.c, g), _each(ops.bias, g, 2)
        if ops.spec.form == "masked":
            assert end is not None
            rows = int(end[g])
            a, out, c = a[:rows], out[:rows], None if c is None else c[:rows]
        yield Group(a, b, out, c, bias)


def zero_unowned(ops: Operands, start: Index | None, end: Index | None) -> None:
    """Writes zeros to the elements of `out` that no group owns; the owned ones are written later."""
    out = ops.out
    if ops.spec.form == "masked":
        assert isinstance(out, Tensor) and end is not None
        for g, rows in enumerate(end.tolist()):
            out[g, rows:] = 0
    elif ops.spec.form in ("jagged_m", "jagged_n"):
        assert isinstance(out, Tensor) and start is not None and end is not None
        flat = out if ops.spec.form == "jagged_m" else out.t()
        owned = np.zeros(flat.shape[0] + 1, np.int64)
        np.add.at(owned, start, 1)
        np.add.at(owned, end, -1)
        for lo, hi in _runs_of_zero(np.cumsum(owned)[:-1]):
            flat[lo:hi] = 0


def _runs_of_zero(cover: Index) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([1], cover, [1])) == 0))
    yield from zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True)


def is_inference(ops: Operands) -> bool:
    """Whether some tensor may only be written inside torch's inference mode."""
    outs = ops.out if isinstance(ops.out, list) else [ops.out]
    return any(torch.is_inference(out) for out in outs)
