"""Launches of one plan from several threads: each goes to its own stream, and new threads get a context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

from multigemm.cuda import driver as cuda_driver
from multigemm.cuda import launch
from multigemm.cuda.driver import NO_CONTEXT, LaunchAttribute, LaunchConfig, Records
from multigemm.errors import LibraryError

Launch = Callable[[], None]


def test_each_stream_has_a_record_of_its_own_that_is_kept() -> None:
    attributes = (LaunchAttribute * 1)(LaunchAttribute(id=4, dim=(2, 1, 1)))
    shape = LaunchConfig(grid=(5, 6, 7), block=(64, 1, 1), shared=99)
    shape.attributes, shape.attribute_count = ctypes.addressof(attributes), 1
    records = Records(shape)
    for stream in (7, 0, 9):
        own = records[stream]._obj
        assert (own.stream or 0, tuple(own.grid), tuple(own.block), own.shared) == (stream, (5, 6, 7), (64, 1, 1), 99)
        assert (own.attributes, own.attribute_count) == (ctypes.addressof(attributes), 1)
        assert records[stream] is records[stream]
    assert records[7]._obj.stream == 7
    assert not shape.stream


class Machine:
    """A driver that notes the stream of each launch; asked which device is current, it lets another thread run."""

    def __init__(self) -> None:
        self.stream, self.launched, self.meanwhile = 7, list[int](), list[Launch]()
        self.answers = list[int]()

    def cuLaunchKernelEx(self, record: Any, *rest: Any) -> int:
        if self.answers and (code := self.answers.pop()):
            return code
        self.launched.append(record._obj.stream)
        return 0

    def cuGetErrorName(self, code: int, text: Any) -> int:
        return 0

    def device(self) -> int:
        if self.meanwhile:
            before, self.stream = self.stream, 9
            self.meanwhile.pop()()
            self.stream = before
        return 0


def _of_runtime(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(launch, "library", lambda: machine)
    monkeypatch.setattr(launch, "current_raw_stream", lambda index: machine.stream)
    monkeypatch.setattr(launch, "current_device", machine.device)
    return launch.Kernel.loaded(1, "name", 0).bound([], grid=1, threads=32)


MAKERS = {"runtime": _of_runtime}


@pytest.mark.parametrize("backend", MAKERS)
@pytest.mark.parametrize("codes", [[], [NO_CONTEXT], [NO_CONTEXT, NO_CONTEXT], [700]], ids=str)
def test_a_thread_without_a_context_gets_one_and_no_other_error_is_tried_again(
    backend: str, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, contexts = Machine(), list[int]()
    launched = MAKERS[backend](machine, monkeypatch)
    monkeypatch.setattr(cuda_driver, "library", lambda: machine)
    monkeypatch.setattr(cuda_driver, "use_context", contexts.append)
    machine.answers = list(codes)
    if codes in ([], [NO_CONTEXT]):
        launched()
    else:
        with pytest.raises(LibraryError, match=rf"cuLaunchKernel.* returned {codes[-1]}"):
            launched()
    assert (contexts, machine.launched) == ([0] * (NO_CONTEXT in codes), [7] * (codes in ([], [NO_CONTEXT])))


@pytest.mark.parametrize("backend", MAKERS)
def test_a_thread_between_two_steps_of_a_launch_does_not_move_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    launched = MAKERS[backend](machine, monkeypatch)
    machine.meanwhile.append(launched)
    launched()
    assert machine.launched == [9, 7]
