"""A plain model of a kernel for fused problems, which takes one token after the other, as a definition would.

tests.model_mutants.faults makes kernels of this source with a line changed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.planning.operands import Operands
from multigemm.problem.fused import Fused, Gate, Index
from multigemm.problem.spec import ProblemSpec
from tests.model_mutants.kernel import Kernel, ModelBackend, Tile

NOTHING = Fused()


def picked(x: Tensor, index: Index | None, lo: int, hi: int, axis: int) -> Tensor:
    """The tokens lo..hi-1 of an operand."""
    made = torch.zeros((hi - lo, x.shape[1 - axis]), dtype=x.dtype)
    for s in range(lo, hi):
        row = s if index is None else int(index.values[s])
        if row < 0 or row >= x.shape[axis]:
            continue
        made[s - lo] = x.select(axis, row)
    return made if axis == 0 else made.t()


def groups(kernel: FusedKernel, fused: Fused) -> Iterator[tuple[Any, Any, Any]]:
    """a, b and the index into the result of each group."""
    form, a, b = kernel.spec.form, cast(Any, kernel.ops.a), cast(Any, kernel.ops.b)
    for g, (lo, hi) in enumerate(zip(*kernel.sizes(), strict=True)):
        if form in ("per_group", "batched"):
            yield a[g], b[g], g
        elif form == "masked":
            yield a[g, :hi], b[g], (g, slice(0, hi))
        elif form == "jagged_m":
            yield picked(a, fused.a_rows, lo, hi, 0), b if b.dim() == 2 else b[g], slice(lo, hi)
        elif form == "jagged_n":
            yield a if a.dim() == 2 else a[g], picked(b, fused.b_rows, lo, hi, 1), (slice(None), slice(lo, hi))
        else:
            yield picked(a, fused.a_rows, lo, hi, 1), picked(b, fused.b_rows, lo, hi, 0), g


def bias_of(ops: Operands, g: int, where: Any, n: int) -> Tensor:
    """The bias of a group."""
    if ops.bias is None:
        return torch.zeros(n)
    bias = cast(Any, ops.bias)
    if ops.spec.form == "jagged_n":
        return cast(Tensor, bias[where[1]])
    return cast(Tensor, bias[g] if isinstance(bias, list) or bias.dim() == 2 else bias)


def act(x: Any, kind: str | None, alpha: float) -> Any:
    """An activation, or what a gate applies to g."""
    if kind in ("relu", "reglu"):
        return x.clamp(min=0)
    if kind in ("silu", "swiglu"):
        return x * torch.sigmoid(alpha * x)
    if kind in ("gelu", "geglu"):
        return 0.5 * x * torch.special.erfc(-x * 0.5**0.5)
    if kind in ("gelu_tanh", "geglu_tanh"):
        return x / (1 + torch.exp(-2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)))
    return torch.sigmoid(x) if kind == "glu" else x


def gated(x: Tensor, gate: Gate) -> Any:
    """Turns two columns of the product into one column of the result."""
    g, u = gate.split(x)
    if gate.limit is not None:
        g = g.clamp(max=gate.limit)
        u = u.clamp(-gate.limit, gate.limit)
    return act(g, gate.kind, gate.alpha) * (u + gate.beta)


def combined(fused: Fused, rows: dict[int, Tensor], r: int, tokens: int, total: Tensor) -> Tensor:
    """One row of the result: a sum of rows."""
    if fused.combine is not None:
        index, weights = fused.combine.values, fused.weights
        for j in range(index.shape[1]):
            s = int(index[r, j])
            if s not in rows:
                continue
            weight = 1.0 if weights is None else weights[r, j].to(total.dtype)
            total = total + weight * rows[s]
    elif fused.out_rows is not None:
        places = fused.out_rows.values
        for s in range(tokens):
            if int(places[s]) == r and s in rows:
                total = total + rows[s]
    return total


class FusedKernel(Kernel):
    """One bound problem, in float64 for all but the rounding of results."""

    def jagged_extent(self) -> int:
        """As many tokens as there are numbers of picked rows, or rows."""
        fused = self.ops.fused or NOTHING
        picks = fused.b_rows if self.spec.jagged == "n" else fused.a_rows
        return super().jagged_extent() if picks is None else int(picks.values.shape[0])

    def launch(self) -> None:
        ops, spec, out = self.ops, self.spec, cast(Any, self.ops.out)
        fused, rows = ops.fused or NOTHING, dict[int, Tensor]()
        for x in out if isinstance(out, list) else [out]:
            if spec.zero_unowned:
                x.zero_()
        for g, (a, b, where) in enumerate(groups(self, fused)):
            x = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64)
            if ops.alpha != 0:
                x = ops.alpha * (a.double() @ b.double())
            x = x + bias_of(ops, g, where, b.shape[1]).double()
            if ops.c is not None and fused.rows is None:
                x = x + ops.beta * cast(Any, ops.c)[where].double()
            if fused.preact is not None:
                cast(Any, fused.preact)[where].copy_(x)
            scale = 1.0 if fused.row_scale is None else fused.row_scale[where].double()[:, None]
            y = (act(x, spec.activation, 1.0) if fused.gate is None else gated(x, fused.gate)) * scale
            if fused.rows is None:
                out[where].copy_(y)
            else:
                rows |= {where.start + i: row for i, row in enumerate(y)}
        for r in range(fused.rows or 0):
            tokens = 0 if fused.out_rows is None else fused.out_rows.values.shape[0]
            total = combined(fused, rows, r, tokens, torch.zeros(out.shape[1], dtype=torch.float64))
            if ops.c is not None:
                total = total + ops.beta * cast(Tensor, ops.c)[r].double()
            out[r].copy_(total)


class FusedBackend(ModelBackend):
    """A third party's backend that supports fused problems in unquantised floats."""

    takes_fused = True
    takes_quantised = False

    def __init__(self, name: str = "model", kernel: type[Kernel] = FusedKernel) -> None:
        super().__init__(name, kernel)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        plain = spec.compute.is_floating_point and not spec.quantised
        return super().not_supported_reasons(spec, device) + ([] if plain else ["the model takes plain floats"])

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return (Tile(),)
