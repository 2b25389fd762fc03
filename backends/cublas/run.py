"""Runs bound work: library calls on torch's handle, on one stream or spread over several.

Side streams are our own, made by the driver, each with a workspace, and lent to one launch after another.
torch hands out a few streams in turn: a caller's capture that forks onto one of those would catch work that somebody
else puts there. Making a stream takes longer than a library call, so streams are kept; and since launches on one stream
follow each other anyway, a side belongs to the stream that it is forked from, as torch's workspaces do: no stream ever
waits for another one's. The calls are made with torch's handle, which is aimed at one side after the other.
"""

from __future__ import annotations

import ctypes
import heapq
import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
from torch import Tensor

from multigemm import torch_internals
from multigemm.backends.cublas.library import Batch, Call, Cublas, aim, handle, make
from multigemm.backends.cublas.products import Shape, leading
from multigemm.cuda import driver
from multigemm.cuda.arguments import OPERANDS, Addresses
from multigemm.cuda.launch import Step
from multigemm.errors import LibraryError
from multigemm.planning.operands import strides_of

CALL_US, FLOPS_PER_US, BYTES_PER_US = 10.0, 700e6, 2.9e6
"""What the host needs for a call, and an H100 for its work. More products than streams that are shorter than their
calls stay on one stream; where each has its own, running at once gains more than the events cost the host."""


FEW_ZEROS = 8
"""The number of results that are zeroed one by one; more of them are left to one launch of the epilogue."""


class MovableStep(ABC):
    """A step that can follow its operands if they are `movable`: packed ones that were not copied."""

    __slots__ = ("movable",)
    movable: bool

    @abstractmethod
    def __call__(self, stream: int) -> None: ...

    @abstractmethod
    def move(self, addresses: Addresses) -> None:
        """Replaces all operand addresses of the step."""


class Steps:
    """A bound launch: its steps in order, on the current stream of the operands' device.

    It follows its operands (`multigemm.cuda.launch.MovableLaunch`) if all steps can. It is not kept as a graph: while
    one thread captures, another one that waits for the device gets an error. A caller who knows his threads may
    capture it.
    """

    __slots__ = ("_steps", "_workspace", "index")

    def __init__(self, device: torch.device, steps: Sequence[Step], workspace: Sequence[Tensor] = ()) -> None:
        self._steps, self._workspace, self.index = steps, workspace, device.index or 0

    def __call__(self) -> None:
        if torch_internals.current_device() == self.index:
            self.on(torch_internals.current_raw_stream(self.index))
        else:
            with torch.cuda.device(self.index):
                self.on(torch_internals.current_raw_stream(self.index))

    def on(self, stream: int) -> None:
        """Launches on the current stream of the current device."""
        for step in self._steps:
            step(stream)

    def move(self, addresses: Addresses) -> None:
        """Sets other operand addresses in every step. All steps must be movable (`stays_behind`)."""
        for step in self._steps:
            step.move(addresses)  # type: ignore[attr-defined]

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether some step holds an address that `move` would not replace."""
        return not all(isinstance(step, MovableStep) and step.movable for step in self._steps)

    def workspace_bytes(self) -> int:
        """The device memory of intermediate results in bytes."""
        return sum(x.nbytes for x in self._workspace)

    def can_resize(self, before: int, after: int) -> bool:
        """Always False: the calls, and the choice among them, depend on the number of tokens."""
        return False


class Calls(MovableStep):
    """Library calls in order on the current stream; in a capture other calls, if given."""

    __slots__ = ("_batch", "_captured", "_library")

    def __init__(self, library: Cublas, batch: Batch, captured: Batch | None = None) -> None:
        self._library, self._batch, self._captured = library, batch, captured
        self.movable = batch.origins is not None

    def __call__(self, stream: int) -> None:
        batch = self._batch
        if self._captured is not None and torch_internals.is_capturing():
            batch = self._captured
        make(self._library, handle(), batch.calls)

    def move(self, addresses: Addresses) -> None:
        """Gives the calls other addresses of the operands."""
        self._batch.move(addresses)
        if self._captured is not None:
            self._captured.move(addresses)


class Zeros(MovableStep):
    """Zeroes a few whole results at the speed of memory; the epilogue kernel would look at all results.

    They are matrices of one result `of`, which may move, or of a list (None).
    """

    __slots__ = ("_base", "_device", "_lines")

    def __init__(self, results: Sequence[Tensor], of: Tensor | None) -> None:
        self._base, self.movable = 0 if of is None else of.data_ptr(), of is not None
        self._device = results[0].device.index or 0
        self._lines = [_lines(result, self._base) for result in results]

    def __call__(self, stream: int) -> None:
        for distance, *rest in self._lines:
            zero_lines(self._device, stream, self._base + distance, *rest)

    def move(self, addresses: Addresses) -> None:
        """Sets the address of the result."""
        self._base = addresses[OPERANDS.index("out")]


def _lines(t: Tensor, base: int) -> tuple[int, int, int, int]:
    """A matrix as lines: bytes from `base` to the first line, bytes between lines, bytes per line, number of lines."""
    s, size = strides_of(t), t.element_size()
    form = leading(t.shape[0], t.shape[1], s.row, s.col, size)
    assert form is not None, "the library writes into this result"
    lines, length = t.shape if form.by_rows else t.shape[::-1]
    return t.data_ptr() - base, form.ld * size, length * size, lines


def zero_lines(device: int, stream: int, address: int, step: int, width: int, lines: int) -> None:
    """Zeroes `lines` of `width` bytes, `step` bytes apart. torch refuses memory that was allocated in its inference
    mode."""
    cuda, at = driver.library(), ctypes.c_uint64(address)
    if lines == 1 or step == width:
        fill = partial(cuda.cuMemsetD8Async, at, 0, ctypes.c_size_t(width * lines), ctypes.c_void_p(stream))
    else:
        size = (ctypes.c_size_t(x) for x in (width, lines))
        fill = partial(cuda.cuMemsetD2D8Async, at, ctypes.c_size_t(step), 0, *size, ctypes.c_void_p(stream))
    if status := fill():
        driver.settle(status, device, fill, "cuMemset")


# --- side streams ---

NON_BLOCKING = 1
WITHOUT_TIMING = 2
DEFAULT_WORKSPACE = 32 << 20
"""Bytes; what cuBLAS asks for on Hopper."""


@cache
def workspace_bytes() -> int:
    """The size of torch's own workspace, so that the same kernels are chosen for every stream.

    Each stream has its own workspace: in a shared one the split sums of two streams would mix.
    """
    pools = re.findall(r":(\d+):(\d+)", os.environ.get("CUBLAS_WORKSPACE_CONFIG", ""))
    return sum(int(kib) * int(count) << 10 for kib, count in pools) or DEFAULT_WORKSPACE


class Event:
    """A driver event without timing. torch's event takes more Python for each record and wait."""

    __slots__ = ("_device", "_raw")

    def __init__(self, device: int) -> None:
        self._raw, self._device = ctypes.c_void_p(), device
        driver.use_context(device)
        driver.check(driver.library().cuEventCreate(ctypes.byref(self._raw), WITHOUT_TIMING), "cuEventCreate")

    def record(self, stream: ctypes.c_void_p) -> None:
        """Marks the work that is enqueued on the stream so far."""
        mark = partial(driver.library().cuEventRecord, self._raw, stream)
        if status := mark():
            driver.settle(status, self._device, mark, "cuEventRecord")

    def hold(self, stream: ctypes.c_void_p) -> None:
        """Makes later work on the stream wait for the marked work."""
        if status := driver.library().cuStreamWaitEvent(stream, self._raw, 0):
            driver.check(status, "cuStreamWaitEvent")


class Side:
    """A side stream that nothing else uses, an event at its end, and a workspace for the library's calls."""

    __slots__ = ("done", "raw", "space")

    def __init__(self, device: int) -> None:
        self.raw = ctypes.c_void_p()
        driver.use_context(device)
        with driver.beside_captures():
            driver.check(driver.library().cuStreamCreate(ctypes.byref(self.raw), NON_BLOCKING), "cuStreamCreate")
            self.space = workspace(device, self.raw)
        self.done = Event(device)


class Kit:
    """The side streams of one launch at a time, and the event at which they fork."""

    __slots__ = ("_device", "_home", "captured", "fork", "sides")

    def __init__(self, device: int, home: list[Kit]) -> None:
        self._device, self._home, self.captured = device, home, False
        self.fork, self.sides = Event(device), list[Side]()

    def at_least(self, count: int) -> None:
        """Creates missing side streams."""
        while len(self.sides) < count:
            self.sides.append(Side(self._device))

    def open_to(self, capture: int) -> bool:
        """Whether a launch in that capture (0 for none) may use the kit. A side that a capture has used belongs to the
        capture until it ends, and other work on it would be captured."""
        return not self.captured or capture_of(self.sides[0].raw) in (0, capture)

    def give_back(self) -> None:
        """Returns the kit. Its unfinished work stays in front of the next borrower's."""
        self._home.append(self)


_kits: dict[tuple[int, int], list[Kit]] = {}
"""All kits that nobody uses at the moment, by device and by the stream that they fork from."""


def borrow(device: int, stream: int, count: int, capture: int = 0) -> Kit:
    """A kit with this many side streams. `capture` is the number of the capture of which `stream` is part, or 0."""
    idle, taken = _kits.setdefault((device, stream), []), list[Kit]()
    while True:
        try:
            kit = idle.pop()
        except IndexError:
            kit = Kit(device, idle)
        if kit.open_to(capture):
            break
        taken.append(kit)
    idle += taken
    kit.at_least(count)
    kit.captured = bool(capture)
    return kit


def workspace(device: int, stream: ctypes.c_void_p | None = None) -> Tensor:
    """Memory that torch's allocator associates with that stream (or with the current one)."""
    where = torch.device("cuda", device)
    user = None if stream is None else torch.cuda.ExternalStream(stream.value, device=where)  # type: ignore[no-untyped-call]
    with torch.cuda.stream(user):
        return torch.empty(workspace_bytes(), dtype=torch.uint8, device=where)


def capture_of(stream: ctypes.c_void_p) -> int:
    """The number of the capture that this stream is part of; 0 if there is none."""
    state, number = ctypes.c_int(), ctypes.c_uint64()
    status = driver.library().cuStreamGetCaptureInfo_v2(
        stream, ctypes.byref(state), ctypes.byref(number), None, None, None
    )
    driver.check(status, "cuStreamGetCaptureInfo")
    return number.value if state.value else 0


# --- calls on several streams ---


def shares(work: Sequence[int], streams: int) -> list[list[int]]:
    """The products of each stream, as indices: the largest work first, each to the stream with the least so far."""
    heap = [(0, i) for i in range(max(1, streams))]
    split: list[list[int]] = [[] for _ in range(max(1, streams))]
    for index in sorted(range(len(work)), key=work.__getitem__, reverse=True):
        load, stream = heapq.heappop(heap)
        split[stream].append(index)
        heapq.heappush(heap, (load + work[index], stream))
    return split[:1] + [share for share in split[1:] if share]


class Streamed(MovableStep):
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
        self.movable = batch.origins is not None
        kit = self._kit(torch_internals.current_raw_stream(self._device)) if self._apart else None
        if kit is not None:  # a launch finds it
            kit.give_back()

    def __call__(self, stream: int) -> None:
        captured = torch_internals.is_capturing()
        current, blas, kit = ctypes.c_void_p(stream), handle(), None
        if self._apart or (captured and self._shares):
            kit = self._kit(stream, capture_of(current) if captured else 0)
        if kit is None:
            make(self._library, blas, self._batch.calls)
            return
        try:
            spaces = [side.space for side in kit.sides]
            if captured:
                here, *spaces = self._own_spaces()
                aim(self._library, blas, current, here)
            make(self._library, blas, self._spread(kit, current, blas, spaces))
            for side in kit.sides[: len(self._shares)]:
                side.done.hold(current)
        finally:
            handle()  # torch aims it at the current stream and its own workspace again
            kit.give_back()

    def move(self, addresses: Addresses) -> None:
        """Gives the calls, which the shares are made of, other addresses of the operands."""
        self._batch.move(addresses)

    def _kit(self, stream: int, capture: int = 0) -> Kit | None:
        """Side streams for a launch from that stream; none for short products if there is no memory."""
        try:
            return borrow(self._device, stream, len(self._shares), capture)
        except (torch.OutOfMemoryError, LibraryError):
            if not self._short or capture:
                raise
            self._apart = False
            return None

    def _own_spaces(self) -> list[Tensor]:
        """Workspaces of this launch alone: torch's workspace also serves other work on the stream."""
        while len(self._spaces) <= len(self._shares):
            self._spaces.append(workspace(self._device))
        return self._spaces

    def _spread(
        self, kit: Kit, current: ctypes.c_void_p, blas: ctypes.c_void_p, spaces: Sequence[Tensor]
    ) -> Iterator[Call]:
        """The calls in order. Between two of them the handle is aimed at the stream of the next."""
        fork = kit.fork
        fork.record(current)
        yield from self._here
        for side, space, calls in zip(kit.sides, spaces, self._shares, strict=False):
            fork.hold(side.raw)
            aim(self._library, blas, side.raw, space)
            yield from calls
            side.done.record(side.raw)


def _work(shapes: Sequence[Shape]) -> tuple[list[int], float]:
    """Multiply-adds of each product, and about how many microseconds a GPU needs for all if operands have 16 bits."""
    work, least = [], 0.0
    for _, _, m, n, k, *_ in shapes:
        work.append(m * n * k)
        least += max(2 * work[-1] / FLOPS_PER_US, 2 * (m * k + k * n + m * n) / BYTES_PER_US)
    return work, least
