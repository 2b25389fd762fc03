"""The runner: refusals, failures and wrong answers become rows; runs resume; nothing is lost."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.__main__ import main
from multigemm.bench import machine, processes, reports, runner
from multigemm.bench.entries import Entry, Prepared, backend_entries, backend_entry
from multigemm.bench.peers import peer_entries
from multigemm.bench.reports import Report
from multigemm.bench.runner import Options, Runner, new_report
from multigemm.bench.workloads import Rates, Workload, parse_shape
from multigemm.errors import MultigemmError
from multigemm.select.timing import Timing
from tests.support.bench_entries import CASE, CPU, ENTRIES, FAST, RATES, by_name, run
from tests.support.bench_reports import made_up_report


def test_every_outcome_is_a_row_with_its_reason() -> None:
    rows = by_name(run([CASE], ENTRIES))
    assert list(rows) == ["right", "wrong", "refuses", "breaks", "idle", "dense"]
    assert [rows[n].status for n in rows] == ["ok", "failed", "refused", "failed", "failed", "ok"]
    assert "1 elements off" in rows["wrong"].reason
    assert rows["refuses"].reason == "K is 16, and this needs 17"
    assert rows["breaks"].reason == "RuntimeError: kernel exploded"
    assert "instead of" in rows["idle"].reason
    assert rows["wrong"].us is None


def test_a_result_that_cannot_be_read_is_a_failure() -> None:
    """A layer's result is made by a second call, which may run out of memory."""

    def gone(returned: object) -> Any:
        raise MemoryError("no room")

    spoilt = Entry("spoilt", "peer", lambda tensors: Prepared(lambda: None, None, unpack=gone))
    rows = by_name(run([CASE], [spoilt, ENTRIES[0]]))
    assert (rows["spoilt"].status, rows["spoilt"].reason) == ("failed", "MemoryError: no room")
    assert rows["right"].status == "ok"


def test_a_slow_call_has_a_fraction_of_its_floor_too() -> None:
    """Kept in significant digits: rounded to places it would be 0, and left out of every mean."""
    (row,) = run([CASE], ENTRIES[:1], options=replace(FAST, rates={"bf16": Rates(1e6, 1e6)})).rows
    assert row.of_floor is not None and 0 < row.of_floor < 1e-4


def test_a_backend_is_also_measured_under_batch_invariance() -> None:
    entries, _ = backend_entries(["cpu"], CPU, batch_invariant=True)
    rows = by_name(run([CASE], entries))
    assert list(rows) == ["cpu", "cpu[batch invariant]"]
    assert rows["cpu"].kernel == "blas" and rows["cpu[batch invariant]"].kernel == "ordered"
    assert all(row.status == "ok" for row in rows.values())


def test_a_timed_row_holds_what_it_promises() -> None:
    row = by_name(run([CASE], ENTRIES))["right"]
    assert row.us is not None
    assert row.eager is not None
    assert row.eager.count >= 4
    assert row.tflops == pytest.approx(row.flops / row.us / 1e6, rel=0.01, abs=1e-4)
    assert row.of_floor == pytest.approx(row.floor_us / row.us, rel=0.01, abs=1e-4)
    assert row.of_dense is not None
    assert row.host_us is not None


@pytest.mark.slow
def test_a_run_resumes_where_it_was_cut(tmp_path: Path) -> None:
    other, path = parse_shape("2,4,8,8"), tmp_path / "report.json"
    first = run([CASE, other], ENTRIES[:1], path, Options(reps=3, budget_ms=3.0, rates=RATES, total_s=-1.0))
    assert first.unfinished == [CASE.key, other.key]
    kept = run([CASE], ENTRIES[:1], path)
    again = Runner(lambda case: ENTRIES[:2], CPU, FAST, reports.read(path), path).run([CASE, other])
    assert [(r.case, r.entry) for r in again.rows] == [
        (CASE.key, "right"), (CASE.key, "wrong"), (other.key, "right"), (other.key, "wrong"),
    ]  # fmt: skip
    assert again.rows[0] == kept.rows[0]
    assert again.unfinished == []


@pytest.mark.slow
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
        lambda case: ENTRIES[:1],
        CPU,
        Options(budget_ms=0.01, rates=RATES, goal_s=0.0),
        new_report(CPU, {"bf16", "fp32"}, FAST, {}),
    ).run([CASE, slow])
    assert [row.eager.count for row in report.rows if row.eager][1] == 3


def test_a_lost_device_is_told_apart_from_a_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def lost(self: Any) -> None:
        raise RuntimeError("illegal address")

    path = tmp_path / "report.json"
    monkeypatch.setattr(runner.Runner, "_synchronize", lost)
    with pytest.raises(runner.DeviceLost, match="context is lost"):
        run([CASE], ENTRIES, path)
    kept = reports.read(path)
    assert [(r.entry, r.status) for r in kept.rows] == [("right", "failed")]


@pytest.mark.slow
def test_the_cpu_backend_and_auto_run_what_users_run() -> None:
    entries = [backend_entry(name) for name in ("cpu", "auto", "auto-static")]
    rows = by_name(run([CASE, parse_shape("3x5x7+2x2x2")], entries))
    assert {row.status for row in rows.values()} == {"ok"}
    assert rows["auto"].kernel.startswith("cpu: ") and rows["auto-static"].kernel.startswith("cpu: ")
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
    peers, missing = peer_entries([], CPU, [CASE])
    assert [e.name for e in peers] == ["torch_grouped", "torch_loop", "torch_bmm"]
    assert "CUDA" in missing["cublas_grouped"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "G=3,M=4,T=24,K=8,form=jagged_n,bias=1,dist=zipf", "G=3,M=4,T=24,N=8,form=jagged_k,bias=1",
        "G=3,T=24,N=8,K=8,bias=1", "G=3,T=24,N=8,K=8,bias=1,dtype=int8",
        "G=3,M=4,T=9,N=8,K=8,form=masked,bias=1", "G=3,T=24,N=0,K=8", "G=3,T=24,N=8,K=0",
        "G=3,T=0,N=8,K=8", "0x4x4+2x0x2",
    ],
)  # fmt: skip
def test_biases_of_every_form_and_empty_problems_are_measured(text: str) -> None:
    peers, _ = peer_entries(["torch_loop", "torch_bmm"], CPU, [CASE])
    rows = by_name(run([parse_shape(text)], [backend_entry("cpu"), *peers]))
    assert rows["cpu"].status == "ok", rows["cpu"].reason
    assert all(row.status in ("ok", "refused") for row in rows.values()), [row.reason for row in rows.values()]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["torch_grouped", "torch_loop", "torch_bmm"])
@pytest.mark.parametrize(
    "text", ["4,8,16,16", "G=4,T=32,N=16,K=16,dist=empty", "8x8x8+8x8x8", "G=3,M=8,N=16,T=32,form=jagged_k"]
)
def test_torch_peers_are_right_or_refuse(name: str, text: str) -> None:
    (entry,), _ = peer_entries([name], CPU, [CASE])
    row = run([parse_shape(text)], [entry]).rows[0]
    assert row.status in ("ok", "refused"), row.reason


@pytest.mark.slow
def test_a_ceiling_that_cannot_be_measured_is_said_and_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> dict[str, Timing]:
        return {"copy": Timing("copy", "cold", error="OutOfMemoryError: no room")}

    monkeypatch.setattr(machine, "measure", fails)
    with pytest.raises(MultigemmError, match="ceiling of memory failed: OutOfMemoryError"):
        machine.copy_tbps(CPU)


def test_who_is_stopped_while_writing_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, report = tmp_path / "report.json", made_up_report(suites="l2")
    reports.write(path, report)

    def half(path: Path, text: str) -> None:
        path.write_bytes(text[:9].encode())
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", half)
    with pytest.raises(KeyboardInterrupt):
        reports.write(path, made_up_report(suites="small"))
    assert reports.read(path) == report


def test_a_lost_device_ends_the_child_with_its_own_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def run(self: Runner, cases: list[Workload]) -> Report:
        raise runner.DeviceLost("illegal address")

    monkeypatch.setattr(runner.Runner, "run", run)
    words = ["--shape", "2,4,8,8", "--device", "cpu", "--floor", "1,1", "--out", str(tmp_path)]
    assert main(["bench", *words]) == processes.CONTEXT_LOST


def test_resuming_the_report_of_another_commit_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    reports.write(tmp_path / "report.json", made_up_report(suites="l2"))
    words = ["--shape", "2,4,8,8", "--device", "cpu", "--resume", "--out", str(tmp_path)]
    assert main(["bench", *words]) == 2
    assert "use another --out" in capsys.readouterr().err


@pytest.mark.slow
def test_resuming_no_report_begins_anew_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["bench", "--shape", "2,4,8,8", "--dtypes", "fp32", "--device", "cpu", "--budget-ms", "2"]
    assert main([*words, "--peers", "none", "--json-only", "--resume", "--out", str(tmp_path)]) == 0
    assert "report.json does not exist, so this run begins anew" in capsys.readouterr().err


@pytest.mark.slow
def test_a_resumed_run_may_bring_other_dtypes(tmp_path: Path) -> None:
    words = ["bench", "--shape", "2,4,8,8", "--device", "cpu", "--budget-ms", "2", "--peers", "none", "--json-only"]
    for dtype in ("fp32", "fp64"):
        assert main([*words, "--dtype", dtype, "--resume", "--quiet", "--out", str(tmp_path)]) == 0
    report = reports.read(tmp_path)
    assert [row.dtype for row in report.rows if row.entry == "cpu"] == ["fp32", "fp64"]
    assert set(report.rates) == set(report.method["measured_rates"]) == {"fp32", "fp64"}
