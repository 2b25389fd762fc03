"""The rule of choice. A name means that backend and no other: if it cannot, it says why. A list means
the first that can. "auto" means, of all that can, the fastest by measurement, else the first in order."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import torch

from multigemm.errors import BackendUnavailable, BackendUnsupported, InvalidSetting, UnknownBackend
from multigemm.planning import launch_cache
from multigemm.planning.binding import Choice
from multigemm.planning.staging import equal_sizes, staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from multigemm.select import measure_once as trial
from multigemm.select import registry
from multigemm.select import table as tuning
from multigemm.select.candidates import Candidate, choice_of, unavailable_text, why, why_not
from multigemm.settings import settings

Which = str | Sequence[str]
CHOICES_KEPT, PICKS_KEPT = 4096, 1 << 16
DIGITS = 5
"""Binary ones of the jagged extent that a choice goes by: it holds within a sixteenth of an octave."""
_choices: dict[Any, Choice] = {}
_picks: dict[int, str] = {}
"""The backend of each of the latest choices that "auto" made, which outlives the choice: the same call gives the same
bits."""
_lock = threading.RLock()


def choose(problem: GroupedGemmProblem, backend: Which = "auto", config: Any = None) -> Choice:
    """The backend and recipe for a problem; remembered by spec, so that a new token count costs nothing, but that
    "auto" asks again every sixteenth of an octave."""
    spec = staged_spec(problem)
    which = backend if isinstance(backend, str) else _names(backend)
    try:
        equal = equal_sizes(problem)
        size = notch(problem) if which == "auto" else 0
        key = (spec, equal, problem.device, which, _hashable(config), size, tuning.generation)
        found = _choices.get(key)
    except TypeError:
        raise InvalidSetting(f"config={config!r} cannot be remembered: pass a frozen config or plain values") from None
    if found is None:
        with _lock:
            tuning.table()  # to make it counts as a change, which must not undo the first choice
        key = (*key[:-1], tuning.generation)
        may_measure = settings().measure and config is None and not settings().backend
        known = trial.settled(problem, spec, equal, may_measure) if which == "auto" else []
        with _lock:
            known = [c for c in known if c.name == _picks.get(hash(key), c.name)] or known
            found = _choices.get(key) or _choose(problem, spec, which, config, equal, known)  # or another thread's
            if which == "auto":
                _remember(hash(key), found.backend)
            if len(_choices) >= CHOICES_KEPT:
                _choices.clear()
            _choices[key] = found
    return found


def _remember(key: int, backend: str) -> None:
    """As the latest pick; the oldest one goes."""
    _picks.pop(key, None)
    _picks[key] = backend
    if len(_picks) > PICKS_KEPT:
        del _picks[next(iter(_picks))]


def forget() -> None:
    """Chooses anew from now on, as another process would."""
    with _lock:
        _choices.clear()
        _picks.clear()
    launch_cache.clear()


def notch(problem: GroupedGemmProblem) -> int:
    """About how long the extent is that offsets cut: what is fastest changes within an octave of it."""
    if problem.extents is None or not problem.form.startswith("jagged"):
        return 0
    extent = problem.extents.along(problem.form[-1])
    octave = extent.bit_length()
    behind = extent >> (octave - DIGITS) if octave > DIGITS else extent << (DIGITS - octave)
    return (octave << (DIGITS - 1)) + behind


def _names(backend: Any) -> tuple[str, ...]:
    """Several names; raises UnknownBackend for anything that is none."""
    if isinstance(backend, Set):
        raise UnknownBackend(f"backend={backend!r} has no order, and the first that can is chosen: pass a list")
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


def _choose(
    problem: GroupedGemmProblem, spec: ProblemSpec, which: Which, config: Any, equal: bool, known: Sequence[Candidate]
) -> Choice:
    if which == "auto":
        choice = _choose_auto(spec, problem.device, config, equal, known)
    else:
        choice = _choose_named(spec, problem.device, [which] if isinstance(which, str) else list(which), config, equal)
    if settings().print_config:
        print(
            f"multigemm: {choice.backend} {choice.recipe.kernel} {choice.recipe.config} ({choice.why})", file=sys.stderr
        )
    return choice


def _choose_named(spec: ProblemSpec, device: torch.device, names: list[str], config: Any, equal: bool) -> Choice:
    reasons: dict[str, list[str]] = {}
    for name in names:  # a slip behind a name that can would never show
        registry.check(name)
    for name in names:
        backend, state = registry.get(name), registry.state(name)
        if not state.ok:
            if len(names) == 1:
                raise BackendUnavailable(name, unavailable_text(state))
            reasons[name] = [unavailable_text(state)]
            continue
        reasons[name] = backend.not_supported_reasons(spec, device)
        if not reasons[name]:
            why = "asked for by name" if len(names) == 1 else f"first of {', '.join(names)} that can"
            return choice_of(name, spec, device, config, why, equal)
    raise BackendUnsupported(reasons)


def _choose_auto(
    spec: ProblemSpec, device: torch.device, config: Any, equal: bool, found: Sequence[Candidate]
) -> Choice:
    allowed = settings().backend
    if unknown := [name for name in allowed if name not in registry.names()]:
        known = ", ".join(registry.names())
        raise UnknownBackend(f"MULTIGEMM_BACKEND holds {unknown[0]!r}, which is no backend; known: {known}")
    able = [c for c in found if c.for_auto]
    if allowed:
        able = sorted((c for c in able if c.name in allowed), key=lambda c: allowed.index(c.name))
    syncing: list[Choice] = []
    for c in able:
        choice = _planned(c.name, spec, device, config, why(c), equal)
        if not choice.recipe.syncs:
            return choice
        syncing.append(choice)
    if syncing:
        return syncing[0]
    raise BackendUnsupported({c.name: why_not(c, allowed) for c in found})


def _planned(name: str, spec: ProblemSpec, device: torch.device, config: Any, why: str, equal: bool) -> Choice:
    """A backend with its recipe, which another number of tokens may have asked for before."""
    key = (name, spec, equal, device, _hashable(config), tuning.generation)
    if key not in _choices:
        _choices[key] = choice_of(name, spec, device, config, "", equal)
    return replace(_choices[key], why=why + _choices[key].why)


def _begin_anew() -> None:
    """In a forked child: a lock that nobody holds."""
    global _lock
    _lock = threading.RLock()


os.register_at_fork(after_in_child=_begin_anew)
