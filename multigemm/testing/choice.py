"""Which config each kind of problem runs under, so that every config that a backend ships comes up.

A backend's first choice depends on sizes, and a campaign's problems are small: left alone, it would
run the kernels for small problems only. So each kind gets configs of its own out of all that the
backend ships for it, those that other kinds have used least. One config for each kind in a lap over
the kinds keeps the number of kernels to compile small; later laps take the next ones.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from multigemm.spec import ProblemSpec
from multigemm.staging import staged_spec
from multigemm.testing.case import Case
from multigemm.testing.subject import Subject
from multigemm.testing.values import shapes
from multigemm.testing.world import make_problem, plot, write_index


def spec_of(case: Case, device: torch.device) -> ProblemSpec:
    """The spec of a case, without its values."""
    place = plot(case, shapes(case))
    inputs = place.inputs.poisoned()
    write_index(case, place, inputs)
    return staged_spec(make_problem(case, place, inputs.to(device), place.outputs.poisoned().to(device)))


def assigned(kinds: list[Case], subject: Subject, device: torch.device, turns: int) -> list[list[Any]]:
    """For each kind, up to `turns` configs; nothing where the backend refuses the kind."""
    used: Counter[Any] = Counter()
    found = []
    for case in kinds:
        spec = spec_of(case, device)
        shipped = [] if subject.refusals(spec, device) else subject.shipped(spec, device)
        chosen = sorted(shipped, key=lambda config: used[config])[:turns]  # a stable sort: the best guess first
        used.update(chosen)
        found.append(chosen)
    return found
