"""`multigemm fuzz`: cross-checks backends on generated problems, or replays stored ones."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multigemm import fleet, interrupts
from multigemm.backends import registry
from multigemm.errors import InvalidSetting
from multigemm.fuzz import campaign, report
from multigemm.fuzz.plan import Options, Summary, Tally
from multigemm.problem.spec import FORMS
from multigemm.settings import settings
from multigemm.testing import check_case, corpus
from multigemm.testing.strategies import DTYPES, Limits

EMULATORS = ("triton", "numba")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}
"""Names of dtypes as the other commands take them."""


def at_least(lowest: float, kind: type = int) -> Callable[[str], Any]:
    """An argparse type: a number, refused below a limit."""

    def read(text: str) -> Any:
        try:
            number = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
        if not number >= lowest:
            raise argparse.ArgumentTypeError(f"{text}: use a number of at least {lowest}")
        return number

    return read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The command's options."""
    _what(parser)
    _how_far(parser)
    _where_to(parser)


def _what(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what is run").add_argument
    any_count, count = partial(add, type=at_least(0)), partial(add, type=at_least(1))
    add("--backends", default="", help="names, separated by commas (default: all that can run on the device)")
    add("--device", default="", help="cuda:1, cpu (default: all GPUs of the host; under torchrun, this rank's share)")
    add("--emulate", action="store_true", help="run triton and numba on CPU tensors, in their emulators")
    add("--forms", default="", help="only these forms, separated by commas")
    dtypes = f"only these dtypes, separated by commas: {', '.join(DTYPES)}, or {', '.join(SHORT)}"
    add("--dtypes", default="", help=dtypes)
    add("--seed", type=int, default=0, help="seed of the problems (default: 0)")
    ways = "first: the backend's own choice; all: every config in turn; pinned: another one for each kind"
    add("--configs", choices=("first", "all", "pinned"), default="first", help=ways)
    kinds = "number of kinds to draw from (default: 100 on a GPU, else 0: no limit); 40 show every required class, and "
    any_count("--kinds", help=f"{kinds}pinned configs may need more")
    count("--turns", default=1, help="with --configs pinned: number of configs for each kind (default: 1)")
    count("--burst", default=25, help="problems of one kind in a row (default: 25)")
    count("--work", default=1 << 17, help="largest number of multiply-adds of a problem (default: 131072)")
    any_count("--large", help="one problem in LARGE has 16 times the work (default: 8 on a GPU, else 0: none)")
    quantised = "one problem in QUANTISED has quantised operands (0: none; default: 8, or 0 with --dtypes)"
    any_count("--quantised", help=quantised)
    fused = "one problem in FUSED picks rows, gates or sums them (0: none; default: 16, or 0 with --dtypes or --forms)"
    any_count("--fused", help=fused)
    deep = "one problem in DEEP also runs on streams, in graphs, in relations, ... (default: 8)"
    count("--deep", default=8, help=deep)


def _how_far(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("how much").add_argument
    count = partial(add, type=at_least(1))
    add("--seconds", type=at_least(0, float), default=0.0, help="stop after this many seconds")
    count("--examples", default=0, help="stop after this many problems (default: 1000 without --seconds)")
    count("--jobs", default=1, help="number of worker processes (default: 1)")


def _where_to(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("what becomes of failures").add_argument
    shrinking = "seconds spent on making a failure small (default: 20)"
    add("--shrink", type=at_least(0, float), default=20.0, metavar="SECONDS", help=shrinking)
    add("--corpus", default="", help="a folder that receives each failure as one JSON file")
    add("--replay", action="append", default=[], metavar="FILE", help="run a stored problem (or a folder of them)")
    add("--json", default="", metavar="FILE", help="write the whole summary to this file")
    add("--quiet", action="store_true", help="no progress line")
    parser.set_defaults(told=False)


def _split(text: str, known: tuple[str, ...], what: str) -> tuple[str, ...]:
    chosen = tuple(SHORT.get(part.strip(), part.strip()) for part in text.split(",") if part.strip())
    for name in chosen:
        if known and name not in known:
            raise InvalidSetting(f"unknown {what} {name!r}: use {', '.join(known)}")
    return chosen


def _emulate() -> None:
    """Sets the environment variable for emulation, which worker processes inherit."""
    os.environ["MULTIGEMM_EMULATE"] = "1"
    settings.cache_clear()


def _device(asked: str, emulate: bool) -> str:
    if asked:
        fleet.default_device(asked)  # raises where there is no such device: every problem would fail there
        return asked
    return "cuda" if torch.cuda.is_available() and not emulate else "cpu"


def _backends(asked: str, device: str) -> tuple[str, ...]:
    if asked:
        chosen = _split(asked, registry.names(), "backend")
        for name in chosen:
            state = registry.get(name).availability()
            if not state.ok:
                raise InvalidSetting(f"backend {name!r} is not available: {state.reason}")
        return chosen
    found = []
    for name in registry.names():
        state = registry.get(name).availability()
        fits = name != "cpu" if device.startswith("cuda") else name == "cpu" or state.emulated
        if state.ok and name != "null" and (fits or name not in registry.BUILTIN):
            found.append(name)
    if not found:
        raise InvalidSetting(f"no backend can run on {device}: see `multigemm info`, or pass --emulate")
    return tuple(found)


def options_of(args: argparse.Namespace) -> Options:
    """The `Options` that the arguments describe."""
    named = _split(args.backends, (), "backend")
    if args.emulate and args.device not in ("", "cpu"):
        raise InvalidSetting(f"--device {args.device} beside --emulate, which runs CPU tensors: leave one of them out")
    if args.emulate or (args.device == "cpu" and any(name in EMULATORS for name in named)):
        _emulate()
        args.emulate = True
    device = _device(args.device, args.emulate)
    on_gpu = device.startswith("cuda")
    limits = Limits(
        work=1 << 13 if args.emulate else args.work,
        groups=24 if args.emulate else 1025,
        longest=80 if args.emulate else 300,
        forms=_split(args.forms, FORMS, "form") or FORMS,  # type: ignore[arg-type]
        dtypes=_split(args.dtypes, DTYPES, "dtype") or DTYPES,
        quantised=(0 if args.dtypes else 8) if args.quantised is None else args.quantised,
        fused=(0 if args.dtypes or args.forms else 16) if args.fused is None else args.fused,
    )
    same = ("seconds", "seed", "jobs", "configs", "deep", "burst", "corpus", "turns")
    return Options(
        backends=_backends(args.backends, device), device=device, limits=limits, shrink_seconds=args.shrink,
        examples=args.examples or (0 if args.seconds else 1000),
        kinds=(100 if on_gpu else 0) if args.kinds is None else args.kinds,
        large=(8 if on_gpu else 0) if args.large is None else args.large,
        **{name: getattr(args, name) for name in same},
    )  # fmt: skip


class _Progress:
    """Progress: a line that is rewritten on a terminal, or printed now and then in a log. Also writes the summary so
    far, so that an interrupted campaign leaves its counts."""

    def __init__(self, options: Options, quiet: bool, target: str) -> None:
        self._options, self._quiet, self._target = options, quiet, target
        self._every, self._last = (1.0 if sys.stderr.isatty() else 15.0), time.monotonic()
        self._saved = time.monotonic()

    def __call__(self, tally: Tally, seconds: float) -> None:
        if self._target and time.monotonic() - self._saved > 10:
            self._saved = time.monotonic()
            _write_json(Summary(self._options, tally, seconds, notes=["unfinished"]), self._target)
        if self._quiet or time.monotonic() - self._last < self._every:
            return
        self._last = time.monotonic()
        end = "\r" if sys.stderr.isatty() else "\n"
        print(report.progress_line(tally, seconds), end=end, file=sys.stderr, flush=True)


def _write_json(summary: Summary, target: str) -> None:
    Path(target).parent.mkdir(parents=True, exist_ok=True)
    interrupts.write_whole(Path(target), json.dumps(report.to_dict(summary), indent=1) + "\n")


def _make_room(args: argparse.Namespace) -> None:
    """Creates the output folders before the campaign, so that its results are not lost."""
    for option, name, folder in (("--corpus", args.corpus, args.corpus), ("--json", args.json, Path(args.json).parent)):
        try:
            if name:
                Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InvalidSetting(f"{option} {name}: the folder cannot be made: {error}") from error
    if args.json and Path(args.json).is_dir():
        raise InvalidSetting(f"--json {args.json} is a folder: name a file")


def _stored(name: str) -> list[Path]:
    """The stored problems of a file or folder."""
    if not Path(name).is_dir():
        return [Path(name)]
    if found := sorted(Path(name).glob("*.json")):
        return found
    raise InvalidSetting(f"{name} holds no stored problem: name a file that --corpus wrote, or a folder of them")


def replay(files: list[str], args: argparse.Namespace) -> int:
    """Runs stored problems on every chosen backend. Returns 1 if any fails."""
    options, bad = options_of(args), 0
    for path in [path for name in files for path in _stored(name)]:
        entry = corpus.load(path)
        for name in options.backends:
            outcome = check_case(entry.case, name, options.device, entry.config if name == entry.backend else 0)
            state = "refused: " + "; ".join(outcome.refusals) if not outcome.ran else "right" if outcome.ok else "WRONG"
            print(f"{entry.name}: {name}: {state}")
            for finding in outcome.findings:
                print(f"  {finding}")
            bad += not outcome.ok
    return 1 if bad else 0


def main(args: argparse.Namespace) -> int:
    """Runs the campaign or the replay. Returns 0 if nothing disagreed."""
    if args.replay:
        return replay(args.replay, args)
    place, options = fleet.here(), options_of(args)
    _make_room(args)
    mine = campaign.of_rank(options, place)
    rank = f", rank {place.rank} of {place.ranks}" if place.ranks > 1 else ""
    print(
        f"multigemm fuzz: {', '.join(mine.backends)} on {', '.join(mine.devices)}, {mine.jobs} job(s), "
        f"seed {mine.seed}{rank}", flush=True,
    )  # fmt: skip
    saved = args.json if place.ranks == 1 else ""  # the whole is written at the end
    summary = campaign.run_on_ranks(options, place, _Progress(mine, args.quiet or place.rank > 0, saved))
    if summary is None:
        return 0  # rank 0 tells, and fails where any rank found something
    with interrupts.held():
        if args.json:
            _write_json(summary, args.json)
        args.told = True
        print(report.to_text(summary), flush=True)
    if summary.interrupted:
        print(_after_ctrl_c(summary, args), file=sys.stderr)
        return 130
    return 1 if report.failed(summary) else 0


def _after_ctrl_c(summary: Summary, args: argparse.Namespace) -> str:
    """Reports what was kept, where, and how to continue."""
    files = " and ".join(filter(None, (args.json, args.corpus and f"{args.corpus} (failures)")))
    kept = f"kept in {files}" if files else "the counts are above, and in no file (--json FILE keeps them)"
    words = [*args.words, "--seed", str(summary.next_seed)]  # of an option that is given twice the last counts
    return (
        f"\nstopped after {summary.tally.problems} problems; {kept}\n"
        f"go on with others: {shlex.join(['multigemm', 'fuzz', *words])}"
    )


def interrupted(args: argparse.Namespace) -> None:
    """Reports after Ctrl-C outside of the campaign itself."""
    if args.told or args.replay:
        return
    if args.json:
        _write_json(Summary(Options(()), Tally(), 0.0, interrupted=True), args.json)
    print("\nstopped before anything was checked", file=sys.stderr)
