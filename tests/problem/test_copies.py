"""Copies, pickles and texts of a problem: the same problem, over arrays of its own; and pickled errors."""

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
from multigemm.problem.spec import FORMS
from tests.support.problem_cases import CUT, A, B, make


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


@pytest.mark.parametrize(
    "problem",
    [
        mg.GroupedGemmProblem(A, B, offsets=CUT, alpha=-1e-30, c=torch.ones(10, 5), beta=float(np.float32(0.1))),
        mg.GroupedGemmProblem(A, B, offsets=torch.tensor(CUT)),
        mg.GroupedGemmProblem(A, B, ends=torch.tensor([2, 9, 5, 9, 10, 9], dtype=torch.int32)[::2]),
        mg.GroupedGemmProblem(torch.ones(3, 2, 4), B, valid_rows=torch.tensor([0, 2, 1])),
        mg.GroupedGemmProblem(torch.ones(41)[1:].view(10, 4), B, offsets=CUT),
        mg.GroupedGemmProblem(torch.ones(0, 4, 6)[:, :, :3], torch.ones(0, 5, 3).mT),
        mg.GroupedGemmProblem([torch.ones(49)[3:].view(2, 23)[:, :4]], [torch.ones(14)[2:].view(4, 3)[:, :2]]),
        mg.GroupedGemmProblem([torch.ones(4, 2).T, A], [torch.ones(4, 3), B[0]], bias=[torch.ones(3), torch.ones(5)]),
        *(make(form, bias=None, activation="relu") for form in FORMS),
    ],
)  # fmt: skip
def test_repr_can_be_pasted_back_whatever_it_holds(problem: mg.GroupedGemmProblem) -> None:
    again = eval(f"mg.{problem!r}", {"mg": mg, "torch": torch})
    assert again.spec == problem.spec
    assert repr(again) == repr(problem)


@pytest.mark.parametrize(
    "error",
    [
        mg.BackendUnsupported({"x": ["K is 3", "N is 4"]}),
        mg.BackendUnavailable("x", "no GPU"),
        mg.UnknownBackend("unknown backend 'y'"),
        mg.InvalidProblem("a is bad"),
    ],
)
def test_exceptions_travel_between_processes(error: mg.MultigemmError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert str(again) == str(error)
    assert vars(again) == vars(error)
