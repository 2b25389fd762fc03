"""Operand tiles of the numba kernels with mma.sync and plain FMA: what each lane's registers hold, without a GPU."""

# mypy: disallow-untyped-calls=False
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.support.numba_world import OBSTACLE

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")
if OBSTACLE:
    pytest.skip(OBSTACLE, allow_module_level=True)

from multigemm.backends.numba.config import KEPT_COLUMNS, ROW_BYTES, SIZE, THREADS
from multigemm.backends.numba.kernels import mma_fragments, tensor_epilogue
from multigemm.backends.numba.kernels.memory import BYTES
from tests.support.numba_lane_model import LANES, Warp, plain

DTYPES = {"i8": np.int8, "f64": np.float64, "tf32": np.float32, "f32": np.float32}
STEPS = 4
ALONG_OR_ACROSS = pytest.mark.parametrize(
    ("across", "aligned"), [(False, True), (True, True), (False, False), (True, False)]
)
EITHER_SIDE = pytest.mark.parametrize("left", [True, False])
WIDTHS = pytest.mark.parametrize("width", [64, 128])


def tile_of(
    kind: str, width: int, across: bool, aligned: bool, monkeypatch: pytest.MonkeyPatch
) -> tuple[Warp, Any, bool]:
    """A warp whose shared memory holds a tile that hangs over in both directions, what it should hold, how it lies."""
    size = SIZE[kind]
    depth = ROW_BYTES // size
    outer, k = width - 5, depth - 3
    full = np.random.default_rng(1).integers(-100, 100, (width, depth)).astype(DTYPES[kind])
    memory = np.ascontiguousarray(full.T if across else full).reshape(-1).view(np.uint8)
    warp = Warp(memory)
    monkeypatch.setattr(mma_fragments, "ptx", warp)
    monkeypatch.setattr(mma_fragments, "_load_u8", warp.load_u8)
    monkeypatch.setattr(mma_fragments, "_ld4", warp.ldmatrix)
    monkeypatch.setattr(mma_fragments, "_ld4t", warp.ldmatrix)
    monkeypatch.setattr(mma_fragments, "_even", lambda x, y: ("even", x, y))
    monkeypatch.setattr(mma_fragments, "_odd", lambda x, y: ("odd", x, y))
    monkeypatch.setattr(mma_fragments, "_make_loads", warp.vectors)
    copy, lies_across = mma_fragments.make_copy(kind, width, THREADS, across, aligned)
    strides = (1, width) if across else (depth, 1)
    for thread in range(THREADS):
        plain(copy)(0, 0, *strides, outer, k, 0, np.int32(thread))
    wanted = np.zeros_like(full)
    wanted[:outer, :k] = full[:outer, :k]
    return warp, wanted, lies_across


def place(kind: str, register: int, left: bool) -> tuple[int, int]:
    """(half of the 16 rows, first k of lane 0) of a register of mma.sync's fragments, by the PTX manual."""
    if kind == "f64":
        return register, 0
    own, deep = (register & 1, register >> 1) if left else (register >> 1, register & 1)
    return own, deep * (16 if kind == "i8" else 4)


@pytest.mark.parametrize("kind", ["i8", "f64", "tf32"])
@ALONG_OR_ACROSS
@EITHER_SIDE
@WIDTHS
def test_registers_hold_what_mma_sync_multiplies(
    kind: str, across: bool, aligned: bool, left: bool, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    warp, wanted, lies_across = tile_of(kind, width, across, aligned, monkeypatch)
    load = plain(mma_fragments.make_fragments.__wrapped__(kind, lies_across, left, width, 16))
    deep, together = ROW_BYTES // SIZE[kind] // STEPS, 4 if kind == "i8" else 1
    for step in range(STEPS):
        for first in (0, 16, width - 16):
            held, reads = [], []
            for lane in range(LANES):
                warp.lane, warp.read = lane, []
                held.append(load(0, step, np.int32(first), np.int32(lane)))
                reads.append(warp.read)
            assert (warp.ways(reads) if reads[0] else warp.matrix_ways()) == 1, "bank conflicts"
            for lane, registers in enumerate(held):
                for number, register in enumerate(registers):
                    half, k = place(kind, number, left)
                    own = lane // 4 * 2 + half if kind == "i8" and lies_across else lane // 4 + 8 * half
                    k += step * deep + lane % 4 * together
                    got = warp.settle(register, lane, lies_across).view(DTYPES[kind])
                    assert np.array_equal(got, wanted[first + own, k : k + together]), (step, first, lane, number)


@pytest.mark.slow
@ALONG_OR_ACROSS
@EITHER_SIDE
@pytest.mark.parametrize(("width", "kept"), [(64, 16), (128, 32), (64, 64)])
def test_lanes_hold_what_plain_cores_multiply(
    across: bool, aligned: bool, left: bool, width: int, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = kept if left else KEPT_COLUMNS
    warp, wanted, lies_across = tile_of("f32", width, across, aligned, monkeypatch)
    load = plain(mma_fragments.make_vectors.__wrapped__(lies_across, left, width, kept))
    lanes, lane_of = (
        (mma_fragments.DOWN, mma_fragments.lane_row) if left else (mma_fragments.ACROSS, mma_fragments.lane_column)
    )
    count = kept // lanes
    for first in range(0, width, kept):
        for step in range(ROW_BYTES // 4 // mma_fragments.STEP):
            reads = []
            for lane in range(LANES):
                warp.read = []
                held = load(0, step, np.int32(first), np.int32(lane))
                reads.append(warp.read)
                mine = plain(lane_of)(lane)
                for i in range(count):
                    row = mine * 4 + i // 4 * lanes * 4 + i % 4 if lies_across else mine + i * lanes
                    values = [held[mma_fragments._element(lies_across, count, i, k)] for k in range(mma_fragments.STEP)]
                    assert values == list(wanted[first + row, step * 4 : step * 4 + 4])
            assert warp.ways(reads) == 1, "bank conflicts"


@pytest.mark.parametrize(
    ("acc", "turned_a", "turned_b"),
    [("f64", False, False), *(("i32", a, b) for a in (False, True) for b in (False, True))],
)
def test_sums_leave_in_their_rows(acc: str, turned_a: bool, turned_b: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where `stage` puts each sum of mma.sync is where `flush` looks for its row and column."""
    kept, size = 32, BYTES[acc]
    columns, pitch = KEPT_COLUMNS // 8, KEPT_COLUMNS * size
    found: dict[int, tuple[int, int]] = {}
    swizzle = plain(tensor_epilogue.make_swizzle(acc))

    def put(lane: int, start: int, twist: int) -> None:
        for row, at, which in tensor_epilogue._runs(kept // 16, columns, size, turned_a, turned_b):
            for number, register in enumerate(which):
                where = start + (twist ^ at) + row * pitch + number * size
                found[where] = element(lane, register)

    def element(lane: int, register: int) -> tuple[int, int]:
        """(row, column) of a sum: two neighbouring columns of a row, then of the row 8 below."""
        block, part = divmod(register, 4)
        i, j = divmod(block, columns)
        row, column = lane // 4 + part // 2 * 8, lane % 4 * 2 + part % 2
        row = i * 16 + (row % 8 * 2 + row // 8 if turned_a else row)
        return row, j // 2 * 16 + column * 2 + j % 2 if turned_b else j * 8 + column

    monkeypatch.setattr(tensor_epilogue, "emitted", lambda *_: put)
    stage = plain(tensor_epilogue.make_stage.__wrapped__(acc, kept, turned_a, turned_b))
    for lane in range(LANES):
        stage(lane, 0, np.int32(lane))
    each = 16 // size
    for row in range(kept):
        for column in range(KEPT_COLUMNS):
            cell = row * pitch + (column // each ^ int(swizzle(row))) * 16 + column % each * size
            assert found.pop(cell) == (row, column)
    assert not found


@pytest.mark.parametrize("upper", [0, 1])
def test_sums_of_wgmma_lie_where_flush_looks_for_them(upper: int) -> None:
    """A lane holds two neighbouring rows of a column, and of the column 8 further."""
    swizzle, address = plain(tensor_epilogue.make_swizzle("f32")), plain(tensor_epilogue.lane_address_32)
    for thread in range(tensor_epilogue.WARPGROUP):
        column = thread // 32 * 16 + thread % 32 // 4 + 8 * upper
        for row in (first + thread % 4 * 2 + odd for first in range(0, tensor_epilogue.ROWS_32, 8) for odd in (0, 1)):
            cell = row * 256 + (column // 4 ^ swizzle(row)) * 16 + column % 4 * 4
            assert cell == address(0, thread, upper) + (row - thread % 4 * 2) * 256
