"""The epilogue over whole operands: one pass for all groups where the form allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from multigemm.backends.cpu.epilogue import finish, store
from multigemm.backends.cpu.groups import Index, Sizes, rows_of
from multigemm.planning.operands import Operands

Finisher = Callable[[Sizes], None]


def accumulator(product: Tensor, integer: bool) -> Tensor:
    """Products of int8 come as exact floats; their sums wrap as int32 does."""
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
    """What turns the products in `target` into `ops.out`."""
    if isinstance(target, list):
        return _finish_list(ops, target)
    if ops.spec.form == "masked":
        return _finish_masked(ops, target)
    return _finish_jagged(ops, target) if ops.spec.form in ("jagged_m", "jagged_n") else _finish_stack(ops, target)
