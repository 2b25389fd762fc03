"""The cupy backend on a laptop: pieces, clusters, instructions and the argument block; none of it needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from multigemm.backends.cupy import (
    BACKEND,
    arguments,
    build,
    choice,
    hopper,
    support,
)
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.cuda.arguments import Fields, fields
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import Operands
from multigemm.problem.spec import OperandSpec
from tests.support.cupy_world import BF16, GPU, SPEC


def test_shifted_weights_need_two_stages_beside_those_of_the_rows() -> None:
    """Many stages of high rows leave weights no room, which once counted as less than no shared memory."""
    spec = replace(SPEC, b=replace(BF16, align=2))
    for rows, most in ((256, 4), (192, 6), (128, 9), (64, 18)):
        fitting = Config("hopper_shift_b", rows=rows, stages=most, cluster=2, step=8)
        assert fitting.weight_stages >= 2 and is_valid(fitting, spec)
        for stages in range(most + 1, 40):
            assert not is_valid(replace(fitting, stages=stages), spec), (rows, stages)


@pytest.mark.parametrize(
    ("total", "align", "rows"), [(256, 16, 128), (8192, 16, 256), (32768, 16, 256), (8192, 8, 256), (32768, 8, 192)]
)
def test_pieces_are_as_high_as_groups_have_rows(total: int, align: int, rows: int) -> None:
    spec = replace(SPEC, groups=64 if total == 256 else 32, total=total, out=replace(BF16, align=align))
    assert choice.heuristic(spec).rows == rows


@pytest.mark.parametrize(
    ("groups", "total", "n", "rows"),
    [(6, 2874, 320, 128), (16, 4096, 256, 128), (16, 4096, 2048, 256), (4, 4096, 4096, 256)],
)
def test_few_tall_tiles_become_more_lower_ones(groups: int, total: int, n: int, rows: int) -> None:
    best = choice.heuristic(replace(SPEC, groups=groups, total=total, n=n, k=1024))
    assert (best.rows, best.cluster) == (rows, 1 if rows == 128 else 2)


@pytest.mark.parametrize(
    ("n", "k", "rows_each", "rows", "cluster"),
    [(1408, 2816, 416, 256, 1), (1536, 2048, 416, 256, 2), (5760, 2880, 256, 256, 2), (2048, 4096, 64, 256, 2),
     (2048, 1024, 64, 128, 2), (2048, 1024, 4, 128, 1)],
)  # fmt: skip
def test_clusters_share_rows_unless_columns_are_odd_or_rows_few(
    n: int, k: int, rows_each: int, rows: int, cluster: int
) -> None:
    best = choice.heuristic(replace(SPEC, groups=48, total=48 * rows_each, n=n, k=k))
    assert (best.kernel, best.rows, best.cluster) == ("hopper", rows, cluster)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 63, 255, 256, 257, 417, 2049, 9921, 100000])
@pytest.mark.parametrize("most", [64, 128, 256])
def test_pieces_are_few_equal_and_waste_less_than_a_step_each(rows: int, most: int) -> None:
    height = arguments.piece_height(rows, most)
    pieces = -(-rows // height)
    assert height % 8 == 0 and 8 <= height <= most
    assert pieces <= -(-rows // most) and pieces * height - rows < 8 * (pieces + 1)
    assert 2 * arguments.list_box(rows, most, 2) >= height
    assert arguments.list_box(rows, most, 1) == height


def test_the_sides_swap_where_rows_are_contiguous_in_the_result() -> None:
    column = replace(SPEC, form="batched", out=replace(BF16, order="col"))
    assert hopper.roles(SPEC) == (False, True, False)
    assert hopper.roles(column) == (True, False, True)
    assert hopper.roles(replace(SPEC, form="jagged_n")).swapped
    assert support.plain_kind(SPEC) == support.plain_kind(column) == 1
    assert support.plain_kind(replace(SPEC, form="jagged_n")) == support.plain_kind(replace(SPEC, out=column.out)) == 2
    assert support.plain_kind(replace(SPEC, activation="relu")) == 0


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
    assert support.sends(spec) is sent
    assert dict(hopper.source(spec, configs.WIDE).defines)["SEND"] == int(sent)
    many = replace(spec, total=4096 * spec.groups)
    takes_turns = not sent and support.plain_kind(spec) > 0
    assert choice.heuristic(many) == (configs.TURNS if takes_turns else configs.WIDE)


def test_the_results_map_counts_rows_back_from_a_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> Fields:
        seen.append(args)
        return fields(b"", ())

    monkeypatch.setattr(arguments, "encode_together", encode)
    side = arguments.Side(1 << 40, 96, 50, 3, 192, 50 * 192, False, torch.bfloat16)
    arguments.result_map(side)
    ((_, start, dims, strides, (box,)),) = seen
    assert box == (64, 64, 1, 1, 1) and dims[0] == 96 and dims[1] == arguments.FAR and dims[4] == 3
    assert all(step % 16 == 0 and step < 1 << 40 for step in strides)
    for group, end, left, row in ((0, 50, 50, 0), (2, 41, 9, 8), (1, 7, 1, 0)):
        at = (arguments.FAR - left + row, end, arguments.FAR, group)
        assert all(0 <= x < size for x, size in zip(at, dims[1:], strict=True)), "the last row still exists"
        address = start + sum(x * step for x, step in zip(at, strides, strict=True))
        assert address % 2**64 == start + (end - left + row) * 192 + group * 50 * 192


def test_the_argument_block_has_the_layout_of_the_struct() -> None:
    a, b, out = torch.zeros(6, 4), torch.zeros(2, 4, 8), torch.zeros(6, 8)
    spec = replace(SPEC, groups=2, compute=torch.float32, a=OperandSpec(torch.float32), out=OperandSpec(torch.float32))
    ops = Operands(spec, a, b, out, ends=torch.tensor([2, 6]), alpha=2.0)
    raw = arguments.problem_bytes(ops, None, arguments.view_of(ops))
    assert len(raw) == arguments.PROBLEM.size == 272
    words = np.frombuffer(raw, dtype=np.int64)
    assert words[:8].tolist() == [a.data_ptr(), 0, 4, 1, b.data_ptr(), 32, 8, 1]
    assert np.frombuffer(raw, dtype=np.float64)[23] == 2.0 and words[25:28].tolist() == [6, 8, 4]
    assert np.frombuffer(raw[224:], dtype=np.int32)[:3].tolist() == [2, arguments.JAGGED["m"], 1]


def test_a_wrong_config_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    with pytest.raises(InvalidSetting, match="cannot run"):
        BACKEND.plan(SPEC, configs.WIDE, GPU)


def test_every_width_is_one_wgmma_instruction() -> None:
    text = build.mma_header()
    assert all(f"m64n{n}k16.f32.bf16.bf16" in text and f"m64n{n}k16.f32.f16.f16" in text for n in range(8, 257, 8))


@pytest.mark.parametrize(("total", "alone"), [(128, True), (32 * 128, True), (32 * 256, False)])
def test_results_of_little_k_are_stored_by_single_blocks(total: int, alone: bool) -> None:
    weights = replace(SPEC, form="jagged_k", m=5632, n=2048, k=None, total=total, a=replace(BF16, order="col"))
    assert (choice.heuristic(weights) == configs.ALONE) is alone


def test_every_width_of_the_shifted_weights_is_one_instruction() -> None:
    text = build.fragment_header()
    assert all(f"m64n{n}k16.f32.bf16.bf16" in text and f"m64n{n}k16.f32.f16.f16" in text for n in range(32, 257, 32))
