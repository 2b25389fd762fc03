# mypy: ignore-errors
"""The warp-specialised kernel for sm_90: one warp loads by TMA, two or three warpgroups multiply by wgmma.

A tile is up to MOST strips of 64 rows by BN columns, so that a ragged group pays for whole strips
and not for whole tiles. The strips are shared out among the consumers, which run apart from each
other within the depth of the ring: while one writes its strip, the others keep the tensor cores
busy. Without multicast the way from the L2 to the SMs is what limits large tiles, so the largest
tile that the registers hold (192 x 256, three consumers) is the best where groups are tall.
Bounded ("ragged") tensor maps zero what lies behind a group's end along K on both operands, and
cut stores at a group's last row, in hardware.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from multigemm.backends.triton.hopper_load import produce
from multigemm.backends.triton.hopper_store import finished, moved, nothing_yet, store, write
from multigemm.backends.triton.hopper_tiles import take

STRIP = gl.constexpr(64)
# a block of K is one swizzled row: 64 elements of 16 bits, or 32 of tf32
ROW_BYTES = gl.constexpr(128)


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
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, PIECE, 256 // BITS])  # fmt: skip
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
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
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
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
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
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
    return stage, phase


@gluon.jit
def consume(WHICH: gl.constexpr, CONSUMERS: gl.constexpr, out, ring, mail, BN: gl.constexpr, PIECE: gl.constexpr,
            PART: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, A_ORDER: gl.constexpr,
            B_ORDER: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One warpgroup: its share of each tile's strips."""
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    FIRST: gl.constexpr = WHICH * (MOST // CONSUMERS)
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    late = nothing_yet(out, g, PIECE, ring[0].dtype.primitive_bitwidth)
    while rows > 0:
        strips = (rows + STRIP - 1) // STRIP
        bound = row + rows
        if MOST == 4:
            above = (strips + 1) // 2 * WHICH
            mine = (strips + 1 - WHICH) // 2
        else:
            above = strips * 0 + WHICH
            mine = gl.where(strips > WHICH, 1, 0)
        spot = (g, row + above * STRIP, rows - above * STRIP, low, bound, col)
        if MOST == 4 and mine == 2:
            late, stage, phase = multiply(ring, stage, phase, k_length, FIRST, late, out, spot, 2, 1, PIECE, MOST,
                                          STAGES, A_ORDER, B_ORDER, PART, END)  # fmt: skip
        elif mine == 1:
            late, stage, phase = multiply(ring, stage, phase, k_length, FIRST, late, out, spot, 1, BN // PIECE, PIECE,
                                          MOST, STAGES, A_ORDER, B_ORDER, PART, END)  # fmt: skip
        else:
            stage, phase = pass_by(ring, stage, phase, k_length, STAGES)
        slot ^= 1
        if slot == 0:
            turn ^= 1
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
    LATE: gl.constexpr, CONSUMERS: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
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
    if CONSUMERS == 3:
        out2 = (out_desc, staging.index(2), tensors, strides, n)
        gl.warp_specialize(
            [
                (consume, (0, CONSUMERS, out0, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
                (consume, (1, CONSUMERS, out1, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
                (consume, (2, CONSUMERS, out2, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
                (produce, ((a_desc, b_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step, FORM,
                           BN, BN // PIECE, PIECE, MOST, STAGES, WIDTH, ORDER, ALIGN, MASKED, A_ORDER, B_ORDER)),
            ],
            [4, 4, 1],
            [CONSUMER_REGISTERS, CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (consume, (0, CONSUMERS, out0, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
                (consume, (1, CONSUMERS, out1, ring, mail, BN, PIECE, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
                (produce, ((a_desc, b_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step, FORM,
                           BN, BN // PIECE, PIECE, MOST, STAGES, WIDTH, ORDER, ALIGN, MASKED, A_ORDER, B_ORDER)),
            ],
            [4, 1],
            [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
        )  # fmt: skip
