"""The triton backend without a GPU: a driver that only notes, kernels that only have a name."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch

from multigemm.backends.triton import build as compiled
from multigemm.backends.triton import generic, hopper, lists, quantised
from multigemm.backends.triton.build import Cubin, KernelSource
from multigemm.cuda import launch
from tests.support import cuda_driver
from tests.support.cuda_driver import FakeDriver

GPU = torch.device("cuda", 0)


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
    fake = cuda_driver.install(monkeypatch)
    monkeypatch.setattr(compiled, "cubin", uncompiled)
    for module in (generic, hopper, lists, quantised):
        monkeypatch.setattr(module, "processors", lambda index: 132)
    for module in (generic, hopper):
        monkeypatch.setattr(module, "Words", Words)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for kept in (compiled.load, compiled.capability_of):
        kept.cache_clear()
    return fake


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A fake driver, of which nothing is left behind."""
    yield install(monkeypatch)
    for kept in (compiled.load, compiled.capability_of):
        kept.cache_clear()


def kernels_of(bound: Any) -> tuple[Any, ...]:
    """The launches of single kernels that a launch comes to."""
    owner = getattr(bound, "__self__", bound)
    return owner._steps if isinstance(owner, launch.LaunchSequence) else (owner,)


def block_of(bound: Any) -> bytes:
    """The arguments of one kernel's launch."""
    return ctypes.string_at(bound._block.pointers[0], bound._block.size)
