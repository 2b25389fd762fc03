"""`multigemm tune`: measure, show what was tried and what failed, keep the best, write it to share."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

from multigemm.bench import machine, reports
from multigemm.bench.suites import above_zero, add_selection, parts, selected
from multigemm.bench.supervise import Marker, as_child, supervise
from multigemm.bench.tune import Limits, State, Tuner, from_reports, tunable
from multigemm.bench.workloads import Workload
from multigemm.errors import InvalidSetting
from multigemm.fleet import default_device
from multigemm.select.table import SCHEMA, Entry, table

EPILOG = """
  multigemm tune --shape 64,2048,3584,1792        one's own: G, M per group, N, K
  multigemm tune --suite moe --seconds 300    a suite, each backend's first config in any case
  multigemm tune --from-report multigemm-bench/report.json
  multigemm explain --shape 64,2048,3584,1792     what auto runs now, and by which numbers
  multigemm cache export mine.json                to another machine: multigemm cache import mine.json
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Everything `multigemm tune` takes."""
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EPILOG
    add_selection(parser)
    parser.add_argument(
        "--backends", "--backend", default="", help="backends, comma separated (default: all that are here)"
    )
    parser.add_argument("--configs", type=int, default=0, help="how many configs of each backend to try; 0: all")
    parser.add_argument(
        "--seconds",
        "--time-budget",
        type=float,
        default=600.0,
        help="seconds, after which no workload or config is begun",
    )
    parser.add_argument("--no-record", action="store_true", help="measure and show, but keep nothing")
    parser.add_argument("--out", type=Path, default=None, help="also write the measurements to a file to share")
    parser.add_argument("--device", default="", help="cuda, cuda:1, cpu (default: the GPU if there is one)")
    parser.add_argument(
        "--from-report", type=Path, action="append", default=[], help="take what `multigemm bench` has measured"
    )
    parser.add_argument("--stall", type=float, default=90.0, help="seconds without news after which a config hangs")
    parser.add_argument("--marker", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--resume", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--quiet", action="store_true", help="only the summary")


def main(args: argparse.Namespace) -> int:
    """Tunes; 0 if anything was measured."""
    if args.from_report:
        found = from_reports([reports.read(path) for path in args.from_report])
        return _keep(found, args, reports.read(args.from_report[0]).machine)
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
        raise InvalidSetting(f"no backend that could be tuned is here ({why}); see `multigemm info`")
    cases = selected(args, device.type)
    if device.type == "cuda" and args.marker is None:
        return _supervised(args)
    state_file = None if args.marker is None else args.marker.with_name("tuning.json")
    state = State.load(state_file) if state_file and args.resume and state_file.exists() else State(state_file)
    if not args.resume:
        for name, why in absent.items():
            print(f"{name}: not tuned: {why}")
    limits, say = Limits(args.seconds, args.configs), _silent if args.quiet else _loud
    tuner = Tuner(device, backends, limits, say, marker=Marker(args.marker), state=state)
    return as_child(lambda: _tuned(tuner, cases, args), args.marker)


def _tuned(tuner: Tuner, cases: list[Workload], args: argparse.Namespace) -> int:
    found = tuner.run(cases)
    for case in tuner.unfinished:
        print(f"not reached within the time budget: {case}")
    return _keep(found, args, machine.describe(tuner.device))


def _keep(found: list[Entry], args: argparse.Namespace, where: dict[str, Any]) -> int:
    """Shows, records and writes what was found."""
    count = sum(len(entry.backends) for entry in found)
    print(f"measurements: {count}; classes of problems: {len(found)}; on {where['device']}")
    lost = ""
    if found and not args.no_record:
        lost = table().keep(found)
        how = "`multigemm cache` shows it, `multigemm cache export FILE` shares it"
        print(f"not recorded: {lost}" if lost else f"recorded in the cache: {how}")
    if args.out:
        write(args.out, found, where)
        print(f"written: {args.out}")
    return 1 if not found or (lost and not args.out) else 0


def _supervised(args: argparse.Namespace) -> int:
    """The work in a child process, so that a config that hangs is a failure on record."""
    with tempfile.TemporaryDirectory(prefix="multigemm-tune-") as folder:
        marker = Path(folder) / "doing.json"

        def blame(said: dict[str, Any], reason: str) -> list[str] | None:
            file = marker.with_name("tuning.json")
            if not said.get("backend"):
                print(f"tuning ended at {said.get('stage', 'its start')}: {reason}", file=sys.stderr)
                return None
            state = State.load(file) if file.exists() else State(file)
            state.bad.setdefault(said["backend"], {})[said["config"]] = f"{reason} ({said['stage']})"
            state.save()
            return []

        words = ["tune", *args.words]
        return supervise(words, marker, args.stall, blame, args.seconds)


def _loud(text: str) -> None:
    print(text, flush=True)


def _silent(text: str) -> None:
    pass


def write(path: Path, found: list[Entry], where: dict[str, Any]) -> None:
    """The form of `multigemm cache export`, one class per line, with where and when it was measured."""
    kept = ("date", "commit", "device", "capability", "packages", "cuda")
    origin = {name: where[name] for name in kept if name in where}
    lines = ",\n  ".join(json.dumps(entry.encoded(), sort_keys=True) for entry in found)
    head = f'{{\n "schema": {SCHEMA},\n "origin": {json.dumps(origin, sort_keys=True)},\n'
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f'{head} "entries": [\n  {lines}\n ]\n}}\n')
