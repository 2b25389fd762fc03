"""Plans a spec with a config: compiles and loads kernels, whose modules then bind problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from multigemm.backend import Launch, Recipe, cannot_run
from multigemm.backends.cupy import (
    choice,
    fused,
    generic,
    hopper,
    hopper_fp8,
    hopper_shift_b,
    hopper_weights,
    quantised,
    small,
    small_list,
    support,
)
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.build import Source, load_all
from multigemm.backends.cupy.config import Config
from multigemm.cuda.device import index_of
from multigemm.planning.fused import kernel_text, products_spec
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec


class LoadedKernel(Protocol):
    """A kernel loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None: ...

    def bind(self, ops: Operands) -> Launch: ...


class KernelFamily(NamedTuple):
    """The interface of a kernel's module: the sources that a spec and a config need, and the loaded kernel."""

    sources: Callable[[ProblemSpec, Config], tuple[Source, ...]]
    loaded: type[LoadedKernel]


def _alone(
    source: Callable[[ProblemSpec, Config], Source],
) -> Callable[[ProblemSpec, Config], tuple[Source, ...]]:
    """The sources of a kernel that is launched without any other."""
    return lambda spec, config: (source(spec, config),)


KERNELS: dict[str, KernelFamily] = {
    "hopper": KernelFamily(_alone(hopper.source), hopper.Hopper),
    "packed": KernelFamily(hopper.copied_sources, hopper.CopiedHopper),
    "hopper_shift_a": KernelFamily(hopper_shift_b.sources, hopper_shift_b.HopperShiftB),
    "hopper_shift_b": KernelFamily(hopper_shift_b.sources, hopper_shift_b.HopperShiftB),
    "small": KernelFamily(_alone(small.source), small.Small),
    "small_list": KernelFamily(small_list.sources, small_list.SmallList),
    "generic": KernelFamily(_alone(generic.source), generic.Generic),
    "quantised": KernelFamily(_alone(quantised.source), quantised.Quantised),
    "hopper_gather": KernelFamily(_alone(hopper.source), hopper.Hopper),
    "gathered": KernelFamily(hopper.gathered_sources, hopper.GatheredHopper),
    "hopper_fp8": KernelFamily(hopper_fp8.sources, hopper_fp8.HopperFp8),
    "hopper_weights": KernelFamily(_alone(hopper_weights.source), hopper_weights.HopperWeights),
}


def plan(spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
    """Compiles and loads the kernels of `spec`. Sizes, strides and addresses come in at `bind`."""
    given, spec = spec, products_spec(spec)
    index = index_of(device)
    capability = torch.cuda.get_device_capability(index)
    if config == choice.heuristic(spec, capability):
        _load_layout(replace(spec, total=0, groups=1, largest=0), capability, index)
    elif not configs.is_valid(config, spec, capability):
        raise cannot_run(config, _obstacle(config, spec, capability))
    load_all(KERNELS[config.kernel].sources(spec, config), index)
    name = {"packed": "packed+hopper", "gathered": "gather, then hopper"}.get(config.kernel, config.kernel)
    bind = fused.summed(given, KERNELS[config.kernel].loaded(spec, config, index).bind, index)
    return Recipe(kernel_text(name, given), config, bind, why(spec, config))


def _obstacle(config: Config, spec: ProblemSpec, capability: tuple[int, int]) -> str:
    """Why the config's kernel, or batch invariance, rules the config out; "" where it is not known."""
    reasons = configs.reasons_against(config.kernel, spec)
    if not reasons and (config.kernel != "generic" or config.tile in configs.shapes_of(spec)):
        reasons = [configs.variance(config, spec, capability)]
    return "; ".join(reasons)


@lru_cache(maxsize=1024)
def _load_layout(spec: ProblemSpec, capability: tuple[int, int], index: int) -> None:
    """Compiles and loads every kernel that the heuristic may choose for a layout, whatever the tokens and groups.

    Otherwise each call with new sizes could stall for seconds to compile another kernel.
    """
    wanted = choice.first_choices(spec, capability)
    load_all([source for c in wanted for source in KERNELS[c.kernel].sources(spec, c)], index)


def why(spec: ProblemSpec, config: Config) -> str:
    """What the kernel is good for, and why it is not the fastest one."""
    fastest = {"float8": support.fp8_reasons, "weights": support.weights_reasons}.get(
        spec.quantised, support.hopper_reasons
    )
    fused_parts = [] if spec.fused is None else ["rows picked by index, a gate, preact_out or row_scale"]
    obstacle = "; ".join(fused_parts + fastest(spec)) or "chosen by config"
    if config.kernel == "hopper_shift_b" and support.weights_of(spec).wide:
        obstacle += "; by the generic kernel where groups of 2^31 elements lie no whole number of lines apart"
    what = {
        "hopper": "TMA and wgmma",
        "gathered": "picked rows are copied first, then TMA and wgmma",
        "hopper_gather": "TMA and wgmma, picked rows copied by two warps",
        "packed": f"operands are copied first: {obstacle}",
        "hopper_shift_a": f"rows are shifted into place as they are read: {obstacle}",
        "hopper_shift_b": f"weights are shifted into place as they are read: {obstacle}",
        "small_list": "one thread block per tile, laid out by the host",
        "small": "one thread block per tile, without a schedule",
        "hopper_fp8": "TMA and wgmma of float8, sums promoted every 128 of k",
        "hopper_weights": "TMA and wgmma, codes become numbers in registers",
        "quantised": f"any quantised operands, exact in tf32 ({obstacle})",
        "generic": f"any strides, alignment and size ({obstacle})",
    }[config.kernel]
    return f"{what}; batch invariant: {configs.summation_of(config, spec)}" if spec.batch_invariant else what
