"""The fuzzer as a user runs it: finds, shrinks, stores, replays; and survives workers that die or never end."""

import json
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from multigemm.__main__ import main
from multigemm.backends import registry
from multigemm.fuzz.plan import Options, Summary, Tally
from multigemm.fuzz.report import failed, to_text
from multigemm.testing import Case
from tests.model_mutants.faults import planted
from tests.model_mutants.kernel import ModelBackend
from tests.support.python_process import install_backends, run_python

FAULTY = """
import ctypes
import time
from tests.model_mutants.kernel import Kernel, ModelBackend
from tests.model_mutants.faults import planted

class Crashing(ModelBackend):
    def bind(self, ops, config):
        def launch():
            if ops.spec.form == "batched" and ops.a.shape[-1] > 10:
                ctypes.string_at(0)
            Kernel(ops, config).launch()
        return launch

class Slow(ModelBackend):
    def plan(self, spec, config, device):
        if spec.form == "batched":
            time.sleep(600)  # a compiler that does not come to an end
        return super().plan(spec, config, device)

crashing, slow = Crashing("crashing"), Slow("slow")
faulty = ModelBackend("faulty", planted("no N mask on the store"))
unscaled = ModelBackend("unscaled", planted("scale of group 0 for all"))
"""
FAULTS = {"faulty": "no N mask on the store", "unscaled": "scale of group 0 for all"}


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return install_backends(tmp_path, FAULTY, "crashing", "faulty", "slow", "unscaled")


def fuzz(environment: dict[str, str], *arguments: Any, code: int | None = 0, device: str = "cpu") -> Any:
    words = ["-m", "multigemm", "fuzz", "--device", device, "--quiet", *arguments]
    return run_python(*words, code=code, environment=environment)


@pytest.mark.slow
def test_faults_are_found_shrunk_stored_and_repeated(
    environment: dict[str, str], tmp_path: Path, install: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of plain problems, and of scales: two backends in one campaign."""
    summary, stored = tmp_path / "s.json", tmp_path / "stored"
    asked = "--backends faulty,unscaled --examples 8 --quantised 2 --fused 0 --deep 1 --shrink 2"
    done = fuzz(environment, *asked.split(), "--corpus", stored, "--json", summary, code=1)
    data = json.loads(summary.read_text())
    assert data["problems"] == 8 and data["disagreements"] == len(data["failures"]) > 0
    assert data["guard_hits"] > 0
    assert 0 < data["quantised_checks"]["unscaled"] == data["classes"]["quantised"] < 8
    small = {name: [Case.from_dict(f["shrunk"]) for f in data["failures"] if f["shrunk"] and f["backend"] == name]
             for name in ("faulty", "unscaled")}  # fmt: skip
    least = min(small["faulty"], key=lambda case: case.work)
    assert least.work <= 16 and least.activation is None
    assert min(case.groups for case in small["unscaled"]) == 2 and all(case.quantised for case in small["unscaled"])
    code = re.findall(r"faulty: \[guard\].*\n  stored as .*\n  to repeat it:\n((?:    .*\n)+)", done.stdout)[0]
    install(ModelBackend("faulty", planted(FAULTS["faulty"])), ModelBackend("unscaled", planted(FAULTS["unscaled"])),
            registry.get("cpu"))  # fmt: skip
    exec("\n".join(line[4:] for line in code.splitlines()), {})
    assert "[guard]" in capsys.readouterr().out
    assert main(["fuzz", "--device", "cpu", "--backends", "faulty,unscaled,cpu", "--replay", str(stored)]) == 1
    replayed = capsys.readouterr().out
    assert all(words in replayed for words in ("faulty: WRONG", "unscaled: WRONG", "cpu: right"))


def test_a_campaign_without_a_check_proves_nothing() -> None:
    summary = Summary(Options(("cpu",), seconds=0.01), Tally(), 0.01)
    assert failed(summary) and "NOTHING CHECKED on cpu" in to_text(summary)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (("--backends", "tritn"), "unknown backend 'tritn'"),
        (("--forms", "jaged"), "unknown form"),
        (("--replay", "/no/such.json", "--backends", "cpu"), "no stored problem"),
    ],
)
def test_bad_options_are_one_line_and_exit_code_two(
    arguments: tuple[str, ...], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fuzz", "--device", "cpu", "--quiet", *arguments]) == 2
    said = capsys.readouterr()
    assert text in said.err and "Traceback" not in said.err, said


@pytest.mark.parametrize(
    "asked", [("--examples", "-3"), ("--seconds", "-1"), ("--jobs", "0"), ("--kinds", "-1"), ("--work", "none")]
)
def test_numbers_that_mean_nothing_are_refused(asked: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fuzz", *asked])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert asked[0] in said and asked[1] in said and ("at least" in said or "no number" in said)


@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    """Two backends, one of which ends its process on some problems: all other results are there."""
    summary = tmp_path / "s.json"
    asked = "--backends cpu,crashing --examples 6 --jobs 2 --forms batched,jagged_m --dtypes float32 --shrink 1"
    fuzz(environment, *asked.split(), "--json", summary, code=1)
    data = json.loads(summary.read_text())
    crashes = [f for f in data["failures"] if f["oracle"] == "crash"]
    assert len(crashes) > 0
    assert {(f["oracle"], f["backend"]) for f in data["failures"]} == {("crash", "crashing")}
    assert data["problems"] == data["checks"]["cpu"] == 6
    assert data["checks"]["crashing"] == 6 - len(crashes)
    small = Case.from_dict(next(f["shrunk"] for f in crashes if f["shrunk"]))
    assert small.form == "batched" and small.k >= 11


@pytest.mark.slow
def test_a_compiler_that_does_not_end_holds_up_nobody(environment: dict[str, str], tmp_path: Path) -> None:
    script = tmp_path / "campaign.py"
    script.write_text(
        "from multigemm.fuzz import campaign\n"
        "from multigemm.fuzz.plan import Options\n"
        "from multigemm.testing import Limits\n"
        "if __name__ == '__main__':\n"
        "    campaign.STUCK_SECONDS = 1\n"
        "    limits = Limits(work=3000, forms=('jagged_m', 'batched'))\n"
        "    some = Options(('slow',), kinds=8, burst=3, examples=20, jobs=3, limits=limits)\n"
        "    done = campaign.run(some)\n"
        "    print(done.tally.problems, len(done.tally.failures), done.crashes, *done.notes, sep='\\n')\n"
    )
    done = run_python(script, timeout=120, environment=environment)
    problems, failures, crashes, *notes = done.stdout.splitlines()
    assert int(problems) >= 20 and failures == crashes == "0", done.stdout + done.stderr
    assert any("was not finished" in note for note in notes)
    assert any("kinds and configs were not begun" in note for note in notes)


@pytest.mark.slow
def test_a_campaign_over_everything_on_the_host(environment: dict[str, str], tmp_path: Path) -> None:
    """Every form and dtype on the cpu backend, against the reference."""
    summary = tmp_path / "s.json"
    asked = "--backends cpu --examples 300 --jobs 2 --seed 5 --work 30000 --deep 4"
    fuzz(environment, *asked.split(), "--json", summary)
    data = json.loads(summary.read_text())
    assert data["checks"]["cpu"] == 300 and data["disagreements"] == 0 and data["crashes"] == 0
    for form in ("per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked"):
        assert data["classes"][f"form:{form}"] > 20
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8"):
        assert data["classes"][f"dtype:{dtype}"] > 20
    assert data["deep"]["relations"] > 6 and data["deep"]["lying sizes"] > 3
    assert data["quantised_checks"]["cpu"] > 20


@pytest.mark.slow
def test_an_emulated_campaign(environment: dict[str, str], tmp_path: Path) -> None:
    summary, names = tmp_path / "s.json", [name for name in ("triton", "numba") if find_spec(name)]
    if not names:
        pytest.skip("neither triton nor numba is installed")
    fuzz(environment, "--backends", ",".join(names), "--examples", "6", "--json", summary, "--emulate")
    assert all(json.loads(summary.read_text())["checks"][name] >= 4 for name in names)


POKING = """
from dataclasses import replace
from types import SimpleNamespace

import triton
import triton.language as tl

from multigemm.backends import registry

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


@pytest.mark.gpu
def test_an_illegal_access_ends_one_worker_only(tmp_path: Path) -> None:
    """The context of the worker is gone; its problem is named and made smaller, all other results are there."""
    summary = tmp_path / "s.json"
    asked = ["--backends", "cublas,poking", "--forms", "batched,jagged_m", "--dtypes", "float32"]
    asked += ["--examples", "3", "--kinds", "0", "--burst", "2", "--jobs", "2", "--shrink", "2"]
    environment = install_backends(tmp_path, POKING, "poking")
    fuzz(environment, *asked, "--json", summary, code=1, device="cuda")
    data = json.loads(summary.read_text())
    crashes = [failure for failure in data["failures"] if failure["oracle"] in ("crash", "exception")]
    assert crashes and {failure["backend"] for failure in data["failures"]} == {"poking"}
    assert data["problems"] == data["checks"]["cublas"] == 3
    assert data["checks"]["poking"] == 3 - sum(failure["oracle"] == "crash" for failure in crashes)
    small = Case.from_dict(next(failure["shrunk"] for failure in crashes if failure["shrunk"]))
    assert small.form == "batched" and small.k >= 11
