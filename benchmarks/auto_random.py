"""How good the choices of `backend="auto"` are on problems that it never met, and what meeting them costs.

    python benchmarks/auto_random.py --shapes 100 --seed 7 --seconds 280 --out auto_random.json
    python benchmarks/auto_random.py --suite moe,wgrad,small --out auto_suites.json

Random shapes are those of `multigemm bench --suite random:SEED`: every form, with sizes on the device and, where a form
has such, on the host. Processes side by side compile every backend for every shape first, into one cache. Then, for
each problem: "auto" meets it with a cache that holds no choices, which is timed (libraries that start once a process
were started before); and all backends are timed side by side, long ones under load, short ones behind other work. A
choice's regret is its backend's time over the fastest one's; where that is more than 1.03, the times of a second and
longer look count. What the static order would take without measuring is judged by the same times.

`--seconds` is the limit of all: compiling ends after three fifths of it, shapes that were not compiled by then come
last, and no further shape is begun at its end. The report is written after each shape.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count, islice
from pathlib import Path
from typing import Any

import torch

import multigemm as mg
from multigemm import interrupts
from multigemm.bench import operands
from multigemm.bench.entries import problem
from multigemm.bench.suites import random, suite
from multigemm.bench.workloads import Workload, geomean, parts
from multigemm.errors import MultigemmError
from multigemm.planning.plan import Plan
from multigemm.planning.staging import staged_spec
from multigemm.select import choose, table, timing
from multigemm.select.measure_once import LONG_US
from multigemm.select.problem_class import class_of
from multigemm.select.ranking import static_order
from multigemm.select.timing import describe, measure

BACKENDS = ("cupy", "triton", "numba", "cublas")
BARS = {"beyond_5_share": 0.03, "beyond_10": 0, "static_geomean": 1.05, "first_meeting_ms_worst": 60.0}
COMPILING = 0.6
"""The share of the time that compiling ahead may take."""
DOUBT, LONGER_LOOK = 1.03, 5
"""The regret from which on a row is timed again, and how many times the samples and the time that gets."""


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
    looks: int = 0
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


def compile_one(task: tuple[Workload, str, str]) -> tuple[str, str]:
    """In a process of its own: plans one backend, which leaves its kernels in the cache. The shape, and what failed."""
    case, name, device = task
    try:
        tensors = operands.make(case, device, drawn=False)
        for on_host in places(case):
            plans(problem(tensors, on_host), [name], {})
    except Exception as error:
        return case.key, f"{name}: {describe(error)}"
    return case.key, ""


def plans(posed: mg.GroupedGemmProblem, names: Sequence[str], failed: dict[str, str]) -> dict[str, Plan]:
    """A plan of each backend that can."""
    found = {}
    for name in names:
        try:
            found[name] = mg.plan(posed, name)
        except MultigemmError as error:
            failed[name] = describe(error)
    return found


def compile_ahead(
    cases: Sequence[Workload], names: Sequence[str], device: torch.device, workers: int, seconds: float
) -> set[str]:
    """Compiles side by side, for so many seconds at most. Returns the shapes that all backends are compiled for."""
    deadline, compiled = time.monotonic() + seconds, Counter[str]()
    tasks = [(case, name, str(device)) for case in cases for name in names]
    with interrupts.left_to_this_process():
        pool = multiprocessing.get_context("spawn").Pool(workers)
    with pool:  # ends the processes, whatever they still do
        done = pool.imap_unordered(compile_one, tasks)
        for _ in tasks:
            try:
                key, failed = done.next(max(0.0, deadline - time.monotonic()))
            except multiprocessing.TimeoutError:
                print(f"compiling ahead ends after {seconds:.0f} s", flush=True)
                break
            compiled[key] += 1
            if failed:
                print(f"{key}: compiling ahead failed: {failed}", file=sys.stderr)
    return {key for key, number in compiled.items() if number >= len(names)}


def rows_of(case: Workload, names: Sequence[str], device: torch.device, budget_ms: float) -> Iterator[Row]:
    """The rows of one case, one for each place of its sizes."""
    tensors = operands.make(case, device)
    for on_host in places(case):
        posed = problem(tensors, on_host)
        c = class_of(posed, staged_spec(posed))
        row = Row(case.key, "host" if on_host else "device", str(c))
        ready = plans(posed, names, row.failed)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        known = len(table.table().choices.entries())
        began = time.perf_counter()
        choice = choose.choose(posed)
        row.meeting_ms = round((time.perf_counter() - began) * 1e3, 2)
        row.auto, row.why = choice.backend, choice.why
        row.measured = len(table.table().choices.entries()) > known
        row.static = next((n for n in static_order(c) if n in ready and not ready[n].syncs), row.auto)
        look(row, ready, device, budget_ms)
        if row.auto in row.us and row.regret(row.auto) > DOUBT:
            look(row, ready, device, budget_ms, LONGER_LOOK)
        yield row


def look(row: Row, ready: dict[str, Plan], device: torch.device, budget_ms: float, longer: int = 1) -> None:
    """Times all backends: behind other work, and where they are long, under load."""
    taken, row.mode = measure(ready, device, "cold", reps=15 * longer, min_reps=5, budget_ms=longer * budget_ms), "cold"
    if device.type == "cuda" and min((t.median for t in taken.values() if t.ok), default=0.0) >= LONG_US:
        row.mode = "sustained"
        taken = measure(ready, device, "sustained", reps=15 * longer, min_reps=5, budget_ms=2 * longer * budget_ms)
    row.us = {name: round(t.median, 2) for name, t in taken.items() if t.ok}
    row.failed |= {name: t.error for name, t in taken.items() if not t.ok}
    row.looks += 1


def summary(rows: Sequence[Row]) -> dict[str, Any]:
    """The numbers that the bars are about; none where nothing was judged."""
    judged = [row for row in rows if row.auto in row.us and row.static in row.us]
    if not judged:
        return {"choices": 0}
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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=100, help="how many random shapes")
    parser.add_argument("--seed", type=int, default=7, help="of the first 20 of them")
    parser.add_argument("--suite", default="", help="suites instead of random shapes, comma separated")
    parser.add_argument("--backends", default=",".join(BACKENDS))
    parser.add_argument("--budget-ms", type=float, default=40.0, help="of timing for each problem, for all backends")
    parser.add_argument("--workers", type=int, default=max(1, min(14, (os.cpu_count() or 2) - 2)))
    parser.add_argument("--seconds", type=float, default=480.0, help="for all; no further shape is begun after that")
    parser.add_argument("--device", type=torch.device, default=torch.device("cuda", 0))
    parser.add_argument("--out", type=Path, required=True, help="the JSON file to write")
    args = parser.parse_args(argv)
    if args.device.type == "cuda" and not torch.cuda.is_available():
        parser.error("torch sees no CUDA GPU")
    cases, names = suite(args.suite) if args.suite else random_shapes(args.shapes, args.seed), parts(args.backends)
    began = time.monotonic()
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="multigemm-auto-") as folder, interrupts.of_termination():
        os.environ["MULTIGEMM_CACHE_DIR"] = folder  # nobody's choices, and of no other run
        mg.settings.settings.cache_clear()
        try:
            compiled = compile_ahead(cases, names, args.device, args.workers, COMPILING * args.seconds)
            machine = _machine(args.device) | {"compiled": len(compiled), "compiled_s": round(time.monotonic() - began)}
            print(f"{len(compiled)} of {len(cases)} shapes compiled in {machine['compiled_s']} s", flush=True)
            if args.device.type == "cuda":
                machine["start_ms"] = start_libraries(args.device)
            for done, case in enumerate(sorted(cases, key=lambda case: case.key not in compiled)):
                if time.monotonic() - began > args.seconds:
                    print(f"out of time: {len(cases) - done} of {len(cases)} shapes are left")
                    break
                rows += rows_of(case, names, args.device, args.budget_ms)
                report = {"machine": machine, "summary": summary(rows), "bars": BARS, "rows": list(map(asdict, rows))}
                interrupts.write_whole(args.out, json.dumps(report, indent=1))
                if args.device.type == "cuda":
                    torch.cuda.empty_cache()
        except KeyboardInterrupt:
            print(f"interrupted; {len(rows)} choices were judged")
    return told(summary(rows), time.monotonic() - began)


def start_libraries(device: torch.device) -> float:
    """Starts what a process starts once, with its first product of a dtype: the vendor's library, and the clock's own
    code. The milliseconds that took, which are no part of a class's meeting."""
    began = time.perf_counter()
    timing.other_code(device.index or 0)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        several = torch.ones(2, 64, 64, device=device, dtype=dtype)
        torch.mm(several[0], several[1])
        torch.bmm(several, several)
    torch.cuda.synchronize(device)
    return round((time.perf_counter() - began) * 1e3, 1)


def _machine(device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
    return {"device": name, "torch": torch.__version__}


def told(found: dict[str, Any], seconds: float) -> int:
    """Prints the summary; 1 where a bar was missed, or nothing judged."""
    for name, value in found.items():
        bar = f"  (at most {BARS[name]})" if name in BARS else ""
        print(f"{name}: {value}{bar}" if name != "worst" else "\n  ".join(["worst:", *value]))
    missed = [name for name, most in BARS.items() if name in found and found[name] > most]
    print(f"bars missed: {', '.join(missed) or 'none'}; {seconds:.0f} s")
    return 1 if missed or not found["choices"] else 0


if __name__ == "__main__":
    sys.exit(main())
