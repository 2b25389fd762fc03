"""Which config the cupy backend takes for what, and which it refuses; none of it needs a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from multigemm.backends.cupy import BACKEND, choice, hopper, rules, small_list, support
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.cuda.device import FITTED_PROCESSORS, first_gpu_processors
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import OperandSpec, ProblemSpec
from multigemm.testing import Limits
from multigemm.testing.placed_case import spec_of
from multigemm.testing.strategies import kinds
from tests.support.cupy_world import BF16, GPU, ODD, SPEC, batch

Change = dict[str, Any]
COLUMNS = replace(BF16, order="col")
STRIDED = replace(BF16, order="strided")
ODD_B = {"b": ODD["b"]}
LIST = {"form": "per_group", "n": None, "k": None}
JAGGED_K = {"form": "jagged_k", "k": None, "a": COLUMNS}
COLUMNS_OF_12: Change = {"form": "jagged_n", "groups": 12, "m": 7136, "n": None, "k": 104, "b": replace(BF16, align=8)}
TF32: Change = {"compute": torch.float32, "precision": "tf32", **dict.fromkeys("ab", OperandSpec(torch.float32))}
INT8: Change = {"compute": torch.int8, **dict.fromkeys("ab", OperandSpec(torch.int8))}
TF32["out"], INT8["out"] = OperandSpec(torch.float32), OperandSpec(torch.int32)


def spec(**change: Any) -> ProblemSpec:
    return replace(SPEC, **change)


# Classes that the kept reports do not have; test_choices_in_reports.py holds the others to their times.


@pytest.mark.parametrize(
    ("groups", "kernel", "rows"),
    [(4, "packed", 256), (16, "hopper_shift_b", 256), (32, "hopper_shift_b", 256), (256, "hopper_shift_b", 64)],
)
def test_odd_weights_are_copied_for_many_rows_and_shifted_for_few(groups: int, kernel: str, rows: int) -> None:
    best = choice.heuristic(spec(groups=groups, **ODD))
    assert (best.kernel, best.rows) == (kernel, rows)
    assert choice.heuristic(spec(groups=groups, a=ODD["a"])).kernel == "packed", "odd rows alone are copied anyway"


@pytest.mark.parametrize(
    ("problem", "best"),
    [
        # Few tiles whose lines begin anywhere: the small kernel.
        (spec(**ODD, groups=6, n=93, k=265, total=256), configs.SMALL_DEEP),
        (spec(**ODD, groups=3, n=209, k=91, total=128), configs.SMALL_32),
        (spec(**{**ODD, "b": STRIDED}, groups=64, n=128, k=60, total=2048), configs.GENERIC_64),
        (spec(**ODD, groups=16, n=500, k=1001, total=64), configs.SHIFT_B_NARROW),
        # One round of results of little k: low tiles, stored by single blocks.
        (spec(**JAGGED_K, groups=12, total=256, m=384, n=320), configs.SMALL_64),
        (spec(**JAGGED_K, groups=12, total=4096, m=512, n=192), configs.SINGLE),
        (spec(**JAGGED_K, m=5632, n=2048, total=32 * 128), configs.ALONE),
        (spec(**JAGGED_K, m=5632, n=2048, total=32 * 256), configs.WIDE),
        # 33 to 64 rows per group: the lowest tiles if they are one round.
        (spec(groups=8, n=1280, k=2240, total=512), configs.SLIM),
        (spec(groups=4, n=4288, k=1344, total=256), configs.MIDDLE),
        # Rows behind a mask: no group is larger than the average one.
        (spec(form="masked", groups=24, n=1280, k=2240, total=1024), configs.MIDDLE),
        (spec(groups=24, n=1280, k=2240, total=1024), configs.WIDE),
        # Gradients that one round of the lowest or of low tiles covers, whatever their k.
        (spec(**JAGGED_K, groups=4, total=16384, m=640, n=200), configs.SLIM),
        (spec(**JAGGED_K, groups=4, total=4096, m=1536, n=200), configs.SINGLE),
        # An odd number of blocks of columns: no clusters. Few rows on half of the multiprocessors: the lowest tiles.
        (spec(groups=128, n=320, k=256, total=8192), configs.SINGLE),
        (spec(groups=4, n=1544, k=3872, total=16), configs.SLIM),
        # Many results of little k: low tiles, while they are few rounds.
        (spec(**JAGGED_K, groups=256, total=16384, m=128, n=256), configs.SINGLE),
        (spec(**JAGGED_K, groups=256, total=32768, m=256, n=512), configs.ALONE),
        # Few columns of a jagged n, whose tiles are mostly empty: the columns are copied.
        (spec(**COLUMNS_OF_12, total=16), replace(configs.SLIM, kernel="packed")),
        (spec(**{**COLUMNS_OF_12, "m": 512}, total=16), configs.SMALL_32),
        (spec(**ODD, groups=64, n=500, k=101, total=64), configs.SHIFT_B_NARROW),
        # Few columns of many rows: the rows are shifted.
        (spec(**ODD, groups=14, n=66, k=7378, total=32768), configs.SHIFT_A_MIDDLE),
        (spec(**ODD, groups=19, n=453, k=4130, total=32768), configs.SHIFT_A),
        # Two rounds of tall tiles of a short k.
        (spec(**ODD, groups=8, n=1023, k=1023, total=8192), replace(configs.SINGLE, kernel="packed")),
        # Rows of results at any address: warpgroups in turns, which store 128 columns at once, unless there are fewer.
        (spec(groups=4, n=1047, k=2047, total=16384, **ODD, out=ODD["a"]), replace(configs.TURNS, kernel="packed")),
        (spec(groups=32, n=2051, k=256, total=8192, out=ODD["a"]), configs.TURNS),
        (spec(groups=14, n=50, k=1208, total=65536, out=ODD["a"]), configs.ALONE),
        (spec(form="batched", total=8000, groups=8, m=1000, n=1001, k=201, **ODD, out=ODD["a"]), configs.SMALL_LIST),
        (
            spec(form="batched", total=32000, groups=16, m=2000, n=2001, k=201, **ODD, out=ODD["a"]),
            replace(configs.TURNS, kernel="packed"),
        ),
    ],
    ids=str,
)
def test_the_best_config_of_other_classes(problem: ProblemSpec, best: Config) -> None:
    assert choice.heuristic(problem) == best
    if problem.form == "jagged_k":
        assert choice.heuristic(replace(problem, **ODD)) not in (configs.SINGLE, configs.SMALL_64)  # type: ignore[arg-type]


def test_rounds_are_those_of_the_gpu_that_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """96 low tiles are one round on an H100, and on a GPU of 78 multiprocessors more than one."""
    problem, found = spec(**JAGGED_K, groups=12, total=4096, m=512, n=192), list[Config]()
    for count in (78, FITTED_PROCESSORS):
        monkeypatch.setattr(rules, "first_gpu_processors", lambda count=count: count)
        for kept in (choice.ranked, rules.layout_of):
            kept.cache_clear()
        found.append(choice.heuristic(problem))
    assert first_gpu_processors() == FITTED_PROCESSORS or torch.cuda.is_available()
    assert found[1] == configs.SINGLE != found[0]


def test_each_kind_has_a_tile_that_fits_everywhere() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.int8):
        for precision in ("ieee", "tf32"):
            problem = spec(a=OperandSpec(dtype), b=OperandSpec(dtype), compute=dtype, precision=precision)
            assert any(configs.tile_fits(problem, side, (8, 6)) for side in configs.shapes_of(problem))
            assert choice.heuristic(problem, (8, 6)).kernel == "generic"


def test_aligned_bfloat16_goes_to_the_hopper_kernel_and_only_there_on_hopper() -> None:
    best = choice.heuristic(SPEC, (9, 0))
    assert best.kernel == "hopper" and is_valid(best, SPEC, (9, 0)) and not is_valid(best, SPEC, (8, 0))
    assert choice.heuristic(SPEC, (8, 0)).kernel == choice.heuristic(SPEC, (10, 0)).kernel == "generic"


@pytest.mark.parametrize(
    "change",
    [
        {"groups": support.MAX_GROUPS + 1},
        {"groups": 0},
        {"form": "masked", "out": COLUMNS},
        {"compute": torch.float64, "out": OperandSpec(torch.float64), "activation": "relu"},
        {**JAGGED_K, "m": 512, "total": 1 << 31},
    ],
    ids=str,
)
def test_what_tma_cannot_read_goes_to_the_generic_kernel_and_says_why(change: dict[str, Any]) -> None:
    problem = spec(**change)
    assert support.hopper_reasons(problem)
    assert choice.heuristic(problem).kernel == "generic"
    assert {c.kernel for c in choice.candidates(problem, GPU)} <= {"generic", "small"}


@pytest.mark.parametrize(
    "change",
    [
        {"a": replace(BF16, align=8)},
        {"b": STRIDED},
        {"a": replace(BF16, dense=False)},
        {"form": "jagged_k"},
        {"form": "per_group", "a": replace(BF16, align=8)},
    ],
    ids=str,
)
def test_large_unreadable_operands_are_copied_and_small_ones_are_not(change: dict[str, Any]) -> None:
    problem = spec(**change)
    copied = support.packed_spec(problem)
    assert support.hopper_reasons(problem) and not support.hopper_reasons(copied)
    assert choice.heuristic(problem).kernel == "packed"
    assert choice.heuristic(replace(problem, total=64, n=64, k=64)).kernel in ("generic", "small")
    assert support.packed_spec(copied) == copied and support.packed_reasons(SPEC)


@pytest.mark.parametrize(
    "change", [{}, {"form": "per_group"}, {"n": 128, "k": 256}, ODD_B, ODD, LIST, TF32, INT8], ids=str
)
def test_a_layouts_family_holds_every_choice_for_other_counts(change: dict[str, Any]) -> None:
    problem = spec(**change)
    members = choice.first_choices(problem, (9, 0))
    for total in (0, 1, 37, 128, 300, 2048, 5000, 1 << 13, 1 << 17):
        for groups in (1, 3, 4, 40, 700):
            for largest in (64, 128, 640, 1408, 4096) if problem.form == "per_group" else (0,):
                bucket = 1 << (total - 1).bit_length() if total else 0
                other = replace(problem, total=bucket, groups=groups, largest=largest)
                assert choice.heuristic(other) in members


def test_all_kernels_for_small_lists_are_compiled_before_any_size_is_known() -> None:
    first, *heights = configs.SMALL_LISTS
    assert first in choice.first_choices(batch(**LIST, largest=512), (9, 0))
    assert small_list.heights(first) == tuple(heights) and small_list.heights(heights[0]) == (heights[0],)


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, True),
        ({"m": 129, "n": 64}, True),
        ({"m": 64, "n": 129, "out": COLUMNS}, True),
        ({"n": 129}, False),
        ({"out": replace(BF16, align=8)}, False),
        ({"out": STRIDED}, False),
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
    problem = spec(**{"form": "jagged_k", "m": 256, "a": COLUMNS, **changes})
    assert support.sends(problem) is sent
    assert dict(hopper.source(problem, configs.WIDE).defines)["SEND"] == int(sent)
    many = replace(problem, groups=256, total=4096 * 256)
    takes_turns = not sent and support.plain_kind(problem) > 0
    assert choice.heuristic(many) == (configs.TURNS if takes_turns else configs.WIDE)


@pytest.mark.parametrize(
    ("groups", "k", "rows", "columns", "best"),
    [
        (32, 512, 2880, 5760, configs.TURNS),  # gpt-oss-20b: 15 tiles of 192 rows, where 12 of 256 leave 192 empty
        (configs.TURNS_GROUPS, 512, 2880, 5760, configs.TURNS),
        (configs.TURNS_GROUPS + 1, 512, 2880, 5760, configs.WIDE),  # more than the schedule holds
        (64, 512, 192, 2048, configs.WIDE),  # one tile of either, not measured
    ],
)
def test_tall_results_of_jagged_k_are_multiplied_in_turns_where_that_takes_less(
    groups: int, k: int, rows: int, columns: int, best: Config
) -> None:
    more: Change = {**JAGGED_K, "groups": groups, "total": groups * k}
    assert choice.heuristic(spec(**more, m=rows, n=columns)) == best
    assert choice.heuristic(spec(**more, m=columns, n=rows, out=COLUMNS)) == best, "the sides swap"
    assert best in choice.first_choices(spec(**more, m=rows, n=columns), (9, 0))


def test_the_sides_swap_where_rows_are_contiguous_in_the_result() -> None:
    column = spec(form="batched", out=COLUMNS)
    assert hopper.roles(SPEC) == (False, True, False)
    assert hopper.roles(column) == (True, False, True)
    assert hopper.roles(spec(form="jagged_n")).swapped
    assert support.plain_kind(SPEC) == support.plain_kind(column) == 1
    assert support.plain_kind(spec(form="jagged_n")) == support.plain_kind(spec(out=COLUMNS)) == 2
    assert support.plain_kind(spec(activation="relu")) == 0


def test_every_candidate_fits_into_shared_memory() -> None:
    for config in choice.candidates(SPEC, GPU):
        assert is_valid(config, SPEC)
        assert config.kernel == "generic" or config.shared_bytes(True) <= configs.SHARED_LIMIT
    assert not is_valid(Config("hopper", rows=256, stages=5, cluster=2), SPEC)
    assert not is_valid(Config("hopper", rows=200, stages=3, cluster=2), SPEC)
    assert not is_valid(Config(blocks_per_sm=4), SPEC)
    assert not is_valid(configs.GENERIC_32, SPEC), "16 bits have a kernel of their own for low tiles"


def test_stages_of_shifted_weights_hold_more_of_each_line() -> None:
    for rows, most in ((256, 4), (192, 4), (128, 5), (64, 7)):
        fitting = Config("hopper_shift_b", rows=rows, stages=most, cluster=2, step=8)
        assert is_valid(fitting, spec(**ODD_B))
        for stages in range(most + 1, 40):
            assert not is_valid(replace(fitting, stages=stages), spec(**ODD_B)), (rows, stages)


def test_stages_of_many_heights_need_a_ring_of_three() -> None:
    """With two, a warp waited for room that consumers gave back after the stage that it was to load."""
    for rows, least in ((256, 3), (192, 3), (128, 2), (64, 2)):
        fitting = Config("hopper", rows=rows, stages=least)
        assert is_valid(fitting, SPEC) and not is_valid(replace(fitting, stages=least - 1), SPEC)


def across(kind: Change, *names: str) -> Change:
    """The kind with operands whose columns are contiguous in a, or rows in b turned into columns."""
    return kind | {name: replace(kind[name], order="col") for name in names}


@pytest.mark.parametrize("kind", [TF32, INT8], ids=["tf32", "int8"])
def test_words_go_to_the_hopper_kernel_with_copies_of_rows_that_lie_across_k(kind: Change) -> None:
    along, turned, rows = spec(**across(kind, "b")), spec(**kind), spec(**across(kind, "a", "b"))
    ragged = spec(**across(kind, "a"), form="jagged_k", k=None, m=4096)
    assert not support.turns_weights(along) and support.turns_weights(turned)
    assert is_valid(configs.TURNS, along) and not is_valid(configs.TURNS, turned) and is_valid(configs.WIDE, turned)
    assert not is_valid(replace(configs.WIDE, step=8), along), "wgmma of int8 has no such widths"
    copied = support.packed_spec(rows)
    assert support.hopper_reasons(rows) and not support.packed_reasons(rows) and not support.hopper_reasons(copied)
    assert (copied.a.order, copied.b.order) == ("row", "col")
    assert support.hopper_reasons(ragged) and not support.packed_reasons(ragged)
    assert support.packed_spec(ragged).a.order == "row" and support.packed_spec(ragged).b == ragged.b
    packed = replace(configs.TURNS, kernel="packed")
    lines = spec(**across(kind, "a", "b"), form="jagged_k", k=None, m=4096)
    assert is_valid(packed, rows) and not is_valid(packed, ragged), "weights across k go through registers"
    assert not is_valid(packed, lines) and is_valid(replace(configs.WIDE, kernel="packed"), lines)
    for problem in (along, turned, rows, ragged):
        heavy = replace(problem, total=1 << 14)
        copies = problem in (rows, ragged)
        assert choice.heuristic(heavy).kernel == ("packed" if copies else "hopper")
        assert (
            choice.heuristic(replace(problem, total=1, n=64, m=problem.m and 64, k=problem.k and 64)).kernel
            == "generic"
        )
        assert choice.heuristic(replace(heavy, batch_invariant=True)).kernel == (
            "generic" if kind is TF32 else choice.heuristic(heavy).kernel
        )


@pytest.mark.parametrize("kind", [TF32, INT8], ids=["tf32", "int8"])
@pytest.mark.parametrize(
    ("change", "along", "across_k"),
    [
        ({"groups": 8, "total": 16384, "n": 2048, "k": 2048}, configs.TURNS, configs.WIDE),
        ({"groups": 128, "total": 8192, "n": 768, "k": 2048}, configs.TURNS, configs.MIDDLE),
        ({"groups": 4, "total": 256, "n": 512, "k": 256}, configs.SLIM, configs.SLIM),
        ({"groups": 4, "total": 2048, "n": 512, "k": 512}, configs.SLIM, configs.SLIM),
    ],
    ids=str,
)
def test_words_have_the_tiles_that_were_measured_to_be_fastest(
    change: Change, along: Config, across_k: Config, kind: Change
) -> None:
    assert choice.heuristic(spec(**across(kind, "b"), **change)) == along
    assert choice.heuristic(spec(**kind, **change)) == across_k


def test_the_kernels_key_knows_no_sizes() -> None:
    grown = spec(groups=64, n=1024, k=512, total=1 << 20)
    assert hopper.source(SPEC, configs.WIDE) == hopper.source(grown, configs.WIDE)


def test_a_wrong_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(InvalidSetting, match="cannot run"):
        BACKEND.plan(SPEC, configs.WIDE, GPU)


SHIFT_A, SHIFT_B, SMALL_LIST = support.shift_a_reasons, support.shift_b_reasons, support.small_list_reasons
ODD_A = {"a": replace(BF16, align=2)}


@pytest.mark.parametrize(
    ("reasons_of", "change", "word"),
    [
        (SHIFT_B, {}, "nothing needs shifting"),
        (SHIFT_B, {"form": "jagged_k", **ODD_B}, "jagged k"),
        (SHIFT_B, {"b": STRIDED}, "strided"),
        (SHIFT_B, {"b": replace(BF16, align=2, dense=False)}, "contiguous direction"),
        (SHIFT_B, {"b": replace(BF16, align=2, wide=True), "n": 33}, "short lines"),
        (SHIFT_B, {**ODD_B, "a": replace(BF16, align=2, wide=True)}, "not copied"),
        (SHIFT_A, {}, "nothing needs shifting"),
        (SHIFT_A, {"form": "batched", **ODD_A}, "jagged m"),
        (SHIFT_A, {"activation": "relu", **ODD_A}, "an epilogue"),
        (SHIFT_A, {"a": replace(BF16, align=2, wide=True)}, "2^31"),
        (SHIFT_A, {**ODD_A, "b": replace(BF16, align=2, wide=True)}, "not copied"),
        (SMALL_LIST, {}, "jagged_m"),
        (SMALL_LIST, {"form": "batched", "groups": 17}, "at most 16"),
        (SMALL_LIST, {"form": "batched", "activation": "relu"}, "an epilogue"),
        (SMALL_LIST, {"form": "batched", "out": COLUMNS}, "by columns"),
        (SMALL_LIST, {"form": "batched", "a": replace(BF16, align=2, wide=True)}, "2^31"),
    ],
    ids=lambda x: x.__name__ if callable(x) else str(x),
)
def test_a_kernel_says_what_it_cannot_do(reasons_of: Any, change: dict[str, Any], word: str) -> None:
    assert any(word in reason for reason in reasons_of(spec(**change)))


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        (Limits(work=1 << 17, fused=1), {"hopper", "gathered", "hopper_gather", "gate of rows across k"}),
        (Limits(work=1 << 17, quantised=1), {"hopper_fp8", "hopper_weights"}),
    ],
    ids=["fused", "quantised"],
)
def test_campaigns_draw_what_kernels_for_hopper_take(limits: Limits, wanted: set[str]) -> None:
    found = Counter[str]()
    for case in kinds(limits, 150, 3):
        if not (case.is_fused or case.quantised):
            continue
        taken = {config.kernel for config in choice.ranked(spec_of(case), (9, 0))} & wanted
        found.update(taken)
        if taken and case.gated and case.form == "jagged_m" and case.a.order == "col":
            found["gate of rows across k"] += 1
    assert all(found[what] >= 2 for what in wanted), found
