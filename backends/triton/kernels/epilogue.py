# mypy: ignore-errors
"""The end of every tile: out = act(alpha * acc + beta * C + bias), then one rounding.

All of it happens in the accumulator's precision (float32, float64, or int32). NaN and the infinities
come out of activations as out of torch's, whose sums 1 + erf and 1 + tanh cancel for negative x.
"""

import triton
import triton.language as tl


@triton.jit
def scalar_of(bits, dtype: tl.constexpr):
    """alpha and beta travel as the bits of a float64 (or as an integer), which no launcher can round."""
    if dtype == tl.int32:
        value = bits.to(tl.int32)
    else:
        value = bits.to(tl.int64).to(tl.float64, bitcast=True).to(dtype)
    return value


@triton.jit
def next_term(p, q, c: tl.constexpr):
    """p * q + c, rounded once. A bare float beside float64 would lose its last bits in some versions of Triton."""
    if q.dtype == tl.float64:
        p = tl.fma(p, q, tl.full([], c, tl.float64))
    else:
        p = tl.fma(p, q, c)
    return p


TAIL_64 = tl.constexpr((
    8.87684080202382977e-10, 5.23763660601023379e-9, -1.34456172912233005e-10, -4.43455297078557501e-8,
    9.45572690337117056e-9, 3.11872449912956753e-7, -4.30306009726024551e-7, -1.80068607392939199e-6,
    6.79640941695843525e-6, 1.07597725423194587e-6, -0.000064751914293224855, 0.000181360324882516688,
    0.0000328699806224424944, -0.00213160519572329813, 0.0100298206483519358, -0.0309853155090167918,
    0.0751719156681254739, -0.152680232064410281, 0.267974245841697094, -0.41390358577559287, 0.568968891814782905,
    -0.701009029590865524, 0.777351771893362193,
))  # fmt: skip
TAIL_32 = tl.constexpr((
    -0.000122983157, 0.0001948018511, 0.001569313645, -0.003523574056, -0.007527212912, 0.06040646975, -0.1865230059,
    0.3871366798, -0.6078966061, 0.7552851385,
))  # fmt: skip
"""Coefficients of `normal_tail`, that of the highest power first."""


@triton.jit
def normal_tail(a):
    """Two factors of the integral of the normal density from a to infinity, for a >= 0.

    exp(-a^2 / 2) and r times a polynomial in q = 1 - 2kr, r = 1 / (a + k), which lies in [-1, 1). The polynomials
    interpolate at Chebyshev's points up to where the tail underflows, a = 14.5 (k = 4) or 39 (k = 6), with a
    relative error below 2^-26 or 2^-56. erfc itself has no counterpart in the interpreter. exp2 with log2(e) / 2
    in its argument saves a product per element, and so the registers that would spill beside a C.
    """
    if a.dtype == tl.float64:
        r = 1.0 / (a + 6.0)
        q = tl.fma(r, -12.0, 1.0)
        p = tl.full([], TAIL_64[0], tl.float64)
        for i in tl.static_range(1, 23):
            p = next_term(p, q, TAIL_64[i])
    else:
        r = 1.0 / (a + 4.0)
        q = tl.fma(r, -8.0, 1.0)
        p = tl.fma(q, TAIL_32[0], TAIL_32[1])
        for i in tl.static_range(2, 10):
            p = next_term(p, q, TAIL_32[i])
    # exp2 of float64 adds to its argument; plus zero keeps the product from being fused into that
    return p * r, tl.exp2(tl.fma(-0.7213475204444817 * a, a, 0.0))


@triton.jit
def normal_area(x):
    """The integral of the normal density from minus infinity to x, relatively precise for negative x."""
    factor, density = normal_tail(tl.abs(x))
    return tl.where(x < 0, factor * density, tl.fma(-1.0 * factor, density, 1.0))


@triton.jit
def activate(x, kind: tl.constexpr):
    """None, relu, gelu, gelu_tanh or silu; `where` rather than `maximum` keeps NaN in relu."""
    if kind == "relu":
        x = tl.where(x <= 0, 0, x).to(x.dtype)
    elif kind == "gelu":
        x = x * normal_area(x)
    elif kind == "gelu_tanh":
        # 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2y)), without tanh and without its cancellation
        y = 0.7978845608028654 * tl.fma(0.044715 * x * x, x, x)
        x = x / (1.0 + tl.exp(-2.0 * y))
    elif kind == "silu":
        x = x / (1.0 + tl.exp(-x))
    return x


@triton.jit
def narrow(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr):
    """One rounding to the output dtype; float64 to 16 bits passes float32 by rounding to odd.

    Rounding to odd keeps the sticky bit that a second rounding needs, so the two steps together
    round once: truncate toward zero, then set the last bit if anything was cut off.
    """
    if x.dtype == tl.float64 and dtype.primitive_bitwidth == 16:
        near = x.to(tl.float32)
        back = near.to(tl.float64)
        bits = near.to(tl.int32, bitcast=True)
        bits = tl.where(tl.abs(back) > tl.abs(x), bits - 1, bits)
        bits = tl.where((back != x) & (x == x), bits | 1, bits)
        x = bits.to(tl.float32, bitcast=True)
    if INTERPRETED and dtype == tl.bfloat16:
        # the interpreter cuts off, and misplaces subnormal numbers; a GPU rounds to the nearest, ties to even
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        x = tl.where(x == x, even, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(dtype)


@triton.jit
def multiply_add(x, y, z):
    """x * y + z, rounded once."""
    if z.dtype == tl.int32:
        z += x * y
    else:
        z = tl.fma(x, y, z)
    return z


@triton.jit
def finish(acc, alpha_bits, beta_bits, c_ptrs, c_mask, bias_ptrs, bias_mask, out_dtype: tl.constexpr,
           HAS_ALPHA: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
           INTERPRETED: tl.constexpr = False):  # fmt: skip
    """The whole epilogue of one tile; beta = 0 (no C) never reads C. bias_ptrs is a row (or a column).

    Where a product meets a sum, the code says whether they round once. Left open, compilers fuse them in one kernel and
    not in the next: then a row's last bit depends on the tile.
    """
    if HAS_BIAS:
        bias = tl.load(bias_ptrs, mask=bias_mask, other=0).to(acc.dtype)
    if HAS_C:
        if HAS_ALPHA:
            acc = acc * scalar_of(alpha_bits, acc.dtype)
        acc = multiply_add(scalar_of(beta_bits, acc.dtype), tl.load(c_ptrs, mask=c_mask, other=0).to(acc.dtype), acc)
        if HAS_BIAS:
            acc += bias
    elif HAS_BIAS and HAS_ALPHA:
        acc = multiply_add(acc, scalar_of(alpha_bits, acc.dtype), bias)
    elif HAS_BIAS:
        acc += bias
    elif HAS_ALPHA:
        acc = acc * scalar_of(alpha_bits, acc.dtype)
    return narrow(activate(acc, ACTIVATION), out_dtype, INTERPRETED)
