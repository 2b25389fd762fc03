"""What is meant where a keyword is left out, in every entrance."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.integrations.torch_op import grouped_gemm as operator

A, B = torch.arange(24.0).view(6, 4), torch.arange(24.0).view(2, 4, 3)
SIZES = torch.tensor([4, 2])
C = torch.full((6, 3), 1000.0)
Way = Callable[..., Any]


def _planned(*args: Any, **keywords: Any) -> Any:
    return mg.plan(mg.GroupedGemmProblem(*args, **keywords), backend="cpu")()


def _compiled(*args: Any, **keywords: Any) -> Any:
    return torch.compile(mg.grouped_gemm, backend="eager", fullgraph=True)(*args, **keywords)


WAYS: dict[str, Way] = {
    "grouped_gemm": mg.grouped_gemm,
    "solve": lambda *args, **keywords: mg.solve(mg.GroupedGemmProblem(*args, **keywords)),
    "plan": _planned,
    "operator": operator,
    "torch.ops": torch.ops.multigemm.grouped_gemm,
    "compiled": _compiled,
}


@pytest.mark.parametrize("way", WAYS)
def test_c_without_beta_is_added(way: str) -> None:
    product = mg.grouped_gemm(A, B, sizes=SIZES)
    assert torch.equal(WAYS[way](A, B, sizes=SIZES, c=C), product + C)
    assert torch.equal(WAYS[way](A, B, sizes=SIZES, c=C * torch.nan, beta=0.0), product), "an explicit 0 reads no c"
    assert torch.equal(WAYS[way](A, B, sizes=SIZES), product)


def test_a_warm_call_knows_c_from_none() -> None:
    """Both leave beta out; the second call of each comes out of the launch cache."""
    product = mg.grouped_gemm(A, B, sizes=SIZES)
    for _ in range(2):
        assert torch.equal(mg.grouped_gemm(A, B, sizes=SIZES, c=C), product + C)
        assert torch.equal(mg.grouped_gemm(A, B, sizes=SIZES), product)
        assert torch.equal(operator(A, B, sizes=SIZES, c=C), product + C)
        assert torch.equal(operator(A, B, sizes=SIZES), product)


@pytest.mark.parametrize("way", ["grouped_gemm", "operator"])
@pytest.mark.parametrize("activation", [None, "silu"])
def test_c_without_beta_gets_its_gradient(way: str, activation: str | None) -> None:
    c, again = (C.clone().requires_grad_() for _ in range(2))
    WAYS[way](A, B, sizes=SIZES, c=c, activation=activation).sum().backward()
    WAYS[way](A, B, sizes=SIZES, c=again, beta=1.0, activation=activation).sum().backward()
    assert c.grad is not None and again.grad is not None
    assert torch.equal(c.grad, again.grad) and c.grad.any()


@pytest.mark.parametrize("cut", [{"sizes": [4, 5]}, {"offsets": [0, 4, 9]}, {"ends": [4, 9]}])
def test_sizes_that_fit_k_alone_propose_jagged_k(cut: dict[str, Any]) -> None:
    """x.T [K, T] @ dy [T, N] is a product of rows, too, but the rows are not the tokens."""
    x, dy = torch.ones(9, 4), torch.ones(9, 3)
    with pytest.raises(mg.InvalidProblem, match="for weight gradients pass jagged='k', whose extent is 9"):
        mg.grouped_gemm(x.T, dy, **cut)
    with pytest.raises(mg.InvalidProblem, match=r"for weight gradients pass a\.T and jagged='k'"):
        mg.grouped_gemm(x, dy, **cut)
    assert mg.grouped_gemm(x.T, dy, jagged="k", **cut).shape == (2, 4, 3)


def test_sizes_that_fit_n_alone_propose_jagged_n() -> None:
    with pytest.raises(mg.InvalidProblem, match="to cut the columns of b pass jagged='n', whose extent is 9"):
        mg.grouped_gemm(torch.ones(4, 3), torch.ones(3, 9), sizes=[4, 5])


def test_sizes_that_fit_nowhere_are_to_shrink() -> None:
    with pytest.raises(mg.InvalidProblem, match="sizes add up to 10, the jagged extent is 6: shrink them or pass more"):
        mg.grouped_gemm(A, B, sizes=[8, 2])
    with pytest.raises(mg.InvalidProblem, match="the jagged extent is 4: shrink them or pass more"):
        mg.grouped_gemm(np.ones((4, 3)), np.ones((3, 4)), sizes=[4, 5])


@pytest.mark.parametrize("check", ["host", "full"])
def test_rows_that_no_group_owns_are_legal(check: str) -> None:
    assert (mg.grouped_gemm(A, B, sizes=[3, 1], check=check)[4:] == 0).all()
