"""What every bound launch of cupy and numba keeps to, against a driver that writes down what it is asked: no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from multigemm.backends.cupy import config as cupy
from multigemm.backends.cupy import hopper as cupy_hopper
from multigemm.backends.numba import config as numba
from multigemm.backends.numba.support import operand_obstacle
from multigemm.cuda import counters
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from tests.support import cupy_world, numba_world
from tests.support.concurrency import on_new_threads
from tests.support.cuda_driver import FakeDriver, addresses_of, steps_of
from tests.support.small_problems import LISTS, PACKED, elsewhere, operands, spans

CUPY = (
    *(cupy.WIDE, cupy.SLIM, replace(cupy.SINGLE, kernel="packed"), cupy.SHIFT_B, cupy.SMALL_32),
    *(cupy.SMALL_LIST, cupy.SMALL_LISTS[1], cupy.GENERIC),
)
NUMBA = (numba.GENERIC, numba.MMA, numba.FMA_TALL, numba.HOPPER, numba.HOPPER_NARROW)


class Way(NamedTuple):
    """A config of a backend, as tests name it."""

    backend: str
    config: Any

    def runs(self, spec: ProblemSpec) -> bool:
        """Whether the config can run a spec."""
        if self.backend == "cupy":
            return cupy.is_valid(self.config, spec)
        return not isinstance(self.config, numba.HopperConfig) or operand_obstacle(spec) == ""

    def bind(self, ops: Operands) -> Any:
        """A launch for a problem."""
        return (cupy_world if self.backend == "cupy" else numba_world).bound(self.config, ops)


WAYS = [*(Way("cupy", config) for config in CUPY), *(Way("numba", config) for config in NUMBA)]
EPILOGUES = [(form, True) for form in ("jagged_m", "offsets", "weights along k", "jagged_n", "batched", "masked")]
GIVEN = [*((form, False) for form in (*PACKED, "twice")), *EPILOGUES, ("jagged_k", True)]


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The driver, as a Hopper GPU for both backends."""
    numba_world.install(monkeypatch)
    return cupy_world.install(monkeypatch)


@pytest.fixture
def one_workspace(fake: FakeDriver, monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Every problem gets the same counter and the same memory for its copies, so that arguments can be compared."""
    counter = torch.zeros(24, dtype=torch.int32)
    monkeypatch.setattr(counters.Words, "_borrow", lambda self, index, size: counter)
    kept: dict[int, torch.Tensor] = {}
    monkeypatch.setattr(
        cupy_hopper, "_workspace", lambda n, x: kept.setdefault(n, torch.zeros(n, dtype=x.dtype, device=x.device))
    )
    return fake


def seen(made: Any) -> list[Any]:
    """All that kernels would read: their arguments, and the copies of their maps in what is device memory here."""
    found: list[Any] = []
    for step in steps_of(made):
        words = step._block.snapshot()
        if step._fields is None:
            found.append(words.tobytes())
        else:
            *rest, maps, ends = words.tolist()
            found.append((rest, ends - maps, ctypes.string_at(maps, ends - maps + 8)))
    return found


def cases(given: list[tuple[str, bool]]) -> list[Any]:
    """Every way with every problem that it runs."""
    posed = [(form, epilogue, operands(form, epilogue).spec) for form, epilogue in given]
    return [
        pytest.param(way, form, epilogue, id=f"{way.backend} {way.config} {form} {epilogue}")
        for way in WAYS
        for form, epilogue, spec in posed
        if way.runs(spec)
    ]


MOVABLE, LISTED = cases(GIVEN), cases([(form, False) for form in LISTS])


def test_every_config_is_among_those_that_are_moved() -> None:
    assert {case.values[0] for case in MOVABLE} == set(WAYS)


@pytest.mark.parametrize(("way", "form", "epilogue"), MOVABLE)
def test_a_moved_launch_is_the_one_bound_there(way: Way, form: str, epilogue: bool, one_workspace: FakeDriver) -> None:
    ops = operands(form, epilogue)
    there = elsewhere(ops)
    launch, wanted = way.bind(ops), way.bind(there)
    before = seen(launch)
    assert before != seen(wanted)
    assert not launch.stays_behind(spans(ops))
    for target in (there, ops, replace(ops, b=there.b)):
        launch.move(addresses_of(target))
        assert seen(launch) == seen(way.bind(target))
    launch.move(addresses_of(ops))
    assert seen(launch) == before


@pytest.mark.parametrize(("way", "form", "epilogue"), MOVABLE)
def test_an_address_that_no_slot_holds_is_seen(way: Way, form: str, epilogue: bool, one_workspace: FakeDriver) -> None:
    ops = operands(form, epilogue)
    launch = way.bind(ops)
    step = steps_of(launch)[-1]
    block = step._block if step._fields is None else step._fields._content
    block._slots = block._slots[1:]
    assert launch.stays_behind(spans(ops))


@pytest.mark.parametrize(("way", "form", "epilogue"), LISTED)
def test_a_list_whose_addresses_lie_in_a_table_cannot_move(
    way: Way, form: str, epilogue: bool, fake: FakeDriver
) -> None:
    launch = way.bind(operands(form))
    assert not hasattr(launch, "move")
    launch()
    assert fake.launched


@pytest.mark.parametrize(("way", "form", "epilogue"), [*MOVABLE, *LISTED])
def test_a_bound_problem_launches_with_one_driver_call_for_each_kernel(
    way: Way, form: str, epilogue: bool, fake: FakeDriver
) -> None:
    launch = way.bind(operands(form, epilogue))
    fake.calls.clear()
    launch()
    launch()
    kernels = [launched.kernel for launched in fake.launched]
    assert fake.calls == ["cuLaunchKernelEx"] * len(kernels)
    own = {"packed": "hopper"}.get(way.config.kernel, way.config.kernel)
    assert kernels in ([own] * 2, ["pack", own] * 2)


@pytest.mark.parametrize(("way", "form", "epilogue"), [*MOVABLE, *LISTED])
def test_a_thread_without_a_context_binds_and_launches(way: Way, form: str, epilogue: bool, fake: FakeDriver) -> None:
    """As the one on which autograd runs backward: the driver refuses whatever is asked without a context."""
    on_new_threads(lambda: way.bind(operands(form, epilogue))())
    assert fake.without_context in ([], ["cuLaunchKernelEx"]), "a launch alone is tried first and repeated"
    assert fake.launched and {"cuModuleLoadData", "cuModuleGetFunction"} <= set(fake.calls)
    assert ("cuTensorMapEncodeTiled" in fake.calls) == (way.config.kernel not in ("generic", "small", "mma"))


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_binding_leaves_a_thread_without_a_context_as_it_was(way: Way, fake: FakeDriver) -> None:
    found: list[int] = []
    form = next(form for form in (*PACKED, *LISTS) if way.runs(operands(form).spec))

    def bind() -> None:
        way.bind(operands(form))
        found.append(fake.current)

    on_new_threads(bind)
    assert found == [0]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_only_kernels_that_wait_by_themselves_may_start_early(way: Way, fake: FakeDriver) -> None:
    form = next(form for form in (*PACKED, *LISTS) if way.runs(operands(form).spec))
    way.bind(operands(form))()
    assert [step.early for step in fake.launched if step.kernel != "pack"] == [way.config.kernel != "generic"]


def test_arrays_are_compared_as_the_kernel_reads_them(fake: FakeDriver) -> None:
    """That `seen` sees: one other word of an operand's address makes another launch."""
    ops = operands("jagged_m")
    for way in (Way("cupy", cupy.GENERIC), Way("numba", numba.GENERIC)):
        (raw,) = seen(way.bind(ops))
        assert ops.a.data_ptr() in np.frombuffer(raw, np.int64)  # type: ignore[union-attr]
