"""The device scheduler of the Hopper kernel: one warp maps tile numbers to groups, ahead of the others.

Each lane counts the tiles of a run of groups and a scan over the lanes tells where each run begins;
a ballot then finds the run of a tile, and a second scan the group in it. Nothing is stored and no
block-wide barrier is needed: 32 x 32 groups take two scans, more groups a loop of scans.

A group of m rows is cut into pieces of equal height, at most `n_max` rows each and a multiple of 8,
because the rows lie on the side of wgmma that comes in steps of 8 (and 8 rows of 2 bytes are what one
copy takes where rows lie side by side: of single bytes it takes 16).
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
int32, uint32 = types.int32, types.uint32
"""Everything here fits 32 bits, and is wrapped at each step: Numba widens sums to 64 bits, and one
64-bit division takes as long as the rest of a small tile's schedule."""


@synchronising
def inclusive_scan(value, lane):
    """The sum of `value` over this lane and those before it."""
    for step in range(5):
        other = cuda.shfl_up_sync(ALL, value, 1 << step)
        if lane >= (1 << step):
            value = int32(value + other)
    return value


@synchronising
def owner_of(low, high, number):
    """The lane whose [low, high) holds `number`, or -1."""
    mask = cuda.ballot_sync(ALL, low <= number and number < high)
    return int32(int32(cuda.ffs(mask)) - int32(1))


@cache
def make_warp_schedule(n_max, columns, step=ROUND):
    """(scan, locate, piece) for pieces of at most n_max rows, a multiple of `step`, and tiles of `columns` columns."""

    @synchronising
    def count_of(m, n):
        down = uint32(uint32(m) + uint32(n_max - 1)) // uint32(n_max)
        across = uint32(uint32(n) + uint32(columns - 1)) // uint32(columns)
        return int32(down * across)

    @synchronising
    def count(p, g):
        m, n, _, _ = extent(p, g)
        return count_of(m, n)

    @synchronising
    def run_of(p):
        """Groups that one lane counts."""
        return int32(uint32(uint32(p.groups) + uint32(LANES - 1)) // uint32(LANES))

    @synchronising
    def scan(p, lane):
        """(tiles before this lane's run, tiles up to its end, all tiles)."""
        if equal_groups(p):
            total = int32(int32(p.groups) * count_of(p.m, p.n))
            return int32(0), total, total
        run = run_of(p)
        first = int32(lane * run)
        last = min(int32(first + run), int32(p.groups))
        mine = int32(0)
        for g in range(first, last):
            mine = int32(mine + count(p, g))
        high = inclusive_scan(mine, lane)
        return int32(high - mine), high, cuda.shfl_sync(ALL, high, 31)

    @synchronising
    def locate(p, low, high, lane, tile):
        """(group, its first tile, its last tile + 1); `low`, `high` come from `scan`."""
        if equal_groups(p):
            each = count_of(p.m, p.n)
            g = int32(uint32(tile) // uint32(each))
            return g, int32(g * each), int32(g * each + each)
        run = run_of(p)
        owner = owner_of(low, high, tile)
        g = int32(owner * run)
        before = cuda.shfl_sync(ALL, low, owner)
        if run == 1:
            return g, before, cuda.shfl_sync(ALL, high, owner)
        last = min(int32(g + run), int32(p.groups))
        owner = int32(-1)
        first, end = before, before
        while owner < 0:
            mine = int32(0)
            if g + lane < last:
                mine = count(p, int32(g + lane))
            to = int32(before + inclusive_scan(mine, lane))
            owner = owner_of(int32(to - mine), to, tile)
            if owner >= 0:
                first, end = cuda.shfl_sync(ALL, int32(to - mine), owner), cuda.shfl_sync(ALL, to, owner)
                g = int32(g + owner)
            else:
                before = cuda.shfl_sync(ALL, to, 31)
                g = int32(g + LANES)
        return g, first, end

    @synchronising
    def piece(m, n, number):
        """(first row, rows, first column) of tile `number` of a group: rows fastest, in bands."""
        m, number = int32(m), int32(number)
        if m <= n_max:
            return int32(0), m, int32(number * columns)
        pieces = uint32(uint32(m) + uint32(n_max - 1)) // uint32(n_max)
        even = uint32(uint32(m) + uint32(pieces) - uint32(1)) // uint32(pieces)
        height = int32(uint32(uint32(even) + uint32(step - 1)) // uint32(step) * uint32(step))
        across = uint32(uint32(n) + uint32(columns - 1)) // uint32(columns)
        band = int32(0)
        if pieces > BAND:
            band = int32(uint32(number) // uint32(uint32(BAND) * uint32(across)))
        inside = min(int32(BAND), int32(int32(pieces) - band * BAND))
        rest = int32(number - band * BAND * int32(across))
        column = int32(uint32(rest) // uint32(inside))
        first = int32((band * BAND + rest - column * inside) * height)
        return first, min(height, int32(m - first)), int32(column * columns)

    return scan, locate, piece
