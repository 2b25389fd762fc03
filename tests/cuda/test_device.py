"""Host data on its way to a device: right, whatever becomes of the source, and without waiting for the stream."""

from __future__ import annotations

import time

import numpy as np
import pytest
import torch

from multigemm.cuda.device import STAGED_BYTES, to_device, upload
from multigemm.errors import NotCapturable


def test_read_only_arrays_are_copied_on_the_host() -> None:
    source = np.arange(5)
    source.flags.writeable = False
    copied = to_device(source, torch.device("cpu"))
    copied[0] = 7
    assert source[0] == 0


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 65, STAGED_BYTES // 8, STAGED_BYTES // 8 + 1, 1 << 16])
def test_the_source_may_change_at_once_and_a_busy_stream_is_not_waited_for(count: int) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    to_device(np.arange(count), device)
    torch.cuda.synchronize()
    sleeper: object = torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    copies = []
    for turn in range(20):
        source = np.arange(count) + turn
        copies.append(to_device(source, device))
        source[:] = -1
    spent = time.perf_counter() - began
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy and spent < 0.5, (sleeper, spent)
    assert all(torch.equal(x.cpu(), torch.arange(count) + turn) for turn, x in enumerate(copies))


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 65, STAGED_BYTES // 8])
def test_an_upload_takes_its_bytes_at_once_and_waits_for_nothing(count: int) -> None:
    index = torch.cuda.current_device()
    targets = [torch.empty(count, dtype=torch.int64, device="cuda") for _ in range(20)]
    torch.cuda.synchronize()
    sleeper: object = torch.cuda._sleep(2_000_000_000)  # type: ignore[no-untyped-call]
    began = time.perf_counter()
    for turn, target in enumerate(targets):
        source = np.arange(count) + turn
        upload(target.data_ptr(), source.ctypes.data, source.nbytes, index)
        source[:] = -1
    spent = time.perf_counter() - began
    busy = not torch.cuda.current_stream().query()
    torch.cuda.synchronize()
    assert busy and spent < 0.5, (sleeper, spent)
    assert all(torch.equal(x.cpu(), torch.arange(count) + turn) for turn, x in enumerate(targets))


@pytest.mark.gpu
def test_nothing_is_copied_in_a_capture() -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(NotCapturable, match="make the plan before"):
        to_device(np.arange(3), torch.device("cuda", torch.cuda.current_device()))
