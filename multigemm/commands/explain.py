"""`multigemm explain`: states which backend runs a problem and why, in sentences and as a table."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from multigemm.api import explain
from multigemm.bench import entries, operands
from multigemm.bench.workloads import DTYPES, dtype_name, parse_shape, parts
from multigemm.errors import InvalidSetting
from multigemm.fleet import default_device
from multigemm.problem.problem import GroupedGemmProblem, Keywords
from multigemm.problem.spec import ACTIVATIONS, FORMS, GATES
from multigemm.select.explain import Explanation

IN_WORDS: dict[str, str] = {
    "per_group": "lists of matrices",
    "jagged_m": "packed rows of a",
    "jagged_n": "packed columns of b",
    "jagged_k": "packed columns of a and rows of b, as for weight gradients",
    "batched": "stacked matrices",
    "masked": "stacked matrices of which some rows count",
}
WITHOUT_SHAPE = {"form": "jagged_m", "sizes": "40,0,1,70", "m": 64, "n": 48, "k": 96}
"""What describes a problem that is no workload of `bench`, and what is taken where it is not given."""
CUT = {"per_group": "m", "jagged_m": "m", "jagged_n": "n", "jagged_k": "k"}
"""The extent that --sizes gives, by form."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--shape", default="", help="a workload as `multigemm bench` takes it: 64,2048,3584,1792")
    parser.add_argument("--host-sizes", action="store_true", help="with --shape: offsets on the host, not the device")
    shown = {name: f"(default {value})" for name, value in WITHOUT_SHAPE.items()}
    parser.add_argument("--form", choices=FORMS, help=f"how the groups lie in memory {shown['form']}")
    parser.add_argument("--sizes", help=f"rows (or columns) of each group, comma-separated {shown['sizes']}")
    parser.add_argument("--m", type=int, help=f"rows of a result where the form does not cut them {shown['m']}")
    parser.add_argument("--n", type=int, help=f"columns of a result where the form does not cut them {shown['n']}")
    parser.add_argument("--k", type=int, help=f"inner extent where the form does not cut it {shown['k']}")
    parser.add_argument(
        "--dtypes", default="", help=f"{', '.join(DTYPES)}, or long names (default fp32, with --shape bf16)"
    )
    parser.add_argument("--device", default="", help="cpu or cuda; the default is cuda where there is one")
    parser.add_argument("--activation", default=None, help=", ".join((*ACTIVATIONS, *GATES)))
    parser.add_argument("--backends", default="auto", help="names with commas, or auto")


def main(args: argparse.Namespace) -> int:
    """Prints the candidates, their reasons, the choice and its rule. Returns 1 if no backend is chosen for one of the
    dtypes."""
    names = parts(args.backends)
    found = []
    for dtype in parts(args.dtypes) or [""]:
        posed = problem_from(argparse.Namespace(**{**vars(args), "dtypes": dtype}))
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


# --- a problem out of words ---------------------------------------------------------------------------


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidSetting(f"--sizes {text!r} is not a comma-separated list of whole numbers") from None
    if min(sizes, default=0) < 0:
        raise InvalidSetting(f"--sizes {text!r} holds {min(sizes)}: a size cannot be negative")
    return sizes


def problem_from(args: argparse.Namespace) -> GroupedGemmProblem:
    """The problem that the options describe, over uninitialised memory. `args.dtypes` names one dtype."""
    device = default_device(args.device)
    if args.shape:
        return _of_workload(args, device)
    _complete(args)
    form, sizes, dtype = args.form, _sizes(args.sizes), DTYPES[dtype_name(args.dtypes or "fp32")]
    a, b = (_empty(shape, dtype, device) for shape in _shapes(form, sizes, args.m, args.n, args.k))
    words: Keywords = {"activation": args.activation, "precision": "tf32" if args.dtypes == "tf32" else "ieee"}
    if form == "masked":
        words["valid_rows"] = sizes
    elif form.startswith("jagged"):
        words |= {"sizes": sizes, "jagged": form[-1]}
    return GroupedGemmProblem(a, b, **words)


def _complete(args: argparse.Namespace) -> None:
    """Fills omitted options from `WITHOUT_SHAPE`. Refuses options that would have no effect."""
    if args.host_sizes:
        raise InvalidSetting("--host-sizes goes with --shape: the sizes of --sizes lie on the host anyway")
    given = [name for name in WITHOUT_SHAPE if getattr(args, name) is not None]
    for name in WITHOUT_SHAPE.keys() - given:
        setattr(args, name, WITHOUT_SHAPE[name])
    even = args.form == "batched" and "sizes" in given
    if (cut := "m" if even else CUT.get(args.form)) in given:
        raise InvalidSetting(f"--{cut} beside --form {args.form}, where --sizes gives it: leave it out")
    if even:
        rows = set(_sizes(args.sizes)) or {0}
        if len(rows) > 1:
            raise InvalidSetting(
                f"--sizes {args.sizes} with --form batched, whose groups are alike: jagged_m or masked"
            )
        args.m = rows.pop()
    for name in ("m", "n", "k"):
        if getattr(args, name) < 0:
            raise InvalidSetting(f"--{name} {getattr(args, name)}: an extent cannot be negative")


def _shapes(form: str, sizes: list[int], m: int, n: int, k: int) -> tuple[Any, Any]:
    """The shapes of a and b; lists of shapes for per_group."""
    groups, total = len(sizes), sum(sizes)
    stacked = (groups, m, k), (groups, k, n)
    return {
        "per_group": ([(size, k) for size in sizes], [(k, n)] * groups),
        "jagged_m": ((total, k), (groups, k, n)),
        "jagged_n": ((groups, m, k), (k, total)),
        "jagged_k": ((m, total), (total, n)),
        "batched": stacked,
        "masked": stacked,
    }[form]


def _empty(shape: Any, dtype: torch.dtype, device: torch.device) -> Any:
    if isinstance(shape, list):
        return [_empty(each, dtype, device) for each in shape]
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except (RuntimeError, TypeError) as error:  # TypeError: an extent beyond 64 bits
        raise InvalidSetting(f"an operand of shape {shape} does not fit into the memory of {device}") from error


def _of_workload(args: argparse.Namespace, device: torch.device) -> GroupedGemmProblem:
    """The problem that `multigemm bench --shape` would time."""
    if given := [f"--{name}" for name in (*WITHOUT_SHAPE, "activation") if getattr(args, name) is not None]:
        raise InvalidSetting(f"{', '.join(given)} beside --shape, which says all of it: leave out one or the other")
    try:
        tensors = operands.make(parse_shape(args.shape, dtype_name(args.dtypes or "bf16")), device, drawn=False)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise InvalidSetting(f"--shape {args.shape} cannot be made on {device}: {why}") from error
    return entries.problem(tensors, args.host_sizes and tensors.offsets is not None)
