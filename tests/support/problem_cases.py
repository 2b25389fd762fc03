"""Small problems of every form in whole numbers, and what tests of refusals say."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg

A, B = torch.ones(10, 4), torch.ones(3, 4, 5)
CUT = [0, 2, 5, 10]
SHAPES = [(2, 3, 4), (0, 5, 1), (6, 2, 0), (1, 1, 1)]
"""(M, N, K) of the matrices of `lists`."""


def make(form: str, dtype: torch.dtype = torch.float32, **extra: Any) -> mg.GroupedGemmProblem:
    """A small problem of each form, three groups with an empty one among them."""

    def x(*shape: int) -> Tensor:
        return torch.randint(-4, 5, shape).to(dtype)

    if form == "per_group":
        return mg.GroupedGemmProblem([x(2, 3), x(0, 4), x(5, 0)], [x(3, 7), x(4, 1), x(0, 2)], **extra)
    if form == "batched":
        return mg.GroupedGemmProblem(x(3, 4, 5), x(3, 5, 6), **extra)
    if form == "masked":
        return mg.GroupedGemmProblem(x(3, 4, 5), x(3, 5, 6), valid_rows=[4, 0, 2], **extra)
    a, b = {
        "jagged_m": (x(10, 5), x(3, 5, 6)),
        "jagged_n": (x(3, 4, 5), x(5, 10)),
        "jagged_k": (x(4, 10), x(10, 6)),
    }[form]
    return mg.GroupedGemmProblem(a, b, offsets=[1, 5, 5, 9], jagged=form[-1], **extra)


def lists(dtype: torch.dtype = torch.float32) -> tuple[list[Tensor], list[Tensor]]:
    """Matrices of SHAPES."""
    a = [torch.randint(-4, 5, (m, k)).to(dtype) for m, _, k in SHAPES]
    return a, [torch.randint(-4, 5, (k, n)).to(dtype) for _, n, k in SHAPES]


def refuse(match: str, call: Callable[[], object]) -> None:
    """The call has no meaning, and the text says so."""
    with pytest.raises(mg.InvalidProblem, match=match):
        call()


def refuse_problem(match: str, *args: Any, **kwargs: Any) -> None:
    """There is no such problem, and the text says so."""
    refuse(match, lambda: mg.GroupedGemmProblem(*args, **kwargs))
