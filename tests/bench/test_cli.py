"""The command: files appear, wrong words are one line, and what is not here is named first."""

from __future__ import annotations

import argparse
import json
import runpy
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.__main__ import main
from multigemm.bench import cli, reports, runner, suites
from multigemm.bench.reports import Report
from multigemm.bench.runner import Runner
from multigemm.bench.suites import add_selection, selected
from multigemm.bench.workloads import parse_shape
from multigemm.select.timing import Timing
from tests.support.bench_entries import FAST, by_name, measured
from tests.support.bench_reports import made_up_report

SCRIPTS = sorted((Path(__file__).parents[2] / "benchmarks").glob("*.py"))
QUICK = ["bench", "--device", "cpu", "--floor", "1,0.02", "--budget-ms", "4", "--quiet"]


@pytest.mark.slow
def test_the_command_writes_everything_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*QUICK, "--shape", "2,8,16,16", "--dtype", "fp32", "--json", str(tmp_path / "copy.json")]
    assert main([*words, "--json-only", "--out", str(tmp_path)]) == 0
    assert {p.name for p in tmp_path.iterdir()} == {"report.json", "copy.json"}
    assert (tmp_path / "copy.json").read_text() == (tmp_path / "report.json").read_text()
    raw = json.loads((tmp_path / "report.json").read_text())
    assert raw["schema"] == reports.SCHEMA
    assert raw["machine"]["commit"]
    assert raw["machine"]["packages"]["torch"] == torch.__version__.split("+")[0] or raw["machine"]["packages"]["torch"]
    assert main(["bench", "compare", str(tmp_path / "report.json"), str(tmp_path)]) == 0
    assert "0 regressions" in capsys.readouterr().out
    assert main(["bench", "render", str(tmp_path / "report.json")]) == 0
    assert "## Every number" in (tmp_path / "report.md").read_text()


@pytest.mark.parametrize("out", [["--out", "/my/own/folder"], ["--out=/my/own/folder"]], ids=len)
def test_the_kept_command_names_no_place_of_this_machine(out: list[str]) -> None:
    words = ["--suite", "moe", *out, "--resume", "--stall=5", "--rest", "80", "--commit", "abc"]
    assert cli._repeatable(Namespace(words=words)) == "multigemm bench --suite moe --rest 80"


def test_an_option_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    """Else a place would be kept with its abbreviated option."""
    with pytest.raises(SystemExit):
        main(["bench", "--suite", "l2", "--ou=somewhere"])
    assert "unrecognized arguments: --ou=somewhere" in capsys.readouterr().err


def test_compare_exits_1_on_a_planted_slow_down(tmp_path: Path) -> None:
    old, new = made_up_report(1), made_up_report(1)
    for row in new.rows:
        if row.entry == "cupy" and row.us:
            row.us *= 1.1
    for name, report in (("old", old), ("new", new)):
        reports.write(tmp_path / name, report)
    assert main(["bench", "compare", str(tmp_path / "old"), str(tmp_path / "new")]) == 1
    assert main(["bench", "compare", str(tmp_path / "new"), str(tmp_path / "old")]) == 0


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        (["--suite", "moee"], "known: tutorial"),
        (["--shape", "1,2"], "cannot be read"),
        (["--suite", "l2", "--only", "nothing"], "no workload is left"),
        (["--suite", "l2", "--floor", "x"], "TFLOP/s,TB/s"),
        (["--suite", "l2", "--device", "cpu", "--floor", "0,3"], "--floor '0,3': write TFLOP/s,TB/s above 0"),
        (["--suite", "l2", "--device", "cpu", "--floor", "nan,3"], "above 0"),
        (["--suite", "l2", "--device", "cpu", "--floor", "770,inf"], "above 0"),
        (["--suite", "l2", "--device", "cpu", "--floor=-770,3"], "above 0"),
        (["--suite", "moe", "--dist", "zipff"], "--dist 'zipff' matches none of 33 (by distribution: balanced, empty"),
        (["--suite", "moe", "--only", "qx", "--dist", "zipf"], "no workload is left: --only 'qx' and --dist 'zipf'"),
        (["--suite", "l2", "--modes", "warm"], "graph, hot and host"),
        (["compare", "/nonexistent", "/nonexistent"], "cannot be read as a report"),
        (["--suite", "l2", "--reps", "0"], "--reps 0: it has to be above 0"),
        (["--suite", "l2", "--rest", "100"], "--rest 100: per cent"),
        (["--suite", "l2", "--budget-ms", "-1"], "--budget-ms -1: it has to be above 0"),
        (["--suite", "l2", "--stall", "0"], "--stall 0: it has to be above 0"),
        (["--suite", "l2", "--shape", "2,4,8,8"], "--suite and --shape"),
        (["--suite", "l2", "--dtypes", "fp8"], "--dtypes 'fp8' is unknown; known: bf16"),
        (["--suite", "l2", "--problem", "x.py"], "--problem beside --suite"),
        (["--problem", "no-such-file.py", "--device", "cpu"], "there is no such file"),
        (["--suite", "l2", "--device", "cuda:99"], "CUDA devices here"),
        (["--suite", "l2", "--json", "/"], "--json / is a folder: name a file"),
        (["--suite", "l2", "--device", "cpu", "--backends", "cpuu"], "did you mean 'cpu'"),
        (["--suite", "l2", "--device", "cpu", "--peers", "torch"], "no peer is called 'torch'; known: torch_grouped"),
    ],
)
def test_wrong_words_are_one_line_and_exit_2(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", *words]) == 2
    assert hint in capsys.readouterr().err


@pytest.mark.parametrize(("device", "kept"), [("cuda", {"a": 110.0, "b": 111.0}), ("cpu", {"a": 100.0, "b": 111.0})])
def test_entries_of_two_passes_of_a_gpu_are_never_compared(
    device: str, kept: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    calm, restless = [1.0] * 9, [0.8, 1.0, 1.3] * 3
    passes = [{"a": (110.0, restless), "b": (111.0, calm)}, {"a": (100.0, restless), "b": (101.0, restless)}]
    passes.append({"a": (110.0, calm), "b": (111.0, calm)})
    left = iter(passes)

    def scripted(calls: dict[str, Any], *_: Any, **__: Any) -> dict[str, Timing]:
        told = next(left)
        return {name: Timing(name, "cold", tuple(told[name][0] * x for x in told[name][1])) for name in calls}

    monkeypatch.setattr(runner, "measure", scripted)
    report = Report({}, {}, {})
    taken = Runner(lambda case: [], torch.device(device), FAST, report)._settled({"a": print, "b": print}, "cold")
    assert {name: timing.median for name, timing in taken.items()} == pytest.approx(kept)


def test_bounds_that_leave_nothing_to_tune_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--suite", "l2", "--seconds", "-1"]) == 2
    assert main(["tune", "--suite", "l2", "--configs", "-2"]) == 2
    told = capsys.readouterr().err
    assert "--seconds -1" in told
    assert "--configs -2" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("words", [["bench", "--backend", "cupy,triton"], ["tune", "--backend", "cupy"]])
def test_backends_that_are_not_here_are_named_before_anything_is_timed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--suite", "l2"]) == 2
    assert "cupy: installed, but torch sees no CUDA GPU" in capsys.readouterr().err


def test_list_shows_every_suite_or_those_that_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--list"]) == 0
    shown = capsys.readouterr().out
    assert "dsv3_up_8k/zipf/bf16" in shown and all(f"\n{name}: " in f"\n{shown}" for name in suites.SUITES)
    assert main(["bench", "--list", "--suite", "tutorial,random"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(":")[0] for line in lines if not line.startswith(" ")] == ["tutorial", "random"]
    assert sum(line.startswith("  random_") for line in lines) == 20
    assert main(["bench", "--list", "--suite", "nope"]) == 2
    assert "suite 'nope' is unknown" in capsys.readouterr().err


def test_a_rested_run_says_so_in_its_report_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = "--shape 2,4,8,8 --peers none"
    assert measured(tmp_path, f"{words} --rest 50").method["rest"] == 0.5
    assert "idle for 50% of the time" in capsys.readouterr().out
    assert "rest" not in measured(tmp_path / "usual", words).method
    assert "idle for" not in capsys.readouterr().out


def test_each_config_is_an_entry_where_that_is_asked(tmp_path: Path) -> None:
    words = "--shape 2,4,8,8 --dtypes fp32 --backends cpu --peers none"
    rows = by_name(measured(tmp_path, f"{words} --configs 2"))
    assert {"cpu#0", "cpu#1"} <= set(rows)
    assert rows["cpu#0"].config != rows["cpu#1"].config
    last = by_name(measured(tmp_path, f"{words} --configs 99 --resume"))["cpu#98"]
    assert last.status == "refused" and "configs for this problem" in last.reason


@pytest.mark.slow
def test_dtypes_are_a_list_in_short_or_long_and_turned_weights_are_asked_for(tmp_path: Path) -> None:
    report = measured(tmp_path, "--shape 2,4,8,8 --dtypes float32,bf16 --nt --backends none --peers none")
    assert report.cases() == [f"shape:2,4,8,8/balanced/{dtype}/nt" for dtype in ("fp32", "bf16")]


def test_what_is_hopeless_on_a_cpu_is_not_chosen_unasked(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def scripted(calls: dict[str, Any], *_: Any, **__: Any) -> dict[str, Timing]:
        took = {"fp32": 100.0, "bf16": 300.0, "fp16": 4000.0}
        return {name: Timing(name, "cold", (took[name],)) for name in calls}

    monkeypatch.setattr(suites, "measure", scripted)
    suites.worthwhile_dtypes.cache_clear()
    parser, gpu, cpu = argparse.ArgumentParser(), torch.device("cuda"), torch.device("cpu")
    add_selection(parser)
    assert {case.dtype for case in selected(parser.parse_args([]), gpu)} == {"fp16", "bf16"}
    cases = selected(parser.parse_args([]), cpu)
    assert [case.dtype for case in cases] == ["fp32"] * 5 + ["bf16"] * 5
    assert capsys.readouterr().err == "left out: fp16, 40 times slower here than fp32 (--dtypes fp16 for it)\n"
    assert {case.dtype for case in selected(parser.parse_args(["--suite", "l2"]), cpu)} == {"fp16"}
    suites.worthwhile_dtypes.cache_clear()


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    words = [*QUICK, "--shape", "2,4,8,8", "--shape", "3,4,8,8", "--dtypes", "fp32", "--peers", "none", "--json-only"]
    words += ["--out", str(tmp_path), "--json", str(tmp_path / "copy.json")]
    real = Runner._case

    def interrupted(self: Runner, case: Any, entries: Any) -> Any:
        if "3,4" in case.key:
            raise KeyboardInterrupt
        return real(self, case, entries)

    with monkeypatch.context() as patch:
        patch.setattr(Runner, "_case", interrupted)
        assert main(words) == 130
    said = capsys.readouterr().err
    assert "workloads measured: 1, left: 1" in said and "--resume" in said and str(tmp_path / "report.json") in said
    assert reports.read(tmp_path / "copy.json").unfinished == ["shape:3,4,8,8/balanced/fp32"]
    assert main([*words, "--resume"]) == 0
    assert len(reports.read(tmp_path).cases()) == 2


def test_progress_tells_the_time_that_is_left_and_what_takes_long(capsys: pytest.CaptureFixture[str]) -> None:
    progress, case = runner.Progress(quiet=False), parse_shape("2,4,8,8")
    progress.started -= 30.0
    progress.step(0, 4, case)
    progress.stage("timing cold: cpu")
    progress.step(3, 4, case)
    progress.step(3, 4, case, allowed_s=4.0)
    progress._told -= 60.0
    progress.stage("timing cold: cpu")
    first, third, bounded, stage = capsys.readouterr().err.splitlines()
    assert first.startswith("[1/4]") and "left" not in first
    assert "about 10 s left" in third and "about 4 s left" in bounded
    assert stage == "  30 s  timing cold: cpu"
    progress._on_terminal = True
    progress.stage("timing cold: cpu")
    progress.end()
    assert capsys.readouterr().err == "\x1b[K  timing cold: cpu\r\x1b[K", "one line, which is wiped at the end"


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_each_script_finds_what_it_imports(script: Path) -> None:
    assert callable(runpy.run_path(str(script), run_name="imported")["main"])
