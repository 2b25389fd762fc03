"""The cupy backend binds and launches as far as the driver's door, on CPU tensors."""

from __future__ import annotations

import gc
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import BACKEND, arguments, build, choice, hopper, hopper_shift_b, small, support
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.backends.cupy.launch import KERNELS, why
from multigemm.cuda import counters
from multigemm.cuda.arguments import Fields, fields
from multigemm.cuda.tensor_map import NO_SWIZZLE, SIZE
from multigemm.planning.operands import Operands
from tests.support.cuda_driver import FakeDriver, addresses_of, arguments_of, steps_of
from tests.support.cupy_world import BF16, SPEC, bound, install, operands, staged


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched", "per_group"])
def test_a_bound_problem_launches_with_one_driver_call(form: str, fake: FakeDriver) -> None:
    launch = bound(configs.WIDE, operands(form))
    fake.calls.clear()
    launch()
    launch()
    assert fake.calls == ["cuLaunchKernelEx"] * 2


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched", "per_group", "odd"])
@pytest.mark.parametrize("config", [configs.GENERIC, configs.GENERIC_64], ids=["large", "small"])
def test_the_portable_kernel_binds_every_form(form: str, config: Config, fake: FakeDriver) -> None:
    launch = bound(config, operands(form))
    fake.calls.clear()
    launch()
    assert fake.calls == ["cuLaunchKernelEx"]


@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched", "per_group", "odd", "odd list"])
@pytest.mark.parametrize("config", [configs.SMALL_32, configs.SMALL_64, configs.SMALL_DEEP], ids=["32", "64", "deep"])
def test_the_small_kernel_binds_every_form(form: str, config: Config, fake: FakeDriver) -> None:
    ops = operands(form)
    odd = form in ("jagged_n", "odd", "odd list")
    assert not support.small_reasons(ops.spec) and support.has_odd_lines(ops.spec) is odd
    assert is_valid(config, ops.spec) is (odd or config != configs.SMALL_DEEP)
    launch = bound(config, ops)
    fake.calls.clear()
    launch()
    assert fake.calls == ["cuLaunchKernelEx"]


def test_a_lists_groups_become_the_small_kernels_argument() -> None:
    raw, tiles = small._listed(operands("per_group"), 32)
    assert len(raw) == small.LISTED.size and tiles == 2 * 4 + 1 * 4
    numbers = np.frombuffer(raw[: 5 * support.MAX_LISTED_GROUPS * 4], dtype=np.int32).reshape(
        5, support.MAX_LISTED_GROUPS
    )
    assert numbers[:, 0].tolist() == [0, 4, 48, 128, 64] and numbers[:, 1].tolist() == [8, 4, 8, 128, 64]
    assert (numbers[0, 2:] == small.NEVER).all()


def test_counters_come_back_and_may_run_out(fake: FakeDriver) -> None:
    launches = [bound(configs.WIDE, operands("batched")) for _ in range(5)]
    _, free = counters.pool(0, 8)
    assert not free
    launches.clear()
    gc.collect()
    assert sorted(free) == [0, 1, 2]


@pytest.mark.parametrize("kernel", ["hopper", "hopper_shift_b"])
def test_a_counter_that_a_graph_may_still_use_never_comes_back(kernel: str, fake: FakeDriver) -> None:
    def made() -> Any:
        if kernel == "hopper":
            return bound(configs.WIDE, operands("batched"))
        return bound(configs.SHIFT_B, operands("odd weights"))

    eager, captured = made(), made()
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
    assert support.packed_reasons(ops.spec) == []
    bound(replace(configs.WIDE, kernel="packed"), ops)()
    assert [step.kernel for step in fake.launched] == ["pack", "hopper"]


def test_copies_are_laid_out_one_after_the_other(fake: FakeDriver) -> None:
    ops = operands("odd list")
    copied, _, _ = hopper.with_copies(
        ops, arguments.view_of(ops), support.packed_spec(ops.spec), build.load(hopper.COPY_SOURCE, 0)
    )
    for given, copy in zip([*ops.a, *ops.b], [*copied.a, *copied.b], strict=True):
        assert copy.shape == given.shape and copy.stride(0) % 8 == 0 and copy.stride(1) == 1
        assert copy.stride(0) - given.shape[1] < 8 and copy.data_ptr() % 16 == 0
    copies = hopper._Copies()
    copies.add(torch.zeros(3, 70, 300, dtype=torch.bfloat16), BF16, "a")
    copies.add(torch.zeros(300, 70, dtype=torch.bfloat16).T, BF16, "b")
    first, second = (hopper.COPY_RECORD.unpack(record) for record in copies.records)
    assert first[-1] == 0 and second[-1] == 3 * 3 * 2 and copies.units == second[-1] + 2 * 5


@pytest.mark.parametrize("form", ["odd list", "odd weights"])
@pytest.mark.parametrize("config", [configs.SHIFT_B, configs.SHIFT_B_MIDDLE, configs.SHIFT_B_NARROW], ids=str)
def test_the_direct_kernel_copies_rows_at_most(form: str, config: Config, fake: FakeDriver) -> None:
    ops = operands(form)
    assert is_valid(config, ops.spec), support.shift_b_reasons(ops.spec)
    bound(config, ops)()
    assert [step.kernel for step in fake.launched] == ["pack"] * (form != "odd weights") + ["hopper_shift_b"]


def test_weights_that_are_no_whole_number_of_lines_apart_are_copied(fake: FakeDriver) -> None:
    x, memory = torch.zeros(3, 16, 64, dtype=torch.bfloat16), torch.zeros(8000, dtype=torch.bfloat16)
    for group, copies in ((64 * 33, 0), (66 * 33, 0), (64 * 33 + 1, 1)):
        problem = mg.GroupedGemmProblem(x, memory.as_strided((3, 64, 33), (group, 33, 1)))
        fake.launched.clear()
        bound(configs.SHIFT_B, staged(problem))()
        assert [step.kernel for step in fake.launched] == ["pack"] * copies + ["hopper_shift_b"]


def test_wide_weights_that_are_no_whole_number_of_lines_apart_are_read_where_they_lie(fake: FakeDriver) -> None:
    """A copy of 2^31 elements is more memory than a product may take without being asked."""
    x, memory = torch.zeros(3, 64, 64, dtype=torch.bfloat16), torch.zeros(16000, dtype=torch.bfloat16)
    for group, kernel in ((64 * 65, "hopper_shift_b"), (64 * 65 + 1, "generic")):
        problem = mg.GroupedGemmProblem(x, memory.as_strided((3, 64, 65), (group, 65, 1)))
        ops = staged(problem)
        ops = replace(ops, spec=replace(ops.spec, b=replace(ops.spec.b, wide=True)))
        assert is_valid(configs.SHIFT_B, ops.spec)
        bound(configs.SHIFT_B, ops)()
        assert fake.launched.pop().kernel == kernel and not fake.launched
        assert "generic" in why(ops.spec, configs.SHIFT_B)


def test_only_wide_weights_may_need_the_portable_kernel_beside_the_one_that_shifts() -> None:
    spec = replace(SPEC, b=replace(BF16, align=2))
    assert [source.entry for source in hopper_shift_b.sources(spec, configs.SHIFT_B)] == ["hopper_shift_b", "pack"]
    wide = replace(spec, b=replace(spec.b, wide=True))
    assert [source.entry for source in hopper_shift_b.sources(wide, configs.SHIFT_B)] == [
        "hopper_shift_b",
        "pack",
        "generic",
    ]
    assert "generic" not in why(spec, configs.SHIFT_B)


@pytest.mark.parametrize(("offset", "pitch"), [(0, 14), (3, 22), (5, 32), (7, 2 * 1023)])
@pytest.mark.parametrize("count", [1, 5, 8, 77])
def test_eight_maps_find_every_line(offset: int, pitch: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Any, ...]] = []

    def encode(*call: Any, swizzle: int) -> Fields:
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


@pytest.mark.parametrize("form", ["odd list", "odd weights", "odd"])
def test_the_weights_of_the_direct_kernel_lie_where_it_looks_for_them(form: str, fake: FakeDriver) -> None:
    ops = operands(form)
    role = hopper.roles(support.shift_b_spec(ops.spec))
    if form == "odd list":
        maps = hopper_shift_b.HopperShiftB(ops.spec, configs.SHIFT_B, 0)._listed_weights(ops)
        assert maps.shape == (2, 8 * SIZE // 8)
        return
    assert isinstance(ops.b, torch.Tensor)
    weights = hopper_shift_b._weights(arguments.view_of(ops), role)
    lines, per_group = hopper_shift_b._stack(weights, 3, torch.bfloat16)
    for g, k in ((0, 0), (1, 5), (2, 62)):
        assert lines.ptr + (g * per_group + k) * lines.pitch == ops.b[g, k].data_ptr()
    assert lines.length == ops.b.shape[2] and lines.number == 2 * per_group + ops.b.shape[1]


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
    reasons = support.shift_b_reasons(replace(SPEC, **change))  # type: ignore[arg-type]
    assert any(word in reason for reason in reasons)


@pytest.mark.parametrize(
    "change", [{}, {"form": "per_group"}, {"n": 128, "k": 256}, {"b": replace(BF16, align=2)}], ids=str
)
def test_a_layouts_family_holds_every_choice_for_other_counts(change: dict[str, object]) -> None:
    spec = replace(SPEC, **change)  # type: ignore[arg-type]
    members = choice.first_choices(spec, (9, 0))
    for total in (0, 1, 37, 300, 2048, 5000, 1 << 17):
        for groups in (1, 3, 40, 700):
            bucket = 1 << (total - 1).bit_length() if total else 0
            assert choice.heuristic(replace(spec, total=bucket, groups=groups)) in members


FORMS = (
    "jagged_m",
    "jagged_n",
    "jagged_k",
    "batched",
    "masked",
    "odd",
    "odd weights",
    "odd batch",
    "twice",
    "epilogue",
)
TRIED = (
    configs.WIDE, configs.SLIM, replace(configs.SINGLE, kernel="packed"), configs.SHIFT_B, configs.SMALL_32, configs.SMALL_LIST,
    configs.SMALL_LISTS[1], configs.GENERIC,
)  # fmt: skip
MOVABLE = [(form, config) for form in FORMS for config in TRIED if is_valid(config, operands(form).spec)]


def test_every_kernel_is_among_those_that_are_moved() -> None:
    assert {config.kernel for _, config in MOVABLE} == {config.kernel for config in TRIED}


def _moved(x: Any, pages: int) -> Any:
    """The same matrix elsewhere, at an address that is congruent modulo 256."""
    if not isinstance(x, torch.Tensor):
        return x
    span = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    memory = torch.zeros(span * x.element_size() + 256 * (pages + 2), dtype=torch.uint8)
    skipped = (x.data_ptr() - memory.data_ptr()) % 256 + 256 * pages
    typed = memory[skipped : skipped + span * x.element_size()].view(x.dtype)
    return typed.as_strided(x.shape, x.stride())


def _elsewhere(ops: Operands) -> Operands:
    names = ("a", "b", "out", "c", "bias", "ends", "valid_rows")
    return replace(ops, **{name: _moved(getattr(ops, name), i + 1) for i, name in enumerate(names)})


def _spans(ops: Operands) -> list[tuple[int, int]]:
    tensors = (ops.a, ops.b, ops.out, ops.c, ops.bias, ops.ends, ops.valid_rows)
    return [
        (x.data_ptr(), x.data_ptr() + max(x.untyped_storage().nbytes(), 1))
        for x in tensors
        if isinstance(x, torch.Tensor)
    ]


@pytest.fixture
def one_workspace(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Every problem gets the same counter and the same memory for its copies, so that blocks can be compared."""
    counter = torch.zeros(24, dtype=torch.int32)
    monkeypatch.setattr(counters.Words, "_borrow", lambda self, index, size: counter)
    kept: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(
        hopper, "_workspace", lambda n, like: kept.setdefault(n, torch.zeros(n, dtype=like.dtype, device=like.device))
    )
    return fake


@pytest.mark.parametrize(("form", "config"), MOVABLE, ids=str)
def test_a_moved_launch_is_the_one_bound_there(form: str, config: Config, one_workspace: FakeDriver) -> None:
    ops = operands(form)
    there = _elsewhere(ops)
    assert all(x % 256 == y % 256 for x, y in zip(addresses_of(ops), addresses_of(there), strict=True))
    launch, wanted = bound(config, ops), bound(config, there)
    before = arguments_of(launch)
    assert before != arguments_of(wanted)
    assert not launch.stays_behind(_spans(ops))
    launch.move(addresses_of(there))
    assert arguments_of(launch) == arguments_of(wanted)
    launch.move(addresses_of(ops))
    assert arguments_of(launch) == before
    mixed = replace(ops, b=there.b)
    launch.move(addresses_of(mixed))
    assert arguments_of(launch) == arguments_of(bound(config, mixed))


@pytest.mark.parametrize("form", ["per_group", "odd list"])
@pytest.mark.parametrize("config", TRIED, ids=str)
def test_a_list_whose_addresses_lie_in_a_table_cannot_be_moved(form: str, config: Config, fake: FakeDriver) -> None:
    ops = operands(form)
    if is_valid(config, ops.spec):
        assert not hasattr(bound(config, ops), "move")


@pytest.mark.parametrize(
    ("form", "config"), [*MOVABLE, ("per_group", configs.WIDE), ("odd list", configs.SHIFT_B)], ids=str
)
def test_a_thread_without_a_context_plans_binds_and_launches(form: str, config: Config, fake: FakeDriver) -> None:
    """As the one on which autograd runs backward: the driver refuses whatever is asked without a context."""
    failed: list[BaseException] = []

    def work() -> None:
        try:
            bound(config, operands(form))()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not failed
    assert fake.without_context in ([], ["cuLaunchKernelEx"]), "a launch alone is tried first and repeated"
    assert fake.launched and "cuModuleLoadData" in fake.calls


def test_tensor_maps_are_encoded_once_for_all_heights(fake: FakeDriver) -> None:
    launch = bound(configs.WIDE, operands("jagged_m"))
    assert fake.encodings == 1 + 16 + 1
    (step,) = steps_of(launch)
    rows = np.frombuffer(arguments_of(launch)[0], dtype=np.uint64)[-18 * 16 :].reshape(18, 16)
    assert [int(row[11]) >> 32 for row in rows[1:17]] == [8 * (i + 1) for i in range(16)]
    assert sum(len(slots) for _, slots in step._block._slots) == 4 + 3, "the maps of all heights are one slot"


def test_a_plan_loads_every_kernel_of_its_layout_once(fake: FakeDriver) -> None:
    device = torch.device("cuda", 0)
    spec = replace(SPEC, n=1024, k=1024)
    BACKEND.plan(spec, choice.heuristic(spec), device)
    loaded = len(fake.images)
    for total in (0, 64, 1024, 1 << 17):
        later = replace(spec, total=total)
        BACKEND.plan(later, choice.heuristic(later), device)
    assert len(fake.images) == loaded > 3


def _python_calls(work: Callable[[], object]) -> int:
    """Besides those of the fake driver."""
    count = 0

    def profiler(frame: Any, event: str, argument: Any) -> None:
        nonlocal count
        count += event == "call" and "/tests/" not in frame.f_code.co_filename

    sys.setprofile(profiler)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


ODD = {"a": replace(BF16, align=2), "b": replace(BF16, align=2)}


@pytest.mark.parametrize(
    ("change", "limit"),
    [({}, 350), ({"form": "batched", "groups": 4}, 450), (ODD, 500)],
    ids=["aligned", "batch", "odd"],
)
def test_a_new_layout_whose_kernels_are_loaded_is_planned_at_once(
    change: dict[str, Any], limit: int, fake: FakeDriver
) -> None:
    device = torch.device("cuda", 0)
    known = replace(SPEC, **change)
    BACKEND.plan(known, choice.heuristic(known), device)
    new = replace(known, n=4096 + 8, k=7168 + 8)
    config, loaded = choice.heuristic(new), len(fake.images)
    assert _python_calls(lambda: BACKEND.plan(new, config, device)) <= limit
    assert len(fake.images) == loaded


@pytest.mark.parametrize(
    ("form", "config", "limit"), [("jagged_m", configs.WIDE, 100), ("jagged_m", configs.SMALL_32, 50)]
)
def test_binding_takes_few_steps(form: str, config: Config, limit: int, fake: FakeDriver) -> None:
    ops = operands(form)
    kernel = KERNELS[config.kernel].loaded(ops.spec, config, 0)
    kernel.bind(ops)
    assert _python_calls(lambda: kernel.bind(ops)) <= limit
