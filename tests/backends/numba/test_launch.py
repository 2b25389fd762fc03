"""What is of the Numba backend alone in how it binds: copies of tensor maps, workspaces, loading."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multigemm.backends.numba.config import (
    A_MAP,
    FMA_TALL,
    GENERIC,
    HOPPER,
    HOPPER_NARROW,
    MMA,
    Config,
)
from multigemm.cuda import tensor_map
from multigemm.cuda.arguments import MOST_COPIES
from multigemm.cuda.launch import NOTHING
from tests.support.cuda_driver import FakeDriver, addresses_of
from tests.support.numba_world import bound, install
from tests.support.small_problems import BOUNDARY, elsewhere, operands

CONFIGS: tuple[Config, ...] = (GENERIC, MMA, FMA_TALL, HOPPER, HOPPER_NARROW)


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def maps_of(made: Any) -> bytes:
    """The copy of a launch's tensor maps in what is device memory here."""
    *_, maps, counters = made._block.snapshot().tolist()
    return ctypes.string_at(maps, counters - maps)


def test_nothing_to_do_needs_no_launch(fake: FakeDriver) -> None:
    ops = operands("jagged_m")
    ops.a, ops.out = ops.a[:0], ops.out[:0]
    assert all(bound(config, ops) is NOTHING for config in CONFIGS)


def test_the_kernel_of_a_config_is_loaded_once(fake: FakeDriver) -> None:
    for _ in range(3):
        bound(MMA, operands("jagged_m"))
    assert fake.calls.count("cuModuleLoadData") == 1
    assert "cuModuleUnload" not in fake.calls


@pytest.mark.slow
@pytest.mark.parametrize("form", ["masked", "per_group"])
def test_a_launch_keeps_its_workspace_alive_and_no_operand(form: str, fake: FakeDriver) -> None:
    seen, launches = {}, {}
    for config in CONFIGS:
        ops: Any = operands(form)
        launches[config] = bound(config, ops)
        tensors = [*ops.a, *ops.b, *ops.out] if form == "per_group" else [ops.a, ops.b, ops.out, ops.valid_rows]
        seen[config] = [weakref.ref(x) for x in tensors]
        del ops, tensors
    gc.collect()
    for config, launch in launches.items():
        assert not any(ref() is not None for ref in seen[config]), config
        kept = (launch.__self__ if form == "per_group" else launch)._keep
        assert sum(isinstance(x, Tensor) for x in kept) == (form == "per_group"), config
        launch()


def copies(made: Any) -> dict[tuple[int, ...], Tensor]:
    found: dict[tuple[int, ...], Tensor] = made._fields._copies
    return found


def test_maps_that_were_uploaded_are_never_written_again(fake: FakeDriver) -> None:
    """A kernel in front may still read them: other addresses get a copy of their own."""
    here = operands("jagged_m")
    there = elsewhere(here)
    made = bound(HOPPER, here)
    first = maps_of(made)
    (kept,) = copies(made).values()
    before = kept.clone()
    for _ in range(3):
        made.move(addresses_of(there))
        made.move(addresses_of(here))
    assert torch.equal(kept, before)
    assert maps_of(made) == first
    assert len(copies(made)) == 2, "operands that lie where they lay before need no other upload"


def test_another_stream_gets_a_copy_of_its_own(fake: FakeDriver) -> None:
    """The upload was enqueued on the first stream, and a kernel on another one does not wait for it."""
    ops = operands("jagged_m")
    made = bound(HOPPER, ops)
    made.move(addresses_of(ops))
    assert len(copies(made)) == 1
    fake.stream = 9
    made.move(addresses_of(ops))
    assert len(copies(made)) == 2
    (first, second) = copies(made).values()
    assert made._block.snapshot()[-2] == second.data_ptr() != first.data_ptr()
    made()
    assert fake.launched[-1].stream == 9


def test_the_number_of_copies_is_bounded(fake: FakeDriver) -> None:
    ops = operands("jagged_m")
    made, where = bound(HOPPER, ops), addresses_of(ops)
    for step in range(3 * MOST_COPIES):
        made.move((where[0] + BOUNDARY * step, *where[1:]))
        maps = int(made._block.snapshot()[-2])
        assert maps in {x.data_ptr() for x in copies(made).values()}
        words = np.frombuffer(ctypes.string_at(maps + A_MAP * tensor_map.SIZE, 8), np.int64)
        assert words[0] == where[0] + BOUNDARY * step
    assert len(copies(made)) == MOST_COPIES
