"""A plain model of a kernel for fused problems, and faults planted in it, to prove that the oracles find them.

`solve` takes one token after the other, as a definition would. `FAULTS` are changes of its source, each of a kind that
kernels have shipped with.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from inspect import getsource
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from multigemm.backend import Availability, BuiltinBackend, Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.fused import Fused, Gate, Index
from multigemm.problem.spec import ProblemSpec

TILE = 16
NOTHING = Fused()


def spans(ops: Operands) -> list[tuple[int, int]]:
    """The first token of each group and the one after its last; for masked, the rows that count."""
    if ops.valid_rows is not None:
        return [(0, rows) for rows in ops.valid_rows.tolist()]
    assert ops.ends is not None
    ends = ops.ends.tolist()
    if not ends:
        return []
    first = ops.ends.as_strided((1,), (1,), ops.ends.storage_offset() - 1).tolist() if ops.head else [0]
    return list(zip([*first, *ends[:-1]], ends, strict=True))


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


def before(anchor: str, line: str) -> tuple[str, str]:
    """Inserts a line before another one."""
    return anchor, f"{line}\n{anchor}"


def after(anchor: str, line: str) -> tuple[str, str]:
    """Inserts a line after another one."""
    return anchor, f"{anchor}\n{line}"


READ = "        row = s if index is None else int(index.values[s])"
LIMIT = "    if gate.limit is not None:"
BIAS = "        x = x + bias_of(ops, g, where, b.shape[1]).double()"
ACT = "        y = (act(x, spec.activation, 1.0)"
KEPT = "            rows |= {where.start + i: row for i, row in enumerate(y)}"
ROW = "            s = int(index[r, j])"
ABSENT = "            if s not in rows:\n                continue"
TERM = "            total = total + weight * rows[s]"
FAULTS: dict[str, tuple[str, str]] = {
    "index off by one": after(READ, "        row += index is not None"),
    "last row of a tile": (READ, READ.replace("values[s]", "values[s - ((s - lo) % TILE == TILE - 1)]")),
    "index of another group": (READ, READ.replace("values[s]", "values[s - lo]")),
    "index in 32 bits": after(READ, "        row = (row + 2**31) % 2**32 - 2**31"),
    "sentinel reads the first row": after(READ, "        row = max(row, 0)"),
    "index past the end reads the last row": after(READ, "        row = min(row, x.shape[axis] - 1)"),
    "gate and up exchanged": ("g, u = gate.split(x)", "u, g = gate.split(x)"),
    "halves for interleaved": ("gate.split(x)", 'gate._replace(layout="halves").split(x)'),
    "beta lost": ("(u + gate.beta)", "u"),
    "beta before the clamp": before(LIMIT, "    u, gate = u + gate.beta, gate._replace(beta=0)"),
    "alpha lost": ("act(g, gate.kind, gate.alpha)", "act(g, gate.kind, 1.0)"),
    "limit lost": (LIMIT, "    if False:"),
    "gate clamped on both sides": ("g.clamp(max=gate.limit)", "g.clamp(-gate.limit, gate.limit)"),
    "up clamped on one side": ("u.clamp(-gate.limit, gate.limit)", "u.clamp(max=gate.limit)"),
    "clamp hides NaN": ("g.clamp(max=gate.limit)", "g.clamp(max=gate.limit).nan_to_num(nan=gate.limit)"),
    "clamp before bias": before(BIAS, "        x = x.clamp(max=getattr(fused.gate, 'limit', None) or 1e9)"),
    "silu for gelu": ('"gelu", "geglu")', '"gelu",)'),
    "preact after the limit": (
        "[where].copy_(x)",
        "[where].copy_(x.clamp(max=getattr(fused.gate, 'limit', None) or 1e9))",
    ),
    "preact rounded before the gate": before(ACT, "        x = x if fused.preact is None else x.bfloat16().double()"),
    "row_scale of the neighbour": ("fused.row_scale[where]", "fused.row_scale.roll(1, -1)[where]"),
    "row_scale rounded": (".row_scale[where].double()", ".row_scale[where].bfloat16().double()"),
    "row_scale before the activation": before(ACT, "        x, scale = x * scale, 1.0"),
    "weight of the neighbour": ("weights[r, j]", "weights[r, j - 1]"),
    "weights rounded": ("weights[r, j].to", "weights[r, j].bfloat16().to"),
    "weight of 0 hides NaN": (TERM, TERM.replace("weight * rows[s]", "(weight * rows[s] if weight != 0 else 0)")),
    "sum in bfloat16": after(TERM, "            total = total.bfloat16().to(total.dtype)"),
    "sentinel adds the first row": before(ABSENT, "            s = s if s in rows or not rows else min(rows)"),
    "weight of an absent row is read": before(
        ABSENT, "            total = total + (0 if weights is None else 0 * weights[r, j])"
    ),
    "duplicates count once": after(ROW, "            s = -1 if s in index[r, :j].tolist() else s"),
    "rows behind the ends": after(KEPT, "            rows |= {where.stop: y[0] * torch.nan} if len(y) else {}"),
    "rows that go to one place overwrite each other": (
        "                total = total + rows[s]",
        "                total = rows[s]",
    ),
    "last row lost": ("for r in range(fused.rows or 0)", "for r in range((fused.rows or 0) - 1)"),
    "rows without contributions keep what they held": (
        "        out[r].copy_(",
        "        (out[r] if total.any() else total).copy_(",
    ),
    "beta of c lost in sums": ("total = total + ops.beta * cast", "total = total + cast"),
}
"""A text of this file's functions, which stands there once, and what replaces it."""
PARTS = (spans, picked, groups, bias_of, act, gated, combined, solve)


@cache
def planted(fault: str = "") -> Any:
    """`solve` with a fault planted in it; "" plants none."""
    source = "\n\n".join(getsource(part) for part in PARTS)
    if fault:
        old, new = FAULTS[fault]
        if source.count(old) != 1:
            raise AssertionError(f"{fault}: its text stands {source.count(old)} times in the model")
        source = source.replace(old, new)
    names = dict(globals())
    exec(compile("from __future__ import annotations\n" + source, f"<{fault or 'model'}>", "exec"), names)
    return names["solve"]


class Model(BuiltinBackend):
    """A third party's backend that supports fused problems."""

    takes_fused: ClassVar[bool] = True


def model(fault: str = "") -> Model:
    """The model as a backend for fused problems in unquantised floats."""

    def reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
        plain = spec.compute.is_floating_point and not spec.quantised
        return [] if device.type == "cpu" and plain else ["the model takes plain floats on the host"]

    def plan(spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        return Recipe("model", config, lambda ops: lambda: planted(fault)(ops))

    return Model(fault or "model", lambda: Availability(ok=True), reasons, lambda spec, device: (0,), plan)
