"""out = act(alpha * acc + beta * C + bias), in the accumulator's precision, for one element.

Shared by all kernels of this backend, so that the order of operations and the treatment of NaN and
infinities are the same whichever kernel ran.
"""

# mypy: ignore-errors
from __future__ import annotations

import math
from functools import cache

from multigemm.backends.numba.memory import caster, loader, wrap_int32
from multigemm.backends.numba.runtime import SIMULATED, device

if SIMULATED:
    import numpy as np

    def _exp(x):
        with np.errstate(all="ignore"):
            return np.exp(x)
else:
    _exp = math.exp

ROOT_HALF = math.sqrt(0.5)
GELU_SCALE = math.sqrt(2.0 / math.pi)
GELU_CUBE = 0.044715


@cache
def make_activation(name, acc):
    """act(x) as torch's function of that name computes it."""
    cast = caster(acc)
    half, one, root = cast(0.5) if acc != "i32" else 0, cast(1), cast(ROOT_HALF) if acc != "i32" else 0
    scale, cube = (cast(GELU_SCALE), cast(GELU_CUBE)) if acc != "i32" else (0, 0)
    zero = cast(0)

    @device
    def identity(x):
        return x

    @device
    def relu(x):
        return zero if x < zero else x

    @device
    def gelu(x):
        return half * x * (one + cast(math.erf(x * root)))

    @device
    def gelu_tanh(x):
        return half * x * (one + cast(math.tanh(scale * (x + cube * x * x * x))))

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
