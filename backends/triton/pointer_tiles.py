"""Lists: the host knows every extent, so it lists the tiles, and no program has to look for its own.

A program then reads one row of a table (the group's row, and where the tile lies in it) and can start
to load: one trip to memory instead of two with a count in between. Groups with a long K come first,
so that the launch does not end on its longest tiles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from multigemm.backends.triton.config import Config
from multigemm.layouts import TABLE, Operands, group_table

TILE_M, TILE_N = 17, 18
"""Columns of the table that the groups' own rows leave free."""
MOST_LISTED = 2048
"""Tiles; above that, copying the list to the device would cost more than it saves."""


def tile_table(ops: Operands, config: Config) -> npt.NDArray[np.int64] | None:
    """[tiles, TABLE.COLUMNS]: a row per tile of a list's products; None where they are too many."""
    groups = group_table(ops)
    down = -(-groups[:, TABLE.M] // config.block_m)
    across = -(-groups[:, TABLE.N] // config.block_n)
    total = int((down * across).sum())
    if total > MOST_LISTED:
        return None
    order = np.argsort(-groups[:, TABLE.K], kind="stable")
    counts = (down * across)[order]
    group = np.repeat(order, counts)
    local = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
    rows = groups[group]
    rows[:, TILE_M], rows[:, TILE_N] = _places(local, down[group], across[group], config.width)
    return rows


def _places(
    local: npt.NDArray[np.int64], down: npt.NDArray[np.int64], across: npt.NDArray[np.int64], width: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """multigemm.schedule.place, for many tiles at once."""
    band = width * across
    first = local // band * width
    height = np.minimum(down - first, width)
    inside = local % band
    return first + inside % height, inside // height


def whole(tiles: npt.NDArray[np.int64], config: Config) -> bool:
    """Whether no listed tile ends before its block does, in any of the three extents."""
    extents, blocks = tiles[:, [TABLE.M, TABLE.N, TABLE.K]], (config.block_m, config.block_n, config.block_k)
    return not (extents % blocks).any()
