"""Kernels that are loaded on a device, and their launches: one foreign call each, with arguments laid out
beforehand."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch

from multigemm.cuda.arguments import (
    Addresses,
    Argument,
    ArgumentBlock,
    DeviceFields,
    Fields,
    PackedArguments,
    Writer,
)
from multigemm.cuda.driver import (
    CLUSTER_DIMENSION,
    MAX_DYNAMIC_SHARED,
    PROGRAMMATIC,
    LaunchAttribute,
    LaunchConfig,
    Records,
    check,
    library,
    on_device,
    settle,
)
from multigemm.torch_internals import current_device, current_raw_stream, is_capturing

DEFAULT_SHARED = 48 * 1024
"""Bytes of dynamic shared memory that a kernel may use by default."""


Launch = Callable[[], object]
"""Does the work of one bound problem on the device's current stream, and may be called again."""
Step = Callable[[int], object]
"""Enqueues work on a raw stream."""


Grid = int | tuple[int, int, int]


class Kernel:
    """A kernel that is loaded on one device until the process ends."""

    __slots__ = ("handle", "index", "name")

    def __init__(self, image: bytes, name: str, index: int, shared: int = 0) -> None:
        self.name, self.index, self.handle = name, index, ctypes.c_void_p()
        module = ctypes.c_void_p()
        with on_device(index) as cuda:
            check(cuda.cuModuleLoadData(ctypes.byref(module), image), f"cuModuleLoadData of {name}")
            found = cuda.cuModuleGetFunction(ctypes.byref(self.handle), module, name.encode())
            check(found, f"cuModuleGetFunction of {name}")
        if shared > DEFAULT_SHARED:
            self.allow_shared(shared)

    @classmethod
    def loaded(cls, handle: int, name: str, index: int) -> Kernel:
        """A kernel that another library has loaded on a device and keeps loaded."""
        made = cls.__new__(cls)
        made.name, made.index, made.handle = name, index, ctypes.c_void_p(handle)
        return made

    def allow_shared(self, size: int) -> None:
        """Allows the kernel more dynamic shared memory than the default limit."""
        with on_device(self.index) as cuda:
            check(cuda.cuFuncSetAttribute(self.handle, MAX_DYNAMIC_SHARED, size), f"cuFuncSetAttribute of {self.name}")

    def blocks_per_processor(self, threads: int, shared: int) -> int:
        """The number of blocks that are resident on a multiprocessor at once; at least 1."""
        count = ctypes.c_int()
        with on_device(self.index) as cuda:
            code = cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor(
                ctypes.byref(count), self.handle, threads, ctypes.c_size_t(shared)
            )
        check(code, f"cuOccupancyMaxActiveBlocksPerMultiprocessor of {self.name}")
        return max(count.value, 1)

    @cache  # noqa: B019  (kernels live as long as the process)
    def resident_clusters(self, cluster: int, threads: int, shared: int) -> int:
        """The number of clusters that are resident on the device at once. A GPC may not divide into whole clusters."""
        attribute = LaunchAttribute(id=CLUSTER_DIMENSION, dim=(cluster, 1, 1))
        config = LaunchConfig(grid=(cluster, 1, 1), block=(threads, 1, 1), shared=shared)
        config.attributes, config.attribute_count = ctypes.addressof(attribute), 1
        count = ctypes.c_int()
        with on_device(self.index) as cuda:
            code = cuda.cuOccupancyMaxActiveClusters(ctypes.byref(count), self.handle, ctypes.byref(config))
        check(code, f"cuOccupancyMaxActiveClusters of {self.name}")
        return count.value

    def bound(
        self,
        arguments: Sequence[Argument] | Fields,
        *,
        grid: Grid,
        threads: int,
        shared: int = 0,
        cluster: int = 1,
        overlap: bool = False,
        fields: DeviceFields | None = None,
        keep: Sequence[object] = (),
        on_capture: Callable[[], object] | None = None,
        grid_for: Callable[[int], Grid] | None = None,
    ) -> BoundKernel:
        """A launch with these arguments: one by one, or as `Fields` where the kernel takes 64-bit words only.

        `overlap`: the kernel waits by itself until the launch before it is over, so it may be started early. `fields`
        follow the operands in device memory. `keep` lives as long as the launch: the workspaces, but no operand, which
        the caller keeps alive. `on_capture` is called whenever a launch becomes part of a CUDA graph. `grid_for`
        gives the grid for another number of tokens of a class (`spec.half_octave`), where nothing else but what
        `Tokens` and `CountedMaps` are depends on that number.
        """
        config = _config(grid, threads, shared, cluster, overlap)
        block = PackedArguments(arguments) if isinstance(arguments, Fields) else ArgumentBlock(arguments)
        return BoundKernel(self, block, config, on_capture, tuple(keep), fields, grid_for)

    def step(self, grid: int, threads: int, values: Sequence[Any], keep: object, *, overlap: bool = False) -> Step:
        """A launch with ctypes objects as arguments, which may change between two calls. Made by two Python calls where
        `bound` takes ten, for launches that are bound at each call. `keep` lives as long as it; `overlap` as in
        `bound`."""
        arguments = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        records, call = Records(_config(grid, threads, 0, 1, overlap)), library().cuLaunchKernelEx

        def start(stream: int, _keep: object = (values, keep)) -> None:
            record = records[stream]
            if code := call(record, self.handle, arguments, None):
                again = partial(call, record, self.handle, arguments, None)
                settle(code, self.index, again, f"cuLaunchKernelEx of {self.name}")

        return start


@cache
def launch_attributes(cluster: int, overlap: bool) -> ctypes.Array[LaunchAttribute]:
    """The attributes of a launch besides its size. Kept until the process ends, because launches point to them."""
    wanted = [LaunchAttribute(id=CLUSTER_DIMENSION, dim=(cluster, 1, 1))] if cluster > 1 else []
    wanted += [LaunchAttribute(id=PROGRAMMATIC, dim=(1, 0, 0))] if overlap else []
    return (LaunchAttribute * len(wanted))(*wanted)


@lru_cache(maxsize=4096)
def _config(grid: Grid, threads: int, shared: int, cluster: int, overlap: bool) -> LaunchConfig:
    """The shape of a launch. Each stream's record is a copy of it, so it is never written."""
    attributes = launch_attributes(cluster, overlap)
    return LaunchConfig(_blocks(grid), (threads, 1, 1), shared, None, ctypes.addressof(attributes), len(attributes))


def _blocks(grid: Grid) -> tuple[int, int, int]:
    return (grid, 1, 1) if isinstance(grid, int) else grid


class BoundKernel:
    """A bound launch of a kernel on its device's current stream."""

    __slots__ = (
        "_block", "_call", "_fields", "_grid_for", "_handle", "_keep", "_kernel", "_lent", "_records",
        "index", "on_capture", "work_bytes",
    )  # fmt: skip

    def __init__(
        self,
        kernel: Kernel,
        block: ArgumentBlock,
        config: LaunchConfig,
        on_capture: Callable[[], object] | None,
        keep: tuple[object, ...],
        fields: DeviceFields | None = None,
        grid_for: Callable[[int], Grid] | None = None,
    ) -> None:
        self._fields, self._grid_for = fields, grid_for
        self._lent: torch.Tensor | None = None
        self.work_bytes = 0
        """Bytes that a mover lends, at the address of `work`."""
        self._kernel, self._block, self.on_capture, self._keep = kernel, block, on_capture, keep
        self._call, self._handle, self.index = library().cuLaunchKernelEx, kernel.handle, kernel.index
        self._records = Records(config)

    def __call__(self) -> None:
        index = self.index
        if current_device() == index:
            self._captured_or_not(current_raw_stream(index))
        else:
            with on_device(index):
                self._captured_or_not(current_raw_stream(index))

    def _captured_or_not(self, stream: int) -> None:
        if self.on_capture is not None and is_capturing():
            self.on_capture()
        self.on(stream)

    def on(self, stream: int) -> None:
        """Launches on a raw stream of the current device that is not being captured."""
        record, block = self._records[stream], self._block
        code = self._call(record, self._handle, block.pointers, block.extra)
        if code:
            again = partial(self._call, record, self._handle, block.pointers, block.extra)
            settle(code, self.index, again, f"cuLaunchKernelEx of {self._kernel.name}")

    def prepared(self, stream: int) -> tuple[Callable[..., int], Any, Any, Any, Any]:
        """The driver's function that launches on a raw stream, and what it takes: nothing of that moves."""
        return self._call, self._records[stream], self._handle, self._block.pointers, self._block.extra

    def writers(self) -> tuple[tuple[int, list[Writer]], ...]:
        """For each operand that the launch follows: what is written when it moves."""
        return self._block.writers()

    def move(self, addresses: Addresses) -> None:
        """Sets other operand addresses. The launch must be the next one on this thread's current stream."""
        self._lent = None
        if self._fields is not None:
            addresses = (*addresses, self._fields.follow(addresses))
        self._block.move(addresses)

    def lend(self, memory: torch.Tensor) -> None:
        """Keeps the memory at the address `work` until the launch moves. Each mover lends as much."""
        self._lent, self.work_bytes = memory, memory.nbytes

    def drop_lent(self) -> None:
        """Releases the lent memory. The launch must move before its next call."""
        self._lent = None

    def can_resize(self, before: int, after: int) -> bool:
        """Whether `resize` gives the same launch as a bind for that number of tokens."""
        if self._grid_for is None:
            return False
        fields = self._fields is None or self._fields.can_resize(before, after)
        return fields and self._block.can_resize(before, after)

    def resize(self, before: int, after: int, regrid: bool) -> None:
        """Changes it to another number of tokens; a `move` must follow. `regrid`: tokens are rows, so the grid changes
        too; for inner extents it does not."""
        assert self._grid_for is not None
        self._block.resize(before, after)
        if self._fields is not None:
            self._fields.resize(before, after)
        if regrid:
            self._records.set_grid(_blocks(self._grid_for(after)))

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether it holds an address in one of these ranges that `move` would not replace."""
        return self._block.stays_behind(spans) or (self._fields is not None and self._fields.stays_behind(spans))

    def workspace_bytes(self) -> int:
        """The device memory that it owns, in bytes, without lent memory."""
        own = sum(x.nbytes for x in self._keep if isinstance(x, torch.Tensor))
        return own + (0 if self._fields is None else self._fields.nbytes)


class _Steps:
    """Several launches, one after the other."""

    __slots__ = ("_steps",)

    def __init__(self, steps: Sequence[Any]) -> None:
        self._steps = tuple(steps)

    def __call__(self) -> None:
        for step in self._steps:
            step()


class LaunchSequence(_Steps):
    """Several launches that can all follow their operands, as `BoundKernel` does."""

    __slots__ = ("_on_capture", "index")

    def __init__(self, steps: Sequence[Any]) -> None:
        flat: list[Any] = []
        for step in steps:
            flat += step._steps if isinstance(step, LaunchSequence) else [step]
        super().__init__(flat)
        devices = {step.index if isinstance(step, BoundKernel) else -1 for step in flat}
        self.index = devices.pop() if len(devices) == 1 else -1
        """The device of all launches; -1 if they have none in common, or some are no kernels of this runtime."""
        self._on_capture = [step.on_capture for step in flat if self.index >= 0 and step.on_capture is not None]

    def __call__(self) -> None:
        index = self.index
        if index >= 0 and current_device() == index:
            if self._on_capture and is_capturing():
                for tell in self._on_capture:
                    tell()
            self.on(current_raw_stream(index))  # asked for once
        else:
            super().__call__()

    def on(self, stream: int) -> None:
        """Launches on a raw stream of the current device that is not being captured, if that device is `index`."""
        for step in self._steps:
            step.on(stream)

    def move(self, addresses: Addresses) -> None:
        for step in self._steps:
            step.move(addresses)

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        return any(step.stays_behind(spans) for step in self._steps)

    def can_resize(self, before: int, after: int) -> bool:
        return all(step.can_resize(before, after) for step in self._steps)

    def resize(self, before: int, after: int, regrid: bool) -> None:
        for step in self._steps:
            step.resize(before, after, regrid)

    def drop_lent(self) -> None:
        """Releases the lent memory. The launches must move before their next call."""
        for step in self._steps:
            if hasattr(step, "drop_lent"):
                step.drop_lent()

    @property
    def work_bytes(self) -> int:
        """The bytes that a mover must lend, at the address of `work`."""
        return max((step.work_bytes for step in self._steps if hasattr(step, "work_bytes")), default=0)

    def workspace_bytes(self) -> int:
        """The device memory that the launches own, in bytes. Shared memory counts once per launch."""
        return sum(step.workspace_bytes() for step in self._steps)


MovableLaunch = BoundKernel | LaunchSequence
"""A launch that can follow its operands: `move` gives it the addresses of the next call."""


def in_turn(steps: Sequence[Launch]) -> Launch:
    """Several launches as one. It can follow its operands if all of them can."""
    return LaunchSequence(steps) if all(hasattr(step, "move") for step in steps) else _Steps(steps)


def without_move(launch: MovableLaunch) -> Launch:
    """The launch as a plain callable, for a launch that holds addresses which no move would replace."""
    return launch.__call__


class PatchedLaunches:
    """Kernels that are launched one after the other on one stream, and whose operands lie in a few pieces of memory.

    A call writes the words that point into a piece which lies elsewhere than at the last call, and nothing else.
    """

    __slots__ = ("_at", "_nowhere", "_starts", "_words")

    def __init__(self, launches: Sequence[tuple[Any, Sequence[tuple[int, int]]]], pieces: int, stream: int) -> None:
        """`launches` of kernels of the current device that follow all their operands, each with the piece that each of
        `OPERANDS` lies in, and how far from where the piece begins."""
        words: dict[int, list[Writer]] = {}
        starts = []
        for launch, places in launches:
            for kernel in kernels_of(launch):
                kernel.drop_lent()
                for operand, writers in kernel.writers():
                    piece, distance = places[operand]
                    words.setdefault(piece, []).extend((distance + more, *where) for more, *where in writers)
                starts.append((*kernel.prepared(stream), kernel, stream))
        self._words, self._starts = tuple(words.items()), tuple(starts)
        self._nowhere: Sequence[int | None] = (None,) * pieces
        self._at: Sequence[int | None] = self._nowhere

    def __call__(self, at: Sequence[int]) -> None:
        """Launches, with each piece of memory at its address."""
        before, self._at = self._at, self._nowhere  # should this be interrupted
        for piece, words in self._words:
            address = at[piece]
            if address != before[piece]:
                for distance, memory, place in words:
                    memory[place] = address + distance
        self._at = at
        for launch, record, handle, pointers, extra, kernel, stream in self._starts:
            if launch(record, handle, pointers, extra):
                kernel.on(stream)  # once more: gives the thread its context, or raises


def kernels_of(launch: Any) -> tuple[BoundKernel, ...]:
    """The kernels that a launch starts, of those that can follow their operands."""
    return launch._steps if isinstance(launch, LaunchSequence) else (launch,)


NOTHING = LaunchSequence(())
"""The launch of a problem without any work."""
