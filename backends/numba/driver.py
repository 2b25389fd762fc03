"""The few driver calls that Numba's own launcher cannot make, through ctypes.

Numba re-inspects every argument at each launch, has no large dynamic shared memory and no launch
attributes. Here a kernel is a loaded function, a launch is one call with a buffer packed beforehand,
and what varies between launches is the stream alone.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from ctypes import c_int, c_size_t, c_uint, c_void_p
from typing import Any

import torch

from multigemm.backends.numba.build import Image
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

BUFFER_POINTER, BUFFER_SIZE, BUFFER_END = 1, 2, 0


class Function:
    """A kernel loaded on one device; `module` stays loaded for the life of the process."""

    def __init__(self, image: Image, shared: int, device: torch.device) -> None:
        self.device, self.shared = device, shared
        module, function = c_void_p(), c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device)
            check(library().cuModuleLoadData(ctypes.byref(module), image.cubin), "cuModuleLoadData")
            name = image.entry.encode()
            check(library().cuModuleGetFunction(ctypes.byref(function), module, name), "cuModuleGetFunction")
            if shared > 0:
                check(library().cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, shared), "cuFuncSetAttribute")
        self.handle, self.module = function, module

    def blocks_per_multiprocessor(self, threads: int) -> int:
        count = c_int()
        with torch.cuda.device(self.device):
            code = library().cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), self.handle, threads, c_size_t(self.shared)
            )
        check(code, "cuOccupancyMaxActiveBlocksPerMultiprocessor")
        return max(count.value, 1)

    def launcher(
        self, grid: int, threads: int, arguments: bytes, cluster: int = 1, overlap: bool = False
    ) -> Callable[[], None]:
        """A launch of `grid` blocks with these packed arguments, on the device's current stream.

        `overlap`: the kernel waits by itself for its predecessor (griddepcontrol), so it may be started early.
        """
        buffer = ctypes.create_string_buffer(arguments, len(arguments))
        size = c_size_t(len(arguments))
        extra = (c_void_p * 5)(
            BUFFER_POINTER, ctypes.addressof(buffer), BUFFER_SIZE, ctypes.addressof(size), BUFFER_END
        )
        attributes = (LaunchAttribute * 2)(
            LaunchAttribute(id=PROGRAMMATIC, dim=(1, 0, 0)), LaunchAttribute(id=CLUSTER_DIMENSION, dim=(cluster, 1, 1))
        )
        first, count = (0 if overlap else 1), int(overlap) + int(cluster > 1)
        grid3, block3 = (c_uint * 3)(grid, 1, 1), (c_uint * 3)(threads, 1, 1)
        config = LaunchConfig(grid3, block3, self.shared, None, ctypes.addressof(attributes[first]), count)
        return _bound_launch(self, config, extra, (buffer, size, attributes))


def _bound_launch(function: Function, config: LaunchConfig, extra: Any, alive: Any) -> Callable[[], None]:
    call, handle, device = library().cuLaunchKernelEx, function.handle, function.device
    where, records = device.index, Records(config)
    current_stream, current_device = torch.cuda.current_stream, torch.cuda.current_device

    def launch(_alive: Any = alive) -> None:
        record = records[current_stream(where).cuda_stream]
        if current_device() == where:
            code = call(record, handle, None, extra)
        else:
            with torch.cuda.device(device):
                code = call(record, handle, None, extra)
        if code:
            settle(code, where, lambda: call(record, handle, None, extra), "cuLaunchKernelEx")

    return launch
