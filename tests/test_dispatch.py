"""Choice, plans and explanations, with small backends made for the purpose."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability, Backend, Recipe
from multigemm.cuda.disk_cache import DiskCache
from multigemm.planning import binding as bound
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry
from multigemm.select import table as tuning
from multigemm.select.choose import forget
from multigemm.select.measured import Measured
from multigemm.settings import Settings, settings
from tests.fake_backends import Dawdler, Fake, Tile, problem


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


def test_auto_goes_by_measurement_then_by_the_nearest(install: Callable[..., None]) -> None:
    install(Fake("first", 1), Fake("second", 2))
    spec = problem().spec
    for name, us in (("first", 30.0), ("second", 10.0)):
        tuning.table().record(Measured(name, {"size": 32}, us, "cpu", tuning.spec_key(spec, equal=True)))
    plan = mg.plan(problem())
    assert (plan.backend, plan.config) == ("second", Tile(32))
    assert "measured (10.0 us" in plan.why
    assert mg.plan(problem(4000)).backend == "second"
    explained = str(mg.explain(problem(4000)))
    assert "first    can, about 3.00 x the fastest (from 1 measured classes, the nearest jagged_m g1" in explained
    assert "expected to be fastest (from 1 measured" in explained
    assert mg.plan(problem(), config={"size": 16}).config == Tile(16)


def test_one_measured_backend_shows_its_time_and_wins_nothing_by_it(install: Callable[..., None]) -> None:
    install(Fake("first", 1), Fake("second", 2))
    asked, near = (mg.GroupedGemmProblem(torch.ones(rows, 3), torch.ones(3, 77), offsets=[0, rows]) for rows in (4, 64))
    DiskCache("tuning").clear()
    tuning.table.cache_clear()
    tuning.table().record(Measured("second", {}, 10.0, "cpu", tuning.spec_key(asked.spec, equal=True)))
    told = mg.explain(asked)
    assert told.chosen == "first"
    assert "second   can, 10.0 us (" in str(told)
    for name, us in (("first", 30.0), ("second", 20.0)):
        tuning.table().record(Measured(name, {}, us, "cpu", tuning.spec_key(near.spec, equal=True)))
    told = mg.explain(asked)
    assert told.chosen == "second"
    assert "10.0 us, about 1.00 x the fastest (from 1 measured classes" in str(told)
    assert "expected to be fastest" in told.why


def test_only_those_that_can_are_compared_and_by_the_configs_that_they_would_run(install: Callable[..., None]) -> None:
    install(Fake("first", 1), Fake("second", 2), Fake("picky", 3, reasons=["why"]))
    key = tuning.spec_key(problem(64).spec, equal=True)
    for name, us in (("first", 20.0), ("second", 10.0), ("picky", 1.0)):
        tuning.table().record(Measured(name, {}, us, "cpu", key, ran="16"))
    for name, us in (("first", 10.0), ("second", 20.0), ("picky", 1.0)):  # as near, but of another config
        tuning.table().record(Measured(name, {}, us, "cpu", key.replace("t64", "t1024"), ran="32"))
    text = str(mg.explain(problem(200)))
    assert "chosen: second" in text
    assert "cannot: why" in text
    assert "second   can, about 1.00 x the fastest" in text


def test_an_unknown_class_is_measured_once_unless_that_is_forbidden(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(tmp_path))
    slow, fast, bad = Dawdler("slow", 1, nap_s=0.004), Dawdler("fast", 2, nap_s=0.001), Fake("bad", reasons=["why"])
    settings.cache_clear()
    install(slow, fast, bad)
    assert mg.solve(problem()).eq(1).all()  # the first in order: nothing is known, and here nothing is measured
    assert (slow.launches, fast.launches) == (1, 0)
    assert Settings().measure is True
    monkeypatch.delenv("MULTIGEMM_MEASURE")
    settings.cache_clear()
    install(slow, fast, bad)
    kept = torch.full((2, 4), 7.0).t()
    posed = mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(3, 2), offsets=[0, 4], out=kept)
    assert mg.plan(posed).backend == "fast"
    assert kept.eq(7.0).all()  # what was timed wrote elsewhere
    seen = slow.launches
    assert seen >= 2
    assert mg.solve(problem()).eq(2).all()
    assert slow.launches == seen  # another class, but by its neighbour there is only one likely backend
    assert "expected to be fastest" in str(mg.explain(problem()))
    met = tuning.table().first_met(posed.spec, torch.device("cpu"), equal=True, flops=2.0 * 4 * 3 * 2)
    assert met is not None
    assert {name: m.us >= least for (name, m), least in zip(met.times.items(), (4000, 1000), strict=True)} == {
        "slow": True,
        "fast": True,
    }
    assert tuning.table().find("fast", posed.spec, torch.device("cpu"), equal=True) is None


@dataclass
class Decider(Fake):
    """A fake that would run another call for many rows, and says so."""

    decides_at_bind: bool = True

    def plan(self, spec: ProblemSpec, config: Tile, device: torch.device) -> Recipe:
        def tell(ops: Operands) -> str:
            assert ops.host_offsets is not None
            rows = int(ops.host_offsets[-1])
            return f"{'many' if rows > 600 else 'few'} calls for {rows} rows"

        return replace(super().plan(spec, config, device), tell=tell)


def test_a_backend_that_decides_by_sizes_is_judged_by_what_it_would_run(install: Callable[..., None]) -> None:
    install(Fake("steady", 1), Decider("picks", 2))
    base = tuning.spec_key(problem(4096).spec, equal=True)
    for total, us, ran in ((256, 40.0, "16/few calls for rows"), (4096, 5.0, "16/many calls for rows")):
        key = base.replace("t4096", f"t{total}")
        tuning.table().record(Measured("steady", {}, 10.0, "cpu", key, ran="16"))
        tuning.table().record(Measured("picks", {}, us, "cpu", key, ran=ran))
    assert mg.plan(problem(520)).backend == "steady"
    forget()
    assert mg.plan(problem(1000)).backend == "picks"


def test_settings_restrict_auto(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(Fake("first", 1), Fake("second", 2), Fake("third", 3))
    monkeypatch.setenv("MULTIGEMM_BACKEND", "third,second")
    settings.cache_clear()
    assert mg.plan(problem()).backend == "third"


def test_settings_that_name_no_backend(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch) -> None:
    install(Fake("first", 1), Fake("null"), Fake("slowly", here=Availability(True, emulated=True)))
    monkeypatch.setenv("MULTIGEMM_BACKEND", "first,secnd")
    settings.cache_clear()
    with pytest.raises(mg.UnknownBackend, match="MULTIGEMM_BACKEND holds 'secnd'"):
        mg.plan(problem())
    monkeypatch.setenv("MULTIGEMM_BACKEND", "null,slowly")
    settings.cache_clear()
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


def test_threads_share_plans_without_harm(install: Callable[..., None]) -> None:
    fake = Fake("only", 9)
    install(fake)
    wrong: list[int] = []

    def work(seed: int) -> None:
        for i in range(50):
            if not mg.solve(problem(4 + (seed + i) % 3)).eq(9).all():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not wrong
    assert len(fake.planned) == 2


def test_a_broken_import_is_a_reason_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name = "broken"

        def load(self) -> Any:
            raise ImportError("libfoo.so.9 is missing")

    registry.reload()
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
        registry.reload()


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


def test_plan_repr_tells_backend_kernel_config_and_why() -> None:
    text = repr(mg.plan(problem(), "cpu"))
    assert text.startswith("Plan(cpu: ")
    assert "asked for by name" in text


def test_spec_difference_is_by_value() -> None:
    spec = problem().spec
    assert replace(spec) == spec
    assert hash(replace(spec)) == hash(spec)


def test_a_plan_made_in_a_capture_stays_in_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills its workspaces was only recorded."""
    state = [True]
    monkeypatch.setattr(bound, "capturing", lambda device: state[0])
    plan = mg.plan(mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(2, 3, 5), sizes=[1, 3]), "cpu")
    assert torch.equal(plan(), torch.full((4, 5), 3.0))
    state[0] = False
    with pytest.raises(mg.InvalidProblem, match="outside of a capture"):
        plan()
