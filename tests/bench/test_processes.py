"""The parent process: children that hang, die or lose their device are replaced, and the culprit is named."""

from __future__ import annotations

import multiprocessing
import sys
import time
from multiprocessing.pool import ThreadPool
from pathlib import Path
from types import SimpleNamespace

import pytest

from multigemm.bench import processes, reports
from multigemm.bench.processes import Marker, read_marker, supervise
from multigemm.bench.reports import Report, Row
from tests.support.bench_entries import CASE, CPU, measured
from tests.support.python_process import install_backends, run_python

CHILD = """
import json, os, pathlib, sys, time
marker = pathlib.Path(sys.argv[sys.argv.index("--marker") + 1])
log = marker.with_name("log")
log.write_text(log.read_text() + " ".join(sys.argv[1:]) + "\\n" if log.exists() else " ".join(sys.argv[1:]) + "\\n")
what = sys.argv[len(log.read_text().splitlines())] if "--resume" in sys.argv else sys.argv[1]
if what == "slow":
    time.sleep(1.2)
row = {"case": "c", "name": "c", "suite": "s", "form": "jagged_m", "distribution": "d", "dtype": "bf16", "shape": "s",
       "groups": 1, "flops": 1, "bytes": 1, "floor_us": 1.0, "entry": "e", "kind": "backend",
       "status": "ok"}
marker.write_text(json.dumps({"stage": what, "rows": [row]}))
if what == "hang":
    time.sleep(60)
if what == "crash":
    os.kill(os.getpid(), 11)
if what == "talk":
    for i in range(8):
        time.sleep(0.15)
        marker.write_text('{"stage": "%d"}' % i)
sys.exit({"lost": 75, "regression": 1, "odd": 9}.get(what, 0))
"""


def run(tmp_path: Path, *plan: str, stall: float = 0.8) -> tuple[int, list[Row], list[str]]:
    """Exit code, the rows that were blamed, and the command lines of the children."""
    report = tmp_path / "report.json"
    reports.write(report, Report({}, {}, {}))
    code = supervise(list(plan), tmp_path / "m", report, stall, program=(sys.executable, "-c", CHILD))
    return code, reports.read(report).rows, (tmp_path / "log").read_text().splitlines()


def test_a_child_that_ends_well_is_left_alone(tmp_path: Path) -> None:
    code, blamed, children = run(tmp_path, "fine")
    assert (code, blamed, len(children)) == (0, [], 1)
    assert not (tmp_path / "m").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("hang", "no answer within 0.8 s (hang)"),
        ("crash", "the process died of SIGSEGV (crash)"),
        ("odd", "the process ended with code 9 (odd)"),
    ],
)
def test_a_culprit_is_a_row_and_a_fresh_child_goes_on(tmp_path: Path, what: str, reason: str) -> None:
    code, blamed, children = run(tmp_path, what, "fine")
    assert code == 0
    assert [(row.status, row.reason, row.notes) for row in blamed] == [("failed", reason, [reports.KILLED])]
    assert children[1].endswith("--resume")


def test_a_lost_device_restarts_without_blame(tmp_path: Path) -> None:
    code, blamed, children = run(tmp_path, "lost", "regression")
    assert (code, blamed, len(children)) == (1, [], 2)


@pytest.mark.slow
def test_a_child_with_news_may_take_long(tmp_path: Path) -> None:
    assert run(tmp_path, "talk")[:2] == (0, [])


@pytest.mark.slow
def test_a_child_may_take_long_to_start_but_not_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(tmp_path, "slow")[:2] == (0, [])
    (tmp_path / "log").unlink()
    monkeypatch.setattr(processes, "START_S", 0.3)
    code, blamed, children = run(tmp_path, "slow", "fine", stall=0.3)
    assert (code, blamed, len(children)) == (1, [], 1), "nobody can be blamed"
    assert "ended at its start: no answer within 0.3 s" in capsys.readouterr().err


def test_a_marker_without_a_path_is_silent_and_one_with_a_path_is_whole(tmp_path: Path) -> None:
    Marker(None).say("nothing")
    marker = Marker(tmp_path / "m")
    marker.say("one", rows=[1])
    assert read_marker(tmp_path / "m") == {"stage": "one", "rows": [1]}
    assert read_marker(tmp_path / "absent") == {}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


def test_kernels_are_compiled_ahead_until_the_time_is_over(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(multiprocessing, "get_context", lambda way: SimpleNamespace(Pool=ThreadPool))
    processes.compile_ahead([CASE], ["cpu", "cublas", "nope"], CPU, 2, 60.0, Marker(tmp_path / "marker"))
    assert read_marker(tmp_path / "marker") == {"stage": "compiling ahead", "done": 3}  # else many would be a hang
    (told,) = capsys.readouterr().err.splitlines()
    assert told.startswith(f"compiling ahead failed: nope on {CASE.key}: UnknownBackend: unknown backend 'nope'")
    monkeypatch.setattr(processes, "_compile", lambda task: time.sleep(0.2))
    processes.compile_ahead([CASE, CASE], ["cpu"], CPU, 1, 0.01, Marker(None))
    assert capsys.readouterr().err == "compiled ahead: 0 of 2, then the time was over\n"


SLEEPER = """
import time
import torch
from multigemm.backend import Availability, Recipe

class Sleeper:
    name = "sleeper"
    def availability(self): return Availability(ok=True)
    def not_supported_reasons(self, spec, device): return []
    def configs(self, spec, device): return []
    def plan(self, spec, config, device): return Recipe("sleep", None, lambda ops: lambda: time.sleep(600))

sleeper = Sleeper()
"""


@pytest.mark.slow
def test_a_backend_that_hangs_is_a_row_and_the_others_are_measured(tmp_path: Path) -> None:
    environment = install_backends(tmp_path, SLEEPER, "sleeper")
    words = (
        "--shape 2,8,8,8 --device cpu --isolate --stall 6 --backend sleeper,cpu --peers none --floor 1,1 --budget-ms 4"
    )
    done = run_python("-m", "multigemm", "bench", *words.split(), "--out", tmp_path / "out", environment=environment)
    rows = {row.entry: row for row in reports.read(tmp_path / "out" / "report.json").rows}
    assert rows["sleeper"].status == "failed"
    assert rows["sleeper"].reason == "no answer within 6 s (preparing and checking)"
    assert rows["cpu"].status == rows["dense"].status == "ok"
    assert "going on in a fresh process after: no answer within 6 s" in done.stderr


@pytest.mark.slow
def test_a_supervised_run_can_be_called_from_python(tmp_path: Path) -> None:
    report = measured(tmp_path, "--shape 2,4,8,8 --isolate --backend cpu --peers none")
    assert [row.entry for row in report.timed()] == ["cpu", "dense"]
    assert "--isolate --backends cpu --peers none" in report.method["command"]
