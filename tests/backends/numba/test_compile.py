"""What the Numba backend compiles, seen without a GPU: instructions, registers, spills, and when it compiles at all."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.numba_world import OBSTACLE

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")
if OBSTACLE:
    pytest.skip(OBSTACLE, allow_module_level=True)

from multigemm.backends.numba import build
from multigemm.backends.numba.arguments import Call, MapEncoder
from multigemm.backends.numba.config import (
    FMA_SMALL,
    FMA_TALL,
    GENERIC,
    GENERIC_LARGE,
    GENERIC_LOW,
    HOPPER,
    HOPPER_MEDIUM,
    HOPPER_NARROW,
    MMA,
    MMA_SMALL,
    MMA_TALL,
    ROW_BYTES,
    SIZE,
    WARPS,
    WEIGHT_BYTES,
    Config,
    HopperConfig,
    Layout,
    MmaConfig,
    Signature,
    piece_step,
    shared_bytes,
    staging_bytes,
)
from multigemm.settings import settings
from tests.support.numba_world import assembled, ptx_of

PLAIN = Signature("bf16", "bf16", None, None, None, True, "row", "row")
SENT = replace(PLAIN, sent=True)
"""Results that the copy engine stores."""
HOPPER_GPU = (9, 0)
SHARED_LIMIT, LEAST_SHARED = 227 * 1024, 99 * 1024
"""Bytes that a thread block may have, on Hopper and on GPUs from Ampere on that have least."""
SPILL_LIMIT = 64
"""Bytes, on plain cores."""
RAGGED = replace(SENT, a_order="col", ragged_k=True)


def coarse(config: HopperConfig, **changes: Any) -> HopperConfig:
    """The same tiles in steps of 64 rows, compiled in a third of the time: the highest ones need most registers."""
    return replace(config, step=64, **changes)


def number(pattern: str, log: str) -> int:
    found = re.search(pattern, log)
    assert found, log
    return int(found.group(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "signature"),
    [*((config, PLAIN) for config in
       (GENERIC, GENERIC_LARGE, GENERIC_LOW, MMA, MMA_SMALL, coarse(HOPPER_NARROW), coarse(HOPPER))),
     *((coarse(config), SENT) for config in (HOPPER_MEDIUM, HOPPER)), (coarse(HOPPER), RAGGED),
     (coarse(HOPPER, cluster=1), replace(SENT, b_order="col")),
     (coarse(HOPPER), replace(PLAIN, compute="f32", out="f32", b_order="col")),
     *((config, replace(PLAIN, compute=name, out=name, b_order="col")) for config, name in
       ((MMA, "i8"), (MMA_TALL, "f64"), (MMA_SMALL, "f64"), (MMA, "f32"), (FMA_TALL, "f32"), (FMA_SMALL, "f32")))],
    ids=str,
)  # fmt: skip
def test_shipped_config_fits_the_registers(config: Config, signature: Signature) -> None:
    """The tallest tiles of each kernel meet each kind of operands and results: their sums take most registers."""
    image = assembled(config, signature, HOPPER_GPU)
    assert number(r"Used (\d+) registers", image.log) * config.threads <= 65536
    assert number(r"(\d+) bytes spill stores", image.log) <= (SPILL_LIMIT if config.kernel == "generic" else 0)
    assert "setmaxnreg' ignored" not in image.log
    assert "serialized" not in image.log, "wgmma must overlap"
    assert image.entry.encode() in image.cubin
    if not isinstance(config, HopperConfig):
        declared = sum(map(int, re.findall(r"(\d+) bytes smem", image.log)))
        assert 0 < declared + (shared_bytes(config) if isinstance(config, MmaConfig) else 0) <= LEAST_SHARED


@pytest.mark.slow
def test_tensor_core_kernels_use_tensor_cores() -> None:
    """Read of kernels whose registers are counted above: their device functions are compiled once in a process."""
    wide = ptx_of(coarse(HOPPER_MEDIUM), SENT, HOPPER_GPU)
    for opcode in (
        "wgmma.mma_async.sync.aligned.m64n64k16",
        "cp.async.bulk.tensor.3d.shared::cluster.global",
        "cp.async.bulk.tensor.5d.global.shared::cta",
        "stmatrix.sync.aligned.m8n8.x4.trans",
        "multicast::cluster.L2::cache_hint",
        "setmaxnreg.inc",
        "mbarrier.try_wait",
        "elect.sync",
    ):
        assert opcode in wide
    assert "cp.async.bulk.tensor.5d" not in ptx_of(coarse(HOPPER_NARROW), PLAIN, HOPPER_GPU)
    old = ptx_of(MMA, PLAIN, (8, 0))
    assert ".target sm_80" in old
    for opcode in ("mma.sync.aligned.m16n8k16.row.col.f32.bf16", "ldmatrix.sync.aligned.m8n8.x4.trans", "cp.async.cg"):
        assert opcode in old


@pytest.mark.parametrize("config", [HOPPER, HOPPER_MEDIUM, HOPPER_NARROW], ids=str)
def test_shared_memory_holds_the_pipeline(config: HopperConfig) -> None:
    layout = Layout(config, PLAIN)
    assert layout.bytes <= SHARED_LIMIT
    assert layout.stage_bytes % 1024 == 0 and layout.staging % 1024 == 0 and layout.records % 16 == 0
    if config.variable:
        lowest = WEIGHT_BYTES + config.step * ROW_BYTES
        assert layout.places * lowest > layout.ring_bytes, "or a full ring would look like an empty one"


def test_mma_leaves_room_for_two_blocks() -> None:
    assert 2 * (shared_bytes(MMA) + 2048) <= SHARED_LIMIT


@pytest.mark.parametrize(
    ("config", "sum_size"),
    [(MMA, 4), (MMA_SMALL, 4), (MMA_SMALL, 8), (MMA_TALL, 8), (FMA_TALL, 4), (FMA_SMALL, 4)],
    ids=str,
)
def test_sums_find_room_where_the_stages_were(config: MmaConfig, sum_size: int) -> None:
    assert WARPS * staging_bytes(config, sum_size) <= shared_bytes(config)


@pytest.mark.parametrize("kind", SIZE)
@pytest.mark.parametrize("high", [64, 128])
def test_tiles_begin_where_16_bytes_can_be_copied(kind: str, high: int) -> None:
    """Rows that lie side by side are copied 16 bytes at a time; 112 single bytes were once cut at 56."""
    from multigemm.backends.numba.kernels.schedule import make_warp_schedule

    piece = make_warp_schedule(high, 64, piece_step(kind))[2].py_func
    for m in (high - 1, high + 1, 112, 144, 200, 257, 1000, 4097):
        seen = [[int(x) for x in piece(np.int32(m), np.int32(64), np.int32(x))][:2] for x in range(-(-m // high))]
        assert all(first * SIZE[kind] % 16 == 0 and 0 < rows <= high for first, rows in seen)
        assert sum(rows for _, rows in seen) == m


@pytest.mark.slow
def test_a_kernel_is_compiled_once_and_then_read_from_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(tmp_path))
    settings.cache_clear()
    try:
        before = len(build.compilations)
        first = build.image(GENERIC, PLAIN, HOPPER_GPU)
        again = build.image(GENERIC, PLAIN, HOPPER_GPU)
        assert len(build.compilations) == before + 1
        assert again == first
        build.image(GENERIC, PLAIN, (8, 0))
        assert len(build.compilations) == before + 2, "another target is another kernel"
    finally:
        monkeypatch.undo()
        settings.cache_clear()


def test_products_without_terms_need_no_tensor_map() -> None:
    empty = Call(*([0] * len(Call._fields)))
    assert not any(b"".join(MapEncoder(HOPPER, PLAIN).of_call(empty)))


@pytest.mark.parametrize(("m", "n"), [(1, 1), (8, 300), (257, 256), (417, 1000), (5000, 640), (256, 128)])
@pytest.mark.parametrize(("n_max", "columns"), [(256, 256), (64, 128), (128, 128)])
def test_pieces_cover_a_group_once(m: int, n: int, n_max: int, columns: int) -> None:
    from multigemm.backends.numba.kernels.schedule import make_warp_schedule

    piece = make_warp_schedule(n_max, columns)[2].py_func
    tiles = -(-m // n_max) * -(-n // columns)
    seen = [tuple(int(x) for x in piece(np.int32(m), np.int32(n), np.int32(number))) for number in range(tiles)]
    assert len(set(seen)) == tiles
    assert sum(rows for _, rows, first in seen if first == 0) == m
    assert {first for _, _, first in seen} == set(range(0, n, columns))
    assert all(0 < rows <= n_max and row % 8 == 0 for row, rows, _ in seen)


@pytest.mark.slow
def test_relu_sees_the_sum_that_int32_keeps() -> None:
    """Numba adds int32 in 64 bits: the sign must be taken after the sum has wrapped, so from 32 bits."""
    from multigemm.backends.numba.kernels.epilogue import make_finish
    from multigemm.backends.numba.kernels.memory import loader, storer
    from multigemm.backends.numba.kernels.runtime import cuda, numpy_names, types

    finish, load, store = make_finish("i32", "relu", "i32", "i32"), loader("i32"), storer("i32", "i32")

    def kernel(at: int, alpha: int, beta: int) -> None:
        store(at, 0, finish(load(at, 1), types.int32(alpha), types.int32(beta), at, 2, at, 3))

    words = types.void(types.int64, types.int64, types.int64)
    with numpy_names(), build._compiling_for((8, 0)):
        text, _ = cuda.compile(kernel, words, device=False, abi="numba", cc=(8, 0))
    assert re.search(r"(max|setp\.\w+)\.s32", text), text
    assert not re.search(r"(max|setp\.\w+)\.s64", text), text
