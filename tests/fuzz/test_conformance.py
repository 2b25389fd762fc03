"""The conformance suite itself: on the cpu backend, on the example of the documentation, on planted faults."""

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.problem.spec import FORMS
from multigemm.testing import conformance
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.model_mutants import planted
from multigemm.testing.strategies import DTYPES
from multigemm.testing.subject import Subject
from tests.support.python_process import NOTHING, ROOT, Environment, install_backends, run_python

FAULT = """
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.model_mutants import planted as kernel
planted = ModelBackend("planted", kernel("tail rows not zeroed"))
"""


def run_suite(
    name: str, *arguments: str, code: int = 0, environment: Environment = NOTHING
) -> subprocess.CompletedProcess[str]:
    words = ["-m", "multigemm.testing.conformance", "--backend", name, "--device", "cpu", *arguments]
    return run_python(*words, code=code, environment=environment)


@pytest.mark.slow
def test_the_example_of_the_documentation_conforms(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "own-backend.md").read_text(), re.DOTALL)
    environment = install_backends(tmp_path, blocks[0] + "\nloop = BACKEND\n", "loop")
    listed = run_python(
        "-c", "import multigemm as mg; print([b.name for b in mg.list_backends()])", environment=environment
    )
    assert "'loop'" in listed.stdout
    done = run_suite("loop", "--cases", "10", "-k", "jagged_m or members or plan or say", environment=environment)
    passed, skipped = (int(re.findall(rf"(\d+) {word}", done.stdout)[0]) for word in ("passed", "skipped"))
    assert passed >= 25
    assert skipped >= 1, "the example refuses activations and other dtypes with a reason"


@pytest.mark.slow
def test_a_faulty_backend_does_not_conform(tmp_path: Path) -> None:
    environment = install_backends(tmp_path, FAULT, "planted")
    done = run_suite("planted", "--cases", "2", "-x", "-k", "jagged_m", code=1, environment=environment)
    assert "no group owns" in done.stdout


def test_an_unknown_backend_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    assert conformance.main(["--backend", "tritn"]) == 2
    said = capsys.readouterr()
    assert said.err.strip() == "unknown backend 'tritn': did you mean 'triton'?" and not said.out


@pytest.mark.parametrize("form", FORMS)
def test_cases_of_the_suite_accept_the_model(form: Any) -> None:
    subject, device = Subject(ModelBackend()), torch.device("cpu")
    for dtype in DTYPES:
        _, outcome = conformance.examine(conformance.case_of(form, dtype, seed=3), subject, device)
        assert outcome.ran, outcome.refusals


@pytest.mark.parametrize("name", ["no M mask on the store", "wrong group's B", "head rows not zeroed"])
def test_cases_of_the_suite_see_faults(name: str) -> None:
    subject, device = Subject(ModelBackend(name, planted(name))), torch.device("cpu")
    with pytest.raises(AssertionError, match="Case"):
        conformance.examine(conformance.case_of("jagged_m", "float32", mode="normal"), subject, device)


@pytest.mark.slow
def test_the_cpu_backend_conforms() -> None:
    run_suite("cpu", "--cases", "6", "-x")
