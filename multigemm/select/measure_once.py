"""Measuring once what nothing tells: where what is known leaves open which backend is fastest.

When "auto" meets such a class of problems for the first time, the backends in question are timed on that very
problem (their results go to memory that is thrown away), and `measured_cache` keeps the times. That waits for
the stream, some 20 to 45 ms besides compiling (also the clock's own kernel); MULTIGEMM_MEASURE=0 forbids it, and
"auto" then goes by what it expects, as it does in a capture, under torch's sync debug mode, where memory is short, and
where the sizes leave hardly anything to do. What was chosen before stays chosen in this process.
"""

from __future__ import annotations

import math
import os
import threading
import warnings
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from multigemm.cuda.driver import beside_captures
from multigemm.planning import binding as bound
from multigemm.planning.binding import Choice
from multigemm.planning.staging import outline
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from multigemm.select import table as tuning
from multigemm.select.candidates import Candidate, candidates, choice_of
from multigemm.select.clocks import FLUSH_BYTES, glance, room
from multigemm.select.measured import Measured, footprint_of
from multigemm.select.measured_cache import SOURCE, FirstMet
from multigemm.select.shape import shape_of
from multigemm.select.timing import describe, measure

AT_MOST = 4
"""Backends, those that are expected to be fastest."""
LEAST, ROUNDS, BUDGET_MS = 3, 15, 40.0
HOPELESS, SLOW_US = 3.0, 500.0
"""Times slower than the fastest at a glance, and so slow that it is not the host: not worth another look."""
LEAST_US = 0.01
LEAST_WORK = 0.1
"""Of the operations that the class makes one expect: a dry run on few tokens tells nothing of it."""
_turns: dict[torch.device, threading.RLock] = {}
"""Trials wait for a device, which may wait for another thread's: each device has its own turn."""
os.register_at_fork(after_in_child=_turns.clear)


def settled(problem: GroupedGemmProblem, spec: ProblemSpec, equal: bool, may_measure: bool) -> list[Candidate]:
    """All backends with what is known of them, once those in question were measured, if they may be."""
    ask = partial(candidates, spec, problem.device, equal, partial(outline, problem, spec))
    found = ask()
    if not may_measure or not in_question(found) or _must_not_wait(problem):
        return found
    turn = _turns.setdefault(problem.device, threading.RLock())
    with turn, bound.callers_stream(problem), beside_captures() if problem.device.type == "cuda" else nullcontext():
        found = ask()  # another thread may have measured
        try:
            return ask() if _measured(problem, spec, equal, found) else found
        except Exception as error:  # the call itself may well succeed; if not, it says so
            _report(f"could not measure: {describe(error)}")
            return found


def _must_not_wait(problem: GroupedGemmProblem) -> bool:
    """In a capture, and where torch was told to complain of whoever waits for a GPU."""
    return bound.captured(problem) or (problem.device.type == "cuda" and torch.cuda.get_sync_debug_mode() != 0)


def _report(what: str) -> None:
    warnings.warn(f"multigemm: auto {what}", RuntimeWarning, stacklevel=2)


def in_question(found: Sequence[Candidate]) -> list[str]:
    """Which backends may well be the fastest, of all in the order of what is expected; none where that is known by
    measurement, or one alone is left."""
    able = [c for c in found if c.for_auto]
    if not able or any(c.slowness is not None and not c.expected for c in able):
        return []
    names = [able[0].name, *(c.name for c in able[1:] if c.in_question)]
    return names if len(names) > 1 else []


def _measured(problem: GroupedGemmProblem, spec: ProblemSpec, equal: bool, found: Sequence[Candidate]) -> bool:
    """Times the backends in question and keeps what they took; false where there is nothing to keep."""
    shape = shape_of(outline(problem, spec))
    work = problem.flops  # reads the sizes
    if not work or work < LEAST_WORK * shape.flops:
        return False
    failed: dict[str, str] = {}
    choices = _planned(in_question(found), spec, problem.device, equal, failed)
    took = _timed(choices, problem, failed) if len(choices) > 1 and _fits(problem) else {}
    for name, why in failed.items():
        _report(f"could not measure backend {name!r}: {why}")
    if len(took) < 2:
        return False
    where, key, times = tuning.device_name(problem.device), tuning.spec_key(spec, equal), {}
    ran = {c.name: c.ran for c in found if c.for_auto and c.name not in failed}
    for name, us in took.items():
        tile, size = footprint_of(choices[name].recipe.config), (spec.groups, shape.flops)
        times[name] = Measured(name, {}, round(us, 2), where, key, {}, SOURCE, ran[name], *size, tile)
    tuning.table().learn(FirstMet(times, {name: its for name, its in ran.items() if name not in times}))
    return True


def _planned(
    names: Sequence[str], spec: ProblemSpec, device: torch.device, equal: bool, failed: dict[str, str]
) -> dict[str, Choice]:
    """Recipes of those that need not wait for sizes."""
    found: dict[str, Choice] = {}
    for name in names:
        try:
            choice = choice_of(name, spec, device, None, "to be measured", equal)
        except Exception as error:  # reported; what is expected of the others holds
            failed[name] = describe(error)
            continue
        if not choice.recipe.syncs and len(found) < AT_MOST:
            found[name] = choice
    return found


def _fits(problem: GroupedGemmProblem) -> bool:
    """Whether there is room for one more result, as it lies in memory, and for what empties the cache."""
    spans, elements = bound.scratch_elements(problem)
    size = problem.out_dtype.itemsize
    return spans <= 2 * elements and room(problem.device) >= FLUSH_BYTES + 2 * spans * size


def _timed(choices: Mapping[str, Choice], problem: GroupedGemmProblem, failed: dict[str, str]) -> dict[str, float]:
    """Microseconds that each took, all of them writing into one scratch result."""
    scratch, bounds, launches, rough = None, {}, {}, {}
    for name, choice in choices.items():
        try:
            scratch = bound.scratch(problem) if scratch is None else scratch
            bounds[name] = bound.bind(choice, problem, scratch)
            launches[name] = bounds[name].launch
            rough[name] = glance(launches[name], problem.device)
        except Exception as error:  # it may well be that the result does not fit twice
            failed[name] = describe(error)
    hopeless = max(SLOW_US, HOPELESS * min(rough.values(), default=math.inf))
    worth = {name: launches[name] for name, us in rough.items() if us <= hopeless}
    taken = measure(worth, problem.device, reps=ROUNDS, min_reps=LEAST, budget_ms=BUDGET_MS)
    failed.update((name, timing.error) for name, timing in taken.items() if not timing.ok)
    took = {name: taken[name].median if name in taken else us for name, us in rough.items()}
    return {name: us for name, us in took.items() if us >= LEAST_US}
