"""out = act(alpha * acc + beta * C + bias), in the accumulator's precision, for one element.

Shared by all kernels of this backend, so that the order of operations and the treatment of NaN and
infinities are the same whichever kernel ran.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from functools import cache

from multigemm.backends.numba.arguments import KIND
from multigemm.backends.numba.kernels.memory import caster, loader, storer, wrap_int32
from multigemm.backends.numba.kernels.runtime import SIMULATED, device
from multigemm.cuda.arguments import ACTIVATION_CODES

if SIMULATED:
    import numpy as np

    def _exp(x):
        with np.errstate(all="ignore"):
            return np.exp(x)
else:
    _exp = math.exp

F16, BF16, F32 = KIND["f16"], KIND["bf16"], KIND["f32"]
RELU, GELU, GELU_TANH, SILU = (ACTIVATION_CODES[name] for name in ("relu", "gelu", "gelu_tanh", "silu"))
ROOT_HALF = math.sqrt(0.5)
TANH_SCALE = -math.sqrt(8.0 / math.pi)
"""1 + tanh(u) = 2 / (1 + exp(-2u)) with 2u = sqrt(8 / pi) (x + 0.044715 x^3)."""
GELU_CUBE = 0.044715


@cache
def make_activation(name, acc):
    """act(x): torch's function of that name, without the sums 1 + erf and 1 + tanh, which cancel for negative x."""
    cast = caster(acc)
    zero, one = cast(0), cast(1)
    constants = (0.5, -ROOT_HALF, TANH_SCALE, GELU_CUBE)
    half, root, scale, cube = (cast(x) if acc != "i32" else 0 for x in constants)

    @device
    def identity(x):
        return x

    @device
    def relu(x):
        return zero if x < zero else x

    @device
    def gelu(x):
        return half * x * cast(math.erfc(x * root))

    @device
    def gelu_tanh(x):
        return x / (one + cast(_exp(scale * (x + cube * x * x * x))))

    @device
    def silu(x):
        return x / (one + cast(_exp(-x)))

    return {None: identity, "relu": relu, "gelu": gelu, "gelu_tanh": gelu_tanh, "silu": silu}[name]


@cache
def make_finish(acc, activation, c_name, bias_name):
    """finish(value, alpha, beta, c, c_at, bias, bias_at): the output value in the accumulator's type.

    `c_name` or `bias_name` None compiles that operand away, so beta = 0 cannot read C.
    """
    cast, act = caster(acc), make_activation(activation, acc)
    load_c, load_bias = loader(c_name or "f32"), loader(bias_name or "f32")
    has_c, has_bias = c_name is not None, bias_name is not None

    @device
    def finish(value, alpha, beta, c, c_at, bias, bias_at):
        value = alpha * value
        if has_c:
            value += beta * cast(load_c(c, c_at))
        if has_bias:
            value += cast(load_bias(bias, bias_at))
        return act(wrap_int32(value)) if acc == "i32" else act(value)

    return finish


@cache
def make_any_finish(acc):
    """finish(value, alpha, beta, activation, c_kind, c, c_at, bias_kind, bias, bias_at), all decided at run time.

    One compiled kernel so serves every epilogue; the tensor-core kernels, which take seconds to compile,
    use it, and the one with the fewest instructions per element, `make_finish`.
    """
    if acc == "i32":
        return _any_finish_of_whole()
    half, brain, single, double = loader("f16"), loader("bf16"), loader("f32"), loader("f64")
    cast = caster(acc)
    relu, gelu = make_activation("relu", acc), make_activation("gelu", acc)
    gelu_tanh, silu = make_activation("gelu_tanh", acc), make_activation("silu", acc)

    @device
    def load_any(address, index, kind):
        value = cast(0)
        if kind == F16:
            value = half(address, index)
        elif kind == BF16:
            value = brain(address, index)
        elif kind == F32:
            value = cast(single(address, index))
        else:
            value = cast(double(address, index))
        return value

    @device
    def finish(value, alpha, beta, activation, c_kind, c, c_at, bias_kind, bias, bias_at):
        value = alpha * value
        if c_kind != 0:
            value += beta * load_any(c, c_at, c_kind)
        if bias_kind != 0:
            value += load_any(bias, bias_at, bias_kind)
        if activation == RELU:
            value = relu(value)
        elif activation == GELU:
            value = gelu(value)
        elif activation == GELU_TANH:
            value = gelu_tanh(value)
        elif activation == SILU:
            value = silu(value)
        return value

    return finish


def _any_finish_of_whole():
    """The same for int32, whose C and bias are int32 too."""
    load, relu = loader("i32"), make_activation("relu", "i32")

    @device
    def finish(value, alpha, beta, activation, c_kind, c, c_at, bias_kind, bias, bias_at):
        value = alpha * value
        if c_kind != 0:
            value += beta * load(c, c_at)
        if bias_kind != 0:
            value += load(bias, bias_at)
        value = wrap_int32(value)
        return relu(value) if activation == RELU else value

    return finish


@cache
def make_any_store(acc):
    """store(address, index, value, kind): a sum with one rounding to the type that `kind` numbers."""
    half, brain, single, double = (storer(name, acc) for name in ("f16", "bf16", "f32", "f64"))
    whole = storer("i32", "i32")

    @device
    def store(address, index, value, kind):
        if kind == F16:
            half(address, index, value)
        elif kind == BF16:
            brain(address, index, value)
        elif kind == F32:
            single(address, index, value)
        else:
            double(address, index, value)

    @device
    def store_whole(address, index, value, kind):
        whole(address, index, value)

    return store_whole if acc == "i32" else store
