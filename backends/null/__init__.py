"""Accepts every spec on every device and launches nothing; `out` keeps whatever it held.

What remains of a call's time with this backend is the cost of multigemm itself.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from multigemm.backend import Availability, BuiltinBackend, Launch, Recipe
from multigemm.cuda.launch import NOTHING
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec


@dataclass(frozen=True, slots=True)
class Config:
    """There is nothing to tune about nothing."""


def _bind(ops: Operands) -> Launch:
    return NOTHING


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """A recipe that leaves `out` alone."""
    return Recipe("nothing", config, _bind, "it computes nothing, for tests of the host path")


BACKEND = BuiltinBackend(
    "null",
    availability=lambda: Availability(ok=True),
    not_supported_reasons=lambda spec, device: [],
    configs=lambda spec, device: (Config(),),
    plan=plan,
)
