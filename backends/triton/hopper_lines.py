# mypy: ignore-errors
"""Weights in lines that begin anywhere, raw in shared memory: the aligned pieces round each line of a block, by the
four warps of `hopper_carry` that do nothing else. What lies between a line's start and its first piece is shifted
away where the weights are read into registers.

Along k a block continues the lines of the block before it: each slot of the ring takes one whole aligned 128 bytes of
every line, and a block lies in its slot and the next one. Pieces of each block by itself would ask the L2 for most
of these 128 bytes twice. Along n, lines of a block are followed by others: each slot takes what it needs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multigemm.backends.triton.hopper_tiles import take

DEEP = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
# bytes along k that a slot takes of a line: a block's
CHUNK = gl.constexpr(128)
# bytes of a line along n in the ring: 128 elements and one piece of 16 bytes more
PITCH_ROW = gl.constexpr(272)
EACH = gl.constexpr(17)
# pieces of a block that are copied as one tensor, whose size is a power of two; the rest follows
MANY = gl.constexpr(1024)


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
def after(stage, phase, STAGES: gl.constexpr):
    """The next stage of a ring, and its phase."""
    stage += 1
    if stage == STAGES:
        stage = 0
        phase ^= 1
    return stage, phase


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
def load_along_n(mail, w_barriers, weights, raw, STAGES: gl.constexpr):
    """Four warps: the aligned pieces round each line of a block of weights.

    What lies behind the end of k becomes zero: products with the zeros of the rows may not meet a NaN.
    """
    b, n, b_group, b_line = weights
    full, empty = w_barriers
    REST: gl.constexpr = DEEP * EACH - MANY
    number, line, inside = pieces_of(0, MANY)
    number_last, line_last, inside_last = pieces_of(MANY, REST)
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        start = b + g.to(gl.int64) * b_group * 2 + col.to(gl.int64) * 2
        source, before = sources(start, line, inside, b_line)
        source_last, before_last = sources(start, line_last, inside_last, b_line)
        across = (n - col) * 2
        for k0 in range(0, gl.maximum(k_length, 1), DEEP):
            deep = gl.minimum(k_length - k0, DEEP)
            size = bytes_of(number, before, across, deep)
            size_last = bytes_of(number_last, before_last, across, deep)
            mbarrier.wait(empty.index(stage), phase)
            copy16(raw + stage * (DEEP * PITCH_ROW) + number * 16, source, size)
            copy16(raw + stage * (DEEP * PITCH_ROW) + number_last * 16, source_last, size_last)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            source = source + b_line * (DEEP * 2)
            source_last = source_last + b_line * (DEEP * 2)
            stage, phase = after(stage, phase, STAGES)
        slot ^= 1
        if slot == 0:
            turn ^= 1
        g, _, rows, col, _, k_length = take(mail, slot, turn)


@gluon.jit
def copy_some(to, source, size):
    """16 bytes as `copy16`; nothing at all where the size is below 0."""
    asm: gl.constexpr = """{ .reg .pred some; setp.ge.s32 some, $3, 0;
        @some cp.async.cg.shared.global [$1], [$2], 16, $3; mov.u32 $0, 0; }"""
    gl.inline_asm_elementwise(asm, "=r,r,l,r", [to, source, size], gl.int32, False, 1)


@gluon.jit
def load_along_k(mail, w_barriers, weights, raw, STAGES: gl.constexpr):
    """Four warps: whole aligned 128 bytes of each line, slot after slot, one more than blocks.

    A piece lies as far behind the slot of the tile's first block as behind the piece that its line begins in, so that
    all lines are read alike. Pieces before that one are left out: in their place may be what the last tile still reads.
    What lies behind the end of k becomes zero: products with the zeros of the rows may not meet a NaN.
    """
    b, n, b_group, b_line = weights
    full, empty = w_barriers
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
        start = b + (g.to(gl.int64) * b_group + col.to(gl.int64) * b_line) * 2
        lines = start + line.to(gl.int64) * b_line * 2
        skew = (lines & 127).to(gl.int32)
        source = (lines - skew.to(gl.int64))[:, None] + (piece * 16)[None, :].to(gl.int64)
        place = (piece * 16)[None, :] - (skew & 112)[:, None]
        before = (piece * 16)[None, :] - skew[:, None]
        within = (line < n - col)[:, None]
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
        slot ^= 1
        if slot == 0:
            turn ^= 1
        g, _, rows, col, _, k_length = take(mail, slot, turn)


@gluon.jit
def load_lines(mail, w_barriers, weights, raw, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """Four warps fill the ring of the weights."""
    if B_ORDER == "col":
        load_along_k(mail, w_barriers, weights, raw, STAGES)
    else:
        load_along_n(mail, w_barriers, weights, raw, STAGES)
