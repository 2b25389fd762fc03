"""From an accumulator to `out`: act(alpha*acc + beta*C + bias), then one rounding to the output dtype.

The accumulator is a fresh contiguous tensor that the epilogue may overwrite. `c` may be `out`:
it is read in full before `out` is written.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from multigemm.problem.spec import Activation, ProblemSpec

_FLOAT32_BITS = torch.int32


def _wrapped(value: float) -> int:
    """An integral factor modulo 2^32, as the int32 that wrapping arithmetic would use."""
    return (int(value) + 2**31) % 2**32 - 2**31


def _gelu(x: Tensor) -> Tensor:
    """torch's own, but for +inf, of which its vectorized code makes a NaN on the CPU; on a GPU it gives inf."""
    top = x == torch.inf
    torch.ops.aten.gelu.out(x, approximate="none", out=x)
    return x.masked_fill_(top, torch.inf)


def _activate(x: Tensor, activation: Activation) -> Tensor:
    functions: dict[str, Callable[[Tensor], Tensor]] = {
        "relu": torch.relu_,
        "silu": lambda t: torch.ops.aten.silu_(t),
        "gelu": _gelu,
        "gelu_tanh": lambda t: torch.ops.aten.gelu.out(t, approximate="tanh", out=t),
    }
    return functions[activation](x)


def is_plain(spec: ProblemSpec) -> bool:
    """Whether the product itself is the answer, up to rounding."""
    return spec.alpha == "one" and spec.c is None and spec.bias is None and spec.activation is None


def finish(acc: Tensor, spec: ProblemSpec, alpha: float, beta: float, c: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scales, adds and activates in the accumulator's precision, in place; `bias` must broadcast."""
    integer = acc.dtype == torch.int32
    if spec.alpha == "any":
        acc.mul_(_wrapped(alpha) if integer else alpha)
    if c is not None:
        scale = _wrapped(beta) if integer else beta
        acc.add_(c.to(acc.dtype), alpha=scale) if scale != 1 else acc.add_(c.to(acc.dtype))
    if bias is not None:
        acc.add_(bias.to(acc.dtype))
    return acc if spec.activation is None else _activate(acc, spec.activation)


def to_odd_float32(x: Tensor) -> Tensor:
    """float64 -> float32, rounded to odd: a second rounding to 16 bits then acts as the only one.

    Truncates toward zero and sets the last bit where the value was not exact, so no tie of the
    narrower format can arise from the first step (float32 has more than two spare bits).
    """
    near = x.float()
    bits = near.view(_FLOAT32_BITS)
    back = near.double()
    bits -= (back.abs() > x.abs()).to(_FLOAT32_BITS)
    bits |= ((back != x) & ~torch.isnan(x)).to(_FLOAT32_BITS)
    return near


def store(acc: Tensor, out: Tensor) -> None:
    """Rounds once into `out`, whatever its strides."""
    if acc.dtype == torch.float64 and out.dtype in (torch.float16, torch.bfloat16):
        acc = to_odd_float32(acc)
    out.copy_(acc)
