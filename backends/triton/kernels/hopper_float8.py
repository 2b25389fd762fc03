# mypy: ignore-errors
"""The warp-specialised kernel for float8 on both sides: products start anew at each block of K.

Hopper's tensor cores keep 14 bits of the float8 sums that they carry on. So the product of a block, 128 of K, starts
from zero, and joins the sum in float32, times its scales where those change along K: while one warpgroup adds, the
other one's products keep the tensor cores busy. Scales that hold for all of K wait for the end.

A strip's part of 64 x 128 lies in registers beside two sums of that size: two strips, or one strip and two pieces of
columns. The scales of the next block are asked for while this block's products run.

Operands of a jagged K are copied first (`quantised.pack_groups_kernel`), so that K is contiguous, and each group begins
with a block of its own. Scales of blocks are copied, too, one for each line: they come into shared memory together with
the operands, since a thread needs those of 32 columns, which few registers hold at once.
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from multigemm.backends.triton.kernels.hopper import (
    End,
    Ring,
    Spot,
    Strides,
    Target,
    barriers,
    halves,
    moved,
    oriented,
    pass_by,
    produce,
    seen_as,
    sum_layout,
    write,
    zero_unowned,
)
from multigemm.backends.triton.kernels.hopper_tiles import (
    STRIP,
    Mail,
    Tiling,
    after,
    after_slot,
    share_of,
    take,
    work_of,
)
from multigemm.backends.triton.kernels.quantised import scale_of

# columns of one wgmma
PIECE = gl.constexpr(128)
# K of a block: one swizzled row, and what one scale covers
DEEP = gl.constexpr(128)
# whose scales a thread holds at once
MOST_COLUMNS = gl.constexpr(32)
# scales one behind the other
LINES = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


class Scale(NamedTuple):
    """Where scales lie, and the elements from a group, a line (row or column) and a block of K to the next."""

    start: Any
    group: Any
    line: Any
    deep: Any


class Covers(NamedTuple):
    """Constants: whether there are scales, how many lines and how much of K one covers (0: all), whether in e8m0."""

    given: Any
    lines: Any
    k: Any
    e8m0: Any


@gluon.jit
def first_scale(scale, g, line, COVERS: gl.constexpr):
    """Where the scales begin of lines from `line` on: a number for all of them, or one for each."""
    base = scale.start + g.to(gl.int64) * scale.group
    if COVERS.lines == 1:
        return base + line.to(gl.int64) * scale.line
    elif COVERS.lines == 128:
        return base + (line // 128).to(gl.int64) * scale.line
    else:
        return base


@gluon.jit
def read_rows(at, line_step, rows, some, LAYOUT: gl.constexpr, SA: gl.constexpr):
    """The scales there, as they lie in memory, of rows that the group has; anything where a has none.

    A strip's distances are counted in 32 bits (`Float8Plan.bind`): 64 bits for each row take registers.
    """
    if SA.given:
        if SA.lines == 1:
            i = gl.arange(0, STRIP, gl.SliceLayout(1, LAYOUT))
            return gl.load(at + (i * line_step).to(gl.uint32), mask=(i < rows) & some, other=0)
        else:
            return gl.load(at, mask=some, other=0)
    else:
        return rows


@gluon.jit
def read_column(at, some, SB: gl.constexpr):
    """The scale there, of a piece that begins before the last column; anything where b has none."""
    if SB.given:
        return gl.load(at, mask=some, other=0)
    else:
        return some


@gluon.jit
def product_of(rows, column, SA: gl.constexpr, SB: gl.constexpr):
    """A block's number for each row, or for all of them."""
    if SA.given and SB.given:
        return scale_of(rows, SA.e8m0) * scale_of(column, SB.e8m0)
    elif SA.given:
        return scale_of(rows, SA.e8m0)
    else:
        return scale_of(column, SB.e8m0)


@gluon.jit
def joined(acc, part, scale, SA: gl.constexpr, SUMS: gl.constexpr):
    """acc + part, times the block's scale; a part that went on with the sum is the sum."""
    if SUMS == "fast":
        return part
    elif SUMS == "promoted":
        return acc + part
    elif SA.lines == 1:
        return acc + part * scale[:, None]
    else:
        return acc + part * scale


@gluon.constexpr_function
def slots_layout(COLUMNS):
    """How a warpgroup holds slots of as many columns, four in a row by each thread (`quantised.line_of_slot`)."""
    far = [[1 << bit] for bit in range(4, 12) if 1 << bit < COLUMNS]
    return gl.DistributedLinearLayout([[1], [2], *far], [[4], [8], [0], [0], [0]], [[0], [0]], [], [COLUMNS])


@gluon.jit
def of_columns(slots, COLUMNS: gl.constexpr, LAYOUT: gl.constexpr):
    """The scales of a product's columns, out of their slots."""
    in_slots: gl.constexpr = slots_layout(COLUMNS)
    scales = slots.load(in_slots).reshape([COLUMNS // 16, 4, 2, 2]).permute(0, 2, 1, 3).reshape([COLUMNS])
    return gl.convert_layout(scales, LAYOUT, assert_trivial=True)[None, :]


@gluon.jit
def joined_by_both(acc, part, rows, slots):
    """acc + part, times the scales of rows and those of columns in slots, of which few are in registers at once."""
    layout: gl.constexpr = acc.type.layout
    if acc.shape[1] > MOST_COLUMNS:
        HALF: gl.constexpr = acc.shape[1] // 2
        left, right = halves(acc)
        part_left, part_right = halves(part)
        left = joined_by_both(left, part_left, rows, slots.slice(0, HALF))
        right = joined_by_both(right, part_right, rows, slots.slice(HALF, HALF))
        both = gl.join(left, right).permute(0, 2, 1).reshape([left.shape[0], 2 * HALF])
        return gl.convert_layout(both, layout, assert_trivial=True)
    else:
        down: gl.constexpr = gl.SliceLayout(1, layout)
        across: gl.constexpr = gl.SliceLayout(0, layout)
        of_rows = gl.convert_layout(rows, down, assert_trivial=True)[:, None]
        return acc + part * (of_rows * of_columns(slots, acc.shape[1], across))


@gluon.jit
def scaled(acc, spot, scales, n, SA: gl.constexpr, SB: gl.constexpr):
    """A sum times scales that hold for all of K."""
    layout: gl.constexpr = acc.type.layout
    scale_a, scale_b = scales
    g, col = spot.group, spot.col
    if SA.given:
        at = first_scale(scale_a, g, spot.row, SA)
        of_rows = read_rows(at, scale_a.line.to(gl.int32), spot.rows, spot.rows > 0, layout, SA)
        of_rows = scale_of(of_rows, SA.e8m0)
        if SA.lines == 1:
            of_rows = of_rows[:, None]
    if SB.given:
        if SB.lines == 1:
            j = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
            at = scale_b.start + g.to(gl.int64) * scale_b.group + (col + j).to(gl.int64) * scale_b.line
            of_columns = scale_of(gl.load(at, mask=j < n - col, other=0), SB.e8m0)[None, :]
        else:
            of_columns = scale_of(read_column(first_scale(scale_b, g, col, SB), col < n, SB), SB.e8m0)
    if SA.given and SB.given:
        return acc * (of_rows * of_columns)
    elif SA.given:
        return acc * of_rows
    elif SB.given:
        return acc * of_columns
    else:
        return acc


@gluon.jit
def write_scaled(acc, target, spot, scales, some, PART: gl.constexpr, END: gl.constexpr, SA: gl.constexpr,
                 SB: gl.constexpr, BLOCKED: gl.constexpr):  # fmt: skip
    """Scales that a sum does not have yet, the epilogue and the store, part by part. No scale touches the sum of no
    products, which `some` denies."""
    if acc.shape[1] > PART:
        left, right = halves(acc)
        write_scaled(left, target, spot, scales, some, PART, END, SA, SB, BLOCKED)
        write_scaled(right, target, moved(spot, 0, acc.shape[1] // 2), scales, some, PART, END, SA, SB, BLOCKED)
    elif BLOCKED:
        write(acc, target, spot, PART, END)
    else:
        write(gl.where(some, scaled(acc, spot, scales, target.n, SA, SB), 0.0), target, spot, PART, END)


@gluon.jit
def block_product(ring, stage, strip, piece: gl.constexpr, acc, PIECES: gl.constexpr, MOST: gl.constexpr,
                  SUMS: gl.constexpr):  # fmt: skip
    """Starts the product of a strip and a piece of a block, from zero unless it may go on with the sum."""
    a = ring.a.index(stage * MOST + strip)
    b = oriented(ring.b.index(stage * PIECES + piece), True)
    return warpgroup_mma(a, b, acc, use_acc=SUMS == "fast", is_async=True)


@gluon.jit
def multiply(ring, stage, phase, k_length, first, target, spot, scales, STRIPS: gl.constexpr, PIECES: gl.constexpr,
             PART: gl.constexpr, TILING: gl.constexpr, END: gl.constexpr, SUMS: gl.constexpr, SA: gl.constexpr,
             SB: gl.constexpr):  # fmt: skip
    """One tile: products of one strip, of two strips, or of one strip with two pieces of columns."""
    TWO: gl.constexpr = STRIPS * PIECES == 2
    BLOCKED: gl.constexpr = SUMS == "blocks"
    MOST: gl.constexpr = TILING.most
    layout: gl.constexpr = sum_layout(PIECE, 8)
    zeros = gl.zeros([STRIP, PIECE], gl.float32, layout)
    sum0 = zeros
    sum1 = zeros
    other = moved(spot, (STRIPS - 1) * STRIP, (PIECES - 1) * PIECE)
    g, rows, col = spot.group, spot.rows, spot.col
    n = target.n
    scale_a, scale_b = scales
    line_step = scale_a.line.to(gl.int32)
    blocks = gl.maximum((k_length + (DEEP - 1)) // DEEP, 1)
    rows_first, rows_second, column_first, column_second = rows, other.rows, col < n, other.col < n
    if BLOCKED:
        at_rows = first_scale(scale_a, g, spot.row, SA)
        at_column = first_scale(scale_b, g, col, SB)
        rows_first = read_rows(at_rows, line_step, rows, rows > 0, layout, SA)
        column_first = read_column(at_column, col < n, SB)
        if STRIPS == 2:
            at_rows_below = first_scale(scale_a, g, other.row, SA)
            rows_second = read_rows(at_rows_below, line_step, other.rows, rows > 0, layout, SA)
        if PIECES == 2:
            at_column_beside = first_scale(scale_b, g, other.col, SB)
            column_second = read_column(at_column_beside, other.col < n, SB)
    for block in range(blocks):
        mbarrier.wait(ring.full.index(stage), phase)
        part = block_product(ring, stage, first, 0, sum0 if SUMS == "fast" else zeros, PIECES, MOST, SUMS)
        scale = product_of(rows_first, column_first, SA, SB)
        part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
        if not TWO:
            mbarrier.arrive(ring.empty.index(stage))
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
            at_rows += scale_a.deep
            at_column += scale_b.deep
            rows_first = read_rows(at_rows, line_step, rows, more, layout, SA)
            column_first = read_column(at_column, more, SB)
            if STRIPS == 2:
                at_rows_below += scale_a.deep
                rows_second = read_rows(at_rows_below, line_step, other.rows, more, layout, SA)
            if PIECES == 2:
                at_column_beside += scale_b.deep
                column_second = read_column(at_column_beside, more & (other.col < n), SB)
        if TWO:
            part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
            mbarrier.arrive(ring.empty.index(stage))
            sum1 = joined(sum1, part, scale, SA, SUMS)
        stage, phase = after(stage, phase, TILING.stages)
    some = k_length > 0 if TILING.form == "k" else True
    write_scaled(sum0, target, spot, scales, some, PART, END, SA, SB, BLOCKED)
    if TWO:
        write_scaled(sum1, target, other, scales, some, PART, END, SA, SB, BLOCKED)
    return stage, phase


@gluon.jit
def multiply_copied(ring, stage, phase, k_length, first, above, target, spot, STRIPS: gl.constexpr, PART: gl.constexpr,
                    TILING: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One tile of a jagged K whose blocks bring their scales along: products of one strip or of two, with `above` of
    the tile's strips above them. An empty K has a block of zeros whose scales are zeros."""
    MOST: gl.constexpr = TILING.most
    layout: gl.constexpr = sum_layout(PIECE, 8)
    down: gl.constexpr = gl.SliceLayout(1, layout)
    zeros = gl.zeros([STRIP, PIECE], gl.float32, layout)
    sum0 = zeros
    sum1 = zeros
    for _ in range(gl.maximum((k_length + (DEEP - 1)) // DEEP, 1)):
        mbarrier.wait(ring.full.index(stage), phase)
        part = block_product(ring, stage, first, 0, zeros, 1, MOST, "blocks")
        slots = ring.scales[1].index(stage)
        strips = seen_as(ring.scales[0].index(stage), gl.float32, [MOST, STRIP], LINES)
        of_rows = strips.index(above).load(down)
        part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
        sum0 = joined_by_both(sum0, part, of_rows, slots)
        if STRIPS == 2:
            part = block_product(ring, stage, first + 1, 0, zeros, 1, MOST, "blocks")
            of_rows = strips.index(above + 1).load(down)
            part = warpgroup_mma_wait(num_outstanding=0, deps=[part])
            sum1 = joined_by_both(sum1, part, of_rows, slots)
        mbarrier.arrive(ring.empty.index(stage))
        stage, phase = after(stage, phase, TILING.stages)
    write(sum0, target, spot, PART, END)
    if STRIPS == 2:
        write(sum1, target, moved(spot, STRIP, 0), PART, END)
    return stage, phase


@gluon.jit
def consume_float8(WHICH: gl.constexpr, target, unowned, ring, mail, scales, PART: gl.constexpr, TILING: gl.constexpr,
                   END: gl.constexpr, SUMS: gl.constexpr, SA: gl.constexpr, SB: gl.constexpr):  # fmt: skip
    """One of two warpgroups: its share of each tile's strips."""
    if END.zero is not None and WHICH == 1:
        zero_unowned(target, unowned[0], unowned[1], END, TILING.sizes)
    stage = 0
    phase = 0
    slot = 0
    turn = 0
    FIRST: gl.constexpr = WHICH * (TILING.most // 2)
    BROUGHT: gl.constexpr = TILING.copied == "scales"
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    while rows > 0:
        above, mine = share_of(WHICH, rows, TILING.most, False)
        if TILING.copied is not None:
            low = row
        spot = Spot(g, row + above * STRIP, rows - above * STRIP, low, row + rows, col)
        if BROUGHT and TILING.most == 4 and mine == 2:
            stage, phase = multiply_copied(ring, stage, phase, k_length, FIRST, above, target, spot, 2, PART, TILING,
                                           END)  # fmt: skip
        elif BROUGHT and mine == 1:
            stage, phase = multiply_copied(ring, stage, phase, k_length, FIRST, above, target, spot, 1, PART, TILING,
                                           END)  # fmt: skip
        elif not BROUGHT and TILING.most == 4 and mine == 2:
            stage, phase = multiply(ring, stage, phase, k_length, FIRST, target, spot, scales, 2, 1, PART, TILING, END,
                                    SUMS, SA, SB)  # fmt: skip
        elif not BROUGHT and mine == 1:
            stage, phase = multiply(ring, stage, phase, k_length, FIRST, target, spot, scales, 1, TILING.pieces, PART,
                                    TILING, END, SUMS, SA, SB)  # fmt: skip
        else:
            stage, phase = pass_by(ring, stage, phase, k_length, TILING.stages)
        slot, turn = after_slot(slot, turn)
        g, row, rows, col, low, k_length = take(mail, slot, turn)
    if END.store == "tma":
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
    """Roles: two warpgroups multiply and write, one more warp loads. K is contiguous on both sides, or copied to be so:
    scale_a and scale_b are then maps of copied scales if any change along K.

    SUMS: what becomes of a block's product: scaled by itself ("blocks"), "promoted" to the sum, or part of it ("fast").
    """
    SA: gl.constexpr = Covers(HAS_SA, SA_ROWS, SA_K, SA_E8M0)
    SB: gl.constexpr = Covers(HAS_SB, SB_ROWS, SB_K, SB_E8M0)
    PIECES: gl.constexpr = BN // PIECE
    BROUGHT: gl.constexpr = FORM == "k" and SUMS == "blocks"
    COPIED: gl.constexpr = None if FORM != "k" else "scales" if BROUGHT else "k"
    TILING: gl.constexpr = Tiling(FORM, BN, PIECES, PIECE, MOST, STAGES, WIDTH, ORDER, 1, MASKED, SIZES, "row", "col",
                                  False, COPIED)  # fmt: skip
    END: gl.constexpr = End(STORE, C, BIAS, ALPHA, ACTIVATION, False, ZERO)
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    out_type: gl.constexpr = out.dtype.element_ty
    staged: gl.constexpr = gl.NVMMASharedLayout(128, out_type.primitive_bitwidth, 2)
    a_smem = gl.allocate_shared_memory(a_desc.dtype, [STAGES * MOST, STRIP, DEEP], swizzled)
    b_smem = gl.allocate_shared_memory(b_desc.dtype, [STAGES * PIECES, PIECE, DEEP], swizzled)
    held: gl.constexpr = [2, STRIP, PART] if STORE == "tma" else [2, 8, 64]
    staging = gl.allocate_shared_memory(out_type, held, staged)
    tickets = gl.allocate_shared_memory(gl.int32, [2, 8], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    descs = (a_desc, b_desc)
    of_lines = ()
    scales = ()
    if BROUGHT:
        descs = (a_desc, b_desc, scale_a, scale_b)
        of_lines = (gl.allocate_shared_memory(gl.float32, [STAGES, MOST * STRIP], LINES),
                    gl.allocate_shared_memory(gl.float32, [STAGES, BN], LINES))  # fmt: skip
    else:
        scales = (Scale(scale_a, sa_group, sa_line, sa_deep), Scale(scale_b, sb_group, sb_line, sb_deep))
    ring = Ring(a_smem, b_smem, barriers(STAGES, 1), barriers(STAGES, 2), of_lines)
    mail = Mail(tickets, barriers(2, 1), barriers(2, 2))
    work = work_of(records, ends, m, n, k, groups, head, TILING, ALPHA)
    strides = Strides(c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
                      out_rows)  # fmt: skip
    unowned = (ends, work.extents) if ZERO is not None else ()
    target0 = Target(out_desc, staging.index(0), c, out, bias, strides, n)
    target1 = Target(out_desc, staging.index(1), c, out, bias, strides, n)
    gl.warp_specialize(
        [
            (consume_float8, (0, target0, unowned, ring, mail, scales, PART, TILING, END, SUMS, SA, SB)),
            (consume_float8, (1, target1, unowned, ring, mail, scales, PART, TILING, END, SUMS, SA, SB)),
            (produce, (descs, ring, mail, work, a_rows, b_step, TILING)),
        ],
        [4, 1],
        [CONSUMER_REGISTERS, PRODUCER_REGISTERS],
    )
