# mypy: ignore-errors
"""The warp-specialised kernel for float8 on both sides: products start anew at each block of K.

Hopper's tensor cores keep 14 bits of the float8 sums that they carry on. So the product of a block, 128 of K, starts
from zero, and joins the sum in float32, times its scales where those change along K: while one warpgroup adds, the
other one's products keep the tensor cores busy. Scales that hold for all of K wait for the end.

A strip's part of 64 x 128 lies in registers beside two sums of that size: two strips, or one strip and two pieces of
columns. The scales of the next block are asked for while this block's products run.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multigemm.backends.triton.kernels.hopper import (
    barriers,
    halves,
    moved,
    oriented,
    pass_by,
    produce,
    sum_layout,
    write,
    zero_unowned,
)
from multigemm.backends.triton.kernels.hopper_tiles import after, after_slot, share_of, take, work_of

STRIP = gl.constexpr(64)
# columns of one wgmma
PIECE = gl.constexpr(128)
# K of a block: one swizzled row, and what one scale covers
DEEP = gl.constexpr(128)


@gluon.jit
def scale_of(code, E8M0: gl.constexpr):
    """Scales in float32; code 0 of e8m0 is 2^-127 and 255 is NaN."""
    if E8M0:
        code = code.to(gl.int32)
        bits = gl.where(code == 0, 0x00400000, code << 23)
        return gl.where(code == 255, 0x7FC00000, bits).to(gl.float32, bitcast=True)
    else:
        return code


@gluon.jit
def row_scale(scale, g, row, SA: gl.constexpr):
    """Where the scales of a strip's rows begin: a number for all of them, or one for each, `line_step` apart."""
    base, group_step, line_step, _ = scale
    base += g.to(gl.int64) * group_step
    if SA[1] == 1:
        return base + row.to(gl.int64) * line_step
    elif SA[1] == 128:
        return base + (row // 128).to(gl.int64) * line_step
    else:
        return base


@gluon.jit
def read_rows(at, line_step, rows, some, LAYOUT: gl.constexpr, SA: gl.constexpr):
    """The scales there, as they lie in memory, of rows that the group has; anything where a has none.

    A strip's distances are counted in 32 bits (`Float8Plan.bind`): 64 bits for each row take registers.
    """
    if SA[0]:
        if SA[1] == 1:
            i = gl.arange(0, STRIP, gl.SliceLayout(1, LAYOUT))
            return gl.load(at + (i * line_step).to(gl.uint32), mask=(i < rows) & some, other=0)
        else:
            return gl.load(at, mask=some, other=0)
    else:
        return rows


@gluon.jit
def column_scale(scale, g, col, SB: gl.constexpr):
    """Where the scale of a piece of columns lies that share one."""
    base, group_step, line_step, _ = scale
    base += g.to(gl.int64) * group_step
    if SB[1] == 128:
        return base + (col // 128).to(gl.int64) * line_step
    else:
        return base


@gluon.jit
def read_column(at, some, SB: gl.constexpr):
    """The scale there, of a piece that begins before the last column; anything where b has none."""
    if SB[0]:
        return gl.load(at, mask=some, other=0)
    else:
        return some


@gluon.jit
def product_of(rows, column, SA: gl.constexpr, SB: gl.constexpr):
    """A block's number for each row, or for all of them."""
    if SA[0] and SB[0]:
        return scale_of(rows, SA[3]) * scale_of(column, SB[3])
    elif SA[0]:
        return scale_of(rows, SA[3])
    else:
        return scale_of(column, SB[3])


@gluon.jit
def joined(acc, part, scale, SA: gl.constexpr, SUMS: gl.constexpr):
    """acc + part, times the block's scale; a part that went on with the sum is the sum."""
    if SUMS == "fast":
        return part
    elif SUMS == "promoted":
        return acc + part
    elif SA[1] == 1:
        return acc + part * scale[:, None]
    else:
        return acc + part * scale


@gluon.jit
def scaled(acc, spot, scales, n, SA: gl.constexpr, SB: gl.constexpr):
    """A sum times scales that hold for all of K."""
    layout: gl.constexpr = acc.type.layout
    scale_a, scale_b = scales
    g, row, rows, _, _, col = spot
    if SA[0]:
        at = row_scale(scale_a, g, row, SA)
        of_rows = scale_of(read_rows(at, scale_a[2].to(gl.int32), rows, rows > 0, layout, SA), SA[3])
        if SA[1] == 1:
            of_rows = of_rows[:, None]
    if SB[0]:
        if SB[1] == 1:
            j = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
            at = scale_b[0] + g.to(gl.int64) * scale_b[1] + (col + j).to(gl.int64) * scale_b[2]
            of_columns = scale_of(gl.load(at, mask=j < n - col, other=0), SB[3])[None, :]
        else:
            of_columns = scale_of(read_column(column_scale(scale_b, g, col, SB), col < n, SB), SB[3])
    if SA[0] and SB[0]:
        return acc * (of_rows * of_columns)
    elif SA[0]:
        return acc * of_rows
    elif SB[0]:
        return acc * of_columns
    else:
        return acc


@gluon.jit
def write_scaled(acc, out, spot, scales, PART: gl.constexpr, END: gl.constexpr, SA: gl.constexpr, SB: gl.constexpr,
                 BLOCKED: gl.constexpr):  # fmt: skip
    """Scales that a sum does not have yet, the epilogue and the store, part by part."""
    if acc.shape[1] > PART:
        left, right = halves(acc)
        write_scaled(left, out, spot, scales, PART, END, SA, SB, BLOCKED)
        write_scaled(right, out, moved(spot, 0, acc.shape[1] // 2), scales, PART, END, SA, SB, BLOCKED)
    elif BLOCKED:
        write(acc, out, spot, PART, END)
    else:
        write(scaled(acc, spot, scales, out[4], SA, SB), out, spot, PART, END)


@gluon.jit
def block_product(ring, stage, strip, piece: gl.constexpr, acc, PIECES: gl.constexpr, MOST: gl.constexpr,
                  SUMS: gl.constexpr):  # fmt: skip
    """Starts the product of a strip and a piece of a block, from zero unless it may go on with the sum."""
    a_smem, b_smem, _, _ = ring
    a = a_smem.index(stage * MOST + strip)
    b = oriented(b_smem.index(stage * PIECES + piece), True)
    return warpgroup_mma(a, b, acc, use_acc=SUMS == "fast", is_async=True)


@gluon.jit
def multiply(ring, stage, phase, k_length, first, out, spot, scales, STRIPS: gl.constexpr, PIECES: gl.constexpr,
             MOST: gl.constexpr, STAGES: gl.constexpr, PART: gl.constexpr, END: gl.constexpr, SUMS: gl.constexpr,
             SA: gl.constexpr, SB: gl.constexpr):  # fmt: skip
    """One tile: products of one strip, of two strips, or of one strip with two pieces of columns."""
    TWO: gl.constexpr = STRIPS * PIECES == 2
    BLOCKED: gl.constexpr = SUMS == "blocks"
    _, _, full, empty = ring
    layout: gl.constexpr = sum_layout(PIECE, 8)
    zeros = gl.zeros([STRIP, PIECE], gl.float32, layout)
    sum0 = zeros
    sum1 = zeros
    other = moved(spot, (STRIPS - 1) * STRIP, (PIECES - 1) * PIECE)
    g, row, rows, _, _, col = spot
    _, row1, rows1, _, _, col1 = other
    n = out[4]
    scale_a, scale_b = scales
    line_step = scale_a[2].to(gl.int32)
    blocks = gl.maximum((k_length + (DEEP - 1)) // DEEP, 1)
    rows_first, rows_second, column_first, column_second = rows, rows1, col < n, col1 < n
    if BLOCKED:
        at_rows = row_scale(scale_a, g, row, SA)
        at_column = column_scale(scale_b, g, col, SB)
        rows_first = read_rows(at_rows, line_step, rows, rows > 0, layout, SA)
        column_first = read_column(at_column, col < n, SB)
        if STRIPS == 2:
            at_rows_below = row_scale(scale_a, g, row1, SA)
            rows_second = read_rows(at_rows_below, line_step, rows1, rows > 0, layout, SA)
        if PIECES == 2:
            at_column_beside = column_scale(scale_b, g, col1, SB)
            column_second = read_column(at_column_beside, col1 < n, SB)
    for block in range(blocks):
        mbarrier.wait(full.index(stage), phase)
        part = block_product(ring, stage, first, 0, sum0 if SUMS == "fast" else zeros, PIECES, MOST, SUMS)
        scale = product_of(rows_first, column_first, SA, SB)
        part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
        if not TWO:
            mbarrier.arrive(empty.index(stage))
        sum0 = joined(sum0, part, scale, SA, SUMS)
        if TWO:
            part = block_product(ring, stage, first + STRIPS - 1, PIECES - 1, sum1 if SUMS == "fast" else zeros,
                                 PIECES, MOST, SUMS)  # fmt: skip
            if STRIPS == 2:
                scale = product_of(rows_second, column_first, SA, SB)
            else:
                scale = product_of(rows_first, column_second, SA, SB)
        if BLOCKED:
            # the next block's; behind the last block there are none
            more = block + 1 < blocks
            at_rows += scale_a[3]
            at_column += scale_b[3]
            rows_first = read_rows(at_rows, line_step, rows, more, layout, SA)
            column_first = read_column(at_column, more, SB)
            if STRIPS == 2:
                at_rows_below += scale_a[3]
                rows_second = read_rows(at_rows_below, line_step, rows1, more, layout, SA)
            if PIECES == 2:
                at_column_beside += scale_b[3]
                column_second = read_column(at_column_beside, more & (col1 < n), SB)
        if TWO:
            part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
            mbarrier.arrive(empty.index(stage))
            sum1 = joined(sum1, part, scale, SA, SUMS)
        stage, phase = after(stage, phase, STAGES)
    write_scaled(sum0, out, spot, scales, PART, END, SA, SB, BLOCKED)
    if TWO:
        write_scaled(sum1, out, other, scales, PART, END, SA, SB, BLOCKED)
    return stage, phase


@gluon.jit
def consume_float8(WHICH: gl.constexpr, out, unowned, ring, mail, scales, BN: gl.constexpr, PART: gl.constexpr,
                   MOST: gl.constexpr, STAGES: gl.constexpr, END: gl.constexpr, ZERO: gl.constexpr,
                   SIZES: gl.constexpr, SUMS: gl.constexpr, SA: gl.constexpr, SB: gl.constexpr):  # fmt: skip
    """One of two warpgroups: its share of each tile's strips."""
    if ZERO is not None and WHICH == 1:
        zero_unowned(out, unowned[0], unowned[1], END[0], ZERO, SIZES)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    FIRST: gl.constexpr = WHICH * (MOST // 2)
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    while rows > 0:
        above, mine = share_of(WHICH, rows, MOST)
        spot = (g, row + above * STRIP, rows - above * STRIP, low, row + rows, col)
        if MOST == 4 and mine == 2:
            stage, phase = multiply(ring, stage, phase, k_length, FIRST, out, spot, scales, 2, 1, MOST, STAGES, PART,
                                    END, SUMS, SA, SB)  # fmt: skip
        elif mine == 1:
            stage, phase = multiply(ring, stage, phase, k_length, FIRST, out, spot, scales, 1, BN // PIECE, MOST,
                                    STAGES, PART, END, SUMS, SA, SB)  # fmt: skip
        else:
            stage, phase = pass_by(ring, stage, phase, k_length, STAGES)
        slot, turn = after_slot(slot, turn)
        g, row, rows, col, low, k_length = take(mail, slot, turn)
    if END[0] == "tma":
        tma.store_wait(0)


@gluon.jit
def float8_kernel(
    a_desc, b_desc, out_desc, c, out, bias, records, ends, m, n, k, groups, head, a_rows, b_step, out_rows,
    c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    scale_a, scale_b, sa_group, sa_line, sa_deep, sb_group, sb_line, sb_deep,
    FORM: gl.constexpr, BN: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr, STAGES: gl.constexpr,
    WIDTH: gl.constexpr, ORDER: gl.constexpr, MASKED: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    ZERO: gl.constexpr, SIZES: gl.constexpr,
    SUMS: gl.constexpr, HAS_SA: gl.constexpr, SA_ROWS: gl.constexpr, SA_K: gl.constexpr, SA_E8M0: gl.constexpr,
    HAS_SB: gl.constexpr, SB_ROWS: gl.constexpr, SB_K: gl.constexpr, SB_E8M0: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Roles: two warpgroups multiply and write, one more warp loads. K is contiguous on both sides.

    SUMS: what becomes of a block's product: scaled by itself ("blocks"), "promoted" to the sum, or part of it ("fast").
    SA and SB: whether there are scales, how many rows (columns) and how much of K one covers, whether they are e8m0.
    """
    SA: gl.constexpr = (HAS_SA, SA_ROWS, SA_K, SA_E8M0)
    SB: gl.constexpr = (HAS_SB, SB_ROWS, SB_K, SB_E8M0)
    PIECES: gl.constexpr = BN // PIECE
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    out_type: gl.constexpr = out.dtype.element_ty
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * MOST, STRIP, DEEP], swizzled)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PIECES, PIECE, DEEP], swizzled)
    held: gl.constexpr = [2, STRIP, PART] if STORE == "tma" else [2, 8, 64]
    staging = gl.allocate_shared_memory(out_type, held, staged)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    ring = (a_smem, b_smem, barriers(STAGES, 1), barriers(STAGES, 2))
    mail = (tickets, barriers(2, 1), barriers(2, 2))
    tiles_n, total, extents = work_of(records, m, n, k, groups, head, FORM, BN, MOST, ALPHA)
    tensors = (c, out, bias)
    strides = (c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col,
               alpha_bits, beta_bits, out_rows)  # fmt: skip
    scales = ((scale_a, sa_group, sa_line, sa_deep), (scale_b, sb_group, sb_line, sb_deep))
    END: gl.constexpr = (STORE, C, BIAS, ALPHA, ACTIVATION, False)
    unowned = (ends, extents) if ZERO is not None else ()
    out0 = (out_desc, staging.index(0), tensors, strides, n)
    out1 = (out_desc, staging.index(1), tensors, strides, n)
    gl.warp_specialize(
        [
            (consume_float8, (0, out0, unowned, ring, mail, scales, BN, PART, MOST, STAGES, END, ZERO, SIZES,
                              SUMS, SA, SB)),
            (consume_float8, (1, out1, unowned, ring, mail, scales, BN, PART, MOST, STAGES, END, ZERO, SIZES,
                              SUMS, SA, SB)),
            (produce, ((a_desc, b_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, b_step, FORM,
                       BN, PIECES, PIECE, MOST, STAGES, WIDTH, ORDER, 1, MASKED, SIZES, "row", "col")),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
