"""cuBLAS as torch carries it: every way that the vendor offers, behind one name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multigemm.backend import Availability, Recipe
from multigemm.problem.spec import ProblemSpec


class CublasBackend:
    """The five members; all work is imported on first use."""

    name = "cublas"
    batch_invariant = True
    decides_at_bind = True  # and planning costs nothing: `multigemm tune` measures with the sizes in either place

    def availability(self) -> Availability:
        from multigemm.backends.cublas.support import availability

        return availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        from multigemm.backends.cublas.support import not_supported_reasons

        return not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        from multigemm.backends.cublas.config import candidates

        return candidates(spec, device)

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        from multigemm.backends.cublas.launch import plan

        return plan(spec, config, device)


BACKEND = CublasBackend()
