"""The options that select workloads, which `bench` and `tune` share."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from functools import lru_cache, partial

import torch

from multigemm.bench.suites import SUITES, suite
from multigemm.bench.workloads import DTYPES, Workload, parse_shape, parts, with_dtype
from multigemm.errors import InvalidSetting
from multigemm.select.timing import measure

USUAL_SUITE = "tutorial"
CPU_DTYPES = ("fp32", "bf16", "fp16")
HOPELESS = 8.0
"""A CPU that multiplies a dtype so many times slower than float32 is not asked for it by the usual suite."""


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Adds the options that select workloads."""
    add = parser.add_argument_group("workloads").add_argument
    add("--suite", default="", help=f"comma separated: {', '.join(SUITES)}, all (default: {USUAL_SUITE})")
    add("--shape", action="append", default=[], help="one's own workload, instead of a suite; may be repeated")
    add("--only", default="", help="keep workloads whose key contains one of these parts")
    add("--dist", default="", help="keep these distributions, comma separated")
    add("--dtypes", default="", help=f"each workload in these instead of its own: {', '.join(DTYPES)}")
    add("--nt", action="store_true", help="B as the transpose of [G, N, K] memory")


def asks_nothing(args: argparse.Namespace) -> bool:
    """Whether a command line leaves the selection to the default."""
    return not (args.suite or args.shape or args.dtypes or getattr(args, "problem", None))


@lru_cache(maxsize=1)
def worthwhile_dtypes() -> tuple[str, ...]:
    """The dtypes that this CPU multiplies at a useful speed. Reports the others on stderr."""
    us: dict[str, float] = {}
    for dtype in CPU_DTYPES:
        x = torch.ones(256, 256, dtype=DTYPES[dtype])
        us[dtype] = min(measure({dtype: partial(torch.mm, x, x)}, "cpu", reps=7, min_reps=7)[dtype].samples)
    slower = {dtype: us[dtype] / us["fp32"] for dtype in CPU_DTYPES if us[dtype] > HOPELESS * us["fp32"]}
    for dtype, factor in slower.items():
        print(f"left out: {dtype}, {factor:.0f} times slower here than fp32 (--dtypes {dtype} for it)", file=sys.stderr)
    return tuple(dtype for dtype in CPU_DTYPES if dtype not in slower)


def selected(args: argparse.Namespace, device: torch.device) -> list[Workload]:
    """The workloads that the arguments name.

    Raises:
        InvalidSetting: for a name that is unknown, or where no workload is left.
    """
    if args.shape and args.suite:
        raise InvalidSetting("--suite and --shape: name a suite or one's own workloads, not both")
    cases = [parse_shape(text) for text in args.shape] or suite(args.suite or USUAL_SUITE)
    usual = ",".join(worthwhile_dtypes()) if asks_nothing(args) and device.type == "cpu" else ""
    if dtypes := parts(args.dtypes or usual):
        cases = list({c.key: c for dtype in dtypes for c in (with_dtype(case, dtype) for case in cases)}.values())
    cases = list({case.key: case for case in (case.for_device(device) for case in cases)}.values())
    cases = [replace(case, trans_b=True) if args.nt and case.form != "layer" else case for case in cases]
    only, dists = parts(args.only), parts(args.dist)
    left = [c for c in cases if not only or any(part in c.key for part in only)]
    left = [c for c in left if not dists or c.distribution in dists]
    if not left:
        asked = " and ".join(f"--{name} {text!r}" for name, text in (("only", args.only), ("dist", args.dist)) if text)
        seen = ", ".join(sorted({c.distribution for c in cases}))
        raise InvalidSetting(
            f"no workload is left: {asked} matches none of {len(cases)} (by distribution: {seen}); "
            "`multigemm bench --list` prints their keys"
        )
    return left


def above_zero(args: argparse.Namespace, *names: str) -> None:
    """Refuses bounds of 0 or less, which would leave nothing to do."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InvalidSetting(f"--{name.replace('_', '-')} {value:g}: it has to be above 0")
