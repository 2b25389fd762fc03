"""`multigemm explain`: states which backend runs a problem and why, in sentences and as a table."""

from __future__ import annotations

import argparse

import torch

from multigemm.api import explain
from multigemm.bench import operands
from multigemm.bench.workloads import DTYPES, dtype_name, parse_shape, parts
from multigemm.errors import InvalidSetting
from multigemm.fleet import default_device
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ACTIVATIONS, GATES
from multigemm.select.choose import Explanation

IN_WORDS: dict[str, str] = {
    "per_group": "lists of matrices",
    "jagged_m": "packed rows of a",
    "jagged_n": "packed columns of b",
    "jagged_k": "packed columns of a and rows of b, as for weight gradients",
    "batched": "stacked matrices",
    "masked": "stacked matrices of which some rows count",
}
USUAL_SHAPE = "sizes=40+0+1+70,N=48,K=96"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    shapes = f"a workload as `multigemm bench` takes it: 64,2048,3584,1792 (default {USUAL_SHAPE})"
    parser.add_argument("--shape", default=USUAL_SHAPE, help=shapes)
    parser.add_argument("--host-sizes", action="store_true", help="offsets on the host, not the device")
    parser.add_argument("--dtypes", default="bf16", help=f"{', '.join(DTYPES)}, or long names (default bf16)")
    parser.add_argument("--device", default="", help="cpu or cuda (default: cuda if there is one)")
    parser.add_argument("--activation", default=None, help=", ".join((*ACTIVATIONS, *GATES)))
    parser.add_argument("--backends", default="auto", help="backends, separated by commas, or auto (the default)")


def main(args: argparse.Namespace) -> int:
    """Prints the candidates, their reasons, the choice and its rule. Returns 1 if no backend is chosen for one of the
    dtypes."""
    names, device = parts(args.backends), default_device(args.device)
    found = []
    for dtype in map(dtype_name, parts(args.dtypes)):
        posed = problem_from(args.shape, dtype, device, args.host_sizes, args.activation)
        found.append(explain(posed, names[0] if len(names) == 1 else names))
    print("\n\n".join(f"{in_words(told)}\n\n{told}" for told in found))
    return 0 if all(told.chosen for told in found) else 1


def in_words(told: Explanation) -> str:
    """The choice and its reason in sentences; the table has the details."""
    spec = told.spec
    asked = f"{spec.groups} products in {str(spec.compute).removeprefix('torch.')}: {IN_WORDS[spec.form]}."
    if not told.chosen:
        return f"{asked} No backend that was asked for runs them here."
    others = ", ".join(c.name for c in told.candidates if c.for_auto and c.name != told.chosen)
    rest = f" {others} could run them, too." if others else ""
    return f"{asked} {told.chosen} runs them, with the kernel {told.kernel}, because: {told.why}.{rest}"


def problem_from(
    shape: str, dtype: str, device: torch.device, host_sizes: bool, activation: str | None
) -> GroupedGemmProblem:
    """The problem that `multigemm bench --shape` times, over uninitialised memory."""
    try:
        tensors = operands.make(parse_shape(shape, dtype), device, drawn=False)
    except (RuntimeError, TypeError, OverflowError) as error:  # memory, or an extent beyond 64 bits
        raise InvalidSetting(f"--shape {shape} cannot be made on {device}: {str(error).splitlines()[0]}") from error
    others = {} if activation is None else {"out": None, "activation": activation}
    return tensors.pose(host_sizes and tensors.host_offsets is not None, **others)
