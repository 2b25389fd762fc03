# mypy: ignore-errors
"""The warp-specialised kernel for weights that no tensor map expresses: four warps carry them through registers.

A tile's rows come by TMA, as in hopper.py, and the consumers are the same. The weights are read whatever their
alignment, element by element or in aligned pieces that are shifted into place, and written to the ring in the order
that wgmma reads: a copy of all weights into aligned rows would cost more memory traffic than the product itself.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from multigemm.backends.triton.hopper import barriers, consume
from multigemm.backends.triton.hopper_load import produce
from multigemm.backends.triton.hopper_tiles import take

# Triton 3.6 calls it otherwise than later versions
reinterpreted = getattr(gl.shared_memory_descriptor, "reinterpret", None) or gl.shared_memory_descriptor._reinterpret
STRIP = gl.constexpr(64)
DEEP = gl.constexpr(64)


@gluon.jit
def carry_elements(ring, mail, b, n, b_group, b_line, BN: gl.constexpr, STAGES: gl.constexpr):
    """Four warps: blocks of B whose lines run along n, element by element. The next block is asked for once this
    one is written."""
    _, b_smem, full, empty = ring
    layout: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [4, 1], [1, 0])
    i = gl.arange(0, DEEP, gl.SliceLayout(1, layout))
    j = gl.arange(0, BN, gl.SliceLayout(0, layout))
    places = i.to(gl.int64)[:, None] * b_line + j[None, :]
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        base = b + g.to(gl.int64) * b_group + col
        for k0 in range(0, gl.maximum(k_length, 1), DEEP):
            inside = (i < k_length - k0)[:, None] & (j < n - col)[None, :]
            values = gl.load(base + places, mask=inside, other=0)
            base = base + b_line * DEEP
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
def four(x):
    """Each group of four neighbouring columns, which one thread holds, as four tensors."""
    even, odd = x.reshape([x.shape[0], x.shape[1] // 4, 2, 2]).split()
    x0, x2 = even.split()
    x1, x3 = odd.split()
    return x0, x1, x2, x3


@gluon.jit
def funnel(low, high, bits):
    """32 bits of high:low, from that bit on."""
    return gl.inline_asm_elementwise("shf.r.wrap.b32 $0, $1, $2, $3;", "=r,r,r,r", [low, high, bits], gl.int32, True, 1)


@gluon.jit
def shifted(low, high, shift, kept):
    """Eight 16-bit elements, from element `shift` (0 to 7) of low:high on, as words; `kept` masks them."""
    z0, z1, z2, z3 = four(low)
    z4, z5, z6, z7 = four(high)
    s, _, _, _ = four(shift)
    k0, k1, k2, k3 = four(kept)
    far = (s & 4) != 0
    z0 = gl.where(far, z2, z0)
    z1 = gl.where(far, z3, z1)
    z2 = gl.where(far, z4, z2)
    z3 = gl.where(far, z5, z3)
    z4 = gl.where(far, z6, z4)
    z5 = gl.where(far, z7, z5)
    far = (s & 2) != 0
    z0 = gl.where(far, z1, z0)
    z1 = gl.where(far, z2, z1)
    z2 = gl.where(far, z3, z2)
    z3 = gl.where(far, z4, z3)
    z4 = gl.where(far, z5, z4)
    bits = (s & 1) * 16
    even = gl.join(funnel(z0, z1, bits) & k0, funnel(z2, z3, bits) & k2)
    odd = gl.join(funnel(z1, z2, bits) & k1, funnel(z3, z4, bits) & k3)
    return gl.join(even, odd).reshape(low.shape)


@gluon.jit
def beside(x, following, chunk, i):
    """The 16 bytes behind each 16 bytes of a line: the next lane has them, behind the last ones the next block."""
    source = (i % 4 * 8)[:, None] + ((chunk // 8 + 1) % 8)[None, :]
    x = gl.where(chunk[None, :] == 0, following, x)
    return gl.inline_asm_elementwise("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", "=r,r,r", [x, source],
                                     gl.int32, True, 1)  # fmt: skip


@gluon.jit
def fetch(b, places, chunk, lines, shift, k0, k_length, across):
    """A block's aligned 16 bytes, but for those that hold no element of the tile."""
    here = ((lines < across) & (k_length > 0))[:, None]
    at = b + (k0 // DEEP).to(gl.int64) * (DEEP // 2)
    return gl.load(at + places, mask=here & (chunk[None, :] < k_length - k0 + shift), other=0)


@gluon.jit
def carry_lines(ring, mail, b, b_skip, n, b_group, b_line, BN: gl.constexpr, STAGES: gl.constexpr):
    """Four warps: blocks of B whose lines run along k, 16 bytes at a time; the next two blocks are on their way.

    `b` is the address of the weights rounded down to 16 bytes, `b_skip` the elements between. A line may start
    anywhere: its 16 bytes are shifted into place, by as many elements in all of its blocks.
    """
    _, b_smem, full, empty = ring
    WORDS: gl.constexpr = DEEP // 2
    # eight lanes hold a line of a block, which `beside` relies on
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [4, 1], [1, 0])
    words = reinterpreted(b_smem, gl.int32, [STAGES, BN, WORDS], gl.NVMMASharedLayout(128, 32, 2))
    i = gl.arange(0, BN, gl.SliceLayout(1, layout))
    j = gl.arange(0, WORDS, gl.SliceLayout(0, layout))
    chunk = j // 4 * 8
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        # a line's first element, counted from the rounded address: its 16 bytes, and its place in them
        element = b_skip + g.to(gl.int64) * b_group + i.to(gl.int64) * b_line
        element += col.to(gl.int64) * b_line
        shift = (element & 7).to(gl.int32)[:, None]
        places = ((element >> 3) * 4)[:, None] + j[None, :]
        across = n - col
        first = k_length * 0
        one = fetch(b, places, chunk, i, shift, first, k_length, across)
        two = fetch(b, places, chunk, i, shift, first + DEEP, k_length, across)
        for k0 in range(0, gl.maximum(k_length, 1), DEEP):
            low = one
            one = two
            two = fetch(b, places, chunk, i, shift, k0 + 2 * DEEP, k_length, across)
            high = beside(low, one, chunk, i)
            left = k_length - k0
            kept = gl.where(2 * j + 1 < left, -1, gl.where(2 * j < left, 0xFFFF, 0))
            values = shifted(low, high, shift + 0 * j[None, :], kept[None, :] + 0 * i[:, None])
            mbarrier.wait(empty.index(stage), phase)
            words.index(stage).store(values)
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
def carry(ring, mail, b, b_skip, n, b_group, b_line, BN: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """The weights, by the way that suits their lines (docs/triton-tuning.md): 16 bytes at a time pay along k only."""
    if B_ORDER == "row":
        carry_elements(ring, mail, b, n, b_group, b_line, BN, STAGES)
    else:
        carry_lines(ring, mail, b, b_skip, n, b_group, b_line, BN, STAGES)


@gluon.jit
def carry_kernel(
    a_desc, out_desc, b, c, out, bias, records, ends, m, n, k, groups, head, a_rows, out_rows, b_skip,
    b_group, b_line, c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    FORM: gl.constexpr, BN: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr,
    A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    LATE: gl.constexpr, CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    CARRIER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Jagged rows alone. Roles: two warpgroups multiply and write, one warp loads A, four warps carry B."""
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
    END: gl.constexpr = (STORE, C, BIAS, ALPHA, ACTIVATION, LATE)
    out0 = (out_desc, staging.index(0), tensors, strides, n)
    out1 = (out_desc, staging.index(1), tensors, strides, n)
    gl.warp_specialize(
        [
            (consume, (0, 2, out0, ring, mail, BN, BN, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
            (consume, (1, 2, out1, ring, mail, BN, BN, PART, MOST, STAGES, A_ORDER, B_ORDER, END)),
            (carry, (ring, mail, b, b_skip, n, b_group, b_line, BN, STAGES, B_ORDER)),
            (produce, ((a_desc, a_desc), ring, mail, records, ends, extents, tiles_n, total, a_rows, 0, FORM, BN, 0,
                       BN, MOST, STAGES, WIDTH, ORDER, ALIGN, False, A_ORDER, B_ORDER)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, CARRIER_REGISTERS, PRODUCER_REGISTERS],
    )  # fmt: skip
