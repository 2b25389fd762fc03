"""Launches that eager calls repeat: right at reused addresses, without keeping memory alive, within bounds."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.integrations import bound_calls, grouped_gemm, op_call, op_route


@pytest.fixture(autouse=True)
def keep_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same way as on a GPU, with the CPU's memory."""
    monkeypatch.setattr(op_call, "KEEPING", ("cpu", "cuda"))
    monkeypatch.setattr(op_call, "current_device", lambda: None)  # a CUDA build of torch would look for a driver
    op_call.forget()
    yield
    op_call.forget()


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


def test_addresses_that_come_back_are_not_bound_again(monkeypatch: pytest.MonkeyPatch) -> None:
    bound: list[Any] = []
    original = op_route.bind

    def counted(*args: Any) -> Any:
        bound.append(args)
        return original(*args)

    monkeypatch.setattr(op_route, "bind", counted)
    a, b, ends = problem()
    buffers = [torch.empty(9, 5) for _ in range(2)]
    calls = iter(buffers * 10)
    grouped_gemm(a, b, ends=ends)  # the whole way, the first time
    monkeypatch.setattr(op_call, "_empty", lambda *_, **__: next(calls))
    before = len(bound)
    for _ in range(10):
        grouped_gemm(a, b, ends=ends)
    assert len(bound) - before == 4  # the first time, and to keep it
    op_call.forget()
    want = mg.grouped_gemm(a, b, ends=ends)
    assert torch.equal(buffers[0], want)
    assert torch.equal(buffers[1], want)


def test_strided_and_broadcast_operands_are_borrowed_as_they_are() -> None:
    for x in (torch.randn(6, 8)[::2, 1::3], torch.randn(3, 1).expand(3, 4), torch.randn(4, 3).T, torch.randn(2, 3, 4)):
        y = bound_calls.borrow(x)
        assert y is not None
        assert (y.data_ptr(), y.shape, y.stride(), y.dtype) == (x.data_ptr(), x.shape, x.stride(), x.dtype)
        assert torch.equal(x, y)
    assert bound_calls.borrow(None) is None


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


def test_what_is_kept_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Route:
        device = None

    def keep(operands: Any, result: int, workspace: int) -> None:
        sizes = iter([0, workspace])
        monkeypatch.setattr(bound_calls, "owned", lambda _: next(sizes))
        assert kept.keep(operands, Route(), result, lambda: launch) is launch

    def launch() -> None:
        pass

    monkeypatch.setattr(bound_calls, "KEPT", 500)
    kept = bound_calls.Launches()
    for i in range(3 * bound_calls.KEPT):
        keep(i % 700, i, 0)
        assert sum(len(made) for _, made in kept.kept.values()) <= bound_calls.KEPT
    kept.clear()
    for i in range(100):
        keep(i, 0, bound_calls.WORKSPACE // 20)
        assert kept._bytes <= bound_calls.WORKSPACE
    keep("large", 0, bound_calls.WORKSPACE)
    assert "large" not in kept.kept
    for i in range(9 * bound_calls.KEPT):
        assert not kept.met("somewhere", i)
        assert kept.met("somewhere", i)
    assert len(kept._met) <= 4 * bound_calls.KEPT
