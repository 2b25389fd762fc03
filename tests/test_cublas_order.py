"""In which order several streams get their calls, and what the handle looks like afterwards; no GPU needed."""

from __future__ import annotations

import pytest
import torch

from multigemm.backends.cublas import run
from multigemm.backends.cublas.library import EXACT_MATH
from multigemm.errors import LibraryError
from tests.cublas_machine import CURRENT, TORCHS_MODE, Machine, install, streamed


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return install(monkeypatch)


def test_the_largest_products_go_to_streams_of_their_own() -> None:
    assert run.shares([40, 30, 20, 10], 3) == [[0], [1], [2, 3]]
    assert run.shares([5], 4) == [[0]]


def test_side_streams_fork_and_join(machine: Machine) -> None:
    streamed(machine)(CURRENT)
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
        streamed(machine, status=15)(CURRENT)
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


def test_short_products_take_one_stream(machine: Machine) -> None:
    """Their calls take the host longer than the device; only a graph runs them beside each other."""
    streamed(machine, size=8)(CURRENT)
    assert [entry[:3] for entry in machine.log] == [("call", name, CURRENT) for name in "abcd"]


def test_side_streams_are_lent_again(machine: Machine) -> None:
    launch = streamed(machine)
    launch(CURRENT)
    assert machine.streams == 102
    del launch
    streamed(machine)(CURRENT)
    assert machine.streams == 102


def test_side_streams_of_a_capture_are_not_lent_again(monkeypatch: pytest.MonkeyPatch, machine: Machine) -> None:
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: True, raising=False)
    launch = streamed(machine, size=8)
    launch(CURRENT)
    assert ("call", "b", 101, EXACT_MATH) in machine.log
    del launch
    streamed(machine)
    assert machine.streams == 104
