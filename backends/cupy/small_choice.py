"""The rules for the kernels for few tiles, and for the generic kernel."""

from __future__ import annotations

from collections.abc import Iterator

from multigemm.backends.cupy.config import (
    BLOCK_K,
    COLUMNS,
    GENERIC,
    GENERIC_32,
    GENERIC_64,
    GENERIC_PAIR,
    SMALL_32,
    SMALL_64,
    SMALL_LIST,
    shapes_of,
)
from multigemm.backends.cupy.rules import (
    Condition,
    Counts,
    Layout,
    Rule,
    larger,
    most_tiles,
    result_tiles,
    rows_of,
    takes,
)
from multigemm.backends.cupy.support import MAX_GROUPS, MAX_LISTED_GROUPS
from multigemm.planning.tiles import TileCost, longest_time, typical_extent

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
AT_ONCE = 3
"""Tiles of 64, or of 32 with eight blocks of k in flight, that a multiprocessor runs at once: it has the shared memory
for so many."""


def generic_rules(layout: Layout, counts: Counts) -> Iterator[Rule]:
    """The rules for the generic kernel: the tile that gives the busiest processor the least work."""
    tiles = shapes_of(layout.spec)
    alone = tiles[128].resident == 1
    here = [c for c in (GENERIC if alone else GENERIC_PAIR, GENERIC_64, GENERIC_32) if c.tile in tiles]
    rows, columns = (larger(typical_extent(layout.spec, direction, counts.mean), 1) for direction in ("m", "n"))
    costs = [TileCost(c.tile, c.tile, tiles[c.tile].cost) for c in here]
    times = [longest_time(cost, larger(counts.groups, 1), rows, columns, 1, layout.processors) for cost in costs]
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
    total, groups, rows = counts.total, counts.groups, rows_of(layout, counts)
    columns = max(layout.spec.n or layout.spec.largest, 1)
    low, high = (larger(-(-total // tile), groups) * -(-columns // COLUMNS) for tile in (128, 256))
    if layout.hopper:
        work = total * columns * layout.k
        good = (low <= LIST_TILES) | ((high <= LIST_HIGH_TILES) & (rows >= LIST_ROWS) & (work <= LIST_WORK))
    else:
        good = (low <= LIST_TILES) | ((layout.k <= LIST_COPIED_K) & (low <= LIST_COPIED_TILES))
    return [(good & (total > 0) & (rows >= 64) & (groups <= MAX_LISTED_GROUPS) & (groups > 0), (SMALL_LIST,))]


def fits_small(layout: Layout, counts: Counts) -> Condition:
    """Whether the small kernel runs these numbers."""
    return layout.small & (counts.groups > 0) & takes(SMALL_32, layout.spec, counts.total, counts.groups)


def few_tiles_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for few tiles, by the two kernels that have no schedule."""
    small, listed = _small_rules(layout, counts), _small_list_rules(layout, counts)
    return [*listed, *small] if layout.k > LIST_LEAST_K else [*small, *listed]


def _small_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for the small kernel: if one wave holds all tiles and k is short, with the larger tile for the longer
    k, or if a jagged k is one block, which is all start and end."""
    if not layout.small:
        return []
    spec, fits, rules = layout.spec, fits_small(layout, counts), list[Rule]()
    k, other = typical_extent(spec, "k", counts.mean), fits
    if not layout.odd_lines:
        low, high = (most_tiles(layout, counts, config.tile) for config in (SMALL_32, SMALL_64))
        short = k <= (FEW_K if spec.form == "jagged_k" else 512)
        first = fits & (low > 0) & (low <= ONE_WAVE) & short
        second = fits & (first ^ True) & (high > 0) & (high <= ONE_WAVE) & (k <= 256)
        rules += [(first, (SMALL_32, SMALL_64)), (second, (SMALL_64, SMALL_32))]
        other = fits & ((first | second) ^ True)
    if spec.form == "jagged_k" and layout.hopper:
        few = result_tiles(spec, counts, SMALL_64.tile)
        other = other & (k <= BLOCK_K) & (counts.groups <= MAX_GROUPS)
        rules.append((other & (few > 0) & (few <= AT_ONCE * layout.processors), (SMALL_64,)))
    return rules
