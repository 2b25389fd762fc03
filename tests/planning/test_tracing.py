"""What `grouped_gemm` becomes inside torch.compile, called directly."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import tracing


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
