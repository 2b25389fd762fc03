"""Binds a problem to torch's grouped_mm: with offsets from the host, or straight from the device.

grouped_mm knows no start: its first group begins at 0. Host offsets shift the operands instead.
Device offsets that have a head need care. For jagged m the first group also multiplies the head's
rows, which become zeros afterwards, or are kept out of the caller's buffer. For jagged k the
first product is wrong by the head's share and is computed again, as the second of two groups.
"""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from multigemm.backends.cublas.epilogue import Cut, Need, finish
from multigemm.backends.cublas.leading import countable
from multigemm.backends.cublas.products import Ints
from multigemm.backends.cublas.run import Steps
from multigemm.backends.cublas.staging import Copies, compact, readable, stage_side
from multigemm.cuda.nvrtc import Step
from multigemm.planning.operands import Operands
from multigemm.torch_internals import redispatched_grouped_mm

EMPTY = torch.ops.aten.empty_strided.default
ALIGNMENT = 8
"""Elements of bfloat16 in 16 bytes: what bases and strides must be multiples of."""
LARGEST_COPY = 8 << 20
"""Elements; copying more takes longer than a call without rows."""


Seen = tuple[Tensor, Tensor, Tensor, bool]
"""a, b and the result as grouped_mm takes them, and whether the epilogue has to carry the result over to its place."""


def bind_grouped_mm(ops: Operands, offsets: Ints | None) -> Steps:
    """The bound call; `offsets` None means that the device alone knows them."""
    steps: list[Step] = []
    seen = _seen(ops, steps)
    return _from_device(ops, seen, steps) if offsets is None else _from_host(ops, seen, steps, offsets)


def _seen(ops: Operands, steps: list[Step]) -> Seen:
    """Operands whose lines lie further apart than is counted are copied by a step; a shared b is one per group, by
    stride 0."""
    given: Any = ops.a, ops.b, ops.out
    a, b, out = given
    a_rows = ops.spec.form == "jagged_m"
    b_rows = not a_rows or ops.spec.b.order == "row"
    if not countable(max(*a.stride()[-2:], *b.stride()[-2:], *out.stride()[-2:]), out.element_size()):
        copies = Copies()
        a, b = stage_side(a, copies), stage_side(b, copies)
        out = out if readable(out) else compact(out, out.dtype, out.device)
        steps += [copies] if copies.pairs else []
    if min(*a.shape, *b.shape, *out.shape) == 1:
        a, b, out = legal(a, a_rows), legal(b, b_rows), legal(out, True)
    if a_rows and b.dim() == 2:
        b = b.expand(ops.spec.groups, -1, -1)
    return a, b, out, out.data_ptr() != given[2].data_ptr()


def legal(t: Tensor, by_rows: bool) -> Tensor:
    """The same elements, by rows or by columns; a stride that no element uses becomes one that torch accepts."""
    outer, inner = (-2, -1) if by_rows else (-1, -2)
    ld = t.stride(outer) if t.shape[outer] > 1 else -(-t.shape[inner] // ALIGNMENT) * ALIGNMENT
    strides = list(t.stride())
    strides[outer], strides[inner] = ld, 1
    if t.dim() == 3 and t.shape[0] <= 1:
        strides[0] = ld * t.shape[outer]
    return t.as_strided(t.shape, strides)


def _shifted(t: Tensor, dim: int, start: int) -> Tensor:
    return t.narrow(dim, start, t.shape[dim] - start) if start else t


def _from_host(ops: Operands, seen: Seen, steps: list[Step], offsets: Ints) -> Steps:
    a, b, out, aside = seen
    jagged_m, zeros = ops.spec.form == "jagged_m", ops.spec.zero_unowned
    extent = a.shape[0] if jagged_m else a.shape[1]
    bounds = np.maximum.accumulate(np.clip(offsets, 0, extent))
    start, ends = int(bounds[0]), bounds[1:]
    if ends[-1] > start:
        a = _shifted(a, 0 if jagged_m else 1, start)
        b, out = (b, _shifted(out, 0, start)) if jagged_m else (_shifted(b, 0, start), out)
        steps.append(GroupedMM(a, b, _ends(ops, start), out))
        if aside:
            steps.append(finish(ops, Need(acc=seen[2], unowned=zeros)))
            return Steps(ops, steps, seen)
    elif not jagged_m:
        steps.append(finish(ops, Need(only_empty=True)))
    if jagged_m and zeros and (start > 0 or ends[-1] < extent):
        steps.append(finish(ops, Need(owned=False, unowned=True)))
    return Steps(ops, steps, seen)


def _ends(ops: Operands, start: int) -> Tensor:
    """The ends on the device as grouped_mm takes them; those that came from the host were checked there."""
    given = cast(Tensor, ops.ends)
    return (given - start if start else given).to(torch.int32)


def _from_device(ops: Operands, seen: Seen, steps: list[Step]) -> Steps:
    a, b, out, aside = seen
    spec, jagged_m = ops.spec, ops.spec.form == "jagged_m"
    if jagged_m and (aside or (ops.head and not spec.zero_unowned)):
        return _guarded(ops, seen, steps)
    bounds = Cut(ops, a.shape[0] if jagged_m else a.shape[1], zeroed=out if jagged_m and spec.zero_unowned else None)
    steps += (bounds.before, GroupedMM(a, b, bounds.ends, out))
    if bounds.after is not None:
        steps.append(bounds.after)
    if aside:
        steps.append(finish(ops, Need(acc=out)))
    if ops.head and not jagged_m:
        steps += _first_again(ops, a, b, bounds)
    return Steps(ops, steps, seen)


def _guarded(ops: Operands, seen: Seen, steps: list[Step]) -> Steps:
    """Keeps the caller's rows before the first group, which only the device can count, and which may be none.

    A small result is written aside and its owned rows copied. For a large one the device decides
    between two calls: in place if there are no such rows, else aside; the other call finds no rows at all.
    A result that grouped_mm cannot write where it lies is always written aside.
    """
    a, b, out, aside = seen
    apart = not aside and out.numel() > LARGEST_COPY
    target = out if aside else compact(out, out.dtype, out.device, rows=True)
    bounds = Cut(ops, a.shape[0], apart)
    steps += (bounds.before, GroupedMM(a, b, bounds.ends, out if apart else target))
    if bounds.aside is not None:
        steps.append(GroupedMM(a, b, bounds.aside, target))
    steps.append(finish(ops, Need(acc=target, only_headed=apart, unowned=ops.spec.zero_unowned)))
    return Steps(ops, steps, (seen, target))


def _first_again(ops: Operands, a: Tensor, b: Tensor, bounds: Cut) -> list[Step]:
    """Two groups, the head and the first one; the second result replaces what the full call wrote."""
    out = cast(Tensor, ops.out).detach()
    pair = compact(out[:1].expand(2, -1, -1), out.dtype, out.device, rows=True)
    return [GroupedMM(a, b, bounds.first_two, pair), Copies([(out[0], pair[1])])]


class GroupedMM(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """One bound call of torch's grouped_mm, a step of a launch, that writes into `out`.

    The operation has no `out`: it asks torch's dispatcher for memory of its result. In this thread, for the length
    of the call, this mode answers with `out`. A torch that allocates in another way is copied from. torch's kernel
    takes two small pieces of memory from the caching allocator at each call; no argument hands them in.
    """

    def __init__(self, a: Tensor, b: Tensor, ends: Tensor, out: Tensor) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._a, self._b, self._ends = a, b, ends
        self._out, self._shape, self._where = out, list(out.shape), out.data_ptr()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """No compiler traces a bound launch, and torch's guard against it would be run at each of them."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is EMPTY and args[0] == self._shape:
            return self._out
        return func(*args, **(kwargs or {}))

    def __call__(self, stream: int) -> None:
        if redispatched_grouped_mm is None:
            with torch.no_grad():
                self._out.copy_(torch.nn.functional.grouped_mm(self._a, self._b, offs=self._ends))
            return
        call, keys, push, pop = redispatched_grouped_mm
        push(self)
        try:
            result = call(keys, self._a, self._b, self._ends, None, None)
        finally:
            pop(None)
        if result.data_ptr() != self._where:
            self._out.copy_(result)
