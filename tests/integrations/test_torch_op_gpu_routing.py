"""The routing, the sort and the gates of layers on a GPU: what torch's own functions give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.autograd import forward_ad

from multigemm.integrations.layer_ops import geglu, sort_by_expert, swiglu, weighted_sum
from multigemm.integrations.routing import combine, dispatch, route

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("count", [20, 3000])
def test_opcheck_of_the_counting_sort(count: int) -> None:
    pairs = torch.randint(-1, 6, (count,), device="cuda")
    torch.library.opcheck(torch.ops.multigemm.sort_by_expert.default, (pairs, 5))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_routing_kernels_are_the_plain_routing(dtype: torch.dtype) -> None:
    index = torch.topk(torch.randn(50, 9), 3)[1]
    x, weights = torch.randn(50, 2100, dtype=dtype), torch.rand(50, 3)
    results = []
    for device in ("cpu", "cuda"):
        routing = route(index.to(device), 8)
        leaves = [t.detach().to(device).requires_grad_() for t in (x, weights)]
        out = combine(dispatch(leaves[0], routing) * 2, leaves[1], routing)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaves)])
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (100, 8), (1000, 128), (4097, 7), (65536, 128), (300000, 1023)])
def test_the_counting_sort_is_a_stable_sort(pairs: int, experts: int) -> None:
    for low, high in ((0, experts), (-1, experts + 2)):
        numbers = torch.randint(low, high, (pairs,), generator=torch.Generator().manual_seed(pairs))
        want = sort_by_expert(numbers, experts)
        got = sort_by_expert(numbers.cuda(), experts)
        for g, w in zip(got, want, strict=True):
            assert torch.equal(g.cpu(), w)


@pytest.mark.parametrize("gate", [swiglu, geglu])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_gate_kernels_are_the_plain_gates(dtype: torch.dtype, gate: Any) -> None:
    x = (torch.randn(37, 2 * 1100) * 3).to(dtype)
    results = []
    for device in ("cpu", "cuda"):
        leaf = x.detach().to(device).requires_grad_()
        out = gate(leaf)
        results.append([out, *torch.autograd.grad(out.float().square().sum(), leaf)])
    tolerance = 2e-2 if dtype is torch.bfloat16 else 1e-4
    for want, got in zip(*results, strict=True):
        torch.testing.assert_close(got.cpu(), want, rtol=tolerance, atol=tolerance)


def test_gates_and_sums_carry_tangents() -> None:
    x, index, weights = torch.randn(6, 8), torch.randperm(6), torch.rand(3, 2)
    found = []
    for device in ("cpu", "cuda"):
        there = [t.to(device) for t in (x, index, weights)]
        with forward_ad.dual_level():
            dual: Any = forward_ad.make_dual(there[0], torch.ones_like(there[0]))  # type: ignore[no-untyped-call]
            out = weighted_sum(swiglu(dual), there[1], there[2], 2)
            found.append(forward_ad.unpack_dual(out).tangent.cpu())  # type: ignore[no-untyped-call]
    torch.testing.assert_close(found[1], found[0])
