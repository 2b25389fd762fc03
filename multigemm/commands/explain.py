"""`multigemm explain`: shapes in, reasons and choice out."""

from __future__ import annotations

import argparse

from multigemm.api import explain
from multigemm.bench.suites import parts
from multigemm.commands.shapes import add_shape_arguments, problem_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_shape_arguments(parser)
    parser.add_argument("--backends", default="auto", help="names with commas, or auto")


def main(args: argparse.Namespace) -> int:
    """Prints who can, who cannot and why, who is chosen and why; 1 if nobody is chosen for one of the dtypes."""
    names = parts(args.backends)
    found = []
    for dtype in parts(args.dtypes) or [""]:
        posed = problem_from(argparse.Namespace(**{**vars(args), "dtypes": dtype}))
        found.append(explain(posed, names[0] if len(names) == 1 else names))
    print("\n\n".join(map(str, found)))
    return 0 if all(told.chosen for told in found) else 1
