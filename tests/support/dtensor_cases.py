"""The operator on DTensors, on every rank of a gloo group: placements, results and gradients."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import multigemm.integrations.dtensor  # noqa: F401  (registers the strategies)
from multigemm.integrations import grouped_gemm

G, M, K, N = 4, 8, 12, 16
WHOLE = Replicate()
PARTIAL = Partial()


def new(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def cases() -> list[tuple[str, Tensor, Tensor, Any, Any, Any, dict[str, Any]]]:
    """(name, a, b, their placements, the result's, keywords with placements)."""
    a, b, row, ends = new(G, M, K), new(G, K, N), new(M, K), torch.tensor([1, 1, 4, 7])
    cut = {"ends": (ends, WHOLE)}
    bias = {"bias": (new(G, N), Shard(1))}
    rows = {"valid_rows": (torch.tensor([1, 0, M, 3]), Shard(0))}
    tall, wide = new(K, M), new(M, N)
    return [
        ("experts", a, b, Shard(0), Shard(0), Shard(0), {}),
        ("experts, bias", a, b, Shard(0), Shard(0), Shard(0), {"bias": (new(G, N), Shard(0))}),
        ("masked experts", a, b, Shard(0), Shard(0), Shard(0), rows),
        ("columns", a, b, WHOLE, Shard(2), Shard(2), {}),
        ("rows", a, b, Shard(1), WHOLE, Shard(1), {}),
        ("contraction", a, b, Shard(2), Shard(1), PARTIAL, {}),
        ("contraction, activation", a, b, Shard(2), Shard(1), WHOLE, {"activation": "silu"}),
        ("jagged m, columns", row, b, WHOLE, Shard(2), Shard(1), {**cut, **bias, "activation": "gelu"}),
        ("jagged m, contraction", row, b, Shard(1), Shard(1), PARTIAL, cut),
        ("jagged m, tokens", row, b, Shard(0), WHOLE, WHOLE, cut),
        ("jagged m, shared", row, b[0], WHOLE, Shard(1), Shard(1), cut),
        ("jagged k, columns", tall, wide, WHOLE, Shard(1), Shard(2), {**cut, "jagged": "k"}),
        ("jagged k, rows", tall, wide, Shard(0), WHOLE, Shard(1), {**cut, "jagged": "k"}),
        ("jagged n, rows", new(G, N, M), new(M, M), Shard(1), WHOLE, Shard(0), {**cut, "jagged": "n"}),
    ]


def check(mesh: Any, name: str, a: Tensor, b: Tensor, pa: Any, pb: Any, expect: Any, keywords: dict[str, Any]) -> None:
    plain = {k: v[0] if isinstance(v, tuple) else v for k, v in keywords.items()}
    spread = {k: distribute_tensor(v[0], mesh, [v[1]]) if isinstance(v, tuple) else v for k, v in keywords.items()}
    x, y = (distribute_tensor(t, mesh, [p]).requires_grad_() for t, p in ((a, pa), (b, pb)))
    got: Any = grouped_gemm(x, y, **spread)
    assert isinstance(got, DTensor)
    assert got.placements == (expect,), (name, got.placements)
    inputs = a.clone().requires_grad_(), b.clone().requires_grad_()
    want = grouped_gemm(*inputs, **plain)
    torch.testing.assert_close(got.full_tensor(), want, msg=f"{name}: result")
    whole: Any = got.redistribute(mesh, [WHOLE])
    grads: Any = torch.autograd.grad(whole.square().sum(), (x, y))
    for g, w in zip(grads, torch.autograd.grad(want.square().sum(), inputs), strict=True):
        torch.testing.assert_close(g.full_tensor(), w, msg=f"{name}: gradient")


def main() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for case in cases():
        check(mesh, *case)
