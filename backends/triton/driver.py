"""Launches through the CUDA driver with prepared argument buffers: a few microseconds per call.

A launch here is one foreign call. The arguments were packed when the problem was bound; only the
stream is looked up at launch time, as the contract asks.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch

from multigemm.backends.triton.compile import Cubin
from multigemm.cuda.driver import MAX_DYNAMIC_SHARED, check, library, settle, use_context

_loading = threading.Lock()


@lru_cache(maxsize=1)
def launch_kernel() -> Any:
    """The driver's cuLaunchKernel, typed since it is called often."""
    call = library().cuLaunchKernel
    call.argtypes = [ctypes.c_void_p, *[ctypes.c_uint] * 7, *[ctypes.c_void_p] * 3]
    return call


def index_of(device: torch.device) -> int:
    """The device's number; the current one where a device has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


_functions: dict[tuple[int, int], tuple[Cubin, int]] = {}


def function(code: Cubin, index: int) -> int:
    """The loaded kernel's handle on a device; loaded once per device, never unloaded."""
    key = (id(code), index)
    with _loading:
        if key not in _functions:
            with torch.cuda.device(index):
                _functions[key] = (code, _load(code, index))
        return _functions[key][1]


def _load(code: Cubin, index: int) -> int:
    cuda = library()
    use_context(index)
    module, handle = ctypes.c_void_p(), ctypes.c_void_p()
    check(cuda.cuModuleLoadData(ctypes.byref(module), code.code), "cuModuleLoadData")
    check(cuda.cuModuleGetFunction(ctypes.byref(handle), module, code.name.encode()), "cuModuleGetFunction")
    if code.shared > 48 * 1024:
        check(cuda.cuFuncSetAttribute(handle, MAX_DYNAMIC_SHARED, code.shared), "cuFuncSetAttribute")
    return int(handle.value or 0)


def align_up(address: int, to: int) -> int:
    return (address + to - 1) // to * to


class Arguments:
    """Kernel arguments in memory that outlives every launch, and the pointers to them."""

    def __init__(self, values: Sequence[int | bytes], keep: Sequence[object]) -> None:
        raw = bytearray()
        places: list[int] = []
        for value in values:
            if isinstance(value, bytes):
                raw += bytes(-len(raw) % 64)  # tensor maps are aligned
            places.append(len(raw))
            raw += value if isinstance(value, bytes) else (value & (2**64 - 1)).to_bytes(8, "little")
        self._raw = ctypes.create_string_buffer(len(raw) + 64)
        at = align_up(ctypes.addressof(self._raw), 64)
        ctypes.memmove(at, bytes(raw), len(raw))
        self.pointers = (ctypes.c_void_p * max(1, len(values)))(*(at + place for place in places))
        self.keep = keep


def launcher(
    code: Cubin, index: int, grid: int, values: Sequence[int | bytes], keep: Sequence[object],
    captured: Callable[[], object] | None = None,
) -> Callable[[], None]:  # fmt: skip
    """A launch of `grid` programs with fixed arguments on the device's current stream.

    `captured` is called whenever a launch becomes part of a CUDA graph.

    Triton appends parameters of its own (a scratch buffer in global memory, a profile buffer) behind
    the kernel's: the PTX says how many. The scratch buffer is allocated here, once per bound problem.
    """
    scratch = torch.empty(0, dtype=torch.uint8)
    extra = [0] * (code.params - len(values))
    if code.scratch:
        size = code.scratch * grid + code.scratch_align
        scratch = torch.empty(size, dtype=torch.uint8, device=torch.device("cuda", index))
        extra[0] = align_up(scratch.data_ptr(), code.scratch_align)
    arguments = Arguments([*values, *extra], (*keep, scratch))
    run = _bound(code, index, grid, arguments)
    return run if captured is None else partial(_told, captured, run)


def _told(captured: Callable[[], object], run: Callable[[], None]) -> None:
    if torch.cuda.is_current_stream_capturing():
        captured()
    run()


def _bound(code: Cubin, index: int, grid: int, arguments: Arguments) -> Callable[[], None]:
    call, handle, pointers = launch_kernel(), ctypes.c_void_p(function(code, index)), arguments.pointers
    blocks, threads, shared = ctypes.c_uint(grid), ctypes.c_uint(code.threads), ctypes.c_uint(code.shared)
    one = ctypes.c_uint(1)
    stream_of: Any = torch._C._cuda_getCurrentRawStream
    device_now = torch.cuda.current_device

    def start() -> int:
        stream = stream_of(index)
        return int(call(handle, blocks, one, one, threads, one, one, shared, stream, pointers, None))

    def launch(_keep: Arguments = arguments) -> None:
        if device_now() == index:
            result = start()
        else:
            with torch.cuda.device(index):
                result = start()
        if result:
            settle(result, index, start, f"cuLaunchKernel of {code.name}")

    return launch
