"""The null backend: accepts every spec on every device and launches nothing. `out` keeps its contents.

The time of a call with this backend is the host's time in multigemm itself.
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
    """Nothing can be chosen."""


def _bind(ops: Operands) -> Launch:
    return NOTHING


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """A recipe that does not touch `out`."""
    return Recipe("nothing", config, _bind, "it computes nothing, for tests of the host path")


BACKEND = BuiltinBackend(
    "null",
    availability=lambda: Availability(ok=True),
    not_supported_reasons=lambda spec, device: [],
    configs=lambda spec, device: (Config(),),
    plan=plan,
)
