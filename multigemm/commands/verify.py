"""`multigemm verify`: a problem from a file through every available backend, each result checked."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from multigemm.api import plan
from multigemm.backends.registry import candidates, get
from multigemm.bench import own
from multigemm.bench.reports import digits
from multigemm.bench.workloads import parts
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.reference.verify import Answer, answer, judge
from multigemm.select.timing import measure


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("problem", type=Path, help="a Python file that defines `problem`, a GroupedGemmProblem")
    backends = "backends, separated by commas (default: all that are available)"
    parser.add_argument("--backends", default="", help=backends)


def main(args: argparse.Namespace) -> int:
    """Solves, checks and times. Returns 1 if a backend was wrong, or none ran."""
    return check(own.load(args.problem), parts(args.backends))


def check(problem: GroupedGemmProblem, names: Sequence[str] = ()) -> int:
    """Prints one line per backend, and how far their results differ. Writes none of the caller's arrays."""
    for name in names:
        get(name)  # raises for one that does not exist
    posed = problem if problem.out is None else own.with_own_result(problem)
    print(f"problem: {posed}\n")
    print(f"{'backend':9}{'kernel':34}{'check':8}{'worst rho':>12}{'first call':>12}{'median':>12}")
    expected, failed = answer(posed), 0
    results: dict[str, list[Any]] = {}
    for candidate in candidates(staged_spec(posed), posed.device):
        if candidate.name == "null" or (names and candidate.name not in names):
            continue
        if not candidate.can:
            print(f"{candidate.name:9}cannot run: {candidate.availability.reason or '; '.join(candidate.reasons)}")
            continue
        failed += not _show(posed, candidate.name, candidate.availability.emulated, expected, results)
    print(f"\n{_agreement(results)}\nrho: the largest error, in units of an ordinary rounding error")
    return 1 if failed or not results else 0


def _show(
    problem: GroupedGemmProblem, name: str, emulated: bool, expected: Answer, results: dict[str, list[Any]]
) -> bool:
    device, start = problem.device, time.perf_counter()
    ready = plan(problem, name)
    out = ready()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first = time.perf_counter() - start
    verdict = judge(expected, out)
    results[name] = [
        torch.as_tensor(x).detach().double().cpu().numpy() for x in (out if isinstance(out, list) else [out])
    ]
    timing = "emulated" if emulated else f"{digits(measure({name: ready}, device)[name].median)} us"
    state = "ok" if verdict.ok else "WRONG"
    print(f"{name:9}{ready.kernel[:32]:34}{state:8}{verdict.rho:12.3f}{first * 1e3:9.0f} ms{timing:>12}")
    if not verdict.ok:
        print(verdict)
    return verdict.ok


def _agreement(results: dict[str, list[Any]]) -> str:
    names = sorted(results)
    pairs = [(x, y) for i, x in enumerate(names) for y in names[i + 1 :]]
    if not names:
        return "no backend ran"
    if not pairs:
        return f"one backend ran: {names[0]}; every result was checked against the NumPy reference"
    worst = max(
        float(np.abs(a - b).max(initial=0)) for x, y in pairs for a, b in zip(results[x], results[y], strict=True)
    )
    return f"{len(names)} backends, {len(pairs)} pairs: largest difference between two of them {worst:.3g}"
