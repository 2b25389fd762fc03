"""A library, its handle and a driver that write down what they are told: for tests of the order of calls."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from multigemm.backends.cublas import run, streams
from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import Call

CURRENT = 7
TORCHS_MODE = 3


class Machine:
    """A library, its handle and a driver that write down what they are told."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.stream, self.mode, self.events, self.streams = CURRENT, TORCHS_MODE, 0, 100

    def handle(self) -> ctypes.c_void_p:
        self.stream, self.mode = CURRENT, TORCHS_MODE
        return ctypes.c_void_p(1)

    def get_math_mode(self, blas: Any, to: Any) -> int:
        to._obj.value = self.mode
        return 0

    def set_math_mode(self, blas: Any, mode: Any) -> int:
        self.mode = getattr(mode, "value", mode)
        return 0

    def set_stream(self, blas: Any, stream: Any) -> int:
        self.stream = stream.value
        return 0

    def set_workspace(self, blas: Any, pointer: Any, size: Any) -> int:
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

    def cuEventDestroy_v2(self, event: Any) -> int:
        return 0

    def cuStreamCreate(self, to: Any, flags: int) -> int:
        self.streams += 1
        to._obj.value = self.streams
        return 0

    def cuStreamDestroy_v2(self, stream: Any) -> int:
        return 0

    def gemm(self, name: str, status: int = 0) -> Call:
        def function(blas: Any) -> int:
            self.log.append(("call", name, self.stream, self.mode))
            return status

        return Call(function, (), name)


def install(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """The machine, in the places of the library, the driver and torch's handle."""
    found = Machine()
    monkeypatch.setattr(run, "handle", found.handle)
    monkeypatch.setattr(streams, "driver", lambda: found)
    monkeypatch.setattr(streams, "use_context", lambda device: None)
    monkeypatch.setattr(streams.Loan, "_idle", {})
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: False, raising=False)
    monkeypatch.setattr(run, "workspace_bytes", lambda: 16)
    return found


def streamed(machine: Machine, status: int = 0, size: int = 4096) -> run.Streamed:
    """Four products on three streams; `status` is what the last of them returns."""
    calls = [machine.gemm(name, status if name == "d" else 0) for name in "abcd"]
    shapes = [Shape(0, 0, size, 4096, k, 4096, 4096, 4096) for k in (4000, 3000, 2000, 1000)]
    library: Any = machine
    return run.Streamed(library, Batch(calls), shapes, 3, torch.device("cpu"))
