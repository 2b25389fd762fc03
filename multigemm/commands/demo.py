"""`multigemm demo`: one jagged problem, every backend that is here, one verified answer."""

from __future__ import annotations

import argparse
import time
from typing import Any

import numpy as np
import torch

from multigemm.api import plan
from multigemm.fleet import default_device
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.reference.verify import verify
from multigemm.select.registry import candidates
from multigemm.select.timing import measure

SIZES = [40, 0, 1, 70, 17]
N, K = 72, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", default="", help="cpu or cuda; the default is cuda where there is one")
    parser.add_argument("--dtype", default="bfloat16", choices=("float16", "bfloat16", "float32", "float64"))


def main(args: argparse.Namespace) -> int:
    """Solves, checks and times; exit code 1 if any backend that ran was wrong."""
    device = default_device(args.device)
    problem = _problem(device, getattr(torch, args.dtype))
    print(f"{len(SIZES)} products, rows {SIZES}, N={N}, K={K}, {args.dtype}, on {device}")
    print(f"problem: {problem}\n")
    print(f"{'backend':9}{'kernel':34}{'check':8}{'worst rho':>12}{'first call':>12}{'median':>12}")
    results: dict[str, Any] = {}
    failed = 0
    for candidate in candidates(staged_spec(problem), device):
        if candidate.name == "null":
            continue
        if not candidate.can:
            reason = candidate.availability.reason or "; ".join(candidate.reasons)
            print(f"{candidate.name:9}not here: {reason}")
            continue
        failed += not _show(problem, candidate.name, candidate.availability.emulated, device, results)
    print(f"\n{_agreement(results)}")
    return 1 if failed else 0


def _problem(device: torch.device, dtype: torch.dtype) -> GroupedGemmProblem:
    generator = torch.Generator().manual_seed(0)
    a = torch.randn(sum(SIZES) + 3, K, generator=generator).to(dtype).to(device)
    b = torch.randn(len(SIZES), K, N, generator=generator).to(dtype).to(device)
    return GroupedGemmProblem(a, b, sizes=SIZES, activation="silu")


def _show(
    problem: GroupedGemmProblem, name: str, emulated: bool, device: torch.device, results: dict[str, Any]
) -> bool:
    start = time.perf_counter()
    ready = plan(problem, name)
    out = ready()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    first = time.perf_counter() - start
    verdict = verify(problem, out)
    results[name] = out.detach().float().cpu().numpy()
    timing = "emulated" if emulated else f"{measure({name: ready}, device)[name].median:.1f} us"
    state = "ok" if verdict.ok else "WRONG"
    print(f"{name:9}{ready.kernel[:32]:34}{state:8}{verdict.rho:12.3f}{first * 1e3:9.0f} ms{timing:>12}")
    if not verdict.ok:
        print(verdict)
    return verdict.ok


def _agreement(results: dict[str, Any]) -> str:
    names = sorted(results)
    pairs = [(x, y) for i, x in enumerate(names) for y in names[i + 1 :]]
    if not pairs:
        return f"one backend ran: {', '.join(names)}; every result was checked against the NumPy reference"
    worst = max(float(np.abs(results[x] - results[y]).max()) for x, y in pairs)
    return f"{len(names)} backends, {len(pairs)} pairs: largest difference between two of them {worst:.3g}"
