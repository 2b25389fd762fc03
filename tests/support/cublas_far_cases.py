"""Operands whose lines or matrices lie as far apart as cuBLAS counts, and further; a process of its own for the GPU.

    python -m tests.support.cublas_far_cases cuda float16 0

runs the cases of one dtype from the given one on, in memory of which little is touched, and prints a line before and
after each: an illegal access ends the process, and the last line says where.
"""

from __future__ import annotations

import math
import mmap
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cublas import launch
from multigemm.backends.cublas.choice import problem_with
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.products import FARTHEST_BYTES, FARTHEST_ELEMENTS
from multigemm.backends.cublas.support import not_supported_reasons
from multigemm.planning.staging import stage, staged_spec

ARENA = 18 << 30
"""Bytes; the farthest case spans eight times 2 GiB."""
RESERVED = 0x4000  # MAP_NORESERVE
GUARD = 5.0
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8)
VARIANTS = (Config("loop"), Config("batched"), Config("grouped"), Config("grouped_mm"), Config("auto"))


@dataclass(frozen=True)
class Far:
    """One operand of one form, whose lines (or the matrices of its stack) lie `distance` elements apart."""

    form: str
    operand: str
    distance: int
    config: Config
    live: bool = False
    """Whether only the device knows the sizes."""


def limit(itemsize: int) -> int:
    """The first distance in elements that is not handed to the library."""
    return min(FARTHEST_ELEMENTS, FARTHEST_BYTES // itemsize)


SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "jagged_m": {"a": (3, 64), "b": (2, 64, 64), "c": (3, 64), "out": (3, 64)},
    "few k": {"a": (8, 8), "b": (8, 64), "out": (8, 64)},
    "jagged_k": {"a": (8, 64), "b": (8, 64), "out": (2, 64, 64)},
    "batched": {"a": (3, 8, 64), "b": (3, 64, 32), "c": (3, 8, 32), "out": (3, 8, 32)},
    "list": {"a": (3, 64), "b": (64, 64), "out": (3, 64)},
}
MOVED = {"jagged_m": ("a", "c", "out"), "few k": ("b",), "jagged_k": ("a", "b", "out"), "list": ("a", "out"),
         "batched": ("a", "b", "c", "out")}  # fmt: skip


def out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The type of results that the library writes."""
    return torch.int32 if dtype is torch.int8 else dtype


def cases(dtype: torch.dtype) -> Iterator[Far]:
    """All cases of a dtype: just nearer than the limit, at it, just beyond, and for int8 where 31 bits end."""
    for form, operands in MOVED.items():
        for operand in operands:
            first = limit((out_dtype(dtype) if operand in ("c", "out") else dtype).itemsize)
            more = (1 << 31,) if dtype is torch.int8 and operand == "a" and form == "jagged_m" else ()
            for distance in (first - 16, first, first + 16, *more):
                for config in VARIANTS:
                    yield Far(form, operand, distance, config)
                if dtype is torch.bfloat16 and form in ("jagged_m", "few k", "jagged_k"):
                    yield Far(form, operand, distance, Config("grouped_mm"), live=True)


def reserved() -> Tensor:
    """As many bytes of the host's address space, of which only what is touched takes memory."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | RESERVED
    return torch.frombuffer(mmap.mmap(-1, ARENA, flags=flags), dtype=torch.uint8)


def _ints(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    return torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def _placed(values: Tensor, distance: int, arena: Tensor) -> tuple[Tensor, list[Tensor]]:
    """The values in the arena, lines (or matrices) so far apart; and what follows each of these, which must stay."""
    size, inner = values.element_size(), math.prod(values.shape[1:])
    memory = arena[: arena.numel() // size * size].view(values.dtype)
    steps = (distance, *torch.empty(values.shape[1:], device="meta").stride())
    there = memory.as_strided(values.shape, steps)
    there.copy_(values)
    guards = [memory[i * distance + inner : i * distance + inner + 64] for i in range(values.shape[0])]
    for guard in guards:
        guard.fill_(GUARD)
    return there, guards


class Placed:
    """Operands of one case on a device, and what has to come out."""

    def __init__(self, case: Far, dtype: torch.dtype, arena: Tensor) -> None:
        shapes, written, device = SHAPES[case.form], out_dtype(dtype), arena.device
        values = {name: _ints(shape, written if name in ("c", "out") else dtype, i).to(device)
                  for i, (name, shape) in enumerate(shapes.items()) if name != "c" or case.operand == "c"}  # fmt: skip
        self.want = _wanted(case.form, values)
        values[case.operand], self.guards = _placed(values[case.operand], case.distance, arena)
        a, b = values["a"], values["b"]
        more: dict[str, Any] = {"c": values["c"], "beta": 2.0} if "c" in values else {}
        sizes = {"jagged_m": [2, 1], "few k": [8], "jagged_k": [8, 0]}.get(case.form)
        if sizes is not None:
            offsets = [0, *accumulate(sizes)]
            more["offsets"] = torch.tensor(offsets, device=device, dtype=torch.int32) if case.live else offsets
        if case.form == "jagged_k":
            a, more["jagged"] = a.t(), "k"
        b = b[None] if case.form == "few k" else b
        self.out, each = values["out"], case.form == "list"
        operands = ([a], [b], [self.out]) if each else (a, b, self.out)
        self.problem = mg.GroupedGemmProblem(*operands[:2], out=operands[2], **more)

    def right(self) -> bool:
        """Whether the result is exact, and nothing else was written."""
        return torch.equal(self.out.double(), self.want) and all(bool((x == GUARD).all()) for x in self.guards)


def _wanted(form: str, values: dict[str, Tensor]) -> Tensor:
    """The result in float64, of operands as they lie before they are moved."""
    a, b = values["a"].double(), values["b"].double()
    added = 2 * values["c"].double() if "c" in values else 0
    if form == "jagged_m":
        return torch.cat([a[:2] @ b[0], a[2:] @ b[1]]) + added
    if form == "jagged_k":
        return torch.stack([a.t() @ b, torch.zeros(64, 64, dtype=torch.float64, device=a.device)])
    return (a @ b).view(values["out"].shape) + added


@cache
def _arena(device: str) -> Tensor:
    return reserved() if device == "cpu" else torch.empty(ARENA, dtype=torch.uint8, device=device)


def solve(case: Far, dtype: torch.dtype, device: str = "cuda") -> str:
    """Runs one case twice: "right", "wrong", or why the variant does not run it."""
    stand = Placed(case, dtype, _arena(device))
    spec, where = staged_spec(stand.problem), torch.device("cuda", 0)
    reasons = not_supported_reasons(spec, where)
    if reasons or problem_with(case.config, spec, where):
        return "refused " + "; ".join(reasons)
    bind = launch.plan(spec, case.config, where).bind
    for _ in range(2):
        ops = stage(stand.problem, spec, stand.problem.out).ops  # type: ignore[arg-type]
        bind(ops)()
    return "right" if stand.right() else "wrong"


def main(device: str, name: str, start: int) -> None:
    """Prints each case before it runs, and what came of it."""
    dtype = getattr(torch, name)
    for at, case in enumerate(cases(dtype)):
        if at >= start:
            print(at, case, flush=True)
            found = solve(case, dtype, device)
            if device == "cuda":
                torch.cuda.synchronize()
            print(found, flush=True)
    print("all", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
