"""The torch operator called again and again: right with new contents, without keeping memory alive."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.integrations import grouped_gemm
from multigemm.nn import GroupedLinear


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.randn(9, 4).to(dtype), torch.randn(3, 4, 5).to(dtype), torch.tensor([2, 2, 7])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
@pytest.mark.parametrize("kind", ["ends", "offsets"])
def test_repeated_calls_follow_new_contents(dtype: torch.dtype, kind: str) -> None:
    a, b, ends = problem(dtype)
    cut = ends if kind == "ends" else torch.cat([torch.zeros(1, dtype=torch.int64), ends])
    columns = b.transpose(1, 2).contiguous().transpose(1, 2)
    for step in range(20):
        a.copy_(torch.randn(9, 4) * 3)
        cut[-2:] = torch.tensor([2 + step % 4, 8])
        given: Any = {kind: cut.tolist()}
        out = grouped_gemm(a, columns if step % 3 == 2 else b, **{kind: cut})
        assert mg.verify(mg.GroupedGemmProblem(a, b, **given), out).ok
        del out


def test_no_memory_is_kept_alive() -> None:
    a, b, ends = problem()
    for _ in range(3):
        out = grouped_gemm(a, b, ends=ends)
    watched = [weakref.ref(x) for x in (a, b, out)]
    storages = [weakref.ref(x.untyped_storage()) for x in (a, b, out)]
    del a, b, out
    gc.collect()
    assert all(w() is None for w in watched)
    assert all(s() is None for s in storages)


def test_a_freed_operand_is_refused_by_a_warm_operator_and_a_warm_layer() -> None:
    a, b, ends = problem()
    layer = GroupedLinear(3, 4, 5, backend="cpu")
    with torch.no_grad():
        for _ in range(3):
            grouped_gemm(a, b, ends=ends, backend="cpu")
            layer(a, ends=ends)
        freed = a.clone()
        freed.untyped_storage().resize_(0)
        with pytest.raises(mg.InvalidProblem, match="memory was freed"):
            grouped_gemm(freed, b, ends=ends, backend="cpu")
        with pytest.raises(mg.InvalidProblem, match="memory was freed"):
            layer(freed, ends=ends)
    bias = torch.zeros(5)
    for _ in range(3):
        grouped_gemm(a, b, ends=ends, bias=bias, backend="cpu")
    bias.untyped_storage().resize_(0)
    with pytest.raises(mg.InvalidProblem, match="memory was freed"):
        grouped_gemm(a, b, ends=ends, bias=bias, backend="cpu")
