"""About how long a kernel takes for a spec: good enough to choose between the two kernels.

Fitted to 109 problems of 6 to 700 us on an H100 (bf16, L2 flushed): the choice that follows from it was wrong by
more than 5 % in 9 of them, and cost 2 % on average against the better of the two each time. The terms: a launch,
then the longest of the steps along K that one program takes after another, the bytes and the products.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from multigemm.backends.triton.config import STRIP, Config, depth_of
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

MOST_SHARED = 160
"""Programs up to which tiles are shared out: more would run one after another, and leave their parts for nothing."""
WORTH_SHARING = 2048
"""Elements of K for each doubling of the programs that share a tile; an eighth of them where a product is as slow as
those of `crossed`."""
STEP_US = {(192, 256): 0.64, (256, 128): 0.51, (128, 256): 0.51, (128, 128): 0.40}
"""A block of K through the ring, one program alone: bound by how many stages are on their way."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A problem as the kernels cut it: `groups` results of `rows` x `columns`, each `deep` along K."""

    groups: int
    rows: int
    columns: int
    deep: int

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.rows * self.columns * self.deep

    @property
    def elements(self) -> float:
        """What has to be read and written, each element once."""
        rows, columns = self.groups * self.rows, self.groups * self.columns
        return rows * self.deep + columns * self.deep + rows * self.columns


def typical_rows(spec: ProblemSpec) -> int:
    """About how many rows the result of one group has, from what a spec knows."""
    groups = max(1, spec.groups)
    if spec.form in ("jagged_m", "per_group", "batched", "masked") and spec.total:
        return max(1, spec.total // groups)
    return spec.m or 256


def typical_columns(spec: ProblemSpec) -> int:
    """The same for columns; lists carry no bucket for n, so their rows stand in for it."""
    if spec.form == "jagged_n":
        return max(1, spec.total // max(1, spec.groups))
    return spec.n if spec.n is not None else typical_rows(spec)


def shape_of(spec: ProblemSpec) -> Shape:
    """Jagged columns count as rows: that is how the warp-specialised kernel takes them."""
    groups = max(1, spec.groups)
    if spec.form == "jagged_n":
        return Shape(groups, typical_columns(spec), spec.m or 1, spec.k or 1)
    deep = max(1, spec.total // groups) if spec.form == "jagged_k" else spec.k or 1
    return Shape(groups, typical_rows(spec), typical_columns(spec), deep)


def tiles_in(config: Config, spec: ProblemSpec) -> int:
    """About how many tiles there are."""
    return _tiles(config, shape_of(spec))


def _tiles(config: Config, shape: Shape) -> int:
    return shape.groups * -(-shape.rows // config.block_m) * -(-shape.columns // config.block_n)


def ring_us(config: Config, spec: ProblemSpec) -> float:
    """The warp-specialised kernel; copies into aligned rows add their launches."""
    shape, size = shape_of(spec), spec.compute.itemsize
    steps = -(-shape.deep // depth_of(spec))
    turns = max(1.0, _tiles(config, shape) / PROCESSORS)
    along = turns * steps * STEP_US[min(256, config.block_m), config.block_n]
    work = max(along, shape.elements * size / 3.2e6, shape.flops * size / 2 / 420e6)
    return 10.0 + work * (1.6 if config.carry else 1.0) + (10.0 if config.pack else 0.0)


def rounds_us(config: Config, spec: ProblemSpec) -> float:
    """What the ring needs for whole rounds of tiles, or for what they read through the L2 at 6 TB/s."""
    shape = shape_of(spec)
    tiles, steps = _tiles(config, shape), -(-shape.deep // depth_of(spec))
    strips = min(config.block_m, -(-shape.rows // STRIP) * STRIP)
    read = tiles * steps * (strips + config.block_n) * 128 / 6e6
    return max(-(-tiles // PROCESSORS) * steps * STEP_US[min(256, config.block_m), config.block_n], read)


def pointer_us(config: Config, spec: ProblemSpec) -> float:
    """The pointer kernel, two programs per multiprocessor; single elements instead of 16 bytes slow it down."""
    shape, size = shape_of(spec), spec.compute.itemsize
    turns = max(1.0, _tiles(config, shape) * config.splits / (2 * PROCESSORS))
    along = turns * -(-shape.deep // (64 * config.splits)) * 0.3
    work = max(along, shape.elements * size / 2.66e6, shape.flops * size / 2 / 240e6)
    return 7.8 + work * _slowness(config, spec)


def _slowness(config: Config, spec: ProblemSpec) -> float:
    if spec.form == "jagged_n":
        return 3.6
    if spec.form == "jagged_m" and spec.compute.itemsize == 2 and min(spec.a.align, spec.b.align) < 16:
        # measured: 25.7 us by 32x32 where the ring takes 29.8, but 41 to 85 by 64x128 where it takes 26 to 43
        return 2.6 if config.block_m * config.block_n <= 64 * 64 else 7.0
    across = spec.compute == torch.float32 and (spec.a.order, spec.b.order) != ("row", "col")
    return 2.0 if min(spec.a.align, spec.b.align, spec.out.align) < 16 or across else 1.0


def crossed(spec: ProblemSpec) -> bool:
    """float32 without tensor cores, weights along k: threads read columns of them that lie in the same banks."""
    return spec.compute == torch.float32 and spec.precision != "tf32" and spec.b.order == "col"


def shared_out(config: Config, spec: ProblemSpec) -> Config:
    """The same with tiles shared out along K, as far as that fills a large GPU."""
    splits, shape = 1, shape_of(spec)
    # a large tile leaves no registers for its parts; lists share out nothing
    large = config.block_m * config.block_n > 64 * 128
    deep = 0 if spec.form == "per_group" or large else shape.deep
    worth = WORTH_SHARING // 8 if crossed(spec) else WORTH_SHARING
    while splits < 8 and 2 * splits * _tiles(config, shape) <= MOST_SHARED and deep >= splits * worth:
        splits *= 2
    return replace(config, splits=splits, programs=0) if splits > 1 else config
