"""The order in which persistent kernels walk over the tiles of a group.

Bands of `width` tile rows: the tiles of a band go down its rows first, then across, so that `width` neighbouring
programs share one column of B while the rows of A stay in L2.
"""

from __future__ import annotations


def place(local: int, tiles_m: int, tiles_n: int, width: int) -> tuple[int, int]:
    """The (tile_m, tile_n) of a group's `local`-th tile."""
    band = width * tiles_n
    first = local // band * width
    height = min(tiles_m - first, width)
    inside = local % band
    return first + inside % height, inside // height
