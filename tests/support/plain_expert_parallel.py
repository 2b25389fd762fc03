"""Expert parallelism as one would write it by hand: a blocking all-to-all, and a loop over experts.

Shares no code with the product; the tests compare the two on one mesh.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor


class Swap(torch.autograd.Function):
    """An all-to-all that blocks; its gradient goes the other way."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, sent: list[int], received: list[int], group: Any) -> Tensor:
        ctx.way = received, sent, group
        came = rows.new_empty(sum(received), *rows.shape[1:])
        dist.all_to_all_single(came, rows, received, sent, group=group)
        return came

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Swap.apply(grad.contiguous(), *ctx.way), None, None, None  # type: ignore[no-untyped-call]


def exchange(rows: Tensor, sent: list[int], group: Any) -> tuple[Tensor, list[int]]:
    """`sent[r]` rows to each rank r; the rows that came, and how many of each rank."""
    counts = torch.tensor(sent)
    arriving = torch.empty_like(counts)
    dist.all_to_all_single(arriving, counts, group=group)
    received = arriving.tolist()
    return Swap.apply(rows, sent, received, group), received  # type: ignore[no-untyped-call]


def layer(x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor, group: Any) -> Tensor:
    """This rank's tokens through all experts; up [E here, 2I, H] (gate first) and down [E here, H, I] are its own."""
    ranks, here = group.size(), len(up)
    top_k = index.shape[1]
    experts = index.reshape(-1)
    order = torch.argsort(experts, stable=True)
    sent = torch.bincount(experts // here, minlength=ranks).tolist()
    rows, _ = exchange(x[order // top_k], sent, group)
    names, received = exchange(experts[order], sent, group)
    results = torch.zeros_like(rows)
    for expert in range(here):
        mine = (names - group.rank() * here == expert).nonzero().squeeze(1)
        gate, value = (rows[mine] @ up[expert].T).chunk(2, dim=1)
        results = results.index_copy(0, mine, (F.silu(gate) * value) @ down[expert].T)
    back, _ = exchange(results, received, group)
    home = torch.zeros_like(back).index_copy(0, order, back)
    return (home.view(len(x), top_k, x.shape[1]) * weights.unsqueeze(2)).sum(1)
