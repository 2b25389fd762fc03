"""The cupy backend on a laptop: reasons, and which kernel runs what; none of it needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import (
    BACKEND,
    arguments,
    choice,
    small,
    small_list,
    support,
)
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.spec import GIANT, OperandSpec
from tests.support.cuda_driver import FakeDriver
from tests.support.cupy_world import BF16, GPU, ODD, SPEC, batch, install


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


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
    best = choice.heuristic(SPEC, (9, 0))
    assert best.kernel == "hopper" and is_valid(best, SPEC, (9, 0)) and not is_valid(best, SPEC, (8, 0))
    assert choice.heuristic(SPEC, (8, 0)).kernel == choice.heuristic(SPEC, (10, 0)).kernel == "generic"


@pytest.mark.parametrize(
    "change",
    [
        {"groups": support.MAX_GROUPS + 1},
        {"groups": 0},
        {"form": "masked", "out": replace(BF16, order="col")},
        {"compute": torch.float64, "out": OperandSpec(torch.float64)},
    ],
    ids=str,
)
def test_what_tma_cannot_read_goes_to_the_portable_kernel_and_says_why(change: dict[str, object]) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    assert support.hopper_reasons(spec)
    assert choice.heuristic(spec).kernel == "generic"
    assert {c.kernel for c in choice.candidates(spec, GPU)} <= {"generic", "small"}


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
    assert choice.heuristic(spec).tile == tile
    assert {c.tile for c in choice.candidates(spec, GPU)} == {32, 64, 128}
    assert not is_valid(configs.GENERIC_32, SPEC), "16 bits have a kernel of their own for low tiles"


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
    copied = support.packed_spec(spec)
    assert support.hopper_reasons(spec) and not support.hopper_reasons(copied)
    assert choice.heuristic(spec).kernel == "packed"
    assert choice.heuristic(replace(spec, total=64, n=64, k=64)).kernel in ("generic", "small")
    assert support.packed_spec(copied) == copied and support.packed_reasons(SPEC)


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
    best = choice.heuristic(replace(SPEC, **change))  # type: ignore[arg-type]
    assert (best.kernel, best.tile) == kernel


@pytest.mark.parametrize(
    ("change", "best"),
    [
        ({"groups": 6, "n": 93, "k": 265, "total": 256}, configs.SMALL_DEEP),
        ({"groups": 3, "n": 209, "k": 91, "total": 128}, configs.SMALL_32),
        ({"groups": 6, "n": 2149, "k": 220, "total": 32}, configs.SMALL_32),
        ({"groups": 2, "n": 50, "k": 60, "total": 4096, "bias": torch.float32}, configs.SMALL_32),
        ({"form": "jagged_k", "groups": 6, "m": 225, "n": 111, "k": None, "total": 128}, configs.SMALL_32),
        ({"groups": 64, "n": 128, "k": 60, "total": 2048, "b": replace(BF16, order="strided")}, configs.GENERIC_64),
        ({"groups": 8, "n": 800, "k": 15, "total": 1024}, configs.GENERIC_64),
        ({"groups": 16, "n": 500, "k": 1001, "total": 64}, configs.SHIFT_B_MIDDLE),
    ],
    ids=str,
)
def test_few_tiles_whose_lines_begin_anywhere_take_the_small_kernel(change: dict[str, Any], best: Config) -> None:
    assert choice.heuristic(replace(SPEC, **{**ODD, **change})) == best


@pytest.mark.parametrize(
    ("groups", "total", "m", "n", "best"),
    [
        (12, 256, 384, 320, configs.SMALL_64),
        (12, 4096, 512, 192, configs.SINGLE),
        (6, 8, 448, 640, configs.SINGLE),
        (4, 4096, 184, 128, configs.SMALL_32),
        (160, 1024, 960, 128, configs.ALONE),
        (8, 8192, 1024, 2048, configs.WIDE),
    ],
)
def test_one_round_of_results_of_little_k_takes_low_tiles(
    groups: int, total: int, m: int, n: int, best: Config
) -> None:
    order = {"a": replace(BF16, order="col"), "k": None, "form": "jagged_k"}
    spec = replace(SPEC, **order, groups=groups, total=total, m=m, n=n)  # type: ignore[arg-type]
    assert choice.heuristic(spec) == best
    assert choice.heuristic(replace(spec, **ODD)) not in (configs.SINGLE, configs.SMALL_64)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"m": 256, "n": 256, "k": 256, "total": 1024}, "small_list"),
        ({"m": 1024, "n": 1024, "k": 1024, "total": 4096}, "small_list"),
        ({"form": "per_group", "n": None, "k": None, "total": 2048, "largest": 1024}, "small_list"),
        ({"groups": 8, "m": 511, "n": 511, "k": 511, "total": 4096, "a": replace(BF16, align=2)}, "small_list"),
        ({"groups": 12, "m": 1500, "n": 777, "k": 333, "total": 32768, "b": replace(BF16, align=2)}, "small_list"),
        ({"groups": 8, "m": 1023, "n": 1023, "k": 1023, "total": 8192, "b": replace(BF16, align=2)}, "hopper_shift_b"),
        ({"groups": 16, "m": 1024, "n": 1024, "k": 1024, "total": 16384}, "small_list"),
        ({"groups": 16, "m": 1024, "n": 1032, "k": 1024, "total": 16384}, "hopper"),
        ({"groups": 12, "m": 1500, "n": 776, "k": 336, "total": 32768}, "hopper"),
        ({"groups": 16, "m": 8, "n": 1024, "k": 4096, "total": 128}, "hopper"),
        ({"groups": 16, "m": 64, "n": 2304, "k": 1024, "total": 1024}, "hopper"),
        ({"groups": 16, "m": 64, "n": 1024, "k": 1024, "total": 1024}, "small_list"),
    ],
    ids=str,
)
def test_lists_and_batches_of_few_rounds_have_a_kernel_of_their_own(change: dict[str, object], kernel: str) -> None:
    assert choice.heuristic(batch(**change)).kernel == kernel


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
    assert small_list.height_for(shapes, 132).rows == rows


def test_all_kernels_for_a_wave_are_compiled_before_any_size_is_known() -> None:
    assert configs.SMALL_LIST in choice.first_choices(batch(form="per_group", n=None, k=None, largest=512), (9, 0))
    assert (
        small_list.heights(configs.SMALL_LIST) == configs.SMALL_LISTS[1:]
        and small_list.heights(configs.SMALL_LISTS[1]) == configs.SMALL_LISTS[1:2]
    )


@pytest.mark.parametrize(
    ("groups", "kernel"),
    [(4, ("packed", 256)), (8, ("hopper_shift_b", 256)), (32, ("hopper_shift_b", 256)), (256, ("hopper_shift_b", 128))],
)
def test_odd_weights_are_copied_for_many_rows_and_shifted_for_few(groups: int, kernel: tuple[str, int]) -> None:
    odd = replace(SPEC, groups=groups, a=replace(BF16, align=2), b=replace(BF16, align=2))
    best = choice.heuristic(odd)
    assert (best.kernel, best.rows) == kernel
    assert choice.heuristic(replace(odd, b=BF16)).kernel == "packed", "only the rows are odd: they are copied anyway"


@pytest.mark.parametrize("columns", [1047, 1201, 3939])
def test_copies_of_many_rows_take_high_tiles_in_pairs_where_results_are_odd(columns: int) -> None:
    odd = replace(BF16, align=2)
    spec = replace(SPEC, groups=4, n=columns, k=2047, total=16384, a=odd, b=odd, out=odd)
    assert choice.heuristic(spec) == replace(configs.WIDE, kernel="packed")


def test_one_b_for_all_groups_needs_no_tile_per_group(fake: FakeDriver) -> None:
    x, w = torch.zeros(70, 64, dtype=torch.bfloat16), torch.zeros(64, 100, dtype=torch.bfloat16)
    problem = mg.GroupedGemmProblem(x, w, ends=torch.tensor([8, 24, 70]))
    view = arguments.view_of(stage(problem, staged_spec(problem), allocate(problem)).ops)
    assert small._grid(view, 32, True) == (4, 3, 1)
    assert small._grid(view, 32, False) == (4, 6, 1)


def test_every_candidate_fits_into_shared_memory() -> None:
    for config in choice.candidates(SPEC, GPU):
        assert is_valid(config, SPEC)
        assert config.kernel == "generic" or config.shared_bytes(True) <= configs.SHARED_LIMIT
    assert not is_valid(Config("hopper", rows=256, stages=5, cluster=2), SPEC)
    assert not is_valid(Config("hopper", rows=200, stages=3, cluster=2), SPEC)
    assert not is_valid(Config(blocks_per_sm=4), SPEC)
