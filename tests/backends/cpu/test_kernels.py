"""The kernels of the cpu backend: which one is tried first, what each refuses, and how groups share calls."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cpu import BACKEND, config, loop
from multigemm.backends.cpu.config import Config, invalid_reasons
from multigemm.backends.cpu.groups import Sizes, empty_products
from multigemm.backends.cpu.stacks import segments
from multigemm.errors import InvalidSetting
from multigemm.planning.staging import staged_spec
from multigemm.problem.spec import ProblemSpec
from multigemm.testing import Case, DeviceCase, Layout
from tests.support.cpu_cases import CPU, case_of, configs, examine, staged


def spec_of(case: Case) -> ProblemSpec:
    return staged_spec(DeviceCase.from_case(case, CPU).problem)


def test_neighbours_without_k_are_cleared_together() -> None:
    """One by one, a thousand empty experts would take longer than the products of all others."""
    ops = staged(DeviceCase.from_case(case_of("jagged_k", lengths=(0, 0, 3, 0, 4, 0, 0, 0), m=2, n=3), CPU))
    sizes = Sizes(ops)
    sizes.changed()
    assert [x.shape[0] for x in empty_products(ops, sizes.start, sizes.end)] == [2, 1, 3]


def test_products_write_nothing_beside_their_columns() -> None:
    for dtype in ("float32", "bfloat16"):
        examine(case_of("jagged_m", dtype, (5, 17, 30), n=21, k=8, given=True, out=Layout(pad=43)))


@pytest.mark.parametrize("dtype", ["float32", "int8", "float16"])
def test_where_torch_lowers_float32_products_the_loop_computes(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a GPU program does with torch.set_float32_matmul_precision: it may lower torch's products on a CPU too."""
    device_case = DeviceCase.from_case(case_of("jagged_m", dtype, (70, 30), n=64, k=96), CPU)
    ops = staged(device_case)
    bound = BACKEND.plan(ops.spec, Config("blas"), CPU).bind(ops)
    bound()
    products, multiply = [], loop.product

    def noted(a: Tensor, b: Tensor, acc: torch.dtype) -> Tensor:
        products.append(multiply(a, b, acc))
        return products[-1]

    monkeypatch.setattr(loop, "product", noted)
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("medium")
        bound()
    finally:
        torch.set_float32_matmul_precision(before)
    assert len(products) == 2
    assert mg.verify(device_case.problem, device_case.out)


def test_a_processor_without_bfloat16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "has_fast_bf16", lambda: False)
    case = case_of("jagged_m", "bfloat16")
    assert [c.kernel for c in configs(DeviceCase.from_case(case, CPU))] == ["blas", "loop"]
    examine(case)


@pytest.mark.parametrize(
    ("matrix_unit", "sizes", "first"),
    [(False, (64,) * 8, "blas"), (False, (2,) * 8, "bmm"), (True, (64,) * 8, "bmm")],
)
def test_bfloat16_is_widened_where_that_is_faster(
    matrix_unit: bool, sizes: tuple[int, ...], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(config, "has_fast_bf16", lambda: True)
    monkeypatch.setattr(config, "has_matrix_unit", lambda: matrix_unit)
    assert BACKEND.configs(spec_of(case_of("jagged_m", "bfloat16", sizes)), CPU)[0].kernel == first


@pytest.mark.parametrize(
    ("chosen", "case", "words"),
    [
        (Config("bmm"), case_of("batched"), "bfloat16"),
        (Config("bmm"), case_of("batched", "bfloat16", bias="n", bias_dtype="bfloat16"), "epilogue"),
        (Config("bmm"), case_of("jagged_k", "bfloat16"), "rows of A"),
        (Config("warp"), case_of("batched"), "unknown"),  # type: ignore[arg-type]
    ],
)
def test_configs_that_cannot_be(chosen: Config, case: Case, words: str) -> None:
    reasons = invalid_reasons(chosen, spec_of(case))
    assert any(words in reason for reason in reasons)
    with pytest.raises(InvalidSetting, match=words):
        BACKEND.plan(spec_of(case), chosen, CPU)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_segments_cover_each_row_once(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, rng.integers(2, 300), rng.integers(1, 80))
        owned = np.zeros(len(sizes), np.int64)
        for s in segments(sizes, 64, 64, dtype):
            owned[s.first : s.last] += 1
            part = sizes[s.first : s.last]
            assert s.height == part.max()
            assert s.even == bool((part == s.height).all())
        assert ((owned == 1) | ((owned == 0) & (sizes == 0))).all()
    assert segments(np.zeros(3, np.int64), 4, 4, dtype) == []


def test_equal_groups_are_one_call_and_a_lone_large_one_is_its_own() -> None:
    assert [s[:2] for s in segments(np.full(64, 16), 128, 128, torch.float32)] == [(0, 64)]
    sizes = np.array([4] * 20 + [600] + [4] * 20)
    assert (20, 21) in [s[:2] for s in segments(sizes, 128, 128, torch.bfloat16)]


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_operands_keep_memory_that_can_be_resized(dtype: torch.dtype, batch_invariant: bool) -> None:
    """FSDP2 frees the memory of parameters between steps by giving it the size 0."""
    a, b = torch.randn(5, 6).to(dtype), torch.randn(3, 6, 4).to(dtype)
    for ends in (torch.tensor([1, 2, 5]), torch.tensor([0, 4, 4])):
        mg.grouped_gemm(a, b, ends=ends, backend="cpu", batch_invariant=batch_invariant)
    assert a.untyped_storage().resizable() and b.untyped_storage().resizable()
