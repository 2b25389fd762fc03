"""The memory checkers' command: what it runs, and what it leaves out only while the tool shows why."""

import sys
from pathlib import Path
from typing import Any

import pytest

from multigemm.testing import control, sanitize
from multigemm.testing.case import Case

TOOL = """#!{python}
import sys
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
print("20 problems ran")
sys.exit({control} if "multigemm.testing.control" in sys.argv else 0)
"""


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    log = tmp_path / "calls"

    def run(reported: bool, *arguments: str) -> list[str]:
        tool = tmp_path / "compute-sanitizer"
        tool.write_text(TOOL.format(python=sys.executable, log=str(log), control=9 if reported else 0))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        log.unlink(missing_ok=True)
        assert sanitize.main(list(arguments)) == 0
        return log.read_text().splitlines()

    return run


def test_a_kernel_is_left_out_as_long_as_the_tool_reports_the_control(checked: Any, capsys: Any) -> None:
    control_call, call = checked(True, "--backend", "triton", "--tools", "racecheck")
    assert control_call.endswith("-m multigemm.testing.control")
    assert "--kernel-name-exclude kns=hopper_kernel" in call and "--inside triton" in call
    assert "whose order is certain: FINDINGS" in (told := capsys.readouterr().out)
    assert "racecheck without hopper_kernel: clean" in told


def test_a_tool_that_can_follow_it_checks_everything(checked: Any) -> None:
    _, call = checked(False, "--backend", "triton", "--tools", "racecheck")
    assert "--kernel-name-exclude" not in call


def test_other_backends_and_tools_leave_nothing_out(checked: Any) -> None:
    calls = checked(True, "--backend", "cupy") + checked(True, "--backend", "triton", "--tools", "memcheck,initcheck")
    assert len(calls) == 6 and not any("exclude" in call or "control" in call for call in calls)
    assert [("--num-cuda-barriers 64" in call) for call in calls] == [False, True, False, True, False, False]


def test_one_command_examines_every_backend(checked: Any, capsys: Any) -> None:
    calls = checked(False, "--jobs", "3")
    assert {(name, tool) for name in sanitize.BACKENDS for tool in sanitize.TOOLS} == {
        (call.split("--inside ")[1].split()[0], call.split()[1]) for call in calls if "--inside" in call
    }
    assert "16 of 16 runs are clean" in capsys.readouterr().out


def test_each_config_comes_before_any_comes_twice() -> None:
    case = Case(m=1, n=1, k=1)
    pairs: list[tuple[Case, list[Any]]] = [(case, [config]) for config in "aabcab"]
    assert "".join(wanted[0] for _, wanted in sanitize.various(pairs)) == "abcaab"


def test_the_control_kernel_compiles() -> None:
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(control.SOURCE, "control.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_90"])
    assert b"hand_over" in nvrtc.getCUBIN(program)
