"""Binds torch's scaled_grouped_mm: float8 x float8 with scales of rows and columns, on Hopper.

torch's kernel wants both operands contiguous along K, one number in float32 for each row and each column of every
group, and groups that begin at multiples of 16 bytes: scales that cover more, or lie otherwise, are spread by a step
before each launch. With K jagged only the host can see where groups begin; operands of other sizes are copied, each
group's K padded with zeros.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backend import Launch, Recipe
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.epilogue import ClampedEnds, Finish, Need, without_products
from multigemm.backends.cublas.grouped_mm import call_into, copy_result, ends_with_head, legal
from multigemm.backends.cublas.run import Steps
from multigemm.backends.cublas.staging import Copies, compact
from multigemm.backends.cublas.support import FLOAT8_STEP
from multigemm.cuda.launch import Step
from multigemm.planning.operands import Operands
from multigemm.torch_internals import redispatched_scaled_grouped_mm

# --- torch's operation ------------------------------------------------------------------------------


def scaled_grouped_mm_into(
    a: Tensor, b: Tensor, scales: Sequence[Tensor], ends: Tensor, fast: bool, out: Tensor
) -> None:
    """torch's scaled_grouped_mm, written into `out`."""
    given: tuple[Any, ...] = (a, b, *scales, ends, None, None, torch.bfloat16, fast)
    if redispatched_scaled_grouped_mm is None:
        with torch.no_grad():
            copy_result(torch._scaled_grouped_mm(*given), out)
    else:
        call_into(out, redispatched_scaled_grouped_mm, *given)


# --- a problem --------------------------------------------------------------------------------------


def plan(config: Config) -> Recipe:
    """A recipe for every problem of any spec of float8 operands."""
    why = "torch's kernel for scales of rows; it takes two small pieces of memory from torch's allocator at each call"
    return Recipe(f"cublas.{config.variant}", config, _bind, why)


def _bind(ops: Operands) -> Launch:
    if torch_internals.current_device() != (ops.device.index or 0):
        with torch.cuda.device(ops.device):
            return _bind(ops)
    spec, a, b = ops.spec, cast(Tensor, ops.a), cast(Tensor, ops.b)
    if spec.alpha == "zero" or not (a.numel() and b.numel()):
        return without_products(ops)
    return _jagged_m(ops, a, b) if spec.form == "jagged_m" else _jagged_k(ops, a, b)


def _jagged_m(ops: Operands, a: Tensor, b: Tensor) -> Steps:
    """jagged m. Ends on the device, which may be invalid, are clamped. The head's rows, which are multiplied with the
    first group's, are zeroed afterwards, or kept out of the caller's buffer."""
    spec, out, copies = ops.spec, cast(Tensor, ops.out), Copies()
    scales = (
        _spread(_lines(ops.scale_a, "a"), (a.shape[0],), ops.device, copies),
        _spread(_lines(ops.scale_b, "b"), (spec.groups, b.shape[-1]), ops.device, copies),
    )
    a, b = legal(a, by_rows=True), legal(b.expand(spec.groups, -1, -1) if b.dim() == 2 else b, by_rows=False)
    numbers, clears = ends_with_head(ops), spec.zero_unowned
    copied = redispatched_scaled_grouped_mm is None  # with all rows of torch's result, also those of no group
    aside = not clears and (ops.head or copied)
    target = legal(compact(out, out.dtype, out.device, rows=True) if aside else out, by_rows=True)
    cut, fast = ClampedEnds(numbers, spec.groups, head=ops.head), spec.accumulate == "fast"

    def multiply(stream: int) -> None:
        cut.before(stream, numbers, a.shape[0], target if clears else None)
        scaled_grouped_mm_into(a, b, scales, cut.ends, fast, target)
        if clears and (ops.head or copied):
            cut.after(stream, target, behind=copied)

    steps: list[Step] = [*([copies] if copies.pairs else []), multiply]
    if aside:
        steps.append(Finish(ops, Need(acc=target)))
    return Steps(ops.device, steps, [target] if aside else [])


def _jagged_k(ops: Operands, a: Tensor, b: Tensor) -> Steps:
    spec, total, copies = ops.spec, a.shape[1], Copies()
    assert ops.host_offsets is not None
    bounds = np.maximum.accumulate(np.clip(ops.host_offsets, 0, total))
    if bounds[-1] <= bounds[0]:
        return without_products(ops)
    rows, columns = (spec.groups, a.shape[0]), (spec.groups, b.shape[1])
    scales = tuple(
        _spread(_lines(scale, side), shape, ops.device, copies).reshape(-1)
        for scale, side, shape in ((ops.scale_a, "a", rows), (ops.scale_b, "b", columns))
    )
    if bounds[0] % FLOAT8_STEP or (np.diff(bounds) % FLOAT8_STEP).any() or total % FLOAT8_STEP:
        a, b, ends = _padded(a, b, bounds, copies)
    else:
        a, b, ends = a[:, bounds[0] :], b[bounds[0] :], bounds[1:] - bounds[0]
    a, b, out = legal(a, by_rows=True), legal(b, by_rows=False), legal(cast(Tensor, ops.out), by_rows=True)
    on_device, fast = torch.tensor(ends, dtype=torch.int32, device=ops.device), spec.accumulate == "fast"
    steps: list[Step] = [copies] if copies.pairs else []
    steps.append(lambda stream: scaled_grouped_mm_into(a, b, scales, on_device, fast, out))
    if (np.diff(bounds) == 0).any():  # no sum of nothing may depend on a scale
        steps.append(Finish(ops, Need(only_empty=True)))
    return Steps(ops.device, steps)


def _padded(a: Tensor, b: Tensor, bounds: Any, copies: Copies) -> tuple[Tensor, Tensor, Any]:
    """Copies in which every group's K is padded with zeros, and the groups' ends in them."""
    widths = -(-np.diff(bounds) // FLOAT8_STEP) * FLOAT8_STEP
    ends = widths.cumsum()
    left = torch.zeros(a.shape[0], int(ends[-1]), dtype=torch.uint8, device=a.device).view(a.dtype)
    right = torch.zeros(b.shape[1], int(ends[-1]), dtype=torch.uint8, device=b.device).view(b.dtype).T
    for at, first, last in zip(ends - widths, bounds[:-1], bounds[1:], strict=True):
        if last > first:
            copies.pairs.append((left[:, at : at + last - first], a[:, first:last]))
            copies.pairs.append((right[at : at + last - first], b[first:last]))
    return left, right, ends


def _lines(scale: Any, side: str) -> Tensor | None:
    """A scale [groups or 1, rows or 1], without the axis of K."""
    return None if scale is None else scale.squeeze(2 if side == "a" else 1)


def _spread(lines: Tensor | None, shape: tuple[int, ...], device: torch.device, copies: Copies) -> Tensor:
    """One float32 number per line, in order; other layouts are copied before each launch."""
    if lines is None:
        return torch.ones(shape, device=device)
    wanted = (lines[0] if len(shape) == 1 else lines).expand(shape)
    if wanted.dtype is torch.float32 and wanted.is_contiguous():
        return wanted
    made = torch.empty(shape, device=device)
    copies.pairs.append((made, wanted))
    return made
