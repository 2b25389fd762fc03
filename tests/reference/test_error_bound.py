"""The bound is tested like the kernels: it accepts every model of a right one and accuses the wrong ones.

The models are written here in plain NumPy: orders of summation, fused multiply-add, and tensor cores
that align a block of products to the largest exponent and truncate (see the bound's docstring).
"""

from typing import Any

import numpy as np
import pytest
import torch

from multigemm.problem.problem import GroupedGemmProblem
from multigemm.reference import answer, dtypes, expected, judge, verify
from multigemm.reference.error_bound import MINIMUM, TF32_INPUT, sum_coefficient
from multigemm.reference.numpy_reference import activate
from tests.support.numpy_tensors import to_torch

F32 = np.float32
M, N = 12, 10


def sequential(a: Any, b: Any) -> Any:
    acc = np.zeros((len(a), b.shape[1]), F32)
    for k in range(a.shape[1]):
        acc = (acc + a[:, k, None] * b[None, k]).astype(F32)
    return acc


def backwards(a: Any, b: Any) -> Any:
    return sequential(a[:, ::-1], b[::-1])


def pairwise(a: Any, b: Any) -> Any:
    terms = (a[:, :, None] * b[None]).astype(F32)
    while terms.shape[1] > 1:
        if terms.shape[1] % 2:
            terms = np.concatenate([terms, np.zeros_like(terms[:, :1])], axis=1)
        terms = terms[:, ::2] + terms[:, 1::2]
    return terms.sum(axis=1, dtype=F32)


def fused(a: Any, b: Any) -> Any:
    """Multiply-add with one rounding: float64 holds the product and the sum of 24-bit numbers well enough."""
    acc = np.zeros((len(a), b.shape[1]))
    for k in range(a.shape[1]):
        acc = (acc + a[:, k, None].astype(np.float64) * b[None, k]).astype(F32).astype(np.float64)
    return acc.astype(F32)


def split_k(a: Any, b: Any) -> Any:
    parts = np.array_split(np.arange(a.shape[1]), 4)
    return np.sum([sequential(a[:, p], b[p]) for p in parts], axis=0, dtype=F32)


def cut(values: Any, quantum: Any) -> Any:
    return np.trunc(values / quantum) * quantum


def tensor_core(block: Any, extra: Any) -> Any:
    """Aligns block + 1 addends to the largest exponent, truncates at 2^-(23+extra), then the sum to float32."""

    def run(a: Any, b: Any) -> Any:
        acc = np.zeros((len(a), b.shape[1]))
        for k in range(0, a.shape[1], block):
            terms = a[:, k : k + block, None].astype(np.float64) * b[None, k : k + block]
            addends = np.concatenate([acc[:, None], terms], axis=1)
            top = np.abs(addends).max(axis=1, keepdims=True)
            quantum = np.ldexp(1.0, np.frexp(np.where(top == 0, 1, top))[1] - 1 - 23 - extra)
            total = cut(addends, quantum).sum(axis=1)
            last = np.ldexp(1.0, np.frexp(np.where(total == 0, 1, total))[1] - 1 - 23)
            acc = cut(total, last)
        return acc.astype(F32)

    return run


RIGHT = {
    "sequential": sequential,
    "backwards": backwards,
    "pairwise": pairwise,
    "fused": fused,
    "split k": split_k,
}
RIGHT_TENSOR_CORES = {f"core {b}+{n}": tensor_core(b, n) for b, n in ((4, 0), (8, 1), (16, 2), (2, 0))}


def data(kind: Any, k: Any, dtype: Any) -> Any:
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((M, k)), rng.standard_normal((k, N))
    if kind == "uniform":
        a, b = rng.random((M, k)), rng.random((k, N))
    elif kind == "cancelling":
        half = k // 2
        a[:, half : 2 * half], b[half : 2 * half] = -a[:, :half], b[:half]
    elif kind == "powers":
        a = np.ldexp(1.0, rng.integers(-12, 13, (M, k))) * rng.choice([-1, 1], (M, k))
    elif kind == "swamped":
        a[:, 0] = 3000.0
    return (dtypes.round_once(x, dtype) for x in (a, b))


def ask(a: Any, b: Any, dtype: Any, out_dtype: Any = None, **more: Any) -> Any:
    p = GroupedGemmProblem(to_torch(a)[None], to_torch(b)[None], out_dtype=out_dtype or dtype, **more)
    return p, answer(p)


def rounded(acc: Any, dtype: Any) -> Any:
    return dtypes.round_once(np.asarray(acc, np.float64)[None], dtype)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["normal", "uniform", "cancelling", "powers", "swamped"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("k", [1, 16, 100, 1024])
def test_right_kernels_are_never_accused(kind: Any, dtype: Any, k: Any) -> None:
    a, b = data(kind, k, dtype)
    models = RIGHT if dtype == torch.float32 else RIGHT | RIGHT_TENSOR_CORES
    for out_dtype in {dtype, torch.float32}:
        _, right = ask(a, b, dtype, out_dtype)
        for name, model in models.items():
            verdict = judge(right, rounded(model(a.astype(F32), b.astype(F32)), out_dtype))
            assert verdict, f"{name}: {verdict.text}"


@pytest.mark.parametrize("act", ["relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_right_epilogues_are_never_accused(act: Any, dtype: Any) -> None:
    rng = np.random.default_rng(5)
    a, b = data("normal", 40, dtype)
    c, bias = (dtypes.round_once(rng.standard_normal(s) * 3, dtype) for s in ((1, M, N), (N,)))
    more = {"alpha": 0.3, "beta": -1.7, "c": to_torch(c), "bias": to_torch(bias), "activation": act}
    _, right = ask(a, b, dtype, None, **more)
    for model in RIGHT.values():
        acc = F32(0.3) * model(a.astype(F32), b.astype(F32)) + F32(-1.7) * c[0].astype(F32) + bias.astype(F32)
        verdict = judge(right, dtypes.round_once(np.asarray(activate(acc, act))[None].astype(np.float64), dtype))
        assert verdict, verdict.text


def test_float64_kernels_are_never_accused() -> None:
    rng = np.random.default_rng(1)
    for k in (1, 7, 300):
        a, b = rng.standard_normal((M, k)) * 10.0 ** rng.integers(-8, 8, (M, 1)), rng.standard_normal((k, N))
        _, right = ask(a, b, torch.float64)
        assert judge(right, (a @ b)[None])
        assert judge(right, np.sum([a[:, i, None] * b[None, i] for i in range(k)], axis=0)[None])
        assert not judge(right, (a.astype(F32) @ b.astype(F32)).astype(np.float64)[None])


def low_precision(dtype: Any) -> Any:
    def run(a: Any, b: Any) -> Any:
        acc = np.zeros((len(a), b.shape[1]))
        for k in range(a.shape[1]):
            acc = dtypes.round_once(acc + a[:, k, None].astype(np.float64) * b[None, k], dtype).astype(np.float64)
        return acc

    return run


def lost_k(a: Any, b: Any) -> Any:
    return sequential(a[:, :-1], b[:-1])


def rounded_halves(dtype: Any) -> Any:
    def run(a: Any, b: Any) -> Any:
        half = a.shape[1] // 2
        parts = [sequential(a[:, s], b[s]) for s in (slice(0, half), slice(half, None))]
        return sum(dtypes.round_once(p.astype(np.float64), dtype).astype(np.float64) for p in parts)

    return run


def as_tf32(a: Any, b: Any) -> Any:
    keep = [(x.view(np.uint32) & np.uint32(0xFFFFE000)).view(F32) for x in (a, np.ascontiguousarray(b))]
    return sequential(*keep)


@pytest.mark.parametrize(
    ("wrong", "dtype", "out_dtype"),
    [
        (low_precision(torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (low_precision(torch.float16), torch.float16, torch.float16),
        (low_precision(torch.float16), torch.float16, torch.float32),
        (lost_k, torch.bfloat16, torch.bfloat16),
        (lost_k, torch.float32, torch.float32),
        (rounded_halves(torch.bfloat16), torch.bfloat16, torch.bfloat16),
        (as_tf32, torch.float32, torch.float32),
    ],
)
def test_wrong_arithmetic_is_seen(wrong: Any, dtype: Any, out_dtype: Any) -> None:
    a, b = data("normal", 64, dtype)
    _, right = ask(a, b, dtype, out_dtype)
    assert not judge(right, rounded(wrong(a.astype(F32), b.astype(F32)), out_dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_toward_zero_and_twice_are_seen(dtype: Any) -> None:
    a, b = data("normal", 64, dtype)
    problem, right = ask(a, b, dtype)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    near = dtypes.round_once(exact, dtype).astype(np.float64)
    step = dtypes.ulp(near, dtype) * np.sign(near)
    toward_zero = np.where(np.abs(near) > np.abs(exact), near - step, near)
    assert not judge(right, rounded(toward_zero, dtype))
    assert judge(right, rounded(exact, dtype)) and problem.out_dtype == dtype


def test_whole_numbers_are_judged_bit_for_bit() -> None:
    rng = np.random.default_rng(3)
    a, b = rng.integers(-15, 16, (M, 64)).astype(F32), rng.integers(-15, 16, (64, N)).astype(F32)
    p = GroupedGemmProblem(torch.from_numpy(a)[None].bfloat16(), torch.from_numpy(b)[None].bfloat16())
    right = answer(p)
    exact = a.astype(np.float64) @ b
    assert (right.blocks[0].low == right.blocks[0].high).all()
    assert judge(right, rounded(exact, torch.bfloat16))
    away = rounded(exact * (1 + 2.0**-20), torch.bfloat16)  # halves away from zero
    assert (away != rounded(exact, torch.bfloat16)).any(), "the data holds no tie"
    assert not judge(right, away)


def verdict_of(a: list[float], b: list[float], result: float, **more: Any) -> Any:
    """Of one element, the product of a row and a column."""
    problem = GroupedGemmProblem(
        torch.tensor([[a]], dtype=torch.float32), torch.tensor(b, dtype=torch.float32).reshape(1, -1, 1), **more
    )
    return verify(problem, torch.full((1, 1, 1), result))


def test_whole_numbers_are_judged_bit_for_bit_as_far_as_float32_holds_them_and_no_further() -> None:
    assert verdict_of([2.0**22, 1], [2, 1], 2.0**23 + 1)
    assert not verdict_of([2.0**22, 1], [2, 1], 2.0**23 + 2), "off by one"
    assert verdict_of([2.0**12, 1, 1], [2.0**12, 1, 1], 2.0**24), "ones that are added to 2^24 one by one are lost"


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_an_activation_may_be_off_by_a_few_ulp_and_by_no_more(activation: str) -> None:
    problem = GroupedGemmProblem(torch.ones(1, 1, 1), torch.ones(1, 1, 1), activation=activation)
    right = float(expected(problem)[0, 0, 0])
    for ulps, ok in ((0, True), (4, True), (-4, True), (20, False), (-20, False)):
        assert bool(verdict_of([1.0], [1.0], right + ulps * 2.0**-24, activation=activation)) is ok


def test_tf32_is_allowed_its_inputs_only_where_asked() -> None:
    a, b = data("normal", 64, torch.float32)
    got = rounded(as_tf32(a, b), torch.float32)
    assert not judge(ask(a, b, torch.float32)[1], got)
    assert judge(ask(a, b, torch.float32, precision="tf32")[1], got)
    assert not judge(ask(a, b, torch.float32, precision="tf32")[1], rounded(lost_k(a, b), torch.float32))


def test_overflow_that_the_order_decides_is_not_judged() -> None:
    a, b = np.array([[3e38, 3e38, -3e38]], F32), np.ones((3, 1), F32)
    _, right = ask(a, b, torch.float32)
    assert right.blocks[0].free.all() and judge(right, np.array([[[np.inf]]], F32))
    _, sure = ask(a[:, :1], b[:1], torch.float32)
    assert not sure.blocks[0].free.any()


def test_the_coefficients_are_the_derived_ones() -> None:
    u = 2.0**-24
    assert sum_coefficient(torch.float32, False, 100) == pytest.approx(100 * u / (1 - 100 * u))
    assert sum_coefficient(torch.bfloat16, False, 100) == pytest.approx(400 * u / (1 - 400 * u))
    assert sum_coefficient(torch.float32, True, 0) == TF32_INPUT == 2.0**-9 + 2.0**-20
    assert sum_coefficient(torch.float64, False, 3) == pytest.approx(3 * 2.0**-53)
    worst = max(2 * ((b + 1) * 2.0**-n + 1) / b for b in range(2, 65) for n in range(4))
    assert worst == 4.0


@pytest.mark.parametrize("name", sorted(MINIMUM))
def test_the_valleys_are_where_the_activations_are_smallest(name: Any) -> None:
    x = np.linspace(-3, 0, 300_001)
    assert abs(x[activate(x, name).argmin()] - MINIMUM[name]) < 2e-5
    fall, rise = (
        activate(np.linspace(-30, MINIMUM[name], 999), name),
        activate(np.linspace(MINIMUM[name], 30, 999), name),
    )
    assert (np.diff(fall) <= 0).all() and (np.diff(rise) >= 0).all()


@pytest.mark.parametrize("name", sorted(MINIMUM))
def test_an_interval_over_the_valley_holds_its_floor(name: Any) -> None:
    a = np.full((1, 4), MINIMUM[name] / 4, F32)
    _, right = ask(a, np.ones((4, 1), F32), torch.float32, activation=name)
    assert judge(right, activate(np.full((1, 1, 1), MINIMUM[name]), name).astype(F32))
