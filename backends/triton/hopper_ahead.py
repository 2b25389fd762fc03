# mypy: ignore-errors
"""The warp-specialised kernel for weights that no tensor map expresses: four warps copy them into aligned lines, ahead.

A copy before the product costs as much memory traffic as the product where groups have few rows. Here it runs beside
the product: programs draw pieces of the copy from a counter, group after group, and the loading warp waits until the
weights of a tile's group are there. They then come from the L2. Whoever runs draws, so no program waits for one that
has not started.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multigemm.backends.triton.hopper import barriers, consume
from multigemm.backends.triton.hopper_load import produce
from multigemm.backends.triton.hopper_shift import aligned, beside, shifted
from multigemm.backends.triton.hopper_store import barrier
from multigemm.backends.triton.hopper_tiles import clear
from multigemm.backends.triton.schedule_device import group_rows

STRIP = gl.constexpr(64)
DEEP = gl.constexpr(64)
LINES = gl.constexpr(128)


@gluon.jit
def copy_piece(b, target, element, to, length, left, across):
    """Copies `length` elements of each of 128 lines, whose first elements are `element` (a vector) to `to`."""
    WORDS: gl.constexpr = DEEP // 2
    # eight lanes hold a line of a block, which `beside` relies on
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    j = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    chunk = j // 4 * 8
    shift = (element & 7).to(gl.int32)[:, None]
    places = ((element >> 3) * 4)[:, None] + j[None, :]
    one = aligned(b, places, chunk, i, shift, 0, left, across)
    two = aligned(b, places, chunk, i, shift, DEEP, left - DEEP, across)
    writes = to[:, None] + j[None, :]
    mine = (i < across)[:, None] & (j >= 0)[None, :]
    for at in range(0, length, DEEP):
        low = one
        one = two
        two = aligned(b, places, chunk, i, shift, at + 2 * DEEP, left - at - 2 * DEEP, across)
        high = beside(low, one, chunk, i)
        kept = gl.where(2 * j + 1 < left - at, -1, gl.where(2 * j < left - at, 0xFFFF, 0))
        values = shifted(low, high, shift + 0 * j[None, :], kept[None, :] + 0 * i[:, None])
        gl.store(target + writes + at // 2, values, mask=mine)


@gluon.jit
def copy_ahead(b, target, records, ends, extents, b_step, b_skip, b_group, b_line, lines, inner, target_line,
               SEGMENT: gl.constexpr, MASKED: gl.constexpr):  # fmt: skip
    """Four warps: pieces of all groups' weights, as they are drawn; each is counted by its group when it is there."""
    m, _, _, groups, head = extents
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    i = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    down = (lines + LINES - 1) // LINES
    across = (inner + SEGMENT - 1) // SEGMENT
    total = gl.where(b_step == 0, gl.minimum(groups, 1), groups) * (down * across)
    piece = gl.atomic_add(records + 3, 1, sem="relaxed")
    while piece < total:
        g = piece // (down * across)
        start, end = group_rows(ends, g, head, m, g >= 0, MASKED)
        if (end > start) | (b_step == 0):
            line = piece // across % down * LINES
            first = piece % across * SEGMENT
            # counted from the address of the weights rounded down to 16 bytes
            element = b_skip + g.to(gl.int64) * b_group + (line + i).to(gl.int64) * b_line + first
            to = ((g.to(gl.int64) * lines + line + i) * target_line + first) // 2
            copy_piece(b, target, element, to, gl.minimum(SEGMENT, inner - first), inner - first, lines - line)
            # what these threads wrote, the copy engine will read
            gl.inline_asm_elementwise("fence.proxy.async.global; mov.b32 $0, $1;", "=r,r", [i], gl.int32, False, 1)
            barrier()
            gl.atomic_add(records + 8 + g, 1, sem="release")
        piece = gl.atomic_add(records + 3, 1, sem="relaxed")
    clear(records, groups, 4)


@gluon.jit
def ahead_kernel(
    a_desc, b_desc, out_desc, b, target, c, out, bias, records, ends, m, n, k, groups, head, a_rows, b_step, out_rows,
    b_skip, b_group, b_line, target_line,
    c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    BN: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ALIGN: gl.constexpr,
    MASKED: gl.constexpr, A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    LATE: gl.constexpr, SEGMENT: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    COPIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Roles: two warpgroups multiply and write, one warp loads, four warps copy weights ahead."""
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
    ring = (a_smem, b_smem, barriers(STAGES, 1), barriers(STAGES, 2))
    mail = (tickets, barriers(2, 1), barriers(2, 2))
    tiles_n = (n + BN - 1) // BN
    lines = k if B_ORDER == "row" else n
    inner = n if B_ORDER == "row" else k
    wanted = (lines + LINES - 1) // LINES * ((inner + SEGMENT - 1) // SEGMENT)
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
            (copy_ahead, (b, target, records, ends, extents, b_step, b_skip, b_group, b_line, lines, inner,
                          target_line, SEGMENT, MASKED)),
            (produce, ((a_desc, b_desc), ring, mail, records, ends, extents, tiles_n, wanted, a_rows, b_step, "search",
                       BN, 1, BN, MOST, STAGES, WIDTH, "ahead", ALIGN, MASKED, A_ORDER, B_ORDER)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, COPIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
