"""Which config fits a problem best without measuring: rules in order of preference, of which the first that holds wins.

The numbers of tokens and groups change from call to call, and compiling a kernel when they first ask for it would stall
that call for seconds. So the rules take them as integers, for one problem, or as arrays, for all sizes that may come:
`first_choices` gives every config that any of them would pick, which the first call of a layout compiles together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch

from multigemm.backends.cupy import shapes
from multigemm.backends.cupy.config import (
    ALONE,
    BLOCK_K,
    COLUMNS,
    CUBE,
    CUBE64,
    DEEP,
    DIRECT,
    DIRECT_MIDDLE,
    DIRECT_NARROW,
    MIDDLE,
    NARROW,
    PAIR,
    PORTABLE,
    SINGLE,
    SLIM,
    SMALL,
    STAGES,
    TINY,
    TURNS,
    TURNS_GROUPS,
    WAVE,
    WAVES,
    WIDE,
    Config,
    capability_of,
    is_valid,
)
from multigemm.backends.cupy.specs import (
    CUBE_ROWS,
    LIST,
    MAX_GROUPS,
    MAX_ROWS,
    has_odd_lines,
    hopper_reasons,
    is_swapped,
    plain_kind,
    sends,
    small_reasons,
    wave_reasons,
)
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

ONE_WAVE = 160
"""Tiles of the small kernel that run at once, with room for the rounding of totals to powers of two."""
RESIDENT, ROUNDS, FULL_ROWS, WAVE_WORK = 264, 528, 192, 1 << 34
"""Tiles of 128 x 128 up to which the wave kernel is faster; of 256 x 128, rows and products, if nothing is copied."""
FEW_K = 1024
"""k per group up to which results of jagged k that one round of low tiles covers are not cut into tall ones."""
SMALL_ROWS, SMALL_COLUMNS = 2048, 1024
"""Below these a result has fewer tiles than the GPU has processors: small tiles, no clusters."""
WORTH_COPYING = 1 << 24
"""Products (rows x columns x k) from which a copy costs less than the portable kernel."""
SPARSE_ROWS, FEW_ROWS = 32, 1024
"""Rows per group up to which weights that are shifted as they are read want low tiles and many stages; up to which they
are shifted at all: more rows repay a copy of the weights."""
SHORT_K, BRIEF_K = 768, 128
"""Up to here a list's odd operands are copied for the wave kernel, whatever the tiles; small tiles beat a wave."""
FEW_COLUMNS, LONG_K = 15, 2048
"""Odd numbers of blocks of columns up to which clusters of two would waste too much; k from which tiles of few rows are
as high as for many: then a large group's weights are read once."""
THIN_K = 128
"""k per group of jagged k up to which storing is most of the work: clusters would share rows that cost nothing."""
MANY_ROWS = 448
"""Rows per group from which warpgroups take turns: lower tiles read weights more often, but hide their stores."""
AT_ONCE = 3 * PROCESSORS
"""Tiles of 64, or of 32 with eight blocks of k in flight, that run at once, for which there is shared memory."""
ODD_US, PORTABLE_US = (7.0, 1.0), (11.0, 4.0)
"""Microseconds (H100) of a launch and of a block of k where lines begin anywhere: a block of one of a processor's tiles
of 32 in the small kernel; of all its tiles of 64 in the portable one, which waits for memory each time."""
CLEARLY = 0.8
"""How far below the other one a forecast must be to be believed."""
HALVES = (torch.float16, torch.bfloat16)
TOTALS = (0, *(1 << i for i in range(21)))
GROUPS = (*(1 << i for i in range(10)), MAX_GROUPS)
"""Numbers of tokens and groups for which kernels are compiled beforehand."""

Number = Any
"""An integer, or an array of the same quantity for many problems."""
Condition = Any
"""Whether something holds: a bool, or an array of them."""
Rule = tuple[Condition, tuple[Config, ...]]
"""Where it holds, these configs, the best one first."""


class Layout(NamedTuple):
    """What is known of a problem apart from its numbers of tokens and groups, which `spec` has not."""

    spec: ProblemSpec
    small: bool
    wave: bool
    hopper: bool
    odd_lines: bool
    sends: bool
    plain: bool
    columns: int
    """Blocks of columns that a result has."""
    k: int
    """0 where it differs by group and none is known."""


class Counts(NamedTuple):
    """Numbers of tokens and groups, and tokens per group."""

    total: Number
    groups: Number
    mean: Number


@lru_cache(maxsize=1024)
def _layout(spec: ProblemSpec) -> Layout:
    """Of a spec with neither tokens nor groups."""
    columns = max(-(-((spec.m if is_swapped(spec) else spec.n) or spec.largest) // COLUMNS), 1)
    return Layout(
        spec, not small_reasons(spec), not wave_reasons(spec), not hopper_reasons(spec), has_odd_lines(spec),
        sends(spec), plain_kind(spec) > 0, columns, spec.k or spec.largest,
    )  # fmt: skip


def _without_counts(spec: ProblemSpec) -> ProblemSpec:
    return replace(spec, total=0, groups=1)


def _order(spec: ProblemSpec) -> list[Config]:
    """All configs, the best guess first."""
    counts = Counts(spec.total, spec.groups, spec.total // max(spec.groups, 1))
    rules = _rules(_layout(_without_counts(spec)), counts)
    return list(dict.fromkeys(config for holds, some in rules if holds for config in some))


def heuristic(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> Config:
    """The best guess without measuring: the first valid config of `_order`."""
    return next(c for c in _order(spec) if is_valid(c, spec, capability))


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Every shipped config that is valid for `spec`, the best guess first."""
    capability = capability_of(device)
    return [c for c in _order(spec) if is_valid(c, spec, capability)]


def first_choices(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    """The heuristic's choices for the spec's layouts and extents, whatever the number of tokens and groups."""
    return _first_choices(replace(spec, total=0, groups=1, largest=0), capability)


@lru_cache(maxsize=1024)
def _first_choices(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    total, groups = (x.ravel() for x in np.meshgrid(np.array(TOTALS, float), np.array(GROUPS, float)))
    found, left, judged = dict[Config, None](), np.ones(total.size, bool), dict[Config, bool]()
    for holds, some in _rules(_layout(spec), Counts(total, groups, total // groups)):
        for config in some:
            if config not in judged:
                judged[config] = is_valid(config, spec, capability)
            taken = left & holds & judged[config] & _takes(config, spec, total, groups)
            if taken.any():
                found[config] = None
                left &= ~taken
        if not left.any():
            break
    return tuple(found)


def _takes(config: Config, spec: ProblemSpec, total: Number, groups: Number) -> Condition:
    """Whether a config that is valid for a layout is so for these numbers, as `is_valid` says."""
    if config.kernel == "portable":
        return True
    if config.kernel == "small":
        return (total <= CUBE_ROWS) & (groups <= (LIST if spec.form == "per_group" else CUBE_ROWS))
    return groups <= (LIST if config.kernel == "wave" else min(config.groups_at_most, MAX_GROUPS))


def _rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """In order of preference: pieces as high as the average group; copies only where they pay."""
    if layout.spec.compute not in HALVES:
        yield from _portable_rules(layout, counts)
        return
    small, wave = _few_tiles_rules(layout, counts), _wave_rules(layout, counts)
    yield from [*wave, *small] if layout.k > BRIEF_K else [*small, *wave]
    yield from _larger_rules(layout, counts)
    yield True, (DIRECT, DIRECT_MIDDLE, DIRECT_NARROW, CUBE, CUBE64, DEEP, *WAVES)


def _not(holds: Condition) -> Condition:
    return holds ^ True


def _most(x: Number, y: Number) -> Number:
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


def _ceil(x: Number, unit: int) -> Number:
    return -(-x // unit)


def _usual(layout: Layout, counts: Counts, direction: str) -> Number:
    """As ProblemSpec.usual: an extent of an ordinary group."""
    extent = getattr(layout.spec, direction)
    if extent is not None:
        return extent
    return counts.mean if direction == layout.spec.jagged else layout.spec.largest


def _rows(layout: Layout, counts: Counts) -> Number:
    """Rows per group: a whole tile where the jagged direction is another."""
    return counts.mean if layout.spec.form != "jagged_k" else WIDE.rows


def _portable_rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """What runs nowhere else: the tile with which the busiest processor has least to do."""
    tiles = shapes.shapes_of(layout.spec)
    alone = tiles[128].resident == 1
    here = [c for c in (PORTABLE if alone else PAIR, SMALL, TINY) if c.tile in tiles]
    times = [_longest_time(layout, counts, c.tile) * tiles[c.tile].cost for c in here]
    # How many tiles are faster than each, those before it where they are equal.
    ranks = [
        sum((other < time) | ((other == time) & (j < i)) for j, other in enumerate(times) if j != i)
        for i, time in enumerate(times)
    ]
    for place in range(len(here)):
        for config, rank in zip(here, ranks, strict=True):
            yield rank == place, (config,)
    yield True, (PAIR if alone else PORTABLE,)


def _longest_time(layout: Layout, counts: Counts, tile: int) -> Number:
    """As ProblemSpec.busiest: elements that the processor with most tiles makes."""
    rows, columns = (_most(_usual(layout, counts, direction), 1) for direction in ("m", "n"))
    tiles = _most(counts.groups, 1) * _ceil(rows, tile) * _ceil(columns, tile)
    return _ceil(tiles, PROCESSORS) * tile * tile


def _wave_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """A block for each tile, where few rounds of blocks take all of them; lists may hide larger columns than rows."""
    if not layout.wave:
        return []
    total, groups, rows = counts.total, counts.groups, _rows(layout, counts)
    columns = max(layout.spec.n or layout.spec.largest, 1)
    low, high = (_most(_ceil(total, tile), groups) * _ceil(columns, COLUMNS) for tile in (128, 256))
    if layout.hopper:
        work = total * columns * layout.k
        good = (low <= RESIDENT) | ((high <= ROUNDS) & (rows >= FULL_ROWS) & (work <= WAVE_WORK))
    else:
        good = (low <= RESIDENT) | (layout.k <= SHORT_K)
    return [(good & (total > 0) & (rows >= 64) & (groups <= LIST) & (groups > 0), (WAVE,))]


def _most_tiles(layout: Layout, counts: Counts, side: int) -> Number:
    """As many as any sizes could need; 0 where there are none, or some extent of a list differs."""
    spec = layout.spec
    if spec.form != "jagged_k" and spec.k is None:
        return 0 * counts.total
    rows = counts.total if spec.form not in ("jagged_n", "jagged_k") else (spec.m or 0) * counts.groups
    columns = counts.total if spec.form == "jagged_n" else spec.n or 0
    return (rows // side + counts.groups) * _ceil(columns, side) * (rows > 0)


def _fits_small(layout: Layout, counts: Counts) -> Condition:
    return layout.small & (counts.groups > 0) & _takes(CUBE, layout.spec, counts.total, counts.groups)


def _few_tiles_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The small kernel where one wave of its tiles is enough and k is short, the larger tile for the longer k.

    Else for jagged k that one round of low tiles covers: the small kernel for one block of k, which is all start and
    end, or the Hopper kernel's low tiles, which leave fewer processors idle than its tall ones and end sooner.
    """
    if not layout.small:
        return []
    spec, fits, k, rules = layout.spec, _fits_small(layout, counts), _usual(layout, counts, "k"), list[Rule]()
    other = fits
    if not layout.odd_lines:
        low, high = (_most_tiles(layout, counts, config.tile) for config in (CUBE, CUBE64))
        short = k <= (FEW_K if spec.form == "jagged_k" else 512)
        first = fits & (low > 0) & (low <= ONE_WAVE) & short
        second = fits & _not(first) & (high > 0) & (high <= ONE_WAVE) & (k <= 256)
        rules += [(first, (CUBE, CUBE64)), (second, (CUBE64, CUBE))]
        other = fits & _not(first | second)
    if spec.form == "jagged_k" and layout.hopper:
        few, one = (_result_tiles(spec, counts, side) for side in (CUBE64.tile, SINGLE.rows))
        other = other & (k <= FEW_K) & (counts.groups <= MAX_GROUPS)
        rules.append((other & (k <= BLOCK_K) & (few > 0) & (few <= AT_ONCE), (CUBE64,)))
        rules.append((other & (one > 0) & (one <= PROCESSORS), (SINGLE,)))
    return rules


def _result_tiles(spec: ProblemSpec, counts: Counts, side: int) -> Number:
    """Of jagged k, whose results are all of one size."""
    return counts.groups * _ceil(spec.m or 0, side) * _ceil(spec.n or 0, side)


def _odd_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The small kernel where lines begin anywhere and it is clearly faster; more blocks of k in flight where there are
    more, if all tiles still run at once."""
    if not layout.small or not layout.odd_lines:
        return []
    blocks, tiles = _most(_ceil(_usual(layout, counts, "k"), BLOCK_K), 1), _most_tiles(layout, counts, CUBE.tile)
    small = ODD_US[0] + ODD_US[1] * blocks * _most(tiles / PROCESSORS, 1)
    wins = (tiles > 0) & (small <= CLEARLY * (PORTABLE_US[0] + PORTABLE_US[1] * blocks)) & _fits_small(layout, counts)
    deep = (blocks > STAGES) & (tiles <= AT_ONCE)
    return [(wins & deep, (DEEP, CUBE)), (wins & _not(deep), (CUBE, DEEP))]


def _larger_rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """The Hopper kernel; where TMA cannot read the operands, those that shift or copy them, or the portable one."""
    spec, total, rows = layout.spec, counts.total, _rows(layout, counts)
    usual = dict[Config, Condition]()
    for holds, fast in _hopper_rules(layout, counts):
        yield holds, fast
        plain = next(c for c in fast if not c.pingpong)
        for config, part in ((fast[0], holds & (rows > FEW_ROWS)), (plain, holds & (rows <= FEW_ROWS))):
            usual[config] = usual[config] | part if config in usual else part
    heavy, few = total * (spec.n or 256) * (spec.k or 256) >= WORTH_COPYING, counts.mean <= FEW_ROWS
    shifted = [(heavy & (rows <= SPARSE_ROWS), (DIRECT_MIDDLE,)), (heavy & (rows > SPARSE_ROWS), (DIRECT,))]
    copied = list(_copied(layout, counts, usual))
    yield from ((holds & few, some) for holds, some in shifted)
    yield from ((holds & heavy, (best,)) for holds, best, _ in copied)
    yield from ((holds & _not(few), some) for holds, some in shifted)
    yield from ((holds & heavy, (other,)) for holds, _, other in copied)
    yield heavy, (PORTABLE, SMALL)
    light = _not(heavy)
    yield from ((holds & light, some) for holds, some in _odd_rules(layout, counts))
    yield light & (total <= SMALL_ROWS), (SMALL, PORTABLE)
    yield light & (total > SMALL_ROWS), (PORTABLE, SMALL)
    yield from ((holds & light, (best,)) for holds, best, _ in copied)


def _copied(
    layout: Layout, counts: Counts, usual: dict[Config, Condition]
) -> Iterator[tuple[Condition, Config, Config]]:
    """Where copies are multiplied by which configs, the best and another one."""
    for config, holds in usual.items():
        other = replace(config, kernel="packed")
        if config not in (ALONE, TURNS):
            yield holds, other, other
            continue
        # Odd results of many rows: high tiles end least often.
        tall = (_rows(layout, counts) > FEW_ROWS) & _not(_sends(layout, counts))
        yield holds & tall, replace(WIDE, kernel="packed"), other
        yield holds & _not(tall), other, other


def _sends(layout: Layout, counts: Counts) -> Condition:
    """As specs.sends."""
    return layout.sends & ((counts.total <= MAX_ROWS) | (layout.spec.form not in ("jagged_m", "jagged_n")))


def _hopper_rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """The Hopper kernel's configs: each rule where none before it holds."""
    spec, total, rows, left = layout.spec, counts.total, _rows(layout, counts), True
    pieces = _ceil(rows, WIDE.rows) * counts.groups if spec.form != "jagged_k" else PROCESSORS + 1
    little = (total <= SMALL_ROWS) & ((spec.n or 0) <= SMALL_COLUMNS) & (spec.form != "jagged_k")
    lower = (total > 1024) | (spec.form == "per_group")
    for holds, configs in (
        (little & lower, (SINGLE, SLIM, WIDE)),
        (little, (SLIM, SINGLE, WIDE)),
        ((rows > 64) & (pieces * layout.columns <= PROCESSORS), (SINGLE, SLIM, WIDE)),
        (rows <= 32, (SINGLE, NARROW, MIDDLE, WIDE)),
        ((rows <= 64) & (layout.k < LONG_K), (MIDDLE, WIDE, NARROW)),
    ):
        yield left & holds, configs
        left = left & _not(holds)
    yield from ((left & holds, configs) for holds, configs in _tall_rules(layout, counts))


def _tall_rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """Groups of many rows: no clusters for an odd number of blocks of columns, turns where the warps store."""
    spec, total, groups = layout.spec, counts.total, counts.groups
    known = spec.form not in ("jagged_k", "per_group")  # a list's columns change from call to call
    single: Condition = known and layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    if spec.form == "jagged_k":
        single = total <= THIN_K * groups
    turns = layout.plain & (groups <= TURNS_GROUPS)
    early = turns & _not(_sends(layout, counts)) & ((_rows(layout, counts) > MANY_ROWS) | (spec.form == "jagged_k"))
    for alone in (True, False):
        at = single if alone else _not(single)
        first = (ALONE,) if alone else ()
        for holds, configs in (
            (early, (*first, TURNS, WIDE, ALONE, MIDDLE, NARROW)),
            (turns & _not(early), (*first, WIDE, TURNS, ALONE, MIDDLE, NARROW)),
            (_not(turns), (*first, WIDE, ALONE, MIDDLE, NARROW)),
        ):
            yield at & holds, tuple(dict.fromkeys(configs))
