"""Host time per call: the front door, the torch operator and a bound plan, beside torch's own grouped_mm.

    python benchmarks/host_time.py --backends cupy,triton,numba,auto,cublas --json host-time.json

Medians of 300 calls in one process, the device waited for after every 32nd, so that no queue fills up; torch's own call
is measured anew before each backend. 64 groups, 256 rows, K = N = 1024, bfloat16. "new a" has another of eight tensors
each time, "new tokens" another number of rows, "new tokens k" of rows that are added up, as in weight gradients, "new
sizes" other sizes on the host; "plan again" makes a plan whose kernels are loaded, with everything that was chosen
forgotten. A ratio is that to torch's call of the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch

import multigemm as mg
import multigemm.integrations
from multigemm.planning import launch_cache
from multigemm.select import choose

GROUPS, ROWS, MOST_ROWS, K, N = 64, 256, 4096, 1024, 1024
CALLS, WARM, TOGETHER = 300, 12, 32
JUDGED = ("cupy", "triton", "numba", "auto")
RATIO_BARS = {"ends": 1.0, "offsets": 1.0, "new a": 1.0, "sizes": 1.0, "list": 1.0, "operator": 0.7}
US_BARS = {"new tokens": 60.0, "new tokens k": 60.0, "new sizes": 60.0}


def host_us(call: Callable[[], Any], warm: int = WARM) -> float:
    """Microseconds that one call keeps the host busy."""
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    spent = []
    for number in range(1, CALLS + 1):
        began = time.perf_counter()
        call()
        spent.append(time.perf_counter() - began)
        if number % TOGETHER == 0:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    return 1e6 * median(spent)


def plan_again_ms(a: torch.Tensor, ends: torch.Tensor, backend: str) -> float:
    """The least over four widths."""
    spent = []
    for width in range(N, N + 256, 64):
        b = torch.randn(GROUPS, K, width, device="cuda", dtype=torch.bfloat16)
        mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend=backend)
        choose.forget()
        problem = mg.GroupedGemmProblem(a, b, ends=ends)
        began = time.perf_counter()
        mg.plan(problem, backend=backend)
        spent.append(1e3 * (time.perf_counter() - began))
    return min(spent)


def measured(backend: str) -> dict[str, float]:
    """All figures of one backend, in microseconds but for the last."""
    rows = torch.randn(MOST_ROWS, K, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(GROUPS, K, N, device="cuda", dtype=torch.bfloat16)
    a, each = rows[:ROWS], ROWS // GROUPS
    ends = torch.arange(1, GROUPS + 1, device="cuda", dtype=torch.int32) * each
    offsets = torch.cat([ends.new_zeros(1), ends])
    sizes = torch.full((GROUPS,), each, device="cuda", dtype=torch.int32)
    operator = torch.ops.multigemm.grouped_gemm
    plan = mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend=backend)
    several = itertools.cycle([torch.randn_like(a) for _ in range(8)])
    chance, tokens = random.Random(0), itertools.cycle(range(1500, MOST_ROWS, 7))
    lists = itertools.cycle([[chance.randrange(64) for _ in range(GROUPS)] for _ in range(700)])
    found = {
        "torch": host_us(lambda: torch.nn.functional.grouped_mm(a, b, offs=ends)),
        "ends": host_us(lambda: mg.grouped_gemm(a, b, ends=ends, backend=backend)),
        "offsets": host_us(lambda: mg.grouped_gemm(a, b, offsets=offsets, backend=backend)),
        "new a": host_us(lambda: mg.grouped_gemm(next(several), b, offsets=offsets, backend=backend), warm=40),
        "sizes": host_us(lambda: mg.grouped_gemm(a, b, sizes=sizes, backend=backend)),
        "list": host_us(lambda: mg.grouped_gemm(a, b, sizes=[each] * GROUPS, backend=backend)),
        "operator": host_us(lambda: operator(a, b, ends=ends, backend=backend)),
        "plan": host_us(plan),
    }
    launch_cache.clear()
    found["new tokens"] = host_us(lambda: mg.grouped_gemm(rows[: next(tokens)], b, ends=ends, backend=backend), warm=60)
    grads = torch.randn(MOST_ROWS, N, device="cuda", dtype=torch.bfloat16)

    def weight_gradients() -> torch.Tensor:
        count = next(tokens)
        return mg.grouped_gemm(rows[:count].t(), grads[:count], ends=ends, jagged="k", backend=backend)

    found["new tokens k"] = host_us(weight_gradients, warm=60)
    found["new sizes"] = host_us(lambda: mg.grouped_gemm(rows, b, sizes=next(lists), backend=backend), warm=30)
    found["plan again, ms"] = plan_again_ms(a, ends, backend)
    return {name: round(value, 2) for name, value in found.items()}


def missed(backend: str, found: dict[str, float]) -> list[str]:
    """The bars that a backend misses."""
    ratios = {name: found[name] / found["torch"] for name in found}
    over = [name for name, most in RATIO_BARS.items() if ratios[name] > most]
    return [f"{backend} {name}" for name in over + [name for name, most in US_BARS.items() if found[name] > most]]


def table(found: dict[str, dict[str, float]]) -> str:
    """A row for each call, a column for each backend, with the ratios to torch's call."""
    lines = [f"{'us per call':16}" + "".join(f"{backend:>18}" for backend in found)]
    for name in next(iter(found.values())):
        cells = [(each[name], each[name] / each["torch"]) for each in found.values()]
        ratios = not name.endswith("ms")
        lines.append(
            f"{name:16}" + "".join(f"{x:10.2f}" + (f"{f'({y:.2f})':>8}" if ratios else " " * 8) for x, y in cells)
        )
    return "\n".join(lines)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backends", default="cupy,triton,numba,auto,cublas", help="names, joined by commas")
    parser.add_argument("--json", type=Path, help="where to write the figures")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU, and what is measured here runs on one")
    found = {}
    for backend in args.backends.split(","):
        found[backend] = measured(backend)
        print(backend, ", ".join(f"{name} {value:.2f}" for name, value in found[backend].items()), flush=True)
    print(table(found))
    over = [text for backend, each in found.items() if backend in JUDGED for text in missed(backend, each)]
    print("bars missed:", ", ".join(over) or "none")
    if args.json:
        versions = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "multigemm": mg.__version__}
        args.json.write_text(json.dumps({"versions": versions, "us": found, "missed": over}, indent=1))


if __name__ == "__main__":
    main()
