"""The Hopper kernel for float8: what it takes, its tiles, launch and machine code, and what its consumers compute."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import product
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")

from multigemm.backends.numba import choice, launch, support
from multigemm.backends.numba.arguments import JAGGED_M, JAGGED_N, Grids
from multigemm.backends.numba.config import (
    FLOAT8_LOW,
    FLOAT8_MEDIUM,
    FLOAT8_TALL,
    HOPPER,
    QUANTISED,
    QUANTISED_FEW,
    ROW_BYTES,
    WEIGHT_BYTES,
    Config,
    Float8Config,
    Float8Signature,
    Layout,
    float8_signature_of,
)
from multigemm.planning.scale_grids import WHOLE_K
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.settings import settings
from tests.support import numba_world
from tests.support.cuda_driver import FakeDriver
from tests.support.numba_lane_model import plain
from tests.support.numba_world import compiles
from tests.support.small_problems import blocks, float8, staged

GPU = torch.device("cuda")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
SIZES = [FLOAT8_TALL, FLOAT8_MEDIUM, FLOAT8_LOW]
SHARED_LIMIT = 227 * 1024
SIGNATURE = Float8Signature("i8", "bf16", None, None, None, True, "row", "col")


def rows(**changes: Any) -> GroupedGemmProblem:
    """A scale for each row, and for each column."""
    return blocks(**{"scale_a": torch.ones(300, 1), "scale_b": torch.ones(3, 1, 520), **changes})


# --- which config -----------------------------------------------------------------------------------


def taken(problem: GroupedGemmProblem) -> list[Config]:
    return choice.candidates(problem.spec, GPU)


def test_tensor_cores_come_first_and_plain_ones_last(hopper: None) -> None:
    for problem in (blocks(), rows(), rows(scale_a=None, scale_b=None), blocks(accumulate="fast")):
        found = taken(problem)
        assert set(found[:3]) == set(SIZES) and set(found[3:]) == {QUANTISED, QUANTISED_FEW}
        assert all(choice.problem_with(config, problem.spec, GPU) == "" for config in found)
    assert "promoted after 128 of k" in choice.why(FLOAT8_TALL, blocks().spec, GPU)
    assert choice.why(QUANTISED, blocks().spec, GPU).endswith("wgmma: not chosen")


@pytest.mark.parametrize(("each", "first"), [(2000, FLOAT8_TALL), (100, FLOAT8_MEDIUM), (4, FLOAT8_LOW)])
def test_the_lowest_tile_that_holds_a_group_comes_first(each: int, first: Float8Config, hopper: None) -> None:
    sizes = [each] * 32
    problem = GroupedGemmProblem(float8(sum(sizes), 128), float8(32, 2048, 128).mT, sizes=sizes)
    assert taken(problem)[0] == first


def test_a_scale_of_each_column_beside_blocks_takes_lower_tiles(hopper: None) -> None:
    problem = blocks(scale_b=torch.ones(3, 1, 520))
    assert taken(problem)[:2] == [FLOAT8_LOW, FLOAT8_MEDIUM]
    assert taken(problem)[2:] == [QUANTISED, QUANTISED_FEW]
    assert "is made for" in choice.problem_with(FLOAT8_TALL, problem.spec, GPU)


def test_tiles_are_cut_finer_before_a_multiprocessor_is_idle(hopper: None) -> None:
    problem = GroupedGemmProblem(float8(600, 128), float8(2, 1024, 128).mT, sizes=[300, 300])
    assert taken(problem)[0] == FLOAT8_LOW
    narrow = GroupedGemmProblem(float8(600, 128), float8(2, 128, 128).mT, sizes=[300, 300])
    assert {config.cluster for config in taken(narrow)[:3] if isinstance(config, Float8Config)} == {1}
    assert all(choice.problem_with(config, narrow.spec, GPU) == "" for config in taken(narrow))


@pytest.mark.parametrize(
    ("problem", "part"),
    [
        (blocks(scale_a=torch.ones(300, 4).to(E8M0)), "scale_a in torch.float8_e8m0fnu"),
        (blocks(scale_b=torch.ones(3, 13, 520)), "scale_b covers 32 of k"),
        (GroupedGemmProblem(float8(300, 400), float8(3, 400, 512), sizes=[100, 0, 200]), "b is contiguous by row"),
        (GroupedGemmProblem(float8(300, 403)[:, :400], float8(3, 64, 400).mT, sizes=[300, 0, 0]), "1-byte aligned"),
        (GroupedGemmProblem([float8(8, 16)], [float8(16, 16).mT]), "per_group"),
        (GroupedGemmProblem(torch.ones(300, 400).half(), float8(3, 520, 400).mT, sizes=[100, 0, 200]), "on both sides"),
    ],
    ids=["e8m0", "1x32", "b by rows", "unaligned", "list", "weights"],
)
def test_obstacles_are_named(problem: GroupedGemmProblem, part: str, hopper: None) -> None:
    assert part in support.float8_obstacle(problem.spec, GPU)
    assert part in choice.problem_with(FLOAT8_TALL, problem.spec, GPU)
    assert set(taken(problem)) == {QUANTISED, QUANTISED_FEW}
    assert part in choice.why(QUANTISED, problem.spec, GPU)


def test_other_gpus_keep_plain_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choice, support):
        monkeypatch.setattr(module, "capability_of", lambda device: (10, 0))
    assert set(taken(blocks())) == {QUANTISED, QUANTISED_FEW}
    assert "compute capability 9.x" in support.float8_obstacle(blocks().spec, GPU)


def test_batch_invariance_keeps_the_kernel_for_any_layout(hopper: None) -> None:
    """Its bits are those of unaligned operands too, which wgmma cannot read."""
    problem = blocks(batch_invariant=True)
    assert taken(problem) == [QUANTISED, QUANTISED_FEW]
    assert "sum alike" in choice.problem_with(FLOAT8_TALL, problem.spec, GPU)


def test_configs_given_by_hand(hopper: None) -> None:
    plain_numbers = GroupedGemmProblem(torch.ones(64, 64).half(), torch.ones(1, 64, 64).half(), sizes=[64]).spec
    assert "take a QuantisedConfig or a Float8Config" in choice.problem_with(HOPPER, blocks().spec, GPU)
    assert "take a QuantisedConfig or a Float8Config" in choice.problem_with(FLOAT8_LOW, plain_numbers, GPU)
    assert "is made for" in choice.problem_with(replace(FLOAT8_TALL, stages=3), blocks().spec, GPU)
    assert choice.problem_with(replace(FLOAT8_TALL, cluster=1), blocks().spec, GPU) == ""


# --- what it is launched with -----------------------------------------------------------------------


@pytest.mark.parametrize("config", SIZES, ids=str)
def test_shared_memory_holds_the_pipeline(config: Float8Config) -> None:
    layout = Layout(config, SIGNATURE)
    assert layout.bytes <= SHARED_LIMIT and layout.stage_bytes % 1024 == 0 and layout.bk == 128
    assert layout.staging_bytes == 2 * 64 * 64 * 2, "two rounds of 16 bits, side by side"


def test_a_signature_has_what_the_machine_code_depends_on() -> None:
    found = float8_signature_of(blocks(out_dtype=torch.float32).spec)
    assert found == replace(SIGNATURE, scales="blocks")
    columns = blocks(scale_b=torch.ones(3, 4, 520))
    assert float8_signature_of(columns.spec).scales == "columns"
    assert float8_signature_of(rows().spec).scales == float8_signature_of(rows(scale_a=None).spec).scales == "whole"
    mixed = GroupedGemmProblem(float8(8, 16, dtype=E5M2), float8(1, 16, 16).mT, sizes=[8], out_dtype=torch.float16)
    assert float8_signature_of(mixed.spec) == replace(SIGNATURE, out="f16", a="e5m2")


def test_a_launch_has_the_words_of_scales_and_ones_for_absent_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: FakeDriver = numba_world.install(monkeypatch)
    ops = staged(blocks(scale_b=None))
    made: Any = launch.bind_for(FLOAT8_TALL, ops.spec, 0)(ops)
    assert fake.calls.count("cuModuleLoadData") == 1
    scales = Grids._make(made._block.snapshot().tolist()[39 : 39 + len(Grids._fields)])
    given: Any = ops.scale_a
    assert scales.scale_a == given.data_ptr() and (scales.scale_a_line, scales.scale_a_deep) == (4, 1)
    (one,) = [x for x in made._keep if isinstance(x, Tensor) and x.data_ptr() == scales.scale_b]
    assert one.view(torch.float32).tolist() == [1, 1]
    assert (scales.scale_b_group, scales.scale_b_line, scales.scale_b_deep, scales.scale_b_k_shift) == (
        0,
        0,
        0,
        WHOLE_K,
    )


@pytest.mark.parametrize("config", SIZES, ids=str)
@pytest.mark.parametrize(("m", "n"), [(1, 1), (64, 300), (257, 256), (300, 1000), (5000, 640)])
def test_groups_are_cut_into_whole_tiles_and_a_rest(config: Float8Config, m: int, n: int) -> None:
    """A warpgroup multiplies 64 rows at once: even pieces of 300 rows would take as long as two whole tiles."""
    if settings().emulate:
        pytest.skip("Numba runs as a simulator in this process")
    from multigemm.backends.numba.kernels.schedule import make_warp_schedule

    columns = 128 * config.cluster
    piece = make_warp_schedule(config.n_max, columns, config.even)[2].py_func
    tiles = -(-m // config.n_max) * -(-n // columns)
    seen = [tuple(int(x) for x in piece(np.int32(m), np.int32(n), np.int32(number))) for number in range(tiles)]
    down = [(row, rows) for row, rows, first in seen if first == 0]
    assert sorted(down) == [(row, min(config.n_max, m - row)) for row in range(0, m, config.n_max)]
    assert len(set(seen)) == tiles and {first for _, _, first in seen} == set(range(0, n, columns))


# --- machine code -----------------------------------------------------------------------------------


COMPILED = {
    config: replace(SIGNATURE, b="e5m2", scales=scales)  # type: ignore[arg-type]
    for config, scales in ((FLOAT8_TALL, "blocks"), (FLOAT8_MEDIUM, "columns"), (FLOAT8_LOW, "blocks"))
}
"""The tallest tiles that take it meet each kind of scales: their sums take most registers."""


@compiles
@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "signature"),
    [*COMPILED.items(), (FLOAT8_TALL, replace(SIGNATURE, b="e5m2", scales="whole"))],
    ids=str,
)
def test_nothing_is_spilled(config: Float8Config, signature: Float8Signature) -> None:
    made = numba_world.assembled(config, signature, (9, 0))
    assert re.findall(r"(\d+) bytes spill stores", made.log) == ["0"], made.log
    assert re.findall(r"Used (\d+) registers", made.log) == ["168"], "what 384 threads have at most"
    assert "setmaxnreg' ignored" not in made.log and "serialized" not in made.log, made.log
    assert "hopper_float8" in made.entry


@compiles
@pytest.mark.slow
def test_operands_of_two_formats_are_multiplied_by_wgmma() -> None:
    text = numba_world.ptx_of(FLOAT8_MEDIUM, COMPILED[FLOAT8_MEDIUM], (9, 0))
    for opcode in ("m64n64k32.f32.e4m3.e5m2", "m64n128k32.f32.e4m3.e5m2", "stmatrix", "setmaxnreg.inc", "fma.rn"):
        assert opcode in text
    low = numba_world.ptx_of(FLOAT8_LOW, COMPILED[FLOAT8_LOW], (9, 0))
    assert "m64n64k32.f32.e4m3.e5m2" in low
    assert "m64n128k32" not in low, "a low tile has half the columns each"


# --- what the consumers compute ---------------------------------------------------------------------

RECORD, GROUP, START, FIRST_COLUMN, ONCE = 1 << 20, 1, 37, 128, 1 << 30
SCALES_B = 1 << 15
"""Bytes from the scales of a to those of b."""


def swizzled(stage: Any, at: int, lines: Any) -> None:
    """Lays down lines of 128 bytes from an address on, as TMA does."""
    plain_at = at + np.arange(lines.size)
    stage[plain_at ^ (plain_at >> 7 & 7) << 4] = lines.reshape(-1)


class Tile:
    """One tile of whole numbers, its scales, and the result."""

    def __init__(self, config: Float8Config, scales: Any, m: int, first_row: int, n: int, depth: int) -> None:
        rng = np.random.default_rng(m + n)
        self.rows, self.columns = min(m - first_row, config.n_max), min(n - FIRST_COLUMN, 128)
        stages = min(config.stages, depth)
        a = rng.integers(-7, 8, (config.n_max, stages * 128)).astype(np.int8)
        b = rng.integers(-7, 8, (128, stages * 128)).astype(np.int8)
        self.shared = np.full(config.stages * Layout(config, SIGNATURE).stage_bytes, 99, np.int8)
        for block in range(stages):
            at = block * Layout(config, SIGNATURE).stage_bytes
            swizzled(self.shared, at, b[:, block * 128 : block * 128 + 128])
            swizzled(self.shared, at + WEIGHT_BYTES, a[:, block * 128 : block * 128 + 128])
        entries, shared = (depth if scales != "whole" else 1), (128 if scales == "blocks" else 1)
        of_a = 2.0 ** rng.integers(-3, 4, (START + m, entries))
        of_b = 2.0 ** rng.integers(-3, 4, (GROUP + 1, entries, -(-n // shared)))
        self.scales = np.full(SCALES_B, np.nan, np.float32)
        self.scales[: of_a.size], self.scales[SCALES_B // 4 :][: of_b.size] = of_a.reshape(-1), of_b.reshape(-1)
        deep_a, deep_b = (1, of_b.shape[2]) if entries > 1 else (0, 0)
        self.grids = Grids(
            0, 0, entries, deep_a, 0, 7, SCALES_B, of_b[0].size, 1, deep_b, shared.bit_length() - 1, 7, *[0] * 8
        )
        words = (GROUP | ONCE, -(-self.rows // 8) * 8, self.rows, first_row, FIRST_COLUMN, depth * 128, START, n)
        self.records = {RECORD + 4 * i: word for i, word in enumerate(words)}
        want = np.zeros((self.rows, self.columns))
        for block in range(depth):
            at = block % stages * 128  # a stage is read again where nobody fills it
            part = a[: self.rows, at : at + 128].astype(float) @ b[: self.columns, at : at + 128].T
            entry = block % entries
            by_row = of_a[START + first_row :][: self.rows, entry, None]
            by_column = of_b[GROUP, entry, (FIRST_COLUMN + np.arange(self.columns)) // shared]
            want += part * (by_row * by_column)
        self.want = want


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch) -> Any:
    """emulated(model): the kernel's module made of plain Python that runs in this model."""
    if settings().emulate:
        pytest.skip("Numba runs as a simulator in this process")
    from multigemm.backends.numba.kernels import hopper_float8, hopper_tiles, tensor_epilogue
    from tests.support.numba_warp_model import Model, emitted

    caches = [x for x in (*vars(hopper_float8).values(), *vars(tensor_epilogue).values()) if hasattr(x, "cache_clear")]

    def forget() -> None:
        for cache in caches:
            cache.cache_clear()

    def install(model: Model) -> Any:
        forget()
        fakes = {
            "ptx": model, "cuda": model, "emitted": emitted, "_single": model.load_scale,
            "make_zeros": lambda count: lambda: [0.0] * count, "make_release": lambda *_: model.nothing,
            "element_pointer": lambda builder, name, at, index: model.load_scale(at, 0),
        }  # fmt: skip
        names = "share_of read_part depth_of of_rows of_none lane_columns group_of read_tile"
        fakes |= {name: plain(getattr(hopper_float8, name)) for name in names.split()}
        monkeypatch.setattr(hopper_tiles, "ptx", model)
        for name, fake in fakes.items():
            monkeypatch.setattr(hopper_float8, name, fake)
        monkeypatch.setattr(tensor_epilogue, "emitted", emitted)
        monkeypatch.setattr(tensor_epilogue, "assembly", model.assembly)
        return hopper_float8, tensor_epilogue

    yield install
    monkeypatch.undo()
    forget()


def unstaged(staged_sums: Any, size: int) -> Any:
    """64 x 64 sums from staging, by the swizzle of float32 or of 16 bits."""
    pitch, each = 64 * size, 16 // size
    row, column = np.indices((64, 64))
    twist = (row // 2) % 4 * 2 if size == 4 else row % 8
    return staged_sums[(row * pitch + (column // each ^ twist) * 16) // size + column % each]


KINDS = ("blocks", "whole", "columns")
TILES = (
    (FLOAT8_LOW, 5, 0, 131, 1), (FLOAT8_LOW, 64, 0, 300, 2), (FLOAT8_LOW, 5, 0, 131, 34),
    (FLOAT8_MEDIUM, 100, 0, 300, 2), (FLOAT8_MEDIUM, 140, 128, 180, 1), (FLOAT8_TALL, 256, 0, 256, 2),
    (FLOAT8_TALL, 170, 0, 300, 1), (FLOAT8_TALL, 356, 256, 250, 2),
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "m", "first_row", "n", "depth", "scales"),
    [(*tile, kind) for i, tile in enumerate(TILES) for j, kind in enumerate(KINDS) if (i + 2 * j) % 3],
)
def test_a_tile_is_exact(
    config: Float8Config, m: int, first_row: int, n: int, depth: int, scales: Any, emulated: Any
) -> None:
    """Every tile meets two kinds of scales, and every config all three."""
    from tests.support.numba_warp_model import Model

    tile = Tile(config, scales, m, first_row, n, depth)
    model = Model(tile.shared, tile.scales, tile.records)
    kernels, epilogue = emulated(model)
    dispatch = plain(kernels.make_dispatch(config, replace(SIGNATURE, scales=scales)))
    rounds = config.n_max // 64
    ways = ((4, epilogue.make_strip_stage_32(rounds), plain(epilogue.strip_address_32)),
            (2, epilogue.make_strip_stage_16(rounds, "bf16"), plain(epilogue.strip_address_16)))  # fmt: skip
    p = SimpleNamespace(jagged=JAGGED_M)
    got = {size: np.full(tile.want.shape, np.nan) for size, *_ in ways}
    for group in range(2):
        row, column, height, width, strips = kernels.share_of(tile.rows, tile.columns, group)
        first = row + column

        def one_lane() -> Any:
            return dispatch(strips, p, tile.grids, 0, 0, 0, depth, RECORD, first)[0]  # noqa: B023

        sums = [model.run(group * 4 + 4 + warp, one_lane) for warp in range(4)]
        for number, (size, stage, address) in product(range(rounds), ways):
            down, right = number // 2 * 64, number % 2 * 64
            if down >= height or right >= width:
                continue
            for warp in range(4):

                def stage_lane() -> None:
                    thread = model.thread_again() % 128
                    stage(sums[thread // 32][thread % 32], number, *address(0, thread))  # noqa: B023

                model.run(warp, stage_lane)
            rows_here, columns_here = min(height - down, 64), min(width - right, 64)
            got[size][row + down :, column + right :][:rows_here, :columns_here] = unstaged(model.staged, size)[
                :rows_here, :columns_here
            ]
    for found in got.values():
        np.testing.assert_array_equal(found, tile.want)


def test_parts_of_a_tile_meet_nowhere_and_leave_nothing(emulated: Any) -> None:
    from tests.support.numba_warp_model import Model

    empty: Any = np.zeros(1)
    kernels, _ = emulated(Model(empty, empty, {}))
    for height in range(1, 257):
        for width in (1, 63, 65, 128, 500):
            seen = np.zeros((height, min(width, 128)), int)
            for group in range(2):
                row, column, m, n, strips = (int(x) for x in kernels.share_of(height, width, group))
                covered = (64, 64) if strips == 0 else (strips * 64, 128)
                assert m <= covered[0], "a strip is missing"
                seen[row : row + max(m, 0), column : column + max(min(n, covered[1]), 0)] += 1
            assert (seen == 1).all(), (height, width)


def test_scales_of_jagged_columns_begin_at_their_group(emulated: Any) -> None:
    from tests.support.numba_warp_model import Model

    empty: Any = np.zeros(1)
    words = (2, 16, 10, 0, 0, 128, 50, 70)
    kernels, _ = emulated(Model(empty, empty, {RECORD + 4 * i: word for i, word in enumerate(words)}))
    grids = Grids(1000, 40, 4, 1, 0, 7, 9000, 0, 1, 0, 0, WHOLE_K, *[0] * 8)
    model: Any = kernels.ptx
    find = plain(kernels.make_find_scales(1))
    found = model.run(4, lambda: find(SimpleNamespace(jagged=JAGGED_N), grids, RECORD))
    assert [of_a for of_a, _, _ in found] == [1000 + (2 * 40 + min(lane % 16, 9) * 4) * 4 for lane in range(32)]
    assert {(of_b, each) for _, of_b, each in found} == {(9000 + 50 * 4, 4)}
    assert ROW_BYTES == 128
