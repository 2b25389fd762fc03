"""Who could solve a problem: each backend's reasons, config, and measured or expected time.

`dispatch` chooses among these candidates; `explain` shows them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from multigemm.backend import Availability
from multigemm.errors import InvalidSetting
from multigemm.planning.binding import Choice
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry
from multigemm.select import table as tuning
from multigemm.select.measured import Measured, config_text, footprint_of
from multigemm.select.measured_cache import near
from multigemm.select.shape import Shape, shape_of
from multigemm.settings import settings

Sizes = Callable[[], Operands]
MATTERS, SURE = 1.1, 2.5
"""A backend is sure not to be faster by this factor where that is so many typical errors away from what is expected."""


def unavailable_text(state: Availability) -> str:
    return f"{state.reason}; install with: {state.install}" if state.install else state.reason


def config_for(name: str, spec: ProblemSpec, device: torch.device, explicit: Any, equal: bool) -> tuple[Any, str]:
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


@lru_cache(maxsize=4096)
def _usual_config(name: str, spec: ProblemSpec, device: torch.device, equal: bool, now: tuple[object, ...]) -> Any:
    """What a backend would run: the same for all token counts of a spec, until it, a table or a setting changes."""
    return config_for(name, spec, device, None, equal)[0]


def choice_of(name: str, spec: ProblemSpec, device: torch.device, config: Any, why: str, equal: bool) -> Choice:
    """One backend, planned with the config that the ladder gives."""
    backend = registry.get(name)
    chosen, source = config_for(name, spec, device, config, equal)
    return Choice(name, backend.plan(spec, chosen, device), spec, f"{why}; config {source}")


def _as_dict(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)}


def _coerce(explicit: Any, valid: Sequence[Any]) -> Any:
    """What the user gave as a config: a mapping completes the best guess, another config is the backend's to judge."""
    if not valid or not is_dataclass(valid[0]):
        return explicit
    kind: Any = type(valid[0])
    known = _as_dict(valid[0])
    if isinstance(explicit, Mapping):
        if wrong := set(explicit) - set(known):
            raise InvalidSetting(
                f"config has no field {min(wrong, key=str)!r}; {kind.__name__} has {', '.join(sorted(known)) or 'none'}"
            )
        explicit = kind(**{**known, **explicit})
    elif (
        not is_dataclass(explicit)
        or isinstance(explicit, type)
        or _home(type(explicit)) not in {_home(type(config)) for config in valid}
    ):
        raise InvalidSetting(
            f"config={explicit!r} is no config of this backend: pass its {kind.__name__}, or a mapping of some of its "
            f"fields ({', '.join(sorted(known)) or 'none'})"
        )
    if type(explicit) is kind:
        _check_types(_as_dict(explicit), known)
    return explicit


def _home(kind: type) -> str:
    """The package of a config's class: a backend may have several, in modules beside each other."""
    return kind.__module__.rpartition(".")[0]


def _check_types(given: Mapping[str, Any], known: Mapping[str, Any]) -> None:
    """Values are of the types that a valid config holds: arithmetic on others fails far from here, or goes wrong.

    A field that a valid config leaves at None may hold anything.
    """
    for name, value in given.items():
        wanted = type(known[name]).__name__
        if type(value) is not type(known[name]) and known[name] is not None:
            raise InvalidSetting(f"config has {name}={value!r}, a {type(value).__name__}; it must be of type {wanted}")


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer to one spec, what it would run, and how many times slower than the fastest it was measured
    or is expected, give or take `error` (a logarithm).

    `us` may be known of one backend alone, which says nothing about how it compares.
    """

    name: str
    availability: Availability
    reasons: tuple[str, ...]
    us: float | None = None
    slowness: float | None = None
    source: str = ""
    expected: bool = False
    error: float = 0.0
    ran: str = ""

    @property
    def can(self) -> bool:
        return self.availability.ok and not self.reasons

    @property
    def for_auto(self) -> bool:
        """Whether "auto" may take it."""
        return self.can and not self.availability.emulated and self.name != "null"

    @property
    def in_question(self) -> bool:
        """Whether it may be faster than the one that is expected to be fastest by more than matters."""
        if self.slowness is None:
            return True
        return math.log(self.slowness * MATTERS) < SURE * self.error


def candidates(
    spec: ProblemSpec, device: torch.device, equal: bool = False, sizes: Sizes | None = None
) -> list[Candidate]:
    """Every backend with its reasons and its measured time, in the order in which auto would try them.

    `sizes` gives the operands in outline, for backends that decide by them what they run.
    """
    states = {name: registry.state(name) for name in registry.names()}
    reasons = {name: registry.reasons(name, spec, device) if state.ok else () for name, state in states.items()}
    every = {name: Candidate(name, states[name], reasons[name]) for name in states}
    able = {name: c for name, c in every.items() if c.can}
    found = [*({**every, **_informed(able, spec, device, equal, sizes() if sizes is not None else None)}).values()]
    return sorted(found, key=lambda c: (c.slowness is None, c.slowness or 0.0))


def _informed(
    able: Mapping[str, Candidate], spec: ProblemSpec, device: torch.device, equal: bool, ops: Operands | None
) -> dict[str, Candidate]:
    """Those that can, with the measured time of this class and how it compares; where that does not tell who is
    fastest, with what other classes let one expect."""
    table, shape = tuning.table(), None if ops is None else shape_of(ops)
    exact = {name: m for name in able if (m := table.find(name, spec, device, equal)) is not None}
    if len(exact) > 1 and all(as_large(m.flops, shape, spec) for m in exact.values()):
        return _compared(able, exact)
    now = tuning.generation, settings()
    configs = {name: _usual_config(name, spec, device, equal, (id(registry.get(name)), *now)) for name in able}
    ran = {name: _would_run(name, config, spec, device, ops) for name, config in configs.items()}
    footprints = {name: footprint_of(config) for name, config in configs.items()}
    told = {name: replace(c, ran=ran[name]) for name, c in able.items()}
    met = None if shape is None else table.first_met(spec, device, equal, shape.flops)
    if met is not None and met.tells({name: ran[name] for name, c in able.items() if c.for_auto}):
        return _compared(told, met.times)
    found = [e for e in table.estimates(spec, device, equal, ran, footprints, shape) if e.backend in able]
    best = min((e.slowness for e in found), default=1.0)
    for name, m in exact.items():
        told[name] = replace(told[name], us=m.us, source=m.source)
    for e in found:
        known = replace(told[e.backend], slowness=e.slowness / best, error=e.error)
        told[e.backend] = replace(known, source=e.source, expected=True)
    return told


def _compared(able: Mapping[str, Candidate], exact: Mapping[str, Measured]) -> dict[str, Candidate]:
    """With what was measured together."""
    best = min(m.us for m in exact.values()) or 1.0
    return {
        name: replace(c, us=m.us, slowness=m.us / best, source=m.source) if (m := exact.get(name)) else c
        for name, c in able.items()
    }


def as_large(flops: float, shape: Shape | None, spec: ProblemSpec) -> bool:
    """Whether a class was measured at about the size that is asked for: it holds all token counts of an octave.

    Where rows are masked nobody knows how many count.
    """
    if shape is None or not flops or not shape.flops or spec.form == "masked":
        return True
    return near(flops, shape.flops)


def _would_run(name: str, config: Any, spec: ProblemSpec, device: torch.device, ops: Operands | None) -> str:
    """What a backend would run, in short."""
    backend, told = registry.get(name), ""
    if ops is not None and getattr(backend, "decides_at_bind", False):
        recipe = backend.plan(spec, config, device)
        told = recipe.tell(ops) if recipe.tell is not None else ""
    return config_text(config, told)


def why(c: Candidate) -> str:
    """Why auto takes a candidate."""
    if c.slowness is None:
        return "first in order that can"
    return f"expected to be fastest ({c.source})" if c.expected else f"fastest measured, {c.us:.1f} us ({c.source})"


def why_not(c: Candidate, allowed: Sequence[str]) -> list[str]:
    """Why auto did not take a candidate."""
    if not c.can:
        return list(c.reasons) or [unavailable_text(c.availability)]
    if c.name == "null" or c.availability.emulated:
        what = "computes nothing" if c.name == "null" else "is emulated here"
        return [f"{what}, and auto passes over it: ask for it by name"]
    return [f"MULTIGEMM_BACKEND allows {', '.join(allowed)} only"]


def state_text(c: Candidate) -> str:
    if not c.availability.ok:
        return f"unavailable: {unavailable_text(c.availability)}"
    if c.reasons:
        return f"cannot: {'; '.join(c.reasons)}"
    note = " (computes nothing: only when named)" if c.name == "null" else ""
    note = " (emulated: only when named)" if c.availability.emulated else note
    known = [f"{c.us:.1f} us"] if c.us is not None else []
    known += [f"about {c.slowness:.2f} x the fastest"] if c.expected else []
    return f"can{note}" + (f", {', '.join(known)} ({c.source})" if known else "")
