"""The `blas` kernel: every form through batched BLAS calls, in the accumulator's precision.

Steps of a launch: (1) read the sizes, and rebuild the calls if they changed; (2) widen or straighten
operands that BLAS cannot address; (3) zero what no product will write; (4) the calls; (5) unless
BLAS wrote into `out` itself, the epilogue over whole operands, not group by group where it can.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cpu.calls import Calls, bf16_calls, double_calls, float_calls
from multigemm.backends.cpu.epilogue import is_plain
from multigemm.backends.cpu.finishers import finisher
from multigemm.backends.cpu.groups import Index, Sizes, empty_products, unowned
from multigemm.backends.cpu.jit import Tile
from multigemm.backends.cpu.mkl import Library, has_fast_bf16
from multigemm.backends.cpu.products import INT8_EXACT_K
from multigemm.backends.cpu.tables import Table, fits, list_tables, merged, packed_table
from multigemm.planning.operands import Operands

Copies = list[tuple[Tensor, Tensor]]
WIDE_BF16 = 1 << 18
"""Multiply-adds of an average product from which BLAS's own bfloat16 beats widening to float32."""


def each(operand: Any) -> list[Tensor]:
    """The tensors of an operand."""
    return operand if isinstance(operand, list) else [operand]


def straightened(operand: Any, dtype: torch.dtype, copies: Copies) -> Any:
    """The operand as BLAS can read it; what has to be copied at each launch is added to `copies`."""
    if isinstance(operand, list):
        made: dict[tuple[Any, ...], Tensor] = {}
        same = [(x.data_ptr(), x.shape, x.stride()) for x in operand]
        for key, matrix in zip(same, operand, strict=True):
            if key not in made:
                made[key] = straightened(matrix, dtype, copies)
        return [made[key] for key in same]
    if operand.dtype == dtype and fits(operand):
        return operand
    work = torch.empty(operand.shape, dtype=dtype, device="cpu")
    copies.append((work, operand))
    return work


def _average_work(ops: Operands) -> float:
    """Multiply-adds of an average product, as far as the shapes tell before the sizes are known."""
    out, a, b = each(ops.out), each(ops.a), each(ops.b)
    if ops.spec.form == "jagged_k":
        return a[0].shape[0] * a[0].shape[1] * b[0].shape[1] / max(1, ops.spec.groups)
    return sum(x.numel() for x in out) * (a[0].shape[-1] if a else 0) / max(1, ops.spec.groups)


def _operand_dtype(ops: Operands, tile: Tile | None) -> torch.dtype:
    spec = ops.spec
    if spec.compute == torch.int8:
        depth = max((x.shape[-1] for x in each(ops.a)), default=0)
        return torch.float32 if depth <= INT8_EXACT_K else torch.float64
    if tile is None and spec.compute == torch.bfloat16 and has_fast_bf16() and _average_work(ops) >= WIDE_BF16:
        return torch.bfloat16
    return torch.float64 if spec.compute == torch.float64 else torch.float32


def _target(ops: Operands, product: torch.dtype) -> tuple[Any, bool]:
    """Where BLAS writes: `out` itself, or an accumulator of its shape."""
    outs = each(ops.out)
    if is_plain(ops.spec) and all(x.dtype == product and fits(x) for x in outs):
        return ops.out, True
    made = [torch.empty(x.shape, dtype=product, device="cpu") for x in outs]
    return (made if isinstance(ops.out, list) else made[0]), False


class BlasLaunch:
    """One bound problem. `slow` is the plain loop, which settles offsets that lie."""

    def __init__(self, ops: Operands, library: Library, slow: Launch, tile: Tile | None = None) -> None:
        self._ops, self._library, self._slow, self._tile = ops, library, slow, tile
        dtype = _operand_dtype(ops, tile)
        product = torch.float64 if dtype == torch.float64 else torch.float32
        target, direct = _target(ops, product)
        self._copies: Copies = []
        reads = ops.spec.alpha != "zero"
        a, b = (straightened(x, dtype, self._copies) if reads else x for x in (ops.a, ops.b))
        self._products = replace(ops, a=a, b=b, out=target)
        self._make = {torch.bfloat16: bf16_calls, torch.float64: double_calls}.get(dtype, float_calls)
        self._finish = None if direct else finisher(ops, target)
        self._sizes = Sizes(ops)
        self._calls: Calls | None = None
        self._zeros: list[Tensor] = []

    def _table(self, start: Index | None, end: Index | None) -> Table:
        if self._ops.spec.form == "per_group":
            return merged(list_tables(self._products))
        return packed_table(self._products, start, end)

    def _rebuild(self) -> None:
        start, end = self._sizes.start, self._sizes.end
        if self._ops.spec.alpha == "zero":
            self._zeros = list(each(self._products.out))
        else:
            self._calls = self._make(self._table(start, end), self._library, self._tile)
            self._zeros = empty_products(self._products, start, end)
        if self._ops.spec.zero_unowned:
            self._zeros += unowned(self._ops, start, end)

    def __call__(self) -> None:
        if self._sizes.changed():
            self._rebuild()
        if self._sizes.lie:
            self._slow()
            return
        for work, operand in self._copies:
            work.copy_(operand)
        for part in self._zeros:
            part.zero_()
        if self._calls is not None:
            self._calls()
        if self._finish is not None:
            self._finish(self._sizes)
