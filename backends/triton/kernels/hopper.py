# mypy: ignore-errors
"""The warp-specialised kernel for sm_90: one warp loads by TMA, two or three warpgroups multiply by wgmma.

A tile is up to MOST strips of 64 rows by BN columns, so that a ragged group pays for whole strips
and not for whole tiles. The strips are shared out among the consumers, which run apart from each
other within the depth of the ring: while one writes its strip, the others keep the tensor cores
busy. Without multicast the way from the L2 to the SMs is what limits large tiles, so the largest
tile that the registers hold (192 x 256, three consumers) is the best where groups are tall.
Bounded ("ragged") tensor maps zero what lies behind a group's end along K on both operands, and
cut stores at a group's last row, in hardware.

The loading warp issues in order, so whatever it waits for, the ring runs dry behind it. Hence the answers of memory
(the next tile, its record) are asked for some blocks before they are needed. The end of a strip is the epilogue, then
a store that stops at the group's last row.
"""

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
    after,
    after_slot,
    draw,
    following,
    publish,
    record_of,
    retire,
    rows_up_to,
    share_of,
    take,
    tile_from,
    work_of,
)

# what Triton 3.6 calls otherwise than later versions: a block comes from global memory, goes there; a role's warps meet
fetch = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
send = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
barrier = getattr(gl, "thread_barrier", None) or gl.barrier
STRIP = gl.constexpr(64)
# a block of K is one swizzled row: 64 elements of 16 bits, or 32 of tf32
ROW_BYTES = gl.constexpr(128)
BILLION = gl.constexpr(1 << 30)
# of a role that stores
WARPS = gl.constexpr(4)


@gluon.jit
def load_strip(desc, row, k0, k_start, k_length, barrier, smem, pred, FORM: gl.constexpr, ORDER: gl.constexpr):
    """One strip of A, as deep as a block of K."""
    if FORM == "k":
        at = [BILLION, k_start + k_length, BILLION - k_length + k0, row]
        fetch(desc, at, barrier, smem.reshape([1, 1, STRIP, 64]), pred)
    elif ORDER == "row":
        fetch(desc, [row, k0], barrier, smem, pred)
    else:
        fetch(desc, [k0, row], barrier, smem, pred)


@gluon.jit
def load_piece(desc, g, col, k0, k_start, k_length, barrier, smem, FORM: gl.constexpr, ORDER: gl.constexpr,
               PIECE: gl.constexpr):  # fmt: skip
    """One block of B, PIECE columns wide."""
    if FORM == "k":
        at = [BILLION, k_start + k_length, BILLION - k_length + k0, col]
        fetch(desc, at, barrier, smem.reshape([1, 1, 64, PIECE]))
    elif ORDER == "row":
        fetch(desc, [g, k0, col], barrier, smem.reshape([1, 64, PIECE]))
    else:
        fetch(desc, [g, col, k0], barrier, smem.reshape([1, PIECE, smem.shape[1]]))


@gluon.jit
def fill(descs, ring, block, blocks, stage, phase, work, a_rows, b_step, FORM: gl.constexpr, PIECES: gl.constexpr,
         PIECE: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, A_ORDER: gl.constexpr,
         B_ORDER: gl.constexpr):  # fmt: skip
    """Sends the blocks [block, blocks) of a tile's A and B into the ring, as its stages become free.

    B is PIECES boxes of PIECE columns; none where other warps load it (hopper_shift_b).
    """
    a_smem, b_smem, full, empty = ring
    g, row, rows, col, _, k_start, k_length = work
    A_BYTES: gl.constexpr = STRIP * ROW_BYTES
    B_BYTES: gl.constexpr = PIECES * PIECE * ROW_BYTES
    DEEP: gl.constexpr = 8 * ROW_BYTES // a_smem.dtype.primitive_bitwidth
    strips = (rows + STRIP - 1) // STRIP
    at = g * a_rows + row
    # an empty K is one block from beyond the maps' bounds: zeros, without a word to memory
    beyond = gl.where(k_length == 0, BILLION, 0)
    for number in range(block, blocks):
        k0 = beyond + number * DEEP
        mbarrier.wait(empty.index(stage), phase)
        barrier = full.index(stage)
        for count in gl.static_range(1, MOST + 1):
            mbarrier.expect(barrier, B_BYTES + count * A_BYTES, pred=strips == count)
        for strip in gl.static_range(MOST):
            if MOST == 4:
                # consumer 0 holds the upper half of the strips, consumer 1 the lower half
                skip = strip % 2 + strip // 2 * ((strips + 1) // 2)
                wanted = strips > (strip % 2) * 2 + strip // 2
            else:
                skip = strip
                wanted = strips > strip
            load_strip(descs[0], at + skip * STRIP, k0, k_start, k_length, barrier,
                       a_smem.index(stage * MOST + strip), wanted, FORM, A_ORDER)  # fmt: skip
        for piece in gl.static_range(PIECES):
            load_piece(descs[1], g * b_step, col + piece * PIECE, k0, k_start, k_length, barrier,
                       b_smem.index(stage * PIECES + piece), FORM, B_ORDER, PIECE)  # fmt: skip
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def produce(descs, ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step,
            FORM: gl.constexpr, BN: gl.constexpr, PIECES: gl.constexpr, PIECE: gl.constexpr, MOST: gl.constexpr,
            STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr, MASKED: gl.constexpr,
            SIZES: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr):  # fmt: skip
    """The loading warp: picks the tiles, and keeps STAGES blocks of A and B in flight across tile borders.

    Tiles of jagged groups differ in cost, so they are drawn from a counter unless ORDER is "dealt". A tile is
    drawn, and its record read, while the last blocks of the tile before it are on their way: the answers
    take longer to come than the ring lasts.
    """
    DEEP: gl.constexpr = 8 * ROW_BYTES // ring[0].dtype.primitive_bitwidth
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    tile = gl.program_id(0)
    found = total
    if FORM == "search":
        found = rows_up_to(ends, extents, MOST, ALIGN, MASKED, SIZES)
        total = gl.max(found, 0) * tiles_n
    record = record_of(tile, total, found, records, ends, extents, tiles_n, FORM, MOST, MASKED, SIZES)
    while tile < total:
        work = tile_from(record, tile, extents, tiles_n, FORM, BN, MOST, WIDTH, ALIGN)
        publish(mail, slot, turn, work)
        slot, turn = after_slot(slot, turn)
        blocks = gl.maximum((work[6] + DEEP - 1) // DEEP, 1)
        drawing = gl.maximum(blocks - 4, 0)
        reading = gl.maximum(blocks - 2, 0)
        stage, phase = fill(descs, ring, 0, drawing, stage, phase, work, a_rows, b_step, FORM, PIECES, PIECE, MOST,
                            STAGES, A_ORDER, B_ORDER)  # fmt: skip
        drawn = draw(records, ORDER)
        stage, phase = fill(descs, ring, drawing, reading, stage, phase, work, a_rows, b_step, FORM, PIECES, PIECE,
                            MOST, STAGES, A_ORDER, B_ORDER)  # fmt: skip
        tile = following(tile, drawn, ORDER)
        record = record_of(tile, total, found, records, ends, extents, tiles_n, FORM, MOST, MASKED, SIZES)
        stage, phase = fill(descs, ring, reading, blocks, stage, phase, work, a_rows, b_step, FORM, PIECES, PIECE, MOST,
                            STAGES, A_ORDER, B_ORDER)  # fmt: skip
    if ORDER == "drawn":
        retire(records)
    nothing = total * 0
    publish(mail, slot, turn, (nothing, nothing, nothing, nothing, nothing, nothing, nothing))


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
    g, row, rows, low, bound, col = spot
    return g, row + down, rows - down, low, bound, col + right


@gluon.jit
def nothing_yet(out, like, PIECE: gl.constexpr, BITS: gl.constexpr):
    """A strip without rows, whose store stores nothing, in the layout that products of BITS wide operands have."""
    layout: gl.constexpr = sum_layout(PIECE, BITS)
    none = like * 0
    return gl.zeros([STRIP, PIECE], out[2][1].dtype.element_ty, layout), (none, none, none, none, none, none)


@gluon.jit
def finished(acc, target, spot, END: gl.constexpr):
    """act(alpha * acc + beta * C + bias) in the output's dtype; END[1] is the order of C or None."""
    C: gl.constexpr = END[1]
    BIAS: gl.constexpr = END[2]
    g, row, rows, low, _, col = spot
    _, _, tensors, strides, n = target
    c, out, bias = tensors
    c_group, c_row, c_col, _, _, _, bias_group, bias_col, alpha_bits, beta_bits, _ = strides
    layout: gl.constexpr = acc.type.layout
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    owned = owned_in(layout, acc.shape[1], row, rows, low, col, n)
    wide = g.to(gl.int64)
    c_ptrs = out
    bias_ptrs = out
    bias_mask = (j < n - col)[None, :]
    if C is not None:
        c_rows = c + wide * c_group + (row + i).to(gl.int64) * c_row
        if C == "row":
            c_ptrs = (c_rows + col)[:, None] + j[None, :]
        else:
            c_ptrs = c_rows[:, None] + (col + j).to(gl.int64)[None, :] * c_col
    if BIAS == "down":
        bias_ptrs = bias + wide * bias_group + (row + i).to(gl.int64)[:, None] * bias_col
        bias_mask = (i < rows)[:, None]
    elif BIAS == "across":
        bias_ptrs = bias + wide * bias_group + (col + j).to(gl.int64)[None, :] * bias_col
    return finish(acc, alpha_bits, beta_bits, c_ptrs, owned, bias_ptrs, bias_mask, out.dtype.element_ty,
                  END[3] == "any", C is not None, BIAS is not None, END[4])  # fmt: skip


@gluon.jit
def owned_in(layout: gl.constexpr, COLUMNS: gl.constexpr, row, rows, low, col, n):
    """Which elements of a strip belong to the group and to the matrix."""
    i = gl.arange(0, STRIP, gl.SliceLayout(1, layout))
    j = gl.arange(0, COLUMNS, gl.SliceLayout(0, layout))
    return ((i < rows) & (row + i >= low))[:, None] & (j < n - col)[None, :]


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
    g, row, rows, low, bound, col = spot
    out_desc, staging, tensors, strides, n = target
    WIDE: gl.constexpr = result.shape[1]
    if WIDE > PART:
        left, right = halves(result)
        store((left, spot), target, PART, END)
        store((right, moved(spot, 0, WIDE // 2)), target, PART, END)
    elif END[0] == "tma":
        store_bounded(result, out_desc, staging, g * strides[10] + bound, BILLION - bound + row, col)
    else:
        store_plain(result, tensors[1], strides, g, row, rows, low, col, n, END[0])


@gluon.jit
def store_bounded(result, out_desc, staging, end, at, col):
    """Through shared memory; the map drops rows from `end` on. Waits first for the store before to have been read."""
    tma.store_wait(0)
    barrier()
    staging.store(result)
    fence_async_shared()
    barrier()
    box = staging.reshape([1, 1, STRIP, result.shape[1]])
    send(out_desc, [BILLION, end, at, col], box)


@gluon.jit
def store_plain(result, out, strides, g, row, rows, low, col, n, STORE: gl.constexpr):
    """Element by element, neighbouring lanes at neighbouring addresses, for outputs that no map can express."""
    COLUMNS: gl.constexpr = result.shape[1]
    lines = out + g.to(gl.int64) * strides[3]
    if STORE == "row":
        blocked: gl.constexpr = gl.BlockedLayout([1, 1], [1, 32], [4, 1], [1, 0])
        i = gl.arange(0, WARPS, gl.SliceLayout(1, blocked))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, blocked))
        start = lines + row.to(gl.int64) * strides[4] + col
        at = start + (i.to(gl.int64) * strides[4])[:, None] + j[None, :]
        store_rows(gl.convert_layout(result, blocked), at, strides[4] * WARPS, low - row, rows, j < n - col, blocked)
    else:
        turned: gl.constexpr = gl.BlockedLayout([1, 1], [32, 1], [1, 4], [0, 1])
        i = gl.arange(0, STRIP, gl.SliceLayout(1, turned))
        j = gl.arange(0, COLUMNS, gl.SliceLayout(0, turned))
        owned = owned_in(turned, COLUMNS, row, rows, low, col, n)
        places = (lines + (row + i).to(gl.int64) * strides[4])[:, None] + (col + j).to(gl.int64)[None, :] * strides[5]
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
    m, _, _, groups, head = extents
    if SIZES:
        g = gl.arange(0, 256, gl.BlockedLayout([8], [32], [WARPS], [0]))
        high = gl.sum(gl.load(ends + g, mask=g < groups, other=0).to(gl.int32), 0)
        low = high * 0
    else:
        low = gl.load(ends - 1, mask=groups * head > 0, other=0).to(gl.int64)
        high = gl.load(ends + groups - 1, mask=groups > 0, other=0).to(gl.int64)
    low = gl.minimum(gl.maximum(low, 0), m)
    high = gl.minimum(gl.maximum(high, low), m)
    return low.to(gl.int32), high.to(gl.int32)


@gluon.jit
def zero_unowned(target, ends, extents, STORE: gl.constexpr, ZERO: gl.constexpr, SIZES: gl.constexpr):
    """Zeros in the rows of a result that no group owns, shared out among the programs.

    One consumer writes them before its first tile, while the loading warp looks for that tile.
    """
    m, _, _, groups, _ = extents
    _, _, tensors, strides, n = target
    out = tensors[1]
    group_step = strides[3]
    row_step = strides[4]
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
    if ZERO == "masked":
        strips_per_group = (m + ROWS - 1) // ROWS
        strips = groups * strips_per_group
    else:
        low, high = owned_rows(ends, extents, SIZES)
        strips = (m - (high - low) + ROWS - 1) // ROWS
    for block in range(gl.program_id(0), strips * across, gl.num_programs(0)):
        strip = block // across
        column = block % across * COLUMNS + j
        lines = out
        if ZERO == "masked":
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
            places = (lines + row.to(gl.int64) * row_step)[:, None] + column.to(gl.int64)[None, :] * strides[5]
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
def step(ring, stage, first, acc0, acc1, STRIPS: gl.constexpr, PIECES: gl.constexpr, MOST: gl.constexpr,
         A_ORDER: gl.constexpr, B_ORDER: gl.constexpr, WHICH: gl.constexpr):  # fmt: skip
    """Starts the products of one block: the first accumulator's, the second's, or both."""
    a_smem, b_smem, _, _ = ring
    if WHICH != 1:
        a = oriented(a_smem.index(stage * MOST + first), A_ORDER == "col")
        b = oriented(b_smem.index(stage * PIECES), B_ORDER == "col")
        acc0 = warpgroup_mma(a, b, acc0, is_async=True)
    if WHICH != 0 and STRIPS * PIECES == 2:
        a = oriented(a_smem.index(stage * MOST + first + STRIPS - 1), A_ORDER == "col")
        b = oriented(b_smem.index(stage * PIECES + PIECES - 1), B_ORDER == "col")
        acc1 = warpgroup_mma(a, b, acc1, is_async=True)
    return acc0, acc1


@gluon.jit
def multiply(ring, stage, phase, k_length, first, late, out, spot, STRIPS: gl.constexpr, PIECES: gl.constexpr,
             PIECE: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, A_ORDER: gl.constexpr,
             B_ORDER: gl.constexpr, PART: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One tile: products of one strip, of two strips, or of one strip with two pieces of columns.

    `late` is what the tile before left to be stored, where registers allow that (END[5]). It goes out while
    the tensor cores are at the first block of this tile, and the first of two results while they are at the
    last block of the second.
    A block is handed back one step late, once the tensor cores have read it.
    """
    TWO: gl.constexpr = STRIPS * PIECES == 2
    _, _, full, empty = ring
    BITS: gl.constexpr = ring[0].dtype.primitive_bitwidth
    layout: gl.constexpr = sum_layout(PIECE, BITS)
    zeros = gl.zeros([STRIP, PIECE], gl.float32, layout)
    acc0 = warpgroup_mma_init(zeros)
    acc1 = warpgroup_mma_init(zeros)
    mbarrier.wait(full.index(stage), phase)
    acc0, acc1 = step(ring, stage, first, acc0, acc1, STRIPS, PIECES, MOST, A_ORDER, B_ORDER, 0)
    if END[5]:
        store(late, out, PART, END)
    acc0, acc1 = step(ring, stage, first, acc0, acc1, STRIPS, PIECES, MOST, A_ORDER, B_ORDER, 1)
    # a value of its own: Triton would take `before = stage` for a name that the loop does not change
    before = (stage + STAGES) % STAGES
    stage, phase = after(stage, phase, STAGES)
    for _ in range(8 * ROW_BYTES // BITS, k_length, 8 * ROW_BYTES // BITS):
        mbarrier.wait(full.index(stage), phase)
        acc0, acc1 = step(ring, stage, first, acc0, acc1, STRIPS, PIECES, MOST, A_ORDER, B_ORDER, 2)
        if TWO:
            acc0, acc1 = warpgroup_mma_wait(num_outstanding=2, deps=[acc0, acc1])
            acc0 = warpgroup_mma_init(acc0)
            acc1 = warpgroup_mma_init(acc1)
        else:
            acc0 = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=1, deps=[acc0]))
        mbarrier.arrive(empty.index(before))
        before = stage
        stage, phase = after(stage, phase, STAGES)
    other = moved(spot, (STRIPS - 1) * STRIP, (PIECES - 1) * PIECE)
    if TWO:
        sum0 = warpgroup_mma_wait(num_outstanding=1, deps=[acc0])
        write(sum0, out, spot, PART, END)
        sum1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc1])
    else:
        sum1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc0])
    mbarrier.arrive(empty.index(before))
    if END[5]:
        return (finished(sum1, out, other, END), other), stage, phase
    else:
        write(sum1, out, other, PART, END)
        return late, stage, phase


@gluon.jit
def pass_by(ring, stage, phase, k_length, STAGES: gl.constexpr):
    """Hands the blocks of a tile back unread, where a consumer has no strip in it."""
    for _ in range(0, gl.maximum(k_length, 1), 8 * ROW_BYTES // ring[0].dtype.primitive_bitwidth):
        mbarrier.wait(full_of(ring).index(stage), phase)
        mbarrier.arrive(empty_of(ring).index(stage))
        stage, phase = after(stage, phase, STAGES)
    return stage, phase


@gluon.jit
def consume(WHICH: gl.constexpr, CONSUMERS: gl.constexpr, out, unowned, ring, mail, BN: gl.constexpr,
            PIECE: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, A_ORDER: gl.constexpr,
            B_ORDER: gl.constexpr, END: gl.constexpr, ZERO: gl.constexpr, SIZES: gl.constexpr):  # fmt: skip
    """One warpgroup: its share of each tile's strips."""
    if ZERO is not None and WHICH == CONSUMERS - 1:
        zero_unowned(out, unowned[0], unowned[1], END[0], ZERO, SIZES)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    FIRST: gl.constexpr = WHICH * (MOST // CONSUMERS)
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    late = nothing_yet(out, g, PIECE, ring[0].dtype.primitive_bitwidth)
    while rows > 0:
        bound = row + rows
        above, mine = share_of(WHICH, rows, MOST)
        spot = (g, row + above * STRIP, rows - above * STRIP, low, bound, col)
        if MOST == 4 and mine == 2:
            late, stage, phase = multiply(ring, stage, phase, k_length, FIRST, late, out, spot, 2, 1, PIECE, MOST,
                                          STAGES, A_ORDER, B_ORDER, PART, END)  # fmt: skip
        elif mine == 1:
            late, stage, phase = multiply(ring, stage, phase, k_length, FIRST, late, out, spot, 1, BN // PIECE, PIECE,
                                          MOST, STAGES, A_ORDER, B_ORDER, PART, END)  # fmt: skip
        else:
            stage, phase = pass_by(ring, stage, phase, k_length, STAGES)
        slot, turn = after_slot(slot, turn)
        g, row, rows, col, low, k_length = take(mail, slot, turn)
    if END[5]:
        store(late, out, PART, END)
    if END[0] == "tma":
        tma.store_wait(0)


@gluon.jit
def full_of(ring):
    return ring[2]


@gluon.jit
def empty_of(ring):
    return ring[3]


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
    MASKED: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    LATE: gl.constexpr, ZERO: gl.constexpr, SIZES: gl.constexpr, CONSUMERS: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Roles: CONSUMERS warpgroups multiply and write, one more warp loads."""
    dtype: gl.constexpr = a_desc.dtype
    out_type: gl.constexpr = out.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    DEEP: gl.constexpr = 8 * ROW_BYTES // dtype.primitive_bitwidth
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * MOST, STRIP, DEEP], swizzled)
    COUNT: gl.constexpr = STAGES * (BN // PIECE)
    block: gl.constexpr = [COUNT, DEEP, PIECE] if B_ORDER == "row" else [COUNT, PIECE, DEEP]
    b_smem = gl.allocate_shared_memory(dtype, block, swizzled)
    held: gl.constexpr = [CONSUMERS, STRIP, PART] if STORE == "tma" else [CONSUMERS, 8, 64]
    staging = gl.allocate_shared_memory(out_type, held, staged)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = (a_smem, b_smem, barriers(STAGES, 1), barriers(STAGES, CONSUMERS))
    mail = (tickets, barriers(2, 1), barriers(2, CONSUMERS))
    tiles_n, total, extents = work_of(records, m, n, k, groups, head, FORM, BN, MOST, ALPHA)
    tensors = (c, out, bias)
    strides = (c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col,
               alpha_bits, beta_bits, out_rows)  # fmt: skip
    END: gl.constexpr = (STORE, C, BIAS, ALPHA, ACTIVATION, LATE)
    unowned = (ends, extents) if ZERO is not None else ()
    out0 = (out_desc, staging.index(0), tensors, strides, n)
    out1 = (out_desc, staging.index(1), tensors, strides, n)
    if CONSUMERS == 3:
        out2 = (out_desc, staging.index(2), tensors, strides, n)
        gl.warp_specialize(
            [
                (consume, (0, CONSUMERS, out0, unowned, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER,
                           END, ZERO, SIZES)),
                (consume, (1, CONSUMERS, out1, unowned, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER,
                           END, ZERO, SIZES)),
                (consume, (2, CONSUMERS, out2, unowned, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER,
                           END, ZERO, SIZES)),
                (produce, ((a_desc, b_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step, FORM,
                           BN, BN // PIECE, PIECE, MOST, STAGES, WIDTH, ORDER, ALIGN, MASKED, SIZES, A_ORDER,
                           B_ORDER)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, CONSUMERS, out0, unowned, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER,
                           END, ZERO, SIZES)),
                (consume, (1, CONSUMERS, out1, unowned, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER,
                           END, ZERO, SIZES)),
                (produce, ((a_desc, b_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step, FORM,
                           BN, BN // PIECE, PIECE, MOST, STAGES, WIDTH, ORDER, ALIGN, MASKED, SIZES, A_ORDER,
                           B_ORDER)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
