"""The conformance suite itself: on the cpu backend, on the example of the documentation, on planted faults."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multigemm.problem.spec import FORMS
from multigemm.testing import conformance
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.mutants import MUTANTS
from multigemm.testing.strategies import DTYPES
from multigemm.testing.subject import Subject

ROOT = Path(__file__).parents[2]
FAULT = """
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.mutants import MUTANTS
BACKEND = ModelBackend("planted", MUTANTS["tail rows not zeroed"])
"""


def install(folder: Path, name: str, source: str) -> dict[str, str]:
    """What `pip install` would leave behind: a module, and metadata with the entry point."""
    (folder / f"multigemm_{name}.py").write_text(source)
    info = folder / f"multigemm_{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: multigemm-{name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[multigemm.backends]\n{name} = multigemm_{name}:BACKEND\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}


def run_suite(environment: dict[str, str], name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "multigemm.testing.conformance", "--backend", name, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)


def test_the_example_of_the_documentation_conforms(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "own-backend.md").read_text(), re.DOTALL)
    environment = install(tmp_path, "loop", blocks[0])
    listed = subprocess.run(
        [sys.executable, "-c", "import multigemm as mg; print([b.name for b in mg.list_backends()])"],
        env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert "'loop'" in listed.stdout, listed.stderr
    done = run_suite(
        environment, "loop", "--device", "cpu", "--cases", "10", "-k", "jagged_m or members or plan or say"
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed, skipped = (int(re.findall(rf"(\d+) {word}", done.stdout)[0]) for word in ("passed", "skipped"))
    assert passed >= 25
    assert skipped >= 1, "the example refuses activations and other dtypes with a reason"


def test_a_faulty_backend_does_not_conform(tmp_path: Path) -> None:
    environment = install(tmp_path, "planted", FAULT)
    done = run_suite(environment, "planted", "--device", "cpu", "--cases", "2", "-x", "-k", "jagged_m")
    assert done.returncode == 1
    assert "no group owns" in done.stdout


def test_an_unknown_backend_is_said(tmp_path: Path) -> None:
    done = run_suite({**os.environ, "PYTHONPATH": str(ROOT)}, "tritn")
    assert done.returncode == 2
    assert done.stderr.strip() == "unknown backend 'tritn': did you mean 'triton'?" and not done.stdout


@pytest.mark.parametrize("form", FORMS)
def test_cases_of_the_suite_accept_the_model(form: Any) -> None:
    import torch

    subject, device = Subject(ModelBackend()), torch.device("cpu")
    for dtype in DTYPES:
        conformance.examine(conformance.case_of(form, dtype, seed=3), subject, device, must_run=True)


@pytest.mark.parametrize("name", ["no M mask on the store", "wrong group's B", "head rows not zeroed"])
def test_cases_of_the_suite_see_faults(name: str) -> None:
    import torch

    subject, device = Subject(ModelBackend(name, MUTANTS[name])), torch.device("cpu")
    with pytest.raises(AssertionError, match="Case"):
        conformance.examine(conformance.case_of("jagged_m", "float32", mode="normal"), subject, device)


def test_the_cpu_backend_conforms() -> None:
    done = run_suite(dict(os.environ), "cpu", "--device", "cpu", "--cases", "6", "-x")
    assert done.returncode == 0, done.stdout[-3000:]
