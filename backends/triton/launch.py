"""The backend's five members: spec and config in, a `Recipe` out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from multigemm.backend import Availability, Recipe
from multigemm.backends.triton import choice, generic, hopper, lists, support
from multigemm.backends.triton import config as configs
from multigemm.backends.triton.build import KernelSource
from multigemm.backends.triton.config import Config
from multigemm.cuda.device import index_of
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import ProblemSpec


class TritonBackend:
    """Persistent kernels written in Triton, launched without Triton's dispatcher."""

    name = "triton"
    batch_invariant = True

    def availability(self) -> Availability:
        """Whether Triton kernels can run here."""
        return support.availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        """Every reason against this problem on this device."""
        return support.not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Config]:
        """Valid configs, the best guess first."""
        if device.type == "cpu":
            short = configs.INVARIANT.block_k
            return [replace(c, block_k=short) if configs.variance(c, spec) else c for c in choice.emulated()]
        found = choice.candidates(spec, torch.cuda.get_device_capability(device))
        properties = torch.cuda.get_device_properties(device)
        limit = getattr(properties, "shared_memory_per_block_optin", configs.SHARED_LIMIT)
        return [config for config in found if configs.shared_memory(config, spec) <= limit]

    def plan(self, spec: ProblemSpec, config: Config | None, device: torch.device) -> Recipe:
        """Compiles (or loads) the kernels of a spec; binding a problem then only lays out arguments."""
        why = "heuristic" if config is None else "given"
        if config is None:
            config = self.configs(spec, device)[0]
        elif problem := configs.problem_with(config, spec):
            raise InvalidSetting(f"{config} cannot run this problem: {problem}")
        if device.type == "cpu":
            return _emulated(spec, config, why)
        return _loaded(spec, config, index_of(device), why)


def _emulated(spec: ProblemSpec, config: Config, why: str) -> Recipe:
    if config.kernel == "hopper":
        raise InvalidSetting(f"{config} runs on a GPU, and operands are on the CPU: use kernel='pointer' there")
    from multigemm.backends.triton.emulate import bind_emulated

    sums = generic.sums_sizes(spec)
    return Recipe("pointer (interpreted)", config, lambda ops: bind_emulated(ops, config), why, sums_sizes=sums)


def _loaded(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    plan_generic = lists.plan_generic_list if spec.form == "per_group" else generic.plan_generic
    if config.kernel != "hopper":
        return plan_generic(spec, config, index, why)
    plan_hopper = lists.plan_hopper_list if spec.form == "per_group" else hopper.plan_hopper
    return plan_hopper(
        spec, config, index, why, lambda: plan_generic(spec, choice.pointer_candidates(spec)[0], index, "strides")
    )


def sources_of(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """All kernels that problems of this spec may run with this config, by name."""
    if spec.form == "per_group":
        return (lists.hopper_list_sources if config.kernel == "hopper" else lists.generic_list_sources)(spec, config)
    return (hopper.hopper_sources if config.kernel == "hopper" else generic.generic_sources)(spec, config)
