"""Problems for the model of numba's Hopper kernel, its modules as plain Python, and a launch of them in the model.

Tests that import this are skipped where Numba is missing or runs as a simulator.
"""

from __future__ import annotations

import ctypes
import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

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
    SIZE,
    Float8Config,
    HopperConfig,
    Layout,
    Signature,
    effective,
    float8_signature_of,
    signature_of,
)
from multigemm.cuda import operand_maps
from multigemm.cuda.arguments import fields
from multigemm.planning.operands import view_of
from tests.support.numba_lane_model import plain
from tests.support.numba_pipeline_faults import Fault
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
    "more groups than threads that count": (LOW, jagged_m([1, 0, 3] * 150, 8, 64)),
}


KERNELS = "multigemm.backends.numba.kernels"
ROLES = ("hopper_tiles", "hopper_load", "hopper")
"""The modules of the kernel's own, each of which imports from those before it."""


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


@contextmanager
def in_plain_python(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
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
        monkeypatch.setattr(operand_maps, "encode_together", self.encode)
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
            machine.outside = Warp(block, 11, lambda: None)
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
