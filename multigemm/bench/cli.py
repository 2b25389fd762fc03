"""`multigemm bench`: its options, the order of a run, and the progress shown to the user."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multigemm import fleet, interrupts
from multigemm.backends import registry
from multigemm.bench import layers, machine, operands, own, plots, processes, ranks, reports, table
from multigemm.bench.compare import compare
from multigemm.bench.entries import Entry, backend_entries, ceiling_entry
from multigemm.bench.peers import peer_entries
from multigemm.bench.processes import CONTEXT_LOST, Marker, as_child, supervise
from multigemm.bench.reports import Report
from multigemm.bench.runner import Data, DeviceLost, Options, Progress, Runner, add_ceilings, new_report
from multigemm.bench.suites import SUITES, above_zero, add_selection, asks_nothing, selected, suite
from multigemm.bench.workloads import Rates, Workload, parts
from multigemm.errors import InvalidSetting

COMPILING = 0.6
"""The part of --seconds that compilation ahead may take."""
UNASKED_S = 30.0
"""Seconds after which a run on a CPU that nothing was asked of begins no further workload."""
LOCAL_OPTIONS = ("--out", "--json", "--commit", "--stall", "--seconds")
LOCAL_FLAGS = ("--resume", "--json-only", "--quiet")
"""What a kept command leaves out: paths of this machine, and its owner's haste."""
EPILOG = """
  multigemm bench --suite moe                     every available backend and installed peer
  multigemm bench --shape 64,2048,3584,1792       one's own: G, M per group, N, K
  multigemm bench --problem mine.py               one's own tensors: the file defines `problem`
  multigemm bench --suite tutorial --style do_bench
  multigemm bench --suite layers                  whole mixture-of-experts layers, forward and training
  multigemm bench --list                          suites and their workloads
  multigemm bench compare old.json new.json       exits 1 if something became slower
  multigemm bench render report.json              table, plots and page again from a report
  multigemm bench embed README.md                 the tables of a page again from their reports
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of `multigemm bench`."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_selection(parser)
    _add_method(parser)
    _add_run(parser)
    commands = parser.add_subparsers(dest="bench_command", metavar="[COMMAND]")
    pair = commands.add_parser(
        "compare", help="show what became slower between two reports (or their folders); exits 1 if anything did"
    )
    pair.add_argument("old", type=Path, help="a report.json, or its folder")
    pair.add_argument("new", type=Path, help="a later report of the same suites and device")
    again = commands.add_parser("render", help="draw table, plots and page again from a report (or its folder)")
    again.add_argument("report", type=Path, help="a report.json, or its folder, which receives what is drawn")
    chart = (
        "write PREFIX-light.svg and PREFIX-dark.svg instead: a chart of the suite that ends PREFIX, as docs/assets/moe"
    )
    again.add_argument("--chart", type=Path, metavar="PREFIX", help=chart)
    pages = commands.add_parser("embed", help="draw the tables of Markdown pages again from the reports that they name")
    pages.add_argument("pages", type=Path, nargs="+", help="Markdown files; run it where their paths begin")
    pages.add_argument("--check", action="store_true", help="change nothing; exit 1 if a page differs from its reports")
    ranks.add_arguments(commands.add_parser("ranks", help="measure layers of experts over many GPUs, under torchrun"))
    parser.set_defaults(began=False)


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Adds the options for who is measured, and how."""
    add = parser.add_argument_group("who is measured, and how").add_argument
    add("--problem", type=Path, help="a Python file that defines `problem`, a GroupedGemmProblem, instead of a suite")
    names = "backends, auto and auto-static, separated by commas, or none (default: all that are available, and auto)"
    add("--backends", default="", help=names)
    add("--peers", default="", help="peers, separated by commas, or none (default: all that are installed)")
    configs = "time this many configs of each backend (default: only the one that it chooses)"
    add("--configs", type=int, default=0, help=configs)
    promise = "time each backend also with batch_invariant=True, and show what that costs"
    add("--batch-invariant", action="store_true", help=promise)
    styles = "cold (default): with cold caches; do_bench: as Triton's tutorials measure"
    add("--style", choices=("cold", "do_bench"), default="cold", help=styles)
    add("--reps", type=int, help="largest number of rounds (default: 300 on a GPU, 100 on a CPU)")
    modes = "what to time besides eager calls (default: graph,hot,host); graph alone is the shortest run"
    add("--modes", default="graph,hot,host", help=modes)
    add("--budget-ms", type=float, help="milliseconds for each workload and mode, all entries together")
    idle = "per cent of the time in which the device idles between bursts of 25 ms (default: 0)"
    add("--rest", type=float, default=0.0, help=idle)
    limit = f"default: {UNASKED_S:g} on a CPU for the usual suite, else no limit"
    add("--seconds", type=float, help=f"seconds after which no workload begins ({limit})")
    add("--energy", action="store_true", help="measure the joules of a call too, if the GPU counts them (NVML)")
    add("--floor", default="", help="ceilings in TFLOP/s,TB/s instead of measured ones, as in 770,3.0")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Adds the options for devices, output and supervision."""
    add = parser.add_argument_group("where it runs, and what becomes of it").add_argument
    add("--list", action="store_true", help="print the suites, or those of --suite, and their workloads")
    out = Path("multigemm-bench")
    add("--out", type=Path, default=out, help=f"folder for report.json, report.md and plots (default: {out})")
    add("--json", type=Path, metavar="FILE", help="also write the report's JSON to this file")
    add("--json-only", action="store_true", help="write no page and no plots (render draws them)")
    add("--commit", default="", help="commit to name in the report if there is no git")
    add("--resume", action="store_true", help="keep the rows that the folder's report already has")
    where = "cuda:1, cpu (default: all GPUs of the host; under torchrun, this rank's share)"
    add("--device", default="", help=where)
    add("--share", default="", help=argparse.SUPPRESS)  # i/n: a part of a run over many devices
    add("--workers", type=int, default=0, help="first compile all workloads for all backends in this many processes")
    late = "seconds without progress after which a kernel counts as hanging (default: 90)"
    add("--stall", type=float, default=90.0, help=late)
    add("--isolate", action="store_true", help="measure in a child process on a CPU too, as on a GPU")
    add("--marker", type=Path, default=None, help=argparse.SUPPRESS)
    add("--quiet", action="store_true", help="no progress lines")


def main(args: argparse.Namespace) -> int:
    """Runs the command. Returns 0, or 1 if a comparison found a regression or nothing could be timed."""
    if args.bench_command == "compare":
        found = compare(reports.read(args.old), reports.read(args.new))
        print(found.text())
        return 1 if found.regressions else 0
    if args.bench_command == "render":
        report = reports.read(args.report)
        if args.chart:
            print("written: " + ", ".join(map(str, plots.charts(report, args.chart))))
            return 0
        return finish(report, args.report if args.report.is_dir() else args.report.parent)
    if args.bench_command == "embed":
        return table.embed(args.pages, args.check)
    if args.bench_command == "ranks":
        return ranks.main(args)
    if args.list:
        return _list(parts(args.suite))
    above_zero(args, "reps", "budget_ms", "seconds", "stall")
    if args.json and args.json.is_dir():  # before the measurements, which would be lost
        raise InvalidSetting(f"--json {args.json} is a folder: name a file")
    if args.problem and (args.suite or args.shape):
        raise InvalidSetting("--problem beside --suite or --shape: name one of them")
    with interrupts.of_termination():
        return as_child(lambda: _measure(args), args.marker)


def _list(asked: list[str]) -> int:
    """Prints the requested suites, or all of them."""
    for name in asked or SUITES:
        cases = suite(name)
        print(f"{name}: {len(cases)} workloads")
        for case in cases:
            print(f"  {case.key:44s} {case.describe()}")
    return 0


# --- a run ------------------------------------------------------------------------------------------


def _measure(args: argparse.Namespace) -> int:
    """Runs the benchmark on many devices, in a child process, or in this process."""
    path: Path = args.out / "report.json"
    place = fleet.here()
    devices = () if args.problem else processes.devices_of_run(args, place)
    if devices:
        cases, words = selected(args, torch.device(devices[0])), _own_words(args)
        if place.rank == 0:
            _begin(args, path)
        keys = [case.key for case in cases]
        report = processes.run_on_devices(words, _repeatable(args), args.out, keys, devices, place)
        return int(place.rank == 0) if report is None else _tell(report, args)
    device = fleet.default_device(args.device)
    if (device.type == "cuda" or args.isolate) and args.marker is None:
        _begin(args, path)
        return _supervised(args, path)
    return _run(args, path, device)


def _begin(args: argparse.Namespace, path: Path) -> None:
    """Replaces the folder's report by that of this run."""
    if args.marker is None and not args.resume:
        path.unlink(missing_ok=True)
    args.began = True


def _run(args: argparse.Namespace, path: Path, device: torch.device) -> int:
    """Runs the benchmark on one device in this process."""
    cases, tensors_of = _workloads(args, device)
    entries, absent = _entries(args, device, cases)
    options, dtypes = _options(args, device, cases), {case.dtype for case in cases}
    if not args.quiet and (warning := machine.load_warning(device)):
        print(warning, file=sys.stderr)
    _begin(args, path)
    kept = args.resume and path.exists()
    if args.resume and not kept and args.marker is None and not args.quiet:
        print(f"--resume: {path} does not exist, so this run begins anew", file=sys.stderr)
    report = reports.read(path) if kept else new_report(device, dtypes, options, absent)
    report.absent |= absent
    if args.commit:
        report.machine["commit"] = args.commit
    report.method["command"] = _repeatable(args)
    if kept:
        _same_run(report, device, args.commit)
    add_ceilings(report, device, dtypes, options)
    progress, marker = Progress(args.quiet), Marker(args.marker)
    if args.workers and not kept:
        ours = [entry.name for entry in entries if entry.name in registry.names()]
        products = [case for case in cases if case.form != "layer"]
        processes.compile_ahead(products, ours, device, args.workers, COMPILING * options.total_s, marker)
    runner = Runner(lambda case: entries, device, options, report, path, marker, progress, tensors_of)
    try:
        runner.run(cases)
    except DeviceLost as lost:
        print(lost, file=sys.stderr)
        return CONTEXT_LOST
    return _tell(report, args)


def _workloads(args: argparse.Namespace, device: torch.device) -> tuple[list[Workload], Any]:
    """The workloads to measure, and the function that makes their tensors."""
    if not args.problem:
        return selected(args, device)[processes.part(args.share)], _make
    posed = own.load(args.problem)
    if posed.device != device:
        raise InvalidSetting(
            f"--problem {args.problem}: its operands are on {posed.device}: say --device {posed.device}"
        )
    tensors = own.own_tensors(posed, args.problem.stem)
    return [tensors.workload], lambda case, device: tensors


def _make(case: Workload, device: torch.device) -> Data:
    return layers.make_layer(case, device) if isinstance(case, layers.LayerCase) else operands.make(case, device)


def interrupted(args: argparse.Namespace) -> None:
    """Reports after Ctrl-C what was kept, where, and how to resume. The folder's report already holds what was
    measured."""
    path: Path = args.out / "report.json"
    if args.bench_command or args.marker or args.share or fleet.here().rank:
        return  # a part of a run, whose parent says it
    measured = args.began and path.exists()
    report = reports.read(path) if measured else Report({}, {}, {})
    if args.json:
        reports.write(args.json, report)
    if not report.rows:
        print("\nstopped before anything was measured", file=sys.stderr)
        return
    words = [word for word in _own_words(args) if word != "--resume"]
    print(
        f"\nstopped: workloads measured: {len(report.cases())}, left: {len(report.unfinished)}; kept in {path}\n"
        f"go on: {shlex.join(['multigemm', 'bench', *words, '--resume'])}\n"
        f"look at it: multigemm bench render {shlex.quote(str(args.out))}",
        file=sys.stderr,
    )


def _tell(report: Report, args: argparse.Namespace) -> int:
    if args.json:
        reports.write(args.json, report)
    if not args.json_only:
        return finish(report, args.out)
    print(table.text(report))
    return 0 if report.timed() else 1


def finish(report: Report, folder: Path) -> int:
    """Prints the table and writes the page and, if matplotlib is installed, the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    print(table.text(report))
    pictures = []
    if reason := plots.missing():
        print(reason)
    else:
        pictures = plots.draw(report, folder)
    (folder / "report.md").write_text(table.page(report, pictures))
    written = [folder / "report.json", folder / "report.md", *pictures]
    print("written: " + ", ".join(str(path) for path in written))
    return 0 if report.timed() else 1


def _own_words(args: argparse.Namespace) -> list[str]:
    """The arguments that the user typed after `multigemm bench`, without those that supervision added."""
    words: list[str] = args.words
    return words[: words.index("--marker")] if "--marker" in words else words


def _repeatable(args: argparse.Namespace) -> str:
    """The command line that repeats this run."""
    words = iter(_own_words(args))
    kept = []
    for word in words:
        name, joined, _ = word.partition("=")
        if name in LOCAL_OPTIONS:
            if not joined:
                next(words, None)
        elif word not in LOCAL_FLAGS:
            kept.append(word)
    return shlex.join(["multigemm", "bench", *kept])


def _supervised(args: argparse.Namespace, path: Path) -> int:
    """Runs in a child process, so that a kernel that hangs or crashes becomes a row."""
    named = [] if args.commit else ["--commit", machine.commit()]  # a fresh child may find another one checked out
    words, marker = ["bench", *_own_words(args), *named], args.out / ".doing.json"
    return supervise(words, marker, path, args.stall, math.inf if args.seconds is None else args.seconds)


def _same_run(report: Report, device: torch.device, commit: str) -> None:
    """Refuses to add rows of another commit or machine to a report."""
    for name, now in (("commit", commit or machine.commit()), ("device", machine.device_name(device))):
        if report.machine[name] != now:
            raise InvalidSetting(
                f"--resume: the report is of {name} {report.machine[name]}, this is {now}: use another --out"
            )


def _entries(
    args: argparse.Namespace, device: torch.device, cases: list[Workload]
) -> tuple[list[Entry], dict[str, str]]:
    names = parts(args.backends)
    backends, absent = list[Entry](), dict[str, str]()
    if names != ["none"]:
        backends, absent = backend_entries(names, device, args.configs, args.batch_invariant)
    peers, missing = ([], {}) if args.peers == "none" else peer_entries(parts(args.peers), device, cases)
    if names not in ([], ["none"]) and not backends:
        why = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise InvalidSetting(f"--backends {args.backends}: nothing of this can run here ({why}); see `multigemm info`")
    whole = layers.layer_entries(names) if names != ["none"] else []
    return [*backends, *whole, *peers, ceiling_entry()], {**absent, **missing}


def _floor(text: str) -> Rates:
    try:
        tflops, tbps = (float(part) for part in text.split(","))
        if not (0 < tflops < math.inf and 0 < tbps < math.inf):
            raise ValueError("both have to be above 0")
    except ValueError as error:
        raise InvalidSetting(f"--floor {text!r}: write TFLOP/s,TB/s above 0, as in 770,3.0") from error
    return Rates(tflops, tbps)


def _options(args: argparse.Namespace, device: torch.device, cases: list[Workload]) -> Options:
    modes = tuple(parts(args.modes))
    if unknown := set(modes) - {"graph", "hot", "host"}:
        raise InvalidSetting(f"--modes {', '.join(sorted(unknown))}: known are graph, hot and host")
    if not 0.0 <= args.rest < 100.0:
        raise InvalidSetting(f"--rest {args.rest:g}: per cent of the time, from 0 to below 100")
    unasked = asks_nothing(args) and device.type == "cpu" and args.seconds is None
    seconds = UNASKED_S if unasked else args.seconds
    given = {"reps": args.reps, "budget_ms": args.budget_ms, "total_s": seconds}
    return replace(
        Options.usual(device, len(cases)),
        **{name: value for name, value in given.items() if value is not None},
        style=args.style,
        modes=modes if args.style == "cold" else ("host",),
        rates={case.dtype: _floor(args.floor) for case in cases} if args.floor else None,
        rest=args.rest / 100.0,
        energy=args.energy,
    )
