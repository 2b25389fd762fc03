"""`torch.ops.multigemm.weighted_sum`: the way home from the experts, as an operator that graphs can hold.

`out[t] = sum over j of weights[t, j] * rows[index[t * k + j]]`, summed in the accumulator's precision
and rounded once. `index` is a permutation of the rows, so nothing is added up by atomics in either
direction. On a GPU with Triton one kernel does it; elsewhere a gather and a product.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from multigemm.integrations import eager

_library: Any = torch.library.Library("multigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_tags = (torch.Tag.pt2_compliant_tag,)
_library.define("weighted_sum(Tensor rows, Tensor index, Tensor? weights, int top_k) -> Tensor", tags=_tags)
_library.define(
    "weighted_sum_backward(Tensor grad, Tensor rows, Tensor index, Tensor weights) -> (Tensor, Tensor)", tags=_tags
)


def weighted_sum(rows: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """rows [S, H], index [S], weights [S // k, k] (None: all one) -> [S // k, H]."""
    return torch.ops.multigemm.weighted_sum(rows, index, weights, top_k)  # type: ignore[no-any-return]


@cache
def triton_is_here() -> bool:
    """Whether Triton is installed."""
    return importlib.util.find_spec("triton") is not None


@cache
def _kernels() -> Any:
    """The Triton kernels, or None where Triton is not installed."""
    if not triton_is_here():
        return None
    from multigemm.integrations import routing_kernels

    return routing_kernels


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype is torch.float64 else torch.float32


def _gathered(rows: Tensor, index: Tensor, top_k: int) -> Tensor:
    pairs = rows.index_select(0, index).to(_wide(rows.dtype))
    return pairs.view(index.shape[0] // top_k, top_k, rows.shape[1])


def _sum(rows: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    pairs = _gathered(rows, index, top_k)
    if weights is not None:
        pairs = pairs * weights.to(pairs.dtype).unsqueeze(2)
    return pairs.sum(1).to(rows.dtype)


def _sum_cuda(rows: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    kernels: Any = _kernels()
    return (kernels.weighted_sum if kernels else _sum)(rows, index, weights, top_k)


def _sum_backward(grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    pairs = _gathered(rows, index, weights.shape[1])
    wide = grad.to(pairs.dtype).unsqueeze(1)
    scaled = (wide * weights.to(pairs.dtype).unsqueeze(2)).to(rows.dtype)
    back = torch.empty_like(index)
    back[index] = torch.arange(index.shape[0], device=index.device, dtype=index.dtype)
    drows = scaled.view(index.shape[0], rows.shape[1]).index_select(0, back)
    return drows, (wide * pairs).sum(2).to(weights.dtype)


def _sum_backward_cuda(grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    kernels: Any = _kernels()
    chosen = kernels.weighted_sum_backward if kernels else _sum_backward
    return chosen(grad, rows, index, weights)


def _like(rows: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    return rows.new_empty((index.shape[0] // top_k, rows.shape[1]))


def _like_backward(grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, index, weights, ctx.top_k = inputs
    ctx.save_for_backward(None if weights is None else rows, index, weights)
    ctx.wanted = rows.dtype


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, index, weights = ctx.saved_tensors
    if weights is None:
        back = torch.empty_like(index)
        back[index] = torch.arange(index.shape[0], device=index.device, dtype=index.dtype)
        return grad.index_select(0, back // ctx.top_k), None, None, None
    if torch.is_grad_enabled():  # second derivatives: in operations that have their own
        drows, dweights = _sum_backward(grad, rows, index, weights)
    else:
        drows, dweights = torch.ops.multigemm.weighted_sum_backward(grad, rows, index, weights)
    return drows, None, dweights, None


eager.register(_library, torch.ops.multigemm.weighted_sum.default, _sum, _sum_cuda, _backward, _keep)
_library.impl("weighted_sum_backward", _sum_backward, "CPU")
_library.impl("weighted_sum_backward", _sum_backward_cuda, "CUDA")
torch.library.register_fake("multigemm::weighted_sum", _like, lib=_library)
torch.library.register_fake("multigemm::weighted_sum_backward", _like_backward, lib=_library)
