"""The groups of each form as lists of matrices, with sizes read at each launch.

Sizes on the CPU are host memory, so an iteration over groups starts from their current contents. They are clamped like
on a GPU: start to [0, T], end to [start, T], so that invalid offsets stay inside the operands.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.planning.operands import Operands

Index = npt.NDArray[np.int64]


class Group(NamedTuple):
    """One product: out = act(alpha * a @ b + beta * c + bias)."""

    a: Tensor
    b: Tensor
    out: Tensor
    c: Tensor | None
    bias: Tensor | None


def jagged_extent(ops: Operands) -> int:
    """T: the extent of the operands along the jagged direction."""
    a, b = cast(Tensor, ops.a), cast(Tensor, ops.b)
    return {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}[ops.spec.jagged or "m"]


class Sizes:
    """Reads the sizes where they lie, at each launch, because their contents may change in place.

    `start` and `end` are clamped int64 arrays of a jagged form; `end` alone holds the valid rows of a
    masked one; a form without sizes has neither. `lie` says that the ends are not in order, so that
    groups may share elements or leave gaps.
    """

    def __init__(self, ops: Operands) -> None:
        self.start: Index | None = None
        self.end: Index | None = None
        self.lie = False
        self._first = True
        self._source = self._head = None
        if ops.spec.jagged:
            ends, self._limit = cast(Tensor, ops.ends).detach(), jagged_extent(ops)
            self._source = ends.numpy()
            if ops.head:
                step = ends.stride(0) if ends.shape[0] > 1 else 1
                self._head = ends.as_strided((1,), (1,), ends.storage_offset() - step).numpy()
        elif ops.spec.form == "masked":
            self._source = cast(Tensor, ops.valid_rows).detach().numpy()
            self._limit = cast(Tensor, ops.a).shape[1]
        self._jagged, self._seen = ops.spec.jagged is not None, b""

    def changed(self) -> bool:
        """Reads the sizes. Returns whether anything differs from the last call (True at the first)."""
        seen = b"" if self._source is None else self._source.tobytes()
        if self._head is not None:
            seen += self._head.tobytes()
        if seen == self._seen and not self._first:
            return False
        self._seen, self._first = seen, False
        self._read()
        return True

    def _read(self) -> None:
        if self._source is None:
            return
        end = self._source.astype(np.int64)
        if not self._jagged:
            self.end = np.clip(end, 0, self._limit)
            return
        start = np.empty_like(end)
        if len(end):
            start[0] = 0 if self._head is None else self._head[0]
            start[1:] = end[:-1]
        self.lie = bool((start > end).any())
        self.start = np.clip(start, 0, self._limit)
        self.end = np.clip(end, self.start, self._limit)

    @property
    def owned(self) -> tuple[int, int]:
        """The range of rows or columns that the groups cover, if the ends of a jagged form are in order."""
        start, end = cast(Index, self.start), cast(Index, self.end)
        return (int(start[0]), int(end[-1])) if len(end) else (0, 0)


def rows_of(sizes: Sizes) -> Tensor:
    """The group of each owned row, if the ends of a jagged form are in order."""
    start, end = cast(Index, sizes.start), cast(Index, sizes.end)
    return torch.from_numpy(np.repeat(np.arange(len(end)), end - start))


def empty_products(ops: Operands, start: Index | None, end: Index | None) -> list[Tensor]:
    """The outputs of groups with K = 0, which BLAS is not asked to write."""
    if ops.spec.form == "per_group":
        return [out for a, out in zip(ops.a, ops.out, strict=True) if a.shape[1] == 0]
    if ops.spec.form == "jagged_k":
        filled = (cast(Index, end) > cast(Index, start)).astype(np.int64)
        return [cast(Tensor, ops.out)[lo:hi] for lo, hi in _runs_of_zero(filled)]
    return [group.out for group in each_group(ops, start, end)] if cast(Tensor, ops.a).shape[-1] == 0 else []


def bare(operand: Any) -> Any:
    """A detached tensor over the same memory, so that writing into `out` is not recorded."""
    if operand is None:
        return None
    return operand.detach() if isinstance(operand, Tensor) else [matrix.detach() for matrix in operand]


def _each(operand: Any, g: int, dims: int = 3) -> Any:
    """Group g's part of an operand that may be a list, a stack, shared by all groups, or absent."""
    if operand is None or (isinstance(operand, Tensor) and operand.dim() < dims):
        return operand
    return operand[g]


def each_group(ops: Operands, start: Index | None, end: Index | None) -> Iterator[Group]:
    """All groups. `end` of a masked problem holds its valid rows; None for other dense forms."""
    jagged, all_of = ops.spec.jagged, slice(None)
    first = [0] * ops.spec.groups if start is None else start.tolist()
    last = [None] * ops.spec.groups if end is None else end.tolist()
    for g, part in enumerate(map(slice, first, last)):
        m, n, k = (part if axis == (jagged or "m") else all_of for axis in "mnk")
        c, bias = _each(ops.c, g), _each(ops.bias, g, 2)
        yield Group(
            _each(ops.a, g)[m, k],
            _each(ops.b, g)[k, n],
            _each(ops.out, g)[m, n],
            None if c is None else c[m, n],
            None if bias is None else bias[n],
        )


def unowned(ops: Operands, start: Index | None, end: Index | None) -> list[Tensor]:
    """The parts of `out` that no group owns, as views; the caller writes zeros to them."""
    out, form = ops.out, ops.spec.form
    if form == "masked":
        stack = cast(Tensor, out)
        return [stack[g, rows:] for g, rows in enumerate(cast(Index, end).tolist()) if rows < stack.shape[1]]
    if form not in ("jagged_m", "jagged_n"):
        return []
    flat = cast(Tensor, out) if form == "jagged_m" else cast(Tensor, out).t()
    first, last = cast(Index, start), cast(Index, end)
    if not len(first) or bool((first[1:] == last[:-1]).all()):
        lo, hi = (int(first[0]), int(last[-1])) if len(first) else (0, 0)
        return [part for part in (flat[:lo], flat[hi:]) if part.shape[0]]
    return [flat[lo:hi] for lo, hi in _runs_of_zero(_owners(flat.shape[0], first, last))]


def owned(ops: Operands, sizes: Sizes) -> list[Any]:
    """Indices of what groups own, for anything with the layout of the products; for a list its matrices."""
    form, start, end = ops.spec.form, sizes.start, sizes.end
    if form == "per_group":
        return list(range(ops.spec.groups))
    if form == "masked":
        return [(g, slice(0, rows)) for g, rows in enumerate(cast(Index, end).tolist())]
    if form not in ("jagged_m", "jagged_n"):
        return [...]
    unowned_ones = _owners(jagged_extent(ops), cast(Index, start), cast(Index, end)) == 0
    runs = [slice(lo, hi) for lo, hi in _runs_of_zero(unowned_ones.astype(np.int64))]
    return runs if form == "jagged_m" else [(slice(None), run) for run in runs]


def _owners(extent: int, start: Index, end: Index) -> Index:
    """How many groups own each row (or column)."""
    edges = np.zeros(extent + 1, np.int64)
    np.add.at(edges, start, 1)
    np.add.at(edges, end, -1)
    return np.cumsum(edges)[:-1]


def _runs_of_zero(cover: Index) -> Iterator[tuple[int, int]]:
    edges = np.flatnonzero(np.diff(np.concatenate(([1], cover, [1])) == 0))
    yield from zip(edges[0::2].tolist(), edges[1::2].tolist(), strict=True)


def is_inference(ops: Operands) -> bool:
    """Whether some tensor may only be written inside torch's inference mode."""
    outs = ops.out if isinstance(ops.out, list) else [ops.out]
    if ops.fused is not None:
        outs = [*outs, *ops.fused.preacts()]
    return any(torch.is_inference(out) for out in outs)
