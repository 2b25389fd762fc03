"""Where nothing is measured, or not everybody: no room, no time, no work, settled, forbidden, hopeless, failing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability
from multigemm.planning import binding as bound
from multigemm.select import measure_once as trial
from multigemm.select.clocks import FLUSH_BYTES
from multigemm.settings import settings
from tests.fake_backends import Dawdler, problem
from tests.trial_cases import Install, pair


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


def test_only_whom_auto_would_take_is_measured(fresh: Install, trials: list[list[str]]) -> None:
    waits = Dawdler("waits", 3, syncs=True)
    emulated = Dawdler("emulated", 4, here=Availability(True, emulated=True))
    fresh(waits, emulated, Dawdler("null", 5), Dawdler("picky", 6, reasons=["why"]), *pair())
    assert mg.plan(problem()).backend == "fast"
    assert trials == [["slow", "fast"]]
    fresh(waits, emulated, Dawdler("alone", 7))
    assert mg.plan(problem(dtype=torch.float64)).backend == "alone"
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
