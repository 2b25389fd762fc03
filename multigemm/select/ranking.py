"""Which backend "auto" takes for a class of problems. The first of these rules that applies:

1. the table holds two backends or more for the class: the fastest of them;
2. it was measured once, in this process or an earlier one: what was chosen then;
3. it may be measured now: the fastest of the (at most three) backends that the static order names;
4. the static order.

A choice, once made, stays: in this process by any of the rules, on disk by rule 3. Ranks of a process group, which have
to choose alike, go by rules 1 and 4.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from multigemm.planning.binding import Choice
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select import measure_once as trial
from multigemm.select import registry, table
from multigemm.select.problem_class import ProblemClass
from multigemm.select.static_order import static_order
from multigemm.select.table import Entry
from multigemm.settings import settings

AT_MOST = 3
KEPT = 1 << 16
Place = tuple[torch.device, ProblemClass, tuple[str, ...], bool]


@dataclass(frozen=True, slots=True)
class Ranking:
    """Backends, the one to take first, why, and what is known of their times in microseconds."""

    names: tuple[str, ...]
    why: str
    us: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


_made: dict[Place, Ranking] = {}
_locks: dict[object, threading.RLock] = {}
os.register_at_fork(after_in_child=_locks.clear)  # threads that held one do not exist in a child


def lock_of(what: object) -> threading.RLock:
    """The lock of a device (one thread at a time measures there), of a backend's compiler, or of what is remembered."""
    return _locks.setdefault(what, threading.RLock())


def rank(
    problem: GroupedGemmProblem,
    problem_class: ProblemClass,
    able: Sequence[str],
    may_measure: bool,
    plan_of: Callable[[str], Choice],
) -> Ranking:
    """The ranking of the backends that are able to solve a problem; measures, unless something is against it."""
    found = known(problem, problem_class, able)
    if found.why:
        return found
    worth = worth_measuring(problem_class, found.names)
    why_not = trial.obstacle(problem) if may_measure else "a config is given"
    with lock_of(problem.device):
        again = known(problem, problem_class, able)  # another thread may have measured
        if again.why:
            return again
        measured = why_not or trial.measure_once(problem, problem_class, worth, plan_of)
        if isinstance(measured, str):
            made = Ranking(found.names, f"first of the static order; not measured: {measured}")
        else:
            made = _by_choice(table.table().keep_choice(measured))
        if may_measure:
            _remember(_place(problem, problem_class, worth), made)
    return _completed(made, found.names)


def known(problem: GroupedGemmProblem, problem_class: ProblemClass, able: Sequence[str]) -> Ranking:
    """What is known without measuring now; where that is nothing, the static order without a reason."""
    named = [name for name in static_order(problem_class) if name in able]
    names = (*named, *(name for name in able if name not in named))
    if (found := _by_table(problem_class, names, problem.device)) is not None:
        return found
    worth = worth_measuring(problem_class, names)
    if len(worth) < 2:
        return Ranking(names, "the only one that can")
    place = _place(problem, problem_class, worth)
    made = _made.get(place)
    if made is None and settings().measure and trial.ranks_of_group() == 1:
        kept = table.table().choice(problem_class, problem.device, worth)
        if kept is not None:
            made = _by_choice(kept)
            _remember(place, made)
    return Ranking(names, "") if made is None else _completed(made, names)


def _by_choice(kept: Entry) -> Ranking:
    """As it was chosen once."""
    us = {name: m.us for name, m in kept.backends.items()}
    names = sorted(us, key=lambda name: (name != kept.chosen, us[name]))
    fastest = us[kept.chosen] == min(us.values())
    why = "the fastest" if fastest else "first of the static order, and about as fast as the fastest"
    source = f"measured on {kept.date[:10]}"
    return Ranking(tuple(names), f"{why}, {us[kept.chosen]:.1f} us, {source}", us, source)


def _by_table(problem_class: ProblemClass, names: Sequence[str], device: torch.device) -> Ranking | None:
    """By the table, if that compares at least two of the backends; those it does not hold come last."""
    known = {name: found for name in names if (found := table.table().find(name, problem_class, device)) is not None}
    if len(known) < 2:
        return None
    us = {name: measured.us for name, (measured, _) in sorted(known.items(), key=lambda item: item[1][0].us)}
    best, *_ = us
    source = known[best][1]
    return _completed(Ranking(tuple(us), f"the fastest in the table, {us[best]:.1f} us, {source}", us, source), names)


def worth_measuring(problem_class: ProblemClass, names: Sequence[str]) -> tuple[str, ...]:
    """Those that the static order names and all of third parties; where that leaves one alone, the first three."""
    named = static_order(problem_class)
    found = [name for name in names if name in named or name not in registry.BUILTIN]
    return tuple(found if len(found) > 1 else names[:AT_MOST])


def _completed(found: Ranking, names: Sequence[str]) -> Ranking:
    """With those of `names` that it does not hold behind the others, and without who is not among them."""
    kept = [name for name in found.names if name in names]
    return Ranking((*kept, *(n for n in names if n not in kept)), found.why, found.us, found.source)


def _place(problem: GroupedGemmProblem, problem_class: ProblemClass, worth: tuple[str, ...]) -> Place:
    return problem.device, problem_class, worth, trial.ranks_of_group() > 1


def _remember(place: Place, ranking: Ranking) -> None:
    with lock_of("rankings"):
        if len(_made) >= KEPT:
            del _made[next(iter(_made))]
        _made[place] = ranking


def forget() -> None:
    """Ranks anew from now on, as another process would: what is on disk stays."""
    with lock_of("rankings"):
        _made.clear()
