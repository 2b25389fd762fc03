"""Facts about a device, and small host data on its way there."""

from __future__ import annotations

from functools import cache

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.errors import NotCapturable

FITTED_PROCESSORS = 132
"""Multiprocessors of an H100 and an H200, on which the backends' estimates were fitted."""


@cache
def processors(index: int) -> int:
    """Multiprocessors of a device."""
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def index_of(device: torch.device) -> int:
    """The device's number; the current one where a device has none."""
    return device.index if device.index is not None else torch.cuda.current_device()


def capturing(device: torch.device) -> bool:
    """Whether work on the device would be recorded into a CUDA graph instead of run."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def to_device(array: npt.NDArray[np.int64] | npt.NDArray[np.int32], device: torch.device) -> Tensor:
    """A small host array on the device, without waiting for it.

    The copy starts in pinned memory, whose allocator keeps it until the copy has run; a pageable
    source could make the driver wait for the stream.
    """
    if device.type != "cuda":
        own = array if array.flags.writeable else array.copy()  # torch would hand out memory that must not be written
        return torch.from_numpy(own).to(device)
    if capturing(device):
        raise NotCapturable(
            "host data cannot be copied while a graph is captured: make the plan before, or pass device sizes"
        )
    pinned = torch.empty(array.shape, dtype=torch.int64 if array.itemsize == 8 else torch.int32, pin_memory=True)
    pinned.numpy()[...] = array
    return pinned.to(device, non_blocking=True)
