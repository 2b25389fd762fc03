"""Published numbers come from kept reports: pages, reports and shipped tunings agree with each other."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from multigemm.__main__ import main
from multigemm.bench import reports, table
from multigemm.bench.operands import make
from multigemm.bench.suites import suite
from multigemm.select import table as tuning
from multigemm.select.problem_class import Query
from multigemm.select.table import SCHEMA, decoded
from tests.support.bench_reports import made_up_report

ROOT = Path(__file__).parents[2]
PAGES = [page for page in (ROOT / "README.md", ROOT / "docs" / "results.md") if page.exists()]
REPORTS = sorted((ROOT / "benchmarks" / "results").glob("*/report.json"))
TUNED = sorted((ROOT / "multigemm" / "tuned").glob("*.json"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_tables_in_pages_are_those_of_the_kept_reports(page: Path) -> None:
    text = page.read_text()
    assert table.filled(text, ROOT) == text, "run: multigemm bench embed README.md docs/results.md"


@pytest.mark.parametrize("path", REPORTS, ids=lambda path: path.parent.name)
def test_kept_reports_are_whole(path: Path) -> None:
    report = reports.read(path)
    assert report.timed()
    assert report.machine["commit"]
    assert report.method["command"].startswith("multigemm bench")
    assert all(row.reason for row in report.rows if row.us is None)
    assert str(Path.home()) not in path.read_text()


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.name)
def test_shipped_tunings_can_be_read_and_say_where_they_come_from(path: Path) -> None:
    raw = json.loads(path.read_text())
    assert raw["schema"] == SCHEMA
    assert raw["origin"]["commit"]
    entries = [decoded(entry, path.name) for entry in raw["entries"]]
    assert len({(entry.device, entry.key) for entry in entries}) == len(entries) > 0


def test_a_rested_and_a_sustained_run_stand_side_by_side(tmp_path: Path) -> None:
    rested, sustained = made_up_report(suites="moe"), made_up_report(suites="moe")
    for row in sustained.rows:
        row.of_floor = row.of_floor and row.of_floor / 2
    sustained.rows = [row for row in sustained.rows if row.entry != "triton"]
    for name, report in (("a", rested), ("b", sustained)):
        reports.write(tmp_path / f"{name}.json", report)
    head, _, *lines = table.filled("<!-- bench a.json,b.json both moe -->\n<!-- end bench -->", tmp_path).splitlines()[
        1:-1
    ]
    names = [cell.strip() for cell in head.split("|")[1:-1]]
    assert names[1].startswith("rested: ")
    assert names[-1] == "sustained: all"
    cells = {line.split("|")[1].strip(): [c.strip(" *") for c in line.split("|")[2:-1]] for line in lines}
    half = len(names) // 2
    assert all(
        float(x) == pytest.approx(2 * float(y), rel=1e-2) for x, y in zip(cells["**cupy**"], cells["**cupy**"][half:])
    )
    assert cells["**triton**"][half:] == [""] * half


def test_a_block_is_filled_and_a_stale_page_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports.write(tmp_path / "r.json", made_up_report(suites="tutorial"))
    blocks = [
        f"<!-- bench r.json {view} -->\nformer text\n<!-- end bench -->" for view in table.VIEWS if view != "both"
    ]
    (tmp_path / "page.md").write_text("before\n" + "\n".join(blocks) + "\nafter\n")
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "embed", "page.md", "--check"]) == 1
    assert main(["bench", "embed", "page.md"]) == 0
    text = (tmp_path / "page.md").read_text()
    origin = "Made-up GPU (700 W), torch 2.11.0; 2026-11-20, commit 0123456789ab"
    assert text.startswith(f"before\n<!-- bench r.json summary -->\n{origin}; `multigemm bench")
    assert "| **cupy** |" in text
    assert "published cuBLAS" in text
    assert "former text" not in text
    assert text.endswith("after\n")
    assert main(["bench", "embed", "page.md", "--check"]) == 0
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("path", TUNED, ids=lambda path: path.name)
def test_shipped_tunings_are_found_by_the_problems_they_were_measured_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entries = {raw["key"]: decoded(raw, f"shipped {path.name}") for raw in json.loads(path.read_text())["entries"]}
    device = next(iter(entries.values())).device
    monkeypatch.setattr(tuning, "device_name", lambda where: device)
    shipped = tuning.TuningTable(Path("/nonexistent"))
    light = [case for case in suite("small,decode,moe,tutorial,l2") if case.resident_bytes < 3e9]
    met = 0
    for case in light:
        posed = make(case, "cpu", drawn=False).problem
        on_host = Query(posed).problem_class
        for c in (on_host, replace(on_host, where="device-sizes")):
            if str(c) not in entries:
                continue
            met += 1
            for name, measured in entries[str(c)].backends.items():
                assert shipped.find(c, torch.device("cpu"))[name] == measured
    assert met >= 10


def test_the_short_table_shows_who_ran_everything_and_the_best_in_bold() -> None:
    report = made_up_report(suites="moe,small", noise=0.0)
    lines = table.VIEWS["short"](report).splitlines()
    assert lines[0].startswith("|  | balanced | zipf | empty |")
    names = [line.split(" | ")[0] for line in lines[2:]]
    assert "| **triton**" not in names, "it refused a workload"
    assert names[0] == "| **cupy**"
    assert not any("dense" in name for name in names)
    for column in range(1, 4):
        cells = [line.strip("| ").split(" | ")[column] for line in lines[2:]]
        assert [cell for cell in cells if cell.startswith("**")] == [
            max(cells, key=lambda cell: float(cell.strip("*")))
        ]


def test_the_losses_are_those_workloads_where_no_kernel_of_ours_is_the_fastest() -> None:
    report = made_up_report(suites="moe,small", noise=0.02)
    lost = report.cases()[3]
    for row in report.rows:
        if row.us and row.case == lost and row.entry == "cupy":
            row.us *= 2
        if row.us and row.case == lost and row.entry == "triton":
            row.entry, row.us = "cublas", row.us / 100
    named = {}
    for line in table.VIEWS["losses"](report).splitlines()[2:]:
        case, entry, share = line.strip("| ").split(" | ")
        named[case] = entry, float(share)
    us = {(row.case, row.entry): row.us for row in report.timed() if row.us}
    peers, ours = ("torch_grouped", "torch_loop"), ("cupy", "triton")
    for case in report.cases():
        kernel, peer = (min(us[case, name] for name in names if (case, name) in us) for names in (ours, peers))
        assert (case in named) == (kernel > peer), case
        if case in named:
            assert named[case][1] == pytest.approx(peer / kernel, rel=6e-3)
    assert named[lost][0] == "cupy"
    assert min(share for _, share in named.values()) == named[lost][1]
