"""The runner and the command: refusals, failures and wrong answers become rows; runs resume; files appear."""

from __future__ import annotations

import json
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm import registry, tuning
from multigemm.__main__ import main
from multigemm.bench import cli, plots, results, roofline, runner, supervise, table, tune
from multigemm.bench.check import group_inputs, group_outputs
from multigemm.bench.drawn import UNTUNED
from multigemm.bench.entries import Entry, Prepared, Refused, backend_entries, backend_entry, ceiling_entry
from multigemm.bench.method import Options, new_report
from multigemm.bench.operands import Tensors
from multigemm.bench.peers import peer_entries
from multigemm.bench.results import Report, Row
from multigemm.bench.runner import Runner
from multigemm.bench.tried import ClassResult, State, from_reports
from multigemm.bench.tune import Limits, Tuner, of_place
from multigemm.bench.workloads import Rates, Workload, geomean, parse_shape
from multigemm.errors import MultigemmError
from multigemm.measured import config_text
from multigemm.spec import ProblemSpec
from multigemm.timing import Timing
from tests.bench_reports import made_up_report

CPU = torch.device("cpu")
RATES = {"bf16": Rates(1.0, 0.02), "fp32": Rates(1.0, 0.02)}
FAST = Options(reps=4, budget_ms=4.0, rates=RATES)
CASE = Workload("tiny", "own", groups=3, n=8, k=16, total=24, distribution="zipf")


def loop(tensors: Tensors, spoil: bool = False) -> Prepared:
    def call() -> None:
        pairs = zip(group_inputs(tensors), group_outputs(tensors, tensors.out), strict=True)
        for (a, b), out in pairs:
            torch.mm(a, b, out=out)
        if spoil:
            group_outputs(tensors, tensors.out)[-1][-1, -1] += 100

    return Prepared(call, tensors.out, "loop")


def refuses(tensors: Tensors) -> Prepared:
    raise Refused("K is 16, and this needs 17")


def breaks(tensors: Tensors) -> Prepared:
    raise RuntimeError("kernel exploded\nwith details")


def writes_nothing(tensors: Tensors) -> Prepared:
    return Prepared(lambda: None, tensors.out)


ENTRIES = [
    Entry("right", "backend", loop),
    Entry("wrong", "backend", lambda t: loop(t, spoil=True)),
    Entry("refuses", "peer", refuses),
    Entry("breaks", "peer", breaks),
    Entry("idle", "peer", writes_nothing),
    ceiling_entry(),
]


def run(cases: list[Workload], entries: list[Entry], path: Path | None = None, options: Options = FAST) -> Report:
    report = new_report(CPU, {"bf16"}, options, {"quack": "not installed"})
    return Runner(entries, CPU, options, report, path).run(cases)


def by_name(report: Report) -> dict[str, Row]:
    return {row.entry: row for row in report.rows}


def test_every_outcome_is_a_row_with_its_reason() -> None:
    rows = by_name(run([CASE], ENTRIES))
    assert list(rows) == ["right", "wrong", "refuses", "breaks", "idle", "dense"]
    assert [rows[n].status for n in rows] == ["ok", "failed", "refused", "failed", "failed", "ok"]
    assert "1 elements off" in rows["wrong"].reason
    assert rows["refuses"].reason == "K is 16, and this needs 17"
    assert rows["breaks"].reason == "RuntimeError: kernel exploded"
    assert "instead of" in rows["idle"].reason
    assert rows["wrong"].us is None


def test_a_timed_row_holds_what_it_promises() -> None:
    row = by_name(run([CASE], ENTRIES))["right"]
    assert row.us is not None
    assert row.eager is not None
    assert row.eager.count >= 4
    assert row.tflops == pytest.approx(row.flops / row.us / 1e6, rel=0.01, abs=1e-4)
    assert row.of_floor == pytest.approx(row.floor_us / row.us, rel=0.01, abs=1e-4)
    assert row.of_dense is not None
    assert row.host_us is not None


def test_a_run_resumes_where_it_was_cut(tmp_path: Path) -> None:
    other, path = parse_shape("2,4,8,8"), tmp_path / "report.json"
    first = run([CASE, other], ENTRIES[:1], path, Options(reps=3, budget_ms=3.0, rates=RATES, total_s=-1.0))
    assert first.unfinished == [CASE.key, other.key]
    kept = run([CASE], ENTRIES[:1], path)
    again = Runner(ENTRIES[:2], CPU, FAST, results.read(path), path).run([CASE, other])
    assert [(r.case, r.entry) for r in again.rows] == [
        (CASE.key, "right"), (CASE.key, "wrong"), (other.key, "right"), (other.key, "wrong"),
    ]  # fmt: skip
    assert again.rows[0] == kept.rows[0]
    assert again.unfinished == []


def test_a_run_that_is_late_takes_fewer_samples_and_leaves_nothing_out() -> None:
    cases = [CASE, parse_shape("2,4,8,8")]
    counts = {}
    for goal_s in (1e9, 0.0):
        report = run(cases, ENTRIES[:1], options=Options(reps=100, budget_ms=1.0, rates=RATES, goal_s=goal_s))
        assert report.unfinished == []
        counts[goal_s] = [row.eager.count for row in report.rows if row.eager]
    assert counts[1e9][1] >= 9
    assert counts[0.0][0] >= 9
    assert counts[0.0][1] >= 3
    slow = parse_shape("1,512,512,512", "fp32")
    report = Runner(
        ENTRIES[:1], CPU, Options(budget_ms=0.01, rates=RATES, goal_s=0.0), new_report(CPU, {"bf16", "fp32"}, FAST, {})
    ).run([CASE, slow])
    assert [row.eager.count for row in report.rows if row.eager][1] == 3


def test_a_lost_device_is_told_apart_from_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(self: Any) -> None:
        raise RuntimeError("illegal address")

    path = tmp_path / "report.json"
    monkeypatch.setattr(runner.Runner, "_synchronize", lost)
    with pytest.raises(runner.DeviceLost, match="context is lost"):
        run([CASE], ENTRIES, path)
    kept = results.read(path)
    assert [(r.entry, r.status) for r in kept.rows] == [("right", "failed")]


def test_the_cpu_backend_and_auto_run_what_users_run() -> None:
    rows = by_name(run([CASE, parse_shape("3x5x7+2x2x2")], [backend_entry("cpu"), backend_entry("auto")]))
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["auto"].kernel.startswith("cpu: ")
    assert rows["cpu"].whole_host_us is not None


def test_a_backend_that_cannot_says_why() -> None:
    row = by_name(run([CASE], [backend_entry("cupy")]))["cupy"]
    if torch.cuda.is_available():
        pytest.skip("cupy can run here")
    assert row.status == "refused"
    assert row.reason


def test_who_is_absent_is_named_with_a_reason() -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here, so less is absent")
    entries, absent = backend_entries([], CPU)
    assert [e.name for e in entries] == ["cpu", "auto"]
    assert {"cupy", "triton", "numba", "cublas"} <= set(absent)
    peers, missing = peer_entries([], CPU)
    assert [e.name for e in peers] == ["torch_grouped", "torch_loop", "torch_bmm"]
    assert "CUDA" in missing["cublas_grouped"]


@pytest.mark.parametrize(
    "text",
    [
        "G=3,M=4,T=24,K=8,form=jagged_n,bias=1,dist=zipf", "G=3,M=4,T=24,N=8,form=jagged_k,bias=1",
        "G=3,T=24,N=8,K=8,bias=1", "G=3,M=4,T=9,N=8,K=8,form=masked,bias=1", "G=3,T=24,N=0,K=8", "G=3,T=24,N=8,K=0",
        "G=3,T=0,N=8,K=8", "0x4x4+2x0x2",
    ],
)  # fmt: skip
def test_biases_of_every_form_and_empty_problems_are_measured(text: str) -> None:
    peers, _ = peer_entries(["torch_loop", "torch_bmm"], CPU)
    rows = by_name(run([parse_shape(text)], [backend_entry("cpu"), *peers]))
    assert rows["cpu"].status == "ok", rows["cpu"].reason
    assert all(row.status in ("ok", "refused") for row in rows.values()), [row.reason for row in rows.values()]


@pytest.mark.parametrize("name", ["torch_grouped", "torch_loop", "torch_bmm"])
@pytest.mark.parametrize(
    "text", ["4,8,16,16", "G=4,T=32,N=16,K=16,dist=empty", "8x8x8+8x8x8", "G=3,M=8,N=16,T=32,form=jagged_k"]
)
def test_torch_peers_are_right_or_refuse(name: str, text: str) -> None:
    (entry,), _ = peer_entries([name], CPU)
    row = run([parse_shape(text)], [entry]).rows[0]
    assert row.status in ("ok", "refused"), row.reason


def test_the_table_tells_all(capsys: pytest.CaptureFixture[str]) -> None:
    report = made_up_report(suites="tutorial")
    shown = table.text(report)
    for part in (
        "seed_cube_128/list/fp16",
        "published cuBLAS",
        "0.020480",
        "wins",
        "QuACK is not installed",
        "Made-up GPU",
    ):
        assert part in shown
    assert "torch_grouped: failed on 10 workload(s): wrong answer: group 0" in shown


def test_the_table_works_without_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    lines = table.text(made_up_report(suites="l2")).splitlines()
    head = next(line for line in lines if line.startswith("workload"))
    assert head.split() == ["workload", "floor", "cupy", "triton", "torch_grouped", "torch_loop", "dense"]


def test_stars_and_wins_go_to_the_fastest_and_ceilings_get_neither(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = made_up_report(suites="l2")
    for row in report.rows:
        if row.kind == "ceiling" and row.us:
            row.us /= 100
    report.rows = [row for row in report.rows if (row.case, row.entry) != (report.cases()[0], "triton")]
    report.rows[0].status, report.rows[0].reason, report.rows[0].us = "refused", "for fun", None
    whole = table.text(report).splitlines()
    lines = [line.split() for line in whole]
    head = next(line for line in lines if line[:1] == ["workload"])
    us = {(row.case, row.entry): row.us for row in report.rows if row.us and row.kind != "ceiling"}
    wins = dict.fromkeys(head[2:], 0)
    for case in report.cases():
        cells = next(line for line in lines if line[:1] == [case])[2:]
        fastest = min((entry for c, entry in us if c == case), key=lambda entry: us[case, entry])
        assert [cell for cell in cells if cell.startswith("*")] == [f"*{us[case, fastest]:.1f}"]
        floor = next(line for line in lines if line[:1] == [case])[1]
        assert floor == f"{next(row.floor_us for row in report.rows if row.case == case):.1f}"
        wins[fastest] += 1
    assert "no" in next(line for line in lines if line[:1] == [report.cases()[0]])
    top = next(number for number, line in enumerate(lines) if line[:1] == ["entry"])
    end = whole[top].index("wins") + len("wins")  # the column's: some cells before it are empty
    told = {line.split()[0]: line[:end].split()[-1] for line in whole[top + 1 : top + 1 + len(wins)]}
    assert told == {name: str(count) for name, count in wins.items()}
    assert "cupy: refused on 1 workload(s): for fun" in whole


def test_means_are_told_by_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    report = made_up_report(suites="moe")
    lines = [line.split() for line in table.text(report).splitlines()]
    head = next(line for line in lines if line[:1] == ["entry"])
    means = next(line for line in lines[lines.index(head) :] if line[:1] == ["cupy"])
    for number, kind in enumerate(head[1:4], 1):
        rows = [row for row in report.rows if row.entry == "cupy" and row.distribution == kind]
        assert rows and means[number] == f"{geomean(row.of_floor or 0.0 for row in rows):.3f}"


def test_brackets_in_names_are_shown() -> None:
    report = made_up_report(suites="l2")
    for row in report.rows:
        row.entry = row.entry.replace("triton", "cublas[host sizes]")
    assert "cublas[host sizes]" in table.text(report)


def test_plots_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = plots.draw(made_up_report(suites="moe"), tmp_path)
    assert [p.name for p in drawn] == ["runtime.png", "roofline.png", "speedup.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in drawn)


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


def test_ceilings_are_in_teraflops_and_terabytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the products, a copy's bytes twice; torch's switch is turned for tf32, and put back."""
    switches = []

    def millisecond(calls: dict[str, Any], *_: object, **__: object) -> dict[str, Timing]:
        switches.append(torch.get_float32_matmul_precision())
        return {name: Timing(name, "cold", (1000.0,) * 3) for name in calls}

    monkeypatch.setattr(roofline, "measure", millisecond)
    monkeypatch.setattr(roofline, "DENSE_SIZES", {"cpu": (100, 10)})
    monkeypatch.setattr(roofline, "COPY_BYTES", {"cpu": 5000})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        rates = roofline.measured_rates(CPU, {"tf32", "fp32", "int8"})
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert switches == ["medium", *["highest"] * 4, *["high"] * 2]
    assert set(rates) == {"fp32", "int8", "tf32"}
    assert all(each.tflops == pytest.approx(2e-3) and each.tbps == pytest.approx(1e-5) for each in rates.values())


def test_a_ceiling_that_cannot_be_measured_is_said_and_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> dict[str, Timing]:
        return {"copy": Timing("copy", "cold", error="OutOfMemoryError: no room")}

    monkeypatch.setattr(roofline, "measure", fails)
    with pytest.raises(MultigemmError, match="ceiling of memory failed: OutOfMemoryError"):
        roofline.copy_tbps(CPU)


def test_who_is_stopped_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = State(tmp_path / "state.json", done=["one"])
    state.save()

    def half(path: Path, text: str) -> None:
        path.write_bytes(text[:9].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    state.done.append("two")
    with pytest.raises(KeyboardInterrupt):
        state.save()
    assert State.load(tmp_path / "state.json").done == ["one"]


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


def test_the_regret_of_auto_is_told() -> None:
    report = made_up_report(suites="l2")
    for row in report.rows:
        if row.entry == "triton":
            row.entry = "auto"
    worst = results.auto_regret(report)[0]
    times = {r.entry: r.us for r in report.rows if r.case == worst.case}
    assert worst.ratio == pytest.approx((times["auto"] or 0) / (times["cupy"] or 1))
    assert worst.fastest == "cupy"
    assert f"{worst.ratio:.3f} (repeats {worst.spread:.3f}) on {worst.case} (fastest: cupy)" in table.text(report)


def test_a_tie_within_what_repeats_differ_by_is_no_sure_regret() -> None:
    report = made_up_report(suites="l2")
    case = report.rows[0].case
    report.rows = [row for row in report.rows if row.case == case and row.entry in ("cupy", "triton")]
    for row, us in zip(report.rows, (7.0, 7.4), strict=True):
        row.us, row.spread, row.entry = us, 0.04, "cupy" if us == 7.0 else "auto"
    (tie,) = results.auto_regret(report)
    assert tie.beyond(1.03)
    assert not tie.beyond(1.03, doubt=True)
    assert "of 1 choices 1 are above 1.03, 0 of them by more than repeats differ" in table.text(report)
    report.rows[1].us = 7.8
    assert results.auto_regret(report)[0].beyond(1.03, doubt=True)


def test_list_names_every_suite(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "list"]) == 0
    shown = capsys.readouterr().out
    assert "dsv3_up_8k/zipf/bf16" in shown
    assert "ragged-odd:" in shown


def test_tuning_measures_keeps_failures_and_writes_a_file_to_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from multigemm import settings

    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(tmp_path / "cache"))
    settings.settings.cache_clear()
    tuning.table.cache_clear()
    words = [
        "--shape",
        "G=3,T=24,N=8,K=16",
        "--shape",
        "G=3,T=24,N=8,K=16,dist=empty",
        "--dtype",
        "fp32",
        "--device",
        "cpu",
    ]
    try:
        assert main(["tune", *words, "--out", str(tmp_path / "t.json"), "--configs", "2"]) == 0
        assert len(tuning.table().own()) == 1
        assert main(["cache", "clear"]) == 0
        assert main(["cache", "import", str(tmp_path / "t.json")]) == 0
        (kept,) = tuning.table().own()
    finally:
        settings.settings.cache_clear()
        tuning.table.cache_clear()
    assert kept.backend == "cpu"
    assert kept.us > 0
    assert "first guess" in capsys.readouterr().out


def test_when_tuning_runs_out_of_time_every_backend_has_had_its_first_config() -> None:
    told: list[str] = []
    tuner = Tuner(CPU, ["cpu"], Limits(total_s=-1.0, quick_ms=1.0, careful_ms=1.0), told.append)
    tuner._case(parse_shape("G=3,T=24,N=8,K=16,dist=empty", "fp32"))
    (result,) = tuner.classes.values()
    assert list(result.us) == [("cpu", 0)]
    assert any("not tried within the time budget" in text for text in told)
    assert tuner.run([CASE]) != []
    assert tuner.unfinished == [CASE.key]


def test_sizes_on_the_host_are_a_class_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def key(spec: ProblemSpec, equal: bool) -> str:  # on a CPU sizes lie on the host anyway
        return tuning.spec_key(spec, equal) + next(told)

    told = iter(["", " elsewhere"])
    monkeypatch.setattr(tune, "spec_key", key)
    monkeypatch.setattr(type(registry.get("cpu")), "decides_at_bind", True, raising=False)
    tuner = Tuner(CPU, ["cpu"], Limits(configs=1, quick_ms=1.0, careful_ms=1.0), lambda text: None)
    found = tuner.run([parse_shape("G=3,T=24,N=8,K=16,dist=empty")])
    assert [m.key.split()[10:] for m in found] == [["host-sizes"], ["host-sizes", "elsewhere"]]
    assert {m.backend for m in found} == {"cpu"}
    assert found[0].us != found[1].us


def test_where_sizes_lie_is_the_same_to_who_never_looks_at_them() -> None:
    times = {("cublas", 0): 5.0, ("cublas[host sizes]", 0): 4.0, ("cupy", 0): 3.0, ("cupy", 1): 2.0}
    assert of_place(times, "") == {("cublas", 0): 5.0, ("cupy", 0): 3.0, ("cupy", 1): 2.0}
    assert of_place(times, "[host sizes]") == {("cublas[host sizes]", 0): 4.0, ("cupy", 0): 3.0, ("cupy", 1): 2.0}


def test_rows_of_kernels_that_never_look_at_host_sizes_count_for_them_too() -> None:
    report = run([CASE], [backend_entry("cpu"), backend_entry("cpu", host_sizes=True)])
    (device, special) = report.rows
    device.entry, device.us, special.us = "other", 5.0, 4.0
    device.spec = device.spec.replace("host-sizes", "device-sizes")
    kept = {(m.backend, m.key.split()[-1]): m.us for m in from_reports([report])}
    where = special.spec.split()[-1]
    assert kept == {("other", "device-sizes"): 5.0, ("other", where): 5.0, ("cpu", where): 4.0}
    device.suite = special.suite = UNTUNED
    assert from_reports([report]) == []


def test_a_report_serves_as_a_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = run([CASE, parse_shape("G=3,T=24,N=8,K=16,dist=empty")], [backend_entry("cpu"), backend_entry("auto")])
    rows = [row for row in report.rows if row.entry == "cpu"]
    results.write(tmp_path / "r.json", report)
    (found,) = from_reports([results.read(tmp_path / "r.json")])
    assert found.backend == "cpu"
    assert found.device == "cpu"
    assert found.key == rows[0].spec == rows[1].spec
    assert found.config == {}  # the backend keeps its own first guess
    assert found.ran == config_text(rows[0].fields) != ""
    assert found.groups == 3
    assert found.flops == pytest.approx((rows[0].flops * rows[1].flops) ** 0.5, rel=1e-3)
    assert found.us == pytest.approx(((rows[0].us or 0) * (rows[1].us or 0)) ** 0.5, abs=0.02)
    words = ["--no-record", "--from-report", str(tmp_path / "r.json"), "--out", str(tmp_path / "t.json")]
    assert main(["tune", *words]) == 0
    assert json.loads((tmp_path / "t.json").read_text())["entries"][0]["key"] == found.key


def test_reports_of_one_config_are_averaged_and_a_new_config_replaces_the_old() -> None:
    first, second, third = (run([CASE], [backend_entry("cpu")]) for _ in range(3))
    for report, us in ((first, 4.0), (second, 9.0), (third, 1.0)):
        report.rows[0].us = us
    assert [m.us for m in from_reports([first, second])] == [6.0]
    third.rows[0].config, third.rows[0].fields, third.rows[0].ran = "another", {"rows": 7}, "7/streams, by the sizes"
    (found,) = from_reports([first, second, third])
    assert (found.us, found.ran) == (1.0, "7/streams, by the sizes")
    assert [m.us for m in from_reports([third, first, second])] == [6.0]


def test_the_winner_is_the_least_worst_over_a_class() -> None:
    result = ClassResult("k", us={
        ("x", 0): {"even": 10.0, "skewed": 30.0},
        ("x", 1): {"even": 11.0, "skewed": 21.0},
        ("x", 2): {"even": 9.0},
        ("y", 0): {"even": 12.0, "skewed": 20.0},
        ("y", 1): {"even": 11.95, "skewed": 20.0},
    })  # fmt: skip
    assert result.winner("x") == ("x", 1)
    assert result.winner("y") == ("y", 0)  # within a per cent of the best: the first guess stays
    assert result.winner("z") is None


def test_bench_imports_no_gpu_library_and_no_optional_one() -> None:
    code = (
        "import sys, multigemm.bench.cli, multigemm.bench.tune_cli\n"
        "print([m for m in ('triton', 'cupy', 'numba', 'matplotlib', 'rich', 'jinja2') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_lost_device_ends_the_child_with_its_own_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(self: Runner, cases: list[Workload]) -> Report:
        raise runner.DeviceLost("illegal address")

    monkeypatch.setattr(runner.Runner, "run", run)
    words = ["--shape", "2,4,8,8", "--device", "cpu", "--floor", "1,1", "--out", str(tmp_path)]
    assert main(["bench", *words]) == supervise.CONTEXT_LOST


def test_a_rested_run_says_so_in_its_report_and_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--shape", "2,4,8,8", "--device", "cpu", "--budget-ms", "2", "--peers", "none", "--json-only"]
    assert main([*words, "--rest", "50", "--quiet", "--out", str(tmp_path)]) == 0
    assert results.read(tmp_path).method["rest"] == 0.5
    assert "idle for 50% of the time" in capsys.readouterr().out
    assert main([*words, "--quiet", "--out", str(tmp_path / "usual")]) == 0
    assert "idle for" not in capsys.readouterr().out
    assert "rest" not in results.read(tmp_path / "usual").method


def test_resuming_the_report_of_another_commit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results.write(tmp_path / "report.json", made_up_report(suites="l2"))
    words = ["--shape", "2,4,8,8", "--device", "cpu", "--resume", "--out", str(tmp_path)]
    assert main(["bench", *words]) == 2
    assert "use another --out" in capsys.readouterr().err


def test_a_resumed_run_may_bring_other_dtypes(tmp_path: Path) -> None:
    words = ["bench", "--shape", "2,4,8,8", "--device", "cpu", "--budget-ms", "2", "--peers", "none", "--json-only"]
    for dtype in ("fp32", "fp64"):
        assert main([*words, "--dtype", dtype, "--resume", "--quiet", "--out", str(tmp_path)]) == 0
    report = results.read(tmp_path)
    assert [row.dtype for row in report.rows if row.entry == "cpu"] == ["fp32", "fp64"]
    assert set(report.rates) == set(report.method["measured_rates"]) == {"fp32", "fp64"}


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
