"""The registry of backends: which there are, what they refuse, and their recipes, compiled once and shared.

The built-in ones are sub-packages of `multigemm.backends`; other packages register an instance of Backend in the
entry-point group of the same name. Each is loaded when it is first asked for. One that fails to import stays in the
list, unavailable, with the error as its reason.
"""

from __future__ import annotations

import difflib
import importlib
import os
import threading
from collections.abc import Sequence, Set
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn

import torch

from multigemm.backend import Availability, Backend, BuiltinBackend, Recipe, refusals
from multigemm.errors import BackendUnavailable, MultigemmError, UnknownBackend
from multigemm.problem.spec import ProblemSpec

BUILTIN = ("cupy", "triton", "numba", "cublas", "cpu", "null")
GROUP = "multigemm.backends"


@lru_cache(maxsize=1)
def _entry_points() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=GROUP) if point.name not in BUILTIN}


def names() -> tuple[str, ...]:
    """The names of all known backends: the built-in ones, then those of other packages in alphabetical order."""
    return (*BUILTIN, *sorted(_entry_points()))


def check(name: str, text: str = "unknown backend") -> None:
    """Raises UnknownBackend, with `text` and the nearest known name, if there is no such backend."""
    if name in names():
        return
    near = difflib.get_close_matches(name.lower(), names(), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names())}"
    if "," in name:
        hint = f"pass several names as a list, {[part.strip() for part in name.split(',')]}"
    if name == "auto":
        hint = "'auto' chooses among all: name nothing else (as a setting: leave MULTIGEMM_BACKEND empty)"
    raise UnknownBackend(f"{text} {name!r}: {hint}")


def several(given: Any) -> tuple[str, ...]:
    """The names in a user's sequence. Raises UnknownBackend for a set, an empty sequence, or an element that is no
    text."""
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
        if isinstance(found, type) or not isinstance(found, Backend):  # a class has the members, unbound
            raise TypeError(f"{found!r} lacks members of the Backend protocol: give an instance")
    except Exception as error:  # any failure of a foreign import becomes this backend's reason
        return _broken(name, f"its import failed: {type(error).__name__}: {error}")
    return found


def _broken(name: str, reason: str) -> Backend:
    """A stand-in for a backend whose import failed. Nobody plans with it, because it is not available."""

    def plan(*_: Any) -> NoReturn:
        raise BackendUnavailable(name, reason)

    here = Availability(ok=False, reason=reason)
    return BuiltinBackend(name, lambda: here, lambda *_: [reason], lambda *_: [], plan)


def state(name: str) -> Availability:
    """The availability of a backend. An exception while asking becomes its reason."""
    try:
        return get(name).availability()
    except MultigemmError:
        raise
    except Exception as error:  # foreign code, like its import
        return Availability(ok=False, reason=f"its availability() failed: {type(error).__name__}: {error}")


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
    """One backend for one spec: whether it can solve it, and if not, why.

    `us` and `host_us` are the times of the device and of the host in microseconds, if they are known; `source` says
    where the times come from.
    """

    name: str
    availability: Availability
    reasons: tuple[str, ...]
    us: float | None = None
    host_us: float = 0.0
    source: str = ""

    @property
    def can(self) -> bool:
        return not self.reasons

    @property
    def only_when_named(self) -> str:
        """Why "auto" passes over it even if it can; "" if it does not."""
        if self.name == "null":
            return "computes nothing"
        return "is emulated here" if self.availability.emulated else ""

    @property
    def for_auto(self) -> bool:
        """Whether "auto" may take it."""
        return self.can and not self.only_when_named

    def why_not(self, allowed: Sequence[str]) -> list[str]:
        """Why "auto" did not take the backend. `allowed` are the backends that the settings allow."""
        if self.can and self.only_when_named:
            return [f"{self.only_when_named}, and auto passes over it: ask for it by name"]
        return list(self.reasons) or [f"MULTIGEMM_BACKEND allows {', '.join(allowed)} only"]

    def __str__(self) -> str:
        if not self.can:
            return f"{'cannot' if self.availability.ok else 'unavailable'}: {'; '.join(self.reasons)}"
        note = f" ({self.only_when_named}: only when named)" if self.only_when_named else ""
        host = f"; a warm call takes the host {self.host_us:.1f} us" if self.host_us else ""
        return f"can{note}" if self.us is None else f"can{note}, {self.us:.1f} us ({self.source}{host})"


def candidates(spec: ProblemSpec, device: torch.device) -> list[Candidate]:
    """Every backend with its reasons, in the order of `names`."""
    states = {name: state(name) for name in names()}
    return [Candidate(n, s, reasons(n, spec, device) if s.ok else (s.why_not,)) for n, s in states.items()]


_locks: dict[object, threading.RLock] = {}
os.register_at_fork(after_in_child=_locks.clear)  # threads that held one do not exist in a child


def lock_of(what: object) -> threading.RLock:
    """The lock of a backend's compiler, or of a device, on which one thread at a time measures."""
    return _locks.setdefault(what, threading.RLock())


def recipe(name: str, spec: ProblemSpec, device: torch.device, config: Any) -> Recipe:
    """The recipe of a backend with a config. Threads that meet a spec together compile it once."""
    with lock_of((name, "compiles")):
        return _compiled(name, spec, device, config)


@lru_cache(maxsize=4096)
def _compiled(name: str, spec: ProblemSpec, device: torch.device, config: Any) -> Recipe:
    return get(name).plan(spec, config, device)


forget_recipes = _compiled.cache_clear
