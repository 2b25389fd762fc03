"""What a problem is: forms, extents, specs, array libraries, and what it says about itself."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.problem.spec import FORMS


def make(form: str, dtype: torch.dtype = torch.float32, **extra: Any) -> mg.GroupedGemmProblem:
    """A small problem of each form, three groups with an empty one among them."""

    def x(*shape: int) -> torch.Tensor:
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


@pytest.mark.parametrize("form", FORMS)
def test_repr_can_be_pasted_back(form: str) -> None:
    problem = make(form, bias=None, activation="relu")
    again = eval(f"mg.{problem!r}", {"mg": mg, "torch": torch})
    assert again.spec == problem.spec
    assert repr(again) == repr(problem)


def test_two_matrices_are_one_group() -> None:
    a, b = torch.randn(3, 4), torch.randn(4, 5)
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


def test_host_lists_are_copied_and_live_tensors_are_followed() -> None:
    a, b = torch.ones(6, 1), torch.tensor([[[1.0]], [[2.0]]])
    cut, live = [0, 2, 6], torch.tensor([0, 2, 6])
    frozen, following = (
        mg.plan(mg.GroupedGemmProblem(a, b, offsets=cut)),
        mg.plan(mg.GroupedGemmProblem(a, b, offsets=live)),
    )
    cut[1], live[1] = 5, 5
    assert frozen().flatten().tolist() == [1, 1, 2, 2, 2, 2]
    assert following().flatten().tolist() == [1, 1, 1, 1, 1, 2]


def test_live_sizes_and_strided_offsets_are_followed() -> None:
    a, b = torch.ones(6, 1), torch.tensor([[[1.0]], [[2.0]]])
    sizes, spaced = torch.tensor([2, 4]), torch.tensor([0, 99, 2, 99, 6, 99])
    by_size = mg.plan(mg.GroupedGemmProblem(a, b, sizes=sizes))
    by_offset = mg.plan(mg.GroupedGemmProblem(a, b, offsets=spaced[::2]))
    assert by_size().flatten().tolist() == by_offset().flatten().tolist() == [1, 1, 2, 2, 2, 2]
    sizes.copy_(torch.tensor([5, 1]))
    spaced[2] = 5
    assert by_size().flatten().tolist() == by_offset().flatten().tolist() == [1, 1, 1, 1, 1, 2]


def test_plan_sees_operands_changed_in_place_and_keeps_its_output() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    plan = mg.plan(mg.GroupedGemmProblem(a, b))
    first = plan()
    assert first.eq(3).all()
    a.mul_(2)
    assert plan() is first
    assert first.eq(6).all()


def test_plan_runs_another_problem_of_its_spec_only() -> None:
    problem = mg.GroupedGemmProblem(torch.ones(2, 3), torch.ones(3, 2))
    plan = mg.plan(problem)
    other = mg.GroupedGemmProblem(torch.full((2, 3), 2.0), torch.ones(3, 2))
    assert plan.run(other).eq(6).all()
    with pytest.raises(mg.InvalidProblem, match="m is 5 instead of 2"):
        plan.run(mg.GroupedGemmProblem(torch.ones(5, 3), torch.ones(3, 2)))


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
