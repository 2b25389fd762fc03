"""Enqueues bound work: library calls on torch's handle, on one stream or spread over several."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Cublas, handle, issue
from multigemm.backends.cublas.streams import Kit, borrow, capture_of, lend, workspace
from multigemm.cuda.nvrtc import Step
from multigemm.errors import LibraryError
from multigemm.planning.operands import Operands

CALL_US, FLOPS_PER_US, BYTES_PER_US = 10.0, 700e6, 2.9e6
"""What the host needs for a call, and an H100 for its work. More products than streams that are shorter than their
calls stay on one stream; where each has its own, running at once gains more than the events cost the host."""


class Steps:
    """A bound launch: its steps in order, on the current stream of the operands' device.

    It is not kept as a graph: while one thread captures, another one that waits for the device gets an error.
    A caller who knows his threads may capture it.
    """

    __slots__ = ("_device", "_keep", "_steps")

    def __init__(self, ops: Operands, steps: Sequence[Step], keep: object = None) -> None:
        self._steps, self._keep, self._device = tuple(steps), (ops, keep), ops.device.index or 0

    def __call__(self) -> None:
        device = self._device
        if torch._C._cuda_getDevice() != device:
            with torch.cuda.device(device):
                self()
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        for step in self._steps:
            step(stream)


class Calls:
    """Library calls one after the other on the current stream; others where a graph captures them, if given."""

    __slots__ = ("_batch", "_calls", "_captured", "_library")

    def __init__(self, library: Cublas, batch: Batch, captured: Batch | None = None) -> None:
        self._library, self._batch, self._calls = library, batch, tuple(batch.calls)
        self._captured = None if captured is None else tuple(captured.calls)

    def __call__(self, stream: int) -> None:
        calls = self._calls
        if self._captured is not None and torch._C._cuda_isCurrentStreamCapturing():
            calls = self._captured
        issue(self._library, handle(), calls)


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


class Streamed:
    """Library calls on the current stream and on side streams at once, forked from it and joined to it again.

    The current stream waits for all of them before it goes on, so operands may be freed or reused
    by whatever follows on it, exactly as after a single call. Sides are lent for the length of a launch. Only a
    graph needs workspaces of its own, since it runs beside whatever borrows the sides later: they are this launch's.
    Called eagerly, many short products stay on the current stream, and few do where there is no memory for sides.
    """

    __slots__ = ("_apart", "_batch", "_device", "_here", "_library", "_shares", "_short", "_spaces")

    def __init__(
        self, library: Cublas, batch: Batch, shapes: Sequence[Shape], streams: int, device: torch.device
    ) -> None:
        self._library, self._batch, self._device = library, batch, device.index or 0
        split = shares([s.m * s.n * s.k for s in shapes], streams)
        self._here, *self._shares = (tuple(batch.calls[i] for i in share) for share in split)
        self._short = sum(map(_least_us, shapes)) < CALL_US * len(shapes)
        self._apart = bool(self._shares) and not (self._short and len(shapes) > streams)
        self._spaces: list[Tensor] = []
        kit = self._kit(torch._C._cuda_getCurrentRawStream(self._device)) if self._apart else None
        if kit is not None:  # a launch finds it
            kit.give_back()

    def __call__(self, stream: int) -> None:
        captured = torch._C._cuda_isCurrentStreamCapturing()
        current = ctypes.c_void_p(stream)
        kit = None
        if self._apart or (captured and self._shares):
            kit = self._kit(stream, capture_of(current) if captured else 0)
        if kit is None:
            issue(self._library, handle(), self._batch.calls)
            return
        try:
            if captured:
                self._recorded(kit, current)
            else:
                self._spread(kit, current, handle())
        finally:
            kit.give_back()

    def _kit(self, stream: int, capture: int = 0) -> Kit | None:
        """Sides for a launch from that stream. Short products do without where there is no memory for them."""
        try:
            return borrow(self._library, self._device, stream, len(self._shares), capture)
        except (torch.OutOfMemoryError, LibraryError):
            if not self._short or capture:
                raise
            self._apart = False
            return None

    def _spread(self, kit: Kit, current: ctypes.c_void_p, blas: ctypes.c_void_p) -> None:
        fork, used = kit.fork, kit.sides[: len(self._shares)]
        fork.record(current)
        issue(self._library, blas, self._here)
        for side, calls in zip(used, self._shares, strict=True):
            side.run(fork.raw, calls)
        for side in used:
            side.join(current)

    def _recorded(self, kit: Kit, current: ctypes.c_void_p) -> None:
        """In workspaces that nobody else uses: torch's too belongs to whatever runs on this stream later."""
        while len(self._spaces) <= len(self._shares):
            self._spaces.append(workspace(self._device))
        here, *rest = self._spaces
        blas = handle()
        lend(self._library, blas, here)
        for side, space in zip(kit.sides, rest, strict=False):
            side.lend(self._library, space)
        try:
            self._spread(kit, current, blas)
        finally:
            handle()  # torch aims it at a workspace of its own again
            for side in kit.sides:
                side.lend(self._library, None)


def _least_us(s: Shape) -> float:
    """About how long a GPU needs for one product of 16-bit operands."""
    return max(2 * s.m * s.n * s.k / FLOPS_PER_US, 2 * (s.m * s.k + s.k * s.n + s.m * s.n) / BYTES_PER_US)
