"""Staging: from a problem to `Operands`, the last step that all backends share.

Kernels then need not know these differences: operands of two dtypes are cast to the common one, `sizes` on the device
become `ends`, offsets on the host are copied to the device, mirrored arrays are refreshed. Steps that must run before
each launch form a list, which is empty for an ordinary problem.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands
from multigemm.planning.running_sums import running_sums
from multigemm.problem.arrays import Operand, Step
from multigemm.problem.fused import Fused, Index
from multigemm.problem.grouping import Grouping, Int64s
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import OperandSpec, ProblemSpec, classify, classify_list

BOUNDARY = 256
"""The alignment in bytes of each matrix of a list of results."""


@dataclass(slots=True)
class Staged:
    """The operands for a backend, and the steps that must run before each launch."""

    ops: Operands
    before: list[Step]


def staged_spec(problem: GroupedGemmProblem) -> ProblemSpec:
    """The spec that backends see: the problem's spec with operands of one dtype."""
    spec = problem.spec
    if (spec.a.dtype is spec.compute and spec.b.dtype is spec.compute) or problem.quantisation is not None:
        return spec
    return replace(spec, a=_cast_spec(problem.a, spec.a, spec.compute), b=_cast_spec(problem.b, spec.b, spec.compute))


def equal_sizes(problem: GroupedGemmProblem) -> bool:
    """Whether the host knows all products to have one shape, so that a library can run them as one batch."""
    if problem.form == "per_group":
        return None not in (problem.spec.m, problem.spec.n, problem.spec.k)
    return problem.cut is not None and problem.cut.equal


def _cast_spec(x: Operand, given: OperandSpec, dtype: torch.dtype) -> OperandSpec:
    if given.dtype is dtype:
        return given
    if isinstance(x, Tensor):
        return classify(torch.empty_like(x, dtype=dtype, device="meta"), given.shared)
    return classify_list([torch.empty_like(t, dtype=dtype, device="meta") for t in x], dtype)


def _cast(x: Operand, dtype: torch.dtype, before: list[Step]) -> Operand:
    """`x` in the compute dtype: itself, or a scratch copy that is refreshed before each launch."""
    if not isinstance(x, Tensor):
        return [_cast(t, dtype, before) for t in x]  # type: ignore[misc]
    if x.dtype is dtype:
        return x
    scratch = torch.empty_like(x, dtype=dtype)
    before.append(partial(scratch.copy_, x.detach()))
    return scratch


def _live_ends(live: Tensor, kind: str, before: list[Step], sums_sizes: bool) -> dict[str, Any]:
    """The fields `ends`, `head` and `sizes` of Operands for a tensor that is followed in place."""
    if live.shape[0] > 1 and live.stride(0) != 1:
        live = _follow(live, before)
    if kind == "sizes":
        ends = torch.empty(live.shape, dtype=torch.int64, device=live.device)
        if not sums_sizes:
            before.append(running_sums(live, ends))
        return {"ends": ends, "sizes": live}
    return {"ends": live[1:], "head": True} if kind == "offsets" else {"ends": live}


def _follow(x: Tensor, before: list[Step]) -> Tensor:
    scratch = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    before.append(partial(scratch.copy_, x))
    return scratch


def _stage_grouping(problem: GroupedGemmProblem, before: list[Step], sums_sizes: bool) -> dict[str, Any]:
    grouping, valid = problem.grouping, problem.valid_rows
    if grouping is not None:
        if grouping.live is not None:
            return _live_ends(grouping.live, grouping.kind, before, sums_sizes)
        assert grouping.host is not None
        offsets = _to_device(grouping.host, grouping, problem.device)
        return {"ends": offsets[1:], "head": True, "host_offsets": grouping.host}
    if valid is not None:
        if valid.live is not None:
            dense = valid.live.shape[0] <= 1 or valid.live.stride(0) == 1
            return {"valid_rows": valid.live if dense else _follow(valid.live, before)}
        assert valid.host is not None
        rows = np.diff(valid.host)
        return {"valid_rows": _to_device(rows, valid, problem.device), "host_valid_rows": rows}
    return {}


def _to_device(values: Int64s, given: Grouping, device: torch.device) -> Tensor:
    return to_device(values if given.index_dtype is torch.int64 else values.astype(np.int32), device)


def stage(problem: GroupedGemmProblem, spec: ProblemSpec, out: Operand, sums_sizes: bool = False) -> Staged:
    """Stages `problem` with its result in `out`.

    `sums_sizes`: the recipe sums sizes itself, so that no step has to do so before each launch.
    """
    before = list(problem.refreshes)
    plain = spec is problem.spec
    ops = Operands(
        spec=spec,
        a=problem.a if plain else _cast(problem.a, spec.compute, before),
        b=problem.b if plain else _cast(problem.b, spec.compute, before),
        out=out,
        c=problem.c,
        bias=problem.bias,
        alpha=problem.alpha,
        beta=problem.beta,
        device=problem.device,
        **_stage_grouping(problem, before, sums_sizes),
        **_scales(problem),
    )
    if problem.fused is not None:
        ops.fused = _stage_fused(problem.fused, problem.device, before)
    return Staged(ops, before)


def _stage_fused(fused: Fused, device: torch.device, before: list[Step]) -> Fused:
    """Dense indices and weights of rows on the device. Strided ones are copied before each launch."""

    def dense(x: Tensor) -> Tensor:
        return x if x.is_contiguous() else _follow(x.detach(), before)

    staged: dict[str, Any] = {
        name: Index(dense(x.values), True) if x.live else Index(to_device(x.values.numpy(), device), False)
        for name, x in fused.indices.items()
    }
    staged |= {
        name: None if x is None else dense(x)
        for name, x in (("row_scale", fused.row_scale), ("weights", fused.weights))
    }
    return replace(fused, **staged)


def _scales(problem: GroupedGemmProblem) -> dict[str, Any]:
    """The grids of scales and zero points by name; empty for plain operands."""
    q = problem.quantisation
    return {} if q is None else {name: scale.grid for name, scale in q.each()}


def shape_only_operands(problem: GroupedGemmProblem, spec: ProblemSpec) -> Operands:
    """Operands for planning: extents, strides and host sizes as `stage` gives them, without memory for a result."""
    grouping, valid, out = problem.grouping, problem.valid_rows, problem.out
    if out is None:
        out = _fresh(problem, torch.device("meta"))
    a, b = problem.a, problem.b
    if problem.quantisation is None:
        a, b = _shape_only(a, spec.compute), _shape_only(b, spec.compute)
    return Operands(
        spec, a, b, out, problem.c, problem.bias, alpha=problem.alpha, beta=problem.beta, device=problem.device,
        host_offsets=None if grouping is None else grouping.host,
        host_valid_rows=None if valid is None or valid.host is None else np.diff(valid.host), fused=problem.fused,
        **_scales(problem),
    )  # fmt: skip


def _shape_only(x: Operand, dtype: torch.dtype) -> Operand:
    if not isinstance(x, Tensor):
        return [_shape_only(t, dtype) for t in x]  # type: ignore[misc]
    return x if x.dtype is dtype else torch.empty_like(x, dtype=dtype, device="meta")


def allocate(problem: GroupedGemmProblem, together: bool = False) -> Operand:
    """The problem's `out`, or fresh memory for the result. `together`: a list's matrices share one allocation."""
    if problem.out is not None:
        return problem.out
    if together and problem.form == "per_group":
        return _together(problem.out_shape, problem.out_dtype, problem.device)
    return _fresh(problem, problem.device)


def _together(shapes: list[tuple[int, int]], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """Matrices in one allocation. Equal ones have equal distances, so that a library can treat them as a batch."""
    step = BOUNDARY // dtype.itemsize
    starts = np.cumsum([0, *(-(-m * n // step) * step for m, n in shapes)]).tolist()
    memory = torch.empty(starts[-1], dtype=dtype, device=device)
    return [memory[at : at + m * n].view(m, n) for at, (m, n) in zip(starts, shapes, strict=False)]


def _fresh(problem: GroupedGemmProblem, device: torch.device) -> Operand:
    dtype = problem.out_dtype
    if problem.form != "per_group":
        return torch.empty(problem.out_shape, dtype=dtype, device=device)
    return [torch.empty(shape, dtype=dtype, device=device) for shape in problem.out_shape]
