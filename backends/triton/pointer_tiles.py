"""Lists: the host knows every extent, so it lists the tiles, and no program has to look for its own.

A program then reads one row of a table (the group's row, and where the tile lies in it) and can start
to load: one trip to memory instead of two with a count in between. Groups with a long K come first,
so that the launch does not end on its longest tiles.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from multigemm.backends.triton.config import Config
from multigemm.planning.operands import TABLE, Operands, group_table
from multigemm.problem.spec import Order

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
    """multigemm.planning.tiles.place, for many tiles at once."""
    band = width * across
    first = local // band * width
    height = np.minimum(down - first, width)
    inside = local % band
    return first + inside % height, inside // height


def whole(tiles: npt.NDArray[np.int64], config: Config) -> bool:
    """Whether no listed tile ends before its block does, in any of the three extents."""
    extents, blocks = tiles[:, [TABLE.M, TABLE.N, TABLE.K]], (config.block_m, config.block_n, config.block_k)
    return not (extents % blocks).any()


def few_groups(ops: Operands, config: Config) -> tuple[list[tuple[int, ...]], int] | None:
    """What `few.few_kernel` takes of each group that has results, and the number of tiles; None where a tile is not
    whole, or where there are too many."""
    blocks, spec = (config.block_m, config.block_n, config.block_k), ops.spec
    products = [((a.shape[0], b.shape[1], a.shape[1]), (a, b, out))
                for a, b, out in zip(ops.a, ops.b, ops.out, strict=True) if out.numel()]  # fmt: skip
    if any(extent % block for extents, _ in products for extent, block in zip(extents, blocks, strict=True)):
        return None
    orders = (spec.a.order, spec.b.order, spec.out.order)
    groups: list[tuple[int, ...]] = []
    tiles = 0
    for (m, n, k), matrices in sorted(products, key=lambda product: -product[0][2]):
        down, across = m // config.block_m, n // config.block_n
        steps = 0 if spec.alpha == "zero" else k // config.block_k
        lines = [_line(matrix, order) for matrix, order in zip(matrices, orders, strict=True)]
        groups.append(
            (tiles, steps, down, across, *inverses(down, across, config.width), *(x for line in lines for x in line))
        )
        tiles += down * across
    return (groups, tiles) if tiles <= MOST_LISTED else None


def inverses(down: int, across: int, width: int) -> tuple[int, int]:
    """What `few.place_few` multiplies with, in place of dividing by a band's tiles and by the last band's height."""
    return -(-(2**31) // (width * across)), -(-(2**31) // (down % width or 1))


def _line(matrix: Tensor, order: Order) -> tuple[int, int]:
    """Where a matrix starts, and the distance of its lines, which are rows or columns as they lie."""
    return matrix.data_ptr(), matrix.stride(0 if order == "row" else 1)
