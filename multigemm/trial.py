"""Measuring once what no table knows: the answer for a shape that must be fast and that nobody tuned.

Only where MULTIGEMM_MEASURE=1 asks for it, since it waits for the device: when "auto" meets a class of
problems for the first time, the backends that are likely to be fastest are timed on that very problem
(their results go to memory that is thrown away), and the times are kept as `multigemm tune` keeps them.
"""

from __future__ import annotations

from functools import partial

from multigemm import bound, tuning
from multigemm.contest import candidates, choice_of
from multigemm.errors import MultigemmError
from multigemm.layouts import capturing
from multigemm.measured import Measured, config_text, footprint_of
from multigemm.problem import GroupedGemmProblem
from multigemm.shape import shape_of
from multigemm.spec import ProblemSpec
from multigemm.staging import outline
from multigemm.timing import measure

LIKELY, AT_MOST = 1.4, 4
"""How much slower than the fastest a backend may be expected to be, to be timed; and how many are."""
LEAST, ROUNDS, BUDGET_MS = 5, 15, 40.0


def run(problem: GroupedGemmProblem, spec: ProblemSpec, equal: bool) -> None:
    """Times the likely backends and records them, unless the class is known or cannot be timed now."""
    device = problem.device
    if capturing(device):
        return
    found = candidates(spec, device, equal, partial(outline, problem, spec))
    found = [c for c in found if c.can and not c.availability.emulated and c.name != "null"]
    if sum(c.us is not None for c in found) > 1:
        return
    likely = [c for c in found if (c.slowness or 1.0) <= LIKELY][:AT_MOST]
    choices = {c.name: choice_of(c.name, spec, device, None, "measured now", equal) for c in likely}
    choices = {name: choice for name, choice in choices.items() if not choice.recipe.syncs}
    if len(choices) < 2:
        return
    launches = {name: bound.rehearsal(choice, problem) for name, choice in choices.items()}
    taken = measure(launches, device, reps=ROUNDS, min_reps=LEAST, budget_ms=BUDGET_MS)
    for name, timing in taken.items():
        if not timing.ok:
            raise MultigemmError(f"backend {name!r} failed while it was measured: {timing.error}")
        config = choices[name].recipe.config
        ran, footprint = config_text(config, bound.told(choices[name], problem)), footprint_of(config)
        us, where, key = round(timing.median, 2), tuning.device_name(device), tuning.spec_key(spec, equal)
        flops = shape_of(outline(problem, spec)).flops
        measured = Measured(name, {}, us, where, key, ran=ran, groups=spec.groups, flops=flops, footprint=footprint)
        tuning.table().record(measured)
