"""Side streams of our own, made by the driver, each with a cuBLAS handle and a workspace: lent to one launch after
another.

torch hands out a few streams in turn: a caller's capture that forks onto one of those would catch work that somebody
else puts there. A handle that is aimed at one stream for good spares every launch two library calls a stream. Making
these takes longer than a library call, so they are kept; and since launches on one stream follow each other anyway, a
side belongs to the stream that it is forked from, as torch's workspaces do: no stream ever waits for another one's.
"""

from __future__ import annotations

import ctypes
import os
import re
import weakref
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor

from multigemm.backends.cublas.library import EXACT_MATH, Cublas, check
from multigemm.backends.cublas.nvrtc import INVALID_CONTEXT, driver, driver_checked, use_context

NON_BLOCKING = 1
WITHOUT_TIMING = 2
RELAXED = 2
"""The mode in which a thread may allocate memory while some stream is captured."""
DEFAULT_WORKSPACE = 32 << 20
"""Bytes; what cuBLAS asks for on Hopper."""


@cache
def workspace_bytes() -> int:
    """As torch sizes the workspace of its own handle, so that the same kernels are chosen for every stream.

    Each stream has one of its own: in a shared one the split sums of two streams would mix.
    """
    pools = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * int(count) << 10 for kib, count in pools) or DEFAULT_WORKSPACE


def when_gone(owner: Any, function: Callable[..., object], *arguments: Any) -> None:
    """Calls the function when `owner` dies; not at the end of the process, where the driver may have gone before."""
    weakref.finalize(owner, function, *arguments).atexit = False


class Event:
    """A driver event without timing; torch's own would pass through more of Python at each record and wait."""

    __slots__ = ("__weakref__", "_device", "raw")

    def __init__(self, device: int) -> None:
        self.raw, self._device = ctypes.c_void_p(), device
        use_context(device)
        driver_checked(driver().cuEventCreate(ctypes.byref(self.raw), WITHOUT_TIMING), "cuEventCreate")
        when_gone(self, driver().cuEventDestroy_v2, self.raw)

    def record(self, stream: ctypes.c_void_p) -> None:
        status = driver().cuEventRecord(self.raw, stream)
        if status == INVALID_CONTEXT:
            use_context(self._device)
            status = driver().cuEventRecord(self.raw, stream)
        driver_checked(status, "cuEventRecord")


class Side:
    """A stream that nobody else knows of, with what is needed to call the library there, and the events around it.

    It lives as long as the process: destroying a handle frees memory, which would break another thread's capture.
    """

    __slots__ = ("_begin", "_end", "_own", "captured", "done", "fork", "handle", "raw")

    def __init__(self, library: Cublas, device: int) -> None:
        self.raw, self.handle, self.captured = ctypes.c_void_p(), ctypes.c_void_p(), False
        before = ctypes.c_int(RELAXED)
        use_context(device)
        driver_checked(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(before)), "capture mode")
        try:
            driver_checked(driver().cuStreamCreate(ctypes.byref(self.raw), NON_BLOCKING), "cuStreamCreate")
            check(library.create(ctypes.byref(self.handle)), "cublasCreate")
            self._own = workspace(device, self.raw)
        finally:
            driver_checked(driver().cuThreadExchangeStreamCaptureMode(ctypes.byref(before)), "capture mode")
        self.fork, self.done = Event(device), Event(device)
        self._begin, self._end = driver().cuStreamWaitEvent, driver().cuEventRecord
        check(library.set_stream(self.handle, self.raw), "cublasSetStream")
        check(library.set_math_mode(self.handle, EXACT_MATH), "cublasSetMathMode")
        self.lend(library, self._own)

    def lend(self, library: Cublas, space: Tensor | None) -> None:
        """Lets the calls here work in `space`; None gives them this stream's own workspace back."""
        given = self._own if space is None else space
        size = ctypes.c_size_t(given.numel())
        check(library.set_workspace(self.handle, ctypes.c_void_p(given.data_ptr()), size), "cublasSetWorkspace")

    def begin(self, after: ctypes.c_void_p) -> None:
        """What is enqueued here from now on waits for what the event recorded."""
        status = self._begin(self.raw, after, 0)
        if status:
            driver_checked(status, "cuStreamWaitEvent")

    def end(self) -> None:
        """Marks the end of the work here."""
        status = self._end(self.done.raw, self.raw)
        if status:
            driver_checked(status, "cuEventRecord")

    def join(self, stream: ctypes.c_void_p) -> None:
        """What is enqueued on `stream` from now on waits for that end."""
        status = self._begin(stream, self.done.raw, 0)
        if status:
            driver_checked(status, "cuStreamWaitEvent")


def workspace(device: int, stream: ctypes.c_void_p | None = None) -> Tensor:
    """Memory that torch's allocator takes to belong to that stream (or to the current one)."""
    where = torch.device("cuda", device)
    user = None if stream is None else torch.cuda.ExternalStream(stream.value, device=where)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(user):
        return torch.empty(workspace_bytes(), dtype=torch.uint8, device=where)


def capture_of(stream: ctypes.c_void_p) -> int:
    """The number of the capture that this stream is part of; 0 if there is none."""
    state, number = ctypes.c_int(), ctypes.c_uint64()
    status = driver().cuStreamGetCaptureInfo_v2(stream, ctypes.byref(state), ctypes.byref(number), None, None, None)
    driver_checked(status, "cuStreamGetCaptureInfo")
    return number.value if state.value else 0


class Sides:
    """All sides of this process that nobody uses at the moment, by device and by the stream that they fork from."""

    _idle: ClassVar[dict[tuple[int, int], list[Side]]] = {}

    @classmethod
    def borrow(cls, library: Cublas, device: int, stream: int, count: int, capture: int = 0) -> list[Side]:
        """As many sides as asked for; `capture` is the number of the capture that `stream` is part of, or 0.

        A side that a capture has used belongs to it until it ends: work of others would become part of it.
        """
        idle, found, taken = cls._idle.setdefault((device, stream), []), list[Side](), list[Side]()
        while idle and len(found) < count:
            side = idle.pop()
            free = not side.captured or capture_of(side.raw) in (0, capture)
            (found if free else taken).append(side)
        idle += taken
        found += [Side(library, device) for _ in range(count - len(found))]
        for side in found:
            side.captured = bool(capture)
        return found

    @classmethod
    def give_back(cls, device: int, stream: int, sides: list[Side]) -> None:
        """What is still on its way there stays in front of the next borrower's work."""
        cls._idle[device, stream] += sides[::-1]
