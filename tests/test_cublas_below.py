"""Functions of torch that are entered below its dispatcher: arguments arrive, and what is thrown becomes a status."""

from __future__ import annotations

import platform
from collections.abc import Iterator

import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas import below, grouped_mm
from multigemm.backends.cublas.config import Config

MM_OUT = "_ZN2at4_ops6mm_out4callERKNS_6TensorES4_RS2_"
"""Tensor& at::_ops::mm_out::call(const Tensor&, const Tensor&, Tensor&), of the library that every torch has."""
only_here = pytest.mark.skipif(
    platform.machine() not in below.MACHINES or platform.system() != "Linux", reason="instructions of another machine"
)


@only_here
def test_tensors_arrive_and_results_come_back() -> None:
    address = below.function("libtorch_cpu.so", MM_OUT)
    assert address is not None
    a, b, out = torch.randn(3, 4), torch.randn(4, 5), torch.empty(3, 5)
    call = below.Bound(address, (a, b, out))
    for _ in range(2):
        a.normal_()
        assert call.call() == 0
        assert torch.equal(out, a @ b)


@only_here
def test_what_is_thrown_becomes_a_status() -> None:
    address = below.function("libtorch_cpu.so", MM_OUT)
    assert address is not None
    a, out = torch.randn(3, 4), torch.empty(3, 4)
    assert below.Bound(address, (a, a, out)).call() != 0
    assert below.Bound(address, (a, torch.eye(4), out)).call() == 0
    assert torch.equal(out, a)


def test_tensors_live_as_long_as_the_call() -> None:
    """A cell holds an address; it is nobody's reference."""
    cells = below.Cells([torch.zeros(1), None])
    assert cells._keep[0] is not None
    assert list(cells._cells) == [cells._keep[0]._cdata, 1, None, None]


@pytest.fixture
def fresh() -> Iterator[None]:
    below.function.cache_clear()
    yield
    below.function.cache_clear()


def test_a_torch_that_no_gpu_showed_is_not_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(below, "function", lambda library, symbol: 1)
    seen = {}
    for version in ("2.11.0+cu130", "2.12.1", "2.13.0", "3.0.0a0+git1"):
        monkeypatch.setattr(torch, "__version__", version)
        seen[version] = below.grouped_mm()
    assert seen == {"2.11.0+cu130": 1, "2.12.1": None, "2.13.0": None, "3.0.0a0+git1": None}


def test_without_the_symbol_the_dispatcher_is_used(fresh: None) -> None:
    assert below.function("libtorch_cpu.so", "_ZN2at6nobody3hasEv") is None
    assert below.function("libno_such_library.so", MM_OUT) is None


def test_on_another_machine_the_dispatcher_is_used(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    below._unpack.cache_clear()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert below.function("libtorch_cpu.so", MM_OUT) is None


# --- on a GPU ------------------------------------------------------------------------------------


def _bf16(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, device="cuda").bfloat16()


@pytest.mark.gpu
def test_a_released_torch_is_entered() -> None:
    """Else host times double, and nothing else would tell."""
    if not (below.release() in below.SEEN and platform.machine() in below.MACHINES):
        pytest.skip("this torch, or this machine, is not one that is entered")
    assert below.grouped_mm() is not None


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["rows", "transposed weights", "sliced result", "weight gradients"])
def test_both_ways_give_the_same_bits(monkeypatch: pytest.MonkeyPatch, layout: str) -> None:
    ends = torch.tensor([96, 96, 300, 512], device="cuda", dtype=torch.int32)
    a, b = _bf16(512, 256), _bf16(4, 256, 192)
    out = torch.zeros(512, 384, device="cuda").bfloat16()[:, :192]
    if layout == "transposed weights":
        b = _bf16(4, 192, 256).transpose(1, 2)
    elif layout == "weight gradients":
        a, b, out = _bf16(512, 256).t(), _bf16(512, 192), torch.zeros(4, 256, 192, device="cuda").bfloat16()
        ends = torch.tensor([96, 128, 304, 512], device="cuda", dtype=torch.int32)
    elif layout == "rows":
        out = torch.zeros(512, 192, device="cuda").bfloat16()
    problem = mg.GroupedGemmProblem(a, b, ends=ends, out=out, jagged="k" if layout == "weight gradients" else "m")
    found = []
    for enter in (True, False):
        if not enter:
            monkeypatch.setattr(below, "grouped_mm", lambda: None)
        out.zero_()
        mg.plan(problem, backend="cublas", config=Config("grouped_mm"))()
        found.append(out.clone())
    assert torch.equal(*found)
    assert torch.equal(found[0], torch._grouped_mm(a, b, offs=ends).view_as(out))


@pytest.mark.gpu
def test_torch_takes_no_reference_that_it_was_not_given() -> None:
    """A function that moved its arguments would leave other addresses, and tensors that are freed too early."""
    ends = torch.tensor([96, 96, 300, 512], device="cuda", dtype=torch.int32)
    step = grouped_mm.GroupedMM(_bf16(512, 256), _bf16(4, 256, 192), ends, _bf16(512, 192))
    if step._below is None:
        pytest.skip("this torch, or this machine, is not one that is entered")
    cells = step._below._keep[0]._cells
    before = list(cells)
    for _ in range(3):
        step(torch.cuda.current_stream().cuda_stream)
    assert list(cells) == before


@pytest.mark.gpu
def test_an_error_below_is_raised_as_torch_raises_it() -> None:
    groups = 1100
    a, b, out = _bf16(64, 64), _bf16(1, 64, 64).expand(groups, -1, -1), _bf16(64, 64)
    ends = torch.full((groups,), 64, device="cuda", dtype=torch.int32)
    step = grouped_mm.GroupedMM(a, b, ends, out)
    with pytest.raises(RuntimeError, match="1024 groups"):
        step(0)
    torch.cuda.synchronize()


@pytest.mark.gpu
def test_a_graph_holds_what_is_entered_below() -> None:
    a, b, ends = _bf16(512, 256), _bf16(4, 256, 192), torch.tensor([96, 96, 300, 512], device="cuda")
    plan = mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend="cublas", config=Config("grouped_mm"))
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    a.normal_()
    ends.copy_(torch.tensor([10, 200, 201, 500]))
    graph.replay()
    want = torch._grouped_mm(a, b, offs=ends.int())
    assert torch.equal(out[:500], want[:500])
    assert not out[500:].any()


@pytest.mark.gpu
def test_plans_can_be_thrown_away_while_their_calls_run() -> None:
    """References are counted as before: nothing is freed too early or kept for ever."""
    ends = torch.tensor([512, 1024, 1500, 2048], device="cuda", dtype=torch.int32)
    before = 0
    for turn in range(30):
        a, b = _bf16(2048, 1024), _bf16(4, 1024, 1024)
        plan = mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend="cublas", config=Config("grouped_mm"))
        for _ in range(3):
            got = plan()
        want = torch._grouped_mm(a, b, offs=ends)
        del plan, a, b
        assert torch.equal(got, want)
        del got, want
        torch.cuda.synchronize()
        if turn == 2:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == before
