"""`multigemm tune`: every config of every backend is an entry of the benchmark; the best of each class is kept.

What is stored belongs to a class of problems (`select.problem_class`), not to one workload: the sizes of groups are
known on the device alone, so that even and skewed groups share a class. A config is therefore judged on all workloads
of its class by its regret, the factor by which it is slower than the fastest of all backends and configs on each; the
smallest worst regret wins. Configs that fail stay in the record with their reasons.

Sizes on the host are classes of their own. A backend that plans by them is tried with sizes in either place, side by
side with the others, whose kernels run alike and whose times count in both classes.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from multigemm import interrupts
from multigemm.backends import registry
from multigemm.bench import machine, reports
from multigemm.bench.entries import available_backends, config_entries
from multigemm.bench.processes import CONTEXT_LOST, Marker, as_child, supervise
from multigemm.bench.reports import HOST_SIZES, Report, Row, by_case, digits, family
from multigemm.bench.runner import LATE, DeviceLost, Options, Progress, Runner
from multigemm.bench.suites import UNTUNED, above_zero, add_selection, selected
from multigemm.bench.workloads import DTYPES, RECIPES, Rates, Workload, geomean, parts
from multigemm.errors import InvalidSetting
from multigemm.fleet import default_device
from multigemm.select.table import SCHEMA, Entry, Measured, table

FIRST_WINS_WITHIN = 1.01
RUNNERS_UP = 4
Choice = tuple[str, int]
"""A backend and the number of one of its configs."""
EPILOG = """
  multigemm tune --shape 64,2048,3584,1792        one's own: G, M per group, N, K
  multigemm tune --suite moe --seconds 300        a suite, each backend's first config in any case
  multigemm tune --from-report multigemm-bench/report.json
  multigemm explain --shape 64,2048,3584,1792     what auto runs now, and by which numbers
  multigemm cache export mine.json                to another machine: multigemm cache import mine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything `multigemm tune` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_selection(parser)
    add = parser.add_argument
    add("--backends", default="", help="backends, separated by commas (default: all that are available)")
    add("--configs", type=int, default=0, help="number of configs of each backend to try (default: 0, all)")
    late = "seconds after which no workload is begun, and only the first config of each backend is tried (default: 600)"
    add("--seconds", type=float, default=600.0, help=late)
    add("--no-record", action="store_true", help="measure and show, but store nothing")
    add("--out", type=Path, help="write the measurements also to this file, for `multigemm cache import`")
    add("--device", default="", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    measured = "take the measurements of this report of `multigemm bench`; may be repeated"
    add("--from-report", type=Path, action="append", default=[], help=measured)
    hanging = "seconds without progress after which a config counts as hanging (default: 90)"
    add("--stall", type=float, default=90.0, help=hanging)
    add("--marker", type=Path, help=argparse.SUPPRESS)
    add("--resume", action="store_true", help=argparse.SUPPRESS)
    add("--quiet", action="store_true", help="print only the summary")


def main(args: argparse.Namespace) -> int:
    """Tunes; 0 if anything was measured."""
    if args.from_report:
        found = [reports.read(path) for path in args.from_report]
        return _keep(from_reports(found), args, found[0].machine)
    above_zero(args, "seconds", "stall")
    if args.out:  # before the measurements, which would be lost
        if args.out.is_dir():
            raise InvalidSetting(f"--out {args.out} is a folder: name a file")
        args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.configs < 0:
        raise InvalidSetting(f"--configs {args.configs}: a count, or 0 for all")
    device = default_device(args.device)
    backends, absent = tunable(parts(args.backends), device)
    if not backends:
        why = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise InvalidSetting(f"no backend that can be tuned is available ({why}); see `multigemm info`")
    cases = selected(args, device)
    if layers := [case.key for case in cases if case.form == "layer"]:
        raise InvalidSetting(f"{layers[0]} is a whole layer, whose products are tuned: --suite layer-products")
    if device.type == "cuda" and args.marker is None:
        with tempfile.TemporaryDirectory(prefix="multigemm-tune-") as folder:
            marker = Path(folder) / "doing.json"
            words = ["tune", *args.words]
            return supervise(words, marker, marker.with_name("report.json"), args.stall, args.seconds)
    if not args.resume:
        for name, why in absent.items():
            print(f"{name}: not tuned: {why}")
    with interrupts.of_termination():
        return as_child(lambda: _tune(args, device, backends, cases), args.marker)


def tunable(names: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The backends to tune on this machine, and why others are not."""
    states = available_backends(device)
    for name in names:
        registry.get(name)  # raises for one that does not exist
    asked = {name: states.get(name, "computes nothing") for name in names or states}
    return [name for name, why in asked.items() if not why], {name: why for name, why in asked.items() if why}


def _tune(args: argparse.Namespace, device: torch.device, backends: Sequence[str], cases: list[Workload]) -> int:
    options = Options(budget_ms=250.0, look_ms=80.0, modes=("graph",), total_s=args.seconds)
    run = tuner(backends, device, options, args.configs)
    run.marker, run.progress = Marker(args.marker), Progress(args.quiet)
    if args.marker:
        run.path = args.marker.with_name("report.json")
        if args.resume and run.path.exists():
            run.report = reports.read(run.path)
    stopped = False
    try:
        run.run(cases)
    except DeviceLost as lost:
        print(lost, file=sys.stderr)
        return CONTEXT_LOST
    except KeyboardInterrupt:
        stopped = True
        print("\nstopped: what has been measured is kept", file=sys.stderr)
    report = run.report
    if not args.quiet:
        print("\n".join(lines_of(report)))
    for case in report.unfinished:
        print(f"not reached: {case}")
    code = _keep(kept_of(report), args, report.machine)
    if stopped:
        raise KeyboardInterrupt  # for the exit code that every command has after Ctrl-C
    return code


def tuner(backends: Sequence[str], device: torch.device, options: Options, configs: int = 0) -> Runner:
    """A benchmark run with this many configs of each backend as entries; 0 means all."""
    report = Report(machine.describe(device), {}, {dtype: asdict(Rates()) for dtype in (*DTYPES, *RECIPES)})
    return Runner(lambda case: config_entries(case, backends, configs, device), device, options, report)


def lines_of(report: Report) -> Iterator[str]:
    """The outcome of each workload as lines: each backend's best config, its first guess, the next ones, its
    failures."""
    for case, rows in by_case(report.rows).items():
        yield f"{case}  [{'] ['.join(dict.fromkeys(row.problem_class for row in rows if row.problem_class))}]"
        tried: dict[str, list[Row]] = {}
        for row in rows:
            tried.setdefault(family(row.entry), []).append(row)
        for backend, mine in tried.items():
            us = {row.entry: _us(report, row) for row in mine if row.us}
            ranked = sorted((row for row in mine if row.us), key=lambda row: us[row.entry])
            for best in ranked[:1]:
                first = digits(us[f"{backend}#0"]) if f"{backend}#0" in us else "no"
                told = f"(first guess {first} us, {len(us)} timed)"
                yield f"  {backend}: {digits(us[best.entry])} us with {best.config} {told}"
            if more := [
                f"{'/'.join(map(str, r.fields.values()))} {digits(us[r.entry])}" for r in ranked[1 : 1 + RUNNERS_UP]
            ]:
                yield f"    then {', '.join(more)}{' ...' if len(ranked) > 1 + RUNNERS_UP else ''}"
            failed = [row for row in mine if not row.us and row.reason != LATE]
            yield from (f"  {backend}: {row.config or 'cannot'}: {row.reason}" for row in failed)
        if late := sum(row.reason == LATE for row in rows):
            yield f"  {late} configs not tried within the time budget"


def _keep(found: list[Entry], args: argparse.Namespace, where: dict[str, Any]) -> int:
    """Shows, stores and exports the outcome."""
    count = sum(len(entry.backends) for entry in found)
    print(f"measurements: {count}; classes of problems: {len(found)}; on {where['device']}")
    if not args.quiet:
        print("\n".join(map(_choice, found)))
    lost = ""
    if found and not args.no_record:
        lost = table().keep(found)
        how = "`multigemm cache` shows it, `multigemm cache export FILE` shares it"
        print(f"not recorded: {lost}" if lost else f"recorded in the cache: {how}")
    if args.out:
        _write(args.out, found, where)
        print(f"written: {args.out}")
    return 1 if not found or (lost and not args.out) else 0


def _choice(entry: Entry) -> str:
    """What `auto` will take for a class, and why."""
    (name, best), *others = sorted(entry.backends.items(), key=lambda item: item[1].us)
    config = ", ".join(f"{field}={value}" for field, value in best.config.items()) or "its own choice of config"
    behind = ", ".join(f"{other} {digits(measured.us)}" for other, measured in others)
    why = f"the others took {behind} us" if others else "no other backend was measured"
    return f"chosen: {name} with {config}: {digits(best.us)} us, {why} [{entry.key}]"


def _write(path: Path, found: list[Entry], where: dict[str, Any]) -> None:
    """Writes the file of `multigemm cache export`: one class per line, with machine and date."""
    kept = ("date", "commit", "device", "capability", "packages", "cuda")
    origin = {name: where[name] for name in kept if name in where}
    lines = ",\n  ".join(json.dumps(entry.encoded(), sort_keys=True) for entry in found)
    head = f'{{\n "schema": {SCHEMA},\n "origin": {json.dumps(origin, sort_keys=True)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    interrupts.write_whole(path, f'{head} "entries": [\n  {lines}\n ]\n}}\n')


# --- what is kept -----------------------------------------------------------------------------------


@dataclass
class ClassResult:
    """The measurements of one class: `us[choice][workload]`, the configs (text and fields) by choice, and failures."""

    key: str
    us: dict[Choice, dict[str, float]] = field(default_factory=dict)
    configs: dict[Choice, tuple[str, dict[str, Any]]] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def regret(self, choice: Choice) -> float:
        """The worst factor behind the fastest; infinite for a choice that lacks a workload."""
        best: dict[str, float] = {}
        for times in self.us.values():
            for case, us in times.items():
                best[case] = min(us, best.get(case, us))
        mine = self.us[choice]
        return max((mine.get(case, math.inf) / us for case, us in best.items()), default=math.inf)

    def winner(self, backend: str) -> Choice | None:
        """The backend's choice with the least regret; its first config unless another is clearly better."""
        mine = sorted(choice for choice in self.us if choice[0] == backend and math.isfinite(self.regret(choice)))
        if not mine:
            return None
        top = min(mine, key=self.regret)
        first = mine[0]
        return first if first[1] == 0 and self.regret(first) <= FIRST_WINS_WITHIN * self.regret(top) else top


def kept_of(report: Report) -> list[Entry]:
    """What a tuning run stores: the best config of each class and backend."""
    return _winners(_classes([report]), bind=True)


def from_reports(found: Sequence[Report]) -> list[Entry]:
    """The measurements to store from reports of `multigemm bench`, which measured each backend with its own choice of
    config.

    No config is stored, so that the table decides between backends, and each backend's heuristic, which may have learnt
    since, between its configs. Workloads that show what `auto` does untuned do not count.
    """
    tuned = [Report(r.machine, r.method, r.rates, [row for row in r.rows if row.suite != UNTUNED]) for r in found]
    return _winners(_classes(tuned), bind=False)


def _classes(found: Iterable[Report]) -> dict[tuple[str, str], ClassResult]:
    """Results by device and class. Of a workload that several reports measured with one config the mean counts, else
    the last report."""
    classes: dict[tuple[str, str], ClassResult] = {}
    samples: dict[tuple[str, str, Choice, str], list[float]] = {}
    for report in found:
        device = "cpu" if report.machine["device_type"] == "cpu" else report.machine["device"]
        for row, key in _class_rows(report):
            result = classes.setdefault((device, key), ClassResult(key))
            backend, _, number = row.entry.partition("#")
            choice = backend.removesuffix(HOST_SIZES), int(number or 0)
            if row.us is None:
                result.failures.setdefault(choice[0], {})[row.config] = row.reason
                continue
            config, old = (row.config, row.fields), result.configs.get(choice)
            if old is not None and old != config:  # another version of the backend: its old times are of no use
                result.us[choice].clear()
            taken = samples.setdefault((device, key, choice, row.case), [])
            if old is not None and row.case not in result.us[choice]:
                taken.clear()
            taken.append(_us(report, row) if number else row.us)
            result.configs[choice] = config
            result.us.setdefault(choice, {})[row.case] = geomean(taken)
    return classes


def _class_rows(report: Report) -> list[tuple[Row, str]]:
    """Rows of backends with the class that each is about.

    Where a backend was measured with host sizes too, the others' rows count for that class as well: they never look at
    host sizes, and only times of the same workloads can be compared.
    """
    rows = [row for row in report.rows if row.kind == "backend" and row.problem_class and row.reason != LATE]
    found = [(row, row.problem_class) for row in rows]
    for mine in by_case(rows).values():
        knowing = {family(row.entry): row.problem_class for row in mine if family(row.entry).endswith(HOST_SIZES)}
        for row in mine:
            if family(row.entry) not in knowing and family(row.entry) + HOST_SIZES not in knowing:
                found += [(row, key) for key in dict.fromkeys(knowing.values())]
    return found


def _winners(classes: dict[tuple[str, str], ClassResult], bind: bool) -> list[Entry]:
    """The entry to store for each class: each backend's winner with its mean time, and the failures.

    Unless `bind`, configs are left to the backends.
    """
    found = []
    for (device, key), result in classes.items():
        kept = {}
        for backend in dict.fromkeys(name for name, _ in result.us):
            choice = result.winner(backend)
            if choice is not None:
                config = result.configs[choice][1] if bind else {}
                us = round(geomean(result.us[choice].values()), 2)
                kept[backend] = Measured(us, config, dict(result.failures.get(backend, {})))
        if kept:
            found.append(Entry(device, key, kept))
    return found


def _us(report: Report, row: Row) -> float:
    """A config's time: on a CPU, which other processes share, the quantile that they disturb less."""
    on_cpu = report.machine["device_type"] == "cpu"
    return row.eager.q20 if on_cpu and row.eager is not None else row.us or math.inf
