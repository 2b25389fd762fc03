"""One trial: who is compiled and timed, how, what it writes into, and where nothing is measured."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability, Recipe
from multigemm.planning import binding as bound
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from multigemm.select import choose, timing
from multigemm.select import measure_once as trial
from multigemm.select import table as tuning
from multigemm.select.timing import FLUSH_BYTES, free_bytes
from tests.support.fake_backends import Dawdler, Tile, problem
from tests.support.trial_cases import Install, class_in, host_time_us, kept, pair


@dataclass
class Broken(Dawdler):
    """A fake that fails at one step, the first few times."""

    step: str = "launch"
    times: int = 1000

    def fail(self, step: str) -> None:
        if step == self.step and self.times:
            self.times -= 1
            raise RuntimeError(f"no luck with the {step}")

    def plan(self, spec: ProblemSpec, config: Tile, device: torch.device) -> Recipe:
        self.fail("plan")
        return super().plan(spec, config, device)

    def bind(self, ops: Operands) -> Any:
        self.fail("bind")
        launch = super().bind(ops)

        def run() -> None:
            self.fail("launch")
            launch()

        return run


@pytest.mark.parametrize("step", ["plan", "bind", "launch"])
def test_a_backend_that_fails_is_left_out_and_named(fresh: Install, step: str) -> None:
    fresh(Broken("broken", 3, step=step), *pair())
    with pytest.warns(
        RuntimeWarning, match=f"could not measure backend 'broken': RuntimeError: no luck with the {step}"
    ) as told:
        assert mg.solve(problem()).eq(2).all()
    assert len(told) == 1
    entry = kept()
    assert entry is not None
    assert set(entry.backends) == {"slow", "fast"}
    assert entry.failed == {"broken": f"RuntimeError: no luck with the {step}"}


@pytest.mark.parametrize("step", ["plan", "bind", "launch"])
def test_a_lone_time_wins_nothing(fresh: Install, step: str) -> None:
    """The expected one failed once, in the trial."""
    fresh(Broken("expected", 3, step=step, times=1), Dawdler("other", 4))
    with pytest.warns(RuntimeWarning, match="'expected'"):
        assert mg.solve(problem()).eq(3).all()
    assert kept() is None


@dataclass
class Watched(Dawdler):
    """A fake that keeps what it was to write into."""

    outs: list[Any] = field(default_factory=list)

    def bind(self, ops: Operands) -> Any:
        self.outs.append(ops.out)
        return super().bind(ops) if isinstance(ops.out, torch.Tensor) else lambda: None


def test_all_write_into_one_scratch_result_that_lies_as_the_real_one(fresh: Install) -> None:
    one, two = Watched("one", 1, nap_s=0.002), Watched("two", 2)
    fresh(one, two)
    out = torch.full((2, 4), 7.0).t()
    posed = mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 4], out=out)
    choose.choose(posed)
    outs = [*one.outs, *two.outs]
    assert {x.data_ptr() for x in outs} == {one.outs[0].data_ptr()} != {out.data_ptr()}
    assert all(x.stride() == out.stride() for x in outs)
    assert out.eq(7.0).all()


def test_results_of_a_list_lie_together_as_those_of_a_plan(fresh: Install) -> None:
    """At even distances a library may treat them as a batch."""
    one = Watched("one", 1, nap_s=0.002)
    fresh(one, Watched("two", 2))
    operands = [torch.ones(64, 32) for _ in range(8)]
    choose.choose(mg.GroupedGemmProblem(operands, [x.t() for x in operands]))
    outs = one.outs[0]
    assert {y.data_ptr() - x.data_ptr() for x, y in pairwise(outs)} == {outs[0].nbytes}


@dataclass
class Patient(Dawdler):
    """A fake whose compiler waits until all others compile too."""

    meeting: threading.Barrier = field(default_factory=lambda: threading.Barrier(1))

    def plan(self, spec: ProblemSpec, config: Tile, device: torch.device) -> Recipe:
        self.meeting.wait(30)
        return super().plan(spec, config, device)


def test_the_one_clock_tells_who_is_faster(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "measure", timing.measure)
    fresh(Dawdler("slow", 1, nap_s=0.05), Dawdler("fast", 2, nap_s=0.001))
    assert mg.plan(problem()).backend == "fast"
    entry = kept()
    assert entry is not None
    assert entry.backends["slow"].us >= 50_000
    assert 1000 <= entry.backends["fast"].us < 50_000


def test_backends_compile_side_by_side(fresh: Install, trials: list[list[str]]) -> None:
    meeting = threading.Barrier(3)
    fresh(*(Patient(name, nap_s=0.001, meeting=meeting) for name in "abc"))
    choose.choose(problem())
    assert trials == [["a", "b", "c"]]


@pytest.mark.parametrize(
    ("took", "chosen"),
    [
        ({"first": 10.2, "second": 10.0}, "first"),  # as good as equal: the static order decides
        ({"first": 10.4, "second": 10.0}, "second"),
        ({"first": 10.0, "second": 11.0}, "first"),
        ({"second": 10.0, "third": 10.1}, "second"),  # the first could not be timed
        ({"second": 10.1, "third": 10.0}, "second"),
    ],
)
def test_the_first_of_the_order_stays_unless_another_is_clearly_faster(took: dict[str, float], chosen: str) -> None:
    assert trial.fastest(took, ("first", "second", "third")) == chosen


def test_long_calls_on_a_gpu_are_ranked_under_load_and_short_ones_behind_other_work(
    fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, dict[str, float]]] = []

    def measure(variants: Any, device: Any, mode: str, **more: Any) -> dict[str, Any]:
        asked.append((mode, more["known_us"]))
        return {}

    fresh(*pair())
    monkeypatch.setattr(trial, "measure", measure)
    posed = problem()
    choices = {name: choose.choose(posed, name) for name in ("slow", "fast")}
    monkeypatch.setattr(type(posed), "device", torch.device("cuda"))
    monkeypatch.setattr(bound, "scratch", lambda posed: None)
    launch = lambda: None  # noqa: E731
    nothing = bound.Bound(launch, Operands(posed.spec, posed.a, posed.b, posed.a), [launch])
    monkeypatch.setattr(bound, "bind", lambda choice, posed, out: nothing)
    for us, mode in ((trial.LONG_US, "sustained"), (0.9 * trial.LONG_US, "cold")):
        monkeypatch.setattr(trial, "rough_time_us", lambda call, device, us=us: us)
        trial._timed(choices, posed, {})
        assert asked[-1] == (mode, {"slow": us, "fast": us})


def test_a_backend_whose_calls_keep_the_host_busy_is_not_taken_for_a_short_product(
    fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU binding takes no time of the device, but every eager call waits for it; a plan does not."""

    class Busy(Dawdler):
        def bind(self, ops: Operands) -> Any:
            until = time.perf_counter() + 0.004
            while time.perf_counter() < until:
                pass
            return super().bind(ops)

    fresh(Busy("busy", 1), Dawdler("idle", 2, nap_s=0.001))
    monkeypatch.setattr(trial, "measure", timing.measure)
    monkeypatch.setattr(trial, "_host_time_us", host_time_us)
    assert mg.plan(problem()).backend == "busy"
    assert mg.solve(problem()).eq(2).all()
    told = str(mg.explain(problem()))
    assert "chosen: idle" in told
    busy = next(line for line in told.splitlines() if " busy " in line)
    assert float(busy.rpartition("takes the host ")[2].removesuffix(" us)")) > 4000
    assert binding_in_a_capture(monkeypatch) == "busy"


@pytest.mark.parametrize(
    ("device_us", "host_us", "chosen"),
    [
        ((102, 100), (20, 12), "fast"), ((102, 100), (13, 12), "slow"), ((110, 100), (12, 20), "fast"),
        ((100, 102), (20, 12), "fast"), ((100, 110), (20, 12), "slow"), ((100, 100), (0, 12), "slow"),
        ((5, 8), (20, 12), "fast"),
    ],
)  # fmt: skip
def test_of_two_as_fast_an_eager_call_takes_the_one_that_keeps_the_host_less_busy(
    device_us: tuple[int, int], host_us: tuple[int, int], chosen: str, fresh: Install
) -> None:
    """A plan takes the one that was chosen by the time of the device; nothing is told of the host of a long product;
    and uneven groups may be cut in another way at the next call."""
    fresh(*pair())
    uneven = mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(2, 3, 2), sizes=[1, 3])
    both = zip(("slow", "fast"), device_us, host_us, strict=True)
    times = {name: tuning.Measured(us, host_us=host) for name, us, host in both}
    for posed in (problem(), uneven):
        tuning.table().keep_choice(tuning.Entry("cpu", str(class_in(posed)), times, "slow", "2026-11-23"))
    assert choose.choose(problem(), eager=True).backend == chosen
    assert mg.plan(problem()).backend == "slow"
    stays = max(device_us[0], host_us[0]) <= trial.WORTH * max(device_us[1], host_us[1])
    assert choose.choose(uneven, eager=True).backend == ("slow" if stays else "fast")


class OnTensors:
    """A launch that the launch cache makes on the tensors of later calls."""

    def __call__(self) -> None: ...

    def on_tensors(self, kind: str, live: Any) -> None: ...


@pytest.mark.parametrize(("launch", "binds"), [(OnTensors(), 0), (lambda: None, trial.HOST_CALLS)])
def test_a_bind_counts_only_where_a_warm_call_binds(
    launch: Any, binds: int, fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(*pair())
    posed, made = problem(), list[object]()
    choice = choose.choose(posed, "fast")
    first = bound.Bound(launch, Operands(posed.spec, posed.a, posed.b, posed.a), [launch])
    monkeypatch.setattr(bound, "bind", lambda *given: made.append(given) or first)  # type: ignore[func-returns-value]
    host_time_us(choice, posed, None, first)
    assert len(made) == binds


def binding_in_a_capture(monkeypatch: pytest.MonkeyPatch) -> str:
    """Whom an eager call runs that becomes part of a CUDA graph."""
    monkeypatch.setattr(bound, "capturing", lambda device: True)
    return choose.choose(problem(), eager=True).backend


def test_where_memory_is_short_nothing_is_measured(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    least = FLUSH_BYTES + 2 * 4 * 2 * 4  # a result of 4 x 2 in float32, twice
    for free, measured in ((least - 1, 0), (least, 1)):
        fresh(*pair())
        monkeypatch.setattr(trial, "free_bytes", lambda device, free=free: free)
        assert mg.solve(problem()).eq(1 + measured).all()
        assert len(trials) == measured


def test_only_whom_auto_would_take_is_measured(fresh: Install, trials: list[list[str]]) -> None:
    waits = Dawdler("waits", 3, syncs=True)
    emulated = Dawdler("emulated", 4, here=Availability(True, emulated=True))
    fresh(waits, emulated, Dawdler("null", 5), Dawdler("picky", 6, reasons=["why"]), *pair())
    assert [mg.plan(problem(rows)).backend for rows in (60, 64)] == [
        "fast"
    ] * 2  # of one class, which has been measured
    assert trials == [["slow", "fast"]]
    fresh(waits, emulated, Dawdler("alone", 7))
    plan = mg.plan(problem(dtype=torch.float64))
    assert plan.backend == "alone"
    assert "waits would wait for the sizes" in plan.why
    assert len(trials) == 1


@pytest.mark.parametrize(
    ("asked", "config", "variables", "in_capture"),
    [
        ("slow", None, {}, False),
        (["slow", "fast"], None, {}, False),
        ("auto", {"size": 32}, {}, False),
        ("auto", None, {"MULTIGEMM_BACKEND": "slow,fast"}, False),
        ("auto", None, {"MULTIGEMM_MEASURE": "0"}, False),
        ("auto", None, {}, True),
    ],
)
def test_nothing_is_measured_where_it_is_settled_forbidden_or_impossible(
    fresh: Install,
    trials: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    setting: Callable[..., None],
    asked: Any,
    config: Any,
    variables: dict[str, str],
    in_capture: bool,
) -> None:
    setting(**variables)
    monkeypatch.setattr(bound, "capturing", lambda device: in_capture)
    fresh(*pair())
    assert mg.solve(problem(), asked, config).eq(1).all()
    assert trials == []


def test_who_is_hopeless_at_first_sight_is_not_timed_again(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "HOPELESS", 3.0)
    hopeless = Dawdler("hopeless", 3, nap_s=0.1)
    fresh(hopeless, Dawdler("fast", 2, nap_s=0.0005))
    assert mg.solve(problem()).eq(2).all()
    assert (hopeless.launches, trials) == (4, [["fast"]])
    fresh(hopeless, Dawdler("fast", 2))
    assert mg.solve(problem()).eq(2).all()
    assert hopeless.launches == 4


def test_who_only_keeps_the_host_busy_is_not_hopeless(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "HOPELESS", 3.0)
    looks = iter((20.0, 0.9 * trial.SLOW_US))
    monkeypatch.setattr(trial, "rough_time_us", lambda call, device: next(looks))
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    assert trials == [["slow", "fast"]]


def test_who_met_a_busy_host_is_looked_at_once_more(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "HOPELESS", 3.0)
    looks = iter((2.0 * trial.SLOW_US, 20.0, 30.0))
    monkeypatch.setattr(trial, "rough_time_us", lambda call, device: next(looks))
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    assert trials == [["slow", "fast"]]


def test_problems_without_work_are_not_timed(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    mg.solve(mg.GroupedGemmProblem(torch.ones(0, 3), torch.ones(3, 2), offsets=[0, 0]))
    mg.solve(mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 0]))
    mg.solve(mg.GroupedGemmProblem(torch.ones(2, 4, 3), torch.ones(2, 3, 2), valid_rows=[0, 0]))
    assert trials == []


def test_masked_rows_may_be_few(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    mg.solve(mg.GroupedGemmProblem(torch.ones(2, 64, 3), torch.ones(2, 3, 2), valid_rows=[1, 0]))
    assert len(trials) == 1


@pytest.mark.parametrize(
    ("module", "name", "error"),
    [
        (bound, "scratch", torch.OutOfMemoryError("the device is full")),
        (trial, "free_bytes", RuntimeError("this allocator does not tell")),
    ],
)
def test_a_trial_that_fails_altogether_is_reported_and_the_first_in_order_is_taken(
    module: Any, name: str, error: Exception, fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> Any:
        raise error

    fresh(*pair())
    monkeypatch.setattr(module, name, fail)
    reason = f"{type(error).__name__}: {error}"
    with pytest.warns(RuntimeWarning, match=f"could not measure: {reason}") as told:
        assert mg.solve(problem()).eq(1).all()
    assert len(told) == 1
    assert f"not measured: it failed: {reason}" in mg.explain(problem()).why


def test_no_scratch_is_made_that_is_far_larger_than_the_result(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    for across, measured in ((64, 0), (3, 1)):
        out = torch.zeros(4, across)[:, :2]
        mg.solve(mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 4], out=out))
        assert len(trials) == measured
        choose.forget()


def test_of_a_cpu_nobody_asks_for_memory() -> None:
    assert math.isinf(free_bytes(torch.device("cpu")))
