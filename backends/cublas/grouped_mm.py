"""Binds torch's grouped_mm, with offsets from the host or from the device.

grouped_mm knows no start: its first group begins at 0. Host offsets shift the operands instead.
Device offsets that have a head need care. For jagged m the first group also multiplies the head's
rows, which become zeros afterwards, or are kept out of the caller's buffer. For jagged k the
first product is wrong by the head's share and is computed again, as the second of two groups.

A call is a function of tensors (`Call`), so that the cache of launches can make it on the tensors of a later one: where
the caller gives no result, torch's own is the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backend import Launch
from multigemm.backends.cublas.epilogue import ClampedEnds, Finish, Need, without_products
from multigemm.backends.cublas.products import Ints, countable
from multigemm.backends.cublas.run import Steps, zero_lines
from multigemm.backends.cublas.staging import Copies, compact, readable, stage_side
from multigemm.cuda.launch import Step
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from multigemm.torch_internals import redispatched_grouped_mm

EMPTY = torch.ops.aten.empty_strided.default
ALIGNMENT = 8
"""Elements of bfloat16 in 16 bytes: what bases and strides must be multiples of."""
LARGEST_COPY = 8 << 20
"""Elements up to which a copy takes less time than a call without rows."""

Call = Callable[[Tensor, Tensor, Any, Tensor | None], Tensor]
"""Of a, b, what cuts the groups (where that lies on the device), and the given result, if any; returns the result."""


# --- torch's operation -----------------------------------------------------------------------------


def grouped_mm(a: Tensor, b: Tensor, ends: Tensor) -> Tensor:
    """torch's grouped_mm of operands that want no gradient, as the launch cache serves them. The public function takes
    the host as long as the call below autograd, by a private name: 1 us less and 0.8 us more in two runs (H200)."""
    return torch.nn.functional.grouped_mm(a, b, offs=ends)


def grouped_mm_into(a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
    """torch's grouped_mm, written into `out`."""
    if redispatched_grouped_mm is None:
        with torch.no_grad():
            result = grouped_mm(a, b, ends)
        copy_result(result, out)
    else:
        call_into(out, redispatched_grouped_mm, a, b, ends, None, None)


def call_into(out: Tensor, operation: tuple[Any, ...], *given: Any) -> None:
    """Calls an operation of torch below autograd, and has it write into `out`.

    The operation has no `out`: it asks torch's dispatcher for memory for its result. For the length of the call, a mode
    of this thread answers with `out`. If a torch version allocates in another way, its result is copied.
    """
    call, keys, push, pop = operation
    modes = torch_internals.dispatch_modes()
    try:
        push(Into(out))
        result = call(keys, *given)
    finally:
        if torch_internals.dispatch_modes() > modes:  # not so where Ctrl-C came before the push
            pop(None)
    if result.data_ptr() != out.data_ptr():
        copy_result(result, out)


class Into:
    """A dispatch mode that answers the first request for memory of one shape with a given tensor.

    It does not derive from `TorchDispatchMode`, whose work around each operator takes 2 us of 4.5 us.
    """

    __slots__ = ("_out", "_shape")

    def __init__(self, out: Tensor) -> None:
        self._out: Tensor | None = out
        self._shape = [*out.shape]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._out
        if out is not None and func is EMPTY and args[0] == self._shape:
            self._out = None
            return out
        return func(*args, **(kwargs or {}))


def copy_result(result: Tensor, out: Tensor) -> None:
    """Copies a result that torch wrote elsewhere."""
    Copies((out, result.detach()))(0)


# --- a problem -------------------------------------------------------------------------------------


class GroupedMM:
    """A bound launch of grouped_mm, which can also run on other tensors with the same layout.

    torch's kernel takes two small pieces of memory from the caching allocator at each call; no argument hands them in.
    """

    __slots__ = ("_arguments", "_as_given", "_call", "_device", "_spec")

    def __init__(self, ops: Operands, call: Call, arguments: tuple[Any, ...], as_given: bool) -> None:
        self._call, self._arguments, self._as_given = call, arguments, as_given
        self._spec, self._device = ops.spec, ops.device

    def __call__(self) -> None:
        device = self._device.index or 0
        if torch_internals.current_device() != device:
            with torch.cuda.device(device):
                self._call(*self._arguments)
        else:
            self._call(*self._arguments)

    def on_tensors(self, kind: str, live: Tensor | None) -> Call | None:
        """The same launch as a function of tensors; None if operands are not passed on as they are.

        `kind` names what cuts the groups, and `live` is that where it lies on the device.
        """
        if not self._as_given or live is None:
            return self._call if self._as_given else None
        return _FromDevice(self._spec, live, kind)


def bind_grouped_mm(ops: Operands, offsets: Ints | None) -> Launch:
    """Binds the call. `offsets` None means that only the device knows them."""
    spec, given, copies = ops.spec, cast(Any, (ops.a, ops.b, ops.out)), Copies()
    a, b, out = _counted(given, copies)
    as_given = a is ops.a and b is ops.b and out is ops.out
    if min(*a.shape, *b.shape, *out.shape) == 1:
        by_rows, seen = (spec.form == "jagged_m", spec.form == "jagged_k" or spec.b.order == "row", True), (a, b, out)
        a, b, out = (legal(t, rows) for t, rows in zip(seen, by_rows, strict=True))
        as_given = as_given and all(x.stride() == y.stride() for x, y in zip((a, b, out), given, strict=True))
    aside = out.data_ptr() != given[2].data_ptr()
    steps: list[Step] = [copies] if copies.pairs else []
    if offsets is None and spec.form == "jagged_m" and (aside or (ops.head and not spec.zero_unowned)):
        return _guarded(ops, a, _each_group(b, spec.groups), out, aside, steps)
    numbers: Tensor | None = None
    call: Call
    if offsets is None:
        numbers = ends_with_head(ops)
        pair = (
            compact(out[:1].expand(2, -1, -1), out.dtype, out.device, rows=True)
            if ops.head and out.dim() == 3
            else None
        )
        call = _FromDevice(spec, numbers, "offsets" if ops.head else "ends", pair)
    else:
        bounds = np.maximum.accumulate(np.clip(offsets, 0, a.shape[0] if spec.form == "jagged_m" else a.shape[1]))
        if bounds[-1] <= bounds[0]:
            return without_products(ops)
        start, ends = int(bounds[0]), cast(Tensor, ops.ends)
        ends = (ends - start if start else ends).to(torch.int32)
        call = FromHost(spec, ends, start, int(bounds[-1]), clears=spec.zero_unowned and not aside)
    arguments: tuple[Any, ...] = a, _each_group(b, spec.groups) if spec.form == "jagged_m" else b, numbers, out
    if not steps and not aside:
        return GroupedMM(ops, call, arguments, as_given)
    steps.append(lambda stream: call(*arguments))
    if aside:
        steps.append(Finish(ops, Need(acc=out, unowned=spec.zero_unowned)))
    return Steps(ops.device, steps, [out] if aside else [])


def ends_with_head(ops: Operands) -> Tensor:
    """The ends of a jagged form on the device, after the first group's start where there is one."""
    ends = cast(Tensor, ops.ends)
    return ends.as_strided((ops.spec.groups + 1,), (1,), ends.storage_offset() - 1) if ops.head else ends


def _counted(given: tuple[Tensor, Tensor, Tensor], copies: Copies) -> tuple[Tensor, Tensor, Tensor]:
    """Copies operands whose lines lie further apart than cuBLAS counts; such a result is written to scratch memory."""
    a, b, out = given
    if countable(max(*a.stride()[-2:], *b.stride()[-2:], *out.stride()[-2:]), out.element_size()):
        return given
    a, b = (cast(Tensor, stage_side(t, copies)) for t in (a, b))
    return a, b, out if readable(out) else compact(out, out.dtype, out.device)


def _each_group(b: Tensor, groups: int) -> Tensor:
    """One weight per group; a shared weight is repeated by a stride of 0."""
    return b.expand(groups, -1, -1) if b.dim() == 2 else b


def legal(t: Tensor, by_rows: bool) -> Tensor:
    """The same elements, row-major or column-major. A stride that no element uses is replaced by one that torch
    accepts."""
    outer, inner = (-2, -1) if by_rows else (-1, -2)
    ld = t.stride(outer) if t.shape[outer] > 1 else -(-t.shape[inner] // ALIGNMENT) * ALIGNMENT
    strides = list(t.stride())
    strides[outer], strides[inner] = ld, 1
    if t.dim() == 3 and t.shape[0] <= 1:
        strides[0] = ld * t.shape[outer]
    return t.as_strided(t.shape, strides)


class FromHost:
    """The call with offsets from the host, which were checked there. There is something to multiply.

    `ends` are relative to the first offset, `start`; `end` is the last one.
    """

    __slots__ = ("_clears", "_device", "_ends", "_groups", "_jagged_m", "end", "start")

    def __init__(self, spec: ProblemSpec, ends: Tensor, start: int, end: int, clears: bool) -> None:
        self._ends, self.start, self.end = ends, start, end
        self._groups, self._device = spec.groups, ends.device.index or 0
        self._jagged_m = spec.form == "jagged_m"
        self._clears = clears and self._jagged_m

    def __call__(self, a: Tensor, b: Tensor, numbers: Any, out: Tensor | None) -> Tensor:
        start, target = self.start, out
        if self._jagged_m:
            if b.dim() == 2:
                b = _each_group(b, self._groups)
            if start:
                out = _new_rows(a, b) if out is None else out
                a, target = a[start:], out[start:]
        elif start:
            a, b = a[:, start:], b[start:]
        if target is not None:
            grouped_mm_into(a, b, self._ends, target)
        if out is None:
            out = grouped_mm(a, b, self._ends)
        if self._clears:
            if start:
                self._clear(out, 0, start)
            if self.end < out.shape[0]:
                self._clear(out, self.end, out.shape[0])
        return out

    def _clear(self, out: Tensor, first: int, end: int) -> None:
        """Zeroes some rows."""
        stream, step, size = torch_internals.current_raw_stream(self._device), out.stride(0), out.element_size()
        at = out.data_ptr() + first * step * size
        zero_lines(self._device, stream, at, step * size, out.shape[1] * size, end - first)


def _new_rows(a: Tensor, b: Tensor) -> Tensor:
    """Memory for the result of jagged m."""
    return torch_internals.empty_cuda((a.shape[0], b.shape[2]), (b.shape[2], 1), a.dtype)


class _FromDevice:
    """The call with sizes from the device, which may be invalid. `kind` says which keyword gave them.

    `pair` is memory for two results, of which the second is the first group's; None leaves it to torch.
    """

    __slots__ = ("_clears", "_cut", "_device", "_groups", "_head", "_jagged_m", "_pair")

    def __init__(self, spec: ProblemSpec, numbers: Tensor, kind: str, pair: Tensor | None = None) -> None:
        self._jagged_m, self._groups, self._pair = spec.form == "jagged_m", spec.groups, pair
        self._head, self._device = kind == "offsets", numbers.device.index or 0
        self._clears = self._jagged_m and spec.zero_unowned
        self._cut = ClampedEnds(numbers, spec.groups, head=self._head, sums=kind == "sizes")

    def __call__(self, a: Tensor, b: Tensor, numbers: Tensor, out: Tensor | None) -> Tensor:
        stream, cut, clears = torch_internals.current_raw_stream(self._device), self._cut, self._clears
        if not self._jagged_m:
            extent = a.shape[1]
        else:
            extent = a.shape[0]
            if b.dim() == 2:
                b = _each_group(b, self._groups)
        if out is None:
            cut.before(stream, numbers, extent)
            out = grouped_mm(a, b, cut.ends)
            if clears:
                cut.after(stream, out, behind=True)
        else:
            cut.before(stream, numbers, extent, out if clears else None)
            grouped_mm_into(a, b, cut.ends, out)
            if clears and self._head:
                cut.after(stream, out, behind=False)
        if self._head and not self._jagged_m:
            self._first_again(a, b, out)
        return out

    def _first_again(self, a: Tensor, b: Tensor, out: Tensor) -> None:
        """Computes two groups, the head and the first group. The second result replaces what the full call wrote."""
        pair = self._pair
        if pair is None:
            pair = grouped_mm(a, b, self._cut.first_two)
        else:
            grouped_mm_into(a, b, self._cut.first_two, pair)
        copy_result(pair[1], out[0])


def _guarded(ops: Operands, a: Tensor, b: Tensor, out: Tensor, aside: bool, steps: list[Step]) -> Steps:
    """Protects the caller's rows before the first group, whose number only the device knows and which may be 0.

    A small result is written to scratch memory, and its owned rows are copied. For a large one the device decides
    between two calls: in place if there are no such rows, else to scratch memory; the other call gets no rows at all. A
    result that grouped_mm cannot write in place always goes to scratch memory.
    """
    apart, numbers = not aside and out.numel() > LARGEST_COPY, ends_with_head(ops)
    target = out if aside else compact(out, out.dtype, out.device, rows=True)
    cut = ClampedEnds(numbers, ops.spec.groups, head=ops.head, apart=apart)

    def multiply(stream: int) -> None:
        cut.before(stream, numbers, a.shape[0])
        grouped_mm_into(a, b, cut.ends, out if apart else target)
        if cut.aside is not None:
            grouped_mm_into(a, b, cut.aside, target)

    need = Need(acc=target, only_headed=apart, unowned=ops.spec.zero_unowned)
    return Steps(ops.device, [*steps, multiply, Finish(ops, need)], [target])
