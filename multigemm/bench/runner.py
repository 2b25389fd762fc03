"""Runs workloads: checks each entry, then times all entries together, one workload at a time.

All entries of a workload are timed interleaved in one process on the same tensors. A failure is recorded and the rest
goes on. After a CUDA error that no later call survives, `DeviceLost` is raised; everything measured so far is then on
disk, so that a fresh process can continue.
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

import torch

from multigemm import interrupts
from multigemm.bench import machine, reports
from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.operands import Truth, make
from multigemm.bench.processes import Marker
from multigemm.bench.reports import KILLED, Report, Row, Sample, family
from multigemm.bench.workloads import Rates, Workload
from multigemm.errors import LibraryError, MultigemmError
from multigemm.select.timing import CODE_BYTES, FLUSH_BYTES, Mode, Timing, describe, measure, other_code, overhead

RESTLESS = 0.15
"""Samples that disagree by more than this are taken again."""
SECOND_LOOKS = 2
NEAR = 1.25
"""Configs within this factor of their backend's best, at a quick look, are measured carefully."""
HOT_BELOW_US = 300.0
"""Longer calls are not timed with a full cache and by the host."""
LATE = "not tried within the time"
STRIKES = 3
"""An entry that hung or crashed this often is not started again."""
OVER_BUDGET = 2.5
"""After this many budgets there is no second look."""
HURRIED = 0.25
"""The fraction of the budget for a workload of a run that is behind its goal."""
SAVE_EVERY_S = 1.5
STAGE_EVERY_S = 4.0
"""Seconds between two progress lines in a log."""
CPU_GOAL_S = 1.6
"""Seconds per workload on a CPU, which other processes may share: where these take longer, samples become fewer."""


@dataclass(frozen=True)
class Options:
    """How to measure. `budget_ms` is milliseconds per workload and mode, for all entries together.

    `goal_s` is the wanted time of the whole run in seconds: after it, samples become fewer, but no workload is left
    out. `look_ms` is the budget of a quick look in milliseconds; then only the configs near their backend's best are
    measured carefully. `rest` is the fraction of the time in which the device idles between bursts of calls, as in
    `timing.measure`. `energy` also measures the joules of a call, if the GPU counts them.
    """

    reps: int = 100
    budget_ms: float = 400.0
    total_s: float = math.inf
    goal_s: float = math.inf
    style: Mode = "cold"
    modes: tuple[str, ...] = ("graph", "hot", "host")
    rates: dict[str, Rates] | None = None
    rest: float = 0.0
    look_ms: float = 0.0
    energy: bool = False

    @classmethod
    def usual(cls, device: torch.device, workloads: int = 1) -> Options:
        """The options of `multigemm bench` without arguments."""
        if device.type == "cuda":
            return cls(reps=300)
        return cls(budget_ms=600.0, goal_s=CPU_GOAL_S * workloads)


def new_report(device: torch.device, dtypes: Iterable[str], options: Options, absent: dict[str, str]) -> Report:
    """An empty report with the machine, the method and the measured ceilings."""
    method = {
        "style": options.style,
        "reps": options.reps,
        "budget_ms": options.budget_ms,
        "modes": list(options.modes),
        **({"rest": options.rest} if options.rest else {}),
        "flush": flush_text(options.style, device) if device.type == "cuda" else "none (CPU)",
        "rates": "given" if options.rates else "measured in this run",
        "measured_rates": {},
        "overhead_us": {name: round(us, 3) for name, us in overhead(device).items()},
    }
    report = Report(machine.describe(device), method, {}, absent=absent)
    add_ceilings(report, device, set(dtypes), options)
    return report


def flush_text(style: Mode, device: torch.device) -> str:
    """The description of what happens before each call on a GPU."""
    written = f"{FLUSH_BYTES >> 20} MB written before each call"
    if style == "do_bench":
        return written
    if other_code(device.index or 0) is None:
        return f"{written} (no NVRTC here: the processors may still hold a call's code)"
    return f"{CODE_BYTES >> 10} KB of other code run and {written}"


def add_ceilings(report: Report, device: torch.device, dtypes: set[str], options: Options) -> None:
    """Measures the ceilings of dtypes for which the report has none yet."""
    lacking = dtypes - set(report.rates)
    measured = (
        {} if not lacking or (options.rates and device.type == "cpu") else machine.measured_rates(device, lacking)
    )
    report.method["measured_rates"] = report.method.get("measured_rates", {}) | _as_numbers(measured)
    rates = options.rates or measured
    report.rates |= _as_numbers({name: rates[name] for name in sorted(lacking)})


def _as_numbers(rates: dict[str, Rates]) -> dict[str, dict[str, float]]:
    return {name: {"tflops": round(rate.tflops, 4), "tbps": round(rate.tbps, 4)} for name, rate in rates.items()}


def total_unrest(taken: dict[str, Timing]) -> float:
    """The unrest of all timings. A failure counts more than any unrest, so that a second look never wins by a
    failure."""
    return math.fsum(timing.unrest if timing.ok else 1e6 for timing in taken.values())


class DeviceLost(MultigemmError):
    """A CUDA error that no later call in this process survives."""


class Data(Protocol):
    """The tensors of a workload."""

    def poison(self) -> None:
        """Makes the output unlike any answer."""

    def reference(self) -> Truth:
        """The condition that a right result must satisfy."""


@dataclass
class Runner:
    """One run. `path` is rewritten every second or two, and at the end.

    `entries_of` gives the entries of a workload; `tensors_of` makes its data.
    """

    entries_of: Callable[[Workload], list[Entry]]
    device: torch.device
    options: Options
    report: Report
    path: Path | None = None
    marker: Marker = Marker(None)
    progress: Progress = field(default_factory=lambda: Progress(quiet=True))
    tensors_of: Callable[[Workload, torch.device], Data] = make
    started: float = field(default_factory=time.monotonic)
    _rows: dict[str, Row] = field(default_factory=dict)
    _behind: bool = False
    _saved: float = 0.0
    _meter: machine.EnergyMeter | None = None
    _late: set[str] = field(default_factory=set)

    def run(self, cases: list[Workload]) -> Report:
        """Runs every workload for which there is time. The others are listed as unfinished, also after an
        interruption."""
        if self.options.energy:
            try:
                self._meter = machine.EnergyMeter(self.device)
            except LibraryError as error:
                self.report.absent["energy"] = str(error)
        try:
            self._run(cases)
        finally:
            with interrupts.held():
                self._save(cases)
                self.progress.end()
        return self.report

    def _run(self, cases: list[Workload]) -> None:
        done = {(row.case, row.entry) for row in self.report.rows}
        self._save(cases)
        for index, case in enumerate(cases):
            spent = time.monotonic() - self.started
            try:
                todo = [e for e in self.entries_of(case) if e.takes(case) and (case.key, e.name) not in done]
            except (torch.cuda.OutOfMemoryError, MemoryError) as error:
                self.report.absent[case.key] = describe(error)
                continue
            if not todo:
                continue
            if spent > self.options.total_s:
                self._late.add(case.key)
                continue
            self._behind = index > 0 and spent > self.options.goal_s * index / len(cases)
            self.progress.step(index, len(cases), case, self.options.total_s - spent)
            self.report.rows += self._case(case, todo)
            self._free()
            if time.monotonic() - self._saved > SAVE_EVERY_S:
                self._save(cases)
        self.report.machine["packages"] = machine.versions(machine.PACKAGES)  # peers are loaded now
        self.report.machine["clocks_after"] = machine.clocks(self.device)

    def _save(self, cases: list[Workload]) -> None:
        met = {*self.report.absent, *(row.case for row in self.report.rows)}
        self.report.unfinished = [case.key for case in cases if case.key in self._late or case.key not in met]
        if self.path is not None:
            reports.write(self.path, self.report)
        self._saved = time.monotonic()

    def _case(self, case: Workload, entries: list[Entry]) -> list[Row]:
        """Makes, checks and times one workload; returns its rows."""
        self._rows = rows = {entry.name: self._blank(case, entry) for entry in entries}
        try:
            self._say("making tensors and reference", *rows.values())
            self._fits(case)
            tensors = self.tensors_of(case, self.device)
            truth = tensors.reference()
        except (Refused, torch.cuda.OutOfMemoryError, MemoryError) as error:
            for row in rows.values():
                row.status, row.reason = "skipped", describe(error)
            return list(rows.values())
        ready = {entry.name: p for entry in entries if (p := self._ready(entry, tensors, truth)) is not None}
        del truth
        self._time(ready)
        self._relate(rows)
        return list(rows.values())

    def _blank(self, case: Workload, entry: Entry) -> Row:
        rates = self.report.rates[case.dtype]
        floor = case.floor_us(Rates(rates["tflops"], rates["tbps"]))
        return Row(
            case=case.key,
            name=case.name,
            suite=case.suite,
            form=case.form,
            distribution=case.distribution,
            dtype=case.dtype,
            shape=case.describe(),
            groups=case.groups,
            flops=case.flops,
            bytes=case.bytes,
            floor_us=float(f"{floor:.6g}"),
            entry=entry.name,
            kind=entry.kind,
            status="failed",
            **entry.known,
        )

    def _say(self, stage: str, *rows: Row) -> None:
        """Tells the parent process and the user the current stage and its entries."""
        self.marker.say(stage, rows=[asdict(row) for row in rows] if self.marker.path else ())
        self.progress.stage(f"{stage}: {rows[0].entry}" if len(rows) == 1 else stage)

    def _fits(self, case: Workload) -> None:
        """Whether twice the tensors (for references, and copies that peers need) fit into free memory."""
        if self.device.type != "cuda":
            return
        free, _ = torch.cuda.mem_get_info(self.device)
        need = 2.5 * case.resident_bytes
        if need > free:
            raise Refused(f"needs about {need / 2**30:.0f} GiB, and {free / 2**30:.0f} GiB are free")

    def _ready(self, entry: Entry, tensors: Data, truth: Truth) -> Prepared | None:
        """Prepares and checks one entry. Returns None, with the reason in its row, if it gave no right answer."""
        row = self._rows[entry.name]
        if why := self._given_up(entry):
            row.status, row.reason = "skipped", why
            return None
        self._say("preparing and checking", row)
        try:
            ready = entry.prepare(tensors)
            row.kernel, row.config, row.why = ready.kernel, ready.config, ready.why
            row.problem_class, row.fields, row.build_s = ready.problem_class, ready.fields, round(ready.build_s, 3)
            if not entry.checks:
                return ready
            tensors.poison()
            result = ready.result(ready.call())
            self._synchronize()
        except Refused as refusal:
            row.status, row.reason = "refused", str(refusal)
            return None
        except Exception as error:  # whatever a competitor raises is its row
            row.reason = describe(error)
            self._survived(row)
            return None
        row.reason = truth.verdict(result)
        return None if row.reason else ready

    def _given_up(self, entry: Entry) -> str:
        """Why an entry is not started; "" if it is."""
        if entry.optional and time.monotonic() - self.started > self.options.total_s:
            return LATE
        name, config = family(entry.name), entry.known.get("config")
        struck = [row for row in self.report.rows if KILLED in row.notes and family(row.entry) == name]
        if bad := next((row for row in struck if config is not None and row.config == config), None):
            return f"not tried again: {bad.reason}"
        return f"not tried: it hung or crashed {len(struck)} times" if len(struck) >= STRIKES else ""

    def _survived(self, row: Row) -> None:
        """Checks after a failure that the device still answers. If not, keeps the final rows and raises DeviceLost."""
        try:
            self._synchronize()
            torch.ones(1, device=self.device).sum().item()
        except Exception as error:
            row.reason += " (the CUDA context is lost)"
            row.notes.append(KILLED)
            self.report.rows += [r for r in self._rows.values() if r is row or r.status == "refused"]
            raise DeviceLost(row.reason) from error

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _time(self, ready: dict[str, Prepared]) -> None:
        """Times eager calls of all entries, graphs of those that can be captured, then hot and host where they
        apply."""
        if self.options.look_ms:
            ready = self._near_the_best(ready)
        self._record(self._settled({name: p.call for name, p in ready.items()}, self.options.style))
        alive = {name: p for name, p in ready.items() if self._rows[name].eager}
        if self.device.type == "cuda" and "graph" in self.options.modes:
            self._graphs({name: p for name, p in alive.items() if not p.syncs})
        if "host" in self.options.modes:
            self._hosts(alive)
        if self._meter is not None:
            for name, p in alive.items():
                row = self._rows[name]
                self._say("counting joules", row)
                try:
                    joules, us = self._meter.of_call(p.call, row.us or 1.0)
                except LibraryError as error:
                    row.notes.append(f"energy: {error}")
                    continue
                row.joules, row.loaded_us = float(f"{joules:.4g}"), round(us, 3)
        for row in self._rows.values():
            if row.us is not None:
                row.us = round(row.us, 3)
                row.spread = round(row.spread, 4) if math.isfinite(row.spread) else 0.0

    def _record(self, taken: dict[str, Timing]) -> None:
        """Stores the times of eager calls, and the reasons of failures."""
        for name, timing in taken.items():
            row = self._rows[name]
            if timing.ok:
                row.status, row.us, row.eager, row.spread = "ok", timing.median, Sample.of(timing), timing.spread
            else:
                row.reason = timing.error
                self._survived(row)

    def _near_the_best(self, ready: dict[str, Prepared]) -> dict[str, Prepared]:
        """The entries worth a careful measurement; the others keep the times of the quick look."""
        self._record(self._measure({name: p.call for name, p in ready.items()}, self.options.style, look=True))
        us = {name: self._rows[name].us or math.inf for name in ready}
        best = {family(name): min(us[each] for each in ready if family(each) == family(name)) for name in ready}
        return {
            name: p for name, p in ready.items() if math.isfinite(us[name]) and us[name] <= NEAR * best[family(name)]
        }

    def _graphs(self, capturable: dict[str, Prepared]) -> None:
        modes: tuple[Mode, ...] = ("graph", "hot") if "hot" in self.options.modes else ("graph",)
        for mode in modes:
            calls = {name: p.call for name, p in capturable.items() if mode != "hot" or self._is_short(name)}
            for name, timing in self._measure(calls, mode).items():
                row = self._rows[name]
                if not timing.ok:
                    row.notes.append(f"{mode}: {timing.error}")
                    self._survived(row)
                elif mode == "hot":
                    row.hot_us = round(timing.median, 3)
                else:
                    row.graph = Sample.of(timing)
                    if row.us is None or timing.median < row.us:
                        row.us, row.spread = timing.median, timing.spread

    def _hosts(self, alive: dict[str, Prepared]) -> None:
        """The host time of calls. On a CPU nothing is queued, so that is the time of an eager call."""
        on_cpu = self.device.type == "cpu"
        short = {name: p for name, p in alive.items() if on_cpu or self._is_short(name)}
        whole = {name: p.whole for name, p in short.items() if p.whole is not None}
        if on_cpu:
            for row in (self._rows[name] for name in short):
                row.host_us = round(row.eager.median, 2) if row.eager else None
        else:
            for name, timing in self._measure({name: p.call for name, p in short.items()}, "host", 20).items():
                self._rows[name].host_us = round(timing.median, 2) if timing.ok else None
        for name, timing in self._measure(whole, "host", 20).items():
            self._rows[name].whole_host_us = round(timing.median, 2) if timing.ok else None

    def _is_short(self, name: str) -> bool:
        return (self._rows[name].us or 0) < HOT_BELOW_US

    def _settled(self, calls: dict[str, Callable[[], object]], mode: Mode) -> dict[str, Timing]:
        """Measures, and once or twice more where repeats disagree.

        A CPU is shared: it stalls now and then for longer than a whole sample, and the calmest pass of each entry
        counts. A GPU changes its clock instead: entries of two passes cannot be compared, and the calmer pass of all
        counts. Where the fewest samples take several budgets already, one look has to do.
        """
        began = time.monotonic()
        taken = self._measure(calls, mode)
        for _ in range(0 if self._behind else SECOND_LOOKS):
            if time.monotonic() - began > OVER_BUDGET * self.options.budget_ms / 1e3 / (1.0 - self.options.rest):
                break
            restless = {name: calls[name] for name, timing in taken.items() if timing.ok and timing.unrest > RESTLESS}
            if restless and self.device.type == "cuda":
                taken = min(taken, self._measure(calls, mode), key=total_unrest)
                continue
            for name, timing in self._measure(restless, mode).items():
                if timing.ok and timing.median < taken[name].median:
                    taken[name] = timing
        return taken

    def _measure(
        self, calls: dict[str, Callable[[], object]], mode: Mode, reps: int | None = None, look: bool = False
    ) -> dict[str, Timing]:
        if not calls:
            return {}
        options, few = self.options, 3 if look else 4 if mode in ("hot", "host") else 9
        budget_ms = options.look_ms if look else options.budget_ms
        if self._behind:
            few, budget_ms = few // 3, HURRIED * budget_ms

        def watch(name: str) -> None:
            self._say(f"timing {mode}", *(self._rows[n] for n in ([name] if name else calls)))

        return measure(
            calls,
            self.device,
            mode,
            reps=reps or options.reps,
            min_reps=few,
            budget_ms=budget_ms,
            rest=0.0 if mode == "host" else options.rest,
            watch=watch,
        )

    def _relate(self, rows: dict[str, Row]) -> None:
        """Computes rates and fractions, which need the dense ceiling of the same workload."""
        cases = {row.case for row in rows.values()}
        known = [row for row in (*rows.values(), *self.report.rows) if row.case in cases and row.kind == "ceiling"]
        dense = next((row.us for row in known if row.us), None)
        for row in rows.values():
            if row.us:
                row.tflops = round(row.flops / row.us / 1e6, 4)
                row.gbps = round(row.bytes / row.us / 1e3, 3)
                row.of_floor = float(f"{row.floor_us / row.us:.4g}")
                row.of_dense = float(f"{dense / row.us:.4g}") if dense else None

    def _free(self) -> None:
        """Each workload begins with an allocator that holds nothing, so that two runs place its tensors alike.

        At a few microseconds it counts which small tensors and tables share a page. What outlives a workload is
        frozen: a collection that looks through all libraries takes as long as a timing.
        """
        gc.collect()
        if self.device.type == "cuda":
            gc.freeze()
            torch.cuda.empty_cache()


class Progress:
    """Progress on standard error: a line for each workload, and the stage of one that takes long."""

    def __init__(self, quiet: bool) -> None:
        self.quiet, self.started = quiet, time.monotonic()
        self._on_terminal, self._told = sys.stderr.isatty(), self.started

    def step(self, index: int, total: int, case: Workload, allowed_s: float = math.inf) -> None:
        """Reports the start of a workload. The remaining time is estimated by the mean of the former ones, at most
        `allowed_s`."""
        spent = time.monotonic() - self.started
        left = min(spent / index * (total - index) if index else math.inf, allowed_s)
        about = f", {'about' if index else 'at most'} {max(left, 0.0):.0f} s left" if math.isfinite(left) else ""
        self._tell(f"[{index + 1}/{total}] {spent:.0f} s{about}  {case.key}", "\n")

    def stage(self, text: str) -> None:
        """Reports the stage of the workload: rewritten on a terminal, every few seconds in a log."""
        if self._on_terminal:
            self._tell(f"  {text}", "\r")
        elif time.monotonic() - self._told > STAGE_EVERY_S:
            self._tell(f"  {time.monotonic() - self.started:.0f} s  {text}", "\n")

    def end(self) -> None:
        """Erases the last stage from a terminal."""
        if self._on_terminal:
            self._tell("", "")

    def _tell(self, line: str, end: str) -> None:
        if not self.quiet:
            self._told = time.monotonic()
            print(f"\x1b[K{line}" if self._on_terminal else line, end=end, file=sys.stderr, flush=True)
