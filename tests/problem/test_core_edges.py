"""Parts of the core that other tests reach only through a compiler or a GPU, called directly."""

from __future__ import annotations

import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import tracing
from multigemm.planning import binding as bound
from multigemm.problem.arrays import _RawStream, cupy_stream
from multigemm.problem.problem import Keywords
from multigemm.problem.spec import ACTIVATIONS, PRECISIONS


@pytest.mark.parametrize("offsets", [[0, 2, 5], torch.tensor([0, 2, 5])])
def test_a_traced_call_is_the_operator(offsets: Any) -> None:
    a, b = torch.randn(5, 4), torch.randn(2, 4, 3)
    want = mg.grouped_gemm(a, b, offsets=[0, 2, 5])
    torch.testing.assert_close(tracing.grouped_gemm(a, b, offsets=offsets), want)
    torch.testing.assert_close(tracing.grouped_gemm(a, b, offsets=offsets, backend=["cpu"]), want)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert tracing.grouped_gemm(a, b, offsets=offsets).dtype is torch.float32
    assert tracing.grouped_gemm(a, b, offsets=offsets, out_dtype="bfloat16").dtype is torch.bfloat16
    torch.testing.assert_close(tracing.grouped_gemm(a, b, sizes=range(2, 4)), want)
    assert tracing.grouped_gemm(a, b[:0], sizes=[]).shape == (5, 3)


@pytest.mark.parametrize("keywords", [{"out": torch.ones(5, 3)}, {"config": {"kernel": "blas"}}, {"check": "full"}])
def test_what_a_graph_cannot_hold_is_refused(keywords: dict[str, Any]) -> None:
    with pytest.raises(mg.InvalidProblem, match="cannot be compiled"):
        tracing.grouped_gemm(torch.ones(5, 4), torch.ones(4, 3), **keywords)
    with pytest.raises(mg.InvalidProblem, match="cannot be compiled"):
        tracing.grouped_gemm([torch.ones(5, 4)], [torch.ones(4, 3)])


def test_one_vocabulary() -> None:
    """What `grouped_gemm` hands on, as its signature says it, is what a problem takes and documents."""
    taken = inspect.signature(mg.GroupedGemmProblem).parameters
    keywords = [name for name, p in taken.items() if p.kind is p.KEYWORD_ONLY]
    assert sorted(Keywords.__annotations__) == sorted(keywords)
    told = str(mg.GroupedGemmProblem.__doc__)
    assert [name for name in keywords if name not in told] == []
    assert [word for word in (*ACTIVATIONS, *PRECISIONS) if f'"{word}"' not in told] == []


def test_the_stream_of_cupy_is_asked_at_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    stream = SimpleNamespace(ptr=7)

    class Using:
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def __enter__(self) -> None:
            entered.append(self.raw)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    fake = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "stream", Using)
    monkeypatch.setattr(bound, "_external", lambda raw, device: raw)
    launches: list[str] = []
    launch = bound._OnCallerStream(lambda: launches.append("go"), torch.device("cpu"))
    launch()
    assert (launches, entered) == (["go"], [])
    stream.ptr = 9
    assert cupy_stream(torch.device("cpu")) == 9
    launch()
    assert (launches, entered) == (["go", "go"], [9, None])


def test_a_raw_stream_speaks_the_protocol() -> None:
    assert _RawStream(11).__cuda_stream__() == (0, 11)
