"""From a validated problem to its `ProblemSpec`; specs of equal problems are one object.

A call with the shapes of an earlier call finds its spec by one dictionary look-up; only new shapes
are classified.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from multigemm.accepted import AcceptedProblem
from multigemm.classify import bucket, classify, classify_fresh, classify_list
from multigemm.spec import GIANT, OperandSpec, ProblemSpec

KEPT = 8192
_by_geometry: dict[Any, ProblemSpec] = {}
_by_value: dict[ProblemSpec, ProblemSpec] = {}


def _geometry(x: Any) -> Any:
    if x is None:
        return None
    return (x.dtype, x.shape, x.stride(), x.data_ptr() & 15)


def specify(problem: AcceptedProblem, groups: int, compute: torch.dtype) -> ProblemSpec:
    """The spec of a problem whose operands, grouping and epilogue are set."""
    source = problem.cut
    index = None if source is None else source.index_dtype
    if problem.grouping is not None and problem.grouping.live is not None and problem.grouping.kind == "sizes":
        index = torch.int64  # staging sums live sizes into int64 ends, whatever their own type
    on_device = source is not None and source.live is not None and problem.device.type != "cpu"
    alpha = "one" if problem.alpha == 1 else "zero" if problem.alpha == 0 else "any"
    bias = problem.each("bias")
    rest: tuple[Any, ...] = (
        bias[0].dtype if bias else None, compute, alpha, problem.activation, problem.precision,
        problem.deterministic, index, on_device, problem.out is None,
    )  # fmt: skip
    if problem.extents is None:
        part, longest = _list_part(problem, compute)
        fields: tuple[Any, ...] = (*part, *rest, longest)
        return _intern(ProblemSpec("per_group", groups, *fields))
    a, b, c, out = problem.a, problem.b, problem.c, problem.out
    key = (problem.form, groups, _geometry(a), _geometry(b), _geometry(c), _geometry(out), problem.out_dtype, rest)
    found = _by_geometry.get(key)
    if found is None:
        if len(_by_geometry) >= KEPT:
            _by_geometry.clear()
        part, longest = _packed_part(problem, groups)
        fields = (*part, *rest, longest)
        spec = ProblemSpec(problem.form, groups, *fields)
        found = _by_geometry[key] = _intern(spec)
    return found


def _intern(spec: ProblemSpec) -> ProblemSpec:
    if len(_by_value) >= KEPT:
        _by_value.clear()
    return _by_value.setdefault(spec, spec)


def _giant(*extents: int) -> int:
    """The longest, if a kernel may not be able to count it; else 0, so that usual problems share their specs."""
    longest = max(extents)
    return longest if longest >= GIANT else 0


def _packed_part(problem: AcceptedProblem, groups: int) -> tuple[tuple[Any, ...], int]:
    """The spec's fields up to those of the epilogue, and the last one."""
    assert problem.extents is not None
    form, _, m, n, k = problem.extents
    jagged = form[-1] if form.startswith("jagged") else ""
    total = problem.extents.along(jagged) if jagged else groups * m
    a, b = _tensor(problem.a), _tensor(problem.b)
    fresh = problem.out is None
    part = (
        None if jagged == "m" else m,
        None if jagged == "n" else n,
        None if jagged == "k" else k,
        bucket(total),
        0 if jagged else bucket(m),
        classify(a, form == "jagged_n" and a.dim() == 2),
        classify(b, form == "jagged_m" and b.dim() == 2),
        classify_fresh(problem.out_dtype, [problem.out_shape]) if fresh else classify(_tensor(problem.out)),
        None if problem.c is None else classify(_tensor(problem.c)),
    )
    return part, _giant(groups, m, n, k)


def _tensor(x: Any) -> Tensor:
    assert isinstance(x, Tensor)
    return x


def _list_part(problem: AcceptedProblem, compute: torch.dtype) -> tuple[tuple[Any, ...], int]:
    """The same of a list."""
    a, b, dtype = problem.each("a"), problem.each("b"), problem.out_dtype
    ms, ns, ks = [x.shape[0] for x in a], [y.shape[1] for y in b], [x.shape[1] for x in a]
    out: OperandSpec = classify_fresh(dtype, problem.out_shape)
    if problem.out is not None:
        out = classify_list(problem.each("out"), dtype)
    tops = [max(v, default=0) for v in (ms, ns, ks)]
    common = (top if v and min(v) == top else None for v, top in zip((ms, ns, ks), tops, strict=True))
    part = (
        *common,
        bucket(sum(ms)),
        bucket(tops[0]),
        classify_list(a, a[0].dtype if a else compute),
        classify_list(b, b[0].dtype if b else compute),
        out,
        None if problem.c is None else classify_list(problem.each("c"), dtype),
    )
    return part, _giant(*tops)
