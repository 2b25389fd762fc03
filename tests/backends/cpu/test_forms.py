"""Every form, dtype and epilogue of the cpu backend against a float64 loop, for every config."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from multigemm.problem.spec import ACTIVATIONS, FORMS, INPUT_DTYPES
from tests.support.cpu_cases import Case, assert_right, build, groups_of, kernels, run

EPILOGUES: dict[str, dict[str, Any]] = {
    "plain": {},
    "alpha": {"alpha": -2.0},
    "zero": {"alpha": 0.0},
    "beta": {"beta": 1.0},
    "beta_any": {"alpha": 3.0, "beta": -2.0},
    "bias_row": {"bias": "row"},
    "bias_group": {"bias": "group"},
    "all": {"alpha": 2.0, "beta": 3.0, "bias": "group", "activation": "relu"},
    "zero_all": {"alpha": 0.0, "beta": 3.0, "bias": "row", "activation": "relu"},
}


def configs(case: Case) -> list[Any]:
    return kernels(build(case))


@pytest.mark.parametrize("epilogue", EPILOGUES)
@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_form_dtype_epilogue(form: str, dtype: torch.dtype, epilogue: str) -> None:
    case = Case(form, dtype, head=3, tail=2, **EPILOGUES[epilogue])
    for config in configs(case):
        assert_right(run(build(case), config))


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("dtype", [d for d in INPUT_DTYPES if d != torch.int8])
@pytest.mark.parametrize("form", FORMS)
def test_activations(form: str, dtype: torch.dtype, activation: str) -> None:
    case = Case(form, dtype, activation=activation, alpha=0.5, bias="group")
    for config in configs(case):
        assert_right(run(build(case), config))


@pytest.mark.parametrize("out_dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [d for d in INPUT_DTYPES if d != torch.int8])
@pytest.mark.parametrize("form", FORMS)
def test_out_dtypes(form: str, dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    plain = Case(form, dtype, out_dtype)
    mixed = Case(form, dtype, out_dtype, beta=0.5, c_dtype=dtype, bias="group", bias_dtype=torch.float32)
    for case in (plain, mixed):
        for config in configs(case):
            assert_right(run(build(case), config))


@pytest.mark.parametrize("transposed", ["a", "b", "o", "abo"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", FORMS)
def test_transposed(form: str, dtype: torch.dtype, transposed: str) -> None:
    case = Case(form, dtype, transposed=transposed, index=torch.int64)
    for config in configs(case):
        assert_right(run(build(case), config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int8])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n"])
def test_shared_matrix(form: str, dtype: torch.dtype) -> None:
    for epilogue in EPILOGUES.values():
        case = Case(form, dtype, shared=True, head=2, tail=3, **epilogue)
        for config in configs(case):
            assert_right(run(build(case), config))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sizes_that_take_different_paths(dtype: torch.dtype) -> None:
    many = tuple(int(x) for x in torch.randint(0, 40, (70,), generator=torch.Generator().manual_seed(3)))
    for sizes in (many, (300, 1, 2, 260, 0, 3), (16,) * 65, (128, 120, 125), (1,) * 130, (600, *(4,) * 64)):
        for shared in (False, True):
            case = Case("jagged_m", dtype, sizes=sizes, n=65, k=70, shared=shared)
            for config in (c for c in configs(case) if c.kernel != "loop"):
                assert_right(run(build(case), config))


@pytest.mark.parametrize("dtype", INPUT_DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_integers_are_exact(form: str, dtype: torch.dtype) -> None:
    """Sums below 2^24 leave one rounding as the only difference, so the answer is known bit for bit."""
    for seed in range(3):
        case = Case(form, dtype, integers=15, k=33, seed=seed, alpha=2.0)
        for config in configs(case):
            ops = run(build(case), config)
            for a, b, out, _, _ in groups_of(ops):
                exact = 2 * (a.long() @ b.long())
                assert torch.equal(out, exact.float().to(out.dtype) if dtype != torch.int8 else exact.int())


@pytest.mark.parametrize("k", [1023, 1024, 1025, 2500])
def test_int8_sums_are_exact_beyond_float32(k: int) -> None:
    ops = build(Case("batched", torch.int8, sizes=(2, 2), m=3, n=4, k=k))
    assert isinstance(ops.b, torch.Tensor)
    ops.a[0].fill_(-128)
    ops.b.fill_(-128)
    ops.b[0, k // 2] = 127
    for config in kernels(ops):
        assert_right(run(ops, config))


def test_int8_wraps() -> None:
    ops = build(Case("per_group", torch.int8, sizes=(2,), n=3, k=131073))
    ops.a[0].fill_(-128)
    ops.b[0].fill_(-128)
    run(ops)
    assert_right(ops)
    assert int(ops.out[0][0, 0]) == 131073 * 2**14 - 2**32
    big = build(Case("batched", torch.int8, alpha=2.0**31 + 3, beta=-(2.0**33) + 5))
    assert_right(run(big))
