"""Enqueues bound work: library calls on torch's handle, on one stream or spread over several."""

from __future__ import annotations

import ctypes
import heapq
from collections.abc import Sequence

import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Cublas, ExactMath, aim, handle, make
from multigemm.backends.cublas.streams import Kit, borrow, capture_of, workspace
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
        self._steps, self._keep, self._device = steps, (ops, keep), ops.device.index or 0

    def __call__(self) -> None:
        device = self._device
        if torch_internals.current_device() != device:
            with torch.cuda.device(device):
                self()
            return
        stream = torch_internals.current_raw_stream(device)
        for step in self._steps:
            step(stream)


class Calls:
    """Library calls one after the other on the current stream; others where a graph captures them, if given."""

    __slots__ = ("_batch", "_captured", "_library")

    def __init__(self, library: Cublas, batch: Batch, captured: Batch | None = None) -> None:
        self._library, self._batch, self._captured = library, batch, captured

    def __call__(self, stream: int) -> None:
        batch = self._batch
        if self._captured is not None and torch_internals.is_capturing():
            batch = self._captured
        blas = handle()
        with ExactMath(self._library, blas):
            make(blas, batch.calls)


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
    for index in sorted(range(len(work)), key=work.__getitem__, reverse=True):
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
        work, least = _work(shapes)
        self._here, *self._shares = [[*map(batch.calls.__getitem__, share)] for share in shares(work, streams)]
        self._short = least < CALL_US * len(shapes)
        self._apart = bool(self._shares) and not (self._short and len(shapes) > streams)
        self._spaces: list[Tensor] = []
        kit = self._kit(torch_internals.current_raw_stream(self._device)) if self._apart else None
        if kit is not None:  # a launch finds it
            kit.give_back()

    def __call__(self, stream: int) -> None:
        captured = torch_internals.is_capturing()
        current, blas, kit = ctypes.c_void_p(stream), handle(), None
        if self._apart or (captured and self._shares):
            kit = self._kit(stream, capture_of(current) if captured else 0)
        if kit is None:
            with ExactMath(self._library, blas):
                make(blas, self._batch.calls)
            return
        try:
            spaces = [side.space for side in kit.sides]
            if captured:
                here, *spaces = self._own_spaces()
                aim(self._library, blas, current, here)
            self._spread(kit, current, blas, spaces)
        finally:
            handle()  # torch aims it at the current stream and its own workspace again
            kit.give_back()

    def _kit(self, stream: int, capture: int = 0) -> Kit | None:
        """Sides for a launch from that stream. Short products do without where there is no memory for them."""
        try:
            return borrow(self._device, stream, len(self._shares), capture)
        except (torch.OutOfMemoryError, LibraryError):
            if not self._short or capture:
                raise
            self._apart = False
            return None

    def _own_spaces(self) -> list[Tensor]:
        """Workspaces that nobody else uses: torch's too belongs to whatever runs on this stream later."""
        while len(self._spaces) <= len(self._shares):
            self._spaces.append(workspace(self._device))
        return self._spaces

    def _spread(self, kit: Kit, current: ctypes.c_void_p, blas: ctypes.c_void_p, spaces: Sequence[Tensor]) -> None:
        fork, library, used = kit.fork, self._library, kit.sides[: len(self._shares)]
        fork.record(current)
        with ExactMath(library, blas):
            make(blas, self._here)
            for side, space, calls in zip(used, spaces, self._shares, strict=False):
                fork.hold(side.raw)
                aim(library, blas, side.raw, space)
                make(blas, calls)
                side.done.record(side.raw)
        for side in used:
            side.done.hold(current)


def _work(shapes: Sequence[Shape]) -> tuple[list[int], float]:
    """Multiply-adds of each product, and about how many microseconds a GPU needs for all if operands have 16 bits."""
    work, least = [], 0.0
    for _, _, m, n, k, *_ in shapes:
        work.append(m * n * k)
        least += max(2 * work[-1] / FLOPS_PER_US, 2 * (m * k + k * n + m * n) / BYTES_PER_US)
    return work, least
