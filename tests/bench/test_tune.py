"""Tuning: what is tried in which order, what failures leave, and reports that serve as a tuning."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multigemm.__main__ import main
from multigemm.backends import registry
from multigemm.backends.cpu import BACKEND as CPU_BACKEND
from multigemm.bench import entries, reports
from multigemm.bench.entries import Entry, Prepared, backend_entry
from multigemm.bench.reports import KILLED, Report
from multigemm.bench.runner import Options, Runner
from multigemm.bench.suites import UNTUNED
from multigemm.bench.tune import ClassResult, from_reports, kept_of, lines_of, tuner
from multigemm.bench.workloads import Workload, parse_shape
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select import table as tuning
from multigemm.select.problem_class import Query
from tests.support.bench_entries import CASE, CPU, FAST, loop, run


@pytest.mark.slow
def test_tuning_measures_keeps_failures_and_writes_a_file_to_share(
    tmp_path: Path, setting: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    setting(MULTIGEMM_CACHE_DIR=tmp_path / "cache")
    words = ["--shape", "G=3,T=24,N=8,K=16", "--shape", "G=3,T=24,N=8,K=16,dist=empty"]
    words += ["--dtypes", "fp32", "--device", "cpu"]
    assert main(["tune", *words, "--out", str(tmp_path / "t.json"), "--configs", "2"]) == 0
    assert len(tuning.table().own.entries()) == 1
    assert main(["cache", "clear"]) == 0
    assert main(["cache", "import", str(tmp_path / "t.json")]) == 0
    (kept,) = tuning.table().own.entries()
    assert [*kept.backends] == ["cpu"]
    assert kept.backends["cpu"].us > 0
    told = capsys.readouterr().out
    assert "first guess" in told and "chosen: cpu with " in told and "no other backend was measured" in told


def test_when_tuning_runs_out_of_time_every_backend_has_had_its_first_config(monkeypatch: pytest.MonkeyPatch) -> None:
    case, other = parse_shape("G=3,T=24,N=8,K=16,dist=empty", "fp32"), parse_shape("2,4,8,8", "fp32")
    run = tuner(["cpu"], CPU, Options(budget_ms=1.0, look_ms=1.0, total_s=3600.0))
    # the time is over once the workload has begun
    monkeypatch.setattr(run.progress, "step", lambda *_: setattr(run, "started", -1e9))
    report = run.run([case, other])
    assert [row.entry for row in report.timed()] == ["cpu#0"]
    assert report.unfinished == [other.key]
    told = "\n".join(lines_of(report))
    assert f"{len(report.rows) - 1} configs not tried within the time budget" in told and "first guess" in told
    (kept,) = kept_of(report)
    assert kept.backends["cpu"].config and kept.backends["cpu"].failures == {}


def test_ctrl_c_keeps_what_was_tuned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = Runner._case

    def interrupted(self: Runner, case: Workload, tried: list[Entry]) -> Any:
        if "3,4" in case.key:
            raise KeyboardInterrupt
        return real(self, case, tried)

    monkeypatch.setattr(Runner, "_case", interrupted)
    words = ["--shape", "2,4,8,8", "--shape", "3,4,8,8", "--device", "cpu", "--configs", "1", "--no-record", "--quiet"]
    assert main(["tune", *words, "--out", str(tmp_path / "t.json")]) == 130
    assert len(json.loads((tmp_path / "t.json").read_text())["entries"]) == 1
    told = capsys.readouterr()
    assert "is kept" in told.err and "not reached: shape:3,4,8,8" in told.out


def test_sizes_on_the_host_are_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def query(problem: GroupedGemmProblem) -> Any:  # on a CPU sizes lie on the host anyway
        return SimpleNamespace(problem_class=str(Query(problem).problem_class) + next(told))

    told = itertools.cycle(["", " elsewhere"])
    monkeypatch.setattr(entries, "Query", query)
    by_sizes = replace(CPU_BACKEND, decides_at_bind=True)
    monkeypatch.setattr(registry, "get", lambda name: by_sizes)
    found = entries.config_entries(parse_shape("G=3,T=24,N=8,K=16,dist=empty"), ["cpu"], 2, CPU)
    assert [entry.name for entry in found] == ["cpu#0", "cpu[host sizes]#0", "cpu#1", "cpu[host sizes]#1"]
    assert [entry.optional for entry in found] == [False, False, True, True]
    assert len({entry.known["problem_class"] for entry in found}) == 2


@pytest.mark.slow
def test_a_config_that_ended_its_process_is_not_tried_again_and_three_end_their_backend() -> None:
    four = [Entry(f"x#{number}", "backend", loop, known={"config": f"config {number}"}) for number in range(4)]
    report = run([CASE], four)
    for struck, left in ((2, ["skipped", "skipped", "ok", "ok"]), (3, ["skipped"] * 4)):
        for row, entry in zip(report.rows[:struck], four, strict=False):
            row.notes, row.config = [KILLED], entry.known["config"]
        again = Runner(lambda case: four, CPU, FAST, replace(report, rows=report.rows[:struck]))
        rows = again.run([parse_shape("2,4,8,8")]).rows[struck:]
        assert [row.status for row in rows] == left
        assert rows[0].reason.startswith("not tried again")
    assert rows[3].reason == "not tried: it hung or crashed 3 times"


def test_configs_far_from_the_best_keep_their_quick_time() -> None:
    samples = {"fast": 1e-4, "near": 1.1e-4, "far": 1e-3}

    def napping(name: str) -> Entry:
        return Entry(f"x#{name}", "backend", lambda t: Prepared(lambda: time.sleep(samples[name]), t.out), checks=False)

    report = Report({"device_type": "cpu"}, {}, {"bf16": {"tflops": 1.0, "tbps": 1.0}})
    options = Options(reps=20, budget_ms=50.0, look_ms=1.0, modes=())
    run = Runner(lambda case: [napping(name) for name in samples], CPU, options, report)
    counts = {row.entry: row.eager.count for row in run.run([CASE]).rows if row.eager}
    assert counts["x#far"] < counts["x#fast"]


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


@pytest.mark.slow
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


@pytest.mark.slow
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
