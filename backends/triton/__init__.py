"""The Triton backend: persistent kernels written in Triton, launched without Triton's dispatcher.

Importing this package imports neither Triton nor a GPU library.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from multigemm.backend import Availability, Recipe
from multigemm.backends.triton import candidates as ranked
from multigemm.backends.triton import config as configs_of
from multigemm.backends.triton import support
from multigemm.backends.triton.config import Config
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import ProblemSpec

__all__ = ["BACKEND", "Config", "TritonBackend"]


class TritonBackend:
    """The five members of the Backend protocol."""

    name = "triton"
    batch_invariant = True

    def availability(self) -> Availability:
        return support.availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return support.not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Config]:
        if device.type == "cpu":
            short = configs_of.INVARIANT.block_k
            return [replace(c, block_k=short) if configs_of.variance(c, spec) else c for c in ranked.emulated()]
        found = ranked.candidates(spec, torch.cuda.get_device_capability(device))
        properties = torch.cuda.get_device_properties(device)
        limit = getattr(properties, "shared_memory_per_block_optin", configs_of.SHARED_LIMIT)
        return [config for config in found if configs_of.shared_memory(config, spec) <= limit]

    def plan(self, spec: ProblemSpec, config: Config | None, device: torch.device) -> Recipe:
        from multigemm.backends.triton import launch

        if config is None:
            return launch.plan(spec, self.configs(spec, device)[0], device, "heuristic")
        if problem := configs_of.problem_with(config, spec):
            raise InvalidSetting(f"{config} cannot run this problem: {problem}")
        return launch.plan(spec, config, device, "given")


BACKEND = TritonBackend()
