"""Launches of several pieces become graphs at the second run, and how those are made; no GPU needed."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from multigemm.backends.cublas import nvrtc, record, run, streams
from multigemm.backends.cublas.calls import GROUPED, Batch
from multigemm.backends.cublas.library import EXACT_MATH, Call
from multigemm.errors import LibraryError
from tests.cublas_machine import CURRENT, TORCHS_MODE, Machine, install, streamed

RECORDING = 9


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


class Recorder:
    """Stands in for `record.Graph`: enqueues at once on a stream of its own, and counts replays."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, device: int, enqueue: Any, allocates: bool) -> None:
        self.replays, self.allocates = 0, allocates
        Recorder.made.append(self)
        enqueue(ctypes.c_void_p(RECORDING))

    def replay(self, stream: int) -> None:
        assert stream == CURRENT
        self.replays += 1


@pytest.fixture
def torchs(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> SimpleNamespace:
    """torch's answers about the device, and what it would say about a capture."""
    state = SimpleNamespace(capturing=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: CURRENT, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: state.capturing, raising=False)
    monkeypatch.setattr(run, "Graph", Recorder)
    Recorder.made = []
    return state


def _steps(*steps: Any) -> run.Steps:
    ops: Any = SimpleNamespace(device=torch.device("cpu"))
    return run.Steps(ops, steps)


def _loop(machine: Machine, names: str, call: str = "") -> run.Calls:
    library: Any = machine
    return run.Calls(library, Batch([machine.gemm(name)._replace(name=call or name) for name in names]))


def test_several_calls_are_recorded_at_the_second_run(torchs: SimpleNamespace, machine: Machine) -> None:
    launch = _steps(_loop(machine, "ab"))
    launch()
    assert [entry[1:3] for entry in machine.log] == [("a", CURRENT), ("b", CURRENT)]
    assert Recorder.made == []
    launch()
    assert machine.log[2:] == [("call", "a", RECORDING, EXACT_MATH), ("call", "b", RECORDING, EXACT_MATH)]
    assert (machine.stream, machine.mode) == (CURRENT, TORCHS_MODE)
    launch()
    assert [graph.replays for graph in Recorder.made] == [2]
    assert len(machine.log) == 4


def test_a_callers_capture_gets_the_pieces(torchs: SimpleNamespace, machine: Machine) -> None:
    launch = _steps(_loop(machine, "ab"))
    launch()
    launch()
    torchs.capturing = True
    launch()
    assert [graph.replays for graph in Recorder.made] == [1]
    assert [entry[2] for entry in machine.log] == [CURRENT] * 2 + [RECORDING] * 2 + [CURRENT] * 2


def test_a_single_piece_and_the_grouped_call_are_no_graphs(torchs: SimpleNamespace, machine: Machine) -> None:
    for launch in (_steps(_loop(machine, "a")), _steps(_loop(machine, "a", GROUPED), print), _steps(print)):
        for _ in range(3):
            launch()
    assert Recorder.made == []


def test_an_epilogue_is_recorded_behind_its_call(torchs: SimpleNamespace, machine: Machine) -> None:
    launch = _steps(_loop(machine, "a"), lambda stream: machine.log.append(("epilogue", stream)))
    launch()
    launch()
    assert machine.log == [
        ("call", "a", CURRENT, EXACT_MATH), ("epilogue", CURRENT),
        ("call", "a", RECORDING, EXACT_MATH), ("epilogue", RECORDING),
    ]  # fmt: skip


def test_several_streams_are_recorded_as_a_fork(torchs: SimpleNamespace, machine: Machine) -> None:
    launch = _steps(streamed(machine))
    launch()
    first, machine.log = machine.log, []
    launch()
    assert [[RECORDING if part == CURRENT else part for part in entry] for entry in first] == [
        list(entry) for entry in machine.log
    ]
    assert (machine.stream, machine.mode) == (CURRENT, TORCHS_MODE)


def test_a_call_that_fails_while_recording_leaves_the_handle_as_it_was(
    torchs: SimpleNamespace, machine: Machine
) -> None:
    library: Any = machine
    status = [0, 0, 15]
    calls = [Call(lambda blas: status.pop(0), (), "x"), Call(lambda blas: status.pop(0), (), "y")]
    launch = _steps(run.Calls(library, Batch(calls)))
    launch()
    with pytest.raises(LibraryError, match="x returned NOT_SUPPORTED"):
        launch()
    assert (machine.stream, machine.mode) == (CURRENT, TORCHS_MODE)


class GraphDriver:
    """The driver's part in a recording, written down."""

    def __init__(self, log: list[Any], bad: str = "") -> None:
        self.log, self.bad = log, bad

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> int:
            self.log.append(name)
            made = {"cuStreamCreate": 5, "cuStreamEndCapture": 6, "cuGraphInstantiateWithFlags": 7}.get(name)
            for to in (getattr(arg, "_obj", None) for arg in args):
                if made and to is not None:
                    to.value = made
            return 900 if name == self.bad else 0

        return call


@pytest.fixture
def recording(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    def start(bad: str = "") -> list[Any]:
        log: list[Any] = []
        machine = GraphDriver(log, bad)
        torchs = SimpleNamespace(
            graph_pool_handle=lambda: (0, 1), ExternalStream=lambda raw, device: raw, stream=nullcontext
        )
        pools = ("_cuda_beginAllocateCurrentThreadToPool", "_cuda_endAllocateToPool", "_cuda_releasePool")
        memory = SimpleNamespace(**{name: partial(lambda name, *args: log.append(name), name) for name in pools})
        monkeypatch.setattr(record, "memory", memory)
        for module in (record, nvrtc, streams):
            monkeypatch.setattr(module, "driver", lambda: machine)
        for module in (record, streams):
            monkeypatch.setattr(module, "use_context", lambda device: log.append("context"))
        monkeypatch.setattr(record, "cuda", torchs)
        record._stream.cache_clear()
        return log

    yield start
    record._stream.cache_clear()


CAPTURE = ["context", "cuStreamCreate", "cuStreamBeginCapture_v2", "work", "cuStreamEndCapture"]


def test_a_graph_is_captured_made_and_launched(recording: Any) -> None:
    log = recording()
    graph = record.Graph(0, lambda stream: log.append("work"), allocates=False)
    assert log == [*CAPTURE, "cuGraphInstantiateWithFlags", "cuGraphDestroy"]
    graph.replay(3)
    assert log[-1] == "cuGraphLaunch"
    del graph
    assert log[-1] == "cuGraphExecDestroy"


def test_what_torch_allocates_lives_as_long_as_the_graph(recording: Any) -> None:
    log = recording()
    graph = record.Graph(0, lambda stream: log.append("work"), allocates=True)
    begin, end = log.index("_cuda_beginAllocateCurrentThreadToPool"), log.index("_cuda_endAllocateToPool")
    assert begin < log.index("work") < end
    assert "_cuda_releasePool" not in log
    del graph
    assert log[-2:] == ["_cuda_releasePool", "cuGraphExecDestroy"]


@pytest.mark.parametrize("bad", ["cuStreamBeginCapture_v2", "cuStreamEndCapture", "cuGraphInstantiateWithFlags"])
def test_a_driver_that_cannot_record_is_loud(recording: Any, bad: str) -> None:
    recording(bad)
    with pytest.raises(LibraryError, match="returned 900"):
        record.Graph(0, lambda stream: None, allocates=False)


def test_work_that_fails_ends_the_capture(recording: Any) -> None:
    log = recording()

    def enqueue(stream: Any) -> None:
        raise LibraryError("no")

    with pytest.raises(LibraryError, match="no"):
        record.Graph(0, enqueue, allocates=True)
    assert log[-3:] == ["cuStreamEndCapture", "cuGraphDestroy", "_cuda_endAllocateToPool"]


def test_a_launch_that_fails_is_loud_and_a_thread_without_a_context_gets_one(recording: Any) -> None:
    log = recording("cuGraphLaunch")
    graph = record.Graph(0, lambda stream: None, allocates=False)
    with pytest.raises(LibraryError, match="cuGraphLaunch returned 900"):
        graph.replay(3)
    assert "context" not in log[len(CAPTURE) :]
