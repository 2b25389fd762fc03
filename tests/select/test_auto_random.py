"""The script that judges `auto` on random shapes: it judges all of them, and what it has when its time is over."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_every_shape_until_the_time_is_over(tmp_path: Path) -> None:
    done = judge(tmp_path / "all.json", seconds=100.0)
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "all.json").read_text())
    assert len({row["case"] for row in report["rows"]}) == report["machine"]["compiled"] == 3
    assert all(row["auto"] == "cpu" and row["us"]["cpu"] > 0 for row in report["rows"])
    assert report["summary"]["choices"] == len(report["rows"])

    done = judge(tmp_path / "none.json", seconds=0.01)
    assert done.returncode == 1
    assert "compiling ahead ends" in done.stdout and "3 of 3 shapes are left" in done.stdout
    assert not (tmp_path / "none.json").exists()


def judge(out: Path, seconds: float) -> subprocess.CompletedProcess[str]:
    options = ["--device", "cpu", "--backends", "cpu", "--shapes", "3", "--workers", "1", "--seconds", str(seconds)]
    return subprocess.run(
        [sys.executable, "benchmarks/auto_random.py", *options, "--out", str(out)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
