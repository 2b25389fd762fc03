"""Host data on its way to a device: right, whatever becomes of the source, and without waiting for the stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multigemm.cuda.device import (
    MEMORY_BUS_BITS,
    MEMORY_CLOCK_KHZ,
    STAGED_BYTES,
    memory_rate,
    to_device,
    upload,
)
from multigemm.errors import LibraryError, NotCapturable
from tests.support import cuda_driver

Array = np.ndarray[Any, Any]
STAGED = (1, 65, STAGED_BYTES // 8)
"""Numbers of elements that are copied through memory of the driver's own."""


def test_read_only_arrays_are_copied_on_the_host() -> None:
    source = np.arange(5)
    source.flags.writeable = False
    copied = to_device(source, torch.device("cpu"))
    copied[0] = 7
    assert source[0] == 0


def test_the_rate_of_memory_is_that_of_its_clock_and_its_bus(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = cuda_driver.install(monkeypatch)
    memory_rate.cache_clear()
    assert memory_rate(0) == pytest.approx(3.352e12, rel=1e-3), "an H100"
    fake.attributes = {MEMORY_CLOCK_KHZ: 3_201_000, MEMORY_BUS_BITS: 6144}
    memory_rate.cache_clear()
    assert memory_rate(0) == pytest.approx(4.917e12, rel=1e-3), "an H200"
    monkeypatch.setattr(fake, "_cuDeviceGetAttribute", lambda *args: 101)
    memory_rate.cache_clear()
    with pytest.raises(LibraryError, match="cuDeviceGetAttribute returned 101"):
        memory_rate(0)
    memory_rate.cache_clear()


@pytest.mark.gpu
def test_the_rate_of_memory_is_one_that_a_gpu_may_have() -> None:
    assert 1e11 < memory_rate(torch.cuda.current_device()) < 1e14


def _array(source: Array, _: Tensor) -> Tensor:
    return to_device(source, torch.device("cuda", torch.cuda.current_device()))


def _upload(source: Array, target: Tensor) -> Tensor:
    upload(target.data_ptr(), source.ctypes.data, source.nbytes, target.device.index)
    return target


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("copy", "count"),
    [
        *((_array, count) for count in (*STAGED, STAGED[-1] + 1, 1 << 16)),
        *((_upload, count) for count in STAGED),
    ],
)
def test_the_source_may_change_at_once_and_a_busy_stream_is_not_waited_for(
    copy: Callable[[Array, Tensor], Tensor], count: int
) -> None:
    targets = [torch.empty(count, dtype=torch.int64, device="cuda") for _ in range(20)]
    copy(np.arange(count), targets[0])
    torch.cuda.synchronize()
    sleeper: object = torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    copies = []
    for turn, target in enumerate(targets):
        source = np.arange(count) + turn
        copies.append(copy(source, target))
        source[:] = -1
    spent = time.perf_counter() - began
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy and spent < 0.5, (sleeper, spent)
    assert all(torch.equal(x.cpu(), torch.arange(count) + turn) for turn, x in enumerate(copies))


@pytest.mark.gpu
def test_nothing_is_copied_in_a_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(NotCapturable, match="make the plan before"):
        to_device(np.arange(3), torch.device("cuda", torch.cuda.current_device()))
