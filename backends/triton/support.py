"""What this backend supports, as reasons against a machine or a problem. Pure Python, needs no GPU."""

from __future__ import annotations

import sys
from importlib.util import find_spec

import numpy as np
import torch

from multigemm.backend import Availability, fused_reasons, quantised_reasons
from multigemm.backends.triton.build import triton_version
from multigemm.backends.triton.config import one_instruction
from multigemm.planning.fused import KEYWORDS
from multigemm.problem.spec import MIXED, ProblemSpec
from multigemm.settings import settings

INSTALL = "pip install 'triton>=3.6'"
MINIMUM_CAPABILITY = (8, 0)
ROWS = 2**31
"""The largest number of rows of all groups of a list or batch together."""


def imported_to_compile() -> bool:
    """Whether Triton was imported without its interpreter. Its own functions tell: the environment may be newer."""
    triton = sys.modules.get("triton")
    return triton is not None and isinstance(triton.language.sum, triton.JITFunction)


def _interpreter_reason() -> str:
    """Why the interpreter cannot be used: it replaces parts of Triton at import, so it must be requested before."""
    if imported_to_compile():
        return "triton was imported before emulation was asked for; set MULTIGEMM_EMULATE=1 before the first import"
    if _number(triton_version()) < (3, 7) and _number(np.__version__) >= (2, 4):
        return (
            f"the interpreter of triton {triton_version()} makes scalars as NumPy {np.__version__} forbids: "
            "pip install 'numpy<2.4', or 'triton>=3.7'"
        )
    return ""


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])


def availability() -> Availability:
    """Whether Triton kernels can run here: on a GPU, or in the interpreter when emulation is asked for."""
    version = triton_version()
    if not version or find_spec("triton") is None:
        return Availability(False, "the package triton is not installed", INSTALL)
    if settings().emulate:
        reason = _interpreter_reason()
        return Availability(not reason, reason, version=version, emulated=True)
    if torch.cuda.is_available():
        return Availability(True, version=version, emulated=False)
    return Availability(False, "installed, but torch sees no CUDA GPU; MULTIGEMM_EMULATE=1 runs Triton's interpreter "
                        "on CPU tensors", version=version)  # fmt: skip


def _device_reasons(device: torch.device) -> list[str]:
    if device.type == "cpu":
        if not settings().emulate:
            return ["operands are on the CPU: move them to a CUDA device, or set MULTIGEMM_EMULATE=1"]
        return [reason] if (reason := _interpreter_reason()) else []
    if device.type != "cuda":
        return [f"device type {device.type!r}: this backend runs on CUDA"]
    if settings().emulate:
        return ["MULTIGEMM_EMULATE=1 turns this process to CPU tensors; unset it to run on the GPU"]
    if torch.cuda.is_available() and (seen := torch.cuda.get_device_capability(device)) < MINIMUM_CAPABILITY:
        return [f"compute capability {seen[0]}.{seen[1]} is below 8.0, the lowest that is tested"]
    return []


def not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """The reasons against a problem; an empty list means that `plan` will work."""
    takes = ("combine", "out_rows") if spec.quantised else KEYWORDS
    if reasons := quantised_reasons(spec, takes=("float8", "weights")) + fused_reasons(spec, takes):
        return reasons
    reasons = _device_reasons(device) + spec.too_long
    if spec.batch_invariant and any(x.scale is not None and x.scale.k == MIXED for x in (spec.a, spec.b)):
        reasons.append(
            "batch_invariant=True and scales of a list that cover unlike parts of K: sums of a row would be cut as the "
            "finest one is: give all matrices blocks of one width"
        )
    if spec.total > ROWS and not spec.longest:
        reasons.append(f"up to {spec.total} rows in all groups: tiles are counted up to {ROWS} rows: split the problem")
    if spec.batch_invariant and device.type == "cuda" and torch.cuda.is_available():
        reasons += _variance_reasons(spec, torch.cuda.get_device_capability(device))
    return reasons


def _variance_reasons(spec: ProblemSpec, capability: tuple[int, int]) -> list[str]:
    """Why a row's bits could depend on its neighbours on such a GPU."""
    if one_instruction(spec, capability):
        return []
    return [
        f"batch_invariant=True on compute capability {capability[0]}.{capability[1]}: Triton multiplies large and "
        "small tiles by different instructions there, which were not measured to sum alike: use cupy or numba"
    ]
