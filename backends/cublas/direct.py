"""Binds a problem to torch's grouped_mm: with offsets from the host, or straight from the device.

grouped_mm knows no start: its first group begins at 0. Host offsets shift the operands instead.
Device offsets that have a head need care. For jagged m the first group also multiplies the head's
rows, and the epilogue then zeroes them, or they are kept out of the caller's buffer. For jagged k the
first product is wrong by the head's share and is computed again, as the second of two groups.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cublas.epilogue import Cut, Need, finish
from multigemm.backends.cublas.grouped_mm import ALIGNMENT, GroupedMM, View
from multigemm.backends.cublas.products import Ints, cut
from multigemm.backends.cublas.run import Steps
from multigemm.backends.cublas.staging import Copies
from multigemm.cuda.device import to_device
from multigemm.cuda.nvrtc import Step
from multigemm.planning.operands import Operands

LARGEST_COPY = 8 << 20
"""Elements; copying more takes longer than a call without rows."""


def bind_grouped_mm(ops: Operands, offsets: Ints | None) -> Steps:
    """The bound call; `offsets` None means that the device alone knows them."""
    return _from_device(ops) if offsets is None else _from_host(ops, offsets)


def _views(ops: Operands) -> tuple[Tensor, Tensor, Tensor]:
    """a, b and out as grouped_mm takes them: a shared b as one per group, by stride zero."""
    a, b, out = cast(Tensor, ops.a), cast(Tensor, ops.b), cast(Tensor, ops.out)
    jagged_m = ops.spec.jagged == "m"
    b = View(not jagged_m or ops.spec.b.order == "row").of(b)
    if jagged_m and b.dim() == 2:
        b = b.expand(ops.spec.groups, -1, -1)
    return View(jagged_m).of(a), b, View(True).of(out)


def _shifted(t: Tensor, dim: int, start: int) -> Tensor:
    return t.narrow(dim, start, t.shape[dim] - start) if start else t


def _from_host(ops: Operands, offsets: Ints) -> Steps:
    a, b, out = _views(ops)
    jagged_m = ops.spec.jagged == "m"
    extent = a.shape[0] if jagged_m else a.shape[1]
    starts, ends = cut(offsets, extent)
    start = int(starts[0])
    ends = np.maximum.accumulate(ends)
    steps: list[Step] = []
    if ends[-1] > start:
        a = _shifted(a, 0 if jagged_m else 1, start)
        b, out = (b, _shifted(out, 0, start)) if jagged_m else (_shifted(b, 0, start), out)
        steps.append(GroupedMM(a, b, _ends(ops, ends - start, start), out))
    if not steps and not jagged_m:
        steps.append(finish(ops, Need(only_empty=True)))
    if jagged_m and ops.spec.zero_unowned and (start > 0 or ends[-1] < extent):
        steps.append(finish(ops, Need(owned=False, unowned=True)))
    return Steps(ops, steps)


def _ends(ops: Operands, ends: Ints, start: int) -> Tensor:
    given = cast(Tensor, ops.ends)
    if start == 0 and given.dtype is torch.int32 and given.is_contiguous():
        return given
    return to_device(ends, ops.device).to(torch.int32)


def _from_device(ops: Operands) -> Steps:
    a, b, out = _views(ops)
    spec, jagged_m = ops.spec, ops.spec.jagged == "m"
    if jagged_m and ops.head and not spec.zero_unowned:
        return _guarded(ops, a, b, out)
    zeroed = out if jagged_m and spec.zero_unowned and not ops.head else None
    bounds = Cut(ops, a.shape[0] if jagged_m else a.shape[1], zeroed=zeroed)
    steps: list[Step] = [bounds.step, GroupedMM(a, b, bounds.ends, out)]
    if zeroed is not None:
        return Steps(ops, steps, bounds)
    if jagged_m and spec.zero_unowned:
        steps.append(finish(ops, Need(owned=False, unowned=True)))
    elif ops.head:
        steps += _first_again(ops, a, b, bounds)
    return Steps(ops, steps, bounds)


def _guarded(ops: Operands, a: Tensor, b: Tensor, out: Tensor) -> Steps:
    """Keeps the caller's rows before the first group, which only the device can count, and which may be none.

    A small result is written aside and its owned rows copied. For a large one the device decides
    between two calls: in place if there are no such rows, else aside; the other call finds no rows at all.
    """
    target, apart = _aligned_scratch(out, out.shape[:-1]), out.numel() > LARGEST_COPY
    bounds = Cut(ops, a.shape[0], apart)
    steps: list[Step] = [bounds.step, GroupedMM(a, b, bounds.ends, out if apart else target)]
    if bounds.aside is not None:
        steps.append(GroupedMM(a, b, bounds.aside, target))
    steps.append(finish(ops, Need(acc=target, only_headed=apart)))
    return Steps(ops, steps, (bounds, target))


def _aligned_scratch(out: Tensor, outer: tuple[int, ...]) -> Tensor:
    """Memory for results as wide as out's, with rows that start at multiples of 16 bytes."""
    width = -(-out.shape[-1] // ALIGNMENT) * ALIGNMENT
    return torch.empty((*outer, width), dtype=out.dtype, device=out.device)[..., : out.shape[-1]]


def _first_again(ops: Operands, a: Tensor, b: Tensor, bounds: Cut) -> list[Step]:
    """Two groups, the head and the first one; the second result replaces what the full call wrote."""
    out = cast(Tensor, ops.out).detach()
    pair = _aligned_scratch(out, (2, out.shape[1]))
    return [GroupedMM(a, b, bounds.first_two, pair), Copies([(out[0], pair[1])])]
