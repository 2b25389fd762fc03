"""The backend's five members: spec and config in, a `Recipe` out."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from multigemm.backend import Availability, Recipe
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import direct, hopper, packing, portable, small, support
from multigemm.backends.cupy.config import Config
from multigemm.errors import InvalidSetting
from multigemm.spec import ProblemSpec


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
        sms = torch.cuda.get_device_properties(index).multi_processor_count
        if config.kernel == "hopper":
            function = hopper.prepare(spec, config, index)
            return Recipe("hopper", config, partial(hopper.bind, config=config, function=function), "TMA and wgmma")
        if config.kernel in ("packed", "direct"):
            room = packing if config.kernel == "packed" else direct
            bind = partial(room.bind, config=config, functions=room.prepare(spec, config, index), sms=sms)
            name, what = {
                "packed": ("packed+hopper", "operands are copied first"),
                "direct": ("direct", "weights are shifted into place as they are read"),
            }[config.kernel]
            return Recipe(name, config, bind, f"{what}: {'; '.join(configs.hopper_reasons(spec))}")
        if config.kernel == "small":
            bind = partial(small.bind, config=config, function=small.prepare(spec, config, index))
            return Recipe("small", config, bind, "one thread block per tile, without a schedule")
        why = "; ".join(configs.hopper_reasons(spec)) or "chosen by config"
        bind = partial(portable.bind, config=config, function=portable.prepare(spec, config, index), sms=sms)
        return Recipe("portable", config, bind, f"any strides, alignment and size ({why})")
