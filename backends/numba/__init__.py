"""Numba CUDA: every form and dtype on plain cores, and tensor cores from pure Python.

Importing this package imports neither Numba nor a GPU library; a plan does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multigemm.backend import Availability, Recipe
from multigemm.backends.numba import support
from multigemm.backends.numba.choice import candidates, why
from multigemm.problem.spec import ProblemSpec


class NumbaBackend:
    """See `multigemm.backend.Backend`."""

    batch_invariant = True

    @property
    def name(self) -> str:
        return "numba"

    def availability(self) -> Availability:
        return support.availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return support.not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return candidates(spec, device)

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        from multigemm.backends.numba.launch import plan

        return plan(spec, config, device, why(config, spec, device))


BACKEND = NumbaBackend()
