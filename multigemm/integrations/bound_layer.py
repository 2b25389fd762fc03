"""The experts of a layer as one bound list of launches, for calls without gradients.

With few tokens a layer's time is the host's: six operators cross torch's dispatcher, allocate, and look up their
launches. Here one look-up finds all launches of the layer for its number of tokens. They share one block of memory for
intermediate results, which few tokens find where the layer before had it, and a call writes only the addresses that
differ from those of the last call. The launches are those of the layer in steps, by fused products, or for few tokens,
and give the same bits. Every unusual call runs operator by operator.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import accumulate
from math import prod
from threading import get_ident
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import numpy as np
import torch
from torch import Tensor

from multigemm.cuda.arguments import OPERANDS, Address
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import Kernel, PatchedLaunches
from multigemm.errors import LibraryError
from multigemm.integrations import torch_op
from multigemm.integrations.expert_network import Network, by_rows, takes_few_tokens
from multigemm.integrations.layer_ops import copies_rows, decode_kernels, gate_kernels, triton_kernels
from multigemm.planning.binding import bind
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.launch_key import GPU_BITS, PLAIN
from multigemm.planning.operands import reach_bytes
from multigemm.problem.arrays import LOWEST, Memory, strides_in_bytes
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select.choose import choose
from multigemm.settings import settings
from multigemm.torch_internals import current_device, current_raw_stream, empty_cuda, is_capturing, only_result_wanted

LINE = 256
"""The alignment in bytes of the parts of the memory between the launches, equal to the allocator's."""
KEPT_BYTES = 4 << 20
"""Bytes of memory between launches that a thread keeps for each of its streams."""
FIXED_SETS = 8
"""The number of sets of addresses that an allocator hands out in turn."""
WORK = 8
"""The position of the memory between the launches among the pieces of memory that launches point into: x, index,
weights, up, down, their biases, the result, that memory, and nothing, at address 0."""
PIECES = 10
Operands = Mapping[str, Tensor | None]
"""Tensors of a launch, by the names of `cuda.arguments.OPERANDS`."""
Launches = list[tuple[Any, Operands]]
"""Launches in order, each with its operands."""
Views = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtypes and shapes of tensors that use one part of the memory one after the other."""


class Given(NamedTuple):
    """The operands of a layer: x [tokens, H], experts and weights [tokens, k], the parameters as `Network` has them."""

    x: Tensor
    top_k_index: Tensor
    top_k_weights: Tensor
    up: Tensor
    down: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None


def run_bound(
    net: Network, fused: bool, x: Tensor, index: Tensor, weights: Tensor, up: Tensor, down: Tensor,
    up_bias: Tensor | None, down_bias: Tensor | None, *, few_alone: bool = False,
) -> Tensor | None:  # fmt: skip
    """The layer's result [tokens, H], by fused products or in steps; None where it has to run operator by operator.
    `few_alone`: by the kernels for few tokens, or not at all.

    The first call of some layouts runs operator by operator, which chooses how each product runs; the second binds.
    """
    if torch.compiler.is_compiling():
        return None
    known_settings = settings()
    if not known_settings.bind_layers or not _on_current_device(x):
        return None
    given = (x, index, weights, up, down, up_bias, down_bias)
    if not only_result_wanted(*given):
        return None
    device = x.get_device()
    layouts: list[Any] = []
    at: list[int] = []
    for t in given:
        if t is None:
            layouts.append(None)
            at.append(0)
            continue
        address = t.data_ptr()
        if type(t) not in PLAIN or address < LOWEST or t.is_neg() or t.get_device() != device:
            return None
        layouts += (t.shape, t.stride(), t.dtype, address & GPU_BITS)
        at.append(address)
    stream = current_raw_stream(device)
    key = ("layer", device, *layouts, net, fused, few_alone, id(known_settings), stream, get_ident())
    known: _BoundLayer | None = LAUNCHES.find(key)
    if known is not None:
        return known.run(given, at)
    if not LAUNCHES.comes_again(key):
        return None
    operands = Given(*given)
    parts = _parts_of(net, fused, operands, few_alone)
    if parts is None:
        return None
    made = _BoundLayer(net, fused, operands, parts, stream)
    found = made.run(given, at)
    LAUNCHES.keep(key, made)
    return found


def _on_current_device(x: Tensor) -> bool:
    """Whether launches can be kept: Triton's kernels on the current GPU, on which no graph is being captured."""
    here = x.is_cuda and triton_kernels() is not None and x.get_device() == current_device()
    return here and not is_capturing()


class _Between:
    """Memory between the launches of a layer, lent to one call after the other of a thread on a stream."""

    __slots__ = ("__weakref__", "_kept", "busy")

    def __init__(self) -> None:
        self._kept: Tensor | None = None
        self.busy = False

    def lend(self, size: int) -> Tensor:
        """Memory of at least this size. Little memory is kept for the next call, which comes behind this one."""
        kept = self._kept
        if kept is not None and size <= kept.shape[0]:
            return kept
        found = empty_cuda((size,), (1,), torch.uint8)
        if size <= KEPT_BYTES:
            self._kept = found
        return found


_between: WeakValueDictionary[tuple[int, int, int], _Between] = WeakValueDictionary()
"""By device, stream and thread, as long as a layer is bound there."""


class _BoundLayer:
    """The launches of a layer for one number of tokens. One entry serves all calls of one key.

    An entry belongs to one thread and one stream, and holds no operand. If a launch cannot follow its operands, as
    those of torch's operators cannot, the entry holds one set of launches for each set of addresses.
    """

    __slots__ = (
        "_between", "_dtype", "_fixed", "_fused", "_net", "_parts", "_patched", "_settings", "_shape", "_size",
        "_stream", "_strides", "workspace",
    )  # fmt: skip

    def __init__(self, net: Network, fused: bool, given: Given, parts: Sequence[Views], stream: int) -> None:
        self._net, self._fused, self._parts, self._stream = net, fused, parts, stream
        self._settings = settings()  # their identity is part of the key
        self._shape, self._dtype = tuple(given.x.shape), given.x.dtype
        self._strides = (self._shape[1], 1)
        self._size = _starts(parts)[-1]
        self._patched: PatchedLaunches | None = None
        self._fixed: dict[tuple[int, ...], Launches] = {}
        self._between = _between.setdefault((given.x.get_device(), stream, get_ident()), _Between())
        self.workspace = 0

    def run(self, given: tuple[Any, ...], at: list[int]) -> Tensor | None:
        """The layer's result; None in the middle of another call, which a finaliser may make. `at`: the addresses of
        the operands."""
        between = self._between
        if between.busy:
            return None
        between.busy = True
        try:
            out, work = empty_cuda(self._shape, self._strides, self._dtype), between.lend(self._size)
            at += (out.data_ptr(), work.data_ptr(), 0)
            if self._patched is None:
                self._bind_or_repeat(Given(*given), out, work, at)
            else:
                self._patched(at)
            return out
        finally:
            between.busy = False

    def _bind_or_repeat(self, given: Given, out: Tensor, work: Tensor, at: list[int]) -> None:
        """Runs the first call, and each call whose launches cannot follow their operands."""
        launches = self._fixed.get(tuple(at))
        if launches is None:
            launches = _bind(self._net, self._fused, self._parts, given, out, work)
            spans = [(0, 0) if t is None else _span(t) for t in (*given, out, work)]
            if all(_follows(launch, spans) for launch, _ in launches):
                self._patch(launches, spans, at)
                return
            self.workspace = FIXED_SETS * sum(_workspace_of(launch) for launch, _ in launches)
            if len(self._fixed) >= FIXED_SETS:
                self._fixed.clear()
            self._fixed[tuple(at)] = launches
        for launch, _ in launches:
            launch()

    def _patch(self, launches: Launches, spans: Sequence[tuple[int, int]], at: list[int]) -> None:
        """Keeps launches that follow their operands. Memory that is lent to them lies behind the parts."""
        size = self._size
        self._size = size + max(getattr(launch, "work_bytes", 0) for launch, _ in launches)
        self.workspace = sum(_workspace_of(launch) for launch, _ in launches)
        placed = [(launch, _places_of(operands, spans, size)) for launch, operands in launches]
        work = self._between.lend(self._size)
        at[WORK] = work.data_ptr()
        self._patched = PatchedLaunches(placed, PIECES, self._stream)
        self._patched(at)


def _span(x: Tensor) -> tuple[int, int]:
    return x.data_ptr(), x.data_ptr() + max(reach_bytes(x), 1)


def _follows(launch: Any, spans: Sequence[tuple[int, int]]) -> bool:
    """Whether a launch consists of kernels that follow all memory in these ranges."""
    kernels = getattr(launch, "index", -1) >= 0 and hasattr(launch, "move")
    return kernels and not launch.stays_behind([span for span in spans if span != (0, 0)])


def _places_of(operands: Operands, spans: Sequence[tuple[int, int]], size: int) -> list[tuple[int, int]]:
    """For each operand of a launch the piece of memory in which it lies, and its distance from there."""
    found = []
    for name in OPERANDS:
        x = operands.get(name)
        if name == "work":
            found.append((WORK, size))
        elif x is None:
            found.append((PIECES - 1, 0))
        else:
            where = x.data_ptr()
            begins = [i for i, (start, _) in enumerate(spans) if start == where]
            piece = (begins or [i for i, (start, end) in enumerate(spans) if start <= where < end])[0]
            found.append((piece, where - spans[piece][0]))
    return found


def _workspace_of(launch: Any) -> int:
    """The device memory that a launch owns, if it tells."""
    owner = getattr(launch, "__self__", launch)
    return owner.workspace_bytes() if hasattr(owner, "workspace_bytes") else 0


# --- the memory between the launches ------------------------------------------------------------------


def _parts_of(net: Network, fused: bool, given: Given, few_alone: bool = False) -> list[Views] | None:
    """The memory between the launches; None if the operators have to cast, copy or refuse something."""
    if not _plain(given):
        return None
    (tokens, top_k), pairs, hidden, across = (
        given.top_k_index.shape,
        given.top_k_index.numel(),
        given.x.shape[1],
        2 - net.stacked,
    )
    experts, width, inner = given.up.shape[0], given.up.shape[3 - across], given.down.shape[across]
    wanted = (experts, hidden, inner) if across == 2 else (experts, inner, hidden)
    gated = net.gate is not None
    if given.down.shape != wanted or width != (2 * inner if gated else inner):
        return None
    kernels, dtype = triton_kernels(), given.x.dtype
    if fused and takes_few_tokens(net, *given):
        return [{"hidden": (dtype, (pairs, inner))}]
    if few_alone or not kernels.can_sort(pairs, experts) or not given.x.numel():
        return None
    counts = kernels.sort_scratch(pairs, experts)
    sorting: list[Views] = [{"ends": (torch.int32, (experts,))}, {"counts": (torch.int32, (counts // 4,))}]
    if fused:
        if given.top_k_weights.dtype not in (torch.float32, dtype):
            return None
        read: Views = {"tokens": (torch.int32, (pairs,))}
        if copies_rows(given.x, pairs, experts, net.invariant, net.backend):
            read = {"rows": (dtype, (pairs, hidden))}
        return [{"hidden": (dtype, (pairs, inner))}, read, {"place": (torch.int32, (tokens, top_k))}, *sorting]
    rows, first, second = ((dtype, (pairs, n)) for n in (hidden, width, inner))
    sorting.append({"inverse": (torch.int64, (pairs,))})
    if gated:
        return [{"rows": rows, "hidden": second}, {"first": first, "last": rows}, *sorting]
    return [{"rows": rows, "last": rows}, {"first": first, "hidden": first}, *sorting]


def _plain(given: Given) -> bool:
    """Whether the kernels can read the operands: one dtype, no strides except those of the weights."""
    x, index, weights, up, down, *_ = given
    shaped = x.dim() == index.dim() == weights.dim() == 2 and up.dim() == down.dim() == 3
    typed = x.dtype == up.dtype == down.dtype and index.dtype in (torch.int64, torch.int32)
    paired = index.shape == weights.shape and len(x) == len(index) and index.is_contiguous() and weights.is_contiguous()
    return shaped and typed and paired and x.stride(1) == 1


def _bytes_of(views: Views) -> int:
    return max(dtype.itemsize * prod(shape) for dtype, shape in views.values())


def _starts(parts: Sequence[Views]) -> list[int]:
    """Where each part begins; then the size of all."""
    return list(accumulate((-(-_bytes_of(views) // LINE) * LINE for views in parts), initial=0))


def _cut(work: Tensor, parts: Sequence[Views]) -> dict[str, Tensor]:
    """The tensors of all parts, by name."""
    return {
        name: work[start : start + dtype.itemsize * prod(shape)].view(dtype).view(shape)
        for start, views in zip(_starts(parts), parts, strict=False)
        for name, (dtype, shape) in views.items()
    }


# --- the launches -------------------------------------------------------------------------------------


def _bind(net: Network, fused: bool, parts: Sequence[Views], given: Given, out: Tensor, work: Tensor) -> Launches:
    """Binds all launches to borrowed memory, so that none keeps an operand alive."""
    between = _cut(_borrowed(work), parts)
    lent = Given(*(None if t is None else _borrowed(t.detach()) for t in given))  # type: ignore[arg-type]
    if "ends" not in between:
        return _bind_decode(net, lent, _borrowed(out), between)
    between["ends"].zero_()  # a problem is made of them before the launches write them
    return (_bind_fused if fused else _bind_steps)(net, lent, _borrowed(out), between)


def _bind_steps(net: Network, given: Given, out: Tensor, between: dict[str, Tensor]) -> Launches:
    """Binds the sort and the copies by expert, the products with the gate between them, and the weighted sum."""
    kernels, device, ends = triton_kernels(), out.get_device(), between["ends"]
    rows, first, hidden, last, inverse = (between[name] for name in ("rows", "first", "hidden", "last", "inverse"))
    sorting = {name: between[name] for name in ("rows", "inverse", "ends", "counts")}
    launches = [_step(device, step) for step in kernels.arrival_steps(given.top_k_index, given.x, **sorting)]
    activation = net.activation if net.gate is None else None
    launches.append(_product(net, rows, given.up, first, ends, given.up_bias, activation=activation))
    if net.gate is not None:
        launches.append(_step(device, gate_kernels().gate_step(net.gate, first, hidden)))
    launches.append(_product(net, hidden, given.down, last, ends, given.down_bias))
    return [
        *launches,
        _step(device, kernels.sum_step(last, inverse, given.top_k_weights, out, given.top_k_index.shape[1])),
    ]


def _bind_decode(net: Network, given: Given, out: Tensor, between: dict[str, Tensor]) -> Launches:
    """Binds the launches for few tokens."""
    steps = decode_kernels().decode_steps(net, *given, between["hidden"], out)
    return [_step(out.get_device(), step) for step in steps]


def _bind_fused(net: Network, given: Given, out: Tensor, between: dict[str, Tensor]) -> Launches:
    """Binds the sort, and the two products that pick, gate and sum rows; `rows` are for copies of many tokens."""
    kernels, (_, top_k) = triton_kernels(), given.top_k_index.shape
    hidden, ends, place, counts = (between[name] for name in ("hidden", "ends", "place", "counts"))
    x, tokens, picked = given.x, between.get("tokens"), dict[str, Any]()
    ahead = kernels.weights_ahead(given.up, net.stacked, given.top_k_index.numel())
    steps = kernels.sort_steps(
        given.top_k_index, None, place, ends, counts, tokens, 0 if tokens is None else top_k, ahead
    )
    if tokens is None:
        x = between["rows"]
        steps.append(kernels.spread_step(given.x, place, x))
    else:
        picked["a_rows"] = tokens
    launches = [_step(out.get_device(), step) for step in steps]
    launches.append(_product(net, x, given.up, hidden, ends, given.up_bias, **picked, **net.keywords))
    sums = (place, given.top_k_weights)
    return [*launches, _product(net, hidden, given.down, out, ends, given.down_bias, combine=sums)]


def _borrowed(x: Tensor) -> Tensor:
    """A tensor over the memory of `x` that does not keep it alive. Valid only in calls that pass the same address."""
    kind = np.dtype(f"i{x.element_size()}").str
    memory = Memory(x.shape, strides_in_bytes(x), kind, x.data_ptr(), cuda=x.is_cuda)
    bits = torch.as_tensor(memory, device=x.device) if x.is_cuda else torch.from_numpy(np.asarray(memory))
    return bits.view(x.dtype)


def _product(
    net: Network, rows: Tensor, weight: Tensor, out: Tensor, ends: Tensor, bias: Tensor | None, **keywords: Any
) -> tuple[Any, Operands]:
    """Binds one of the products as its operator ran it. Returns it with its operands."""
    stacked = by_rows(weight, net.stacked)
    problem = GroupedGemmProblem(rows, stacked, ends=ends, bias=bias, batch_invariant=net.batch_invariant, **keywords)
    choice = choose(problem, torch_op.names(net.backend))
    index, numbers = keywords.get("combine", (None, None))
    operands = {"a": rows, "b": weight, "out": out, "bias": bias, "ends": ends, "a_rows": keywords.get("a_rows"),
                "index": index, "weights": numbers}  # fmt: skip
    return bind(choice, problem, out).launch, operands


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


def operands_of(kernel: Any, values: dict[str, Any]) -> Operands:
    """The tensors of a step, named in the order of its arguments, by which its launch follows them."""
    tensors = {id(x): x for x in (values[name] for name in kernel.arg_names) if isinstance(x, Tensor)}
    return dict(zip(OPERANDS, tensors.values(), strict=False))


def _step(device: int, step: Any) -> tuple[Any, Operands]:
    """A bound Triton step and its operands."""
    return bound(device, *step), operands_of(step.kernel, step.values)


def bound(
    device: int, kernel: Any, grid: tuple[int, ...], warps: int, values: dict[str, Any], waits: bool = False
) -> Any:
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
        overlap=waits, keep=(compiled,),
    )  # fmt: skip
