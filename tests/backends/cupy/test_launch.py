"""The cupy backend binds and launches as far as the driver's door, on CPU tensors."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability
from multigemm.backends import registry
from multigemm.backends.cupy import BACKEND, build, choice, generic, hopper, hopper_shift_b, support
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.backends.cupy.launch import KERNELS, why
from multigemm.cuda import counters
from multigemm.cuda.device import MEMORY_BUS_BITS, MEMORY_CLOCK_KHZ, memory_rate
from multigemm.cuda.launch import Kernel
from multigemm.cuda.tensor_map import SIZE
from multigemm.errors import CompileError
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.operands import view_of
from multigemm.select import choose
from tests.support.concurrency import on_new_threads
from tests.support.cuda_driver import FakeDriver
from tests.support.cupy_world import BF16, SPEC, bound, install
from tests.support.python_calls import python_calls
from tests.support.small_problems import operands, staged


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


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
    assert [(step.kernel, step.early) for step in fake.launched] == [("pack", False), ("hopper", True)]


def test_a_product_of_copies_begins_early_only_if_there_are_copies(fake: FakeDriver) -> None:
    """Its kernel waits for the copies, but for nothing else."""
    for rows in (0, 8):
        a, b = torch.zeros(rows, 33, dtype=torch.bfloat16), torch.zeros(2, 33, 64, dtype=torch.bfloat16)
        fake.launched.clear()
        bound(replace(configs.WIDE, kernel="packed"), staged(mg.GroupedGemmProblem(a, b, sizes=[rows, 0])))()
        assert [step.early for step in fake.launched] == ([False, True] if rows else [False])


def test_copies_are_laid_out_one_after_the_other(fake: FakeDriver) -> None:
    ops = operands("odd list")
    copied, _, _ = hopper.with_copies(
        ops, view_of(ops), support.packed_spec(ops.spec), build.load(hopper.COPY_SOURCE, 0)
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
def test_the_kernel_that_shifts_copies_rows_at_most(form: str, config: Config, fake: FakeDriver) -> None:
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


def test_only_wide_weights_may_need_the_generic_kernel_beside_the_one_that_shifts() -> None:
    spec = replace(SPEC, b=replace(BF16, align=2))
    assert [source.entry for source in hopper_shift_b.sources(spec, configs.SHIFT_B)] == ["hopper_shift_b", "pack"]
    wide = replace(spec, b=replace(spec.b, wide=True))
    assert [source.entry for source in hopper_shift_b.sources(wide, configs.SHIFT_B)] == [
        "hopper_shift_b",
        "pack",
        "generic",
    ]
    assert "generic" not in why(spec, configs.SHIFT_B)


@pytest.mark.parametrize("form", ["odd list", "odd weights", "odd"])
def test_the_weights_of_the_kernel_that_shifts_lie_where_it_looks_for_them(form: str, fake: FakeDriver) -> None:
    ops = operands(form)
    role = hopper.roles(support.shift_b_spec(ops.spec))
    if form == "odd list":
        maps = hopper_shift_b.HopperShiftB(ops.spec, configs.SHIFT_B, 0)._listed_weights(ops)
        assert maps.shape == (2, 8 * SIZE // 8)
        return
    assert isinstance(ops.b, torch.Tensor)
    weights = hopper_shift_b._weights(view_of(ops), role)
    lines, per_group = hopper_shift_b._stack(weights, 3, torch.bfloat16)
    for g, k in ((0, 0), (1, 5), (2, 62)):
        assert lines.ptr + (g * per_group + k) * lines.pitch == ops.b[g, k].data_ptr()
    assert lines.length == ops.b.shape[2] and lines.number == 2 * per_group + ops.b.shape[1]


def test_hopper_alone_is_compiled_for_the_rate_of_memory(fake: FakeDriver) -> None:
    plain, other = hopper.source(SPEC, configs.WIDE), generic.source(SPEC, configs.GENERIC)
    assert build.for_memory_of(plain, 0) == plain, "an H100"
    fake.attributes = {MEMORY_CLOCK_KHZ: 3_201_000, MEMORY_BUS_BITS: 6144}
    memory_rate.cache_clear()
    assert dict(build.for_memory_of(plain, 0).defines) == {**dict(plain.defines), "FAST_MEMORY": 1}
    assert build.for_memory_of(other, 0) == other


def test_a_plan_loads_every_kernel_of_its_layout_once(fake: FakeDriver) -> None:
    device = torch.device("cuda", 0)
    spec = replace(SPEC, n=1024, k=1024)
    BACKEND.plan(spec, choice.heuristic(spec), device)
    loaded = len(fake.images)
    for total in (0, 64, 1024, 1 << 17):
        later = replace(spec, total=total)
        BACKEND.plan(later, choice.heuristic(later), device)
    assert len(fake.images) == loaded > 3


ODD = {"a": replace(BF16, align=2), "b": replace(BF16, align=2)}


@pytest.mark.parametrize(
    ("change", "limit"),
    [({}, 370), ({"form": "batched", "groups": 4}, 450), (ODD, 600)],
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
    assert python_calls(lambda: BACKEND.plan(new, config, device)).functions <= limit
    assert len(fake.images) == loaded


@pytest.mark.parametrize(
    ("form", "config", "limit"), [("jagged_m", configs.WIDE, 100), ("jagged_m", configs.SMALL_32, 50)]
)
def test_binding_takes_few_steps(form: str, config: Config, limit: int, fake: FakeDriver) -> None:
    ops = operands(form)
    kernel = KERNELS[config.kernel].loaded(ops.spec, config, 0)
    kernel.bind(ops)
    assert python_calls(lambda: kernel.bind(ops)).functions <= limit


@pytest.fixture
def on_cpu_tensors(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The registry takes this backend for one that runs here, and the fake GPU for the device of CPU tensors."""
    gpu = torch.device("cuda", 0)
    backend = SimpleNamespace(
        name="cupy",
        configs=lambda spec, device: BACKEND.configs(spec, gpu),
        plan=lambda spec, config, device: BACKEND.plan(spec, config, gpu),
        not_supported_reasons=lambda spec, device: [],
    )
    monkeypatch.setattr(registry, "get", lambda name: backend)
    monkeypatch.setattr(registry, "state", lambda name: Availability(ok=True))
    choose.forget()
    yield
    choose.forget()


@pytest.mark.parametrize(
    ("k", "n", "jagged"), [(1024, 1024, True), (63, 192, True), (128, 131, True), (63, 131, False)],
    ids=["aligned", "odd k", "odd n", "batch"],
)  # fmt: skip
def test_the_way_to_a_kernel_that_is_loaded_is_short(k: int, n: int, jagged: bool, on_cpu_tensors: None) -> None:
    """From the operands to a plan, and in a call that comes again to the driver's door."""
    a, b = torch.zeros(8, 32, k, dtype=torch.bfloat16), torch.zeros(8, k, n, dtype=torch.bfloat16)
    cuts: dict[str, Any] = {"offsets": torch.arange(9, dtype=torch.int32) * 32} if jagged else {}
    a = a.flatten(0, 1) if jagged else a

    def plan() -> mg.Plan:
        return mg.plan(mg.GroupedGemmProblem(a, b, **cuts), "cupy")

    plan()
    choose.forget()
    assert python_calls(plan).functions <= 500
    for _ in range(3):
        mg.grouped_gemm(a, b, backend="cupy", **cuts)
    served = LAUNCHES.served
    count, files = python_calls(lambda: mg.grouped_gemm(a, b, backend="cupy", **cuts))
    assert LAUNCHES.served == served + 1
    assert count <= 30
    assert len(files) <= 6


def test_kernels_are_loaded_together_and_errors_come_out(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    sources = [hopper.source(SPEC, configs.WIDE), generic.source(SPEC, configs.GENERIC)]
    build.load_all([*sources, sources[0]], 0)
    assert sorted(fake.names.values()) == ["generic", "hopper"]

    def fails(source: build.Source, arch: str) -> bytes:
        raise CompileError("no")

    monkeypatch.setattr(build, "cubin_of", fails)
    build.load_all(sources, 0)
    with pytest.raises(CompileError):
        build.load_all([hopper.source(SPEC, configs.MIDDLE)], 0)


def test_a_finaliser_that_loads_a_kernel_while_one_is_loaded_does_not_wait(
    fake: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = (build.Source("generic.cu", name, ()) for name in ("one", "other"))

    def interrupted(cubin: bytes, name: str, *given: int) -> Kernel:
        if name == "one":
            build.load(other, 0)
        return Kernel(cubin, name, *given)

    monkeypatch.setattr(build, "Kernel", interrupted)
    on_new_threads(lambda: build.load(one, 0), seconds=30)
    assert sorted(fake.names.values()) == ["one", "other"]


def test_threads_that_load_a_kernel_at_once_get_one_module(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> None:
    together = threading.Barrier(4)

    def compiled(source: build.Source, arch: str) -> bytes:
        together.wait(10)  # all are past the first look
        return b""

    monkeypatch.setattr(build, "cubin_of", compiled)
    source = build.Source("generic.cu", "generic", ())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: build.load(source, 0), range(4)))
    assert list(fake.names.values()) == ["generic"]
    assert len({id(kernel) for kernel in found}) == 1
