"""Which workloads a command line names: `multigemm bench` and `multigemm tune` mean the same by the same words."""

from __future__ import annotations

import argparse

from multigemm.bench.suites import SUITES, suite
from multigemm.bench.workloads import DTYPES, Workload, parse_shape, with_dtype
from multigemm.errors import InvalidSetting

USUAL_SUITE = "tutorial"


def add_selection(parser: argparse.ArgumentParser) -> None:
    """Which workloads; shared with `multigemm tune`."""
    parser.add_argument(
        "--suite", default="", help=f"comma separated: {', '.join(SUITES)}, all (default: {USUAL_SUITE})"
    )
    parser.add_argument(
        "--shape", action="append", default=[], help="one's own workload, instead of a suite; may be repeated"
    )
    parser.add_argument("--only", default="", help="keep workloads whose key contains one of these parts")
    parser.add_argument("--dist", default="", help="keep these distributions, comma separated")
    parser.add_argument("--dtype", default="", help=f"replace the workloads' dtype: {', '.join(DTYPES)}")


def selected(args: argparse.Namespace) -> list[Workload]:
    """The workloads that the arguments name."""
    if args.shape and args.suite:
        raise InvalidSetting("--suite and --shape: name a suite or one's own workloads, not both")
    cases = [parse_shape(text) for text in args.shape] or suite(args.suite or USUAL_SUITE)
    if args.dtype:
        cases = list({c.key: c for c in (with_dtype(case, args.dtype) for case in cases)}.values())
    only, dists = parts(args.only), parts(args.dist)
    left = [c for c in cases if not only or any(part in c.key for part in only)]
    left = [c for c in left if not dists or c.distribution in dists]
    if not left:
        asked = " and ".join(f"--{name} {text!r}" for name, text in (("only", args.only), ("dist", args.dist)) if text)
        seen = ", ".join(sorted({c.distribution for c in cases}))
        raise InvalidSetting(
            f"no workload is left: {asked} matches none of {len(cases)} (by distribution: {seen}); "
            "`multigemm bench list` prints their keys"
        )
    return left


def above_zero(args: argparse.Namespace, *names: str) -> None:
    """Refuses bounds that leave nothing to do."""
    for name in names:
        value = getattr(args, name)
        if value is not None and not value > 0:
            raise InvalidSetting(f"--{name.replace('_', '-')} {value:g}: it has to be above 0")


def parts(text: str) -> list[str]:
    return [part.strip() for part in text.split(",") if part.strip()]
