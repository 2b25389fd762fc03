"""Which variant runs a problem whose sizes are known.

Equal products go in one batched call. For unequal ones three estimates are compared, in
microseconds; their constants were fitted to measurements (33 mixture-of-experts cases on an H100, 20 of other
models on an H200, which has the same processors):

* torch's grouped_mm: whole tiles of one size, two along m at a time, over all multiprocessors;
* one call per product, spread over streams: the library's best tile for each product, or the
  product's memory traffic, and a cost per call;
* cublasGemmGroupedBatchedEx: a slower kernel, but one launch.

What matters is their order, not their size; so the constants serve other GPUs of the kind as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from multigemm.backends.cublas.config import SIXTEEN_BIT, Config, grouped_mm_reasons, grouped_reasons
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import TRANSPOSE
from multigemm.backends.cublas.products import Ints, Product
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

TILES = ((64, 128), (128, 128), (64, 256), (128, 256), (256, 128), (192, 128))
BYTES_PER_US = 2.9e6
FLOPS_PER_US = {torch.float64: 50e6, torch.float32: 45e6, torch.int8: 700e6}
TENSOR_FLOPS_PER_US, TF32_FLOPS_PER_US = 742e6, 350e6
CALL_US, STREAMS_US, GROUPED_MM_US, GROUPED_US, MEMBER_US = 3.6, 10.0, 19.5, 9.0, 0.025
"""What a call on a stream costs beyond its work; what streams (to fork and join) and the two grouped launches cost on
nothing; and what the second of those costs for each product."""
LARGE_TILE = 128, 256, 11.6, 11.6, 1.0
SMALL_TILE = 64, 128, 4.45, 3.5, 0.8
"""grouped_mm's tiles: rows, columns, nanoseconds per step of K among others and alone, microseconds per tile."""
GROUPED_TILE, GROUPED_TILE_US, GROUPED_SLOWDOWN, GROUPED_TRANSPOSED = (128, 64), 1.5, 2.37, 1.09
HOST_US = 10.0
"""Of the host's time, per call: what many small products take at least."""
MOST_FUSED, MOST_APART = 12, 8
"""Calls with an epilogue of the library's own; calls that a graph holds instead of a grouped one."""
FEW_ROWS, LONG_ROWS, NARROW = 16, 2048, 64 * 128
SLOWER, SLOWER_TRANSPOSED = 1.05, 1.15
"""A product of few rows and too few columns for all multiprocessors does not reach the memory's speed by itself, and
less with transposed weights. Batched, too, long rows of those are read more slowly (0.98) than by the grouped call."""


def choose(spec: ProblemSpec, products: Sequence[Product], device: torch.device, written: torch.dtype) -> Config:
    """The variant expected to be fastest for these products, whose results are of the type `written`."""
    shapes = [p.shape for p in products]
    if len(shapes) < 2:
        return Config("loop")
    grouped = not grouped_reasons(spec) and (spec.compute not in SIXTEEN_BIT or written is spec.compute)
    if len(set(shapes)) == 1:
        if grouped and slow_to_read(shapes[0]) and shapes[0].k >= LONG_ROWS:
            return Config("grouped")
        return Config("loop" if spec.compute is torch.int8 else "batched")
    found = {Config("streams", 4): max(separately(spec, shapes), HOST_US * len(shapes))}
    if not grouped_mm_reasons(spec, device):
        found[Config("grouped_mm")] = by_grouped_mm(spec, shapes)
    if grouped:
        found[Config("grouped")] = by_grouped(spec, shapes)
    return min(found, key=lambda config: found[config])


def fused_calls(lengths: Ints | None, otherwise: int) -> int:
    """How many fused calls groups of these lengths take: one if they are equal and hence lie evenly."""
    if lengths is None:
        return otherwise
    present = lengths[lengths > 0]
    return 1 if len(present) == len(lengths) and len(np.unique(present)) <= 1 else len(present)


def pays_to_fuse(calls: int) -> bool:
    """Whether a bias or relu is better left to cuBLASLt.

    It spares a kernel and a float32 result, written and read. But the host describes each call anew for other sizes,
    and of some it has to ask the library's heuristic: from some 16 calls on that takes it longer than other calls do.
    """
    return calls <= MOST_FUSED


def apart_in_a_graph(spec: ProblemSpec, shapes: Sequence[Shape]) -> bool:
    """Whether a CUDA graph should hold one call per product where the grouped call is chosen otherwise.

    There, calls cost the host nothing, and the library's best kernel for each makes up for their number.
    """
    return len(shapes) <= MOST_APART and separately(spec, shapes) - STREAMS_US < by_grouped(spec, shapes)


def _rate(spec: ProblemSpec) -> float:
    if spec.compute is torch.float32 and spec.precision == "tf32":
        return TF32_FLOPS_PER_US
    return FLOPS_PER_US.get(spec.compute, TENSOR_FLOPS_PER_US)


def _traffic(spec: ProblemSpec, s: Shape) -> float:
    return (s.m * s.k + s.k * s.n + s.m * s.n) * spec.compute.itemsize / BYTES_PER_US


def _together(work: float, traffic: float, power: int) -> float:
    """The larger of both or more: neither hides the other wholly."""
    both: float = (work**power + traffic**power) ** (1 / power)
    return both


def _padded(extent: int, tile: int) -> int:
    return -(-extent // tile) * tile


def slow_to_read(s: Shape) -> bool:
    """Whether the weights of this product are transposed, and all its time is spent on reading them."""
    return s.n <= FEW_ROWS and s.op_first == TRANSPOSE


def _slowness(s: Shape) -> float:
    if s.n > 2 * FEW_ROWS or s.m > NARROW:
        return 1.0
    return SLOWER_TRANSPOSED if s.op_first == TRANSPOSE else SLOWER


def separately(spec: ProblemSpec, shapes: Sequence[Shape]) -> float:
    """One call per product, on several streams."""
    rate, total = _rate(spec), STREAMS_US
    for s in shapes:
        area = min(_padded(s.m, b) * _padded(s.n, a) for a, b in TILES)
        total += _together(2.0 * area * s.k / rate + CALL_US, _traffic(spec, s) * _slowness(s), 6)
    return total


def by_grouped_mm(spec: ProblemSpec, shapes: Sequence[Shape]) -> float:
    """torch's grouped_mm. The result lies by rows, so a shape's n counts its rows."""
    average = sum(s.n for s in shapes) // spec.groups if spec.jagged == "m" else shapes[0].n
    small = average <= 128 or shapes[0].m <= 128
    rows, cols, step, alone, each = SMALL_TILE if small else LARGE_TILE
    work = sum(2 * -(-s.n // (2 * rows)) * -(-s.m // cols) * (s.k * step / 1e3 + each) for s in shapes)
    longest = max(s.k for s in shapes) * alone / 1e3 + each
    work, traffic = work / PROCESSORS, sum(_traffic(spec, s) for s in shapes)
    return max(_together(work, traffic, 5) if small else max(work, traffic), longest) + GROUPED_MM_US


def by_grouped(spec: ProblemSpec, shapes: Sequence[Shape]) -> float:
    """cublasGemmGroupedBatchedEx."""
    rate = _rate(spec) / (GROUPED_SLOWDOWN if spec.compute.itemsize == 2 else 1.2)
    cols, rows = GROUPED_TILE
    step = 2.0 * cols * rows * PROCESSORS / rate * (GROUPED_TRANSPOSED if shapes[0].op_first == TRANSPOSE else 1.0)
    work = sum(-(-s.m // cols) * -(-s.n // rows) * (s.k * step + GROUPED_TILE_US) for s in shapes)
    longest = max(s.k for s in shapes) * step + GROUPED_TILE_US
    traffic = 0.95 * sum(_traffic(spec, s) for s in shapes)
    return max(_together(work / PROCESSORS, traffic, 4), longest) + GROUPED_US + MEMBER_US * len(shapes)
