"""A launch of several pieces of work, kept as a CUDA graph from its second run on.

The host pays for every piece: ten microseconds for a library call, three for a kernel, one for an
event. A graph costs about as much as one call, and the device starts its pieces sooner. It is made at
the second run, because most problems are bound for a single one and making it costs several. Inside a
caller's own capture the pieces are enqueued one by one, as at the first run.

A graph may run beside anything else, so the library calls in it have a workspace of their own, and
what torch allocates while recording stays with the graph. The driver records, not torch.cuda.graph: that
waits for the device, and while it records no other thread may draw random numbers. Nor a torch.cuda.MemPool:
when one dies it frees device memory, which ends the program if another thread records at that moment.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from multigemm.backends.cublas.nvrtc import INVALID_CONTEXT, driver, driver_checked, use_context
from multigemm.backends.cublas.streams import Stream, when_gone

cuda: Any = torch.cuda  # its classes carry no types
memory: Any = torch._C
RELAXED = 2
"""Capture mode: other threads are not concerned, and the library may allocate."""
_lock = threading.RLock()
"""One recording at a time: they share a stream."""


@cache
def _stream(device: int) -> tuple[Stream, Any]:
    """The stream that recordings of one device are made on, and torch's view of it."""
    own = Stream(device)
    return own, cuda.ExternalStream(own.raw.value, device=device)


class Graph:
    """What `enqueue` puts on the stream that it is given, to be replayed on any; `allocates` if torch may do so."""

    __slots__ = ("__weakref__", "_device", "_launch", "_mutex", "_pool", "_ready")

    def __init__(self, device: int, enqueue: Callable[[ctypes.c_void_p], None], allocates: bool) -> None:
        self._device, self._ready, self._mutex = device, ctypes.c_void_p(), threading.Lock()
        self._pool, self._launch = cuda.graph_pool_handle() if allocates else None, driver().cuGraphLaunch
        graph = self._captured(enqueue)
        status = driver().cuGraphInstantiateWithFlags(ctypes.byref(self._ready), graph, ctypes.c_uint64(0))
        driver().cuGraphDestroy(graph)
        driver_checked(status, "cuGraphInstantiate")
        when_gone(self, driver().cuGraphExecDestroy, self._ready)
        if allocates:
            when_gone(self, memory._cuda_releasePool, device, self._pool)

    def _captured(self, enqueue: Callable[[ctypes.c_void_p], None]) -> ctypes.c_void_p:
        graph = ctypes.c_void_p()
        with _lock:
            own, seen = _stream(self._device)
            with cuda.stream(seen), self._memory():
                driver_checked(driver().cuStreamBeginCapture_v2(own.raw, RELAXED), "cuStreamBeginCapture")
                try:
                    enqueue(own.raw)
                except BaseException:
                    driver().cuStreamEndCapture(own.raw, ctypes.byref(graph))
                    driver().cuGraphDestroy(graph)
                    raise
                driver_checked(driver().cuStreamEndCapture(own.raw, ctypes.byref(graph)), "cuStreamEndCapture")
        return graph

    @contextmanager
    def _memory(self) -> Iterator[None]:
        """Lets this thread allocate from the graph's pool, which nobody else gets before the graph is gone."""
        if self._pool is None:
            yield
            return
        memory._cuda_beginAllocateCurrentThreadToPool(self._device, self._pool)
        try:
            yield
        finally:
            memory._cuda_endAllocateToPool(self._device, self._pool)

    def replay(self, stream: int) -> None:
        """Enqueues everything on a raw stream."""
        at = ctypes.c_void_p(stream)
        with self._mutex:  # one graph may not be launched by two threads at once
            status = self._launch(self._ready, at)
            if status == INVALID_CONTEXT:
                use_context(self._device)
                status = self._launch(self._ready, at)
        driver_checked(status, "cuGraphLaunch")
