"""Accepts every spec on every device and launches nothing; `out` keeps whatever it held.

What remains of a call's time with this backend is the cost of multigemm itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from multigemm.backend import Availability, Launch, Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec


@dataclass(frozen=True, slots=True)
class Config:
    """There is nothing to tune about nothing."""


def _launch() -> None:
    return None


def _bind(ops: Operands) -> Launch:
    return _launch


class NullBackend:
    """The five members of a backend, none of which does any work."""

    batch_invariant = True  # what is never computed does not depend on anything

    @property
    def name(self) -> str:
        return "null"

    def availability(self) -> Availability:
        return Availability(ok=True)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return []

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return (Config(),)

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        return Recipe(
            kernel="nothing", config=config, bind=_bind, why="it computes nothing, for tests of the host path"
        )


BACKEND = NullBackend()
