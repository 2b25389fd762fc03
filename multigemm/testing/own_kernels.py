"""Random problems and one assertion for tests of one's own kernels, which need not be backends.

    from hypothesis import given
    from multigemm.testing import assert_correct, problems

    @given(problem=problems(dtype="bfloat16", device="cuda"))
    def test_my_kernel(problem):
        assert_correct(my_kernel(problem.a, problem.b, problem.grouping.live), problem)

Without hypothesis, pytest draws the problems: a test that takes `grouped_gemm_problem` runs on twenty of them, and
`@pytest.mark.grouped_gemm(dtype="bfloat16", device="cuda", count=100)` says which, by the keywords of `random_problem`
and their number (`multigemm.pytest_plugin`, which pytest finds by itself where multigemm is installed).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import Form
from multigemm.reference.verify import verify
from multigemm.testing.case import Case
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import Limits, cases, legal, random_case

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

SHAPE = ("form", "dtype", "m", "n", "k", "lengths", "dims", "mode", "seed")
"""What is kept of a case that is drawn; the rest is plain: rows in order, no epilogue, offsets on the device."""
MODES = ("int", "normal", "uniform", "ties", "cancel")
"""Whole numbers, which have one right answer, and random ones, which have bounds; none with NaN or infinities."""


def assert_correct(result: Any, *args: Any, **keywords: Any) -> None:
    """Asserts that every element of a result lies within its own bound, which is a single value where sums are
    exact.

    Args:
        result: what a kernel computed: an array, or a list of them for lists.
        args, keywords: the problem, or the arguments of `grouped_gemm` that mean it.

    Raises:
        AssertionError: an element is wrong; the text tells the worst one by group and place, and its bounds.
        InvalidProblem: the arguments have no meaning, or the result has another shape or dtype.

    Example:
        >>> import torch
        >>> a, b = torch.ones(6, 4), torch.ones(3, 4, 2)
        >>> assert_correct(torch.full((6, 2), 4.0), a, b, sizes=[1, 0, 5])
    """
    given = args and isinstance(args[0], GroupedGemmProblem)
    verdict = verify(args[0] if given else GroupedGemmProblem(*args, **keywords), result)
    if not verdict.ok:
        raise AssertionError(str(verdict))


def problems(
    form: Form = "jagged_m", dtype: str = "float32", device: str | torch.device = "cpu", work: int = 1 << 16
) -> SearchStrategy[GroupedGemmProblem]:
    """A hypothesis strategy of plain problems, which shrinks what a property test finds.

    Args:
        form: how the groups lie: "jagged_m" (packed rows), "per_group" (lists), ...
        dtype: of both operands: "bfloat16", "float16", "float32", "float64" or "int8".
        device: where the operands lie.
        work: multiply-adds of one problem, at most.

    Returns:
        A strategy of problems with uneven and odd extents, empty groups, operands in rows, offsets on the device.

    Example:
        >>> from hypothesis import given
        >>> @given(problem=problems("jagged_m", "float32"))
        ... def test_mine(problem):
        ...     assert_correct(mine(problem), problem)
    """
    return cases(_limits(form, dtype, work)).map(lambda case: _plain_problem(case, torch.device(device)))


def random_problem(
    seed: int, form: Form = "jagged_m", dtype: str = "float32", device: str | torch.device = "cpu", work: int = 1 << 16
) -> GroupedGemmProblem:
    """The problem of a seed, drawn as `problems` draws them.

    Args:
        seed: the same seed, the same problem.
        form, dtype, device, work: as for `problems`.

    Returns:
        The problem.

    Example:
        >>> random_problem(3, "batched").form
        'batched'
    """
    return _plain_problem(random_case(seed, _limits(form, dtype, work)), torch.device(device))


def _limits(form: Form, dtype: str, work: int) -> Limits:
    return Limits(work=work, groups=65, forms=(form,), dtypes=(dtype,), modes=MODES, quantised=0)


def _plain_problem(case: Case, device: torch.device) -> GroupedGemmProblem:
    plain = Case(**{name: getattr(case, name) for name in SHAPE})
    return DeviceCase.from_case(legal(plain), device).problem
