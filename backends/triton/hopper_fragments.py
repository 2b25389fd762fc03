# mypy: ignore-errors
"""Weights from the raw ring of `hopper_lines` into the registers that wgmma takes its first operand from.

A line begins at any element, so a pair of elements lies across two words (lines along k), or in two lines (along n):
no layout of Triton's expresses that, and addresses in shared memory are computed here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from multigemm.backends.triton.hopper_lines import CHUNK, DEEP, PITCH_ROW, after, line_pitch, slots

STRIP = gl.constexpr(64)
# of K in one wgmma
STEP = gl.constexpr(16)


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
def fragment(place, slot, AT: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """64 columns of weights, 16 deep, step AT of the block that begins in a slot: pairs of elements, as wgmma takes its
    first operand."""
    line, inside, more = place
    if B_ORDER == "row":
        at = line + slot * (DEEP * PITCH_ROW)
        return gl.inline_asm_elementwise(halves_at(AT * 16 * PITCH_ROW), "=r,r,r", [at, at + more], gl.int32, False, 1)
    elif AT < 3:
        at = line + inside + slot * CHUNK
        return gl.inline_asm_elementwise(words_at(AT * 32), "=r,r,r", [at, more], gl.int32, False, 1)
    else:
        # a block's last words may lie in the next slot, and that in front of all others
        low = inside + (slot * CHUNK + 96)
        high = low + 4
        END: gl.constexpr = slots(STAGES, B_ORDER) * CHUNK
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
def place_of(weights, raw, g, col, PAIRS: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """Where a thread's pairs lie in the first slot: their lines' addresses, how far behind, and by how much a pair lies
    across words, or how far behind the first element the second one lies, in the next line.

    Lines eight apart lie alike in their 16 bytes: a line's offset is that of the thread's first line.
    """
    b, _, b_group, b_line = weights
    m = gl.arange(0, STRIP, gl.SliceLayout(1, PAIRS))
    k = gl.arange(0, STEP // 2, gl.SliceLayout(0, PAIRS))
    start = (b + (g.to(gl.int64) * b_group) * 2).to(gl.int32)
    step = (b_line * 2).to(gl.int32)
    if B_ORDER == "col":
        ahead = (start + (col + m % 8) * step) & 15
        line = (raw + m * line_pitch(STAGES))[:, None] + 0 * k[None, :]
        return line, (ahead & 12)[:, None] + (k * 4)[None, :], ((ahead & 2) * 8)[:, None] + 0 * k[None, :]
    else:
        ahead = (start + col * 2 + (k * 2 % 8) * step) & 15
        ahead_next = (start + col * 2 + (k * 2 % 8 + 1) * step) & 15
        line = raw + (m * 2)[:, None] + (k * (2 * PITCH_ROW) + ahead)[None, :]
        return line, 0, (PITCH_ROW + ahead_next - ahead)[None, :] + 0 * m[:, None]


@gluon.jit
def await_lines(w_full, at_w, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """Waits for the weights of a block: along k they end in the slot after the one that they begin in, and that one is
    known to be full."""
    slot, turn = at_w
    if B_ORDER == "col":
        slot, turn = after(slot, turn, slots(STAGES, B_ORDER))
    mbarrier.wait(w_full.index(slot), turn)


@gluon.jit
def hand_back(w_empty, at_w, LAST: gl.constexpr, STAGES: gl.constexpr, B_ORDER: gl.constexpr):
    """Frees the slot that a block begins in; along k, the LAST block's second slot as well."""
    slot, turn = at_w
    mbarrier.arrive(w_empty.index(slot))
    slot, turn = after(slot, turn, slots(STAGES, B_ORDER))
    if LAST and B_ORDER == "col":
        mbarrier.arrive(w_empty.index(slot))
        slot, turn = after(slot, turn, slots(STAGES, B_ORDER))
    return slot, turn
