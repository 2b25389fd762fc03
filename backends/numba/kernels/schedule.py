"""The device schedulers: from a tile number to a group and a tile in it, without a walk over all groups.

`make_schedule` is that of the plain-core kernel, by blocks; `make_warp_schedule` that of the sm_80
kernel, by warps; that of the Hopper kernels is in `hopper_tiles`. Within a group, tiles go through
bands of `BAND` row tiles, columns next, so that neighbouring blocks share both operands in the L2 cache.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda import types

from multigemm.backends.numba.arguments import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.kernels.memory import caster, loader, storer, unforeseen, zero_16
from multigemm.backends.numba.kernels.runtime import device, synchronising
from multigemm.planning.operands import TABLE

BAND = 8
_load_i32, _load_i64 = loader("i32"), loader("i64")
T_M, T_N, T_K, T_COLUMNS = int(TABLE.M), int(TABLE.N), int(TABLE.K), int(TABLE.COLUMNS)


@device
def load_index(address, wide, position):
    """An int32 or int64 as int64."""
    value = 0
    if wide != 0:
        value = _load_i64(address, position)
    else:
        value = _load_i32(address, position)
    return value


@device
def clamp(value, low, high):
    return min(max(value, low), high)


@device
def jagged_total(p):
    """T: the extent that the offsets cut."""
    total = p.k
    if p.jagged == JAGGED_M:
        total = p.m
    elif p.jagged == JAGGED_N:
        total = p.n
    return total


@device
def start_of(p, g, total):
    """Where group g starts in the jagged extent; offsets that lie are clamped."""
    start = 0
    if g > 0 or p.head != 0:
        start = clamp(load_index(p.ends, p.ends_wide, g - 1), 0, total)
    return start


@device
def extent(p, g):
    """(m, n, k, start) of group g; start counts along the jagged direction."""
    m, n, k, start = p.m, p.n, p.k, p.k * 0
    if p.table != 0:
        row = g * T_COLUMNS
        m, n, k = _load_i64(p.table, row + T_M), _load_i64(p.table, row + T_N), _load_i64(p.table, row + T_K)
    elif p.jagged != 0:
        total = jagged_total(p)
        start = start_of(p, g, total)
        size = clamp(load_index(p.ends, p.ends_wide, g), start, total) - start
        if p.jagged == JAGGED_M:
            m = size
        elif p.jagged == JAGGED_N:
            n = size
        else:
            k = size
    elif p.valid != 0:
        m = clamp(load_index(p.valid, p.valid_wide, g), 0, p.m)
    return m, n, k, start


@device
def ceil_div(value, step):
    return (value + step - 1) // step


@device
def equal_groups(p):
    """Whether all groups have the same number of tiles, so that no scan is needed."""
    return p.table == 0 and p.valid == 0 and (p.jagged == 0 or p.jagged == JAGGED_K)


@cache
def make_schedule(bm, bn, threads):
    """(scan, locate, tile_in_group) for tiles of bm x bn elements of C and blocks of `threads`."""

    @device
    def count(p, g):
        m, n, _, _ = extent(p, g)
        return ceil_div(m, bm) * ceil_div(n, bn)

    @synchronising
    def scan(p, prefix, thread):
        """Fills prefix[0..threads] in shared memory; returns the number of all tiles."""
        if equal_groups(p):
            return p.groups * ceil_div(p.m, bm) * ceil_div(p.n, bn)
        run = ceil_div(p.groups, threads)
        total = p.groups * 0
        for g in range(thread * run, min(thread * run + run, p.groups)):
            total += count(p, g)
        prefix[thread + 1] = total
        if thread == 0:
            prefix[0] = 0
        cuda.syncthreads()
        distance = 1
        while distance < threads:
            before = total * 0
            if thread >= distance:
                before = prefix[thread + 1 - distance]
            cuda.syncthreads()
            total += before
            prefix[thread + 1] = total
            cuda.syncthreads()
            distance *= 2
        return prefix[threads]

    @device
    def locate(p, prefix, tile):
        """(group, number of the tile inside it)."""
        if equal_groups(p):
            each = ceil_div(p.m, bm) * ceil_div(p.n, bn)
            return tile // each, tile % each
        low, high = 0, threads
        while high - low > 1:
            middle = (low + high) // 2
            if prefix[middle] <= tile:
                low = middle
            else:
                high = middle
        run = ceil_div(p.groups, threads)
        g, rest = low * run, tile - prefix[low]
        here = count(p, g)
        while rest >= here:
            rest -= here
            g += 1
            here = count(p, g)
        return g, rest

    @device
    def tile_in_group(m, n, number):
        """(row tile, column tile): bands of BAND row tiles, row tiles fastest inside a band."""
        columns = ceil_div(n, bn)
        band = number // (BAND * columns)
        height = min(BAND, ceil_div(m, bm) - band * BAND)
        rest = number - band * BAND * columns
        return band * BAND + rest % height, rest // height

    return scan, locate, tile_in_group


@device
def owned_span(p, total):
    """(start of the first group, end of the last one) in the jagged extent."""
    head, tail = total, total
    if p.groups > 0:
        head = start_of(p, 0, total)
        last = start_of(p, p.groups - 1, total)
        tail = clamp(load_index(p.ends, p.ends_wide, p.groups - 1), last, total)
    return head, tail


@device
def unowned_part(p, number):
    """(address, rows, columns) of what lies before or behind all groups, or below a group's rows."""
    base, rows, columns = p.out, p.m, p.n
    if p.valid != 0:
        m, _, _, _ = extent(p, number)
        base += (number * p.out_group + m * p.out_row) * p.out_size
        rows -= m
    else:
        total = jagged_total(p)
        head, tail = owned_span(p, total)
        length, step = head, p.out_row if p.jagged == JAGGED_M else p.out_col
        if number > 0:
            length = total - tail
            base += tail * step * p.out_size
        if p.jagged == JAGGED_M:
            rows = length
        else:
            columns = length
    return base, rows, columns


@cache
def make_zero_unowned(lanes):
    """zero(p, lane, team, teams): writes 0 to the elements of out that no group owns, whatever their type.

    `lanes` threads are a team, which takes a line at a time, 16 bytes to each thread where that fits.
    """
    store_2, store_4, store_8 = storer("f16", "f32"), storer("f32", "f32"), storer("f64", "f32")
    zero = caster("f32")(0)

    @device
    def zero_line(at, columns, col_stride, size, lane):
        column = types.int64(lane)
        if col_stride == 1 and (at & 15) == 0:
            tail = columns & 7 if size == 2 else columns & 3 if size == 4 else columns & 1
            end, byte = at + (columns - tail) * size, at + lane * 16
            while byte < end:
                zero_16(byte)
                byte = unforeseen(byte + lanes * 16)
            column += columns - tail
        while column < columns:
            if size == 2:
                store_2(at, column * col_stride, zero)
            elif size == 4:
                store_4(at, column * col_stride, zero)
            else:
                store_8(at, column * col_stride, zero)
            column = unforeseen(column + lanes)

    @device
    def zero_unowned(p, lane, team, teams):
        parts, number = types.int64(0), types.int64(0)
        if p.valid != 0:
            parts = p.groups
        elif p.jagged == JAGGED_M or p.jagged == JAGGED_N:
            parts = types.int64(2)
        while number < parts:
            base, rows, columns = unowned_part(p, number)
            row = types.int64(team)
            while row < rows:
                zero_line(base + row * p.out_row * p.out_size, columns, p.out_col, p.out_size, lane)
                row = unforeseen(row + teams)
            number = unforeseen(number + 1)

    return zero_unowned


# One warp maps tile numbers to groups, ahead of the others.
#
# Each lane counts the tiles of a run of groups and a scan over the lanes tells where each run begins;
# a ballot then finds the run of a tile, and a second scan the group in it. Nothing is stored and no
# block-wide barrier is needed: 32 x 32 groups take two scans, more groups a loop of scans.
#
# A group of m rows is cut into pieces of equal height, at most `n_max` rows each and a multiple of 8,
# because the rows lie on the side of wgmma that comes in steps of 8 (and 8 rows of 2 bytes are what one
# copy takes where rows lie side by side: of single bytes it takes 16).

ALL = 0xFFFFFFFF
LANES = 32
ROUND = 8
int32, uint32 = types.int32, types.uint32
"""Everything here fits 32 bits, and is wrapped at each step: Numba widens sums to 64 bits, and one
64-bit division takes as long as the rest of a small tile's schedule."""


@cache
def make_running_sum(kind):
    """running_sum(value, lane) -> the sum of values of a type over this lane and those before it."""

    @synchronising
    def running_sum(value, lane):
        for step in range(5):
            other = cuda.shfl_up_sync(ALL, value, 1 << step)
            if lane >= (1 << step):
                value = kind(value + other)
        return value

    return running_sum


@cache
def make_run_of(runs):
    """run_of(p) -> groups that one of so many runs has."""

    @synchronising
    def run_of(p):
        return int32(uint32(uint32(p.groups) + uint32(runs - 1)) // uint32(runs))

    return run_of


@synchronising
def owner_of(low, high, number):
    """The lane whose [low, high) holds `number`, or -1."""
    mask = cuda.ballot_sync(ALL, low <= number and number < high)
    return int32(int32(cuda.ffs(mask)) - int32(1))


@cache
def make_pieces(n_max, columns, step=ROUND):
    """(count_of, piece) for pieces of at most n_max rows, a multiple of `step`, and tiles of `columns` columns."""

    @synchronising
    def count_of(m, n):
        """The tiles of m x n results."""
        down = uint32(uint32(m) + uint32(n_max - 1)) // uint32(n_max)
        across = uint32(uint32(n) + uint32(columns - 1)) // uint32(columns)
        return int32(down * across)

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

    return count_of, piece


@cache
def make_warp_schedule(n_max, columns, step=ROUND):
    """(scan, locate, piece) for pieces of at most n_max rows, a multiple of `step`, and tiles of `columns` columns."""
    count_of, piece = make_pieces(n_max, columns, step)
    run_of, running_sum = make_run_of(LANES), make_running_sum(int32)

    @synchronising
    def count(p, g):
        m, n, _, _ = extent(p, g)
        return count_of(m, n)

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
        high = running_sum(mine, lane)
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
            to = int32(before + running_sum(mine, lane))
            owner = owner_of(int32(to - mine), to, tile)
            if owner >= 0:
                first, end = cuda.shfl_sync(ALL, int32(to - mine), owner), cuda.shfl_sync(ALL, to, owner)
                g = int32(g + owner)
            else:
                before = cuda.shfl_sync(ALL, to, 31)
                g = int32(g + LANES)
        return g, first, end

    return scan, locate, piece
