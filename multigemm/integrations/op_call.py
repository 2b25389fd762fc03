"""What runs when the torch operator is called on real tensors.

An eager call should cost little more on the host than a launch. All that is checked and chosen for a
call follows from metadata (shapes, strides, dtypes, alignment, keywords), so it is done once and
remembered as a `Route`: allocate, bind, launch. Values are another matter: offsets on the CPU are
read and checked on every call, like everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multigemm import bound, dispatch, tuning
from multigemm.grouping import Kind, make_grouping, make_valid_rows
from multigemm.layouts import Operands
from multigemm.problem import GroupedGemmProblem
from multigemm.spec import ProblemSpec

ROUTES_KEPT = 4096
_routes: dict[Any, Route | None] = {}


@dataclass(frozen=True, slots=True)
class Route:
    """How every call with one set of metadata runs."""

    choice: bound.Choice
    spec: ProblemSpec
    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alpha: float
    beta: float
    kind: Kind | None
    masked: bool
    total: int
    checked: bool


def names(backend: str) -> Any:
    """The operator's schema holds text only: "auto", one name, or names joined by commas."""
    return backend.split(",") if "," in backend else backend


def _geometry(x: Tensor | None) -> Any:
    return None if x is None else (x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.device)


def run(
    a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None, ends: Tensor | None = None,
    valid_rows: Tensor | None = None, c: Tensor | None = None, bias: Tensor | None = None, **options: Any,
) -> Tensor:  # fmt: skip
    """The operator on real tensors."""
    key = (
        a.dtype, a.shape, a.stride(), a.data_ptr() & 15, a.device,
        b.dtype, b.shape, b.stride(), b.data_ptr() & 15, b.device,
        offsets is None or _index(offsets), sizes is None or _index(sizes), ends is None or _index(ends),
        valid_rows is None or _index(valid_rows), _geometry(c), bias is None or _geometry(bias),
        tuple(options.items()), tuning.table().generation,
    )  # fmt: skip
    route = _routes.get(key)
    if route is None:
        if key not in _routes:
            return _first(key, a, b, offsets, sizes, ends, valid_rows, c, bias, options)
        return _whole_way(a, b, offsets, sizes, ends, valid_rows, c, bias, options)[0]
    return _run(route, a, b, offsets, ends, valid_rows, c, bias)


def _index(x: Tensor) -> Any:
    return (x.dtype, x.shape, x.stride(), x.device)


def _run(
    route: Route, a: Tensor, b: Tensor, offsets: Tensor | None, ends: Tensor | None, valid_rows: Tensor | None,
    c: Tensor | None, bias: Tensor | None,
) -> Tensor:  # fmt: skip
    out = torch.empty(route.shape, dtype=route.dtype, device=route.device)
    if route.checked:
        _check(route, offsets, ends, valid_rows)
    ops = Operands(
        route.spec,
        a,
        b,
        out,
        c if route.beta != 0 else None,
        bias,
        ends if offsets is None else offsets[1:],
        offsets is not None,
        valid_rows,
        alpha=route.alpha,
        beta=route.beta,
        device=route.device,
    )
    route.choice.recipe.bind(ops)()
    return out


def _check(route: Route, offsets: Tensor | None, ends: Tensor | None, valid_rows: Tensor | None) -> None:
    """Values that lie on the host are checked each time; they are no part of a route."""
    if route.kind is not None:
        groups = route.spec.groups
        make_grouping(offsets, None, ends, groups=groups, total=route.total, device=route.device, full=False)
    elif route.masked:
        make_valid_rows(valid_rows, groups=route.spec.groups, rows=route.shape[1], device=route.device, full=False)


def _first(
    key: Any, a: Tensor, b: Tensor, offsets: Any, sizes: Any, ends: Any, valid_rows: Any, c: Any, bias: Any,
    options: dict[str, Any],
) -> Tensor:  # fmt: skip
    """The first call of its kind: validated and chosen in full, and remembered if it can be repeated directly."""
    out, problem, choice = _whole_way(a, b, offsets, sizes, ends, valid_rows, c, bias, options)
    if len(_routes) >= ROUTES_KEPT:
        _routes.clear()
    _routes[key] = _route(problem, choice)
    return out


def _whole_way(
    a: Tensor, b: Tensor, offsets: Any, sizes: Any, ends: Any, valid_rows: Any, c: Any, bias: Any,
    options: dict[str, Any],
) -> tuple[Tensor, GroupedGemmProblem, bound.Choice]:  # fmt: skip
    asked = {name: value for name, value in options.items() if name not in ("backend", "grad_backend")}
    problem = GroupedGemmProblem(
        a, b, offsets=offsets, sizes=sizes, ends=ends, valid_rows=valid_rows, c=c, bias=bias, **asked
    )
    choice = dispatch.choose(problem, names(options.get("backend", "auto")))
    return bound.run(choice, problem), problem, choice


def _route(problem: GroupedGemmProblem, choice: bound.Choice) -> Route | None:
    """None where something has to happen before each launch: those calls go the whole way each time."""
    grouping, valid, spec = problem.grouping, problem.valid_rows, problem.spec
    plain = spec.a.dtype is spec.b.dtype is spec.compute and not choice.recipe.syncs and not problem.squeezed
    if grouping is not None:
        live = grouping.live
        plain = plain and live is not None and grouping.kind != "sizes" and (len(live) <= 1 or live.stride(0) == 1)
    elif valid is not None:
        plain = plain and valid.live is not None and (len(valid.live) <= 1 or valid.live.stride(0) == 1)
    if not plain or problem.extents is None:
        return None
    return Route(
        choice=choice,
        spec=choice.spec,
        shape=tuple(problem.out_shape),
        dtype=problem.out_dtype,
        device=problem.device,
        alpha=problem.alpha,
        beta=problem.beta,
        kind=None if grouping is None else grouping.kind,
        masked=valid is not None,
        total=0 if grouping is None else problem.extents.along(problem.form[-1]),
        checked=problem.device.type == "cpu" and (grouping is not None or valid is not None),
    )


def forget() -> None:
    """Drops all routes; for tests that change which backends exist."""
    _routes.clear()
