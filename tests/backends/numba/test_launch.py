"""How the Numba backend is bound and launched, against a driver that only writes down: contexts, moves, overlap."""

from __future__ import annotations

import ctypes
import gc
import hashlib
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.numba import launch as numba_launch
from multigemm.backends.numba.build import Image
from multigemm.backends.numba.config import (
    FMA_TALL,
    GENERIC,
    HOPPER,
    HOPPER_NARROW,
    MMA,
    Config,
    HopperConfig,
)
from multigemm.cuda import device_fields, driver, launch, tensor_map
from multigemm.cuda.device_fields import MOST_COPIES
from multigemm.cuda.driver import NO_CONTEXT, PROGRAMMATIC, LaunchAttribute
from multigemm.cuda.launch import NOTHING, BoundKernel
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec

ANYWHERE = ("cuInit", "cuDeviceGet", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent", "cuGetErrorName")
CONTEXT = 77
PLAIN, FULL = "plain", "full"
FORMS = ("jagged_m", "offsets", "weights along k", "jagged_n", "jagged_k", "batched", "masked")
BOUNDARY = 256


class Driver:
    """Answers 201 to every call that needs a context, on a thread that has none, and writes down the launches."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launches: list[tuple[int, list[int]]] = []
        """The stream and the identifiers of the attributes of each launch."""
        self.stream, self._own = 7, threading.local()
        self.cuTensorMapEncodeTiled = partial(self._answer, "cuTensorMapEncodeTiled", self._encode)

    def __getattr__(self, name: str) -> Callable[..., int]:
        return partial(self._answer, name, getattr(type(self), f"_{name}", None))

    def _answer(self, name: str, work: Callable[..., None] | None, *arguments: Any) -> int:
        self.calls.append(name)
        if name not in ANYWHERE and not getattr(self._own, "context", 0):
            return NO_CONTEXT
        if name == "cuDevicePrimaryCtxRetain":
            arguments[0]._obj.value = CONTEXT
        elif name == "cuCtxGetCurrent":
            arguments[0]._obj.value = getattr(self._own, "context", 0)
        elif name == "cuCtxSetCurrent":
            self._own.context = arguments[0].value
        elif name == "cuOccupancyMaxActiveBlocksPerMultiprocessor":
            arguments[0]._obj.value = 2
        elif name == "cuLaunchKernelEx":
            record = arguments[0]._obj
            attributes = (LaunchAttribute * record.attribute_count).from_address(record.attributes)
            self.launches.append((record.stream, [each.id for each in attributes]))
        if work is not None:
            work(*arguments)
        return 0

    @staticmethod
    def _encode(target: Any, kind: int, rank: int, address: Any, *shape: Any) -> None:
        """A map: the address, then a digest of all else."""
        extents, strides, box = (list(x._obj) for x in shape[:3])
        told = f"{kind} {rank} {extents} {strides} {box}".encode()
        raw = address.value.to_bytes(8, "little") + hashlib.sha256(told).digest() * 4
        ctypes.memmove(target, raw, tensor_map.SIZE)


def forget() -> None:
    for kept in (numba_launch.kernel_of, driver.primary_context, tensor_map._place_of_address):
        kept.cache_clear()


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """A driver without a GPU; kernels without a compiler."""
    fake = Driver()
    forget()
    for module in (driver, launch, tensor_map):
        monkeypatch.setattr(module, "library", lambda: fake)
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    for reader in (launch, device_fields):
        monkeypatch.setattr(reader, "current_raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(device_fields, "index_of", lambda device: 0)
    monkeypatch.setattr(numba_launch, "image", lambda *asked: Image("kernel", b"cubin"))
    monkeypatch.setattr(numba_launch, "capability_of", lambda device: (9, 0))
    monkeypatch.setattr(numba_launch, "processors", lambda index: 132)
    yield fake
    forget()


def placed(x: Tensor) -> Tensor:
    """The same values from a multiple of 256 on."""
    memory = torch.zeros(x.numel() * x.itemsize + 2 * BOUNDARY, dtype=torch.uint8)
    start = -memory.data_ptr() % BOUNDARY
    return memory[start : start + x.numel() * x.itemsize].view(x.dtype).view(x.shape).copy_(x)


def operands(form: str, extras: str = PLAIN) -> Operands:
    """One small problem of a form; all its memory is its own."""

    def half(*shape: int) -> Tensor:
        return placed(torch.ones(shape, dtype=torch.bfloat16))

    ends = placed(torch.tensor([8, 24, 48]))
    cases: dict[str, tuple[Any, Any, dict[str, Any]]] = {
        "jagged_m": (half(48, 64), half(3, 64, 128), {"ends": ends}),
        "offsets": (half(48, 64), half(3, 64, 128), {"offsets": placed(torch.tensor([0, 8, 24, 48]))}),
        "weights along k": (half(48, 64), half(3, 128, 64).mT, {"ends": ends}),
        "jagged_n": (half(3, 128, 64), half(64, 48), {"ends": ends, "jagged": "n"}),
        "jagged_k": (half(48, 64).T, half(48, 128), {"ends": ends, "jagged": "k"}),
        "batched": (half(3, 16, 64), half(3, 64, 128), {}),
        "masked": (half(3, 16, 64), half(3, 64, 128), {"valid_rows": placed(torch.tensor([3, 16, 0]))}),
        "per_group": ([half(48, 64), half(8, 64)], [half(64, 128), half(64, 128)], {}),
    }  # fmt: skip
    a, b, grouping = cases[form]
    shape = mg.GroupedGemmProblem(a, b, **grouping).out_shape
    more: dict[str, Any] = {}
    if extras == FULL:
        more = {"c": half(*shape), "beta": 0.5, "alpha": 2.0, "bias": half(shape[-1]), "activation": "relu"}
    if form != "per_group":
        more["out"] = half(*shape)
    problem = mg.GroupedGemmProblem(a, b, **grouping, **more)
    return stage(problem, staged_spec(problem), allocate(problem)).ops


def addresses(ops: Operands) -> tuple[int, ...]:
    named: Any = (ops.a, ops.b, ops.out, ops.c, ops.bias, ops.ends, ops.valid_rows, None)
    return tuple(0 if x is None else x.data_ptr() for x in named)


def bound(config: Config, ops: Operands) -> Any:
    return numba_launch.bind_for(config, ops.spec, 0)(ops)


@dataclass
class Seen:
    """All that a kernel would read: its arguments, and the copy of its maps in what is device memory here."""

    words: list[int]
    maps: bytes = field(default=b"")


def seen(config: Config, made: BoundKernel) -> Seen:
    words = made._block.snapshot().tolist()
    if not isinstance(config, HopperConfig):
        return Seen(words)
    *rest, maps, counters = words
    return Seen([*rest, counters - maps], ctypes.string_at(maps, counters - maps + 8))


CONFIGS: tuple[Config, ...] = (GENERIC, MMA, FMA_TALL, HOPPER, HOPPER_NARROW)


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("extras", [PLAIN, FULL])
@pytest.mark.parametrize("form", FORMS)
def test_a_moved_launch_is_one_that_was_bound_there(form: str, extras: str, config: Config, cuda: Driver) -> None:
    here, there = operands(form, extras), operands(form, extras)
    moved, fresh = bound(config, here), bound(config, there)
    assert seen(config, moved) != seen(config, fresh)
    assert addresses(here)[0] != addresses(there)[0]
    moved.move(addresses(there))
    assert seen(config, moved) == seen(config, fresh)
    moved.move(addresses(here))
    assert seen(config, moved) == seen(config, bound(config, here))


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_no_address_of_an_operand_stays_behind(form: str, config: Config, cuda: Driver) -> None:
    ops = operands(form, FULL)
    tensors: Any = [x for x in (ops.a, ops.b, ops.out, ops.c, ops.bias, ops.ends, ops.valid_rows) if x is not None]
    spans = [(x.data_ptr(), x.data_ptr() + x.numel() * x.itemsize) for x in tensors]
    made = bound(config, ops)
    assert not made.stays_behind(spans)
    block = made._block if not isinstance(config, HopperConfig) else made._fields._content
    block._slots = block._slots[1:]
    assert made.stays_behind(spans), "an address that no slot holds must be seen"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_list_is_launched_but_cannot_move(config: Config, cuda: Driver) -> None:
    made = bound(config, operands("per_group"))
    assert not hasattr(made, "move")
    made()
    assert len(cuda.launches) == 1


def test_nothing_to_do_needs_no_launch(cuda: Driver) -> None:
    ops = operands("jagged_m")
    ops.a, ops.out = ops.a[:0], ops.out[:0]
    assert all(bound(config, ops) is NOTHING for config in CONFIGS)


def in_a_fresh_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", ["jagged_m", "per_group"])
def test_every_call_of_the_driver_finds_a_context_on_a_fresh_thread(form: str, config: Config, cuda: Driver) -> None:
    ops = operands(form)
    in_a_fresh_thread(lambda: bound(config, ops)())
    assert len(cuda.launches) == 1
    needed = {"cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"}
    if config is HOPPER or config is HOPPER_NARROW:
        needed |= {"cuTensorMapEncodeTiled", "cuFuncSetAttribute"}
    else:
        needed |= {"cuOccupancyMaxActiveBlocksPerMultiprocessor"}
    assert needed <= set(cuda.calls)


def test_binding_leaves_a_thread_without_a_context_as_it_was(cuda: Driver) -> None:
    def context() -> int:
        bound(HOPPER, operands("jagged_m"))
        return getattr(cuda._own, "context", 0) or 0

    assert in_a_fresh_thread(context) == 0


def test_the_kernel_of_a_config_is_loaded_once(cuda: Driver) -> None:
    for _ in range(3):
        bound(MMA, operands("jagged_m"))
    assert cuda.calls.count("cuModuleLoadData") == 1
    assert "cuModuleUnload" not in cuda.calls


def test_kernels_that_wait_by_themselves_may_start_early(cuda: Driver) -> None:
    for config in (GENERIC, MMA, HOPPER_NARROW, HOPPER):
        bound(config, operands("jagged_m"))()
    found = [PROGRAMMATIC in attributes for _, attributes in cuda.launches]
    assert found == [False, True, True, True]


@pytest.mark.parametrize("config", CONFIGS, ids=str)
@pytest.mark.parametrize("form", ["masked", "per_group"])
def test_a_launch_keeps_its_workspace_alive_and_no_operand(form: str, config: Config, cuda: Driver) -> None:
    ops: Any = operands(form)
    made = bound(config, ops)
    tensors = [*ops.a, *ops.b, *ops.out] if form == "per_group" else [ops.a, ops.b, ops.out, ops.valid_rows]
    seen = [weakref.ref(x) for x in tensors]
    del ops, tensors
    gc.collect()
    assert not any(ref() is not None for ref in seen)
    kept = (made.__self__ if form == "per_group" else made)._keep
    assert sum(isinstance(x, Tensor) for x in kept) == (form == "per_group")
    made()


def copies(made: Any) -> dict[tuple[int, ...], Tensor]:
    found: dict[tuple[int, ...], Tensor] = made._fields._copies
    return found


def test_maps_that_were_uploaded_are_never_written_again(cuda: Driver) -> None:
    """A kernel in front may still read them: other addresses get a copy of their own."""
    here, there = operands("jagged_m"), operands("jagged_m")
    made = bound(HOPPER, here)
    first = seen(HOPPER, made)
    (kept,) = copies(made).values()
    before = kept.clone()
    for _ in range(3):
        made.move(addresses(there))
        made.move(addresses(here))
    assert torch.equal(kept, before)
    assert seen(HOPPER, made) == first
    assert len(copies(made)) == 2, "operands that lie where they lay before need no other upload"


def test_another_stream_gets_a_copy_of_its_own(cuda: Driver) -> None:
    """The upload was enqueued on the first stream, and a kernel on another one does not wait for it."""
    ops = operands("jagged_m")
    made = bound(HOPPER, ops)
    made.move(addresses(ops))
    assert len(copies(made)) == 1
    cuda.stream = 9
    made.move(addresses(ops))
    assert len(copies(made)) == 2
    (first, second) = copies(made).values()
    assert made._block.snapshot()[-2] == second.data_ptr() != first.data_ptr()
    made()
    assert cuda.launches[-1][0] == 9


def test_the_number_of_copies_is_bounded(cuda: Driver) -> None:
    ops = operands("jagged_m")
    made, where = bound(HOPPER, ops), addresses(ops)
    for step in range(3 * MOST_COPIES):
        made.move((where[0] + BOUNDARY * step, *where[1:]))
        maps = int(made._block.snapshot()[-2])
        assert maps in {x.data_ptr() for x in copies(made).values()}
        words = np.frombuffer(ctypes.string_at(maps, 2 * tensor_map.SIZE), np.int64)
        assert words[16] == where[0] + BOUNDARY * step
    assert len(copies(made)) == MOST_COPIES
