# mypy: ignore-errors
"""The device scheduler that the kernels share: tile index -> group, from sizes that stay on the device.

`multigemm.planning.tiles` is the host model of the same walk. No program walks all groups one by one: up
to CHUNK groups are counted at once by a vector prefix sum; beyond that a small kernel writes the
prefix sums first, and each lookup is two vector steps (CHUNK pivots, then the groups between two).
With CHUNK = 32 every warp counts for itself, without a word through shared memory.
"""

import triton
import triton.language as tl

FAR = tl.constexpr(2147483647)

# of the table of a list, as in `multigemm.planning.operands.TABLE`
TABLE_M, TABLE_N, TABLE_K = tl.constexpr(5), tl.constexpr(6), tl.constexpr(7)
COLUMNS = tl.constexpr(20)


@triton.jit
def clamped_range(start, end, total):
    """[start, end) clamped to the extent, so that lying offsets stay in it."""
    start = tl.minimum(tl.maximum(start, 0), total)
    end = tl.minimum(tl.maximum(end, start), total)
    return start.to(tl.int32), end.to(tl.int32)


@triton.jit
def group_range(ends, g, head, total, ok):
    """[start, end) of groups along the jagged extent."""
    start = tl.load(ends + g - 1, mask=ok & (g + head > 0), other=0).to(tl.int64)
    return clamped_range(start, tl.load(ends + g, mask=ok, other=0).to(tl.int64), total)


@triton.jit
def summed_ranges(sizes, g, total, ok):
    """[start, end) of all groups out of their sizes. Sums of sizes that lie may wrap, but each group starts where the
    one before it ends."""
    size = tl.load(sizes + g, mask=ok, other=0).to(tl.int32)
    end = tl.cumsum(size, 0)
    return clamped_range(end - size, end, total)


@triton.jit
def range_of(ends, g, head, total, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    """[start, end) of one group; out of up to CHUNK sizes with SIZES."""
    if SIZES:
        lane = tl.arange(0, CHUNK)
        start = tl.sum(tl.load(ends + lane, mask=lane < g, other=0).to(tl.int32), 0)
        end = start + tl.load(ends + g).to(tl.int32)
        start, end = clamped_range(start, end, total)
    else:
        start, end = group_range(ends, g, head, total, g >= 0)
    return start, end


@triton.jit
def owned_range(ends, groups, head, total, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    """From where the first group starts to where the last one ends along the jagged extent."""
    if SIZES:
        lane = tl.arange(0, CHUNK)
        high = tl.sum(tl.load(ends + lane, mask=lane < groups, other=0).to(tl.int32), 0).to(tl.int64)
        low = high * 0
    else:
        low = tl.load(ends - 1, mask=groups * head > 0, other=0).to(tl.int64)
        high = tl.load(ends + groups - 1, mask=groups > 0, other=0).to(tl.int64)
    low = tl.minimum(tl.maximum(low, 0), total).to(tl.int32)
    high = tl.minimum(tl.maximum(high, 0), total).to(tl.int32)
    return low, high


@triton.jit
def tiles_in(g, ok, ends, table, m, n, groups, head,
             FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SIZES: tl.constexpr = False):  # fmt: skip
    """The number of tiles of groups `g` (a vector; of all groups with SIZES); 0 where not `ok`."""
    if FORM == "per_group":
        rows = tl.load(table + g.to(tl.int64) * COLUMNS + TABLE_M, mask=ok, other=0).to(tl.int32)
        columns = tl.load(table + g.to(tl.int64) * COLUMNS + TABLE_N, mask=ok, other=0).to(tl.int32)
    elif FORM == "masked":
        rows = tl.load(ends + g, mask=ok, other=0).to(tl.int64)
        rows = tl.minimum(tl.maximum(rows, 0), m).to(tl.int32)
        columns = n
    else:
        total = n if FORM == "jagged_n" else m
        if SIZES:
            start, end = summed_ranges(ends, g, total, ok)
        else:
            start, end = group_range(ends, g, head, total, ok)
        rows = m if FORM == "jagged_n" else end - start
        columns = end - start if FORM == "jagged_n" else n
    count = ((rows + BM - 1) // BM) * ((columns + BN - 1) // BN)
    return tl.where(ok, count, 0)


@triton.jit
def pivots(prefix, ends, table, m, n, groups, head,
           FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CHUNK: tl.constexpr,
           SIZES: tl.constexpr = False):  # fmt: skip
    """CHUNK inclusive tile counts: of every group if they fit, else of every `stride`-th one."""
    lane = tl.arange(0, CHUNK)
    stride = (groups + CHUNK - 1) // CHUNK
    if groups <= CHUNK:
        counts = tiles_in(lane, lane < groups, ends, table, m, n, groups, head, FORM, BM, BN, SIZES)
        found = tl.cumsum(counts, 0)
    else:
        found = tl.load(prefix + tl.minimum((lane + 1) * stride, groups) - 1)
    return found, stride


@triton.jit
def locate(tile, found, stride, prefix, groups, CHUNK: tl.constexpr):
    """(group, the group's first tile) of a tile index below the total."""
    lane = tl.arange(0, CHUNK)
    below = found <= tile
    group = tl.sum(below.to(tl.int32), 0)
    first = tl.max(tl.where(below, found, 0), 0)
    if groups > CHUNK:
        base = group * stride
        group = base
        for offset in range(0, stride, CHUNK):
            index = base + offset + lane
            ok = (offset + lane < stride) & (index < groups)
            counts = tl.load(prefix + index, mask=ok, other=FAR)
            under = counts <= tile
            group += tl.sum(under.to(tl.int32), 0)
            first = tl.maximum(first, tl.max(tl.where(under, counts, 0), 0))
    return group, first


@triton.jit
def all_tiles(prefix, ends, table, m, n, groups, head, FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
              UNIFORM: tl.constexpr, CHUNK: tl.constexpr, SIZES: tl.constexpr):  # fmt: skip
    """The number of tiles, and two values by which `group_of_tile` finds their groups.

    UNIFORM: each group has the tiles of m x n. With CHUNK <= 0 a row of the table is a tile, and counts as a group.
    """
    if UNIFORM:
        step = ((m + BM - 1) // BM) * ((n + BN - 1) // BN)
        total = groups * step
        found = total
    elif CHUNK <= 0:
        total = groups
        found = total
        step = total
    else:
        found, step = pivots(prefix, ends, table, m, n, groups, head, FORM, BM, BN, CHUNK, SIZES)
        total = tl.max(found, 0)
    return total, found, step


@triton.jit
def group_of_tile(tile, found, step, prefix, groups, UNIFORM: tl.constexpr, CHUNK: tl.constexpr):
    """(group, the group's first tile) of a tile index below the total."""
    if UNIFORM:
        g = tile // step
        first = g * step
    elif CHUNK <= 0:
        g = tile + groups * 0
        first = g
    else:
        g, first = locate(tile, found, step, prefix, groups, CHUNK)
    return g, first


@triton.jit
def place(local, tiles_m, tiles_n, WIDTH: tl.constexpr):
    """(tile_m, tile_n) inside a group, in bands of WIDTH tile rows (see multigemm.planning.tiles.place)."""
    band = WIDTH * tiles_n
    first = local // band * WIDTH
    height = tl.minimum(tiles_m - first, WIDTH)
    inside = local % band
    return first + inside % height, inside // height


@triton.jit
def wide_strips(strips):
    """Of a group's strips of 64 rows the last ones that wide tiles take: 0 to 2, which leaves tall tiles of 3 or 4."""
    over = strips & 3
    return tl.where(over == 3, 0, tl.where((over == 1) & (strips > 1), 2, over))


@triton.jit
def tiles_of_two_widths(strips, across):
    """The tiles of a group: `across` in each row of tall tiles, half as many in a row of wide ones."""
    low = wide_strips(strips)
    return (strips - low + 3) // 4 * across + tl.where(low > 0, (across + 1) // 2, 0)


@triton.jit
def place_of_two_widths(local, strips, across, WIDTH: tl.constexpr):
    """(first strip, number of strips, first block of columns) of a group's tile; one of up to two strips is wide.

    Tall tiles come in bands like those of `place`. In the last band a wide tile follows the tall ones of its two
    columns, which read the same weights.
    """
    low = wide_strips(strips)
    tall = (strips - low + 3) // 4
    first = local // (WIDTH * across) * WIDTH
    inside = local - first * across
    height = tl.minimum(tall - first, WIDTH)
    each = 2 * height + tl.where((low > 0) & (height < WIDTH), 1, 0)
    pair = inside // each
    rest = inside - pair * each
    is_wide = rest >= height * tl.minimum(across - 2 * pair, 2)
    second = tl.where(rest >= height, 1, 0)
    strip = tl.where(is_wide, strips - low, (first + rest - second * height) * 4)
    count = tl.where(is_wide, low, tl.minimum(strips - low - strip, 4))
    return strip, count, 2 * pair + tl.where(is_wide, 0, second)


@triton.jit
def write_prefix(prefix, ends, table, m, n, groups, head,
                 FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """Inclusive prefix sums of the tile counts of all groups, by one program, STEP groups at a time."""
    lane = tl.arange(0, STEP)
    carry = 0
    for base in range(0, groups, STEP):
        g = base + lane
        counts = tiles_in(g, g < groups, ends, table, m, n, groups, head, FORM, BM, BN)
        tl.store(prefix + g, carry + tl.cumsum(counts, 0), mask=g < groups)
        carry += tl.sum(counts, 0)


@triton.jit
def group_rows(ends, g, head, m, ok, MASKED: tl.constexpr):
    """[start, end) of groups' rows: a slice of the packed rows, or the first rows of a padded group."""
    if MASKED:
        end = tl.load(ends + g, mask=ok, other=0).to(tl.int64)
        end = tl.minimum(tl.maximum(end, 0), m).to(tl.int32)
        start = end * 0
    else:
        start, end = group_range(ends, g, head, m, ok)
    return start, end


@triton.jit
def write_records(records, ends, m, groups, head,
                  KIND: tl.constexpr, STRIP: tl.constexpr, MOST: tl.constexpr, ALIGN: tl.constexpr,
                  ROWS: tl.constexpr, STEP: tl.constexpr):  # fmt: skip
    """One record per tile row: group, its first tile row, their number, strips per tile, start, end, true start.

    records[0] is the number of tile rows, the record of tile row i starts at 8 * (1 + i). Rows are split
    into tiles of equal numbers of strips (see multigemm.planning.tiles.heights). `start` is rounded down to
    a multiple of ALIGN, which copies along rows need. Each program finds the groups of its ROWS tile rows;
    sizes that lie may claim more of them than there are places, which are then left out.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    lane = tl.arange(0, STEP)
    carry = 0
    g = i * 0
    first = i * 0
    for base in range(0, groups, STEP):
        index = base + lane
        start, end = group_rows(ends, index, head, m, index < groups, KIND == "masked")
        strips = tl.where(end > start, (end - start // ALIGN * ALIGN + STRIP - 1) // STRIP, 0)
        counts = (strips + MOST - 1) // MOST
        at = carry + tl.cumsum(counts, 0) - counts
        carry += tl.sum(counts, 0)
        found = (at[None, :] <= i[:, None]) & ((at + counts)[None, :] > i[:, None])
        g += tl.sum(tl.where(found, index[None, :], 0), 1)
        first += tl.sum(tl.where(found, at[None, :], 0), 1)
    valid = i < carry
    true_start, end = group_rows(ends, g, head, m, valid, KIND == "masked")
    start = true_start // ALIGN * ALIGN
    strips = (end - start + STRIP - 1) // STRIP
    count = (strips + MOST - 1) // MOST
    entry = records + 8 + i * 8
    tl.store(entry, g, mask=valid)
    tl.store(entry + 1, first, mask=valid)
    tl.store(entry + 2, count, mask=valid)
    tl.store(entry + 3, (strips + count - 1) // tl.maximum(count, 1), mask=valid)
    tl.store(entry + 4, start, mask=valid)
    tl.store(entry + 5, end, mask=valid)
    tl.store(entry + 6, true_start, mask=valid)
    if tl.program_id(0) == 0:
        # the tile rows, the tiles that were drawn, the programs that draw no more
        tl.store(records, tl.minimum(carry, tl.num_programs(0) * ROWS))
        tl.store(records + 1, 0)
        tl.store(records + 2, 0)
