"""What a run shows: the table, means, stars, plots, ceilings, and the regret of auto."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.bench import machine, plots, reports, table
from multigemm.bench.suites import suite
from multigemm.bench.workloads import geomean, rows_and_weights
from multigemm.select.timing import Timing
from tests.support.bench_entries import CPU
from tests.support.bench_reports import made_up_report


def cells_of(grid: table.Grid) -> dict[str, dict[str, str]]:
    """Cells by name of the row and heading."""
    return {row[0]: dict(zip(grid[0][1:], row[1:], strict=True)) for row in grid[1:]}


def test_the_table_tells_all() -> None:
    shown = table.text(made_up_report(suites="tutorial"))
    for part in ("seed_cube_128/list/fp16", "published cuBLAS", "0.020480", "QuACK is not installed", "Made-up GPU"):
        assert part in shown
    assert "torch_grouped: failed on 10 workload(s): wrong answer: group 0" in shown
    assert "WARNING" not in shown


def test_the_page_holds_every_time_reason_and_verdict() -> None:
    report = made_up_report()
    report.rows[0].why = "a | b"
    told = table.page(report, [Path("elsewhere/runtime.png")])
    cells = {cell.strip(" *|") for line in told.splitlines() if line.startswith("|") for cell in line.split(" | ")}
    assert cells >= {reports.digits(row.us or 0) for row in report.timed()} | {row.case for row in report.timed()}
    found = reports.duels(report)
    assert {duel.won for duel in found} == {True, False}
    assert cells >= {reports.digits(duel.ratio) for duel in found} and table.won_and_lost(report) in told
    assert "checked against a float32 reference" in told and "![runtime](runtime.png)" in told and "a \\| b" in told
    for section in ("K % 8", "not installed", "## Microseconds", "## Won and lost", "## Every number"):
        assert section in told
    assert "## Auto" not in told, "auto was not measured"
    mine = [row for row in report.timed() if row.entry == "cupy"]
    autos = [replace(row, entry="auto", us=(row.us or 0) * (1.2 if row is mine[3] else 0.5)) for row in mine]
    told = table.page(replace(report, rows=[*report.rows, *autos]))
    assert f"of {len(mine)} choices 1 are above 1.03" in told and "## Auto" in told


def test_columns_stand_below_their_headings() -> None:
    lines = table.plain([["workload", "a", "bb"], ["x", table.Best("7.12"), "1"], ["long/er/name", "", "10.5"]])
    assert lines.splitlines() == [
        "workload          a    bb",
        "x             *7.12     1",
        "long/er/name         10.5",
    ]


def test_the_fastest_stands_out_and_is_counted_and_ceilings_are_not() -> None:
    report = made_up_report(suites="l2")
    for row in report.rows:
        if row.kind == "ceiling" and row.us:
            row.us /= 100
    report.rows = [row for row in report.rows if (row.case, row.entry) != (report.cases()[0], "triton")]
    report.rows[0].status, report.rows[0].reason, report.rows[0].us = "refused", "for fun", None
    shown = cells_of(table.times(report))
    us = {(row.case, row.entry): row.us for row in report.rows if row.us and row.kind != "ceiling"}
    wins = dict.fromkeys(("cupy", "triton", "torch_grouped", "torch_loop", "dense"), 0)
    for case in report.cases():
        fastest = min((entry for c, entry in us if c == case), key=lambda entry: us[case, entry])
        wins[fastest] += 1
        assert [name for name, cell in shown[case].items() if isinstance(cell, table.Best)] == [fastest]
        assert shown[case][fastest] == reports.digits(us[case, fastest])
        assert shown[case]["floor"] == reports.digits(next(row.floor_us for row in report.rows if row.case == case))
    assert shown[report.cases()[0]]["cupy"] == "refused"
    assert {name: int(row["fastest"]) for name, row in cells_of(table.means(report)).items()} == wins
    assert "cupy: refused on 1 workload(s): for fun" in table.text(report)


def test_means_are_told_by_distribution_and_against_the_best_peer() -> None:
    report = made_up_report(suites="moe")
    shown = cells_of(table.means(report))["cupy"]
    mine = [row for row in report.rows if row.entry == "cupy"]
    for kind in ("balanced", "zipf", "empty"):
        rows = [row for row in mine if row.distribution == kind]
        assert rows and shown[kind] == reports.digits(geomean(row.of_floor or 0.0 for row in rows))
    peers = {r.case: min(p.us or 0 for p in report.timed() if p.case == r.case and p.kind == "peer") for r in mine}
    assert shown["of the best peer"] == reports.digits(geomean(peers[r.case] / (r.us or 1) for r in mine))


def test_what_batch_invariance_costs_is_told_and_wins_nothing() -> None:
    report = made_up_report(suites="l2", noise=0.0)
    before = table.means(report)
    promised = [copy.copy(row) for row in report.rows if row.entry == "cupy"]
    for number, row in enumerate(promised):
        row.entry, row.us = "cupy[batch invariant]", (row.us or 0) * (0.5 if number else 2.0)
        row.config = "" if number else "another"
    report.rows += promised
    ((_, told),) = cells_of(table.promised(report)).items()
    assert told["suite"] == "l2" and told["workloads"] == str(len(promised)) and told["where"] == promised[0].case
    assert told["least"] == "0.500" and told["with another kernel or config"] == "1"
    assert f"what batch_invariant=True leaves\n{table.plain(table.promised(report))}" in table.text(report)
    assert {name: row["fastest"] for name, row in cells_of(table.means(report)).items()} == {
        **{name: row["fastest"] for name, row in cells_of(before).items()},
        "cupy[batch invariant]": "0",
    }


@pytest.mark.parametrize(("load", "warned"), [(0.5, False), (9.0, True)])
def test_a_busy_machine_is_said_before_anything_is_measured(
    load: float, warned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (load, 0.0, 0.0))
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert ("load 9.0 on 2 cores): stop them" in machine.load_warning(CPU)) == warned
    assert machine.load_warning(torch.device("cuda")) == ""


def test_speed_ups_are_shown_by_the_size_of_groups() -> None:
    report = made_up_report(suites="moe,wgrad,tutorial", noise=0.0)
    cells = cells_of(table.heat_map(report))
    by_case = {duel.case: duel.ratio for duel in reports.duels(report)}
    mine = [by_case[f"dsv3_up_32k/{kind}/bf16"] for kind in ("balanced", "zipf", "empty")]
    assert cells["1024 to 4095"]["NxK 16M+"] == reports.digits(geomean(mine)), "T/G 1024, N x K 28 M, alone there"
    assert cells["64 to 255"]["NxK 16K+"] == reports.digits(by_case["seed_cube_128/list/fp16"]), (
        "lists of equal matrices"
    )
    assert rows_and_weights(suite("wgrad")[0].describe()) is None, "no weights N x K"
    assert "by the size of a group" in table.text(report) and "by the size of a group" in table.page(report)
    assert "by the size of a group" not in table.text(made_up_report(suites="wgrad"))


def test_what_nobody_measured_has_no_column() -> None:
    report = made_up_report(suites="l2")
    assert "host us" in table.means(report)[0] and "J a call" not in table.means(report)[0]
    assert "J a call" not in table.page(report)
    report.rows[0].joules = 0.01234
    assert cells_of(table.means(report))[report.rows[0].entry]["J a call"] == "0.0123"
    assert "| J a call |" in table.page(report)
    for row in report.rows:
        row.host_us = None
    assert "host us" not in table.means(report)[0]


def test_a_noisy_machine_is_said_with_the_remedy() -> None:
    report = made_up_report(suites="l2")
    assert reports.unrest_warning(report) == ""
    for row in report.rows[: len(report.rows) // 2]:
        row.spread = 0.5
    assert "in 8 of 16 times" in table.text(report) and "--rest 80" in table.text(report)
    report.machine["device_type"] = "cpu"
    assert "OMP_WAIT_POLICY=passive" in reports.unrest_warning(report)


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5.5349, "5.53"),
        (22.03, "22.0"),
        (710.5, "710"),
        (2398.4, "2398"),
        (0.0456, "0.0456"),
        (0.0, "0"),
        (0.9996, "1.00"),
        (float("nan"), ""),
        (1e-5, "0.0000100"),
    ],
)
def test_numbers_have_three_digits(value: float, text: str) -> None:
    assert reports.digits(value) == text


def test_brackets_in_names_are_shown() -> None:
    report = made_up_report(suites="l2")
    for row in report.rows:
        row.entry = row.entry.replace("triton", "cublas[host sizes]")
    assert "cublas[host sizes]" in table.text(report)


@pytest.mark.slow
def test_plots_are_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    drawn = plots.draw(made_up_report(suites="moe"), tmp_path)
    assert [p.name for p in drawn] == ["runtime.png", "roofline.png", "speedup.png"]
    assert all(p.read_bytes().startswith(b"\x89PNG") and p.stat().st_size > 10_000 for p in drawn)


def test_ceilings_are_in_teraflops_and_terabytes_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """The best of the products, a copy's bytes twice; torch's switch is turned for tf32, and put back."""
    switches = []

    def millisecond(calls: dict[str, Any], *_: object, **__: object) -> dict[str, Timing]:
        switches.append(torch.get_float32_matmul_precision())
        return {name: Timing(name, "cold", (1000.0,) * 3) for name in calls}

    monkeypatch.setattr(machine, "measure", millisecond)
    monkeypatch.setattr(machine, "DENSE_SIZES", {"cpu": (100, 10)})
    monkeypatch.setattr(machine, "COPY_BYTES", {"cpu": 5000})
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    try:
        rates = machine.measured_rates(CPU, {"tf32", "fp32", "int8"})
        assert torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert switches == ["medium", *["highest"] * 4, *["high"] * 2]
    assert set(rates) == {"fp32", "int8", "tf32"}
    assert all(each.tflops == pytest.approx(2e-3) and each.tbps == pytest.approx(1e-5) for each in rates.values())


def test_the_regret_of_auto_is_told() -> None:
    report = made_up_report(suites="l2")
    for row in report.rows:
        if row.entry == "triton":
            row.entry = "auto"
    worst = reports.auto_regret(report)[0]
    times = {r.entry: r.us for r in report.rows if r.case == worst.case}
    assert worst.ratio == pytest.approx((times["auto"] or 0) / (times["cupy"] or 1))
    assert worst.fastest == "cupy"
    assert "static order" not in table.text(report)
    static = [replace(row, entry="auto-static", us=2 * (row.us or 0)) for row in report.rows if row.entry == "auto"]
    assert "static order, without measuring: 2." in table.text(replace(report, rows=[*report.rows, *static]))
    assert f"{worst.ratio:.3f} (repeats {worst.spread:.3f}) on {worst.case} (fastest: cupy)" in table.text(report)


def test_a_tie_within_what_repeats_differ_by_is_no_sure_regret() -> None:
    report = made_up_report(suites="l2")
    case = report.rows[0].case
    report.rows = [row for row in report.rows if row.case == case and row.entry in ("cupy", "triton")]
    for row, us in zip(report.rows, (7.0, 7.4), strict=True):
        row.us, row.spread, row.entry = us, 0.04, "cupy" if us == 7.0 else "auto"
    (tie,) = reports.auto_regret(report)
    assert tie.beyond(1.03)
    assert not tie.beyond(1.03, doubt=True)
    assert "of 1 choices 1 are above 1.03, 0 of them by more than repeats differ" in table.text(report)
    report.rows[1].us = 7.8
    assert reports.auto_regret(report)[0].beyond(1.03, doubt=True)
