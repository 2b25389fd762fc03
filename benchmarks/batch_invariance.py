"""What `batch_invariant=True` costs: each backend with it and without it, interleaved, on the same problems.

    python benchmarks/batch_invariance.py --suite moe,decode,small --jobs 12 --out batch_invariance.json      # on a GPU

Processes side by side compile all plans first, into one cache. A problem's time is the better of an eager call and a
graph replay, cold L2, medians. The speed that remains is the time without the promise over the time with it; a backend
that takes the same kernel and config either way keeps all of it, and what is measured then is the noise.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

import multigemm as mg
from multigemm.bench import operands
from multigemm.bench.entries import problem
from multigemm.bench.suites import suite
from multigemm.bench.workloads import Workload, geomean
from multigemm.errors import MultigemmError
from multigemm.planning.plan import Plan
from multigemm.problem import rebuild
from multigemm.select.timing import measure

BACKENDS = "cupy,triton,numba,cublas"
PROMISED = " batch invariant"


@dataclass
class Row:
    """One problem on one backend: microseconds without and with the promise, and what ran; `refused` says why not."""

    suite: str
    case: str
    backend: str
    us: float = math.nan
    us_invariant: float = math.nan
    ran: str = ""
    ran_invariant: str = ""
    refused: str = ""

    @property
    def speed(self) -> float:
        """The part of the speed that remains."""
        return self.us / self.us_invariant


@dataclass
class Report:
    device: str
    torch: str
    rows: list[Row] = field(default_factory=list)


def plans(case: Workload, backends: Sequence[str], drawn: bool) -> tuple[dict[str, Plan], dict[str, Row]]:
    """The plans of a problem, without and with the promise, by name."""
    posed = problem(operands.make(case, "cuda", drawn=drawn))
    a, b, keywords = rebuild.arguments(posed)
    promised = mg.GroupedGemmProblem(a, b, **{**keywords, "batch_invariant": True})
    found, rows = dict[str, Plan](), dict[str, Row]()
    for name in backends:
        row = rows[name] = Row(case.suite, case.name, name)
        try:
            pair = mg.plan(posed, name), mg.plan(promised, name)
        except MultigemmError as error:
            row.refused = str(error)
            continue
        found[name], found[name + PROMISED] = pair
        row.ran, row.ran_invariant = (f"{plan.backend} {plan.kernel} {plan.config}" for plan in pair)
    return found, rows


def compile_all(case: Workload, backends: Sequence[str]) -> None:
    """In a process of its own: the kernels of a problem, into the cache on disk."""
    plans(case, backends, False)


def timed(case: Workload, backends: Sequence[str], budget_ms: float) -> list[Row]:
    """One problem on all backends, both ways, side by side."""
    found, rows = plans(case, backends, True)
    best = defaultdict[str, float](lambda: math.inf)
    for mode in ("cold", "graph"):
        for name, timing in measure(found, "cuda", mode, reps=200, budget_ms=budget_ms).items():
            if timing.ok:
                best[name] = min(best[name], timing.median)
    for name, row in rows.items():
        if not row.refused:
            row.us, row.us_invariant = best[name], best[name + PROMISED]
    return list(rows.values())


def summary(rows: Sequence[Row]) -> list[str]:
    """A line for each backend and suite."""
    lines = []
    for backend in dict.fromkeys(row.backend for row in rows):
        for name in dict.fromkeys(row.suite for row in rows):
            mine = [row for row in rows if (row.backend, row.suite) == (backend, name)]
            timed_rows = [row for row in mine if not row.refused and math.isfinite(row.speed)]
            if not timed_rows:
                lines.append(f"{backend:8} {name:8} refused: {mine[0].refused.splitlines()[-1].strip()[:100]}")
                continue
            worst = min(timed_rows, key=lambda row: row.speed)
            changed = sum(row.ran != row.ran_invariant for row in timed_rows)
            lines.append(
                f"{backend:8} {name:8} {geomean([row.speed for row in timed_rows]):.3f} of the speed over "
                f"{len(timed_rows)} problems, {changed} with another kernel or config; "
                f"least {worst.speed:.3f} ({worst.case})"
            )
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--suite", default="moe,decode,small")
    parser.add_argument("--backends", default=BACKENDS)
    parser.add_argument("--budget-ms", type=float, default=150.0, help="of work for each problem and mode")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    cases, backends = suite(args.suite), args.backends.split(",")
    with ProcessPoolExecutor(args.jobs, mp_context=get_context("spawn")) as pool:
        waiting = [pool.submit(compile_all, case, backends) for case in cases]
        for each in waiting:
            if error := each.exception():
                print(f"compiling ahead failed, the timing will compile: {error}", file=sys.stderr)
    report = Report(torch.cuda.get_device_name(), torch.__version__)
    for case in cases:
        report.rows += timed(case, backends, args.budget_ms)
        torch.cuda.empty_cache()
    data: dict[str, Any] = asdict(report)
    if args.out:
        args.out.write_text(json.dumps(data, indent=1))
    print("\n".join(summary(report.rows)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
