"""CUDA C++ kernels, compiled by NVRTC through CuPy when first needed: one for every problem, fast ones for Hopper.

Importing this package imports neither CuPy nor a GPU library.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from multigemm.backend import Availability, Recipe
from multigemm.backends.cupy import choice, launch, support
from multigemm.backends.cupy.config import Config
from multigemm.problem.spec import ProblemSpec


class CupyBackend:
    """See `multigemm.backend.Backend`."""

    name = "cupy"
    batch_invariant = True

    def availability(self) -> Availability:
        return support.availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return support.not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Config]:
        return choice.candidates(spec, device)

    def plan(self, spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
        return launch.plan(spec, config, device)


BACKEND = CupyBackend()
