"""Measuring once what nothing tells: which backends are in question, and what becomes of the times."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import bound, dispatch, timing, trial, tuning
from multigemm.backend import Availability, Recipe
from multigemm.clocks import FLUSH_BYTES
from multigemm.contest import Candidate
from multigemm.first_met import SOURCE, FirstMet
from multigemm.layouts import Operands
from multigemm.measured import Measured
from multigemm.nearest import Estimate
from multigemm.settings import settings
from multigemm.spec import ProblemSpec
from multigemm.timing import Timing
from tests.fake_backends import Dawdler, Fake, Tile, problem

CPU = torch.device("cpu")
FLOPS = 2.0 * 4 * 3 * 2
"""Of `problem()`."""
Install = Callable[..., None]


@pytest.fixture
def fresh(install: Install, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Install:
    """As whoever has set nothing finds it: a cache that holds nothing, and measuring is on."""
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.delenv("MULTIGEMM_MEASURE")
    settings.cache_clear()
    monkeypatch.setattr(trial, "HOPELESS", math.inf)  # a busy host makes naps longer
    return install


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Who was timed together, trial by trial."""
    found: list[list[str]] = []
    real = timing.measure

    def measure(variants: Mapping[str, Any], *given: Any, **more: Any) -> dict[str, Timing]:
        found.append(list(variants))
        return real(variants, *given, **more)

    monkeypatch.setattr(trial, "measure", measure)
    return found


def pair() -> tuple[Dawdler, Dawdler]:
    """Two backends; the one that comes first is clearly slower."""
    return Dawdler("slow", 1, nap_s=0.003), Dawdler("fast", 2, nap_s=0.0005)


def learn(posed: mg.GroupedGemmProblem, flops: float, **us: float) -> None:
    """As if these backends had been timed on a problem, all with their first config."""
    key = tuning.spec_key(posed.spec, equal=True)
    every = [Measured(name, {}, took, "cpu", key, ran="16", groups=1, flops=flops) for name, took in us.items()]
    tuning.table().learn(FirstMet({m.backend: replace(m, source=SOURCE) for m in every}, {}))


def times_of(posed: mg.GroupedGemmProblem, flops: float = FLOPS) -> dict[str, Measured]:
    """What was measured of a problem."""
    met = tuning.table().first_met(posed.spec, CPU, True, flops)
    return {} if met is None else dict(met.times)


def known(name: str, slowness: float | None = None, error: float = 0.2, expected: bool = True) -> Candidate:
    us = None if expected else 10.0
    return Candidate(name, Availability(True), (), us, slowness, "", expected and slowness is not None, error)


def test_who_may_be_faster_by_more_than_matters_is_in_question() -> None:
    assert known("x").in_question
    assert known("x", 1.49).in_question  # 1.1 * 1.49 is just below exp(2.5 * 0.2)
    assert not known("x", 1.51).in_question
    assert known("x", 1.0, error=0.04).in_question
    assert not known("x", 1.0, error=0.03).in_question  # it may well be faster, but hardly by a tenth
    assert known("x", 5.0, error=0.8).in_question


def test_those_in_question_are_compared_with_the_expected_one() -> None:
    assert trial.in_question([]) == []
    assert trial.in_question([known("a", 1.0), known("b", 1.3), known("c", 1.6), known("d")]) == ["a", "b", "d"]
    assert trial.in_question([known("a", 1.0, 0.01), known("b", 1.01, 0.01)]) == []  # one alone needs no trial
    assert trial.in_question([known(name) for name in "abcdef"]) == [*"abcdef"]
    assert trial.in_question([known("null"), known("a", 1.0), known("b", 1.0)]) == ["a", "b"]
    measured = [known("a", 1.0, 0.0, expected=False), known("b", 1.01, 0.0, expected=False)]
    assert trial.in_question(measured) == []
    assert trial.in_question([*measured, known("c")]) == []
    assert trial.in_question([replace(known("a"), us=10.0), known("b")]) == ["a", "b"]  # a lone time compares nothing


@pytest.mark.parametrize(("error", "timed", "chosen"), [(0.02, [], "slow"), (0.2, [["slow", "fast"]], "fast")])
def test_a_forecast_is_tried_where_it_is_open_and_believed_where_it_is_sure(
    fresh: Install,
    trials: list[list[str]],
    monkeypatch: pytest.MonkeyPatch,
    error: float,
    timed: list[list[str]],
    chosen: str,
) -> None:
    told = [Estimate("slow", 1.0, "said so", error), Estimate("fast", 1.3, "said so", error)]
    told.append(Estimate("far", 9.0, "said so", error))
    fresh(*pair(), Fake("far", 3))
    monkeypatch.setattr(tuning.TuningTable, "estimates", lambda *given: told)
    assert mg.plan(problem()).backend == chosen
    assert trials == timed


def test_what_was_chosen_stays_and_what_is_still_to_be_chosen_goes_by_what_was_learnt(
    fresh: Install, trials: list[list[str]]
) -> None:
    fresh(*pair())
    first = dispatch.choose(problem())
    near = dispatch.choose(problem(64))
    assert (first.backend, near.backend, len(trials)) == ("fast", "fast", 1)
    before = tuning.generation
    mg.solve(problem(dtype=torch.float64))
    assert len(trials) == 2
    learn(problem(64), 64 / 4 * FLOPS, slow=1.0, fast=100.0)
    assert tuning.generation == before
    assert dispatch.choose(problem()) is first
    assert dispatch.choose(problem(64)) is near
    assert mg.plan(problem(66)).backend == "slow"
    assert len(trials) == 2


def test_another_process_finds_the_times_and_measures_nothing(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    mg.plan(problem())
    slow, fast = pair()
    fresh(slow, fast)  # its table, choices and backends are new
    assert mg.solve(problem()).eq(2).all()
    assert (slow.launches, fast.launches) == (0, 1)
    assert len(trials) == 1
    assert SOURCE in mg.explain(problem()).why


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
        recipe = super().plan(spec, config, device)

        def bind(ops: Operands) -> Callable[[], object]:
            self.fail("bind")
            launch = recipe.bind(ops)

            def run() -> None:
                self.fail("launch")
                launch()

            return run

        return replace(recipe, bind=bind)


@pytest.mark.parametrize("step", ["plan", "bind", "launch"])
def test_a_contender_that_fails_is_left_out_and_named(fresh: Install, step: str) -> None:
    fresh(Broken("broken", 3, step=step), *pair())
    with pytest.warns(
        RuntimeWarning, match=f"could not measure backend 'broken': RuntimeError: no luck with the {step}"
    ) as told:
        assert mg.solve(problem()).eq(2).all()
    assert len(told) == 1
    met = tuning.table().first_met(problem().spec, CPU, True, FLOPS)
    assert met is not None
    assert set(met.times) == {"slow", "fast"}
    assert not met.passed


@pytest.mark.parametrize("step", ["plan", "bind", "launch"])
def test_a_lone_time_wins_nothing(fresh: Install, step: str) -> None:
    """The expected one failed once, in the trial."""
    fresh(Broken("expected", 3, step=step, times=1), Dawdler("other", 4))
    with pytest.warns(RuntimeWarning, match="'expected'"):
        assert mg.solve(problem()).eq(3).all()


def test_where_no_second_result_fits_the_expected_one_is_taken(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(posed: mg.GroupedGemmProblem) -> Any:
        raise torch.OutOfMemoryError("the device is full")

    fresh(*pair())
    monkeypatch.setattr(bound, "scratch", full)
    with pytest.warns(RuntimeWarning, match="the device is full") as told:
        assert mg.solve(problem()).eq(1).all()
    assert len(told) == 2


def test_where_memory_is_short_nothing_is_measured(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    least = FLUSH_BYTES + 2 * 4 * 2 * 4  # a result of 4 x 2 in float32, twice
    for free, measured in ((least - 1, 0), (least, 1)):
        fresh(*pair())
        monkeypatch.setattr(trial, "room", lambda device, free=free: free)
        assert mg.solve(problem()).eq(1 + measured).all()
        assert len(trials) == measured


@dataclass
class Watched(Dawdler):
    """A fake that keeps what it was to write into."""

    outs: list[torch.Tensor] = field(default_factory=list)

    def plan(self, spec: ProblemSpec, config: Tile, device: torch.device) -> Recipe:
        recipe = super().plan(spec, config, device)

        def bind(ops: Operands) -> Callable[[], object]:
            assert isinstance(ops.out, torch.Tensor)
            self.outs.append(ops.out)
            return recipe.bind(ops)

        return replace(recipe, bind=bind)


def test_contenders_write_into_one_scratch_result_that_lies_as_the_real_one(fresh: Install) -> None:
    one, two = Watched("one", 1, nap_s=0.002), Watched("two", 2)
    fresh(one, two)
    kept = torch.full((2, 4), 7.0).t()
    posed = mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 4], out=kept)
    dispatch.choose(posed)
    (first,), (second,) = one.outs, two.outs
    assert first.data_ptr() == second.data_ptr() != kept.data_ptr()
    assert first.stride() == kept.stride()
    assert kept.eq(7.0).all()


def test_only_whom_auto_would_take_is_measured(fresh: Install, trials: list[list[str]]) -> None:
    waits = Dawdler("waits", 3, syncs=True)
    emulated = Dawdler("emulated", 4, here=Availability(True, emulated=True))
    fresh(waits, emulated, Dawdler("null", 5), Dawdler("picky", 6, reasons=["why"]), *pair())
    assert mg.plan(problem()).backend == "fast"
    assert trials == [["slow", "fast"]]
    fresh(waits, emulated, Dawdler("alone", 7))
    assert mg.plan(problem(dtype=torch.float64)).backend == "alone"
    assert len(trials) == 1


def test_two_threads_measure_a_class_once_and_both_are_answered(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, meeting = vars(trial)["measure"], threading.Barrier(2)
    answers: list[torch.Tensor] = []

    def measure(*given: Any, **more: Any) -> dict[str, Timing]:
        time.sleep(0.1)  # the other thread has come meanwhile
        found: dict[str, Timing] = real(*given, **more)
        return found

    def work() -> None:
        meeting.wait()
        answers.append(mg.solve(problem()))

    fresh(*pair())
    monkeypatch.setattr(trial, "measure", measure)
    threads = [threading.Thread(target=work) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 2
    assert all(answer.eq(2).all() for answer in answers)
    assert len(trials) == 1


def test_what_one_thread_learns_while_another_asks_is_not_lost(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(*pair())
    table, real = tuning.table(), tuning.TuningTable._classes_on
    other = threading.Thread(target=learn, args=(problem(), FLOPS), kwargs={"slow": 1.0, "fast": 5.0})

    def classes(its: tuning.TuningTable, *given: Any) -> Any:
        found = real(its, *given)
        if other.ident is None:
            other.start()
            other.join(0.3)
        return found

    monkeypatch.setattr(tuning.TuningTable, "_classes_on", classes)
    assert table.estimates(problem().spec, CPU, True) == []
    other.join()
    assert {e.backend for e in table.estimates(problem().spec, CPU, True)} == {"slow", "fast"}


@dataclass
class Other(Dawdler):
    """A fake that has another config now."""

    def configs(self, spec: ProblemSpec, device: torch.device) -> list[Tile]:
        return [Tile(64)]


def test_what_was_measured_with_another_config_is_asked_anew(fresh: Install, trials: list[list[str]]) -> None:
    fresh(Dawdler("one", 1), Dawdler("two", 2, nap_s=0.003))
    learn(problem(), FLOPS, one=12.0, two=10.0)
    assert mg.plan(problem()).backend == "two"
    assert trials == []
    fresh(Dawdler("one", 1), Other("two", 2, nap_s=0.003))
    assert mg.plan(problem()).backend == "one"
    assert len(trials) == 1
    assert {m.ran for m in times_of(problem()).values()} == {"16", "64"}


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
    asked: Any,
    config: Any,
    variables: dict[str, str],
    in_capture: bool,
) -> None:
    for name, text in variables.items():
        monkeypatch.setenv(name, text)
    settings.cache_clear()
    monkeypatch.setattr(bound, "capturing", lambda device: in_capture)
    fresh(*pair())
    assert mg.solve(problem(), asked, config).eq(1).all()
    assert trials == []


def test_who_is_hopeless_at_a_glance_is_asked_for_no_more(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "HOPELESS", 3.0)
    hopeless = Dawdler("hopeless", 3, nap_s=0.1)
    fresh(hopeless, Dawdler("fast", 2, nap_s=0.0005))
    assert mg.solve(problem()).eq(2).all()
    assert (hopeless.launches, trials) == (2, [["fast"]])
    fresh(hopeless, Dawdler("fast", 2))
    assert mg.solve(problem()).eq(2).all()
    assert hopeless.launches == 2


def test_who_only_keeps_the_host_busy_is_not_hopeless(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trial, "HOPELESS", 3.0)
    looks = iter((20.0, 0.9 * trial.SLOW_US))
    monkeypatch.setattr(trial, "glance", lambda call, device: next(looks))
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    assert trials == [["slow", "fast"]]


def test_a_backend_that_was_not_there_is_asked(fresh: Install, trials: list[list[str]]) -> None:
    slow, fast = pair()
    fresh(slow, fast)
    assert mg.plan(problem()).backend == "fast"
    fresh(*pair(), Dawdler("new", 3))
    assert mg.plan(problem()).backend == "new"
    assert len(trials) == 2


def test_where_measuring_is_forbidden_nothing_that_was_measured_so_counts(
    fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    monkeypatch.setenv("MULTIGEMM_MEASURE", "0")
    settings.cache_clear()
    fresh(*pair())
    assert mg.plan(problem()).backend == "slow"
    assert mg.plan(problem(64)).backend == "slow"


def test_a_choice_outlives_the_memory_of_choices(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dispatch, "CHOICES_KEPT", 1)
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    learn(problem(), FLOPS, slow=1.0, fast=9.0)
    mg.plan(problem(dtype=torch.float64))
    assert mg.plan(problem()).backend == "fast"
    dispatch.forget()
    assert mg.plan(problem()).backend == "slow"


def test_problems_without_work_are_not_timed(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    mg.solve(mg.GroupedGemmProblem(torch.ones(0, 3), torch.ones(3, 2), offsets=[0, 0]))
    mg.solve(mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 0]))
    mg.solve(mg.GroupedGemmProblem(torch.ones(2, 4, 3), torch.ones(2, 3, 2), valid_rows=[0, 0]))
    assert trials == []


def test_a_trial_that_fails_altogether_is_reported_and_the_call_succeeds(
    fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(device: torch.device) -> float:
        raise RuntimeError("this allocator does not tell")

    fresh(*pair())
    monkeypatch.setattr(trial, "room", fail)
    with pytest.warns(RuntimeWarning, match="auto could not measure: RuntimeError: this allocator does not tell"):
        assert mg.solve(problem()).eq(1).all()


def test_no_scratch_is_made_that_is_far_larger_than_the_result(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    for across, measured in ((64, 0), (3, 1)):
        out = torch.zeros(4, across)[:, :2]
        mg.solve(mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 4], out=out))
        assert len(trials) == measured


def test_explain_shows_the_times_that_its_own_call_measured(fresh: Install) -> None:
    fresh(*pair())
    told = mg.explain(problem())
    assert told.chosen == "fast"
    assert told.why.startswith("fastest measured, ")
    times = {c.name: (c.us or 0.0, c.source, c.expected) for c in told.candidates}
    assert times["slow"][0] > times["fast"][0] >= 500
    assert [rest for _, *rest in times.values()] == [[SOURCE, False]] * 2


def test_a_trial_warns_of_nothing_where_all_goes_well(fresh: Install) -> None:
    fresh(*pair())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.solve(problem())
