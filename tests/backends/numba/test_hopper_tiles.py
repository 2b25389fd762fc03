"""How the blocks of numba's Hopper kernel find their tiles, what they write zeroes to, and how lanes hold sums."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.numba import arguments
from multigemm.backends.numba.config import HopperConfig
from tests.support.numba_lane_model import plain
from tests.support.numba_pipeline_model import BASE
from tests.support.numba_pipeline_run import (
    KERNELS,
    LOW,
    TALL,
    Problem,
    Run,
    a_list,
    jagged_k,
    jagged_m,
    masked,
    whole,
)
from tests.support.turns import Turns

# --- how tiles are counted and found -------------------------------------------------------------------


class Counting:
    """A block of threads that meet where lanes shuffle, and at its barrier; stands in for `ptx` and `cuda`."""

    def __init__(self, threads: int, shared: int) -> None:
        self.shared, self.turns, self.everybody = np.zeros(shared, np.uint8), Turns(threads), range(threads)
        self.told = [0] * threads
        self.gridDim = SimpleNamespace(x=8)

    def run(self, function: Callable[[int], Any]) -> list[Any]:
        return self.turns.run([partial(function, thread) for thread in self.everybody])

    def _told(self, value: int, other: Callable[[int], int]) -> int:
        me = self.turns.number
        warp = self.everybody[me // 32 * 32 :][:32]
        self.turns.meet(warp)
        self.told[me] = value
        self.turns.meet(warp)
        return int(self.told[warp[other(me % 32)]])

    def shfl_sync(self, _mask: int, value: int, lane: int) -> int:
        return self._told(value, lambda _: int(lane))

    def shfl_up_sync(self, _mask: int, value: int, distance: int) -> int:
        return self._told(value, lambda me: max(me - int(distance), 0))

    def syncthreads(self) -> None:
        self.turns.meet(self.everybody)

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


@pytest.mark.slow
@pytest.mark.parametrize("case", COUNTED)
def test_every_tile_is_found_once(case: str, kernel: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Counted by all threads of a block; the tiles of each group cover its results, and the short ones come last."""
    config, make = COUNTED[case]
    made = Run(config, make(), monkeypatch)
    machine: Any = Counting(384, made.layout.end + BASE)
    tiles = kernel(made.machine(0, 1))[2]
    for place in (f"{tiles.__name__}.ptx", f"{tiles.__name__}.cuda", f"{KERNELS}.schedule.cuda"):
        monkeypatch.setattr(place, machine)
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


@pytest.mark.parametrize("lanes", [4, 32])
@pytest.mark.parametrize("case", UNOWNED)
def test_what_no_group_owns_becomes_zero_and_nothing_else_does(
    case: str, lanes: int, kernel: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from multigemm.backends.numba.kernels import schedule

    def zero_16(at: int) -> None:
        assert at % 16 == 0
        ctypes.memset(int(at), 0, 16)

    def storer(name: str, _: str) -> Callable[[int, int, Any], None]:
        size = {"f16": 2, "f32": 4, "f64": 8}[name]

        def store(at: int, index: int, _: Any) -> None:
            ctypes.memset(int(at) + int(index) * size, 0, size)

        return store

    made = Run(TALL, UNOWNED[case](), monkeypatch)
    kernel(made.machine(0, 1))
    for name, fake in {"storer": storer, "zero_16": zero_16, "unforeseen": lambda value: value}.items():
        monkeypatch.setattr(schedule, name, fake)
    zero = plain(schedule.make_zero_unowned.__wrapped__(lanes))
    for thread in range(3 * lanes):
        zero(made.call, np.int32(thread % lanes), np.int32(thread // lanes), np.int32(3))
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
