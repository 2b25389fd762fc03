"""The experts of a layer as one bound sequence of launches, for calls without gradients.

With few tokens a layer's time is the host's: six operators cross torch's dispatcher, allocate, and look up their
launches. Here one look-up finds all launches of the layer, which follow its operands and share one block of memory for
intermediate results. The launches are those of the layer in steps and give the same bits. Every unusual call runs in
steps.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import prod
from threading import get_ident
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.cuda.arguments import OPERANDS, Address
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import Kernel
from multigemm.errors import LibraryError
from multigemm.integrations import torch_op
from multigemm.integrations.layer_ops import triton_kernels
from multigemm.planning.binding import bind
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.launch_key import GPU_BITS, PLAIN
from multigemm.planning.operands import reach_bytes
from multigemm.problem.arrays import LOWEST
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose
from multigemm.settings import settings
from multigemm.torch_internals import current_device, current_raw_stream, empty_cuda, is_capturing, only_result_wanted

LINE = 256
"""The alignment in bytes of the parts of the memory between the launches, equal to the allocator's."""
PLACES = 8
"""The number of sets of addresses that an allocator hands out in turn."""
_WORK = 8
"""The position in `Places` of the memory between the launches."""
Places = tuple[int, ...]
"""The addresses of x, index, weights, up, down, their biases, the result and the memory between the launches; then
0."""
Launches = list[tuple[Any, dict[str, "Tensor | None"]]]
"""Launches in order, each with its operands by the names of `cuda.arguments.OPERANDS`."""


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
        """Whether the first product has two columns for each inner feature of the second."""
        return self.gelu is not None or (self.fused is not None and self.fused.gate is not None)


@dataclass(frozen=True, slots=True)
class _Layer:
    """The memory between the launches, as it follows from shapes: the offsets `starts` of its parts, and `size` in
    bytes.

    The first part holds the rows, then the gated values; the second holds the result of up, then that of down. Each is
    reused when no launch reads its former contents any more. Then come inverse, ends, and the scratch memory of a large
    sort. With fused products the first part holds the gated values, and the last one the tokens of the pairs.
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


class _Bound:
    """The launches of a layer, which follow its operands. One entry serves all calls of one key.

    An entry belongs to one thread and one stream. If a launch cannot move, as those of torch's operators cannot, the
    entry holds one set of launches for each set of addresses.
    """

    __slots__ = ("_at", "_busy", "_moves", "_others", "_settings", "_size", "_starts", "_stream", "layer", "workspace")

    def __init__(self, layer: _Layer) -> None:
        self.layer, self._busy, self._settings = layer, False, settings()  # their identity is part of the key
        self._at: Places | None = None
        self._moves: list[tuple[Callable[[Any], None], list[tuple[int, int]]]] | None = None
        self._starts: list[Callable[[int], None]] = []
        self._others: dict[Places, Launches] = {}
        self._size, self._stream, self.workspace = layer.size, 0, 0

    def run(self, x: Tensor, index: Tensor, weights: Tensor, nets: Networks, tensors: list[int]) -> Tensor | None:
        """The layer's result; None in the middle of another call, which a finaliser may make. `tensors`: where the
        operands lie."""
        if self._busy:
            return None
        self._busy = True
        try:
            layer = self.layer
            out = empty_cuda((layer.tokens, layer.hidden), (layer.hidden, 1), layer.dtype)
            work = empty_cuda((self._size,), (1,), torch.uint8)
            at: Places = (*tensors, out.data_ptr(), work.data_ptr(), 0)
            if self._moves is None or at != self._at:
                given = (x, index, weights, nets.up, nets.down, nets.up_bias, nets.down_bias)
                work = self._move(at, given, out, work, nets)
            for start in self._starts:
                start(self._stream)
            return out
        finally:
            self._busy = False

    def _move(
        self, at: Places, tensors: tuple[Tensor | None, ...], out: Tensor, work: Tensor, nets: Networks
    ) -> Tensor:
        """Moves the launches to these addresses. Returns the memory between them, which may have grown."""
        before, self._at = self._at, None  # should this be interrupted
        if before is not None and self._moves is not None:
            for move, places in self._moves:
                move(_addresses(at, places))
            self._at = at
            return work
        launches = self._others.get(at)
        if launches is None:
            x, index, weights = tensors[:3]
            assert x is not None and index is not None and weights is not None
            launches = _bind(self.layer, x, index, weights, nets, out, work)
            spans = [(0, 0) if t is None else _span(t) for t in (*tensors, out)]
            spans.append((at[_WORK], at[_WORK] + self.layer.size))
            if all(_follows(launch, spans) for launch, _ in launches):
                return self._follow(launches, at, spans, work)
            self.workspace = PLACES * sum(_workspace_of(launch) for launch, _ in launches)
            if len(self._others) >= PLACES:
                self._others.clear()
            self._others[at] = launches
        self._starts = [_called(launch) for launch, _ in launches]
        return work

    def _follow(self, launches: Launches, at: Places, spans: Sequence[tuple[int, int]], work: Tensor) -> Tensor:
        """Keeps launches that follow their operands. Memory that is lent to them lies behind the layer's own memory."""
        size = self.layer.size
        self._size = size + max(getattr(launch, "work_bytes", 0) for launch, _ in launches)
        self.workspace = sum(_workspace_of(launch) for launch, _ in launches)
        self._stream = current_raw_stream(work.get_device())
        self._moves = [(launch.move, _places_of(given, spans, size)) for launch, given in launches]
        self._starts = [launch.on for launch, _ in launches]
        if self._size > size:
            work = empty_cuda((self._size,), (1,), torch.uint8)
        self._at = (*at[:_WORK], work.data_ptr(), 0)
        for move, places in self._moves:
            move(_addresses(self._at, places))
        return work


def _addresses(at: Places, places: list[tuple[int, int]]) -> Places:
    return tuple([at[base] + distance for base, distance in places])


def _span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + max(reach_bytes(x), 1)


def _follows(launch: Any, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether all memory in these ranges follows, for a launch of one or several kernels."""
    kernels = getattr(launch, "index", -1) >= 0 and hasattr(launch, "move")
    return kernels and not launch.stays_behind([span for span in spans if span != (0, 0)])


def _places_of(
    given: Mapping[str, Tensor | None], spans: Sequence[tuple[int, int]], size: int
) -> list[tuple[int, int]]:
    """The operands of a launch in whose memory an address lies, with its distance from their start."""
    found = []
    for name in OPERANDS:
        x = given.get(name)
        if name == "work":
            found.append((_WORK, size))
        elif x is None:
            found.append((_WORK + 1, 0))
        else:
            where = x.data_ptr()
            begins = [i for i, (start, _) in enumerate(spans) if start == where]
            base = (begins or [i for i, (start, end) in enumerate(spans) if start <= where < end])[0]
            found.append((base, where - spans[base][0]))
    return found


def _called(launch: Any) -> Callable[[int], None]:
    return lambda stream: launch()


def call(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> Tensor | None:
    """The layer's result [tokens, H]; None where it has to run in steps.

    x [tokens, H], index and weights [tokens, k]. The first call of some layouts runs in steps, which choose how each
    product runs; the second binds.
    """
    if torch.compiler.is_compiling():
        return None
    known_settings = settings()
    if not known_settings.bind_layers or not _bindable(x):
        return None
    given = (x, index, weights, nets.up, nets.down, nets.up_bias, nets.down_bias)
    if not only_result_wanted(*given):
        return None
    layouts: list[Any] = []
    tensors: list[int] = []
    for t in given:
        if t is None:
            layouts.append(None)
            tensors.append(0)
            continue
        if type(t) not in PLAIN or (at := t.data_ptr()) < LOWEST or t.is_neg():
            return None
        layouts.append((t.shape, t.stride(), t.dtype, at & GPU_BITS))
        tensors.append(at)
    device = x.get_device()
    stream = current_raw_stream(device)
    key = ("layer", device, *layouts, *nets[4:], id(known_settings), stream, get_ident())
    known: _Bound | None = LAUNCHES.find(key)
    if known is not None:
        return known.run(x, index, weights, nets, tensors)
    layer = _layer_of(x, index, weights, nets) if LAUNCHES.comes_again(key) else None
    if layer is None:
        return None
    made = _Bound(layer)
    found = made.run(x, index, weights, nets, tensors)
    LAUNCHES.keep(key, made)
    return found


def _workspace_of(launch: Any) -> int:
    """The device memory that a launch owns, if it tells."""
    owner = getattr(launch, "__self__", launch)
    return owner.workspace_bytes() if hasattr(owner, "workspace_bytes") else 0


def _bindable(x: Tensor) -> bool:
    """Whether launches can be kept: Triton's kernels on the current GPU, on which no graph is being captured."""
    here = x.is_cuda and triton_kernels() is not None and x.get_device() == current_device()
    return here and not is_capturing()


def _layer_of(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> _Layer | None:
    """The layout of the layer; None if the steps have to cast, copy or refuse something."""
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
        sizes = (line * inner, 0, 4 * pairs, 4 * experts, 0, counts, 4 * pairs)
    *starts, size = accumulate((-(-part // LINE) * LINE for part in sizes), initial=0)
    return _Layer(tokens, top_k, experts, hidden, width, inner, x.dtype, x.device, tuple(starts), size)


def _plain(x: Tensor, index: Tensor, weights: Tensor, nets: Networks) -> bool:
    """Whether the kernels can read the operands: one device, one dtype, no strides except those of the weights."""
    given = (x, index, weights, nets.up, nets.down, nets.up_bias, nets.down_bias)
    shaped = x.dim() == index.dim() == weights.dim() == 2 and nets.up.dim() == nets.down.dim() == 3
    typed = x.dtype == nets.up.dtype == nets.down.dtype and index.dtype in (torch.int64, torch.int32)
    paired = index.shape == weights.shape and len(x) == len(index) and index.is_contiguous() and weights.is_contiguous()
    return shaped and typed and paired and x.stride(1) == 1 and all(t is None or t.device == x.device for t in given)


def _bind(
    layer: _Layer, x: Tensor, index: Tensor, weights: Tensor, nets: Networks, out: Tensor, work: Tensor
) -> Launches:
    """Binds all launches to borrowed memory, so that none keeps an operand alive."""
    if nets.fused is not None:
        return _bind_fused(layer, x, index, weights, nets, out, work)
    parts = _cut(layer, _borrowed(work), nets.gelu is not None)
    parts.ends.zero_()  # a problem is made of them before the launches write them
    kernels, device = triton_kernels(), x.get_device()
    arrival = kernels.arrival_steps(_borrowed(index), _borrowed(x), parts)
    launches = [_step(device, step) for step in arrival]
    launches.append(_product(parts.rows, nets.up, parts.up, parts.ends, nets.up_bias, nets, activation=nets.activation))
    if nets.gelu is not None:
        launches.append(_step(device, kernels.gate_step(parts.up, parts.inner, nets.gelu)))
    launches.append(_product(parts.inner, nets.down, parts.down, parts.ends, nets.down_bias, nets))
    home = kernels.sum_step(parts.down, parts.inverse, _borrowed(weights), _borrowed(out), layer.top_k)
    return [*launches, _step(device, home)]


def _bind_fused(
    layer: _Layer, x: Tensor, index: Tensor, weights: Tensor, nets: Networks, out: Tensor, work: Tensor
) -> Launches:
    """Binds the sort, and the two products that pick, gate and sum rows."""
    whole, starts, pairs = _borrowed(work), layer.starts, layer.tokens * layer.top_k

    def part(at: int, kind: torch.dtype, *shape: int) -> Tensor:
        return whole[starts[at] : starts[at] + kind.itemsize * prod(shape)].view(kind).view(shape)

    inner, ends = part(0, layer.dtype, pairs, layer.inner), part(3, torch.int32, layer.experts)
    place, rows = part(2, torch.int32, layer.tokens, layer.top_k), part(6, torch.int32, pairs)
    counts = whole[starts[5] : starts[6]].view(torch.int32)
    ends.zero_()  # a problem is made of them before the launches write them
    kernels = triton_kernels()
    ahead = kernels.weights_ahead(_borrowed(nets.up.detach()), nets.stacked, pairs)
    sort = kernels.sort_steps(_borrowed(index), None, place, ends, counts, rows, layer.top_k, ahead)
    keywords = {"a_rows": rows, "activation": nets.activation, **nets.fused.keywords}
    sums = {"combine": (place, _borrowed(weights))}
    launches = [_step(x.get_device(), step) for step in sort]
    launches.append(_product(_borrowed(x), nets.up, inner, ends, nets.up_bias, nets, **keywords))
    return [*launches, _product(inner, nets.down, _borrowed(out), ends, nets.down_bias, nets, **sums)]


class _Memory:
    """Memory of another owner, as an object with the array interface."""

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
    """A tensor over the memory of `x` that does not keep it alive. Valid only in calls that pass the same address."""
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
) -> tuple[Any, dict[str, Tensor | None]]:
    """Binds one of the products as the steps ran it. Returns it with its operands."""
    held = _borrowed(weight.detach())
    stacked = held if nets.stacked else held.transpose(1, 2)
    vector = None if bias is None else _borrowed(bias.detach())
    problem = GroupedGemmProblem(
        rows, stacked, ends=ends, bias=vector, batch_invariant=nets.batch_invariant, **keywords
    )
    choice = choose(problem, torch_op.names(nets.backend))
    index, numbers = keywords.get("combine", (None, None))
    given = {"a": rows, "b": held, "out": out, "bias": vector, "ends": ends, "a_rows": keywords.get("a_rows"),
             "index": index, "weights": numbers}  # fmt: skip
    return bind(choice, problem, out).launch, given


# --- a kernel of Triton, bound ------------------------------------------------------------------------

_PARAMETERS = re.compile(r"\.entry[^(]*\(([^)]*)\)")


def words(kernel: Any, compiled: Any, values: dict[str, Any]) -> list[int]:
    """The kernel's parameters as words: all arguments that are no constants, then Triton's own pointers, which these
    kernels do not use."""
    types = compiled.src.signature
    given = [values[name] for name in kernel.arg_names if types[name] != "constexpr"]
    found = _PARAMETERS.search(compiled.asm["ptx"])
    own = (found.group(1).count(".param") if found else 0) - len(given)
    scratch = compiled.metadata.global_scratch_size
    if own < 0 or scratch:
        raise LibraryError(f"{compiled.name} takes {own} parameters more than it was given, and {scratch} bytes")
    names = {id(x): name for name, x in operands_of(kernel, values).items()}
    return [Address(x.data_ptr(), names[id(x)]) if isinstance(x, Tensor) else x for x in given] + [0] * own


def operands_of(kernel: Any, values: dict[str, Any]) -> dict[str, Tensor | None]:
    """The tensors of a step, named in the order of its arguments, by which its launch follows them."""
    tensors = {id(x): x for x in (values[name] for name in kernel.arg_names) if isinstance(x, Tensor)}
    return dict(zip(OPERANDS, tensors.values(), strict=False))


def _step(device: int, step: Any) -> tuple[Any, dict[str, Tensor | None]]:
    """A bound Triton step and its operands."""
    kernel, _, _, values = step
    return bound(device, *step), operands_of(kernel, values)


def bound(device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: dict[str, Any]) -> Any:
    """A launch of a step of Triton on the current stream of GPU `device`, the current device.

    Triton finds a kernel anew at every call, by the types and alignment of all arguments, which takes longer than the
    launch. A bound launch is one foreign call; it keeps no memory alive.
    """
    with on_device(device):
        compiled = kernel.warmup(grid=grid, num_warps=warps, **values)
        compiled._init_handles()
    x, y, z, *_ = (*grid, 1, 1)
    loaded = Kernel.loaded(compiled.function, compiled.name, device)
    return loaded.bound(
        words(kernel, compiled, values), grid=(x, y, z), threads=32 * warps, shared=compiled.metadata.shared,
        keep=(compiled,),
    )  # fmt: skip
