"""What the cpu backend can do, declared without doing it: everything, as long as the memory is the host's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from multigemm.backend import Availability, Recipe, quantised_reasons
from multigemm.backends.cpu.config import Config, candidates, invalid_reasons
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import ACTIVATIONS, FLOAT8, INPUT_DTYPES, ProblemSpec


class CpuBackend:
    """The five members. Planning is cheap: nothing is compiled."""

    batch_invariant = True

    @property
    def name(self) -> str:
        return "cpu"

    def availability(self) -> Availability:
        return Availability(ok=True, version=torch.__version__)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        reasons = quantised_reasons(spec, takes=("float8", "weights"))
        if device.type != "cpu":
            reasons.append(
                f"the operands are on {device}, but this backend works in host memory: move them (torch: .cpu(), "
                "CuPy: .get())"
            )
        if spec.compute not in (*INPUT_DTYPES, *FLOAT8):
            reasons.append(f"compute dtype {spec.compute} is unknown: use one of {', '.join(map(str, INPUT_DTYPES))}")
        if spec.compute == torch.int8 and spec.out.dtype != torch.int32:
            reasons.append(f"int8 products are int32, and out is {spec.out.dtype}: use out_dtype=torch.int32")
        if spec.activation is not None and spec.activation not in ACTIVATIONS:
            reasons.append(f"activation {spec.activation!r} is unknown here: use one of {', '.join(ACTIVATIONS)}")
        return reasons

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Config]:
        return candidates(spec)

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        from multigemm.backends.cpu.launch import recipe

        if not isinstance(config, Config):
            raise InvalidSetting(f"the cpu backend takes its own Config, not {type(config).__name__}")
        if reasons := invalid_reasons(config, spec):
            raise InvalidSetting(f"{config}: {'; '.join(reasons)}")
        return recipe(spec, config)
