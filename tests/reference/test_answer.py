"""The reference against definitions that share no code with it: rationals, and IEEE arithmetic term by term."""

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

from multigemm.problem.problem import GroupedGemmProblem
from multigemm.reference import dtypes, expected, verify
from multigemm.reference.numpy_reference import activate

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def values(shape: Any, dtype: Any, seed: Any) -> Any:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.int8:
        return torch.randint(-128, 128, shape, generator=generator).to(torch.int8)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def packed(form: Any, dtype: Any) -> Any:
    """A small problem of each form, with empty groups, a late start and an early end."""
    offsets = {"offsets": torch.tensor([1, 3, 3, 8])}
    if form == "jagged_m":
        return values((9, 4), dtype, 0), values((3, 4, 5), dtype, 1), offsets
    if form == "jagged_n":
        return values((3, 4, 5), dtype, 0), values((5, 9), dtype, 1), offsets | {"jagged": "n"}
    if form == "jagged_k":
        return values((4, 9), dtype, 0), values((9, 5), dtype, 1), offsets | {"jagged": "k"}
    if form == "masked":
        rows = {"valid_rows": torch.tensor([4, 0, 2])}
        return values((3, 4, 5), dtype, 0), values((3, 5, 2), dtype, 1), rows
    if form == "batched":
        return values((3, 4, 5), dtype, 0), values((3, 5, 2), dtype, 1), {}
    return [values((g, 3), dtype, 0) for g in (2, 0, 3)], [values((3, n), dtype, 0) for n in (1, 4, 2)], {}


def exact_sum(view: Any, problem: Any) -> Any:
    """alpha * a @ b + beta * c + bias in rational arithmetic."""
    rows = []
    for i in range(view.m):
        row = []
        for j in range(view.n):
            total = sum(Fraction(float(view.a[i, k])) * Fraction(float(view.b[k, j])) for k in range(view.k))
            total *= Fraction(float(problem.alpha))
            if view.c is not None:
                total += Fraction(float(problem.beta)) * Fraction(float(view.c[i, j]))
            if view.bias is not None:
                total += Fraction(float(view.bias[j]))
            row.append(total)
        rows.append(row)
    return rows


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("form", ["per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked"])
def test_forms_and_epilogue_against_rationals(form: Any, dtype: Any) -> None:
    a, b, grouping = packed(form, dtype)
    plain = GroupedGemmProblem(a, b, **grouping)
    c = [values(s, dtype, 7) for s in plain.out_shape] if form == "per_group" else values(plain.out_shape, dtype, 7)
    problem = GroupedGemmProblem(a, b, **grouping, c=c, alpha=0.75, beta=-1.5)
    got = expected(problem)
    seen = [np.zeros(x.shape, bool) for x in (got if form == "per_group" else [got])]
    for view in problem.groups():
        block = got[view.where] if form != "per_group" else got[view.index]
        (seen[view.index] if form == "per_group" else seen[0])[... if form == "per_group" else view.where] = True
        for i, row in enumerate(exact_sum(view, problem)):
            for j, total in enumerate(row):
                half = Fraction(float(dtypes.ulp(np.array([float(total)]), dtype)[0])) / 2
                assert abs(Fraction(float(block[i, j])) - total) <= half
    for mask, array in zip(seen, got if form == "per_group" else [got], strict=True):
        assert (array[~mask] == 0).all()


@pytest.mark.parametrize("beta", [0, 1, -3, 2**31 - 1])
@pytest.mark.parametrize("alpha", [0, 1, -2, 70_000])
def test_int8_wraps_like_a_machine(alpha: int, beta: int) -> None:
    a, b = values((4, 3, 6), torch.int8, alpha % 7), values((4, 6, 2), torch.int8, beta % 5)
    c = torch.randint(-(2**31), 2**31, (4, 3, 2), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    bias = torch.tensor([2**31 - 1, -5], dtype=torch.int32)
    got = expected(GroupedGemmProblem(a, b, c=c, alpha=alpha, beta=beta, bias=bias))
    for g, i, j in np.ndindex(4, 3, 2):
        total = alpha * sum(int(a[g, i, k]) * int(b[g, k, j]) for k in range(6))
        total += beta * int(c[g, i, j]) + int(bias[j])
        assert int(got[g, i, j]) == (total + 2**31) % 2**32 - 2**31


def test_nan_and_infinities_spread_as_ieee_says() -> None:
    """Whether few or many of the elements are special."""
    draw = np.random.default_rng(0)
    special = np.array([0.0, -0.0, math.inf, -math.inf, math.nan, 1.0, -2.0])
    found = special[draw.integers(draw.choice([0, 2, 3], (300, 1, 1, 1)), 7, (300, 2, 3, 3))]
    few = draw.random(found.shape) < draw.choice([0.2, 1.0], (300, 1, 1, 1))
    a, b = np.where(few, found, draw.choice([1.0, -2.0], found.shape)).transpose(1, 0, 2, 3)
    with np.errstate(invalid="ignore"):
        wanted = (a[..., None] * b[:, None]).sum(axis=2)
    got = expected(GroupedGemmProblem(a.astype(np.float32), b.astype(np.float32)))
    np.testing.assert_array_equal(got, wanted.astype(np.float32))
    assert np.isnan(wanted).any() and np.isinf(wanted).any() and np.isfinite(wanted).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_are_torchs(name: Any, dtype: Any) -> None:
    """From -1 up to the bound; below, torch's gelus lose digits, so only as far as float64 has them."""
    ends = torch.tensor([0.0, 1e30, -1e30, torch.inf, -torch.inf, torch.nan])
    x = torch.cat([torch.linspace(-1 if "gelu" in name else -12, 12, 601), ends]).to(dtype)
    torchs: Any = {
        "relu": functional.relu,
        "gelu": functional.gelu,
        "gelu_tanh": lambda t: functional.gelu(t, approximate="tanh"),
        "silu": functional.silu,
    }[name]
    # torch's vectorised float32 erf form makes NaN of plus infinity on a CPU; its float64 form does not.
    result = torch.where(x == torch.inf, torchs(x.double()).to(dtype), torchs(x)).reshape(1, -1, 1)
    a, b = torch.zeros(1, x.numel(), 0, dtype=dtype), torch.zeros(1, 0, 1, dtype=dtype)
    problem = GroupedGemmProblem(a, b, c=x.reshape(1, -1, 1), beta=1.0, activation=name)
    verdict = verify(problem, result)
    assert verdict, verdict.text
    x = torch.linspace(-12, 12, 601, dtype=torch.float64)
    got = activate(x.numpy(), name)
    np.testing.assert_allclose(got, torchs(x).numpy(), rtol=1e-12, atol=1e-14)


def test_float64_is_better_than_float64() -> None:
    a = np.array([[1e16, 1.0, -1e16, 2.0**-30]])
    b = np.ones((4, 1))
    assert expected(GroupedGemmProblem(a, b))[0, 0] == 1.0 + 2.0**-30 or np.finfo(np.longdouble).nmant <= 52


def test_unowned_rows_keep_the_users_content() -> None:
    out = torch.full((9, 5), 7.0)
    a, b, grouping = packed("jagged_m", torch.float32)
    got = expected(GroupedGemmProblem(a, b, **grouping, out=out))
    assert (got[[0, 8]] == 7).all() and not (got[1:8] == 7).any()
    assert (out == 7).all(), "the reference must not write the user's memory"


def test_beta_zero_never_looks_at_c_and_alpha_zero_never_at_a() -> None:
    nan = torch.full((1, 2, 2), torch.nan)
    assert (expected(GroupedGemmProblem(torch.ones(1, 2, 2), torch.ones(1, 2, 2), c=nan, beta=0)) == 2).all()
    assert (expected(GroupedGemmProblem(nan, nan, alpha=0.0)) == 0).all()


def test_no_groups_no_rows_no_columns() -> None:
    assert expected(GroupedGemmProblem([], [])) == []
    assert expected(GroupedGemmProblem(torch.zeros(0, 2, 3), torch.zeros(0, 3, 4))).shape == (0, 2, 4)
    assert expected(GroupedGemmProblem(torch.zeros(2, 0), torch.zeros(0, 3))).tolist() == [[0] * 3] * 2


def test_two_matrices_give_a_matrix() -> None:
    x = torch.randn(3, 4)
    problem = GroupedGemmProblem(x, x.t())
    assert expected(problem).shape == (3, 3)
    assert verify(problem, x @ x.t())
