"""The rules for the Hopper kernel over 16 bits: the height of tiles, clusters, warpgroups in turns."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from multigemm.backends.cupy.config import ALONE, MIDDLE, NARROW, SINGLE, SLIM, TURNS, TURNS_GROUPS, WIDE, Config
from multigemm.backends.cupy.rules import FEW_COLUMNS, Condition, Counts, Layout, height_of, rows_of, sends_at
from multigemm.backends.cupy.support import stores_anywhere

MANY_GRADIENTS, SHORT_GRADIENT_K, LOW_ROUNDS = 32, 256, 8
"""Groups of jagged k from which, and k per group and rounds of low tiles up to which low ones take less than tall ones:
0.77 to 0.84 of the time of the faster of ALONE and WIDE, with half of the groups idle 0.96 (64 to 900 groups, 40 to 101
k, results of 64 x 128 to 256 x 512, H200, 2026-11-25); 1.05 in 9 rounds of 192 rows, 1.00 in 15."""
SMALL_ROWS = 2048
"""Rows, and SMALL_COLUMNS, up to which a result has fewer tiles than the GPU has multiprocessors: low tiles, no
clusters."""
SMALL_COLUMNS = 1024
"""Columns: see SMALL_ROWS."""
ONE_ROUND = 1.5
"""Lowest tiles for each multiprocessor up to which they are taken. Tokens are rounded up to powers of two, by 1.5 on
average: so many counted tiles are one real round.

Time over that of tiles of 128 rows, H200, 2026-11-25: 0.77 to 0.95 in one round (seven problems; 1.02 for one of few
blocks of k), 0.96 to 1.14 in two (five; benchmarks/results/h200-low-tiles). Of 33 to 64 rows per group 0.94 to 1.00 for
up to 132 counted tiles (five), 1.14 for 136 of which uneven groups made two rounds.
"""
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


def _turns_take_less(layout: Layout, counts: Counts) -> Condition:
    """Whether tall tiles of jagged k that the copy engine stores are estimated to take less time in turns than shared.

    Pairs of multiprocessors take tiles of two blocks of columns each, of which low ones cost as much as full ones.
    """
    height = height_of(layout)
    pairs, processors = counts.groups * -(-layout.columns // 2), layout.processors // 2
    shared, turns = (
        min(height, config.rows) * (-(-pairs * -(-height // config.rows) // processors) + LAUNCH_ROUNDS)
        for config in (WIDE, TURNS)
    )
    return turns * (counts.mean + TURNS_ENDS) < shared * counts.mean


def hopper_rules(layout: Layout, counts: Counts) -> list[tuple[Condition, Ladder]]:
    """The rules for the Hopper kernel; each applies if none before it does."""
    spec, total, rows = layout.spec, counts.total, rows_of(layout, counts)
    found, left = list[tuple[Condition, Ladder]](), True
    jagged_k = spec.form == "jagged_k"
    masked = spec.form in ("batched", "masked")  # no group is larger than the others
    known = spec.form not in ("jagged_k", "per_group")  # a list's columns change from call to call
    odd = known and layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    height = height_of(layout) if jagged_k else rows
    lowest, low, highest = (
        -(-height // config.rows) * counts.groups * layout.columns for config in (SLIM, SINGLE, WIDE)
    )
    little = (total <= SMALL_ROWS) & ((spec.n or 0) <= SMALL_COLUMNS) & (not jagged_k)
    # As many multiprocessors as there can be load at once, and for few rows only loads count.
    idle = (lowest <= layout.processors) & ((rows > 32) | (2 * lowest <= layout.processors)) & (not jagged_k)
    many = jagged_k & (counts.groups >= MANY_GRADIENTS) & (counts.mean <= SHORT_GRADIENT_K)
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
    return [*found, *[(left & holds, ladder) for holds, ladder in _tall_rules(layout, counts, odd)]]


def _tall_rules(layout: Layout, counts: Counts, odd: bool) -> list[tuple[Condition, Ladder]]:
    """The rules for groups of many rows: no clusters for an `odd` number of blocks of columns; turns where the warps
    store, and where they are estimated to take less than the copy engine's stores of shared tiles."""
    spec, anywhere = layout.spec, stores_anywhere(layout.spec)
    alone: Condition = odd and (layout.columns == 1 or not anywhere)
    if spec.form == "jagged_k":
        alone = counts.total <= THIN_K * counts.groups
    turns = layout.plain & (counts.groups <= TURNS_GROUPS)
    stored = sends_at(layout, counts) ^ True
    turns_first = turns & stored & ((rows_of(layout, counts) > MANY_ROWS) | (spec.form == "jagged_k") | anywhere)
    if spec.form == "jagged_k" and layout.sends:
        turns_first = turns & _turns_take_less(layout, counts)
    kinds = (turns_first, turns & (turns_first ^ True), turns ^ True)
    found = [(alone & kind, ladder) for kind, ladder in zip(kinds, TALL_ALONE, strict=True)]
    return found + [((alone ^ True) & kind, ladder) for kind, ladder in zip(kinds, TALL, strict=True)]
