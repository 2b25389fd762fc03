"""Operands that BLAS can read: the given ones wherever a leading dimension expresses them, else packed copies.

A copy is made at every launch, because operands may change in place; its memory is taken at bind.
int8 has rules of its own (see `support.INT8_STEP`): K contiguous in both operands, padded with
zeros, which add nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from multigemm.backends.cublas.leading import leading
from multigemm.backends.cublas.support import INT8_STEP
from multigemm.planning.operands import Operands, strides_of

INT8_PAD = ALIGNMENT = 16
Side = Tensor | list[Tensor]


@dataclass(slots=True)
class Copies:
    """Packed copies to refresh before each launch: (destination, source) pairs."""

    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

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
    """Whether BLAS can read (or write) the matrix, or every matrix of the stack, as it lies."""
    s = strides_of(t)
    return leading(t.shape[-2], t.shape[-1], s.row, s.col) is not None


def writable(out: Side) -> bool:
    """Whether a library call can write its result straight into `out`."""
    return all(readable(t) for t in out) if isinstance(out, list) else readable(out)


def expressible(side: Side) -> Side:
    """The shape of `side`, with strides that BLAS can read: what a copy would have."""
    if isinstance(side, list):
        return [cast(Tensor, expressible(t)) for t in side]
    return side if readable(side) else torch.empty(side.shape, dtype=side.dtype, device="meta")


def stage(ops: Operands, copies: Copies) -> tuple[Side, Side]:
    """a and b as BLAS reads them; whatever has to be copied for that is added to `copies`."""
    if ops.spec.compute is torch.int8:
        return _stage_int8(ops, copies)
    return _each(ops.a, copies), _each(ops.b, copies)


def _each(side: Side, copies: Copies) -> Side:
    if isinstance(side, list):
        return [_one(t, copies) for t in side]
    return _one(side, copies)


def _one(t: Tensor, copies: Copies) -> Tensor:
    if readable(t):
        return t
    copy = torch.empty(t.shape, dtype=t.dtype, device=t.device)
    copies.pairs.append((copy, t.detach()))
    return copy


def scratch(out: Side, dtype: torch.dtype) -> Side:
    """Memory for an intermediate result, each line of it on an address that every call may write to."""
    if isinstance(out, list):
        return [cast(Tensor, scratch(t, dtype)) for t in out]
    step = ALIGNMENT // dtype.itemsize
    width = -(-out.shape[-1] // step) * step
    return torch.empty((*out.shape[:-1], width), dtype=dtype, device=out.device)[..., : out.shape[-1]]


def stage_bias(ops: Operands, copies: Copies) -> Side | None:
    """The bias as cuBLASLt reads it: every group's without gaps, at an aligned address."""
    if isinstance(ops.bias, list):
        return [_one_bias(t, copies) for t in ops.bias]
    return None if ops.bias is None else _one_bias(ops.bias, copies)


def _one_bias(t: Tensor, copies: Copies) -> Tensor:
    steps = (t.data_ptr(), *(s * t.element_size() for s in t.stride()[:-1]))
    if (t.stride(-1) == 1 or t.shape[-1] <= 1) and all(step % ALIGNMENT == 0 for step in steps):
        return t
    width = -(-t.shape[-1] * t.element_size() // ALIGNMENT) * ALIGNMENT // t.element_size()
    copy = torch.empty((*t.shape[:-1], width), dtype=t.dtype, device=t.device)[..., : t.shape[-1]]
    copies.pairs.append((copy, t.detach()))
    return copy


def _stage_int8(ops: Operands, copies: Copies) -> tuple[Side, Side]:
    if isinstance(ops.a, list):
        pairs = [_int8_pair(a, b, copies) for a, b in zip(ops.a, cast(list[Tensor], ops.b), strict=True)]
        return [a for a, _ in pairs], [b for _, b in pairs]
    return _int8_pair(ops.a, cast(Tensor, ops.b), copies)


def _int8_pair(a: Tensor, b: Tensor, copies: Copies) -> tuple[Tensor, Tensor]:
    if a.shape[-1] % INT8_STEP == 0:
        return _int8_rows(a, copies), _int8_rows(b.transpose(-1, -2), copies).transpose(-1, -2)
    padded = -(-a.shape[-1] // INT8_PAD) * INT8_PAD
    return _padded(a, padded, copies), _padded(b.transpose(-1, -2), padded, copies).transpose(-1, -2)


def _int8_rows(t: Tensor, copies: Copies) -> Tensor:
    """The matrix with its last direction contiguous and everything in steps of four bytes."""
    rows, inner = t.shape[-2], t.shape[-1]
    contiguous = inner <= 1 or (t.stride(-1) == 1 and (rows <= 1 or t.stride(-2) >= inner))
    steps = [s for n, s in zip(t.shape[:-1], t.stride()[:-1], strict=True) if n > 1]
    if contiguous and all(s % INT8_STEP == 0 for s in (*steps, t.data_ptr())):
        return t
    return _padded(t, inner, copies)


def _padded(t: Tensor, inner: int, copies: Copies) -> Tensor:
    copy = torch.zeros((*t.shape[:-1], inner), dtype=t.dtype, device=t.device)
    copies.pairs.append((copy[..., : t.shape[-1]], t.detach()))
    return copy
