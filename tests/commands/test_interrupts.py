"""Ctrl-C at any moment of `bench` and `fuzz`: nothing that was measured is lost, and the user is told how to go on."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from multigemm import interrupts
from multigemm.__main__ import main

ROOT = Path(__file__).parents[2]
COUNT = 400
"""Workloads that no machine measures before the last moment."""
SHAPES = [word for groups in range(2, 2 + COUNT) for word in ("--shape", f"{groups},16,64,64")]
DRAW = random.Random(20261122)
MOMENTS = [DRAW.uniform(0.2, 2.5), DRAW.uniform(2.5, 4.5)]


def hear_interrupts() -> None:
    """As in a terminal: a shell's background jobs ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def interrupted(folder: Path, words: list[str], after_s: float) -> tuple[int, str, Any]:
    """Exit code and standard error of a command that its terminal interrupts, and the JSON that it has written."""
    command = [sys.executable, "-m", "multigemm", *words, "--device", "cpu", "--json", "x.json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with subprocess.Popen(
        command, cwd=folder, env=environment, start_new_session=True, text=True, preexec_fn=hear_interrupts,
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    ) as process:  # fmt: skip
        time.sleep(after_s)
        os.killpg(process.pid, signal.SIGINT)
        _, told = process.communicate(timeout=120)
    assert (folder / "x.json").exists(), told
    return process.returncode, told, json.loads((folder / "x.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "isolated"), [*((at, False) for at in MOMENTS), (DRAW.uniform(3, 5), True)])
def test_a_benchmark_keeps_what_it_measured(moment: float, isolated: bool, tmp_path: Path) -> None:
    words = ["bench", *SHAPES, "--dtypes", "fp32", "--floor", "1,1", "--budget-ms", "30", "--out", "out"]
    code, told, report = interrupted(tmp_path, [*words, *(["--isolate"] if isolated else [])], moment)
    assert code == 130 and "Traceback" not in told, told
    begun = len(re.findall(rf"^\[\d+/{COUNT}\]", told, re.MULTILINE))
    kept = {row["case"] for row in report["rows"]}
    assert max(0, begun - 1) <= len(kept) <= begun
    if not kept:
        assert "stopped before anything was measured" in told
        return
    assert f"stopped: workloads measured: {len(kept)}, left: {COUNT - len(kept)}; kept in out/report.json" in told
    assert "go on: multigemm bench " in told and "--resume" in told
    assert report == json.loads((tmp_path / "out" / "report.json").read_text())


@pytest.mark.slow
@pytest.mark.parametrize("moment", MOMENTS, ids="{:.1f}s".format)
def test_a_campaign_keeps_what_it_checked(moment: float, tmp_path: Path) -> None:
    words = ["fuzz", "--backends", "cpu", "--seconds", "100", "--jobs", "2", "--seed", "3"]
    code, told, summary = interrupted(tmp_path, words, moment)
    assert code == 130 and "Traceback" not in told, told
    assert summary["interrupted"] and summary["checks"].get("cpu", 0) == summary["problems"]
    if "stopped before anything was checked" in told:
        assert summary["problems"] == 0
        return
    assert f"stopped after {summary['problems']} problems; kept in x.json" in told
    seed = re.search(r"go on with others: multigemm fuzz .* --seed (\d+)$", told, re.MULTILINE)
    assert seed and int(seed[1]) >= 3 + summary["problems"]


@pytest.fixture
def _interruptible() -> Iterator[None]:
    """SIGINT as in a shell's foreground, which its background jobs ignore."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interruptible")
def test_what_is_held_is_raised_at_the_end() -> None:
    done = []

    def hold_twice() -> None:
        with interrupts.held():
            with interrupts.held():
                signal.raise_signal(signal.SIGINT)
            done.append("the inner part does not raise in the outer one")

    with pytest.raises(KeyboardInterrupt):
        hold_twice()
    assert done


def test_a_termination_is_an_interrupt_inside_and_not_outside() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), interrupts.of_termination():
        signal.raise_signal(signal.SIGTERM)
    assert signal.getsignal(signal.SIGTERM) is before


@pytest.mark.parametrize("option", ["--backend", "--backend="])
def test_former_spellings_are_taken_and_not_shown(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = [option + "cpu"] if option.endswith("=") else [option, "cpu"]
    assert main(["explain", "--dtype", "fp32", "--device", "cpu", *words]) == 0
    for command in ("explain", "verify", "demo", "fuzz", "bench", "tune"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        shown = capsys.readouterr().out
        assert not re.search(r"--(backend|dtype|time-budget)\b(?!s)", shown), command
        assert "--backends" in shown
