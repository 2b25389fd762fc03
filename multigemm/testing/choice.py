"""Which config each kind of problem runs under, so that every config that a backend ships comes up.

A backend's first choice depends on sizes, and a campaign's problems are small: left alone, it would
run the kernels for small problems only. So each kind gets configs of its own out of all that the
backend ships for it, the one that other kinds have used least. Later laps over the kinds bring up configs
that no kind has used, where there are such, and otherwise what is compiled already. What is left then gets further
kinds (`carriers`): new ones where no kind can run under it; one once more where all that can have rarer ones to run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from multigemm.planning.staging import staged_spec
from multigemm.problem.spec import ProblemSpec
from multigemm.testing.case import Case
from multigemm.testing.strategies import Limits, random_case
from multigemm.testing.subject import Subject
from multigemm.testing.values import shapes
from multigemm.testing.world import make_problem, plot, write_index

SOUGHT, FAR_SEED = 600, 1 << 20
"""Random cases that are looked through for configs that no kind runs, and their first seed."""


def spec_of(case: Case) -> ProblemSpec:
    """The spec of a case, without its values."""
    place = plot(case, shapes(case))
    inputs = place.inputs.blank()
    write_index(case, place, inputs)
    return staged_spec(make_problem(case, place, inputs, place.outputs.blank()))


def offered(kinds: list[Case], subject: Subject, device: torch.device) -> list[list[Any]]:
    """For each kind, all configs that the backend ships for it; nothing where it refuses the kind."""
    return [_offered(spec_of(case), subject, device) for case in kinds]


def _offered(spec: ProblemSpec, subject: Subject, device: torch.device) -> list[Any]:
    return [] if subject.refusals(spec, device) else subject.shipped(spec, device)


def carriers(kinds: list[Case], names: Sequence[str], device: torch.device, limits: Limits, turns: int) -> list[Case]:
    """Further kinds, so that every config that any kind offers is assigned to one."""
    subjects = [Subject(name) for name in names]
    every = [offered(kinds, subject, device) for subject in subjects]
    known = [_all_of(_spread(shipped, turns)) for shipped in every]
    found = []
    for seed in range(SOUGHT):
        case, brings = random_case(FAR_SEED + seed, limits), False
        spec = spec_of(case)
        its = [_offered(spec, subject, device) for subject in subjects]
        for shipped, seen in zip(its, known, strict=True):
            new = [config for config in shipped if config not in seen][:turns]
            brings = brings or bool(new)
            seen.update(new)
        if brings:
            found.append(case)
            every = [[*before, shipped] for before, shipped in zip(every, its, strict=True)]
    return found + _repeated([*kinds, *found], every, turns)


def _repeated(kinds: list[Case], every: list[list[list[Any]]], turns: int) -> list[Case]:
    """Kinds that are needed once more, since all that offer some config have rarer ones to run; each at most as often
    as it offers configs, for it takes one that is not used yet, if there is one."""
    found = list[Case]()
    while True:
        left = [_all_of(shipped) - _all_of(_spread(shipped, turns)) for shipped in every]
        offer = [any(x.intersection(s[i]) for x, s in zip(left, every, strict=True)) for i in range(len(kinds))]
        if not any(offer):
            return found
        at = offer.index(True)
        found.append(kinds[at])
        every = [[*shipped, shipped[at]] for shipped in every]


def _all_of(each: list[list[Any]]) -> set[Any]:
    return {config for configs in each for config in configs}


def assigned(kinds: list[Case], subject: Subject, device: torch.device, turns: int) -> list[list[Any]]:
    """For each kind, up to `turns` configs; nothing where the backend refuses the kind."""
    return _spread(offered(kinds, subject, device), turns)


def _spread(every: list[list[Any]], turns: int) -> list[list[Any]]:
    """Of what is offered for each kind up to `turns`, the rarest of those that no other uses first."""
    used: Counter[Any] = Counter()
    common = Counter(config for shipped in every for config in shipped)
    found = []
    for shipped in every:  # what few kinds can run comes first, then the backend's best guess
        found.append(sorted(shipped, key=lambda config: (used[config], common[config]))[:1])
        used.update(found[-1])
    for _ in range(1, turns):
        for shipped, chosen in zip(every, found, strict=True):
            unused = sorted((each for each in shipped if not used[each]), key=lambda each: common[each])[:1]
            used.update(unused)
            chosen += unused
    return found


def compile_singly() -> None:
    """From here on, in this process: the backend that compiles a whole family of kernels, so that later calls of
    other sizes find theirs, compiles only what is asked for. A campaign asks for each in its turn."""
    from multigemm.backends.cupy import choice

    vars(choice).update(first_choices=lambda spec, capability: ())
