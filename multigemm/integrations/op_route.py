"""How every call of the torch operator with one set of metadata runs, found once and remembered.

All that is checked and chosen for a call follows from metadata (shapes, strides, dtypes, alignment, keywords): a
`Route` is what remains to be done, allocate and bind. Values are another matter: offsets on the CPU are
read and checked on every call, like everywhere else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multigemm import api as dispatch
from multigemm.backend import Launch
from multigemm.planning import plan as bound
from multigemm.planning.operands import Operands
from multigemm.problem.grouping import Kind, make_grouping, make_valid_rows
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from multigemm.select import table as tuning

ROUTES_KEPT = 4096
_routes: dict[Any, Route | None] = {}


@dataclass(frozen=True, slots=True, eq=False)
class Route:
    """How every call with one set of metadata runs."""

    choice: bound.Choice
    spec: ProblemSpec
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    alpha: float
    beta: float
    kind: Kind | None
    masked: bool
    total: int
    checked: bool
    index: int


def names(backend: str) -> Any:
    """The operator's schema holds text only: "auto", one name, or names joined by commas."""
    return backend.split(",") if "," in backend else backend


def _geometry(x: Tensor) -> Any:
    return (x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device())


def _key(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Any:
    return (*(x is None or _geometry(x) for x in tensors), tuple(options.items()), tuning.generation)


def known(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> Route | None:
    """The route that `find` has found for such a call; None before, and where every call goes the whole way."""
    return _routes.get(_key(tensors, options))


def met(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> bool:
    """Whether such a call went the whole way before, and was found right."""
    return _key(tensors, options) in _routes


def find(tensors: tuple[Tensor | None, ...], options: dict[str, Any]) -> tuple[Route | None, Tensor | None]:
    """The route of a call; or None and its result, where it went the whole way."""
    key = _key(tensors, options)
    route = _routes.get(key)
    if route is not None:
        return route, None
    out, problem, choice = whole_way(tensors, options)
    if key not in _routes:
        if len(_routes) >= ROUTES_KEPT:
            _routes.clear()
        _routes[key] = _route(problem, choice)
    return None, out


def bind(
    route: Route, a: Any, b: Any, offsets: Tensor | None, ends: Tensor | None, valid_rows: Tensor | None,
    c: Tensor | None, bias: Tensor | None, out: Any,
) -> Launch:  # fmt: skip
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
    return route.choice.recipe.bind(ops)


def check(route: Route, offsets: Tensor | None, ends: Tensor | None, valid_rows: Tensor | None) -> None:
    """Values that lie on the host are checked each time; they are no part of a route."""
    if route.kind is not None:
        groups = route.spec.groups
        make_grouping(offsets, None, ends, groups=groups, total=route.total, device=route.device, full=False)
    elif route.masked:
        make_valid_rows(valid_rows, groups=route.spec.groups, rows=route.shape[1], device=route.device, full=False)


def whole_way(tensors: tuple[Any, ...], options: dict[str, Any]) -> tuple[Tensor, GroupedGemmProblem, bound.Choice]:
    """A call as if it was the first of its kind: validated, chosen for, run."""
    a, b, offsets, sizes, ends, valid_rows, c, bias = tensors
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
        strides=torch.empty(problem.out_shape, device="meta").stride(),
        dtype=problem.out_dtype,
        device=problem.device,
        alpha=problem.alpha,
        beta=problem.beta,
        kind=None if grouping is None else grouping.kind,
        masked=valid is not None,
        total=0 if grouping is None else problem.extents.along(problem.form[-1]),
        checked=problem.device.type == "cpu" and (grouping is not None or valid is not None),
        index=problem.device.index if problem.device.type == "cuda" else -1,
    )


def forget() -> None:
    """Drops all routes; for tests that change which backends exist."""
    _routes.clear()
