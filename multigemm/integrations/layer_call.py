"""The experts of a layer as one bound sequence of launches, where no gradient is wanted.

With few tokens a layer's time is the host's: six operators cross torch's dispatcher, allocate and look themselves up.
Here one look-up by address finds all launches of the layer, bound to one piece of memory for what lies between them.
What runs is what the layer runs in steps, with the same bits; whatever is out of the ordinary is left to the steps.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import Kernel
from multigemm.errors import LibraryError
from multigemm.integrations import torch_op
from multigemm.integrations.eager import plain_call
from multigemm.integrations.layer_ops import triton_kernels
from multigemm.planning.binding import bind
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose
from multigemm.settings import Settings, settings
from multigemm.torch_internals import current_device, current_raw_stream, empty_cuda, is_capturing

LINE = 256
"""Bytes to which the parts of the memory between the launches are aligned, as the allocator's own are."""
PLACES = 8
"""Addresses of the result and the work that an allocator hands out in turn."""


class Networks(NamedTuple):
    """The weights of all experts: `up` [E, W, H] and `down` [E, H, I], or `stacked` the other way round ([E, H, W]).

    `gelu` None: the first product's `activation` is all (W = I); else gated by gelu or silu (W = 2*I). With `fused` the
    layer runs by fused products: a `fused_experts.Network`, which also says what the activation is.
    """

    up: Tensor
    down: Tensor
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    stacked: bool = False
    gelu: bool | None = None
    activation: str | None = None
    backend: str = "auto"
    batch_invariant: bool | None = None
    fused: Any = None

    @property
    def gated(self) -> bool:
        """Whether the first product has two columns for each of the second one's."""
        return self.gelu is not None or (self.fused is not None and self.fused.gate is not None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """What follows from shapes: how the memory between the launches is cut, at `starts`, `size` bytes in all.

    The first part holds the rows and then the gated values, the second the result of up and then that of down: each
    when the launches read no longer what was there. Then come inverse, ends, and what only a large sort needs. By fused
    products the first part holds the gated values, and the last one the tokens of the pairs.
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


class _Bound(NamedTuple):
    """What a layer's calls have in common: its shapes, and its launches by where the result and the work lie."""

    layer: _Layer
    launches: dict[tuple[int, int], tuple[Launch, ...]]
    workspace: int
    settings: Settings
    """Their identity is part of the key."""


def call(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> Tensor | None:
    """The layer's result [tokens, H]; None where it has to run in steps.

    x [tokens, H], index and weights [tokens, k]. The first call at some addresses runs in steps, which choose how
    each product runs; the second binds.
    """
    if torch.compiler.is_compiling() or not settings().bind_layers or not _bindable(x):
        return None
    up, down, up_bias, down_bias = nets.up, nets.down, nets.up_bias, nets.down_bias
    given = (x, index, weights, up, down, up_bias, down_bias)
    if not plain_call(*given):
        return None
    key = (
        "layer", *(None if t is None else _memory(t) for t in given), nets.stacked, nets.gelu, nets.activation,
        nets.backend, nets.batch_invariant, nets.fused, id(settings()), current_raw_stream(x.get_device()), get_ident(),
    )  # fmt: skip
    known: _Bound | None = LAUNCHES.find(key)
    if known is not None:
        layer: _Layer | None = known.layer
    else:
        layer = _layer_of(x, index, weights, nets) if LAUNCHES.comes_again(key) else None
    if layer is None:
        return None
    out, work = _memory_of(layer)
    at = (out.data_ptr(), work.data_ptr())
    launches = None if known is None else known.launches.get(at)
    if launches is None:
        launches = _bind(layer, x, index, weights, nets, out, work)
        if known is None:
            LAUNCHES.keep(key, _Bound(layer, {at: launches}, PLACES * sum(map(_workspace_of, launches)), settings()))
        else:
            if len(known.launches) >= PLACES:
                known.launches.clear()
            known.launches[at] = launches
    for launch in launches:
        launch()
    return out


def _workspace_of(launch: Any) -> int:
    """Device memory that a launch owns, where it tells."""
    owner = getattr(launch, "__self__", launch)
    return owner.workspace_bytes() if hasattr(owner, "workspace_bytes") else 0


def _bindable(x: Tensor) -> bool:
    """Whether launches can be kept: Triton's kernels on the current GPU, of which no graph is being captured."""
    here = x.is_cuda and triton_kernels() is not None and x.get_device() == current_device()
    return here and not is_capturing()


def _memory(x: Tensor) -> Any:
    return (x.data_ptr(), x.dtype, x.shape, x.stride())


def _memory_of(layer: _Layer) -> tuple[Tensor, Tensor]:
    """Fresh memory for the result and for what lies before it."""
    out = empty_cuda((layer.tokens, layer.hidden), (layer.hidden, 1), layer.dtype)
    return out, empty_cuda((layer.size,), (1,), torch.uint8)


def _layer_of(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> _Layer | None:
    """None for what the steps have to arrange, or refuse."""
    if not _plain(x, index, weights, nets):
        return None
    (tokens, top_k), pairs, hidden, across = index.shape, index.numel(), x.shape[1], 2 - nets.stacked
    experts, width, inner = nets.up.shape[0], nets.up.shape[3 - across], nets.down.shape[across]
    wanted = (experts, hidden, inner) if across == 2 else (experts, inner, hidden)
    if nets.down.shape != wanted or width != (2 * inner if nets.gated else inner):
        return None
    if not triton_kernels().can_sort(pairs, experts) or not x.numel():
        return None
    line = pairs * x.dtype.itemsize
    order, counts = triton_kernels().sort_scratch(pairs, experts)
    sizes: tuple[int, ...] = (
        line * max(hidden, inner),
        line * max(hidden, width),
        8 * pairs,
        4 * experts,
        order,
        counts,
    )
    if nets.fused is not None:
        if weights.dtype not in (torch.float32, x.dtype):
            return None
        sizes = (line * inner, 0, 8 * pairs, 4 * experts, 8 * pairs, counts, 4 * pairs)
    *starts, size = accumulate((-(-part // LINE) * LINE for part in sizes), initial=0)
    return _Layer(tokens, top_k, experts, hidden, width, inner, x.dtype, x.device, tuple(starts), size)


def _plain(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> bool:
    """Whether all lies as the kernels read it: one device, one dtype, no strides but the weights'."""
    given = (x, index, weights, nets.up, nets.down, nets.up_bias, nets.down_bias)
    shaped = x.dim() == index.dim() == weights.dim() == 2 and nets.up.dim() == nets.down.dim() == 3
    typed = x.dtype == nets.up.dtype == nets.down.dtype and index.dtype in (torch.int64, torch.int32)
    paired = index.shape == weights.shape and len(x) == len(index) and index.is_contiguous() and weights.is_contiguous()
    return shaped and typed and paired and x.stride(1) == 1 and all(t is None or t.device == x.device for t in given)


def _bind(
    layer: _Layer, x: Tensor, index: Tensor, weights: Tensor, nets: Networks, out: Tensor, work: Tensor
) -> tuple[Launch, ...]:
    """All launches, bound to borrowed memory: none keeps an operand alive."""
    if nets.fused is not None:
        return _bind_fused(layer, x, index, weights, nets, out, work)
    parts = _cut(layer, _borrowed(work), nets.gelu is not None)
    parts.ends.zero_()  # a problem is made of them before the launches write them
    kernels, device = triton_kernels(), x.get_device()
    arrival = kernels.arrival_steps(_borrowed(index), _borrowed(x), parts)
    launches = [bound(device, *step) for step in arrival]
    launches.append(_product(parts.rows, nets.up, parts.up, parts.ends, nets.up_bias, nets, activation=nets.activation))
    if nets.gelu is not None:
        launches.append(bound(device, *kernels.gate_step(parts.up, parts.inner, nets.gelu)))
    launches.append(_product(parts.inner, nets.down, parts.down, parts.ends, nets.down_bias, nets))
    home = kernels.sum_step(parts.down, parts.inverse, _borrowed(weights), _borrowed(out), layer.top_k)
    return (*launches, bound(device, *home))


def _bind_fused(
    layer: _Layer, x: Tensor, index: Tensor, weights: Tensor, nets: Networks, out: Tensor, work: Tensor
) -> tuple[Launch, ...]:
    """The sort, and the two products that pick, gate and sum rows."""
    whole, starts, pairs = _borrowed(work), layer.starts, layer.tokens * layer.top_k

    def part(at: int, kind: torch.dtype, *shape: int) -> Tensor:
        return whole[starts[at] : starts[at] + kind.itemsize * prod(shape)].view(kind).view(shape)

    inner, ends = part(0, layer.dtype, pairs, layer.inner), part(3, torch.int32, layer.experts)
    inverse, order, rows = part(2, torch.int64, pairs), part(4, torch.int64, pairs), part(6, torch.int32, pairs)
    counts = whole[starts[5] : starts[6]].view(torch.int32)
    ends.zero_()  # a problem is made of them before the launches write them
    sort = triton_kernels().sort_steps(_borrowed(index), order, inverse, ends, counts, rows, layer.top_k)
    keywords = {"a_rows": rows, "activation": nets.activation, **nets.fused.keywords}
    sums = {"combine": (inverse.view(layer.tokens, layer.top_k), _borrowed(weights))}
    launches = [bound(x.get_device(), *step) for step in sort]
    launches.append(_product(_borrowed(x), nets.up, inner, ends, nets.up_bias, nets, **keywords))
    return (*launches, _product(inner, nets.down, _borrowed(out), ends, nets.down_bias, nets, **sums))


class _Memory:
    """Memory that someone else owns, as the array interface describes it."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        interface = {
            "shape": tuple(x.shape),
            "strides": tuple(s * size for s in x.stride()),
            "typestr": np.dtype(f"i{size}").str,
            "data": (x.data_ptr(), False),
            "version": 3,
        }
        setattr(self, "__cuda_array_interface__" if x.is_cuda else "__array_interface__", interface)


def _borrowed(x: Tensor) -> Tensor:
    """A tensor over the memory of `x` that does not keep it alive: valid whenever a call comes with that address."""
    memory = _Memory(x)
    bits = torch.as_tensor(memory, device=x.device) if x.is_cuda else torch.from_numpy(np.asarray(memory))
    return bits.view(x.dtype)


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
    rows: Tensor, weight: Tensor, out: Tensor, ends: Tensor, bias: Tensor | None, nets: Networks, **keywords: Any
) -> Launch:
    """Binds one of the products as its step has run it."""
    held = _borrowed(weight.detach())
    stacked = held if nets.stacked else held.transpose(1, 2)
    vector = None if bias is None else _borrowed(bias.detach())
    problem = GroupedGemmProblem(
        rows, stacked, ends=ends, bias=vector, batch_invariant=nets.batch_invariant, **keywords
    )
    choice = choose(problem, torch_op.names(nets.backend))
    return bind(choice, problem, out).launch


# --- a kernel of Triton, bound ------------------------------------------------------------------------

_PARAMETERS = re.compile(r"\.entry[^(]*\(([^)]*)\)")


def words(kernel: Any, compiled: Any, values: dict[str, Any]) -> list[int]:
    """The kernel's parameters: what is no constant, then pointers of Triton's own, which these kernels do not use."""
    types = compiled.src.signature
    given = [values[name] for name in kernel.arg_names if types[name] != "constexpr"]
    found = _PARAMETERS.search(compiled.asm["ptx"])
    own = (found.group(1).count(".param") if found else 0) - len(given)
    scratch = compiled.metadata.global_scratch_size
    if own < 0 or scratch:
        raise LibraryError(f"{compiled.name} takes {own} parameters more than it was given, and {scratch} bytes")
    return [x.data_ptr() if isinstance(x, Tensor) else x for x in given] + [0] * own


def bound(device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: dict[str, Any]) -> Launch:
    """A launch of a step of Triton on the current stream of GPU `device`, the current device.

    Triton finds a kernel anew at every call, by the types and alignment of all arguments, which takes longer than the
    launch. A bound launch is one foreign call; it keeps no memory alive, and stays at the addresses it was bound to.
    """
    with on_device(device):
        compiled = kernel.warmup(grid=grid, num_warps=warps, **values)
        compiled._init_handles()
    x, y, z, *_ = (*grid, 1, 1)
    loaded = Kernel.loaded(compiled.function, compiled.name, device)
    launch = loaded.bound(
        words(kernel, compiled, values), grid=(x, y, z), threads=32 * warps, shared=compiled.metadata.shared,
        keep=(compiled,),
    )  # fmt: skip
    return launch.__call__
