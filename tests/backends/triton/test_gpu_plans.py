"""Plans of the Triton backend on a GPU: graphs, streams, compilations, moved operands, what a call costs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config
from tests.support.triton_gpu_cases import problem

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_a_plan_costs_the_host_little() -> None:
    plan = mg.plan(problem("jagged_m"), backend="triton")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            plan()
        best = min(best, (time.perf_counter() - start) / 50)
    assert best < 30e-6


RING = Config("hopper", block_m=128, block_n=128, stages=5, warps=4, order="drawn")
SHARED = Config(block_m=32, block_n=64, block_k=64, warps=4, stages=3, programs=0, splits=4)
COUNTING = {"search": (6, RING), "listed": (300, RING), "shared": (6, SHARED)}


def deep_problem(groups: int) -> mg.GroupedGemmProblem:
    rows = 5 * groups + 100
    offsets = torch.linspace(0, rows, groups + 1).to(torch.int32).cuda()
    a = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    return mg.GroupedGemmProblem(
        a, torch.randn(groups, 1024, 136, device="cuda", dtype=torch.bfloat16), offsets=offsets
    )


def dirty() -> None:
    """Leaves memory behind whose words are not zero."""
    held = [torch.full((1 << 12,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("kind", COUNTING)
def test_a_plan_runs_at_once_on_another_stream(kind: str) -> None:
    groups, config = COUNTING[kind]
    given = deep_problem(groups)
    mg.plan(given, backend="triton", config=config)()
    cuda: Any = torch.cuda
    side = cuda.Stream()
    dirty()
    cuda._sleep(50_000_000)  # what this stream is asked for now comes late
    plan = mg.plan(given, backend="triton", config=config)
    with torch.cuda.stream(side):
        out = plan()
    side.synchronize()
    assert mg.verify(given, out)
    torch.cuda.synchronize()
    assert mg.verify(given, plan())


@pytest.mark.parametrize("kind", COUNTING)
def test_a_call_in_a_graph_and_plans_beside_it(kind: str) -> None:
    groups, config = COUNTING[kind]
    given = deep_problem(groups)
    plan = mg.plan(given, backend="triton", config=config)
    plan()
    graph = torch.cuda.CUDAGraph()
    dirty()
    with torch.cuda.graph(graph):
        out = mg.solve(given, backend="triton", config=config)
        again = plan()
    others = [mg.plan(given, backend="triton", config=config) for _ in range(3)]
    for other in others:
        graph.replay()
        assert mg.verify(given, other())
    out.zero_()
    graph.replay()
    assert mg.verify(given, out)
    assert mg.verify(given, again)
