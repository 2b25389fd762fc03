"""From an accumulator to `out`: act(alpha*acc + beta*C + bias), then one rounding to the output dtype.

The accumulator is a fresh contiguous tensor that the epilogue may overwrite. `c` may be `out`:
it is read in full before `out` is written.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import cast

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

Finisher = Callable[[Sizes], None]


def accumulator(product: Tensor, integer: bool) -> Tensor:
    """Converts products of int8, which come as exact floats, to int32 sums, which wrap."""
    if not integer:
        return product
    return (product.to(torch.int64) if product.dtype == torch.float64 else product).to(torch.int32)


def _apply(ops: Operands, acc: Tensor, c: Tensor | None, bias: Tensor | None, out: Tensor) -> None:
    if out.numel():
        acc = accumulator(acc, ops.spec.compute == torch.int8)
        store(finish(acc, ops.spec, ops.alpha, ops.beta, c, bias), out)


def _tensors(ops: Operands) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """out, c and bias of a packed form, which has no lists."""
    return cast(Tensor, ops.out), cast("Tensor | None", ops.c), cast("Tensor | None", ops.bias)


def _finish_list(ops: Operands, target: list[Tensor]) -> Finisher:
    none = [None] * len(target)
    out, c, bias = (none if x is None else x for x in (ops.out, ops.c, ops.bias))

    def run(sizes: Sizes) -> None:
        for acc, *rest in zip(target, c, bias, out, strict=True):
            _apply(ops, acc, *rest)

    return run


def _finish_jagged(ops: Operands, target: Tensor) -> Finisher:
    """Owned rows (or columns) are one range; a bias per group is spread over its rows first."""
    out, c, bias = _tensors(ops)
    by_row = ops.spec.form == "jagged_m"
    spread = by_row and bias is not None and bias.dim() == 2

    def run(sizes: Sizes) -> None:
        lo, hi = sizes.owned
        cut = (slice(lo, hi),) if by_row else (slice(None), slice(lo, hi))
        row = bias
        if spread:
            row = torch.index_select(cast(Tensor, bias), 0, rows_of(sizes))
        elif bias is not None and not by_row:
            row = bias[lo:hi]
        _apply(ops, target[cut], None if c is None else c[cut], row, out[cut])

    return run


def _finish_stack(ops: Operands, target: Tensor) -> Finisher:
    out, c, bias = _tensors(ops)
    row = bias[:, None] if bias is not None and bias.dim() == 2 else bias

    def run(sizes: Sizes) -> None:
        _apply(ops, target, c, row, out)

    return run


def _finish_masked(ops: Operands, target: Tensor) -> Finisher:
    out, c, bias = _tensors(ops)

    def run(sizes: Sizes) -> None:
        for g, rows in enumerate(cast(Index, sizes.end).tolist()):
            row = bias[g] if bias is not None and bias.dim() == 2 else bias
            _apply(ops, target[g, :rows], None if c is None else c[g, :rows], row, out[g, :rows])

    return run


def finisher(ops: Operands, target: Tensor | list[Tensor]) -> Finisher:
    """The function that turns the products in `target` into `ops.out`."""
    if isinstance(target, list):
        return _finish_list(ops, target)
    if ops.spec.form == "masked":
        return _finish_masked(ops, target)
    return _finish_jagged(ops, target) if ops.spec.form in ("jagged_m", "jagged_n") else _finish_stack(ops, target)
