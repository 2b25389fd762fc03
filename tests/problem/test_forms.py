"""What a problem is: forms, lists, extents, specs, array libraries, and what it says about itself."""

from __future__ import annotations

import inspect
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.planning.staging import stage, staged_spec
from multigemm.problem.arrays import dtype_of
from multigemm.problem.fused import FusedKeywords
from multigemm.problem.problem import Keywords
from multigemm.problem.spec import ACTIVATIONS, FORMS, GATES, GLU_LAYOUTS, PRECISIONS
from tests.support.problem_cases import CUT, SHAPES, lists, make

SIZES = {
    "per_group": [(2, 7, 3), (0, 1, 4), (5, 2, 0)],
    "batched": [(4, 6, 5)] * 3,
    "masked": [(4, 6, 5), (0, 6, 5), (2, 6, 5)],
    "jagged_m": [(4, 6, 5), (0, 6, 5), (4, 6, 5)],
    "jagged_n": [(4, 4, 5), (4, 0, 5), (4, 4, 5)],
    "jagged_k": [(4, 6, 4), (4, 6, 0), (4, 6, 4)],
}


@pytest.mark.parametrize("form", FORMS)
def test_each_form_has_its_sizes_flops_and_views(form: str) -> None:
    problem = make(form)
    assert problem.form == form
    assert problem.spec.form == form
    assert problem.spec.groups == 3
    assert problem.sizes() == SIZES[form]
    assert problem.flops == sum(2 * m * n * k for m, n, k in SIZES[form])
    for view, (m, n, k) in zip(problem.groups(), SIZES[form], strict=True):
        assert view.a.shape == (m, k)
        assert view.b.shape == (k, n)


@pytest.mark.parametrize("form", FORMS)
def test_solving_equals_a_loop_over_the_views(form: str) -> None:
    problem = make(form)
    result = mg.solve(problem)
    if form != "per_group":
        assert result.shape == problem.out_shape
    covered: Any = [torch.zeros_like(r) for r in result] if form == "per_group" else torch.zeros_like(result)
    for view in problem.groups():
        torch.testing.assert_close(result[view.where], view.a @ view.b, rtol=0, atol=0)
        covered[view.where] = 1
    if form != "per_group":
        assert not result[covered == 0].any()


def test_two_matrices_are_one_group() -> None:
    a, b = torch.randint(-4, 5, (3, 4)).float(), torch.randint(-4, 5, (4, 5)).float()
    out = torch.full((3, 5), float("nan"))
    assert torch.equal(mg.grouped_gemm(a, b), a @ b)
    assert mg.grouped_gemm(a, b, out=out) is out
    assert torch.equal(out, a @ b)


@pytest.mark.parametrize("kind", ["offsets", "sizes", "ends"])
@pytest.mark.parametrize("give", [list, np.array, np.int32, torch.tensor, "int32"])
def test_all_ways_to_cut_agree(kind: str, give: Any) -> None:
    values = {"offsets": [0, 4, 4, 9], "sizes": [4, 0, 5], "ends": [4, 4, 9]}[kind]
    if give is np.int32:
        cut: Any = np.array(values, np.int32)
    elif give == "int32":
        cut = torch.tensor(values, dtype=torch.int32)
    else:
        cut = give(values)
    a, b = torch.randn(11, 3), torch.randn(3, 3, 2)
    result = mg.grouped_gemm(a, b, **{kind: cut})
    want = torch.cat([a[:4] @ b[0], a[4:9] @ b[2], torch.zeros(2, 2)])
    torch.testing.assert_close(result, want)


def test_specs_hold_buckets_not_token_counts() -> None:
    def spec(rows: int) -> mg.ProblemSpec:
        return mg.GroupedGemmProblem(torch.ones(rows, 8), torch.ones(2, 8, 4), offsets=[0, 1, rows]).spec

    assert spec(600) is spec(1000)
    assert spec(600) != spec(2000)


@pytest.mark.parametrize("bits", [np.float32, np.float16, np.float64, ml_dtypes.bfloat16, np.int8])
def test_numpy_in_numpy_out(bits: Any) -> None:
    rng = np.random.default_rng(0)
    a, b = rng.integers(-4, 5, (7, 3)).astype(bits), rng.integers(-4, 5, (2, 3, 4)).astype(bits)
    result = mg.grouped_gemm(a, b, offsets=[0, 3, 7])
    assert isinstance(result, np.ndarray)
    assert result.dtype == (np.int32 if bits is np.int8 else bits)
    want = np.concatenate([a[:3].astype(int) @ b[0].astype(int), a[3:].astype(int) @ b[1].astype(int)])
    assert (result.astype(int) == want).all()


def test_numpy_views_that_torch_lacks() -> None:
    a = np.arange(12.0).reshape(4, 3)[::-1, ::-1]
    b = np.arange(6.0).reshape(3, 2)
    b.flags.writeable = False
    plan = mg.plan(mg.GroupedGemmProblem(a, b))
    assert (plan() == a @ b).all()
    base: Any = a.base
    base[...] = 1
    assert (plan() == a @ b).all()


def test_numpy_out_is_written_in_place() -> None:
    out = np.full((4, 2), np.nan)
    assert mg.grouped_gemm(np.ones((4, 3)), np.ones((3, 2)), out=out) is out
    assert (out == 3).all()


class OnlyDlpack:
    """An array that offers nothing but DLPack."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x

    def __dlpack__(self, **kwargs: Any) -> Any:
        return self.x.__dlpack__(**kwargs)

    def __dlpack_device__(self) -> Any:
        return self.x.__dlpack_device__()


def test_dlpack_gives_torch() -> None:
    a, b = torch.randn(4, 3), torch.randn(3, 2)
    result = mg.grouped_gemm(OnlyDlpack(a), OnlyDlpack(b))
    assert isinstance(result, torch.Tensor)
    torch.testing.assert_close(result, a @ b)


def test_mixed_float_dtypes_are_computed_in_the_common_one() -> None:
    a, b = torch.randn(5, 4).to(torch.bfloat16), torch.randn(4, 3).to(torch.float16)
    problem = mg.GroupedGemmProblem(a, b)
    assert problem.spec.compute is torch.float32
    plan = mg.plan(problem)
    torch.testing.assert_close(plan(), a.float() @ b.float())
    a.zero_()
    assert not plan().any()
    assert "a is cast to torch.float32" in str(mg.explain(problem))


def test_zero_and_absurd_strides_are_operands_like_any() -> None:
    a = torch.randn(1, 3).expand(4, 3)
    b = torch.randn(3, 2).as_strided((3, 1), (1, 10**9))
    torch.testing.assert_close(mg.grouped_gemm(a, b), a.contiguous() @ b.contiguous())


def test_no_groups_and_no_extent_are_ordinary() -> None:
    assert mg.grouped_gemm([], []) == []
    assert mg.grouped_gemm(torch.ones(0, 4, 3), torch.ones(0, 3, 2)).shape == (0, 4, 2)
    assert not mg.grouped_gemm(torch.ones(5, 3), torch.ones(0, 3, 2), offsets=[2]).any()
    assert not mg.grouped_gemm(torch.ones(2, 4, 0), torch.ones(2, 0, 2)).any()
    assert mg.grouped_gemm(torch.ones(4, 3), torch.ones(3, 0)).shape == (4, 0)
    assert mg.grouped_gemm(torch.ones(4, 5), torch.ones(5, 3), offsets=[2, 2, 2], jagged="k").eq(0).all()


def test_out_stays_untouched_where_nobody_owns_it() -> None:
    out = torch.full((6, 2), 7.0)
    mg.grouped_gemm(torch.ones(6, 3), torch.ones(1, 3, 2), offsets=[2, 4], out=out)
    assert out[:, 0].tolist() == [7, 7, 3, 3, 7, 7]


def test_accumulating_into_c_in_place() -> None:
    c = torch.ones(4, 2)
    result = mg.grouped_gemm(torch.ones(4, 3), torch.ones(3, 2), c=c, out=c, beta=2.0)
    assert result is c
    assert c.eq(5).all()


def test_interleaved_columns_of_one_matrix_are_legal_outputs() -> None:
    whole = torch.zeros(4, 6)
    outs = [whole[:, 0::2], whole[:, 1::2]]
    mg.grouped_gemm([torch.ones(4, 2)] * 2, [torch.ones(2, 3), torch.full((2, 3), 3.0)], out=outs)
    assert whole[0].tolist() == [2, 6, 2, 6, 2, 6]


def test_bytes_count_each_operand_once() -> None:
    problem = mg.GroupedGemmProblem(torch.ones(10, 4), torch.ones(4, 3), offsets=[0, 5, 10])
    assert problem.bytes == 4 * (10 * 4 + 4 * 3 + 10 * 3)


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


def test_a_cast_of_repeated_elements_is_as_wide_as_its_copy() -> None:
    a = torch.zeros(1, 1, 1, dtype=torch.bfloat16).expand(2, 2**15, 2**16)
    problem = mg.GroupedGemmProblem(a, torch.zeros(1, 1, 1, dtype=torch.float16).expand(2, 2**16, 1))
    assert not problem.spec.a.wide
    assert staged_spec(problem).a.wide


def test_an_index_beyond_32_bits_is_wide_without_a_distance() -> None:
    ones = torch.ones(1, 1).expand(1, 2**31)
    problem = mg.GroupedGemmProblem(ones, ones.T, sizes=[3, 5], jagged="k")
    assert problem.spec.a.wide
    assert problem.spec.b.wide
    assert not mg.GroupedGemmProblem(ones[:, 1:], ones.T[1:], sizes=[3, 5], jagged="k").spec.a.wide


@pytest.mark.parametrize(("last", "index"), [(10, torch.int32), (2**31 - 1, torch.int32), (2**31, torch.int64)])
def test_host_sizes_are_of_the_type_that_device_sizes_are_as_a_rule(last: int, index: torch.dtype) -> None:
    """A kernel is compiled for one type: that of the sizes on a device serves those of the host too."""
    rows, weights = torch.ones(1, 4).expand(2**31 + 5, 4), torch.ones(2, 4, 5)
    for cut in ({"offsets": [1, 3, last]}, {"sizes": [3, last - 3]}, {"ends": np.array([3, last])}):
        problem = mg.GroupedGemmProblem(rows, weights, **cut)
        staged = stage(problem, problem.spec, torch.empty(0)).ops
        assert isinstance(staged.ends, torch.Tensor) and staged.host_offsets is not None
        assert problem.spec.index is staged.ends.dtype is index
        assert staged.host_offsets.dtype == np.int64 and staged.ends[-1] == staged.host_offsets[-1] == last
    masked = mg.GroupedGemmProblem(torch.ones(2, 3, 4), weights, valid_rows=[0, 3])
    valid = stage(masked, masked.spec, torch.empty(0)).ops.valid_rows
    assert isinstance(valid, torch.Tensor) and valid.dtype is masked.spec.index is torch.int32


def test_views_of_mirrored_arrays_are_fresh() -> None:
    a = np.ones((10, 4))
    problem = mg.GroupedGemmProblem(a[::-1], np.ones((3, 4, 5)), offsets=CUT)
    a[...] = 2
    assert (mg.expected(problem) == 8).all()
    assert mg.verify(problem, mg.solve(problem)).ok


def test_one_vocabulary() -> None:
    """What `grouped_gemm` hands on, as its signature says it, is what a problem takes and documents."""
    taken = inspect.signature(mg.GroupedGemmProblem).parameters
    keywords = [name for name, p in taken.items() if p.kind is p.KEYWORD_ONLY] + list(FusedKeywords.__annotations__)
    assert sorted(Keywords.__annotations__) == sorted(keywords)
    told = str(mg.GroupedGemmProblem.__doc__)
    assert [name for name in keywords if name not in told] == []
    assert [word for word in (*ACTIVATIONS, *GATES, *GLU_LAYOUTS, *PRECISIONS) if f'"{word}"' not in told] == []
