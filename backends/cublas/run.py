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

from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Call, Cublas, begin, check, end, handle, issue, make
from multigemm.backends.cublas.streams import Event, Loan, Side
from multigemm.layouts import Operands

CALL_US, FLOPS_PER_US, BYTES_PER_US = 10.0, 700e6, 2.9e6
"""What the host needs for a call, and an H100 for its work: products shorter than their calls need no streams."""
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

    It is not kept as a graph: while one thread captures, another one that waits for the device gets an error.
    A caller who knows his threads may capture it.
    """

    __slots__ = ("_device", "_keep", "_steps")

    def __init__(self, ops: Operands, steps: Sequence[Callable[[int], None]], keep: object = None) -> None:
        self._steps, self._keep, self._device = tuple(steps), (ops, keep), ops.device.index or 0

    def __call__(self) -> None:
        if torch._C._cuda_getDevice() == self._device:
            self._enqueue()
        else:
            with torch.cuda.device(self._device):
                self._enqueue()

    def _enqueue(self) -> None:
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        for step in self._steps:
            step(stream)


def aim(library: Cublas, blas: ctypes.c_void_p, stream: ctypes.c_void_p, space: Tensor) -> None:
    """Turns the handle to a stream and a workspace."""
    check(library.set_stream(blas, stream), "cublasSetStream")
    size = ctypes.c_size_t(space.numel())
    check(library.set_workspace(blas, ctypes.c_void_p(space.data_ptr()), size), "cublasSetWorkspace")


class Calls:
    """Library calls one after the other on the current stream."""

    __slots__ = ("_batch", "_calls", "_library")

    def __init__(self, library: Cublas, batch: Batch) -> None:
        self._library, self._batch, self._calls = library, batch, tuple(batch.calls)

    def __call__(self, stream: int) -> None:
        issue(self._library, handle(), self._calls)


class Zeros:
    """Fills a few whole results, at the speed of the memory; the epilogue would look at all the others too."""

    __slots__ = ("_results",)

    def __init__(self, results: list[Tensor]) -> None:
        self._results = results

    def __call__(self, stream: int) -> None:
        for result in self._results:
            result.zero_()


def shares(work: Sequence[int], streams: int) -> list[list[int]]:
    """Indices per stream: the largest piece of work first, each to the stream with the least so far."""
    heap = [(0, i) for i in range(max(1, streams))]
    split: list[list[int]] = [[] for _ in range(max(1, streams))]
    for index in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, stream = heapq.heappop(heap)
        split[stream].append(index)
        heapq.heappush(heap, (load + work[index], stream))
    return split[:1] + [share for share in split[1:] if share]


class _Lane:
    """A side stream with its own workspace and its share of the calls."""

    __slots__ = ("_space", "calls", "side")

    def __init__(self, calls: Sequence[Call], side: Side, device: torch.device) -> None:
        self.calls, self.side = tuple(calls), side
        self._space = torch.empty(workspace_bytes(), dtype=torch.uint8, device=device)

    def run(self, library: Cublas, blas: ctypes.c_void_p, after: Event) -> None:
        """Makes the calls on this stream, behind `after`."""
        after.hold(self.side.stream.raw)
        aim(library, blas, self.side.stream.raw, self._space)
        make(blas, self.calls)
        self.side.done.record(self.side.stream.raw)


class Streamed:
    """Library calls on the current stream and on side streams at once, forked from it and joined to it again.

    The current stream waits for all of them before it goes on, so operands may be freed or reused
    by whatever follows on it, exactly as after a single call.
    """

    __slots__ = ("__weakref__", "_batch", "_here", "_lanes", "_library", "_loan", "_short")

    def __init__(
        self, library: Cublas, batch: Batch, shapes: Sequence[Shape], streams: int, device: torch.device
    ) -> None:
        self._library, self._batch = library, batch
        split = shares([s.m * s.n * s.k for s in shapes], streams)
        self._here = tuple(batch.calls[i] for i in split[0])
        self._loan = Loan(len(split) - 1, device.index or 0, self)
        shared = ([batch.calls[i] for i in share] for share in split[1:])
        self._lanes = [_Lane(calls, side, device) for calls, side in zip(shared, self._loan.sides, strict=True)]
        self._short = sum(map(_least_us, shapes)) < CALL_US * len(shapes)

    def __call__(self, stream: int) -> None:
        captured = torch._C._cuda_isCurrentStreamCapturing()
        if self._short and not captured:
            issue(self._library, handle(), self._batch.calls)
            return
        self._loan.captured |= captured
        blas, current = handle(), ctypes.c_void_p(stream)
        mode = begin(self._library, blas)
        try:
            self._spread(blas, current)
        finally:
            end(self._library, handle(), mode)  # torch aims its handle at its own current stream and workspace again
        for lane in self._lanes:
            lane.side.done.hold(current)

    def _spread(self, blas: ctypes.c_void_p, current: ctypes.c_void_p) -> None:
        fork = self._lanes[0].side.fork if self._lanes else None
        if fork is not None:
            fork.record(current)
        make(blas, self._here)
        for lane in self._lanes:
            lane.run(self._library, blas, cast(Event, fork))


def _least_us(s: Shape) -> float:
    """About how long a GPU needs for one product of 16-bit operands."""
    return max(2 * s.m * s.n * s.k / FLOPS_PER_US, 2 * (s.m * s.k + s.k * s.n + s.m * s.n) / BYTES_PER_US)
