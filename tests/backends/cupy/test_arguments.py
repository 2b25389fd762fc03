"""What cupy's kernels are handed: the argument block, tensor maps, a list's groups; none of it needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import arguments, small, support
from multigemm.backends.cupy import config as configs
from multigemm.cuda import operand_maps
from multigemm.cuda.arguments import JAGGED_CODES, Fields, fields
from multigemm.cuda.tensor_map import NO_SWIZZLE, PROMOTION_128B
from multigemm.planning.operands import Operands, view_of
from multigemm.problem.spec import OperandSpec
from tests.support.cuda_driver import FakeDriver, arguments_of, steps_of
from tests.support.cupy_world import SPEC, bound, install
from tests.support.small_problems import operands, staged


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.mark.parametrize("rows", [1, 7, 8, 9, 63, 255, 256, 257, 417, 2049, 9921, 100000])
@pytest.mark.parametrize("most", [64, 128, 256])
def test_pieces_are_few_equal_and_waste_less_than_a_step_each(rows: int, most: int) -> None:
    height = arguments.piece_height(rows, most)
    pieces = -(-rows // height)
    assert height % 8 == 0 and 8 <= height <= most
    assert pieces <= -(-rows // most) and pieces * height - rows < 8 * (pieces + 1)
    assert 2 * arguments.list_box(rows, most, 2) >= height
    assert arguments.list_box(rows, most, 1) == height


def test_weights_across_k_are_asked_of_memory_128_bytes_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, int]] = []

    def encode(*args: Any, **modes: int) -> Fields:
        seen.append(modes)
        return fields(b"", ())

    for module in (arguments, operand_maps):
        monkeypatch.setattr(module, "encode_together", encode)
    side = operand_maps.Side(1 << 40, 96, 64, 3, 192, 64 * 192, False, torch.bfloat16)
    for given in (side, side._replace(k_contiguous=True)):
        operand_maps.plain_map(given, 128)
        arguments.gate_map(given, interleaved=False)
    across = {"promotion": PROMOTION_128B}
    assert seen == [across, across, {}, {}], "256 bytes along k, where they hold the next block"


def test_the_results_map_counts_rows_back_from_a_groups_end(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*args: Any) -> Fields:
        seen.append(args)
        return fields(b"", ())

    monkeypatch.setattr(operand_maps, "encode_together", encode)
    side = operand_maps.Side(1 << 40, 96, 50, 3, 192, 50 * 192, False, torch.bfloat16)
    operand_maps.result_map(side)
    ((_, start, dims, strides, (box,)),) = seen
    assert box == (64, 64, 1, 1, 1) and dims[0] == 96 and dims[1] == operand_maps.FAR and dims[4] == 3
    assert all(step % 16 == 0 and step < 1 << 40 for step in strides)
    for group, end, left, row in ((0, 50, 50, 0), (2, 41, 9, 8), (1, 7, 1, 0)):
        at = (operand_maps.FAR - left + row, end, operand_maps.FAR, group)
        assert all(0 <= x < size for x, size in zip(at, dims[1:], strict=True)), "the last row still exists"
        address = start + sum(x * step for x, step in zip(at, strides, strict=True))
        assert address % 2**64 == start + (end - left + row) * 192 + group * 50 * 192


def test_the_argument_block_has_the_layout_of_the_struct() -> None:
    a, b, out = torch.zeros(6, 4), torch.zeros(2, 4, 8), torch.zeros(6, 8)
    spec = replace(SPEC, groups=2, compute=torch.float32, a=OperandSpec(torch.float32), out=OperandSpec(torch.float32))
    ops = Operands(spec, a, b, out, ends=torch.tensor([2, 6]), alpha=2.0)
    raw = arguments.problem_bytes(ops, None, view_of(ops))
    assert len(raw) == arguments.PROBLEM.size == 272
    words = np.frombuffer(raw, dtype=np.int64)
    assert words[:8].tolist() == [a.data_ptr(), 0, 4, 1, b.data_ptr(), 32, 8, 1]
    assert np.frombuffer(raw, dtype=np.float64)[23] == 2.0 and words[25:28].tolist() == [6, 8, 4]
    assert np.frombuffer(raw[224:], dtype=np.int32)[:3].tolist() == [2, JAGGED_CODES["m"], 1]


def test_a_lists_groups_become_the_small_kernels_argument() -> None:
    raw, tiles = small._listed(operands("per_group"), 32)
    assert len(raw) == small.LISTED.size and tiles == 2 * 4 + 1 * 4
    numbers = np.frombuffer(raw[: 5 * support.MAX_LISTED_GROUPS * 4], dtype=np.int32).reshape(
        5, support.MAX_LISTED_GROUPS
    )
    assert numbers[:, 0].tolist() == [0, 4, 48, 128, 64] and numbers[:, 1].tolist() == [8, 4, 8, 128, 64]
    assert (numbers[0, 2:] == small.NEVER).all()


@pytest.mark.parametrize(("offset", "pitch"), [(0, 14), (3, 22), (5, 32), (7, 2 * 1023)])
@pytest.mark.parametrize("count", [1, 5, 8, 77])
def test_eight_maps_find_every_line(offset: int, pitch: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*call: Any, swizzle: int, promotion: int) -> Fields:
        seen.append((*call, swizzle))
        return fields(b"", ())

    monkeypatch.setattr(arguments, "encode_together", encode)
    start, length = 4096 + 2 * offset, 7
    arguments.weight_maps(arguments.Lines(start, pitch, count, length, torch.bfloat16), 160, 8)
    assert len(seen) == 8
    for line in range(count):
        _, base, (width, lines, one), (step, _), boxes, swizzle = seen[line & 7]
        shift = ((start + (line & 7) * pitch) & 15) >> 1  # as in hopper_shift_b.cu
        assert base % 16 == step % 16 == 0 and (boxes, one, swizzle) == (((160, 8, 1),), 1, NO_SWIZZLE)
        assert base + step * (line >> 3) + 2 * shift == start + line * pitch
        assert width == shift + length and (line >> 3) < lines
    assert [lines for _, _, (_, lines, _), *_ in seen] == [max((count - i + 7) // 8, 1) for i in range(8)]


def test_tensor_maps_are_encoded_once_for_all_heights(fake: FakeDriver) -> None:
    launch = bound(configs.WIDE, operands("jagged_m"))
    assert fake.encodings == 1 + 16 + 1
    (step,) = steps_of(launch)
    rows = np.frombuffer(arguments_of(launch)[0], dtype=np.uint64)[-18 * 16 :].reshape(18, 16)
    assert [int(row[11]) >> 32 for row in rows[1:17]] == [8 * (i + 1) for i in range(16)]
    assert sum(len(slots) for _, slots in step._block._slots) == 4 + 3, "the maps of all heights are one slot"


def test_one_b_for_all_groups_needs_no_tile_per_group() -> None:
    x, w = torch.zeros(70, 64, dtype=torch.bfloat16), torch.zeros(64, 100, dtype=torch.bfloat16)
    view = view_of(staged(mg.GroupedGemmProblem(x, w, ends=torch.tensor([8, 24, 70]))))
    assert small._grid(view, view.m, 32, True) == (4, 3, 1)
    assert small._grid(view, view.m, 32, False) == (4, 6, 1)
