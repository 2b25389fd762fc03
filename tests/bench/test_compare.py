"""Compare: quiet on two runs of one commit, loud on a planted ten per cent, ten times out of ten."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from multigemm.bench import reports
from multigemm.bench.compare import compare
from multigemm.bench.reports import Report, Sample
from multigemm.errors import InvalidSetting
from tests.support.bench_reports import made_up_report

NOISE: dict[str, Any] = {"noise": 0.012, "machine_noise": 0.02}
SEEDS = range(10)


def slow_down(report: Report, factor: float, entry: str = "cupy", case: str = "") -> int:
    """Makes rows slower, samples included; says how many."""
    count = 0
    for row in report.rows:
        if row.us and row.entry == entry and case in row.case:
            count += 1
            row.us *= factor
            assert row.eager is not None
            e = row.eager
            row.eager = Sample(e.median * factor, e.q20 * factor, e.q80 * factor, e.best * factor, e.spread, e.count)
    return count


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_two_runs_of_one_commit_agree(seed: int) -> None:
    found = compare(made_up_report(seed, **NOISE), made_up_report(seed + 100, **NOISE))
    assert found.regressions == []


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_per_cent_everywhere_is_found(seed: int) -> None:
    slower = made_up_report(seed + 100, **NOISE)
    assert slow_down(slower, 1.10) > 10
    assert any(text.startswith("cupy: ") for text in compare(made_up_report(seed, **NOISE), slower).regressions)


@pytest.mark.parametrize("seed", SEEDS)
def test_ten_per_cent_on_one_workload_is_found(seed: int) -> None:
    quiet: dict[str, Any] = {"noise": 0.005, "machine_noise": 0.02}
    slower = made_up_report(seed + 100, **quiet)
    assert slow_down(slower, 1.10, case="qwen3_32k/zipf") == 1
    found = compare(made_up_report(seed, **quiet), slower).regressions
    assert [text for text in found if "qwen3_32k/zipf" in text]
    assert not [text for text in found if "qwen3_32k/zipf" not in text]


def test_a_workload_whose_peers_jumped_is_not_judged() -> None:
    old, new = made_up_report(1, **NOISE), made_up_report(2, **NOISE)
    for entry in ("torch_grouped", "torch_loop", "dense"):
        slow_down(new, 0.01, entry, "qwen3_32k/zipf")
    found = compare(old, new)
    assert found.regressions == []
    assert [case for case in found.unjudged if "qwen3_32k/zipf" in case] == found.unjudged != []
    assert "not judged" in found.text()
    slow_down(new, 1.1)
    assert compare(old, new).regressions


def test_where_nothing_can_be_told_there_is_no_verdict() -> None:
    old, new = made_up_report(1, **NOISE), made_up_report(2, **NOISE)
    for entry in ("torch_grouped", "torch_loop", "dense"):
        slow_down(new, 0.01, entry)
    with pytest.raises(InvalidSetting, match="moved by more than 2 x everywhere"):
        compare(old, new)
    other = made_up_report(2, **NOISE)
    other.machine["device"] = "another GPU"
    with pytest.raises(InvalidSetting, match="and another GPU: compare one device"):
        compare(old, other)
    new.rows = [row for row in new.rows if row.kind != "backend"]
    with pytest.raises(InvalidSetting, match="no time of a backend in common"):
        compare(old, new)


def test_a_slower_machine_is_no_regression_of_ours_but_a_uniform_shift_is_told() -> None:
    old, new = made_up_report(1, **NOISE), made_up_report(2, **NOISE)
    for entry in ("cupy", "triton", "torch_grouped", "torch_loop", "dense"):
        slow_down(new, 1.04, entry)
    assert compare(old, new).regressions == []
    same = made_up_report(1, **NOISE)
    for entry in ("cupy", "triton", "torch_grouped", "torch_loop", "dense"):
        slow_down(same, 1.10, entry)
    assert any(
        text.startswith("everything, peers and ceilings too: +10.0 %") for text in compare(old, same).regressions
    )
    assert "drift of peers and ceilings +10.0 %" in compare(old, same).text()


def test_peers_that_moved_by_many_factors_are_no_uniform_shift() -> None:
    old, new = made_up_report(1), made_up_report(1)
    for entry, factor in (("torch_loop", 1.1), ("dense", 1.3)):
        slow_down(new, factor, entry)
    found = compare(old, new)
    assert "drift of peers and ceilings +10.0 %" in found.text()
    assert not any("everything" in text for text in found.regressions)


def test_only_the_printed_time_changed() -> None:
    slower = made_up_report(1)
    for row in slower.rows:
        if row.entry == "triton" and row.us:
            row.us *= 1.1
    assert any(text.startswith("triton: ") for text in compare(made_up_report(1), slower).regressions)


def test_what_ran_before_and_fails_now_is_a_regression() -> None:
    new = made_up_report(1)
    new.rows[0].us, new.rows[0].status, new.rows[0].reason = None, "failed", "wrong answer"
    assert any("ran before, now failed: wrong answer" in text for text in compare(made_up_report(1), new).regressions)


def test_a_faster_run_is_said_and_is_no_regression() -> None:
    new = made_up_report(1)
    slow_down(new, 0.8, "triton")
    found = compare(made_up_report(1), new)
    assert found.regressions == []
    assert "faster: triton" in found.text()
    assert found.text().endswith("0 regressions")
    slow_down(new, 0.8, "torch_loop")
    told = [line for line in compare(made_up_report(1), new).text().splitlines() if line.startswith("faster: ")]
    assert told and all(line.startswith("faster: triton on ") for line in told), "peers are no news"


def test_peers_of_another_torch_correct_nothing() -> None:
    """They are other programs then, and what they gained says nothing about the machine."""
    old, new = made_up_report(1), made_up_report(1)
    for entry in ("torch_grouped", "torch_loop", "dense"):
        slow_down(new, 0.8, entry)
    assert "drift of peers and ceilings -20.0 %" in compare(old, new).text()
    new.machine["packages"] = {**new.machine["packages"], "torch": "9.9.9"}
    assert "drift of peers and ceilings +0.0 %" in compare(old, new).text()
    assert compare(old, new).regressions == []


def test_reports_survive_a_file(tmp_path: Path) -> None:
    report, path = made_up_report(), tmp_path / "a" / "report.json"
    reports.write(path, report)
    again = reports.read(path)
    assert again == report
    assert list(tmp_path.glob("a/*")) == [path]


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": null, "rows": []}'])
def test_foreign_files_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "x.json"
    path.write_text(text)
    with pytest.raises(InvalidSetting, match=r"x\.json"):
        reports.read(path)
