"""In which order several streams get their calls, and what the handle looks like afterwards; no GPU needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.backends.cublas import run
from multigemm.backends.cublas.calls import Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import EXACT_MATH, Call
from multigemm.errors import LibraryError

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

    def new_stream(self, device: Any) -> Any:
        self.streams += 1
        return SimpleNamespace(cuda_stream=self.streams)

    def gemm(self, name: str, status: int = 0) -> Call:
        def function(blas: Any) -> int:
            self.log.append(("call", name, self.stream, self.mode))
            return status

        return Call(function, (), name)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(run, "driver", lambda: found)
    monkeypatch.setattr(run, "handle", found.handle)
    monkeypatch.setattr(run, "use_context", lambda device: None)
    monkeypatch.setattr(run, "cuda", SimpleNamespace(Stream=found.new_stream))
    monkeypatch.setattr(run, "WORKSPACE_BYTES", 16)
    return found


def _streamed(machine: Machine, status: int = 0) -> run.Streamed:
    calls = [machine.gemm(name, status if name == "d" else 0) for name in "abcd"]
    shapes = [Shape(0, 0, 8, 8, k, 8, 8, 8) for k in (40, 30, 20, 10)]
    library: Any = machine
    return run.Streamed(library, Batch(calls), shapes, 3, torch.device("cpu"))


def test_the_largest_products_go_to_streams_of_their_own() -> None:
    assert run.shares([40, 30, 20, 10], 3) == [[0], [1], [2, 3]]
    assert run.shares([5], 4) == [[0]]


def test_side_streams_fork_and_join(machine: Machine) -> None:
    _streamed(machine)(CURRENT)
    kinds = [entry[:2] if entry[0] == "call" else entry[0] for entry in machine.log]
    assert kinds[:2] == ["record", ("call", "a")]
    assert machine.log[0][2] == CURRENT
    fork = machine.log[0][1]
    for name, stream in (("b", 101), ("c", 102), ("d", 102)):
        at = machine.log.index(("call", name, stream, EXACT_MATH))
        assert machine.log.index(("wait", fork, stream)) < at
        ended = next(i for i, entry in enumerate(machine.log) if entry[0] == "record" and entry[2] == stream)
        assert at < ended
        assert machine.log.index(("wait", machine.log[ended][1], CURRENT)) > ended
    assert ("call", "a", CURRENT, EXACT_MATH) in machine.log
    assert (machine.stream, machine.mode) == (CURRENT, TORCHS_MODE)


def test_a_failed_call_leaves_the_handle_as_it_was(machine: Machine) -> None:
    with pytest.raises(LibraryError, match="d returned NOT_SUPPORTED"):
        _streamed(machine, status=15)(CURRENT)
    assert (machine.stream, machine.mode) == (CURRENT, TORCHS_MODE)
