"""`multigemm demo`: one jagged problem through every available backend, checked and timed."""

from __future__ import annotations

import argparse

import torch

from multigemm.backends.registry import get
from multigemm.bench.workloads import DTYPES, dtype_name, parts
from multigemm.commands.verify import check
from multigemm.fleet import default_device
from multigemm.problem.problem import GroupedGemmProblem

SIZES = [40, 0, 1, 70, 17]
N, K = 72, 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--device", default="", help="cpu or cuda (default: cuda if there is one)")
    backends = "backends, separated by commas (default: all that are available)"
    parser.add_argument("--backends", default="", help=backends)
    dtypes = f"dtypes, separated by commas (default: bf16): {', '.join(DTYPES)}"
    parser.add_argument("--dtypes", default="bf16", help=dtypes)


def main(args: argparse.Namespace) -> int:
    """Solves, checks and times; exit code 1 if any backend that ran was wrong."""
    device = default_device(args.device)
    codes, names = [], parts(args.backends)
    for name in names:
        get(name)  # raises for one that does not exist
    for dtype in map(dtype_name, parts(args.dtypes)):
        print(f"{len(SIZES)} products, rows {SIZES}, N={N}, K={K}, {dtype}, on {device}")
        codes.append(check(_problem(device, dtype), names))
    return max(codes, default=0)


def _problem(device: torch.device, dtype: str) -> GroupedGemmProblem:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator) for shape in ((sum(SIZES) + 3, K), (len(SIZES), K, N)))
    scale, activation = (4, None) if dtype == "int8" else (1, "silu")  # an activation asks for floating point
    a, b = ((scale * x).to(DTYPES[dtype]).to(device) for x in (a, b))
    precision = "tf32" if dtype == "tf32" else "ieee"
    return GroupedGemmProblem(a, b, sizes=SIZES, activation=activation, precision=precision)
