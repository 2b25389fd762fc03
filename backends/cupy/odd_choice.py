"""The rules for 16-bit operands that TMA cannot read ("odd" ones): the kernel shifts them, or copies are multiplied."""

from __future__ import annotations

from dataclasses import replace

from multigemm.backends.cupy.config import (
    BLOCK_K,
    COLUMNS,
    COPIED_SHAPES,
    GENERIC,
    GENERIC_64,
    SHIFT_A,
    SHIFT_A_MIDDLE,
    SHIFT_B,
    SHIFT_B_NARROW,
    SINGLE,
    SMALL_32,
    SMALL_DEEP,
    SMALL_STAGES,
    TURNS,
    WIDE,
    Config,
    shapes_of,
)
from multigemm.backends.cupy.hopper_choice import SMALL_ROWS, Ladder
from multigemm.backends.cupy.rules import (
    Condition,
    Counts,
    Layout,
    Rule,
    holds_somewhere,
    larger,
    most_tiles,
    rows_of,
    sends_at,
)
from multigemm.backends.cupy.small_choice import AT_ONCE, fits_small, generic_rules
from multigemm.backends.cupy.support import stores_anywhere
from multigemm.planning.tiles import typical_extent

WORTH_COPYING = 1 << 24
"""Products (rows x columns x k) from which a copy costs less than the generic kernel."""
BLOCKS_WORTH_COPYING = 7.5
"""Blocks of 64 k of tiles of 64, for each multiprocessor, from which the same holds: of groups with few tokens, whose
tiles are mostly empty. Time over that of the generic or small kernel, H200, 2026-11-25: 0.42 to 0.79 (five problems, m
or n jagged), 0.97 against `small` for 64 groups of a row, 500 columns and k = 101."""
SHIFTED_LOW_ROWS = 64
"""Rows per group up to which weights that are shifted want the lowest tiles; numbers of tokens are rounded up to powers
of two. H200, 2026-11-25, time over that of tall tiles: 0.86 to 0.995 with 11 to 39 rows (eight shapes), 0.98 to 1.66
with 73 to 186 (ten)."""
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
ODD_US = (7.0, 1.0)
"""Microseconds (H100) of a launch of the small kernel where lines begin anywhere, and of a block of k of one of a
processor's tiles of 32."""
GENERIC_US = (11.0, 4.0)
"""Microseconds of a launch of the generic kernel for such lines, and of a block of k of all of a multiprocessor's tiles
of 64: it waits for memory each time."""
CLEARLY = 0.8
"""The fraction of the other estimate below which an estimate is trusted."""


def _small_odd_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for lines that start at any address: the small kernel if it is clearly faster, with more blocks of k in
    flight for longer k, if all tiles still run at once."""
    if not layout.small or not layout.odd_lines:
        return []
    blocks, tiles = (
        larger(-(-typical_extent(layout.spec, "k", counts.mean) // BLOCK_K), 1),
        most_tiles(layout, counts, SMALL_32.tile),
    )
    small = ODD_US[0] + ODD_US[1] * blocks * larger(tiles / layout.processors, 1)
    wins = (tiles > 0) & (small <= CLEARLY * (GENERIC_US[0] + GENERIC_US[1] * blocks)) & fits_small(layout, counts)
    deep = (blocks > SMALL_STAGES) & (tiles <= AT_ONCE * layout.processors)
    return [(wins & deep, (SMALL_DEEP, SMALL_32)), (wins & (deep ^ True), (SMALL_32, SMALL_DEEP))]


COPIED_WIDE, COPIED_SINGLE, COPIED_TURNS = (replace(config, kernel="packed") for config in (WIDE, SINGLE, TURNS))


def odd_rules(layout: Layout, counts: Counts, ladders: list[tuple[Condition, Ladder]]) -> list[Rule]:
    """The rules for operands that TMA cannot read: the kernels that shift or copy them, or the generic one."""
    spec, total, rows = layout.spec, counts.total, rows_of(layout, counts)
    across = spec.m if spec.form == "jagged_n" else spec.n
    of_tiles = -(-typical_extent(spec, "k", counts.mean) // BLOCK_K) * most_tiles(layout, counts, GENERIC_64.tile)
    heavy = total * (across or 256) * (spec.k or 256) >= WORTH_COPYING
    heavy = heavy | (of_tiles >= BLOCKS_WORTH_COPYING * layout.processors)
    # Groups of many rows that are two rounds of tall tiles at most, with a short k.
    brief = (spec.form != "jagged_k" and layout.k <= BRIEF_K) & (counts.mean > BRIEF_ROWS)
    brief = brief & (-(-counts.mean // WIDE.rows) * counts.groups * layout.columns <= 2 * layout.processors)
    # So few rows that a copy of the weights takes longer than to shift them in every tile.
    columns = layout.columns * COLUMNS
    filled = (spec.n or columns) / columns if spec.out.order == "row" else 1.0
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
        *(generic_rules(layout, counts) if aligned else [(heavy, (GENERIC, GENERIC_64))]),
        *[(holds & light, some) for holds, some in _small_odd_rules(layout, counts)],
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
    many, stored = rows_of(layout, counts) > COPIED_FEW_ROWS, sends_at(layout, counts) ^ True
    for holds, ladder in ladders:
        if not holds_somewhere(holds):
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
