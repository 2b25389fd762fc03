"""Gradients: right in every form, exact zeros where nothing flows, no NaN that was not in the inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.autograd import grad, gradcheck, gradgradcheck

import multigemm as mg
from multigemm.integrations import grouped_gemm as operator
from tests.support.torch_op_cases import FORMS, bias_shapes, operands, result_shape

ACTIVATIONS = (None, "relu", "gelu", "gelu_tanh", "silu")
WAYS: dict[str, Any] = {"operator": operator, "solve": mg.grouped_gemm}


def leaves(form: str, bias_shape: tuple[int, ...], dtype: torch.dtype = torch.float64) -> tuple[list[Tensor], Any]:
    """(a, b, c, bias that require grad, the cut)."""
    a, b, cut = operands(form, dtype)
    make = torch.Generator().manual_seed(1)
    extra = [torch.randn(shape, generator=make, dtype=dtype) for shape in (result_shape(form), bias_shape)]
    return [x.requires_grad_() for x in (a, b, *extra)], cut


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("form", FORMS)
def test_gradcheck_in_every_form(form: str, way: str) -> None:
    for i, shape in enumerate(bias_shapes(form)):
        inputs, cut = leaves(form, shape)

        def call(a: Tensor, b: Tensor, c: Tensor, bias: Tensor, cut: Any = cut, act: Any = (None, "silu")[i]) -> Any:
            return WAYS[way](a, b, c=c, bias=bias, alpha=0.7, beta=-1.5, activation=act, **cut)

        assert gradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gradcheck_and_second_derivatives_through_activations(activation: str | None) -> None:
    inputs, cut = leaves("jagged_m", (3, 2))
    for way in WAYS.values():

        def call(a: Tensor, b: Tensor, c: Tensor, bias: Tensor, way: Any = way) -> Any:
            return way(a, b, c=c, bias=bias, beta=0.5, activation=activation, **cut)

        assert gradcheck(call, inputs, fast_mode=True)
        assert gradgradcheck(call, inputs, fast_mode=True)


@pytest.mark.parametrize("way", WAYS)
def test_c_and_bias_of_the_dtype_of_the_result(way: str) -> None:
    """A pre-activation is formed anew in float32, which takes no float16 beside bfloat16 operands."""
    a, b = torch.ones(5, 4, dtype=torch.bfloat16, requires_grad=True), torch.ones(3, 4, 2, dtype=torch.bfloat16)
    c, bias = torch.ones(5, 2, dtype=torch.float16), torch.ones(2, dtype=torch.float16)
    sizes = torch.tensor([2, 0, 3])
    y = WAYS[way](a, b, sizes=sizes, c=c, bias=bias, beta=1.0, activation="silu", out_dtype=torch.float16)
    pre = torch.full((), 6.0, dtype=torch.float64, requires_grad=True)
    slope = grad(torch.nn.functional.silu(pre), pre)[0]
    torch.testing.assert_close(grad(y.sum(), a)[0].double(), (2 * slope).expand(5, 4), rtol=0.01, atol=0.0)


@pytest.mark.parametrize("kind", ["sizes", "ends"])
@pytest.mark.parametrize("where", [torch.tensor, list])
def test_each_way_to_cut_has_gradients(kind: str, where: Any) -> None:
    inputs, _ = leaves("jagged_m_shared", (2,))
    values = {"sizes": [2, 0, 3], "ends": [2, 2, 5]}[kind]

    def call(a: Tensor, b: Tensor, c: Tensor, bias: Tensor) -> Any:
        return mg.grouped_gemm(a, b, c=c, beta=1.0, bias=bias, **{kind: where(values)})

    assert gradcheck(call, inputs, fast_mode=True)


def test_lists_have_gradients() -> None:
    shapes = [(2, 3, 4), (0, 3, 2), (5, 1, 3)]
    make = torch.Generator().manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=make, dtype=torch.float64).requires_grad_()

    a, b = [new(m, k) for m, _, k in shapes], [new(k, n) for _, n, k in shapes]
    c, bias = [new(m, n) for m, n, _ in shapes], [new(n) for _, n, _ in shapes]
    for activation in ACTIVATIONS:

        def call(*flat: Tensor, activation: Any = activation) -> Any:
            a, b, c, bias = (list(flat[i : i + 3]) for i in (0, 3, 6, 9))
            return tuple(mg.grouped_gemm(a, b, c=c, bias=bias, alpha=0.5, beta=2.0, activation=activation))

        assert gradcheck(call, (*a, *b, *c, *bias), fast_mode=True)
    shared = new(4, 3)
    total = sum(y.sum() for y in mg.grouped_gemm([new(2, 4), new(3, 4)], [shared, shared]))
    assert isinstance(total, Tensor)
    assert grad(total, shared)[0].shape == (4, 3)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("activation", [None, "relu", "silu"])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_m_shared", "jagged_n", "jagged_n_shared", "jagged_k", "masked"])
def test_unowned_elements_are_constants(form: str, activation: str | None, way: str) -> None:
    """NaN in everything that no group owns, the incoming gradient included, reaches no gradient."""
    inputs, cut = leaves(form, bias_shapes(form)[-1])
    clean = _gradients(WAYS[way], inputs, cut, activation, torch.ones(result_shape(form), dtype=torch.float64))
    owned, poisoned, incoming = _poison(form, inputs, cut)
    dirty = _gradients(WAYS[way], poisoned, cut, activation, incoming)
    for x, y, live in zip(clean, dirty, owned, strict=True):
        assert torch.isfinite(y).all()
        assert torch.equal(torch.where(live, x, 0), y)  # the same, and exact zeros where nothing is owned


def _gradients(way: Any, inputs: list[Tensor], cut: Any, activation: Any, incoming: Tensor) -> tuple[Tensor, ...]:
    a, b, c, bias = inputs
    out = way(a, b, c=c, bias=bias, beta=0.5, activation=activation, **cut)
    return grad(out, inputs, incoming)


def _poison(form: str, inputs: list[Tensor], cut: Any) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """(which elements of a, b, c and bias matter, the inputs with NaN elsewhere, the incoming gradient alike)."""
    if form == "masked":
        rows = (torch.arange(4) < cut["valid_rows"].unsqueeze(1)).unsqueeze(2)
    else:
        index = torch.arange(7)
        rows = (index >= cut["offsets"][0]) & (index < cut["offsets"][-1])
    everything = torch.tensor(True)
    column = rows.unsqueeze(1) if form != "masked" else rows
    live = {
        "jagged_m": (column, everything, column, everything),
        "jagged_n": (everything, rows, rows, rows),
        "jagged_k": (rows, column, everything, everything),
        "masked": (rows, everything, rows, everything),
    }[form.removesuffix("_shared")]
    poisoned = [torch.where(w, x.detach(), torch.nan).requires_grad_() for x, w in zip(inputs, live, strict=True)]
    incoming = torch.where(live[2], torch.ones(result_shape(form), dtype=torch.float64), torch.nan)
    return [w.expand_as(x) for x, w in zip(inputs, live, strict=True)], poisoned, incoming


def test_empty_experts_and_one_expert_that_takes_all() -> None:
    a, b = torch.randn(6, 4, requires_grad=True), torch.randn(3, 4, 5, requires_grad=True)
    bias = torch.randn(3, 5, requires_grad=True)
    out = operator(a, b, ends=torch.tensor([0, 6, 6]), bias=bias, activation="gelu")
    da, db, dbias = grad(out.sum(), (a, b, bias))
    want = grad(torch.nn.functional.gelu(a @ b[1] + bias[1]).sum(), (a, b, bias))
    for got, expected in zip((da, db, dbias), want, strict=True):
        torch.testing.assert_close(got, expected)
    assert torch.equal(db[[0, 2]], torch.zeros(2, 4, 5))
    assert torch.equal(dbias[[0, 2]], torch.zeros(2, 5))
    nothing = operator(a, b, ends=torch.zeros(3, dtype=torch.int32), bias=bias)
    assert all(torch.equal(g, torch.zeros_like(g)) for g in grad(nothing.sum(), (a, b, bias)))
    no_groups = operator(a, b[:0], ends=torch.zeros(0, dtype=torch.int32))
    assert torch.equal(grad(no_groups.sum(), a)[0], torch.zeros_like(a))


def test_beta_zero_does_not_let_c_in() -> None:
    a, b, cut = operands("jagged_m")
    c = torch.full((7, 2), torch.nan, dtype=torch.float64, requires_grad=True)
    out = operator(a.requires_grad_(), b, c=c, beta=0.0, **cut)
    assert torch.equal(grad(out.sum(), c)[0], torch.zeros_like(c))
    zero = operator(torch.full_like(a, torch.nan).requires_grad_(), b, alpha=0.0, **cut)
    assert torch.equal(zero, torch.zeros_like(zero))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_gradients_are_within_the_bound(dtype: torch.dtype) -> None:
    a, b, cut = operands("jagged_m", dtype)
    out = operator(a.requires_grad_(), b.requires_grad_(), **cut)
    incoming = torch.randn_like(out)
    da, db = grad(out, (a, b), incoming)
    problem = mg.GroupedGemmProblem(incoming, b.detach().transpose(1, 2), **cut)
    assert mg.verify(problem, da).ok
    problem = mg.GroupedGemmProblem(a.detach().T, incoming, jagged="k", **cut)
    assert mg.verify(problem, db).ok
    assert da.dtype is db.dtype is dtype


def test_gradients_keep_the_dtype_of_each_input() -> None:
    a, b, cut = operands("jagged_m", torch.float32)
    x, w = a.bfloat16().requires_grad_(), b.half().requires_grad_()
    bias = torch.randn(2, requires_grad=True)
    out = operator(x, w, bias=bias, out_dtype=torch.float64, activation="silu", **cut)
    got = grad(out.sum(), (x, w, bias))
    assert [g.dtype for g in got] == [torch.bfloat16, torch.float16, torch.float32]


def test_only_what_is_asked_for_is_computed_and_the_bits_repeat() -> None:
    (a, b, c, bias), cut = leaves("jagged_m", (3, 2), torch.float32)
    out = operator(a.detach(), b, c=c.detach(), bias=bias.detach(), beta=1.0, activation="gelu", **cut)
    (first,) = grad(out.sum(), b, retain_graph=True)
    assert all(torch.equal(first, grad(out.sum(), b, retain_graph=True)[0]) for _ in range(3))


def test_the_gradient_backend_can_be_named() -> None:
    a, b, cut = operands("jagged_m", torch.float32)
    out = operator(a.requires_grad_(), b, grad_backend="cpuu", **cut)
    with pytest.raises(mg.InvalidSetting, match="did you mean 'cpu'"):
        grad(out.sum(), a)


def test_offsets_changed_between_forward_and_backward_are_noticed() -> None:
    for way in WAYS.values():
        a, b, _ = operands("jagged_m")
        ends = torch.tensor([2, 4, 7])
        out = way(a.requires_grad_(), b, ends=ends)
        ends.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            grad(out.sum(), a)


def test_what_cannot_be_differentiated_is_refused() -> None:
    a, b, cut = operands("jagged_m")
    a.requires_grad_()
    with pytest.raises(mg.InvalidProblem, match="a plan has no gradient"):
        mg.plan(mg.GroupedGemmProblem(a, b, **cut))
    with pytest.raises(mg.InvalidProblem, match="out was given"):
        mg.grouped_gemm(a, b, out=torch.empty(7, 2, dtype=torch.float64), **cut)
    x = np.zeros((7, 3))
    with pytest.raises(mg.InvalidProblem, match="numpy array"):
        mg.grouped_gemm(x, np.zeros((3, 3, 2)), bias=torch.zeros(2, requires_grad=True, dtype=torch.float64), **cut)
    with torch.no_grad():
        assert not mg.grouped_gemm(a, b, **cut).requires_grad
