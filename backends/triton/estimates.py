"""About how long a kernel takes, from what a spec knows: its extents, and buckets of token counts.

`hopper_us` and `pointer_us` are good enough to choose between the two kernels. Fitted to 109 problems of 6 to 700 us
(bf16, H100): the choice that follows was wrong by more than 5 % in 9 of them, and cost 2 % on average against the
better of the two each time. docs/notes/triton-tuning.md has the measurements, and their commands.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from multigemm.backends.triton.config import STRIP, Config, depth_of
from multigemm.cuda.device import first_gpu_processors
from multigemm.problem.spec import ProblemSpec


class Speed(NamedTuple):
    """The lower bounds of a kernel's time."""

    launch_us: float
    bytes_per_us: float
    flops_per_us: float
    """The operations per microsecond of products of 16 bits; wider ones have as many fewer as they are wider."""


HOPPER, POINTER = Speed(10.0, 3.2e6, 420e6), Speed(7.8, 2.66e6, 240e6)
COPY_US = 10.0
"""Microseconds that copies of operands into aligned rows add."""
SHIFTED = 1.6
"""The time of products of shifted weights, relative to plain ones."""
POINTER_STEP_US, POINTER_DEPTH, POINTER_PROGRAMS = 0.3, 64, 2
"""A block of K, its depth, and programs on a multiprocessor: those of an ordinary config of the pointer kernel."""
STEP_US = {(192, 256): 0.64, (256, 128): 0.51, (128, 256): 0.51, (128, 128): 0.40}
"""A block of K through the ring, one program alone: bound by how many stages are on their way."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A problem as `groups` results of `rows` x `columns`, each `deep` along K."""

    groups: int
    rows: int
    columns: int
    deep: int

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.columns * self.deep

    @property
    def elements(self) -> float:
        """The number of elements to read and write, each counted once."""
        rows, columns = self.groups * self.rows, self.groups * self.columns
        return rows * self.deep + columns * self.deep + rows * self.columns


def typical_rows(spec: ProblemSpec) -> int:
    """The estimated rows of one group's result, from a spec."""
    groups = max(1, spec.groups)
    if spec.form in ("jagged_m", "per_group", "batched", "masked") and spec.total:
        return max(1, spec.total // groups)
    return spec.m or 256


def typical_columns(spec: ProblemSpec) -> int:
    """The estimated columns of one group's result. For lists, which have no bucket of n, their rows."""
    if spec.form == "jagged_n":
        return max(1, spec.total // max(1, spec.groups))
    return spec.n if spec.n is not None else typical_rows(spec)


def shape_of(spec: ProblemSpec) -> Shape:
    """The shape of a spec. Jagged columns count as rows, as in the warp-specialised kernel."""
    groups = max(1, spec.groups)
    if spec.form == "jagged_n":
        return Shape(groups, typical_columns(spec), spec.m or 1, spec.k or 1)
    deep = max(1, spec.total // groups) if spec.form == "jagged_k" else spec.k or 1
    return Shape(groups, typical_rows(spec), typical_columns(spec), deep)


def tiles_in(config: Config, spec: ProblemSpec) -> int:
    """The estimated number of tiles."""
    return _tiles(config, shape_of(spec))


def _tiles(config: Config, shape: Shape) -> int:
    return shape.groups * -(-shape.rows // config.block_m) * -(-shape.columns // config.block_n)


def _work_us(speed: Speed, shape: Shape, size: int, along: float) -> float:
    """The estimated time in microseconds: the longest of one program's steps along K, the bytes, and the products."""
    return max(along, shape.elements * size / speed.bytes_per_us, shape.flops * size / 2 / speed.flops_per_us)


def hopper_us(config: Config, spec: ProblemSpec) -> float:
    """The estimated microseconds of the warp-specialised kernel."""
    shape = shape_of(spec)
    steps = -(-shape.deep // depth_of(spec))
    turns = max(1.0, _tiles(config, shape) / first_gpu_processors())
    along = turns * steps * STEP_US[min(256, config.block_m), config.block_n]
    work = _work_us(HOPPER, shape, spec.compute.itemsize, along)
    return HOPPER.launch_us + work * (SHIFTED if config.shift_b else 1.0) + (COPY_US if config.pack else 0.0)


def rounds_us(config: Config, spec: ProblemSpec) -> float:
    """The microseconds of whole rounds of tiles in the ring, or of their reads through the L2 at 6 TB/s."""
    shape = shape_of(spec)
    tiles, steps = _tiles(config, shape), -(-shape.deep // depth_of(spec))
    strips = min(config.block_m, -(-shape.rows // STRIP) * STRIP)
    read = tiles * steps * (strips + config.block_n) * 128 / 6e6
    return max(-(-tiles // first_gpu_processors()) * steps * STEP_US[min(256, config.block_m), config.block_n], read)


def pointer_us(config: Config, spec: ProblemSpec) -> float:
    """The estimated microseconds of the pointer kernel, which loads of single elements instead of 16 bytes slow
    down."""
    shape = shape_of(spec)
    turns = max(1.0, _tiles(config, shape) * config.splits / (POINTER_PROGRAMS * first_gpu_processors()))
    along = turns * -(-shape.deep // (POINTER_DEPTH * config.splits)) * POINTER_STEP_US
    return POINTER.launch_us + _work_us(POINTER, shape, spec.compute.itemsize, along) * _slowness(config, spec)


def _slowness(config: Config, spec: ProblemSpec) -> float:
    if spec.form == "jagged_n":
        return 3.6
    if spec.form == "jagged_m" and spec.compute.itemsize == 2 and min(spec.a.align, spec.b.align) < 16:
        # measured: 25.7 us by 32x32 where the ring takes 29.8, but 41 to 85 by 64x128 where it takes 26 to 43
        return 2.6 if config.block_m * config.block_n <= 64 * 64 else 7.0
    across = spec.compute == torch.float32 and (spec.a.order, spec.b.order) != ("row", "col")
    return 2.0 if min(spec.a.align, spec.b.align, spec.out.align) < 16 or across else 1.0
