"""Launches of one plan from several threads: each goes to its own stream, and new threads get a context."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.backends.numba import driver as numba_driver
from multigemm.backends.triton import driver as triton_driver
from multigemm.cuda import driver as cuda_driver
from multigemm.cuda import launch as cuda_launch
from multigemm.cuda.arguments import ArgumentBlock
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

    def cuLaunchKernel(self, handle: Any, *rest: Any) -> int:
        code = self.answers.pop() if self.answers else 0
        if not code:
            self.launched.append(rest[7])
        return code

    def cuGetErrorName(self, code: int, text: Any) -> int:
        return 0

    def device(self) -> int:
        if self.meanwhile:
            before, self.stream = self.stream, 9
            self.meanwhile.pop()()
            self.stream = before
        return 0


def _of_the_runtime(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(cuda_launch, "library", lambda: machine)
    monkeypatch.setattr(cuda_launch, "current_raw_stream", lambda index: machine.stream)
    monkeypatch.setattr(cuda_launch, "current_device", machine.device)
    monkeypatch.setattr(cuda_launch, "is_capturing", lambda: False)
    kernel: Any = SimpleNamespace(handle=1, index=0, name="kernel")
    return cuda_launch.BoundKernel(kernel, ArgumentBlock([]), LaunchConfig(), None, None)


def _of_numba(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(numba_driver, "library", lambda: machine)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda index: SimpleNamespace(cuda_stream=machine.stream))
    monkeypatch.setattr(torch.cuda, "current_device", machine.device)
    function: Any = SimpleNamespace(handle=1, device=torch.device("cuda", 0))
    return numba_driver._bound_launch(function, LaunchConfig(), None, None)


def _of_triton(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> Launch:
    monkeypatch.setattr(triton_driver, "launch_kernel", lambda: machine.cuLaunchKernel)
    monkeypatch.setattr(triton_driver, "function", lambda code, index: 1)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: machine.stream, raising=False)
    monkeypatch.setattr(torch.cuda, "current_device", machine.device)
    code: Any = SimpleNamespace(threads=32, shared=0, name="name")
    return triton_driver._bound(code, 0, 1, triton_driver.Arguments([], ()))


MAKERS = {"runtime": _of_the_runtime, "numba": _of_numba, "triton": _of_triton}


@pytest.mark.parametrize("backend", MAKERS)
@pytest.mark.parametrize("codes", [[], [NO_CONTEXT], [NO_CONTEXT, NO_CONTEXT], [700]], ids=str)
def test_a_thread_without_a_context_gets_one_and_no_other_error_is_tried_again(
    backend: str, codes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine, contexts = Machine(), list[int]()
    launch = MAKERS[backend](machine, monkeypatch)
    monkeypatch.setattr(cuda_driver, "library", lambda: machine)
    monkeypatch.setattr(cuda_driver, "use_context", contexts.append)
    machine.answers = list(codes)
    if codes in ([], [NO_CONTEXT]):
        launch()
    else:
        with pytest.raises(LibraryError, match=rf"cuLaunchKernel.* returned {codes[-1]}"):
            launch()
    assert (contexts, machine.launched) == ([0] * (NO_CONTEXT in codes), [7] * (codes in ([], [NO_CONTEXT])))


@pytest.mark.parametrize("backend", ["runtime", "numba"])
def test_a_thread_between_two_steps_of_a_launch_does_not_move_it(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine()
    launch = MAKERS[backend](machine, monkeypatch)
    machine.meanwhile.append(launch)
    launch()
    assert machine.launched == [9, 7]
