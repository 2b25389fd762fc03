"""The ten mistakes that a new user makes: each message holds the fix, in the words of the caller's array library."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg

A, W = torch.ones(12, 8), torch.ones(3, 8, 4)
X, DY = torch.ones(12, 8), torch.ones(12, 5)
SIZES = [4, 4, 4]
gemm: Any = mg.grouped_gemm  # whose types would tell some of these mistakes before they are made
plan: Any = mg.plan

MISTAKES: dict[str, tuple[Any, str]] = {
    "a keyword is misspelled": (lambda: gemm(A, W, sizes=SIZES, activaton="silu"), "activation="),
    "torch's word for ends": (lambda: gemm(A, W, offs=torch.tensor([4, 8, 12])), "ends="),
    "weights stored as torch.nn.Linear": (
        lambda: gemm(A, W.transpose(1, 2).contiguous(), sizes=SIZES),
        "pass b.transpose(1, 2)",
    ),
    "the same in NumPy": (
        lambda: gemm(A.numpy(), W.transpose(1, 2).contiguous().numpy(), sizes=SIZES),
        "pass b.swapaxes(1, 2)",
    ),
    "tokens with a batch dimension": (lambda: gemm(A.view(2, 6, 8), W, sizes=SIZES), "a.flatten(0, 1)"),
    "weight gradients without jagged": (lambda: gemm(X.T, DY, sizes=SIZES), "pass jagged='k'"),
    "sizes of floats": (lambda: gemm(A, W, sizes=torch.tensor([4.0, 4.0, 4.0])), ".to(torch.int64)"),
    "ends passed as offsets": (lambda: gemm(A, W, offsets=[4, 8, 12]), "pass ends="),
    "a plan called with operands": (lambda: plan(A, W, sizes=SIZES)(A, W), "plan.run("),
    "a function as the activation": (
        lambda: gemm(A, W, sizes=SIZES, activation=torch.nn.functional.silu),
        "use one of 'relu', 'gelu', 'gelu_tanh', 'silu'",
    ),
    "operands of two libraries": (lambda: gemm(np.ones((12, 8), np.float32), W, sizes=SIZES), "one kind"),
    "sizes that forget rows": (
        lambda: gemm(A, W, sizes=torch.tensor([4, 4, 1]), check="complete"),
        "own 0 to 9 of the jagged extent 12",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_the_message_holds_the_fix(mistake: str) -> None:
    call, fix = MISTAKES[mistake]
    with pytest.raises(mg.InvalidProblem) as caught:
        call()
    assert fix in str(caught.value)


@pytest.mark.parametrize("cut", [{"offsets": [1, 8, 12, 12]}, {"ends": [4, 8, 11]}, {"sizes": [4, 4, 0]}])
def test_groups_that_leave_rows_to_nobody_are_refused_where_that_is_asked(cut: dict[str, Any]) -> None:
    assert mg.grouped_gemm(A, W, **cut, check="full").shape == (12, 4)
    with pytest.raises(mg.InvalidProblem, match="check='complete' wants all"):
        mg.grouped_gemm(A, W, **cut, check="complete")
    assert torch.equal(mg.grouped_gemm(A, W, sizes=SIZES, check="complete"), mg.grouped_gemm(A, W, sizes=SIZES))
    with pytest.raises(mg.InvalidProblem, match="own 0 to 0 of the jagged extent 12"):
        mg.grouped_gemm(A, W[:0], sizes=[], check="complete")


def test_the_list_of_backends_is_read_without_a_parser() -> None:
    found = mg.list_backends()
    lines = str(found).splitlines()
    assert len(lines) == len(found) and repr(found) == str(found)
    assert next(line for line in lines if line.startswith("cpu ")).split()[:2] == ["cpu", "here"]
    assert [info.name for info in found] == [line.split()[0] for line in lines]
