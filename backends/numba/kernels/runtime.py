"""Imports Numba once, as a compiler or as its CUDA simulator, and says which of the two it is.

Numba decides at import whether `numba.cuda` compiles or simulates. Under MULTIGEMM_EMULATE the
variable NUMBA_ENABLE_CUDASIM has to be set before anybody imports numba; where somebody was faster,
`SIMULATED` is False and `availability` says so. Device code is written against the few names below,
so that the same kernel text runs in both worlds.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import numpy as np

from multigemm.settings import settings

if settings().emulate and "numba" not in sys.modules:
    os.environ.setdefault("NUMBA_ENABLE_CUDASIM", "1")


@contextmanager
def numpy_names() -> Iterator[None]:
    """Lends NumPy a name that numba-cuda 0.30 registers an overload for and NumPy 2.5 has dropped.

    Needed while numba-cuda is imported, which it does in two parts: now, and at the first compilation.
    """
    if hasattr(np, "row_stack"):
        yield
        return

    def row_stack(*args: Any, **kwargs: Any) -> Any:
        return np.vstack(*args, **kwargs)

    names: Any = np
    names.row_stack = row_stack
    try:
        yield
    finally:
        del names.row_stack


with numpy_names():
    import numba.core.config
    import numba.cuda

cuda: Any = numba.cuda
types: Any = numba.types
SIMULATED = bool(getattr(numba.core.config, "ENABLE_CUDASIM", 0))


class _Allocations(dict[Any, Any]):
    """The simulator's shared arrays by source line, allocated once however many threads ask together.

    It looks an array up and stores a new one where there is none, in two steps: between them two
    threads could each make their own. Here the lock is taken by the first step and kept until the second.
    """

    def __init__(self) -> None:
        super().__init__()
        self._lock = threading.RLock()

    def get(self, key: Any, default: Any = None) -> Any:
        self._lock.acquire()
        if key not in self:
            return default
        self._lock.release()
        return self[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self._lock.release()


class _Barrier:
    """Where the threads of a block that still run wait for each other."""

    def __init__(self, threads: int) -> None:
        self._running, self._waiting, self._passed = threads, 0, 0
        self._changed = threading.Condition()

    def wait(self) -> None:
        with self._changed:
            self._waiting, before = self._waiting + 1, self._passed
            self._release()
            self._changed.wait_for(lambda: self._passed != before)

    def leave(self) -> None:
        with self._changed:
            self._running -= 1
            self._release()

    def _release(self) -> None:
        if self._waiting == self._running:
            self._waiting, self._passed = 0, self._passed + 1
            self._changed.notify_all()


def _replace_parts_of_the_simulator() -> None:
    """Shared arrays are allocated once, and threads wait at a barrier: the simulator polls them in a busy loop, which
    takes the processor from them."""
    import numba.cuda.simulator.kernel
    import numba.cuda.simulator.kernelapi

    simulator: Any = numba.cuda.simulator
    shared, block = simulator.kernelapi.FakeCUDAShared, simulator.kernel.BlockManager
    block_thread = simulator.kernel.BlockThread
    initialise_shared = shared.__init__

    def initialise(self: Any, size: int) -> None:
        initialise_shared(self, size)
        self._allocations = _Allocations()

    def run(self: Any, place: tuple[int, ...], *args: Any) -> None:
        points = [*np.ndindex(*self._block_dim)]
        self.barrier = _Barrier(len(points))

        def one() -> None:
            try:
                self._f(*args)
            finally:
                self.barrier.leave()

        threads = [block_thread(one, self, place, point, self._debug) for point in points]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        except BaseException:  # Ctrl-C: they still write into the caller's memory
            for thread in threads:
                thread.join()
            raise
        for thread in threads:
            if thread.exception:
                raise thread.exception[0].with_traceback(thread.exception[1])

    shared.__init__, block.run = initialise, run
    block_thread.syncthreads = lambda self: self._manager.barrier.wait()


if SIMULATED:
    _replace_parts_of_the_simulator()

_one_at_a_time = threading.RLock()
"""The simulator runs one kernel at a time."""


@contextmanager
def simulating() -> Iterator[None]:
    """Keeps the simulator quiet while a kernel runs: NumPy scalars warn of the NaN and infinities that a GPU computes
    silently."""
    with _one_at_a_time, warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        yield


F = TypeVar("F", bound=Callable[..., Any])


def device(function: F) -> F:
    """A device function that is always inlined.

    The simulator calls plain Python functions much faster than decorated ones. A plain function
    must not name `cuda`, which the simulator swaps only in decorated ones: use `synchronising`.
    """
    return function if SIMULATED else synchronising(function)


def synchronising(function: F) -> F:
    """A device function that uses `cuda.syncthreads` and the like."""
    options = {} if SIMULATED else {"forceinline": True}
    made: F = cuda.jit(device=True, **options)(function)
    return made


def kernel(function: F) -> F:
    """A kernel: left plain for our own compile path, decorated for the simulator."""
    return cuda.jit(function) if SIMULATED else function
