"""spec + config -> Recipe: which of the ways to launch takes a problem."""

from __future__ import annotations

import torch

from multigemm.backend import Recipe
from multigemm.backends.triton.candidates import pointer_candidates
from multigemm.backends.triton.compile import KernelSource
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.generic_launch import generic_sources, plan_generic
from multigemm.backends.triton.hopper_launch import hopper_sources, plan_hopper
from multigemm.backends.triton.list_launch import (
    list_sources,
    plan_map_list,
    plan_pointer_list,
    pointer_list_sources,
)
from multigemm.cuda.device import index_of
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import ProblemSpec


def sources_of(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """All kernels that problems of this spec may run with this config, by name."""
    if spec.form == "per_group":
        return list_sources(spec, config) if config.kernel == "hopper" else pointer_list_sources(spec, config)
    return hopper_sources(spec, config) if config.kernel == "hopper" else generic_sources(spec, config)


def plan(spec: ProblemSpec, config: Config, device: torch.device, why: str) -> Recipe:
    """Compiles (or loads) the kernels of a spec; binding a problem then only lays out arguments."""
    if device.type == "cpu":
        if config.kernel == "hopper":
            raise InvalidSetting(f"{config} runs on a GPU, and operands are on the CPU: use kernel='pointer' there")
        from multigemm.backends.triton.emulate import bind_emulated

        return Recipe("pointer (interpreted)", config, lambda ops: bind_emulated(ops, config), why)
    index, listed = index_of(device), spec.form == "per_group"
    plan_pointer = plan_pointer_list if listed else plan_generic
    if config.kernel != "hopper":
        return plan_pointer(spec, config, index, why)
    plan_maps = plan_map_list if listed else plan_hopper
    return plan_maps(
        spec, config, index, why, lambda: plan_pointer(spec, pointer_candidates(spec)[0], index, "strides")
    )
