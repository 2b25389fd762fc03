# mypy: ignore-errors
"""The warp-specialised kernel for weights that no tensor map expresses: shifted on their way into registers.

The result is computed transposed, C^T = W^T X^T: wgmma takes its first operand from registers, and that are the
weights. Four warps copy the lines of the weights into a ring of their own (cp.async), in aligned pieces of 16 bytes,
as they lie; the consumers shift them when they load their fragments, 16 of K at a time, between the products of the
16 before. The rows come by TMA, through a second ring. So weights are read once, where a copy into aligned lines would
read, write and read them again.

The ring of the weights lies behind all that Triton allocates: its lines are read at any element, which no layout
of Triton's expresses, so addresses in it are computed here (`RAW_AT`, from the start of shared memory).

Of a line, the aligned pieces round it lie raw in shared memory, and what stands before its start is shifted away
where it is read into registers. Along k a block continues the lines of the block before it: each slot of the ring
takes one whole aligned 128 bytes of every line, and a block lies in its slot and the next one. Pieces of each block by
itself would ask the L2 for most of these 128 bytes twice. Along n, lines of a block are followed by others: each slot
takes what it needs. A line begins at any element, so a pair of elements lies across two words (lines along k), or in
two lines (along n).
"""

from typing import Any, NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
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
    produce,
    seen_as,
    sum_layout,
    write,
    zero_unowned,
)
from multigemm.backends.triton.kernels.hopper_tiles import STRIP, Mail, Tiling, after, after_slot, take, work_of

# of K in one wgmma
STEP = gl.constexpr(16)
DEEP = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
# bytes along k that a slot takes of a line: a block's
CHUNK = gl.constexpr(128)
# bytes of a line along n in the ring: 128 elements and one piece of 16 bytes more
PITCH_ROW = gl.constexpr(272)
EACH = gl.constexpr(17)
# pieces of a block that are copied as one tensor, whose size is a power of two; the rest follows
MANY = gl.constexpr(1024)


class Rings(NamedTuple):
    """Blocks of rows on their way, and the barriers of both rings: filled, and read."""

    x: Any
    x_full: Any
    x_empty: Any
    w_full: Any
    w_empty: Any


class Weights(NamedTuple):
    """Their address, columns, and the elements from a group and from a line to the next."""

    start: Any
    n: Any
    group: Any
    line: Any


class Strips(NamedTuple):
    """Constants: strips of a tile's first sum; where those of the second sum begin, and their number."""

    first: Any
    begin: Any
    second: Any


@gluon.constexpr_function
def slots(stages, order):
    """Of the ring; along k a block holds two at once."""
    return stages + 1 if order == "col" else stages


@gluon.constexpr_function
def line_pitch(stages):
    """Bytes from a line along k to the next: those of all slots, and a piece that moves it by four banks."""
    return (stages + 1) * 128 + 16


@gluon.jit
def ring_start(raw_at):
    """The address of what lies behind Triton's own shared memory."""
    start = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r,r", [raw_at], gl.int32, True, 1)
    return start + raw_at


@gluon.jit
def copy16(to, source, size):
    """16 bytes to shared memory, of which the first `size` are read and the others become zero."""
    gl.inline_asm_elementwise("cp.async.cg.shared.global [$1], [$2], 16, $3; mov.u32 $0, 0;", "=r,r,l,r",
                              [to, source, size], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def pieces_of(FIRST: gl.constexpr, NUMBER: gl.constexpr):
    """NUMBER pieces of a block, counted along its lines: each one's number, its line, and where it lies in the line.

    So neighbouring threads copy neighbouring pieces. A line's last piece by itself would ask for its 128 bytes again.
    """
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    number = gl.arange(0, NUMBER, layout) + FIRST
    line = number // EACH
    return number, line, (number - line * EACH) * 16


@gluon.jit
def sources(start, line, inside, b_line):
    """From where each piece is copied, and how many bytes before it in its line lie in the block."""
    at = start + line.to(gl.int64) * b_line * 2
    ahead = (at & 15).to(gl.int32)
    return at - ahead.to(gl.int64) + inside.to(gl.int64), inside - ahead


@gluon.jit
def bytes_of(number, before, across, deep):
    """How many bytes of a piece there are: none behind the last line, nor behind the end of a line."""
    size = gl.where(number < deep * EACH, across - before, 0)
    return gl.minimum(gl.maximum(size, 0), 16)


@gluon.jit
def load_along_n(mail, full, empty, weights, raw, STAGES: gl.constexpr):
    """Four warps: the aligned pieces round each line of a block of weights.

    What lies behind the end of k becomes zero: products with the zeros of the rows may not meet a NaN.
    """
    REST: gl.constexpr = DEEP * EACH - MANY
    number, line, inside = pieces_of(0, MANY)
    number_last, line_last, inside_last = pieces_of(MANY, REST)
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        start = weights.start + g.to(gl.int64) * weights.group * 2 + col.to(gl.int64) * 2
        source, before = sources(start, line, inside, weights.line)
        source_last, before_last = sources(start, line_last, inside_last, weights.line)
        across = (weights.n - col) * 2
        for k0 in range(0, gl.maximum(k_length, 1), DEEP):
            deep = gl.minimum(k_length - k0, DEEP)
            size = bytes_of(number, before, across, deep)
            size_last = bytes_of(number_last, before_last, across, deep)
            mbarrier.wait(empty.index(stage), phase)
            copy16(raw + stage * (DEEP * PITCH_ROW) + number * 16, source, size)
            copy16(raw + stage * (DEEP * PITCH_ROW) + number_last * 16, source_last, size_last)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            source = source + weights.line * (DEEP * 2)
            source_last = source_last + weights.line * (DEEP * 2)
            stage, phase = after(stage, phase, STAGES)
        slot, turn = after_slot(slot, turn)
        g, _, rows, col, _, k_length = take(mail, slot, turn)


@gluon.jit
def copy_some(to, source, size):
    """16 bytes as `copy16`; nothing at all where the size is below 0."""
    asm: gl.constexpr = """{ .reg .pred some; setp.ge.s32 some, $3, 0;
        @some cp.async.cg.shared.global [$1], [$2], 16, $3; mov.u32 $0, 0; }"""
    gl.inline_asm_elementwise(asm, "=r,r,l,r", [to, source, size], gl.int32, False, 1)


@gluon.jit
def load_along_k(mail, full, empty, weights, raw, STAGES: gl.constexpr):
    """Four warps: whole aligned 128 bytes of each line, slot after slot, one more than blocks.

    A piece lies as far behind the slot of the tile's first block as behind the piece that its line begins in, so that
    all lines are read alike. Pieces before that one are left out: in their place may be what the last tile still reads.
    What lies behind the end of k becomes zero: products with the zeros of the rows may not meet a NaN.
    """
    SLOTS: gl.constexpr = slots(STAGES, "col")
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [4, 8], [4, 1], [1, 0])
    line = gl.arange(0, COLUMNS, gl.SliceLayout(1, layout))
    piece = gl.arange(0, 8, gl.SliceLayout(0, layout))
    to = raw + (line * line_pitch(STAGES))[:, None]
    chunk = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        start = weights.start + (g.to(gl.int64) * weights.group + col.to(gl.int64) * weights.line) * 2
        lines = start + line.to(gl.int64) * weights.line * 2
        skew = (lines & 127).to(gl.int32)
        source = (lines - skew.to(gl.int64))[:, None] + (piece * 16)[None, :].to(gl.int64)
        place = (piece * 16)[None, :] - (skew & 112)[:, None]
        before = (piece * 16)[None, :] - skew[:, None]
        within = (line < weights.n - col)[:, None]
        # -1 once, for the pieces before the first one
        nothing = gl.where(place < 0, -1, 0)
        for k0 in range(0, (gl.maximum(k_length, 1) + (DEEP - 1)) // DEEP * DEEP + 1, DEEP):
            size = gl.minimum(gl.maximum((k_length - k0) * 2 - before, 0), 16)
            size = gl.where(within, size, 0)
            size = gl.where(nothing < 0, nothing, size)
            at = place + chunk * CHUNK
            at = gl.where(at < 0, at + SLOTS * CHUNK, at)
            mbarrier.wait(empty.index(chunk), phase)
            copy_some(to + at, source, size)
            async_copy.mbarrier_arrive(full.index(chunk), increment_count=False)
            source = source + DEEP * 2
            nothing = nothing * 0
            chunk, phase = after(chunk, phase, SLOTS)
        slot, turn = after_slot(slot, turn)
        g, _, rows, col, _, k_length = take(mail, slot, turn)


@gluon.jit
def load_lines(mail, full, empty, weights, raw, TILING: gl.constexpr):
    """Four warps fill the ring of the weights."""
    if TILING.b_order == "col":
        load_along_k(mail, full, empty, weights, raw, TILING.stages)
    else:
        load_along_n(mail, full, empty, weights, raw, TILING.stages)


@gluon.constexpr_function
def words_at(offset):
    """Loads two words and shifts the pair that lies across them into one."""
    loads = f"ld.shared.b32 low, [$1 + {offset}]; ld.shared.b32 high, [$1 + {offset + 4}];"
    return "{ .reg .b32 low, high; " + loads + " shf.r.wrap.b32 $0, low, high, $2; }"


@gluon.constexpr_function
def halves_at(offset):
    """Loads a pair from two lines."""
    loads = f"ld.shared.b16 low, [$1 + {offset}]; ld.shared.b16 high, [$2 + {offset}];"
    return "{ .reg .b16 low, high; " + loads + " mov.b32 $0, {low, high}; }"


@gluon.jit
def fragment(place, slot, AT: gl.constexpr, TILING: gl.constexpr):
    """64 columns of weights, 16 deep, step AT of the block that begins in a slot: pairs of elements, as wgmma takes its
    first operand."""
    line, inside, more = place
    if TILING.b_order == "row":
        at = line + slot * (DEEP * PITCH_ROW)
        return gl.inline_asm_elementwise(halves_at(AT * 16 * PITCH_ROW), "=r,r,r", [at, at + more], gl.int32, False, 1)
    elif AT < 3:
        at = line + inside + slot * CHUNK
        return gl.inline_asm_elementwise(words_at(AT * 32), "=r,r,r", [at, more], gl.int32, False, 1)
    else:
        # a block's last words may lie in the next slot, and that in front of all others
        low = inside + (slot * CHUNK + 96)
        high = low + 4
        END: gl.constexpr = slots(TILING.stages, TILING.b_order) * CHUNK
        low = gl.where(low >= END, low - END, low) + line
        high = gl.where(high >= END, high - END, high) + line
        asm: gl.constexpr = """{ .reg .b32 low, high;
            ld.shared.b32 low, [$1]; ld.shared.b32 high, [$2]; shf.r.wrap.b32 $0, low, high, $3; }"""
        return gl.inline_asm_elementwise(asm, "=r,r,r,r", [low, high, more], gl.int32, False, 1)


@gluon.jit
def elements(pairs, TYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Pairs as the elements that they are. Nothing moves: in a register of 32 bits each they outlive a loop's turn,
    where elements of 16 bits would be taken apart, and wgmma would wait for them."""
    both = gl.join(pairs, pairs).reshape([STRIP, STEP])
    found = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [both], gl.int16, True, 2)
    return gl.convert_layout(found.to(TYPE, bitcast=True), OPERAND)


@gluon.jit
def place_of(weights, raw, g, col, PAIRS: gl.constexpr, TILING: gl.constexpr):
    """Where a thread's pairs lie in the first slot: their lines' addresses, how far behind, and by how much a pair lies
    across words, or how far behind the first element the second one lies, in the next line.

    Lines eight apart lie alike in their 16 bytes: a line's offset is that of the thread's first line.
    """
    m = gl.arange(0, STRIP, gl.SliceLayout(1, PAIRS))
    k = gl.arange(0, STEP // 2, gl.SliceLayout(0, PAIRS))
    start = (weights.start + (g.to(gl.int64) * weights.group) * 2).to(gl.int32)
    step = (weights.line * 2).to(gl.int32)
    if TILING.b_order == "col":
        ahead = (start + (col + m % 8) * step) & 15
        line = (raw + m * line_pitch(TILING.stages))[:, None] + 0 * k[None, :]
        return line, (ahead & 12)[:, None] + (k * 4)[None, :], ((ahead & 2) * 8)[:, None] + 0 * k[None, :]
    else:
        ahead = (start + col * 2 + (k * 2 % 8) * step) & 15
        ahead_next = (start + col * 2 + (k * 2 % 8 + 1) * step) & 15
        line = raw + (m * 2)[:, None] + (k * (2 * PITCH_ROW) + ahead)[None, :]
        return line, 0, (PITCH_ROW + ahead_next - ahead)[None, :] + 0 * m[:, None]


@gluon.jit
def await_lines(w_full, at_w, TILING: gl.constexpr):
    """Waits for the weights of a block: along k they end in the slot after the one that they begin in, and that one is
    known to be full."""
    slot, turn = at_w
    if TILING.b_order == "col":
        slot, turn = after(slot, turn, slots(TILING.stages, "col"))
    mbarrier.wait(w_full.index(slot), turn)


@gluon.jit
def hand_back(w_empty, at_w, LAST: gl.constexpr, TILING: gl.constexpr):
    """Frees the slot that a block begins in; along k, the LAST block's second slot as well."""
    slot, turn = at_w
    mbarrier.arrive(w_empty.index(slot))
    slot, turn = after(slot, turn, slots(TILING.stages, TILING.b_order))
    if LAST and TILING.b_order == "col":
        mbarrier.arrive(w_empty.index(slot))
        slot, turn = after(slot, turn, slots(TILING.stages, "col"))
    return slot, turn


@gluon.jit
def write_turned(acc, target, spot, PART: gl.constexpr, END: gl.constexpr):
    """Stores C^T, 64 rows of C at once."""
    if acc.shape[1] > STRIP:
        upper, lower = halves(acc)
        DOWN: gl.constexpr = acc.shape[1] // 2
        write_turned(upper, target, spot, PART, END)
        write_turned(lower, target, moved(spot, DOWN, 0), PART, END)
    else:
        if spot.rows > 0:
            write(acc.permute(1, 0), target, spot, PART, END)


@gluon.jit
def rows_of(x_smem, stage, SLOTS: gl.constexpr, FIRST: gl.constexpr, TILING: gl.constexpr):
    """SLOTS strips of a block of rows, from strip FIRST on, as the second operand."""
    layout: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    blocks: gl.constexpr = TILING.most // SLOTS
    view = seen_as(x_smem, x_smem.dtype, [TILING.stages * TILING.most // SLOTS, SLOTS * STRIP, DEEP], layout)
    return view.index(stage * blocks + FIRST // SLOTS).permute((1, 0))


@gluon.jit
def multiply_step(pairs, x_smem, stage, sums, AT: gl.constexpr, STRIPS: gl.constexpr, LAYOUTS: gl.constexpr,
                  TILING: gl.constexpr):  # fmt: skip
    """Starts the products of step AT of a block, 16 of K."""
    TYPE: gl.constexpr = x_smem.dtype
    OPERAND0: gl.constexpr = gl.DotOperandLayout(0, LAYOUTS[0], 2)
    OPERAND1: gl.constexpr = gl.DotOperandLayout(0, LAYOUTS[1], 2)
    first, second = sums
    x = rows_of(x_smem, stage, STRIPS.first, 0, TILING).slice(AT * STEP, STEP, 0)
    first = warpgroup_mma(elements(pairs, TYPE, OPERAND0), x, first, is_async=True)
    if STRIPS.second > 0:
        y = rows_of(x_smem, stage, STRIPS.second, STRIPS.begin, TILING).slice(AT * STEP, STEP, 0)
        second = warpgroup_mma(elements(pairs, TYPE, OPERAND1), y, second, is_async=True)
    return first, second


@gluon.jit
def settled(sums, LEFT: gl.constexpr, STRIPS: gl.constexpr):
    """Waits until at most LEFT steps are under way: the registers of those before may be loaded again."""
    first, second = sums
    if STRIPS.second > 0:
        first, second = warpgroup_mma_wait(num_outstanding=2 * LEFT, deps=[first, second])
        return warpgroup_mma_init(first), warpgroup_mma_init(second)
    else:
        return warpgroup_mma_init(warpgroup_mma_wait(num_outstanding=LEFT, deps=[first])), second


@gluon.jit
def multiply_block(rings, place, at_x, at_w, pairs, sums, older, LAST: gl.constexpr, STRIPS: gl.constexpr,
                   LAYOUTS: gl.constexpr, TILING: gl.constexpr):  # fmt: skip
    """One block. While the tensor cores are at a step, what is needed three steps later is loaded into the registers
    of the step before: of this block the last step's weights, then of the next block, unless this is the LAST.

    It ends with nothing under way. Products that went on through the end of a loop's turn would be serialised
    (ptxas: "insufficient register resources"), each waiting for the one before.
    """
    STAGES: gl.constexpr = TILING.stages
    w0, w1, w2 = pairs
    stage, phase = at_x
    if TILING.b_order == "row":
        at_w = at_x  # both rings turn alike
    mbarrier.wait(rings.x_full.index(stage), phase)
    sums = multiply_step(w0, rings.x, stage, sums, 0, STRIPS, LAYOUTS, TILING)
    sums = settled(sums, 1, STRIPS)
    w3 = fragment(place, at_w[0], 3, TILING)
    sums = multiply_step(w1, rings.x, stage, sums, 1, STRIPS, LAYOUTS, TILING)
    # the rows of the block before: handed back here, where it delays no product
    mbarrier.arrive(rings.x_empty.index((stage + STAGES - 1) % STAGES), pred=older)
    at_w = hand_back(rings.w_empty, at_w, LAST, TILING)
    now = (stage + STAGES) % STAGES
    if not LAST:
        at_x = after(stage, phase, STAGES)
        await_lines(rings.w_full, at_w, TILING)
    sums = settled(sums, 1, STRIPS)
    if not LAST:
        w0 = fragment(place, at_w[0], 0, TILING)
    sums = multiply_step(w2, rings.x, now, sums, 2, STRIPS, LAYOUTS, TILING)
    sums = settled(sums, 1, STRIPS)
    if not LAST:
        w1 = fragment(place, at_w[0], 1, TILING)
    sums = multiply_step(w3, rings.x, now, sums, 3, STRIPS, LAYOUTS, TILING)
    if not LAST:
        sums = settled(sums, 1, STRIPS)
        w2 = fragment(place, at_w[0], 2, TILING)
    sums = settled(sums, 0, STRIPS)
    return at_x, at_w, (w0, w1, w2), sums


@gluon.jit
def multiply(rings, place, at_x, at_w, k_length, target, spot, STRIPS: gl.constexpr, PART: gl.constexpr,
             TILING: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One tile, in one sum or two."""
    WIDTH0: gl.constexpr = STRIPS.first * STRIP
    WIDTH1: gl.constexpr = (STRIPS.second if STRIPS.second > 0 else 1) * STRIP
    LAYOUT0: gl.constexpr = sum_layout(WIDTH0, 16)
    LAYOUT1: gl.constexpr = sum_layout(WIDTH1, 16)
    LAYOUTS: gl.constexpr = (LAYOUT0, LAYOUT1)
    sums = (warpgroup_mma_init(gl.zeros([STRIP, WIDTH0], gl.float32, LAYOUT0)),
            warpgroup_mma_init(gl.zeros([STRIP, WIDTH1], gl.float32, LAYOUT1)))  # fmt: skip
    if TILING.b_order == "col":
        mbarrier.wait(rings.w_full.index(at_w[0]), at_w[1])
    else:
        at_w = at_x
    await_lines(rings.w_full, at_w, TILING)
    slot = at_w[0]
    pairs = (fragment(place, slot, 0, TILING), fragment(place, slot, 1, TILING), fragment(place, slot, 2, TILING))
    for k0 in range(DEEP, k_length, DEEP):
        at_x, at_w, pairs, sums = multiply_block(rings, place, at_x, at_w, pairs, sums, k0 > DEEP, False, STRIPS,
                                                 LAYOUTS, TILING)  # fmt: skip
    at_x, at_w, pairs, sums = multiply_block(rings, place, at_x, at_w, pairs, sums, k_length > DEEP, True, STRIPS,
                                             LAYOUTS, TILING)  # fmt: skip
    mbarrier.arrive(rings.x_empty.index(at_x[0]))
    first, second = sums
    if STRIPS.second > 0:
        first, second = warpgroup_mma_wait(num_outstanding=0, deps=[first, second])
        write_turned(first, target, spot, PART, END)
        write_turned(second, target, moved(spot, WIDTH0, 0), PART, END)
    else:
        write_turned(warpgroup_mma_wait(num_outstanding=0, deps=[first]), target, spot, PART, END)
    return after(at_x[0], at_x[1], TILING.stages), at_w


@gluon.jit
def consume_shifted(WHICH: gl.constexpr, target, unowned, rings, mail, weights, raw, PART: gl.constexpr,
                    TILING: gl.constexpr, END: gl.constexpr):  # fmt: skip
    """One warpgroup: 64 of a tile's columns."""
    if END.zero is not None and WHICH == 1:
        zero_unowned(target, unowned[0], unowned[1], END, TILING.sizes)
    TALL: gl.constexpr = TILING.most == 4
    HALF_BYTES: gl.constexpr = STRIP * line_pitch(TILING.stages) if TILING.b_order == "col" else STRIP * 2
    LAYOUT: gl.constexpr = sum_layout(STRIP, 16)
    PAIRS: gl.constexpr = gl.DotOperandLayout(0, LAYOUT, 1)
    slot = 0
    turn = 0
    at_x = (0, 0)
    at_w = (0, 0)
    g, row, rows, col, low, k_length = take(mail, slot, turn)
    while rows > 0:
        strips = (rows + STRIP - 1) // STRIP
        place = place_of(weights, raw + WHICH * HALF_BYTES, g, col, PAIRS, TILING)
        spot = Spot(g, row, rows, low, row + rows, col + WHICH * STRIP)
        if TALL and strips == 4:
            at_x, at_w = multiply(rings, place, at_x, at_w, k_length, target, spot, Strips(2, 2, 2), PART,
                                  TILING, END)  # fmt: skip
        elif TALL and strips == 3:
            at_x, at_w = multiply(rings, place, at_x, at_w, k_length, target, spot, Strips(2, 2, 1), PART,
                                  TILING, END)  # fmt: skip
        elif strips == 2:
            at_x, at_w = multiply(rings, place, at_x, at_w, k_length, target, spot,
                                  Strips(1, 2, 1) if TALL else Strips(2, 0, 0), PART, TILING, END)  # fmt: skip
        else:
            at_x, at_w = multiply(rings, place, at_x, at_w, k_length, target, spot, Strips(1, 0, 0), PART,
                                  TILING, END)  # fmt: skip
        slot, turn = after_slot(slot, turn)
        g, row, rows, col, low, k_length = take(mail, slot, turn)
    if END.store == "tma":
        tma.store_wait(0)


@gluon.jit
def shift_b_kernel(
    a_desc, out_desc, b, c, out, bias, records, ends, m, n, k, groups, head, a_rows, out_rows, raw_at,
    b_group, b_line, c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
    FORM: gl.constexpr, BN: gl.constexpr, PART: gl.constexpr, MOST: gl.constexpr,
    STAGES: gl.constexpr, WIDTH: gl.constexpr, ORDER: gl.constexpr, ALIGN: gl.constexpr,
    A_ORDER: gl.constexpr, B_ORDER: gl.constexpr,
    STORE: gl.constexpr, C: gl.constexpr, BIAS: gl.constexpr, ALPHA: gl.constexpr, ACTIVATION: gl.constexpr,
    ZERO: gl.constexpr, SIZES: gl.constexpr,
    CONSUMER_REGISTERS: gl.constexpr, PRODUCER_REGISTERS: gl.constexpr,
    LOADER_REGISTERS: gl.constexpr,
):  # fmt: skip
    """Jagged rows alone. Roles: two warpgroups multiply and write, four warps load weights, one warp rows."""
    TILING: gl.constexpr = Tiling(FORM, BN, 0, BN, MOST, STAGES, WIDTH, ORDER, ALIGN, False, SIZES, A_ORDER, B_ORDER,
                                  False, None)  # fmt: skip
    END: gl.constexpr = End(STORE, C, BIAS, ALPHA, ACTIVATION, False, ZERO)
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
    rings = Rings(x_smem, x_full, x_empty, w_full, w_empty)
    rows_ring = Ring(x_smem, x_smem, x_full, x_empty, ())
    mail = Mail(tickets, barriers(2, 1), barriers(2, 3))
    work = work_of(records, ends, m, n, k, groups, head, TILING, ALPHA)
    strides = Strides(c_group, c_row, c_col, out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
                      out_rows)  # fmt: skip
    unowned = (ends, work.extents) if ZERO is not None else ()
    weights = Weights(b, n, b_group, b_line)
    raw = ring_start(raw_at)
    target0 = Target(out_desc, staging.index(0), c, out, bias, strides, n)
    target1 = Target(out_desc, staging.index(1), c, out, bias, strides, n)
    gl.warp_specialize(
        [
            (consume_shifted, (0, target0, unowned, rings, mail, weights, raw, PART, TILING, END)),
            (consume_shifted, (1, target1, unowned, rings, mail, weights, raw, PART, TILING, END)),
            (load_lines, (mail, w_full, w_empty, weights, raw, TILING)),
            (produce, ((a_desc, a_desc), rows_ring, mail, work, a_rows, 0, TILING)),
        ],
        [4, 4, 1],
        [CONSUMER_REGISTERS, LOADER_REGISTERS, PRODUCER_REGISTERS],
    )
