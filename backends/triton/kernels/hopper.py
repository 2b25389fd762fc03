# mypy: ignore-errors
"""The warp-specialised kernel for sm_90: one warp loads by TMA, two or three warpgroups multiply by wgmma.

A tile is up to MOST strips of 64 rows by BN columns, so that a ragged group pays for whole strips
and not for whole tiles. The strips are shared out among the consumers, which run apart from each
other within the depth of the ring: while one writes its strip, the others keep the tensor cores
busy. Without multicast the way from the L2 to the SMs is what limits large tiles, so the largest
tile that the registers hold (192 x 256, three consumers) is the best where groups are tall.
Bounded ("ragged") tensor maps zero what lies behind a group's end along K on both operands, and
cut stores at a group's last row, in hardware.

Low tiles read as many weights as tall ones for fewer products, so the way from the L2 limits them. With WIDE, tiles
of 128 columns have 3 or 4 strips. The strips that remain of a group, 2 at most, are a tile of 256 columns: a stage has
room for either, and each consumer multiplies half of the columns.

The loading warp issues in order, so whatever it waits for, the ring runs dry behind it. Hence the answers of memory
(the next tile, its record) are asked for some blocks before they are needed. The end of a strip is the epilogue, then
a store that stops at the group's last row.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from multigemm.backends.triton.kernels.epilogue import finish
from multigemm.backends.triton.kernels.hopper_tiles import (
    STRIP,
    Mail,
    Tile,
    Tiling,
    after,
    after_slot,
    draw,
    following,
    publish,
    record_of,
    retire,
    share_of,
    take,
    tile_from,
    tiles_up_to,
    work_of,
)

# what Triton 3.6 calls otherwise than later versions: a block comes from global memory, goes there; a role's warps meet
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
seen_as = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
# a block of K is one swizzled row: 64 elements of 16 bits, or 32 of tf32
ROW_BYTES = gl.constexpr(128)
BILLION = gl.constexpr(1 << 30)
# of a role that stores
WARPS = gl.constexpr(4)


class Ring(NamedTuple):
    """Blocks of A and B on their way, and the barriers of each stage: filled, and read. `scales`: those of the blocks'
    rows and columns, where they are on their way, too."""

    a: Any
    b: Any
    full: Any
    empty: Any
    scales: Any


class Strides(NamedTuple):
    """Distances of elements, what C and sums are multiplied by, and the rows of the result's map in a group."""

    c_group: Any
    c_row: Any
    c_col: Any
    out_group: Any
    out_row: Any
    out_col: Any
    bias_group: Any
    bias_col: Any
    alpha_bits: Any
    beta_bits: Any
    out_rows: Any


class Target(NamedTuple):
    """Where one consumer's results go, and what the epilogue reads; n columns in all."""

    desc: Any
    staging: Any
    c: Any
    out: Any
    bias: Any
    strides: Strides
    n: Any


class End(NamedTuple):
    """Constants: what becomes of a sum, how it is stored (`hopper._end` on the host), and rows that no group owns."""

    store: Any
    c: Any
    bias: Any
    alpha: Any
    activation: Any
    late: Any
    zero: Any


class Spot(NamedTuple):
    """Where a strip lies: its rows from `low` on belong to the group, whose tile ends before row `bound`."""

    group: Any
    row: Any
    rows: Any
    low: Any
    bound: Any
    col: Any


@gluon.jit
def strips_in(units, number):
    """The two strips of A that lie in a unit of a ring for tiles of two widths (see `fill`)."""
    DEEP: gl.constexpr = 8 * ROW_BYTES // units.dtype.primitive_bitwidth
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, units.dtype.primitive_bitwidth, 2)
    return seen_as(units.index(number), units.dtype, [2, STRIP, DEEP], swizzled)


@gluon.jit
def load_strip(desc, row, k0, tile, barrier, smem, pred, TILING: gl.constexpr):
    """One strip of A, as deep as a block of K."""
    if TILING.form == "k" and TILING.copied is None:
        at = [BILLION, tile.k_start + tile.k_length, BILLION - tile.k_length + k0, row]
        fetch(desc, at, barrier, smem.reshape([1, 1, STRIP, 64]), pred)
    elif TILING.a_order == "row":
        fetch(desc, [row, k0], barrier, smem, pred)
    else:
        fetch(desc, [k0, row], barrier, smem, pred)


@gluon.jit
def load_piece(desc, g, col, k0, tile, barrier, smem, pred, TILING: gl.constexpr):
    """One block of B, a piece wide."""
    PIECE: gl.constexpr = TILING.piece
    if TILING.form == "k" and TILING.copied is None:
        at = [BILLION, tile.k_start + tile.k_length, BILLION - tile.k_length + k0, col]
        fetch(desc, at, barrier, smem.reshape([1, 1, 64, PIECE]), pred)
    elif TILING.b_order == "row":
        fetch(desc, [g, k0, col], barrier, smem.reshape([1, 64, PIECE]), pred)
    else:
        fetch(desc, [g, col, k0], barrier, smem.reshape([1, PIECE, smem.shape[1]]), pred)


@gluon.constexpr_function
def scale_bytes(tiling):
    """Of a block's scales, one for each row and column of a tile."""
    return 4 * (64 * tiling.most + tiling.columns) if tiling.copied == "scales" else 0


@gluon.jit
def load_scales(desc, entry, line, barrier, smem):
    """The scales of a block of a tile's rows or columns, one behind the other."""
    boxed: gl.constexpr = gl.NVMMASharedLayout(0, 32, 2)
    COUNT: gl.constexpr = desc.block_shape[1]
    fetch(desc, [entry, line], barrier, seen_as(smem, gl.float32, [1, COUNT], boxed))


@gluon.jit
def fill(descs, ring, block, blocks, stage, phase, tile, a_rows, b_step, TILING: gl.constexpr):
    """Sends the blocks [block, blocks) of a tile's A and B into the ring, as its stages become free.

    B comes in pieces of columns; there are none where other warps load it (hopper_shift_b). With tiles of two widths a
    stage has three units: two strips of A; two more, or a wide tile's second piece of B; a piece of B.
    """
    MOST: gl.constexpr = TILING.most
    A_BYTES: gl.constexpr = STRIP * ROW_BYTES
    B_BYTES: gl.constexpr = TILING.pieces * TILING.piece * ROW_BYTES + scale_bytes(TILING)
    DEEP: gl.constexpr = 8 * ROW_BYTES // ring.a.dtype.primitive_bitwidth
    strips = (tile.rows + STRIP - 1) // STRIP
    at = tile.group * a_rows + tile.row
    # an empty K is one block from beyond the maps' bounds: zeros, without a word to memory
    beyond = gl.where(tile.k_length == 0, BILLION, 0)
    if TILING.copied is not None:
        beyond += tile.low * DEEP
    for number in range(block, blocks):
        k0 = beyond + number * DEEP
        mbarrier.wait(ring.empty.index(stage), phase)
        barrier = ring.full.index(stage)
        if TILING.wide:
            mbarrier.expect(barrier, B_BYTES + 4 * A_BYTES, pred=strips % 2 == 0)
            mbarrier.expect(barrier, B_BYTES + 3 * A_BYTES, pred=strips % 2 == 1)
        else:
            for count in gl.static_range(1, MOST + 1):
                mbarrier.expect(barrier, B_BYTES + count * A_BYTES, pred=strips == count)
        for strip in gl.static_range(MOST):
            skip = strip
            wanted = strips > strip
            if TILING.wide:
                smem = strips_in(ring.a, stage * 3 + strip // 2).index(strip % 2)
            else:
                smem = ring.a.index(stage * MOST + strip)
                if MOST == 4:
                    # consumer 0 holds the upper half of the strips, consumer 1 the lower half
                    skip = strip % 2 + strip // 2 * ((strips + 1) // 2)
                    wanted = strips > (strip % 2) * 2 + strip // 2
            load_strip(descs[0], at + skip * STRIP, k0, tile, barrier, smem, wanted, TILING)
        if TILING.wide:
            for piece in gl.static_range(2):
                load_piece(descs[1], tile.group * b_step, tile.col + piece * TILING.piece, k0, tile, barrier,
                           ring.b.index(stage * 3 + 2 - piece), strips <= 2 * (2 - piece), TILING)  # fmt: skip
        else:
            for piece in gl.static_range(TILING.pieces):
                load_piece(descs[1], tile.group * b_step, tile.col + piece * TILING.piece, k0, tile, barrier,
                           ring.b.index(stage * TILING.pieces + piece), True, TILING)  # fmt: skip
        if TILING.copied == "scales":
            load_scales(descs[2], k0 // DEEP, tile.row, barrier, ring.scales[0].index(stage))
            load_scales(descs[3], k0 // DEEP, tile.col, barrier, ring.scales[1].index(stage))
        stage, phase = after(stage, phase, TILING.stages)
    return stage, phase


@gluon.jit
def produce(descs, ring, mail, work, a_rows, b_step, TILING: gl.constexpr):
    """The loading warp: picks the tiles, and keeps all stages of A and B in flight across tile borders.

    Tiles of jagged groups differ in cost, so they are drawn from a counter unless the order is "dealt". A tile is
    drawn, and its record read, while the last blocks of the tile before it are on their way: the answers
    take longer to come than the ring lasts.
    """
    DEEP: gl.constexpr = 8 * ROW_BYTES // ring.a.dtype.primitive_bitwidth
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    number = gl.program_id(0)
    total = work.total
    found = total
    if TILING.form == "search":
        found = tiles_up_to(work, TILING)
        total = gl.max(found, 0) * (1 if TILING.wide else work.tiles_n)
    record = record_of(number, total, found, work, TILING)
    while number < total:
        tile = tile_from(record, number, work, TILING)
        publish(mail, slot, turn, tile)
        slot, turn = after_slot(slot, turn)
        blocks = gl.maximum((tile.k_length + DEEP - 1) // DEEP, 1)
        drawing = gl.maximum(blocks - 4, 0)
        reading = gl.maximum(blocks - 2, 0)
        stage, phase = fill(descs, ring, 0, drawing, stage, phase, tile, a_rows, b_step, TILING)
        drawn = draw(work.records, TILING.order)
        stage, phase = fill(descs, ring, drawing, reading, stage, phase, tile, a_rows, b_step, TILING)
        number = following(number, drawn, TILING.order)
        record = record_of(number, total, found, work, TILING)
        stage, phase = fill(descs, ring, reading, blocks, stage, phase, tile, a_rows, b_step, TILING)
    if TILING.order == "drawn":
        retire(work.records)
    nothing = total * 0
    publish(mail, slot, turn, Tile(nothing, nothing, nothing, nothing, nothing, nothing, nothing))


@gluon.constexpr_function
def sum_layout(columns, bits, warps=4):
    """How the warps of a role hold sums of products of operands of so many bits."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[warps, 1], instr_shape=[16, columns, 256 // bits])


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def moved(spot, down: gl.constexpr, right: gl.constexpr):
    """The place of a strip `down` rows below and `right` columns beside another."""
    return Spot(spot.group, spot.row + down, spot.rows - down, spot.low, spot.bound, spot.col + right)


@gluon.jit
def nothing_yet(target, like, PIECE: gl.constexpr, BITS: gl.constexpr):
    """A strip without rows, whose store stores nothing, in the layout that products of BITS wide operands have."""
    layout: gl.constexpr = sum_layout(PIECE, BITS)
    none = like * 0
    return gl.zeros([STRIP, PIECE], target.out.dtype.element_ty, layout), Spot(none, none, none, none, none, none)


@gluon.jit
def finished(acc, target, spot, END: gl.constexpr):
    """act(alpha * acc + beta * C + bias) in the output's dtype; END.c is the order of C or None."""
    strides = target.strides
    out = target.out
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    owned = owned_in(layout, acc.shape[1], spot, target.n)
    wide = spot.group.to(gl.int64)
    c_ptrs = out
    bias_ptrs = out
    bias_mask = (j < target.n - spot.col)[None, :]
    if END.c is not None:
        c_rows = target.c + wide * strides.c_group + (spot.row + i).to(gl.int64) * strides.c_row
        if END.c == "row":
            c_ptrs = (c_rows + spot.col)[:, None] + j[None, :]
        else:
            c_ptrs = c_rows[:, None] + (spot.col + j).to(gl.int64)[None, :] * strides.c_col
    if END.bias == "down":
        bias = target.bias + wide * strides.bias_group
        bias_ptrs = bias + (spot.row + i).to(gl.int64)[:, None] * strides.bias_col
        bias_mask = (i < spot.rows)[:, None]
    elif END.bias == "across":
        bias = target.bias + wide * strides.bias_group
        bias_ptrs = bias + (spot.col + j).to(gl.int64)[None, :] * strides.bias_col
    return finish(acc, strides.alpha_bits, strides.beta_bits, c_ptrs, owned, bias_ptrs, bias_mask,
                  out.dtype.element_ty, END.alpha == "any", END.c is not None, END.bias is not None,
                  END.activation)  # fmt: skip


@gluon.jit
def owned_in(layout: gl.constexpr, COLUMNS: gl.constexpr, spot, n):
    """Which elements of a strip belong to the group and to the matrix."""
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return ((i < spot.rows) & (spot.row + i >= spot.low))[:, None] & (j < n - spot.col)[None, :]


@gluon.jit
def write(acc, target, spot, PART: gl.constexpr, END: gl.constexpr):
    """The epilogue and the store of a strip, part by part, which takes fewer registers than all at once."""
    WIDE: gl.constexpr = acc.shape[1]
    if WIDE > PART:
        left, right = halves(acc)
        write(left, target, spot, PART, END)
        write(right, target, moved(spot, 0, WIDE // 2), PART, END)
    else:
        store((finished(acc, target, spot, END), spot), target, PART, END)


@gluon.jit
def store(late, target, PART: gl.constexpr, END: gl.constexpr):
    """One finished strip, in parts of PART columns: by TMA through shared memory, or by plain stores."""
    result, spot = late
    WIDE: gl.constexpr = result.shape[1]
    if WIDE > PART:
        left, right = halves(result)
        store((left, spot), target, PART, END)
        store((right, moved(spot, 0, WIDE // 2)), target, PART, END)
    elif END.store == "tma":
        store_bounded(result, target, spot)
    else:
        store_plain(result, target, spot, END.store)


@gluon.jit
def store_bounded(result, target, spot):
    """Through shared memory; the map drops rows behind the tile's. Waits first for the store before to have been
    read."""
    end = spot.group * target.strides.out_rows + spot.bound
    at = BILLION - spot.bound + spot.row
    tma.store_wait(0)
    barrier()
    target.staging.store(result)
    fence_async_shared()
    barrier()
    box = target.staging.reshape([1, 1, STRIP, result.shape[1]])
    send(target.desc, [BILLION, end, at, spot.col], box)


@gluon.jit
def store_plain(result, target, spot, STORE: gl.constexpr):
    """Element by element, neighbouring lanes at neighbouring addresses, for outputs that no map can express."""
    COLUMNS: gl.constexpr = result.shape[1]
    strides = target.strides
    lines = target.out + spot.group.to(gl.int64) * strides.out_group
    if STORE == "row":
        blocked: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        i = gl.arange(0, WARPS, gl.SliceLayout(1, blocked))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, blocked))
        start = lines + spot.row.to(gl.int64) * strides.out_row + spot.col
        at = start + (i.to(gl.int64) * strides.out_row)[:, None] + j[None, :]
        store_rows(gl.convert_layout(result, blocked), at, strides.out_row * WARPS, spot.low - spot.row, spot.rows,
                   j < target.n - spot.col, blocked)  # fmt: skip
    else:
        turned: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        i = gl.arange(0, STRIP, gl.SliceLayout(1, turned))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, turned))
        owned = owned_in(turned, COLUMNS, spot, target.n)
        of_rows = (lines + (spot.row + i).to(gl.int64) * strides.out_row)[:, None]
        places = of_rows + (spot.col + j).to(gl.int64)[None, :] * strides.out_col
        gl.store(places, gl.convert_layout(result, turned), mask=owned)


@gluon.jit
def store_rows(result, at, step, first, rows, within, LAYOUT: gl.constexpr):
    """The rows from `first` on and before `rows`: one by each warp, then the next ones.

    An address is one addition away from another: the product of each row's number and the stride would cost more
    instructions than the stores do.
    """
    ROWS: gl.constexpr = result.shape[0]
    if ROWS > WARPS:
        HALF: gl.constexpr = ROWS // 2
        upper, lower = result.reshape([2, HALF, result.shape[1]]).permute(1, 2, 0).split()
        at = store_rows(upper, at, step, first, rows, within, LAYOUT)
        return store_rows(lower, at, step, first - HALF, rows - HALF, within, LAYOUT)
    else:
        i = gl.arange(0, WARPS, gl.SliceLayout(1, LAYOUT))
        owned = ((i >= first) & (i < rows))[:, None] & within[None, :]
        gl.store(at, gl.convert_layout(result, LAYOUT), mask=owned)
        return at + step


@gluon.jit
def owned_rows(ends, extents, SIZES: gl.constexpr):
    """[low, high): from the start of the first group to the end of the last one."""
    groups = extents.groups
    if SIZES:
        g = gl.arange(0, 256, gl.BlockedLayout([8], [32], [WARPS], [0]))
        high = gl.sum(gl.load(ends + g, mask=g < groups, other=0).to(gl.int32), 0)
        low = high * 0
    else:
        low = gl.load(ends - 1, mask=groups * extents.head > 0, other=0).to(gl.int64)
        high = gl.load(ends + groups - 1, mask=groups > 0, other=0).to(gl.int64)
    low = gl.minimum(gl.maximum(low, 0), extents.m)
    high = gl.minimum(gl.maximum(high, low), extents.m)
    return low.to(gl.int32), high.to(gl.int32)


@gluon.jit
def zero_unowned(target, ends, extents, END: gl.constexpr, SIZES: gl.constexpr):
    """Zeros in the rows of a result that no group owns, shared out among the programs.

    One consumer writes them before its first tile, while the loading warp looks for that tile.
    """
    STORE: gl.constexpr = END.store
    m = extents.m
    n = target.n
    out = target.out
    group_step = target.strides.out_group
    row_step = target.strides.out_row
    # 16 bytes at once where rows are known to be aligned, else neighbouring lanes at neighbouring addresses
    VECTOR: gl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth if STORE == "tma" else 1
    if STORE == "tma":
        out = gl.multiple_of(out, 16)
        group_step = gl.multiple_of(group_step, VECTOR)
        row_step = gl.multiple_of(row_step, VECTOR)
        n = gl.multiple_of(n, VECTOR)
    ROWS: gl.constexpr = 64 if STORE == "col" else 16
    COLUMNS: gl.constexpr = 16 if STORE == "col" else 32 * VECTOR
    down_memory: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, WARPS], [0, 1])
    along_memory: gl.constexpr = gl.BlockedLayout([1, VECTOR], [1, 32], [WARPS, 1], [1, 0])
    layout: gl.constexpr = down_memory if STORE == "col" else along_memory
    i = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    zeros = gl.zeros([ROWS, COLUMNS], out.dtype.element_ty, layout)
    across = (n + COLUMNS - 1) // COLUMNS
    if END.zero == "masked":
        strips_per_group = (m + ROWS - 1) // ROWS
        strips = extents.groups * strips_per_group
    else:
        low, high = owned_rows(ends, extents, SIZES)
        strips = (m - (high - low) + ROWS - 1) // ROWS
    for block in range(gl.program_id(0), strips * across, gl.num_programs(0)):
        strip = block // across
        column = block % across * COLUMNS + j
        lines = out
        if END.zero == "masked":
            g = strip // strips_per_group
            lines += g.to(gl.int64) * group_step
            row = strip % strips_per_group * ROWS + i
            valid = gl.load(ends + g).to(gl.int64)
            unowned = (row >= valid) & (row < m)
        else:
            row = strip * ROWS + i
            row = gl.where(row < low, row, row + (high - low))
            unowned = row < m
        if STORE == "col":
            of_rows = (lines + row.to(gl.int64) * row_step)[:, None]
            places = of_rows + column.to(gl.int64)[None, :] * target.strides.out_col
        else:
            places = (lines + row.to(gl.int64) * row_step)[:, None] + column[None, :]
        gl.store(places, zeros, mask=unowned[:, None] & (column < n)[None, :])


@gluon.jit
def oriented(smem, TURN: gl.constexpr):
    """A block of shared memory as the matrix that it holds, or as its transpose."""
    if TURN:
        return smem.permute((1, 0))
    else:
        return smem


@gluon.jit
def operands_of(ring, stage, first, LAST: gl.constexpr, STRIPS: gl.constexpr, PIECES: gl.constexpr,
                TILING: gl.constexpr):  # fmt: skip
    """The blocks of A and B of a consumer's first accumulator, or of its second.

    `first` is the consumer's first strip in a stage; for tiles of two widths its units of A and of B.
    """
    if TILING.wide:
        a = strips_in(ring.a, stage * 3 + first[0]).index(LAST)
        b = ring.b.index(stage * 3 + first[1])
    else:
        a = ring.a.index(stage * TILING.most + first + LAST * (STRIPS - 1))
        b = ring.b.index(stage * PIECES + LAST * (PIECES - 1))
    return oriented(a, TILING.a_order == "col"), oriented(b, TILING.b_order == "col")


@gluon.jit
def step(ring, stage, first, acc0, acc1, STRIPS: gl.constexpr, PIECES: gl.constexpr, TILING: gl.constexpr,
         WHICH: gl.constexpr):  # fmt: skip
    """Starts the products of one block: the first accumulator's, the second's, or both."""
    if WHICH != 1:
        a, b = operands_of(ring, stage, first, 0, STRIPS, PIECES, TILING)
        acc0 = warpgroup_mma(a, b, acc0, is_async=True)
    if WHICH != 0 and STRIPS * PIECES == 2:
        a, b = operands_of(ring, stage, first, 1, STRIPS, PIECES, TILING)
        acc1 = warpgroup_mma(a, b, acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def multiply(ring, stage, phase, k_length, first, late, target, spot, STRIPS: gl.constexpr, PIECES: gl.constexpr,
             PART: gl.constexpr, TILING: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One tile: products of one strip, of two strips, or of one strip with two pieces of columns.

    `late` is what the tile before left to be stored, where registers allow that (END.late). It goes out while
    the tensor cores are at the first block of this tile, and the first of two results while they are at the
    last block of the second.
    A block is handed back one step late, once the tensor cores have read it.
    """
    TWO: gl.constexpr = STRIPS * PIECES == 2
    STAGES: gl.constexpr = TILING.stages
    BITS: gl.constexpr = ring.a.dtype.primitive_bitwidth
    layout: gl.constexpr = sum_layout(TILING.piece, BITS)
    zeros = gl.zeros([STRIP, TILING.piece], gl.float32, layout)
    acc0 = warpgroup_mma_init(zeros)
    acc1 = warpgroup_mma_init(zeros)
    mbarrier.wait(ring.full.index(stage), phase)
    acc0, acc1 = step(ring, stage, first, acc0, acc1, STRIPS, PIECES, TILING, 0)
    if END.late:
        store(late, target, PART, END)
    acc0, acc1 = step(ring, stage, first, acc0, acc1, STRIPS, PIECES, TILING, 1)
    # a value of its own: Triton would take `before = stage` for a name that the loop does not change
    before = (stage + STAGES) % STAGES
    stage, phase = after(stage, phase, STAGES)
    for _ in range(8 * ROW_BYTES // BITS, k_length, 8 * ROW_BYTES // BITS):
        mbarrier.wait(ring.full.index(stage), phase)
        acc0, acc1 = step(ring, stage, first, acc0, acc1, STRIPS, PIECES, TILING, 2)
        if TWO:
            acc0, acc1 = warpgroup_mma_wait(num_outstanding=2, deps=[acc0, acc1])
            acc0 = warpgroup_mma_init(acc0)
            acc1 = warpgroup_mma_init(acc1)
        else:
            acc0 = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=[acc0]))
        mbarrier.arrive(ring.empty.index(before))
        before = stage
        stage, phase = after(stage, phase, STAGES)
    other = moved(spot, (STRIPS - 1) * STRIP, (PIECES - 1) * TILING.piece)
    if TWO:
        sum0 = warpgroup_mma_wait(num_outstanding=1, deps=[acc0])
        write(sum0, target, spot, PART, END)
        sum1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc1])
    else:
        sum1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc0])
    mbarrier.arrive(ring.empty.index(before))
    if END.late:
        return (finished(sum1, target, other, END), other), stage, phase
    else:
        write(sum1, target, other, PART, END)
        return late, stage, phase


@gluon.jit
def pass_by(ring, stage, phase, k_length, STAGES: gl.constexpr):
    """Hands the blocks of a tile back unread, where a consumer has no strip in it."""
    for _ in range(0, gl.maximum(k_length, 1), 8 * ROW_BYTES // ring.a.dtype.primitive_bitwidth):
        mbarrier.wait(ring.full.index(stage), phase)
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def consume(WHICH: gl.constexpr, CONSUMERS: gl.constexpr, target, unowned, ring, mail, PART: gl.constexpr,
            TILING: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One warpgroup: its share of each tile's strips."""
    if END.zero is not None and WHICH == CONSUMERS - 1:
        zero_unowned(target, unowned[0], unowned[1], END, TILING.sizes)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    late = nothing_yet(target, g, TILING.piece, ring.a.dtype.primitive_bitwidth)
    while rows > 0:
        bound = row + rows
        above, mine = share_of(WHICH, rows, TILING.most, TILING.wide)
        if TILING.wide:
            apart = gl.where(rows <= 2 * STRIP, WHICH, 0)
            first = (WHICH - apart, 2 - apart)
            col += apart * TILING.columns
        else:
            first = WHICH * (TILING.most // CONSUMERS)
        spot = Spot(g, row + above * STRIP, rows - above * STRIP, low, bound, col)
        if TILING.most == 4 and mine == 2:
            late, stage, phase = multiply(ring, stage, phase, k_length, first, late, target, spot, 2, 1, PART, TILING,
                                          END)  # fmt: skip
        elif mine == 1:
            late, stage, phase = multiply(ring, stage, phase, k_length, first, late, target, spot, 1, TILING.pieces,
                                          PART, TILING, END)  # fmt: skip
        else:
            stage, phase = pass_by(ring, stage, phase, k_length, TILING.stages)
        slot, turn = after_slot(slot, turn)
        g, row, rows, col, low, k_length = take(mail, slot, turn)
    if END.late:
        store(late, target, PART, END)
    if END.store == "tma":
        tma.store_wait(0)


@gluon.jit
def barriers(NUMBER: gl.constexpr, ARRIVALS: gl.constexpr):
    """NUMBER barriers that each wait for ARRIVALS."""
    made = gl.allocate_shared_memory(gl.int64, [NUMBER, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(NUMBER):
        mbarrier.init(made.index(s), count=ARRIVALS)
    return made


@gluon.jit
def hopper_kernel(
    a_desc, b_desc, out_desc, c, out, bias, records, ends, m, n, k, groups, head, a_rows, b_step, out_rows,
    c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    FORM: gl.constexpr, BN: gl.constexpr, PIECE: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr,
    MASKED: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr, WIDE: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    LATE: gl.constexpr, ZERO: gl.constexpr, SIZES: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Roles: CONSUMERS warpgroups multiply and write, one more warp loads."""
    TILING: gl.constexpr = Tiling(FORM, BN, BN // PIECE, PIECE, MOST, STAGES, WIDTH, ORDER, ALIGN, MASKED, SIZES,
                                  A_ORDER, B_ORDER, WIDE, None)  # fmt: skip
    END: gl.constexpr = End(STORE, C, BIAS, ALPHA, ACTIVATION, LATE, ZERO)
    dtype: gl.constexpr = a_desc.dtype
    out_type: gl.constexpr = out.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    DEEP: gl.constexpr = 8 * ROW_BYTES // dtype.primitive_bitwidth
    COUNT: gl.constexpr = STAGES * (3 if WIDE else BN // PIECE)
    block: gl.constexpr = [COUNT, DEEP, PIECE] if B_ORDER == "row" else [COUNT, PIECE, DEEP]
    b_smem = gl.allocate_shared_memory(dtype, block, swizzled)
    if WIDE:
        a_smem = b_smem
    else:
        a_smem = gl.allocate_shared_memory(dtype, [STAGES * MOST, STRIP, DEEP], swizzled)
    held: gl.constexpr = [CONSUMERS, STRIP, PART] if STORE == "tma" else [CONSUMERS, 8, 64]
    staging = gl.allocate_shared_memory(out_type, held, staged)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = Ring(a_smem, b_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS), ())
    mail = Mail(tickets, barriers(2, 1), barriers(2, CONSUMERS))
    work = work_of(records, ends, m, n, k, groups, head, TILING, ALPHA)
    strides = Strides(c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
                      out_rows)  # fmt: skip
    unowned = (ends, work.extents) if ZERO is not None else ()
    descs = (a_desc, b_desc)
    target0 = Target(out_desc, staging.index(0), c, out, bias, strides, n)
    target1 = Target(out_desc, staging.index(1), c, out, bias, strides, n)
    if CONSUMERS == 3:
        target2 = Target(out_desc, staging.index(2), c, out, bias, strides, n)
        gl.warp_specialize(
            [
                (consume, (0, CONSUMERS, target0, unowned, ring, mail, PART, TILING, END)),
                (consume, (1, CONSUMERS, target1, unowned, ring, mail, PART, TILING, END)),
                (consume, (2, CONSUMERS, target2, unowned, ring, mail, PART, TILING, END)),
                (produce, (descs, ring, mail, work, a_rows, b_step, TILING)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (consume, (0, CONSUMERS, target0, unowned, ring, mail, PART, TILING, END)),
                (consume, (1, CONSUMERS, target1, unowned, ring, mail, PART, TILING, END)),
                (produce, (descs, ring, mail, work, a_rows, b_step, TILING)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )
