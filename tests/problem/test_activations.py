"""gelu, gelu_tanh and silu keep their relative precision down to where they underflow, on every backend."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

import multigemm as mg
from multigemm.backends import registry
from multigemm.integrations.layer_ops import geglu
from multigemm.reference.numpy_reference import activate
from tests.support.activation_cases import TAILS, points, problem_of

mpmath: Any = pytest.importorskip("mpmath")

ROOT = Path(__file__).parents[2]
DTYPES = (torch.float32, torch.float64)
ROOT_HALF = 0.5**0.5


def exact(name: str, x: float) -> Any:
    """By a library of arbitrary precision."""
    with mpmath.workdps(60):
        y = mpmath.mpf(x)
        if name == "gelu":
            return y * mpmath.erfc(-y / mpmath.sqrt(2)) / 2
        inner = mpmath.sqrt(8 / mpmath.pi) * (y + mpmath.mpf("0.044715") * y**3) if name == "gelu_tanh" else y
        return y / (1 + mpmath.exp(-inner))


def tanh_exponent(x: Tensor) -> Any:
    return (8 / torch.pi) ** 0.5 * (x + 0.044715 * x * x * x)


CANCELLING: dict[str, list[Callable[[Tensor], Any]]] = {
    "gelu": [lambda x: 0.5 * x * (1 + torch.erf(x * ROOT_HALF)), functional.gelu],
    "gelu_tanh": [
        lambda x: 0.5 * x * (1 + torch.tanh(tanh_exponent(x) / 2)),
        lambda x: functional.gelu(x, approximate="tanh"),
    ],
}
PRECISE: dict[str, Callable[[Tensor], Any]] = {
    "gelu": lambda x: 0.5 * x * torch.special.erfc(-x * ROOT_HALF),
    "gelu_tanh": lambda x: x / (1 + torch.exp(-tanh_exponent(x))),
    "silu": lambda x: x / (1 + torch.exp(-x)),
}


@pytest.mark.parametrize("name", PRECISE)
@pytest.mark.parametrize("kind", [np.float64, np.longdouble])
def test_the_reference_is_better_than_what_it_judges(name: str, kind: Any) -> None:
    """In longdouble by an ulp or two of float64; in float64 by far more than float32 needs."""
    lowest = TAILS[torch.float32 if kind is np.float64 else torch.float64][name] * 0.94
    xs = np.random.default_rng(0).uniform(lowest, 10, 200)
    allowed = 2.0**-40 if kind is np.float64 or np.finfo(np.longdouble).nmant <= 52 else 2.0**-50
    for x, got in zip(xs, activate(xs.astype(kind), name), strict=True):
        high = float(got)
        found = mpmath.mpf(high) + mpmath.mpf(float(got - kind(high)))
        assert abs(found / exact(name, float(x)) - 1) < allowed, f"{name}({x})"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRECISE)
def test_precise_formulas_are_accepted(name: str, dtype: torch.dtype) -> None:
    x = points(name, dtype)
    verdict = mg.verify(problem_of(x, name), PRECISE[name](x).reshape(1, -1, 1))
    assert verdict, verdict.text


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CANCELLING)
def test_formulas_that_cancel_are_refused_wherever_they_lose_digits(name: str, dtype: torch.dtype) -> None:
    for formula in CANCELLING[name]:
        for low, high in ((-5, -4), (-7, -6), (-9, -8)):
            x = torch.linspace(low, high, 200, dtype=dtype)
            verdict = mg.verify(problem_of(x, name), formula(x).reshape(1, -1, 1))
            assert verdict.bad > 100, f"only {verdict.bad} of {verdict.total} are refused in {low} to {high}"


def test_a_tail_in_float16_is_right_to_the_last_bit() -> None:
    """0.5 x (1 + tanh u) gave -1.7285e-06 for -1.6876e-06, which lies one number of float16 nearer to 0."""
    x = torch.linspace(-6, -4, 500)
    problem = problem_of(x, "gelu_tanh")
    half = mg.GroupedGemmProblem(problem.a, problem.b, activation="gelu_tanh", out_dtype=torch.float16)
    nearest = np.array([float(exact("gelu_tanh", float(v))) for v in x]).astype(np.float16)
    assert np.array_equal(mg.solve(half, backend="cpu").numpy().ravel(), nearest)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", PRECISE)
def test_cpu(name: str, dtype: torch.dtype) -> None:
    problem = problem_of(points(name, dtype), name)
    verdict = mg.verify(problem, mg.solve(problem, backend="cpu"))
    assert verdict, verdict.text


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_geglu(device: str, dtype: torch.dtype) -> None:
    x = points("gelu", dtype)
    out = geglu(torch.stack([x, torch.ones_like(x)], 1).to(device))
    verdict = mg.verify(problem_of(x, "gelu"), out.cpu()[None])
    assert verdict, verdict.text


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [*DTYPES, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", PRECISE)
@pytest.mark.parametrize("backend", ["cublas", "triton", "cupy", "numba"])
def test_gpu(backend: str, name: str, dtype: torch.dtype) -> None:
    """Of 16 bits too, whose kernels have an epilogue of their own; few columns and many, which take other kernels."""
    if not registry.get(backend).availability().ok:
        pytest.skip(registry.get(backend).availability().reason)
    x = points(name, dtype)
    for n, k in ((1, 1), (64, 16), (256, 64)):
        problem = problem_of(x, name, "cuda", n, k)
        verdict = mg.verify(problem, mg.solve(problem, backend=backend))
        assert verdict, f"{n} columns, k = {k}: {verdict.text}"
