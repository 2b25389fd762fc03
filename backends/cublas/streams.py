"""Side streams of our own, made by the driver, each with a workspace: lent to one launch after another.

torch hands out a few streams in turn: a caller's capture that forks onto one of those would catch work that somebody
else puts there. Making a stream takes longer than a library call, so streams are kept; and since launches on one stream
follow each other anyway, a side belongs to the stream that it is forked from, as torch's workspaces do: no stream ever
waits for another one's. The calls are made with torch's handle, which is aimed at one side after the other.
"""

from __future__ import annotations

import ctypes
import os
import re
from functools import cache

import torch
from torch import Tensor

from multigemm.cuda import driver

NON_BLOCKING = 1
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


class Event:
    """A driver event without timing; torch's own would pass through more of Python at each record and wait."""

    __slots__ = ("_device", "_raw")

    def __init__(self, device: int) -> None:
        self._raw, self._device = ctypes.c_void_p(), device
        driver.use_context(device)
        driver.check(driver.library().cuEventCreate(ctypes.byref(self._raw), WITHOUT_TIMING), "cuEventCreate")

    def record(self, stream: ctypes.c_void_p) -> None:
        """Marks what is enqueued on the stream by now."""
        status = driver.library().cuEventRecord(self._raw, stream)
        if status == driver.NO_CONTEXT:
            driver.use_context(self._device)
            status = driver.library().cuEventRecord(self._raw, stream)
        driver.check(status, "cuEventRecord")

    def hold(self, stream: ctypes.c_void_p) -> None:
        """What is enqueued on the stream from now on waits for what was marked."""
        driver.check(driver.library().cuStreamWaitEvent(stream, self._raw, 0), "cuStreamWaitEvent")


class Side:
    """A stream that nobody else knows of, the event at its end, and memory for the library's calls there."""

    __slots__ = ("done", "raw", "space")

    def __init__(self, device: int) -> None:
        self.raw = ctypes.c_void_p()
        driver.use_context(device)
        with driver.beside_captures():
            driver.check(driver.library().cuStreamCreate(ctypes.byref(self.raw), NON_BLOCKING), "cuStreamCreate")
            self.space = workspace(device, self.raw)
        self.done = Event(device)


class Kit:
    """Sides for one launch at a time, and the event that they fork at."""

    __slots__ = ("_device", "_home", "captured", "fork", "sides")

    def __init__(self, device: int, home: list[Kit]) -> None:
        self._device, self._home, self.captured = device, home, False
        self.fork, self.sides = Event(device), list[Side]()

    def at_least(self, count: int) -> None:
        """Makes the sides that are missing."""
        while len(self.sides) < count:
            self.sides.append(Side(self._device))

    def open_to(self, capture: int) -> bool:
        """Whether a launch in that capture (or in none, 0) may use it: a side that a capture has used belongs to
        that one until it ends, and work of others would become part of it."""
        return not self.captured or capture_of(self.sides[0].raw) in (0, capture)

    def give_back(self) -> None:
        """What is still on its way there stays in front of the next borrower's work."""
        self._home.append(self)


_kits: dict[tuple[int, int], list[Kit]] = {}
"""All kits that nobody uses at the moment, by device and by the stream that they fork from."""


def borrow(device: int, stream: int, count: int, capture: int = 0) -> Kit:
    """A kit with so many sides; `capture` is the number of the capture that `stream` is part of, or 0."""
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
    """Memory that torch's allocator takes to belong to that stream (or to the current one)."""
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
