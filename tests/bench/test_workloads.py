"""Workloads: published shapes and floors, exact sums, and own shapes with clear refusals."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from multigemm.bench import operands, workloads
from multigemm.bench.suites import SUITES, suite
from multigemm.bench.workloads import Rates, Workload, geomean, parse_shape, with_dtype
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import FORMS

PUBLISHED_FLOORS = {
    "dsv3_up_8k/balanced/bf16": 687.9,
    "dsv3_down_8k/zipf/bf16": 363.5,
    "dsv3_up_32k/balanced/bf16": 2498.9,
    "mixtral_512/balanced/bf16": 319.5,
    "mixtral_512/empty/bf16": 241.2,
    "qwen3_32k/empty/bf16": 279.6,
    "gptoss_8k/balanced/bf16": 401.1,
    "gptoss_8k/empty/bf16": 353.0,
    "decode_g64/balanced/bf16": 717.2,
    "fine_g256/zipf/bf16": 106.3,
    "fine_g256/empty/bf16": 83.9,
    "wgrad_dsv3_32k/balanced/bf16/tn": 1249.4,
    "wgrad_mixtral_16k/empty/bf16/tn": 2498.9,
}


def test_floors_of_an_h100_are_the_published_ones() -> None:
    floors = {case.key: round(case.floor_us(), 1) for case in suite("moe,wgrad")}
    assert {key: floors[key] for key in PUBLISHED_FLOORS} == PUBLISHED_FLOORS
    assert len(suite("moe")) == 33


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_has_unique_keys_and_sound_numbers(name: str) -> None:
    cases = suite(name)
    assert len({case.key for case in cases}) == len(cases) > 0
    for case in cases:
        assert case.flops > 0
        assert case.bytes > 0
        assert case.resident_bytes > 0
        assert case.suite == name


@pytest.mark.parametrize("name", workloads.DISTRIBUTIONS)
@pytest.mark.parametrize(("groups", "total"), [(1, 7), (2, 0), (8, 513), (64, 63), (0, 0)])
def test_sizes_sum_and_repeat(name: str, groups: int, total: int) -> None:
    sizes = workloads.draw(name, groups, total, seed=3)
    assert sizes.shape == (groups,)
    assert sizes.min(initial=0) >= 0
    assert np.array_equal(sizes, workloads.draw(name, groups, total, seed=3))
    if name != "decode" and groups:
        assert sizes.sum() == total


def test_distributions_are_what_their_names_say() -> None:
    empty = workloads.draw("empty", 32, 8192)
    assert (empty == 0).sum() == 8
    assert empty[0] == empty[-1] == 0
    zipf = np.sort(workloads.draw("zipf", 32, 8192))[::-1]
    assert zipf[0] == pytest.approx(2 * zipf[1], rel=0.01)
    assert (workloads.draw("one-hot", 16, 99) > 0).sum() == 1
    assert workloads.draw("decode", 4096, 0).max() == 8
    with pytest.raises(InvalidSetting, match="known: balanced"):
        workloads.draw("pareto", 4, 4)


@pytest.mark.parametrize(
    ("text", "extents"),
    [
        ("2,8,16,32", [(8, 16, 32)] * 2),
        ("3x5x7+2x2x2", [(3, 5, 7), (2, 2, 2)]),
        ("G=4,T=40,N=8,K=16,dist=balanced", [(10, 8, 16)] * 4),
        ("G=4,T=40,N=8,M=16,dist=balanced,form=jagged_k", [(16, 8, 10)] * 4),
        ("G=2,M=6,N=8,K=4,form=batched", [(6, 8, 4)] * 2),
        ("sizes=40+0+7,N=8,K=16", [(40, 8, 16), (0, 8, 16), (7, 8, 16)]),
        ("form=jagged_k,sizes=4+7,M=2,N=8,dtype=fp32", [(2, 8, 4), (2, 8, 7)]),
    ],
)
def test_own_shapes(text: str, extents: list[tuple[int, int, int]]) -> None:
    assert parse_shape(text).extents == extents


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1,2,3",
        "a,b,c,d",
        "3x4",
        "G=2,Q=4",
        "G=4,T=8,N=8,K=8,dtype=fp3",
        "G=4,T=8,N=8,K=8,dist=odd",
        "1,2,3,-4",
        "0,2,3,4",
        "64x-2x3",
        "G=4,T=-8,N=8,K=8",
        "G=4,T=8,N=8,K=8,form=ragged",
        "G=4,T=8,N=8,K=8,form=per_group",
        "G=4,T=8,N=8,K=8,seed=-1",
    ],
)
def test_unreadable_shapes_are_refused_with_a_hint(text: str) -> None:
    with pytest.raises(InvalidSetting):
        parse_shape(text)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("G=4,M=16,N=8,K=8", "jagged_m needs T"), ("G=4,T=64,M=16,N=8,K=8", "jagged_m has no M"),
        ("G=4,T=64,N=8", "jagged_m needs K"), ("G=4,T=64,N=8,K=8,form=batched", "batched has no T"),
        ("G=4,N=8,K=8,form=batched", "batched needs M"), ("G=4,T=64,N=8,K=8,form=jagged_k", "jagged_k needs M"),
        ("G=4,T=100,M=16,N=8,K=8,form=masked,dist=balanced", "a group of 25 rows, where M is 16: .* cap=16"),
        ("5,1,2", "3 numbers, not 4"), ("G=-4,T=8,N=8,K=8", "-4 groups: at least 1"),
    ],
)  # fmt: skip
def test_an_extent_that_would_be_ignored_or_is_forgotten_is_said(text: str, match: str) -> None:
    with pytest.raises(InvalidSetting, match=match):
        parse_shape(text)


@pytest.mark.parametrize(
    "text",
    [
        "G=5,T=40,N=24,K=16,dist=empty", "G=5,T=40,N=24,K=16,dist=zipf,shared=1", "G=3,M=6,T=40,K=16,form=jagged_n",
        "G=5,M=24,T=40,N=16,form=jagged_k,dist=empty", "G=3,M=6,N=24,K=16,form=batched",
        "G=4,M=16,T=30,N=24,K=8,form=masked,dist=balanced", "4x24x16+7x8x3", "4x24x16+4x24x16",
    ],
)  # fmt: skip
@pytest.mark.parametrize("dtype", ["bf16", "int8"])
def test_floors_count_what_a_problem_counts_and_memory_what_tensors_take(text: str, dtype: str) -> None:
    case = parse_shape(text, dtype)
    tensors = operands.make(case, "cpu")
    posed = tensors.problem
    assert (case.flops, case.bytes) == (posed.flops, posed.bytes)
    every = [x for each in (tensors.a, tensors.b, tensors.out) for x in (each if isinstance(each, list) else [each])]
    assert case.resident_bytes == sum(x.numel() * x.element_size() for x in every)
    rates = Rates(2.0, 0.5)
    assert case.floor_us(rates) == pytest.approx(max(case.flops / 2e6, case.bytes / 5e5))


@pytest.mark.parametrize(("name", "low", "high"), [("uniform", 0.7, 1.3), ("empty", 0.3, 1.7)])
def test_sizes_lie_as_far_apart_as_their_description_says(name: str, low: float, high: float) -> None:
    for seed in range(4):
        sizes = workloads.draw(name, 256, 256 * 4000, seed)
        held = sizes[sizes > 0]
        assert 0.9 * high / low < held.max() / held.min() < 1.01 * high / low
        if name == "empty":
            assert len(held) == 192 and sizes[0] == sizes[-1] == 0


def test_a_geometric_mean_is_of_what_was_measured() -> None:
    assert geomean([1.0, 4.0]) == pytest.approx(2.0)
    assert geomean([4.0, 0.0, math.nan, math.inf, -1.0]) == pytest.approx(4.0)
    assert math.isnan(geomean([math.nan]))


def test_a_workload_in_words() -> None:
    wide = parse_shape("G=3,M=6,T=40,N=8,form=jagged_k")
    assert wide.describe() == "jagged_k G=3 T=40 M=6 N=8 K=0 balanced bf16"
    assert parse_shape("3,8,16,24").describe() == "jagged_m G=3 T=24 N=16 K=24 balanced bf16"
    assert parse_shape("4x4x4+4x4x4").describe().startswith("per_group 2 x 4x4x4 ")


def test_a_masked_workload_whose_sizes_are_capped_is_one() -> None:
    own = parse_shape("G=4,T=100,M=16,N=8,K=8,form=masked,cap=16,dist=balanced")
    assert own.extents == [(16, 8, 8)] * 4


def test_random_is_of_every_form_and_drawn_anew_by_a_seed() -> None:
    cases = [case for seed in range(1, 9) for case in suite(f"random:{seed}")]
    assert {case.form for case in cases} == set(FORMS)
    assert all(case.flops < 1.3e12 and case.bytes < 2**32 for case in cases)
    first, again, other = suite("random:7"), suite("random:7"), suite("random:8,random")
    assert first == again
    assert len({case.key for case in first + other}) == 60
    assert {case.suite for case in first + other} == {"random"}
    for text in ("random:", "random:x", "random:0"):
        with pytest.raises(InvalidSetting, match="random:SEED"):
            suite(text)


def test_unknown_suites_and_dtypes_name_the_known_ones() -> None:
    with pytest.raises(InvalidSetting, match="moe-more"):
        suite("moee")
    with pytest.raises(InvalidSetting, match="bf16"):
        with_dtype(suite("l2")[0], "fp8")


SMALL = [
    Workload("m", "t", groups=4, n=6, k=5, total=19, distribution="zipf"),
    Workload("shared", "t", groups=4, n=6, k=5, total=19, shared_b=True, dtype="fp32"),
    Workload("nt", "t", groups=3, n=6, k=5, total=9, trans_b=True, dtype="fp16"),
    Workload("n", "t", "jagged_n", 3, m=4, k=5, total=11, distribution="empty"),
    Workload("k", "t", "jagged_k", 3, m=4, n=6, total=11, trans_a=True, distribution="empty"),
    Workload("batch", "t", "batched", 3, m=4, n=6, k=5, dtype="fp64"),
    Workload("masked", "t", "masked", 3, m=8, n=6, k=5, total=9, cap=8),
    Workload("list", "t", "per_group", 3, products=((3, 4, 5), (0, 2, 2), (7, 1, 9)), dtype="int8"),
    Workload("one_b", "t", "per_group", 2, products=((3, 4, 5), (6, 4, 5)), shared_b=True, bias=True),
    Workload("equal", "t", "per_group", 3, products=((3, 4, 5),) * 3, trans_b=True, bias=True),
]


@pytest.mark.parametrize("case", SMALL, ids=lambda case: case.name)
def test_the_reference_accepts_the_truth_and_finds_one_wrong_element(case: Workload) -> None:
    tensors = operands.make(case, "cpu")
    truth = tensors.reference()
    assert "wrong answer" in truth.verdict(tensors.out)  # poisoned
    bias, products = tensors.problem.bias, tensors.products()
    biases = bias if isinstance(bias, list) else [torch.zeros(())] * len(products)
    for (a, b, out), bias, (m, n, k) in zip(products, biases, case.extents, strict=True):
        assert a.shape == (m, k)
        assert b.shape == (k, n)
        out.copy_((a.double() @ b.double() + bias).to(out.dtype))
    assert truth.verdict(tensors.out) == ""
    last = next(out for _, _, out in reversed(products) if out.numel())
    last[-1, -1] += 1 if case.dtype == "int8" else 1 + last.abs().max() * 0.1
    assert "1 elements off" in truth.verdict(tensors.out)


def test_equal_products_of_a_list_lie_evenly_in_one_tensor() -> None:
    tensors = operands.make(SMALL[-1], "cpu")
    for matrices, size in ((tensors.a, 15), (tensors.b, 20), (tensors.out, 12)):
        assert isinstance(matrices, list)
        assert len({t.untyped_storage().data_ptr() for t in matrices}) == 1
        assert [t.storage_offset() for t in matrices] == [0, size, 2 * size]


def test_tensors_repeat_and_are_never_zero() -> None:
    first, second = (operands.make(SMALL[0], "cpu") for _ in range(2))
    assert isinstance(first.a, torch.Tensor)
    assert isinstance(second.a, torch.Tensor)
    assert torch.equal(first.a, second.a)
    assert (first.a != 0).float().mean() > 0.9
