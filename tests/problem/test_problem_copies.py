"""Copies and pickles of a problem: the same problem, over arrays of its own."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm import reference

A, B = torch.ones(10, 4), torch.ones(3, 4, 5)
CUT = [0, 2, 5, 10]


def _in_place(out: Any) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(A[:4], A[:4].clone().T, c=out, beta=2.0, out=out)


def _pickled(problem: mg.GroupedGemmProblem) -> Any:
    return pickle.loads(pickle.dumps(problem))


@pytest.mark.parametrize(
    "problem",
    [
        mg.GroupedGemmProblem(A, B, offsets=CUT, alpha=-3, bias=torch.ones(3, 5), activation="relu"),
        mg.GroupedGemmProblem(A, B, sizes=torch.tensor([1, 2, 3]), out_dtype=torch.float64),
        mg.GroupedGemmProblem(A.T.contiguous(), torch.ones(10, 2), offsets=CUT, jagged="k", precision="tf32"),
        mg.GroupedGemmProblem(torch.ones(3, 2, 4), B, valid_rows=[0, 2, 1], c=torch.ones(3, 2, 5), beta=1),
        mg.GroupedGemmProblem(torch.ones(3, 2, 4), B, valid_rows=torch.tensor([0, 2, 1]), deterministic=False),
        mg.GroupedGemmProblem([A, A[:3]], [B[0], B[1]], bias=torch.ones(2, 5), out=[torch.ones(10, 5), A[:3] @ B[1]]),
        mg.GroupedGemmProblem(np.ones((4, 4)), np.ones((4, 3))[::-1], out=np.full((4, 3), 7.0)),
        _in_place(torch.ones(4, 4)),
        _in_place(np.ones((4, 4), np.float32)),
        mg.GroupedGemmProblem(A[:4], A[:4].T, out=torch.ones(4, 4)),
        mg.GroupedGemmProblem([], [], out_dtype=torch.int32),
    ],
)
@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, _pickled])
def test_a_copy_is_the_same_problem_over_its_own_arrays(
    problem: mg.GroupedGemmProblem, copied: Callable[[Any], Any]
) -> None:
    again = copied(problem)
    assert repr(again) == repr(problem) and again.spec == problem.spec
    answer = reference.answer(again)
    result = mg.solve(again)
    assert reference.judge(answer, result).ok
    if problem.given_out is not None:
        assert result is again.given_out
        assert (result is problem.given_out) == (copied is copy.copy)


def test_a_copy_speaks_of_its_own_alignment() -> None:
    memory = torch.from_numpy(torch.empty(19).numpy()[1:])  # starts off 16 bytes, and its copy does not
    problem = mg.GroupedGemmProblem(memory[3:15].view(3, 4), torch.ones(4, 4))
    again = copy.deepcopy(problem)
    assert isinstance(again.a, torch.Tensor)
    assert problem.spec.a.align == 16
    assert again.a.data_ptr() % again.spec.a.align == 0
