"""The torch operator on a GPU in graphs: compiled with many token counts, captured, replayed."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import multigemm as mg
from multigemm.integrations import grouped_gemm
from multigemm.nn import MoE

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_fifty_token_counts_of_a_moe_layer_need_two_graphs(backend: str) -> None:
    torch.manual_seed(0)
    torch.compiler.reset()
    counter, moe = CompileCounterWithBackend(backend), MoE(64, 32, 4, 2, device="cuda")
    compiled, parameters = torch.compile(moe, fullgraph=True, backend=counter), list(moe.parameters())
    for tokens in torch.randint(2, 300, (52,)).tolist():
        x = torch.randn(tokens, 64, device="cuda")
        got, want = compiled(x), moe(x)
        torch.testing.assert_close(got, want)
        gradients = (torch.autograd.grad(y.square().sum(), parameters) for y in (got, want))
        for have, wanted in zip(*gradients, strict=True):
            torch.testing.assert_close(have, wanted, rtol=1e-3, atol=1e-3)
    assert counter.frame_count <= 2


def test_a_graph_follows_new_tokens_and_new_ends() -> None:
    a = torch.randn(64, 32, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(4, 32, 48, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([10, 10, 30, 64], device="cuda", dtype=torch.int32)
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
