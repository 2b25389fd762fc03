"""The model of the persistent kernels' walk over tiles: tile index -> (group, tile_m, tile_n), each tile exactly once.

Device code walks tiles that only the device can count, because group sizes stay there. This model is the same
arithmetic in NumPy, so that a property test can show what no GPU test can: for every size list and every number of
programs the walk visits each tile once and only once. Another test holds the triton backend's scheduler to it, tile by
tile.

Equations, with tm[g], tn[g] the tiles of group g along m and n, P programs and a raster width w:
  prefix[g] = sum over h <= g of tm[h] * tn[h]
  program p takes the tiles p, p + P, p + 2P, ... below prefix[G-1]
  group(t)  = number of g with prefix[g] <= t        (empty groups drop out by themselves)
  inside a group, bands of w tile rows: the tiles of a band go down its rows first, then across, so
  that w neighbouring programs share one column of B while the w rows of A stay in L2.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multigemm.planning.tiles import tiles_of


class Tile(NamedTuple):
    """One tile of one group's output, counted in tiles."""

    group: int
    m: int
    n: int


def place(local: int, tiles_m: int, tiles_n: int, width: int) -> tuple[int, int]:
    """The (tile_m, tile_n) of a group's `local`-th tile, in bands of `width` tile rows."""
    band = width * tiles_n
    first = local // band * width
    height = min(tiles_m - first, width)
    inside = local % band
    return first + inside % height, inside // height


@dataclass(frozen=True)
class TileWalk:
    """The walk over all groups' tiles by `programs` programs."""

    tiles_m: npt.NDArray[np.int64]
    tiles_n: npt.NDArray[np.int64]
    programs: int
    width: int = 8

    @classmethod
    def of(
        cls, sizes: Sequence[tuple[int, int]], block_m: int, block_n: int, programs: int, width: int = 8
    ) -> TileWalk:
        """The walk for groups of the given (m, n)."""
        rows = np.array([tiles_of(m, block_m) for m, _ in sizes], dtype=np.int64)
        columns = np.array([tiles_of(n, block_n) for _, n in sizes], dtype=np.int64)
        return cls(rows, columns, max(1, programs), max(1, width))

    @property
    def prefix(self) -> npt.NDArray[np.int64]:
        return np.cumsum(self.tiles_m * self.tiles_n, dtype=np.int64)

    @property
    def total(self) -> int:
        return int(self.prefix[-1]) if len(self.tiles_m) else 0

    def locate(self, tile: int) -> Tile:
        """Where a tile index lies; the index must be below `total`."""
        prefix = self.prefix
        group = int(np.count_nonzero(prefix <= tile))
        local = tile - (int(prefix[group - 1]) if group else 0)
        return Tile(group, *place(local, int(self.tiles_m[group]), int(self.tiles_n[group]), self.width))

    def program(self, index: int) -> Iterator[Tile]:
        """The tiles that one program computes, in its order."""
        return (self.locate(tile) for tile in range(index, self.total, self.programs))

    def loads(self) -> npt.NDArray[np.int64]:
        """Tiles per program: a static walk is balanced to within one tile."""
        return np.array([len(range(p, self.total, self.programs)) for p in range(self.programs)], dtype=np.int64)


def heights(extent: int, granule: int, most: int) -> tuple[int, int]:
    """Splits `extent` rows into tiles of equal numbers of granules: (tiles, granules per tile).

    Tiles hold at most `most` granules. Even tiles finish together: 5 granules under a limit of 4
    are 3 + 2 rather than 4 + 1, which keeps the reuse of the other operand alike in both.
    """
    granules = tiles_of(extent, granule)
    tiles = tiles_of(granules, most)
    return tiles, tiles_of(granules, max(1, tiles))
