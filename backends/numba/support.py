"""What this backend supports, as reasons against a machine or a problem. Imports no GPU library.

The generic kernel runs every form, dtype, stride and alignment, so most reasons concern the machine.
"""

from __future__ import annotations

import importlib.util
from functools import cache

import torch

from multigemm.backend import Availability, installed_version, quantised_reasons
from multigemm.backends.numba.config import MOST_GROUPS, a_inner_jagged, b_inner_jagged
from multigemm.cuda.operand_maps import FAR
from multigemm.planning.fused_steps import fused_reasons_in_steps, product_spec, taken_in_steps
from multigemm.problem.spec import HALVES, ProblemSpec, ScaleSpec
from multigemm.settings import settings

INSTALL = "pip install 'multigemm[numba]'"
PACKAGES = {"numba": "numba", "numba_cuda": "numba-cuda", "llvmlite": "llvmlite", "cuda.bindings": "cuda-bindings"}
MINIMUM = (7, 5)
BF16_MINIMUM = MMA_MINIMUM = (8, 0)
DOUBLE_MINIMUM = (9, 0)
"""Where mma.sync multiplies 16 x 8 float64 at once."""
TMA_ALIGN = 16
PROMOTION = 128
"""Of k: what tensor cores add up of float8 before the sum goes on in float32."""


def _missing() -> list[str]:
    missing = []
    for module, package in PACKAGES.items():
        try:
            found = importlib.util.find_spec(module) is not None
        except ModuleNotFoundError:
            found = False
        if not found:
            missing.append(package)
    return missing


@cache
def compiler_obstacle() -> str:
    """Why nothing can be compiled here: Numba needs NVVM and the linker, from wheels or a CUDA toolkit."""
    from cuda.pathfinder import DynamicLibNotFoundError, load_nvidia_dynamic_lib

    for name in ("nvvm", "nvJitLink"):
        try:
            load_nvidia_dynamic_lib(name)
        except DynamicLibNotFoundError:
            return f"lib{name} is missing: pip install 'numba-cuda[cu13]', or install a CUDA toolkit"
    return ""


@cache
def _availability(emulate: bool) -> Availability:
    missing = _missing()
    if missing:
        return Availability(False, f"not installed: {', '.join(missing)}", INSTALL)
    if not (found := installed_version("numba-cuda")):
        return Availability(False, "not installed: numba-cuda (numba's built-in CUDA target is not enough)", INSTALL)
    if emulate:
        from multigemm.backends.numba.kernels.runtime import SIMULATED

        if SIMULATED:
            return Availability(True, version=found, emulated=True)
        why = "numba was imported before multigemm; set NUMBA_ENABLE_CUDASIM=1 beside MULTIGEMM_EMULATE=1"
        return Availability(False, f"numba's CUDA simulator is off: {why}", version=found)
    if not torch.cuda.is_available():
        why = "installed, but torch sees no CUDA GPU; MULTIGEMM_EMULATE=1 runs numba's simulator on CPU tensors"
        return Availability(False, why, version=found)
    return Availability(not compiler_obstacle(), compiler_obstacle(), version=found)


def availability() -> Availability:
    """Whether Numba and a GPU (or the simulator) are available."""
    return _availability(settings().emulate)


def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability; under emulation the oldest supported one."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else MINIMUM


def not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """The reasons against this problem on this device; empty if it runs."""
    if reasons := quantised_reasons(spec, takes=("float8", "weights")) + fused_reasons_in_steps(spec):
        return reasons
    if taken_in_steps(spec):
        if device.type == "cpu":
            return ["fused keywords in Numba's simulator: the steps round a product are kernels for a GPU; use 'cpu'"]
        return not_supported_reasons(product_spec(spec), device)
    if settings().emulate:
        if device.type != "cpu":
            return [f"operands on {device}, but MULTIGEMM_EMULATE=1 runs CPU tensors only; unset it to use the GPU"]
        return []
    if device.type != "cuda":
        return [f"operands on {device}; the numba backend needs a CUDA device (or MULTIGEMM_EMULATE=1 for CPU tensors)"]
    capability, reasons = capability_of(device), []
    if capability < MINIMUM:
        reasons.append(f"compute capability {capability} is below {MINIMUM}, the oldest that CUDA 13 compiles for")
    elif capability < BF16_MINIMUM and torch.bfloat16 in {x.dtype for x in (spec.a, spec.b, spec.out)}:
        reasons.append(f"bfloat16 needs compute capability {BF16_MINIMUM}, this GPU has {capability}; use float16")
    return reasons + spec.too_long


def hopper_obstacle(spec: ProblemSpec, device: torch.device) -> str:
    """Why the Hopper kernel cannot run this; "" if it can."""
    if capability_of(device)[0] != 9:
        return f"needs compute capability 9.x, this GPU has {capability_of(device)}"
    return operand_obstacle(spec)


def operand_obstacle(spec: ProblemSpec) -> str:
    """Why TMA and wgmma cannot read these operands; "" if they can."""
    if _dtype_obstacle(spec):
        return _dtype_obstacle(spec)
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if operand.order == "strided" or not operand.dense:
            return f"{name} is not contiguous in one direction, which TMA needs"
        if operand.align < TMA_ALIGN:
            return f"{name} is aligned to {operand.align} bytes, TMA needs {TMA_ALIGN}"
    if a_inner_jagged(spec) or b_inner_jagged(spec):
        return "offsets cut the contiguous direction of an operand, where TMA needs aligned starts"
    if spec.compute == torch.float32 and (spec.a.order != "row" or spec.b.order != "col"):
        return "tf32 operands of wgmma must be contiguous along k"
    return _number_obstacle(spec)


def _number_obstacle(spec: ProblemSpec) -> str:
    """Why a group's k or the number of groups is too large for the Hopper kernels; "" if neither is."""
    if spec.form == "jagged_k" and spec.total > FAR:
        return f"a group's k may be up to {spec.total}: tensor maps of a jagged k reach {FAR}"
    return f"{spec.groups} groups: a tile's record numbers {MOST_GROUPS}" if spec.groups > MOST_GROUPS else ""


def float8_obstacle(spec: ProblemSpec, device: torch.device) -> str:
    """Why the Hopper kernel for float8 cannot run this; "" if it can."""
    if capability_of(device)[0] != 9:
        return f"needs compute capability 9.x, this GPU has {capability_of(device)}"
    if spec.quantised != "float8" or spec.form in ("per_group", "jagged_k"):
        kind = f"{spec.form} of {spec.a.dtype} x {spec.b.dtype}"
        return f"{kind}: it takes float8 on both sides in jagged m and n, batched and masked"
    for name, operand, order in (("a", spec.a, "row"), ("b", spec.b, "col")):
        if operand.order != order or not operand.dense or operand.align < TMA_ALIGN:
            seen = f"{name} is contiguous by {operand.order}, {operand.align}-byte aligned, dense={operand.dense}"
            return f"{seen}: wgmma takes float8 contiguous along k, TMA takes lines at multiples of {TMA_ALIGN} bytes"
        if reason := _scale_obstacle(name, operand.scale):
            return reason
    return _number_obstacle(spec)


def _scale_obstacle(name: str, scale: ScaleSpec | None) -> str:
    """Why the Hopper kernel for float8 cannot read this scale; "" if it can."""
    if scale is None:
        return ""
    if scale.dtype is not torch.float32 or scale.align < scale.dtype.itemsize:
        return f"scale_{name} in {scale.dtype}, aligned to {scale.align} bytes: it takes aligned float32"
    if scale.k not in (0, PROMOTION):
        return f"scale_{name} covers {scale.k} of k: sums are promoted after {PROMOTION}"
    return ""


def mma_obstacle(spec: ProblemSpec, device: torch.device) -> str:
    """Why the sm_80 kernel cannot run this; "" if it can."""
    if capability_of(device) < MMA_MINIMUM:
        return f"needs compute capability {MMA_MINIMUM}, this GPU has {capability_of(device)}"
    if spec.compute == torch.float64 and capability_of(device) < DOUBLE_MINIMUM:
        return f"float64 needs compute capability {DOUBLE_MINIMUM}, this GPU has {capability_of(device)}"
    return ""


def _dtype_obstacle(spec: ProblemSpec) -> str:
    if spec.compute in HALVES or (spec.compute == torch.float32 and spec.precision == "tf32"):
        return ""
    return f"{spec.compute} with precision={spec.precision!r} does not run on these tensor cores"
