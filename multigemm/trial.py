"""Measuring once what nothing tells: where what is known leaves open which backend is fastest.

When "auto" meets such a class of problems for the first time, the backends in question are timed on that very
problem (their results go to memory that is thrown away), and `multigemm.met` keeps the times. That waits for the
device, some 10 to 40 ms besides compiling; MULTIGEMM_MEASURE=0 forbids it, and "auto" then goes by what it expects,
as it does in a capture and where memory is short. What was chosen before stays chosen in this process.
"""

from __future__ import annotations

import math
import threading
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from multigemm import bound, tuning
from multigemm.bound import Choice
from multigemm.clocks import FLUSH_BYTES, room
from multigemm.contest import Candidate, candidates, choice_of, would_run
from multigemm.layouts import capturing
from multigemm.measured import Measured, footprint_of
from multigemm.met import SOURCE
from multigemm.problem import GroupedGemmProblem
from multigemm.shape import shape_of
from multigemm.spec import ProblemSpec
from multigemm.staging import outline
from multigemm.timing import Timing, describe, measure

AT_MOST = 4
"""Backends, those that are expected to be fastest."""
LEAST, ROUNDS, BUDGET_MS = 3, 15, 40.0
_turns: dict[torch.device, threading.RLock] = {}
"""Trials wait for a device, which may wait for another thread's: each device has its own turn."""


def run(problem: GroupedGemmProblem, spec: ProblemSpec, equal: bool) -> None:
    """Times the backends in question and records them; nothing where there are none, or none can be timed now."""
    if capturing(problem.device):
        return
    with _turns.setdefault(problem.device, threading.RLock()), bound.callers_stream(problem):
        _run(problem, spec, equal)


def _run(problem: GroupedGemmProblem, spec: ProblemSpec, equal: bool) -> None:
    device = problem.device
    found = candidates(spec, device, equal, partial(outline, problem, spec))
    names = in_question([c for c in found if c.can and not c.availability.emulated and c.name != "null"])
    if len(names) < 2:
        return
    choices = _planned(names, spec, device, equal)
    choices = {name: choice for name, choice in choices.items() if not choice.recipe.syncs}
    if len(choices) < 2 or room(device) < FLUSH_BYTES + 2 * _result_bytes(problem):
        return
    ops, place, where = outline(problem, spec), tuning.spec_key(spec, equal), tuning.device_name(device)
    flops, measured = shape_of(ops).flops, []
    for name, timing in _timed(choices, problem).items():
        config = choices[name].recipe.config
        ran = would_run(name, config, spec, device, ops)
        m = Measured(name, {}, round(timing.median, 2), where, place, ran=ran, groups=spec.groups, flops=flops)
        measured.append(replace(m, source=SOURCE, footprint=footprint_of(config)))
    if len(measured) > 1:
        tuning.table().learn(measured)


def _result_bytes(problem: GroupedGemmProblem) -> int:
    shapes = problem.out_shape if problem.form == "per_group" else [problem.out_shape]
    return sum(map(math.prod, shapes)) * problem.out_dtype.itemsize


def in_question(able: list[Candidate]) -> list[str]:
    """Which backends, of all that can in the order of what is expected, may well be the fastest; none where that is
    known by measurement."""
    if not able or any(c.slowness is not None and not c.expected for c in able):
        return []
    return [able[0].name, *(c.name for c in able[1:] if c.in_question)][:AT_MOST]


def _planned(names: Sequence[str], spec: ProblemSpec, device: torch.device, equal: bool) -> dict[str, Choice]:
    """Their recipes; one that cannot be made is left out, with a warning."""
    found = {}
    for name in names:
        try:
            found[name] = choice_of(name, spec, device, None, "to be measured", equal)
        except Exception as error:
            _left_out(name, describe(error))
    return found


def _left_out(name: str, why: str) -> None:
    warnings.warn(f"multigemm: auto could not measure backend {name!r}: {why}", RuntimeWarning, stacklevel=2)


def _timed(choices: Mapping[str, Choice], problem: GroupedGemmProblem) -> dict[str, Timing]:
    """What each took, all of them writing into one scratch result; one that fails is left out, with a warning."""
    scratch, launches = None, {}
    for name, choice in choices.items():
        try:
            scratch = bound.scratch(problem) if scratch is None else scratch
            launches[name] = bound.launcher(choice, problem, scratch)
        except Exception as error:  # it may well be that the result does not fit twice
            _left_out(name, describe(error))
    taken = measure(launches, problem.device, reps=ROUNDS, min_reps=LEAST, budget_ms=BUDGET_MS)
    for name, timing in taken.items():
        if not timing.ok:
            _left_out(name, timing.error)
    return {name: timing for name, timing in taken.items() if timing.ok}
