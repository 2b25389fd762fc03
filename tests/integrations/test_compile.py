"""torch.compile: one graph, and no new one for a new number of tokens."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.nn import MoE
from tests.support.torch_op_cases import FORMS, graph_counter, operands

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def fresh_dynamo() -> None:
    torch.compiler.reset()


def cut_randomly(rng: random.Random, tokens: int, groups: int) -> Tensor:
    return torch.tensor(sorted(rng.randint(0, tokens) for _ in range(groups)), dtype=torch.int32)


def test_fifty_token_counts_need_two_graphs() -> None:
    counter, rng = graph_counter("aot_eager"), random.Random(0)
    weight = torch.randn(3, 8, 5, requires_grad=True)

    def layer(x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = mg.grouped_gemm(x, weight, ends=ends, activation="silu", backend=["cupy", "cpu"])
        return y * 2

    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for _ in range(52):
        tokens = rng.randint(2, 300)
        x, ends = torch.randn(tokens, 8, requires_grad=True), cut_randomly(rng, tokens, 3)
        got, want = compiled(x, ends), layer(x, ends)
        assert torch.equal(got, want)
        assert torch.equal(*(torch.autograd.grad(y.sum(), x)[0] for y in (got, want)))
    assert counter.frame_count <= 2


def test_a_moe_layer_compiles_whole() -> None:
    torch.manual_seed(0)
    counter, moe = graph_counter("aot_eager"), MoE(8, 6, 4, 2)
    compiled = torch.compile(moe, fullgraph=True, backend=counter)
    for tokens in (3, 7, 11, 20, 2, 50):
        x = torch.randn(tokens, 8)
        got, want = compiled(x), moe(x)
        torch.testing.assert_close(got, want)
        parameters = list(moe.parameters())
        pairs = zip(*(torch.autograd.grad(y.square().sum(), parameters) for y in (got, want)), strict=True)
        for dx, dy in pairs:
            torch.testing.assert_close(dx, dy)
    assert counter.frame_count <= 2


@pytest.mark.parametrize("form", FORMS)
def test_every_form_compiles(form: str) -> None:
    a, b, cut = operands(form, torch.float32)

    def call(a: Tensor, b: Tensor) -> Any:
        return mg.grouped_gemm(a, b, activation="gelu", **cut)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    x, y = a.clone().requires_grad_(), b.clone().requires_grad_()
    assert torch.equal(compiled(x, y), call(x, y))
    got, want = (torch.autograd.grad(f(x, y).sum(), (x, y)) for f in (compiled, call))
    assert all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


def test_inductor_gives_the_same() -> None:
    weight = torch.randn(3, 8, 5)

    def layer(x: Tensor, ends: Tensor) -> Tensor:
        y: Tensor = mg.grouped_gemm(x.sin(), weight.transpose(1, 2).contiguous().transpose(1, 2), ends=ends)
        return y.relu() + 1

    x, ends = torch.randn(9, 8), torch.tensor([2, 2, 9])
    torch.testing.assert_close(torch.compile(layer, fullgraph=True)(x, ends), layer(x, ends))


def test_autocast_does_not_change_a_problem() -> None:
    x, w, sizes = torch.randn(4, 8), torch.randn(3, 8, 5), torch.tensor([1, 2, 1])

    def call(x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y: Tensor = mg.grouped_gemm(x, w, sizes=sizes)
            return y

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert compiled(x).dtype is call(x).dtype is torch.float32
    assert torch.equal(compiled(x), call(x))


def test_what_no_graph_can_hold_is_refused() -> None:
    x, w = torch.randn(4, 8), torch.randn(3, 8, 5)
    compiled: Any = torch.compile(mg.grouped_gemm, fullgraph=True, backend="aot_eager")
    assert compiled(x, w, sizes=[1, 2, 1]).shape == (4, 5)
    with pytest.raises(Exception, match="cannot be compiled"):
        compiled([x], [w[0]])
    with pytest.raises(Exception, match="cannot be compiled"):
        compiled(x, w, sizes=torch.tensor([1, 2, 1]), out=torch.empty(4, 5))


@pytest.mark.parametrize("name", [torch.float64, "float64", np.float64, np.dtype("float64"), float])
def test_dtypes_go_by_any_name_in_a_graph(name: Any) -> None:
    a, b, cut = operands("jagged_m")
    compiled = torch.compile(lambda x, w: mg.grouped_gemm(x, w, out_dtype=name, **cut), fullgraph=True, backend="eager")
    assert compiled(a, b).dtype is torch.float64


def _solved(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    result: Tensor = mg.solve(mg.GroupedGemmProblem(a, b, sizes=sizes, activation="relu"))
    return result


def _planned(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    with torch.no_grad():
        plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=sizes), backend="cpu")
        result: Tensor = plan() + plan.run(plan.problem)
    return result


def _listed(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    first, second = mg.grouped_gemm([a, a * 2], [b[0], b[1]])
    result: Tensor = torch.sin(first) + second
    return result


def _into(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    out = torch.empty(len(a), b.shape[-1], dtype=a.dtype)
    with torch.no_grad():
        mg.grouped_gemm(a, b, sizes=sizes, out=out)
    return out * 2


def _judged(a: Tensor, b: Tensor, sizes: Tensor) -> Tensor:
    problem = mg.GroupedGemmProblem(a, b, sizes=sizes)
    return a.sum() if mg.verify(problem, mg.solve(problem)).ok and mg.explain(problem).chosen else -a.sum()


@pytest.mark.parametrize("call", [_solved, _planned, _listed, _into, _judged])
def test_what_no_graph_holds_breaks_it_and_runs_as_it_is(call: Any) -> None:
    """Dynamo would trace NumPy and addresses, and fail far from the call or change what it means."""
    a, b, sizes = torch.randn(9, 8, requires_grad=True), torch.randn(3, 8, 5), torch.tensor([4, 0, 5])
    compiled: Any = torch.compile(call, backend="eager")
    got, want = compiled(a, b, sizes), call(a, b, sizes)
    assert torch.equal(got, want)
    if want.requires_grad:
        assert torch.equal(*(torch.autograd.grad(x.sum(), a)[0] for x in (got, want)))


def test_a_whole_graph_refuses_a_problem_with_the_remedy() -> None:
    a, b, sizes = torch.randn(9, 8), torch.randn(3, 8, 5), torch.tensor([4, 0, 5])
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"use multigemm\.grouped_gemm with packed"):
        torch.compile(_solved, backend="eager", fullgraph=True)(a, b, sizes)
