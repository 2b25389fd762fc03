"""The torch operator and the operators of layers on a GPU: values, gradients, repeated calls, graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad

import multigemm as mg
from multigemm.integrations import grouped_gemm, torch_op
from multigemm.integrations.expert_network import combine, dispatch, route
from multigemm.integrations.layer_ops import geglu, sort_by_expert, swiglu, weighted_sum
from multigemm.nn import MoE
from tests.support.torch_op_cases import FORMS, bias_shapes, graph_counter, operands, result_shape

pytestmark = pytest.mark.gpu


def rows() -> tuple[Tensor, Tensor, Tensor]:
    """(a, b, ends): four groups of 64 rows, one of them empty."""
    a = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16)
    return a, b, torch.tensor([10, 10, 30, 64], device="cuda", dtype=torch.int32)


def assert_alike(results: list[list[Tensor]], dtype: torch.dtype) -> None:
    """What the CPU gives, and what the GPU gives."""
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS)
def test_forward_and_gradients_are_those_of_the_cpu(form: str) -> None:
    a, b, cut = operands(form)
    bias = torch.linspace(-1, 1, bias_shapes(form)[-1][-1], dtype=torch.float64).expand(bias_shapes(form)[-1])
    inputs = [a, b, torch.ones(result_shape(form), dtype=torch.float64), bias]
    results = []
    for device in ("cpu", "cuda"):
        x, y, c, v = (t.detach().to(device).requires_grad_() for t in inputs)
        there = {k: t.to(device) if isinstance(t, Tensor) else t for k, t in cut.items()}
        out = grouped_gemm(x, y, c=c, bias=v, beta=0.5, activation="silu", **there)
        results.append([out, *torch.autograd.grad(out.sum(), (x, y, c, v))])
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu(), want)


def test_opcheck_on_the_device() -> None:
    a, b = torch.randn(7, 8, device="cuda", requires_grad=True), torch.randn(3, 8, 4, device="cuda", requires_grad=True)
    ends = torch.tensor([2, 2, 6], device="cuda")
    torch.library.opcheck(torch.ops.multigemm.grouped_gemm.default, (a, b, None, None, ends), {"activation": "gelu"})


# --- calls that come again --------------------------------------------------------------------------


def test_repeated_calls_share_nothing_and_keep_no_memory() -> None:
    a, b, ends = rows()
    for step in range(12):
        a.normal_()
        ends.copy_(torch.tensor([step, 10 + step, 40, 60]))
        out = grouped_gemm(a, b, ends=ends)
        assert mg.verify(mg.GroupedGemmProblem(a, b, ends=ends), out).ok
    kept = [grouped_gemm(a, b, ends=ends) for _ in range(4)]
    assert len({x.data_ptr() for x in kept}) == 4
    assert all(torch.equal(x, out) for x in kept)
    large = torch.randn(4 << 20, 32, device="cuda", dtype=torch.bfloat16)
    held = torch.cuda.memory_allocated()
    for _ in range(3):
        grouped_gemm(large, b, ends=ends)
    del large, kept
    assert torch.cuda.memory_allocated() <= held - (200 << 20)


@pytest.mark.parametrize(
    ("backend", "kind"),
    [
        *((name, "ends") for name in ("auto", "cupy", "triton", "numba", "cublas")),
        ("auto", "offsets"),
        ("auto", "sizes"),
        ("auto", "c"),
    ],
)
def test_calls_that_come_again_are_not_validated_again(
    backend: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    a = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    b = torch.nn.Parameter(torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16))
    cut = torch.zeros(5 if kind == "offsets" else 4, device="cuda", dtype=torch.int32)
    given: dict[str, Any] = {"ends" if kind == "c" else kind: cut}
    if kind == "c":
        given |= {"c": torch.randn(64, 48, device="cuda", dtype=torch.bfloat16), "beta": 0.5}
    entered: list[Any] = []

    def noted(*operands: Any, **keywords: Any) -> Any:
        entered.append(operands)
        return mg.GroupedGemmProblem(*operands, **keywords)

    monkeypatch.setattr(torch_op, "GroupedGemmProblem", noted)
    operator = torch.ops.multigemm.grouped_gemm
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for step in range(8):
            a.normal_()
            cut[-4:].copy_(torch.tensor([step, 9, 40, 3] if kind == "sizes" else [step, 10 + step, 40, 60]))
            if step == 5:
                del entered[:]
            out = operator(a, b, **given, backend=backend)
            assert mg.verify(mg.GroupedGemmProblem(a, b.detach(), **given), out).ok
            del out
        assert not entered
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            others = [operator(a, b, **given, backend=backend) for _ in range(5)]
        torch.cuda.synchronize()
        assert all(torch.equal(x, others[0]) for x in others)
        assert mg.verify(mg.GroupedGemmProblem(a, b.detach(), **given), others[0]).ok
    assert operator(a, b, **given, backend=backend).requires_grad


# --- graphs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fifty_token_counts_of_a_moe_layer_need_two_graphs(backend: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    counter, moe = graph_counter(backend), MoE(64, 32, 4, 2, device="cuda")
    compiled, parameters = torch.compile(moe, fullgraph=True, backend=counter), list(moe.parameters())
    for tokens in torch.randint(2, 300, (52,)).tolist():
        x = torch.randn(tokens, 64, device="cuda")
        got, want = compiled(x), moe(x)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)  # in steps, and fused for its gradients
        gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (got, want))
        for have, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(have, wanted, rtol=1e-3, atol=1e-3)
    assert counter.frame_count <= 2


def test_a_graph_follows_new_tokens_and_new_ends() -> None:
    a, b, ends = rows()
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.stream(side):
        grouped_gemm(a, b, ends=ends)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = grouped_gemm(a, b, ends=ends)
    a.normal_()
    ends.copy_(torch.tensor([0, 50, 50, 60]))
    graph.replay()
    assert mg.verify(mg.GroupedGemmProblem(a, b, ends=ends), out).ok


def test_a_moe_layer_compiles_with_cuda_graphs() -> None:
    torch.manual_seed(0)
    moe = MoE(64, 32, 4, 2, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(moe, fullgraph=True, mode="reduce-overhead")
    for _ in range(4):
        x = torch.randn(33, 64, device="cuda", dtype=torch.bfloat16)
        with torch.no_grad():
            torch.testing.assert_close(compiled(x).clone(), moe(x), rtol=0.05, atol=0.02)


# --- the sort, the routing and the gates of layers ----------------------------------------------------


@pytest.mark.parametrize("count", [20, 3000])
def test_opcheck_of_the_counting_sort(count: int) -> None:
    pairs = torch.randint(-1, 6, (count,), device="cuda")
    torch.library.opcheck(torch.ops.multigemm.sort_by_expert.default, (pairs, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_routing_kernels_are_the_plain_routing(dtype: torch.dtype) -> None:
    index = torch.topk(torch.randn(50, 9), 3)[1]
    x, weights = torch.randn(50, 2100, dtype=dtype), torch.rand(50, 3)
    results = []
    for device in ("cpu", "cuda"):
        routing = route(index.to(device), 8)
        leaves = [t.detach().to(device).requires_grad_() for t in (x, weights)]
        out = combine(dispatch(leaves[0], routing) * 2, leaves[1], routing)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    assert_alike(results, dtype)


@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (100, 8), (1000, 128), (4097, 7), (65536, 128), (300000, 1023)])
def test_the_counting_sort_is_a_stable_sort(pairs: int, experts: int) -> None:
    for low, high in ((0, experts), (-1, experts + 2)):
        numbers = torch.randint(low, high, (pairs,), generator=torch.Generator().manual_seed(pairs))
        want = sort_by_expert(numbers, experts)
        got = sort_by_expert(numbers.cuda(), experts)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g.cpu(), w)


@pytest.mark.parametrize("gate", [swiglu, geglu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gate_kernels_are_the_plain_gates(dtype: torch.dtype, gate: Any) -> None:
    x = (torch.randn(37, 2 * 1100) * 3).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.detach().to(device).requires_grad_()
        out = gate(leaf)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaf)])
    assert_alike(results, dtype)


def test_gates_and_sums_carry_tangents() -> None:
    x, index, weights = torch.randn(6, 8), torch.randperm(6), torch.rand(3, 2)
    found = []
    for device in ("cpu", "cuda"):
        there = [t.to(device) for t in (x, index, weights)]
        with forward_ad.dual_level():
            dual: Any = forward_ad.make_dual(there[0], torch.ones_like(there[0]))  # type: ignore[no-untyped-call]
            out = weighted_sum(swiglu(dual), there[1], there[2], 2)
            found.append(forward_ad.unpack_dual(out).tangent.cpu())  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found[1], found[0])
