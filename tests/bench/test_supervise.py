"""The parent process: children that hang, die or lose their device are replaced, and the culprit is named."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multigemm.__main__ import main
from multigemm.bench import reports
from multigemm.bench import supervise as supervise_module
from multigemm.bench.supervise import Marker, read, supervise

CHILD = """
import os, pathlib, sys, time
marker = pathlib.Path(sys.argv[sys.argv.index("--marker") + 1])
log = marker.with_name("log")
log.write_text(log.read_text() + " ".join(sys.argv[1:]) + "\\n" if log.exists() else " ".join(sys.argv[1:]) + "\\n")
what = sys.argv[len(log.read_text().splitlines())] if "--resume" in sys.argv else sys.argv[1]
if what == "slow":
    time.sleep(1.2)
marker.write_text('{"stage": "' + what + '"}')
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


def run(tmp_path: Path, *plan: str, stall: float = 0.8, go_on: bool = True) -> tuple[int, list[str], list[str]]:
    """Exit code, what was blamed, and the command lines of the children."""
    blamed: list[str] = []

    def blame(said: dict[str, Any], reason: str) -> list[str] | None:
        blamed.append(f"{said.get('stage')}: {reason}")
        return ["--extra"] if go_on else None

    code = supervise(list(plan), tmp_path / "m", stall, blame, program=(sys.executable, "-c", CHILD))
    return code, blamed, (tmp_path / "log").read_text().splitlines()


def test_a_child_that_ends_well_is_left_alone(tmp_path: Path) -> None:
    code, blamed, children = run(tmp_path, "fine")
    assert (code, blamed, len(children)) == (0, [], 1)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("hang", "hang: no answer within 0.8 s"),
        ("crash", "crash: the process died of SIGSEGV"),
        ("odd", "odd: the process ended with code 9"),
    ],
)
def test_a_culprit_is_blamed_and_a_fresh_child_goes_on(tmp_path: Path, what: str, reason: str) -> None:
    code, blamed, children = run(tmp_path, what, "fine")
    assert code == 0
    assert blamed == [reason]
    assert children[1].endswith("--extra --resume")


def test_a_lost_device_restarts_without_blame(tmp_path: Path) -> None:
    code, blamed, children = run(tmp_path, "lost", "regression")
    assert (code, blamed, len(children)) == (1, [], 2)


def test_a_child_with_news_may_take_long(tmp_path: Path) -> None:
    code, blamed, _ = run(tmp_path, "talk")
    assert (code, blamed) == (0, [])


def test_a_child_may_take_long_to_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert run(tmp_path, "slow")[:2] == (0, [])
    (tmp_path / "log").unlink()
    monkeypatch.setattr(supervise_module, "START_S", 0.3)
    assert run(tmp_path, "slow", "fine", stall=0.3)[1] == ["None: no answer within 0.3 s"]


def test_blame_can_end_it(tmp_path: Path) -> None:
    code, blamed, children = run(tmp_path, "crash", "fine", go_on=False)
    assert (code, len(blamed), len(children)) == (1, 1, 1)


def test_a_marker_without_a_path_is_silent_and_one_with_a_path_is_whole(tmp_path: Path) -> None:
    Marker(None).say("nothing")
    marker = Marker(tmp_path / "m")
    marker.say("one", rows=[1])
    assert read(tmp_path / "m") == {"stage": "one", "rows": [1]}
    assert read(tmp_path / "absent") == {}
    assert [p.name for p in tmp_path.iterdir()] == ["m"]


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

BACKEND = Sleeper()
"""


@pytest.mark.slow
def test_a_backend_that_hangs_is_a_row_and_the_others_are_measured(tmp_path: Path) -> None:
    site = tmp_path / "site"
    (site / "sleeper-1.dist-info").mkdir(parents=True)
    (site / "sleeper.py").write_text(SLEEPER)
    (site / "sleeper-1.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: sleeper\nVersion: 1\n")
    (site / "sleeper-1.dist-info" / "entry_points.txt").write_text("[multigemm.backends]\nsleeper = sleeper:BACKEND\n")
    root = Path(__file__).parents[2]
    environment = dict(os.environ) | {"PYTHONPATH": f"{site}{os.pathsep}{root}"}
    words = ["bench", "--shape", "2,8,8,8", "--device", "cpu", "--isolate", "--stall", "15"]
    words += ["--backend", "sleeper,cpu", "--peers", "none", "--floor", "1,1"]
    done = subprocess.run(
        [sys.executable, "-m", "multigemm", *words, "--out", str(tmp_path / "out")],
        env=environment, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = {row.entry: row for row in reports.read(tmp_path / "out" / "report.json").rows}
    assert rows["sleeper"].status == "failed"
    assert rows["sleeper"].reason == "no answer within 15 s (preparing and checking)"
    assert rows["cpu"].status == rows["dense"].status == "ok"
    assert "going on in a fresh process after: no answer within 15 s" in done.stderr


def test_a_supervised_run_can_be_called_from_python(tmp_path: Path) -> None:
    words = ["bench", "--shape", "2,4,8,8", "--device", "cpu", "--isolate", "--backend", "cpu", "--peers", "none"]
    assert main([*words, "--floor", "1,1", "--json-only", "--quiet", "--out", str(tmp_path)]) == 0
    report = reports.read(tmp_path)
    assert [row.entry for row in report.timed()] == ["cpu", "dense"]
    assert report.method["command"].endswith("--isolate --backend cpu --peers none --floor 1,1")
