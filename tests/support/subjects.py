"""Backends under test with configs that no campaign gives them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from multigemm.backend import Backend, Recipe
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import ProblemSpec
from multigemm.testing import Subject


class Forced(Subject):
    """Runs everything under one config; a spec for which that is not valid cannot be planned."""

    def __init__(self, backend: str | Backend, only: Any) -> None:
        super().__init__(backend)
        self.only = only

    def planned(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        return self.backend.plan(spec, self.only, device)


class Adapted(Subject):
    """Changes a config before it is planned, wherever the changed one is valid for the spec."""

    def __init__(self, backend: str | Backend, adapt: Callable[[Any], Any]) -> None:
        super().__init__(backend)
        self.adapt = adapt

    def planned(self, spec: ProblemSpec, device: torch.device) -> Recipe:
        try:
            return self.backend.plan(spec, self.adapt(self.configs(spec, device)[0]), device)
        except InvalidSetting:
            return super().planned(spec, device)
