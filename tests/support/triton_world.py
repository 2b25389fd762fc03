"""The triton backend without a GPU: a driver that only notes, kernels that only have a name."""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from multigemm.backends.triton import build as compiled
from multigemm.backends.triton import generic, hopper, lists, quantised
from multigemm.backends.triton.build import Cubin, KernelSource
from multigemm.cuda import counters, driver, launch
from multigemm.cuda.arguments import Fields, fields, slot_of, words
from multigemm.cuda.driver import NO_CONTEXT

GPU = torch.device("cuda", 0)
CONTEXT = 4242
BARE = ("cuInit", "cuDeviceGet", "cuGetErrorName")
"""Calls that need no context."""


class FakeDriver:
    """Succeeds at every call, but for those of a thread without a context; notes those that succeed."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        self.encoded: list[tuple[Any, ...]] = []
        self.contexts: dict[int, int | None] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            if name not in BARE and not self.has_context():
                return NO_CONTEXT
            self.calls.append(name)
            if name == "cuLaunchKernelEx":
                self.launched.append(args)
            return 0

        return call

    def has_context(self) -> bool:
        return self.contexts.get(threading.get_ident()) == CONTEXT

    def cuDevicePrimaryCtxRetain(self, context: Any, device: Any) -> int:
        context._obj.value = CONTEXT
        return 0

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = self.contexts.get(threading.get_ident())
        return 0

    def cuCtxSetCurrent(self, context: Any) -> int:
        self.contexts[threading.get_ident()] = context.value
        return 0

    def encode(
        self, dtype: torch.dtype, address: int, extents: Sequence[int], strides: Sequence[int],
        boxes: tuple[tuple[int, ...]],
    ) -> Fields:  # fmt: skip
        """A map whose first word is the address, and whose second is what it says of the layout."""
        assert self.has_context()
        [box] = boxes
        said = (dtype, tuple(extents), tuple(strides), box)
        self.encoded.append((address, *said))
        return fields(words(address, hash(repr(said)) % 2**40) + bytes(112), slot_of(address, 0))


def parameters(kind: Any) -> int:
    """Parameters of a compiled kernel that an argument of a type takes."""
    if isinstance(kind, tuple):
        return sum(map(parameters, kind))
    return 3 + 2 * kind[: kind.index("]")].count(",") if kind.startswith("tensordesc") else 1


def uncompiled(source: KernelSource, capability: int) -> Cubin:
    """What a launch has to know of a kernel."""
    count = sum(parameters(kind) for _, kind in source.signature) + 2
    shared = 60_000 if source.gluon else 1000
    return Cubin(repr(source).encode(), source.name, 32 * source.warps, shared, 0, 1, count, 77 if source.room else 0)


class Words:
    """Words that every bound problem counts in: the same ones, so that its arguments can be compared."""

    memory = torch.zeros(1 << 14, dtype=torch.int32)
    address = memory.data_ptr()

    def __init__(self, index: int, size: int) -> None:
        """Nothing is written there, so they may be too few."""

    @staticmethod
    def pin() -> None:
        """Nothing comes back to the pool."""


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Planning, binding and launching on CPU tensors, as far as the driver's door."""
    fake = FakeDriver()
    for module in (driver, launch):
        monkeypatch.setattr(module, "library", lambda: fake)
    for module in (hopper, lists):
        monkeypatch.setattr(module, "encode_together", fake.encode)
    monkeypatch.setattr(compiled, "cubin", uncompiled)
    for module in (generic, hopper, lists, quantised):
        monkeypatch.setattr(module, "processors", lambda index: 132)
    for module in (generic, hopper):
        monkeypatch.setattr(module, "Words", Words)
    pool = (torch.zeros(1, dtype=torch.int32), deque[int]())
    monkeypatch.setattr(counters, "pool", lambda index, size: pool)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(launch, "current_device", lambda: 0)
    monkeypatch.setattr(launch, "current_raw_stream", lambda index: 7)
    monkeypatch.setattr(launch, "is_capturing", lambda: False)
    for kept in (compiled.load, compiled.capability_of, driver.primary_context):
        kept.cache_clear()
    return fake


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake driver, of which nothing is left behind."""
    yield install(monkeypatch)
    for kept in (compiled.load, compiled.capability_of, driver.primary_context):
        kept.cache_clear()


def kernels_of(bound: Any) -> tuple[Any, ...]:
    """The launches of single kernels that a launch comes to."""
    owner = getattr(bound, "__self__", bound)
    return owner._steps if isinstance(owner, launch.LaunchSequence) else (owner,)


def block_of(bound: Any) -> bytes:
    """The arguments of one kernel's launch."""
    return ctypes.string_at(bound._block.pointers[0], bound._block.size)
