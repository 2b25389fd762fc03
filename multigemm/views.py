"""A problem as separate products on the host: what the reference, the oracles and reports read.

Everything here may wait for the device, where the sizes or the operands live there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

if TYPE_CHECKING:
    from multigemm.problem import GroupedGemmProblem


@dataclass(frozen=True, slots=True)
class GroupView:
    """One product on the host: C = act(alpha * a @ b + beta * c + bias).

    `where` indexes this group's block in the result: a tuple of slices and integers for packed
    forms, the position in the list for per_group.
    """

    index: int
    m: int
    n: int
    k: int
    a: Tensor
    b: Tensor
    c: Tensor | None
    bias: Tensor | None
    where: Any


def bounds(problem: GroupedGemmProblem) -> list[tuple[int, int]]:
    """(start, end) of every group along the jagged direction, clamped as the kernels clamp."""
    assert problem.grouping is not None
    assert problem.extents is not None
    total = problem.extents.along(problem.form[-1])
    offsets = problem.grouping.read().tolist()
    starts = [min(max(s, 0), total) for s in offsets[:-1]]
    return [(s, min(max(e, s), total)) for s, e in zip(starts, offsets[1:], strict=True)]


def sizes(problem: GroupedGemmProblem) -> list[tuple[int, int, int]]:
    """(m, n, k) of every group."""
    if problem.extents is None:
        pairs = zip(problem.each("a"), problem.each("b"), strict=True)
        return [(x.shape[0], y.shape[1], x.shape[1]) for x, y in pairs]
    _, _, m, n, k = problem.extents
    if problem.valid_rows is not None:
        return [(min(max(rows, 0), m), n, k) for rows in np.diff(problem.valid_rows.read()).tolist()]
    if problem.grouping is None:
        return [(m, n, k)] * problem.spec.groups
    lengths = [end - start for start, end in bounds(problem)]
    jagged = problem.form[-1]
    return [tuple(length if d == jagged else e for d, e in zip("mnk", (m, n, k))) for length in lengths]  # type: ignore[misc]


def groups(problem: GroupedGemmProblem) -> Iterator[GroupView]:
    """Every product, one after the other."""
    for refresh in problem.refreshes:
        refresh()
    a, b, c, bias = (_on_host(x) for x in (problem.a, problem.b, problem.c, problem.bias))
    cuts = bounds(problem) if problem.grouping is not None else [(0, 0)] * problem.spec.groups
    for g, (m, n, k) in enumerate(sizes(problem)):
        spans = {d: slice(0, extent) for d, extent in zip("mnk", (m, n, k))}
        if problem.spec.jagged:
            spans[problem.spec.jagged] = slice(*cuts[g])
        where = _where(problem.form, g, spans["m"], spans["n"])
        x, y = _pick(a, g)[spans["m"], spans["k"]], _pick(b, g)[spans["k"], spans["n"]]
        yield GroupView(g, m, n, k, x, y, None if c is None else c[where], _bias(bias, g, spans["n"]), where)


def _where(form: str, g: int, rows: slice, cols: slice) -> Any:
    if form == "per_group":
        return g
    return (rows, cols) if form in ("jagged_m", "jagged_n") else (g, rows, cols)


def _pick(x: Any, g: int) -> Any:
    return x if isinstance(x, Tensor) and x.dim() == 2 else x[g]


def _bias(bias: Any, g: int, cols: slice) -> Any:
    if bias is None:
        return None
    return bias[cols] if isinstance(bias, Tensor) and bias.dim() == 1 else bias[g]


def _on_host(x: Any) -> Any:
    if x is None:
        return None
    return x.detach().cpu() if isinstance(x, Tensor) else [t.detach().cpu() for t in x]


def least_bytes(problem: GroupedGemmProblem) -> int:
    """Bytes that must move at least once."""
    used = [s for s in sizes(problem) if s[0] and s[1]]
    if not used:
        return 0
    a_size, b_size = problem.spec.a.dtype.itemsize, problem.spec.b.dtype.itemsize
    c_size = problem.spec.c.dtype.itemsize if problem.spec.c is not None else 0
    a = [m * k * a_size for m, _, k in used]
    b = [k * n * b_size for _, n, k in used]
    results = sum(m * n * (problem.out_dtype.itemsize + c_size) for m, n, _ in used)
    return results + (a[0] if problem.spec.a.shared else sum(a)) + (b[0] if problem.spec.b.shared else sum(b))
