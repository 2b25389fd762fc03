"""Plans of the Triton backend on a GPU: graphs, the current stream, compilations, what a call costs."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND
from multigemm.backends.triton import compile as compiled
from multigemm.planning.staging import staged_spec
from tests.triton_gpu_cases import draw, offsets_of, problem, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_a_graph_sees_new_sizes_and_new_values() -> None:
    given = problem("jagged_m", n=512, k=512)
    for config in BACKEND.configs(staged_spec(given), given.device):
        plan = mg.plan(given, backend="triton", config=config)
        plan()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan()
        offsets_of(given).copy_(torch.tensor([0, 0, 500, 501, 501, 640, 900, 1000, 1200], dtype=torch.int32))
        tensor(given.a).mul_(2)
        graph.replay()
        assert mg.verify(given, out)


def test_new_token_counts_and_group_counts_compile_nothing() -> None:
    def run(groups: int, rows: int) -> None:
        offsets = torch.linspace(0, rows, groups + 1).to(torch.int32).cuda()
        mg.grouped_gemm(draw(rows, 128), draw(groups, 128, 256), offsets=offsets, backend="triton")

    for rows in (64, 700, 20000):
        run(4, rows)
    before = compiled.compilations
    for step in range(20):
        run(1 + 37 * step % 60, 300 + 977 * step % 15000)
    assert compiled.compilations == before


def test_the_current_stream_is_used() -> None:
    given = problem("jagged_m")
    plan = mg.plan(given, backend="triton")
    cuda: Any = torch.cuda
    side = cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        cuda._sleep(20_000_000)
        tensor(given.a).mul_(2)
        out = plan()
    side.synchronize()
    assert mg.verify(given, out)


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
