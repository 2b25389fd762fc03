"""The cupy backend binds and launches as far as the driver's door, on CPU tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import (
    direct,
    family,
    hopper,
    packing,
    params,
    portable,
    small,
    specs,
    tensor_maps,
)
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.backends.cupy.launch import _why
from multigemm.cuda import counters
from multigemm.planning.staging import allocate, stage, staged_spec
from tests.cupy_world import BF16, SPEC, FakeDriver, install, operands


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


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
