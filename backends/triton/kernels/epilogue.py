# mypy: ignore-errors
"""The end of every tile: out = act(alpha * acc + beta * C + bias), then one rounding.

All of it happens in the accumulator's precision (float32, float64, or int32). Activations follow
torch's formulas, so that NaN and the infinities come out as they do there.
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
def activate(x, kind: tl.constexpr):
    """None, relu, gelu, gelu_tanh or silu; `where` rather than `maximum` keeps NaN in relu."""
    if kind == "relu":
        x = tl.where(x <= 0, 0, x).to(x.dtype)
    elif kind == "gelu":
        x = x * 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    elif kind == "gelu_tanh":
        # 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2y)), without tanh and without its cancellation
        y = 0.7978845608028654 * (x + 0.044715 * x * x * x)
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
        # the interpreter cuts off; a GPU rounds to the nearest, ties to even
        bits = x.to(tl.float32).to(tl.int32, bitcast=True)
        even = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = tl.where(x == x, even.to(tl.float32, bitcast=True), x.to(tl.float32))
    return x.to(dtype)


@triton.jit
def finish(acc, alpha_bits, beta_bits, c_ptrs, c_mask, bias_ptrs, bias_mask, out_dtype: tl.constexpr,
           HAS_ALPHA: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
           INTERPRETED: tl.constexpr = False):  # fmt: skip
    """The whole epilogue of one tile; beta = 0 (no C) never reads C. bias_ptrs is a row (or a column)."""
    if HAS_ALPHA:
        acc = acc * scalar_of(alpha_bits, acc.dtype)
    if HAS_C:
        acc += scalar_of(beta_bits, acc.dtype) * tl.load(c_ptrs, mask=c_mask, other=0).to(acc.dtype)
    if HAS_BIAS:
        acc += tl.load(bias_ptrs, mask=bias_mask, other=0).to(acc.dtype)
    return narrow(activate(acc, ACTIVATION), out_dtype, INTERPRETED)
