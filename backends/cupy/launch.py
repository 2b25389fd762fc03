"""The backend's five members: spec and config in, a `Recipe` out."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple, Protocol

import torch

from multigemm.backend import Availability, Launch, Recipe
from multigemm.backends.cupy import choice, direct, hopper, packing, portable, small, specs, wave
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.build import Source, load_all
from multigemm.backends.cupy.config import Config
from multigemm.cuda.device import index_of
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.problem.spec import INPUT_DTYPES, ProblemSpec

OLDEST = (8, 0)
RESULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)
INSTALL = "pip install cupy-cuda13x  (cupy-cuda12x for CUDA 12)"


class LoadedKernel(Protocol):
    """A kernel, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None: ...

    def bind(self, ops: Operands) -> Launch: ...


class KernelFamily(NamedTuple):
    """What a kernel's module offers: all sources that a spec and a config need, and the loaded kernel."""

    sources: Callable[[ProblemSpec, Config], tuple[Source, ...]]
    loaded: type[LoadedKernel]


KERNELS: dict[str, KernelFamily] = {
    "hopper": KernelFamily(hopper.sources, hopper.Hopper),
    "packed": KernelFamily(packing.sources, packing.Packing),
    "direct": KernelFamily(direct.sources, direct.Direct),
    "small": KernelFamily(small.sources, small.Small),
    "wave": KernelFamily(wave.sources, wave.Wave),
    "portable": KernelFamily(portable.sources, portable.Portable),
}


class CupyBackend:
    """CUDA C++ kernels, compiled by NVRTC through CuPy when a problem first needs them."""

    name = "cupy"
    batch_invariant = True

    def availability(self) -> Availability:
        """Whether CuPy, its compiler and a GPU are here."""
        return _availability()

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        """Every reason against this problem on this device."""
        return _not_supported_reasons(spec, device)

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Config]:
        """Valid configs, the best guess first."""
        return choice.candidates(spec, device)

    def plan(self, spec: ProblemSpec, config: Config, device: torch.device) -> Recipe:
        """Compiles and loads what `spec` needs; sizes, strides and addresses come in at `bind`."""
        index = index_of(device)
        capability = torch.cuda.get_device_capability(index)
        if config == choice.heuristic(spec, capability):
            _load_layout(replace(spec, total=0, groups=1, largest=0), capability, index)
        elif not configs.is_valid(config, spec, capability):
            raise InvalidSetting(f"{config} cannot run {spec}{_variance(config, spec, capability)}")
        load_all(KERNELS[config.kernel].sources(spec, config), index)
        name = "packed+hopper" if config.kernel == "packed" else config.kernel
        return Recipe(name, config, KERNELS[config.kernel].loaded(spec, config, index).bind, _why(spec, config))


def _variance(config: Config, spec: ProblemSpec, capability: tuple[int, int]) -> str:
    """What batch invariance has against a config, to end a sentence with."""
    known = config.kernel != "portable" or config.tile in configs.shapes_of(spec)
    reason = configs.variance(config, spec, capability) if known else ""
    return f": {reason}" if reason else ""


@lru_cache(maxsize=1024)
def _load_layout(spec: ProblemSpec, capability: tuple[int, int], index: int) -> None:
    """Compiles and loads all kernels that the heuristic may choose for a layout, whatever its tokens and groups.

    Calls of other sizes would stall for seconds if each compiled what it is the first to need.
    """
    wanted = choice.first_choices(spec, capability)
    load_all((source for c in wanted for source in KERNELS[c.kernel].sources(spec, c)), index)


def _why(spec: ProblemSpec, config: Config) -> str:
    """What the kernel is good for, and why not the fastest one."""
    obstacle = "; ".join(specs.hopper_reasons(spec)) or "chosen by config"
    if config.kernel == "direct" and specs.weights_of(spec).wide:
        obstacle += "; by the portable kernel where groups of 2^31 elements lie no whole number of lines apart"
    what = {
        "hopper": "TMA and wgmma",
        "packed": f"operands are copied first: {obstacle}",
        "direct": f"weights are shifted into place as they are read: {obstacle}",
        "wave": "one thread block per tile, laid out by the host",
        "small": "one thread block per tile, without a schedule",
        "portable": f"any strides, alignment and size ({obstacle})",
    }[config.kernel]
    return f"{what}; batch invariant: {configs.summation_of(config, spec)}" if spec.batch_invariant else what


def _availability() -> Availability:
    """Whether CuPy, its compiler and a GPU are here."""
    if importlib.util.find_spec("cupy") is None:
        return Availability(False, "the package cupy is not installed", INSTALL)
    if not torch.cuda.is_available():
        return Availability(False, "torch sees no CUDA GPU: it takes a CUDA build of torch on a machine with one")
    try:
        import cupy
        from cupy.cuda import nvrtc

        nvrtc.getVersion()
    except (ImportError, OSError, RuntimeError) as error:
        return Availability(False, f"cupy does not import: {error}", INSTALL)
    return Availability(True, version=str(cupy.__version__))


def _not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """Every reason against this problem on this device; none means that it runs."""
    reasons = []
    if device.type != "cuda":
        reasons.append(f"the operands are on {device}; this backend runs on CUDA devices: move them with .cuda()")
    elif torch.cuda.is_available() and torch.cuda.get_device_capability(device) < OLDEST:
        seen = ".".join(map(str, torch.cuda.get_device_capability(device)))
        reasons.append(f"{device} has compute capability {seen}; the kernels need 8.0 or later: use another backend")
    if spec.compute not in INPUT_DTYPES:
        reasons.append(
            f"products of {spec.compute} are not implemented; cast to one of {', '.join(map(str, INPUT_DTYPES))}"
        )
    if spec.out.dtype not in RESULTS:
        reasons.append(
            f"results of {spec.out.dtype} are not implemented; ask for one of {', '.join(map(str, RESULTS))}"
        )
    if (spec.compute == torch.int8) != (spec.out.dtype == torch.int32):
        reasons.append(f"{spec.compute} gives {spec.out.dtype}: int8 operands give int32 results, and no others do")
    return reasons + spec.too_long
