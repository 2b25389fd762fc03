"""A CUDA driver that keeps the driver's rules and remembers what it was asked, for tests without a GPU.

Every call but those that make a context fails with CUDA_ERROR_INVALID_CONTEXT on a thread on which no context is
current. `cuTensorMapEncodeTiled` is called through a C function pointer, so that arguments become C values as for the
real one; it checks alignment and limits, and writes 16 words that hold its arguments, the address in the first.
"""

from __future__ import annotations

import ctypes
import threading
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch

from multigemm.cuda import arguments, counters, device, driver, launch, tensor_map
from multigemm.cuda.arguments import OPERANDS, Addresses

CONTEXT = 77
"""The handle of device 0's primary context; those of others follow."""
INVALID_VALUE, NO_CONTEXT = 1, 201
SETTLING = (
    "cuInit", "cuDeviceGet", "cuDeviceGetAttribute", "cuDevicePrimaryCtxRetain", "cuCtxGetCurrent", "cuCtxSetCurrent",
    "cuGetErrorName",
)  # fmt: skip
"""What needs no context."""
ADDRESSED = 0
"""The word of a map that holds the address."""

Encoder = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.c_void_p] * 4,
    *[ctypes.c_int] * 4,
)  # fmt: skip


class Launched(NamedTuple):
    """One launch: the kernel's name, its grid, its stream, whether it may start before its predecessor has ended; and
    the kernel's handle, its block and its bytes of shared memory."""

    kernel: str
    grid: tuple[int, int, int]
    stream: int
    early: bool
    handle: int
    block: tuple[int, int, int]
    shared: int


class FakeDriver:
    """Answers as the driver would; `calls` names every call that needs a context, in order."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[Launched] = []
        self.mapped: list[int] = []
        """The address of each tensor map."""
        self.copied: list[tuple[int, int]] = []
        """Bytes and stream of each copy to the device."""
        self.without_context: list[str] = []
        self.names: dict[int, str] = {}
        self.images: list[bytes] = []
        self.clusters, self.capturing, self.stream, self.device = 66, False, 7, 0
        self.attributes = {device.MEMORY_CLOCK_KHZ: 2_619_000, device.MEMORY_BUS_BITS: 5120}
        """Those of an H100."""
        self._thread = threading.local()
        self._encode = Encoder(self._write_map)

    def make_current(self, context: int = CONTEXT) -> None:
        """Gives this thread a context."""
        self._thread.context = context

    @property
    def current(self) -> int:
        """This thread's context; 0 for none."""
        return getattr(self._thread, "context", 0)

    def __getattr__(self, name: str) -> Callable[..., int]:
        if not name.startswith("cu"):
            raise AttributeError(name)

        def call(*args: Any) -> int:
            if name not in SETTLING:
                self.calls.append(name)
                if not self.current:
                    self.without_context.append(name)
                    return NO_CONTEXT
            answer: Callable[..., int] = getattr(self, f"_{name}", lambda *args: 0)
            return answer(*args)

        return call

    @property
    def encodings(self) -> int:
        """How many maps were encoded."""
        return self.calls.count("cuTensorMapEncodeTiled")

    def _cuCtxGetCurrent(self, into: Any) -> int:
        into._obj.value = self.current or None
        return 0

    def _cuCtxSetCurrent(self, context: Any) -> int:
        self.make_current(context.value or 0)
        return 0

    def _cuDeviceGet(self, into: Any, index: int) -> int:
        into._obj.value = index
        return 0

    def _cuDeviceGetAttribute(self, into: Any, number: int, device: Any) -> int:
        into._obj.value = self.attributes[number]
        return 0

    def _cuDevicePrimaryCtxRetain(self, into: Any, device: Any) -> int:
        into._obj.value = CONTEXT + device.value
        return 0

    def _cuModuleLoadData(self, into: Any, image: bytes) -> int:
        self.images.append(image)
        into._obj.value = len(self.images)
        return 0

    def _cuModuleGetFunction(self, into: Any, module: Any, name: bytes) -> int:
        into._obj.value = 1000 + len(self.names)
        self.names[into._obj.value] = name.decode()
        return 0

    def _cuOccupancyMaxActiveClusters(self, into: Any, *rest: Any) -> int:
        into._obj.value = self.clusters
        return 0

    def _cuOccupancyMaxActiveBlocksPerMultiprocessor(self, into: Any, *rest: Any) -> int:
        into._obj.value = 2
        return 0

    def _cuLaunchKernelEx(self, record: Any, handle: Any, *rest: Any) -> int:
        shape = record._obj
        count = shape.attribute_count
        attributes = (driver.LaunchAttribute * count).from_address(shape.attributes) if count else ()
        early = driver.PROGRAMMATIC in [each.id for each in attributes]
        name, grid, block = self.names.get(handle.value, "?"), tuple(shape.grid), tuple(shape.block)
        self.launched.append(Launched(name, grid, shape.stream or 0, early, handle.value, block, shape.shared))
        return 0

    def _cuMemcpyHtoDAsync_v2(self, to: Any, source: Any, size: Any, stream: Any) -> int:
        ctypes.memmove(to.value, source.value, size.value)
        self.copied.append((size.value, stream.value or 0))
        return 0

    def _cuTensorMapEncodeTiled(self, *args: Any) -> int:
        return int(self._encode(*args))

    def _write_map(
        self, target: int, kind: int, rank: int, address: int | None, extents: int, strides: int, box: int, steps: int,
        interleave: int, swizzle: int, promotion: int, fill: int,
    ) -> int:  # fmt: skip
        if not 1 <= rank <= 5:
            return INVALID_VALUE
        sizes = list((ctypes.c_uint64 * rank).from_address(extents))
        pitches = list((ctypes.c_uint64 * (rank - 1)).from_address(strides)) if rank > 1 else []
        boxes = list((ctypes.c_uint32 * rank).from_address(box))
        ones = list((ctypes.c_uint32 * rank).from_address(steps))
        right = target % 64 == 0 and (address or 0) % 16 == 0 and all(pitch % 16 == 0 for pitch in pitches)
        right = right and all(0 < size <= 2**32 for size in sizes) and all(0 < x <= 256 for x in boxes)
        right = right and ones == [1] * rank and all(pitch < 2**40 for pitch in pitches)
        if not right:
            return INVALID_VALUE
        self.mapped.append(address or 0)
        facts = [kind, rank, interleave, swizzle, promotion, fill]
        words = [address or 0, int.from_bytes(bytes(facts), "little"), *sizes, *[0] * (5 - rank), *pitches]
        words += [0] * (11 - len(words))
        words += [first | second << 32 for first, second in zip(*[iter([*boxes, *[0] * (6 - rank)])] * 2, strict=True)]
        (ctypes.c_uint64 * 16).from_address(target)[:] = words + [0] * (16 - len(words))
        return 0


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Binding and launching on CPU tensors, as far as the driver's door, on device 0, whose context is current here."""
    fake = FakeDriver()
    for module in (driver, launch, tensor_map):
        monkeypatch.setattr(module, "library", lambda: fake)
    monkeypatch.setattr(driver, "primary_context", lambda index: CONTEXT + index)
    monkeypatch.setattr(tensor_map, "_place_of_address", lambda: 8 * ADDRESSED)
    for module in (launch, arguments):
        monkeypatch.setattr(module, "current_raw_stream", lambda index: fake.stream)
    monkeypatch.setattr(arguments, "index_of", lambda device: 0)
    monkeypatch.setattr(launch, "current_device", lambda: fake.device)
    monkeypatch.setattr(launch, "is_capturing", lambda: fake.capturing)
    monkeypatch.setattr(device, "library", lambda: fake)
    monkeypatch.setattr(device, "current_raw_stream", lambda index: fake.stream)
    pool = (torch.zeros(24, dtype=torch.int32), deque(range(3)))
    monkeypatch.setattr(counters, "pool", lambda index, size: pool)
    own = staticmethod(lambda index, words: torch.zeros(words, dtype=torch.int32))
    monkeypatch.setattr(counters.Words, "_own", own)
    fake.make_current()
    return fake


def steps_of(bound: Any) -> list[launch.BoundKernel]:
    """The kernels that a launch starts, one after the other."""
    return [step for each in bound._steps for step in steps_of(each)] if hasattr(bound, "_steps") else [bound]


def arguments_of(bound: Any) -> list[bytes]:
    """The argument block of each kernel that a launch starts."""
    return [step._block._words.tobytes() for step in steps_of(bound)]


def addresses_of(ops: Any) -> Addresses:
    """What a later call of the same class hands to `move`; the sizes of a problem reach no kernel of a backend."""
    given = (getattr(ops, name, None) for name in OPERANDS)
    return tuple(0 if x is None else x.data_ptr() for x in given)
