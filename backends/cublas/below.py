"""C++ functions of torch that have no name in Python: found by their symbols, called with tensors that lie ready.

torch's grouped_mm asks its dispatcher for a result and then calls a function that takes one; that function is
exported. Entering there spares the host a third of the call, and the result lands where it is wanted.

No exception of C++ may pass through ctypes. torch's stable C interface has a loop that calls a function of three
arguments in place and turns what it throws into a status. A few instructions make five arguments of the third and
jump on, so that nothing without unwinding tables lies between who throws and who catches. Where any of this is
missing, callers go through the dispatcher.
"""

from __future__ import annotations

import ctypes
import mmap
import platform
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from multigemm.backends.cublas.library import NO_LOAD

UNPACK = bytes.fromhex(
    "f30f1efa"  # endbr64
    "4889d0"  # mov rax, rdx: the table, third argument of the loop's callback
    "488b38 488b7008 488b5010 488b4818 4c8b4020"  # rdi, rsi, rdx, rcx, r8 = its first five entries
    "ff6028"  # jmp [rax + 40]: the sixth is the function
)
MACHINES = ("x86_64", "AMD64")
ARGUMENTS = 5
GROUPED_MM = "_ZN2at4cuda6detail19bf16bf16_grouped_mmENS_6TensorES2_St8optionalIS2_ES4_RS2_"
"""void at::cuda::detail::bf16bf16_grouped_mm(Tensor, Tensor, optional<Tensor>, optional<Tensor>, Tensor&)"""
SEEN = ((2, 11),)
"""Releases of torch whose function was seen on a GPU. One that moved what it takes by value would keep a reference that
nobody gave it; a test shows that this one copies, and any other torch has to pass it first."""
_pages: list[mmap.mmap] = []
"""Executable memory, which lives as long as the process."""


@cache
def _unpack() -> int:
    """The address of the instructions; OSError or ValueError where memory may not be executed."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        raise OSError(f"no instructions for {platform.system()} on {platform.machine()}")
    page = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
    page.write(UNPACK)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    readable = ctypes.c_int(mmap.PROT_READ | mmap.PROT_EXEC)
    if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address), ctypes.c_size_t(mmap.PAGESIZE), readable):
        raise OSError("memory may not be executed here")
    _pages.append(page)
    return address


@cache
def _loop() -> Any:
    """torch_parallel_for(begin, end, grain, callback, its third argument), since torch 2.10. Holds Python's lock, as
    calls through torch's dispatcher from Python do."""
    return ctypes.PyDLL("libtorch_cpu.so", mode=NO_LOAD).torch_parallel_for


def release() -> tuple[int, int]:
    """Major and minor number of torch."""
    major, minor = torch.__version__.split(".")[:2]
    return int(major), int(minor)


@cache
def function(library: str, symbol: str) -> int | None:
    """The address of a function in a library that torch has loaded, if it can be called from here."""
    try:
        _unpack()
        _loop()
        found = getattr(ctypes.PyDLL(library, mode=NO_LOAD), symbol)
    except (OSError, ValueError, AttributeError):
        return None
    return ctypes.cast(found, ctypes.c_void_p).value


def grouped_mm() -> int | None:
    """The address of torch's grouped_mm with an output, in the releases where it was seen."""
    return function("libtorch_cuda.so", GROUPED_MM) if release() in SEEN else None


class Cells:
    """Tensors as C++ sees them: each is the address of its implementation, behind it whether an optional holds it."""

    __slots__ = ("_cells", "_keep")

    def __init__(self, tensors: Sequence[Tensor | None]) -> None:
        given = [(0, 0) if t is None else (t._cdata, 1) for t in tensors]
        self._cells = (ctypes.c_void_p * (2 * len(given)))(*(value for pair in given for value in pair))
        self._keep = tuple(tensors)

    def at(self, index: int) -> int:
        """Where a function finds that tensor: by value, by reference and as an optional alike."""
        return ctypes.addressof(self._cells) + index * 2 * ctypes.sizeof(ctypes.c_void_p)


class Bound:
    """A function with its arguments. `call()` returns a status, other than 0 for whatever the function throws."""

    __slots__ = ("_keep", "call")

    def __init__(self, address: int, tensors: Sequence[Tensor | None]) -> None:
        cells = Cells(tensors)
        given = [cells.at(i) for i in range(len(tensors))] + [0] * (ARGUMENTS - len(tensors))
        table = (ctypes.c_void_p * (ARGUMENTS + 1))(*given, address)
        once = ctypes.c_int64(0), ctypes.c_int64(1), ctypes.c_int64(1)
        pointers = ctypes.c_void_p(_unpack()), ctypes.c_void_p(ctypes.addressof(table))
        self.call: Callable[[], int] = partial(_loop(), *once, *pointers)
        self._keep = cells, table
