"""The device scheduler of the Hopper kernel: one warp maps tile numbers to groups, ahead of the others.

Each lane counts the tiles of a run of groups and a scan over the lanes tells where each run begins;
a ballot then finds the run of a tile, and a second scan the group in it. Nothing is stored and no
block-wide barrier is needed: 32 x 32 groups take two scans, more groups a loop of scans.

A group of m rows is cut into pieces of equal height, at most `n_max` rows each and a multiple of 8,
because the rows lie on the side of wgmma that comes in steps of 8.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda import types

from multigemm.backends.numba.runtime import synchronising
from multigemm.backends.numba.schedule import BAND, equal_groups, extent

ALL = 0xFFFFFFFF
LANES = 32
ROUND = 8
int32 = types.int32


@synchronising
def inclusive_scan(value, lane):
    """The sum of `value` over this lane and those before it."""
    for step in range(5):
        other = cuda.shfl_up_sync(ALL, value, 1 << step)
        if lane >= (1 << step):
            value += other
    return value


@synchronising
def owner_of(low, high, number):
    """The lane whose [low, high) holds `number`, or -1."""
    mask = cuda.ballot_sync(ALL, low <= number and number < high)
    return int32(cuda.ffs(mask)) - int32(1)


@cache
def make_warp_schedule(n_max, columns):
    """(scan, locate, piece) for pieces of at most n_max rows and tiles of `columns` columns."""

    @synchronising
    def count_of(m, n):
        return ((int32(m) + int32(n_max - 1)) // int32(n_max)) * ((int32(n) + int32(columns - 1)) // int32(columns))

    @synchronising
    def count(p, g):
        m, n, _, _ = extent(p, g)
        return count_of(m, n)

    @synchronising
    def scan(p, lane):
        """(tiles before this lane's run, tiles up to its end, all tiles)."""
        if equal_groups(p):
            total = int32(p.groups) * count_of(p.m, p.n)
            return int32(0), total, total
        run = (int32(p.groups) + int32(LANES - 1)) // int32(LANES)
        mine = int32(0)
        for g in range(lane * run, min(lane * run + run, int32(p.groups))):
            mine += count(p, g)
        high = inclusive_scan(mine, lane)
        return high - mine, high, cuda.shfl_sync(ALL, high, 31)

    @synchronising
    def locate(p, low, high, lane, tile):
        """(group, its first tile, its last tile + 1); `low`, `high` come from `scan`."""
        if equal_groups(p):
            each = count_of(p.m, p.n)
            g = tile // each
            return g, g * each, g * each + each
        run = (int32(p.groups) + int32(LANES - 1)) // int32(LANES)
        owner = owner_of(low, high, tile)
        g = owner * run
        before = cuda.shfl_sync(ALL, low, owner)
        if run == 1:
            return g, before, cuda.shfl_sync(ALL, high, owner)
        last = min(g + run, int32(p.groups))
        owner = int32(-1)
        first, end = before, before
        while owner < 0:
            mine = int32(0)
            if g + lane < last:
                mine = count(p, g + lane)
            to = before + inclusive_scan(mine, lane)
            owner = owner_of(to - mine, to, tile)
            if owner >= 0:
                first, end = cuda.shfl_sync(ALL, to - mine, owner), cuda.shfl_sync(ALL, to, owner)
                g += owner
            else:
                before = cuda.shfl_sync(ALL, to, 31)
                g += int32(LANES)
        return g, first, end

    @synchronising
    def piece(m, n, number):
        """(first row, rows, first column) of tile `number` of a group: rows fastest, in bands."""
        pieces = (int32(m) + int32(n_max - 1)) // int32(n_max)
        height = (((int32(m) + pieces - 1) // pieces + int32(ROUND - 1)) // int32(ROUND)) * int32(ROUND)
        across = (int32(n) + int32(columns - 1)) // int32(columns)
        band = number // (int32(BAND) * across)
        inside = min(int32(BAND), pieces - band * int32(BAND))
        rest = number - band * int32(BAND) * across
        first = (band * int32(BAND) + rest % inside) * height
        return first, min(height, int32(m) - first), (rest // inside) * int32(columns)

    return scan, locate, piece
