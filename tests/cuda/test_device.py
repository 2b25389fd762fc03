"""Host data on its way to a device: right, whatever becomes of the source, and without waiting for the stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multigemm.cuda.device import STAGED_BYTES, to_device, upload
from multigemm.errors import NotCapturable

Array = np.ndarray[Any, Any]
STAGED = (1, 65, STAGED_BYTES // 8)
"""Numbers of elements that are copied through memory of the driver's own."""


def test_read_only_arrays_are_copied_on_the_host() -> None:
    source = np.arange(5)
    source.flags.writeable = False
    copied = to_device(source, torch.device("cpu"))
    copied[0] = 7
    assert source[0] == 0


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
