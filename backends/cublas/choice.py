"""Lists the valid configs of a spec, the best guess first, and chooses the variant once sizes are known.

Equal products go in one batched call. For unequal ones three estimates are compared, in microseconds:

* torch's grouped_mm: whole tiles of one size, two along m at a time, over all multiprocessors;
* one call per product, spread over streams: the library's best tile for each product, or the
  product's memory traffic, and a cost per call;
* cublasGemmGroupedBatchedEx: a slower kernel, but one launch.

What matters is their order, not their size; so the constants serve other GPUs of the kind as well.
"""

from __future__ import annotations

from math import inf
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multigemm.backends.cublas.config import (
    VARIANTS,
    Config,
    grouped_mm_reasons,
    grouped_reasons,
    plain,
)
from multigemm.backends.cublas.products import TRANSPOSE, Products, Shape
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.planning.fused_steps import product_spec, taken_in_steps
from multigemm.problem.spec import ProblemSpec

# Fitted numbers, last changed on 2026-11-21: bfloat16 and float32 on an H100 (33 cases of mixtures of experts) and an
# H200 (20 of other models; it has the same processors). `multigemm bench --suite moe,wgrad --backends cublas --configs
# 12` times every variant of such cases, which is how to fit them anew; docs/notes/cublas.md has tables.

TILE = 64, 128
"""Rows and columns of the tiles that the library's kernels for a single product are made of."""
BYTES_PER_US = 2.9e6
FLOPS_PER_US = {torch.float64: 50e6, torch.float32: 45e6, torch.int8: 700e6}
TENSOR_FLOPS_PER_US = 742e6
"""The floating-point operations per microsecond of 16-bit products."""
TF32_FLOPS_PER_US = 350e6
CALL_US = 3.6
"""Microseconds of a call on a stream besides its work."""
STREAMS_US = 10.0
"""Microseconds of forking to streams and joining them."""
GROUPED_MM_US = 19.5
"""Microseconds of torch's grouped_mm without work."""
GROUPED_US = 9.0
"""Microseconds of cublasGemmGroupedBatchedEx without work."""
MEMBER_US = 0.025
"""Microseconds of that call for each product."""
LARGE_TILE = 128, 256, 11.6, 11.6, 1.0
SMALL_TILE = 64, 128, 4.45, 3.5, 0.8
"""grouped_mm's tiles: rows, columns, nanoseconds per step of K among others and alone, microseconds per tile."""
GROUPED_TILE = 128, 64
"""Columns and rows of the grouped call's tile."""
GROUPED_TILE_US = 1.5
"""Microseconds of the grouped call's tile besides its steps of K."""
GROUPED_SLOWDOWN = 2.37
"""The time of the grouped call's products of 16 bits, relative to a single product's."""
GROUPED_SLOWDOWN_WIDE = 1.2
"""The time of the grouped call's products of wider types, relative to a single product's."""
GROUPED_TRANSPOSED = 1.09
"""The relative time of the grouped call's products of transposed weights."""
HOST_US = 10.0
"""The host's microseconds for each call, the least time of each of many small products."""
MOST_APART = 8
"""The largest number of separate calls that a graph holds instead of a grouped one."""
FEW_ROWS = 16
"""Rows up to which all of a product's time is spent on reading its weights."""
NARROW = 64 * 128
"""Columns up to which a product of at most 2 x FEW_ROWS rows does not reach the memory's speed by itself."""
SLOWER, SLOWER_TRANSPOSED = 1.05, 1.15
"""How many times as long such a product takes, with weights by rows and with transposed ones."""

ALLOCATES = "takes two small pieces of memory from torch's allocator at each call, which no argument spares"
EVERY = (Config("auto"), Config("grouped_mm"), Config("batched"), Config("grouped"), Config("streams", 4),
         Config("streams", 2), Config("loop"))  # fmt: skip
SCALED = Config("scaled_grouped_mm")
STREAMS, GROUPED, GROUPED_MM = Config("streams", 4), Config("grouped"), Config("grouped_mm")


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """All configs that can run this spec, the best guess first."""
    if spec.quantised:
        return [SCALED]
    if taken_in_steps(spec):
        spec = product_spec(spec)
    return [config for config in EVERY if not problem_with(config, spec, device)]


def problem_with(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    """Why a config, which a user may have given, cannot run a supported spec; "" if it can."""
    if config.variant not in VARIANTS:
        return f"variant {config.variant!r} is unknown: use one of {', '.join(VARIANTS)}"
    if (config.variant == "streams") != (config.streams > 0):
        return f"streams must be positive for variant 'streams' and 0 for every other, got {config.streams}"
    if (config.variant == SCALED.variant) != bool(spec.quantised):
        return f"variant {config.variant!r}: float8 operands take 'scaled_grouped_mm', and no others do"
    if config.variant == "grouped":
        return "; ".join(grouped_reasons(spec))
    return "; ".join(grouped_mm_reasons(spec, device)) if config.variant == "grouped_mm" else ""


def why(spec: ProblemSpec, config: Config, syncs: bool, grouped_mm: bool) -> str:
    """The calls of a plan as text, before sizes are known; `grouped_mm` if they may be that."""
    parts = []
    if config.variant == "auto":
        parts.append("the calls are chosen per problem, by its sizes")
    if syncs:
        parts.append("reads the sizes back from the device, because BLAS calls take them from the host")
    if spec.alpha != "zero" and not plain(spec):
        parts.append(f"{spec.acc} result and one epilogue kernel, so that it rounds once")
    elif spec.alpha != "zero" and spec.bias is not None:
        parts.append("the bias is laid into the result, and the library adds to it")
    if grouped_mm:
        certain = config.variant == "grouped_mm" or spec.device_sizes
        parts.append(f"{'' if certain else 'where it is chosen, '}torch's grouped_mm {ALLOCATES}")
    copied = [name for name, o in (("a", spec.a), ("b", spec.b)) if o.order == "strided" or not o.dense]
    if copied:
        parts.append(f"packed copy of {' and '.join(copied)}: no leading dimension expresses the strides")
    if spec.compute is torch.int8 and not (spec.a.order == "row" and spec.b.order == "col"):
        parts.append("packed copies with K contiguous: the only int8 products that cuBLAS takes at any extent")
    return "; ".join(parts)


# Where the sizes are known.

Column = npt.NDArray[np.float64]


class Work:
    """Several products of a spec: how many, their extents, and sums over them, which are exact. `grouped_step` is the
    time of a step of k in a tile of the grouped call, `element_us` that of an element's way through memory."""

    __slots__ = (
        "count", "element_us", "grouped_step", "k", "longest", "m", "most_n", "n", "rate", "sum_n", "traffic",
        "transposed",
    )  # fmt: skip

    def __init__(self, spec: ProblemSpec, transposed: Any) -> None:
        tf32, size = spec.compute is torch.float32 and spec.precision == "tf32", spec.compute.itemsize
        self.rate = TF32_FLOPS_PER_US if tf32 else FLOPS_PER_US.get(spec.compute, TENSOR_FLOPS_PER_US)
        self.transposed, self.element_us = transposed, size / BYTES_PER_US
        rate = self.rate / (GROUPED_SLOWDOWN if size == 2 else GROUPED_SLOWDOWN_WIDE)
        slowness = GROUPED_TRANSPOSED if np.ravel(transposed)[0] else 1.0
        self.grouped_step = 2.0 * GROUPED_TILE[0] * GROUPED_TILE[1] * PROCESSORS / rate * slowness

    def of(self, m: Any, n: Any, k: Any) -> Work:
        """Products of these extents: a column each."""
        self.count, self.m, self.n, self.k = len(n), m, n, k
        self.sum_n, self.most_n, self.longest = int(n.sum()), int(n.max()), int(k.max())
        self.traffic = int((m * k + k * n + m * n).sum()) * self.element_us
        return self

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        """The tiles of all products, n by rows and m by columns; and the steps of k in them."""
        each = _tiles(self.n, rows) * _tiles(self.m, columns)
        return int(each.sum()), int((each * self.k).sum())


class CutWork(Work):
    """Products that are cut along n (`rows`) or k, and share their other extents."""

    __slots__ = ("_rows", "_tokens")

    def __init__(self, spec: ProblemSpec, whole: Shape, rows: bool) -> None:
        super().__init__(spec, whole.op_first == TRANSPOSE)
        _, _, self.m, self.n, self.k, *_ = whole
        self.most_n, self.longest, self._rows = self.n, self.k, rows

    def cut(self, lengths: Any, tokens: int) -> Work:
        """Products of these lengths, the largest first, which are `tokens` together."""
        self.count, self._tokens = len(lengths), tokens
        if self._rows:
            self.n, self.sum_n, self.most_n, other = lengths, tokens, lengths.item(0), self.k
        else:
            self.k, self.sum_n, self.longest, other = lengths, self.n * self.count, lengths.item(0), self.n
        self.traffic = (self.m * other * self.count + (self.m + other) * tokens) * self.element_us
        return self

    def tiles(self, rows: int, columns: int) -> tuple[int, int]:
        across = _tiles(self.m, columns)
        if self._rows:
            along = self.count if self.most_n <= rows else int(_tiles(self.n, rows).sum())
            return along * across, along * across * self.k
        each = _tiles(self.n, rows) * across
        return each * self.count, each * self._tokens


def work_of(spec: ProblemSpec, products: Products) -> Work:
    """The extents of listed products."""
    op_first, _, m, n, k, *_ = np.array(products.shapes, dtype=np.int64)[products.kinds].T
    return Work(spec, op_first == TRANSPOSE).of(m, n, k)


def choose(spec: ProblemSpec, products: Products, grouped: bool, grouped_mm: bool) -> Config:
    """The variant expected to be fastest for these products. The flags say which grouped calls can run them."""
    if len(products) < 2:
        return Config("loop")
    if len(products.shapes) == 1:
        return Config("loop" if spec.compute is torch.int8 else "batched")
    if not grouped and not grouped_mm:
        return STREAMS
    return fastest(spec, work_of(spec, products), grouped, grouped_mm)


def fastest(spec: ProblemSpec, work: Work, grouped: bool, grouped_mm: bool) -> Config:
    """The variant expected to be fastest for several products that differ.

    Separate calls take the host `HOST_US` each at least: what else they take is estimated only where no grouped call
    takes less than that.
    """
    by_cublas = by_grouped(work) if grouped else inf
    reads = work.traffic + GROUPED_MM_US  # grouped_mm takes no less
    by_torch = by_grouped_mm(spec, work) if grouped_mm and reads < by_cublas else inf
    apart = HOST_US * work.count
    if apart <= by_torch and apart <= by_cublas:
        apart = separately(work)
    if by_cublas < apart and by_cublas < by_torch:
        return GROUPED
    return GROUPED_MM if by_torch < apart else STREAMS


def apart_in_a_graph(spec: ProblemSpec, products: Products) -> bool:
    """Whether a CUDA graph should hold one call per product although the grouped call was chosen.

    In a graph calls cost the host nothing, and the library's best kernel for each product outweighs their number.
    """
    if not 2 <= len(products) <= MOST_APART:
        return False
    work = work_of(spec, products)
    return separately(work) - STREAMS_US < by_grouped(work)


def _together(work: Any, traffic: Any, power: int) -> Any:
    """The time of overlapping work: at least the larger part, and more, because neither hides the other completely."""
    return (work**power + traffic**power) ** (1 / power)


def _first(extents: Any) -> int:
    return extents if isinstance(extents, int) else int(extents[0])


def _tiles(extents: Any, tile: int) -> Any:
    """The whole tiles that cover an extent, or each of a column."""
    return (extents + (tile - 1)) // tile


def separately(work: Work) -> float:
    """The time of one call per product, on several streams."""
    rows, columns = TILE
    m, n, k = work.m, work.n, work.k
    area = _tiles(m, columns) * columns * (_tiles(n, rows) * rows)
    slow = (n <= 2 * FEW_ROWS) & (m <= NARROW)
    slowness = np.where(slow, np.where(work.transposed, SLOWER_TRANSPOSED, SLOWER), 1.0)
    busy: Column = 2.0 * area * k / work.rate + CALL_US
    traffic: Column = (m * k + k * n + m * n) * work.element_us
    return STREAMS_US + float(_together(busy, traffic * slowness, 6).sum())


def by_grouped_mm(spec: ProblemSpec, work: Work) -> float:
    """The time of torch's grouped_mm. The result is row-major, so a product's n counts its rows."""
    average = work.sum_n // spec.groups if spec.form == "jagged_m" else _first(work.n)
    small = average <= 128 or _first(work.m) <= 128
    rows, cols, step, alone, each = SMALL_TILE if small else LARGE_TILE
    pairs, steps = work.tiles(2 * rows, cols)
    busy, traffic = 2 * (steps * (step / 1e3) + pairs * each) / PROCESSORS, work.traffic
    longest = work.longest * alone / 1e3 + each
    return float(max(_together(busy, traffic, 5) if small else max(busy, traffic), longest)) + GROUPED_MM_US


def by_grouped(work: Work) -> float:
    """The time of cublasGemmGroupedBatchedEx."""
    cols, rows = GROUPED_TILE
    tiles, steps = work.tiles(rows, cols)
    busy = (steps * work.grouped_step + tiles * GROUPED_TILE_US) / PROCESSORS
    longest = work.longest * work.grouped_step + GROUPED_TILE_US
    return float(max(_together(busy, 0.95 * work.traffic, 4), longest)) + GROUPED_US + MEMBER_US * work.count
