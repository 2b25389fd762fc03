"""Launches: of one plan from several threads, in a capture, of several kernels; and copies in front of them."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from typing import Any

import pytest

from multigemm.cuda import driver as cuda_driver
from multigemm.cuda import launch
from multigemm.cuda.device import upload
from multigemm.cuda.driver import NO_CONTEXT, LaunchAttribute, LaunchConfig, Records
from multigemm.errors import LibraryError
from tests.support import cuda_driver as cuda_driver_fake

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


def test_another_grid_reaches_every_stream_and_no_other_launch() -> None:
    shape = LaunchConfig(grid=(5, 1, 1), block=(64, 1, 1))
    records, others = Records(shape), Records(shape)  # launches of one shape share its record
    kept = records[7], others[7]
    for blocks in ((9, 1, 1), (2, 3, 1), (2, 3, 1)):
        records.set_grid(blocks)
        assert [tuple(records[stream]._obj.grid) for stream in (7, 0)] == [blocks] * 2
        assert [tuple(others[stream]._obj.grid) for stream in (7, 0)] == [(5, 1, 1)] * 2
        assert (records[7], others[7]) == kept and records[7]._obj.stream == 7
    assert tuple(shape.grid) == (5, 1, 1)


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


@pytest.mark.parametrize("codes", [[], [NO_CONTEXT], [NO_CONTEXT, NO_CONTEXT], [700]], ids=str)
def test_a_thread_without_a_context_gets_one_and_no_other_error_is_tried_again(
    codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, contexts = Machine(), list[int]()
    launched = _of_runtime(machine, monkeypatch)
    monkeypatch.setattr(cuda_driver, "library", lambda: machine)
    monkeypatch.setattr(cuda_driver, "use_context", contexts.append)
    machine.answers = list(codes)
    if codes in ([], [NO_CONTEXT]):
        launched()
    else:
        with pytest.raises(LibraryError, match=rf"cuLaunchKernel.* returned {codes[-1]}"):
            launched()
    assert (contexts, machine.launched) == ([0] * (NO_CONTEXT in codes), [7] * (codes in ([], [NO_CONTEXT])))


def test_a_thread_between_two_steps_of_a_launch_does_not_move_it(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    launched = _of_runtime(machine, monkeypatch)
    machine.meanwhile.append(launched)
    launched()
    assert machine.launched == [9, 7]


@pytest.mark.parametrize("kernels", [1, 2])
def test_owners_of_workspaces_are_told_of_a_capture_and_of_nothing_else(
    kernels: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, told = cuda_driver_fake.install(monkeypatch), list[int]()
    kernel = launch.Kernel.loaded(1, "name", 0)
    steps = [kernel.bound([], grid=1, threads=32, on_capture=lambda i=i: told.append(i)) for i in range(kernels)]  # type: ignore[misc]
    launched = launch.in_turn([*steps, kernel.bound([], grid=1, threads=32)])
    for fake.capturing, fake.device in ((False, 0), (True, 0), (False, 0), (True, 1)):
        launched()
    assert told == [*range(kernels), *range(kernels)]
    assert len(fake.launched) == 4 * (kernels + 1)


@pytest.mark.parametrize("has_context", [True, False])
def test_a_few_bytes_are_copied_on_the_current_stream(has_context: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = cuda_driver_fake.install(monkeypatch)
    fake.make_current(cuda_driver_fake.CONTEXT if has_context else 0)
    source, target = array("i", [3, 4, 5]), array("i", [0, 0, 0, 7])
    given = target.buffer_info()[0], source.buffer_info()[0], 12, 0
    upload(*given)
    assert target.tolist() == [3, 4, 5, 7]
    assert fake.copied == [(12, fake.stream)]
