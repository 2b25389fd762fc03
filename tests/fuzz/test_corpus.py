"""Every failure ever found, here and in peers' histories, on every backend that is here."""

from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.backends import registry
from multigemm.errors import InvalidSetting
from multigemm.testing import Case, Subject, check_case, corpus
from multigemm.testing.placed_case import spec_of
from tests.model_mutants.kernel import ModelBackend
from tests.support.python_process import run_python

FOLDER = Path(__file__).parents[1] / "corpus"
ENTRIES = list(corpus.entries(FOLDER))
EMULATED_WORK = 6_000
"""Multiply-adds of a stored problem that an emulator may be asked to do in the ordinary tests."""


def test_the_corpus_is_there() -> None:
    assert len(ENTRIES) >= 50
    assert all(entry.why and entry.source for entry in ENTRIES)


@pytest.mark.parametrize("entry", [entry for entry in ENTRIES if entry.config], ids=lambda e: e.name)
def test_a_stored_config_is_still_offered(entry: corpus.Entry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device=None: None)
    shipped = Subject(entry.backend).shipped(spec_of(entry.case), torch.device("cuda", 0))
    assert entry.config in list(map(str, shipped))


@pytest.mark.slow
@pytest.mark.parametrize("entry", ENTRIES, ids=lambda e: e.name)
def test_host_backends(entry: corpus.Entry) -> None:
    for backend in ("cpu", ModelBackend()):
        outcome = check_case(entry.case, backend)
        assert outcome.ran, outcome.refusals
        assert outcome.ok, f"{entry.why}: {outcome.findings}"


@pytest.mark.gpu
@pytest.mark.parametrize("name", [n for n in registry.BUILTIN if n not in ("cpu", "null")])
@pytest.mark.parametrize("part", range(3))
def test_gpu_backends(name: str, part: int) -> None:
    """The silent faults of history; `multigemm fuzz --replay tests/corpus` runs all of them."""
    if not registry.get(name).availability().ok:
        pytest.skip(registry.get(name).availability().reason)
    chosen = [
        e for e in ENTRIES if e.name.startswith(("tail-rows", "masked", "empty-expert", "k-", "helion-uncovered"))
    ]
    for entry in chosen[part::3]:
        outcome = check_case(entry.case, name, "cuda")
        assert outcome.ok, f"{entry.name}: {entry.why}: {outcome.findings}"


SCRIPT = """
import sys
from pathlib import Path
from typing import Any
from multigemm.backends import registry
from multigemm.testing import check_case, corpus
state = registry.get(sys.argv[1]).availability()
if not state.ok:
    print("UNAVAILABLE", state.reason)
    sys.exit(0)
ran = 0
for entry in corpus.entries(Path(sys.argv[2])):
    if entry.case.work > int(sys.argv[3]) or entry.case.groups > 400:
        continue
    outcome = check_case(entry.case, sys.argv[1])
    assert outcome.ok, (entry.name, entry.why, outcome.findings)
    ran += outcome.ran
print("RAN", ran)
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "numba"])
def test_emulated_backends(name: str) -> None:
    done = run_python("-c", SCRIPT, name, FOLDER, str(EMULATED_WORK), environment={"MULTIGEMM_EMULATE": "1"})
    if "UNAVAILABLE" in done.stdout:
        pytest.skip(done.stdout)
    assert int(done.stdout.split()[-1]) >= 15


def test_a_file_that_is_no_problem_is_refused(tmp_path: Path) -> None:
    bad = tmp_path / "x.json"
    for text in ("{", '{"case": {"colour": 1}}', "{}"):
        bad.write_text(text)
        with pytest.raises(InvalidSetting, match="no stored problem"):
            corpus.load(bad)


def test_what_is_saved_is_what_is_loaded(tmp_path: Path) -> None:
    case = Case(form="per_group", dtype="float16", dims=((1, 2, 3),))
    path = corpus.save(tmp_path, {"case": case.to_dict(), "backend": "cpu", "oracle": "value", "why": "w", "config": 2})
    entry = corpus.load(path)
    assert (entry.case, entry.backend, entry.oracle, entry.config) == (case, "cpu", "value", 2)
    namespace: dict[str, Any] = {}
    exec(corpus.snippet(case, "cpu", "cpu"), namespace)
    assert namespace["case"] == case
