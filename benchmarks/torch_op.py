"""Host time of the torch operator beside that of a plan, and beside torch's own grouped_mm: what an eager call costs.

    python benchmarks/torch_op.py --backends cupy,triton,numba,cublas,auto

A small problem on a GPU, no gradients; the least over 40 rounds of 100 calls, the device idle at the start of each.
A plan writes into memory that exists, the operator allocates its result: what that alone takes stands at the end.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import multigemm as mg
import multigemm.integrations


def host_us(*calls: Callable[[], Any], rounds: int = 40, repeats: int = 100) -> list[float]:
    """Microseconds that one call of each keeps the host busy; they take turns, to meet the same disturbances."""
    best = [float("inf")] * len(calls)
    for _ in range(rounds):
        for i, call in enumerate(calls):
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(repeats):
                call()
            best[i] = min(best[i], (time.perf_counter() - start) / repeats * 1e6)
    torch.cuda.synchronize()
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="cupy,triton,numba,cublas,auto")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU, and what is measured here runs on one")
    a = torch.randn(64, 64, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4, 64, 64, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([16, 32, 48, 64], device="cuda", dtype=torch.int32)
    print(f"{'backend':10}{'plan':>8}{'operator':>10}{'above plan':>12}   us")
    for backend in args.backends.split(","):
        keywords = {} if backend == "auto" else {"backend": backend}
        plan = mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend)
        operator = partial(torch.ops.multigemm.grouped_gemm, a, b, ends=ends, **keywords)
        with torch.no_grad():
            bound, op = host_us(plan, operator)
        print(f"{backend:10}{bound:8.2f}{op:10.2f}{op - bound:12.2f}")
    theirs = partial(torch.nn.functional.grouped_mm, a, b, offs=ends)
    empty = partial(torch.empty, a.shape, dtype=a.dtype, device=a.device)
    for name, us in zip(("torch", "empty"), host_us(theirs, empty), strict=True):
        print(f"{name:10}{'':8}{us:10.2f}")


if __name__ == "__main__":
    main()
