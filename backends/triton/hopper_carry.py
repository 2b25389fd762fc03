# mypy: ignore-errors
"""The warp-specialised kernel for weights that no tensor map expresses: shifted on their way into registers.

The result is computed transposed, C^T = W^T X^T: wgmma takes its first operand from registers, and that are the
weights. Four warps copy the lines of the weights into a ring of their own (cp.async), in aligned pieces of 16 bytes,
as they lie; the consumers shift them when they load their fragments, 16 of K at a time, between the products of the
16 before. The rows come by TMA, through a second ring. So weights are read once, where a copy into aligned lines would
read, write and read them again.

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
from multigemm.backends.triton.hopper_fragments import (
    STEP,
    STRIP,
    await_lines,
    elements,
    fragment,
    hand_back,
    place_of,
)
from multigemm.backends.triton.hopper_lines import DEEP, after, line_pitch, load_lines, ring_start, slots
from multigemm.backends.triton.hopper_load import produce
from multigemm.backends.triton.hopper_store import moved, write
from multigemm.backends.triton.hopper_tiles import take

# Triton 3.6 calls it otherwise than later versions
reinterpreted = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret


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
def multiply_step(pairs, x_smem, stage, sums, AT: gl.constexpr, STRIPS: gl.constexpr, LAYOUTS: gl.constexpr,
                  MOST: gl.constexpr, STAGES: gl.constexpr):  # fmt: skip
    """Starts the products of step AT of a block, 16 of K."""
    TYPE: gl.constexpr = x_smem.dtype
    OPERAND0: gl.constexpr = gl.DotOperandLayout(0, LAYOUTS[0], 2)
    OPERAND1: gl.constexpr = gl.DotOperandLayout(0, LAYOUTS[1], 2)
    first, second = sums
    x = rows_of(x_smem, stage, STRIPS[0], 0, MOST, STAGES).slice(AT * STEP, STEP, 0)
    first = warpgroup_mma(elements(pairs, TYPE, OPERAND0), x, first, is_async=True)
    if STRIPS[2] > 0:
        y = rows_of(x_smem, stage, STRIPS[2], STRIPS[1], MOST, STAGES).slice(AT * STEP, STEP, 0)
        second = warpgroup_mma(elements(pairs, TYPE, OPERAND1), y, second, is_async=True)
    return first, second


@gluon.jit
def settled(sums, LEFT: gl.constexpr, STRIPS: gl.constexpr):
    """Waits until at most LEFT steps are under way: the registers of those before may be loaded again."""
    first, second = sums
    if STRIPS[2] > 0:
        first, second = warpgroup_mma_wait(num_outstanding=2 * LEFT, deps=[first, second])
        return warpgroup_mma_init(first), warpgroup_mma_init(second)
    else:
        return warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=LEFT, deps=[first])), second


@gluon.jit
def multiply_block(rings, place, at_x, at_w, pairs, sums, older, LAST: gl.constexpr, STRIPS: gl.constexpr,
                   LAYOUTS: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):  # fmt: skip
    """One block. While the tensor cores are at a step, what is needed three steps later is loaded into the registers
    of the step before: of this block the last step's weights, then of the next block, unless this is the LAST.

    It ends with nothing under way. Products that went on through the end of a loop's turn would be serialised
    (ptxas: "insufficient register resources"), each waiting for the one before.
    """
    x_smem, x_full, x_empty, w_full, w_empty = rings
    w0, w1, w2 = pairs
    stage, phase = at_x
    if B_ORDER == "row":
        at_w = at_x  # both rings turn alike
    mbarrier.wait(x_full.index(stage), phase)
    sums = multiply_step(w0, x_smem, stage, sums, 0, STRIPS, LAYOUTS, MOST, STAGES)
    sums = settled(sums, 1, STRIPS)
    w3 = fragment(place, at_w[0], 3, STAGES, B_ORDER)
    sums = multiply_step(w1, x_smem, stage, sums, 1, STRIPS, LAYOUTS, MOST, STAGES)
    # the rows of the block before: handed back here, where it delays no product
    mbarrier.arrive(x_empty.index((stage + STAGES - 1) % STAGES), pred=older)
    at_w = hand_back(w_empty, at_w, LAST, STAGES, B_ORDER)
    now = (stage + STAGES) % STAGES
    if not LAST:
        at_x = after(stage, phase, STAGES)
        await_lines(w_full, at_w, STAGES, B_ORDER)
    sums = settled(sums, 1, STRIPS)
    if not LAST:
        w0 = fragment(place, at_w[0], 0, STAGES, B_ORDER)
    sums = multiply_step(w2, x_smem, now, sums, 2, STRIPS, LAYOUTS, MOST, STAGES)
    sums = settled(sums, 1, STRIPS)
    if not LAST:
        w1 = fragment(place, at_w[0], 1, STAGES, B_ORDER)
    sums = multiply_step(w3, x_smem, now, sums, 3, STRIPS, LAYOUTS, MOST, STAGES)
    if not LAST:
        sums = settled(sums, 1, STRIPS)
        w2 = fragment(place, at_w[0], 2, STAGES, B_ORDER)
    sums = settled(sums, 0, STRIPS)
    return at_x, at_w, (w0, w1, w2), sums


@gluon.jit
def multiply(rings, place, at_x, at_w, k_length, out, spot, STRIPS: gl.constexpr, MOST: gl.constexpr,
             STAGES: gl.constexpr, B_ORDER: gl.constexpr, PART: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One tile, of STRIPS[0] strips and of STRIPS[2] strips from strip STRIPS[1] on."""
    WIDTH0: gl.constexpr = STRIPS[0] * STRIP
    WIDTH1: gl.constexpr = (STRIPS[2] if STRIPS[2] > 0 else 1) * STRIP
    LAYOUT0: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH0, 16])  # fmt: skip
    LAYOUT1: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH1, 16])  # fmt: skip
    LAYOUTS: gl.constexpr = (LAYOUT0, LAYOUT1)
    _, _, x_empty, w_full, _ = rings
    sums = (warpgroup_mma_init(gl.zeros([STRIP, WIDTH0], gl.float32, LAYOUT0)),
            warpgroup_mma_init(gl.zeros([STRIP, WIDTH1], gl.float32, LAYOUT1)))  # fmt: skip
    if B_ORDER == "col":
        mbarrier.wait(w_full.index(at_w[0]), at_w[1])
    else:
        at_w = at_x
    await_lines(w_full, at_w, STAGES, B_ORDER)
    slot = at_w[0]
    pairs = (fragment(place, slot, 0, STAGES, B_ORDER), fragment(place, slot, 1, STAGES, B_ORDER),
             fragment(place, slot, 2, STAGES, B_ORDER))  # fmt: skip
    for k0 in range(DEEP, k_length, DEEP):
        at_x, at_w, pairs, sums = multiply_block(rings, place, at_x, at_w, pairs, sums, k0 > DEEP, False, STRIPS,
                                                 LAYOUTS, MOST, STAGES, B_ORDER)  # fmt: skip
    at_x, at_w, pairs, sums = multiply_block(rings, place, at_x, at_w, pairs, sums, k_length > DEEP, True, STRIPS,
                                             LAYOUTS, MOST, STAGES, B_ORDER)  # fmt: skip
    mbarrier.arrive(x_empty.index(at_x[0]))
    first, second = sums
    if STRIPS[2] > 0:
        first, second = warpgroup_mma_wait(num_outstanding=0, deps=[first, second])
        write_turned(first, out, spot, PART, END)
        write_turned(second, out, moved(spot, WIDTH0, 0), PART, END)
    else:
        write_turned(warpgroup_mma_wait(num_outstanding=0, deps=[first]), out, spot, PART, END)
    return after(at_x[0], at_x[1], STAGES), at_w


@gluon.jit
def consume_shifted(WHICH: gl.constexpr, out, rings, mail, weights, raw, PART: gl.constexpr, MOST: gl.constexpr,
                   STAGES: gl.constexpr, B_ORDER: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 of a tile's columns."""
    HALF_BYTES: gl.constexpr = STRIP * line_pitch(STAGES) if B_ORDER == "col" else STRIP * 2
    LAYOUT: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, STRIP, 16])  # fmt: skip
    PAIRS: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    slot = 0
    turn = 0
    at_x = (0, 0)
    at_w = (0, 0)
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    while rows > 0:
        strips = (rows + STRIP - 1) // STRIP
        place = place_of(weights, raw + WHICH * HALF_BYTES, g, col, PAIRS, STAGES, B_ORDER)
        spot = (g, row, rows, low, row + rows, col + WHICH * STRIP)
        if MOST == 4:
            if strips == 4:
                at_x, at_w = multiply(rings, place, at_x, at_w, k_length, out, spot, (2, 2, 2), MOST, STAGES,
                                      B_ORDER, PART, END)  # fmt: skip
            elif strips == 3:
                at_x, at_w = multiply(rings, place, at_x, at_w, k_length, out, spot, (2, 2, 1), MOST, STAGES,
                                      B_ORDER, PART, END)  # fmt: skip
            elif strips == 2:
                at_x, at_w = multiply(rings, place, at_x, at_w, k_length, out, spot, (1, 2, 1), MOST, STAGES,
                                      B_ORDER, PART, END)  # fmt: skip
            else:
                at_x, at_w = multiply(rings, place, at_x, at_w, k_length, out, spot, (1, 0, 0), MOST, STAGES,
                                      B_ORDER, PART, END)  # fmt: skip
        else:
            if strips == 2:
                at_x, at_w = multiply(rings, place, at_x, at_w, k_length, out, spot, (2, 0, 0), MOST, STAGES,
                                      B_ORDER, PART, END)  # fmt: skip
            else:
                at_x, at_w = multiply(rings, place, at_x, at_w, k_length, out, spot, (1, 0, 0), MOST, STAGES,
                                      B_ORDER, PART, END)  # fmt: skip
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
    w_full = barriers(slots(STAGES, B_ORDER), 128)
    w_empty = barriers(slots(STAGES, B_ORDER), 2)
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
            (load_lines, (mail, (w_full, w_empty), weights, raw, STAGES, B_ORDER)),
            (produce, ((a_desc, a_desc), (x_smem, x_smem, x_full, x_empty), mail, records, ends, extents, tiles_n,
                       total, a_rows, 0, FORM, BN, 0, BN, MOST, STAGES, WIDTH, ORDER, ALIGN, False, A_ORDER,
                       B_ORDER)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CARRIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
