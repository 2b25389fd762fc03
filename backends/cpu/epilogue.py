"""From an accumulator to `out`: act(alpha*acc + beta*C + bias), then one rounding to the output dtype.

The accumulator is a fresh contiguous tensor that the epilogue may overwrite. `c` may be `out`:
it is read in full before `out` is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backends.cpu.groups import Index, Sizes, rows_of
from multigemm.planning.operands import Operands
from multigemm.problem.spec import Activation, ProblemSpec

_FLOAT32_BITS = torch.int32


def _wrapped(value: float) -> int:
    """An integral factor modulo 2^32, as the int32 that wrapping arithmetic would use."""
    return (int(value) + 2**31) % 2**32 - 2**31


def _gelu(x: Tensor) -> None:
    """0.5 x erfc(-x / sqrt(2)); torch's own cancels for negative x, and is NaN at +inf on a CPU."""
    area = x * -math.sqrt(0.5)
    torch.special.erfc(area, out=area)
    x.mul_(0.5).mul_(area)


def _gelu_tanh(x: Tensor) -> None:
    """x / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3); torch's own, 0.5 x (1 + tanh u), cancels."""
    scale = -math.sqrt(8 / math.pi)
    exponent = (x * x).mul_(0.044715 * scale).add_(scale).mul_(x)
    x.div_(exponent.exp_().add_(1))


_IN_PLACE: dict[Activation, Callable[[Tensor], object]] = {
    "relu": torch.relu_, "silu": torch.ops.aten.silu_, "gelu": _gelu, "gelu_tanh": _gelu_tanh
}  # fmt: skip
_PER_THREAD = 1 << 16
"""Elements that one thread handles at once: several passes over 256 KiB stay in its cache, which doubles their
speed."""


def activate(x: Tensor, activation: Activation) -> Tensor:
    piece = _PER_THREAD * torch.get_num_threads()
    if activation in ("relu", "silu") or x.numel() <= piece or not x.is_contiguous():
        _IN_PLACE[activation](x)
        return x
    flat = x.view(-1)
    for first in range(0, flat.numel(), piece):
        _IN_PLACE[activation](flat[first : first + piece])
    return x


PICKS = frozenset(("a_rows", "b_rows"))
"""The fused keywords that change only the operands."""


def is_plain(spec: ProblemSpec) -> bool:
    """Whether the product itself is the result, except for rounding."""
    if spec.fused is not None and not set(spec.fused.keywords) <= PICKS:
        return False
    return spec.alpha == "one" and spec.c is None and spec.bias is None and spec.activation is None


def finish(acc: Tensor, spec: ProblemSpec, alpha: float, beta: float, c: Tensor | None, bias: Tensor | None) -> Tensor:
    """Scales, adds and activates in place, in the accumulator's precision. `bias` must broadcast."""
    integer = acc.dtype == torch.int32
    if spec.alpha == "any":
        acc.mul_(_wrapped(alpha) if integer else alpha)
    if c is not None:
        scale = _wrapped(beta) if integer else beta
        acc.add_(c.to(acc.dtype), alpha=scale) if scale != 1 else acc.add_(c.to(acc.dtype))
    if bias is not None:
        acc.add_(bias.to(acc.dtype))
    return acc if spec.activation is None else activate(acc, spec.activation)


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


# --- over whole operands: one pass for all groups where the form allows it --------------------------


def accumulator(product: Tensor, integer: bool) -> Tensor:
    """Converts products of int8, which come as exact floats, to int32 sums, which wrap."""
    if not integer:
        return product
    return (product.to(torch.int64) if product.dtype == torch.float64 else product).to(torch.int32)


def finisher(ops: Operands, target: Any) -> Callable[[Sizes], None]:
    """The function that turns the products in `target`, which has the layout of `ops.out`, into `ops.out`."""
    form, out, c, bias = ops.spec.form, cast(Any, ops.out), cast(Any, ops.c), cast(Any, ops.bias)
    by_group = isinstance(bias, Tensor) and bias.dim() == 2
    if by_group and form in ("batched", "jagged_k"):
        bias = bias[:, None]

    def parts(sizes: Sizes) -> Iterator[tuple[Tensor, Tensor | None, Tensor | None, Tensor]]:
        """The products, c, bias and out that one pass of the epilogue takes."""
        if form == "per_group":
            none = [None] * len(target)
            yield from zip(target, c or none, bias or none, out, strict=True)
        elif form == "masked":
            for g, rows in enumerate(cast(Index, sizes.end).tolist()):
                row = bias[g] if by_group else bias
                yield target[g, :rows], None if c is None else c[g, :rows], row, out[g, :rows]
        elif form in ("jagged_m", "jagged_n"):  # owned rows (or columns) are one range
            lo, hi = sizes.owned
            cut = (slice(lo, hi),) if form == "jagged_m" else (slice(None), slice(lo, hi))
            row = bias
            if form == "jagged_m" and by_group:
                row = torch.index_select(bias, 0, rows_of(sizes))
            elif form == "jagged_n" and bias is not None:
                row = bias[lo:hi]
            yield target[cut], None if c is None else c[cut], row, out[cut]
        else:
            yield target, c, bias, out

    def run(sizes: Sizes) -> None:
        for acc, old, row, to in parts(sizes):
            if to.numel():
                acc = accumulator(acc, ops.spec.compute == torch.int8)
                store(finish(acc, ops.spec, ops.alpha, ops.beta, old, row), to)

    return run
