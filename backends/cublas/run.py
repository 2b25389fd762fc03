"""Enqueues bound work: library calls on torch's handle, on one stream or spread over several."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Callable, Sequence
from typing import Any

import torch

from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Call, Cublas, begin, check, end, handle, issue, make
from multigemm.backends.cublas.nvrtc import INVALID_CONTEXT, driver, driver_checked, use_context
from multigemm.layouts import Operands

cuda: Any = torch.cuda  # its classes carry no types
WITHOUT_TIMING = 2
WORKSPACE_BYTES = 32 << 20
"""Per side stream; what cuBLAS asks for on Hopper. A shared one would let split sums of two streams mix."""


class Steps:
    """A bound launch: its steps in order, on the current stream of the operands' device."""

    __slots__ = ("_device", "_keep", "_steps")

    def __init__(self, ops: Operands, steps: Sequence[Callable[[int], None]], keep: object = None) -> None:
        self._steps, self._keep = tuple(steps), (ops, keep)
        self._device = ops.device.index or 0

    def __call__(self) -> None:
        if torch._C._cuda_getDevice() == self._device:
            self._run()
        else:
            with torch.cuda.device(self._device):
                self._run()

    def _run(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for step in self._steps:
            step(stream)


class Calls:
    """Library calls one after the other on the current stream."""

    __slots__ = ("_batch", "_calls", "_library")

    def __init__(self, library: Cublas, batch: Batch) -> None:
        self._library, self._batch, self._calls = library, batch, tuple(batch.calls)

    def __call__(self, stream: int) -> None:
        issue(self._library, handle(), self._calls)


def shares(work: Sequence[int], streams: int) -> list[list[int]]:
    """Indices per stream: the largest piece of work first, each to the stream with the least so far."""
    heap = [(0, i) for i in range(max(1, streams))]
    split: list[list[int]] = [[] for _ in range(max(1, streams))]
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, stream = heapq.heappop(heap)
        split[stream].append(index)
        heapq.heappush(heap, (load + work[index], stream))
    return split[:1] + [share for share in split[1:] if share]


class _Event:
    """A driver event without timing; torch's own would pass through more of Python at each record and wait."""

    __slots__ = ("_device", "_raw")

    def __init__(self, device: torch.device) -> None:
        self._raw, self._device = ctypes.c_void_p(), device.index or 0
        use_context(self._device)
        driver_checked(driver().cuEventCreate(ctypes.byref(self._raw), WITHOUT_TIMING), "cuEventCreate")

    def record(self, stream: ctypes.c_void_p) -> None:
        status = driver().cuEventRecord(self._raw, stream)
        if status == INVALID_CONTEXT:
            use_context(self._device)
            status = driver().cuEventRecord(self._raw, stream)
        driver_checked(status, "cuEventRecord")

    def hold(self, stream: ctypes.c_void_p) -> None:
        """Whatever is enqueued on `stream` from now on waits for what the event recorded."""
        driver_checked(driver().cuStreamWaitEvent(stream, self._raw, 0), "cuStreamWaitEvent")

    def __del__(self) -> None:
        if self._raw:
            driver().cuEventDestroy_v2(self._raw)


class _Lane:
    """A side stream with its own workspace, its share of the calls and the event that ends it."""

    __slots__ = ("_pointer", "_size", "_space", "_stream", "calls", "done", "raw")

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self.calls, self._stream, self.done = tuple(calls), cuda.Stream(device), _Event(device)
        self._space = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
        self.raw, self._size = ctypes.c_void_p(self._stream.cuda_stream), ctypes.c_size_t(WORKSPACE_BYTES)
        self._pointer = ctypes.c_void_p(self._space.data_ptr())

    def run(self, library: Cublas, blas: ctypes.c_void_p, after: _Event) -> None:
        """Turns the handle to this stream and workspace, and makes the calls behind `after`."""
        after.hold(self.raw)
        check(library.set_stream(blas, self.raw), "cublasSetStream")
        check(library.set_workspace(blas, self._pointer, self._size), "cublasSetWorkspace")
        make(blas, self.calls)
        self.done.record(self.raw)


class Streamed:
    """Library calls on the current stream and on side streams at once, forked from it and joined to it again.

    The current stream waits for all of them before it goes on, so operands may be freed or reused
    by whatever follows on it, exactly as after a single call.
    """

    __slots__ = ("_batch", "_fork", "_here", "_lanes", "_library")

    def __init__(
        self, library: Cublas, batch: Batch, shapes: Sequence[Shape], streams: int, device: torch.device
    ) -> None:
        self._library, self._batch, self._fork = library, batch, _Event(device)
        split = shares([s.m * s.n * s.k for s in shapes], streams)
        self._here = tuple(batch.calls[i] for i in split[0])
        self._lanes = [_Lane([batch.calls[i] for i in share], device) for share in split[1:]]

    def __call__(self, stream: int) -> None:
        library, blas, current = self._library, handle(), ctypes.c_void_p(stream)
        self._fork.record(current)
        mode = begin(library, blas)
        try:
            make(blas, self._here)
            for lane in self._lanes:
                lane.run(library, blas, self._fork)
        finally:
            end(library, handle(), mode)  # torch aims its handle at its own current stream and workspace again
        for lane in self._lanes:
            lane.done.hold(current)
