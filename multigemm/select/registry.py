"""The registry of backends: their reasons to refuse a problem, and their recipes, compiled once and shared.

The built-in ones are sub-packages of `multigemm.backends`; anyone else's come from the entry-point
group `multigemm.backends`, whose value is a Backend instance. Each is loaded when it is first asked for. A backend that
fails to import is not hidden: it stays in the list, unavailable, with the error as its reason.
"""

from __future__ import annotations

import difflib
import importlib
import os
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass, is_dataclass
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import torch

from multigemm.backend import (
    Availability,
    Backend,
    BuiltinBackend,
    Recipe,
    as_dict,
    completed,
    fused_reasons,
    quantised_reasons,
)
from multigemm.errors import BackendUnavailable, MultigemmError, UnknownBackend
from multigemm.planning.binding import Choice
from multigemm.problem.spec import ProblemSpec
from multigemm.select import table
from multigemm.select.problem_class import Query
from multigemm.select.table import Measured

BUILTIN = ("cupy", "triton", "numba", "cublas", "cpu", "null")
GROUP = "multigemm.backends"


def _broken(name: str, error: Exception) -> Backend:
    """A stand-in for a backend whose import failed. Its availability holds the error."""
    reason = f"its import failed: {type(error).__name__}: {error}"

    def plan(*_: Any) -> NoReturn:
        raise BackendUnavailable(name, reason)

    here = Availability(ok=False, reason=reason)
    return BuiltinBackend(name, lambda: here, lambda spec, device: [reason], lambda spec, device: [], plan)


@lru_cache(maxsize=1)
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILTIN}


def names() -> tuple[str, ...]:
    """The names of all known backends: the built-in ones, then those of other packages in alphabetical order."""
    return (*BUILTIN, *sorted(_entry_points()))


def check(name: str) -> None:
    """Raises UnknownBackend, with the nearest known name, if there is no such backend."""
    if name in names():
        return
    near = difflib.get_close_matches(name.lower(), names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
    if "," in name:
        hint = f"pass several names as a list, {[part.strip() for part in name.split(',')]}"
    if name == "auto":
        hint = "'auto' chooses among all: pass it alone"
    raise UnknownBackend(f"unknown backend {name!r}: {hint}")


def check_allowed(allowed: Sequence[str]) -> None:
    """Raises UnknownBackend if MULTIGEMM_BACKEND names a backend that does not exist."""
    for name in set(allowed) - set(names()):
        raise UnknownBackend(f"MULTIGEMM_BACKEND holds {name!r}, which is no backend; known: {', '.join(names())}")


def several(given: Any) -> tuple[str, ...]:
    """Splits a user's text or sequence into backend names. Raises UnknownBackend for an unknown one."""
    if isinstance(given, Set):
        raise UnknownBackend(f"backend={given!r} has no order, and the first that can is chosen: pass a list")
    try:
        found = tuple(given)
    except TypeError:
        found = (given,)
    if not found:
        raise UnknownBackend("backend=[] names no backend: pass a name, several names, or 'auto'")
    if wrong := [name for name in found if not isinstance(name, str)]:
        raise UnknownBackend(f"backend holds {wrong[0]!r}, which is no name: pass a name, several names, or 'auto'")
    return found


@cache
def get(name: str) -> Backend:
    """The backend with this name. Raises UnknownBackend if there is none."""
    check(name)
    try:
        if name in BUILTIN:
            found = importlib.import_module(f"multigemm.backends.{name}").BACKEND
        else:
            found = _entry_points()[name].load()
    except Exception as error:  # any failure of a foreign import becomes this backend's reason
        return _broken(name, error)
    if isinstance(found, type) or not isinstance(found, Backend):  # a class has the members, unbound
        return _broken(name, TypeError(f"{found!r} lacks members of the Backend protocol: give an instance"))
    return found


def state(name: str) -> Availability:
    """The availability of a backend. An exception while asking becomes its reason."""
    try:
        return get(name).availability()
    except MultigemmError:
        raise
    except Exception as error:  # foreign code, like its import
        return Availability(ok=False, reason=f"its availability() failed: {type(error).__name__}: {error}")


def unkept_promises(backend: Backend, spec: ProblemSpec) -> list[str]:
    """The promises (batch invariance) that a problem demands and this backend does not make."""
    if not spec.batch_invariant or getattr(backend, "batch_invariant", False):
        return []
    return [
        "it does not promise that a row's bits are independent of its neighbours: leave batch_invariant=True out, or "
        "name a backend that does (cupy, triton, numba, cpu)"
    ]


def refusals(backend: Backend, spec: ProblemSpec, device: torch.device) -> list[str]:
    """A backend's own reasons and the promises that it does not make. A backend of another package that does not
    declare support for quantised operands or fused keywords is refused those."""
    for knows, reasons_against in (("takes_quantised", quantised_reasons), ("takes_fused", fused_reasons)):
        foreign = backend.name not in BUILTIN and not getattr(backend, knows, False)
        if foreign and (unknown := reasons_against(spec)):
            return unknown
    return [*unkept_promises(backend, spec), *backend.not_supported_reasons(spec, device)]


def reasons(name: str, spec: ProblemSpec, device: torch.device) -> tuple[str, ...]:
    """Why a backend does not support a problem. An exception while asking becomes a reason."""
    try:
        return tuple(refusals(get(name), spec, device))
    except MultigemmError:
        raise
    except Exception as error:  # foreign code, like its availability
        return (f"its not_supported_reasons() failed: {type(error).__name__}: {error}",)


@dataclass(frozen=True, slots=True)
class Candidate:
    """One backend's answer to one spec. `measured` are its known times for the class."""

    name: str
    availability: Availability
    reasons: tuple[str, ...]
    measured: Measured | None = None

    @property
    def us(self) -> float | None:
        """Microseconds of the device, if they are known."""
        return None if self.measured is None else self.measured.us

    @property
    def can(self) -> bool:
        return self.availability.ok and not self.reasons

    @property
    def for_auto(self) -> bool:
        """Whether "auto" may take it."""
        return self.can and not self.availability.emulated and self.name != "null"

    def why_not(self, allowed: Sequence[str]) -> list[str]:
        """Why "auto" did not take the backend. `allowed` are the backends that the settings allow."""
        if not self.can:
            return list(self.reasons) or [unavailable_text(self.availability)]
        if not self.for_auto:
            what = "computes nothing" if self.name == "null" else "is emulated here"
            return [f"{what}, and auto passes over it: ask for it by name"]
        return [f"MULTIGEMM_BACKEND allows {', '.join(allowed)} only"]

    def __str__(self) -> str:
        if not self.availability.ok:
            return f"unavailable: {unavailable_text(self.availability)}"
        if self.reasons:
            return f"cannot: {'; '.join(self.reasons)}"
        note = " (computes nothing: only when named)" if self.name == "null" else ""
        note = " (emulated: only when named)" if self.availability.emulated else note
        if (found := self.measured) is None:
            return f"can{note}"
        host = f"; a warm call takes the host {found.host_us:.1f} us" if found.host_us else ""
        return f"can{note}, {found.us:.1f} us ({found.source}{host})"


def candidates(spec: ProblemSpec, device: torch.device) -> list[Candidate]:
    """Every backend with its reasons, in the order of `names`."""
    states = {name: state(name) for name in names()}
    return [Candidate(name, here, reasons(name, spec, device) if here.ok else ()) for name, here in states.items()]


def unavailable_text(state: Availability) -> str:
    return f"{state.reason}; install with: {state.install}" if state.install else state.reason


# --- recipes ----------------------------------------------------------------------------------------

_locks: dict[object, threading.RLock] = {}
os.register_at_fork(after_in_child=_locks.clear)  # threads that held one do not exist in a child


def lock_of(what: object) -> threading.RLock:
    """The lock of a backend's compiler, or of a device, on which one thread at a time measures."""
    return _locks.setdefault(what, threading.RLock())


def plan(query: Query, name: str, why: str = "") -> Choice:
    """The recipe of one backend, with the given config, else a measured one, else the backend's first guess."""
    spec, device = query.spec, query.problem.device
    config, source = _config_for(query, name)
    with lock_of((name, "compiles")):  # threads that meet a spec together compile it once
        recipe = _compiled(name, spec, device, config)
    return Choice(name, recipe, spec, f"{why}; config {source}")


@lru_cache(maxsize=4096)
def _compiled(name: str, spec: ProblemSpec, device: torch.device, config: Any) -> Recipe:
    return get(name).plan(spec, config, device)


forget_recipes = _compiled.cache_clear


def _config_for(query: Query, name: str) -> tuple[Any, str]:
    """The config of a backend, and its origin. A measured config that is no longer valid is skipped."""
    device = query.problem.device
    valid = get(name).configs(query.spec, device)
    if query.config is not None:
        return completed(query.config, valid), "given"
    if (measured := table.table().find(query.problem_class, device).get(name)) is not None:
        for config in valid:
            if is_dataclass(config) and as_dict(config) == dict(measured.config):
                return config, f"measured ({measured.us:.1f} us, {measured.source})"
    return (valid[0] if valid else None), "heuristic"
