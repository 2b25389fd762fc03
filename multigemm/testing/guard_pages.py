"""Memory in which a stray access shows: guard pages round operands, guard bands round a backend's own allocations.

Poison beside an operand shows a stray read only if its value reaches a result. Here each operand lies in memory of its
own, against a guard page, which is not mapped: behind its last byte, or in front of its first. A kernel that touches
the next element ends in an error (on a GPU), or with its process (on a CPU). What a 16-byte access takes along within
its own 16 bytes is no fault: no such access crosses a page.

A workspace, a list of tiles, a count that a backend takes from torch while it binds has no such page, and what lies
behind it is whatever the allocator left there. Each gets a guard band on either side: a store into one shows, and what
a kernel reads there is chosen so that it leads astray.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from math import prod
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from multigemm.cuda import driver
from multigemm.problem.arrays import Memory
from multigemm.testing.placed_case import Region

FILL = 0xFF
"""NaN in every float format."""
MOST_OPERANDS = 12
"""Operands of one problem that get memory of their own; further matrices of a list stay where they are."""
ALIGN = 16
"""The number of bytes up to which a spec distinguishes alignments; placed operands keep their remainder."""

PINNED, DEVICE, READ_WRITE = 1, 1, 3  # CU_MEM_ALLOCATION_TYPE_PINNED, .._LOCATION_TYPE_DEVICE, .._ACCESS_FLAGS_PROT_..


@dataclass(slots=True)
class Block:
    """Mapped bytes between two pages that are not; `keep` owns the mapping."""

    bytes: Tensor
    keep: Any

    @property
    def begin(self) -> int:
        return self.bytes.data_ptr()

    @property
    def end(self) -> int:
        return self.bytes.data_ptr() + self.bytes.numel()


def _host_block(size: int) -> Block:
    page = mmap.PAGESIZE
    size = -(-size // page) * page
    memory = mmap.mmap(-1, size + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for edge in (address, address + page + size):
        if protect(edge, page, 0):
            raise OSError(ctypes.get_errno(), "mprotect")
    whole = torch.frombuffer(memory, dtype=torch.uint8)
    return Block(whole[page : page + size], memory)


def _driver(name: str, *arguments: Any) -> None:
    driver.check(getattr(driver.library(), name)(*arguments), name)


def _device_block(size: int, device: torch.device) -> Block:
    """A mapping in the middle of a reserved range of addresses."""
    where = (DEVICE, device.index or 0)
    made = (ctypes.c_int * 8)(PINNED, 0, *where)  # CUmemAllocationProp, whose other fields are 0
    access = (ctypes.c_int * 3)(*where, READ_WRITE)  # CUmemAccessDesc
    unit, address, handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    _driver("cuMemGetAllocationGranularity", ctypes.byref(unit), made, 0)
    size = -(-size // unit.value) * unit.value
    whole, none = ctypes.c_size_t(size + 2 * unit.value), ctypes.c_uint64(0)
    _driver("cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), none, none)
    _driver("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), made, none)
    begin = ctypes.c_uint64(address.value + unit.value)
    _driver("cuMemMap", begin, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, none)
    _driver("cuMemSetAccess", begin, ctypes.c_size_t(size), access, ctypes.c_size_t(1))
    mapped = Memory((size,), None, "|u1", begin.value, cuda=True)
    return Block(torch.as_tensor(mapped, device=device), mapped)


class GuardedBlocks:
    """The blocks of one device, reused for each problem, because mapping costs more than a launch."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.blocks, self._used = device, list[Block](), 0

    def clear(self) -> None:
        """Frees all blocks for reuse and clears their contents."""
        for block in self.blocks[: self._used]:
            block.bytes.fill_(FILL)
        self._used = 0

    def _block(self, size: int) -> Block:
        for at in range(self._used, len(self.blocks)):
            if self.blocks[at].bytes.numel() >= size:
                self.blocks[self._used], self.blocks[at] = self.blocks[at], self.blocks[self._used]
                break
        else:
            made = _device_block(size, self.device) if self.device.type == "cuda" else _host_block(size)
            made.bytes.fill_(FILL)
            self.blocks.insert(self._used, made)
        self._used += 1
        return self.blocks[self._used - 1]

    def place(self, region: Region, arena: Tensor, *, behind: bool) -> Tensor:
        """The region's tensor, with its end (or its beginning if not `behind`) at an edge of mapped memory."""
        size = region.dtype.itemsize
        reach = sum((n - 1) * step for n, step in zip(region.shape, region.strides, strict=True)) + 1
        if 0 in region.shape or self._used >= MOST_OPERANDS:
            return region.view(arena)
        reach *= size
        block = self._block(reach + ALIGN)
        here = arena.data_ptr() + region.offset
        if behind:
            first = block.end - reach
            first -= (first - here) % ALIGN
        else:
            first = block.begin + (here - block.begin) % ALIGN
        at = first - block.begin
        block.bytes[at : at + reach].copy_(arena[region.offset : region.offset + reach])
        kept = replace(region, offset=0)
        return kept.view(block.bytes[at : at + reach // size * size]) if at % size == 0 else region.view(arena)


@cache
def guarded_blocks(device: torch.device) -> GuardedBlocks:
    """One pool for each device of this process."""
    return GuardedBlocks(device)


BAND = 1 << 14
"""Bytes of a guard band; a multiple of what an allocator aligns to."""
KNOWN = {"dtype", "device"}
"""Options of an allocation that gets guard bands; any other call is torch's own."""


@dataclass(slots=True)
class GuardBands:
    """The guard bands of the allocations so far, and the byte that fills them."""

    fill: int
    bands: list[Tensor] = field(default_factory=list)

    def around(self, size: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        """Allocates memory for a tensor, with a band before and after it."""
        count = prod(size) * dtype.itemsize
        whole = torch.full((2 * BAND + count,), self.fill, dtype=torch.uint8, device=device)
        self.bands += [whole[:BAND], whole[BAND + count :]]
        return whole[BAND : BAND + count].view(dtype).reshape(size)

    def written(self) -> int:
        """The number of bytes of the bands that were overwritten."""
        return sum(int((band != self.fill).sum()) for band in self.bands)


def _size_of(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    whole = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    return tuple(int(extent) for extent in whole)


@contextmanager
def banded_allocations(fill: int) -> Iterator[GuardBands]:
    """A context in which `torch.empty` and `torch.zeros` allocate with guard bands."""
    guard_bands = GuardBands(fill)

    def banded(allocate: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def found(*sizes: Any, **options: Any) -> Tensor:
            size = _size_of(sizes) if sizes and options.keys() <= KNOWN else ()
            if not size or 0 in size or torch.device(options.get("device") or "cpu").type == "meta":
                return allocate(*sizes, **options)
            own = guard_bands.around(size, options.get("dtype") or torch.get_default_dtype(), options.get("device"))
            return own.zero_() if allocate is zeros else own

        return found

    zeros = torch.zeros
    with patch.object(torch, "empty", banded(torch.empty)), patch.object(torch, "zeros", banded(zeros)):
        yield guard_bands
