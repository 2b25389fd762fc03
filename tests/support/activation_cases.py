"""Activations from their far negative tail to infinity, as problems."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg

TAILS = {
    torch.float32: {"gelu": -14.5, "gelu_tanh": -10.5, "silu": -95.0},
    torch.float64: {"gelu": -39.0, "gelu_tanh": -22.5, "silu": -745.0},
}
"""Where each activation underflows."""
SPECIAL = (0.0, -0.0, 1e-30, -1e-30, 1e30, -1e30, 3e38, -3e38, torch.inf, -torch.inf, torch.nan)


def points(activation: str, dtype: torch.dtype) -> Tensor:
    """Arguments from where the activation underflows to 10, and the special ones."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    x = torch.cat([torch.linspace(TAILS[wide][activation], 0, 400), torch.linspace(0, 10, 100)])
    return torch.cat([x, torch.tensor(SPECIAL)]).to(dtype)


def problem_of(
    x: Tensor, activation: str | None, device: str = "cpu", n: int = 1, k: int = 1, **more: Any
) -> mg.GroupedGemmProblem:
    """One group whose every column is act(x)."""
    a, b = torch.zeros(1, len(x), k, dtype=x.dtype), torch.zeros(1, k, n, dtype=x.dtype)
    a[0, :, 0], b[0, 0] = x, 1
    out_dtype = torch.promote_types(x.dtype, torch.float32)
    return mg.GroupedGemmProblem(a.to(device), b.to(device), activation=activation, out_dtype=out_dtype, **more)


def thinned(x: Tensor) -> Tensor:
    """Every tenth argument, and the special ones: together one tile of 64 rows, since an interpreter takes long."""
    ordinary = len(x) - len(SPECIAL)
    return torch.cat([x[:ordinary:10], x[ordinary:]])


EACH = pytest.mark.parametrize(
    ("activation", "dtype"), [(name, dtype) for dtype, tails in TAILS.items() for name in tails], ids=str
)


def check_emulated(backend: str, activation: str, dtype: torch.dtype) -> None:
    """A backend whose kernels run as Python is right for a tenth of the arguments."""
    problem = problem_of(thinned(points(activation, dtype)), activation)
    verdict = mg.verify(problem, mg.solve(problem, backend=backend))
    assert verdict, verdict.text
