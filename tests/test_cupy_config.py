"""The cupy backend on a laptop: reasons, configs and the argument block, none of which needs a GPU."""

from __future__ import annotations

import gc
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm import counters
from multigemm.backends.cupy import (
    BACKEND,
    build,
    direct,
    driver,
    family,
    fragments,
    hopper,
    mma_shapes,
    packing,
    params,
    portable,
    small,
    specs,
    tensor_maps,
    wave,
)
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.backends.cupy.launch import _why
from multigemm.errors import InvalidSetting
from multigemm.layouts import Operands
from multigemm.spec import GIANT, OperandSpec, ProblemSpec
from multigemm.staging import allocate, stage, staged_spec

GPU = torch.device("cuda", 0)
WAVE_KERNELS = {(config, slots): 2 for config in configs.WAVES[1:] for slots in wave.SLOTS}
BF16 = OperandSpec(torch.bfloat16)
SPEC = ProblemSpec("jagged_m", 32, None, 4096, 7168, 8192, 0, BF16, BF16, BF16, compute=torch.bfloat16)


def test_a_cpu_device_is_refused_with_the_remedy() -> None:
    (reason,) = BACKEND.not_supported_reasons(SPEC, torch.device("cpu"))
    assert "cpu" in reason and ".cuda()" in reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"compute": torch.complex64}, "complex64"),
        ({"out": OperandSpec(torch.int32)}, "int32"),
        ({"out": OperandSpec(torch.uint8)}, "uint8"),
    ],
)
def test_reasons_name_what_was_seen(change: dict[str, object], word: str) -> None:
    reasons = BACKEND.not_supported_reasons(replace(SPEC, **change), GPU)  # type: ignore[arg-type]
    assert reasons and any(word in reason for reason in reasons)


@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"n": GIANT - 1}, False),
        ({"n": GIANT, "longest": GIANT}, True),
        ({"total": 2**31}, False),
        ({"total": 2**31, "longest": 2**31 - 1}, True),
        ({"form": "batched", "m": 2**20, "total": 2**34}, False),
        ({"form": "per_group", "n": None, "k": None, "total": 2**34, "largest": 2**31}, False),
        ({"form": "per_group", "n": None, "k": None, "total": 2**14, "largest": 2**10, "longest": 2**33}, True),
    ],
    ids=str,
)
def test_extents_that_31_bits_do_not_count_are_refused(change: dict[str, Any], refused: bool) -> None:
    reasons = BACKEND.not_supported_reasons(replace(SPEC, **change), GPU)
    assert [(str(change["longest"]) in reason and "split" in reason) for reason in reasons] == [True] * refused


def test_aligned_bfloat16_goes_to_the_hopper_kernel_and_only_there_on_hopper() -> None:
    best = configs.heuristic(SPEC, (9, 0))
    assert best.kernel == "hopper" and is_valid(best, SPEC, (9, 0)) and not is_valid(best, SPEC, (8, 0))
    assert configs.heuristic(SPEC, (8, 0)).kernel == configs.heuristic(SPEC, (10, 0)).kernel == "portable"


@pytest.mark.parametrize(
    "change",
    [
        {"groups": specs.MAX_GROUPS + 1},
        {"groups": 0},
        {"form": "masked", "out": replace(BF16, order="col")},
        {"compute": torch.float64, "out": OperandSpec(torch.float64)},
    ],
    ids=str,
)
def test_what_tma_cannot_read_goes_to_the_portable_kernel_and_says_why(change: dict[str, object]) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    assert specs.hopper_reasons(spec)
    assert configs.heuristic(spec).kernel == "portable"
    assert {c.kernel for c in configs.candidates(spec, GPU)} <= {"portable", "small"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize(
    ("change", "tile"),
    [
        ({"form": "batched", "groups": 2, "m": 4096, "n": 4096, "k": 4096, "total": 8192}, 128),
        ({"form": "batched", "groups": 4, "m": 512, "n": 512, "k": 256, "total": 2048}, 64),
        ({"form": "batched", "groups": 1, "m": 512, "n": 512, "k": 256, "total": 512}, 32),
        ({"groups": 8, "n": 1024, "total": 64}, 32),
        ({"groups": 8, "n": 1024, "total": 8192}, 128),
        ({"form": "jagged_n", "groups": 8, "m": 1024, "n": None, "total": 8192}, 128),
        ({"form": "jagged_k", "groups": 1, "m": 256, "n": 256, "total": 8192}, 32),
        ({"form": "per_group", "groups": 2, "n": None, "k": None, "total": 1024, "largest": 512}, 64),
    ],
    ids=str,
)
def test_tiles_of_other_dtypes_are_as_large_as_leaves_no_processor_idle(
    change: dict[str, Any], tile: int, dtype: torch.dtype
) -> None:
    other = OperandSpec(dtype)
    spec = replace(SPEC, **change, a=other, b=other, out=other, compute=dtype)
    assert configs.heuristic(spec).tile == tile
    assert {c.tile for c in configs.candidates(spec, GPU)} == {32, 64, 128}
    assert not is_valid(configs.TINY, SPEC), "16 bits have a kernel of their own for low tiles"


@pytest.mark.parametrize(
    "change",
    [
        {"a": replace(BF16, align=8)},
        {"b": replace(BF16, order="strided")},
        {"a": replace(BF16, dense=False)},
        {"form": "jagged_k"},
        {"form": "per_group", "a": replace(BF16, align=8)},
    ],
    ids=str,
)
def test_large_unreadable_operands_are_copied_and_small_ones_are_not(change: dict[str, object]) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    copied = specs.packed_spec(spec)
    assert specs.hopper_reasons(spec) and not specs.hopper_reasons(copied)
    assert configs.heuristic(spec).kernel == "packed"
    assert configs.heuristic(replace(spec, total=64, n=64, k=64)).kernel in ("portable", "small")
    assert specs.packed_spec(copied) == copied and specs.packed_reasons(SPEC)


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"form": "per_group", "groups": 4, "m": 128, "n": 128, "k": 128, "total": 512}, ("small", 32)),
        (
            {"form": "batched", "groups": 4, "m": 256, "n": 256, "k": 256, "total": 1024, "bias": torch.float32},
            ("small", 64),
        ),
        ({"groups": 4, "n": 128, "k": 256, "total": 1024}, ("small", 32)),
        ({"groups": 4, "n": 512, "k": 512, "total": 2048}, ("hopper", 128)),
        ({"groups": 4, "n": 128, "k": 8192, "total": 512}, ("hopper", 128)),
        (
            {"form": "per_group", "groups": 4, "n": None, "k": None, "total": 2048, "activation": "relu"},
            ("hopper", 128),
        ),
    ],
)
def test_one_wave_of_small_tiles_takes_the_small_kernel(change: dict[str, object], kernel: tuple[str, int]) -> None:
    best = configs.heuristic(replace(SPEC, **change))  # type: ignore[arg-type]
    assert (best.kernel, best.tile) == kernel


ODD = {"a": replace(BF16, align=2), "b": replace(BF16, align=2)}


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ({"groups": 6, "n": 93, "k": 265, "total": 256}, configs.DEEP),
        ({"groups": 3, "n": 209, "k": 91, "total": 128}, configs.CUBE),
        ({"groups": 6, "n": 2149, "k": 220, "total": 32}, configs.CUBE),
        ({"groups": 2, "n": 50, "k": 60, "total": 4096, "bias": torch.float32}, configs.CUBE),
        ({"form": "jagged_k", "groups": 6, "m": 225, "n": 111, "k": None, "total": 128}, configs.CUBE),
        ({"groups": 64, "n": 128, "k": 60, "total": 2048, "b": replace(BF16, order="strided")}, configs.SMALL),
        ({"groups": 8, "n": 800, "k": 15, "total": 1024}, configs.SMALL),
        ({"groups": 16, "n": 500, "k": 1001, "total": 64}, configs.DIRECT_MIDDLE),
    ],
    ids=str,
)
def test_few_tiles_whose_lines_begin_anywhere_take_the_small_kernel(change: dict[str, Any], best: Config) -> None:
    assert configs.heuristic(replace(SPEC, **{**ODD, **change})) == best


@pytest.mark.parametrize(
    ("groups", "total", "m", "n", "best"),
    [
        (12, 256, 384, 320, configs.CUBE64),
        (12, 4096, 512, 192, configs.SINGLE),
        (6, 8, 448, 640, configs.SINGLE),
        (4, 4096, 184, 128, configs.CUBE),
        (160, 1024, 960, 128, configs.ALONE),
        (8, 8192, 1024, 2048, configs.WIDE),
    ],
)
def test_one_round_of_results_of_little_k_takes_low_tiles(
    groups: int, total: int, m: int, n: int, best: Config
) -> None:
    order = {"a": replace(BF16, order="col"), "k": None, "form": "jagged_k"}
    spec = replace(SPEC, **order, groups=groups, total=total, m=m, n=n)  # type: ignore[arg-type]
    assert configs.heuristic(spec) == best
    assert configs.heuristic(replace(spec, **ODD)) not in (configs.SINGLE, configs.CUBE64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"m": 256, "n": 256, "k": 256, "total": 1024}, "wave"),
        ({"m": 1024, "n": 1024, "k": 1024, "total": 4096}, "wave"),
        ({"form": "per_group", "n": None, "k": None, "total": 2048, "largest": 1024}, "wave"),
        ({"groups": 8, "m": 511, "n": 511, "k": 511, "total": 4096, "a": replace(BF16, align=2)}, "wave"),
        ({"groups": 12, "m": 1500, "n": 777, "k": 333, "total": 32768, "b": replace(BF16, align=2)}, "wave"),
        ({"groups": 8, "m": 1023, "n": 1023, "k": 1023, "total": 8192, "b": replace(BF16, align=2)}, "direct"),
        ({"groups": 16, "m": 1024, "n": 1024, "k": 1024, "total": 16384}, "wave"),
        ({"groups": 16, "m": 1024, "n": 1032, "k": 1024, "total": 16384}, "hopper"),
        ({"groups": 12, "m": 1500, "n": 776, "k": 336, "total": 32768}, "hopper"),
        ({"groups": 16, "m": 8, "n": 1024, "k": 4096, "total": 128}, "hopper"),
        ({"groups": 16, "m": 64, "n": 2304, "k": 1024, "total": 1024}, "hopper"),
        ({"groups": 16, "m": 64, "n": 1024, "k": 1024, "total": 1024}, "wave"),
    ],
    ids=str,
)
def test_lists_and_batches_of_few_rounds_have_a_kernel_of_their_own(change: dict[str, object], kernel: str) -> None:
    assert configs.heuristic(_batch(**change)).kernel == kernel


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        (((1024, 1024, 1024), (512, 512, 512), (256, 256, 256), (128, 128, 128)), 80),
        (((512, 512, 512),) * 4, 64),
        (((1024, 1024, 1024),) * 4, 128),
        (((1024, 4096, 512),) * 2, 64),
        (((2048, 512, 1024),) * 3, 192),
        (((384, 768, 640),) * 8, 128),
        ((), 64),
    ],
)
def test_the_height_of_a_waves_tiles_is_the_one_whose_last_block_ends_first(
    shapes: tuple[tuple[int, int, int], ...], rows: int
) -> None:
    assert wave.height_for(shapes, 132).rows == rows


def _batch(**change: object) -> ProblemSpec:
    return replace(replace(SPEC, form="batched", groups=4), **change)  # type: ignore[arg-type]


def test_all_kernels_for_a_wave_are_compiled_before_any_size_is_known() -> None:
    assert configs.WAVE in family.members(_batch(form="per_group", n=None, k=None, largest=512), (9, 0))
    assert wave.heights(configs.WAVE) == configs.WAVES[1:] and wave.heights(configs.WAVES[1]) == configs.WAVES[1:2]


@pytest.mark.parametrize(
    ("groups", "kernel"), [(4, ("packed", 256)), (8, ("direct", 256)), (32, ("direct", 256)), (256, ("direct", 128))]
)
def test_odd_weights_are_copied_for_many_rows_and_shifted_for_few(groups: int, kernel: tuple[str, int]) -> None:
    odd = replace(SPEC, groups=groups, a=replace(BF16, align=2), b=replace(BF16, align=2))
    best = configs.heuristic(odd)
    assert (best.kernel, best.rows) == kernel
    assert configs.heuristic(replace(odd, b=BF16)).kernel == "packed", "only the rows are odd: they are copied anyway"


@pytest.mark.parametrize("columns", [1047, 1201, 3939])
def test_copies_of_many_rows_take_high_tiles_in_pairs_where_results_are_odd(columns: int) -> None:
    odd = replace(BF16, align=2)
    spec = replace(SPEC, groups=4, n=columns, k=2047, total=16384, a=odd, b=odd, out=odd)
    assert configs.heuristic(spec) == replace(configs.WIDE, kernel="packed")


def test_one_b_for_all_groups_needs_no_tile_per_group(fake: FakeDriver) -> None:
    x, w = torch.zeros(70, 64, dtype=torch.bfloat16), torch.zeros(64, 100, dtype=torch.bfloat16)
    problem = mg.GroupedGemmProblem(x, w, ends=torch.tensor([8, 24, 70]))
    view = params.view_of(stage(problem, staged_spec(problem), allocate(problem)).ops)
    assert small._grid(view, 32, True) == (4, 3, 1)
    assert small._grid(view, 32, False) == (4, 6, 1)


def test_every_candidate_fits_into_shared_memory() -> None:
    for config in configs.candidates(SPEC, GPU):
        assert is_valid(config, SPEC)
        assert config.kernel == "portable" or config.shared_bytes(True) <= configs.SHARED_LIMIT
    assert not is_valid(Config("hopper", rows=256, stages=5, cluster=2), SPEC)
    assert not is_valid(Config("hopper", rows=200, stages=3, cluster=2), SPEC)
    assert not is_valid(Config(blocks_per_sm=4), SPEC)


def test_shifted_weights_need_two_stages_beside_those_of_the_rows() -> None:
    """Many stages of high rows leave weights no room, which once counted as less than no shared memory."""
    spec = replace(SPEC, b=replace(BF16, align=2))
    for rows, most in ((256, 4), (192, 6), (128, 9), (64, 18)):
        fitting = Config("direct", rows=rows, stages=most, cluster=2, step=8)
        assert fitting.weight_stages >= 2 and is_valid(fitting, spec)
        for stages in range(most + 1, 40):
            assert not is_valid(replace(fitting, stages=stages), spec), (rows, stages)


@pytest.mark.parametrize(
    ("total", "align", "rows"), [(256, 16, 128), (8192, 16, 256), (32768, 16, 256), (8192, 8, 256), (32768, 8, 192)]
)
def test_pieces_are_as_high_as_groups_have_rows(total: int, align: int, rows: int) -> None:
    spec = replace(SPEC, groups=64 if total == 256 else 32, total=total, out=replace(BF16, align=align))
    assert configs.heuristic(spec).rows == rows


@pytest.mark.parametrize(
    ("groups", "total", "n", "rows"),
    [(6, 2874, 320, 128), (16, 4096, 256, 128), (16, 4096, 2048, 256), (4, 4096, 4096, 256)],
)
def test_few_tall_tiles_become_more_lower_ones(groups: int, total: int, n: int, rows: int) -> None:
    best = configs.heuristic(replace(SPEC, groups=groups, total=total, n=n, k=1024))
    assert (best.rows, best.cluster) == (rows, 1 if rows == 128 else 2)


@pytest.mark.parametrize(
    ("n", "k", "rows_each", "rows", "cluster"),
    [(1408, 2816, 416, 256, 1), (1536, 2048, 416, 256, 2), (5760, 2880, 256, 256, 2), (2048, 4096, 64, 256, 2),
     (2048, 1024, 64, 128, 2), (2048, 1024, 4, 128, 1)],
)  # fmt: skip
def test_clusters_share_rows_unless_columns_are_odd_or_rows_few(
    n: int, k: int, rows_each: int, rows: int, cluster: int
) -> None:
    best = configs.heuristic(replace(SPEC, groups=48, total=48 * rows_each, n=n, k=k))
    assert (best.kernel, best.rows, best.cluster) == ("hopper", rows, cluster)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 63, 255, 256, 257, 417, 2049, 9921, 100000])
@pytest.mark.parametrize("most", [64, 128, 256])
def test_pieces_are_few_equal_and_waste_less_than_a_step_each(rows: int, most: int) -> None:
    height = tensor_maps.piece_height(rows, most)
    pieces = -(-rows // height)
    assert height % 8 == 0 and 8 <= height <= most
    assert pieces <= -(-rows // most) and pieces * height - rows < 8 * (pieces + 1)
    assert 2 * tensor_maps.list_box(rows, most, 2) >= height
    assert tensor_maps.list_box(rows, most, 1) == height


def test_the_sides_swap_where_rows_are_contiguous_in_the_result() -> None:
    column = replace(SPEC, form="batched", out=replace(BF16, order="col"))
    assert hopper.roles(SPEC) == (False, True, False)
    assert hopper.roles(column) == (True, False, True)
    assert hopper.roles(replace(SPEC, form="jagged_n")).swapped
    assert specs.plain_kind(SPEC) == specs.plain_kind(column) == 1
    assert specs.plain_kind(replace(SPEC, form="jagged_n")) == specs.plain_kind(replace(SPEC, out=column.out)) == 2
    assert specs.plain_kind(replace(SPEC, activation="relu")) == 0


def test_the_kernels_key_knows_no_sizes() -> None:
    grown = replace(SPEC, groups=64, n=1024, k=512, total=1 << 20)
    assert hopper.source(SPEC, configs.WIDE) == hopper.source(grown, configs.WIDE)


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, True),
        ({"m": 129, "n": 64}, True),
        ({"m": 64, "n": 129, "out": replace(BF16, order="col")}, True),
        ({"n": 129}, False),
        ({"out": replace(BF16, align=8)}, False),
        ({"out": replace(BF16, order="strided")}, False),
        ({"activation": "relu"}, False),
        ({"form": "jagged_m", "a": BF16, "m": None, "k": 64}, True),
        ({"form": "jagged_m", "a": BF16, "m": None, "k": 64, "n": 129}, False),
        ({"form": "jagged_m", "m": None, "k": 64}, False),
        ({"form": "jagged_n"}, False),
    ],
    ids=[
        *("rows", "odd-rows", "columns", "cut", "unaligned", "strided", "epilogue"),
        *("jagged_m", "jagged_m-cut", "jagged_m-rows-contiguous", "jagged_n"),
    ],
)
def test_the_copy_engine_stores_plain_results(changes: dict[str, Any], sent: bool) -> None:
    spec = replace(SPEC, **{"form": "jagged_k", "m": 256, "a": replace(BF16, order="col"), **changes})
    assert specs.sends(spec) is sent
    assert dict(hopper.source(spec, configs.WIDE).defines)["SEND"] == int(sent)
    many = replace(spec, total=4096 * spec.groups)
    takes_turns = not sent and specs.plain_kind(spec) > 0
    assert configs._hopper_order(many)[0] == (configs.TURNS if takes_turns else configs.WIDE)


def test_the_results_map_counts_rows_back_from_a_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> bytes:
        seen.append(args)
        return b""

    monkeypatch.setattr(tensor_maps, "encode", encode)
    side = tensor_maps.Side(1 << 40, 96, 50, 3, 192, 50 * 192, False, torch.bfloat16)
    tensor_maps.results.__wrapped__(side)
    ((_, start, dims, strides, box),) = seen
    assert box == (64, 64, 1, 1, 1) and dims[0] == 96 and dims[1] == tensor_maps.FAR and dims[4] == 3
    assert all(step % 16 == 0 and step < 1 << 40 for step in strides)
    for group, end, left, row in ((0, 50, 50, 0), (2, 41, 9, 8), (1, 7, 1, 0)):
        at = (tensor_maps.FAR - left + row, end, tensor_maps.FAR, group)
        assert all(0 <= x < size for x, size in zip(at, dims[1:], strict=True)), "the last row still exists"
        address = start + sum(x * step for x, step in zip(at, strides, strict=True))
        assert address % 2**64 == start + (end - left + row) * 192 + group * 50 * 192


def test_the_argument_block_has_the_layout_of_the_struct() -> None:
    a, b, out = torch.zeros(6, 4), torch.zeros(2, 4, 8), torch.zeros(6, 8)
    spec = replace(SPEC, groups=2, compute=torch.float32, a=OperandSpec(torch.float32), out=OperandSpec(torch.float32))
    ops = Operands(spec, a, b, out, ends=torch.tensor([2, 6]), alpha=2.0)
    raw = params.problem_bytes(ops, None, params.view_of(ops))
    assert len(raw) == params.PROBLEM.size == 272
    words = np.frombuffer(raw, dtype=np.int64)
    assert words[:8].tolist() == [a.data_ptr(), 0, 4, 1, b.data_ptr(), 32, 8, 1]
    assert np.frombuffer(raw, dtype=np.float64)[23] == 2.0 and words[25:28].tolist() == [6, 8, 4]
    assert np.frombuffer(raw[224:], dtype=np.int32)[:3].tolist() == [2, params.JAGGED["m"], 1]


def test_a_wrong_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(InvalidSetting, match="cannot run"):
        BACKEND.plan(SPEC, configs.WIDE, GPU)


def test_every_width_is_one_wgmma_instruction() -> None:
    text = mma_shapes.text()
    assert all(f"m64n{n}k16.f32.bf16.bf16" in text and f"m64n{n}k16.f32.f16.f16" in text for n in range(8, 257, 8))


class FakeDriver:
    """Answers every driver call with success, counts the calls and remembers which kernels were launched."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[int] = []
        self.capturing = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuOccupancyMaxActiveClusters":
                args[0]._obj.value = 66
            if name == "cuLaunchKernelEx":
                self.launched.append(args[1].value)
            return 0

        return call


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Binding and launching on CPU tensors, as far as the driver's door."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(tensor_maps, "library", lambda: fake)
    pool = (torch.zeros(24, dtype=torch.int32), deque(range(3)))
    monkeypatch.setattr(counters, "pool", lambda index, size: pool)
    monkeypatch.setattr(
        counters.Words, "_own", staticmethod(lambda index, words: torch.zeros(words, dtype=torch.int32))
    )
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: fake.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    hopper._packed_maps.cache_clear()
    driver.resident_clusters.cache_clear()
    return fake


def operands(form: str) -> Operands:
    """One small problem of a form on the CPU."""
    half = partial(torch.zeros, dtype=torch.bfloat16)
    x, w = half(48, 64), half(3, 64, 128)
    ends = torch.tensor([8, 24, 48])
    problem = {
        "jagged_m": lambda: mg.GroupedGemmProblem(x, w, ends=ends),
        "jagged_n": lambda: mg.GroupedGemmProblem(w.mT.contiguous(), x.T.contiguous(), ends=ends, jagged="n"),
        "jagged_k": lambda: mg.GroupedGemmProblem(x.T, torch.zeros_like(x), ends=ends, jagged="k"),
        "batched": lambda: mg.GroupedGemmProblem(torch.zeros(3, 16, 64, dtype=torch.bfloat16), w),
        "per_group": lambda: mg.GroupedGemmProblem([x, x[:8]], [w[0], w[0]]),
        "odd list": lambda: mg.GroupedGemmProblem([half(48, 63), half(8, 61)], [half(63, 101), half(61, 128)]),
        "odd weights": lambda: mg.GroupedGemmProblem(x, w[:, :, 1:], ends=ends),
        "odd": lambda: mg.GroupedGemmProblem(torch.zeros(48, 63, dtype=torch.bfloat16), w[:, :63], ends=ends),
    }[form]()
    return stage(problem, staged_spec(problem), allocate(problem)).ops


@pytest.mark.parametrize(("total", "alone"), [(128, True), (32 * 128, True), (32 * 256, False)])
def test_results_of_little_k_are_stored_by_single_blocks(total: int, alone: bool) -> None:
    weights = replace(SPEC, form="jagged_k", m=5632, n=2048, k=None, total=total, a=replace(BF16, order="col"))
    assert (configs.heuristic(weights) == configs.ALONE) is alone


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched", "per_group"])
def test_a_bound_problem_launches_with_one_driver_call(form: str, fake: FakeDriver) -> None:
    ops = operands(form)
    launch = hopper.bind(ops, configs.WIDE, 1)
    before = len(fake.calls)
    launch()
    launch()
    assert fake.calls[before:] == ["cuLaunchKernelEx"] * 2
    fake.calls.clear()
    hopper.bind(ops, configs.WIDE, 1)
    if form != "per_group":
        assert "cuTensorMapEncodeTiled" not in fake.calls, "the same addresses need no new tensor maps"


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched", "per_group", "odd"])
@pytest.mark.parametrize("config", [configs.PORTABLE, configs.SMALL], ids=["large", "small"])
def test_the_portable_kernel_binds_every_form(form: str, config: Config, fake: FakeDriver) -> None:
    launch = portable.bind(operands(form), config, 1, 132)
    launch()
    assert fake.calls == ["cuLaunchKernelEx"]


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched", "per_group", "odd", "odd list"])
@pytest.mark.parametrize("config", [configs.CUBE, configs.CUBE64, configs.DEEP], ids=["32", "64", "deep"])
def test_the_small_kernel_binds_every_form(
    form: str, config: Config, fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    ops = operands(form)
    odd = form in ("jagged_n", "odd", "odd list")
    assert not specs.small_reasons(ops.spec) and specs.has_odd_lines(ops.spec) is odd
    assert is_valid(config, ops.spec) is (odd or config != configs.DEEP)
    small.bind(ops, config, 1)()
    assert fake.calls == ["cuLaunchKernelEx"]


def test_a_lists_groups_become_the_small_kernels_argument() -> None:
    raw, tiles = small._listed(operands("per_group"), 32)
    assert len(raw) == small.LISTED.size and tiles == 2 * 4 + 1 * 4
    numbers = np.frombuffer(raw[: 5 * specs.LIST * 4], dtype=np.int32).reshape(5, specs.LIST)
    assert numbers[:, 0].tolist() == [0, 4, 48, 128, 64] and numbers[:, 1].tolist() == [8, 4, 8, 128, 64]
    assert (numbers[0, 2:] == small.NEVER).all()


def test_counters_come_back_and_may_run_out(fake: FakeDriver) -> None:
    launches = [hopper.bind(operands("batched"), configs.WIDE, 1) for _ in range(5)]
    _, free = counters.pool(0, 8)
    assert not free
    launches.clear()
    gc.collect()
    assert sorted(free) == [0, 1, 2]


@pytest.mark.parametrize("room", ["hopper", "direct"])
def test_a_counter_that_a_graph_may_still_use_never_comes_back(room: str, fake: FakeDriver) -> None:
    def bound() -> Callable[[], object]:
        if room == "hopper":
            return hopper.bind(operands("batched"), configs.WIDE, 1)
        return direct.bind(operands("odd weights"), configs.DIRECT, (1, 2, 0), 132)

    eager, captured = bound(), bound()
    eager()
    fake.capturing = True
    captured()
    fake.capturing = False
    captured()
    del eager, captured
    gc.collect()
    _, free = counters.pool(0, 8)
    assert sorted(free) == [0, 2], "the second pair belongs to the graph for good"


@pytest.mark.parametrize("form", ["odd", "odd list"])
def test_odd_operands_are_copied_by_one_launch_before_each_product(form: str, fake: FakeDriver) -> None:
    ops = operands(form)
    assert specs.packed_reasons(ops.spec) == []
    launch = packing.bind(ops, configs.WIDE, (1, 2), 132)
    before = len(fake.calls)
    launch()
    assert fake.calls[before:] == ["cuLaunchKernelEx"] * 2


def test_copies_are_laid_out_one_after_the_other(fake: FakeDriver) -> None:
    ops = operands("odd list")
    copied, _ = packing.with_copies(ops, specs.packed_spec(ops.spec), 1, 132)
    for given, copy in zip([*ops.a, *ops.b], [*copied.a, *copied.b], strict=True):
        assert copy.shape == given.shape and copy.stride(0) % 8 == 0 and copy.stride(1) == 1
        assert copy.stride(0) - given.shape[1] < 8 and copy.data_ptr() % 16 == 0
    copies = packing._Copies()
    copies.add(torch.zeros(3, 70, 300, dtype=torch.bfloat16), BF16)
    copies.add(torch.zeros(300, 70, dtype=torch.bfloat16).T, BF16)
    first, second = (packing.COPY.unpack(record) for record in copies.records)
    assert first[-1] == 0 and second[-1] == 3 * 3 * 2 and copies.units == second[-1] + 2 * 5


@pytest.mark.parametrize("form", ["odd list", "odd weights"])
@pytest.mark.parametrize("config", [configs.DIRECT, configs.DIRECT_MIDDLE, configs.DIRECT_NARROW], ids=str)
def test_the_direct_kernel_copies_rows_at_most(form: str, config: Config, fake: FakeDriver) -> None:
    ops = operands(form)
    assert is_valid(config, ops.spec), specs.direct_reasons(ops.spec)
    launch = direct.bind(ops, config, (1, 2, 0), 132)
    fake.calls.clear()
    launch()
    assert fake.calls == ["cuLaunchKernelEx"] * (1 if form == "odd weights" else 2)


def test_weights_that_are_no_whole_number_of_lines_apart_are_copied(fake: FakeDriver) -> None:
    x, memory = torch.zeros(3, 16, 64, dtype=torch.bfloat16), torch.zeros(8000, dtype=torch.bfloat16)
    for group, copies in ((64 * 33, 0), (66 * 33, 0), (64 * 33 + 1, 1)):
        problem = mg.GroupedGemmProblem(x, memory.as_strided((3, 64, 33), (group, 33, 1)))
        launch = direct.bind(
            stage(problem, staged_spec(problem), allocate(problem)).ops, configs.DIRECT, (1, 2, 0), 132
        )
        fake.calls.clear()
        launch()
        assert fake.calls == ["cuLaunchKernelEx"] * (1 + copies)


def test_wide_weights_that_are_no_whole_number_of_lines_apart_are_read_where_they_lie(fake: FakeDriver) -> None:
    """A copy of 2^31 elements is more memory than a product may take without being asked."""
    x, memory = torch.zeros(3, 64, 64, dtype=torch.bfloat16), torch.zeros(16000, dtype=torch.bfloat16)
    for group, function in ((64 * 65, 2), (64 * 65 + 1, 3)):
        problem = mg.GroupedGemmProblem(x, memory.as_strided((3, 64, 65), (group, 65, 1)))
        ops = stage(problem, staged_spec(problem), allocate(problem)).ops
        ops = replace(ops, spec=replace(ops.spec, b=replace(ops.spec.b, wide=True)))
        assert is_valid(configs.DIRECT, ops.spec)
        direct.bind(ops, configs.DIRECT, (1, 2, 3), 132)()
        assert fake.launched.pop() == function and not fake.launched
        assert "portable" in _why(ops.spec, configs.DIRECT)


def test_only_wide_weights_may_need_the_portable_kernel_beside_the_one_that_shifts(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "load", lambda source, index: (1, None))
    monkeypatch.setattr(direct, "ready", lambda index, words: None)
    monkeypatch.setattr(portable, "prepare", lambda spec, config, index: 3)
    spec = replace(SPEC, b=replace(BF16, align=2))
    assert direct.prepare(spec, configs.DIRECT, 0) == (1, 1, 0)
    assert direct.prepare(replace(spec, b=replace(spec.b, wide=True)), configs.DIRECT, 0) == (1, 1, 3)
    assert "portable" not in _why(spec, configs.DIRECT)


@pytest.mark.parametrize(("offset", "pitch"), [(0, 14), (3, 22), (5, 32), (7, 2 * 1023)])
@pytest.mark.parametrize("count", [1, 5, 8, 77])
def test_eight_maps_find_every_line(offset: int, pitch: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*call: Any) -> bytes:
        seen.append(call)
        return b""

    monkeypatch.setattr(tensor_maps, "encode", encode)
    start, length = 4096 + 2 * offset, 7
    tensor_maps.eighths.__wrapped__(tensor_maps.Lines(start, pitch, count, length, torch.bfloat16), 160, 8)
    assert len(seen) == 8
    for line in range(count):
        _, base, (width, lines, one), (step, _), box, swizzle = seen[line & 7]
        shift = ((start + (line & 7) * pitch) & 15) >> 1  # as in weights.cuh
        assert base % 16 == step % 16 == 0 and (box, one, swizzle) == ((160, 8, 1), 1, tensor_maps.NO_SWIZZLE)
        assert base + step * (line >> 3) + 2 * shift == start + line * pitch
        assert width == shift + length and (line >> 3) < lines
    assert [lines for _, _, (_, lines, _), *_ in seen] == [max((count - i + 7) // 8, 1) for i in range(8)]


@pytest.mark.parametrize("form", ["odd list", "odd weights", "odd"])
def test_the_weights_of_the_direct_kernel_lie_where_it_looks_for_them(form: str, fake: FakeDriver) -> None:
    ops = operands(form)
    role = hopper.roles(specs.direct_spec(ops.spec))
    if form == "odd list":
        maps = direct._listed_weights(ops, role)
        assert maps.shape == (2, 8 * tensor_maps.SIZE // 8)
        return
    assert isinstance(ops.b, torch.Tensor)
    weights = direct._weights(params.view_of(ops), role)
    lines, per_group = direct._stack(weights, 3, torch.bfloat16)
    for g, k in ((0, 0), (1, 5), (2, 62)):
        assert lines.ptr + (g * per_group + k) * lines.pitch == ops.b[g, k].data_ptr()
    assert lines.length == ops.b.shape[2] and lines.count == 2 * per_group + ops.b.shape[1]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "nothing needs shifting"),
        ({"form": "jagged_k", "b": replace(BF16, align=2)}, "jagged k"),
        ({"b": replace(BF16, order="strided")}, "strided"),
        ({"b": replace(BF16, align=2, dense=False)}, "contiguous direction"),
        ({"b": replace(BF16, align=2, wide=True), "n": 33}, "short lines"),
        ({"b": replace(BF16, align=2), "a": replace(BF16, align=2, wide=True)}, "not copied"),
    ],
    ids=str,
)
def test_the_direct_kernel_says_what_it_cannot_do(change: dict[str, object], word: str) -> None:
    reasons = specs.direct_reasons(replace(SPEC, **change))  # type: ignore[arg-type]
    assert any(word in reason for reason in reasons)


@pytest.mark.parametrize(
    "change", [{}, {"form": "per_group"}, {"n": 128, "k": 256}, {"b": replace(BF16, align=2)}], ids=str
)
def test_a_layouts_family_holds_every_choice_for_other_counts(change: dict[str, object]) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    members = family.members(spec, (9, 0))
    for total in (0, 1, 37, 300, 2048, 5000, 1 << 17):
        for groups in (1, 3, 40, 700):
            bucket = 1 << (total - 1).bit_length() if total else 0
            assert configs.heuristic(replace(spec, total=bucket, groups=groups)) in members


@pytest.mark.parametrize("largest", [64, 128, 640, 1408, 4096])
def test_a_lists_family_covers_any_largest_matrix(largest: int) -> None:
    spec = replace(SPEC, form="per_group", n=None, k=None)
    members = family.members(spec, (9, 0))
    for total in (128, 2048, 1 << 13, 1 << 17):
        for groups in (4, 40, 700):
            assert configs.heuristic(replace(spec, total=total, groups=groups, largest=largest)) in members


def test_a_family_is_prepared_whole_and_errors_come_out() -> None:
    seen: list[Config] = []
    family.prepare_all((configs.WIDE, configs.SMALL), seen.append)
    assert set(seen) == {configs.WIDE, configs.SMALL}

    def fails(config: Config) -> None:
        raise InvalidSetting("no")

    with pytest.raises(InvalidSetting):
        family.prepare_all((configs.WIDE,), fails)


def test_threads_that_load_a_kernel_at_once_get_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)
    loads: list[str] = []

    def compiled(source: build.Source, arch: str) -> bytes:
        together.wait(10)  # all are past the first look
        return b""

    def loaded(cubin: bytes, entry: str, index: int) -> tuple[int, object]:
        loads.append(entry)
        return len(loads), object()

    monkeypatch.setattr(build, "_loaded", {})
    monkeypatch.setattr(build, "_architecture_of", lambda index: "sm_90a")
    monkeypatch.setattr(build, "cubin_of", compiled)
    monkeypatch.setattr(build, "_load", loaded)
    source = build.Source("portable.cu", "portable", ())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.load(source, 0), range(4)))
    assert loads == ["portable"]
    assert len({id(module) for _, module in found}) == 1


@pytest.mark.parametrize("form", ["batched", "per_group"])
@pytest.mark.parametrize("config", configs.WAVES)
def test_a_wave_is_laid_out_by_the_host(form: str, config: Config, fake: FakeDriver) -> None:
    ops = operands(form)
    assert is_valid(config, ops.spec), specs.wave_reasons(ops.spec)
    groups = wave.groups_of(ops)
    config = config if config.rows else wave.height_for(tuple((g.m, g.k, g.n) for g in groups), 132)
    slots = wave.SLOTS[0]
    argument, tiles, more = wave.layout(ops, groups, config, slots)
    assert tiles == sum(-(-g.m // config.rows) * -(-g.n // 128) for g in groups) and more is None
    maps = 2 * slots * tensor_maps.SIZE
    shapes_at = maps + wave.PLACE.itemsize * wave.LISTED
    spots = np.frombuffer(argument[maps:shapes_at], wave.PLACE)[:tiles]
    assert {(s["group"], s["blocks"]) for s in spots} == {(i, -(-g.k // 64)) for i, g in enumerate(groups)}
    shapes = list(wave.SHAPE.iter_unpack(argument[shapes_at : -wave.TAIL.size]))
    expected = [(g.m, g.n, g.out.ptr, 2 * g.out.row) for g in groups]
    assert shapes[: len(groups)] == expected and len(shapes) == slots
    assert wave.TAIL.unpack(argument[-wave.TAIL.size :]) == (0, 1.0, 1, tiles)
    launch = wave.bind(ops, config, (0, {(config, slots): 1}), 132)
    fake.calls.clear()
    launch()
    assert fake.calls == ["cuLaunchKernelEx"]


def test_tiles_beyond_the_argument_lie_in_device_memory_and_none_is_left_out(fake: FakeDriver) -> None:
    half = partial(torch.zeros, dtype=torch.bfloat16)
    problem = mg.GroupedGemmProblem([half(1000, 64), half(300, 130)], [half(64, 1300), half(130, 136)])
    ops = stage(problem, staged_spec(problem), allocate(problem)).ops
    groups = wave.groups_of(ops)
    argument, tiles, more = wave.layout(ops, groups, configs.WAVES[1], wave.SLOTS[0])
    maps = 2 * wave.SLOTS[0] * tensor_maps.SIZE
    listed = np.frombuffer(argument[maps : maps + wave.PLACE.itemsize * wave.LISTED], wave.PLACE)
    assert more is not None and tiles == 5 * 2 + 16 * 11 > wave.LISTED
    places = np.concatenate([listed, more.numpy().view(wave.PLACE)]).tolist()
    assert places[:10] == [(0, 3, d, a) for d in range(5) for a in range(2)], "the longest k first"
    assert places[10:] == [(1, 1, d, a) for d in range(16) for a in range(11)]
    assert wave.TAIL.unpack(argument[-wave.TAIL.size :])[0] == more.data_ptr()
    zero = replace(ops, spec=replace(ops.spec, alpha="zero"))
    argument, _, _ = wave.layout(zero, groups, configs.WAVES[1], wave.SLOTS[0])
    assert set(np.frombuffer(argument[maps : maps + 160], wave.PLACE)["blocks"]) == {0}, "nothing is read"


def test_a_height_is_chosen_without_laying_any_tile_out() -> None:
    """Of 65,536 x 65,536 there are up to half a million tiles, 8 MB for each height; few tables are kept at all."""
    wave.places.cache_clear()
    wave.height_for.cache_clear()
    assert wave.height_for(((1 << 16, 4096, 1 << 16), (64, 64, 64)), 132) in configs.WAVES[1:]
    assert wave.places.cache_info().currsize == 0
    for rows in range(1, 200):
        wave.places(((rows, 64, 128),), 64)
    assert wave.places.cache_info().currsize <= 32


def test_a_kept_table_of_tiles_cannot_be_written() -> None:
    tiles = wave.places(((100, 64, 128),), 64)
    assert tiles is wave.places(((100, 64, 128),), 64)
    with pytest.raises(ValueError, match="read-only"):
        tiles["group"] = 1


@pytest.mark.parametrize("config", configs.WAVES[1:], ids=lambda c: str(c.rows))
@pytest.mark.parametrize("order", ["row", "col"])
def test_odd_results_of_a_wave_are_read_within_the_staging(order: Any, config: Config) -> None:
    """In turns of 32 rows, the last of which may reach past the tile's."""
    spec = _batch(a=replace(BF16, order=order))
    staged = config.rows if config.rows <= wave.STAGED else 64
    stages = wave.stages_of(spec, config) * wave.stage_bytes(spec, config)
    read = -(-staged // 32) * 32 * 64 * 2
    assert wave.shared_bytes(spec, config) >= stages + 2 * read + 1023 and staged % 16 == 0


def test_odd_lists_are_copied_for_the_wave_kernel(fake: FakeDriver) -> None:
    ops = operands("odd list")
    assert specs.hopper_reasons(ops.spec) and specs.wave_reasons(ops.spec) == []
    launch = wave.bind(ops, configs.WAVE, (1, WAVE_KERNELS), 132)
    fake.calls.clear()
    launch()
    assert fake.calls == ["cuLaunchKernelEx"] * 2, "the copies, then the product"


def test_the_longest_groups_of_a_wave_start_first(fake: FakeDriver) -> None:
    half = partial(torch.zeros, dtype=torch.bfloat16)
    problem = mg.GroupedGemmProblem(
        [half(8, 64), half(0, 512), half(8, 256)], [half(64, 8), half(512, 8), half(256, 8)]
    )
    ops = stage(problem, staged_spec(problem), allocate(problem)).ops
    assert [g.k for g in wave.groups_of(ops)] == [256, 64], "a group without results has no tile"
    empty = mg.GroupedGemmProblem([half(0, 64)], [half(64, 8)])
    wave.bind(stage(empty, staged_spec(empty), allocate(empty)).ops, configs.WAVE, (0, WAVE_KERNELS), 132)()
    assert "cuLaunchKernelEx" not in fake.calls


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({}, "jagged_m"),
        ({"form": "batched", "groups": 17}, "at most 16"),
        ({"form": "batched", "activation": "relu"}, "an epilogue"),
        ({"form": "batched", "out": replace(BF16, order="col")}, "by columns"),
        ({"form": "batched", "a": replace(BF16, align=2, wide=True)}, "2^31"),
    ],
    ids=str,
)
def test_the_wave_kernel_says_what_it_cannot_do(change: dict[str, object], word: str) -> None:
    assert any(word in reason for reason in specs.wave_reasons(replace(SPEC, **change)))  # type: ignore[arg-type]


def test_every_width_of_the_shifted_weights_is_one_instruction() -> None:
    text = fragments.text()
    assert all(f"m64n{n}k16.f32.bf16.bf16" in text and f"m64n{n}k16.f32.f16.f16" in text for n in range(32, 257, 32))
