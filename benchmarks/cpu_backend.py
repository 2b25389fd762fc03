"""The cpu backend against torch's own ways, on jagged rows: the figures of its bars.

    python benchmarks/cpu_backend.py [--dtype fp32,bf16] [--reps 30] [--all-configs]

Each shape is checked once against a float64 loop, then the variants are timed interleaved: torch.mm
with `out=` in a loop over ready-made views, torch.nn.functional.grouped_mm, torch.bmm where all
groups are equal, and a bound launch. The ratio is the best of the peers over the launch.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cpu import BACKEND
from multigemm.planning.operands import Operands
from multigemm.problem.spec import OperandSpec, ProblemSpec
from multigemm.select.timing import measure

CPU = torch.device("cpu")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Shape:
    """Rows of a jagged m: how many groups, how their sizes are drawn, and the shared extents."""

    name: str
    groups: int
    rows: int
    k: int
    n: int
    draw: str

    def sizes(self) -> list[int]:
        rng = np.random.default_rng(7)
        if self.draw == "equal":
            return [self.rows] * self.groups
        if self.draw == "zipf":
            weights = rng.permutation(1.0 / np.arange(1, self.groups + 1))
            return [int(x) for x in np.round(weights / weights.sum() * self.rows * self.groups)]
        if self.draw == "empty":
            return [int(x) for x in rng.integers(0, self.rows + 1, self.groups) * (rng.random(self.groups) < 0.5)]
        return [int(x) for x in rng.integers(0, self.rows + 1, self.groups)]

    @property
    def many_small(self) -> bool:
        return self.groups >= 64 and max(self.sizes()) <= 32


SHAPES = (
    Shape("few-large", 8, 512, 512, 512, "uniform"),
    Shape("few-large-equal", 8, 256, 512, 512, "equal"),
    Shape("wide", 8, 128, 1024, 1024, "uniform"),
    Shape("moe-8", 8, 256, 768, 1024, "zipf"),
    Shape("moe-16", 16, 64, 512, 768, "uniform"),
    Shape("moe-32", 32, 64, 512, 512, "zipf"),
    Shape("moe-empty", 32, 96, 256, 512, "empty"),
    Shape("moe-64", 64, 48, 256, 256, "zipf"),
    Shape("heads", 16, 100, 64, 64, "uniform"),
    Shape("tiny-few", 4, 20, 64, 64, "uniform"),
    Shape("odd", 24, 61, 131, 197, "uniform"),
    Shape("lora-up", 32, 64, 16, 512, "uniform"),
    Shape("lora-down", 32, 64, 512, 16, "uniform"),
    Shape("small-32", 64, 32, 128, 128, "uniform"),
    Shape("small-32-wide", 64, 32, 256, 256, "uniform"),
    Shape("small-16", 128, 16, 128, 128, "uniform"),
    Shape("small-16-equal", 64, 16, 128, 128, "equal"),
    Shape("small-8", 256, 8, 64, 64, "uniform"),
    Shape("small-4", 64, 4, 256, 256, "uniform"),
    Shape("small-empty", 256, 32, 64, 128, "empty"),
    Shape("decode", 128, 2, 128, 256, "uniform"),
)


def operands(shape: Shape, dtype: torch.dtype) -> Operands:
    """A jagged m in memory of its own."""
    sizes = shape.sizes()
    gen = torch.Generator().manual_seed(1)
    total = sum(sizes)
    a = torch.randn((total, shape.k), generator=gen).to(dtype)
    b = torch.randn((shape.groups, shape.k, shape.n), generator=gen).to(dtype)
    one = OperandSpec(dtype)
    bucket = 1 << max(0, total - 1).bit_length()
    spec = ProblemSpec(
        "jagged_m", shape.groups, None, shape.n, shape.k, bucket, 0, one, one, one, compute=dtype, index=torch.int32
    )
    ends = torch.tensor(sizes).cumsum(0).to(torch.int32)
    return Operands(spec, a, b, torch.empty((total, shape.n), dtype=dtype), ends=ends)


def peers(shape: Shape, ops: Operands) -> dict[str, Callable[[], object]]:
    """torch's own ways, with all that can be prepared beforehand prepared."""
    a, b, ends = ops.a, ops.b, ops.ends
    assert isinstance(a, Tensor) and isinstance(b, Tensor) and ends is not None
    out = torch.empty_like(ops.out)  # type: ignore[arg-type]
    sizes = shape.sizes()
    views = list(zip(a.split(sizes), b, out.split(sizes), strict=True))

    def loop() -> None:
        for x, y, z in views:
            torch.mm(x, y, out=z)

    found: dict[str, Callable[[], object]] = {"torch.mm": loop}
    found["grouped_mm"] = lambda: torch.nn.functional.grouped_mm(a, b, offs=ends)
    if len(set(sizes)) == 1:
        stack, stacked = a.view(shape.groups, -1, shape.k), out.view(shape.groups, -1, shape.n)
        found["torch.bmm"] = lambda: torch.bmm(stack, b, out=stacked)
    return found


def check(shape: Shape, ops: Operands) -> None:
    """A float64 loop, with the bound that K products and one rounding allow."""
    lo = 0
    unit = 2.0**-8 if ops.spec.compute == torch.bfloat16 else 2.0**-24
    for g, rows in enumerate(shape.sizes()):
        a, b, out = (x.double() for x in (ops.a[lo : lo + rows], ops.b[g], ops.out[lo : lo + rows]))  # type: ignore[union-attr]
        bound = 4 * shape.k * 2.0**-24 * (a.abs() @ b.abs()) + unit * (a @ b).abs()
        if not bool(((out - a @ b).abs() <= bound).all()):
            raise SystemExit(f"{shape.name}: group {g} is wrong")
        lo += rows


def row(shape: Shape, dtype: torch.dtype, reps: int, every: bool) -> dict[str, Any]:
    """The medians of one shape in microseconds."""
    ops = operands(shape, dtype)
    others = peers(shape, ops)
    variants = dict(others)
    configs = BACKEND.configs(ops.spec, CPU)
    for config in configs if every else configs[:1]:
        launch = BACKEND.plan(ops.spec, config, CPU).bind(ops)
        launch()
        check(shape, ops)
        variants[config.kernel] = launch
    timings = measure(variants, CPU, reps=reps, budget_ms=1500)
    found: dict[str, Any] = {"shape": shape.name, "many_small": shape.many_small}
    for statistic in ("median", "best"):
        times = {name: getattr(t, statistic) for name, t in timings.items()}
        peer = min(times[name] for name in others if not math.isnan(times[name]))
        found[statistic] = {"times": times, "ratio": peer / times[configs[0].kernel]}
    return found


def geomean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def summary(name: str, rows: list[dict[str, Any]]) -> None:
    """The bars, by the median and by the fastest sample (the latter is what a busy machine leaves to compare)."""
    for statistic in ("median", "best"):
        ratios = [r[statistic]["ratio"] for r in rows]
        small = [r[statistic]["ratio"] for r in rows if r["many_small"]]
        print(
            f"{name} {statistic:6s} {len(ratios)} shapes: mean {geomean(ratios):.2f}, least {min(ratios):.2f}; "
            f"{len(small)} of many small groups: mean {geomean(small):.2f}, least {min(small, default=1):.2f}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="fp32,bf16")
    parser.add_argument("--only", default="")
    parser.add_argument("--reps", type=int, default=60)
    parser.add_argument("--all-configs", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results: dict[str, list[dict[str, Any]]] = {}
    for name in args.dtype.split(","):
        results[name] = []
        for shape in SHAPES:
            if args.only in shape.name:
                results[name].append(row(shape, DTYPES[name], args.reps, args.all_configs))
                last = results[name][-1]
                times = "  ".join(f"{key} {value:7.1f}" for key, value in last["best"]["times"].items())
                ratios = f"{last['median']['ratio']:5.2f} {last['best']['ratio']:5.2f}"
                print(f"{name} {shape.name:16s} {ratios}   {times}", flush=True)
    for name, rows in results.items():
        summary(name, rows)
    summary("all", [r for rows in results.values() for r in rows])
    if args.json:
        args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    with torch.no_grad():
        main()
