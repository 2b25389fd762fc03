"""A plain model of a kernel for fused problems, which takes one token after the other, as a definition would.

tests.model_mutants.faults makes kernels of this source with a line changed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from multigemm.backend import Availability, BuiltinBackend, Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.fused import Fused, Gate, Index
from multigemm.problem.spec import ProblemSpec

NOTHING = Fused()


def token_count(ops: Operands) -> int:
    """The extent that offsets divide: as many tokens as there are numbers of picked rows, or rows."""
    fused, direction, a, b = ops.fused or NOTHING, ops.spec.jagged, cast(Tensor, ops.a), cast(Tensor, ops.b)
    picks = fused.b_rows if direction == "n" else fused.a_rows
    if picks is not None:
        return int(picks.values.shape[0])
    return {"m": a.shape[0], "n": b.shape[-1], "k": a.shape[-1]}[direction or "m"]


def spans(ops: Operands) -> list[tuple[int, int]]:
    """First and past-the-end token of each group, inside the operands even if sizes lie; masked: the valid rows."""
    if ops.valid_rows is not None:
        most = cast(Tensor, ops.a).shape[1]
        return [(0, min(max(rows, 0), most)) for rows in ops.valid_rows.tolist()]
    assert ops.ends is not None
    ends, total = ops.ends.tolist(), token_count(ops)
    if not ends:
        return []
    first = ops.ends.as_strided((1,), (1,), ops.ends.storage_offset() - 1).tolist() if ops.head else [0]
    starts = [min(max(start, 0), total) for start in [*first, *ends[:-1]]]
    return [(start, min(max(end, start), total)) for start, end in zip(starts, ends, strict=True)]


def picked(x: Tensor, index: Index | None, lo: int, hi: int, axis: int) -> Tensor:
    """The tokens lo..hi-1 of an operand."""
    made = torch.zeros((hi - lo, x.shape[1 - axis]), dtype=x.dtype)
    for s in range(lo, hi):
        row = s if index is None else int(index.values[s])
        if row < 0 or row >= x.shape[axis]:
            continue
        made[s - lo] = x.select(axis, row)
    return made if axis == 0 else made.t()


def groups(ops: Operands, fused: Fused) -> Iterator[tuple[Any, Any, Any]]:
    """a, b and the index into the result of each group."""
    form, a, b = ops.spec.form, cast(Any, ops.a), cast(Any, ops.b)
    if form in ("per_group", "batched"):
        yield from ((a[g], b[g], g) for g in range(ops.spec.groups))
        return
    for g, (lo, hi) in enumerate(spans(ops)):
        if form == "masked":
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


def solve(ops: Operands) -> None:
    """The whole problem, in float64 for all but the rounding of results."""
    fused, spec, out = ops.fused or NOTHING, ops.spec, cast(Any, ops.out)
    rows: dict[int, Tensor] = {}
    for x in out if isinstance(out, list) else [out]:
        if spec.zero_unowned:
            x.zero_()
    for g, (a, b, where) in enumerate(groups(ops, fused)):
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


class Model(BuiltinBackend):
    """A third party's backend that supports fused problems."""

    takes_fused: ClassVar[bool] = True


def model(name: str = "model", solve: Callable[[Operands], None] = solve) -> Model:
    """The model, or one like it, as a backend for fused problems in unquantised floats."""

    def reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
        plain = spec.compute.is_floating_point and not spec.quantised
        return [] if device.type == "cpu" and plain else ["the model takes plain floats on the host"]

    def plan(spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        return Recipe("model", config, lambda ops: lambda: solve(ops))

    return Model(name, lambda: Availability(ok=True), reasons, lambda spec, device: (0,), plan)
