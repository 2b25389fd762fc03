"""A campaign on a GPU in which one backend writes where no memory is: nothing but its own results is lost."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multigemm.testing import Case

ROOT = Path(__file__).parents[2]
PLANTED = """
from dataclasses import replace
from types import SimpleNamespace

import triton
import triton.language as tl

from multigemm.select import registry

@triton.jit
def poke(pointer):
    tl.store(pointer + (1 << 44), 1.0)

class Poking:
    name = "poking"

    def __init__(self):
        self.inner = registry.get("cublas")
        for member in ("availability", "not_supported_reasons", "configs"):
            setattr(self, member, getattr(self.inner, member))

    def plan(self, spec, config, device):
        recipe = self.inner.plan(spec, config, device)
        if spec.form != "batched":
            return recipe

        def bind(ops):
            launch = recipe.bind(ops)
            def run():
                launch()
                if ops.a.shape[-1] > 10:
                    poke[(1,)](ops.out)
            return run
        return replace(recipe, bind=bind, tell=None)

poking = Poking()
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    (tmp_path / "multigemm_poking.py").write_text(PLANTED)
    info = tmp_path / "multigemm_poking-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-poking\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[multigemm.backends]\npoking = multigemm_poking:poking\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


@pytest.mark.gpu
def test_an_illegal_access_ends_one_worker_only(environment: dict[str, str], tmp_path: Path) -> None:
    """The context of the worker is gone; its problem is named and made smaller, all other results are there."""
    summary = tmp_path / "s.json"
    asked = ["--backends", "cublas,poking", "--device", "cuda", "--forms", "batched,jagged_m", "--dtypes", "float32"]
    asked += ["--examples", "3", "--kinds", "0", "--burst", "2", "--jobs", "2", "--shrink", "2", "--quiet"]
    command: list[Any] = [sys.executable, "-W", "ignore", "-m", "multigemm", "fuzz", *asked, "--json", summary]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)
    assert done.returncode == 1, done.stdout + done.stderr
    data = json.loads(summary.read_text())
    crashes = [failure for failure in data["failures"] if failure["oracle"] in ("crash", "exception")]
    assert crashes and {failure["backend"] for failure in data["failures"]} == {"poking"}
    assert data["problems"] == data["checks"]["cublas"] == 3
    assert data["checks"]["poking"] == 3 - sum(failure["oracle"] == "crash" for failure in crashes)
    small = Case.from_dict(next(failure["shrunk"] for failure in crashes if failure["shrunk"]))
    assert small.form == "batched" and small.k >= 11
