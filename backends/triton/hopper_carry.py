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
from multigemm.backends.triton.hopper_load import produce
from multigemm.backends.triton.hopper_tiles import take

STRIP = gl.constexpr(64)
DEEP = gl.constexpr(64)


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
            (produce, ((a_desc, a_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, 0, FORM, BN, 0,
                       BN, MOST, STAGES, WIDTH, ORDER, ALIGN, MASKED, A_ORDER, B_ORDER)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CARRIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
