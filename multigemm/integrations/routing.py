"""Tokens to experts and back: a sort, a gather, a weighted sum. No atomics, no synchronisation.

Each token goes to k experts, which makes S = tokens * k pairs. A stable sort by expert puts the pairs of one expert
next to each other; the inverse permutation returns the results. Both directions, and their gradients, are gathers, so
the same call gives the same bits. Expert numbers outside of 0..experts-1 mean "not on this rank": those pairs come
after the last group, where a grouped GEMM reads nothing and writes zeros.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.integrations.layer_ops import sort_by_expert, weighted_sum

Compute = Callable[[Tensor, Tensor], Tensor]
"""(rows [S, H] sorted by expert, ends [experts]) -> rows [S, H']."""


def through_experts(x: Tensor, index: Tensor, weights: Tensor, experts: int, compute: Compute) -> Tensor:
    """Runs a layer in steps: the weighted sum of the rows that `compute` makes for each token.

    x [tokens, H], index and weights [tokens, k] -> [tokens, H'].
    """
    check_routing(x, index, weights)
    routing = route(index, experts)
    return combine(compute(dispatch(x, routing), routing.ends), weights, routing)


def check_routing(x: Tensor, index: Tensor, weights: Tensor) -> None:
    """Refuses an index or weights that are not [tokens, k] for tokens x [tokens, H]."""
    if x.dim() != 2 or index.dim() != 2 or index.shape != weights.shape or index.shape[0] != x.shape[0]:
        raise InvalidProblem(
            f"x {tuple(x.shape)}, index {tuple(index.shape)}, weights {tuple(weights.shape)}: index and weights must "
            "be [tokens, k] for x [tokens, H]"
        )
    if index.dtype is torch.bool or index.dtype.is_floating_point or index.dtype.is_complex:
        raise InvalidProblem(f"top_k_index has dtype {index.dtype}; expert numbers are integers: call .long()")


@dataclass(frozen=True, slots=True)
class Routing:
    """`order` [S] lists the pairs by expert, `inverse` undoes it, `ends` [experts] cuts the sorted pairs."""

    order: Tensor
    inverse: Tensor
    ends: Tensor
    top_k: int


def route(top_k_index: Tensor, experts: int) -> Routing:
    """The routing of `top_k_index` [tokens, k]."""
    order, inverse, ends = sort_by_expert(top_k_index.reshape(-1), experts)
    return Routing(order, inverse, ends, top_k_index.shape[-1])


class _Dispatch(torch.autograd.Function):
    """Autograd function: row order[s] // k of x for every pair s. The gradient of a token is the sum over its k
    pairs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.top_k = top_k
        return x.index_select(0, order if top_k == 1 else order // top_k)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return weighted_sum(grad, ctx.saved_tensors[0], None, ctx.top_k), None, None, None


def dispatch(x: Tensor, routing: Routing) -> Tensor:
    """[tokens, H] -> [S, H], sorted by expert."""
    if not (x.requires_grad and torch.is_grad_enabled()):
        return x.index_select(0, routing.order // routing.top_k)
    rows: Tensor = _Dispatch.apply(x, routing.order, routing.inverse, routing.top_k)  # type: ignore[no-untyped-call]
    return rows


def combine(y: Tensor, weights: Tensor, routing: Routing) -> Tensor:
    """[S, H] sorted by expert, and weights [tokens, k] -> the weighted sum of each token [tokens, H]."""
    return weighted_sum(y, routing.inverse, weights, routing.top_k)


def permute(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """The rows of x in another order; `inverse` is the inverse permutation."""
    rows: Tensor = _Dispatch.apply(x, order, inverse, 1)  # type: ignore[no-untyped-call]
    return rows
