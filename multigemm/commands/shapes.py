"""A problem out of a few words on the command line: form, extents, dtype."""

from __future__ import annotations

import argparse

import torch

from multigemm.bench import entries, operands
from multigemm.bench.workloads import DTYPES, parse_shape
from multigemm.errors import InvalidSetting
from multigemm.fleet import default_device
from multigemm.problem import GroupedGemmProblem
from multigemm.spec import FORMS, INPUT_DTYPES

WITHOUT_SHAPE = {"form": "jagged_m", "sizes": "40,0,1,70", "m": 64, "n": 48, "k": 96}
"""What describes a problem that is no workload of `bench`, and what is taken where it is not given."""
LONG = tuple(str(dtype).removeprefix("torch.") for dtype in INPUT_DTYPES)


def add_shape_arguments(parser: argparse.ArgumentParser) -> None:
    """--shape, or --form, --sizes, --m, --n, --k, --dtype and the epilogue; --device."""
    parser.add_argument("--shape", default="", help="a workload as `multigemm bench` takes it: 64,2048,3584,1792")
    parser.add_argument("--host-sizes", action="store_true", help="with --shape: offsets on the host, not the device")
    shown = {name: f"(default {value})" for name, value in WITHOUT_SHAPE.items()}
    parser.add_argument("--form", choices=FORMS, help=f"how the groups lie in memory {shown['form']}")
    parser.add_argument("--sizes", help=f"rows (or columns) of each group, comma-separated {shown['sizes']}")
    parser.add_argument("--m", type=int, help=f"rows of a result where the form does not cut them {shown['m']}")
    parser.add_argument("--n", type=int, help=f"columns of a result where the form does not cut them {shown['n']}")
    parser.add_argument("--k", type=int, help=f"inner extent where the form does not cut it {shown['k']}")
    parser.add_argument(
        "--dtype", default="", help=f"{', '.join(LONG)}, or {', '.join(DTYPES)} (default float32, with --shape bf16)"
    )
    parser.add_argument("--device", default="", help="cpu or cuda; the default is cuda where there is one")
    parser.add_argument("--activation", default=None, help="relu, gelu, gelu_tanh or silu")


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidSetting(f"--sizes {text!r} is not a comma-separated list of whole numbers") from None
    if min(sizes, default=0) < 0:
        raise InvalidSetting(f"--sizes {text!r} holds {min(sizes)}: a size cannot be negative")
    return sizes


def problem_from(args: argparse.Namespace) -> GroupedGemmProblem:
    """The problem that the options describe, over memory that nobody has written."""
    device = default_device(args.device)
    if args.shape:
        return _of_workload(args, device)
    if args.host_sizes:
        raise InvalidSetting("--host-sizes goes with --shape: the sizes of --sizes lie on the host anyway")
    for name, value in WITHOUT_SHAPE.items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    sizes = _sizes(args.sizes)
    for name in ("m", "n", "k"):
        if getattr(args, name) < 0:
            raise InvalidSetting(f"--{name} {getattr(args, name)}: an extent cannot be negative")
    dtype = DTYPES.get(args.dtype) or getattr(torch, args.dtype or "float32", None)
    if dtype not in INPUT_DTYPES:
        raise InvalidSetting(f"--dtype {args.dtype!r} is unknown: use one of {', '.join(LONG)}, {', '.join(DTYPES)}")

    def make(*shape: int) -> torch.Tensor:
        try:
            return torch.empty(shape, dtype=dtype, device=device)
        except (RuntimeError, TypeError) as error:  # TypeError: an extent beyond 64 bits
            raise InvalidSetting(f"an operand of shape {shape} does not fit into the memory of {device}") from error

    m, n, k, groups, total = args.m, args.n, args.k, len(sizes), sum(sizes)
    extra = {"activation": args.activation, "precision": "tf32" if args.dtype == "tf32" else "ieee"}
    if args.form == "per_group":
        return GroupedGemmProblem([make(s, k) for s in sizes], [make(k, n) for _ in sizes], **extra)
    if args.form == "batched":
        return GroupedGemmProblem(make(groups, m, k), make(groups, k, n), **extra)
    if args.form == "masked":
        return GroupedGemmProblem(make(groups, m, k), make(groups, k, n), valid_rows=sizes, **extra)
    a, b = {
        "jagged_m": lambda: (make(total, k), make(groups, k, n)),
        "jagged_n": lambda: (make(groups, m, k), make(k, total)),
        "jagged_k": lambda: (make(m, total), make(total, n)),
    }[args.form]()
    return GroupedGemmProblem(a, b, sizes=sizes, jagged=args.form[-1], **extra)


def _of_workload(args: argparse.Namespace, device: torch.device) -> GroupedGemmProblem:
    """The problem that `multigemm bench --shape` would time."""
    short = {str(dtype).removeprefix("torch."): name for name, dtype in DTYPES.items() if name != "tf32"}
    dtype = short.get(args.dtype, args.dtype or "bf16")
    if dtype not in DTYPES:
        raise InvalidSetting(f"--dtype {args.dtype!r} is unknown: use one of {', '.join(DTYPES)}")
    if given := [f"--{name}" for name in (*WITHOUT_SHAPE, "activation") if getattr(args, name) is not None]:
        raise InvalidSetting(f"{', '.join(given)} beside --shape, which says all of it: leave out one or the other")
    try:
        tensors = operands.make(parse_shape(args.shape, dtype), device, drawn=False)
    except RuntimeError as error:
        why = str(error).splitlines()[0]
        raise InvalidSetting(f"--shape {args.shape} cannot be made on {device}: {why}") from error
    return entries.problem(tensors, args.host_sizes and tensors.offsets is not None)
