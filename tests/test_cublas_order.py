"""In which order several streams get their calls, and what the handle looks like afterwards; no GPU needed."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from multigemm.backends.cublas import record, run
from multigemm.backends.cublas.calls import GROUPED, Batch
from multigemm.backends.cublas.leading import Shape
from multigemm.backends.cublas.library import EXACT_MATH, Call
from multigemm.errors import LibraryError

CURRENT = 7
TORCHS_MODE = 3
RECORDING = 9


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


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    found = Machine()
    monkeypatch.setattr(run, "handle", found.handle)
    for module in (run, record):
        monkeypatch.setattr(module, "driver", lambda: found)
        monkeypatch.setattr(module, "use_context", lambda device: None)
    monkeypatch.setattr(run, "workspace_bytes", lambda: 16)
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


@pytest.mark.parametrize(
    ("config", "size"), [("", 32 << 20), (":4096:8", 32 << 20), (":16:8", 128 << 10), (":4096:2:16:8", 8320 << 10)]
)
def test_the_workspace_is_sized_as_torchs(monkeypatch: pytest.MonkeyPatch, config: str, size: int) -> None:
    """Another size would let the library choose other kernels, and the first run other bits than the next."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", config)
    run.workspace_bytes.cache_clear()
    assert run.workspace_bytes() == size
    run.workspace_bytes.cache_clear()


# --- launches that become graphs -------------------------------------------------------------------


class Recorder:
    """Stands in for `record.Graph`: enqueues at once on a stream of its own, and counts replays."""

    made: ClassVar[list[Recorder]] = []

    def __init__(self, device: int, enqueue: Any) -> None:
        self.replays = 0
        Recorder.made.append(self)
        enqueue(ctypes.c_void_p(RECORDING))

    def replay(self) -> None:
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
    launch = _steps(_streamed(machine))
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
