"""The command: files appear, wrong words are one line, and what is not here is named first."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.__main__ import main
from multigemm.bench import cli, results, runner
from multigemm.bench.results import Report
from multigemm.bench.runner import Runner
from multigemm.select import registry
from multigemm.select.timing import Timing
from tests.support.bench_entries import FAST
from tests.support.bench_reports import made_up_report


def test_the_command_writes_everything_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "bench",
        "--shape",
        "2,8,16,16",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
        "--floor",
        "1,0.02",
        "--budget-ms",
        "4",
    ]
    assert main([*words, "--quiet", "--out", str(tmp_path)]) == 0
    names = {p.name for p in tmp_path.iterdir()}
    assert {"report.json", "report.html"} <= names
    raw = json.loads((tmp_path / "report.json").read_text())
    assert raw["schema"] == results.SCHEMA
    assert raw["machine"]["commit"]
    assert raw["machine"]["packages"]["torch"] == torch.__version__.split("+")[0] or raw["machine"]["packages"]["torch"]
    assert main(["bench", "compare", str(tmp_path / "report.json"), str(tmp_path)]) == 0
    assert "0 regressions" in capsys.readouterr().out
    assert main(["bench", "render", str(tmp_path / "report.json")]) == 0


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
        results.write(tmp_path / name, report)
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
        (["--suite", "l2", "--device", "cuda:99"], "CUDA devices here"),
        (["--suite", "l2", "--device", "cpu", "--backend", "cpuu"], "did you mean 'cpu'"),
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
    taken = Runner([], torch.device(device), FAST, report)._settled({"a": print, "b": print}, "cold")
    assert {name: timing.median for name, timing in taken.items()} == pytest.approx(kept)


def test_bounds_that_leave_nothing_to_tune_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune", "--suite", "l2", "--time-budget", "-1"]) == 2
    assert main(["tune", "--suite", "l2", "--configs", "-2"]) == 2
    told = capsys.readouterr().err
    assert "--time-budget -1" in told
    assert "--configs -2" in told


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")
@pytest.mark.parametrize("words", [["bench", "--backend", "cupy,triton"], ["tune", "--backend", "cupy"]])
def test_backends_that_are_not_here_are_named_before_anything_is_timed(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words, "--suite", "l2"]) == 2
    assert "cupy: torch sees no CUDA GPU" in capsys.readouterr().err


def test_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "list"]) == 0
    shown = capsys.readouterr().out
    assert "dsv3_up_8k/zipf/bf16" in shown
    assert "ragged-odd:" in shown


def test_a_rested_run_says_so_in_its_report_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--shape", "2,4,8,8", "--device", "cpu", "--budget-ms", "2", "--peers", "none", "--json-only"]
    assert main([*words, "--rest", "50", "--quiet", "--out", str(tmp_path)]) == 0
    assert results.read(tmp_path).method["rest"] == 0.5
    assert "idle for 50% of the time" in capsys.readouterr().out
    assert main([*words, "--quiet", "--out", str(tmp_path / "usual")]) == 0
    assert "idle for" not in capsys.readouterr().out
    assert "rest" not in results.read(tmp_path / "usual").method


def test_the_quick_timer_checks_times_and_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from multigemm.bench import quick

    words = [
        "--device",
        "cpu",
        "--shape",
        "G=3,T=24,N=8,K=16,dist=zipf",
        "--budget-ms",
        "4",
        "--json",
        str(tmp_path / "q"),
    ]
    assert quick.main([*words, "--backend", "cpu", "--peer"]) == 0
    raw = json.loads((tmp_path / "q").read_text())
    assert {row["variant"] for row in raw["rows"]} == {"cpu", "torch"}
    assert raw["means"]["cpu"]["zipf"] > 0
    for wrong, match in ((["--backend", "cpuu"], "did you mean 'cpu'"), (["--shape", "1,2"], "cannot be read")):
        with pytest.raises(SystemExit) as done:
            quick.main([*words, *wrong])
        assert done.value.code == 2
        assert match in capsys.readouterr().err
    monkeypatch.setattr(registry, "check", lambda name: None)
    assert quick.main([*words, "--backend", "nothing"]) == 1, "a backend that does not import is a row"
    assert "ModuleNotFoundError" in capsys.readouterr().out
