# mypy: ignore-errors
"""Which tile next: the loading warp decides, and hands each tile to the consumers through shared memory.

The sizes of groups stay on the device. The loading warp decodes a tile index once, well ahead of
its use; the consumers only read eight words and never wait for the L2.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multigemm.backends.triton.kernels.schedule import group_rows, place

STRIP = gl.constexpr(64)
RECORD = gl.constexpr(8)


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
def tiles_of_launch(records, m, groups, tiles_n, FORM: gl.constexpr, MOST: gl.constexpr):
    """The number of tiles, as far as it is known before sizes are read."""
    if FORM == "rows":
        return gl.load(records) * tiles_n
    elif FORM == "search":
        return tiles_n * 0
    else:
        return groups * ((m + MOST * STRIP - 1) // (MOST * STRIP)) * tiles_n


@gluon.jit
def work_of(records, m, n, k, groups, head, FORM: gl.constexpr, BN: gl.constexpr, MOST: gl.constexpr,
            ALPHA: gl.constexpr):  # fmt: skip
    """Tiles side by side, all tiles, and the extents, with a k of 0 where nothing is multiplied."""
    tiles_n = (n + BN - 1) // BN
    total = tiles_of_launch(records, m, groups, tiles_n, FORM, MOST)
    if ALPHA == "zero":
        k = k * 0
    return tiles_n, total, (m, n, k, groups, head)


@gluon.jit
def share_of(WHICH: gl.constexpr, rows, MOST: gl.constexpr):
    """Of a tile's strips those above a warpgroup's own ones, and their number. Of four the first one has up to two."""
    strips = (rows + STRIP - 1) // STRIP
    if MOST == 4:
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
def rows_up_to(ends, extents, MOST: gl.constexpr, ALIGN: gl.constexpr, MASKED: gl.constexpr, SIZES: gl.constexpr):
    """Tile rows up to each of 256 groups (or 128: hopper.searchable), counted by one warp, all at once.

    Sums of SIZES that lie may wrap, but each group starts where the one before it ends.
    """
    m, _, _, groups, head = extents
    EACH: gl.constexpr = 4 if MOST == 3 else 8
    lanes: gl.constexpr = gl.BlockedLayout([EACH], [32], [1], [0])
    g = gl.arange(0, 32 * EACH, lanes)
    if SIZES:
        size = gl.load(ends + g, mask=g < groups, other=0).to(gl.int32)
        end = gl.associative_scan(size, 0, plus)
        start, end = inside(end - size, end, m)
    else:
        start, end = group_rows(ends, g, head, m, g < groups, MASKED)
    strips = gl.where(end > start, (end - start // ALIGN * ALIGN + STRIP - 1) // STRIP, 0)
    return gl.associative_scan((strips + MOST - 1) // MOST, 0, plus)


@gluon.jit
def span_of(g, ok, ends, head, MOST: gl.constexpr, SIZES: gl.constexpr):
    """Where a group starts and ends, to be clamped by `inside`: two loads on their way, or the sums of SIZES."""
    if SIZES:
        lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
        before = lane * 0
        for step in gl.static_range(4 if MOST == 3 else 8):
            index = lane + 32 * step
            before += gl.load(ends + index, mask=ok & (index < g), other=0).to(gl.int32)
        start = gl.sum(before, 0)
        end = start + gl.load(ends + g, mask=ok, other=0).to(gl.int32)
    else:
        start = gl.load(ends + g - 1, mask=ok & (g + head > 0), other=0)
        end = gl.load(ends + g, mask=ok, other=0)
    return start, end


@gluon.jit
def record_of(tile, total, found, records, ends, extents, tiles_n, FORM: gl.constexpr, MOST: gl.constexpr,
              MASKED: gl.constexpr, SIZES: gl.constexpr):  # fmt: skip
    """What memory holds about a tile's group, as loads on their way; nothing for a tile beyond the last."""
    m, _, _, _, head = extents
    ok = tile < total
    if FORM == "rows":
        entry = records + RECORD + tile // tiles_n * RECORD
        g = gl.load(entry, mask=ok, other=0)
        first = gl.load(entry + 1, mask=ok, other=0)
        count = gl.load(entry + 2, mask=ok, other=0)
        each = gl.load(entry + 3, mask=ok, other=0)
        start = gl.load(entry + 4, mask=ok, other=0)
        end = gl.load(entry + 5, mask=ok, other=0)
        low = gl.load(entry + 6, mask=ok, other=0)
        return g, start, end, first, count, each, low
    elif FORM == "search":
        below = found <= tile // tiles_n
        g = gl.sum(below.to(gl.int32), 0)
        first = gl.max(gl.where(below, found, 0), 0)
        if MASKED:
            start = g * 0
            end = gl.load(ends + g, mask=ok, other=0)
        else:
            start, end = span_of(g, ok, ends, head, MOST, SIZES)
        return g, start, end, first
    else:
        g = tile // ((m + MOST * STRIP - 1) // (MOST * STRIP) * tiles_n)
        start = g * 0
        end = start
        if FORM == "k":
            start, end = span_of(g, ok, ends, head, MOST, SIZES)
        return g, start, end


@gluon.jit
def inside(start, end, extent):
    """[start, end) clamped to the extent, so that lying offsets stay in it."""
    start = gl.minimum(gl.maximum(start.to(gl.int64), 0), extent)
    end = gl.minimum(gl.maximum(end.to(gl.int64), start), extent)
    return start.to(gl.int32), end.to(gl.int32)


@gluon.jit
def tile_from(record, tile, extents, tiles_n, FORM: gl.constexpr, BN: gl.constexpr, MOST: gl.constexpr,
              WIDTH: gl.constexpr, ALIGN: gl.constexpr):  # fmt: skip
    """(group, first row, rows, first column, first row to write, k start, k length) of a tile."""
    m, _, k, _, _ = extents
    if FORM == "rows":
        g, start, end, first, count, each, low = record
        tm, tn = place(tile - first * tiles_n, count, tiles_n, WIDTH)
        row = start + tm * each * STRIP
        return g, row, gl.minimum(each * STRIP, end - row), tn * BN, low, g * 0, k
    elif FORM == "search":
        g, start, end, first = record
        low, end = inside(start, end, m)
        start = low // ALIGN * ALIGN
        strips = (end - start + STRIP - 1) // STRIP
        count = (strips + MOST - 1) // MOST
        each = (strips + count - 1) // gl.maximum(count, 1)
        tm, tn = place(tile - first * tiles_n, count, tiles_n, WIDTH)
        row = start + tm * each * STRIP
        return g, row, gl.minimum(each * STRIP, end - row), tn * BN, low, g * 0, k
    else:
        g, start, end = record
        down = (m + MOST * STRIP - 1) // (MOST * STRIP)
        tm, tn = place(tile % (down * tiles_n), down, tiles_n, WIDTH)
        row = tm * (MOST * STRIP)
        rows = gl.minimum(MOST * STRIP, m - row)
        if FORM == "k":
            start, end = inside(start, end, k)
            return g, row, rows, tn * BN, row, start, end - start
        else:
            return g, row, rows, tn * BN, row, start, k


@gluon.jit
def publish(mail, slot, turn, work):
    """Hands a tile to the consumers; rows = 0 ends their loops."""
    tickets, issued, taken = mail
    g, row, rows, col, low, _, k_length = work
    mbarrier.wait(taken.index(slot), turn ^ 1)
    one: gl.constexpr = gl.BlockedLayout([8], [32], [1], [0])
    lane = gl.arange(0, 8, one)
    words = gl.where(lane == 3, col, gl.where(lane == 4, low, k_length))
    words = gl.where(lane == 0, g, gl.where(lane == 1, row, gl.where(lane == 2, rows, words)))
    tickets.index(slot).store(words)
    mbarrier.arrive(issued.index(slot))


@gluon.jit
def word(words, lane, at: gl.constexpr):
    """One of eight words that every thread holds."""
    return gl.sum(gl.where(lane == at, words, 0), 0)


@gluon.jit
def take(mail, slot, turn):
    """The next tile, as `publish` wrote it."""
    tickets, issued, taken = mail
    mbarrier.wait(issued.index(slot), turn)
    four: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    lane = gl.arange(0, 8, four)
    words = tickets.index(slot).load(four)
    mbarrier.arrive(taken.index(slot))
    g = word(words, lane, 0)
    row = word(words, lane, 1)
    rows = word(words, lane, 2)
    col = word(words, lane, 3)
    low = word(words, lane, 4)
    k_length = word(words, lane, 5)
    return g, row, rows, col, low, k_length
