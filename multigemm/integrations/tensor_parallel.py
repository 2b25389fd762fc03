"""The two ends of a tensor-parallel region: each is the other's gradient.

Inside, ranks hold slices of the weights and form partial sums of one result. What enters is the same
on all ranks, so its gradients are summed; what leaves is summed, so its gradient is the same on all.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch import Tensor


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _sum(grad, ctx.group), None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


class _Share(torch.autograd.Function):
    """A bias that every rank adds to its partial sum: a share of it, but the gradient of the whole."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int) -> Tensor:
        return x / ranks

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    total: Tensor = collectives.wait_tensor(collectives.all_reduce(x.contiguous(), "sum", group))  # type: ignore[no-untyped-call]
    return total


def enter(x: Tensor, group: Any) -> Tensor:
    """Into the region: `x` is the same on all ranks."""
    return _Enter.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def leave(x: Tensor, group: Any) -> Tensor:
    """Out of the region: the sum of all ranks' parts."""
    return _Leave.apply(x, group)  # type: ignore[no-any-return, no-untyped-call]


def share(bias: Tensor, ranks: int) -> Tensor:
    """This rank's share of a bias of the summed result."""
    return _Share.apply(bias, ranks)  # type: ignore[no-any-return, no-untyped-call]
