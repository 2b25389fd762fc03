"""Every backend on threads that never touched CUDA, on every GPU of the host: loading, maps, occupancy, launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.select import choose
from tests.support.concurrency import on_new_threads

pytestmark = pytest.mark.gpu
BACKENDS = ("cupy", "triton", "numba", "cublas")
DEVICES = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()


def operands(device: int, form: str, dtype: torch.dtype, n: int) -> tuple[Tensor, Tensor, dict[str, Any]]:
    """Small whole numbers, so that results are exact."""
    where = torch.device("cuda", device)

    def new(*shape: int) -> Tensor:
        return torch.randint(-2, 3, shape, device=where).to(dtype)

    ends = torch.tensor([30, 30, 64, 96], dtype=torch.int32, device=where)
    if form == "list":
        return [new(24, 64), new(40, 64)], [new(64, n), new(64, n)], {}  # type: ignore[return-value]
    if form == "jagged_k":
        return new(64, 96), new(96, n), {"ends": ends, "jagged": "k"}
    return new(96, 64), new(4, 64, n), {"ends": ends}


def right(given: tuple[Any, Any, dict[str, Any]], out: Any) -> bool:
    a, b, cut = given
    return bool(mg.verify(mg.GroupedGemmProblem(a, b, **cut), out).ok)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("form", ["jagged_m", "jagged_k", "list"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_first_call_on_new_threads(backend: str, dtype: torch.dtype, form: str, device: int) -> None:
    given = operands(device, form, dtype, 128 + 8 * BACKENDS.index(backend))
    torch.cuda.synchronize(device)
    choose.forget()
    found: list[Any] = []

    def work() -> None:
        a, b, cut = given
        found.append(mg.plan(mg.GroupedGemmProblem(a, b, **cut), backend=backend)())
        found.extend(mg.grouped_gemm(a, b, **cut, backend=backend) for _ in range(4))
        torch.cuda.synchronize(device)

    on_new_threads(work)
    assert all(right(given, out) for out in found)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_thread_keeps_the_device_that_it_chose(backend: str, device: int) -> None:
    given = operands(device, "jagged_m", torch.bfloat16, 64)
    torch.cuda.synchronize(device)

    def work() -> None:
        before = torch.cuda.current_device()
        a, b, cut = given
        for _ in range(4):
            out = mg.grouped_gemm(a, b, **cut, backend=backend)
        assert torch.cuda.current_device() == before
        torch.cuda.synchronize(device)
        assert right(given, out)

    on_new_threads(work)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_whose_first_driver_call_is_ours(backend: str, device: int) -> None:
    a, b, cut = operands(device, "jagged_m", torch.bfloat16, 72)
    a, b = a.requires_grad_(), b.requires_grad_()
    out = mg.grouped_gemm(a, b, **cut, backend=backend)
    grad = torch.ones_like(out)
    torch.ops.multigemm.grouped_gemm(a, b, **cut, backend=backend, grad_backend=backend).backward(grad)
    assert a.grad is not None and b.grad is not None
    ones = torch.ones(96, 72, dtype=torch.float64, device=a.device)
    for g, (start, end) in enumerate(((0, 30), (30, 30), (30, 64), (64, 96))):
        x, w = a.detach().double(), b.detach().double()
        assert torch.equal(b.grad[g].double(), (x[start:end].T @ ones[start:end]).to(torch.bfloat16).double())
        assert torch.equal(a.grad[start:end].double(), (ones[start:end] @ w[g].T).to(torch.bfloat16).double())
