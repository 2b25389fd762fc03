"""Several launches as one call of the driver: a CUDA graph of kernels whose arguments no longer change.

The driver takes about as long for a graph of a few kernels in a row as for one launch of a kernel.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

from multigemm.cuda.driver import RELAXED, beside_captures, check, on_device, settle

NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING


@cache
def _capture_stream(index: int) -> int:
    """A stream of a device that runs nothing: what is enqueued there becomes part of a graph."""
    stream = ctypes.c_void_p()
    with on_device(index) as cuda:
        check(cuda.cuStreamCreate(ctypes.byref(stream), NON_BLOCKING), "cuStreamCreate")
    return stream.value or 0


class Graph:
    """Launches as they are bound now: a copy of their arguments, which later moves of the launches do not change.

    Like the launches, whose workspaces it shares and keeps, it is for one stream.
    """

    __slots__ = ("_handle", "_index", "_launch", "_launches")

    def __init__(self, launches: Sequence[Any]) -> None:
        """Of launches on one GPU that are `recordable`."""
        self._handle, self._index, self._launches = ctypes.c_void_p(), launches[0].index, tuple(launches)
        stream, graph = _capture_stream(self._index), ctypes.c_void_p()
        with on_device(self._index) as cuda, beside_captures():
            self._launch: Any = cuda.cuGraphLaunch
            found = cuda.cuStreamBeginCapture_v2(ctypes.c_void_p(stream), RELAXED)
            check(found, "cuStreamBeginCapture")
            try:
                for launch in launches:
                    launch.on(stream)
            finally:
                code = cuda.cuStreamEndCapture(ctypes.c_void_p(stream), ctypes.byref(graph))
            check(code, "cuStreamEndCapture")
            code = cuda.cuGraphInstantiateWithFlags(ctypes.byref(self._handle), graph, ctypes.c_ulonglong(0))
            cuda.cuGraphDestroy(graph)
            check(code, "cuGraphInstantiateWithFlags")

    def on(self, stream: int) -> None:
        """Runs it on a raw stream of the current device, of which no graph is captured."""
        at = ctypes.c_void_p(stream)
        code = self._launch(self._handle, at)
        if code:
            settle(code, self._index, partial(self._launch, self._handle, at), "cuGraphLaunch")

    def __del__(self) -> None:
        if self._handle.value and not sys.is_finalizing():
            with on_device(self._index) as cuda:
                cuda.cuGraphExecDestroy(self._handle)  # one that still runs is freed at its end
