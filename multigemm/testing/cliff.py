"""Operands that end where the mapped memory ends: a read past them cannot go unseen.

Guard bands and poison show a stray read only if its value reaches a result. Here each operand lies in
memory of its own, against a page that is not mapped: behind its last byte, or in front of its first. A
kernel that touches the next element ends in an error (on a GPU), or with its process (on a CPU). What a
16-byte access takes along within its own 16 bytes is no fault: no such access crosses a page.
"""

from __future__ import annotations

import ctypes
import mmap
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from multigemm.testing.concurrency import lie, strays
from multigemm.testing.fences import fenced
from multigemm.testing.memory import Region
from multigemm.testing.oracles import Finding, Outcome, bind, differing, fetch
from multigemm.testing.subject import Subject
from multigemm.testing.world import Stand, make_problem

FILL = 0xFF
"""NaN in every float format."""
MOST = 12
"""Operands of one problem that get memory of their own; further matrices of a list stay where they are."""
FENCES = (0, FILL)
"""What lies beside memory that the backend takes for itself, in turn."""
ALIGN = 16
"""Bytes up to which a spec tells addresses apart; placed operands keep their remainder."""


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


class _Where(ctypes.Structure):
    """CUmemLocation."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class _Made(ctypes.Structure):
    """CUmemAllocationProp."""

    _fields_ = (
        ("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", _Where), ("win32", ctypes.c_void_p),
        ("flags", ctypes.c_ubyte * 8),
    )  # fmt: skip


class _Access(ctypes.Structure):
    """CUmemAccessDesc."""

    _fields_ = (("location", _Where), ("flags", ctypes.c_int))


@dataclass(frozen=True, slots=True)
class _Mapped:
    """What torch asks of foreign memory."""

    address: int
    size: int

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {"shape": (self.size,), "typestr": "|u1", "data": (self.address, False), "version": 3, "strides": None}


def _driver(name: str, *arguments: Any) -> None:
    status = getattr(ctypes.CDLL("libcuda.so.1"), name)(*arguments)
    if status:
        raise OSError(status, f"{name} failed with CUDA error {status}")


def _device_block(size: int, device: torch.device) -> Block:
    """A mapping in the middle of a reserved range of addresses."""
    where = _Where(1, device.index or 0)  # a device, by its number
    made = _Made(type=1, location=where)  # pinned to it
    unit, address, handle = ctypes.c_size_t(), ctypes.c_uint64(), ctypes.c_uint64()
    _driver("cuMemGetAllocationGranularity", ctypes.byref(unit), ctypes.byref(made), 0)
    size = -(-size // unit.value) * unit.value
    whole, none = ctypes.c_size_t(size + 2 * unit.value), ctypes.c_uint64(0)
    _driver("cuMemAddressReserve", ctypes.byref(address), whole, ctypes.c_size_t(0), none, none)
    _driver("cuMemCreate", ctypes.byref(handle), ctypes.c_size_t(size), ctypes.byref(made), none)
    begin = ctypes.c_uint64(address.value + unit.value)
    _driver("cuMemMap", begin, ctypes.c_size_t(size), ctypes.c_size_t(0), handle, none)
    access = _Access(where, 3)  # reads and writes
    _driver("cuMemSetAccess", begin, ctypes.c_size_t(size), ctypes.byref(access), ctypes.c_size_t(1))
    mapped = _Mapped(begin.value, size)
    return Block(torch.as_tensor(mapped, device=device), mapped)


class Cliffs:
    """The blocks of one device, used again for each problem: mapping costs more than a launch."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.blocks, self._used = device, list[Block](), 0

    def clear(self) -> None:
        """All blocks are free again, and hold nothing."""
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
        """The region's tensor, its end (or, not `behind`, its beginning) at an edge of what is mapped."""
        size = region.dtype.itemsize
        reach = sum((n - 1) * step for n, step in zip(region.shape, region.strides, strict=True)) + 1
        if 0 in region.shape or self._used >= MOST:
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
def cliffs(device: torch.device) -> Cliffs:
    """One pool for each device of this process."""
    return Cliffs(device)


def on_a_cliff(stand: Stand, subject: Subject, outcome: Outcome, seed: int) -> bool:
    """The same launch over operands at the edge of mapped memory, and once more with sizes that lie; what the
    backend allocates for it lies between bands.

    `outcome` is that of a run that was found right: it must come out again.
    """
    pool, case, index = cliffs(stand.device), stand.world.case, stand.world.place.index
    pool.clear()
    placed: dict[int, Tensor] = {}

    def at(region: Region, arena: Tensor) -> Tensor:
        if id(region) not in placed:
            placed[id(region)] = pool.place(region, arena, behind=seed % 4 != 3)
        return placed[id(region)]

    problem = make_problem(case, stand.world.place, stand.inputs, stand.outputs, at)
    edge = replace(stand, problem=problem)
    with fenced(FENCES[seed % 2]) as fences:
        launch, _ = bind(edge, subject)
    edge.prefill(1)
    launch()
    bad = differing(outcome.result, fetch(edge), stand.world.writable) if outcome.result is not None else 0
    if bad:
        outcome.findings.append(Finding("cliff", f"{bad} bytes differ with operands at the edge of mapped memory"))
    few = case.groups <= 2000 or stand.device.type != "cpu"  # each group of lying sizes may be the whole extent
    if index is not None and case.where == "device" and index.shape[0] and few:
        placed[id(index)].copy_(lie(stand, seed))
        edge.prefill(0)
        launch()
        strays(edge, outcome)
        stand.inputs.copy_(stand.pristine)  # where there was no room on a cliff
    if broken := fences.broken():
        outcome.findings.append(Finding("workspace", f"{broken} bytes beside the backend's own memory were written"))
    return True
