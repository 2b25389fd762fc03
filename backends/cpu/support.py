"""What the cpu backend supports: everything, if the operands are in host memory."""

from __future__ import annotations

import torch

from multigemm.backend import Availability, quantised_reasons
from multigemm.problem.spec import ACTIVATIONS, FLOAT8, GATES, INPUT_DTYPES, ProblemSpec


def availability() -> Availability:
    """Always available, because torch is."""
    return Availability(ok=True, version=torch.__version__)


def not_supported_reasons(spec: ProblemSpec, device: torch.device) -> list[str]:
    """The reasons against this problem on this device; empty if it runs."""
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
    known = (*ACTIVATIONS, *GATES)
    if spec.activation is not None and spec.activation not in known:
        reasons.append(f"activation {spec.activation!r} is unknown here: use one of {', '.join(known)}")
    return reasons
