"""The groups of a problem as few calls of torch.mm, torch.bmm and, where they are small, numpy.matmul.

Each call costs microseconds, and torch has no entry for groups of different sizes on a CPU. So neighbouring groups of a
jagged form are padded to one height and multiplied in one batched call, whose threads work on different groups; a group
much larger than its neighbours is a call of its own, because padding others to its height would cost more. Only
neighbours can share a call: their right operands lie at one stride, and copying those would cost what the call saves.
Rows that pad a group are copies of rows that exist, and what they give is dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backends.cpu.groups import Index, each_group
from multigemm.planning.operands import Operands
from multigemm.problem.arrays import numpy_view

Call = Callable[[], object]
STEP = 32
"""Columns of A that oneDNN reads at once in a bfloat16 product."""
SMALL = 1 << 18
"""Multiply-adds up to which NumPy's BLAS runs a product on the calling thread; torch's wakes others for 5 us."""


# --- how groups share calls -------------------------------------------------------------------------

HEIGHTS = (8, 16, 32, 64, 128, 256)


class Costs(NamedTuple):
    """The costs of calls, in microseconds on two cores of a server processor. Only their ratios matter, to within a
    factor."""

    single_us: float
    batch_us: float
    gather_us: float
    flop_per_us: float
    single_bytes_per_us: float
    batch_bytes_per_us: float
    copy_bytes_per_us: float


BFLOAT16 = Costs(24.0, 10.0, 8.0, 2e6, 25e3, 36e3, 10e3)
FLOAT = Costs(1.0, 6.0, 14.0, 1.2e5, 25e3, 25e3, 10e3)


class Segment(NamedTuple):
    """Groups first..last-1, each padded to `height` rows; `even` if none needs padding."""

    first: int
    last: int
    height: int
    even: bool


class _Partition(NamedTuple):
    first: npt.NDArray[np.intp]
    last: npt.NDArray[np.intp]
    height: Index
    rows: Index


def _partition(sizes: Index, highest: int) -> _Partition:
    """Runs of neighbouring groups of at most `highest` rows. A larger group is a run of its own."""
    large = sizes > highest
    starts = np.flatnonzero(np.concatenate(([True], large[1:] | large[:-1])))
    stops = np.append(starts[1:], len(sizes))
    return _Partition(starts, stops, np.maximum.reduceat(sizes, starts), np.add.reduceat(sizes, starts))


def _cost_us(runs: _Partition, k: int, n: int, bytes_each: int, costs: Costs) -> float:
    """A rough estimate in microseconds."""
    count = runs.last - runs.first
    single = (count == 1) & (runs.height > 0)
    batch = (count > 1) & (runs.height > 0)
    padded = np.where(runs.height > 0, runs.height * count, 0)
    uneven = batch & (padded != runs.rows)
    weight = bytes_each * k * n
    arithmetic = padded.sum() * (2.0 * k * n / costs.flop_per_us)
    weights = single.sum() * weight / costs.single_bytes_per_us + count[batch].sum() * weight / costs.batch_bytes_per_us
    gathered = padded[uneven].sum() * (bytes_each * (k + n) / costs.copy_bytes_per_us)
    calls = single.sum() * costs.single_us + batch.sum() * costs.batch_us + uneven.sum() * costs.gather_us
    return float(arithmetic + weights + gathered + calls)


def segments(sizes: Index, k: int, n: int, dtype: torch.dtype) -> list[Segment]:
    """The cheapest of a few partitions. Runs without rows are left out."""
    if not len(sizes) or not sizes.any():
        return []
    highest = int(sizes.max())
    partitions = [_partition(sizes, height) for height in (0, *(h for h in HEIGHTS if h < highest), highest)]
    costs = BFLOAT16 if dtype == torch.bfloat16 else FLOAT
    best = min(partitions, key=lambda runs: _cost_us(runs, k, n, dtype.itemsize, costs))
    even = best.height * (best.last - best.first) == best.rows
    columns = (best.first, best.last, best.height, even)
    return [Segment(*row) for row in zip(*(column.tolist() for column in columns), strict=True) if row[2] > 0]


# --- calls ------------------------------------------------------------------------------------------


def reads_into_next_row(a: Tensor) -> bool:
    """Whether a product with this A multiplies what lies behind a row by zeros, which keeps an infinity or a NaN."""
    return a.dtype == torch.bfloat16 and a.shape[-1] % STEP != 0


def _is_small(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether NumPy is faster for this product, because it wakes no threads."""
    if a.dim() == 3 or a.dtype == torch.bfloat16 or out.numel() * a.shape[1] > SMALL:
        return False
    return all(1 in x.stride() for x in (a, b, out))


def product_call(a: Tensor, b: Tensor, out: Tensor) -> Call:
    """One product. For a column-major `out` torch swaps the operands, and then columns of B could mix."""
    if _is_small(a, b, out):
        x, y, z = numpy_view(a), numpy_view(b), numpy_view(out)
        return lambda: np.matmul(x, y, out=z)
    multiply = torch.bmm if a.dim() == 3 else torch.mm
    if not reads_into_next_row(a) or out.stride(-1) == 1:
        return lambda: multiply(a, b, out=out)
    product = torch.empty(out.shape, dtype=out.dtype, device="cpu")

    def run() -> None:
        multiply(a, b, out=product)
        out.copy_(product)

    return run


class _Scratch:
    """Buffers of one bound problem, which grow with its sizes and are used by one call at a time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        size = shape[0] * shape[1]
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = torch.empty(size, dtype=dtype, device="cpu")
        return self._buffers[name][:size].view(shape)


def _stacked(matrix: Tensor, lo: int, count: int, height: int) -> Tensor:
    """Consecutive blocks of rows as a stack, without a copy."""
    row, col = matrix.stride()
    shape = (count, height, matrix.shape[1])
    return matrix.as_strided(shape, (height * row, row, col), matrix.storage_offset() + lo * row)


class ProductCalls:
    """The calls of one bound problem, whose sizes may change. A jagged n is computed as a transposed jagged m."""

    def __init__(self, ops: Operands) -> None:
        self._ops, self._scratch = ops, _Scratch()
        if ops.spec.form in ("jagged_m", "jagged_n"):
            self._a, self._b, self._out = (cast(Tensor, x) for x in (ops.a, ops.b, ops.out))
            if ops.spec.form == "jagged_n":
                self._a, self._b = self._b.t(), self._a.transpose(-1, -2)
                self._out = self._out.t()

    def make(self, start: Index | None, end: Index | None) -> list[Call]:
        """Calls for all products that are not empty."""
        ops, form = self._ops, self._ops.spec.form
        if form in ("jagged_m", "jagged_n"):
            return self._jagged(cast(Index, start), cast(Index, end))
        if form == "masked":
            return self._masked(cast(Index, end))
        if form == "batched":
            a, b, out = (cast(Tensor, x) for x in (ops.a, ops.b, ops.out))
            return [product_call(a, b, out)] if a.shape[-1] and out.numel() else []
        return [product_call(g.a, g.b, g.out) for g in each_group(ops, start, end) if g.out.numel() and g.a.shape[1]]

    def _jagged(self, start: Index, end: Index) -> list[Call]:
        k, n = self._b.shape[-2:]
        if k == 0 or n == 0 or not len(start):
            return []
        if self._b.dim() == 2:
            lo, hi = int(start[0]), int(end[-1])
            return [product_call(self._a[lo:hi], self._b, self._out[lo:hi])] if hi > lo else []
        calls: list[Call] = []
        for segment in segments(end - start, k, n, self._a.dtype):
            calls.append(self._segment(segment, start, end))
        return calls

    def _segment(self, s: Segment, start: Index, end: Index) -> Call:
        lo, hi, count = int(start[s.first]), int(end[s.last - 1]), s.last - s.first
        if count == 1:
            return product_call(self._a[lo:hi], self._b[s.first], self._out[lo:hi])
        if s.even:
            a, out = (_stacked(x, lo, count, s.height) for x in (self._a, self._out))
            return product_call(a, self._b[s.first : s.last], out)
        return self._padded(s, start[s.first : s.last], end[s.first : s.last])

    def _padded(self, s: Segment, start: Index, end: Index) -> Call:
        """Gathers rows, multiplies the stack, gathers the owned rows back into their order."""
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

        return run

    def _masked(self, end: Index) -> list[Call]:
        """Multiplies the stack down to the last row of the fullest group; only valid rows are kept."""
        a, b, out = (cast(Tensor, x) for x in (self._ops.a, self._ops.b, self._ops.out))
        top = int(end.max(initial=0))
        if top == 0 or a.shape[-1] == 0 or b.shape[-1] == 0:
            return []
        if (end == top).all():
            return [product_call(a[:, :top], b, out[:, :top])]
        product = torch.empty((a.shape[0], top, b.shape[-1]), dtype=out.dtype, device="cpu")
        kept = [(out[g, :rows], product[g, :rows]) for g, rows in enumerate(end.tolist()) if rows]

        def run() -> None:
            torch.bmm(a[:, :top], b, out=product)
            for target, source in kept:
                target.copy_(source)

        return [run]
