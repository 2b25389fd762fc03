"""What this backend can run, said beforehand and in words. Pure Python: it answers on a laptop."""

from __future__ import annotations

import importlib.util

import torch

from multigemm.backend import Availability
from multigemm.problem.spec import INPUT_DTYPES, ProblemSpec

OLDEST = (8, 0)
RESULTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32)
INSTALL = "pip install cupy-cuda13x  (cupy-cuda12x for CUDA 12)"


def availability() -> Availability:
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


def not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
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
