"""Classes of problems: what they hold, what they leave out, and that their text comes back."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.problem.spec import half_octave
from multigemm.select.problem_class import ProblemClass, Query
from tests.support.trial_cases import class_from


def packed(rows: int = 1000, groups: int = 5, n: int = 24, **more: Any) -> ProblemClass:
    a, b = torch.ones(rows, 16), torch.ones(groups, 16, n)
    offsets = [0, 1, *(rows * i // groups for i in range(2, groups)), rows]
    return of(mg.GroupedGemmProblem(a, b, offsets=offsets, **more))


def of(problem: mg.GroupedGemmProblem) -> ProblemClass:
    return Query(problem).problem_class


def test_half_octaves_are_the_least_that_hold_a_count() -> None:
    steps = [half_octave(n) for n in range(1, 5000)]
    assert steps == sorted(steps)
    assert all(n <= step <= 1.5 * n + 1 for n, step in enumerate(steps, 1))
    assert sorted({step for step in steps if 64 <= step <= 512}) == [64, 90, 128, 181, 256, 362, 512]
    assert half_octave(0) == 0


def test_tokens_and_groups_are_buckets_and_the_rest_is_exact() -> None:
    assert packed() == packed(1020) == packed(1000, 7)
    assert packed() != packed(1100)
    assert packed() != packed(1000, 9)
    assert packed() != packed(n=25)
    assert packed().total == 1024
    assert packed().rows == 1024 / 8


def test_the_text_of_a_class_tells_all_of_it() -> None:
    text = str(packed(bias=torch.ones(24)))
    assert text == "jagged_m g8 m* n24 k16 t1024 float32/row float32/row float32/row ieee+epilogue host-sizes"
    assert class_from(text) == packed(activation="relu") != packed()


def test_equal_groups_on_the_host_are_a_class_of_their_own() -> None:
    a, b = torch.ones(32, 16), torch.ones(4, 16, 8)
    assert of(mg.GroupedGemmProblem(a, b, sizes=[8] * 4)).where == "equal-sizes"
    assert of(mg.GroupedGemmProblem(a, b, sizes=[7, 9, 8, 8])).where == "host-sizes"


def test_rows_of_batches_are_tokens() -> None:
    def batch(m: int) -> ProblemClass:
        return of(mg.GroupedGemmProblem(torch.ones(4, m, 16), torch.ones(4, 16, 8)))

    assert batch(60) == batch(64) != batch(65)
    assert (batch(60).m, batch(60).total, batch(60).rows) == (None, 256, 64)


def test_lists_whose_n_and_k_differ_are_told_apart_by_their_work() -> None:
    def of_list(*shapes: tuple[int, int, int]) -> ProblemClass:
        a, b = [torch.ones(m, k) for m, _, k in shapes], [torch.ones(k, n) for _, n, k in shapes]
        return of(mg.GroupedGemmProblem(a, b))

    assert of_list((32, 8, 16), (32, 8, 16)).total == 64
    assert of_list((32, 8, 16), (32, 16, 16)).total == half_octave(32 * 8 + 32 * 16)
    assert of_list((32, 8, 16), (32, 16, 8)) != of_list((32, 80, 160), (32, 160, 80))
    assert [of_list((32, 8, 16), (m, 8, 16)).where for m in (32, 31)] == ["equal-sizes", "host-sizes"]


@pytest.mark.parametrize(("column", "unaligned"), [(24, False), (23, True)])
def test_alignment_and_dtype_are_told(column: int, unaligned: bool) -> None:
    a, b = torch.ones(8, 16), torch.ones(2, 16, column)
    found = of(mg.GroupedGemmProblem(a, b, offsets=[0, 3, 8], precision="tf32"))
    assert (found.unaligned, found.dtype) == (unaligned, "tf32")
