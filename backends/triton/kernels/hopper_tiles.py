# mypy: ignore-errors
"""Which tile next: the loading warp decides, and hands each tile to the consumers through shared memory.

The sizes of groups stay on the device. The loading warp decodes a tile index once, well ahead of
its use; the consumers only read eight words and never wait for the L2.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multigemm.backends.triton.kernels.schedule import (
    clamped_range,
    group_rows,
    place,
    place_of_two_widths,
    tiles_of_two_widths,
)

STRIP = gl.constexpr(64)
RECORD = gl.constexpr(8)
# of a jagged K: each group's blocks of a copy are its own (`quantised.pack_groups_kernel`)
COPIED_BLOCK = gl.constexpr(128)


class Tiling(NamedTuple):
    """Constants: how work is cut into tiles, and how operands lie (`hopper._cut` on the host)."""

    form: Any
    columns: Any
    """Of a tile."""
    pieces: Any
    """Boxes of B that one warp loads for a block of K; 0 where other warps load B."""
    piece: Any
    """Columns of such a box, which are those of one wgmma."""
    most: Any
    """Strips of 64 rows in a tile, at most."""
    stages: Any
    width: Any
    order: Any
    align: Any
    masked: Any
    sizes: Any
    a_order: Any
    b_order: Any
    wide: Any
    """Whether a group's last 128 rows or fewer are tiles of twice the columns (`schedule.place_of_two_widths`)."""
    copied: Any
    """Of a jagged K that was copied such that it is contiguous: "k", or "scales" if float32 scales were copied too."""


class Extents(NamedTuple):
    """Of the whole problem; `head`: whether the first group's start stands before the ends."""

    m: Any
    n: Any
    k: Any
    groups: Any
    head: Any


class Work(NamedTuple):
    """What the loading warp finds its tiles by; `total` is 0 where it has to read sizes first."""

    records: Any
    ends: Any
    extents: Extents
    tiles_n: Any
    total: Any


class Tile(NamedTuple):
    """A tile: group, first row, rows, first column, first row that it writes, and its part of K.

    Where a jagged K was copied such that it is contiguous, `low` is the group's first block of K in the copy: all rows
    of the tile are written.
    """

    group: Any
    row: Any
    rows: Any
    col: Any
    low: Any
    k_start: Any
    k_length: Any


class Mail(NamedTuple):
    """Two slots in which tiles are handed over, and the barriers that say that one was filled, and emptied."""

    tickets: Any
    issued: Any
    taken: Any


@gluon.jit
def after(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def after_slot(slot, turn):
    """The next of the two slots in which tiles are handed over, and its turn."""
    slot ^= 1
    if slot == 0:
        turn ^= 1
    return slot, turn


@gluon.jit
def tiles_of_launch(records, m, groups, tiles_n, TILING: gl.constexpr):
    """The number of tiles, as far as it is known before sizes are read."""
    if TILING.form == "rows":
        return gl.load(records) * tiles_n
    elif TILING.form == "search":
        return tiles_n * 0
    else:
        return groups * ((m + TILING.most * STRIP - 1) // (TILING.most * STRIP)) * tiles_n


@gluon.jit
def work_of(records, ends, m, n, k, groups, head, TILING: gl.constexpr, ALPHA: gl.constexpr):
    """The tiles of a launch; k is 0 where nothing is multiplied."""
    tiles_n = (n + TILING.columns - 1) // TILING.columns
    total = tiles_of_launch(records, m, groups, tiles_n, TILING)
    if ALPHA == "zero":
        k = k * 0
    return Work(records, ends, Extents(m, n, k, groups, head), tiles_n, total)


@gluon.jit
def share_of(WHICH: gl.constexpr, rows, MOST: gl.constexpr, WIDE: gl.constexpr):
    """Of a tile's strips those above a warpgroup's own ones, and their number. Of four the first one has up to two."""
    strips = (rows + STRIP - 1) // STRIP
    if WIDE:
        # of a wide tile each warpgroup has all rows of its own half of the columns
        above = gl.where(strips > 2, 2 * WHICH, 0)
        mine = strips - above if WHICH == 1 else gl.minimum(strips, 2)
    elif MOST == 4:
        above = (strips + 1) // 2 * WHICH
        mine = (strips + 1 - WHICH) // 2
    else:
        above = strips * 0 + WHICH
        mine = gl.where(strips > WHICH, 1, 0)
    return above, mine


@gluon.jit
def draw(records, ORDER: gl.constexpr):
    """Asks the counter for a tile; one lane gets the answer, and no one waits for it here.

    The counter starts at 0 and is left at 0 (see `retire`): each program starts with the tile of its own number.
    """
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, lanes)
    if ORDER == "dealt":
        return lane
    else:
        return gl.atomic_add(records + 1 + lane * 0, lane * 0 + 1, mask=lane == 0, sem="relaxed")


@gluon.jit
def following(tile, drawn, ORDER: gl.constexpr):
    """The tile after this one, in turn or as drawn."""
    if ORDER == "dealt":
        return tile + gl.num_programs(0)
    else:
        lane = gl.arange(0, 32, drawn.type.layout)
        return gl.num_programs(0) + gl.sum(gl.where(lane == 0, drawn, 0), 0)


@gluon.jit
def retire(records):
    """Counts the programs that draw no more; the last one clears both counts for the next launch."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    lane = gl.arange(0, 32, lanes)
    before = gl.atomic_add(records + 2 + lane * 0, lane * 0 + 1, mask=lane == 0, sem="acq_rel")
    last = gl.sum(gl.where(lane == 0, before, 0), 0) == gl.num_programs(0) - 1
    gl.store(records + 1 + lane, lane * 0, mask=(lane < 2) & last)


@gluon.jit
def plus(x, y):
    return x + y


@gluon.jit
def tiles_up_to(work, TILING: gl.constexpr):
    """Tile rows, or tiles of two widths, up to each of 256 groups (or 128: hopper.searchable), counted by one warp, all
    at once.

    Sums of sizes that lie may wrap, but each group starts where the one before it ends.
    """
    ends = work.ends
    extents = work.extents
    MOST: gl.constexpr = TILING.most
    EACH: gl.constexpr = 4 if MOST == 3 else 8
    lanes: gl.constexpr = gl.BlockedLayout([EACH], [32], [1], [0])
    g = gl.arange(0, 32 * EACH, lanes)
    if TILING.sizes:
        size = gl.load(ends + g, mask=g < extents.groups, other=0).to(gl.int32)
        end = gl.associative_scan(size, 0, plus)
        start, end = clamped_range(end - size, end, extents.m)
    else:
        start, end = group_rows(ends, g, extents.head, extents.m, g < extents.groups, TILING.masked)
    strips = gl.where(end > start, (end - start // TILING.align * TILING.align + STRIP - 1) // STRIP, 0)
    if TILING.wide:
        return gl.associative_scan(tiles_of_two_widths(strips, work.tiles_n), 0, plus)
    else:
        return gl.associative_scan((strips + MOST - 1) // MOST, 0, plus)


@gluon.jit
def span_of(g, ok, ends, head, TILING: gl.constexpr):
    """Where a group starts and ends, to be clamped by `clamped_range`: two loads on their way, or sums of sizes."""
    if TILING.sizes:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        before = lane * 0
        for step in gl.static_range(4 if TILING.most == 3 else 8):
            index = lane + 32 * step
            before += gl.load(ends + index, mask=ok & (index < g), other=0).to(gl.int32)
        start = gl.sum(before, 0)
        end = start + gl.load(ends + g, mask=ok, other=0).to(gl.int32)
    else:
        start = gl.load(ends + g - 1, mask=ok & (g + head > 0), other=0)
        end = gl.load(ends + g, mask=ok, other=0)
    return start, end


@gluon.jit
def record_of(tile, total, found, work, TILING: gl.constexpr):
    """What memory holds about a tile's group, as loads on their way; nothing for a tile beyond the last."""
    ok = tile < total
    if TILING.form == "rows":
        entry = work.records + RECORD + tile // work.tiles_n * RECORD
        g = gl.load(entry, mask=ok, other=0)
        first = gl.load(entry + 1, mask=ok, other=0)
        count = gl.load(entry + 2, mask=ok, other=0)
        each = gl.load(entry + 3, mask=ok, other=0)
        start = gl.load(entry + 4, mask=ok, other=0)
        end = gl.load(entry + 5, mask=ok, other=0)
        low = gl.load(entry + 6, mask=ok, other=0)
        return g, start, end, first, count, each, low
    elif TILING.form == "search":
        below = found <= (tile if TILING.wide else tile // work.tiles_n)
        g = gl.sum(below.to(gl.int32), 0)
        first = gl.max(gl.where(below, found, 0), 0)
        if TILING.masked:
            start = g * 0
            end = gl.load(work.ends + g, mask=ok, other=0)
        else:
            start, end = span_of(g, ok, work.ends, work.extents.head, TILING)
        return g, start, end, first
    else:
        height: gl.constexpr = TILING.most * STRIP
        g = tile // ((work.extents.m + height - 1) // height * work.tiles_n)
        start = g * 0
        end = start
        if TILING.form == "k":
            start, end = span_of(g, ok, work.ends, work.extents.head, TILING)
        return g, start, end


@gluon.jit
def tile_from(record, tile, work, TILING: gl.constexpr):
    """A tile, once memory has answered."""
    tiles_n = work.tiles_n
    k = work.extents.k
    height: gl.constexpr = TILING.most * STRIP
    if TILING.form == "rows":
        g, start, end, first, count, each, low = record
        tm, tn = place(tile - first * tiles_n, count, tiles_n, TILING.width)
        row = start + tm * each * STRIP
        return Tile(g, row, gl.minimum(each * STRIP, end - row), tn * TILING.columns, low, g * 0, k)
    elif TILING.form == "search":
        g, start, end, first = record
        low, end = clamped_range(start, end, work.extents.m)
        start = low // TILING.align * TILING.align
        strips = (end - start + STRIP - 1) // STRIP
        if TILING.wide:
            strip, count, tn = place_of_two_widths(tile - first, strips, tiles_n, TILING.width)
            row = start + strip * STRIP
            # a bound that the compiler sees: else it makes a tile's coordinates uniform anew for each block of K
            rows = gl.minimum(gl.minimum(count * STRIP, end - row), height)
        else:
            count = (strips + TILING.most - 1) // TILING.most
            each = (strips + count - 1) // gl.maximum(count, 1)
            tm, tn = place(tile - first * tiles_n, count, tiles_n, TILING.width)
            row = start + tm * each * STRIP
            rows = gl.minimum(each * STRIP, end - row)
        return Tile(g, row, rows, tn * TILING.columns, low, g * 0, k)
    else:
        g, start, end = record
        down = (work.extents.m + height - 1) // height
        tm, tn = place(tile % (down * tiles_n), down, tiles_n, TILING.width)
        row = tm * height
        rows = gl.minimum(height, work.extents.m - row)
        if TILING.form == "k":
            start, end = clamped_range(start, end, k)
            low = row
            if TILING.copied is not None:
                low = start // COPIED_BLOCK + g
            return Tile(g, row, rows, tn * TILING.columns, low, start, end - start)
        else:
            return Tile(g, row, rows, tn * TILING.columns, row, start, k)


@gluon.jit
def publish(mail, slot, turn, tile):
    """Hands a tile to the consumers; rows = 0 ends their loops."""
    mbarrier.wait(mail.taken.index(slot), turn ^ 1)
    one: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    lane = gl.arange(0, 8, one)
    words = gl.where(lane == 3, tile.col, gl.where(lane == 4, tile.low, tile.k_length))
    words = gl.where(lane == 0, tile.group, gl.where(lane == 1, tile.row, gl.where(lane == 2, tile.rows, words)))
    mail.tickets.index(slot).store(words)
    mbarrier.arrive(mail.issued.index(slot))


@gluon.jit
def word(words, lane, at: gl.constexpr):
    """One of eight words that every thread holds."""
    return gl.sum(gl.where(lane == at, words, 0), 0)


@gluon.jit
def take(mail, slot, turn):
    """The next tile's group, first row, rows, first column, first row to write and length of K."""
    mbarrier.wait(mail.issued.index(slot), turn)
    four: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    lane = gl.arange(0, 8, four)
    words = mail.tickets.index(slot).load(four)
    mbarrier.arrive(mail.taken.index(slot))
    g = word(words, lane, 0)
    row = word(words, lane, 1)
    rows = word(words, lane, 2)
    col = word(words, lane, 3)
    low = word(words, lane, 4)
    k_length = word(words, lane, 5)
    return g, row, rows, col, low, k_length
