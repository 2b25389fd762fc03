"""The small operators of a mixture-of-experts layer, which graphs can hold: a sort, a weighted sum, a gate.

On a GPU with Triton each runs one or a few kernels (layer_kernels.py, gate_kernels.py, decode_kernels.py,
exchange_kernels.py); elsewhere it calls torch functions. Sums are formed in the accumulator's precision, in a fixed
order, and rounded once: the same call gives the same bits.
"""

from __future__ import annotations

import importlib
import importlib.util
import math
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from multigemm.torch_internals import register_differentiable

Sorted = tuple[Tensor, Tensor, Tensor]
NARROW = 1 << 15
_library: Any = torch.library.Library("multigemm", "FRAGMENT")  # type: ignore[no-untyped-call]
_tags = (torch.Tag.pt2_compliant_tag,)
for schema in (
    "sort_by_expert(Tensor pairs, int experts) -> (Tensor, Tensor, Tensor)",
    "weighted_sum(Tensor rows, Tensor index, Tensor? weights, int top_k) -> Tensor",
    "weighted_sum_backward(Tensor grad, Tensor rows, Tensor index, Tensor weights) -> (Tensor, Tensor)",
    "gated(Tensor x, bool gelu) -> Tensor",
    "gated_backward(Tensor grad, Tensor x, bool gelu) -> Tensor",
):
    _library.define(schema, tags=_tags)


def sort_by_expert(pairs: Tensor, experts: int) -> Sorted:
    """Sorts pairs [S] of expert numbers stably. Returns order [S], inverse [S], ends [experts].

    `order` lists the pairs by expert, `inverse` is the position of each pair, `ends` is where each expert's pairs end.
    Numbers outside of 0..experts-1 come last.
    """
    return torch.ops.multigemm.sort_by_expert(pairs, experts)  # type: ignore[no-any-return]


def weighted_sum(rows: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    """rows [S, H], index [S], weights [S // k, k] (None: all one) -> [S // k, H].

    `out[t] = sum over j of weights[t, j] * rows[index[t * k + j]]`; `index` is a permutation of the rows, so nothing is
    added up by atomics in either direction.
    """
    return torch.ops.multigemm.weighted_sum(rows, index, weights, top_k)  # type: ignore[no-any-return]


def swiglu(x: Tensor) -> Tensor:
    """silu(gate) * up for x [S, 2*I] = [gate | up] -> [S, I]."""
    return torch.ops.multigemm.gated(x, False)  # type: ignore[no-any-return]


def geglu(x: Tensor) -> Tensor:
    """gelu(gate) * up."""
    return torch.ops.multigemm.gated(x, True)  # type: ignore[no-any-return]


@cache  # finding a package takes as long as many launches
def _kernels(name: str) -> Any:
    """A module of Triton kernels beside this one, or None if Triton is not installed."""
    if importlib.util.find_spec("triton") is None:
        return None
    return importlib.import_module(f"multigemm.integrations.{name}")


triton_kernels: Callable[[], Any] = partial(_kernels, "layer_kernels")
gate_kernels: Callable[[], Any] = partial(_kernels, "gate_kernels")
exchange_kernels: Callable[[], Any] = partial(_kernels, "exchange_kernels")
decode_kernels: Callable[[], Any] = partial(_kernels, "decode_kernels")


def kernels_for(x: Tensor, kernels: Callable[[], Any] = triton_kernels) -> Any:
    """The module that `kernels` returns; None if x does not lie on a GPU, or Triton is not installed."""
    return kernels() if x.is_cuda else None


def _in_triton(name: str, plain: Callable[..., Any], kernels: Callable[[], Any] = triton_kernels) -> Callable[..., Any]:
    """An operator's kernel for GPUs: the Triton function of that name, or torch functions if Triton is not
    installed."""
    return lambda *args: getattr(kernels(), name, plain)(*args)


# --- the sort ---------------------------------------------------------------------------------------


def _sort(pairs: Tensor, experts: int) -> Sorted:
    known = torch.where((pairs >= 0) & (pairs < experts), pairs, experts)
    # two-byte keys sort several times faster than eight-byte ones
    by_expert, order = torch.sort(known.to(torch.int16 if experts < NARROW else torch.int64), stable=True)
    steps = torch.arange(order.shape[0], device=order.device)
    inverse = torch.empty_like(order).scatter_(0, order, steps)
    numbers = torch.arange(experts, device=pairs.device, dtype=by_expert.dtype)
    return order, inverse, torch.searchsorted(by_expert, numbers, right=True, out_int32=True)


def _sort_cuda(pairs: Tensor, experts: int) -> Sorted:
    kernels = triton_kernels()
    can = kernels is not None and kernels.can_sort(pairs.shape[0], experts)
    return (kernels.sort_by_expert if can else _sort)(pairs, experts)


def _sort_like(pairs: Tensor, experts: int) -> Sorted:
    order = pairs.new_empty(pairs.shape, dtype=torch.int64)
    return order, torch.empty_like(order), pairs.new_empty((experts,), dtype=torch.int32)


_library.impl("sort_by_expert", _sort, "CPU")
_library.impl("sort_by_expert", _sort_cuda, "CUDA")
torch.library.register_fake("multigemm::sort_by_expert", _sort_like, lib=_library)


class Pairs(NamedTuple):
    """Pairs of token and expert, sorted by expert: their tokens [S], the position of each pair [tokens, k], the ends of
    experts [E] and, if they were asked for, the numbers of the pairs [S], else None; all int32."""

    tokens: Tensor
    place: Tensor
    ends: Tensor
    order: Any  # Tensor | None; who reads it has asked for it


def sort_pairs(
    index: Tensor, experts: int, ordered: bool = True, up: Tensor | None = None, stacked: bool = False
) -> Pairs:
    """The pairs of index [tokens, k], with their numbers if `ordered`.

    `up`: the weights of the product behind the sort, `stacked` or not, which it may fetch ahead. No operator.
    """
    kernels = kernels_for(index)
    if kernels is not None and kernels.can_sort(index.numel(), experts):
        order = torch.empty(index.numel(), dtype=torch.int32, device=index.device) if ordered else None
        tokens, place, ends = kernels.sort_pairs(index, experts, order, up, stacked)
        return Pairs(tokens, place, ends, order)
    order, inverse, ends = sort_by_expert(index.reshape(-1), experts)
    tokens, place = tokens_of_pairs(order, index.shape[1]).int(), inverse.int().view(index.shape)
    return Pairs(tokens, place, ends, order.int() if ordered else None)


# --- the rows of pairs ------------------------------------------------------------------------------


COPIED_ROWS = 48
"""Rows per expert above which a layer copies tokens to their pairs before the first product, which else picks them on
its way: PICKED_ROWS of backends/cupy/choice.py."""


def copies_rows(x: Tensor, pairs: int, experts: int, invariant: bool, backend: str) -> bool:
    """Whether a layer copies tokens to their pairs before the first product.

    On a GPU it reads each token once, where a backend that copies picked rows reads it for each pair. Triton alone
    would pick them on its way. Products of batch-invariant layers must not change with the number of tokens.
    """
    copied = pairs > COPIED_ROWS * experts and not invariant and backend != "triton"
    return copied and kernels_for(x) is not None


def tokens_of_pairs(order: Tensor, top_k: int) -> Tensor:
    """Pairs `order` [S] -> [S]: the token of each pair."""
    return order // max(top_k, 1)


def rows_of_pairs(x: Tensor, place: Tensor, count: int) -> Tensor:
    """x [tokens, H], place [tokens, k] -> [count, H]: the row of each pair's token at the pair's place. Pairs with a
    place of `count` or more are left out. No operator."""
    kernels = kernels_for(x)
    if kernels is not None:
        found: Tensor = kernels.rows_of_pairs(x, place, count)
        return found
    at, pairs = place.long().clamp(max=count).view(-1), torch.arange(place.numel(), device=place.device)
    tokens = pairs.new_zeros(count + 1).index_copy_(0, at, tokens_of_pairs(pairs, place.shape[1]))
    return x.index_select(0, tokens[:count])


def sum_by_expert(
    rows: Tensor, ends: Tensor, dtype: torch.dtype, order: Tensor | None = None, weights: Tensor | None = None
) -> Tensor:
    """rows [S, n] sorted by expert -> [E, n]: the sum of each expert's rows, weighted by `weights` of pairs `order`.

    No operator.
    """
    kernels = kernels_for(rows)
    if kernels is not None:
        found: Tensor = kernels.sum_by_expert(rows, ends, dtype, order, weights)
        return found
    wide = rows.to(torch.promote_types(_wide(rows.dtype), dtype))
    if order is not None and weights is not None:
        wide = wide * weights.reshape(-1).index_select(0, order).to(wide.dtype).unsqueeze(1)
    offsets = F.pad(ends.long(), (1, 0))
    sums: Tensor = torch.segment_reduce(wide, "sum", offsets=offsets, axis=0, unsafe=True, initial=0)
    return sums.to(dtype)


# --- the weighted sum -------------------------------------------------------------------------------


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


def _inverse(index: Tensor) -> Tensor:
    """The inverse permutation of `index`."""
    back = torch.empty_like(index)
    back[index] = torch.arange(index.shape[0], device=index.device, dtype=index.dtype)
    return back


def _sum_backward(grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    pairs = _gathered(rows, index, weights.shape[1])
    wide = grad.to(pairs.dtype).unsqueeze(1)
    scaled = (wide * weights.to(pairs.dtype).unsqueeze(2)).to(rows.dtype)
    drows = scaled.view(index.shape[0], rows.shape[1]).index_select(0, _inverse(index))
    return drows, (wide * pairs).sum(2).to(weights.dtype)


def _sum_like(rows: Tensor, index: Tensor, weights: Tensor | None, top_k: int) -> Tensor:
    return rows.new_empty((index.shape[0] // top_k, rows.shape[1]))


def _sum_backward_like(grad: Tensor, rows: Tensor, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _keep_sum(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    rows, index, weights, ctx.top_k = inputs
    ctx.save_for_backward(None if weights is None else rows, index, weights)


def _backward_of_sum(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    rows, index, weights = ctx.saved_tensors
    if weights is None:
        return grad.index_select(0, _inverse(index) // ctx.top_k), None, None, None
    if torch.is_grad_enabled():  # second derivatives: in operations that have their own
        drows, dweights = _sum_backward(grad, rows, index, weights)
    else:
        drows, dweights = torch.ops.multigemm.weighted_sum_backward(grad, rows, index, weights)
    return drows, None, dweights, None


register_differentiable(
    _library,
    torch.ops.multigemm.weighted_sum.default,
    _sum,
    _in_triton("weighted_sum", _sum),
    _backward_of_sum,
    _keep_sum,
)
_library.impl("weighted_sum_backward", _sum_backward, "CPU")
_library.impl("weighted_sum_backward", _in_triton("weighted_sum_backward", _sum_backward), "CUDA")
torch.library.register_fake("multigemm::weighted_sum", _sum_like, lib=_library)
torch.library.register_fake("multigemm::weighted_sum_backward", _sum_backward_like, lib=_library)


def add_returned(own: Tensor, rows: Tensor, place: Tensor) -> Tensor:
    """Adds to own [tokens, n] the rows [m, n] that `place` names for each token (-1: none), and rounds once.

    place is [chunks, ranks, tokens of a chunk]; the last chunk may have more places than there are tokens. This is no
    operator: autograd does not see it.
    """
    kernels = kernels_for(own, exchange_kernels)
    if kernels is not None:
        found: Tensor = kernels.add_returned(own, rows, place)
        return found
    total = own.to(_wide(own.dtype))
    for at in place.transpose(0, 1).reshape(place.shape[1], -1)[:, : len(own)] if len(rows) else ():
        there = (at >= 0).unsqueeze(1)
        total = total + torch.where(there, rows.index_select(0, at.clamp(min=0)), 0).to(total.dtype)
    return total.to(own.dtype)


def copy_rows(sources: tuple[Tensor, Tensor], rows: Tensor | None, to: tuple[Tensor, Tensor]) -> None:
    """Copies the first `rows` rows of two matrices whose last stride is 1; all rows if that is None.

    This is no operator: autograd does not see it.
    """
    kernels = kernels_for(sources[0], exchange_kernels)
    if kernels is not None:
        kernels.copy_rows(sources, rows, to)
        return
    for source, target in zip(sources, to, strict=True):
        target.copy_(source if rows is None else source.index_select(0, rows))


# --- the gate ---------------------------------------------------------------------------------------


def _gelu(x: Tensor) -> Tensor:
    """GELU by erfc: F.gelu computes 1 + erf, which loses the tail of negative x."""
    area: Tensor = 0.5 * torch.special.erfc(x * -math.sqrt(0.5))
    return x * area


def _gate(x: Tensor, gelu: bool) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    gate, up = wide.chunk(2, dim=-1)
    return ((_gelu if gelu else F.silu)(gate) * up).to(x.dtype)


def _gate_backward(grad: Tensor, x: Tensor, gelu: bool) -> Tensor:
    wide = torch.promote_types(x.dtype, torch.float32)
    gate, up = x.to(wide).chunk(2, dim=-1)
    g = grad.to(wide)
    if gelu:
        dgate = torch.ops.aten.gelu_backward(g * up, gate)
    else:
        s = torch.sigmoid(gate)
        dgate = g * up * s * (1 + gate * (1 - s))
    return torch.cat([dgate, g * (_gelu if gelu else F.silu)(gate)], dim=-1).to(x.dtype)


def _keep_gate(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, ctx.gelu = inputs
    ctx.save_for_backward(x)


def _backward_of_gate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    if torch.is_grad_enabled():  # second derivatives: in operations that have their own
        return _gate_backward(grad, x, ctx.gelu), None
    return torch.ops.multigemm.gated_backward(grad, x, ctx.gelu), None


register_differentiable(
    _library,
    torch.ops.multigemm.gated.default,
    _gate,
    _in_triton("gated", _gate, gate_kernels),
    _backward_of_gate,
    _keep_gate,
)
_library.impl("gated_backward", _gate_backward, "CPU")
_library.impl("gated_backward", _in_triton("gated_backward", _gate_backward, gate_kernels), "CUDA")
torch.library.register_fake(
    "multigemm::gated", lambda x, gelu: x.new_empty((x.shape[0], x.shape[1] // 2)), lib=_library
)
torch.library.register_fake("multigemm::gated_backward", lambda grad, x, gelu: x.new_empty(x.shape), lib=_library)
