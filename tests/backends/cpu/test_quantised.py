"""Quantised operands on the cpu backend: the corners of scales and formats. `test_every_config` has generated ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cpu.config import Config
from multigemm.reference.verify import answer, judge
from tests.support.quantised_rows import GRAINS, a_nan_in_a_scale_stays_in_its_block, rows_alone_have_the_same_bits

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
OFFSETS = [3, 3, 100, 131, 290]


def test_weights_with_zero_points_of_either_sign() -> None:
    b = torch.randint(-128, 128, (2, 64, 9), dtype=torch.int8)
    zero = torch.randint(-128, 128, (2, 2, 9), dtype=torch.int8)
    for points in (zero, zero.view(torch.uint8)):
        scale = torch.rand(2, 2, 9)
        problem = mg.GroupedGemmProblem(torch.randn(7, 64).half(), b, sizes=[3, 4], scale_b=scale, zero_b=points)
        assert mg.verify(problem, mg.solve(problem, "cpu"))


def one(a: list[float], b: list[float], dtype: torch.dtype = E4M3, **options: Any) -> float:
    """a . b for one row and one column."""
    left, right = torch.tensor([a]).to(dtype), torch.tensor(b)[:, None].to(dtype)
    problem = mg.GroupedGemmProblem(left, right, out_dtype=torch.float32, **options)
    result = mg.solve(problem, "cpu")
    assert mg.verify(problem, result)
    return float(result)


def e8m0(code: int) -> Tensor:
    return torch.tensor(code, dtype=torch.uint8).view(E8M0)


def test_scales_at_their_ends() -> None:
    assert one([2, 3], [4, 5], scale_a=e8m0(127), scale_b=e8m0(128)) == 46
    assert one([1, 0], [1, 0], scale_a=e8m0(0), scale_b=torch.tensor(2.0**20)) == 2.0**-107
    assert one([1], [1], scale_a=e8m0(254), scale_b=e8m0(0)) == 1
    assert one([448], [448], scale_a=torch.tensor(2.0**125), scale_b=torch.tensor(2.0**-120)) == 448 * 448 * 32
    assert one([2, 3], [4, 5], scale_a=torch.tensor(-1.0)) == -23
    assert one([2, 3], [4, 5], scale_b=torch.tensor(0.0)) == 0
    assert torch.isnan(torch.tensor(one([0, 0], [1, 1], scale_a=e8m0(255))))
    assert torch.isnan(torch.tensor(one([torch.inf], [1], E5M2, scale_a=torch.tensor(0.0))))
    assert one([torch.inf], [1], E5M2) == torch.inf
    assert one([2.0**-9, 448], [448, 2.0**-9]) == 1.75
    assert one([2.0**-16], [57344], E5M2) == 57344 / 65536


def test_a_nan_in_a_scale_reaches_its_block_and_nothing_else() -> None:
    a_nan_in_a_scale_stays_in_its_block("cpu")


def test_what_no_group_owns_and_what_no_block_covers_is_never_used() -> None:
    a, b = torch.ones(5, 300).to(E4M3), torch.ones(300, 6).to(E4M3)
    a.view(torch.uint8)[:, :3] = 0x7F  # NaN before the first group and behind the last
    b.view(torch.uint8)[290:] = 0x7F
    used = [0 // 128 + 0, *(3 // 128 + 1 + j for j in range(1)), 100 // 128 + 2, 131 // 128 + 3, 131 // 128 + 4]
    scale = torch.full((5, 300 // 128 + 4), torch.nan)
    scale[:, used] = 1.0
    y = mg.grouped_gemm(a, b, offsets=OFFSETS, jagged="k", scale_a=scale, out_dtype=torch.float32, backend="cpu")
    assert y[:, 0, 0].tolist() == [0, 97, 31, 159]
    masked, rows = torch.ones(2, 4, 32).to(E4M3), torch.ones(2, 4, 1)
    rows[0, 2:], rows[1] = torch.nan, torch.nan
    y = mg.grouped_gemm(masked, torch.ones(2, 32, 3).to(E4M3), valid_rows=[2, 0], scale_a=rows, backend="cpu")
    assert y.sum() == 2 * 3 * 32


def test_blocks_at_the_start_of_a_group() -> None:
    """A wrong index of a block cannot hide: whole numbers and powers of two are judged to the last bit."""
    g = torch.Generator().manual_seed(1)
    a = torch.randint(-7, 8, (9, 700), generator=g).float().to(E4M3)
    b = torch.randint(-1, 2, (700, 11), generator=g).float().to(E4M3)
    sizes = torch.tensor([130, 1, 0, 255, 64, 200])
    scale = torch.exp2(torch.randint(-3, 4, (9, 700 // 32 + 6), generator=g).float())
    problem = mg.GroupedGemmProblem(a, b, sizes=sizes, jagged="k", scale_a=scale, out_dtype=torch.float32)
    right = answer(problem)
    assert (right.blocks[0].low == right.blocks[0].high).all()
    result = mg.solve(problem, "cpu")
    assert judge(right, result)
    start = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)[:-1]])
    for group, (first, count) in enumerate(zip(start.tolist(), sizes.tolist(), strict=True)):
        k = torch.arange(count)
        of_k = scale[:, first // 32 + group + k // 32]
        wanted = (a[:, first : first + count].float() * of_k) @ b[first : first + count].float()
        assert torch.equal(result[group], wanted)


def test_device_sizes_that_lie_stay_inside_scales() -> None:
    sizes = torch.tensor([40, 60])
    a, b = torch.ones(3, 100).to(E4M3), torch.ones(100, 4).to(E4M3)
    problem = mg.GroupedGemmProblem(a, b, sizes=sizes, jagged="k", scale_a=torch.ones(3, 100 // 32 + 2))
    plan = mg.plan(problem, "cpu")
    for lie in ([90, 90], [0, 0], [100, 0], [0, 100]):
        sizes.copy_(torch.tensor(lie))
        assert mg.verify(problem, plan())


def test_c_in_out_and_strides() -> None:
    """Inputs and scales may interleave in memory, results have strides, c may be out."""
    rows = torch.zeros(10, 64 + 8, dtype=torch.uint8)
    rows[:, :64] = torch.randint(0, 0x70, (10, 64), dtype=torch.uint8)
    scale = rows[:, 64:].view(torch.float32)
    scale.copy_(torch.rand(10, 2))
    b = torch.randint(0, 0x70, (2, 64, 5), dtype=torch.uint8).view(E5M2).transpose(1, 2).contiguous().transpose(1, 2)
    out = torch.randn(20, 10)[::2, ::2]
    problem = mg.GroupedGemmProblem(rows[:, :64].view(E4M3), b, sizes=[4, 5], scale_a=scale, out=out, c=out, beta=-1.5)
    right = answer(problem)
    assert judge(right, mg.solve(problem, "cpu"))


def test_groups_without_work() -> None:
    empty = torch.zeros(4, 0).to(E4M3), torch.zeros(2, 0, 3).to(E4M3)
    bias = torch.ones(2, 3)
    y = mg.grouped_gemm(
        *empty, sizes=[1, 3], scale_a=torch.ones(4, 1), scale_b=torch.ones(2, 0, 3), bias=bias, backend="cpu"
    )
    assert (y == 1).all()
    nan = torch.full((4, 32), torch.nan).to(E4M3), torch.ones(2, 32, 3).to(E4M3)
    assert (mg.grouped_gemm(*nan, sizes=[1, 3], scale_a=torch.tensor(torch.nan), alpha=0.0, backend="cpu") == 0).all()


def test_only_the_loop_takes_them() -> None:
    a, b = torch.ones(4, 8).to(E4M3), torch.ones(8, 3).to(E4M3)
    problem = mg.GroupedGemmProblem(a, b)
    assert mg.plan(problem, "cpu").config == Config("loop")
    with pytest.raises(mg.InvalidSetting, match="blas takes operands that mean what they say"):
        mg.plan(problem, "cpu", Config("blas"))


@pytest.mark.parametrize("grain", GRAINS)
def test_rows_have_the_same_bits_alone_and_in_another_form(grain: Any) -> None:
    rows_alone_have_the_same_bits("cpu", grain)
