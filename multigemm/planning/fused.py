"""Fused problems as launches: the products that make rows, then the sums of those rows.

For `combine` and `out_rows` the products become a problem of their own, which any kernel may solve. It writes rows in
the operands' dtype into memory that the caller of the launch lends. A second kernel sums the rows in a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.cuda.launch import NOTHING, BoundKernel, Launch, in_turn
from multigemm.planning.operands import NO_VIEW, Operands, Packed, packed
from multigemm.problem.fused import Fused, Index
from multigemm.problem.spec import FusedSpec, ProblemSpec, classify_fresh

KEYWORDS = ("a_rows", "b_rows", "preact_out", "row_scale", "combine", "out_rows", "gate")
"""All of `FusedSpec.keywords`."""


def columns_of(spec: ProblemSpec, n: int) -> int:
    """The columns of the result if the products have n columns; a gate turns two columns into one."""
    return n // 2 if spec.fused is not None and spec.fused.layout else n


def rows_dtype(spec: ProblemSpec) -> torch.dtype:
    """The dtype of the rows that are summed: the operands' dtype, or bfloat16 for scaled float8."""
    return torch.bfloat16 if spec.compute.itemsize == 1 else spec.compute


def products_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec of the products. For sums of rows its result is the unsummed rows, in the operands' dtype, or in
    bfloat16 for scaled float8."""
    fused = spec.fused
    if fused is None or not fused.scatters:
        return spec
    rest = replace(fused, combine=None, weights=None, terms=0, out_rows=None, rows=0)
    rows = classify_fresh(rows_dtype(spec), [(max(spec.total, 2), columns_of(spec, cast(int, spec.n)))])
    return replace(spec, fused=rest if rest.keywords else None, out=rows, c=None, zero_unowned=False)


def view_of_tokens(ops: Operands) -> Packed:
    """The address formula (`Packed`) of a problem's products. Extents count tokens; indices may pick them from fewer or
    more rows. `NO_VIEW` for a list."""
    if ops.spec.form == "per_group":
        return NO_VIEW
    shape, fused = packed(ops), ops.fused
    for rows in () if fused is None else fused.picks.values():
        shape = replace(shape, **cast("dict[str, Any]", {cast(str, ops.spec.jagged): rows.values.shape[0]}))
    return shape


def product_operands(ops: Operands) -> Operands:
    """The operands of the products whose rows `combine` or `out_rows` sums. Their result lies in lent memory."""
    fused, spec = cast(Fused, ops.fused), products_spec(ops.spec)
    rest = replace(fused, combine=None, weights=None, out_rows=None, rows=None) if spec.fused else None
    tokens = int(view_of_tokens(ops).m)
    rows = torch.empty((tokens, cast(Tensor, ops.out).shape[1]), dtype=spec.out.dtype, device=ops.device)
    return replace(ops, spec=spec, fused=rest, out=rows, c=None, beta=0.0, lent=rows)


def sort_step(places: Tensor) -> tuple[Tensor, Tensor, Launch]:
    """The launch that sorts rows by their destination, and its results: destinations in order and the row of each. Rows
    of one destination keep their order."""
    ordered, order = torch.empty_like(places), torch.empty(places.shape, dtype=torch.int64, device=places.device)
    if not places.numel():
        return ordered, order, NOTHING
    return ordered, order, lambda: torch.sort(places, stable=True, out=(ordered, order))


SumLaunch = Callable[[Operands, Tensor, Tensor, "Tensor | None"], Launch]
"""Binds a sum: the problem, its rows, the index (of `out_rows`: sorted) and who goes to each sorted place, or None."""


def lending(steps: Sequence[Launch], lent: Tensor | None) -> Launch:
    """The steps as one launch that holds this memory between them until it is moved. Each later call lends as much."""
    launch = in_turn(steps)
    if lent is None:
        return launch
    if not hasattr(launch, "move"):
        kept = [lent]
        return lambda: (launch(), kept)
    for step in reversed(steps):
        if isinstance(step, BoundKernel):
            step.lend(lent)
            break
    return launch


def bind_sums(ops: Operands, products: Callable[[Operands], Launch], bind_sum: SumLaunch) -> Launch:
    """Binds the launch of the products and the launch of the sums. A launch without elements is left out."""
    fused, inner = cast(Fused, ops.fused), product_operands(ops)
    rows = cast(Tensor, inner.out)
    index, order = cast(Index, fused.combine or fused.out_rows).values, None
    steps = [products(inner)] if rows.numel() or _writes_preact(inner) else []
    if cast(Tensor, ops.out).numel():
        if fused.out_rows is not None:
            index, order, sort = sort_step(index)
            steps.insert(0, sort)  # before the products, so that the sums may be launched while those still run
        steps.append(bind_sum(ops, rows, index, order))
    return lending(steps, rows)


def _writes_preact(ops: Operands) -> bool:
    return ops.fused is not None and any(x.numel() for x in ops.fused.preacts())


def kernel_text(kernel: str, spec: ProblemSpec) -> str:
    """The name of the products' kernel, followed by its fused work and by the launches after it."""
    fused = spec.fused
    if fused is None:
        return kernel
    inside = inside_text(fused)
    behind = ["sum of rows"] if fused.scatters else []
    ahead = ["sort"] if fused.out_rows is not None else []
    return ", then ".join([*ahead, f"{kernel} with {inside}" if inside else kernel, *behind])


def inside_text(fused: FusedSpec) -> str:
    """The fused work that the kernel of products does."""
    parts = {
        "gather": fused.a_rows or fused.b_rows,
        "gate": fused.layout,
        "preact_out": fused.preact,
        "row_scale": fused.row_scale,
    }
    return ", ".join(name for name, asked in parts.items() if asked)
