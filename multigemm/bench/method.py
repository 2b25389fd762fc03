"""How a run measures, and the head of its report: what a reader must know before the first row."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from multigemm.bench import machine
from multigemm.bench.results import Report
from multigemm.bench.roofline import measured_rates
from multigemm.bench.workloads import Rates
from multigemm.select.clocks import CODE_BYTES, FLUSH_BYTES, other_code
from multigemm.select.timing import Mode, overhead


@dataclass(frozen=True)
class Options:
    """How to measure. `budget_ms` is per workload and mode, for all entries together.

    `goal_s` is what the whole run should take: behind it, samples become fewer, but no workload is left out.
    `rest` is the part of the time in which the device idles between bursts of calls, as `timing.measure` knows it.
    """

    reps: int = 100
    budget_ms: float = 400.0
    total_s: float = math.inf
    goal_s: float = math.inf
    style: Mode = "cold"
    modes: tuple[str, ...] = ("graph", "hot", "host")
    hot_below_us: float = 300.0
    rates: dict[str, Rates] | None = None
    rest: float = 0.0


def new_report(device: torch.device, dtypes: Iterable[str], options: Options, absent: dict[str, str]) -> Report:
    """An empty report with the machine, the method and the measured ceilings."""
    method = {
        "style": options.style,
        "reps": options.reps,
        "budget_ms": options.budget_ms,
        "modes": list(options.modes),
        **({"rest": options.rest} if options.rest else {}),
        "flush": _flush(options.style, device) if device.type == "cuda" else "none (CPU)",
        "rates": "given" if options.rates else "measured in this run",
        "measured_rates": {},
        "overhead_us": {name: round(us, 3) for name, us in overhead(device).items()},
    }
    report = Report(machine.describe(device), method, {}, absent=absent)
    add_ceilings(report, device, set(dtypes), options)
    return report


def _flush(style: Mode, device: torch.device) -> str:
    written = f"{FLUSH_BYTES >> 20} MB written before each call"
    if style == "do_bench":
        return written
    if other_code(device.index or 0) is None:
        return f"{written} (no NVRTC here: the processors may still hold a call's code)"
    return f"{CODE_BYTES >> 10} KB of other code run and {written}"


def add_ceilings(report: Report, device: torch.device, dtypes: set[str], options: Options) -> None:
    """Measures the ceilings of dtypes that the report has none for yet."""
    lacking = dtypes - set(report.rates)
    measured = {} if not lacking or (options.rates and device.type == "cpu") else measured_rates(device, lacking)
    report.method["measured_rates"] = report.method.get("measured_rates", {}) | _as_numbers(measured)
    rates = options.rates or measured
    report.rates |= _as_numbers({name: rates[name] for name in sorted(lacking)})


def _as_numbers(rates: dict[str, Rates]) -> dict[str, dict[str, float]]:
    return {name: {"tflops": round(rate.tflops, 4), "tbps": round(rate.tbps, 4)} for name, rate in rates.items()}
