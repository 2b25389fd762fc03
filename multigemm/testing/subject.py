"""A backend under test, which of its configs runs, and which configs a campaign assigns to kinds of problems.

A backend is asked through the protocol alone, so that third parties' backends and planted faults are
judged by the same code as our own. `configs(spec)` of a backend names what suits the sizes of a spec;
what else it would choose for larger problems of the same kind is valid for small ones too, and small
problems are what a campaign draws. `shipped` names all of them.

So that every config that a backend ships comes up, each kind of problem gets configs of its own (`assigned`): the one
that other kinds have used least. Later laps over the kinds bring up configs that no kind has used, where there are
such, and otherwise what is compiled already. What is left then gets further kinds (`kinds_for_rare_configs`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from multigemm.backend import Backend, Recipe, refusals
from multigemm.backends import registry
from multigemm.errors import BackendUnsupported, InvalidSetting
from multigemm.problem.spec import ProblemSpec
from multigemm.testing.case import Case
from multigemm.testing.placed_case import spec_of
from multigemm.testing.strategies import Limits, random_case

LIBRARIES = ("cpu", "cublas")
"""Backends whose kernels a vendor's library picks by shape, so that a row's bits may depend on its neighbours."""

ROWS = (16, 64, 256, 1024, 8192)
COLUMNS = (64, 4096)
KEPT = 2000
"""The number of recipes that one subject keeps."""


def kind_of(spec: ProblemSpec) -> ProblemSpec:
    """The spec without its sizes; only whether an extent is zero remains."""
    m, n, k = (None if extent is None else min(extent, 1) for extent in (spec.m, spec.n, spec.k))
    groups, total, largest = (min(count, 1) for count in (spec.groups, spec.total, spec.largest))
    return replace(spec, groups=groups, m=m, n=n, k=k, total=total, largest=largest, longest=0)


def _larger(spec: ProblemSpec) -> list[ProblemSpec]:
    """The same kind of problem with larger sizes."""
    if 0 in (spec.m, spec.n, spec.k, spec.groups, spec.total):
        return []
    groups = 1 << (spec.groups - 1).bit_length()
    found = []
    for rows, columns in product(ROWS, COLUMNS):
        m, n, k = (None if old is None else new for old, new in ((spec.m, rows), (spec.n, columns), (spec.k, 4096)))
        found.append(replace(spec, m=m, n=n, k=k, total=groups * rows, largest=rows if spec.largest else 0))
    return found


class Subject:
    """A backend under test. `config` picks one of its configs: by position, modulo their number, or by its
    text. After `pin` that config is kept for every spec that it is valid for, so that problems of one
    kind share their compiled kernels."""

    def __init__(self, backend: str | Backend, config: int | str = 0) -> None:
        self.backend: Backend = registry.get(backend) if isinstance(backend, str) else backend
        self.config = config
        self._pinned: Any = None
        self._ran: list[Any] = []
        self._offered: dict[Any, list[Any]] = {}
        self._recipes: dict[Any, Recipe] = {}

    @property
    def name(self) -> str:
        return self.backend.name

    @property
    def own_kernels(self) -> bool:
        """Whether equal kernel and config promise equal arithmetic for an element."""
        return self.name not in LIBRARIES

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return self.backend.configs(spec, device)

    def shipped(self, spec: ProblemSpec, device: torch.device) -> list[Any]:
        """All configs that the backend would choose for problems of this kind, its choice for this one first."""
        key = (kind_of(spec), device)
        if key not in self._offered:
            every = [config for size in _larger(spec) for config in self.configs(size, device)]
            self._offered[key] = list(dict.fromkeys(every))
        return list(dict.fromkeys([*self.configs(spec, device), *self._offered[key]]))

    def refusals(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        state = self.backend.availability()
        if not state.ok:
            return [f"unavailable: {state.reason}"]
        return refusals(self.backend, spec, device)

    def offered(self, spec: ProblemSpec, device: torch.device) -> list[Any]:
        """The shipped configs; none if the backend refuses the problem."""
        return [] if self.refusals(spec, device) else self.shipped(spec, device)

    def pin(self, config: Any) -> None:
        """Keeps a config for all later specs; None releases it."""
        self._pinned = config

    def recipe(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        """The recipe for a spec under the chosen config; made once."""
        key = (spec, device)
        if key not in self._recipes:
            if len(self._recipes) > KEPT:
                self._recipes.clear()
            self._recipes[key] = self.planned(spec, device)
        return self._recipes[key]

    def planned(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        """A new recipe for a spec."""
        if self._pinned is not None:  # also where it is shipped for other sizes only
            try:
                return self.backend.plan(spec, self._pinned, device)
            except (InvalidSetting, BackendUnsupported):  # not for this very problem: another one is
                pass
        config = self._chosen(spec, device)
        if config is not None and config not in self._ran:
            self._ran.append(config)
        return self.backend.plan(spec, config, device)

    def _chosen(self, spec: ProblemSpec, device: torch.device) -> Any:
        if isinstance(self.config, str):
            named = [config for config in self.shipped(spec, device) if str(config) == self.config]
            if not named:
                raise InvalidSetting(f"{self.name} has no config {self.config} for this problem")
            return named[0]
        configs = list(self.configs(spec, device))
        if not configs:
            return None
        if self._pinned is not None:  # what is compiled already, if there is such
            return next((config for config in self._ran if config in configs), configs[0])
        return configs[self.config % len(configs)]


SEARCHED, FAR_SEED = 600, 1 << 20
"""Random cases that are looked through for configs that no kind runs, and their first seed."""


def offered(kinds: list[Case], subject: Subject, device: torch.device) -> list[list[Any]]:
    """For each kind, all configs that the backend ships for it; none if it refuses the kind."""
    return [subject.offered(spec_of(case), device) for case in kinds]


def kinds_for_rare_configs(
    kinds: list[Case], names: Sequence[str], device: torch.device, limits: Limits, turns: int
) -> list[Case]:
    """More kinds, so that every config that a kind or one of the searched cases offers is assigned to one.

    A kind comes once more where all that offer some config have rarer ones to run: it takes one that is not used yet.
    """
    candidates = [*kinds, *(random_case(FAR_SEED + seed, limits) for seed in range(SEARCHED))]
    return [candidates[at] for at in _added([offered(candidates, Subject(name), device) for name in names],
                                            len(kinds), turns)]  # fmt: skip


def _added(offers: Sequence[list[list[Any]]], count: int, turns: int) -> list[int]:
    """Which candidates to add to the first `count`, so that every config that any candidate offers is assigned; for
    each backend the configs that each candidate offers."""
    chosen = list(range(count))
    while True:
        left = [_all_of(each) - _all_of(_spread([each[at] for at in chosen], turns)) for each in offers]
        helps = (at for at in range(len(offers[0])) if any(x & set(each[at]) for x, each in zip(left, offers)))
        if (at := next(helps, None)) is None:
            return chosen[count:]
        chosen.append(at)


def _all_of(each: list[list[Any]]) -> set[Any]:
    return {config for configs in each for config in configs}


def assigned(kinds: list[Case], subject: Subject, device: torch.device, turns: int) -> list[list[Any]]:
    """For each kind, up to `turns` configs; none if the backend refuses the kind."""
    return _spread(offered(kinds, subject, device), turns)


def _spread(every: list[list[Any]], turns: int) -> list[list[Any]]:
    """Up to `turns` of the configs offered for each kind, first those that the fewest others use."""
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
    """Makes the backend, in this process, compile only the requested kernel instead of the whole family that later
    sizes may need. A campaign requests each one."""
    from multigemm.backends.cupy import choice

    vars(choice).update(first_choices=lambda spec, capability: ())
