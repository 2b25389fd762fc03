"""Ends out of sizes that live on the device: the same as torch's cumsum, followed in place."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.cuda import nvrtc
from multigemm.planning import running_sums as module
from multigemm.planning.running_sums import MOST, SOURCE, running_sums
from tests.support.concurrency import on_new_threads
from tests.support.nvrtc_here import nvrtc_here

INDEX = [torch.int32, torch.int64]
COUNTS = [0, 1, 2, 31, 32, 33, 255, 256, 257, 1000, 4097]


def sizes_of(count: int, dtype: torch.dtype, device: str, step: int = 1) -> torch.Tensor:
    low, high = torch.iinfo(dtype).min, torch.iinfo(dtype).max  # sizes that lie, whose sums wrap
    return torch.randint(low, high, (max(count * step, 1),), dtype=dtype).to(device)[::step][:count]


def check(device: str, count: int, dtype: torch.dtype, step: int) -> None:
    live = sizes_of(count, dtype, device, step)
    ends = torch.empty(count, dtype=torch.int64, device=device)
    launch = running_sums(live, ends)
    for _ in range(2):
        launch()
        assert torch.equal(ends, torch.cumsum(live, 0, dtype=torch.int64))
        live.copy_(sizes_of(count, dtype, device))


@pytest.mark.parametrize("count", COUNTS)
def test_on_the_host_it_is_torchs(count: int) -> None:
    check("cpu", count, torch.int32, 1)


@pytest.mark.parametrize(("count", "ours"), [(0, False), (1, True), (MOST, True), (MOST + 1, False)])
def test_many_sizes_are_left_to_torch(count: int, ours: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class OnGpu:
        device, dtype, shape = torch.device("cuda", 0), torch.int64, (count,)
        data_ptr, stride, numel = (lambda self: 8), (lambda self, axis: 1), (lambda self: count)

    class Kernel:
        def bound(self, *given: Any, **shape: Any) -> str:
            return "ours"

    monkeypatch.setattr(module, "capturing", lambda device: False)
    monkeypatch.setattr(module, "_compiles", lambda: True)
    monkeypatch.setattr(nvrtc, "loaded", lambda *given: Kernel())
    live: Any = OnGpu()
    assert (running_sums(live, live) == "ours") is ours  # type: ignore[comparison-overlap]


@pytest.mark.parametrize("size", ["int", "long long"])
def test_the_kernel_compiles(size: str, monkeypatch: pytest.MonkeyPatch) -> None:
    library = nvrtc_here()
    monkeypatch.setattr(nvrtc, "compiler", lambda: library)
    options = ("--gpu-architecture=sm_80", "--std=c++17", f"-DSIZE={size}")
    assert nvrtc.compile_source(SOURCE, "running_sums", options)[:4] == b"\x7fELF"


@pytest.mark.gpu
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("dtype", INDEX)
@pytest.mark.parametrize("step", [1, 3])
def test_on_a_gpu(count: int, dtype: torch.dtype, step: int) -> None:
    check("cuda", count, dtype, step)


@pytest.mark.gpu
def test_a_plan_over_sizes_goes_on_in_another_thread_on_another_stream_and_in_a_graph() -> None:
    a, b = torch.ones(20, 16, device="cuda"), torch.ones(3, 16, 8, device="cuda")
    live = torch.tensor([5, 0, 13], device="cuda")
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=live), "cupy")
    found: list[Any] = []
    make: Any = torch.cuda.Stream
    stream = make()

    def other() -> None:
        with torch.cuda.stream(stream):
            live.copy_(torch.tensor([1, 2, 3]))
            found.append(plan().sum().item())

    torch.cuda.synchronize()
    on_new_threads(other)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    for sizes in ([0, 0, 20], [4, 4, 4]):
        live.copy_(torch.tensor(sizes))
        graph.replay()
        found.append(out.sum().item())
    assert found == [6 * 16 * 8, 20 * 16 * 8, 12 * 16 * 8]


@pytest.mark.gpu
def test_a_plan_made_in_a_capture() -> None:
    a, b = torch.ones(20, 16, device="cuda"), torch.ones(3, 16, 8, device="cuda")
    live = torch.tensor([5, 0, 13], device="cuda")
    mg.grouped_gemm(a, b, sizes=live, backend="triton")  # compiled before
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mg.grouped_gemm(a, b, sizes=live, backend="triton")
    live.copy_(torch.tensor([1, 2, 3]))
    graph.replay()
    assert out.sum().item() == 6 * 16 * 8
