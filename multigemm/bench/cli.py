"""`multigemm bench`: what it understands, and the order of a run."""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from multigemm import fleet as places
from multigemm.bench import fleet, machine, markdown, page, plots, results, table
from multigemm.bench.compare import compare
from multigemm.bench.entries import Entry, backend_entries, ceiling_entry
from multigemm.bench.method import Options, add_ceilings, new_report
from multigemm.bench.peers import peer_entries
from multigemm.bench.progress import Progress
from multigemm.bench.runner import DeviceLost, Runner
from multigemm.bench.selection import above_zero, add_selection, parts, selected
from multigemm.bench.suites import SUITES, suite
from multigemm.bench.supervise import CONTEXT_LOST, Marker, as_child, supervise
from multigemm.bench.workloads import Rates, Workload
from multigemm.errors import InvalidSetting

STRIKES = 3
LONG_SUITE, LISTED = 100, 5
CPU_GOAL_S = 1.6
"""Seconds per workload on a CPU, which other processes may share: where these take longer, samples become fewer."""
EPILOG = """
  multigemm bench --suite moe                     every backend and peer that is here
  multigemm bench --shape 64,2048,3584,1792       one's own: G, M per group, N, K
  multigemm bench --suite tutorial --style do_bench
  multigemm bench compare old.json new.json       exits 1 if something became slower
  multigemm bench render report.json              table, PNG and HTML again from a report
  multigemm bench list                            suites and their workloads
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything `multigemm bench` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_selection(parser)
    _add_method(parser)
    _add_run(parser)
    commands = parser.add_subparsers(dest="bench_command", metavar="[COMMAND]")
    pair = commands.add_parser(
        "compare", help="what became slower between two reports (or their folders); exits 1 if anything did"
    )
    pair.add_argument("old", type=Path, help="a report.json, or its folder")
    pair.add_argument("new", type=Path, help="another one of the same suites and device")
    again = commands.add_parser("render", help="table, PNG and HTML from a report (or its folder)")
    again.add_argument("report", type=Path, help="a report.json, or its folder, which receives what is drawn")
    again.add_argument("--markdown", action="store_true", help="print Markdown tables instead")
    commands.add_parser("list", help="suites and their workloads")


def _add_method(parser: argparse.ArgumentParser) -> None:
    """Who is measured, and how."""
    parser.add_argument(
        "--backend", default="", help="backends, comma separated, or none (default: all that are here, and auto)"
    )
    parser.add_argument("--peers", default="", help="peers, comma separated, or none (default: all that are here)")
    parser.add_argument(
        "--style", choices=("cold", "do_bench"), default="cold", help="do_bench: as Triton's tutorials measure"
    )
    parser.add_argument("--reps", type=int, default=None, help="rounds at most (default: 300 on a GPU, 100 on a CPU)")
    parser.add_argument(
        "--modes", default="graph,hot,host", help="what to time besides eager calls; graph alone is the shortest"
    )
    parser.add_argument("--budget-ms", type=float, default=None, help="per workload and mode, all entries together")
    parser.add_argument(
        "--rest",
        type=float,
        default=0.0,
        help="per cent of the time in which the device idles, in pauses between bursts of 25 ms (default: 0)",
    )
    parser.add_argument(
        "--time-budget", type=float, default=float("inf"), help="seconds, after which no workload is begun"
    )
    parser.add_argument("--floor", default="", help="TFLOP/s,TB/s to use as ceilings instead of measuring them")


def _add_run(parser: argparse.ArgumentParser) -> None:
    """Where it runs and what becomes of it."""
    parser.add_argument("--out", type=Path, default=Path("multigemm-bench"), help="folder for JSON, PNG and HTML")
    parser.add_argument("--json-only", action="store_true", help="write no page and no plots (render draws them)")
    parser.add_argument("--commit", default="", help="what to call the code where there is no git")
    parser.add_argument("--resume", action="store_true", help="keep the rows that the folder's report already has")
    parser.add_argument(
        "--device", default="", help="cuda:1, cpu (default: all GPUs of the host; under torchrun, this rank's share)"
    )
    parser.add_argument("--share", default="", help="i/n: only every n-th workload from the i-th on")
    parser.add_argument("--stall", type=float, default=90.0, help="seconds without news after which a kernel hangs")
    parser.add_argument("--isolate", action="store_true", help="work in a child process on a CPU as well")
    parser.add_argument("--marker", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--drop", default="", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help="no progress lines")


def main(args: argparse.Namespace) -> int:
    """Runs what was asked; 0, or 1 if a comparison found a regression or nothing could be timed."""
    if args.bench_command == "compare":
        found = compare(results.read(args.old), results.read(args.new))
        print(found.text())
        return 1 if found.regressions else 0
    if args.bench_command == "render" and args.markdown:
        report = results.read(args.report)
        print(f"{markdown.summary(report)}\n\n{markdown.details(report)}")
        return 0
    if args.bench_command == "render":
        return finish(results.read(args.report), args.report if args.report.is_dir() else args.report.parent)
    if args.bench_command == "list":
        for name in SUITES:
            whole = suite(name)
            print(f"{name}: {len(whole)} workloads")
            for case in whole[: LISTED if len(whole) > LONG_SUITE else None]:
                print(f"  {case.key:44s} {case.describe()}")
            if len(whole) > LONG_SUITE:
                print("  ...")
        return 0
    above_zero(args, "reps", "budget_ms", "time_budget", "stall")
    place = places.here()
    if devices := fleet.shared(args, place):
        cases = [case.key for case in selected(args)]
        return fleet.run(_own_words(args), args.out, cases, devices, place, lambda report: _whole(report, args))
    return as_child(lambda: _run(args), args.marker)


def _whole(report: results.Report, args: argparse.Namespace) -> int:
    """The report of all devices, written as that of one would be."""
    report.method["command"] = _repeatable(args)
    args.out.mkdir(parents=True, exist_ok=True)
    results.write(args.out / "report.json", report)
    return _tell(report, args)


def _tell(report: results.Report, args: argparse.Namespace) -> int:
    if not args.json_only:
        return finish(report, args.out)
    print(table.text(report))
    return 0 if report.timed() else 1


def _run(args: argparse.Namespace) -> int:
    device = places.default_device(args.device)
    cases = selected(args)[fleet.part(args.share)]
    if (device.type == "cuda" or args.isolate) and args.marker is None:
        return _supervised(args)
    entries, absent = _entries(args, device)
    options = _options(args, device, cases)
    path = args.out / "report.json"
    kept = args.resume and path.exists()
    report = results.read(path) if kept else new_report(device, {c.dtype for c in cases}, options, absent)
    report.absent |= absent
    if args.commit:
        report.machine["commit"] = args.commit
    report.method["command"] = _repeatable(args)
    if kept:
        _same_run(report, device, args.commit)
    add_ceilings(report, device, {c.dtype for c in cases}, options)
    with Progress(len(cases), quiet=args.quiet) as progress:
        runner = Runner(entries, device, options, report, path, Marker(args.marker), progress.step)
        try:
            runner.run(cases)
        except DeviceLost as lost:
            print(lost, file=sys.stderr)
            return CONTEXT_LOST
    return _tell(report, args)


def _own_words(args: argparse.Namespace) -> list[str]:
    """What the user typed after `multigemm bench`, without what supervision added."""
    words: list[str] = args.words
    return words[: words.index("--marker")] if "--marker" in words else words


def _repeatable(args: argparse.Namespace) -> str:
    """The command as a reader would repeat it: without this machine's paths and its owner's haste."""
    words = iter(_own_words(args))
    kept = []
    for word in words:
        name, joined, _ = word.partition("=")
        if name in ("--out", "--commit", "--stall", "--time-budget"):
            if not joined:
                next(words, None)
        elif word not in ("--resume", "--json-only", "--quiet"):
            kept.append(word)
    return shlex.join(["multigemm", "bench", *kept])


def _supervised(args: argparse.Namespace) -> int:
    """The run in a child process, so that a kernel that hangs or crashes is a row."""
    path: Path = args.out / "report.json"
    if path.exists() and not args.resume:
        path.unlink()
    struck: Counter[str] = Counter()

    def blame(said: dict[str, Any], reason: str) -> list[str] | None:
        rows = [results.row(raw) for raw in said.get("rows", ())]
        if not path.exists() or not rows:
            print(f"the benchmark ended at {said.get('stage', 'its start')}: {reason}", file=sys.stderr)
            return None
        report = results.read(path)
        for row in rows:
            row.status, row.us, row.reason = "failed", None, f"{reason} ({said['stage']})"
        report.rows += rows
        results.write(path, report)
        struck.update({row.entry for row in rows} if len(rows) == 1 else ())
        out = [name for name, count in struck.items() if count >= STRIKES]
        return ["--drop", ",".join(out)] if out else []

    named = [] if args.commit else ["--commit", machine.commit()]  # a fresh child may find another one checked out
    return supervise(
        ["bench", *_own_words(args), *named], args.out / ".doing.json", args.stall, blame, args.time_budget
    )


def _same_run(report: results.Report, device: torch.device, commit: str) -> None:
    """Rows of another commit or machine must not end up in one file."""
    for name, now in (("commit", commit or machine.commit()), ("device", machine.device_name(device))):
        if report.machine[name] != now:
            raise InvalidSetting(
                f"--resume: the report is of {name} {report.machine[name]}, this is {now}: use another --out"
            )


def _entries(args: argparse.Namespace, device: torch.device) -> tuple[list[Entry], dict[str, str]]:
    backends, absent = ([], {}) if args.backend == "none" else backend_entries(parts(args.backend), device)
    peers, missing = ([], {}) if args.peers == "none" else peer_entries(parts(args.peers), device)
    if args.backend not in ("", "none") and not backends:
        why = "; ".join(f"{name}: {reason}" for name, reason in absent.items())
        raise InvalidSetting(f"--backend {args.backend}: nothing of this can run here ({why}); see `multigemm info`")
    dropped = dict.fromkeys(parts(args.drop), f"dropped after hanging or crashing {STRIKES} times")
    entries = [entry for entry in [*backends, *peers, ceiling_entry()] if entry.name not in dropped]
    return entries, {**absent, **missing, **dropped}


def _floor(text: str) -> Rates:
    try:
        tflops, tbps = (float(part) for part in text.split(","))
        if not (0 < tflops < math.inf and 0 < tbps < math.inf):
            raise ValueError("both have to be above 0")
    except ValueError as error:
        raise InvalidSetting(f"--floor {text!r}: write TFLOP/s,TB/s above 0, as in 770,3.0") from error
    return Rates(tflops, tbps)


def _options(args: argparse.Namespace, device: torch.device, cases: list[Workload]) -> Options:
    rates = {c.dtype: _floor(args.floor) for c in cases} if args.floor else None
    reps = args.reps if args.reps is not None else 300 if device.type == "cuda" else 100
    budget = args.budget_ms or (400.0 if device.type == "cuda" else 600.0)
    goal = CPU_GOAL_S * len(cases) if device.type == "cpu" else math.inf
    modes = tuple(parts(args.modes))
    if unknown := set(modes) - {"graph", "hot", "host"}:
        raise InvalidSetting(f"--modes {', '.join(sorted(unknown))}: known are graph, hot and host")
    if not 0.0 <= args.rest < 100.0:
        raise InvalidSetting(f"--rest {args.rest:g}: per cent of the time, from 0 to below 100")
    options = Options(reps, budget, args.time_budget, goal, args.style, modes, rates=rates, rest=args.rest / 100.0)
    return options if args.style == "cold" else replace(options, modes=("host",))


def finish(report: results.Report, folder: Path) -> int:
    """Prints the table and writes the page and, where matplotlib is here, the plots."""
    folder.mkdir(parents=True, exist_ok=True)
    print(table.text(report))
    written = [folder / "report.json", page.write(report, folder / "report.html")]
    if reason := plots.missing():
        print(reason)
    else:
        written += plots.draw(report, folder)
    print("written: " + ", ".join(str(path) for path in written))
    return 0 if report.timed() else 1
