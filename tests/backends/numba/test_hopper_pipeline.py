"""The Hopper kernel of numba, all of its warps and clusters, in a model whose copies and products take any time they
like.

Each problem is of whole numbers, so its result is exact. The faults below show what the model would notice.
"""

from __future__ import annotations

import ctypes
import importlib
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")

from multigemm.settings import settings

if settings().emulate:
    pytest.skip("Numba runs as a simulator in this process", allow_module_level=True)

from multigemm.backends.numba import arguments
from multigemm.backends.numba.arguments import Call, MapEncoder, call_of, epilogue_words, list_table
from multigemm.backends.numba.config import (
    ANY_K,
    FLOAT8_LOW,
    FLOAT8_MEDIUM,
    FLOAT8_TALL,
    SIZE,
    Float8Config,
    HopperConfig,
    Layout,
    Signature,
    effective,
    float8_signature_of,
    signature_of,
)
from multigemm.cuda import tensor_map
from multigemm.cuda.arguments import fields
from multigemm.planning.operands import view_of
from tests.support.numba_lane_model import plain
from tests.support.numba_pipeline_model import BASE, COUNTERS_AT, LINE, MAPS_AT, Machine, Map, Warp
from tests.support.small_problems import staged

TALL, MIDDLE, LOW = HopperConfig(), HopperConfig(128, 6), HopperConfig(64, 8, 8)
Problem = Callable[[], mg.GroupedGemmProblem]


def whole(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Small whole numbers, whose sums 16 bits hold exactly."""
    return torch.randint(-1, 2, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def jagged_m(
    sizes: list[int], n: int, k: int, *, along: bool = False, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> Problem:
    def make() -> mg.GroupedGemmProblem:
        b = whole(len(sizes), n, k, seed=2, dtype=dtype).mT if along else whole(len(sizes), k, n, seed=2, dtype=dtype)
        return mg.GroupedGemmProblem(whole(sum(sizes), k, seed=1, dtype=dtype), b, sizes=sizes, **more)

    return make


def jagged_k(sizes: list[int], m: int, n: int) -> Problem:
    return lambda: mg.GroupedGemmProblem(
        whole(sum(sizes), m, seed=1).T, whole(sum(sizes), n, seed=2), sizes=sizes, jagged="k"
    )


def masked(valid: list[int], m: int, n: int, k: int) -> Problem:
    groups = len(valid)
    return lambda: mg.GroupedGemmProblem(
        whole(groups, m, k, seed=1), whole(groups, k, n, seed=2), valid_rows=torch.tensor(valid)
    )


def batched(groups: int, m: int, n: int, k: int) -> Problem:
    """Rows that lie across k."""
    return lambda: mg.GroupedGemmProblem(whole(groups, k, m, seed=1).mT, whole(groups, k, n, seed=2))


def jagged_n(sizes: list[int], m: int, k: int) -> Problem:
    groups = len(sizes)
    return lambda: mg.GroupedGemmProblem(
        whole(groups, m, k, seed=1), whole(sum(sizes), k, seed=2).T, sizes=sizes, jagged="n"
    )


def a_list(shapes: list[tuple[int, int, int]]) -> Problem:
    return lambda: mg.GroupedGemmProblem(
        [whole(m, k, seed=m) for m, _, k in shapes], [whole(k, n, seed=n) for _, n, k in shapes]
    )


CASES: dict[str, tuple[HopperConfig, Problem]] = {
    "uneven groups, three blocks of columns": (TALL, jagged_m([300, 0, 5, 70, 256, 17, 513], 320, 200)),
    "weights along k": (TALL, jagged_m([40, 130, 257], 264, 130, along=True)),
    "alone": (replace(TALL, cluster=1), jagged_m([300, 0, 5, 200, 256], 264, 200)),
    "one block of k": (TALL, jagged_m([256, 30, 250], 512, 64)),
    "no k": (TALL, jagged_m([256, 30], 128, 0)),
    "many blocks of k": (TALL, jagged_m([250, 3], 256, 1400)),
    "tiles of 128 rows": (MIDDLE, jagged_m([128, 1, 40, 200], 320, 300)),
    "tiles of 128 rows, alone": (replace(MIDDLE, cluster=1), jagged_m([2, 3, 0, 9, 64], 136, 520)),
    "tiles of 64 rows": (replace(LOW, cluster=1), jagged_m([2, 3, 0, 9, 70], 136, 130)),
    "tiles of 64 rows, in clusters": (LOW, jagged_m([2, 64, 9], 136, 130, dtype=torch.float16)),
    "jagged k": (TALL, jagged_k([100, 0, 37, 300], 264, 328)),
    "jagged k, alone": (replace(TALL, cluster=1), jagged_k([100, 64, 3], 136, 128)),
    "jagged k, low": (MIDDLE, jagged_k([100, 0, 37], 200, 264)),
    "masked": (TALL, masked([5, 0, 300, 128], 300, 264, 100)),
    "batched, rows across k": (TALL, batched(2, 200, 328, 100)),
    "batched, rows across k, alone": (replace(MIDDLE, cluster=1), batched(2, 200, 136, 100)),
    "jagged n": (TALL, jagged_n([100, 0, 260, 7], 130, 72)),
    "a list": (TALL, a_list([(300, 136, 72), (5, 264, 200), (64, 8, 64), (100, 130 * 8, 136)])),
    "a list, low": (LOW, a_list([(70, 136, 72), (5, 264, 200)])),
    "float32": (TALL, jagged_m([300, 5], 328, 200, out_dtype=torch.float32)),
}
SLOW: dict[str, tuple[HopperConfig, Problem]] = {
    "more groups than threads that count": (LOW, jagged_m([1, 0, 3] * 150, 8, 64)),
}


KERNELS = "multigemm.backends.numba.kernels"
ROLES = ("hopper_tiles", "hopper_load", "hopper")
"""The modules of the kernel's own, each of which imports from those before it."""


class Fault(NamedTuple):
    """A line that is changed in one of the modules, and a problem that shows it."""

    module: str
    line: str
    changed: str
    case: str


def source_of(module: str) -> str:
    """The text of one of the modules."""
    return (Path(arguments.__file__).parent / "kernels" / f"{module}.py").read_text()


def modules_with(fault: Fault | None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The modules of the kernel, made anew with a fault."""
    made = []
    # all at once: one that were imported later, beside a changed one, would keep functions of that one for good
    real = {name: importlib.import_module(f"{KERNELS}.{name}") for name in (*ROLES, "hopper_float8")}
    for name in ROLES:
        found = real[name]
        if fault is not None:
            text = source_of(name)
            if name == fault.module:
                text = text.replace(fault.line, fault.changed)
            found = ModuleType(found.__name__)
            monkeypatch.setitem(sys.modules, found.__name__, found)
            exec(compile(text, name, "exec"), vars(found))
        made.append(found)
    return made


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """kernel(machine, fault): the modules of the kernel as plain Python that runs in this machine."""
    from multigemm.backends.numba.kernels import memory, schedule, tensor_epilogue

    caches = set[Any]()

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    def install(machine: Machine, fault: Fault | None = None) -> Any:
        hopper_tiles, hopper_load, hopper = modules_with(fault, monkeypatch)
        modules = (hopper, hopper_load, hopper_tiles, memory, schedule, tensor_epilogue)
        caches.update(x for module in modules for x in vars(module).values() if hasattr(x, "cache_clear"))
        forget()
        monkeypatch.setattr(memory, "loader", lambda name: _reader({"i32": ctypes.c_int32}.get(name, ctypes.c_int64)))
        for module in (schedule, memory):
            monkeypatch.setattr(module, "_load_i64", _reader(ctypes.c_int64), raising=False)
        monkeypatch.setattr(schedule, "_load_i32", _reader(ctypes.c_int32))
        for module in (hopper, hopper_load, hopper_tiles):
            monkeypatch.setattr(module, "ptx", machine)
        for module in (hopper, hopper_tiles):
            monkeypatch.setattr(module, "cuda", machine)
        for name, value in {
            "_load_3": machine.make_tma_load(3), "_load_4": machine.make_tma_load(4),
            "_multicast_3": machine.make_tma_multicast(3), "_multicast_4": machine.make_tma_multicast(4),
        }.items():  # fmt: skip
            monkeypatch.setattr(hopper_load, name, value)
        monkeypatch.setattr(hopper, "_wait_one", machine.wait_one)
        monkeypatch.setattr(hopper, "make_zeros", machine.make_zeros)
        monkeypatch.setattr(hopper, "make_late", machine.make_late)
        monkeypatch.setattr(hopper, "make_write", lambda *_: _make_write(machine))
        for module in modules:
            for name, value in [*vars(module).items()]:
                if hasattr(value, "py_func"):
                    monkeypatch.setattr(module, name, plain(value))
        return hopper, hopper_load, hopper_tiles

    yield install
    monkeypatch.undo()
    forget()


def _reader(kind: Any) -> Callable[[int, int], int]:
    return lambda at, index: int(kind.from_address(int(at) + int(index) * ctypes.sizeof(kind)).value)


def _make_write(machine: Machine) -> Callable[..., None]:
    """The way out of results that warps store: each stores its 16 columns, all at once."""

    def write(
        acc: Any, staging: int, barrier: int, p: Any, place: Any, out: Any, alpha: float, beta: float, rows: int,
        columns: int, thread: int,
    ) -> None:  # fmt: skip
        assert not machine.warp.groups and barrier == machine.warp.number // 4
        at, row, column = (int(x) for x in out)
        first = machine.warp.number % 4 * 16
        count = min(max(int(columns) - first, 0), 16)
        values = torch.from_numpy(acc.values[:count, : int(rows)].T.copy())
        places = at + (np.arange(int(rows))[:, None] * row + (first + np.arange(count)) * column) * int(p.out_size)
        if not values.numel():
            return
        if p.out_size == 4:
            words = values.float().numpy().view(np.uint16)
            machine.scatter(places.reshape(-1), words[:, ::2].reshape(-1))
            machine.scatter(places.reshape(-1) + 2, words[:, 1::2].reshape(-1))
        else:
            machine.scatter(places.reshape(-1), values.bfloat16().view(torch.int16).numpy().view(np.uint16).reshape(-1))

    return write


class Run:
    """A problem bound as for a launch, and what a machine makes of it."""

    longest_k = ANY_K

    def __init__(self, config: HopperConfig, problem: mg.GroupedGemmProblem, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config, self.problem, self.ops = config, problem, staged(problem)
        spec = self.ops.spec
        quantised = isinstance(config, Float8Config)
        self.signature: Signature = float8_signature_of(spec) if quantised else effective(config, signature_of(spec))
        self.layout, self.made = Layout(config, self.signature), list[Map]()
        monkeypatch.setattr(tensor_map, "encode_together", self.encode)
        self.table = torch.from_numpy(list_table(self.ops)) if spec.form == "per_group" else None
        call = call_of(self.ops, view_of(self.ops), epilogue_words(spec), self.table)
        words: Any = map(np.int64, call)  # as a kernel has them
        self.call = Call(*words)
        encoder = MapEncoder(config, self.signature)
        self.maps = b"".join(encoder.of_call(call) if self.table is None else encoder.of_list(self.table.numpy()))

    def encode(self, dtype: Any, address: int, extents: Any, strides: Any, boxes: Any, **_: Any) -> bytes:
        """As `tensor_map.encode_together`: a map holds a number, under which it is kept."""
        parts = []
        for box in boxes:
            size = SIZE[self.signature.compute]
            self.made.append(Map(int(address), tuple(map(int, extents)), tuple(strides), tuple(box), size))
            parts.append(len(self.made).to_bytes(LINE, "little"))
        return fields(b"".join(parts), ())

    def machine(self, seed: int, clusters: int) -> Machine:
        """A machine with these operands, whose results are not written yet."""
        machine = Machine(seed, clusters, self.config.cluster, self.layout.end, self.maps, self.made)
        for name in ("a", "b", "out"):
            tensors = getattr(self.ops, name)
            for tensor in tensors if isinstance(tensors, list) else [tensors]:
                if name == "out":
                    tensor.fill_(float("nan"))
                if tensor.numel():
                    machine.own(tensor, name)
        return machine

    def launch(self, machine: Machine, modules: Any, counts: tuple[int, bytes], make_consumer: Any = None) -> None:
        """Runs all warps of all blocks."""
        hopper, load, tiles = modules
        config, signature, call, all_tiles = self.config, self.signature, self.call, np.int64(counts[0])
        longest_k = self.longest_k
        if make_consumer is None:
            make_consumer = hopper.make_sending_consumer if signature.sent else hopper.make_storing_consumer
        init = plain(hopper.make_barriers(config, signature))
        for block in machine.blocks:
            block.shared[BASE + self.layout.counts :][: len(counts[1])] = np.frombuffer(counts[1], np.uint8)
            machine.here.warp = Warp(block, 11, lambda: None)
            init(BASE)
            rank, base = np.int32(block.rank), np.int32(BASE)
            roles: list[tuple[int, Any, tuple[Any, ...]]] = [
                (0, plain(load.make_load_weights(config, signature)), (call, longest_k, MAPS_AT, base, rank)),
                (1, plain(load.make_load_rows(config, signature)), (call, longest_k, MAPS_AT, base, rank)),
                (2, plain(tiles.make_announce(config, signature)), (call, COUNTERS_AT, base, rank, all_tiles)),
            ]
            consume = plain(make_consumer(config, signature))
            for number in range(8):
                group, thread = np.int32(number // 4), np.int32(number % 4 * 32)
                roles.append((number + 4, consume, (call, 0, 1.0, 0.0, longest_k, MAPS_AT, base, rank, group, thread)))
            for number, work, given in roles:
                machine.start(block, number, partial(work, *given))
        machine.run()

    def counts(self, modules: Any, machine: Machine) -> tuple[int, bytes]:
        """What `count_all` finds: all tiles, and what it leaves in shared memory; one thread after the other."""
        count, runs = plain(modules[2].make_count(self.config, self.signature)), self.layout.runs
        each = -(-self.call.groups // runs)
        before, kept = 0, list[int]()
        for run in range(runs):
            kept.append(before)
            for g in range(run * each, min(run * each + each, self.call.groups)):
                before += int(count(self.call, g))
        return before, np.array(kept, np.int64).tobytes()

    def check(self, machine: Machine) -> None:
        """The result is exact, and nothing else was written."""
        wanted, got = mg.solve(self.problem, backend="cpu"), self.ops.out
        pairs = zip(wanted, got, strict=True) if isinstance(got, list) else [(wanted, got)]
        for want, found in pairs:
            owned = torch.isfinite(found)
            if self.ops.valid_rows is None:
                assert owned.all(), "results are missing"
            else:
                inside = torch.arange(want.shape[1]) < self.ops.valid_rows[:, None]
                assert torch.equal(owned, inside[:, :, None].expand_as(owned)), "results are missing or too many"
            assert torch.equal(torch.where(owned, found, 0).float(), torch.where(owned, want, 0).float())


def run(
    case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch, fault: Fault | None = None, clusters: int = 2
) -> None:
    """One launch of a case in the model."""
    config, make = (CASES | SLOW)[case]
    made = Run(config, make(), monkeypatch)
    machine = made.machine(seed, clusters)
    modules = kernel(machine, fault)
    made.launch(machine, modules, made.counts(modules, machine))
    made.check(machine)


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW)])
@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_results_are_exact_in_any_order(case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run(case, seed, kernel, monkeypatch)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("case", ["jagged k", "a list"])
def test_stages_of_a_long_k_are_as_large_as_any_tile_needs(
    case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups with a longer and with a shorter k, one after the other, in one ring."""
    monkeypatch.setattr(Run, "longest_k", 80)
    run(case, seed, kernel, monkeypatch)


UNEVEN, LONG, SHORT = "uneven groups, three blocks of columns", "many blocks of k", "one block of k"
FAULTS = {
    "a stage too many is filled": Fault(
        "hopper_tiles",
        "while int32(begin + size - ring_bytes - oldest) > 0:",
        "while int32(begin - ring_bytes - oldest) > 0:",
        LONG,
    ),
    "stages of one size are not waited for": Fault(
        "hopper_tiles",
        ("int32(ring.parity ^ 1))\n            return room"),
        ("int32(ring.parity))\n            return room"),
        "tiles of 128 rows",
    ),
    "the oldest stage is forgotten": Fault(
        "hopper_tiles",
        "oldest = ptx.load_shared_u32(int32(begins + place * 4))",
        "oldest = begin",
        LONG,
    ),
    "a stage reaches past the end of the ring": Fault(
        "hopper_tiles",
        ("        where = ring.at\n        if variable and int32(where + size) > ring_bytes:"),
        ("        where = ring.at\n        if variable and int32(where) > ring_bytes:"),
        UNEVEN,
    ),
    "the parity stays": Fault(
        "hopper_tiles",
        ("place, parity = int32(0), int32(parity ^ 1)\n            if not variable:"),
        ("place, parity = int32(0), int32(parity)\n            if not variable:"),
        LONG,
    ),
    "a record is written over": Fault(
        "hopper_tiles",
        ("int32(((number // SLOTS) & 1) ^ 1))\n        a, b"),
        ("int32(1))\n        a, b"),
        UNEVEN,
    ),
    "the other block does not expect a tile": Fault(
        "hopper_tiles",
        "ptx.mbarrier_expect_tx(int32(base + full + (number & (SLOTS - 1)) * 8), RECORD_BYTES)",
        "pass",
        UNEVEN,
    ),
    "a block ends before the other one has read its last tile": Fault(
        "hopper_tiles",
        "if cluster > 1:  # warps of other blocks still arrive",
        "if cluster > 9:  #",
        UNEVEN,
    ),
    "a block ends before its stages are handed back": Fault(
        "hopper_load",
        "if cluster > 1:  # a block must not end",
        "if cluster > 9:  #",
        UNEVEN,
    ),
    "the counters stay": Fault(
        "hopper_tiles",
        "                finish(counters, clusters)",
        "                pass",
        UNEVEN,
    ),
    "the next tile is not asked for": Fault(
        "hopper_load",
        "                if rank == 0 and ptx.elected():",
        "                if rank == 9:",
        "no k",
    ),
    "lean tiles come twice": Fault(
        "hopper_tiles",
        "place = int32(lean - (busy + lean - number))",
        "place = int32(lean - (busy + lean - number) - 1)",
        UNEVEN,
    ),
    "a block takes all of a tile that is shared by its rows": Fault(
        "hopper_tiles",
        "if not halves or (tile.group & HALVES) == 0:",
        "if True:",
        UNEVEN,
    ),
    "a half begins at the first row": Fault(
        "hopper_tiles",
        "int32(tile.row + before), column, tile.k",
        "tile.row, column, tile.k",
        UNEVEN,
    ),
    "the second block's rows are the first's": Fault(
        "hopper_load",
        "first = int32(rank * part)",
        "first = int32(0)",
        LONG,
    ),
    "a stage expects the rows that are multiplied": Fault(
        "hopper_load",
        "expected = int32(tile.height * ROW_BYTES)",
        "expected = int32((tile.height + 15) // 16 * 2048)",
        UNEVEN,
    ),
    "a map is used before its fence": Fault(
        "hopper_load",
        "if (used & ~fenced) != 0:",
        "if fenced == 0:",
        UNEVEN,
    ),
    "a list's map is used before its fence": Fault(
        "hopper_load",
        "fenced, group = int32(0), g",
        "group = g",
        "a list",
    ),
    "jagged k does not end": Fault(
        "hopper_load",
        "k = int32(FAR - tile.k)",
        "k = int32(FAR - 64)",
        "jagged k",
    ),
    "a stage is handed back too early": Fault(
        "hopper",
        (
            "            words, to = send(words, to, base, maps, warpgroup, thread)\n"
            "            _wait_one()\n"
            "            release(base, before)"
        ),
        (
            "            words, to = send(words, to, base, maps, warpgroup, thread)\n"
            "            _wait_one()\n"
            "            release(base, ring.place)"
        ),
        UNEVEN,
    ),
    "products are not waited for": Fault(
        "hopper",
        ("        acc = result(acc)\n        release(base, before)\n        return pack(acc), ring"),
        "        return pack(acc), ring",
        UNEVEN,
    ),
    "the last stage is not handed back": Fault(
        "hopper",
        ("        release(base, before)\n        return pack(acc), ring"),
        "        return pack(acc), ring",
        LONG,
    ),
    "staging is written over": Fault(
        "hopper",
        "        ptx.tma_store_read(sender)",
        "        pass",
        LONG,
    ),
    "staging is written over by other warps": Fault(
        "hopper",
        ("        ptx.named_barrier(int32(warpgroup + 1), WARPGROUP)\n        put("),
        "        put(",
        LONG,
    ),
    "the copy engine does not see the staging": Fault(
        "hopper",
        ("        ptx.fence_async()\n        ptx.named"),
        "        ptx.named",
        UNEVEN,
    ),
    "other warps' results are not waited for": Fault(
        "hopper",
        ("        ptx.fence_async()\n        ptx.named_barrier(int32(warpgroup + 1), WARPGROUP)"),
        "        ptx.fence_async()",
        UNEVEN,
    ),
    "stores are not waited for": Fault(
        "hopper",
        "        ptx.tma_store_wait()",
        "        pass",
        UNEVEN,
    ),
    "the last tile is never stored": Fault(
        "hopper",
        (
            "        while to.rows > 0:\n"
            "            words, to = send(words, to, base, maps, warpgroup, thread)\n"
            "        ptx."
        ),
        "        ptx.",
        UNEVEN,
    ),
    "a tile has fewer blocks than rows to store": Fault(
        "hopper",
        "while to.rows > blocks * LATE_ROWS:",
        "while to.rows > 9999:",
        SHORT,
    ),
    "results end at the group's own row": Fault(
        "hopper",
        "int32(end + tile.start)",
        "int32(end)",
        UNEVEN,
    ),
    "a barrier expects too few": Fault(
        "hopper",
        "full + place * 8), LOADERS)",
        "full + place * 8), 1)",
        UNEVEN,
    ),
    "a barrier waits for one block's warps": Fault(
        "hopper",
        "empty + place * 8), CONSUMER_WARPS * cluster)",
        "empty + place * 8), CONSUMER_WARPS)",
        LONG,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_noticed(name: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """In one of some orders: as a race, as warps that all wait, or in the result."""
    fault = FAULTS[name]
    if source_of(fault.module).count(fault.line) != 1:
        pytest.fail(f"not one line of {fault.module}.py: {fault.line}")
    for seed in range(12):
        try:
            with monkeypatch.context() as patch:
                run(fault.case, seed, kernel, patch, fault)
        except (AssertionError, KeyError, IndexError, OverflowError, ValueError):
            return
    pytest.fail("nothing was noticed")


# --- float8: the same way in, and consumers of its own -------------------------------------------------

FLOAT8: dict[str, tuple[Float8Config, Problem]] = {
    "jagged m": (FLOAT8_TALL, lambda: float8([300, 0, 5, 513], 264, 400)),
    "jagged m, low": (FLOAT8_LOW, lambda: float8([70, 1, 0, 64], 136, 130)),
    "jagged n": (FLOAT8_MEDIUM, lambda: float8([100, 0, 260, 7], 140, 144, jagged="n")),
    "batched": (FLOAT8_TALL, lambda: float8([2], 328, 272, m=270)),
    "masked": (FLOAT8_MEDIUM, lambda: float8([5, 0, 200], 264, 128, m=200, valid=True)),
}


def float8(
    sizes: list[int], n: int, k: int, *, m: int = 0, jagged: str = "", valid: bool = False
) -> mg.GroupedGemmProblem:
    """Random bytes, contiguous along k, in lines at multiples of 16 bytes. Jagged n: `n` rows."""

    def codes(*shape: int) -> Tensor:
        data = torch.randint(0, 100, (*shape[:-1], -(-shape[-1] // 16) * 16), dtype=torch.uint8)
        return data.view(torch.float8_e4m3fn)[..., : shape[-1]]

    groups, total = len(sizes), sum(sizes)
    if jagged:
        return mg.GroupedGemmProblem(codes(groups, n, k), codes(total, k).T, sizes=sizes, jagged="n")
    if m:
        more: dict[str, Any] = {"valid_rows": torch.tensor(sizes)} if valid else {}
        return mg.GroupedGemmProblem(codes(groups, m, k), codes(groups, n, k).mT, **more)
    return mg.GroupedGemmProblem(codes(total, k), codes(groups, n, k).mT, sizes=sizes)


class Float8Run(Run):
    """A float8 problem, whose consumers compare every stage with the operands."""

    def install(self, machine: Machine, tiles: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
        """The float8 kernel's module with consumers that only look."""
        from multigemm.backends.numba.kernels import hopper_float8

        ops: Any = self.ops
        a, b = (x.view(torch.uint8).numpy() for x in (ops.a, ops.b.mT))
        form, layout = self.problem.spec.form, self.layout
        release = plain(sys.modules[f"{KERNELS}.hopper"].make_release(self.config, self.signature))
        self.seen = 0

        def stage(at: int, rows: int) -> Any:
            flat = at - BASE + np.arange(rows * LINE)
            return machine.block.shared[BASE + (flat ^ (flat >> 7 & 7) << 4)].reshape(rows, LINE)

        def padded(lines: Any, first: int, rows: int, k: int) -> Any:
            found = np.zeros((rows, LINE), np.uint8)
            part = lines[first : first + rows, k : k + LINE]
            found[: part.shape[0], : part.shape[1]] = part
            return found

        def dispatch(
            _: int, p: Any, q: Any, base: int, place: Any, parity: Any, depth: int, record: int, first: int
        ) -> Any:
            tile = tiles.read_tile(record)
            g, j = int(tiles.group_of(tile)), int(tile.column) + machine.block.rank * 128
            of_a = a if form == "jagged_m" else a[g]
            of_b = b if form == "jagged_n" else b[g]
            i, j = int(tile.row) + int(tile.start) * (form == "jagged_m"), j + int(tile.start) * (form == "jagged_n")
            for block in range(int(depth)):
                machine.mbarrier_wait(base + layout.full + place * 8, parity)
                at = BASE + int(place) * layout.stage_bytes
                if machine.warp.number == 4:
                    assert np.array_equal(stage(at, 128), padded(of_b, j, 128, block * 128))
                    rows = stage(at + 128 * LINE, int(tile.height))
                    assert np.array_equal(rows, padded(of_a, i, int(tile.height), block * 128))
                    self.seen += 1
                release(base, place)
                place = np.int32(place + 1)
                if place == layout.places:
                    place, parity = np.int32(0), np.int32(parity ^ 1)
            return None, place, parity

        fakes = {
            "ptx": machine, "cuda": machine, "make_dispatch": lambda *_: dispatch,
            "make_prefetch": lambda *_: lambda *_: None, "make_strip_write": lambda *_: lambda *_: machine.pause(),
            "read_tile": tiles.read_tile, "group_of": tiles.group_of,
        }  # fmt: skip
        for name, fake in fakes.items():
            monkeypatch.setattr(hopper_float8, name, fake)
        for name in ("share_of", "read_part", "depth_of"):
            monkeypatch.setattr(hopper_float8, name, plain(getattr(hopper_float8, name)))
        return hopper_float8


@pytest.mark.parametrize("case", FLOAT8)
@pytest.mark.parametrize("seed", range(2))
def test_stages_of_float8_hold_what_they_should(
    case: str, seed: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, make = FLOAT8[case]
    made = Float8Run(config, make(), monkeypatch)
    machine = made.machine(seed, 2)
    modules = kernel(machine)
    module = made.install(machine, modules[2], monkeypatch)
    made.launch(machine, modules, made.counts(modules, machine), module.make_consumer.__wrapped__)
    assert made.seen > 0


# --- how tiles are counted and found -------------------------------------------------------------------


class Counting:
    """A block of threads that meet where lanes shuffle, and at its barrier; stands in for `ptx` and `cuda`."""

    def __init__(self, threads: int, shared: int) -> None:
        self.shared, self.here = np.zeros(shared, np.uint8), threading.local()
        self.all, self.warps = threading.Barrier(threads), [threading.Barrier(32) for _ in range(threads // 32)]
        self.told = [0] * threads
        self.gridDim = SimpleNamespace(x=8)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        found: list[Any] = [None] * len(self.told)

        def one(thread: int) -> None:
            self.here.thread = thread
            found[thread] = function(thread)

        threads = [threading.Thread(target=one, args=(thread,)) for thread in range(len(self.told))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return found

    def _told(self, value: int, other: Callable[[int], int]) -> int:
        me = self.here.thread
        self.warps[me // 32].wait()
        self.told[me] = value
        self.warps[me // 32].wait()
        return int(self.told[me // 32 * 32 + other(me % 32)])

    def shfl_sync(self, _mask: int, value: int, lane: int) -> int:
        return self._told(value, lambda _: int(lane))

    def shfl_up_sync(self, _mask: int, value: int, distance: int) -> int:
        return self._told(value, lambda me: max(me - int(distance), 0))

    def syncthreads(self) -> None:
        self.all.wait()

    def unforeseen(self, value: Any) -> Any:
        return value

    def load_shared_i64(self, at: int) -> np.int64:
        return np.int64(self.shared[int(at) : int(at) + 8].view(np.int64)[0])

    def load_shared_u32(self, at: int) -> np.int32:
        return np.int32(self.shared[int(at) : int(at) + 4].view(np.int32)[0])

    def store_shared_i64(self, at: int, value: int) -> None:
        self.shared[int(at) : int(at) + 8] = np.array([value], np.int64).view(np.uint8)


COUNTED: dict[str, tuple[HopperConfig, Problem]] = {
    "both queues": (TALL, jagged_m([300, 0, 5, 70, 256, 17, 513, 0, 208, 207], 320, 8)),
    "one queue": (TALL, jagged_m([3, 0, 5, 0], 600, 8)),
    "nothing": (TALL, jagged_m([0, 0], 600, 8)),
    "runs of three groups": (LOW, jagged_m([0, 3, 66, 0, 300, 1] * 160, 8, 8)),
    "jagged k": (TALL, jagged_k([100, 0, 37, 300], 264, 328)),
    "masked": (TALL, masked([5, 0, 300, 128], 300, 264, 8)),
    "a list": (LOW, a_list([(300, 136, 8), (5, 264, 8), (64, 8, 8)])),
}


@pytest.mark.parametrize("case", COUNTED)
def test_every_tile_is_found_once(case: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by all threads of a block; the tiles of each group cover its results, and the short ones come last."""
    config, make = COUNTED[case]
    made = Run(config, make(), monkeypatch)
    machine: Any = Counting(384, made.layout.end + BASE)
    tiles = kernel(made.machine(0, 1))[2]
    for name in ("ptx", "cuda"):
        monkeypatch.setattr(tiles, name, machine)
    count_all, find = (plain(x) for x in tiles.make_finder.__wrapped__(config, made.signature))
    totals = set(machine.run(lambda thread: int(count_all(made.call, BASE, np.int32(thread)))))
    assert len(totals) == 1
    both = totals.pop()
    busy, lean = both >> 32, both & 0xFFFFFFFF
    ops: Any = made.ops
    columns = 128 * config.cluster
    found = [find(made.call, np.int32(BASE), np.int32(i), np.int64(both)) for i in range(busy + lean)]
    outs = ops.out if isinstance(ops.out, list) else [ops.out]
    extents, starts = [(x.shape[-2], x.shape[-1]) for x in outs], [0] * made.call.groups
    if made.problem.spec.form == "jagged_m":
        ends = [int(x) for x in ops.ends.tolist()]
        starts = [0, *ends[:-1]]
        extents = [(end - start, extents[0][1]) for start, end in zip(starts, ends, strict=True)]
    elif ops.valid_rows is not None:
        extents = [(int(rows), extents[0][1]) for rows in ops.valid_rows]
    elif len(extents) == 1:
        extents *= int(made.call.groups)
    seen = [np.zeros((m, -(-n // columns)), int) for m, n in extents]
    for tile in found:
        g = int(tile.group) & tiles.GROUP
        m, n = extents[g]
        assert 0 < tile.rows <= config.n_max and tile.height == -(-tile.rows // 8) * 8 and tile.width == n
        start = arguments.list_box(m, config) if made.call.table else starts[g]
        assert tile.start == start or made.problem.spec.form == "jagged_k"
        seen[g][tile.row : tile.row + tile.rows, tile.column // columns] += 1
        once, halves = bool(tile.group & tiles.ONCE), bool(tile.group & tiles.HALVES)
        assert halves == (config.cluster == 2 and not made.call.table and n - tile.column <= 128)
        assert once == (m <= config.n_max and not halves)
    assert all((x == 1).all() for x in seen)
    if busy and lean:
        last = [extents[int(tile.group) & tiles.GROUP][0] for tile in found[-min(lean, 4) :]]
        assert made.problem.spec.form == "jagged_k" or max(last) < tiles.BUSY_ROWS


# --- what no group owns --------------------------------------------------------------------------------


def framed(*shape: int, columns: slice, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Some columns of a larger matrix of ones, or of several."""
    return torch.ones(shape, dtype=dtype)[..., columns]


OFFSETS = torch.tensor([3, 5, 5, 9])
UNOWNED: dict[str, Callable[[], mg.GroupedGemmProblem]] = {
    "rows of whole pieces": lambda: mg.GroupedGemmProblem(
        whole(12, 8, seed=1), whole(3, 8, 520, seed=2), offsets=OFFSETS, out=framed(12, 528, columns=slice(8, 528))
    ),
    "rows at any address": lambda: mg.GroupedGemmProblem(
        whole(12, 8, seed=1), whole(3, 8, 43, seed=2), offsets=OFFSETS, out=framed(12, 51, columns=slice(3, 46))
    ),
    "4 bytes": lambda: mg.GroupedGemmProblem(
        whole(12, 8, seed=1), whole(3, 8, 135, seed=2), offsets=OFFSETS,
        out=framed(12, 140, columns=slice(4, 139), dtype=torch.float32),
    ),
    "one column": lambda: mg.GroupedGemmProblem(
        whole(12, 8, seed=1), whole(3, 8, 1, seed=2), offsets=OFFSETS, out=framed(12, 9, columns=slice(8, 9))
    ),
    "by columns": lambda: mg.GroupedGemmProblem(
        whole(12, 8, seed=1), whole(3, 8, 40, seed=2), offsets=OFFSETS,
        out=torch.ones(40, 24, dtype=torch.bfloat16).T[8:20],
    ),
    "columns": lambda: mg.GroupedGemmProblem(
        whole(3, 20, 8, seed=1), whole(8, 12, seed=2), offsets=OFFSETS, jagged="n",
        out=framed(20, 16, columns=slice(0, 12)),
    ),
    "rows of each group": lambda: mg.GroupedGemmProblem(
        whole(3, 20, 8, seed=1), whole(3, 8, 43, seed=2), valid_rows=torch.tensor([5, 20, 0]),
        out=framed(3, 20, 51, columns=slice(8, 51)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", UNOWNED)
def test_what_no_group_owns_becomes_zero_and_nothing_else_does(
    case: str, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multigemm.backends.numba.kernels import schedule

    def store_16(at: int, values: Any) -> None:
        assert at % 16 == 0 and not any(values)
        ctypes.memset(int(at), 0, 16)

    def storer(name: str, _: str) -> Callable[[int, int, Any], None]:
        size = {"f16": 2, "f32": 4, "f64": 8}[name]

        def store(at: int, index: int, _: Any) -> None:
            ctypes.memset(int(at) + int(index) * size, 0, size)

        return store

    made = Run(TALL, UNOWNED[case](), monkeypatch)
    kernel(made.machine(0, 1))
    monkeypatch.setattr(schedule, "storer", storer)
    zero = plain(schedule.make_zero_lines.__wrapped__(store_16, lambda value: value))
    for warp in range(3):
        for lane in range(32):
            zero(made.call, np.int32(lane), np.int32(warp), np.int32(3))
    out: Any = made.ops.out
    wanted = torch.zeros(out.shape, dtype=torch.bool)
    if made.ops.valid_rows is not None:
        wanted = torch.arange(out.shape[1])[None, :, None] >= made.ops.valid_rows[:, None, None]
    else:
        rows = wanted.T if made.problem.spec.form == "jagged_n" else wanted
        rows[:3], rows[9:] = True, True
    assert torch.equal(out == 0, wanted.expand_as(out))
    assert torch.equal(torch.isnan(out), ~wanted.expand_as(out))
    everything = torch.empty(0, dtype=out.dtype).set_(out.untyped_storage())
    assert int((everything == 1).sum()) == everything.numel() - out.numel()


# --- what lanes hold ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [16, 64, 80, 256])
def test_packed_sums_turn_into_rows_of_the_staging(n: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each lane of wgmma has two neighbouring rows of two columns; the copy engine takes 64 rows x 64 columns."""
    from multigemm.backends.numba.kernels import tensor_epilogue as epilogue
    from tests.support.numba_warp_model import emitted

    n_max, stored = 256, list[tuple[int, int, list[Any]]]()

    def assembly(builder: Any, text: str, values: Any, *_: Any, **__: Any) -> list[Any]:
        if text.startswith("cvt.rn.bf16x2"):
            assert "$0, $2, $1" in text, "the first of both goes into the lower half"
            return [tuple(values)]
        found = re.fullmatch(r"stmatrix\.sync\.aligned\.m8n8\.x4\.trans\.shared\.b16 \[\$0\+(\d+)\], .*", text)
        assert found is not None
        stored.append((int(values[0]), int(found.group(1)), list(values[1:])))
        return []

    fake = SimpleNamespace(
        words=lambda count: SimpleNamespace(count=count), undefined=lambda fragment: [None] * fragment.count,
        replaced=lambda builder, fragment, values, first=0: [*values, *fragment[len(values) :]],
    )  # fmt: skip
    for name, value in (("ptx", fake), ("emitted", emitted), ("assembly", assembly)):
        monkeypatch.setattr(epilogue, name, value)
    nothing, pack, put, drop = epilogue.make_late.__wrapped__(n_max, "bf16")
    address, sums = plain(epilogue.lane_address_16), np.arange(64 * n_max).reshape(64, n_max)
    staging = np.full((n_max, 64), -1)
    for first in range(0, n, 64):
        memory = np.full(64 * 64, -1)
        for warp in range(4):
            stored.clear()
            for lane in range(32):
                acc = [
                    sums[warp * 16 + lane // 4 + r // 2 % 2 * 8, r // 4 * 8 + lane % 4 * 2 + r % 2]
                    for r in range(n_max // 2)
                ]
                words = pack(n)(acc)
                for _ in range(first // 64):
                    words = drop(words)
                put(words, address(0, warp * 32 + lane))
            for which in range(4):
                of_lanes = stored[which::4]
                for matrix in range(4):
                    for row in range(8):
                        at, offset, _ = of_lanes[matrix * 8 + row]
                        line = [of_lanes[i * 4 + row // 2][2][matrix] for i in range(8)]
                        for i, pair in enumerate(line):
                            if pair is not None:
                                memory[(at + offset) // 2 + i] = pair[row % 2]
        rows, columns = np.indices((64, 64))
        staging[first : first + 64] = memory[rows * 64 + (columns // 8 ^ rows % 8) * 8 + columns % 8]
    assert np.array_equal(staging[:n], sums[:, :n].T)
    assert len(nothing()) == n_max // 4
