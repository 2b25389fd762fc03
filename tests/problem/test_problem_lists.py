"""Lists of matrices: every keyword that lists share with packed forms, and the classes of their operands."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.problem.arrays import dtype_of

SHAPES = [(2, 3, 4), (0, 5, 1), (6, 2, 0), (1, 1, 1)]


def lists(dtype: torch.dtype = torch.float32) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    a = [torch.randint(-4, 5, (m, k)).to(dtype) for m, _, k in SHAPES]
    return a, [torch.randint(-4, 5, (k, n)).to(dtype) for _, n, k in SHAPES]


def test_c_bias_and_out_of_lists() -> None:
    a, b = lists()
    c = [torch.full((m, n), 2.0) for m, n, _ in SHAPES]
    bias = [torch.full((n,), 1.0) for _, n, _ in SHAPES]
    out = [torch.full((m, n), float("nan")) for m, n, _ in SHAPES]
    problem = mg.GroupedGemmProblem(a, b, c=c, beta=3.0, bias=bias, out=out, activation="relu")
    assert mg.solve(problem) is out
    for x, y, z in zip(a, b, out, strict=True):
        assert torch.equal(z, (x @ y + 7).relu())
    assert mg.verify(problem, out).ok


@pytest.mark.parametrize("rank", [1, 2])
def test_one_array_of_bias_serves_a_list_of_equal_widths(rank: int) -> None:
    a, b = [torch.ones(2, 3), torch.ones(4, 3)], [torch.ones(3, 5)] * 2
    bias = torch.arange(5.0) if rank == 1 else torch.stack([torch.arange(5.0), torch.ones(5)])
    got = mg.grouped_gemm(a, b, bias=bias)
    rows = [bias, bias] if rank == 1 else list(bias)
    for x, row in zip(got, rows, strict=True):
        assert torch.equal(x, 3 + row.expand_as(x))


def test_mixed_dtypes_of_lists_are_cast() -> None:
    a, b = lists(torch.float16)
    result = mg.grouped_gemm(a, [y.bfloat16() for y in b])
    assert all(r.dtype is torch.float32 and torch.equal(r, x.float() @ y.float()) for r, x, y in zip(result, a, b))


def test_the_spec_holds_what_all_matrices_share() -> None:
    spec = mg.GroupedGemmProblem([torch.ones(2, 8), torch.ones(3, 8)], [torch.ones(8, 4), torch.ones(8, 12)]).spec
    assert (spec.m, spec.n, spec.k) == (None, None, 8)
    assert (spec.a.order, spec.a.align) == ("row", 16)
    mixed = mg.GroupedGemmProblem([torch.ones(8, 8), torch.ones(8, 8).T], [torch.ones(8, 7)] * 2).spec
    assert mixed.a.order == "strided"
    assert mixed.b.align == 4
    empty = mg.GroupedGemmProblem([], []).spec
    assert (empty.groups, empty.m) == (0, None)


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int32])
def test_a_list_of_no_problems_has_no_results_of_any_dtype(dtype: torch.dtype | None) -> None:
    problem = mg.GroupedGemmProblem([], [], out_dtype=dtype)
    assert (mg.solve(problem), problem.out_dtype) == ([], dtype or torch.float32)
    assert problem.spec.a.dtype == problem.spec.b.dtype == problem.spec.compute
    again = eval(f"mg.{problem!r}", {"mg": mg, "torch": torch})
    assert again.spec == problem.spec


def test_a_list_of_no_problems_is_refused_what_no_problem_may_ask() -> None:
    with pytest.raises(mg.InvalidProblem, match=r"torch\.int64"):
        mg.GroupedGemmProblem([], [], out_dtype=torch.int64)
    with pytest.raises(mg.InvalidProblem, match="only 'relu'"):
        mg.GroupedGemmProblem([], [], out_dtype=torch.int32, activation="silu")


def test_repr_of_lists_and_strided_operands_can_be_pasted_back() -> None:
    a, b = lists()
    problem = mg.GroupedGemmProblem([a[0].T.contiguous().T, *a[1:]], b, bias=[torch.ones(n) for _, n, _ in SHAPES])
    again = eval(f"mg.{problem!r}", {"mg": mg, "torch": torch})
    assert again.spec == problem.spec


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (torch.half, torch.half),
        ("bfloat16", torch.bfloat16),
        (np.float64, torch.float64),
        (np.dtype("int8"), torch.int8),
    ],
)
def test_dtypes_by_any_name(given: Any, wanted: torch.dtype) -> None:
    assert dtype_of(given, "x") is wanted


def test_arrays_of_tuples_are_lists() -> None:
    a, b = lists()
    assert all(
        torch.equal(x, y) for x, y in zip(mg.grouped_gemm(tuple(a), tuple(b)), mg.grouped_gemm(a, b), strict=True)
    )


def test_wide_operands_are_known_by_their_strides() -> None:
    a = torch.ones(1).as_strided((2, 3), (0, 0))
    assert not mg.GroupedGemmProblem(a, torch.ones(3, 2)).spec.a.wide
    memory = torch.empty(2**31 + 8, dtype=torch.int8)
    far = memory.as_strided((2, 3), (2**31, 1))
    spec = mg.GroupedGemmProblem(far, torch.ones(3, 2, dtype=torch.int8)).spec
    assert spec.a.wide
    far.copy_(torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int8))
    assert mg.grouped_gemm(far, torch.ones(3, 2, dtype=torch.int8)).tolist() == [[6, 6], [15, 15]]
