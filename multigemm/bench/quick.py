"""Times one backend's kernels directly, without dispatch: the tool to have open while writing a kernel.

    python -m multigemm.bench.quick --backend cupy --suite moe --only dsv3,fine --peer

Each case is checked against a float32 loop first, then timed cold (the better of an eager call
and a CUDA-graph replay). Prints microseconds, TFLOP/s and the fraction of the floor, and geometric
means per distribution.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
from collections import defaultdict
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from multigemm.bench.check import Reference, reference
from multigemm.bench.operands import Tensors, as_operands, make, poison
from multigemm.bench.suites import suite
from multigemm.bench.workloads import Rates, Workload, geomean, parse_shape, with_dtype
from multigemm.errors import MultigemmError
from multigemm.select import registry
from multigemm.select.timing import Call, describe, measure


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m multigemm.bench.quick", description=__doc__.splitlines()[0])
    parser.add_argument("--backend", default="", help="names, comma separated: triton, cupy, numba, cublas, cpu")
    parser.add_argument("--suite", default="moe")
    parser.add_argument("--shape", action="append", default=[], help="one's own workload, instead of the suite")
    parser.add_argument("--only", default="", help="parts of names, comma separated")
    parser.add_argument("--dist", default="", help="distributions to keep, comma separated")
    parser.add_argument("--dtype", default="", help="replaces the workloads' dtype")
    parser.add_argument("--nt", action="store_true", help="B as the transpose of [G, N, K] memory")
    parser.add_argument("--configs", type=int, default=1, help="how many of the backend's candidates to time; 0: all")
    parser.add_argument("--peer", action="store_true", help="also torch.nn.functional.grouped_mm, or the torch loop")
    parser.add_argument("--reps", type=int, default=30)
    parser.add_argument("--budget-ms", type=float, default=150.0, help="per case, for all variants together")
    parser.add_argument("--hot", action="store_true", help="also 20 calls back to back, and host time per call")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--json", type=Path, default=None)
    return parser


def chosen(args: argparse.Namespace) -> list[Workload]:
    """The workloads that the arguments name."""
    cases = [parse_shape(text) for text in args.shape] or suite(args.suite)
    cases = [with_dtype(case, args.dtype) if args.dtype else case for case in cases]
    cases = [replace(case, trans_b=True) if args.nt else case for case in cases]
    only, dists = [p for p in args.only.split(",") if p], [p for p in args.dist.split(",") if p]
    cases = [c for c in cases if not only or any(part in c.key for part in only)]
    return [c for c in cases if not dists or c.distribution in dists]


def launches(tensors: Tensors, backend: str, count: int, device: torch.device) -> dict[str, Call | str]:
    """A bound launch per config, by label; or the reason why there is none."""
    implementation = importlib.import_module(f"multigemm.backends.{backend}").BACKEND
    ops = as_operands(tensors)
    here = implementation.availability()
    reasons = [here.reason] if not here.ok else implementation.not_supported_reasons(ops.spec, device)
    if reasons:
        return {backend: "; ".join(reasons)}
    found: dict[str, Call | str] = {}
    configs = list(implementation.configs(ops.spec, device))
    for config in configs[: count or None]:
        label = backend if count == 1 else f"{backend} {config}"
        try:
            launch = implementation.plan(ops.spec, config, device).bind(ops)
            found[label] = partial(_launched, launch, ops)
        except Exception as error:  # one config's failure is a row; the others are still worth timing
            found[label] = describe(error)
    return found


def _launched(launch: Call, _operands: object) -> None:
    """A launch keeps no operand alive; this call does."""
    launch()


def torch_call(tensors: Tensors) -> Call:
    """The peer: grouped_mm where its layout rules allow it, else a loop of torch.mm."""
    from multigemm.bench.check import group_inputs, group_outputs

    grouped = getattr(torch.nn.functional, "grouped_mm", getattr(torch, "_grouped_mm", None))
    form = tensors.workload.form
    if grouped is not None and tensors.offsets is not None and form in ("jagged_m", "jagged_k"):
        a, b, ends = tensors.a, tensors.b, tensors.offsets[1:].contiguous()
        if tensors.workload.dtype == "bf16" and not tensors.workload.shared_b and tensors.offsets.is_cuda:
            return lambda: grouped(a, b, offs=ends)
    pairs = [
        (a, b, out)
        for (a, b), out in zip(group_inputs(tensors), group_outputs(tensors, tensors.out), strict=True)
    ]  # fmt: skip

    def loop() -> None:
        for a, b, out in pairs:
            torch.mm(a, b, out=out)

    return loop


def checked(call: Call, tensors: Tensors, truth: Reference) -> str:
    """Runs once on a poisoned output; the verdict in words, empty when right."""
    poison(tensors)
    try:
        call()
        if tensors.workload and torch.cuda.is_available():
            torch.cuda.synchronize()
    except Exception as error:  # reported as this case's row
        return describe(error)
    return truth.verdict(tensors.out)


def rows(case: Workload, args: argparse.Namespace) -> list[dict[str, Any]]:
    """All variants of one case, checked and timed."""
    device = torch.device(args.device)
    tensors = make(case, device)
    truth = reference(tensors)
    found: dict[str, Call | str] = {}
    for backend in [name for name in args.backend.split(",") if name]:
        try:
            found.update(launches(tensors, backend, args.configs, device))
        except Exception as error:  # a backend that does not even import is a row as well
            found[backend] = describe(error)
    failures = {name: call for name, call in found.items() if isinstance(call, str)}
    calls = {name: call for name, call in found.items() if not isinstance(call, str)}
    for name, call in list(calls.items()):
        verdict = checked(call, tensors, truth)
        if verdict:
            failures[name] = verdict
            del calls[name]
    del truth
    if args.peer:
        calls["torch"] = torch_call(tensors)
    return _timed(case, calls, failures, device, args)


def _timed(
    case: Workload, calls: dict[str, Call], failures: dict[str, str], device: torch.device, args: argparse.Namespace
) -> list[dict[str, Any]]:
    modes = ["cold"] + (["graph"] if device.type == "cuda" else []) + (["hot", "host"] if args.hot else [])
    taken = {mode: measure(calls, device, mode, reps=args.reps, budget_ms=args.budget_ms) for mode in modes}  # type: ignore[arg-type]
    floor = case.floor_us(Rates())
    result = [
        {"case": case.key, "variant": name, "error": reason, "floor_us": floor} for name, reason in failures.items()
    ]
    for name in calls:
        best = min(
            (taken[mode][name].median for mode in ("cold", "graph") if mode in taken and taken[mode][name].ok),
            default=math.nan,
        )
        row: dict[str, Any] = {"case": case.key, "variant": name, "us": best, "floor_us": floor, "flops": case.flops}
        row |= {mode: taken[mode][name].median for mode in modes}
        row |= {"fraction": floor / best, "spread": taken["cold"][name].spread}
        row["error"] = "; ".join(taken[mode][name].error for mode in modes if taken[mode][name].error)
        result.append(row)
    return result


def show(row: dict[str, Any]) -> None:
    start = f"{row['case']:34s} {row['variant']:18s}"
    if "us" not in row:
        print(start, row["error"], flush=True)
        return
    rate = row["flops"] / row["us"] / 1e6
    more = " ".join(f"{mode} {row[mode]:.1f}" for mode in ("cold", "graph", "hot", "host") if mode in row)
    took = f"{row['us']:9.1f} us {rate:7.1f} TFLOP/s {row['fraction']:5.2f} of floor"
    print(f"{start} {took}  ({more}) {row['error']}", flush=True)


def means(everything: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric means of the fraction of the floor, per variant and distribution."""
    found: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in everything:
        if "us" in row:
            found[row["variant"]][row["case"].split("/")[1]].append(row["fraction"])
            found[row["variant"]]["all"].append(row["fraction"])
    return {variant: {d: geomean(values) for d, values in by.items()} for variant, by in found.items()}


def main(argv: list[str] | None = None) -> int:
    parser = arguments()
    args = parser.parse_args(argv)
    try:
        cases = chosen(args)
        for name in args.backend.split(",") if args.backend else ():
            registry.check(name)
    except MultigemmError as error:
        parser.error(str(error))
    everything: list[dict[str, Any]] = []
    for case in cases:
        for row in rows(case, args):
            show(row)
            everything.append(row)
        if args.json:
            args.json.write_text(json.dumps({"rows": everything, "means": means(everything)}, indent=1))
    for variant, by in means(everything).items():
        print(f"{variant:24s} of floor: " + "  ".join(f"{d} {value:.3f}" for d, value in by.items()))
    bad = sum(1 for row in everything if "us" not in row)
    print(f"{len(everything) - bad} timed, {bad} failed or refused")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
