"""The memory checkers' command: what it runs, and what it leaves out only while the tool shows why."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from multigemm.testing import sanitize
from multigemm.testing.case import Case

ROOT = Path(__file__).parents[2]

TOOL = """#!{python}
import sys
with open({log!r}, "a") as log:
    log.write(" ".join(sys.argv[1:]) + "\\n")
if "--control" in sys.argv:
    sys.exit({control})
print("triton: 20 problems ran under 9 configs, 0 wrong")
if {tool!r} in sys.argv:
    print({said!r})
    sys.exit(9 if {said!r} else 0)
"""
RACE = """========= Error: Race reported between Write access at {kernel}+0x77d0 in {file}:{one}
=========     and Read access at {kernel}+0x5d50 in {file}:{two} [16 hazards]
=========     and Read access at {kernel}+0x8060 in {file}:{two} [8 hazards]
========= RACECHECK SUMMARY: {shown} hazards displayed ({shown} errors, 0 warnings)
"""


def line_of(file: str, text: str) -> int:
    lines = (ROOT / "backends" / "triton" / "kernels" / file).read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)


def race(kernel: str = "hopper_kernel", shown: int = 1, read: str = "words = mail.tickets.index(slot).load") -> str:
    """racecheck's words for the hand-over of a tile, or for something else in the same file."""
    one, two = (line_of("hopper_tiles.py", text) for text in ("tickets.index(slot).store", read))
    return RACE.format(kernel=kernel, file="hopper_tiles.py", one=one, two=two, shown=shown)


@pytest.fixture
def checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    log = tmp_path / "calls"

    def run(
        *arguments: str, control: bool = True, said: str = "", code: int = 0, reporting: str = "racecheck"
    ) -> list[str]:
        tool = tmp_path / "compute-sanitizer"
        answers = {"control": 9 if control else 0, "said": said, "tool": reporting}
        tool.write_text(TOOL.format(python=sys.executable, log=str(log), **answers))
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path))
        log.unlink(missing_ok=True)
        assert sanitize.main(list(arguments)) == code
        return log.read_text().splitlines()

    return run


RACECHECK = ("--backend", "triton", "--tools", "racecheck")


@pytest.mark.parametrize("kernel", ["hopper_kernel", "shift_b_kernel"])
def test_a_known_hand_over_is_set_aside_while_the_tool_reports_the_control(
    checked: Any, capsys: Any, tmp_path: Path, kernel: str
) -> None:
    kept = tmp_path / "verdicts.json"
    call, control_call = checked(*RACECHECK, "--json", str(kept), said=race(kernel))
    assert "exclude" not in call and control_call.endswith("-m multigemm.testing.sanitize --control hand_over")
    told = capsys.readouterr().out
    assert (
        "hand_over, which is right by construction: FINDINGS" in told
        and "1 reports set aside" in told
        and "`taken`" in told
    )
    (verdict,) = json.loads(kept.read_text())["runs"]
    assert verdict["clean"] and verdict["state"] == "FINDINGS" and len(verdict["set_aside"]) == 3


@pytest.mark.parametrize(
    "change",
    [
        {"control": False, "said": race()},  # the tool can follow it
        {"said": race(kernel="pointer_kernel")},
        {"said": race().replace("hopper_kernel+0x8060", "shift_b_kernel+0x8060")},  # two kernels at once
        {"said": race(read="return gl.sum(gl.where(lane == at, words, 0), 0)")},  # another line of the same file
        {"said": race(shown=2)},  # one that is counted and not shown
        {"said": race() + race(kernel="other", shown=2)},
    ],
)
def test_any_other_report_is_a_finding(checked: Any, change: dict[str, Any]) -> None:
    checked(*RACECHECK, code=1, **change)


def test_the_kernels_that_are_reported_are_named(checked: Any, capsys: Any) -> None:
    read = (
        "========= Uninitialized __global__ memory read of size 16 bytes\n=========     at void cutlass::f<1>()+0x20\n"
    )
    checked(*RACECHECK, said=2 * read, code=1)
    assert "2 reports in void cutlass::f<1>()" in capsys.readouterr().out


INITCHECK = ("--backend", "cublas", "--tools", "initcheck")


def reading(
    lanes: int = 32, kernel: str = sanitize.LIBRARY_KERNELS["cublas"] + "x>>", size: int = 4, more: int = 0
) -> str:
    """initcheck's words for a warp that reads a tensor map."""
    text = "".join(
        f"========= Uninitialized __global__ memory read of size {size} bytes\n=========     at {kernel}(T1)+0x70f0\n"
        f"=========     by thread ({64 + lane},0,0) in block (0,0,0)\n"
        for lane in range(lanes)
    )
    return f"{text}========= ERROR SUMMARY: {lanes + more} errors\n"


def test_reads_of_a_librarys_own_are_set_aside_while_the_bare_call_shows_them(checked: Any, capsys: Any) -> None:
    call, control_call = checked(*INITCHECK, said=reading(), reporting="initcheck")
    assert "--fill" in call and control_call.endswith("-m multigemm.testing.sanitize --control grouped_mm")
    told = capsys.readouterr().out
    assert "32 reports set aside" in told and "grouped_mm, which is right by construction: FINDINGS" in told


@pytest.mark.parametrize(
    "change",
    [
        {"control": False, "said": reading()},
        {"said": reading(lanes=31)},
        {"said": reading(size=16)},
        {"said": reading(kernel="void write_zeros")},
        {"said": reading(more=1)},
    ],
)
def test_any_other_read_is_a_finding(checked: Any, change: dict[str, Any]) -> None:
    checked(*INITCHECK, code=1, reporting="initcheck", **change)


def test_a_kernel_of_ours_may_read_nothing_unwritten(checked: Any) -> None:
    checked("--backend", "cupy", "--tools", "initcheck", said=reading(), reporting="initcheck", code=1)


def test_without_a_report_there_is_nothing_to_set_aside(checked: Any) -> None:
    assert len(checked(*RACECHECK)) == 1


def test_other_backends_and_tools_leave_nothing_out(checked: Any) -> None:
    calls = checked("--backend", "cupy") + checked("--backend", "triton", "--tools", "memcheck,initcheck")
    assert len(calls) == 6 and not any("exclude" in call or "control" in call for call in calls)
    assert [("--num-cuda-barriers 64" in call) for call in calls] == [False, True, False, True, False, False]


def test_one_command_examines_every_backend(checked: Any, capsys: Any) -> None:
    calls = checked("--jobs", "3")
    assert {(name, tool) for name in sanitize.BACKENDS for tool in sanitize.TOOLS} == {
        (call.split("--inside ")[1].split()[0], call.split()[1]) for call in calls if "--inside" in call
    }
    assert "16 of 16 runs are clean" in capsys.readouterr().out


def test_the_control_kernel_compiles() -> None:
    pytest.importorskip("cupy")
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(sanitize.HAND_OVER, "control.cu", [], [])
    nvrtc.compileProgram(program, ["-arch=sm_90"])
    assert b"hand_over" in nvrtc.getCUBIN(program)


def test_a_hand_over_speaks_of_functions_that_there_are() -> None:
    listed = [
        (backend, *place) for backend, known in sanitize.HAND_OVERS.items() for x in known for place in x.functions
    ]
    assert listed
    for backend, file, name in listed:
        assert name in [function for _, _, function in sanitize._functions(backend, file)], (file, name)


def test_each_config_runs_once_before_any_runs_twice() -> None:
    """Among the cases of new configs, and then among the others, the one of the most new classes comes first."""
    plain, scaled = Case("jagged_m", n=8, k=8, lengths=(4,)), Case("batched", m=4, n=8, k=8, lengths=(0,), alpha=0.5)
    pairs = [(plain, "one"), (scaled, "one"), (plain, "two"), (plain, "two"), (plain, "three")]
    configs = [config for _, config in sanitize.configs_first(pairs)]
    assert sorted(configs[:3]) == ["one", "three", "two"] and sorted(configs[3:]) == ["one", "two"]
