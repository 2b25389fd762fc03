"""The fuzzer as a user runs it: finds, shrinks, stores, replays; and survives workers that die."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from multigemm.__main__ import main
from multigemm.fuzz.plan import Failure, Options, Summary, Tally
from multigemm.fuzz.report import missing, progress_line, to_dict, to_text
from multigemm.fuzz.shrink import shrink, simpler
from multigemm.fuzz.worker import drawn
from multigemm.testing import Case, Layout, random_case
from multigemm.testing.case import fit

ROOT = Path(__file__).parents[2]
FAULTY = """
import ctypes
import time
from multigemm.testing.model_kernel import Kernel, ModelBackend
from multigemm.testing.model_parts import Faults
from multigemm.backend import Recipe

class Crashing(ModelBackend):
    def plan(self, spec, config, device):
        def bind(ops):
            def launch():
                if spec.form == "batched" and ops.a.shape[-1] > 10:
                    ctypes.string_at(0)
                Kernel(ops, config, self.faults).launch()
            return launch
        return Recipe("crashing", config, bind)

class Slow(ModelBackend):
    def plan(self, spec, config, device):
        if spec.form == "batched":
            time.sleep(600)  # a compiler that does not come to an end
        return super().plan(spec, config, device)

crashing, slow = Crashing("crashing"), Slow("slow")
faulty = ModelBackend("faulty", Faults(mask_n_store=False))
"""


@pytest.fixture
def environment(tmp_path: Path) -> Any:
    (tmp_path / "multigemm_planted.py").write_text(FAULTY)
    info = tmp_path / "multigemm_planted-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: multigemm-planted\nVersion: 1.0\n")
    points = "".join(f"{n} = multigemm_planted:{n}\n" for n in ("crashing", "faulty", "slow"))
    (info / "entry_points.txt").write_text(f"[multigemm.backends]\n{points}")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(ROOT)])}


def fuzz(environment: dict[str, str], *arguments: Any) -> Any:
    command = [sys.executable, "-W", "ignore", "-m", "multigemm", "fuzz", "--device", "cpu", "--quiet", *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, cwd=ROOT)


def test_a_fault_is_found_shrunk_stored_and_repeated(environment: dict[str, str], tmp_path: Path) -> None:
    summary, stored = tmp_path / "s.json", tmp_path / "stored"
    asked = ["--backends", "faulty", "--examples", "10", "--corpus", str(stored), "--json", str(summary)]
    done = fuzz(environment, *asked, "--shrink", "4")
    assert done.returncode == 1, done.stderr
    data = json.loads(summary.read_text())
    assert data["problems"] == 10
    assert data["disagreements"] == len(data["failures"]) > 0
    assert data["guard_hits"] > 0
    small = min((Case.from_dict(f["shrunk"]) for f in data["failures"] if f["shrunk"]), key=lambda c: c.work)
    assert small.work <= 16 and small.activation is None
    code = re.findall(r"to repeat it:\n((?:    .*\n)+)", done.stdout)[0]
    script = "\n".join(line[4:] for line in code.splitlines())
    again = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert "[guard]" in again.stdout, again.stderr
    replayed = fuzz(environment, "--backends", "faulty,cpu", "--replay", str(stored))
    assert replayed.returncode == 1
    assert "faulty: WRONG" in replayed.stdout and "cpu: right" in replayed.stdout


def test_a_campaign_without_a_check_proves_nothing(environment: dict[str, str]) -> None:
    done = fuzz(environment, "--backends", "cpu", "--seconds", "0.01")
    assert done.returncode == 1, done.stdout
    assert "NOTHING CHECKED on cpu" in done.stdout


@pytest.mark.parametrize(
    "asked", [("--examples", "-3"), ("--seconds", "-1"), ("--jobs", "0"), ("--kinds", "-1"), ("--work", "none")]
)
def test_numbers_that_mean_nothing_are_refused(asked: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["fuzz", *asked])
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert asked[0] in said and asked[1] in said and ("at least" in said or "no number" in said)


def test_a_worker_that_is_killed_loses_nothing(environment: dict[str, str], tmp_path: Path) -> None:
    """Two backends, one of which ends its process on some problems: all other results are there."""
    summary = tmp_path / "s.json"
    asked = ["--backends", "cpu,crashing", "--examples", "6", "--jobs", "2", "--forms", "batched,jagged_m"]
    done = fuzz(environment, *asked, "--dtypes", "float32", "--json", str(summary), "--shrink", "3")
    assert done.returncode == 1, done.stderr
    data = json.loads(summary.read_text())
    crashes = [f for f in data["failures"] if f["oracle"] == "crash"]
    assert len(crashes) > 0
    assert {(f["oracle"], f["backend"]) for f in data["failures"]} == {("crash", "crashing")}
    assert data["problems"] == data["checks"]["cpu"] == 6
    assert data["checks"]["crashing"] == 6 - len(crashes)
    small = Case.from_dict(next(f["shrunk"] for f in crashes if f["shrunk"]))
    assert small.form == "batched" and small.k >= 11


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
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(script)], env=environment, capture_output=True, text=True, timeout=120
    )
    problems, failures, crashes, *notes = done.stdout.splitlines()
    assert int(problems) >= 40 and failures == crashes == "0", done.stdout + done.stderr
    assert any("was not finished" in note for note in notes)
    assert any("kinds and configs were not begun" in note for note in notes)


def test_a_campaign_over_everything_on_the_host(environment: dict[str, str], tmp_path: Path) -> None:
    """Every form and dtype on the cpu backend, against the reference."""
    summary = tmp_path / "s.json"
    done = fuzz(environment, "--backends", "cpu", "--examples", "500", "--jobs", "2", "--seed", "5", "--work", "30000",
                "--json", str(summary))  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    data = json.loads(summary.read_text())
    assert data["checks"]["cpu"] == 500 and data["disagreements"] == 0 and data["crashes"] == 0
    for form in ("per_group", "jagged_m", "jagged_n", "jagged_k", "batched", "masked"):
        assert data["classes"][f"form:{form}"] > 35
    for dtype in ("float16", "bfloat16", "float32", "float64", "int8"):
        assert data["classes"][f"dtype:{dtype}"] > 35
    assert data["deep"]["relations"] > 5 and data["deep"]["lying sizes"] > 1


@pytest.mark.parametrize("name", ["triton", "numba"])
def test_an_emulated_campaign(name: str, environment: dict[str, str], tmp_path: Path) -> None:
    summary = tmp_path / "s.json"
    done = fuzz(environment, "--backends", name, "--examples", "6", "--jobs", "1", "--json", str(summary), "--emulate")
    if "not available" in done.stderr:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]
    assert json.loads(summary.read_text())["checks"][name] >= 4


def test_bad_options_are_one_line_and_exit_code_two(environment: dict[str, str]) -> None:
    for arguments, text in (
        (("--backends", "tritn"), "unknown backend 'tritn'"),
        (("--forms", "jaged"), "unknown form"),
        (("--replay", "/no/such.json", "--backends", "cpu"), "no stored problem"),
    ):
        done = fuzz(environment, *arguments)
        assert done.returncode == 2, done.stdout + done.stderr
        assert text in done.stderr and "Traceback" not in done.stderr


def test_shrinking_keeps_only_what_matters() -> None:
    case = Case(form="jagged_m", dtype="float16", n=65, k=33, lengths=(17, 0, 40, 3), head=2, tail=9, bias="gn",
                bias_dtype="float32", activation="silu", given=True, mode="normal", a=Layout("col", 3, 1),
                out=Layout("row", 7))  # fmt: skip
    small = shrink(case, lambda c: any(n > 8 for n in c.lengths) and c.k > 4, seconds=20)
    assert small.k == 5 and sorted(small.lengths)[-1] == 9 and len(small.lengths) == 1
    assert (small.activation, small.bias, small.given, small.head, small.tail) == (None, "", False, 0, 0)
    assert small.a == Layout() and small.mode == "int"


def test_every_proposal_is_a_legal_case() -> None:
    from multigemm.testing import World

    for seed in (3, 17, 41):
        for candidate in list(simpler(fit(random_case(seed), 4000)))[:40]:
            World.build(candidate)


def test_no_problem_comes_twice() -> None:
    options = Options(("cpu",), kinds=12, burst=3, turns=2, seed=9)
    cases = [drawn(options, number) for number in range(80)]
    assert len({repr(c) for c in cases}) == 80
    assert [options.kind_of(number) for number in (0, 2, 3, 35, 36, 72)] == [0, 0, 1, 11, 0, 0]
    assert [options.config_of(number) for number in (0, 3, 36, 39, 72)] == [0, 2, 1, 3, 0]
    assert drawn(options, 5) == drawn(options, 5)


def test_the_gate_names_what_was_never_drawn() -> None:
    options = Options(("cpu",))
    tally = Tally(problems=6000)
    tally.classes["form:jagged_m"] = 6000
    summary = Summary(options, tally, 1.0)
    assert "form:masked" in missing(summary) and "form:jagged_m" not in missing(summary)
    assert "NOT COVERED" in to_text(summary)
    assert not missing(Summary(Options(("cpu",), forms=("masked",)), tally, 1.0))


def test_the_report_counts_and_speaks() -> None:
    tally = Tally(problems=3)
    tally.checks["cpu"] = 3
    tally.refusals["cpu", "too wide"] = 2
    tally.note_rho("cpu", "float32", 3.0, 1.0)
    tally.failures.append(Failure("cpu", "value", "wrong", Case(dims=()).to_dict(), 1))
    more = Tally()
    more.add(tally)
    text = to_text(Summary(Options(("cpu",)), more, 2.0))
    assert (
        "refused 2 x cpu: too wide" in text and "check_case(case" in text and "1 failures" in progress_line(more, 2.0)
    )
    assert to_dict(Summary(Options(("cpu",)), more, 2.0))["rho"][0]["max"] == 3.0
