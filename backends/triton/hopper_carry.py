# mypy: ignore-errors
"""The warp-specialised kernel for weights that no tensor map expresses: four warps carry them through registers.

A tile's rows come by TMA, as in hopper.py, and the consumers are the same. The weights are read element by element,
neighbouring lanes at neighbouring addresses, whatever their alignment, and written to the ring in the order that
wgmma reads: a copy of all weights into aligned rows would cost more memory traffic than the product itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from multigemm.backends.triton.hopper import barriers, consume
from multigemm.backends.triton.hopper_load import load_strip
from multigemm.backends.triton.hopper_tiles import (
    draw,
    following,
    publish,
    record_of,
    retire,
    rows_up_to,
    take,
    tile_from,
)

STRIP = gl.constexpr(64)
DEEP = gl.constexpr(64)
BILLION = gl.constexpr(1 << 30)


@gluon.jit
def fill_rows(desc, ring, block, blocks, stage, phase, work, a_rows, MOST: gl.constexpr, STAGES: gl.constexpr,
              A_ORDER: gl.constexpr):  # fmt: skip
    """Sends the blocks [block, blocks) of a tile's A into the ring, as its stages become free."""
    a_smem, _, full, empty = ring
    g, row, rows, _, _, k_start, k_length = work
    A_BYTES: gl.constexpr = STRIP * 128
    strips = (rows + STRIP - 1) // STRIP
    at = g * a_rows + row
    beyond = gl.where(k_length == 0, BILLION, 0)
    for number in range(block, blocks):
        k0 = beyond + number * DEEP
        mbarrier.wait(empty.index(stage), phase)
        barrier = full.index(stage)
        for count in gl.static_range(1, MOST + 1):
            mbarrier.expect(barrier, count * A_BYTES, pred=strips == count)
        for strip in gl.static_range(MOST):
            if MOST == 4:
                skip = strip % 2 + strip // 2 * ((strips + 1) // 2)
                wanted = strips > (strip % 2) * 2 + strip // 2
            else:
                skip = strip
                wanted = strips > strip
            load_strip(desc, at + skip * STRIP, k0, k_start, k_length, barrier,
                       a_smem.index(stage * MOST + strip), wanted, "rows", A_ORDER)  # fmt: skip
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def produce_rows(desc, ring, mail, records, ends, extents, tiles_n, total, a_rows, FORM: gl.constexpr,
                 BN: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr,
                 ALIGN: gl.constexpr, MASKED: gl.constexpr, A_ORDER: gl.constexpr):  # fmt: skip
    """The loading warp of hopper_load.produce, for A alone."""
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    tile = gl.program_id(0)
    found = total
    if FORM == "search":
        found = rows_up_to(ends, extents, MOST, ALIGN, MASKED)
        total = gl.max(found, 0) * tiles_n
    record = record_of(tile, total, found, records, ends, extents, tiles_n, FORM, MOST, MASKED)
    while tile < total:
        work = tile_from(record, tile, extents, tiles_n, FORM, BN, MOST, WIDTH, ALIGN)
        publish(mail, slot, turn, work)
        slot ^= 1
        if slot == 0:
            turn ^= 1
        blocks = gl.maximum((work[6] + DEEP - 1) // DEEP, 1)
        drawing = gl.maximum(blocks - 4, 0)
        reading = gl.maximum(blocks - 2, 0)
        stage, phase = fill_rows(desc, ring, 0, drawing, stage, phase, work, a_rows, MOST, STAGES, A_ORDER)
        drawn = draw(records, ORDER)
        stage, phase = fill_rows(desc, ring, drawing, reading, stage, phase, work, a_rows, MOST, STAGES, A_ORDER)
        tile = following(tile, drawn, ORDER)
        record = record_of(tile, total, found, records, ends, extents, tiles_n, FORM, MOST, MASKED)
        stage, phase = fill_rows(desc, ring, reading, blocks, stage, phase, work, a_rows, MOST, STAGES, A_ORDER)
    if ORDER == "drawn":
        retire(records)
    nothing = total * 0
    publish(mail, slot, turn, (nothing, nothing, nothing, nothing, nothing, nothing, nothing))


@gluon.jit
def carry(ring, mail, b, n, b_group, b_line, BN: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """Four warps: each block of B from memory to the ring. The next block is asked for once this one is written."""
    _, b_smem, full, empty = ring
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    LINES: gl.constexpr = DEEP if B_ORDER == "row" else BN
    WIDE: gl.constexpr = BN if B_ORDER == "row" else DEEP
    i = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    j = gl.arange(0, WIDE, gl.SliceLayout(0, layout))
    places = i.to(gl.int64)[:, None] * b_line + j[None, :]
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        base = b + g.to(gl.int64) * b_group
        if B_ORDER == "row":
            base = base + col
            step = b_line * DEEP
        else:
            base = base + col.to(gl.int64) * b_line
            step = b_line * 0 + DEEP
        for k0 in range(0, gl.maximum(k_length, 1), DEEP):
            if B_ORDER == "row":
                inside = (i < k_length - k0)[:, None] & (j < n - col)[None, :]
            else:
                inside = (i < n - col)[:, None] & (j < k_length - k0)[None, :]
            values = gl.load(base + places, mask=inside, other=0)
            base = base + step
            mbarrier.wait(empty.index(stage), phase)
            b_smem.index(stage).store(values)
            fence_async_shared()
            mbarrier.arrive(full.index(stage))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        slot ^= 1
        if slot == 0:
            turn ^= 1
        g, _, rows, col, _, k_length = take(mail, slot, turn)


@gluon.jit
def carry_kernel(
    a_desc, out_desc, b, c, out, bias, records, ends, m, n, k, groups, head, a_rows, out_rows,
    b_group, b_line, c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    FORM: gl.constexpr, BN: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr,
    MASKED: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    LATE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    CARRIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Roles: two warpgroups multiply and write, one warp loads A, four warps carry B."""
    dtype: gl.constexpr = a_desc.dtype
    out_type: gl.constexpr = out.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    a_smem = gl.allocate_shared_memory(dtype, [STAGES * MOST, STRIP, DEEP], swizzled)
    block: gl.constexpr = [STAGES, DEEP, BN] if B_ORDER == "row" else [STAGES, BN, DEEP]
    b_smem = gl.allocate_shared_memory(dtype, block, swizzled)
    held: gl.constexpr = [2, STRIP, PART] if STORE == "tma" else [2, 8, 64]
    staging = gl.allocate_shared_memory(out_type, held, staged)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = (a_smem, b_smem, barriers(STAGES, 2), barriers(STAGES, 2))
    mail = (tickets, barriers(2, 1), barriers(2, 3))
    tiles_n = (n + BN - 1) // BN
    if FORM == "rows":
        total = gl.load(records) * tiles_n
    elif FORM == "search":
        total = tiles_n * 0
    else:
        total = groups * ((m + MOST * STRIP - 1) // (MOST * STRIP)) * tiles_n
    if ALPHA == "zero":
        k = k * 0
    extents = (m, n, k, groups, head)
    tensors = (c, out, bias)
    strides = (c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col,
               alpha_bits, beta_bits, out_rows)  # fmt: skip
    END: gl.constexpr = (STORE, C, BIAS, ALPHA, ACTIVATION, LATE)
    out0 = (out_desc, staging.index(0), tensors, strides, n)
    out1 = (out_desc, staging.index(1), tensors, strides, n)
    gl.warp_specialize(
        [
            (consume, (0, 2, out0, ring, mail, BN, BN, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
            (consume, (1, 2, out1, ring, mail, BN, BN, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
            (carry, (ring, mail, b, n, b_group, b_line, BN, STAGES, B_ORDER)),
            (produce_rows, (a_desc, ring, mail, records, ends, extents, tiles_n, total, a_rows, FORM, BN, MOST, STAGES,
                            WIDTH, ORDER, ALIGN, MASKED, A_ORDER)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CARRIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
