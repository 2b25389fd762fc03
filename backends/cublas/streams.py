"""Streams and events of our own, made by the driver, and lent to one launch after another.

torch hands out a few streams in turn: a caller's capture that forks onto one of those would catch work
that somebody else puts there. Making a stream takes longer than a library call, so idle ones are kept.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from typing import Any, ClassVar

from multigemm.backends.cublas.nvrtc import INVALID_CONTEXT, driver, driver_checked, use_context

NON_BLOCKING = 1
WITHOUT_TIMING = 2


def when_gone(owner: Any, function: Callable[..., object], *arguments: Any) -> None:
    """Calls the function when `owner` dies; not at the end of the process, where the driver may have gone before."""
    weakref.finalize(owner, function, *arguments).atexit = False


class Stream:
    """A stream that nobody else knows of."""

    __slots__ = ("__weakref__", "raw")

    def __init__(self, device: int) -> None:
        self.raw = ctypes.c_void_p()
        use_context(device)
        driver_checked(driver().cuStreamCreate(ctypes.byref(self.raw), NON_BLOCKING), "cuStreamCreate")
        when_gone(self, driver().cuStreamDestroy_v2, self.raw)


class Event:
    """A driver event without timing; torch's own would pass through more of Python at each record and wait."""

    __slots__ = ("__weakref__", "_device", "_raw")

    def __init__(self, device: int) -> None:
        self._raw, self._device = ctypes.c_void_p(), device
        use_context(device)
        driver_checked(driver().cuEventCreate(ctypes.byref(self._raw), WITHOUT_TIMING), "cuEventCreate")
        when_gone(self, driver().cuEventDestroy_v2, self._raw)

    def record(self, stream: ctypes.c_void_p) -> None:
        status = driver().cuEventRecord(self._raw, stream)
        if status == INVALID_CONTEXT:
            use_context(self._device)
            status = driver().cuEventRecord(self._raw, stream)
        driver_checked(status, "cuEventRecord")

    def hold(self, stream: ctypes.c_void_p) -> None:
        """Whatever is enqueued on `stream` from now on waits for what the event recorded."""
        driver_checked(driver().cuStreamWaitEvent(stream, self._raw, 0), "cuStreamWaitEvent")


class Side:
    """A side stream and the events around its work: where it forks off, and where it is done."""

    __slots__ = ("done", "fork", "stream")

    def __init__(self, device: int) -> None:
        self.stream, self.fork, self.done = Stream(device), Event(device), Event(device)


class Loan:
    """Sides for one launch. They go back when it dies, with whatever work is still on its way there in front of the
    next borrower's; but not if a capture used them, which may go on and would catch that borrower's work."""

    __slots__ = ("captured", "device", "sides")
    _idle: ClassVar[dict[int, list[Side]]] = {}

    def __init__(self, count: int, device: int, owner: Any) -> None:
        self.captured, self.device = False, device
        self.sides = [self._lent() for _ in range(count)]
        when_gone(owner, self._back)

    def _lent(self) -> Side:
        try:
            return self._idle[self.device].pop()
        except (KeyError, IndexError):
            return Side(self.device)

    def _back(self) -> None:
        if not self.captured:
            self._idle.setdefault(self.device, []).extend(self.sides)
