# mypy: ignore-errors
"""Lines that start anywhere, read 16 aligned bytes at a time and shifted into place by one warp per few lines."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


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
def aligned(lines_at, places, chunk, line, shift, at, left, lines):
    """A block's aligned 16 bytes, but for those that hold no element of its lines; `left` are to come of each."""
    # a line that ends in the block before may end in the first 16 bytes of this one: left <= 0 < left + shift
    mask = (line < lines)[:, None] & (chunk[None, :] < left + shift)
    return gl.load(lines_at + at // 2 + places, mask=mask, other=0)
