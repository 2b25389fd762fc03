"""Reports made up for tests: every status, several suites, dtypes and distributions, wins and losses."""

from __future__ import annotations

import numpy as np

from multigemm.bench.reports import Report, Row, Sample
from multigemm.bench.suites import suite
from multigemm.bench.workloads import Workload

ENTRIES = {"cupy": "backend", "triton": "backend", "torch_grouped": "peer", "torch_loop": "peer", "dense": "ceiling"}
SPEED = {"cupy": 0.93, "triton": 0.72, "torch_grouped": 0.82, "torch_loop": 0.6, "dense": 1.0}


def sample(us: float, noise: float) -> Sample:
    return Sample(us, us * (1 - noise), us * (1 + noise), us * (1 - 2 * noise), noise / 2, 100)


def row(case: Workload, entry: str, us: float | None, noise: float, status: str = "ok", reason: str = "") -> Row:
    floor = case.floor_us()
    made = Row(
        case.key, case.name, case.suite, case.form, case.distribution, case.dtype, case.describe(), len(case.extents),
        case.flops, case.bytes, floor, entry, ENTRIES[entry], status, reason,  # type: ignore[arg-type]
    )  # fmt: skip
    if us is not None:
        made.us, made.eager, made.spread = us, sample(us, noise), noise / 2
        made.tflops, made.gbps = case.flops / us / 1e6, case.bytes / us / 1e3
        made.of_floor, made.of_dense, made.host_us = floor / us, 0.9 * floor / us, 12.0
    return made


def made_up_report(
    seed: int = 0, noise: float = 0.01, suites: str = "moe,small,l2", machine_noise: float = 0.0
) -> Report:
    """Times scatter by `noise` per row and by `machine_noise` per workload (all entries alike)."""
    random = np.random.default_rng(seed)
    rows = []
    for case in suite(suites):
        shared = 1 + machine_noise * random.standard_normal()
        for entry, speed in SPEED.items():
            luck = 1.25 if entry == "cupy" and case.distribution == "empty" else 1.0
            us = (case.floor_us() + 3) / speed * luck * shared * (1 + noise * random.standard_normal())
            if entry == "triton" and case.form == "jagged_n":
                rows.append(row(case, entry, None, noise, "refused", "K % 8 is 3: pad K"))
            elif entry == "torch_grouped" and case.form == "per_group":
                rows.append(row(case, entry, None, noise, "failed", "wrong answer: group 0"))
            else:
                rows.append(row(case, entry, us, noise))
    machine = {
        "date": "2026-11-20T12:00:00+00:00", "commit": "0123456789ab", "device": "Made-up GPU", "python": "3.12",
        "cuda": "13.0", "packages": {"torch": "2.11.0"}, "clocks": {"sm_clock_mhz": 1980.0, "power_cap_w": 700.0},
    }  # fmt: skip
    method = {
        "style": "cold", "reps": 100, "rates": "measured in this run",
        "flush": "128 KB of other code run and 256 MB written before each call",
        "overhead_us": {"nothing": 1.2, "empty_kernel": 3.8}, "command": "multigemm bench --suite moe",
    }  # fmt: skip
    rates = {"bf16": {"tflops": 770.0, "tbps": 3.0}, "fp16": {"tflops": 770.0, "tbps": 3.0}}
    return Report(machine, method, rates, rows, {"quack": "QuACK is not installed (no module quack)"})
