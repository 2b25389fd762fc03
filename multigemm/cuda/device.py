"""Properties of a device, and copies of small host data to it."""

from __future__ import annotations

import ctypes
from functools import cache, partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.cuda.driver import check, library, settle
from multigemm.errors import NotCapturable
from multigemm.torch_internals import current_raw_stream

MEMORY_CLOCK_KHZ, MEMORY_BUS_BITS = 36, 37
"""Device attributes of the driver."""
FITTED_PROCESSORS = 132
"""Multiprocessors of an H100 and an H200, on which the backends' estimates were fitted."""


@cache
def first_gpu_processors() -> int:
    """The multiprocessors of the first GPU, for which configs are chosen; FITTED_PROCESSORS without a GPU."""
    return processors(0) if torch.cuda.is_available() else FITTED_PROCESSORS


@cache
def processors(index: int) -> int:
    """The number of multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


@cache
def memory_rate(index: int) -> float:
    """The peak rate of a device's memory in bytes per second: both edges of its clock, times the width of its bus."""
    return 2e3 * _attribute(MEMORY_CLOCK_KHZ, index) * _attribute(MEMORY_BUS_BITS, index) / 8


def _attribute(number: int, index: int) -> int:
    cuda, device, value = library(), ctypes.c_int(), ctypes.c_int()
    check(cuda.cuInit(0), "cuInit")  # without a context: torch may not have used the device yet
    check(cuda.cuDeviceGet(ctypes.byref(device), index), "cuDeviceGet")
    check(cuda.cuDeviceGetAttribute(ctypes.byref(value), number, device), "cuDeviceGetAttribute")
    return value.value


def index_of(device: torch.device) -> int:
    """The index of a device; of the current device if it has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


def capturing(device: torch.device) -> bool:
    """Whether work on the device would be recorded into a CUDA graph instead of run."""
    if device.type != "cuda":
        return False
    if device.index is None or device.index == torch.cuda.current_device():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()


STAGED_BYTES = 32 << 10
"""Up to here the driver copies pageable memory aside before it returns; what is larger may wait for the stream."""


def to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """Copies a small host array to the device without waiting.

    Few bytes are copied from pageable memory, because the driver takes them before it returns, in half the time that
    pinned memory costs. More bytes go through pinned memory, which torch's allocator keeps until the copy has run.
    """
    own = array if array.flags.writeable else array.copy()  # torch would hand out memory that must not be written
    values = torch.from_numpy(own)
    if device.type != "cuda":
        return values.to(device)
    if capturing(device):
        raise NotCapturable(
            "host data cannot be copied while a graph is captured: make the plan before, or pass device sizes"
        )
    if array.nbytes > STAGED_BYTES:
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def upload(address: int, source: int, size: int, index: int) -> None:
    """Copies a few bytes (at most STAGED_BYTES) of the host to a device, on its current stream, without waiting.

    The bytes may be changed afterwards. Takes a quarter of the time of `to_device`, which makes a tensor.
    """
    given = ctypes.c_uint64(address), ctypes.c_void_p(source), ctypes.c_size_t(size)
    copy = partial(library().cuMemcpyHtoDAsync_v2, *given, ctypes.c_void_p(current_raw_stream(index)))
    if code := copy():
        settle(code, index, copy, "cuMemcpyHtoDAsync")
