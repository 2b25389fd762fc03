# mypy: ignore-errors
"""Weights in lines that begin anywhere, raw in shared memory: the aligned pieces round each line of a block, by the
four warps of `hopper_carry` that do nothing else. What lies between a line's start and its first piece is shifted
away where the weights are read into registers.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multigemm.backends.triton.hopper_tiles import take

DEEP = gl.constexpr(64)
COLUMNS = gl.constexpr(128)
# bytes of a line in the ring: 64 elements along k, or 128 along n, and one piece of 16 bytes more
PITCH_COL = gl.constexpr(144)
PITCH_ROW = gl.constexpr(272)


@gluon.jit
def ring_start(raw_at):
    """The address of what lies behind Triton's own shared memory."""
    start = gl.inline_asm_elementwise("mov.u32 $0, global_smem;", "=r,r", [raw_at], gl.int32, True, 1)
    return start + raw_at


@gluon.jit
def copy16(to, source, size):
    """16 bytes to shared memory, of which the first `size` are read and the others become zero."""
    gl.inline_asm_elementwise("cp.async.cg.shared.global.L2::256B [$1], [$2], 16, $3; mov.u32 $0, 0;", "=r,r,l,r",
                              [to, source, size], gl.int32, False, 1)  # fmt: skip


@gluon.jit
def load_lines(ring, mail, w_barriers, weights, raw, BN: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """Four warps: the aligned pieces round each line of a block of weights.

    What lies behind the end of k becomes zero: products with the zeros of the rows may not meet a NaN.
    """
    b, n, b_group, b_line = weights
    full, empty = w_barriers
    LINES: gl.constexpr = COLUMNS if B_ORDER == "col" else DEEP
    PIECES: gl.constexpr = 8 if B_ORDER == "col" else 16
    PITCH: gl.constexpr = PITCH_COL if B_ORDER == "col" else PITCH_ROW
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [32 // PIECES, PIECES], [4, 1], [1, 0])
    single: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    line = gl.arange(0, LINES, gl.SliceLayout(1, layout))
    piece = gl.arange(0, PIECES, gl.SliceLayout(0, layout))
    last = gl.arange(0, LINES, single)
    to = raw + line[:, None] * PITCH + piece[None, :] * 16
    to_last = raw + last * PITCH + PIECES * 16
    stage = 0
    phase = 1
    slot = 0
    turn = 0
    g, _, rows, col, _, k_length = take(mail, slot, turn)
    while rows > 0:
        start = b + g.to(gl.int64) * b_group * 2
        if B_ORDER == "col":
            start = start + col.to(gl.int64) * b_line * 2
        else:
            start = start + col.to(gl.int64) * 2
        lines = start + line.to(gl.int64) * b_line * 2
        lines_last = start + last.to(gl.int64) * b_line * 2
        ahead = (lines & 15).to(gl.int32)
        ahead_last = (lines_last & 15).to(gl.int32)
        source = (lines - ahead.to(gl.int64))[:, None] + (piece * 16)[None, :].to(gl.int64)
        source_last = lines_last - ahead_last.to(gl.int64) + PIECES * 16
        # bytes that a line has from the start of each piece on
        before = (piece * 16)[None, :] - ahead[:, None]
        before_last = PIECES * 16 - ahead_last
        across = (n - col) * 2
        for k0 in range(0, gl.maximum(k_length, 1), DEEP):
            left = (k_length - k0) * 2
            if B_ORDER == "col":
                size = gl.where((2 * line < across)[:, None], left - before, 0)
                size_last = gl.where(2 * last < across, left - before_last, 0)
            else:
                size = gl.where((2 * line < left)[:, None], across - before, 0)
                size_last = gl.where(2 * last < left, across - before_last, 0)
            size = gl.minimum(gl.maximum(size, 0), 16)
            size_last = gl.minimum(gl.maximum(size_last, 0), 16)
            mbarrier.wait(empty.index(stage), phase)
            copy16(to + stage * (LINES * PITCH), source, size)
            copy16(to_last + stage * (LINES * PITCH), source_last, size_last)
            async_copy.mbarrier_arrive(full.index(stage), increment_count=False)
            if B_ORDER == "col":
                source = source + DEEP * 2
                source_last = source_last + DEEP * 2
            else:
                source = source + b_line * (DEEP * 2)
                source_last = source_last + b_line * (DEEP * 2)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase ^= 1
        slot ^= 1
        if slot == 0:
            turn ^= 1
        g, _, rows, col, _, k_length = take(mail, slot, turn)
