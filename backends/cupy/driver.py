"""The few driver calls that neither CuPy nor torch offers, through ctypes.

A launch here costs one foreign call: its arguments are laid out once, when a problem is bound.
CuPy's own launcher knows neither clusters nor tensor maps, and packs its arguments at every call.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from multigemm.cuda.driver import (
    CLUSTER_DIMENSION,
    MAX_DYNAMIC_SHARED,
    PROGRAMMATIC,
    LaunchAttribute,
    LaunchConfig,
    Records,
    check,
    library,
    settle,
)


def allow_shared(function: int, size: int) -> None:
    """Lets a kernel use more than 48 KB of dynamic shared memory."""
    check(
        library().cuFuncSetAttribute(ctypes.c_void_p(function), MAX_DYNAMIC_SHARED, size),
        "cuFuncSetAttribute(MAX_DYNAMIC_SHARED_SIZE_BYTES)",
    )


@cache
def resident_clusters(function: int, cluster: int, threads: int, shared: int) -> int:
    """How many clusters a device holds at once: a processor group may not divide into whole clusters."""
    attribute = LaunchAttribute(id=CLUSTER_DIMENSION, dim=(cluster, 1, 1))
    config = LaunchConfig(grid=(cluster, 1, 1), block=(threads, 1, 1), shared=shared)
    config.attributes, config.attribute_count = ctypes.addressof(attribute), 1
    count = ctypes.c_int()
    check(
        library().cuOccupancyMaxActiveClusters(ctypes.byref(count), ctypes.c_void_p(function), ctypes.byref(config)),
        "cuOccupancyMaxActiveClusters",
    )
    return count.value


def launcher(
    function: int,
    arguments: Sequence[bytes],
    *,
    grid: int | tuple[int, int, int],
    threads: int,
    shared: int = 0,
    cluster: int = 1,
    overlap: bool = False,
    index: int,
    keep: Any = None,
    captured: Callable[[], object] | None = None,
) -> Callable[[], None]:
    """A closure that launches `function` on the device's current stream; `keep` lives as long as it.

    `overlap`: the kernel waits by itself until the launch before it is over, so it may be started early.
    `captured` is called whenever a launch becomes part of a CUDA graph.
    """
    buffer, addresses = _laid_out(arguments)
    pointers = (ctypes.c_void_p * len(addresses))(*addresses)
    config, attributes = _configured(grid, threads, shared, cluster, overlap)
    return _launch_of(function, config, pointers, index, captured, (buffer, attributes, keep))


def _configured(
    grid: int | tuple[int, int, int], threads: int, shared: int, cluster: int, overlap: bool
) -> tuple[LaunchConfig, Any]:
    """A launch's shape, and the attributes that it points to."""
    attributes, count = (LaunchAttribute * 2)(), 0
    for wanted, name, value in ((cluster > 1, CLUSTER_DIMENSION, (cluster, 1, 1)), (overlap, PROGRAMMATIC, (1, 0, 0))):
        if wanted:
            attributes[count] = LaunchAttribute(id=name, dim=value)
            count += 1
    config = LaunchConfig(grid=(grid, 1, 1) if isinstance(grid, int) else grid, block=(threads, 1, 1), shared=shared)
    config.attributes, config.attribute_count = ctypes.addressof(attributes), count
    return config, attributes


def _launch_of(
    function: int, config: LaunchConfig, pointers: Any, index: int, captured: Callable[[], object] | None, keep: Any
) -> Callable[[], None]:
    """What a bound problem keeps: as few steps per launch as Python allows."""
    call, records, handle = library().cuLaunchKernelEx, Records(config), ctypes.c_void_p(function)
    stream_of: Any = torch._C._cuda_getCurrentRawStream
    current: Any = torch._C._cuda_getDevice
    capturing: Any = torch._C._cuda_isCurrentStreamCapturing

    def launch(_alive: Any = keep) -> None:
        record = records[stream_of(index)]
        if captured is not None and capturing():
            captured()
        if current() == index:
            code = call(record, handle, pointers, None)
        else:
            with torch.cuda.device(index):
                code = call(record, handle, pointers, None)
        if code:
            settle(code, index, lambda: call(record, handle, pointers, None), "cuLaunchKernelEx")

    return launch


def _laid_out(arguments: Sequence[bytes]) -> tuple[Any, list[int]]:
    """One copy of all arguments, each at a 64-byte boundary, as tensor maps demand; and their addresses."""
    text, offsets = bytearray(), []
    for argument in arguments:
        offsets.append(len(text))
        text += argument
        text += bytes(-len(argument) % 64)
    buffer = (ctypes.c_char * (len(text) + 64))()
    start = (ctypes.addressof(buffer) + 63) // 64 * 64
    ctypes.memmove(start, bytes(text), len(text))
    return buffer, [start + offset for offset in offsets]
