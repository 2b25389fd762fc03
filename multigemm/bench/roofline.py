"""The two ceilings of a machine, measured in the same run as everything that is held against them."""

from __future__ import annotations

from functools import partial

import torch

from multigemm.bench.workloads import DTYPES, Rates
from multigemm.errors import MultigemmError
from multigemm.select.timing import measure

DENSE_SIZES = {"cuda": (4096, 8192), "cpu": (512, 1024)}
COPY_BYTES = {"cuda": 1 << 30, "cpu": 1 << 27}


def dense_tflops(device: torch.device, dtype: str) -> float:
    """The best that torch.mm reaches on large square products of random data."""
    best = 0.0
    for n in DENSE_SIZES[device.type]:
        values = torch.randn(2, n, n, device=device)
        whole = dtype == "int8"
        a, b = (values * 3).to(torch.int8) if whole else values.to(DTYPES[dtype])
        call = partial(torch._int_mm, a, b) if whole else partial(torch.mm, a, b, out=torch.empty_like(a))
        with _Tf32(dtype == "tf32"):
            taken = measure({"dense": call}, device, reps=20, min_reps=5, budget_ms=60.0)["dense"]
        if taken.ok:
            best = max(best, 2 * n**3 / taken.median / 1e6)
    return best


def copy_tbps(device: torch.device) -> float:
    """Bytes read plus bytes written by a large copy; raises MultigemmError where it cannot run."""
    source = torch.randint(0, 255, (COPY_BYTES[device.type],), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    taken = measure({"copy": lambda: target.copy_(source)}, device, reps=20, min_reps=5, budget_ms=60.0)["copy"]
    if not taken.ok:
        raise MultigemmError(f"the copy that gives the ceiling of memory failed: {taken.error}")
    return 2 * source.numel() / taken.median / 1e6


def measured_rates(device: torch.device, dtypes: set[str]) -> dict[str, Rates]:
    """The ceilings for each dtype that occurs."""
    bandwidth = copy_tbps(device)
    return {dtype: Rates(dense_tflops(device, dtype), bandwidth) for dtype in sorted(dtypes)}


class _Tf32:
    """Lets torch use tf32 inside, and puts the user's choice back."""

    def __init__(self, allowed: bool) -> None:
        self.allowed = allowed

    def __enter__(self) -> None:
        self.before = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high" if self.allowed else "highest")

    def __exit__(self, *_: object) -> None:
        torch.set_float32_matmul_precision(self.before)
