"""A library with handles and a driver that write down what they are told: for tests of the order of calls."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from multigemm.backends.cublas import run, streams
from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Call
from multigemm.cuda import driver as cuda_driver

CURRENT = 7
TORCHS, TORCHS_MODE, TORCHS_SPACE = 1, 3, 9
SPACE = 16


class Machine:
    """A library, its handles and a driver that write down what they are told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.stream_of, self.mode_of = {TORCHS: CURRENT}, {TORCHS: TORCHS_MODE}
        self.space_of = {TORCHS: TORCHS_SPACE}
        self.capture_of: dict[int, int] = {}
        self.events, self.streams, self.relaxed = 0, 100, False

    def handle(self) -> ctypes.c_void_p:
        self.stream_of[TORCHS], self.mode_of[TORCHS], self.space_of[TORCHS] = CURRENT, TORCHS_MODE, TORCHS_SPACE
        return ctypes.c_void_p(TORCHS)

    def create(self, to: Any) -> int:
        assert self.relaxed, "elsewhere a capture may be going on"
        to._obj.value = len(self.mode_of) + 1
        self.mode_of[to._obj.value] = 0
        return 0

    def get_math_mode(self, blas: Any, to: Any) -> int:
        to._obj.value = self.mode_of[blas.value]
        return 0

    def set_math_mode(self, blas: Any, mode: Any) -> int:
        self.mode_of[blas.value] = getattr(mode, "value", mode)
        return 0

    def set_stream(self, blas: Any, stream: Any) -> int:
        self.stream_of[blas.value] = stream.value
        self.space_of.pop(blas.value, None)  # as the library does
        return 0

    def set_workspace(self, blas: Any, pointer: Any, size: Any) -> int:
        self.space_of[blas.value] = pointer.value
        return 0

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        mode._obj.value, self.relaxed = 2 * self.relaxed, mode._obj.value == 2
        return 0

    def cuStreamGetCaptureInfo_v2(self, stream: Any, state: Any, number: Any, *rest: Any) -> int:
        number._obj.value = self.capture_of.get(stream.value, 0)
        state._obj.value = int(number._obj.value > 0)
        return 0

    def cuEventCreate(self, to: Any, flags: int) -> int:
        self.events += 1
        to._obj.value = self.events
        return 0

    def cuEventRecord(self, event: Any, stream: Any) -> int:
        self.log.append(("record", event.value, stream.value))
        return 0

    def cuStreamWaitEvent(self, stream: Any, event: Any, flags: int) -> int:
        self.log.append(("wait", event.value, stream.value))
        return 0

    def cuStreamCreate(self, to: Any, flags: int) -> int:
        self.streams += 1
        to._obj.value = self.streams
        return 0

    def gemm(self, name: str, status: int = 0) -> Call:
        def function(blas: Any) -> int:
            self.log.append(("call", name, self.stream_of[blas.value], self.mode_of[blas.value]))
            return status

        return Call(function, (), name)

    def called(self) -> dict[str, int]:
        """The stream of each call."""
        return {entry[1]: entry[2] for entry in self.log if entry[0] == "call"}


def install(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine, in the places of the library, the driver and torch's handle."""
    found = Machine()
    monkeypatch.setattr(run, "handle", found.handle)
    monkeypatch.setattr(cuda_driver, "library", lambda: found)
    monkeypatch.setattr(cuda_driver, "use_context", lambda device: None)
    for module in (streams, run):
        monkeypatch.setattr(module, "workspace", lambda device, stream=None: torch.empty(SPACE, dtype=torch.uint8))
    monkeypatch.setattr(streams, "_kits", {})
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: CURRENT in found.capture_of, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: CURRENT, raising=False)
    return found


def streamed(machine: Machine, status: int = 0, size: int = 4096, count: int = 3) -> run.Streamed:
    """Four products on so many streams; `status` is what the last of them returns."""
    calls = [machine.gemm(name, status if name == "d" else 0) for name in "abcd"]
    shapes = [Shape(0, 0, size, 4096, k, 4096, 4096, 4096) for k in (4000, 3000, 2000, 1000)]
    library: Any = machine
    return run.Streamed(library, Batch(calls), shapes, count, torch.device("cpu"))
