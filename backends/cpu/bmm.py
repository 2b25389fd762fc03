"""The `bmm` kernel: 16-bit products through torch's own batched product, rounded once to 16 bits.

For plain products whose result has the operands' dtype. oneDNN accumulates in float32 and rounds
at the end, so nothing else has to be done. Rows that pad a group are copies of rows that exist, and
what they give is dropped. See leaks.py for the one way in which rows of A can meet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cpu.groups import Index, Sizes, empty_products, unowned, walk
from multigemm.backends.cpu.leaks import Rows, reads_on
from multigemm.backends.cpu.segments import Segment, segments
from multigemm.planning.operands import Operands

Step = Callable[[], object]


class _Scratch:
    """Buffers of one bound problem that grow with its sizes and are used by one step at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = shape[0] * shape[1]
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype, device="cpu")
        return self._buffers[name][:size].view(shape)


def _step(a: Tensor, b: Tensor, out: Tensor) -> Step:
    """One product. torch swaps the operands of a column-major `out`, and then B's columns could meet."""
    multiply = torch.bmm if a.dim() == 3 else torch.mm
    if not reads_on(a) or out.stride(-1) == 1:
        return lambda: multiply(a, b, out=out)
    product = torch.empty(out.shape, dtype=out.dtype, device="cpu")

    def run() -> None:
        multiply(a, b, out=product)
        out.copy_(product)

    return run


def _stack(matrix: Tensor, lo: int, count: int, height: int) -> Tensor:
    """Consecutive blocks of rows as a stack, without a copy."""
    row, col = matrix.stride()
    shape = (count, height, matrix.shape[1])
    return matrix.as_strided(shape, (height * row, row, col), matrix.storage_offset() + lo * row)


class RowGroups:
    """Jagged rows as steps. A jagged n is the same problem, transposed."""

    def __init__(self, ops: Operands) -> None:
        a, b, out = (cast(Tensor, x) for x in (ops.a, ops.b, ops.out))
        if ops.spec.form == "jagged_n":
            a, b, out = b.t(), a.transpose(-1, -2), out.t()
        self.rows = Rows(a)
        self._a, self._b, self._out, self._scratch = self.rows.matrix, b, out, _Scratch()

    def steps(self, start: Index, end: Index) -> list[Step]:
        k, n = self._b.shape[-2:]
        if k == 0 or n == 0 or not len(start):
            return []
        if self._b.dim() == 2:
            lo, hi = int(start[0]), int(end[-1])
            return [_step(self._a[lo:hi], self._b, self._out[lo:hi])] if hi > lo else []
        made: list[Step] = []
        for segment in segments(end - start, k, n):
            made += self._segment(segment, start, end)
        return made

    def _segment(self, s: Segment, start: Index, end: Index) -> list[Step]:
        lo, hi, count = int(start[s.first]), int(end[s.last - 1]), s.last - s.first
        if count == 1:
            return [_step(self._a[lo:hi], self._b[s.first], self._out[lo:hi])]
        if s.even:
            a, out = (_stack(x, lo, count, s.height) for x in (self._a, self._out))
            return [_step(a, self._b[s.first : s.last], out)]
        return self._padded(s, start[s.first : s.last], end[s.first : s.last])

    def _padded(self, s: Segment, start: Index, end: Index) -> list[Step]:
        """Gather rows, multiply the stack, gather the rows that count back into their order."""
        a, b, out = self._a, self._b[s.first : s.last], self._out[int(start[0]) : int(end[-1])]
        place = np.arange(s.height)
        last = np.maximum(end - 1, 0)
        rows = torch.from_numpy(np.minimum(start[:, None] + place, last[:, None]).reshape(-1))
        back = torch.from_numpy(np.flatnonzero((place < (end - start)[:, None]).reshape(-1)))
        count, k, n = b.shape
        left = self._scratch.take("left", (count * s.height, k), a.dtype)
        product = self._scratch.take("product", (count * s.height, n), a.dtype)
        stacks = left.view(count, s.height, k), product.view(count, s.height, n)
        direct = out.is_contiguous()
        kept = out if direct else self._scratch.take("kept", (out.shape[0], n), a.dtype)

        def run() -> None:
            torch.index_select(a, 0, rows, out=left)
            torch.bmm(stacks[0], b, out=stacks[1])
            torch.index_select(product, 0, back, out=kept)
            if not direct:
                out.copy_(kept)

        return [run]


def _masked_steps(ops: Operands, a: Tensor, end: Index) -> list[Step]:
    """The stack as far down as the fullest group reaches; only the rows that count are kept."""
    b, out = (cast(Tensor, x) for x in (ops.b, ops.out))
    top = int(end.max(initial=0))
    if top == 0 or a.shape[-1] == 0 or b.shape[-1] == 0:
        return []
    if (end == top).all():
        return [_step(a[:, :top], b, out[:, :top])]
    product = torch.empty((a.shape[0], top, b.shape[-1]), dtype=out.dtype, device="cpu")
    kept = [(out[g, :rows], product[g, :rows]) for g, rows in enumerate(end.tolist()) if rows]

    def run() -> None:
        torch.bmm(a[:, :top], b, out=product)
        for target, source in kept:
            target.copy_(source)

    return [run]


class BmmLaunch:
    """One bound problem. `slow` is the plain loop, which settles offsets that lie and rows that could meet."""

    def __init__(self, ops: Operands, slow: Launch) -> None:
        self._ops, self._slow, self._sizes = ops, slow, Sizes(ops)
        self._jagged = RowGroups(ops) if ops.spec.form in ("jagged_m", "jagged_n") else None
        self._stack = Rows(cast(Tensor, ops.a)) if ops.spec.form in ("masked", "batched") else None
        self._rows = self._jagged.rows if self._jagged else self._stack
        self._range = (0, 0)
        self._steps: list[Step] = []
        self._zeros: list[Tensor] = []

    def _make(self, start: Index | None, end: Index | None) -> list[Step]:
        ops = self._ops
        if self._jagged is not None:
            self._range = self._sizes.owned
            return self._jagged.steps(cast(Index, start), cast(Index, end))
        if self._stack is None:
            return [_step(g.a, g.b, g.out) for g in walk(ops, start, end) if g.out.numel() and g.a.shape[1]]
        a, b, out = self._stack.matrix, cast(Tensor, ops.b), cast(Tensor, ops.out)
        self._range = (0, a.shape[1] if end is None else int(end.max(initial=0)))
        if end is not None:
            return _masked_steps(ops, a, end)
        return [_step(a, b, out)] if a.shape[-1] and out.numel() else []

    def _rebuild(self) -> None:
        start, end = self._sizes.start, self._sizes.end
        self._zeros = empty_products(self._ops, start, end)
        if self._ops.spec.zero_unowned:
            self._zeros += unowned(self._ops, start, end)
        self._steps = self._make(start, end)

    def __call__(self) -> None:
        if self._sizes.changed() and not self._sizes.lie:
            self._rebuild()
        if self._sizes.lie or not (self._rows is None or self._rows.renew(*self._range)):
            self._slow()
            return
        for part in self._zeros:
            part.zero_()
        for step in self._steps:
            step()
