"""Operands in hostile memory: guard bands round each, poison in every byte that nobody may read.

All operands of one side (inputs, or outputs) live in one arena of bytes, at offsets that are the same
on the host and on a device. So one copy moves a whole problem, one comparison finds every byte that
was written and should not have been, and a failing case has the same addresses, modulo 512, everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.testing.case import PLAIN, Layout

ALIGN = 512
Bytes = npt.NDArray[np.uint8]

# NaN with a payload that no arithmetic makes, so that an unwritten element differs from a computed NaN.
POISON = {
    torch.float16: 0x7DB1,
    torch.bfloat16: 0x7FB1,
    torch.float32: 0x7FBADBAD,
    torch.float64: 0x7FFBADBADBADBADB,
    torch.int8: 0x7D,
    torch.int32: 0x7BADBADB,
    torch.int64: 0x7BADBADBADBADBAD,
}
_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SIGNED = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True)
class Region:
    """One tensor inside an arena: `offset` is the byte of its first element, strides are in elements."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int

    def view(self, arena: Tensor) -> Tensor:
        """The tensor over an arena on any device."""
        return self._over(arena.view(self.dtype))

    def bits(self, arena: Tensor) -> Tensor:
        """The same elements as integers of the same width."""
        return self._over(arena.view(_SIGNED[self.dtype.itemsize]))

    def _over(self, typed: Tensor) -> Tensor:
        # as_strided counts from the start of the storage, and the arena may be a slice of a larger one
        first = typed.storage_offset() + self.offset // self.dtype.itemsize
        return typed.as_strided(self.shape, self.strides, first)

    def distinct(self, arena: Tensor) -> Tensor:
        """The view with each stride-0 direction cut to its first element, so that it can be written."""
        view = self.view(arena)
        for axis, stride in enumerate(self.strides):
            if stride == 0 and self.shape[axis] > 1:
                view = view.narrow(axis, 0, 1)
        return view


def strides_for(shape: Sequence[int], layout: Layout) -> tuple[tuple[int, ...], int]:
    """Strides in elements, and how many elements the tensor reaches over."""
    *front, rows, cols = shape if len(shape) > 1 else (1, *shape)
    inner, outer = (cols, rows) if layout.order == "row" else (rows, cols)
    near = 0 if ("c" if layout.order == "row" else "r") in layout.zero else layout.step
    line = max(inner, 1) * layout.step
    lead = line + (layout.pad if layout.pad >= 0 else -line % -layout.pad)
    far = 0 if ("r" if layout.order == "row" else "c") in layout.zero else lead
    strides = [far, near] if layout.order == "row" else [near, far]
    whole = lead * max(outer, 1)
    if front:
        strides.insert(0, 0 if "g" in layout.zero else whole)
        whole *= max(front[0], 1)
    return (tuple(strides) if len(shape) > 1 else (layout.step,)), whole


class Arena:
    """Collects regions, then makes the bytes."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        self._fills: list[tuple[int, int, torch.dtype]] = []
        self._size = 0

    def add(self, dtype: torch.dtype, shape: Sequence[int], layout: Layout = PLAIN, *, guard: int = 4096) -> Region:
        """Room for one tensor, with at least `guard` bytes on each side; its first element is `layout.shift`
        elements past a 512-byte boundary."""
        strides, reach = strides_for(shape, layout)
        start = self._size
        first = _up(start + guard, ALIGN) + layout.shift * dtype.itemsize
        stop = _up(first + reach * dtype.itemsize + guard, ALIGN)
        region = Region(dtype, tuple(shape), strides, first)
        self.regions.append(region)
        self._fills.append((start, stop, dtype))
        self._size = stop
        return region

    def poisoned(self) -> Tensor:
        """Fresh bytes on the host: every region and its surroundings hold its dtype's poison."""
        data = np.empty(max(self._size, ALIGN), np.uint8)
        data[self._size :] = 0
        for start, stop, dtype in self._fills:
            data[start:stop].view(_UNSIGNED[dtype.itemsize])[:] = POISON[dtype]
        return torch.from_numpy(data)

    def blank(self) -> Tensor:
        """Fresh bytes on the host that hold anything."""
        return torch.empty(max(self._size, ALIGN), dtype=torch.uint8)

    def random_bytes(self, seed: int) -> Tensor:
        """Fresh bytes that are finite numbers in every format: the second prefill."""
        size = max(self._size, ALIGN)
        pattern = np.random.default_rng(seed).integers(0x11, 0x3B, 4099, np.uint8)  # a prime: no row repeats another
        return torch.from_numpy(np.resize(pattern, size))


def _up(value: int, unit: int) -> int:
    return -(-value // unit) * unit


def guard_bytes(shape: Sequence[int], itemsize: int) -> int:
    """A guard of about one tile of rows: 4 KiB to 64 KiB."""
    return min(max(256 * itemsize * (shape[-1] if shape else 1), 4096), 65536)


def foreign_writes(got: Bytes, before: Bytes, mask: Bytes) -> int:
    """How many bytes changed where `mask` (0xFF for what may be written) does not allow it."""
    changed = (got.view(np.uint64) ^ before.view(np.uint64)) & ~mask.view(np.uint64)
    if not changed.any():
        return 0
    return int(np.count_nonzero(changed.view(np.uint8)))
