"""Measuring once what nothing tells: which backends are in question, and what becomes of the times."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import api as dispatch
from multigemm.backend import Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from multigemm.select import measure_once as trial
from multigemm.select import table as tuning
from multigemm.select.measured_cache import SOURCE
from multigemm.select.nearest import Estimate
from multigemm.select.timing import Timing
from multigemm.settings import settings
from tests.fake_backends import Dawdler, Fake, Tile, problem
from tests.trial_cases import CPU, FLOPS, Install, known, learn, pair, times_of


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


def test_the_memory_of_what_was_picked_is_bounded_and_keeps_the_latest(
    fresh: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists of ever other sizes make ever other choices."""
    monkeypatch.setattr(dispatch, "PICKS_KEPT", 2)
    fresh(*pair())
    picked = []
    for dtype in (torch.float32, torch.float64, torch.float16):
        mg.plan(problem(dtype=dtype))
        picked.append(next(reversed(dispatch._picks)))
    assert [*dispatch._picks] == picked[1:]


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
