"""compute-sanitizer over chosen problems, one command for all backends and tools:

    python -m multigemm.testing.sanitize --jobs 4
    python -m multigemm.testing.sanitize --backend triton --tools memcheck,racecheck --problems 8

Value oracles cannot see a read outside an allocation whose result is thrown away, nor a race that
happens to end well. memcheck runs without torch's caching allocator and with padding behind every
allocation, so that a neighbour is never hit by accident. initcheck does not see what a vendor's library
writes by TMA and would call all of it unwritten: for backends over libraries, fresh memory is
filled with NaN instead, so that an unwritten element that is used shows in the values.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

from multigemm.testing.case import Case
from multigemm.testing.races import order_of, reports
from multigemm.testing.reads import REASON, foreign
from multigemm.testing.versions import versions

BACKENDS = ("cublas", "triton", "cupy", "numba")
LIBRARIES = ("cublas",)
TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
BARRIERS = ("--num-cuda-barriers", "64")
"""For each thread block. The tools find out by themselves for what nvcc has compiled only; of an mbarrier that they
do not count they know nothing, and take what it orders for races."""
OPTIONS = {"memcheck": ("--padding", "4096"), "racecheck": BARRIERS, "synccheck": BARRIERS}
PROBLEMS = 20
TURNS = 3
"""As in docs/proof.md, so that both find the same compiled kernels."""
T = TypeVar("T")


def command(tool: str, inner: list[str], exclude: str = "") -> list[str]:
    """The sanitizer with a module's own process inside it."""
    left_out = ["--kernel-name-exclude", f"kns={exclude}"] if exclude else []
    given = [*OPTIONS.get(tool, ()), *left_out, "--error-exitcode", "9", "--print-limit", "2000"]
    return ["compute-sanitizer", "--tool", tool, *given, sys.executable, "-W", "ignore", "-m", *inner]


def problems_of(backend: str, tool: str, args: argparse.Namespace) -> list[str]:
    """This module, as it runs the problems."""
    inner = ["multigemm.testing.sanitize", "--inside", backend, "--problems", str(args.problems)]
    inner += ["--kinds", str(args.kinds), "--work", str(args.work)]
    return inner + (["--fill"] if tool == "initcheck" and backend in LIBRARIES else [])


def spread(items: list[T], count: int) -> list[T]:
    """The same items, those far from each other first."""
    step = next(s for s in (7, 11, 13, 17) if count % s)  # without a common divisor
    return [items[i * step % count] for i in range(count)]


def various(pairs: list[tuple[Case, list[Any]]]) -> list[tuple[Case, list[Any]]]:
    """The same pairs, first one for each config."""
    seen: set[Any] = set()
    again = []
    for pair in pairs:
        again.append(pair[1][0] in seen)
        seen.add(pair[1][0])
    return [pair for _, pair in sorted(zip(again, pairs, strict=True), key=lambda entry: entry[0])]


def inside(backend: str, problems: int, kinds: int, work: int, fill: bool) -> int:
    """Runs the problems; the values are judged as well."""
    import torch

    from multigemm.testing.choice import assigned, compile_singly
    from multigemm.testing.oracles import check
    from multigemm.testing.strategies import Limits
    from multigemm.testing.strategies import kinds as kinds_of
    from multigemm.testing.subject import Subject
    from multigemm.testing.world import Stand, World

    torch.set_num_threads(1)
    compile_singly()
    if fill:  # torch fills what `empty` returns in its deterministic mode
        torch.use_deterministic_algorithms(True, warn_only=True)
    device, bad, ran, configs = torch.device("cuda"), 0, 0, set()
    every = kinds_of(Limits(work=work), kinds)
    chosen = list(zip(every, assigned(every, Subject(backend), device, TURNS), strict=True))
    for case, wanted in various([pair for pair in spread(chosen, kinds) if pair[1]])[:problems]:
        subject = Subject(backend)
        subject.pin(wanted[0])
        outcome = check(Stand.build(World.build(case), device), subject)
        ran += outcome.ran
        configs.add(outcome.config)
        bad += not outcome.ok
        for finding in outcome.findings:
            print(f"{case!r}: {finding}")
    print(f"{backend}: {ran} problems ran under {len(configs)} configs, {bad} wrong", flush=True)
    return 1 if bad else 0


def run(words: list[str], seconds: float) -> tuple[str, str]:
    """The verdict of one tool ("clean", "FINDINGS", "wrong values", "timeout") and the end of its output."""
    environment = {
        **os.environ,
        "PYTORCH_NO_CUDA_MEMORY_CACHING": "1",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    try:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired as error:
        text = (error.stdout or b"").decode(errors="replace")
        return "timeout", text[-1500:]
    state = {0: "clean", 9: "FINDINGS", 1: "wrong values"}.get(done.returncode, f"exit code {done.returncode}")
    return state, done.stdout + done.stderr


def set_aside(backend: str, tool: str, text: str, seconds: float) -> tuple[list[str], bool]:
    """What is to be said of a tool's reports, and whether all of them are of what the tool does not follow: listed one
    by one, while it reports the control program too, which is right by construction, and while all values are right."""
    ways = {"racecheck": ordered, "initcheck": foreign_reads}
    said, control = ways[tool](backend, text) if tool in ways else ([], "")
    if not control or ", 0 wrong" not in text:
        return said, False
    state, _ = run(command(tool, ["multigemm.testing.control", control]), seconds)
    return [
        f"{tool} of the control program {control}, which is right by construction: {state}",
        *said,
    ], state == "FINDINGS"


def ordered(backend: str, text: str) -> tuple[list[str], str]:
    """racecheck's reports of orders that it does not follow: a listed hand-over each (multigemm.testing.races)."""
    found, whole = reports(text)
    orders = [order_of(backend, report) for report in found]
    strange = [f"{report}: NOT a known hand-over" for report, order in zip(found, orders, strict=True) if not order]
    if not found or not whole or strange:
        return strange, ""
    said = list[str]()
    for known in dict.fromkeys(order for order in orders if order):
        mine = [str(report) for report, order in zip(found, orders, strict=True) if order is known]
        said += [f"{len(mine)} reports set aside, for these accesses are ordered: {known.reason}", *dict.fromkeys(mine)]
    return said, "hand_over"


def foreign_reads(backend: str, text: str) -> tuple[list[str], str]:
    """initcheck's reports of a library's own kernel (multigemm.testing.reads)."""
    found = foreign(backend, text)
    return ([f"{len(found)} reports set aside: {REASON}"], "grouped_mm") if found else ([], "")


def examine(backend: str, tool: str, args: argparse.Namespace) -> dict[str, Any]:
    """Runs one tool over one backend's problems, prints what it says, and returns that."""
    begin = time.monotonic()
    state, text = run(command(tool, problems_of(backend, tool, args), args.exclude), args.seconds)
    said, excused = set_aside(backend, tool, text, args.seconds) if state == "FINDINGS" else ([], False)
    content = state == "clean" or excused
    rest = f" without {args.exclude}" if args.exclude else ""
    verdict = f"{state}{', all of them set aside' if excused else ''}"
    lines = [line for line in text.splitlines() if "SUMMARY" in line or "problems ran" in line]
    kernels = Counter(re.findall(r"^=========\s+at (.+?)\+0x", text, re.MULTILINE))
    said += [f"{count} reports in {name[:160]}" for name, count in kernels.most_common()]
    shown = "\n".join([*said, *(lines[-2:] if content else text.splitlines()[-25:])])
    spent = time.monotonic() - begin
    print(f"{backend}: {tool}{rest}: {verdict} ({spent:.0f} s)\n{shown}", flush=True)
    return {
        "backend": backend, "tool": tool, "left_out": args.exclude, "state": state, "clean": content,
        "set_aside": said if excused else [], "kernels": dict(kernels), "seconds": round(spent, 1), "said": lines[-2:],
    }  # fmt: skip


def main(arguments: list[str]) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="compute-sanitizer over chosen problems of each backend")
    parser.add_argument("--backend", default=",".join(BACKENDS), help="names, separated by commas")
    parser.add_argument("--inside", default="", help=argparse.SUPPRESS)
    parser.add_argument("--exclude", default="", help="leave out kernels whose name contains this")
    parser.add_argument("--fill", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--tools", default=",".join(TOOLS))
    parser.add_argument("--problems", type=int, default=PROBLEMS)
    parser.add_argument("--kinds", type=int, default=40)
    parser.add_argument("--work", type=int, default=65536)
    parser.add_argument("--seconds", type=float, default=900.0, help="limit for each tool")
    parser.add_argument("--jobs", type=int, default=1, help="so many tools side by side")
    parser.add_argument("--json", default="", help="write all verdicts there")
    args = parser.parse_args(arguments)
    if args.inside:
        return inside(args.inside, args.problems, args.kinds, args.work, args.fill)
    if shutil.which("compute-sanitizer") is None:
        print("compute-sanitizer is not on the PATH: it comes with the CUDA toolkit", file=sys.stderr)
        return 2
    pairs, results = list(product(args.backend.split(","), args.tools.split(","))), list[dict[str, Any]]()
    with ThreadPoolExecutor(args.jobs) as pool:
        for result in pool.map(lambda pair: examine(pair[0], pair[1], args), pairs):
            results.append(result)
            if args.json:  # after each, for whoever is cut off
                summary = {"versions": versions(), "problems": args.problems, "kinds": args.kinds, "runs": results}
                Path(args.json).write_text(json.dumps(summary, indent=1) + "\n")
    clean = sum(result["clean"] for result in results)
    print(f"{clean} of {len(pairs)} runs are clean")
    return 0 if clean == len(pairs) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
