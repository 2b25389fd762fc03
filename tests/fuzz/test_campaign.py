"""The fuzzer as a user runs it: finds, shrinks, stores, replays; and survives workers that die or never end."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from multigemm.__main__ import main
from multigemm.testing import Case
from tests.support.python_process import install_backends, run_python

FAULTY = """
import ctypes
import time
from multigemm.testing.model_kernel import Kernel, ModelBackend
from multigemm.testing.model_mutants import planted

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


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    return install_backends(tmp_path, FAULTY, "crashing", "faulty", "slow", "unscaled")


def fuzz(environment: dict[str, str], *arguments: Any, code: int | None = 0, device: str = "cpu") -> Any:
    words = ["-m", "multigemm", "fuzz", "--device", device, "--quiet", *arguments]
    return run_python(*words, code=code, environment=environment)


@pytest.mark.slow
def test_a_fault_is_found_shrunk_stored_and_repeated(environment: dict[str, str], tmp_path: Path) -> None:
    summary, stored = tmp_path / "s.json", tmp_path / "stored"
    asked = ["--backends", "faulty", "--examples", "10", "--corpus", stored, "--json", summary, "--shrink", "4"]
    done = fuzz(environment, *asked, code=1)
    data = json.loads(summary.read_text())
    assert data["problems"] == 10
    assert data["disagreements"] == len(data["failures"]) > 0
    assert data["guard_hits"] > 0
    small = min((Case.from_dict(f["shrunk"]) for f in data["failures"] if f["shrunk"]), key=lambda c: c.work)
    assert small.work <= 16 and small.activation is None
    code = re.findall(r"faulty: \[guard\].*\n  stored as .*\n  to repeat it:\n((?:    .*\n)+)", done.stdout)[0]
    script = "\n".join(line[4:] for line in code.splitlines())
    assert "[guard]" in run_python("-c", script, environment=environment).stdout
    replayed = fuzz(environment, "--backends", "faulty,cpu", "--replay", stored, code=1)
    assert "faulty: WRONG" in replayed.stdout and "cpu: right" in replayed.stdout


@pytest.mark.slow
def test_a_fault_of_scales_is_found_shrunk_stored_and_repeated(environment: dict[str, str], tmp_path: Path) -> None:
    summary, stored = tmp_path / "s.json", tmp_path / "stored"
    asked = "--backends unscaled --examples 40 --quantised 1 --fused 0 --deep 1 --shrink 2"
    fuzz(environment, *asked.split(), "--corpus", stored, "--json", summary, code=1)
    data = json.loads(summary.read_text())
    assert data["quantised_checks"]["unscaled"] == data["classes"]["quantised"] == 40
    small = [Case.from_dict(f["shrunk"]) for f in data["failures"] if f["shrunk"]]
    assert min(case.groups for case in small) == 2 and all(case.quantised for case in small)
    replayed = fuzz(environment, "--backends", "unscaled,cpu", "--replay", stored, code=1)
    assert "unscaled: WRONG" in replayed.stdout and "cpu: right" in replayed.stdout


@pytest.mark.slow
def test_a_campaign_without_a_check_proves_nothing(environment: dict[str, str]) -> None:
    done = fuzz(environment, "--backends", "cpu", "--seconds", "0.01", code=1)
    assert "NOTHING CHECKED on cpu" in done.stdout


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
    asked = "--backends cpu,crashing --examples 6 --jobs 2 --forms batched,jagged_m --dtypes float32 --shrink 3"
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
        "if __name__ == '__main__':\n"
        "    campaign.STUCK_SECONDS = 2\n"
        "    forms = ('jagged_m', 'batched')\n"
        "    some = Options(('slow',), kinds=8, burst=3, examples=40, jobs=3, work=3000, forms=forms)\n"
        "    done = campaign.run(some)\n"
        "    print(done.tally.problems, len(done.tally.failures), done.crashes, *done.notes, sep='\\n')\n"
    )
    done = run_python(script, timeout=120, environment=environment)
    problems, failures, crashes, *notes = done.stdout.splitlines()
    assert int(problems) >= 40 and failures == crashes == "0", done.stdout + done.stderr
    assert any("was not finished" in note for note in notes)
    assert any("kinds and configs were not begun" in note for note in notes)


@pytest.mark.slow
def test_a_campaign_over_everything_on_the_host(environment: dict[str, str], tmp_path: Path) -> None:
    """Every form and dtype on the cpu backend, against the reference."""
    summary = tmp_path / "s.json"
    asked = "--backends cpu --examples 500 --jobs 2 --seed 5 --work 30000 --deep 4"
    fuzz(environment, *asked.split(), "--json", summary)
    data = json.loads(summary.read_text())
    assert data["checks"]["cpu"] == 500 and data["disagreements"] == 0 and data["crashes"] == 0
    for form in ("per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked"):
        assert data["classes"][f"form:{form}"] > 35
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8"):
        assert data["classes"][f"dtype:{dtype}"] > 35
    assert data["deep"]["relations"] > 10 and data["deep"]["lying sizes"] > 3
    assert data["quantised_checks"]["cpu"] > 35


@pytest.mark.slow
@pytest.mark.parametrize("name", ["triton", "numba"])
def test_an_emulated_campaign(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    summary = tmp_path / "s.json"
    asked = ["--backends", name, "--examples", "6", "--jobs", "1", "--json", summary, "--emulate"]
    done = fuzz(environment, *asked, code=None)
    if "not available" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads(summary.read_text())["checks"][name] >= 4


POKING = """
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
