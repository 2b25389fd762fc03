# mypy: ignore-errors
"""Weights from the raw ring of `hopper_lines` into the registers that wgmma takes its first operand from.

A line begins at any element, so a pair of elements lies across two words (lines along k), or in two lines (along n):
no layout of Triton's expresses that, and addresses in shared memory are computed here.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from multigemm.backends.triton.hopper_lines import PITCH_COL, PITCH_ROW

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
def fragment(place, AT: gl.constexpr, B_ORDER: gl.constexpr):
    """64 columns of weights, 16 deep, step AT of a block: pairs of elements, as wgmma takes its first operand."""
    at, more = place
    if B_ORDER == "col":
        return gl.inline_asm_elementwise(words_at(AT * 32), "=r,r,r", [at, more], gl.int32, False, 1)
    else:
        return gl.inline_asm_elementwise(halves_at(AT * 16 * PITCH_ROW), "=r,r,r", [at, at + more], gl.int32, False, 1)


@gluon.jit
def elements(pairs, TYPE: gl.constexpr, OPERAND: gl.constexpr):
    """Pairs as the elements that they are. Nothing moves: in a register of 32 bits each they outlive a loop's turn,
    where elements of 16 bits would be taken apart, and wgmma would wait for them."""
    both = gl.join(pairs, pairs).reshape([STRIP, STEP])
    found = gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r,r", [both], gl.int16, True, 2)
    return gl.convert_layout(found.to(TYPE, bitcast=True), OPERAND)


@gluon.jit
def place_of(weights, raw, g, col, PAIRS: gl.constexpr, B_ORDER: gl.constexpr):
    """Where a thread's pairs lie in the first stage: their addresses, and by how much a pair lies across words, or
    how far behind the first element the second one lies, in the next line.

    Lines eight apart lie alike in their 16 bytes: a line's offset is that of the thread's first line.
    """
    b, _, b_group, b_line = weights
    m = gl.arange(0, STRIP, gl.SliceLayout(1, PAIRS))
    k = gl.arange(0, STEP // 2, gl.SliceLayout(0, PAIRS))
    start = (b + (g.to(gl.int64) * b_group) * 2).to(gl.int32)
    step = (b_line * 2).to(gl.int32)
    if B_ORDER == "col":
        ahead = (start + (col + m % 8) * step) & 15
        at = raw + (m * PITCH_COL + (ahead & 12))[:, None] + (k * 4)[None, :]
        return at, ((ahead & 2) * 8)[:, None] + 0 * k[None, :]
    else:
        ahead = (start + col * 2 + (k * 2 % 8) * step) & 15
        ahead_next = (start + col * 2 + (k * 2 % 8 + 1) * step) & 15
        at = raw + (m * 2)[:, None] + (k * (2 * PITCH_ROW) + ahead)[None, :]
        return at, (PITCH_ROW + ahead_next - ahead)[None, :] + 0 * m[:, None]


@gluon.jit
def in_stage(place, stage, BYTES: gl.constexpr):
    """The same place in another stage."""
    return place[0] + stage * BYTES, place[1]
