"""The conformance suite itself: on the cpu backend, on the example of the documentation, on planted faults."""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.problem.spec import FORMS
from multigemm.testing import conformance
from multigemm.testing.strategies import DTYPES
from multigemm.testing.subject import Subject
from tests.model_mutants.faults import planted
from tests.model_mutants.kernel import ModelBackend
from tests.support.python_process import ROOT, install_backends, run_python


def run_suite(*arguments: str) -> int:
    """The suite in this process; which tests it has does not depend on where it runs."""
    return conformance.main(["-c", os.devnull, "--device", "cpu", *arguments])


@pytest.mark.slow
def test_the_example_of_the_documentation_conforms(tmp_path: Path) -> None:
    """As an installed package that is found by its entry point."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "how-to" / "own-backend.md").read_text(), re.DOTALL)
    environment = install_backends(tmp_path, blocks[0] + "\nloop = BACKEND\n", "loop")
    words = "-m multigemm.testing.conformance --backend loop --device cpu --cases 10"
    chosen = ("-k", "jagged_m or members or plan or say")
    done = run_python(*words.split(), *chosen, environment=environment)
    passed, skipped = (int(re.findall(rf"(\d+) {word}", done.stdout)[0]) for word in ("passed", "skipped"))
    assert passed >= 25
    assert skipped >= 1, "the example refuses activations and other dtypes with a reason"


def test_a_faulty_backend_does_not_conform(install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install(ModelBackend("planted", planted("tail rows not zeroed")))
    assert run_suite("--backend", "planted", "--cases", "2", "-x", "-k", "jagged_m") == 1
    assert "no group owns" in capsys.readouterr().out


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
    assert run_suite("--backend", "cpu", "--cases", "3", "-x") == 0
