"""Tuning: what is tried in which order, what failures leave, and reports that serve as a tuning."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from multigemm.__main__ import main
from multigemm.bench import reports, tune
from multigemm.bench.entries import backend_entry
from multigemm.bench.suites import UNTUNED
from multigemm.bench.tune import ClassResult, Limits, Tuner, from_reports, of_place
from multigemm.bench.workloads import parse_shape
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from multigemm.select import registry
from multigemm.select import table as tuning
from multigemm.select.problem_class import class_of
from tests.support.bench_entries import CASE, CPU, run


def test_tuning_measures_keeps_failures_and_writes_a_file_to_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from multigemm import settings

    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    settings.settings.cache_clear()
    tuning.table.cache_clear()
    words = [
        "--shape",
        "G=3,T=24,N=8,K=16",
        "--shape",
        "G=3,T=24,N=8,K=16,dist=empty",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
    ]
    try:
        assert main(["tune", *words, "--out", str(tmp_path / "t.json"), "--configs", "2"]) == 0
        assert len(tuning.table().own()) == 1
        assert main(["cache", "clear"]) == 0
        assert main(["cache", "import", str(tmp_path / "t.json")]) == 0
        (kept,) = tuning.table().own()
    finally:
        settings.settings.cache_clear()
        tuning.table.cache_clear()
    assert [*kept.backends] == ["cpu"]
    assert kept.backends["cpu"].us > 0
    assert "first guess" in capsys.readouterr().out


def test_when_tuning_runs_out_of_time_every_backend_has_had_its_first_config() -> None:
    told: list[str] = []
    tuner = Tuner(CPU, ["cpu"], Limits(total_s=-1.0, quick_ms=1.0, careful_ms=1.0), told.append)
    tuner._case(parse_shape("G=3,T=24,N=8,K=16,dist=empty", "fp32"))
    (result,) = tuner.classes.values()
    assert list(result.us) == [("cpu", 0)]
    assert any("not tried within the time budget" in text for text in told)
    assert tuner.run([CASE]) != []
    assert tuner.unfinished == [CASE.key]


def test_sizes_on_the_host_are_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(problem: GroupedGemmProblem, spec: ProblemSpec) -> str:  # on a CPU sizes lie on the host anyway
        return str(class_of(problem, spec)) + next(told)

    told = iter(["", " elsewhere"])
    monkeypatch.setattr(tune, "class_of", key)
    monkeypatch.setattr(type(registry.get("cpu")), "decides_at_bind", True, raising=False)
    tuner = Tuner(CPU, ["cpu"], Limits(configs=1, quick_ms=1.0, careful_ms=1.0), lambda text: None)
    found = tuner.run([parse_shape("G=3,T=24,N=8,K=16,dist=empty")])
    assert [m.key.split()[10:] for m in found] == [["host-sizes"], ["host-sizes", "elsewhere"]]
    assert [[*entry.backends] for entry in found] == [["cpu"]] * 2
    assert found[0].backends["cpu"].us != found[1].backends["cpu"].us


def test_where_sizes_lie_is_the_same_to_who_never_looks_at_them() -> None:
    times = {("cublas", 0): 5.0, ("cublas[host sizes]", 0): 4.0, ("cupy", 0): 3.0, ("cupy", 1): 2.0}
    assert of_place(times, "") == {("cublas", 0): 5.0, ("cupy", 0): 3.0, ("cupy", 1): 2.0}
    assert of_place(times, "[host sizes]") == {("cublas[host sizes]", 0): 4.0, ("cupy", 0): 3.0, ("cupy", 1): 2.0}


def test_rows_of_kernels_that_never_look_at_host_sizes_count_for_them_too() -> None:
    report = run([CASE], [backend_entry("cpu"), backend_entry("cpu", host_sizes=True)])
    (device, special) = report.rows
    device.entry, device.us, special.us = "other", 5.0, 4.0
    device.problem_class = device.problem_class.replace("host-sizes", "device-sizes")
    kept = {(n, e.key.split()[-1]): m.us for e in from_reports([report]) for n, m in e.backends.items()}
    where = special.problem_class.split()[-1]
    assert kept == {("other", "device-sizes"): 5.0, ("other", where): 5.0, ("cpu", where): 4.0}
    device.suite = special.suite = UNTUNED
    assert from_reports([report]) == []


def test_a_report_serves_as_a_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run([CASE, parse_shape("G=3,T=24,N=8,K=16,dist=empty")], [backend_entry("cpu"), backend_entry("auto")])
    rows = [row for row in report.rows if row.entry == "cpu"]
    reports.write(tmp_path / "r.json", report)
    (found,) = from_reports([reports.read(tmp_path / "r.json")])
    assert [*found.backends] == ["cpu"]
    assert found.device == "cpu"
    assert found.key == rows[0].problem_class == rows[1].problem_class
    assert found.backends["cpu"].config == {}  # the backend keeps its own first guess
    assert found.backends["cpu"].us == pytest.approx(((rows[0].us or 0) * (rows[1].us or 0)) ** 0.5, abs=0.02)
    words = ["--no-record", "--from-report", str(tmp_path / "r.json"), "--out", str(tmp_path / "t.json")]
    assert main(["tune", *words]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["entries"][0]["key"] == found.key


def test_reports_of_one_config_are_averaged_and_a_new_config_replaces_the_old() -> None:
    first, second, third = (run([CASE], [backend_entry("cpu")]) for _ in range(3))
    for report, us in ((first, 4.0), (second, 9.0), (third, 1.0)):
        report.rows[0].us = us
    assert [e.backends["cpu"].us for e in from_reports([first, second])] == [6.0]
    third.rows[0].config, third.rows[0].fields = "another", {"rows": 7}
    assert [e.backends["cpu"].us for e in from_reports([first, second, third])] == [1.0]
    assert [e.backends["cpu"].us for e in from_reports([third, first, second])] == [6.0]


def test_the_winner_is_the_least_worst_over_a_class() -> None:
    result = ClassResult("k", us={
        ("x", 0): {"even": 10.0, "skewed": 30.0},
        ("x", 1): {"even": 11.0, "skewed": 21.0},
        ("x", 2): {"even": 9.0},
        ("y", 0): {"even": 12.0, "skewed": 20.0},
        ("y", 1): {"even": 11.95, "skewed": 20.0},
    })  # fmt: skip
    assert result.winner("x") == ("x", 1)
    assert result.winner("y") == ("y", 0)  # within a per cent of the best: the first guess stays
    assert result.winner("z") is None
