"""`multigemm explain`: shapes in; who runs them and why, in words and as a table."""

from __future__ import annotations

import argparse

from multigemm.api import explain
from multigemm.bench.suites import parts
from multigemm.commands.shapes import add_shape_arguments, problem_from
from multigemm.select.explain import Explanation

FORMS = {
    "per_group": "lists of matrices",
    "jagged_m": "packed rows of a",
    "jagged_n": "packed columns of b",
    "jagged_k": "packed columns of a and rows of b, as for weight gradients",
    "batched": "stacked matrices",
    "masked": "stacked matrices of which some rows count",
}


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
    print("\n\n".join(f"{in_words(told)}\n\n{told}" for told in found))
    return 0 if all(told.chosen for told in found) else 1


def in_words(told: Explanation) -> str:
    """What would run and why, in sentences; the table has the details."""
    spec = told.spec
    asked = f"{spec.groups} products in {str(spec.compute).removeprefix('torch.')}: {FORMS[spec.form]}."
    if not told.chosen:
        return f"{asked} No backend that was asked for runs them here."
    others = ", ".join(c.name for c in told.candidates if c.for_auto and c.name != told.chosen)
    rest = f" {others} could run them, too." if others else ""
    return f"{asked} {told.chosen} runs them, with the kernel {told.kernel}, because: {told.why}.{rest}"
