# mypy: ignore-errors
"""The warp-specialised kernel for weights that no tensor map expresses: shifted on their way into registers.

The result is computed transposed, C^T = W^T X^T: wgmma takes its first operand from registers, and that are the
weights. Four warps copy the aligned 16 bytes round each line of the weights into a ring of their own (cp.async),
as they are; the consumers shift them when they load their fragments. The rows come by TMA, through a second ring.
So weights are read once, where a copy into aligned lines would read, write and read them again.

The ring of the weights lies behind all that Triton allocates: its lines are read at any element, which no layout
of Triton's expresses, so addresses in it are computed here (`RAW_AT`, from the start of shared memory).
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

from multigemm.backends.triton.hopper import barriers
from multigemm.backends.triton.hopper_lines import COLUMNS, DEEP, PITCH_COL, PITCH_ROW, load_lines, ring_start
from multigemm.backends.triton.hopper_load import produce
from multigemm.backends.triton.hopper_store import moved, write
from multigemm.backends.triton.hopper_tiles import take

# Triton 3.6 calls it otherwise than later versions
reinterpreted = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
STRIP = gl.constexpr(64)


@gluon.jit
def fragment(place, stage, STAGE_BYTES: gl.constexpr, TYPE: gl.constexpr, B_ORDER: gl.constexpr):
    """64 columns of weights, 64 deep, in the registers that wgmma takes its first operand from."""
    at, bits = place
    at = at + stage * STAGE_BYTES
    if B_ORDER == "col":
        asm: gl.constexpr = """{ .reg .b32 low, high;
            ld.shared.b32 low, [$1]; ld.shared.b32 high, [$1 + 4]; shf.r.wrap.b32 $0, low, high, $3; }"""
        found = gl.inline_asm_elementwise(asm, "=r,r,r,r,r", [at, bits], gl.int16, False, 2)
        return found.to(TYPE, bitcast=True)
    else:
        asm2: gl.constexpr = """{ .reg .b16 low, high;
            ld.shared.b16 low, [$1]; ld.shared.b16 high, [$2]; mov.b32 $0, {low, high}; }"""
        pairs = gl.inline_asm_elementwise(asm2, "=r,r,r", [at], gl.int16, False, 2)
        return pairs.to(TYPE, bitcast=True)


@gluon.jit
def place_of(weights, raw, g, col, OPERAND: gl.constexpr, B_ORDER: gl.constexpr):
    """Where a thread's elements lie in a stage: their addresses, and by how much a pair lies across words.

    Lines eight apart lie alike in their 16 bytes: a line's offset is that of the thread's first line.
    """
    b, _, b_group, b_line = weights
    m = gl.arange(0, STRIP, gl.SliceLayout(1, OPERAND))
    k = gl.arange(0, DEEP, gl.SliceLayout(0, OPERAND))
    start = (b + (g.to(gl.int64) * b_group) * 2).to(gl.int32)
    step = (b_line * 2).to(gl.int32)
    if B_ORDER == "col":
        ahead = (start + (col + m % 8) * step) & 15
        at = raw + (m * PITCH_COL + (ahead & 12))[:, None] + (k * 2)[None, :]
        bits = ((ahead & 2) * 8)[:, None] + 0 * k[None, :]
        return at, bits
    else:
        ahead = (start + col * 2 + (k % 8) * step) & 15
        at = raw + (m * 2)[:, None] + (k * PITCH_ROW + ahead)[None, :]
        return at, at


@gluon.jit
def halves(x):
    """The left and the right half of the columns."""
    return x.reshape([x.shape[0], 2, x.shape[1] // 2]).permute(0, 2, 1).split()


@gluon.jit
def write_turned(acc, out, spot, PART: gl.constexpr, END: gl.constexpr):
    """Stores C^T, 64 rows of C at once."""
    if acc.shape[1] > STRIP:
        upper, lower = halves(acc)
        DOWN: gl.constexpr = acc.shape[1] // 2
        write_turned(upper, out, spot, PART, END)
        write_turned(lower, out, moved(spot, DOWN, 0), PART, END)
    else:
        if spot[2] > 0:
            write(acc.permute(1, 0), out, spot, PART, END)


@gluon.jit
def rows_of(x_smem, stage, SLOTS: gl.constexpr, FIRST: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr):
    """SLOTS strips of a block of rows, from strip FIRST on, as the second operand."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    view = reinterpreted(x_smem, x_smem.dtype, [STAGES * MOST // SLOTS, SLOTS * STRIP, DEEP], layout)
    return view.index(stage * (MOST // SLOTS) + FIRST // SLOTS).permute((1, 0))


@gluon.jit
def multiply(rings, place, stage, phase, k_length, out, spot, SLOTS0: gl.constexpr, FIRST1: gl.constexpr,
             SLOTS1: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, STAGE_BYTES: gl.constexpr,
             OPERAND: gl.constexpr, B_ORDER: gl.constexpr, PART: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One tile, of SLOTS0 strips and SLOTS1 strips from strip FIRST1 on. The next block's weights are taken while
    this block's products are under way."""
    x_smem, x_full, x_empty, w_full, w_empty = rings
    TYPE: gl.constexpr = x_smem.dtype
    WIDTH1: gl.constexpr = (SLOTS1 if SLOTS1 > 0 else 1) * STRIP
    LAYOUT0: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, SLOTS0 * STRIP, 16])  # fmt: skip
    LAYOUT1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH1, 16])  # fmt: skip
    DOT0: gl.constexpr = gl.DotOperandLayout(0, LAYOUT0, 2)
    DOT1: gl.constexpr = gl.DotOperandLayout(0, LAYOUT1, 2)
    acc0 = warpgroup_mma_init(gl.zeros([STRIP, SLOTS0 * STRIP], gl.float32, LAYOUT0))
    acc1 = warpgroup_mma_init(gl.zeros([STRIP, WIDTH1], gl.float32, LAYOUT1))
    mbarrier.wait(w_full.index(stage), phase)
    w = fragment(place, stage, STAGE_BYTES, TYPE, B_ORDER)
    mbarrier.arrive(w_empty.index(stage))
    for _ in range(DEEP, k_length, DEEP):
        mbarrier.wait(x_full.index(stage), phase)
        acc0 = warpgroup_mma(gl.convert_layout(w, DOT0), rows_of(x_smem, stage, SLOTS0, 0, MOST, STAGES), acc0,
                             is_async=True)  # fmt: skip
        if SLOTS1 > 0:
            acc1 = warpgroup_mma(gl.convert_layout(w, DOT1), rows_of(x_smem, stage, SLOTS1, FIRST1, MOST, STAGES),
                                 acc1, is_async=True)  # fmt: skip
        before = (stage + STAGES) % STAGES
        stage += 1
        if stage == STAGES:
            stage = 0
            phase ^= 1
        mbarrier.wait(w_full.index(stage), phase)
        w = fragment(place, stage, STAGE_BYTES, TYPE, B_ORDER)
        mbarrier.arrive(w_empty.index(stage))
        if SLOTS1 > 0:
            acc0, acc1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc0, acc1])
            acc0 = warpgroup_mma_init(acc0)
            acc1 = warpgroup_mma_init(acc1)
        else:
            acc0 = warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=0, deps=[acc0]))
        mbarrier.arrive(x_empty.index(before))
    mbarrier.wait(x_full.index(stage), phase)
    acc0 = warpgroup_mma(gl.convert_layout(w, DOT0), rows_of(x_smem, stage, SLOTS0, 0, MOST, STAGES), acc0,
                         is_async=True)  # fmt: skip
    if SLOTS1 > 0:
        acc1 = warpgroup_mma(gl.convert_layout(w, DOT1), rows_of(x_smem, stage, SLOTS1, FIRST1, MOST, STAGES),
                             acc1, is_async=True)  # fmt: skip
        sum0, sum1 = warpgroup_mma_wait(num_outstanding=0, deps=[acc0, acc1])
        mbarrier.arrive(x_empty.index(stage))
        write_turned(sum0, out, spot, PART, END)
        write_turned(sum1, out, moved(spot, SLOTS0 * STRIP, 0), PART, END)
    else:
        sum2 = warpgroup_mma_wait(num_outstanding=0, deps=[acc0])
        mbarrier.arrive(x_empty.index(stage))
        write_turned(sum2, out, spot, PART, END)
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


@gluon.jit
def consume_shifted(WHICH: gl.constexpr, out, rings, mail, weights, raw, PART: gl.constexpr, MOST: gl.constexpr,
                   STAGES: gl.constexpr, B_ORDER: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 of a tile's columns."""
    STAGE_BYTES: gl.constexpr = COLUMNS * PITCH_COL if B_ORDER == "col" else DEEP * PITCH_ROW
    HALF_BYTES: gl.constexpr = STRIP * PITCH_COL if B_ORDER == "col" else STRIP * 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, STRIP, 16])  # fmt: skip
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 2)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    while rows > 0:
        strips = (rows + STRIP - 1) // STRIP
        place = place_of(weights, raw + WHICH * HALF_BYTES, g, col, OPERAND, B_ORDER)
        spot = (g, row, rows, low, row + rows, col + WHICH * STRIP)
        if MOST == 4:
            if strips == 4:
                stage, phase = multiply(rings, place, stage, phase, k_length, out, spot, 2, 2, 2, MOST, STAGES,
                                        STAGE_BYTES, OPERAND, B_ORDER, PART, END)  # fmt: skip
            elif strips == 3:
                stage, phase = multiply(rings, place, stage, phase, k_length, out, spot, 2, 2, 1, MOST, STAGES,
                                        STAGE_BYTES, OPERAND, B_ORDER, PART, END)  # fmt: skip
            elif strips == 2:
                stage, phase = multiply(rings, place, stage, phase, k_length, out, spot, 1, 2, 1, MOST, STAGES,
                                        STAGE_BYTES, OPERAND, B_ORDER, PART, END)  # fmt: skip
            else:
                stage, phase = multiply(rings, place, stage, phase, k_length, out, spot, 1, 0, 0, MOST, STAGES,
                                        STAGE_BYTES, OPERAND, B_ORDER, PART, END)  # fmt: skip
        else:
            if strips == 2:
                stage, phase = multiply(rings, place, stage, phase, k_length, out, spot, 2, 0, 0, MOST, STAGES,
                                        STAGE_BYTES, OPERAND, B_ORDER, PART, END)  # fmt: skip
            else:
                stage, phase = multiply(rings, place, stage, phase, k_length, out, spot, 1, 0, 0, MOST, STAGES,
                                        STAGE_BYTES, OPERAND, B_ORDER, PART, END)  # fmt: skip
        slot ^= 1
        if slot == 0:
            turn ^= 1
        g, row, rows, col, low, k_length = take(mail, slot, turn)
    if END[0] == "tma":
        tma.store_wait(0)


@gluon.jit
def carry_kernel(
    a_desc, out_desc, b, c, out, bias, records, ends, m, n, k, groups, head, a_rows, out_rows, raw_at,
    b_group, b_line, c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    FORM: gl.constexpr, BN: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr,
    A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    CARRIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Jagged rows alone. Roles: two warpgroups multiply and write, four warps load weights, one warp rows."""
    dtype: gl.constexpr = a_desc.dtype
    out_type: gl.constexpr = out.dtype.element_ty
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, dtype.primitive_bitwidth, 2)
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    x_smem = gl.allocate_shared_memory(dtype, [STAGES * MOST, STRIP, DEEP], swizzled)
    held: gl.constexpr = [2, STRIP, PART] if STORE == "tma" else [2, 8, 64]
    staging = gl.allocate_shared_memory(out_type, held, staged)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    x_full = barriers(STAGES, 1)
    x_empty = barriers(STAGES, 2)
    w_full = barriers(STAGES, 128)
    w_empty = barriers(STAGES, 2)
    mail = (tickets, barriers(2, 1), barriers(2, 3))
    tiles_n = (n + BN - 1) // BN
    if FORM == "search":
        total = tiles_n * 0
    else:
        total = gl.load(records) * tiles_n
    if ALPHA == "zero":
        k = k * 0
    extents = (m, n, k, groups, head)
    tensors = (c, out, bias)
    strides = (c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col,
               alpha_bits, beta_bits, out_rows)  # fmt: skip
    END: gl.constexpr = (STORE, C, BIAS, ALPHA, ACTIVATION, False)
    rings = (x_smem, x_full, x_empty, w_full, w_empty)
    weights = (b, n, b_group, b_line)
    raw = ring_start(raw_at)
    out0 = (out_desc, staging.index(0), tensors, strides, n)
    out1 = (out_desc, staging.index(1), tensors, strides, n)
    gl.warp_specialize(
        [
            (consume_shifted, (0, out0, rings, mail, weights, raw, PART, MOST, STAGES, B_ORDER, END)),
            (consume_shifted, (1, out1, rings, mail, weights, raw, PART, MOST, STAGES, B_ORDER, END)),
            (load_lines, (rings, mail, (w_full, w_empty), weights, raw, BN, STAGES, B_ORDER)),
            (produce, ((a_desc, a_desc), (x_smem, x_smem, x_full, x_empty), mail, records, ends, extents, tiles_n,
                       total, a_rows, 0, FORM, BN, 0, BN, MOST, STAGES, WIDTH, ORDER, ALIGN, False, A_ORDER,
                       B_ORDER)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CARRIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
