"""Gradients through rows picked by index, gates, weights of rows and sums of rows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.problem.spec import GATES, GLU_LAYOUTS

SIZES = torch.tensor([3, 0, 4])
ROWS = torch.tensor([2, -1, 4, 5, 2, 0, 3, 1])
INDEX = torch.tensor([[0, 6, -1], [3, 3, 7], [5, 10**12, 1], [-1, -1, 8]])
PLACES = torch.tensor([0, 0, 2, -5, 9, 2, 1, 1])


def new(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape) + 100 * seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()


def check(call: Any, *inputs: Tensor, twice: bool = True) -> None:
    assert torch.autograd.gradcheck(call, inputs, fast_mode=True)
    assert not twice or torch.autograd.gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("layout", GLU_LAYOUTS)
@pytest.mark.parametrize("gate", GATES)
def test_gates(gate: str, layout: str) -> None:
    numbers: dict[str, Any] = {"glu_alpha": 1.702} if gate == "swiglu" else {}

    def call(a: Tensor, b: Tensor, bias: Tensor) -> Any:
        return mg.grouped_gemm(
            a, b, sizes=SIZES, bias=bias, activation=gate, glu_layout=layout, glu_beta=1.0, glu_limit=1.5, **numbers
        )

    check(call, new(8, 3), new(3, 3, 4), new(3, 4), twice=layout == "halves")


def test_forms() -> None:
    check(lambda a, b: mg.grouped_gemm(a, b, activation="swiglu"), new(2, 3, 4), new(2, 4, 6))
    check(lambda a, b: mg.grouped_gemm(a, b, activation="geglu"), new(3, 4), new(4, 6))
    check(lambda a, b: tuple(mg.grouped_gemm([a, a], [b, 2 * b], activation="swiglu")), new(3, 4), new(4, 6))
    valid = torch.tensor([2, 0])

    def masked(a: Tensor, b: Tensor, scale: Tensor) -> Any:
        return mg.grouped_gemm(a, b, valid_rows=valid, activation="glu", row_scale=scale)

    check(masked, new(2, 3, 4), new(2, 4, 6), new(2, 3))


def test_rows_of_the_operands() -> None:
    check(lambda a, b: mg.grouped_gemm(a, b, sizes=SIZES, a_rows=ROWS, activation="silu"), new(6, 3), new(3, 3, 4))
    cut: dict[str, Any] = {"sizes": SIZES, "jagged": "k"}
    check(lambda a, b: mg.grouped_gemm(a, b, a_rows=ROWS, b_rows=ROWS.flip(0), **cut), new(3, 6), new(5, 4))
    check(lambda a, b: mg.grouped_gemm(a, b, sizes=SIZES, jagged="n", b_rows=ROWS), new(3, 2, 4), new(4, 6))
    a, b = new(6, 3), new(3, 3, 4)
    mg.grouped_gemm(a, b, sizes=SIZES, a_rows=ROWS.clamp(max=0)).sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None and b.grad is not None
    assert (a.grad[1:] == 0).all() and (b.grad[1] == 0).all(), "rows that no index names, and empty groups"


def test_sums_of_rows() -> None:
    def combined(a: Tensor, b: Tensor, scale: Tensor, weights: Tensor, c: Tensor) -> Any:
        return mg.grouped_gemm(a, b, sizes=SIZES, row_scale=scale, combine=(INDEX, weights), c=c, beta=0.5)

    check(combined, new(8, 3), new(3, 3, 4), new(8), new(4, 3, seed=1), new(4, 4, seed=2))

    def scattered(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return mg.grouped_gemm(a, b, sizes=SIZES, out_rows=PLACES, rows=3, c=c, activation="swiglu")

    check(scattered, new(8, 3), new(3, 3, 4), new(3, 2))


def test_what_contributes_nothing_has_a_gradient_of_zero_whatever_flows_in() -> None:
    a, b, weights = new(8, 3), new(3, 3, 4), new(4, 3)
    with torch.no_grad():
        a[7], weights[3], weights[0, 2] = torch.nan, torch.nan, torch.nan  # unowned, and of no row
    out = mg.grouped_gemm(a, b, sizes=SIZES, combine=(INDEX, weights))
    out.backward(torch.full_like(out, 2.0))  # type: ignore[no-untyped-call]
    assert a.grad is not None and b.grad is not None and weights.grad is not None
    assert (a.grad[7] == 0).all() and a.grad.isfinite().all() and b.grad.isfinite().all()
    assert (weights.grad[3] == 0).all() and weights.grad[0, 2] == 0 and weights.grad[1, 2] == 0


def test_a_graph_of_the_gradient_does_not_change_it_where_inputs_are_related() -> None:
    """One matrix in a list twice, one tensor under two names, and one that is made of another."""
    x, w, scale = new(7, 3), new(3, 6), new(7)
    places = torch.arange(7)[:, None]
    calls: list[Callable[[], Tensor]] = [
        lambda: torch.cat(mg.grouped_gemm([x[:3], x[3:]], [w, w], activation="swiglu")),
        lambda: mg.grouped_gemm(x, w[None, :, :3], sizes=[7], c=x, row_scale=x.sum(1)),
        lambda: mg.grouped_gemm(x, w[None], sizes=[7], row_scale=scale, combine=(places, scale[:, None])),
    ]
    for call in calls:
        out = call()
        inputs = [leaf for leaf in (x, w, scale) if leaf is not scale or call is calls[2]]
        plain, graphed = (
            torch.autograd.grad(out.sin().sum(), inputs, create_graph=wanted, retain_graph=True)
            for wanted in (False, True)
        )
        for want, got in zip(plain, graphed, strict=True):
            assert torch.allclose(got, want, rtol=1e-12, atol=1e-12)


def test_the_gradient_passes_at_the_limit() -> None:
    b = torch.eye(2)[None].requires_grad_()
    a = torch.tensor([[7.0, -7.0], [8.0, 8.0]]).requires_grad_()
    mg.grouped_gemm(a, b, sizes=[2], activation="reglu", glu_limit=7.0).sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None and a.grad.tolist() == [[-7.0, 7.0], [0.0, 0.0]]


def test_bfloat16_against_steps() -> None:
    x, w = torch.randn(20, 16).bfloat16(), torch.randn(3, 16, 8).bfloat16()
    rows, sizes = torch.randint(0, 20, (30,)), torch.tensor([10, 5, 15])
    results = []
    for step_by_step in (False, True):
        a, b = x.clone().requires_grad_(), w.clone().requires_grad_()
        if step_by_step:
            pre = mg.grouped_gemm(a[rows], b, sizes=sizes, out_dtype=torch.float32)
            out = (torch.nn.functional.silu(pre[:, :4]) * pre[:, 4:]).bfloat16()
        else:
            out = mg.grouped_gemm(a, b, sizes=sizes, a_rows=rows, activation="swiglu")
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert a.grad is not None and b.grad is not None and a.grad.dtype is torch.bfloat16
        results.append((out, a.grad, b.grad))
    for got, want in zip(*results, strict=True):
        assert torch.allclose(got.float(), want.float(), atol=0.1, rtol=0.02)


def test_refusals() -> None:
    a, b = new(8, 3), new(3, 3, 4)
    with pytest.raises(mg.InvalidProblem, match="preact_out is memory of the caller's"):
        mg.grouped_gemm(a, b, sizes=SIZES, activation="relu", preact_out=torch.empty(8, 4, dtype=torch.float64))
    with pytest.raises(mg.InvalidProblem, match="a plan has no gradient"):
        mg.plan(a.detach(), b.detach(), sizes=SIZES, row_scale=new(8))
    rows = ROWS.clone()
    out = mg.grouped_gemm(a, b, sizes=SIZES, a_rows=rows)
    rows += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()  # type: ignore[no-untyped-call]
