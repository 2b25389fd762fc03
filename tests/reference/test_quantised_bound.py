"""The bound of quantised operands accepts models of right kernels, and accuses what they must not do.

The model of Hopper's float8 tensor core is that of Microsoft's MMA-Sim: 32 products and the sum so far are aligned to
the largest exponent, each is cut at 2^-13 of it, and the sum is cut to 13 bits behind the point.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.reference import answer, judge
from multigemm.reference.dtypes import decode
from multigemm.reference.error_bound import tensor_core_coefficient

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Array = Any


def exponent(x: Array, least: float) -> Array:
    return np.frexp(np.maximum(np.abs(x), least))[1] - 1


def wgmma(c: Array, x: Array, y: Array, least: float) -> Array:
    """c + x @ y for 32 of K."""
    terms = x[:, :, None] * y[None]
    place = exponent(x, least)[:, :, None] + exponent(y, least)[None]
    place = np.where(terms == 0, -200, place)
    top = np.maximum(place.max(axis=1, initial=-200), np.where(c == 0, -200, exponent(c, 1e-300)))
    quantum = np.ldexp(1.0, top - 13)
    total = (np.trunc(terms / quantum[:, None]).sum(axis=1) + np.trunc(c / quantum)) * quantum
    return np.where(
        total == 0,
        0,
        np.trunc(total / np.ldexp(1.0, exponent(total, 1e-300) - 13)) * np.ldexp(1.0, exponent(total, 1e-300) - 13),
    )


def tensor_core(a: Array, b: Array, promote: int | None, sa: Array, sb: Array, least: float = 2.0**-6) -> Array:
    """Sums in 14 bits over `promote` of K, or all; their sums, times the block's scales, in float32."""
    m, k, n = len(a), a.shape[1], b.shape[1]
    total, acc = np.zeros((m, n), np.float32), np.zeros((m, n))
    for first in range(0, k, 32):
        acc = wgmma(acc, a[:, first : first + 32], b[first : first + 32], least)
        if (promote and (first + 32) % promote == 0) or first + 32 >= k:
            scale = (sa[:, first // 128, None] * sb[first // 128][None]).astype(np.float32)
            total, acc = (total + acc.astype(np.float32) * scale).astype(np.float32), np.zeros((m, n))
    return total


def problem(
    k: int, values: str, dtype: torch.dtype = E4M3, scaled: bool = True, **options: Any
) -> mg.GroupedGemmProblem:
    g = torch.Generator().manual_seed(k)

    def new(*shape: int) -> torch.Tensor:
        if values == "positive":
            return torch.rand(*shape, generator=g) + 0.5
        if values == "whole":
            return torch.randint(-7, 8, shape, generator=g).float()
        if values == "subnormal":
            return torch.randint(-7, 8, shape, generator=g).float() * 2.0**-9
        return torch.randn(*shape, generator=g)

    def scale(*shape: int) -> torch.Tensor:
        if values == "whole":
            return torch.exp2(torch.randint(-3, 4, shape, generator=g).float())
        return torch.rand(*shape, generator=g) + 0.5

    blocks = -(-k // 128)
    if scaled:
        options |= {"scale_a": scale(6, blocks), "scale_b": scale(blocks, 5)}
    return mg.GroupedGemmProblem(new(6, k).to(dtype), new(k, 5).to(dtype), out_dtype=torch.float32, **options)


def parts(p: mg.GroupedGemmProblem) -> tuple[Array, Array, Array, Array]:
    (view,) = p.groups()
    blocks = -(-view.k // 128)
    given = [x.numpy() if isinstance(x, torch.Tensor) else None for x in (p.scale_a, p.scale_b)]
    scales = [np.ones(s) if x is None else x for x, s in zip(given, ((6, blocks), (blocks, 5)), strict=True)]
    return decode(view.a), decode(view.b), scales[0], scales[1]


@pytest.mark.parametrize("values", ["normal", "positive", "whole", "subnormal"])
@pytest.mark.parametrize("k", [1, 31, 128, 200, 1000, 4096])
def test_promoted_sums_are_accepted(k: int, values: str) -> None:
    for scaled in (True, False):
        for dtype, least in ((E4M3, 2.0**-6), (E5M2, 2.0**-14)):
            p = problem(k, values, dtype, scaled)
            a, b, sa, sb = parts(p)
            verdict = judge(answer(p), tensor_core(a, b, 128, sa, sb, least))
            assert verdict.ok, verdict.text


def test_lost_promotion_is_accused_where_it_shows() -> None:
    for k in (4096, 8192):
        p = problem(k, "positive", scaled=False)
        a, b, sa, sb = parts(p)
        unpromoted = tensor_core(a, b, None, sa, sb)
        exact = a @ b
        assert np.abs(unpromoted / exact - 1).max() > 0.04
        assert not judge(answer(p), unpromoted)
        fast = problem(k, "positive", scaled=False, accumulate="fast")
        assert judge(answer(fast), unpromoted)


def test_coefficients() -> None:
    assert tensor_core_coefficient(128, False) == tensor_core_coefficient(10**6, False) < 0.0167
    assert tensor_core_coefficient(32, True) == 34 * 2.0**-13
    assert tensor_core_coefficient(4096, True) == 128 * 34 * 2.0**-13


def test_whole_numbers_with_powers_of_two_are_judged_to_the_last_bit() -> None:
    p = problem(1000, "whole")
    right = answer(p)
    assert (right.blocks[0].low == right.blocks[0].high).all()
    a, b, sa, sb = parts(p)
    got = tensor_core(a, b, 128, sa, sb)
    assert judge(right, got)
    got[3, 2] = np.nextafter(got[3, 2], np.float32(np.inf))
    assert not judge(right, got)
    assert not judge(right, tensor_core(a, b, 128, np.roll(sa, 1, axis=1), sb))
    large = problem(4096, "normal")
    found = answer(large).blocks[0]
    assert (found.low < found.high).all()


def weights(a: torch.dtype, scale: torch.Tensor, w: torch.Tensor) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(torch.ones(1, 1).to(a), w[None], scale_b=scale, out_dtype=torch.float32)


def test_a_weight_may_be_rounded_once_to_bfloat16_and_no_more() -> None:
    g = torch.Generator().manual_seed(0)
    w = torch.randint(-127, 128, (4000,), generator=g, dtype=torch.int8)
    scale = torch.rand(1, 4000, generator=g) + 0.5
    right = answer(weights(torch.bfloat16, scale, w))
    once = (w * scale).bfloat16().float()
    assert judge(right, once.numpy())
    assert not judge(right, (w * scale.bfloat16()).bfloat16().float().numpy())
    exact = answer(weights(torch.bfloat16, torch.exp2(torch.randint(-9, 9, (1, 4000)).float()), w)).blocks[0]
    assert (exact.low == exact.high).all()
    half = answer(weights(torch.float16, scale, w))
    assert not judge(half, (w * scale).half().float().numpy())
    assert judge(half, (w * scale).numpy())
    of_half = answer(weights(torch.float16, scale.half(), w))
    assert judge(of_half, (w * scale.half().float()).half().float().numpy())


@pytest.mark.parametrize(
    ("held", "zero", "digits"), [("int4", 255, 9), ("uint4", 255, 8), ("int8", 127, 8), ("int8", 255, 9)]
)
def test_a_weight_less_its_zero_point_is_rounded_where_it_has_nine_digits(held: str, zero: int, digits: int) -> None:
    """The least weight: where its difference fits bfloat16, a scale of 1 in e8m0 leaves nothing to round."""
    least, byte = {"int4": (-8, 0x88), "uint4": (0, 0), "int8": (-128, 0x80)}[held]
    codes = torch.full((32 if held == "int8" else 16, 1), byte, dtype=torch.uint8)
    p = mg.GroupedGemmProblem(
        torch.ones(1, 32).bfloat16(), codes.view(torch.int8) if held == "int8" else codes,
        b_format=None if held == "int8" else held, scale_b=torch.ones(1, 1).to(torch.float8_e8m0fnu),
        zero_b=torch.full((1, 1), zero, dtype=torch.uint8 if zero > 127 else torch.int8), out_dtype=torch.float32,
    )  # fmt: skip
    rounded = float(torch.tensor(float(least - zero)).bfloat16())
    assert (rounded == least - zero) is (digits == 8)
    assert judge(answer(p), np.full((1, 1), 32 * rounded, np.float32))
    assert bool(judge(answer(p), np.full((1, 1), 32 * (least - zero) + 0.5, np.float32))) is (digits == 9)


def test_what_is_not_judged() -> None:
    w = torch.tensor([1, 100, 3], dtype=torch.int8)
    free = answer(weights(torch.float16, torch.tensor([[1.0, 1000.0, 1.0]]), w)).blocks[0].free
    assert free.tolist() == [[[False, True, False]]]
    a, b = torch.ones(2, 32).to(E4M3), torch.ones(32, 3).to(E4M3)
    infinite = torch.tensor([[1.0], [torch.inf]])
    p = mg.GroupedGemmProblem(a, b, scale_a=infinite)
    assert answer(p).blocks[0].free.tolist() == [[[False] * 3, [True] * 3]]
    p = mg.GroupedGemmProblem(
        a, b, scale_a=torch.tensor([[1.0], [2.0**120]]), scale_b=torch.tensor([[1.0, 2.0**6, 2.0**7]])
    )
    assert answer(p).blocks[0].free.tolist() == [[[False] * 3, [False, True, True]]]


def test_code_0_of_e8m0_is_no_zero() -> None:
    scale = torch.zeros(1, 1, dtype=torch.uint8).view(torch.float8_e8m0fnu)
    p = mg.GroupedGemmProblem(
        torch.ones(1, 32).to(E4M3), torch.ones(32, 1).to(E4M3), scale_a=scale, scale_b=torch.tensor(2.0**30),
        out_dtype=torch.float32,
    )  # fmt: skip
    assert judge(answer(p), np.full((1, 1), 2.0**-92, np.float32))
    assert not judge(answer(p), np.zeros((1, 1), np.float32))
