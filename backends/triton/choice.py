"""Which configs to try for a spec, the best guess first: what measurements on an H100 support.

Nothing here depends on a token count beyond the buckets that a spec carries. The numbers were fitted on an H100 (700 W,
Triton 3.6.0, 2026-11-21, L2 flushed); docs/notes/triton-tuning.md has the measurements behind them, and their commands.

`hopper_us` and `pointer_us` say about how long a kernel takes: good enough to choose between the two. Fitted to 109
problems of 6 to 700 us (bf16): the choice that follows was wrong by more than 5 % in 9 of them, and cost 2 % on average
against the better of the two each time.

Tiles for products in 32 and 64 bits are those whose rounds on the busiest multiprocessor take least, padding included.
A program alone on a multiprocessor takes `alone` us for a block of K, several beside each other `busy` us each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, cast

import torch

from multigemm.backends.triton.config import (
    INVARIANT,
    INVARIANT_TILE,
    PROMOTION,
    SHARED_LIMIT,
    STRIP,
    Config,
    crossed,
    depth_of,
    finest_block,
    foldable,
    invariant_depth,
    is_tf32,
    mappable,
    problem_with,
    shared_memory,
    turns_weights,
    variance,
    wide_tails_problem,
)
from multigemm.cuda.device import usual_processors
from multigemm.planning.fused import products_spec
from multigemm.planning.fused_steps import product_spec, steps_reasons
from multigemm.problem.spec import MIXED, FusedSpec, ProblemSpec

BRIEF_US = 50.0
"""Below this many microseconds programs take so few tiles that drawing them from a counter costs more than it gains."""
UNCOPIED_ROWS = {256: 1024, 128: 256}
"""Rows per group up to which a copy of unaligned weights takes longer than tiles of that height that shift them."""
FEW_ROWS_OF_A_GATE = 16
"""Rows per group up to which a gate's tile is as low as tiles are."""
FEW_ROWS_OF_FLOAT8 = 16
"""Rows per group up to which a low tile of the portable kernel beats the warp-specialised one: 262 us, 294 (H200, 4
rows of each of 64 groups, K = N = 4096)."""
BRIEF_BLOCKS = 2
"""Blocks of a jagged K of float8 that a multiprocessor multiplies in all, up to which the portable kernel beats copies
and the warp-specialised one: one block takes 8.6 us, after copies 17.5; 4 (by the mean of unequal groups) 52.7, 22.8;
32 blocks 136, 33 (H100, 2026-11-25). Between 1 and 4 nothing was measured."""
CHEAP_TO_COPY = 4 << 20
"""Elements of weights up to which a copy of them costs less than the slower products: it never leaves the L2 cache."""
DEEP = 2048
"""From that K on half as many rows again: a tile's end, which the copied way hides better, counts for less."""
WRITTEN_K, WRITTEN_ROUNDS = 128, 20
"""K per group of jagged K, if it is more than one block, up to which writing results takes most of the time, and the
rounds of tiles of 192 x 256 from which those take less of it than 128 x 256: 0.96 to 0.98 (H200, 2026-11-23, six
problems of 22 rounds and more; benchmarks/results/h200/weight-gradients.json). They take 1.02 with 64 of K, 1.00 with
96 and with 192, 1.02 to 1.12 with 256, and 0.99 and more with 512; less than 22 rounds was not measured."""

MANY_TILES = 100
"""Large tiles of a list that keep a GPU busy."""
MOST_SHARED = 160
"""Programs up to which tiles are shared out: more would run one after another, and leave their parts for nothing."""
WORTH_SHARING = 2048
"""Elements of K for each doubling of the programs that share a tile; an eighth of them where a product is as slow as
those of `crossed`."""


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
    turns = max(1.0, _tiles(config, shape) / usual_processors())
    along = turns * steps * STEP_US[min(256, config.block_m), config.block_n]
    work = _work_us(HOPPER, shape, spec.compute.itemsize, along)
    return HOPPER.launch_us + work * (SHIFTED if config.shift_b else 1.0) + (COPY_US if config.pack else 0.0)


def rounds_us(config: Config, spec: ProblemSpec) -> float:
    """The microseconds of whole rounds of tiles in the ring, or of their reads through the L2 at 6 TB/s."""
    shape = shape_of(spec)
    tiles, steps = _tiles(config, shape), -(-shape.deep // depth_of(spec))
    strips = min(config.block_m, -(-shape.rows // STRIP) * STRIP)
    read = tiles * steps * (strips + config.block_n) * 128 / 6e6
    return max(-(-tiles // usual_processors()) * steps * STEP_US[min(256, config.block_m), config.block_n], read)


def pointer_us(config: Config, spec: ProblemSpec) -> float:
    """The estimated microseconds of the pointer kernel, which loads of single elements instead of 16 bytes slow
    down."""
    shape = shape_of(spec)
    turns = max(1.0, _tiles(config, shape) * config.splits / (POINTER_PROGRAMS * usual_processors()))
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


def shared_out(config: Config, spec: ProblemSpec) -> Config:
    """The same config with tiles split along K, as far as that fills a large GPU."""
    splits, shape = 1, shape_of(spec)
    # a large tile leaves no registers for its parts; lists share out nothing
    large = config.block_m * config.block_n > 64 * 128
    deep = 0 if spec.form == "per_group" or large else shape.deep
    worth = WORTH_SHARING // 8 if crossed(spec) else WORTH_SHARING
    while splits < 8 and 2 * splits * _tiles(config, shape) <= MOST_SHARED and deep >= splits * worth:
        splits *= 2
    return replace(config, splits=splits, programs=0) if splits > 1 else config


@dataclass(frozen=True, slots=True)
class Timed:
    """A tile, and the microseconds of a block of K in it."""

    config: Config
    alone: float
    busy: float


def _timed(tile: tuple[int, int, int], warps: int, stages: int, programs: int, alone: float, busy: float) -> Timed:
    m, n, k = tile
    config = Config(block_m=m, block_n=n, block_k=k, warps=warps, stages=stages, programs=programs)
    return Timed(config, alone, busy)


DOUBLE = (
    _timed((64, 64, 16), 4, 4, 2, 0.70, 0.40),
    _timed((32, 128, 16), 4, 4, 2, 0.75, 0.41),
    _timed((32, 32, 32), 2, 4, 3, 0.50, 0.25),
    _timed((16, 64, 32), 4, 4, 2, 0.60, 0.32),
)
"""float64. Few rows per group waste most of 64, and low tiles read shared memory more often."""
DOUBLE_ALONG, DOUBLE_ACROSS = (
    _timed((64, 64, 32), 4, 3, 2, 1.40, 0.73),
    _timed((128, 128, 16), 8, 3, 1, 1.41, 1.41),
)
"""float64 of many rows and a long k on Hopper, where both operands run along k, and otherwise. H100, 2026-11-24, time
over that of 64x64x16 on 8 groups of 2048 cubed and 128 ragged ones: 0.92 and 0.86; 0.89 and 0.89 (nn), 0.93 and 0.91
(weight gradient)."""
LARGE_ROWS, LARGE_K = 256, 512
"""Rows per group and k from which these are tried: fewer were not measured."""
ALONG = (
    _timed((128, 128, 32), 8, 3, 1, 0.62, 0.62),
    _timed((64, 64, 32), 4, 5, 2, 0.36, 0.25),
    _timed((32, 32, 64), 4, 4, 3, 0.50, 0.25),
)
"""tf32 along memory: wgmma, from 64 rows on."""
ACROSS = (
    _timed((128, 128, 32), 8, 3, 1, 1.66, 1.66),
    _timed((32, 64, 32), 4, 4, 4, 0.42, 0.22),
    _timed((32, 32, 64), 4, 4, 3, 0.50, 0.25),
)
"""tf32 otherwise: operands turn on their way from shared memory to registers."""
SINGLE = (
    Config(block_m=64, block_n=64, block_k=16, warps=4, stages=3, programs=3),
    Config(block_m=32, block_n=32, block_k=16, warps=4, stages=3, programs=4),
)
"""float32, with weights across k."""
CROSSED = (Timed(SINGLE[0], 1.60, 1.60), _timed((16, 32, 32), 4, 4, 4, 1.16, 1.16))
"""float32 whose weights run along k: reading them from shared memory is what a program waits for, alone or not. Of 28
rows, tiles of 32 x 32 took 1.3 to 1.45 times as long as those of 64 x 64."""

TURNED = Timed(replace(SINGLE[0], pack=("b",)), 0.60, 0.42)
"""float32 whose weights ran along k, after a copy that transposes them: five shapes on an H200, 2026-11-23
(docs/notes/triton-tuning.md)."""
TURNED_COPY, TURNED_BYTES_PER_US = 5.0, 3.5e6
"""Microseconds of the copy's launch, and bytes that it reads and writes."""


def busiest_us(timed: Timed, spec: ProblemSpec) -> float:
    """How long the multiprocessor with most tiles takes."""
    config = shared_out(timed.config, spec)
    most = -(-tiles_in(config, spec) * config.splits // usual_processors())
    steps = -(-shape_of(spec).deep // (config.block_k * config.splits))
    rounds = -(-most // config.programs) if config.programs else 1
    return steps * max(rounds * timed.alone, most * timed.busy)


def ranked(tiles: tuple[Timed, ...], spec: ProblemSpec) -> list[Config]:
    """The tiles by estimated time, the shortest first."""
    return [timed.config for timed in sorted(tiles, key=lambda timed: busiest_us(timed, spec))]


def sixty_four_bit(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    if burdened(spec):
        return [replace(x, warps=2 * x.warps) if x.block_m > 16 else x for x in ranked(DOUBLE, spec)]
    if capability[0] != 9 or typical_rows(spec) < LARGE_ROWS or shape_of(spec).deep < LARGE_K:
        return ranked(DOUBLE, spec)
    along = (spec.a.order, spec.b.order) == ("row", "col")
    return ranked((*DOUBLE, DOUBLE_ALONG if along else DOUBLE_ACROSS), spec)


def burdened(spec: ProblemSpec) -> bool:
    """Whether addresses, a C or an activation take registers that a program with half the warps does not have."""
    operands = (spec.a, spec.b, spec.out)
    single = spec.form == "jagged_n" or any(x.align < 16 or x.order == "strided" for x in operands)
    return single or spec.c is not None or spec.activation not in (None, "relu")


def thirty_two_bit(spec: ProblemSpec) -> list[Config]:
    if spec.precision == "tf32":
        along = (spec.a.order, spec.b.order) == ("row", "col")
        # low tiles read more single elements for each product
        return ranked(ALONG if along else ACROSS, spec) if in_pieces(spec) else [timed.config for timed in ALONG[:2]]
    return _crossed(spec) if crossed(spec) else list(SINGLE)


def _crossed(spec: ProblemSpec) -> list[Config]:
    """The order of weights for float32: as they are, or transposed first if there are enough rows. Split tiles never
    read transposed weights."""
    found = ranked(CROSSED, spec)
    if not turns_weights(spec) or shared_out(TURNED.config, spec).splits > 1:
        return found
    shape = shape_of(spec)
    copy_us = TURNED_COPY + 8.0 * shape.groups * shape.columns * shape.deep / TURNED_BYTES_PER_US
    as_they_lie = min(busiest_us(timed, spec) for timed in CROSSED)
    turned = copy_us + busiest_us(TURNED, spec)
    return [TURNED.config, *found] if turned < as_they_lie else [*found, TURNED.config]


def in_pieces(spec: ProblemSpec) -> bool:
    """Whether operands can be read 16 bytes at a time. Rows that start at any element cannot."""
    jagged = spec.form == "jagged_n" or (spec.form == "jagged_k" and (spec.a.order, spec.b.order) != ("col", "row"))
    return not jagged and min(spec.a.align, spec.b.align) == 16


def _lowest_tile(rows: int) -> int:
    """The rows of the lowest tile that holds so many: 16 or 32."""
    return 16 if rows <= 16 else 32


def _sixteen_bit(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    rows, columns = typical_rows(spec), typical_columns(spec)
    # lists of many small products fill a GPU with larger tiles
    tiny = rows * columns <= 160 * 160 and not (spec.form == "per_group" and min(rows, columns) >= 64)
    thin = Config(block_m=_lowest_tile(rows), block_n=128, block_k=64, warps=4, stages=5, programs=2)
    fills = capability[0] < 9 and rows <= 32 and tiles_in(thin, spec) >= usual_processors()
    if (tiny and not fills) or spec.groups * rows * columns <= usual_processors() * 32 * 32:
        small = Config(block_m=32, block_n=32, block_k=64, warps=4, stages=3, programs=0)
        if shape_of(spec).deep > 512:
            small = replace(small, block_k=128, stages=4)
        return [small, replace(small, block_m=64), replace(small, block_n=64), replace(small, block_m=16, block_n=64)]
    if rows <= 32:
        return [thin, replace(thin, block_n=64, stages=6, programs=3), replace(thin, block_k=128, stages=3)]
    big = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=2)
    mid = Config(block_m=128, block_n=64, block_k=64, warps=4, stages=4, programs=3)
    low = Config(block_m=64, block_n=128, block_k=64, warps=4, stages=4, programs=2)
    if heavy(spec):
        low = replace(low, block_k=32)
        return [replace(low, warps=8), replace(low, block_n=64, warps=8)]
    if spec.form == "per_group":
        square = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4, width=4, programs=0)
        wide = replace(big, stages=5, programs=0)
        return [square, low, mid, wide] if rows <= 600 else [wide, low, mid]
    square = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4, programs=0)
    if capability[0] < 9:
        return _before_hopper(spec, low, square, big, mid)
    sizes = [low, square, big, mid] if rows <= 96 else [big, square, mid, low]
    # too few large tiles leave multiprocessors idle
    return sizes if tiles_in(sizes[0], spec) >= usual_processors() else [square, *(x for x in sizes if x is not square)]


def _before_hopper(spec: ProblemSpec, low: Config, square: Config, big: Config, mid: Config) -> list[Config]:
    """The order of tiles where warps multiply alone, 64 x 64 of each: the largest that fills the GPU comes first.

    Rates relative to CUTLASS' grouped kernel for sm_80, all run on an H200 as for sm_80, ten shapes of `moe`, weights
    in either order, 2026-11-25: 128 x 256 0.84 to 0.88, 128 x 128 in four warps 0.79 to 0.83, in eight 0.61 to 0.66;
    with 64 rows per group 64 x 128 0.96 to 0.98.
    """
    large, columns = replace(big, warps=4), typical_columns(spec)
    sizes = [large, mid, low, square]
    if -(-columns // 256) * 256 <= 1.25 * columns:
        sizes = [replace(big, block_n=256, programs=1), *sizes]
    if typical_rows(spec) <= 96:
        sizes = [low, *(x for x in sizes if x is not low)]
    filling = [x for x in sizes if tiles_in(x, spec) >= usual_processors()] or [square]
    return [*filling, *(x for x in sizes if x not in filling)]


def heavy(spec: ProblemSpec) -> bool:
    """Whether element-wise addresses, or a C to read, take the registers that a large tile needs."""
    aligned = min(spec.a.align, spec.b.align, spec.out.align) == 16 and spec.form != "jagged_n"
    return not aligned or spec.c is not None


def _eight_bit(spec: ProblemSpec) -> list[Config]:
    first = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=1)
    small = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=3, programs=2)
    if min(spec.a.align, spec.b.align) < 16:
        return [small, replace(small, block_n=32)]
    return [first, small] if typical_rows(spec) > 64 else [small, first]


def emulated() -> list[Config]:
    """The configs for the interpreter, whose cost is the number of operations, not of elements."""
    return [Config(block_m=64, block_n=64, block_k=64, warps=4, stages=1, width=2, programs=3)]


def emulated_quantised(spec: ProblemSpec) -> Config:
    """The configs for the interpreter with quantised operands."""
    deep = PROMOTION if foldable(spec) else finest_block(spec) or PROMOTION
    return Config("quantised", 64, 64, deep, warps=4, stages=1, width=2, programs=3)


def _mostly_written(large: Config, spec: ProblemSpec) -> bool:
    """Whether the time is that of writing many tiles: plain results of 16 bits in rows, of a jagged K that is short."""
    plain = spec.c is None and spec.bias is None and spec.activation is None and spec.out.order == "row"
    whole = all(mappable(x) and x.dtype.itemsize == 2 for x in (spec.a, spec.b, spec.out))
    short = spec.form == "jagged_k" and large.block_k < shape_of(spec).deep <= WRITTEN_K
    return plain and whole and short and tiles_in(large, spec) >= WRITTEN_ROUNDS * usual_processors()


def _ranked(spec: ProblemSpec, large: Config, wide: Config, tall: Config, flat: Config) -> tuple[Config, ...]:
    """The order of configs by rows per group, as measured on an H100 (docs/notes/triton-tuning.md)."""
    rows = shape_of(spec).rows
    if shape_of(spec).columns <= 128:
        return tall, flat
    if _mostly_written(large, spec):
        return large, wide, tall, flat
    if spec.form == "jagged_k" or (384 < rows <= 1536 and not tall.wide_tails):
        return wide, large, tall, flat
    if 32 < rows <= 1536:
        return tall, wide, large, flat
    return large, wide, tall, flat


def _has_wide_tails(tall: Config, spec: ProblemSpec) -> bool:
    """Whether tiles of 256 x 128 have tails of 256 columns: if those waste less than an eighth of them, and if groups
    have more rows than a strip or K is not short (docs/notes/triton-tuning.md)."""
    shape = shape_of(spec)
    if wide_tails_problem(tall, spec) or _mostly_padding(shape.columns):
        return False
    return shape.rows > STRIP or shape.deep >= DEEP


def _mostly_padding(columns: int) -> bool:
    """Whether tiles of 256 columns would be empty by an eighth or more, and those of 128 would not."""
    return -(-columns // 256) * 256 >= 1.125 * (-(-columns // 128) * 128)


def _narrow_first(ranked: tuple[Config, ...], spec: ProblemSpec) -> tuple[Config, ...]:
    """Puts tiles of 128 columns first if tiles of 256 would be empty by an eighth or more."""
    if not _mostly_padding(shape_of(spec).columns):
        return ranked
    return tuple(sorted(ranked, key=lambda config: config.block_n))


def _brief_first(ranked: tuple[Config, ...], spec: ProblemSpec) -> tuple[Config, ...]:
    """Puts small tiles first if programs take few tiles each: an incomplete last round then costs more than a large
    tile gains."""
    if tiles_in(ranked[0], spec) > 4 * usual_processors():
        return ranked
    brief = min(ranked, key=lambda config: rounds_us(config, spec))
    if rounds_us(brief, spec) > 0.95 * rounds_us(ranked[0], spec):
        return ranked
    return brief, *(config for config in ranked if config is not brief)


def hopper_candidates(spec: ProblemSpec) -> list[Config]:
    """Configs of the warp-specialised kernel, the best guess first; empty if it cannot run."""
    if spec.form == "per_group":
        return _lists(spec)
    large = Config("hopper", block_m=192, block_n=256, stages=3, warps=4)
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4)
    tall = Config("hopper", block_m=256, block_n=128, stages=4, warps=4)
    flat = Config("hopper", block_m=128, block_n=128, stages=5, warps=4)
    along = {"a": "row", "b": "col"} if spec.compute == torch.float32 else {"a": spec.a.order, "b": spec.b.order}
    operands = (("a", spec.a), ("b", spec.b))
    pack = tuple(name for name, x in operands if not mappable(x) or x.order != along[name])
    tall = replace(tall, wide_tails="b" not in pack and _has_wide_tails(tall, spec))
    ranked = _brief_first(_ranked(spec, large, wide, tall, flat), spec)
    if "b" in pack:
        idle = spec.form == "jagged_m" and tiles_in(tall, spec) < usual_processors()
        ranked = (flat, wide, tall) if idle else _narrow_first(ranked, spec)
    found = [replace(config, pack=pack, block_k=depth_of(spec)) for config in ranked]
    if "b" in pack:
        uncopied = _uncopied(spec, tall, flat, tuple(name for name in pack if name == "a"))
        found = [*uncopied, *found] if _few(uncopied, spec) else [*found, *uncopied[:1]]
    found = [config for config in found if not problem_with(config, spec)]
    return _ordered(found, spec) if found else []


def _lists(spec: ProblemSpec) -> list[Config]:
    """Tiles for lists: large ones if they fill a GPU, dealt out in turn if that takes several rounds; else small
    ones."""
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4, width=4, programs=0, order="dealt")
    low = replace(wide, block_m=64, block_n=128)
    flat = replace(wide, block_n=128, stages=6)
    dealt = replace(wide, programs=1)
    found = [low, wide, flat, dealt]
    if _fills(wide, spec):
        found = [dealt, wide, low, flat] if tiles_in(wide, spec) >= 3 * usual_processors() else [wide, dealt, low, flat]
    return [config for config in found if not problem_with(config, spec)]


def _fills(wide: Config, spec: ProblemSpec) -> bool:
    """Whether a list has enough large tiles, and enough columns for them. Unequal products leave a last round half
    empty."""
    enough = MANY_TILES if spec.largest <= typical_rows(spec) else 2 * MANY_TILES
    columns = typical_columns(spec)
    return tiles_in(wide, spec) >= enough and 4 * columns >= 3 * wide.block_n * -(-columns // wide.block_n)


def _maps_first(spec: ProblemSpec, best: Config) -> bool:
    """Whether to use tensor maps: for lists that large tiles fill, or small tiles of a few groups. With fewer tiles,
    reading the maps takes longer than the work."""
    some = MANY_TILES <= tiles_in(best, spec) <= 2 * usual_processors() and spec.groups <= 8
    return best.block_m > 64 or some


def _uncopied(spec: ProblemSpec, tall: Config, flat: Config, pack: tuple[str, ...]) -> list[Config]:
    """Configs that pass unaligned weights through registers. The tall tile reads them less often; the low one takes
    three quarters of the time for half of the rows, which helps if one round of low tiles is enough."""
    tiles = (tall, replace(flat, stages=6))
    if tiles_in(tall, spec) < usual_processors() and tiles_in(flat, spec) <= usual_processors():
        tiles = tiles[::-1]
    found = [replace(config, shift_b=True, wide_tails=False, pack=pack, block_k=depth_of(spec)) for config in tiles]
    return [config for config in found if not problem_with(config, spec)]


def _few(uncopied: list[Config], spec: ProblemSpec) -> bool:
    """Whether groups have so few rows that shifting their weights in every tile is cheaper than copying them once."""
    shape = shape_of(spec)
    if not uncopied or shape.groups * shape.columns * shape.deep <= CHEAP_TO_COPY:
        return False
    limit = UNCOPIED_ROWS[max(config.block_m for config in uncopied)]
    return shape.rows <= (limit * 3 // 2 if shape.deep >= DEEP else limit)


def _ordered(found: list[Config], spec: ProblemSpec) -> list[Config]:
    """Tiles dealt out in turn if the work is brief, else drawn; the best guess also in the other order."""
    orders: tuple[Literal["dealt", "drawn"], ...] = ("dealt", "drawn")
    usual, other = orders if hopper_us(found[0], spec) < BRIEF_US else orders[::-1]
    return [*(replace(config, order=usual) for config in found), replace(found[0], order=other)]


def pointer_candidates(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs of the pointer kernel, the best guess first."""
    size = spec.compute.itemsize
    by_size = {1: lambda: _eight_bit(spec), 2: lambda: _sixteen_bit(spec, capability), 4: lambda: thirty_two_bit(spec)}
    found = by_size.get(size, lambda: sixty_four_bit(spec, capability))()
    found = [shared_out(found[0], spec), *found]
    if capability[0] >= 10:
        # four warps get 128 registers each there, and spill
        found = [replace(x, warps=8) if (x.block_m, x.block_n, x.warps) == (64, 64, 4) else x for x in found]
    return [config for config in dict.fromkeys(found) if not problem_with(config, spec)]


def _roomy(spec: ProblemSpec) -> bool:
    """Whether a gate leaves registers for 128 x 256 products: half as many results, and no other operand in the
    epilogue."""
    fused = spec.fused
    assert fused is not None
    more = fused.preact is not None or fused.row_scale is not None or spec.bias is not None
    light = spec.activation in ("swiglu", "reglu", "glu") and not (fused.alpha or fused.beta or fused.limit)
    return bool(fused.layout) and light and not more and not heavy(spec)


def fused_candidates(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs of the fused kernel, and of a plain product among steps, the best guess first.

    Measured on an H200 (us, layers of Qwen3-30B and Mixtral, 4096 tokens, bfloat16):
    * Many rows: the warp-specialised kernel makes up for the steps round it. Rows picked in front of a plain product:
      255 and 1234, in the fused kernel 301 and 1920; gradients of weights: 427 and 2518, fused 1836 and 9834. A gate
      that leaves registers for 128 x 256 products is the exception: 450 fused at K = 2048, 439 as three calls.
    * Few rows: tiles of 16 rows and 64 columns, of which a gate makes 32: 203 for Qwen3's 64 tokens, of 32 x 32: 271.
    """
    plain = pointer_candidates(spec, capability)
    if cast(FusedSpec, spec.fused).layout and typical_rows(spec) <= FEW_ROWS_OF_A_GATE:
        plain.sort(key=lambda x: (x.block_n < 64, x.block_m))
    # addresses of picked rows leave no registers for steps of 128 that bring 64 columns
    plain = [replace(x, block_k=64, stages=6) if x.block_k > 64 and x.block_n > 32 else x for x in plain]
    many = spec.jagged == "k" or typical_rows(spec) > 96
    steps = hopper_candidates(product_spec(spec))[:4] if capability[0] == 9 and not steps_reasons(spec) else []
    plain = [*steps, *plain] if many else [*plain, *steps[:1]]
    if spec.compute.itemsize == 2 and capability[0] == 9 and typical_rows(spec) > 96 and _roomy(spec):
        large = Config(block_m=128, block_n=256, block_k=64, warps=8, stages=3, programs=1)
        plain = [large, *plain] if tiles_in(large, spec) >= usual_processors() else [*plain, large]
    return [config for config in dict.fromkeys(plain) if not problem_with(config, spec)]


def quantised_candidates(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs for quantised operands, the best guess first: the warp-specialised kernel if it supports them,
    except for few rows, where one of its two warpgroups would be idle, and for a jagged K too short for copies."""
    fast = float8_candidates(spec) if capability[0] == 9 else []
    portable = portable_quantised(spec, capability)
    few = shape_of(spec).rows <= FEW_ROWS_OF_FLOAT8 or (spec.form == "jagged_k" and _brief(portable[0], spec))
    return [*portable[:1], *fast, *portable[1:]] if few else [*fast, *portable]


def _brief(config: Config, spec: ProblemSpec) -> bool:
    """Whether the busiest multiprocessor has few blocks of 128 of K in all."""
    rounds, blocks = -(-tiles_in(config, spec) // usual_processors()), -(-shape_of(spec).deep // PROMOTION)
    return rounds * blocks <= BRIEF_BLOCKS


def float8_candidates(spec: ProblemSpec) -> list[Config]:
    """Configs of the warp-specialised kernel for float8, the best guess first; empty if it cannot run.

    Measured on an H200 (us; 8192 rows of 32 groups, K = 7168, N = 4096; in front of 192x128 by three warpgroups): with
    scales of 1x128 and 128x128, 420 by 256x128, 429 by 128x256, 562; of rows 382, 382 and 411. Weight gradients in
    blocks: 128x128 takes 1.006 to 1.028 times as long as 256x128 (H100, six problems with 256 to 2048 of K).
    """
    pack = ("a", "b") if spec.form == "jagged_k" else ()
    tall = Config("hopper", block_m=256, block_n=128, block_k=depth_of(spec), stages=4, warps=4, pack=pack)
    wide = replace(tall, block_m=128, block_n=256)
    flat = replace(tall, block_m=128, block_n=128, stages=6)
    ranked = [tall, wide, flat] if finest_block(spec) else [wide, tall, flat]
    shallow = [replace(config, stages=config.stages - 1) for config in ranked]  # beside results of 32 bits
    ranked = [x if shared_memory(x, spec) <= SHARED_LIMIT else y for x, y in zip(ranked, shallow, strict=True)]
    found = [config for config in ranked if not problem_with(config, spec)]
    return _ordered(found, spec) if found else []


def portable_quantised(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs of the kernel `quantised`, the best guess first. Those for few rows were measured.

    A tile as low as its tokens wastes no products. Few tokens wait for weights: long steps and several programs on a
    multiprocessor keep more bytes on their way. Many tokens share every weight with as many rows as registers hold
    beside a second sum. Steps are short where elements need registers of their own: converted ones, and those with an
    address each.
    """
    if spec.batch_invariant:
        rows, columns, warps = INVARIANT_TILE
        fixed = Config("quantised", rows, columns, invariant_depth(spec), warps=warps, stages=3, programs=2)
        return [config for config in (fixed, replace(fixed, stages=2)) if not problem_with(config, spec)][:1]
    rows, converted = typical_rows(spec), spec.quantised == "weights" or capability[0] < 9
    single = not in_pieces(spec)
    deep = PROMOTION if foldable(spec) else finest_block(spec) or PROMOTION
    short = min(deep, 64 if foldable(spec) or not single else 32)
    low = Config("quantised", _lowest_tile(rows), 64, deep, warps=4, stages=4, programs=4)
    mid = Config("quantised", 64, 128, deep, warps=4, stages=4, programs=2)
    high = Config("quantised", 128, 128, deep, warps=8, stages=4, programs=1)
    small = Config("quantised", 64, 64, deep, warps=4, stages=3, programs=3)
    if converted:
        mid = replace(mid, warps=8)
    if capability[0] >= 10:
        low = replace(low, block_n=64 if converted else 128, warps=8, programs=3)
        mid = replace(mid, warps=4 if converted else 8)
    elif not heavy(spec) and spec.activation in (None, "relu"):
        low = _few_rows(spec, low, capability[0] == 9)
    if burdened_quantised(spec) or capability[0] < 9:
        mid, high = replace(mid, warps=8), replace(high, block_n=64)
    if burdened_quantised(spec) and capability[0] < 9:
        mid = high = replace(mid, block_n=64)
        small = replace(small, warps=8, block_n=32)
    if converted or single:
        mid, high, small = (replace(config, block_k=short) for config in (mid, high, small))
    if single:
        low = replace(low, block_k=short)
    sizes = [low, small, mid] if rows <= 32 else [mid, small, high] if rows <= 96 else [high, mid, small]
    if rows > 32 and tiles_in(sizes[0], spec) < usual_processors():
        sizes = [small, *(config for config in sizes if config is not small)]
    return [config for config in dict.fromkeys(sizes) if not problem_with(config, spec)]


def _few_rows(spec: ProblemSpec, low: Config, wgmma: bool) -> Config:
    """The tile for few rows, whose time is that of reading weights: warps that do not wait for each other keep the most
    bytes in flight.

    Measured on an H200 (us; 4 rows of each of 32 groups, K = 7168, N = 4096, Triton 3.6; in front of 64 columns by four
    warps, which wgmma multiplies): float8 weights 240, 257; int8 244, 337; int4 220, 286; e2m1 279, 344. float8 on both
    sides is multiplied by wgmma alone: 448 in blocks of 32 by 128 columns, 511 by 64.
    """
    if spec.b.packed:
        return replace(low, warps=2, stages=3, programs=8)
    if spec.quantised == "weights":
        return replace(low, block_n=32, warps=1, programs=8)
    return replace(low, block_n=128, stages=6, programs=3) if low.block_k == 32 and wgmma else low


def burdened_quantised(spec: ProblemSpec) -> bool:
    """Whether addresses, the epilogue, or scales per column and block take registers that a large tile needs."""
    scale = spec.b.scale
    columns = scale is not None and bool(scale.k) and scale.rows in (1, MIXED) and not foldable(spec)
    return heavy(spec) or columns or spec.activation not in (None, "relu")


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Valid configs for a spec on a device, the best guess first; for sums of rows, those of the products."""
    spec = products_spec(spec)
    if device.type == "cpu" and spec.quantised:
        fixed = spec.batch_invariant
        return quantised_candidates(spec) if fixed else [emulated_quantised(spec)]
    if device.type == "cpu":
        short = INVARIANT.block_k
        return [replace(config, block_k=short) if variance(config, spec) else config for config in emulated()]
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", SHARED_LIMIT)
    found = candidates_of(spec, torch.cuda.get_device_capability(device))
    return [config for config in found if shared_memory(config, spec) <= limit]


def candidates_of(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    """Valid configs for a spec on devices of a compute capability, the best guess first."""
    spec = products_spec(spec)
    if spec.quantised:
        return quantised_candidates(spec, capability)
    if spec.fused is not None:
        return fused_candidates(spec, capability)
    plain = pointer_candidates(spec, capability)
    fast = hopper_candidates(spec) if capability[0] == 9 else []
    if not fast:
        return plain
    if spec.form == "per_group":
        return [*fast, *plain] if _maps_first(spec, fast[0]) else [*plain, *fast]
    # what is known of both in tf32 is how large tiles compare
    fitted = max(plain, key=lambda x: x.block_m * x.block_n) if is_tf32(spec) else plain[0]
    if hopper_us(fast[0], spec) < pointer_us(fitted, spec):
        return [*fast, *plain]
    return [*plain, fast[0]]
