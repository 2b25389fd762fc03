"""The choice of a backend by name, by list and by "auto", with small backends made for the purpose."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability, Backend, Recipe
from multigemm.backends import registry
from multigemm.problem.spec import ProblemSpec
from tests.support.concurrency import on_new_threads
from tests.support.fake_backends import Fake, problem
from tests.support.trial_cases import tune


def test_fakes_are_backends() -> None:
    assert isinstance(Fake("x"), Backend)


def test_auto_takes_the_first_that_can(install: Callable[..., None]) -> None:
    install(
        Fake("gone", 1, Availability(False, "no GPU", "pip install gone")),
        Fake("picky", 2, reasons=["K is 3, it must divide 8: pad it"]),
        Fake("slowly", 3, Availability(True, emulated=True)),
        Fake("able", 4),
        Fake("null", 5),
    )
    assert mg.solve(problem()).eq(4).all()
    text = str(mg.explain(problem()))
    for part in ("unavailable: no GPU; install with: pip install gone", "cannot: K is 3", "emulated", "chosen: able"):
        assert part in text


def test_the_sizes_decide_what_is_told(install: Callable[..., None]) -> None:
    install(Fake("able"))
    assert mg.explain(problem(4)).why.endswith("fills 4 rows")
    assert mg.plan(problem(6)).why.endswith("fills 6 rows")
    mixed = mg.GroupedGemmProblem(torch.ones(5, 3).half(), torch.ones(3, 2).bfloat16(), offsets=[0, 5])
    assert "fills 5 rows" in str(mg.explain(mixed))


def test_a_name_never_hands_over(install: Callable[..., None]) -> None:
    install(
        Fake("gone", here=Availability(False, "no GPU", "pip install gone")),
        Fake("picky", reasons=["why"]),
        Fake("able"),
    )
    with pytest.raises(mg.BackendUnavailable, match="pip install gone"):
        mg.solve(problem(), "gone")
    assert "chosen: none, backend 'gone' is not available: no GPU" in str(mg.explain(problem(), "gone"))
    with pytest.raises(mg.BackendUnsupported, match="picky: why"):
        mg.solve(problem(), "picky")


def test_a_list_means_the_first_that_can(install: Callable[..., None]) -> None:
    install(
        Fake("gone", here=Availability(False, "no GPU")),
        Fake("picky", reasons=["why"]),
        Fake("able", 3),
        Fake("also", 4),
    )
    assert mg.solve(problem(), ["gone", "picky", "able", "also"]).eq(3).all()
    with pytest.raises(mg.BackendUnsupported) as caught:
        mg.solve(problem(), ["gone", "picky"])
    assert caught.value.reasons == {"gone": ["no GPU"], "picky": ["why"]}


def test_auto_passes_over_a_plan_that_syncs(install: Callable[..., None]) -> None:
    install(Fake("waits", 1, syncs=True), Fake("flows", 2))
    assert mg.plan(problem()).backend == "flows"
    install(Fake("waits", 1, syncs=True))
    assert mg.plan(problem()).syncs


def test_other_specs_of_a_class_go_by_its_times(install: Callable[..., None]) -> None:
    """A class holds what one backend may refuse: the next one by time is taken."""
    install(Fake("first", 1), Fake("second", 2), Fake("picky", 3, reasons=["why"]))
    tune(problem(), first=20.0, second=10.0, picky=1.0)
    told = mg.explain(problem())
    assert told.chosen == "second"
    assert "cannot: why" in str(told)
    assert [c.us for c in told.candidates] == [10.0, 20.0, None]


def test_settings_restrict_auto(install: Callable[..., None], setting: Callable[..., None]) -> None:
    install(Fake("first", 1), Fake("second", 2), Fake("third", 3))
    setting(MULTIGEMM_BACKEND="third,second")
    assert mg.plan(problem()).backend == "third"


def test_settings_that_name_no_backend(install: Callable[..., None], setting: Callable[..., None]) -> None:
    install(Fake("first", 1), Fake("null"), Fake("slowly", here=Availability(True, emulated=True)))
    setting(MULTIGEMM_BACKEND="first,secnd")
    with pytest.raises(mg.UnknownBackend, match="MULTIGEMM_BACKEND holds the unknown backend 'secnd'"):
        mg.plan(problem())
    setting(MULTIGEMM_BACKEND="auto")
    with pytest.raises(mg.UnknownBackend, match=r"'auto': 'auto' chooses among all: .* leave MULTIGEMM_BACKEND empty"):
        mg.plan(problem())
    setting(MULTIGEMM_BACKEND="null,slowly")
    with pytest.raises(mg.BackendUnsupported) as caught:
        mg.plan(problem())
    assert caught.value.reasons["first"] == ["MULTIGEMM_BACKEND allows null, slowly only"]
    told = str(mg.explain(problem())).splitlines()[-1]
    assert told.startswith("chosen: none, no asked backend supports this problem; ")
    assert "; first: MULTIGEMM_BACKEND allows null, slowly only" in told
    assert "computes nothing" in caught.value.reasons["null"][0]
    assert "is emulated here" in caught.value.reasons["slowly"][0]


def test_choices_are_remembered_by_spec(install: Callable[..., None]) -> None:
    fake = Fake("only")
    install(fake)
    for rows in range(33, 65):
        mg.solve(problem(rows))
    assert len(fake.planned) == 1


def test_unknown_config_fields_are_named(install: Callable[..., None]) -> None:
    install(Fake("only"))
    with pytest.raises(mg.InvalidSetting, match="no field 'sice'; Tile has size"):
        mg.solve(problem(), "only", {"sice": 3})


def test_threads_that_meet_a_spec_together_plan_it_once(install: Callable[..., None]) -> None:
    slow, meeting = Fake("slow", 9), threading.Barrier(4)
    real = slow.plan

    def plan(*given: Any) -> Recipe:
        time.sleep(0.05)
        return real(*given)

    def work() -> None:
        meeting.wait()
        mg.solve(problem(), "slow")

    slow.plan = plan  # type: ignore[method-assign,assignment]
    install(slow)
    on_new_threads(*[work] * 4)
    assert len(slow.planned) == 1


def test_threads_share_plans_without_harm(install: Callable[..., None]) -> None:
    fake = Fake("only", 9)
    install(fake)

    def work(seed: int) -> None:
        for i in range(50):
            assert mg.solve(problem(4 + (seed + i) % 3)).eq(9).all()

    on_new_threads(*(partial(work, seed) for seed in range(8)))
    assert len(fake.planned) == 2


def forget_backends() -> None:
    """Loads backends anew, as another process would."""
    registry.get.cache_clear()
    registry._entry_points.cache_clear()


def test_a_broken_import_is_a_reason_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "broken"

        def load(self) -> Any:
            raise ImportError("libfoo.so.9 is missing")

    forget_backends()
    monkeypatch.setattr(
        registry,
        "_entry_points",
        lambda: {"broken": Point(), "odd": give(object()), "kind": give(Fake), "mute": give(Mute("mute"))},
    )
    try:
        by_name = {i.name: i for i in mg.list_backends()}
        assert "libfoo.so.9 is missing" in by_name["broken"].reason
        assert "lacks members" in by_name["odd"].reason
        assert "give an instance" in by_name["kind"].reason
        assert "ZeroDivisionError: as it is" in by_name["mute"].reason
        assert by_name["cpu"].available
        with pytest.raises(mg.BackendUnavailable, match="libfoo"):
            mg.solve(problem(), "broken")
    finally:
        monkeypatch.undo()
        forget_backends()


class Mute(Fake):
    def availability(self) -> Availability:
        raise ZeroDivisionError("as it is")


class Clumsy(Fake):
    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        raise ZeroDivisionError("as it is")


def test_a_backend_that_fails_to_say_what_it_supports_is_passed_over_and_named(install: Callable[..., None]) -> None:
    install(Clumsy("clumsy"), Fake("sound"))
    assert mg.plan(problem()).backend == "sound"
    assert "not_supported_reasons() failed: ZeroDivisionError: as it is" in str(mg.explain(problem()))
    with pytest.raises(ZeroDivisionError):  # asked for by name: its author wants to see where
        mg.solve(problem(), "clumsy")


def give(x: Any) -> Any:
    class Point:
        def load(self) -> Any:
            return x

    return Point()
