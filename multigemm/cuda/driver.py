"""The CUDA driver through ctypes: the library, its errors, the context of a thread, the launch record.

Calls of the driver run inside `on_device`, which makes the device's primary context (shared with torch and CuPy)
current on the calling thread. A thread that never touched CUDA has none, for example autograd's backward thread.
Launches (`settle`) and encodings of tensor maps are tried first and repeated with the context if it was missing,
because checking beforehand costs as much as a launch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

from multigemm.errors import LibraryError

NO_CONTEXT = 201
"""What a call returns on a thread that never touched CUDA."""
RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
CLUSTER_DIMENSION = 4  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
PROGRAMMATIC = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION


class LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute: an identifier and a 64-byte union, of which the three numbers of a cluster are used."""

    _fields_ = [
        ("id", ctypes.c_uint),
        ("pad", ctypes.c_uint),
        ("dim", ctypes.c_uint * 3),
        ("rest", ctypes.c_ubyte * 52),
    ]


class LaunchConfig(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("attribute_count", ctypes.c_uint),
    ]


class Records(dict[int, Any]):
    """References to a launch record, one per raw stream, so that threads that launch the same plan at once do not
    overwrite each other's stream."""

    def __init__(self, record: LaunchConfig) -> None:
        super().__init__()
        self._record, self._own = record, list[LaunchConfig]()
        self._blocks: tuple[int, int, int] | None = None

    def __missing__(self, stream: int) -> Any:
        own = LaunchConfig.from_buffer_copy(self._record)
        own.stream = stream
        self._own.append(own)
        reference = self[stream] = ctypes.byref(own)
        return reference

    def set_grid(self, blocks: tuple[int, int, int]) -> None:
        """Changes the grid of a launch that no other thread is making."""
        if blocks != self._blocks:
            if self._blocks is None:  # the record was that of all launches of this shape
                self._record = LaunchConfig.from_buffer_copy(self._record)
                self._own.append(self._record)
            self._blocks = blocks
            for own in self._own:
                own.grid[:] = blocks


@cache
def library() -> Any:
    """libcuda. Raises OSError if no driver is installed."""
    return ctypes.CDLL("libcuda.so.1")


def check(code: int, call: str) -> None:
    """Raises LibraryError with the driver's name of the error, unless the call succeeded."""
    if code:
        name = ctypes.c_char_p()
        library().cuGetErrorName(code, ctypes.byref(name))
        raise LibraryError(f"{call} returned {code} ({(name.value or b'unknown').decode()})")


def use_context(index: int) -> None:
    """Makes the primary context of a device this thread's current one permanently, for threads that work on that device
    only."""
    check(library().cuCtxSetCurrent(ctypes.c_void_p(primary_context(index))), "cuCtxSetCurrent")


def settle(code: int, device: int, again: Callable[[], int], call: str) -> None:
    """Repeats a failed launch with the device's context, which a thread that never touched CUDA lacks. Raises any other
    error."""
    if code == NO_CONTEXT:
        use_context(device)
        code = again()
    check(code, call)


class on_device:
    """The driver's library, with a device's primary context current on this thread; restores the former context.

    A thread that had no context has none afterwards, because torch's current device follows the context.
    """

    __slots__ = ("_before", "_wanted")

    def __init__(self, index: int) -> None:
        self._wanted = primary_context(index)

    def __enter__(self) -> Any:
        cuda, before = library(), ctypes.c_void_p()
        check(cuda.cuCtxGetCurrent(ctypes.byref(before)), "cuCtxGetCurrent")
        self._before = None if before.value == self._wanted else before
        if self._before is not None:
            check(cuda.cuCtxSetCurrent(ctypes.c_void_p(self._wanted)), "cuCtxSetCurrent")
        return cuda

    def __exit__(self, *error: object) -> None:
        if self._before is not None:
            check(library().cuCtxSetCurrent(self._before), "cuCtxSetCurrent")


@contextmanager
def beside_captures() -> Iterator[None]:
    """Allows this thread calls that any thread's capture of a CUDA graph forbids: allocating, loading code, waiting for
    uncaptured work."""
    mode = ctypes.c_int(RELAXED)
    check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")
    try:
        yield
    finally:  # `mode` holds what it was before
        check(library().cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)), "cuThreadExchangeStreamCaptureMode")


@cache
def primary_context(index: int) -> int:
    """The handle of a device's context that torch and CuPy share."""
    device, context = ctypes.c_int(), ctypes.c_void_p()
    check(library().cuInit(0), "cuInit")
    check(library().cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    return context.value or 0
