"""Operands that cuBLAS can address: the given ones if a leading dimension expresses them, else compact copies.

A copy is made at every launch, because operands may change in place; its memory is taken at bind. A result that the
library cannot write where it lies goes into compact memory too, and the epilogue carries it over.
int8 has rules of its own (see `support.INT8_STEP`): K contiguous in both operands, padded with
zeros, which add nothing.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from multigemm.backends.cublas.config import ALIGNMENT
from multigemm.backends.cublas.products import countable, leading
from multigemm.backends.cublas.support import INT8_STEP, line_reason
from multigemm.errors import BackendUnsupported
from multigemm.planning.operands import Operands, strides_of

Side = Tensor | list[Tensor]


class Copies:
    """Compact copies that are refreshed before each launch: (destination, source) pairs."""

    __slots__ = ("pairs",)

    def __init__(self, *pairs: tuple[Tensor, Tensor]) -> None:
        self.pairs = list(pairs)

    def __call__(self, stream: int) -> None:
        if any(destination.is_inference() for destination, _ in self.pairs):
            with torch.inference_mode():  # elsewhere torch refuses to write what was made there
                self._refresh()
        else:
            self._refresh()

    def _refresh(self) -> None:
        for destination, source in self.pairs:
            destination.copy_(source)


def readable(t: Tensor) -> bool:
    """Whether BLAS can read (or write) the matrix, or every matrix of the stack, in place."""
    s = strides_of(t)
    return leading(t.shape[-2], t.shape[-1], s.row, s.col, t.element_size()) is not None


def writable(out: Side) -> bool:
    """Whether a library call can write its result directly into `out`."""
    return all(readable(t) for t in out) if isinstance(out, list) else readable(out)


def expressible(side: Side) -> Side:
    """The shape of `side`, with strides that BLAS can read: what a copy would have."""
    if isinstance(side, list):
        return [cast(Tensor, expressible(t)) for t in side]
    return side if readable(side) else _memory(side, torch.device("meta"))


def by_columns(t: Tensor) -> bool:
    """Whether the matrix is contiguous along its columns only."""
    return t.shape[-1] > 1 and t.stride(-1) != 1 and (t.shape[-2] <= 1 or t.stride(-2) == 1)


def compact(like: Tensor, dtype: torch.dtype, device: torch.device, rows: bool = False) -> Tensor:
    """Memory for a matrix or stack with each line at a multiple of 16 bytes, in the order of `like` or row-major
    (`rows`)."""
    if not rows and by_columns(like):
        return compact(like.transpose(-1, -2), dtype, device).transpose(-1, -2)
    step = ALIGNMENT // dtype.itemsize
    width = -(-like.shape[-1] // step) * step
    return _lines(like, width, dtype, device)[..., : like.shape[-1]]


def _lines(like: Tensor, width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory for the rows of `like`, `width` elements each. Raises if cuBLAS cannot address such rows either."""
    if like.shape[-2] > 1 and not countable(width, dtype.itemsize):
        raise BackendUnsupported({"cublas": [line_reason(width, dtype)]})
    return torch.empty((*like.shape[:-1], width), dtype=dtype, device=device)


def stage(ops: Operands, copies: Copies) -> tuple[Side, Side]:
    """a and b in a form that BLAS reads. Required copies are added to `copies`."""
    if ops.spec.compute is torch.int8:
        return _stage_int8(ops, copies)
    return stage_side(ops.a, copies), stage_side(ops.b, copies)


def stage_side(side: Side, copies: Copies) -> Side:
    """One operand in a form that BLAS reads."""
    if isinstance(side, list):
        return [cast(Tensor, stage_side(t, copies)) for t in side]
    if readable(side):
        return side
    copy = _memory(side, side.device)
    copies.pairs.append((copy, side.detach()))
    return copy


def _memory(t: Tensor, device: torch.device) -> Tensor:
    """Memory for a copy: compact. If only a distance is too large, the given order and alignment are kept, so that
    calls that need both are not refused."""
    near = countable(max(t.stride()[-2:]), t.element_size())
    return torch.empty(t.shape, dtype=t.dtype, device=device) if near else compact(t, t.dtype, device)


def scratch(out: Side, dtype: torch.dtype, rows: bool) -> Side:
    """Memory for an intermediate result, with each line at an address that every call may write to."""
    if isinstance(out, list):
        return [compact(t, dtype, t.device, rows) for t in out]
    return compact(out, dtype, out.device, rows)


def _stage_int8(ops: Operands, copies: Copies) -> tuple[Side, Side]:
    if isinstance(ops.a, list):
        pairs = [_int8_pair(a, b, copies) for a, b in zip(ops.a, cast(list[Tensor], ops.b), strict=True)]
        return [a for a, _ in pairs], [b for _, b in pairs]
    return _int8_pair(ops.a, cast(Tensor, ops.b), copies)


def _int8_pair(a: Tensor, b: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
    if a.shape[-1] % INT8_STEP == 0:
        return _int8_rows(a, copies), _int8_rows(b.transpose(-1, -2), copies).transpose(-1, -2)
    padded = -(-a.shape[-1] // ALIGNMENT) * ALIGNMENT
    return _padded(a, padded, copies), _padded(b.transpose(-1, -2), padded, copies).transpose(-1, -2)


def _int8_rows(t: Tensor, copies: Copies) -> Tensor:
    """The matrix with its last direction contiguous, rows that cuBLAS counts, and everything in steps of four bytes."""
    rows, inner = t.shape[-2], t.shape[-1]
    contiguous = inner <= 1 or (t.stride(-1) == 1 and (rows <= 1 or t.stride(-2) >= inner))
    steps = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    near = rows <= 1 or countable(t.stride(-2), 1)
    if contiguous and near and all(s % INT8_STEP == 0 for s in (*steps, t.data_ptr())):
        return t
    return _padded(t, inner, copies)


def _padded(t: Tensor, inner: int, copies: Copies) -> Tensor:
    copy = _lines(t, inner, t.dtype, t.device).zero_()
    copies.pairs.append((copy[..., : t.shape[-1]], t.detach()))
    return copy
