"""How good the choices of `backend="auto"` are on problems that it never met, and what meeting them costs.

    python benchmarks/auto_random.py --shapes 100 --seed 7 --out auto_random.json       # on a GPU; some four minutes
    python benchmarks/auto_random.py --suite moe,wgrad,small --out auto_suites.json

Random shapes are those of `multigemm bench --suite random:SEED`: every form, with sizes on the device and, where a form
has such, on the host. Processes side by side compile every backend for every shape first, into one cache. Then, for
each problem: "auto" meets it with a cache that holds no choices, which is timed; and all backends are timed side by
side, long ones under load, short ones behind other work. A choice's regret is its backend's time over the fastest
one's. What the static order would take without measuring is judged by the same times.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

import multigemm as mg
from multigemm.bench import operands
from multigemm.bench.entries import problem
from multigemm.bench.suites import parts, random, suite
from multigemm.bench.workloads import Workload, geomean
from multigemm.errors import MultigemmError
from multigemm.planning.plan import Plan
from multigemm.planning.staging import staged_spec
from multigemm.select import choose, table, timing
from multigemm.select.measure_once import LONG_US
from multigemm.select.problem_class import class_of
from multigemm.select.ranking import static_order
from multigemm.select.timing import describe, measure

BACKENDS = ("cupy", "triton", "numba", "cublas")
DEVICE = torch.device("cuda", 0)
BARS = {"beyond_5_share": 0.03, "beyond_10": 0, "static_geomean": 1.05, "first_meeting_ms_worst": 60.0}


@dataclass
class Row:
    """One problem: what each backend took, what "auto" and the static order chose, and what the choice cost."""

    case: str
    sizes_on: str
    problem_class: str
    us: dict[str, float] = field(default_factory=dict)
    mode: str = ""
    auto: str = ""
    why: str = ""
    meeting_ms: float = 0.0
    measured: bool = False
    static: str = ""
    failed: dict[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str:
        return min(self.us, key=lambda name: self.us[name])

    def regret(self, name: str) -> float:
        """How many times slower a backend is than the fastest."""
        return self.us[name] / self.us[self.fastest]


def random_shapes(shapes: int, seed: int) -> list[Workload]:
    """So many, 20 by each seed."""
    every = (case for own in count(seed) for case in random(own))
    return list(islice(every, shapes))


def places(case: Workload) -> tuple[bool, ...]:
    """Whether the sizes lie on the host: either, where offsets cut the groups."""
    return (False, True) if case.form.startswith("jagged") else (False,)


def compile_one(case: Workload, names: Sequence[str]) -> str:
    """In a process of its own: plans all backends, which leaves their kernels in the cache."""
    tensors = operands.make(case, DEVICE, drawn=False)
    for on_host in places(case):
        plans(problem(tensors, on_host), names, {})
    return case.key


def plans(posed: mg.GroupedGemmProblem, names: Sequence[str], failed: dict[str, str]) -> dict[str, Plan]:
    """A plan of each backend that can."""
    found = {}
    for name in names:
        try:
            found[name] = mg.plan(posed, name)
        except MultigemmError as error:
            failed[name] = describe(error)
    return found


def compile_ahead(cases: Sequence[Workload], names: Sequence[str], workers: int) -> float:
    """All cases side by side; the seconds that took."""
    began = time.perf_counter()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = [(case, pool.submit(compile_one, case, names)) for case in cases]
        for case, future in waiting:
            if error := future.exception():
                print(f"{case.key}: compiling ahead failed: {describe(error)}", file=sys.stderr)
    return time.perf_counter() - began


def rows_of(case: Workload, names: Sequence[str], budget_ms: float) -> Iterator[Row]:
    """The rows of one case, one for each place of its sizes."""
    tensors = operands.make(case, DEVICE)
    for on_host in places(case):
        posed = problem(tensors, on_host)
        c = class_of(posed, staged_spec(posed))
        row = Row(case.key, "host" if on_host else "device", str(c))
        ready = plans(posed, names, row.failed)
        torch.cuda.synchronize()
        known = len(table.table().own(choices=True))
        began = time.perf_counter()
        choice = choose.choose(posed)
        row.meeting_ms = round((time.perf_counter() - began) * 1e3, 2)
        row.auto, row.why = choice.backend, choice.why
        row.measured = len(table.table().own(choices=True)) > known
        row.static = next((n for n in static_order(c) if n in ready and not ready[n].syncs), row.auto)
        first = measure(ready, DEVICE, "cold", reps=15, min_reps=5, budget_ms=budget_ms)
        taken, row.mode = first, "cold"
        if min((t.median for t in first.values() if t.ok), default=0.0) >= LONG_US:
            taken = measure(ready, DEVICE, "sustained", reps=15, min_reps=5, budget_ms=2 * budget_ms)
            row.mode = "sustained"
        row.us = {name: round(t.median, 2) for name, t in taken.items() if t.ok}
        row.failed |= {name: t.error for name, t in taken.items() if not t.ok}
        yield row


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers that the bars are about."""
    judged = [row for row in rows if row.auto in row.us and row.static in row.us]
    auto, static = ([row.regret(getattr(row, rule)) for row in judged] for rule in ("auto", "static"))
    meetings = sorted(row.meeting_ms for row in rows if row.measured) or [0.0]
    worst = sorted(judged, key=lambda row: -row.regret(row.auto))[:8]
    return {
        "choices": len(judged),
        "measured": sum(row.measured for row in rows),
        "auto_geomean": round(geomean(auto), 4),
        "beyond_3_share": round(sum(x > 1.03 for x in auto) / len(auto), 4),
        "beyond_5_share": round(sum(x > 1.05 for x in auto) / len(auto), 4),
        "beyond_10": sum(x > 1.10 for x in auto),
        "static_geomean": round(geomean(static), 4),
        "first_meeting_ms_median": meetings[len(meetings) // 2],
        "first_meeting_ms_worst": meetings[-1],
        "worst": [
            f"{row.regret(row.auto):.3f} {row.auto} instead of {row.fastest}: {row.case}, sizes on the {row.sizes_on}, "
            f"{row.us[row.fastest]:.1f} us {row.mode}"
            for row in worst
        ],
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100, help="how many random shapes")
    parser.add_argument("--seed", type=int, default=7, help="of the first 20 of them")
    parser.add_argument("--suite", default="", help="suites instead of random shapes, comma separated")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--budget-ms", type=float, default=40.0, help="of timing for each problem, for all backends")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=480.0, help="after which no further problem is begun")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args(argv)
    cases, names = suite(args.suite) if args.suite else random_shapes(args.shapes, args.seed), parts(args.backends)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="multigemm-auto-") as folder:
        os.environ["MULTIGEMM_CACHE_DIR"] = folder  # nobody's choices, and of no other run
        mg.settings.settings.cache_clear()
        compiled_s = compile_ahead(cases, names, args.workers)
        print(f"{len(cases)} shapes compiled in {compiled_s:.0f} s", flush=True)
        timing.other_code(0)
        rows: list[Row] = []
        for case in cases:
            if time.monotonic() - began > args.seconds:
                print(f"out of time before {case.key}")
                break
            rows += rows_of(case, names, args.budget_ms)
            torch.cuda.empty_cache()
        told = summary(rows)
        machine = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__, "compiled_s": round(compiled_s)}
        report = {"machine": machine, "summary": told, "bars": BARS, "rows": [asdict(row) for row in rows]}
        args.out.write_text(json.dumps(report, indent=1))
    for name, value in told.items():
        bar = f"  (at most {BARS[name]})" if name in BARS else ""
        print(f"{name}: {value}{bar}" if name != "worst" else "\n  ".join(["worst:", *value]))
    missed = [name for name, most in BARS.items() if told[name] > most]
    print(f"bars missed: {', '.join(missed) or 'none'}; {time.monotonic() - began:.0f} s")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
