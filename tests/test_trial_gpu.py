"""On a GPU: auto measures once what is open, and leaves everything but its own memory as it was."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import contest, dispatch, settings, trial, tuning
from multigemm.cache import DiskCache

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, and torch sees none here"),
]
MACHINES_CACHE = os.environ.get("MULTIGEMM_CACHE_DIR", "")


@pytest.fixture(autouse=True)
def everything_is_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every backend is in question, whatever the forecast says; warnings are errors."""
    monkeypatch.setenv("MULTIGEMM_MEASURE", "1")
    monkeypatch.setenv("MULTIGEMM_BACKEND", "")
    if MACHINES_CACHE:
        monkeypatch.setenv("MULTIGEMM_CACHE_DIR", MACHINES_CACHE)
    settings.settings.cache_clear()
    monkeypatch.setattr(contest, "SURE", 1e9)
    own = tuning.TuningTable(DiskCache("tuning", tmp_path))
    monkeypatch.setattr(tuning, "table", lambda: own)
    dispatch._choices.clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="multigemm: auto could not")
        yield
    dispatch._choices.clear()
    settings.settings.cache_clear()


def operands(rows: int = 488, n: int = 328, grad: bool = False) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    a, b = (torch.randn(*s, dtype=torch.bfloat16, device="cuda") / 8 for s in ((rows, 264), (5, 264, n)))
    sizes = torch.tensor([rows // 8] * 4 + [rows - 4 * (rows // 8)], device="cuda")
    return a.requires_grad_(grad), b.requires_grad_(grad), {"sizes": sizes}


def measured(problem: mg.GroupedGemmProblem) -> dict[str, float]:
    return {c.name: c.us for c in mg.explain(problem).candidates if c.us is not None}


def test_an_open_class_is_measured_and_a_second_process_finds_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, how = operands()
    problem = mg.GroupedGemmProblem(a, b, **how)
    assert mg.verify(problem, mg.solve(problem)).ok
    took = measured(problem)
    assert {"cupy", "triton", "numba"} <= set(took)
    assert mg.explain(problem).chosen == min(took, key=lambda name: took[name])
    assert all(1.0 < us < 1000.0 for us in took.values())
    again = tuning.TuningTable(DiskCache("tuning", tmp_path))
    monkeypatch.setattr(tuning, "table", lambda: again)
    monkeypatch.setattr(trial, "measure", None)  # which nobody can call
    dispatch._choices.clear()
    assert measured(problem) == took


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


def test_gradients_flow_and_are_measured_too() -> None:
    a, b, how = operands(grad=True)
    out = mg.grouped_gemm(a, b, **how)
    out.float().square().sum().backward()
    assert a.grad is not None
    assert b.grad is not None
    assert a.grad.isfinite().all()
    assert b.grad.abs().sum() > 0


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


def test_threads_measure_in_turn_and_all_are_right() -> None:
    wrong: list[int] = []

    def work(seed: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]
            a, b, how = operands(rows=400 + 64 * (seed % 2))
            problem = mg.GroupedGemmProblem(a, b, **how)
            if not mg.verify(problem, mg.solve(problem)).ok:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_where_the_gpu_is_full_the_forecast_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, how = operands(n=344)
    problem = mg.GroupedGemmProblem(a, b, **how)
    monkeypatch.setattr(trial, "measure", None)
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info()
    ballast = torch.empty(free - (200 << 20), dtype=torch.int8, device="cuda")
    try:
        assert mg.verify(problem, mg.solve(problem)).ok
    finally:
        del ballast
        torch.cuda.empty_cache()
    assert not measured(problem)
