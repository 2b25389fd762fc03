"""Which configs of the pointer kernel to try for a spec, the best guess first.

Tiles for products in 32 and 64 bits are those whose rounds on the busiest multiprocessor take least, padding included.
A program alone on a multiprocessor takes `alone` us for a block of K, several beside each other `busy` us each. Fitted
on an H100 (700 W, Triton 3.6.0, 2026-11-21, L2 flushed).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from multigemm.backends.triton.config import Config, crossed, problem_with, turns_weights
from multigemm.backends.triton.estimates import shape_of, tiles_in, typical_columns, typical_rows
from multigemm.cuda.device import first_gpu_processors
from multigemm.problem.spec import ProblemSpec

MOST_SHARED = 160
"""Programs up to which tiles are shared out: more would run one after another, and leave their parts for nothing."""
WORTH_SHARING = 2048
"""Elements of K for each doubling of the programs that share a tile; an eighth of them where a product is as slow as
those of `crossed`."""


def shared_out(config: Config, spec: ProblemSpec) -> Config:
    """The same config with tiles split along K, as far as that fills a large GPU."""
    splits = 1
    # a large tile leaves no registers for its parts; lists share out nothing
    large = config.block_m * config.block_n > 64 * 128
    deep = 0 if spec.form == "per_group" or large else shape_of(spec).deep
    worth = WORTH_SHARING // 8 if crossed(spec) else WORTH_SHARING
    while splits < 8 and 2 * splits * tiles_in(config, spec) <= MOST_SHARED and deep >= splits * worth:
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
    most = -(-tiles_in(config, spec) * config.splits // first_gpu_processors())
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


def lowest_tile(rows: int) -> int:
    """The rows of the lowest tile that holds so many: 16 or 32."""
    return 16 if rows <= 16 else 32


def _sixteen_bit(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    rows, columns = typical_rows(spec), typical_columns(spec)
    # lists of many small products fill a GPU with larger tiles
    tiny = rows * columns <= 160 * 160 and not (spec.form == "per_group" and min(rows, columns) >= 64)
    thin = Config(block_m=lowest_tile(rows), block_n=128, block_k=64, warps=4, stages=5, programs=2)
    fills = capability[0] < 9 and rows <= 32 and tiles_in(thin, spec) >= first_gpu_processors()
    if (tiny and not fills) or spec.groups * rows * columns <= first_gpu_processors() * 32 * 32:
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
    return (
        sizes
        if tiles_in(sizes[0], spec) >= first_gpu_processors()
        else [square, *(x for x in sizes if x is not square)]
    )


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
    filling = [x for x in sizes if tiles_in(x, spec) >= first_gpu_processors()] or [square]
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
