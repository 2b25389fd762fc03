"""A backend under test, and which of its configs runs.

A backend is asked through the protocol alone, so that third parties' backends and planted faults are
judged by the same code as our own. `configs(spec)` of a backend names what suits the sizes of a spec;
what else it would choose for larger problems of the same kind is valid for small ones too, and small
problems are what a campaign draws. `shipped` names all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from multigemm.backend import Backend, Recipe
from multigemm.errors import BackendUnsupported, InvalidSetting
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry

LIBRARIES = ("cpu", "cublas")
"""Backends whose kernels a vendor's library picks by shape, so that a row's bits may depend on its neighbours."""

ROWS = (16, 64, 256, 1024, 8192)
COLUMNS = (64, 4096)
KEPT = 2000
"""Recipes that one subject remembers."""


def kind_of(spec: ProblemSpec) -> ProblemSpec:
    """The spec without its sizes; only whether an extent is zero remains."""
    m, n, k = (None if extent is None else min(extent, 1) for extent in (spec.m, spec.n, spec.k))
    groups, total, largest = (min(count, 1) for count in (spec.groups, spec.total, spec.largest))
    return replace(spec, groups=groups, m=m, n=n, k=k, total=total, largest=largest, longest=0)


def _larger(spec: ProblemSpec) -> list[ProblemSpec]:
    """The same kind of problem with other sizes."""
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
    kind share their compiled kernels; after `force` no other one is tried. `adapt` may change a config before
    it is planned."""

    def __init__(
        self, backend: str | Backend, config: int | str = 0, *, adapt: Callable[[Any], Any] | None = None
    ) -> None:
        self.backend: Backend = registry.get(backend) if isinstance(backend, str) else backend
        self.config, self.adapt = config, adapt
        self._pinned: Any = None
        self._forced: Any = None
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
        return [*registry.unkept_promises(self.backend, spec), *self.backend.not_supported_reasons(spec, device)]

    def pin(self, config: Any) -> None:
        """Keeps a config for all that follow; None: no longer."""
        self._pinned = config

    def force(self, config: Any) -> None:
        """Runs everything under a config; a spec that it is not valid for cannot be planned."""
        self._forced = config

    def recipe(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        """The recipe for a spec under the chosen config; made once."""
        key = (spec, device)
        if key not in self._recipes:
            if len(self._recipes) > KEPT:
                self._recipes.clear()
            self._recipes[key] = self._made(spec, device)
        return self._recipes[key]

    def _made(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        if self._forced is not None:
            return self.backend.plan(spec, self._forced, device)
        if self._pinned is not None:  # also where it is shipped for other sizes only
            try:
                return self.backend.plan(spec, self._pinned, device)
            except (InvalidSetting, BackendUnsupported):  # not for this very problem: another one is
                pass
        config = self._chosen(spec, device)
        if config is not None and config not in self._ran:
            self._ran.append(config)
        return self._plan(spec, config, device)

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

    def _plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        if self.adapt is not None:
            try:
                return self.backend.plan(spec, self.adapt(config), device)
            except InvalidSetting:  # the adapted config is not valid for this spec: the given one is
                pass
        return self.backend.plan(spec, config, device)
