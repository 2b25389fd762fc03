"""What a forecast was fitted to counts again when it is fitted anew."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from multigemm.bench import fit, results
from multigemm.bench.results import Report
from multigemm.bench.suites import suite
from multigemm.select import pair
from multigemm.select.forecast import shipped
from tests.made_up_runs import made_up, rows


def test_a_model_tells_what_it_was_fitted_to() -> None:
    its = fit.ratios(made_up()[0])
    told = fit.fitted_to(fit.fit(("ieee half", "x", "y"), its, steps=3))
    assert told.logs == pytest.approx(its.logs)
    assert (told.points == its.points).all()
    assert (told.words, told.cases) == (its.words, its.cases)


def test_what_was_measured_again_counts_anew_and_the_rest_stays() -> None:
    runs = made_up(6)[0]
    old = fit.ratios(runs)
    again = fit.ratios([(replace(runs[0][0], us=99.0), runs[0][1])])
    both = fit.joined(again, old)
    assert both.places == [old.places[0], *old.places[1:]]
    assert both.logs.tolist() == [again.logs[0], *old.logs[1:]]
    assert len(both.words) == len(both.points) == 6
    other = fit.ratios([(replace(runs[0][0], device="an H100"), runs[0][1])])
    on_h200 = fit.ratios(runs[:1])
    assert len(fit.joined(other, on_h200).logs) == 2  # on another device
    assert len(fit.joined(again, on_h200).logs) == 1


def test_a_report_of_some_workloads_leaves_all_others_as_they_were(tmp_path: Path) -> None:
    cases = suite("small")[:6]
    device = {"device": "an H100", "device_type": "cuda"}
    first = Report(device, {}, {}, [row for i, case in enumerate(cases) for row in rows(case, x=9.0 + i, y=7.0, z=5.0)])
    later = Report(device, {}, {}, [*rows(cases[0], x=70.0, y=7.0)])
    for name, report in (("first", first), ("later", later)):
        results.write(tmp_path / f"{name}.json", report)
    words = ["--steps", "2", "--more", "0"]
    assert fit.main([str(tmp_path / "a.npz"), str(tmp_path / "first.json"), *words]) == 0
    former = ["--former", str(tmp_path / "a.npz")]
    assert fit.main([str(tmp_path / "b.npz"), str(tmp_path / "later.json"), *words, *former]) == 0
    old, new = ({m.names[1:]: fit.fitted_to(m) for m in pair.read(tmp_path / f"{name}.npz")} for name in "ab")
    assert set(old) == set(new) == {("x", "y"), ("x", "z"), ("y", "z")}
    assert dict(zip(new["x", "y"].cases, np.exp(new["x", "y"].logs), strict=True)) == pytest.approx(
        {case.key: 10.0 if i == 0 else (9.0 + i) / 7.0 for i, case in enumerate(cases)}, rel=1e-3
    )
    assert new["y", "z"].logs == pytest.approx(old["y", "z"].logs, rel=1e-3)


def test_what_ships_tells_ratios_of_every_workload() -> None:
    model = shipped().models["ieee half", "cupy", "triton"]
    told = fit.fitted_to(model)
    assert len(set(told.places)) == len(told.places) > 2000
    assert 0.0 < np.abs(told.logs).mean() < 0.5
