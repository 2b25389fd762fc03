"""What a run shows: the table, means, stars, plots, ceilings, and the regret of auto."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.bench import plots, results, roofline, table
from multigemm.bench.workloads import geomean
from multigemm.select.timing import Timing
from tests.support.bench_entries import CPU
from tests.support.bench_reports import made_up_report


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
