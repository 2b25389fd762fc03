"""The core on a GPU: every array library, live sizes, graphs, streams, and host data under capture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.planning.launch_cache import LAUNCHES

pytestmark = pytest.mark.gpu
BACKENDS = ["cupy", "triton", "numba", "cublas"]


def operands(dtype: torch.dtype = torch.float16) -> tuple[torch.Tensor, torch.Tensor]:
    a = torch.randint(-4, 5, (20, 16), device="cuda").to(dtype)
    return a, torch.randint(-4, 5, (3, 16, 8), device="cuda").to(dtype)


def want(a: torch.Tensor, b: torch.Tensor, offsets: list[int]) -> torch.Tensor:
    out = torch.zeros(a.shape[0], b.shape[2], dtype=a.dtype, device=a.device)
    for g in range(b.shape[0]):
        rows = slice(offsets[g], offsets[g + 1])
        out[rows] = (a[rows].float() @ b[g].float()).to(a.dtype)
    return out


@pytest.mark.parametrize("backend", BACKENDS)
def test_cupy_and_numba_arrays_come_back_as_their_kind(backend: str) -> None:
    cupy, cuda = pytest.importorskip("cupy"), pytest.importorskip("numba.cuda")
    a, b = operands()
    expected = want(a, b, [0, 5, 5, 18]).cpu().numpy()
    got = mg.grouped_gemm(cupy.asarray(a), cupy.asarray(b), offsets=[0, 5, 5, 18], backend=backend)
    assert isinstance(got, cupy.ndarray)
    assert (cupy.asnumpy(got) == expected).all()
    flipped = cupy.asarray(a.flip(0).contiguous())[::-1]
    got = mg.grouped_gemm(flipped, cupy.asarray(b), offsets=[0, 5, 5, 18], backend=backend)
    assert (cupy.asnumpy(got) == expected).all()
    x, y = cuda.as_cuda_array(a), cuda.as_cuda_array(b)
    result = mg.grouped_gemm(x, y, offsets=[0, 5, 5, 18], backend=backend)
    assert type(result).__name__ == "DeviceNDArray"
    assert (result.copy_to_host() == expected).all()


def test_cupy_work_runs_on_the_stream_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    a, b = operands()
    expected = want(a, b, [0, 5, 5, 18]).cpu().numpy()
    mg.grouped_gemm(a, b, offsets=[0, 5, 5, 18])
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        late = cupy.zeros((20, 16), cupy.float16)
        sleep: Any = torch.cuda._sleep
        sleep(1)
        late[...] = cupy.asarray(a)
        got = mg.grouped_gemm(late, cupy.asarray(b), offsets=[0, 5, 5, 18])
        stream.synchronize()
    assert (cupy.asnumpy(got) == expected).all()


@pytest.mark.parametrize("backend", ["cupy", "triton", "numba"])
@pytest.mark.parametrize("kind", ["offsets", "sizes", "ends"])
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_a_graph_follows_live_sizes(backend: str, kind: str, index: torch.dtype) -> None:
    a, b = operands()
    cuts = [[0, 5, 5, 18], [0, 0, 20, 20], [0, 1, 2, 3]]

    def values(offsets: list[int]) -> torch.Tensor:
        v = {"offsets": offsets, "ends": offsets[1:], "sizes": np.diff(offsets).tolist()}[kind]
        return torch.tensor(v, dtype=index, device="cuda")

    live = values(cuts[0])
    cut_by: dict[str, Any] = {kind: live}
    plan = mg.plan(mg.GroupedGemmProblem(a, b, **cut_by), backend)
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    for cut in cuts:
        live.copy_(values(cut))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, want(a, b, cut)), (backend, kind, cut)


@pytest.mark.parametrize("backend", BACKENDS)
def test_offsets_that_lie_touch_nothing_outside(backend: str) -> None:
    guard = torch.full((64, 8), 7.0, dtype=torch.float16, device="cuda")
    a, b = operands()
    live = torch.tensor([-5, 30, 2, 10**6], device="cuda")
    mg.grouped_gemm(a, b, offsets=live, out=guard[20:40], backend=backend)
    assert guard[:20].eq(7).all()
    assert guard[40:].eq(7).all()
    with pytest.raises(mg.InvalidProblem, match=r"offsets\[2\] is 2, less than"):
        mg.GroupedGemmProblem(a, b, offsets=live, check="full")


def test_host_sizes_under_capture_are_refused_clearly() -> None:
    a, b = operands()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        a.add_(0)
        with pytest.raises(mg.NotCapturable, match="host data"):
            mg.grouped_gemm(a, b, offsets=[0, 5, 5, 18], backend="cupy")


def test_operands_on_two_devices_are_refused() -> None:
    a, b = operands()
    with pytest.raises(mg.InvalidProblem, match="b is on cpu and a is on cuda:0"):
        mg.GroupedGemmProblem(a, b.cpu(), offsets=[0, 5, 5, 18])


def test_auto_names_a_gpu_backend_that_does_not_sync() -> None:
    a, b = operands()
    plan: Any = mg.plan(mg.GroupedGemmProblem(a, b, offsets=torch.tensor([0, 5, 5, 18], device="cuda")))
    assert plan.backend in BACKENDS
    assert not plan.syncs


@pytest.mark.parametrize("backend", [*BACKENDS, "auto"])
@pytest.mark.parametrize("kind", ["offsets on the device", "sizes on the device", "offsets", "sizes"])
@pytest.mark.parametrize(("k", "n", "groups"), [(64, 128, 8), (256, 96, 3), (63, 130, 5), (64, 64, 300)])
def test_ever_new_token_counts_and_sizes_are_right(backend: str, kind: str, k: int, n: int, groups: int) -> None:
    """What one launch is resized for: half an octave of token counts and more, in turn, with poisoned results."""
    chance, limit = np.random.default_rng(k + groups), 4 if backend == "cublas" else 1
    rows = torch.randint(-2, 3, (1500, k), device="cuda").to(torch.bfloat16)
    weights = torch.randint(-2, 3, (groups, k, n), device="cuda").to(torch.bfloat16)
    served = LAUNCHES.served
    for _ in range(40 // limit):
        a = rows[: int(chance.integers(700, 1500))]
        offsets = np.sort(chance.integers(0, a.shape[0] + 1, groups + 1))
        if kind.startswith("sizes"):
            offsets[0] = 0
        values = np.diff(offsets) if kind.startswith("sizes") else offsets
        given: dict[str, Any] = {kind.partition(" ")[0]: values.tolist()}
        if kind.endswith("device"):
            given = {name: torch.tensor(x, dtype=torch.int32, device="cuda") for name, x in given.items()}
        poison = torch.full((a.shape[0], n), float("nan"), dtype=torch.bfloat16, device="cuda")
        del poison  # where the result will lie
        got = mg.grouped_gemm(a, weights, backend=backend, **given)
        assert torch.equal(got, want(a, weights, offsets.tolist())), (a.shape, offsets)
    assert LAUNCHES.served > served or backend == "cublas"
