"""What runs when the torch operator is called on real tensors.

An eager call should cost little more on the host than a launch. All that is checked and chosen for a
call follows from metadata (shapes, strides, dtypes, alignment, keywords), so it is done once and
remembered as a `Route`: allocate, bind, launch. On a GPU even what was bound is remembered, by address.
Values are another matter: offsets on the CPU are read and checked on every call, like everywhere else.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multigemm import bound, dispatch, tuning
from multigemm.backend import Launch
from multigemm.grouping import Kind, make_grouping, make_valid_rows
from multigemm.integrations import bound_calls
from multigemm.layouts import Operands
from multigemm.problem import GroupedGemmProblem
from multigemm.spec import ProblemSpec

ROUTES_KEPT = 4096
KEEPING = ("cuda",)
"""Where launches are kept for the next call: on a CPU binding is cheap, and its workspaces cannot be told."""
_routes: dict[Any, Route | None] = {}
launches = bound_calls.Launches()
_known = launches.kept
_empty = torch.empty_strided
_capturing = torch.cuda.is_current_stream_capturing
_grad_enabled = torch.is_grad_enabled
_any_requires_grad = torch._C._any_requires_grad


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
    repeats: bool
    graphs: bool


def names(backend: str) -> Any:
    """The operator's schema holds text only: "auto", one name, or names joined by commas."""
    return backend.split(",") if "," in backend else backend


def _geometry(x: Tensor) -> Any:
    return (x.dtype, x.shape, x.stride(), x.data_ptr() & 15, x.get_device())


def entry(special: int, general: Callable[..., Any]) -> Callable[..., Tensor]:
    """The operator on real tensors, as a kernel of torch's dispatcher.

    `special` holds the dispatch keys, as bits, that have work to do below autograd. With one of them, or where
    gradients are wanted, the call goes to `general`, torch's own way. Each step in here is paid for by every
    call: written out, and not shared.
    """

    def run(
        keyset: Any, a: Tensor, b: Tensor, offsets: Tensor | None = None, sizes: Tensor | None = None,
        ends: Tensor | None = None, valid_rows: Tensor | None = None, c: Tensor | None = None,
        bias: Tensor | None = None, **options: Any,
    ) -> Tensor:  # fmt: skip
        if special and (keyset.raw_repr() & special or (_grad_enabled() and _any_requires_grad(a, b, c, bias))):
            return general(keyset, a, b, offsets, sizes, ends, valid_rows, c, bias, **options)  # type: ignore[no-any-return]
        given, cut = 0, None
        if offsets is not None:
            given, cut = 1, offsets
        if ends is not None:
            given, cut = given + 2, ends
        if valid_rows is not None:
            given, cut = given + 4, valid_rows
        if sizes is not None:
            given, cut = given + 8, sizes
        at_a, at_b = a.data_ptr(), b.data_ptr()
        key = (
            a.dtype, a.shape, a.stride(), at_a & 15, a.get_device(),
            b.dtype, b.shape, b.stride(), at_b & 15, b.get_device(),
            given, cut is None or (cut.dtype, cut.shape, cut.stride(), cut.get_device()),
            c is None or _geometry(c), bias is None or _geometry(bias),
            tuple(options.items()), tuning.table().generation,
        )  # fmt: skip
        route = _routes.get(key)
        if route is None:
            if key not in _routes:
                return _first(key, a, b, offsets, sizes, ends, valid_rows, c, bias, options)
            return _whole_way(a, b, offsets, sizes, ends, valid_rows, c, bias, options)[0]
        out = _empty(route.shape, route.strides, dtype=route.dtype, device=route.device)
        if route.checked:
            _check(route, offsets, ends, valid_rows)
        if not route.repeats:
            _bind(route, a, b, offsets, ends, valid_rows, c, bias, out)()
            return out
        where = (
            route, at_a, at_b, out.data_ptr(), 0 if cut is None else cut.data_ptr(),
            0 if c is None else c.data_ptr(), 0 if bias is None else bias.data_ptr(),
        )  # fmt: skip
        launch = _known.get(where)
        if launch is None or (route.graphs and _capturing()):
            _fresh(where, a, b, offsets, ends, valid_rows, c, bias, out)
        else:
            launch()
        return out

    return run


def _bind(
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


def _fresh(where: tuple[Any, ...], *tensors: Tensor | None) -> None:
    """A call at new addresses. What it binds is kept for the next call there, if that costs little memory."""
    route: Route = where[0]
    keep = not bound_calls.capturing(route.device) and all(x is None or x.numel() for x in tensors)
    if not keep:
        _bind(route, *tensors)()
        return
    borrowed = [bound_calls.borrow(x) for x in tensors]
    before = bound_calls.owned(route.device)
    launch = _bind(route, *borrowed)
    launches.keep(where, launch, bound_calls.owned(route.device) - before)
    launch()


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
        forget()
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
        strides=torch.empty(problem.out_shape, device="meta").stride(),
        dtype=problem.out_dtype,
        device=problem.device,
        alpha=problem.alpha,
        beta=problem.beta,
        kind=None if grouping is None else grouping.kind,
        masked=valid is not None,
        total=0 if grouping is None else problem.extents.along(problem.form[-1]),
        checked=problem.device.type == "cpu" and (grouping is not None or valid is not None),
        repeats=problem.device.type in KEEPING,
        graphs=problem.device.type == "cuda",
    )


def forget() -> None:
    """Drops all routes and launches; for tests that change which backends exist."""
    _routes.clear()
    launches.clear()
