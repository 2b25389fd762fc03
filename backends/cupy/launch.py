"""The backend's five members: spec and config in, a `Recipe` out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch

from multigemm.backend import Availability, Launch, Recipe
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import direct, family, hopper, packing, portable, small, specs, support, wave
from multigemm.backends.cupy.config import Config
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec

ROOMS: dict[str, Any] = {
    "hopper": hopper,
    "packed": packing,
    "direct": direct,
    "small": small,
    "wave": wave,
    "portable": portable,
}
SPREADS = ("packed", "direct", "portable", "wave")
"""Kernels whose grid follows the number of processors."""


class CupyBackend:
    """CUDA C++ kernels, compiled by NVRTC through CuPy when a problem first needs them."""

    name = "cupy"

    def availability(self) -> Availability:
        """Whether CuPy, its compiler and a GPU are here."""
        return support.availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        """Every reason against this problem on this device."""
        return support.not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Config]:
        """Valid configs, the best guess first."""
        return configs.candidates(spec, device)

    def plan(self, spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
        """Compiles and loads what `spec` needs; sizes, strides and addresses come in at `bind`."""
        if not configs.is_valid(config, spec, torch.cuda.get_device_capability(device)):
            raise InvalidSetting(f"{config} cannot run {spec}")
        index = device.index if device.index is not None else torch.cuda.current_device()
        capability = torch.cuda.get_device_capability(device)
        if config == configs.heuristic(spec, capability):
            family.prepare_all(family.members(spec, capability), partial(_prepare, spec, index=index))
        known = [config, _prepare(spec, config, index=index)]
        if config.kernel in SPREADS:
            known.append(torch.cuda.get_device_properties(index).multi_processor_count)
        name, room = "packed+hopper" if config.kernel == "packed" else config.kernel, ROOMS[config.kernel]

        def bind(ops: Operands) -> Launch:
            launch: Launch = room.bind(ops, *known)
            return launch

        return Recipe(name, config, bind, _why(spec, config))


def _prepare(spec: ProblemSpec, config: Config, *, index: int) -> Any:
    """Compiles (or finds) and loads the kernels of a config."""
    with torch.cuda.device(index):  # a thread of its own has no current device yet
        return ROOMS[config.kernel].prepare(spec, config, index)


def _why(spec: ProblemSpec, config: Config) -> str:
    """What the kernel is good for, and why not the fastest one."""
    obstacle = "; ".join(specs.hopper_reasons(spec)) or "chosen by config"
    if config.kernel == "direct" and specs.weights_of(spec).wide:
        obstacle += "; by the portable kernel where groups of 2^31 elements lie no whole number of lines apart"
    return {
        "hopper": "TMA and wgmma",
        "packed": f"operands are copied first: {obstacle}",
        "direct": f"weights are shifted into place as they are read: {obstacle}",
        "wave": "one thread block per tile, laid out by the host",
        "small": "one thread block per tile, without a schedule",
        "portable": f"any strides, alignment and size ({obstacle})",
    }[config.kernel]
