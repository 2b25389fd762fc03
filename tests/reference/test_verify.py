"""A verdict names the group, the place and the numbers, and says what kind of fault it is."""

from typing import Any

import numpy as np
import pytest
import torch

import multigemm.reference as reference
from multigemm.api import solve
from multigemm.errors import InvalidProblem
from multigemm.problem.problem import GroupedGemmProblem


def jagged(**more: Any) -> Any:
    a, b = torch.randint(-3, 4, (8, 4)).float(), torch.randint(-3, 4, (3, 4, 5)).float()
    return GroupedGemmProblem(a, b, offsets=[1, 3, 3, 7], **more)


def test_a_right_answer_is_right() -> None:
    problem = jagged()
    verdict = reference.verify(problem, reference.expected(problem))
    assert verdict and verdict.ok and verdict.bad == 0 and verdict.total == 40 and "40" in str(verdict)


def test_the_worst_element_is_told() -> None:
    problem = jagged()
    result = reference.expected(problem)
    result[4, 2] += 1
    result[5, 1] += 900
    verdict = reference.verify(problem, torch.from_numpy(result))
    assert not verdict and verdict.bad == 2
    assert (verdict.group, verdict.coordinate, verdict.within) == (2, (5, 1), (2, 1))
    assert verdict.got == result[5, 1] and verdict.wanted == result[5, 1] - 900 == verdict.low == verdict.high
    assert "group 2" in verdict.text and "exact" in verdict.text


@pytest.mark.parametrize("form", ["jagged_k", "batched", "masked"])
def test_stacked_results_are_told_by_group_too(form: Any) -> None:
    cuts: dict[str, Any] = {"jagged_k": {"offsets": [0, 3, 5], "jagged": "k"}, "masked": {"valid_rows": [1, 4]}}
    grouping = cuts.get(form, {})
    shapes = ((4, 5), (5, 3)) if form == "jagged_k" else ((2, 4, 5), (2, 5, 3))
    problem = GroupedGemmProblem(*(torch.ones(s) for s in shapes), **grouping)
    result = reference.expected(problem)
    result[1, 3, 2] = np.nan
    verdict = reference.verify(problem, result)
    assert (verdict.group, verdict.within) == (1, (3, 2)) and "NaN" in verdict.text
    assert "of output" not in verdict.text, "there is but one"


def test_lists_name_the_matrix() -> None:
    problem = GroupedGemmProblem([torch.ones(2, 3), torch.ones(1, 3)], [torch.ones(3, 2), torch.ones(3, 4)])
    result = reference.expected(problem)
    result[1][0, 3] = 0
    verdict = reference.verify(problem, result)
    assert verdict.group == 1 and verdict.array == 1 and verdict.coordinate == (0, 3) and "output 1" in verdict.text


def test_rows_that_no_group_owns_are_judged() -> None:
    problem = jagged()
    result = reference.expected(problem)
    result[0, 0] = 1
    verdict = reference.verify(problem, result)
    assert verdict.group is None and "no group owns" in verdict.text and "zero" in verdict.text


def test_a_users_out_must_keep_its_other_rows() -> None:
    out = torch.full((8, 5), 3.0)
    problem = jagged(out=out)
    before = reference.answer(problem)
    out.zero_()
    verdict = reference.judge(before, out)
    assert not verdict and verdict.bad >= 20


def test_wrong_shapes_dtypes_and_counts_are_said() -> None:
    problem = jagged()
    result = reference.expected(problem)
    assert "shape" in reference.verify(problem, result[1:]).text
    assert "dtype" in reference.verify(problem, result.astype(np.float64)).text
    assert "arrays" in reference.verify(problem, [result, result]).text


@pytest.mark.parametrize(
    "x", [None, 3.0, "text", [[1.0]], torch.ones(8, 5, device="meta"), torch.ones(8, 5).to_sparse()]
)
def test_what_is_no_result(x: Any) -> None:
    with pytest.raises(InvalidProblem, match="result"):
        reference.verify(jagged(), x)


def test_rho_tells_ordinary_errors_from_large_ones() -> None:
    a, b = torch.randn(1, 20, 64), torch.randn(1, 64, 20)
    problem = GroupedGemmProblem(a, b)
    exact = reference.expected(problem)
    usual = reference.verify(problem, a @ b)
    assert usual and 0 < usual.rho_rms <= usual.rho < 20
    assert reference.verify(problem, exact).rho < 1.01


def test_rho_counts_half_an_ulp_and_the_root_of_k() -> None:
    """One ulp of 4 is 2^-21, and sqrt(4) u 4 = 2^-21 as well: an error of one is 2 / 3 of what is ordinary."""
    problem = GroupedGemmProblem(torch.full((1, 1, 4), 0.5), torch.full((1, 4, 1), 2.0))
    verdict = reference.verify(problem, torch.full((1, 1, 1), 4.0 + 2.0**-21))
    assert verdict.rho == verdict.rho_rms == pytest.approx(2 / 3)


def test_a_c_that_the_result_has_overwritten_judges_nothing() -> None:
    """What was added is gone: the verdict would be "wrong" about a right result."""
    out = torch.ones(4, 2)
    problem = GroupedGemmProblem(torch.ones(4, 3), torch.ones(1, 3, 2), sizes=[4], c=out, beta=1.0, out=out)
    before = reference.answer(problem)
    result = solve(problem)
    with pytest.raises(InvalidProblem, match=r"c is the result's own memory.*answer\(problem\) before it runs"):
        reference.verify(problem, result)
    assert reference.judge(before, result)
    copies = [torch.ones(2, 2), torch.ones(3, 2)]
    listed = GroupedGemmProblem(
        [torch.ones(2, 3), torch.ones(3, 3)], [torch.ones(3, 2)] * 2, c=copies, beta=2.0, out=copies
    )
    with pytest.raises(InvalidProblem, match="c is the result's own memory"):
        reference.verify(listed, solve(listed))
    unread = GroupedGemmProblem(torch.ones(4, 3), torch.ones(1, 3, 2), sizes=[4], c=out, beta=0, out=out)
    assert reference.verify(unread, solve(unread)), "beta is 0"


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.complex64, torch.int16])
def test_a_result_of_a_dtype_that_no_problem_has_is_wrong(dtype: torch.dtype) -> None:
    problem = GroupedGemmProblem(torch.ones(4, 3), torch.ones(1, 3, 2), sizes=[4])
    verdict = reference.verify(problem, torch.ones(4, 2).to(dtype))
    assert not verdict
    assert f"dtype {str(dtype).removeprefix('torch.')}, expected float32" in verdict.text
