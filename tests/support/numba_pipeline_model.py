"""A grid of the numba backend's Hopper kernel in plain Python: one thread for each warp, in a random order.

The roles of the kernel run as they are written; `Machine` stands in for the modules `ptx` and `cuda` of their source.
It has barriers, shared memory, clusters, and a copy engine and tensor cores that work when they like: a copy is done at
any time after it was asked for, and products read their operands until they are waited for. What a wait forgot, a
parity that is wrong, a barrier that expects too much, a block that ends too early: all become an `AssertionError` or a
wrong result.

A warp's sums are an array of [16 columns, rows]; how lanes share them is tested elsewhere.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from tests.support.turns import Turns

Array = npt.NDArray[Any]
BASE = 1024
"""Where a block's shared memory begins."""
MAPS_AT, COUNTERS_AT = 1 << 24, 1 << 25
LINE, SIZE = 128, 2
WORD = 1 << 64
BLOCK_K = 64


class Stop(BaseException):
    """Ends the threads of a run that has failed."""


@dataclass
class Map:
    """What a tensor map describes: see `multigemm.cuda.tensor_map.encode_together`."""

    address: int
    extents: tuple[int, ...]
    strides: tuple[int, ...]
    box: tuple[int, ...]
    size: int = SIZE
    """Bytes of an element."""

    def addresses(self, start: Sequence[int]) -> tuple[Array, Array]:
        """([..., inner] addresses of a box, the outermost dimension first; which of them lie inside)."""
        ranges = [np.arange(x, x + n, dtype=np.int64) for x, n in zip(map(int, start), self.box, strict=True)]
        places = np.meshgrid(*reversed(ranges), indexing="ij")[::-1]
        inside = np.logical_and.reduce([(x >= 0) & (x < n) for x, n in zip(places, self.extents, strict=True)])
        steps, at = (self.size, *self.strides), np.full(places[0].shape, self.address % WORD, np.uint64)
        for place, step in zip(places, steps, strict=True):
            at += place.astype(np.uint64) * np.uint64(step % WORD)
        return at.astype(np.int64), inside


@dataclass
class Barrier:
    """An mbarrier: phases end when all have arrived and all bytes have come."""

    count: int
    pending: int = 0
    bytes: int = 0
    phases: int = 0

    def __post_init__(self) -> None:
        self.pending = self.count

    def arrive(self) -> None:
        assert self.pending > 0, "more have arrived than were expected"
        self.pending -= 1
        self.settle()

    def settle(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phases, self.pending = self.phases + 1, self.count


@dataclass
class Copy:
    """A copy under way, in steps that each happen at any time after the one before."""

    steps: list[Callable[[], None]]
    reads: tuple[int, int, int] | None = None
    writes: list[tuple[int, int, int]] = field(default_factory=list)


@dataclass
class Sums:
    """A warp's accumulators."""

    values: Array


@dataclass
class Block:
    """A thread block: its shared memory, its barriers, and what runs on it."""

    number: int
    rank: int
    shared: Array
    barriers: dict[int, Barrier] = field(default_factory=dict)
    alive: int = 0
    fenced: set[int] = field(default_factory=set)
    unfenced: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    """Bytes that a warp wrote and did not yet show to the copy engine."""
    meetings: dict[int, list[int]] = field(default_factory=dict)


class Warp:
    """One warp, and what it waits for."""

    def __init__(self, block: Block, number: int, work: Callable[[], Any]) -> None:
        self.block, self.number, self.work = block, number, work
        self.ready: Callable[[], bool] | None = None
        self.what = ""
        self.done = False
        self.open: list[tuple[Any, ...]] = []
        self.groups: list[list[tuple[Any, ...]]] = []
        self.stores: list[Copy] = []


def unwritten(count: int) -> Array:
    """What a block finds in its memory: NaN in both 16-bit types."""
    return np.full(count, 255, np.uint8)


class Machine:
    """All blocks of a launch, the memory that they share, and the order in which things happen."""

    def __init__(self, seed: int, clusters: int, cluster: int, shared_bytes: int, maps: bytes, made: list[Map]) -> None:
        self.draw = random.Random(seed)
        self.eager = self.draw.choice((0.02, 0.3, 0.9))
        self.patience = self.draw.choice((0.1, 0.5))
        self.clusters, self.cluster = clusters, cluster
        self.blocks = [Block(i, i % cluster, unwritten(shared_bytes + BASE)) for i in range(clusters * cluster)]
        self.maps, self.made = maps, made
        self.counters = [0, 0]
        self.memory: list[tuple[int, Array, str]] = []
        self.written: dict[int, Array] = {}
        self.warps: list[Warp] = []
        self.flights: list[Copy] = []
        self.turns: Turns | None = None
        self.outside: Warp | None = None
        """The warp as which the test itself acts, before all others run."""
        self.failure: BaseException | None = None
        self.favour: dict[int, float] = {}

    # Memory.

    def own(self, tensor: torch.Tensor, name: str) -> None:
        """Makes a tensor's memory known."""
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        if storage.data_ptr() not in self.written:
            self.memory.append((storage.data_ptr(), storage.numpy(), name))
            self.written[storage.data_ptr()] = np.zeros(storage.numel(), np.int32)

    def _place(self, at: Array, names: tuple[str, ...], size: int = SIZE) -> tuple[Array, Array, int]:
        for start, data, name in self.memory:
            if name in names and at.min() >= start and at.max() + size <= start + data.size:
                return at - start, data, start
        raise AssertionError(f"{int(at.min()):#x} to {int(at.max()):#x} is not in {names}")

    def gather(self, at: Array, size: int) -> Array:
        """Elements of the operands."""
        place, data, _ = self._place(at, ("a", "b"), size)
        found: Array = data[place].astype(np.uint16 if size == SIZE else np.uint8)
        return found | data[place + 1].astype(np.uint16) << 8 if size == SIZE else found

    def scatter(self, at: Array, values: Array) -> None:
        """Results, each of which is written once."""
        place, data, start = self._place(at, ("out",))
        np.add.at(self.written[start], place, 1)
        assert self.written[start][place].max() == 1, "a result was written twice"
        data[place], data[place + 1] = values & 255, values >> 8

    def map_at(self, at: int) -> Map:
        """The map at an address."""
        assert int(at) in self.block.fenced, "a tensor map is used before its fence"
        offset = int(at) - MAPS_AT
        number = int.from_bytes(self.maps[offset : offset + 8], "little")
        assert offset % LINE == 0 and number, "there is no map"
        return self.made[number - 1]

    # The order.

    @property
    def warp(self) -> Warp:
        """The warp that runs."""
        found = self.outside if self.turns is None else self.warps[self.turns.number]
        assert found is not None
        return found

    @property
    def block(self) -> Block:
        """Its block."""
        return self.warp.block

    def start(self, block: Block, number: int, work: Callable[[], Any]) -> None:
        """Adds a warp."""
        block.alive += 1
        self.warps.append(Warp(block, number, work))

    def _life(self, warp: Warp) -> None:
        try:
            if self.failure is None:
                warp.work()
                assert not warp.open and not warp.groups, "products are under way"
                assert not any(store.steps for store in warp.stores), "a warp ends before its stores are done"
        except Stop:
            pass
        except BaseException as error:
            self.failure = self.failure or error
        warp.done = True
        warp.block.alive -= 1
        if warp.block.alive == 0 and self.failure is None:
            mine = [x for x in self.flights if any(b == warp.block.number for b, _, _ in x.writes)]
            if mine:
                self.failure = AssertionError("a block ends while copies to it are under way")

    def run(self) -> None:
        """Runs all warps to their end, in a random order."""
        self.favour = {id(warp): self.draw.choice((0.05, 1.0, 1.0, 4.0)) for warp in self.warps}
        self.turns = Turns(len(self.warps), self._next)
        self.turns.run([partial(self._life, warp) for warp in self.warps])
        if self.failure is not None:
            raise self.failure
        assert self.counters == [0, 0], "the counters are not as they were found"

    def _next(self) -> int | None:
        """The warp that goes on, after copies that are done meanwhile; after a failure each ends by itself."""
        while True:
            left = [warp for warp in self.warps if not warp.done]
            if self.failure is not None:
                return self.warps.index(left[0]) if left else None
            able = [warp for warp in left if warp.ready is None or warp.ready()]
            if self.flights and (not able or self.draw.random() < self.eager):
                self._fly()
                continue
            if not able:
                if not left:
                    return None
                self.failure = AssertionError(
                    "all wait: " + "; ".join(f"{w.block.number}.{w.number} for {w.what}" for w in left)
                )
                continue
            chosen = self.draw.choices(able, [self.favour[id(warp)] for warp in able])[0]
            chosen.ready = None
            return self.warps.index(chosen)

    def _fly(self) -> None:
        which = self.draw.randrange(len(self.flights)) if self.draw.random() < 0.5 else 0
        flight = self.flights[which]
        try:
            flight.steps.pop(0)()
        except BaseException as error:
            self.failure = self.failure or error
        if not flight.steps:
            self.flights.remove(flight)

    def wait(self, ready: Callable[[], bool], what: str) -> None:
        """Lets others run until it is so."""
        warp = self.warp
        if ready() and self.draw.random() < 0.5:
            return
        assert self.turns is not None
        warp.ready, warp.what = ready, what
        self.turns.hand_on()
        if self.failure is not None:
            raise Stop

    def pause(self) -> None:
        """Maybe lets others run."""
        if self.draw.random() < self.patience:
            self.wait(lambda: True, "nothing")

    # Races.

    def check_write(self, block: int, low: int, high: int) -> None:
        """Nobody reads or writes these bytes of a block now."""
        for warp in self.warps:
            if warp.block.number == block:
                for product in (*warp.open, *(x for group in warp.groups for x in group)):
                    for start, end in product[0]:
                        assert end <= low or high <= start, "a stage is written over while it is multiplied"
        for flight in self.flights:
            for whose, start, end in (*flight.writes, *([flight.reads] if flight.reads else [])):
                assert whose != block or end <= low or high <= start, "bytes are written while a copy uses them"

    def check_read(self, low: int, high: int) -> None:
        """Nobody writes these bytes of this block now."""
        for flight in self.flights:
            for whose, start, end in flight.writes:
                assert whose != self.block.number or end <= low or high <= start, "a stage is read before it is there"

    # What the kernel calls in `ptx`.

    EVICT_FIRST, EVICT_NORMAL, EVICT_LAST = 1, 2, 3

    def elected(self) -> int:
        return 1

    def unforeseen(self, value: Any) -> Any:
        return value

    def thread_again(self) -> np.int32:
        return np.int32(self.warp.number * 32)

    def cluster_rank(self) -> np.int32:
        return np.int32(self.block.rank)

    def fence_mbarrier_init(self) -> None:
        pass

    def fence_tensormap(self, at: int) -> None:
        self.block.fenced.add(int(at))

    def mbarrier_init(self, at: int, count: int) -> None:
        assert int(at) % 8 == 0 and int(at) not in self.block.barriers
        self.block.barriers[int(at)] = Barrier(int(count))

    def mbarrier_arrive(self, at: int) -> None:
        self.pause()
        self.block.barriers[int(at)].arrive()

    def mbarrier_expect_tx(self, at: int, count: int) -> None:
        self.pause()
        barrier = self.block.barriers[int(at)]
        barrier.bytes += int(count)
        barrier.arrive()

    def mbarrier_wait(self, at: int, parity: int) -> None:
        barrier, wanted = self.block.barriers[int(at)], int(parity)
        assert wanted in (0, 1)
        self.wait(lambda: barrier.phases & 1 != wanted, f"barrier {int(at)}")

    def _peer(self, rank: int) -> Block:
        peer = self.blocks[self.block.number - self.block.rank + int(rank)]
        assert peer.alive > 0, "a block has ended that others still need"
        return peer

    def make_arrive_at_each(self, blocks: int) -> Callable[[int, int], None]:
        def arrive(at: int, wanted: int) -> None:
            if wanted >= 0:
                for rank in range(blocks):
                    self.pause()
                    self._peer(rank).barriers[int(at)].arrive()

        return arrive

    def store_async_u32x4(self, at: int, barrier: int, rank: int, words: Sequence[int]) -> None:
        peer, data = self._peer(rank), np.array([int(x) for x in words], np.int32).view(np.uint8)

        def land() -> None:
            assert peer.alive > 0, "a block has ended that others still write to"
            peer.shared[int(at) : int(at) + 16] = data
            peer.barriers[int(barrier)].bytes -= 16
            peer.barriers[int(barrier)].settle()

        self.flights.append(Copy([land]))

    def load_shared_u32(self, at: int) -> np.int32:
        return np.int32(self.block.shared[int(at) : int(at) + 4].view(np.int32)[0])

    def load_shared_u32x4(self, at: int) -> tuple[np.int32, ...]:
        self.pause()
        return tuple(np.int32(x) for x in self.block.shared[int(at) : int(at) + 16].view(np.int32))

    def store_shared_u32(self, at: int, value: int) -> None:
        self.block.shared[int(at) : int(at) + 4] = np.array([int(value)], np.int32).view(np.uint8)

    def store_shared_u32x4(self, at: int, words: Sequence[int]) -> None:
        self.pause()
        self.block.shared[int(at) : int(at) + 16] = np.array([int(x) for x in words], np.int32).view(np.uint8)

    def atomic_add(self, at: int, value: int) -> np.int32:
        self.pause()
        which = (int(at) - COUNTERS_AT) // 4
        self.counters[which] += int(value)
        return np.int32(self.counters[which] - int(value))

    def store_global_u32(self, at: int, value: int) -> None:
        self.counters[(int(at) - COUNTERS_AT) // 4] = int(value)

    # The copy engine.

    def _load(self, to: int, at: int, barrier: int, where: Sequence[int], receivers: list[Block]) -> None:
        self.pause()
        described, start = self.map_at(at), int(to)
        assert start % 1024 == 0, "a box begins at a multiple of 1024"
        assert int(where[0]) * described.size % 16 == 0, "a box begins at a multiple of 16 bytes"
        places, inside = described.addresses(where)
        data = np.zeros(places.shape, np.uint16 if described.size == SIZE else np.uint8)
        count = data.nbytes
        flat = start - BASE + np.arange(count)
        swizzled = BASE + (flat ^ (flat >> 7 & 7) << 4)
        for block in receivers:
            self.check_write(block.number, start, start + count)

        def land() -> None:
            if inside.any():
                data[inside] = self.gather(places[inside], described.size)
            for block in receivers:
                assert block.alive > 0, "a block has ended that others still write to"
                block.shared[swizzled] = data.reshape(-1).view(np.uint8)
                block.barriers[int(barrier)].bytes -= count
                block.barriers[int(barrier)].settle()
            copy.writes.clear()

        copy = Copy([land], writes=[(block.number, start, start + count) for block in receivers])
        self.flights.append(copy)

    def make_tma_load(self, rank: int) -> Callable[..., None]:
        def load(to: int, at: int, barrier: int, where: Sequence[int], hint: int) -> None:
            assert len(where) == rank
            self._load(to, at, barrier, where, [self.block])

        return load

    def make_tma_multicast(self, rank: int) -> Callable[..., None]:
        def load(to: int, at: int, barrier: int, where: Sequence[int], mask: int, hint: int) -> None:
            assert len(where) == rank
            blocks = [self._peer(i) for i in range(self.cluster) if int(mask) >> i & 1]
            self._load(to, at, barrier, where, blocks)

        return load

    def fence_async(self) -> None:
        if self.turns is not None or self.outside is not None:
            self.block.unfenced.pop((self.warp.number, 0), None)

    def tma_store(self, wanted: int, start: int, at: int, where: Sequence[int]) -> None:
        self.pause()
        if not wanted:
            return
        described, start, block = self.map_at(at), int(start), self.block
        places, inside = described.addresses(where)
        count = places.size * SIZE
        for low, high in block.unfenced.values():
            assert high <= start or start + count <= low, "the copy engine does not yet see what was written"
        found: list[Array] = []

        def read() -> None:
            flat = start - BASE + np.arange(count)
            found.append(block.shared[BASE + (flat ^ (flat >> 7 & 7) << 4)].view(np.uint16).reshape(places.shape))
            copy.reads = None

        def write() -> None:
            if inside.any():
                self.scatter(places[inside], found[0][inside])

        copy = Copy([read, write], reads=(block.number, start, start + count))
        self.flights.append(copy)
        self.warp.stores.append(copy)

    def tma_store_read(self, wanted: int) -> None:
        if wanted:
            stores = self.warp.stores
            self.wait(lambda: all(x.reads is None for x in stores), "stores to be read")

    def tma_store_wait(self) -> None:
        stores = self.warp.stores
        self.wait(lambda: not any(x.steps for x in stores), "stores to be done")

    # Tensor cores.

    def make_zeros(self, count: int, within: int) -> Callable[[], Sums]:
        return lambda: Sums(np.zeros((16, count * 2)))

    def make_descriptor(self, leading: int, stride: int) -> Callable[[int], int]:
        return int

    def make_wgmma(
        self, kind: str, n: int, w_across: bool, x_across: bool, within: int, steps: tuple[tuple[int, int], ...]
    ) -> Callable[[Sums, int, int], Sums]:
        each = [128 if across else 2 for across in (w_across, x_across)]
        assert steps == tuple((each[0] * i, each[1] * i) for i in range(4))

        def wgmma(acc: Sums, w: int, x: int) -> Sums:
            self.pause()
            warp = self.warp
            assert acc.values.shape == (16, n)
            ranges = [(w, w + 8192), (x, x + (-(-n // 64) * 8192 if x_across else n * LINE))]
            for low, high in ranges:
                self.check_read(low, high)
            own = warp.number % 4 * 16

            def product() -> None:
                shared = warp.block.shared
                of_w = _operand(shared, w, 64, w_across, kind)[own : own + 16]
                with np.errstate(all="ignore"):
                    acc.values += of_w @ _operand(shared, x, n, x_across, kind).T

            warp.open.append((ranges, product))
            return acc

        return wgmma

    def wgmma_fence(self) -> None:
        pass

    def wgmma_commit(self) -> None:
        self.warp.groups.append(self.warp.open)
        self.warp.open = []

    def _retire(self, pending: int) -> None:
        groups = self.warp.groups
        while len(groups) > pending:
            for _, product in groups[0]:
                product()
            groups.pop(0)

    def wait_one(self) -> None:
        self.pause()
        self._retire(1)

    def make_wgmma_result(self, n: int, within: int) -> Callable[[Sums], Sums]:
        def result(acc: Sums) -> Sums:
            self.pause()
            self._retire(0)
            return acc

        return result

    def named_barrier(self, number: int, threads: int) -> None:
        meeting, mine = self.block.meetings.setdefault(int(number), []), self.warp.number
        assert threads == 128 and int(number) == mine // 4, "another barrier than the warpgroup's own"
        assert mine not in meeting[len(meeting) // 4 * 4 :], "a warp meets itself"
        meeting.append(mine)
        needed = -(-len(meeting) // 4) * 4
        self.wait(lambda: len(meeting) >= needed, "a named barrier")

    # Results that wait, by warps.

    def make_late(self, n_max: int, kind: str) -> tuple[Any, ...]:
        """As `tensor_epilogue.make_late`."""

        def nothing() -> Array:
            return np.full((16, n_max), 0x7FC0, np.uint16)

        def pack(n: int) -> Callable[[Sums], Array]:
            def packed(acc: Sums) -> Array:
                assert not self.warp.groups, "sums are read while products are under way"
                found = nothing()
                dtype = torch.bfloat16 if kind == "bf16" else torch.float16
                found[:, :n] = torch.from_numpy(acc.values).to(dtype).view(torch.int16).numpy().view(np.uint16)
                return found

            return packed

        def put(words: Array, address: int) -> None:
            self.pause()
            warp = self.warp.number % 4
            staging = int(address) - warp * 32
            rows, columns = np.indices((64, 16))
            flat = staging - BASE + rows * LINE + (warp * 16 + columns) * SIZE
            at = BASE + (flat ^ (flat >> 7 & 7) << 4)
            self.check_write(self.block.number, staging, staging + 8192)
            self.block.unfenced[self.warp.number, 0] = staging, staging + 8192
            values = words[:, :64].T
            self.block.shared[at], self.block.shared[at + 1] = values & 255, values >> 8

        def drop(words: Array) -> Array:
            found = nothing()
            found[:, : n_max - 64] = words[:, 64:]
            return found

        return nothing, pack, put, drop

    # What it calls in `cuda`.

    @property
    def gridDim(self) -> Any:
        return _Extent(len(self.blocks))

    @property
    def blockIdx(self) -> Any:
        return _Extent(self.block.number)

    def shfl_sync(self, _mask: int, value: Any, _lane: int) -> Any:
        return value

    def syncwarp(self) -> None:
        self.pause()

    def threadfence(self) -> None:
        pass


@dataclass
class _Extent:
    x: int


def _operand(shared: Array, at: int, rows: int, across: bool, kind: str) -> Array:
    """[rows, 64] numbers of a stage, as wgmma reads them."""
    row, k = np.indices((rows, BLOCK_K))
    flat = at - BASE + (row // 64 * 8192 + k * LINE + row % 64 * SIZE if across else row * LINE + k * SIZE)
    place = BASE + (flat ^ (flat >> 7 & 7) << 4)
    words = (shared[place].astype(np.uint16) | shared[place + 1].astype(np.uint16) << 8).view(np.int16)
    dtype = torch.bfloat16 if kind == "bf16" else torch.float16
    found: Array = torch.from_numpy(words.copy()).view(dtype).double().numpy()
    return found
