"""An all-to-all in two halves, so that something else can be computed while rows are under way.

`depart` starts an exchange and returns memory that is still being filled; `arrive` waits for it. Their
gradients are each other's mirror image: the gradient of `arrive` starts the way back, that of `depart`
waits for it. So whatever lies between the two in the forward pass also lies between them in the
backward pass, where autograd runs the youngest call first.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

_collectives: Any = torch.ops._c10d_functional


def begin(rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> Tensor:
    """Starts to send `sent[r]` rows to each rank r; `received[r]` rows of each will be in the result."""
    under_way: Tensor = _collectives.all_to_all_single(rows.contiguous(), received, sent, group.group_name)
    return under_way


def finish(under_way: Tensor) -> Tensor:
    """The rows of `begin`, there for whatever the current stream does next."""
    there: Tensor = _collectives.wait_tensor(under_way)
    return there


class _Depart(torch.autograd.Function):
    """Rows -> a ticket without data, of the rows' shape because its gradients are theirs."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return rows.new_empty(()).expand(rows.shape)

    @staticmethod
    def backward(ctx: Any, under_way: Tensor) -> Any:
        return finish(under_way)


class _Arrive(torch.autograd.Function):
    """A ticket, and the rows that are under way for it -> the rows."""

    @staticmethod
    def forward(ctx: Any, ticket: Tensor, under_way: Tensor, *way: Any) -> Tensor:
        ctx.way = way
        return finish(under_way).view_as(under_way)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        received, sent, group = ctx.way
        back = begin(grad, sent, received, group)
        if torch.is_anomaly_enabled():
            finish(back)  # anomaly detection reads every gradient as soon as it is returned
        return back, None, None, None, None


class Exchange:
    """Rows on their way; `arrive()` gives them, once."""

    def __init__(self, rows: Tensor, received: list[int], sent: list[int], group: dist.ProcessGroup) -> None:
        self._way = received, sent, group
        self._ticket: Tensor = _Depart.apply(rows)  # type: ignore[no-untyped-call]
        self._under_way = begin(rows.detach(), *self._way)

    def arrive(self) -> Tensor:
        """The rows that came: from here on they may be read."""
        rows: Tensor = _Arrive.apply(self._ticket, self._under_way, *self._way)  # type: ignore[no-untyped-call]
        return rows
