"""What a call costs in joules, by the counter of the whole board that NVML reads."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable

import torch

from multigemm.errors import LibraryError

LIBRARY = "libnvidia-ml.so.1"
LONG_ENOUGH_US = 1e6
"""The counter moves in steps of up to 100 ms: calls are repeated for a second."""


class EnergyMeter:
    """The energy that a GPU has used since its driver was loaded.

    Raises:
        LibraryError: there is no GPU, no NVML, or this GPU counts nothing; the text says which.
    """

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda":
            raise LibraryError(f"energy is counted on GPUs alone, and this is a {device.type}")
        self.device, self._handle = device, ctypes.c_void_p()
        try:
            self._nvml = ctypes.CDLL(LIBRARY)
        except OSError as error:
            raise LibraryError(f"energy is read through NVML, which is not here: {error}") from error
        self._call("nvmlInit_v2")
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}".encode()
        self._call("nvmlDeviceGetHandleByUUID", uuid, ctypes.byref(self._handle))
        self.joules()

    def _call(self, name: str, *arguments: object) -> None:
        if status := getattr(self._nvml, name)(*arguments):
            raise LibraryError(f"{name} returned status {status}: this GPU's energy cannot be read")

    def joules(self) -> float:
        """What was used up to now."""
        total = ctypes.c_ulonglong()
        self._call("nvmlDeviceGetTotalEnergyConsumption", self._handle, ctypes.byref(total))
        return total.value / 1e3

    def of_call(self, call: Callable[[], object], us: float) -> float:
        """Joules of one call that takes about `us` microseconds: the mean over a second of calls back to back."""
        count = math.ceil(LONG_ENOUGH_US / us)
        torch.cuda.synchronize(self.device)
        before = self.joules()
        for _ in range(count):
            call()
        torch.cuda.synchronize(self.device)
        return (self.joules() - before) / count
