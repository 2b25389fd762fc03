"""On a GPU: auto measures a class once, and leaves everything but its own memory as it was."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.select import choose, timing
from multigemm.select import measure_once as trial
from multigemm.select import table as tuning
from tests.support.concurrency import on_new_threads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"),
]


@pytest.fixture(autouse=True)
def nothing_is_known(setting: Callable[..., None], own_tunings: None) -> Iterator[None]:
    """No class was met before; warnings are errors."""
    setting(MULTIGEMM_MEASURE=1, MULTIGEMM_BACKEND="")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="multigemm: auto could not")
        yield
    choose.forget()


def operands(rows: int = 488, n: int = 328, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    a, b = (torch.randn(*s, dtype=torch.bfloat16, device="cuda") / 8 for s in ((rows, 264), (5, 264, n)))
    sizes = torch.tensor([rows // 8] * 4 + [rows - 4 * (rows // 8)], device="cuda")
    return a.requires_grad_(grad), b.requires_grad_(grad), {"sizes": sizes}


def measured(problem: mg.GroupedGemmProblem) -> dict[str, float]:
    return {c.name: c.us for c in mg.explain(problem).candidates if c.us is not None}


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many backends each trial timed."""
    found: list[int] = []
    real = vars(trial)["measure"]

    def measure(variants: Any, *given: Any, **more: Any) -> Any:
        found.append(len(variants))
        return real(variants, *given, **more)

    monkeypatch.setattr(trial, "measure", measure)
    return found


def test_an_open_class_is_measured_and_a_second_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, how = operands()
    problem = mg.GroupedGemmProblem(a, b, **how)
    assert mg.verify(problem, mg.solve(problem)).ok
    took = measured(problem)
    assert set(took) == {"cupy", "triton"}
    chosen = mg.explain(problem).chosen
    assert chosen is not None
    assert took[chosen] <= trial.WORTH * min(took.values())
    assert all(1.0 < us < 1000.0 for us in took.values())
    again = tuning.TuningTable(tmp_path)
    monkeypatch.setattr(tuning, "table", lambda: again)
    monkeypatch.setattr(trial, "measure", None)  # which nobody can call
    choose.forget()
    assert measured(problem) == took
    assert mg.explain(problem).chosen == chosen


def test_c_is_added_once_though_many_have_run() -> None:
    a, b, how = operands()
    c = torch.randn(488, 328, dtype=torch.bfloat16, device="cuda")
    out = c.clone()
    posed = mg.GroupedGemmProblem(a, b, c=out, beta=1.0, out=out, **how)
    want = mg.solve(mg.GroupedGemmProblem(a, b, c=c, beta=1.0, **how), "cupy")
    got = mg.solve(posed)
    assert got is out
    assert len(measured(posed)) > 1
    torch.testing.assert_close(got, want)


def test_gradients_flow_and_are_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = counted(monkeypatch)
    a, b, how = operands(grad=True)
    out = mg.grouped_gemm(a, b, **how)
    assert len(trials) == 1
    out.float().square().sum().backward()
    assert len(trials) == 3
    assert a.grad is not None
    assert b.grad is not None
    want = [x.detach().float().requires_grad_() for x in (a, b)]
    mg.grouped_gemm(*want, backend="cublas", **how).square().sum().backward()
    for got, true in zip((a.grad, b.grad), want, strict=True):
        assert true.grad is not None
        assert (got.float() - true.grad).norm() < 0.02 * true.grad.norm()


def test_nothing_is_measured_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, how = operands(n=336)
    problem = mg.GroupedGemmProblem(a, b, **how)
    for name in ("cupy", "triton", "cublas", "numba"):
        mg.plan(problem, name)()
    torch.cuda.synchronize()
    monkeypatch.setattr(trial, "measure", None)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = mg.solve(problem)
    graph.replay()
    assert mg.verify(problem, out).ok


def test_arrays_of_cupy_are_measured_on_the_stream_of_cupy() -> None:
    cupy = pytest.importorskip("cupy")
    a, b, how = operands()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        stream.synchronize()
        x, y = (cupy.random.standard_normal(t.shape, dtype=cupy.float32) for t in (a, b))
        problem = mg.GroupedGemmProblem(x, y, sizes=cupy.asarray(how["sizes"].cpu().numpy()))
        out = mg.solve(problem)
        assert mg.verify(problem, out).ok
    took = measured(problem)
    assert len(took) > 1
    assert all(1.0 < us < 1000.0 for us in took.values())


def test_threads_measure_in_turn_and_all_are_right(monkeypatch: pytest.MonkeyPatch) -> None:
    trials, right = counted(monkeypatch), list[bool]()

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            a, b, how = operands(rows=400 if seed % 2 else 900)
            problem = mg.GroupedGemmProblem(a, b, **how)
            right.append(mg.verify(problem, mg.solve(problem)).ok)

    on_new_threads(*(partial(work, seed) for seed in range(4)))
    assert right == [True] * 4
    assert len(trials) == 2


def test_a_capture_in_another_thread_is_not_disturbed(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = counted(monkeypatch)
    a, b, how = operands(n=352)
    problem = mg.GroupedGemmProblem(a, b, **how)
    for name in ("cupy", "triton", "cublas", "numba"):
        mg.plan(problem, name)()
    x = torch.ones(1 << 16, device="cuda")
    torch.cuda.synchronize()
    begun, solved, right = threading.Event(), threading.Event(), list[bool]()

    def solve() -> None:
        begun.wait()
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            out = mg.solve(problem)
            solved.set()
            right.append(out is not None)

    thread = threading.Thread(target=solve)
    thread.start()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        x.add_(1)
        begun.set()
        assert solved.wait(60)
        x.add_(1)
    thread.join()
    graph.replay()
    torch.cuda.synchronize()
    assert (right, len(trials), float(x[0])) == ([True], 1, 3.0)


def test_a_capture_on_a_stream_of_cupy_is_one() -> None:
    cupy = pytest.importorskip("cupy")
    a, b, how = operands(n=360)
    x, y = (cupy.asarray(t.float()) for t in (a, b))
    problem = mg.GroupedGemmProblem(x, y, sizes=cupy.asarray(how["sizes"].cpu().numpy()))
    for name in ("cupy", "triton", "numba"):
        mg.solve(problem, name)
    stream = cupy.cuda.Stream(non_blocking=True)
    torch.cuda.synchronize()
    plan = mg.plan(problem, "cupy")
    with stream:
        stream.begin_capture()
        mg.solve(problem)
        plan()
        stream.end_capture().launch(stream)
    stream.synchronize()
    assert mg.verify(problem, plan()).ok
    assert not measured(problem)


def test_nothing_waits_where_torch_is_told_to_complain_of_that(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = counted(monkeypatch)
    a, b, how = operands(n=376)
    problem = mg.GroupedGemmProblem(a, b, **how)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = mg.solve(problem)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert mg.verify(problem, out).ok
    assert trials == []


def test_a_dry_run_on_no_tokens_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = counted(monkeypatch)
    a, b, how = operands(n=368)
    mg.solve(mg.GroupedGemmProblem(a, b, sizes=torch.zeros_like(how["sizes"])))
    assert trials == []


def test_where_the_gpu_is_full_the_static_order_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, how = operands(n=344)
    problem = mg.GroupedGemmProblem(a, b, **how)
    monkeypatch.setattr(trial, "measure", None)
    torch.cuda.empty_cache()
    ballast, size = list[torch.Tensor](), 1 << 36
    while timing.free_bytes(a.device) > 224 << 20:  # torch may have kept pieces, where a capture failed before
        try:
            ballast.append(torch.empty(size, dtype=torch.int8, device="cuda"))
        except torch.OutOfMemoryError:
            size //= 2
    try:
        assert mg.verify(problem, mg.solve(problem)).ok
    finally:
        del ballast
        torch.cuda.empty_cache()
    assert not measured(problem)


@pytest.mark.parametrize(("rows", "n", "k"), [(488, 328, 264), (16384, 4096, 4096)])
def test_a_first_meeting_costs_at_most_60_ms_besides_compiling(rows: int, n: int, k: int) -> None:
    """A short product, and one of some 800 us, which is ranked under load."""
    a, b = (torch.randn(*s, dtype=torch.bfloat16, device="cuda") / 8 for s in ((rows, k), (8, k, n)))
    sizes = torch.tensor([rows // 8] * 8, device="cuda")
    problem = mg.GroupedGemmProblem(a, b, sizes=sizes)
    for name in ("cupy", "triton", "cublas"):
        mg.plan(problem, name)()
    timing.other_code(0)
    torch.cuda.synchronize()
    began = time.perf_counter()
    choose.choose(problem)
    spent = time.perf_counter() - began
    assert len(measured(problem)) == 2
    assert spent < 0.06 * 1.5  # half as much again: other programs may use this machine
