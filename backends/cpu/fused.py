"""Fused problems on the CPU, step by step.

1. Rows are picked into copies of the operands.
2. A kernel of this backend forms the products with alpha, bias and, where it belongs to them, C: into `out` if picking
   rows is all that is asked for, else into sums of the accumulator's dtype.
3. What groups own goes to `preact_out`, through the activation or gate, times `row_scale`, and is rounded into `out`.
4. Where rows of the result are sums of rows, these stay in the accumulator's dtype, are summed in order and rounded.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cpu.epilogue import PICKS, activate, store
from multigemm.backends.cpu.groups import Sizes, bare, owned
from multigemm.backends.cpu.loop import in_pieces
from multigemm.planning.operands import Operands
from multigemm.problem.fused import PICKED, Fused, Gate, Index
from multigemm.problem.spec import Activation, classify, classify_list

_PLAIN: dict[Activation, Activation] = {"geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu", "swiglu": "silu"}
"""The activation that a gate applies to g; glu takes its sigmoid."""


def bare_fused(fused: Fused) -> Fused:
    """The fused tensors without autograd's graph, over the same memory."""
    return replace(fused, **{name: bare(getattr(fused, name)) for name in ("preact", "row_scale", "weights")})


# --- rows by number ---------------------------------------------------------------------------------


def _picked(x: Tensor, rows: Tensor, axis: int, absent: int = 0) -> Tensor:
    """A copy of the rows with these numbers; `absent` in every byte, or as every number, where there is none."""
    bits = x.view(torch.uint8) if x.element_size() == 1 else x
    there = (rows >= 0) & (rows < x.shape[axis])
    shape = [1] * x.dim()
    shape[axis] = -1
    if x.shape[axis]:
        found = bits.index_select(axis, torch.where(there, rows, 0))
    else:
        found = bits.new_empty((*x.shape[:axis], rows.shape[0], *x.shape[axis + 1 :]))
    return found.masked_fill_(~there.view(shape), absent).view(x.dtype)


def _laid_out_like(x: Tensor, shape: list[int]) -> Tensor:
    """Memory for a matrix with the order of another one and the same distance between elements of a line."""
    turned = x.stride(0) < x.stride(1)
    lines, length = reversed(shape) if turned else shape
    step = max(1, min(x.stride()))
    made = torch.empty((lines, max(length, 1) * step), dtype=x.dtype)[:, : length * step : step]
    return made.t() if turned else made


class _Picks:
    """Operands whose rows are picked, and their scales, as copies that each launch refills."""

    def __init__(self, ops: Operands, fused: Fused) -> None:
        self._steps: list[Callable[[], object]] = []
        self._changes: dict[str, Any] = {}
        for name, x, rows in (("a", ops.a, fused.a_rows), ("b", ops.b, fused.b_rows)):
            if rows is not None:
                axis = PICKED[f"{name}_rows"][ops.spec.form[-1]]
                self._changes[name] = self._copy(cast(Tensor, x), rows, axis)
                self._pick_scales(ops, name, rows)
        self.ops = replace(ops, **self._changes)

    def _pick_scales(self, ops: Operands, name: str, rows: Index) -> None:
        """Copies the picked rows' scales. A row of zeros is 0 times a scale that all rows share, but not 0 minus a zero
        point that all rows share."""
        of = ops.spec.a.scale if name == "a" else ops.spec.b.scale
        if of is None or (of.rows != 1 and of.zero is None):
            return
        axis, extent = (1, cast(Tensor, ops.a).shape[0]) if name == "a" else (2, cast(Tensor, ops.b).shape[1])
        for scale in ("scale_a",) if name == "a" else ("scale_b", "zero_b"):
            if (grid := getattr(ops, scale)) is not None:
                shape = list(grid.shape)
                shape[axis] = extent
                absent = 0 if scale == "zero_b" else 127 if grid.dtype is torch.float8_e8m0fnu else 1
                self._changes[scale] = self._copy(grid.expand(shape), rows, axis, absent)
        if of.rows != 1:
            self._changes["spec"] = replace(ops.spec, b=replace(ops.spec.b, scale=replace(of, rows=1)))

    def _copy(self, x: Tensor, rows: Index, axis: int, absent: int = 0) -> Tensor:
        """A copy with the operand's order, by which libraries choose their kernels, and so the bits."""
        shape = list(x.shape)
        shape[axis] = rows.values.shape[0]
        made = torch.empty(shape, dtype=x.dtype) if x.dim() == 3 else _laid_out_like(x, shape)
        self._steps.append(lambda: made.copy_(_picked(x, rows.values, axis, absent)))
        return made

    def __call__(self) -> None:
        for step in self._steps:
            step()


# --- activation, gate and row_scale ------------------------------------------------------------------


def _gated(g: Tensor, u: Tensor, gate: Gate) -> Tensor:
    """act(min(g, limit)) * (u within the limits + beta), each step in the accumulator's precision; NaN stays NaN."""
    if gate.limit is not None:
        g, u = g.clamp(max=gate.limit), u.clamp(-gate.limit, gate.limit)
    if gate.beta != 0:
        u = u + gate.beta
    if gate.kind == "glu":
        return torch.sigmoid(g).mul_(u)
    if gate.alpha != 1:
        return torch.sigmoid(g * gate.alpha).mul_(g).mul_(u)
    return activate(g.clone(), _PLAIN[gate.kind]).mul_(u)


def _finished(ops: Operands, sums: Tensor, scale: Tensor | None, ordered: bool) -> Tensor:
    """Rows of the result before they are rounded or summed; may overwrite the sums."""
    gate = cast(Fused, ops.fused).gate
    activation = None if gate is not None else ops.spec.activation

    def rows(x: Tensor, u: Tensor | None, scale: Tensor | None) -> Tensor:
        if gate is not None:
            x = _gated(x, cast(Tensor, u), gate)
        elif activation is not None:
            x = activate(x, activation)
        return x if scale is None else x.mul_(scale)

    x, u = (sums, None) if gate is None else gate.split(sums)
    if scale is not None:
        scale = scale.to(sums.dtype)[:, None].expand(x.shape)
    return in_pieces(rows, sums.dtype, x, u, scale) if ordered else rows(x, u, scale)


# --- sums of rows -------------------------------------------------------------------------------------


def _combined(rows: Tensor, there: Tensor, index: Tensor, weights: Tensor | None) -> Tensor:
    """Sums of rows by index [R, k], j ascending; only existing rows count."""
    total = torch.zeros((index.shape[0], rows.shape[1]), dtype=rows.dtype)
    if not rows.shape[0]:
        return total
    for j in range(index.shape[1]):
        at = index[:, j]
        valid = (at >= 0) & (at < rows.shape[0])
        at = torch.where(valid, at, 0)
        valid &= there[at]
        term = rows.index_select(0, at)
        if weights is not None:
            term.mul_(weights[:, j, None].to(rows.dtype))
        total = torch.where(valid[:, None], total + term, total)
    return total


def _scattered(rows: Tensor, there: Tensor, places: Tensor, count: int) -> Tensor:
    """Sums of rows by destination, s ascending, as torch adds them on a CPU."""
    at = torch.where(there & (places >= 0) & (places < count), places, count).long()
    return rows.new_zeros((count + 1, rows.shape[1])).index_add_(0, at, rows)[:count]


# --- the launch ---------------------------------------------------------------------------------------


class FusedLaunch:
    """One bound problem. `ordered`: a row's bits do not depend on its neighbours."""

    def __init__(self, ops: Operands, bind: Callable[[Operands], Launch], ordered: bool) -> None:
        fused = cast(Fused, ops.fused)
        self._ops, self._fused, self._ordered = ops, fused, ordered
        self._picks = _Picks(ops, fused)
        products = self._picks.ops
        spec = products.spec
        plain = replace(spec, fused=None, a=_like(spec.a, products.a), b=_like(spec.b, products.b))
        self._sums: Any = None
        if not set(spec.fused.keywords if spec.fused else ()) <= PICKS:
            self._sums = _sums_of(ops, products)
            out = classify_list(self._sums, spec.acc) if isinstance(self._sums, list) else classify(self._sums)
            scatters = fused.scatters
            plain = replace(plain, activation=None, out=out, zero_unowned=False, c=None if scatters else spec.c)
            products = replace(products, out=self._sums, c=None if scatters else ops.c)
        self._products = replace(products, spec=plain, fused=None)
        self._sizes, self._launch = Sizes(self._products), bind(self._products)

    def __call__(self) -> None:
        self._picks()
        self._launch()
        if self._sums is None:
            return
        self._sizes.changed()
        if self._fused.scatters:
            self._sum_rows()
            return
        out: Any = self._ops.out
        if self._ops.spec.zero_unowned:
            for x in out if isinstance(out, list) else [out]:
                x.zero_()
        for where in owned(self._products, self._sizes):
            store(self._rows(where), out[where])

    def _rows(self, where: Any) -> Tensor:
        """Computes rows of the result, after writing `preact_out`."""
        fused, sums = self._fused, self._sums[where]
        if fused.preact is not None:
            store(sums, cast(Any, fused.preact)[where])
        scale = None if fused.row_scale is None else fused.row_scale[where]
        return _finished(self._ops, sums, scale, self._ordered)

    def _sum_rows(self) -> None:
        ops, fused = self._ops, self._fused
        out, count = cast(Tensor, ops.out), self._sums.shape[0]
        rows = torch.zeros((count, out.shape[1]), dtype=self._sums.dtype)
        there = torch.zeros(count, dtype=torch.bool)
        for where in owned(self._products, self._sizes):
            rows[where], there[where] = self._rows(where), True
        if fused.combine is not None:
            total = _combined(rows, there, fused.combine.values, fused.weights)
        else:
            total = _scattered(rows, there, cast(Index, fused.out_rows).values, out.shape[0])
        if ops.c is not None:
            total = total + cast(Tensor, ops.c).to(total.dtype) * ops.beta
        if self._ordered:
            total.masked_fill_(total.isnan(), math.nan)
        store(total, out)


def _like(spec: Any, x: Any) -> Any:
    """The `OperandSpec` of an operand, or of the copy of its rows."""
    if not isinstance(x, Tensor):
        return spec
    found = classify(x, spec.shared)
    return replace(spec, order=found.order, align=found.align, dense=found.dense, wide=found.wide)


def _sums_of(ops: Operands, products: Operands) -> Any:
    """Memory for the products: [T, N], [M, T], [G, M, N], or a list."""
    acc, spec = ops.spec.acc, ops.spec
    if isinstance(products.a, list):
        return [torch.empty((x.shape[0], y.shape[1]), dtype=acc) for x, y in zip(products.a, products.b, strict=True)]
    stack = () if spec.form in ("jagged_m", "jagged_n") else (spec.groups,)
    return torch.empty((*stack, products.a.shape[-2], cast(Tensor, products.b).shape[-1]), dtype=acc)
