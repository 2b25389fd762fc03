"""From a problem to a backend: `grouped_gemm`, `solve`, `plan`, `explain`, `list_backends`.

The rule of choice. A name means that backend and no other: if it cannot, it says why. A list means
the first that can. "auto" means, of all that can, the fastest by measurement (for this class of
problems on this device, or by the classes around it that were measured), else the first in the
registry's order; emulated ones, the null backend, and plans that must read sizes back from the
device while another need not, are passed over.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import torch

from multigemm import bound, registry, tracing, tuning
from multigemm.backend import Availability
from multigemm.bound import Choice, Plan
from multigemm.errors import BackendUnavailable, BackendUnsupported, InvalidSetting, UnknownBackend
from multigemm.problem import GroupedGemmProblem, checked
from multigemm.settings import settings
from multigemm.spec import ProblemSpec
from multigemm.staging import equal_sizes, staged_spec

Which = str | Sequence[str]
CHOICES_KEPT = 4096
_choices: dict[Any, Choice] = {}
_lock = threading.RLock()


def grouped_gemm(*args: Any, backend: Which = "auto", config: Any = None, **kwargs: Any) -> Any:
    """`solve(GroupedGemmProblem(*args, **kwargs), backend, config)`: many matrix products in one call."""
    if torch.compiler.is_compiling():  # a graph holds the torch operator, not this code
        return tracing.grouped_gemm(*args, backend=backend, config=config, **kwargs)
    return solve(GroupedGemmProblem(*args, **kwargs), backend, config)


def solve(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Any:
    """The result of `problem`, as the caller's kind of array; differentiable where an input requires grad."""
    if checked(problem).requires_grad and torch.is_grad_enabled():
        return registry.integration("differentiable").solve(problem, backend, config)
    return bound.run(choose(problem, backend, config), problem)


def plan(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Plan:
    """A plan: compiled, bound, with its output allocated; calling it only launches."""
    bound.refuse_gradients(checked(problem))
    return Plan(choose(problem, backend, config), problem)


def choose(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Choice:
    """The backend and recipe for a problem; remembered by spec, so that a new token count costs nothing."""
    spec = staged_spec(problem)
    which = backend if isinstance(backend, str) else _names(backend)
    try:
        equal = equal_sizes(problem)
        key = (spec, equal, problem.device, which, _hashable(config), tuning.table().generation)
        found = _choices.get(key)
    except TypeError:
        raise InvalidSetting(f"config={config!r} cannot be remembered: pass a frozen config or plain values") from None
    if found is None:
        with _lock:
            found = _choices.get(key) or _choose(spec, problem.device, which, config, equal)
            if len(_choices) >= CHOICES_KEPT:
                _choices.clear()
            _choices[key] = found
    return found


def _names(backend: Any) -> tuple[str, ...]:
    """Several names; raises UnknownBackend for anything that is none."""
    try:
        names = tuple(backend)
    except TypeError:
        names = (backend,)
    if not names:
        raise UnknownBackend("backend=[] names no backend: pass a name, several names, or 'auto'")
    if wrong := [name for name in names if not isinstance(name, str)]:
        raise UnknownBackend(f"backend holds {wrong[0]!r}, which is no name: pass a name, several names, or 'auto'")
    return names


def _hashable(config: Any) -> Any:
    return frozenset(config.items()) if isinstance(config, Mapping) else config


def _choose(spec: ProblemSpec, device: torch.device, which: Which, config: Any, equal: bool) -> Choice:
    if which == "auto":
        choice = _choose_auto(spec, device, config, equal)
    else:
        choice = _choose_named(spec, device, [which] if isinstance(which, str) else list(which), config, equal)
    if settings().print_config:
        print(
            f"multigemm: {choice.backend} {choice.recipe.kernel} {choice.recipe.config} ({choice.why})", file=sys.stderr
        )
    return choice


def _choose_named(spec: ProblemSpec, device: torch.device, names: list[str], config: Any, equal: bool) -> Choice:
    reasons: dict[str, list[str]] = {}
    for name in names:
        backend, state = registry.get(name), registry.state(name)
        if not state.ok:
            if len(names) == 1:
                raise BackendUnavailable(name, _unavailable_text(state))
            reasons[name] = [_unavailable_text(state)]
            continue
        reasons[name] = backend.not_supported_reasons(spec, device)
        if not reasons[name]:
            why = "asked for by name" if len(names) == 1 else f"first of {', '.join(names)} that can"
            return _recipe(name, spec, device, config, why, equal)
    raise BackendUnsupported(reasons)


def _unavailable_text(state: Availability) -> str:
    return f"{state.reason}; install with: {state.install}" if state.install else state.reason


def _recipe(name: str, spec: ProblemSpec, device: torch.device, config: Any, why: str, equal: bool) -> Choice:
    backend = registry.get(name)
    chosen, source = _config(name, spec, device, config, equal)
    return Choice(name, backend.plan(spec, chosen, device), spec, f"{why}; config {source}")


def _config(name: str, spec: ProblemSpec, device: torch.device, explicit: Any, equal: bool) -> tuple[Any, str]:
    """The ladder: explicit > measured > heuristic. A measured config that is no longer valid is passed over."""
    valid = registry.get(name).configs(spec, device)
    if explicit is not None:
        return _coerce(explicit, valid), "given"
    measured = tuning.table().find(name, spec, device, equal)
    if measured is not None:
        match = [c for c in valid if is_dataclass(c) and _as_dict(c) == dict(measured.config)]
        if match:
            return match[0], f"measured ({measured.us:.1f} us, {measured.source})"
    return (valid[0] if valid else None), "heuristic"


def _as_dict(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _coerce(explicit: Any, valid: Sequence[Any]) -> Any:
    if not isinstance(explicit, Mapping) or not valid:
        return explicit
    kind = type(valid[0])
    known = {f.name for f in fields(kind)}
    if wrong := set(explicit) - known:
        raise InvalidSetting(
            f"config has no field {min(wrong, key=str)!r}; {kind.__name__} has {', '.join(sorted(known))}"
        )
    return kind(**{**_as_dict(valid[0]), **explicit})


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer to one spec, and how many times slower than the fastest it was measured or is expected."""

    name: str
    availability: Availability
    reasons: tuple[str, ...]
    us: float | None = None
    slowness: float | None = None
    source: str = ""

    @property
    def can(self) -> bool:
        return self.availability.ok and not self.reasons


def candidates(spec: ProblemSpec, device: torch.device, equal: bool = False) -> list[Candidate]:
    """Every backend with its reasons and its measured time, in the order in which auto would try them."""
    states = {name: registry.state(name) for name in registry.names()}
    reasons = {
        name: tuple(registry.get(name).not_supported_reasons(spec, device)) if state.ok else ()
        for name, state in states.items()
    }
    able = [name for name, state in states.items() if state.ok and not reasons[name]]
    known = _knowledge(able, spec, device, equal)
    found = [Candidate(name, states[name], reasons[name], *known.get(name, (None, None, ""))) for name in states]
    return sorted(found, key=lambda c: (c.slowness is None, c.slowness or 0.0))


def _knowledge(
    names: Sequence[str], spec: ProblemSpec, device: torch.device, equal: bool
) -> dict[str, tuple[float | None, float | None, str]]:
    """Per backend the measured time of this class and how it compares; where the class was not measured, what
    the classes around it let one expect."""
    table = tuning.table()
    exact = {name: m for name in names if (m := table.find(name, spec, device, equal)) is not None}
    if len(exact) > 1:
        best = min(m.us for m in exact.values()) or 1.0
        return {name: (m.us, m.us / best, m.source) for name, m in exact.items()}
    ran = {name: tuning.config_text(_config(name, spec, device, None, equal)[0]) for name in names}
    found = [e for e in table.estimates(spec, device, equal, ran) if e.backend in names]
    best = min((e.slowness for e in found), default=1.0)
    return {e.backend: (None, e.slowness / best, e.source) for e in found}


def _choose_auto(spec: ProblemSpec, device: torch.device, config: Any, equal: bool) -> Choice:
    allowed = settings().backend
    if unknown := [name for name in allowed if name not in registry.names()]:
        known = ", ".join(registry.names())
        raise UnknownBackend(f"MULTIGEMM_BACKEND holds {unknown[0]!r}, which is no backend; known: {known}")
    found = candidates(spec, device, equal)
    able = [c for c in found if c.can and not c.availability.emulated and c.name != "null"]
    if allowed:
        able = sorted((c for c in able if c.name in allowed), key=lambda c: allowed.index(c.name))
    syncing: list[Choice] = []
    for c in able:
        choice = _recipe(c.name, spec, device, config, _why(c), equal)
        if not choice.recipe.syncs:
            return choice
        syncing.append(choice)
    if syncing:
        return syncing[0]
    raise BackendUnsupported({c.name: _why_not(c, allowed) for c in found})


def _why(c: Candidate) -> str:
    """Why auto takes a candidate."""
    if c.us is not None:
        return f"fastest measured, {c.us:.1f} us ({c.source})"
    return f"expected to be fastest ({c.source})" if c.slowness is not None else "first in order that can"


def _why_not(c: Candidate, allowed: Sequence[str]) -> list[str]:
    """Why auto did not take a candidate."""
    if not c.can:
        return list(c.reasons) or [_unavailable_text(c.availability)]
    if c.name == "null" or c.availability.emulated:
        what = "computes nothing" if c.name == "null" else "is emulated here"
        return [f"{what}, and auto passes over it: ask for it by name"]
    return [f"MULTIGEMM_BACKEND allows {', '.join(allowed)} only"]


@dataclass(frozen=True, slots=True)
class Explanation:
    """Who can, who cannot and why, who is chosen and why. Prints as a table."""

    spec: ProblemSpec
    candidates: tuple[Candidate, ...]
    chosen: str | None
    kernel: str
    config: Any
    why: str
    staging: tuple[str, ...]

    def __str__(self) -> str:
        lines = [
            f"{self.spec.form}: {self.spec.groups} groups, m={self.spec.m} n={self.spec.n} k={self.spec.k}, "
            f"{self.spec.compute}"
        ]
        lines += [f"  before the launch: {step}" for step in self.staging]
        for c in self.candidates:
            mark = "*" if c.name == self.chosen else " "
            lines.append(f"{mark} {c.name:8} {_state_text(c)}")
        if self.chosen:
            lines.append(f"chosen: {self.chosen}, {self.kernel}, {self.config}: {self.why}")
        else:
            lines.append(f"chosen: none, {self.why.splitlines()[0]}")
        return "\n".join(lines)


def _state_text(c: Candidate) -> str:
    if not c.availability.ok:
        return f"unavailable: {_unavailable_text(c.availability)}"
    if c.reasons:
        return f"cannot: {'; '.join(c.reasons)}"
    note = " (emulated: only when named)" if c.availability.emulated else ""
    if c.us is not None:
        return f"can{note}, {c.us:.1f} us ({c.source})"
    return f"can{note}" + (f", about {c.slowness:.2f} x the fastest ({c.source})" if c.slowness is not None else "")


def explain(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Explanation:
    """Why `solve(problem, backend, config)` would run what it runs."""
    spec, equal = staged_spec(checked(problem)), equal_sizes(problem)
    steps = [
        f"{name} is cast to {spec.compute}" for name in "ab" if getattr(problem.spec, name).dtype is not spec.compute
    ]
    if problem.refreshes:
        steps.append(f"{len(problem.refreshes)} array(s) with negative strides are copied")
    try:
        choice = choose(problem, backend, config)
    except (BackendUnsupported, BackendUnavailable) as error:
        return Explanation(
            spec, tuple(candidates(spec, problem.device, equal)), None, "", None, str(error), tuple(steps)
        )
    return Explanation(
        spec,
        tuple(candidates(spec, problem.device, equal)),
        choice.backend,
        choice.recipe.kernel,
        choice.recipe.config,
        bound.reasons(choice, problem),
        tuple(steps),
    )


@dataclass(frozen=True, slots=True)
class BackendInfo:
    """One line of `list_backends()`."""

    name: str
    available: bool
    version: str
    reason: str
    install: str
    emulated: bool


def list_backends() -> list[BackendInfo]:
    """What is here, what is missing, how to get it."""
    states = ((name, registry.state(name)) for name in registry.names())
    return [BackendInfo(name, s.ok, s.version, s.reason, s.install, s.emulated) for name, s in states]
