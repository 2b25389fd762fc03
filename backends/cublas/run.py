"""Enqueues bound work: library calls on torch's handle, on one stream or spread over several."""

from __future__ import annotations

import ctypes
import heapq
import os
import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import cast

import torch
from torch import Tensor

from multigemm.backends.cublas.calls import GROUPED, Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Call, Cublas, begin, check, end, handle, issue, make
from multigemm.backends.cublas.nvrtc import INVALID_CONTEXT, driver, driver_checked, use_context
from multigemm.backends.cublas.record import Graph, Stream
from multigemm.layouts import Operands

WITHOUT_TIMING = 2
DEFAULT_WORKSPACE = 32 << 20
"""Bytes; what cuBLAS asks for on Hopper."""


@cache
def workspace_bytes() -> int:
    """As torch sizes the workspace of its own handle, so that the same kernels are chosen for every stream.

    Each stream has one of its own: in a shared one the split sums of two streams would mix.
    """
    pools = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * int(count) << 10 for kib, count in pools) or DEFAULT_WORKSPACE


class Steps:
    """A bound launch: its steps in order, on the current stream of the operands' device.

    Several pieces of work become one graph at the second run (see `record`).
    """

    __slots__ = ("_blas", "_device", "_graph", "_keep", "_ran", "_several", "_space", "_steps")

    def __init__(self, ops: Operands, steps: Sequence[Callable[[int], None]], keep: object = None) -> None:
        self._steps, self._keep = tuple(steps), (ops, keep)
        self._device, self._ran, self._graph = ops.device.index or 0, False, cast(Graph | None, None)
        self._blas = next((step for step in steps if isinstance(step, Calls | Streamed)), None)
        pieces = len(steps) if self._blas is None else len(steps) - 1 + self._blas.pieces
        self._several = pieces > 1 and (self._blas is None or self._blas.replayable)
        owns = self._several and self._blas is not None
        self._space = torch.empty(workspace_bytes(), dtype=torch.uint8, device=ops.device) if owns else None

    def __call__(self) -> None:
        if torch._C._cuda_getDevice() == self._device:
            self._run()
        else:
            with torch.cuda.device(self._device):
                self._run()

    def _run(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if self._several and not torch._C._cuda_isCurrentStreamCapturing():
            if self._graph is None and self._ran:
                self._graph = self._recorded()
            if self._graph is not None:
                self._graph.replay(stream)
                return
            self._ran = True
        for step in self._steps:
            step(stream)

    def _recorded(self) -> Graph:
        if self._blas is None:
            return Graph(self._device, lambda stream: self._enqueue(stream, None))
        library, blas = self._blas.library, handle()
        mode = begin(library, blas)
        try:
            return Graph(self._device, lambda stream: self._enqueue(stream, blas))
        finally:
            end(library, handle(), mode)  # torch aims its handle at its own current stream and workspace again

    def _enqueue(self, stream: ctypes.c_void_p, blas: ctypes.c_void_p | None) -> None:
        for step in self._steps:
            if blas is not None and isinstance(step, Calls | Streamed):
                aim(step.library, blas, stream, cast(Tensor, self._space))
                step.record(blas, stream)
            else:
                step(stream.value or 0)


def aim(library: Cublas, blas: ctypes.c_void_p, stream: ctypes.c_void_p, space: Tensor) -> None:
    """Turns the handle to a stream and a workspace."""
    check(library.set_stream(blas, stream), "cublasSetStream")
    size = ctypes.c_size_t(space.numel())
    check(library.set_workspace(blas, ctypes.c_void_p(space.data_ptr()), size), "cublasSetWorkspace")


class Calls:
    """Library calls one after the other on the current stream."""

    __slots__ = ("_batch", "_calls", "library", "pieces", "replayable")

    def __init__(self, library: Cublas, batch: Batch) -> None:
        self.library, self._batch, self._calls = library, batch, tuple(batch.calls)
        self.pieces = len(self._calls)
        self.replayable = all(call.name != GROUPED for call in self._calls)  # that one takes 5 us more in a graph

    def __call__(self, stream: int) -> None:
        issue(self.library, handle(), self._calls)

    def record(self, blas: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        """Makes the calls on a handle that is turned to `stream` and in exact math."""
        make(blas, self._calls)


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

    __slots__ = ("_space", "_stream", "calls", "done")

    def __init__(self, calls: Sequence[Call], device: torch.device) -> None:
        self.calls, self._stream, self.done = tuple(calls), Stream(device.index or 0), _Event(device)
        self._space = torch.empty(workspace_bytes(), dtype=torch.uint8, device=device)

    def run(self, library: Cublas, blas: ctypes.c_void_p, after: _Event) -> None:
        """Makes the calls on this stream, behind `after`."""
        after.hold(self._stream.raw)
        aim(library, blas, self._stream.raw, self._space)
        make(blas, self.calls)
        self.done.record(self._stream.raw)


class Streamed:
    """Library calls on the current stream and on side streams at once, forked from it and joined to it again.

    The current stream waits for all of them before it goes on, so operands may be freed or reused
    by whatever follows on it, exactly as after a single call.
    """

    __slots__ = ("_batch", "_fork", "_here", "_lanes", "library", "pieces", "replayable")

    def __init__(
        self, library: Cublas, batch: Batch, shapes: Sequence[Shape], streams: int, device: torch.device
    ) -> None:
        self.library, self._batch, self._fork = library, batch, _Event(device)
        split = shares([s.m * s.n * s.k for s in shapes], streams)
        self._here = tuple(batch.calls[i] for i in split[0])
        self._lanes = [_Lane([batch.calls[i] for i in share], device) for share in split[1:]]
        self.pieces, self.replayable = len(batch.calls), True

    def __call__(self, stream: int) -> None:
        blas, current = handle(), ctypes.c_void_p(stream)
        mode = begin(self.library, blas)
        try:
            self._spread(blas, current)
        finally:
            end(self.library, handle(), mode)  # torch aims its handle at its own current stream and workspace again
        self._join(current)

    def record(self, blas: ctypes.c_void_p, stream: ctypes.c_void_p) -> None:
        """The same on a handle that is turned to `stream` and in exact math."""
        self._spread(blas, stream)
        self._join(stream)

    def _spread(self, blas: ctypes.c_void_p, current: ctypes.c_void_p) -> None:
        self._fork.record(current)
        make(blas, self._here)
        for lane in self._lanes:
            lane.run(self.library, blas, self._fork)

    def _join(self, current: ctypes.c_void_p) -> None:
        for lane in self._lanes:
            lane.done.hold(current)
