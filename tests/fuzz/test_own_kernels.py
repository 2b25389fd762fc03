"""Tests of one's own kernels: the assertion, the strategy, and the fixture that pytest finds."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings

import multigemm as mg
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.testing import assert_correct, problems, random_problem

KERNEL = """
import pytest, torch
from multigemm.testing import assert_correct

def kernel(a, b, offsets, bug):
    out = a.new_zeros(a.shape[0], b.shape[2])
    ends = offsets.tolist()
    for g in range(len(b)):
        out[ends[g] : ends[g + 1]] = a[ends[g] : ends[g + 1]] @ b[g]
    if bug and out.numel():
        out[ends[0] : ends[-1]][-1:] = 1e4
    return out

@pytest.mark.parametrize("bug", [False, True])
@pytest.mark.grouped_gemm(dtype="float64", count=16)
def test_kernel(grouped_gemm_problem, bug):
    problem = grouped_gemm_problem
    assert_correct(kernel(problem.a, problem.b, problem.grouping.live, bug), problem)
"""


def test_a_result_is_right_or_told_by_group_and_place() -> None:
    a, b = torch.ones(6, 4), torch.ones(3, 4, 2)
    out = mg.grouped_gemm(a, b, sizes=[1, 0, 5])
    assert_correct(out, a, b, sizes=[1, 0, 5])
    assert_correct(out.numpy(), a.numpy(), b.numpy(), sizes=[1, 0, 5])
    assert_correct([np.ones((2, 2)) * 3], [np.ones((2, 3))], [np.ones((3, 2))])
    out[4, 1] += 1
    with pytest.raises(AssertionError, match=r"group 2"):
        assert_correct(out, GroupedGemmProblem(a, b, sizes=[1, 0, 5]))


@settings(max_examples=15, deadline=None)
@given(problem=problems("jagged_k", "bfloat16"))
def test_problems_are_plain_and_of_the_kind_that_was_asked_for(problem: GroupedGemmProblem) -> None:
    assert problem.form == "jagged_k" and problem.spec.a.dtype is problem.spec.b.dtype is torch.bfloat16
    assert problem.bias is problem.c is problem.activation is None and problem.quantisation is None
    assert_correct(mg.solve(problem, "cpu"), problem)


def test_problems_of_a_seed_differ_in_their_extents_and_hold_empty_groups() -> None:
    drawn = [random_problem(seed) for seed in range(20)]
    assert len({tuple(problem.a.shape) for problem in drawn}) > 10  # type: ignore[union-attr]
    assert any(size == 0 for problem in drawn for size, _, _ in problem.sizes())


WRONG_MARKERS = {
    "16": "got (16,) without a name: write count=...",
    "dtpe='float64'": "takes no dtpe=: it takes count, form,",
}


class Reports:
    """A plugin that notes what came of each test, and what failed to be collected."""

    def __init__(self) -> None:
        self.outcomes: dict[str, str] = {}
        self.errors: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            self.outcomes[report.nodeid.rpartition("::")[2]] = report.outcome

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.errors.append(str(report.longrepr))


def test_pytest_finds_the_fixture_tells_a_bug_and_refuses_markers_of_other_words(tmp_path: Path) -> None:
    (tmp_path / "test_kernel.py").write_text(KERNEL)
    for number, words in enumerate(WRONG_MARKERS):
        (tmp_path / f"test_wrong{number}.py").write_text(KERNEL.replace('dtype="float64", count=16', words))
    words = f"-q -c {os.devnull} --rootdir {tmp_path} -p no:multigemm -p multigemm.pytest_plugin -p no:cacheprovider"
    seen = Reports()
    pytest.main([*words.split(), "--strict-markers", "--continue-on-collection-errors", str(tmp_path)], [seen])
    failed = [name for name, outcome in seen.outcomes.items() if outcome == "failed"]
    assert len(failed) >= 6 and all(name.endswith("-True]") for name in failed), seen.outcomes
    assert len(seen.outcomes) == 32 and set(seen.outcomes.values()) == {"passed", "failed"}
    for said, error in zip(WRONG_MARKERS.values(), seen.errors, strict=True):
        assert said in error
