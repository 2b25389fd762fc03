"""`multigemm explain`: shapes in, reasons and choice out."""

from __future__ import annotations

import argparse

from multigemm.api import explain
from multigemm.commands.shapes import add_shape_arguments, problem_from


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    add_shape_arguments(parser)
    parser.add_argument("--backend", default="auto", help="a name, several names with commas, or auto")


def main(args: argparse.Namespace) -> int:
    """Prints who can, who cannot and why, who is chosen and why."""
    names = args.backend.split(",")
    told = explain(problem_from(args), names[0] if len(names) == 1 else names)
    print(told)
    return 0 if told.chosen else 1
