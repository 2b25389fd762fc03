"""The experts of a layer as one bound sequence of launches, where no gradient is wanted.

With few tokens a layer's time is the host's: six operators cross torch's dispatcher, allocate and look themselves up.
Here one look-up by address finds all launches of the layer, bound to one piece of memory for what lies between them.
What runs is what the layer runs in steps, with the same bits; whatever is out of the ordinary is left to the steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.integrations import op_call, op_route
from multigemm.integrations.bound_calls import borrow
from multigemm.integrations.eager import current_device, lazy, watched
from multigemm.integrations.routing_op import triton_is_here
from multigemm.select import table as tuning
from multigemm.settings import settings

LINE = 256
"""Bytes to which the parts of the memory between the launches are aligned, as the allocator's own are."""
_known = op_call.launches.kept


class Networks(NamedTuple):
    """The weights of all experts: `up` [E, W, H] and `down` [E, H, I], or `stacked` the other way round ([E, H, W]).

    `gelu` None: the first product's `activation` is all (W = I); else gated by gelu or silu (W = 2*I).
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    stacked: bool = False
    gelu: bool | None = None
    activation: str | None = None
    backend: str = "auto"


@dataclass(frozen=True, slots=True)
class _Layer:
    """What follows from shapes: how the memory between the launches is cut, at `starts`, `size` bytes in all.

    The first part holds the rows and then the gated values, the second the result of up and then that of down: each
    when the launches read no longer what was there. Then come inverse, ends, and what only a large sort needs.
    """

    tokens: int
    top_k: int
    experts: int
    hidden: int
    width: int
    inner: int
    dtype: torch.dtype
    device: torch.device
    starts: tuple[int, ...]
    size: int


class _Parts(NamedTuple):
    """The memory between the launches, as tensors."""

    rows: Tensor
    up: Tensor
    inner: Tensor
    down: Tensor
    inverse: Tensor
    ends: Tensor
    order: Tensor
    counts: Tensor


@cache
def _kernels() -> Any:
    from multigemm.integrations import layer_kernels

    return layer_kernels


def call(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> Tensor | None:
    """The layer's result [tokens, H]; None where it has to run in steps.

    x [tokens, H], index and weights [tokens, k].
    """
    if torch.compiler.is_compiling() or not settings().bind_layers or not _bindable(x):
        return None
    up, down, up_bias, down_bias = nets.up, nets.down, nets.up_bias, nets.down_bias
    if watched(x, index, weights, up, down, up_bias, down_bias):
        return None
    if lazy(x, weights, up, down, up if up_bias is None else up_bias, down if down_bias is None else down_bias):
        return None
    key = (
        x.data_ptr(), x.dtype, x.shape, x.stride(), index.data_ptr(), index.dtype, index.shape, index.stride(),
        weights.data_ptr(), weights.dtype, weights.shape, weights.stride(), up.data_ptr(), up.dtype, up.shape,
        up.stride(), down.data_ptr(), down.dtype, down.shape, down.stride(), up_bias is None or _memory(up_bias),
        down_bias is None or _memory(down_bias), nets.stacked, nets.gelu, nets.activation, nets.backend,
        tuning.generation,
    )  # fmt: skip
    known = _known.get(key)
    if known is None:
        return _fresh(key, x, index, weights, nets)
    layer, made = known
    out, work = _memory_of(layer)
    launches = made.get((out.data_ptr(), work.data_ptr()))
    if launches is None:
        del out, work
        return _fresh(key, x, index, weights, nets)
    for launch in launches:
        launch()
    return out


def _bindable(x: Tensor) -> bool:
    """Whether launches can be kept: Triton's kernels on the current GPU, of which no graph is being captured."""
    here = x.is_cuda and triton_is_here() and x.get_device() == current_device()
    return here and not op_call.capturing_now()


def _memory(x: Tensor) -> Any:
    return (x.data_ptr(), x.dtype, x.shape, x.stride())


def _memory_of(layer: _Layer) -> tuple[Tensor, Tensor]:
    """Fresh memory for the result and for what lies before it."""
    out = op_call.empty_cuda((layer.tokens, layer.hidden), (layer.hidden, 1), layer.dtype)
    return out, op_call.empty_cuda((layer.size,), (1,), torch.uint8)


def _layer_of(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> _Layer | None:
    """None for what the steps have to arrange, or refuse."""
    if not _plain(x, index, weights, nets):
        return None
    (tokens, top_k), pairs, hidden, across = index.shape, index.numel(), x.shape[1], 2 - nets.stacked
    experts, width, inner = nets.up.shape[0], nets.up.shape[3 - across], nets.down.shape[across]
    wanted = (experts, hidden, inner) if across == 2 else (experts, inner, hidden)
    if nets.down.shape != wanted or width != (inner if nets.gelu is None else 2 * inner):
        return None
    if not _kernels().can(pairs, experts) or not x.numel():
        return None
    line = pairs * x.dtype.itemsize
    order, counts = _kernels().scratch(pairs, experts)
    sizes = (line * max(hidden, inner), line * max(hidden, width), 8 * pairs, 4 * experts, order, counts)
    *starts, size = accumulate((-(-part // LINE) * LINE for part in sizes), initial=0)
    return _Layer(tokens, top_k, experts, hidden, width, inner, x.dtype, x.device, tuple(starts), size)


def _plain(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> bool:
    """Whether all lies as the kernels read it: one device, one dtype, no strides but the weights'."""
    given = (x, index, weights, nets.up, nets.down, nets.up_bias, nets.down_bias)
    shaped = x.dim() == index.dim() == weights.dim() == 2 and nets.up.dim() == nets.down.dim() == 3
    typed = x.dtype == nets.up.dtype == nets.down.dtype and index.dtype in (torch.int64, torch.int32)
    paired = index.shape == weights.shape and len(x) == len(index) and index.is_contiguous() and weights.is_contiguous()
    return shaped and typed and paired and x.stride(1) == 1 and all(t is None or t.device == x.device for t in given)


def _fresh(key: Any, x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> Tensor | None:
    """Binds and launches; what is bound the second time at the same addresses is kept for the third.

    None where one of the products has no route yet: it gets one when it runs as a step.
    """
    layer = _layer_of(x, index, weights, nets)
    if layer is None:
        return None
    out, work = _memory_of(layer)
    at = (out.data_ptr(), work.data_ptr())
    lasting = op_call.launches.met(key, at)
    hold: Any = borrow if lasting else _given
    parts = _cut(layer, hold(work), nets.gelu is not None)
    up = _product(parts.rows, hold(nets.up), parts.up, parts.ends, hold(nets.up_bias), nets, nets.activation)
    down = _product(parts.inner, hold(nets.down), parts.down, parts.ends, hold(nets.down_bias), nets, None)
    if up is None or down is None:
        return None

    def bind() -> tuple[Launch, ...]:
        kernels, device = _kernels(), x.get_device()
        steps = [*kernels.arrival(index, x, parts, device), up()]
        if nets.gelu is not None:
            steps.append(kernels.gate(parts.up, parts.inner, nets.gelu, device))
        return (*steps, down(), kernels.home(parts.down, parts.inverse, weights, out, device))

    for launch in op_call.launches.keep(key, layer, at, bind) if lasting else bind():
        launch()
    return out


def _given(x: Tensor | None) -> Tensor | None:
    return x


def _cut(layer: _Layer, work: Tensor, gated: bool) -> _Parts:
    pairs, dtype = layer.tokens * layer.top_k, layer.dtype

    def part(at: int, kind: torch.dtype, *shape: int) -> Tensor:
        start = layer.starts[at]
        return work[start : start + kind.itemsize * prod(shape)].view(kind).view(shape)

    up = part(1, dtype, pairs, layer.width)
    many = layer.starts[5] > layer.starts[4]
    return _Parts(
        rows=part(0, dtype, pairs, layer.hidden),
        up=up,
        inner=part(0, dtype, pairs, layer.inner) if gated else up,
        down=part(1 if gated else 0, dtype, pairs, layer.hidden),
        inverse=part(2, torch.int64, pairs),
        ends=part(3, torch.int32, layer.experts),
        order=part(4, torch.int64, pairs) if many else work,
        counts=work[layer.starts[5] :].view(torch.int32),
    )


def _product(
    rows: Tensor, weight: Tensor, out: Tensor, ends: Tensor, bias: Tensor | None, nets: Networks, activation: str | None
) -> Callable[[], Launch] | None:
    """Binds one of the products; None where its route is not known."""
    options = {} if activation is None else {"activation": activation}
    if nets.backend != "auto":
        options["backend"] = nets.backend
    stacked = weight if nets.stacked else weight.transpose(1, 2)
    route = op_route.known((rows, stacked, None, None, ends, None, None, bias), options)
    return None if route is None else lambda: op_route.bind(route, rows, stacked, None, ends, None, None, bias, out)
