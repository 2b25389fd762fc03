"""Chooses a config without measuring, by rules in order of preference. The first rule that applies wins.

Numbers of tokens and groups change from call to call, and compiling a kernel at that moment would stall the call for
seconds. So the rules take these numbers as integers, for one problem, or as arrays, for all sizes that may come:
`first_choices` returns every config that any of them would choose, and the first call of a layout compiles these
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from multigemm.backends.cupy.config import (
    ALONE,
    BLOCK_K,
    COLUMNS,
    COPIED_SHAPES,
    FP8,
    FP8_ALONE,
    FP8_BROAD,
    FP8_BROAD_ALONE,
    FP8_MIDDLE,
    FP8_NARROW,
    FP8_SINGLE,
    FP8_WIDE,
    FUSED_TOGETHER,
    GATED,
    GATHERED,
    GATHERED_TOGETHER,
    GENERIC,
    GENERIC_32,
    GENERIC_64,
    GENERIC_PAIR,
    MIDDLE,
    NARROW,
    QUANTISED,
    SHIFT_A,
    SHIFT_A_MIDDLE,
    SHIFT_B,
    SHIFT_B_MIDDLE,
    SHIFT_B_NARROW,
    SINGLE,
    SLIM,
    SMALL_32,
    SMALL_64,
    SMALL_DEEP,
    SMALL_LIST,
    SMALL_LISTS,
    SMALL_STAGES,
    TURNS,
    TURNS_GROUPS,
    WEIGHTS_LOW,
    WEIGHTS_MIDDLE,
    WEIGHTS_NARROW,
    WEIGHTS_WIDE,
    WIDE,
    Config,
    capability_of,
    reasons_against,
    shape_fits,
    shapes_of,
)
from multigemm.backends.cupy.support import (
    MAX_GROUPS,
    MAX_LISTED_GROUPS,
    MAX_ROWS,
    SMALL_MAX_ROWS,
    gathered_reasons,
    has_block_scales,
    has_gate,
    has_odd_lines,
    hopper_plain_kind,
    hopper_reasons,
    is_swapped,
    picks_rows,
    sends,
    small_list_reasons,
    small_reasons,
    stores_anywhere,
    trades_sides,
    words_of,
)
from multigemm.cuda.device import usual_processors
from multigemm.planning.fused import products_spec
from multigemm.planning.tiles import Number, TileCost, longest_time, typical_extent
from multigemm.problem.spec import HALVES, ProblemSpec

# Fitted numbers, last changed on 2026-11-23: times in bfloat16 on an H100 or H200 (docs/notes/cupy-hopper.md).
# `multigemm tune` times every config of a class of problems, which is how to fit them anew.

ONE_WAVE = 160
"""Tiles of the small kernel that run at once, with room for the rounding of totals to powers of two."""
LIST_TILES = 264
"""Tiles of 128 x 128 up to which the kernel for small lists is faster, whatever their number of rows."""
LIST_HIGH_TILES = 528
"""Tiles of 256 x 128 up to which it is faster if nothing is copied, groups have LIST_ROWS and products are few."""
LIST_ROWS = 192
"""Rows per group from which LIST_HIGH_TILES counts."""
LIST_WORK = 1 << 34
"""Products (rows x columns x k) up to which LIST_HIGH_TILES counts."""
LIST_COPIED_K, LIST_COPIED_TILES = 768, 2048
"""k, and tiles of 128 x 128, up to which a list's odd operands are copied for the kernel for small lists. With 1,536
tiles it takes 1.0 times as long as warpgroups in turns, with 4,096 1.1, with 10,800 1.5 (batches, H200)."""
LIST_LEAST_K = 128
"""k up to which the small kernel is tried before the kernel for small lists."""
FEW_K = 1024
"""k per group of a jagged k up to which the small kernel is tried."""
MANY_GRADIENTS, SHORT_K, LOW_ROUNDS = 32, 256, 8
"""Groups of jagged k from which, and k per group and rounds of low tiles up to which low ones take less than tall ones:
0.77 to 0.84 of the time of the faster of ALONE and WIDE, with half of the groups idle 0.96 (64 to 900 groups, 40 to 101
k, results of 64 x 128 to 256 x 512, H200, 2026-11-25); 1.05 in 9 rounds of 192 rows, 1.00 in 15."""
SMALL_ROWS = 2048
"""Rows, and SMALL_COLUMNS, up to which a result has fewer tiles than the GPU has multiprocessors: low tiles, no
clusters."""
SMALL_COLUMNS = 1024
"""Columns: see SMALL_ROWS."""
WORTH_COPYING = 1 << 24
"""Products (rows x columns x k) from which a copy costs less than the generic kernel."""
BLOCKS_WORTH_COPYING = 7.5
"""Blocks of 64 k of tiles of 64, for each multiprocessor, from which the same holds: of groups with few tokens, whose
tiles are mostly empty. Time over that of the generic or small kernel, H200, 2026-11-25: 0.42 to 0.79 (five problems, m
or n jagged), 0.97 against `small` for 64 groups of a row, 500 columns and k = 101."""
WORDS_WORK, COPIED_WORDS_WORK = 1 << 25, 1 << 30
"""Products (rows x columns x k) of tf32 or int8 from which the Hopper kernel is taken, and after copies.

The first are the fewest that were measured, where it takes 0.5 to 0.8 of the generic kernel's time; the second a guess.
"""
SPARSE_ROWS = 32
"""Rows per group up to which tf32 and int8 want low tiles and many stages."""
SHIFTED_LOW_ROWS = 64
"""Rows per group up to which weights that are shifted want the lowest tiles; numbers of tokens are rounded up to powers
of two. H200, 2026-11-25, time over that of tall tiles: 0.86 to 0.995 with 11 to 39 rows (eight shapes), 0.98 to 1.66
with 73 to 186 (ten)."""
FP8_SPARSE_ROWS = 32
"""Rows per group up to which float8 wants low tiles and many stages."""
CROWDED_ROWS = 100
"""Rows per group from which some groups of a random routing have more than 128, and tiles are higher."""
PICKED_ROWS = 48
"""Rows per group up to which picked rows are read where they lie, and not copied first."""
ONE_ROUND = 1.5
"""Lowest tiles for each multiprocessor up to which they are taken. Tokens are rounded up to powers of two, by 1.5 on
average: so many counted tiles are one real round.

Time over that of tiles of 128 rows, H200, 2026-11-25: 0.77 to 0.95 in one round (seven problems; 1.02 for one of few
blocks of k), 0.96 to 1.14 in two (five; benchmarks/results/h200-low-tiles). Of 33 to 64 rows per group 0.94 to 1.00 for
up to 132 counted tiles (five), 1.14 for 136 of which uneven groups made two rounds.
"""
FULL_ROWS = 2
"""Rows of a masked group for each one that counts, as a guess: what lies behind the mask reads no weights. Lowest tiles
for 64 rows, H100, 2026-11-24, K = 7168, time over that of the next higher ones: 0.76 to 0.99 if 16 of them count on
average, 0.75 to 0.97 if 32 do, 1.03 to 1.23 if 48 or all do."""
FEW_WEIGHT_ROWS = 64
"""Rows per group up to which quantised weights are taken by tiles of as many; not measured."""
COPIED_FEW_ROWS = 1024
"""Rows per group up to which a product of copies is one of few rows."""
REPAID_ROWS, REPAID_K = 1900, 1450
"""Rows per group, where columns fill their blocks and k is long, that repay a copy of the weights, and the k at which
half as many do: numbers of tokens are rounded up to powers of two.

Fitted to 54 shapes on an H200, 2026-11-25, whose times after copies are 0.72 to 2.3 of those of shifted weights: the
choices take 1.001 of the faster way's time, 1.07 at most; shifted weights for all 1.06 and 1.38.
"""
ROWS_COPY_COLUMNS = 271
"""Columns whose product takes as long as a copy of the rows of a jagged m; this and the next three decide whether such
rows are shifted or copied."""
ROWS_COPY_K = 100
"""k that a copy of the rows takes beside their own."""
SHIFTING_ROWS = 0.3
"""The part by which shifting the rows prolongs a product."""
SHIFTED_TILE_ROWS = 166
"""Rows per group for which shifted rows take longer: their tiles have 256 rows."""
BRIEF_K, BRIEF_ROWS = 1024, 256
"""k up to which, and rows per group from which, two rounds of tall tiles of copies take longer than low ones (0.74 to
0.98 of the time, 8 shapes), and than shifted weights (0.76 to 0.9)."""
FEW_COLUMNS = 15
"""Odd numbers of blocks of columns up to which clusters of two would waste too much."""
LONG_K = 2048
"""k from which tiles of few rows are as high as for many: then a large group's weights are read once. Not where no
group can be larger: for three masked problems of 36 to 60 rows those of 128 take 0.91 to 0.99 of the time (H200)."""
THIN_K = 128
"""k per group of jagged k up to which storing is most of the work: clusters would share rows that cost nothing."""
MANY_ROWS = 448
"""Rows per group from which warpgroups take turns: lower tiles read weights more often, but hide their stores."""
TURNS_ENDS, LAUNCH_ROUNDS = 14, 5
"""Of tall tiles of jagged k whose results the copy engine stores: the elements of k that take as long as what a tile in
turns costs beyond one that is shared, and the rounds of tiles that take as long as a launch starts and ends.

Least squares of the logarithm of turns' time relative to that of shared tiles, 51 problems of more than 128 k per group
on an H200, bfloat16, 2026-11-23 (benchmarks/results/h200/weight-gradients.json): its error has a root mean square of
5 %. The choices are 0.14 % behind the faster config on average and 2.9 % at most, for problems left out of the fit
0.22 % and 4.7 %; shared tiles for all 4.1 % and 34 %, turns for all 1.1 % and 12 %. Results below 384 rows were not
measured.
"""
AT_ONCE = 3
"""Tiles of 64, or of 32 with eight blocks of k in flight, that a multiprocessor runs at once: it has the shared memory
for so many."""
ODD_US = (7.0, 1.0)
"""Microseconds (H100) of a launch of the small kernel where lines begin anywhere, and of a block of k of one of a
processor's tiles of 32."""
GENERIC_US = (11.0, 4.0)
"""Microseconds of a launch of the generic kernel for such lines, and of a block of k of all of a multiprocessor's tiles
of 64: it waits for memory each time."""
CLEARLY = 0.8
"""The fraction of the other estimate below which an estimate is trusted."""
TOTALS = (0, *(1 << i for i in range(21)))
GROUPS = (*(1 << i for i in range(10)), MAX_GROUPS)
"""The numbers of tokens and groups for which kernels are compiled in advance."""

Condition = Any
"""Whether something holds: a bool, or an array of them."""
Rule = tuple[Condition, tuple[Config, ...]]
"""A condition, and the configs to use where it holds, the best first."""


class Layout(NamedTuple):
    """What is known of a problem without its numbers of tokens and groups, beyond `spec`."""

    spec: ProblemSpec
    small: bool
    small_list: bool
    hopper: bool
    odd_lines: bool
    sends: bool
    plain: bool
    columns: int
    """The blocks of columns of a result."""
    k: int
    """The inner extent; 0 if it differs by group and none is known."""
    processors: int


class Counts(NamedTuple):
    """Numbers of tokens, numbers of groups, and tokens per group."""

    total: Number
    groups: Number
    mean: Number


@lru_cache(maxsize=1024)
def _layout(spec: ProblemSpec) -> Layout:
    """The layout of a spec."""
    columns = max(-(-((spec.m if is_swapped(spec) else spec.n) or spec.largest) // COLUMNS), 1)
    return Layout(
        spec, not small_reasons(spec), not small_list_reasons(spec), not hopper_reasons(spec), has_odd_lines(spec),
        sends(spec), hopper_plain_kind(spec) > 0, columns, spec.k or spec.largest, usual_processors(),
    )  # fmt: skip


def _without_counts(spec: ProblemSpec) -> ProblemSpec:
    return replace(spec, total=0, groups=1)


class Judge:
    """Decides which configs are valid for a spec, like `is_valid`, but asks each kernel's module only once."""

    def __init__(self, spec: ProblemSpec, capability: tuple[int, int], known: Mapping[str, bool] | None = None) -> None:
        self._spec, self._capability, self._runs = spec, capability, dict(known or {})

    def accepts(self, config: Config) -> bool:
        """Whether the config can run the spec on the device."""
        runs = self._runs.get(config.kernel)
        if runs is None:
            runs = self._runs[config.kernel] = not reasons_against(config.kernel, self._spec)
        return runs and shape_fits(config, self._spec, self._capability)


def _order(spec: ProblemSpec) -> Iterator[Config]:
    """All configs, the best guess first; some occur more than once."""
    counts = Counts(spec.total, spec.groups, spec.total // max(spec.groups, 1))
    stages = _rules(_layout(_without_counts(spec)), counts)
    return (config for rules in stages for holds, some in rules if holds for config in some)


@lru_cache(maxsize=1024)
def ranked(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Every shipped config that is valid for `spec`, the best guess first: the valid ones of `_order`."""
    spec = products_spec(spec)
    judge = Judge(spec, capability)
    return tuple(c for c in dict.fromkeys(_order(spec)) if judge.accepts(c))


def heuristic(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> Config:
    """The best guess without measuring."""
    return ranked(spec, capability)[0]


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """The configs of `ranked` for a device."""
    return list(ranked(spec, capability_of(device)))


def first_choices(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    """The heuristic's choices for the spec's layouts and extents, over all numbers of tokens and groups."""
    spec = replace(products_spec(spec), total=0, groups=1, largest=0)
    total, groups = (x.ravel() for x in np.meshgrid(np.array(TOTALS, float), np.array(GROUPS, float)))
    layout = _layout(spec)
    known = {"small": layout.small, "small_list": layout.small_list, "hopper": layout.hopper}
    found, left, judge = dict[Config, None](), np.ones(total.size, bool), Judge(spec, capability, known)
    for rules in _rules(layout, Counts(total, groups, total // groups)):
        for holds, some in rules:
            for config in some:
                taken = left & holds
                if taken.nonzero()[0].size and judge.accepts(config):
                    taken &= _takes(config, spec, total, groups)
                    if taken.nonzero()[0].size:
                        found[config] = None
                        left &= ~taken
        if not left.nonzero()[0].size:
            break
    return tuple(found)


def _takes(config: Config, spec: ProblemSpec, total: Number, groups: Number) -> Condition:
    """Whether a config that is valid for a layout is also valid for these numbers, as `is_valid` says."""
    if config.kernel == "generic":
        return True
    if config.kernel == "small":
        return (total <= SMALL_MAX_ROWS) & (
            groups <= (MAX_LISTED_GROUPS if spec.form == "per_group" else SMALL_MAX_ROWS)
        )
    fits = groups <= (MAX_LISTED_GROUPS if config.kernel == "small_list" else min(config.groups_at_most, MAX_GROUPS))
    if config.columns != COLUMNS and spec.form in ("jagged_m", "jagged_n"):
        return fits & (total <= MAX_ROWS)  # support.sends
    return fits


def _rules(layout: Layout, counts: Counts) -> Iterator[list[Rule]]:
    """The rules in order of preference: pieces as high as the average group; copies only where they pay.

    They come in stages, because later ones need not be computed if an earlier one decides for all sizes.
    """
    if layout.spec.quantised:
        yield _quantised_rules(layout, counts)
        return
    if layout.spec.fused is not None and (layout.hopper or not gathered_reasons(layout.spec)):
        yield _fused_rules(layout, counts)
    words = layout.spec.fused is None and layout.spec.compute not in HALVES and bool(words_of(layout.spec))
    if words:
        yield _words_rules(layout, counts)
    if layout.spec.compute is torch.float64 and layout.hopper:
        yield _double_rules(layout, counts)
    if layout.spec.compute not in HALVES or layout.spec.fused is not None:
        yield list(_generic_rules(layout, counts))
        yield [(words, WORDS), (words, tuple(replace(config, kernel="packed") for config in WORDS))]
        return
    small, listed = _few_tiles_rules(layout, counts), _small_list_rules(layout, counts)
    yield [*listed, *small] if layout.k > LIST_LEAST_K else [*small, *listed]
    ladders = _hopper_rules(layout, counts)
    yield [(holds, ladder.configs) for holds, ladder in ladders]
    yield _other_rules(layout, counts, ladders)
    shifting = (SHIFT_A, SHIFT_A_MIDDLE, SHIFT_B, SHIFT_B_MIDDLE, SHIFT_B_NARROW)
    yield [(True, (*shifting, SMALL_32, SMALL_64, SMALL_DEEP, *SMALL_LISTS))]


def _quantised_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for quantised operands: high tiles, which skewed sizes need, except for few rows per group.

    Fitted to times on an H200. Scales that cover all of k, 2026-11-22: e4m3, the 11 shapes of the suite `moe`, sizes
    balanced, zipf and with empty groups: a block alone takes 0.93 to 1.03 of the time of a cluster of two. Rows by
    blocks of 128 x 128, 2026-11-23, five shapes, balanced and zipf: tiles of 192 columns take 0.89 to 0.96 of the time
    of 128, and a cluster as long as a block alone, within 2 %.
    """
    rows = _rows(layout, counts)
    if layout.spec.quantised == "weights":
        low = rows <= WEIGHTS_LOW.rows * (FULL_ROWS if layout.spec.form == "masked" else 1)
        return [(low, (WEIGHTS_LOW,)),
                (rows <= FEW_WEIGHT_ROWS, (WEIGHTS_NARROW,)), (rows <= WEIGHTS_MIDDLE.rows, (WEIGHTS_MIDDLE,)),
                (True, (WEIGHTS_WIDE, WEIGHTS_MIDDLE, WEIGHTS_NARROW, QUANTISED))]  # fmt: skip
    sparse = rows <= FP8_SPARSE_ROWS
    odd = layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    high = (FP8_ALONE, FP8_WIDE) if odd or has_block_scales(layout.spec) else (FP8_WIDE, FP8_ALONE)
    if trades_sides(layout.spec):
        high = (*((FP8_BROAD, FP8_BROAD_ALONE) if _fill_broad_tiles(layout) else ()), FP8_SINGLE, FP8_MIDDLE)
    return [(sparse, (FP8_SINGLE, FP8_NARROW)), (True, (*high, *FP8, QUANTISED))]


def _fill_broad_tiles(layout: Layout) -> bool:
    """Whether tiles of 192 columns pad the columns by at most 8 % more than tiles of 128."""
    columns = (layout.spec.m if is_swapped(layout.spec) else layout.spec.n) or layout.spec.largest
    return -(-columns // FP8_BROAD.columns) * FP8_BROAD.columns <= 1.08 * layout.columns * COLUMNS


def _fused_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for gates and picked rows on Hopper: tiles as high as the average group needs.

    Rows of small groups are picked on their way: the time is that of the weights (H200, 2026-11-23: 446 us of 443 for
    Mixtral's first product at 64 tokens). Those of large ones, which tiles read again and again, are copied first.
    Clusters that share the weights of picked rows come last: they were never timed.
    """
    rows, gated, picks = _rows(layout, counts), has_gate(layout.spec), picks_rows(layout.spec)
    plain = GATED if gated else FUSED_TOGETHER
    found = list[Rule]()
    for height, holds in ((64, rows <= 48), (128, (rows > 48) & (rows <= CROWDED_ROWS)), (256, rows > CROWDED_ROWS)):
        alike = sorted(plain, key=lambda c: abs(c.rows - height))
        gathered = sorted(GATHERED if gated else (*GATHERED_TOGETHER, *GATHERED), key=lambda c: abs(c.rows - height))
        alone, shared = [c for c in gathered if c.cluster == 1], [c for c in gathered if c.cluster > 1]
        copied = [replace(c, kernel="gathered") for c in alike]
        if not picks:
            found.append((holds, tuple(alike)))
            continue
        found.append((holds & (rows <= PICKED_ROWS), (*alone, *copied, *shared)))
        found.append((holds & (rows > PICKED_ROWS), (*copied, *alone, *shared)))
    return found


TURNS_ALONE = replace(TURNS, cluster=1)
WORDS = (TURNS, TURNS_ALONE, WIDE, ALONE, MIDDLE, SINGLE, NARROW, SLIM)
"""The Hopper kernel's configs for tf32 and int8."""


def _words_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for tf32 and int8, after copies where TMA and wgmma need them: low tiles if each multiprocessor gets at
    most one.

    Else tall ones, which read the weights of a large group once.

    Fitted to times on an H200, 2026-11-23 (docs/notes/cupy-hopper.md); groups of up to 32 rows were not measured.
    """
    spec, rows = layout.spec, _rows(layout, counts)
    height = _height(layout) if spec.form == "jagged_k" else rows
    depth = height if spec.form == "jagged_k" else layout.k or COLUMNS
    work = counts.total * layout.columns * COLUMNS * depth
    odd = layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    turns, wide = ((TURNS_ALONE, TURNS), (ALONE, WIDE)) if odd else ((TURNS, TURNS_ALONE), (WIDE, ALONE))
    low, middle = (-(-height // side) * counts.groups * layout.columns <= layout.processors for side in (64, 128))
    found, left = list[Rule](), True
    for holds, some in (
        (low, (SLIM, SINGLE)),
        (middle, (SINGLE, SLIM)),
        (rows <= SPARSE_ROWS, (SINGLE, MIDDLE, NARROW)),
        (rows <= 128, (*turns, MIDDLE, SINGLE)),
        (True, (*turns, *wide, MIDDLE)),
    ):
        found.append((left & holds & (work >= WORDS_WORK), some))
        found.append((left & holds & (work >= COPIED_WORDS_WORK), tuple(replace(c, kernel="packed") for c in some)))
        left = left & (holds ^ True)
    return found


def _double_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for float64 that TMA can read: low tiles if each multiprocessor gets at most one."""
    height = _height(layout) if layout.spec.form == "jagged_k" else _rows(layout, counts)
    low, middle = (-(-height // side) * counts.groups * layout.columns <= layout.processors for side in (64, 128))
    odd = layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    tall = (SINGLE, MIDDLE) if odd else (MIDDLE, SINGLE)
    return [(low, (SLIM, SINGLE)), (middle, (SINGLE, SLIM)), (True, (*tall, SLIM, NARROW))]


def _somewhere(holds: Condition) -> bool:
    return bool(holds.nonzero()[0].size if isinstance(holds, np.ndarray) else holds)


def _most(x: Number, y: Number) -> Number:
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


def _rows(layout: Layout, counts: Counts) -> Number:
    """Rows per group; a whole tile if another direction is jagged."""
    return counts.mean if layout.spec.form != "jagged_k" else WIDE.rows


def _height(layout: Layout) -> int:
    """Rows of a result of jagged k, as the Hopper kernel's tiles count them."""
    return (layout.spec.n if is_swapped(layout.spec) else layout.spec.m) or COLUMNS


def _generic_rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """The rules for the generic kernel: the tile that gives the busiest processor the least work."""
    tiles = shapes_of(layout.spec)
    alone = tiles[128].resident == 1
    here = [c for c in (GENERIC if alone else GENERIC_PAIR, GENERIC_64, GENERIC_32) if c.tile in tiles]
    rows, columns = (_most(typical_extent(layout.spec, direction, counts.mean), 1) for direction in ("m", "n"))
    costs = [TileCost(c.tile, c.tile, tiles[c.tile].cost) for c in here]
    times = [longest_time(cost, _most(counts.groups, 1), rows, columns, 1, layout.processors) for cost in costs]
    # How many tiles are faster than each, those before it where they are equal.
    ranks = [
        sum((other < time) | ((other == time) & (j < i)) for j, other in enumerate(times) if j != i)
        for i, time in enumerate(times)
    ]
    for place in range(len(here)):
        for config, rank in zip(here, ranks, strict=True):
            yield rank == place, (config,)
    yield True, (GENERIC_PAIR if alone else GENERIC,)


def _small_list_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for `small_list`: a block for each tile, if few rounds of blocks hold all tiles. Members of a list may
    have longer columns than rows."""
    if not layout.small_list:
        return []
    total, groups, rows = counts.total, counts.groups, _rows(layout, counts)
    columns = max(layout.spec.n or layout.spec.largest, 1)
    low, high = (_most(-(-total // tile), groups) * -(-columns // COLUMNS) for tile in (128, 256))
    if layout.hopper:
        work = total * columns * layout.k
        good = (low <= LIST_TILES) | ((high <= LIST_HIGH_TILES) & (rows >= LIST_ROWS) & (work <= LIST_WORK))
    else:
        good = (low <= LIST_TILES) | ((layout.k <= LIST_COPIED_K) & (low <= LIST_COPIED_TILES))
    return [(good & (total > 0) & (rows >= 64) & (groups <= MAX_LISTED_GROUPS) & (groups > 0), (SMALL_LIST,))]


def _most_tiles(layout: Layout, counts: Counts, side: int) -> Number:
    """An upper bound on the tiles of any sizes; 0 if there are none, or if some extent of a list differs."""
    spec = layout.spec
    if spec.form != "jagged_k" and spec.k is None:
        return 0 * counts.total
    rows = (spec.m or 0) * counts.groups if spec.form == "jagged_k" else counts.total
    columns = spec.m if spec.form == "jagged_n" else spec.n
    return (rows // side + counts.groups) * -(-(columns or 0) // side) * (rows > 0)


def _fits_small(layout: Layout, counts: Counts) -> Condition:
    return layout.small & (counts.groups > 0) & _takes(SMALL_32, layout.spec, counts.total, counts.groups)


def _few_tiles_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for few tiles: the small kernel if one wave holds all tiles and k is short, with the larger tile for
    the longer k.

    Else the small kernel for one block of a jagged k, which is all start and end.
    """
    if not layout.small:
        return []
    spec, fits, k, rules = (
        layout.spec,
        _fits_small(layout, counts),
        typical_extent(layout.spec, "k", counts.mean),
        list[Rule](),
    )
    other = fits
    if not layout.odd_lines:
        low, high = (_most_tiles(layout, counts, config.tile) for config in (SMALL_32, SMALL_64))
        short = k <= (FEW_K if spec.form == "jagged_k" else 512)
        first = fits & (low > 0) & (low <= ONE_WAVE) & short
        second = fits & (first ^ True) & (high > 0) & (high <= ONE_WAVE) & (k <= 256)
        rules += [(first, (SMALL_32, SMALL_64)), (second, (SMALL_64, SMALL_32))]
        other = fits & ((first | second) ^ True)
    if spec.form == "jagged_k" and layout.hopper:
        few = _result_tiles(spec, counts, SMALL_64.tile)
        other = other & (k <= BLOCK_K) & (counts.groups <= MAX_GROUPS)
        rules.append((other & (few > 0) & (few <= AT_ONCE * layout.processors), (SMALL_64,)))
    return rules


def _result_tiles(spec: ProblemSpec, counts: Counts, side: int) -> Number:
    """The number of result tiles of jagged k, whose results all have one size."""
    return counts.groups * -(-(spec.m or 0) // side) * -(-(spec.n or 0) // side)


def _odd_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for lines that start at any address: the small kernel if it is clearly faster, with more blocks of k in
    flight for longer k, if all tiles still run at once."""
    if not layout.small or not layout.odd_lines:
        return []
    blocks, tiles = (
        _most(-(-typical_extent(layout.spec, "k", counts.mean) // BLOCK_K), 1),
        _most_tiles(layout, counts, SMALL_32.tile),
    )
    small = ODD_US[0] + ODD_US[1] * blocks * _most(tiles / layout.processors, 1)
    wins = (tiles > 0) & (small <= CLEARLY * (GENERIC_US[0] + GENERIC_US[1] * blocks)) & _fits_small(layout, counts)
    deep = (blocks > SMALL_STAGES) & (tiles <= AT_ONCE * layout.processors)
    return [(wins & deep, (SMALL_DEEP, SMALL_32)), (wins & (deep ^ True), (SMALL_32, SMALL_DEEP))]


class Ladder(NamedTuple):
    """The Hopper kernel's configs, the best first, and those that multiply copies of the operands."""

    configs: tuple[Config, ...]
    copied_many: Config
    """The configs for copies with many rows per group."""
    copied_few: Config
    """The configs for copies with few rows per group, where warpgroups that take turns do not pay."""
    high: bool
    """Whether higher tiles are better for many rows of odd results, which end least often then."""


def _ladder(*configs: Config) -> Ladder:
    few = next(c for c in configs if not c.pingpong)
    copied_many, copied_few = (replace(c, kernel="packed") for c in (configs[0], few))
    return Ladder(configs, copied_many, copied_few, configs[0] in (ALONE, TURNS))


LOW, LOWEST = _ladder(SINGLE, SLIM, WIDE), _ladder(SLIM, SINGLE, WIDE)
SPARSE, BETWEEN = _ladder(SINGLE, NARROW, MIDDLE, WIDE), _ladder(MIDDLE, WIDE, NARROW)
BETWEEN_ALONE = _ladder(SINGLE, MIDDLE, WIDE, NARROW)
TALL = (_ladder(TURNS, WIDE, ALONE, MIDDLE, NARROW), _ladder(WIDE, TURNS, ALONE, MIDDLE, NARROW),
        _ladder(WIDE, ALONE, MIDDLE, NARROW))  # fmt: skip
"""The configs for groups of many rows: where taking turns pays at once, where it may, where it cannot."""
TALL_ALONE = (_ladder(ALONE, TURNS, WIDE, MIDDLE, NARROW), _ladder(ALONE, WIDE, TURNS, MIDDLE, NARROW),
              _ladder(ALONE, WIDE, MIDDLE, NARROW))  # fmt: skip
"""The same where clusters do not pay."""
COPIED_WIDE, COPIED_SINGLE, COPIED_TURNS = (replace(config, kernel="packed") for config in (WIDE, SINGLE, TURNS))


def _other_rules(layout: Layout, counts: Counts, ladders: list[tuple[Condition, Ladder]]) -> list[Rule]:
    """The rules for operands that TMA cannot read: the kernels that shift or copy them, or the generic one."""
    spec, total, rows = layout.spec, counts.total, _rows(layout, counts)
    across = spec.m if spec.form == "jagged_n" else spec.n
    blocks = -(-typical_extent(spec, "k", counts.mean) // BLOCK_K) * _most_tiles(layout, counts, GENERIC_64.tile)
    heavy = total * (across or 256) * (spec.k or 256) >= WORTH_COPYING
    heavy = heavy | (blocks >= BLOCKS_WORTH_COPYING * layout.processors)
    # Groups of many rows that are two rounds of tall tiles at most, with a short k.
    brief = (spec.form != "jagged_k" and layout.k <= BRIEF_K) & (counts.mean > BRIEF_ROWS)
    brief = brief & (-(-counts.mean // WIDE.rows) * counts.groups * layout.columns <= 2 * layout.processors)
    # So few rows that a copy of the weights takes longer than to shift them in every tile.
    blocks = layout.columns * COLUMNS
    filled = (spec.n or blocks) / blocks if spec.out.order == "row" else 1.0
    few = (counts.mean <= REPAID_ROWS * filled * layout.k / (layout.k + REPAID_K)) & (brief ^ True)
    low = rows <= SHIFTED_LOW_ROWS
    shifted = [(heavy & low, (SHIFT_B_NARROW,)), (heavy & (low ^ True), (SHIFT_B,))]
    copied = _copied(layout, counts, brief, ladders)
    light, aligned = heavy ^ True, not layout.odd_lines and shapes_of(spec) is COPIED_SHAPES
    return [
        *[(holds & heavy, some) for holds, some in _shifted_rows(layout, counts)],
        *[(holds & few, some) for holds, some in shifted],
        *[(holds & heavy, (best,)) for holds, best, _ in copied],
        *[(holds & (few ^ True), some) for holds, some in shifted],
        *[(holds & heavy, (other,)) for holds, _, other in copied],
        *(_generic_rules(layout, counts) if aligned else [(heavy, (GENERIC, GENERIC_64))]),
        *[(holds & light, some) for holds, some in _odd_rules(layout, counts)],
        (light & (total <= SMALL_ROWS), (GENERIC_64, GENERIC)),
        (light & (total > SMALL_ROWS), (GENERIC, GENERIC_64)),
        *[(holds & light, (best,)) for holds, best, _ in copied],
    ]


def _shifted_rows(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for rows of a jagged m that are shifted and not copied: there are few columns, and k is long.

    Low tiles have as few columns, or hold all of them in one round, or end more often where k is short.
    """
    spec, rows, columns = layout.spec, counts.mean, layout.columns * COLUMNS
    if spec.form != "jagged_m" or spec.a.align == 16 or columns * SHIFTING_ROWS >= ROWS_COPY_COLUMNS:
        return []
    copy = ROWS_COPY_COLUMNS * layout.k / (layout.k + ROWS_COPY_K) * rows
    chosen = (rows >= (spec.n or 0)) & (copy > columns * (SHIFTING_ROWS * rows + SHIFTED_TILE_ROWS))
    low = (-(-rows // (2 * COLUMNS)) * counts.groups * layout.columns <= layout.processors // 2) | (layout.columns == 1)
    low = low | (layout.k <= BRIEF_K)
    return [(chosen & low, (SHIFT_A_MIDDLE, SHIFT_A)), (chosen & (low ^ True), (SHIFT_A, SHIFT_A_MIDDLE))]


def _copied(
    layout: Layout, counts: Counts, brief: Condition, ladders: list[tuple[Condition, Ladder]]
) -> list[tuple[Condition, Config, Config]]:
    """When copies are multiplied: the best and the second config."""
    found, turns = list[tuple[Condition, Config, Config]](), stores_anywhere(layout.spec)
    many, stored = _rows(layout, counts) > COPIED_FEW_ROWS, _sends(layout, counts) ^ True
    for holds, ladder in ladders:
        if not _somewhere(holds):
            continue
        few, high = ladder.copied_few, holds & many
        found.append((holds & brief, COPIED_SINGLE, few))
        if turns and ladder.copied_many == COPIED_TURNS:
            found.append((holds, COPIED_TURNS, few))
            continue
        found.append((holds & (many ^ True), few, few))
        if ladder.high:
            found.append((high & stored, COPIED_WIDE, ladder.copied_many))
            high = high & (stored ^ True)
        found.append((high, ladder.copied_many, ladder.copied_many))
    return found


def _sends(layout: Layout, counts: Counts) -> Condition:
    """`support.sends` for a layout."""
    return layout.sends & ((counts.total <= MAX_ROWS) | (layout.spec.form not in ("jagged_m", "jagged_n")))


def _turns_take_less(layout: Layout, counts: Counts) -> Condition:
    """Whether tall tiles of jagged k that the copy engine stores are estimated to take less time in turns than shared.

    Pairs of multiprocessors take tiles of two blocks of columns each, of which low ones cost as much as full ones.
    """
    height = (layout.spec.n if is_swapped(layout.spec) else layout.spec.m) or 0
    pairs, processors = counts.groups * -(-layout.columns // 2), layout.processors // 2
    shared, turns = (
        min(height, config.rows) * (-(-pairs * -(-height // config.rows) // processors) + LAUNCH_ROUNDS)
        for config in (WIDE, TURNS)
    )
    return turns * (counts.mean + TURNS_ENDS) < shared * counts.mean


def _hopper_rules(layout: Layout, counts: Counts) -> list[tuple[Condition, Ladder]]:
    """The rules for the Hopper kernel; each applies if none before it does."""
    spec, total, rows = layout.spec, counts.total, _rows(layout, counts)
    found, left = list[tuple[Condition, Ladder]](), True
    jagged_k = spec.form == "jagged_k"
    masked = spec.form in ("batched", "masked")  # no group is larger than the others
    known = spec.form not in ("jagged_k", "per_group")  # a list's columns change from call to call
    odd = known and layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    height = _height(layout) if jagged_k else rows
    lowest, low, highest = (
        -(-height // config.rows) * counts.groups * layout.columns for config in (SLIM, SINGLE, WIDE)
    )
    little = (total <= SMALL_ROWS) & ((spec.n or 0) <= SMALL_COLUMNS) & (not jagged_k)
    # As many multiprocessors as there can be load at once, and for few rows only loads count.
    idle = (lowest <= layout.processors) & ((rows > 32) | (2 * lowest <= layout.processors)) & (not jagged_k)
    many = jagged_k & (counts.groups >= MANY_GRADIENTS) & (counts.mean <= SHORT_K)
    for holds, ladder in (
        (jagged_k & (lowest <= layout.processors), LOWEST),
        (jagged_k & (low <= layout.processors), LOW),
        (many & (low <= LOW_ROUNDS * layout.processors), LOW),
        ((rows > SLIM.rows) & (lowest <= ONE_ROUND * layout.processors) & (not jagged_k), LOWEST),
        (((little & (total <= 1024)) | idle) & (spec.form != "per_group"), LOWEST),
        (little | ((rows > 32) & (highest <= layout.processors) & (not jagged_k)), LOW),
        (rows <= 32, SPARSE),
        ((rows <= 64) & ((layout.k < LONG_K) | masked), BETWEEN_ALONE if odd else BETWEEN),
    ):
        found.append((left & holds, ladder))
        left = left & (holds ^ True)
    # Groups of many rows: no clusters for an odd number of blocks of columns; turns where the warps store, and where
    # they are estimated to take less than the copy engine's stores of shared tiles.
    anywhere = stores_anywhere(spec)
    alone: Condition = odd and (layout.columns == 1 or not anywhere)
    if spec.form == "jagged_k":
        alone = total <= THIN_K * counts.groups
    turns = layout.plain & (counts.groups <= TURNS_GROUPS)
    turns_first = turns & (_sends(layout, counts) ^ True) & ((rows > MANY_ROWS) | (spec.form == "jagged_k") | anywhere)
    if spec.form == "jagged_k" and layout.sends:
        turns_first = turns & _turns_take_less(layout, counts)
    kinds = (turns_first, turns & (turns_first ^ True), turns ^ True)
    found += [(left & alone & kind, ladder) for kind, ladder in zip(kinds, TALL_ALONE, strict=True)]
    return found + [(left & (alone ^ True) & kind, ladder) for kind, ladder in zip(kinds, TALL, strict=True)]
