"""The report for a terminal: one line per workload, one column per entry, then the means and the reasons."""

from __future__ import annotations

import importlib.util
import io
import shutil
from collections import Counter
from typing import Any

from multigemm.bench import tutorial
from multigemm.bench.results import AUTO, BEHIND, Report, Row, auto_regret, by_entry
from multigemm.bench.workloads import geomean

Grid = list[list[str]]
SHOWN = 5


def text(report: Report) -> str:
    """Everything a reader needs to judge the numbers, as plain text."""
    parts = [header(report)]
    parts += [_draw(title, head, grid) for title, head, grid in _grids(report)]
    parts.append(_auto(report))
    parts.append(tutorial.table(report))
    parts.append(_reasons(report))
    return "\n\n".join(part for part in parts if part)


def header(report: Report) -> str:
    """Machine, commit and method in a few lines."""
    m, how = report.machine, report.method
    clocks = m.get("clocks") or {}
    power = (
        f", power cap {clocks['power_cap_w']} W, SM clock {clocks['sm_clock_mhz']} MHz"
        if "sm_clock_mhz" in clocks
        else ""
    )
    rates = _rates(report.rates)
    if how["rates"] == "given" and how.get("measured_rates"):
        rates += f"; measured in this run: {_rates(how['measured_rates'])}"
    packages = ", ".join(f"{k} {v}" for k, v in m.get("packages", {}).items())
    return "\n".join(
        [
            f"{m['device']}{power}; {m['date']}; commit {m['commit']}",
            packages,
            f"ceilings ({how['rates']}): {rates}",
            f"method: {how['style']}, flush: {how['flush']}, up to {how['reps']} rounds, interleaved, medians; "
            f"{_rested(how)}"
            f"the better of eager and CUDA graph; clock overhead {how['overhead_us']} us, not subtracted",
        ]
    )


def _rested(how: dict[str, Any]) -> str:
    return f"idle for {how['rest']:.0%} of the time, in pauses between bursts of 25 ms; " if how.get("rest") else ""


def _rates(rates: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {r['tflops']:g} TFLOP/s, {r['tbps']:g} TB/s" for name, r in rates.items())


def _grids(report: Report) -> list[tuple[str, list[str], Grid]]:
    entries = list(by_entry(report.rows))
    timed = {(r.case, r.entry): r for r in report.rows}
    grid = []
    for case in report.cases():
        some = next(r for r in report.rows if r.case == case)
        best = min((r.us for r in report.rows if r.case == case and r.us and r.kind != "ceiling"), default=None)
        grid.append([case, f"{some.floor_us:.1f}"] + [_cell(timed.get((case, e)), best) for e in entries])
    found = [("microseconds (* is the fastest)", ["workload", "floor", *entries], grid)]
    found.append(("fraction of the floor, geometric means", *_means(report)))
    return found


def _cell(row: Row | None, best: float | None) -> str:
    if row is None:
        return ""
    if row.us is None:
        return {"refused": "no", "failed": "FAILED", "skipped": "skipped"}.get(row.status, row.status)
    mark = "*" if best is not None and row.us == best and row.kind != "ceiling" else ""
    return f"{mark}{row.us:.1f}"


def _means(report: Report) -> tuple[list[str], Grid]:
    kinds = list(dict.fromkeys(row.distribution for row in report.rows))
    wins = Counter(_winner(report, case) for case in report.cases())
    grid = []
    for name, rows in by_entry(report.rows).items():
        cells = [name]
        for kind in kinds:
            cells.append(_mean([r for r in rows if r.distribution == kind]))
        host = geomean(r.host_us for r in rows if r.host_us)
        cells += [
            _mean(rows),
            str(sum(r.us is not None for r in rows)),
            str(wins[name]),
            "" if host != host else f"{host:.1f}",
        ]
        grid.append(cells)
    return ["entry", *kinds, "all", "timed", "wins", "host us"], grid


def _mean(rows: list[Row]) -> str:
    value = geomean(r.of_floor for r in rows if r.of_floor)
    return "" if value != value else f"{value:.3f}"


def _winner(report: Report, case: str) -> str:
    rows = [r for r in report.rows if r.case == case and r.us and r.kind != "ceiling" and not r.entry.startswith(AUTO)]
    return min(rows, key=lambda r: r.us or 0.0).entry if rows else ""


def _auto(report: Report) -> str:
    regrets = auto_regret(report)
    if not regrets:
        return ""
    behind = [r for r in regrets if r.beyond(BEHIND)]
    sure = sum(r.beyond(BEHIND, doubt=True) for r in behind)
    lines = [
        f"auto over the fastest single backend: {geomean(r.ratio for r in regrets):.3f}; of {len(regrets)} choices "
        f"{len(behind)} are above {BEHIND}, {sure} of them by more than repeats differ; at worst"
    ]
    lines += [f"  {r.ratio:.3f} (repeats {r.spread:.3f}) on {r.place} (fastest: {r.fastest})" for r in regrets[:SHOWN]]
    return "\n".join(lines)


def _reasons(report: Report) -> str:
    """Why something has no time: each reason once, with how often it occurred."""
    counted = Counter((r.entry, r.status, r.reason) for r in report.rows if r.us is None)
    lines = [
        f"{entry}: {status} on {count} workload(s): {reason}" for (entry, status, reason), count in counted.items()
    ]
    lines += [f"{name}: absent: {why}" for name, why in report.absent.items()]
    lines += [f"not reached within the time budget: {case}" for case in report.unfinished]
    return "\n".join(lines)


def _draw(title: str, head: list[str], grid: Grid) -> str:
    if importlib.util.find_spec("rich") is not None:
        return _rich(title, head, grid)
    return _plain(title, head, grid)


def _plain(title: str, head: list[str], grid: Grid) -> str:
    widths = [max(len(row[i]) for row in [head, *grid]) for i in range(len(head))]
    lines = [title]
    for row in [head, *grid]:
        padded = [cell.rjust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join([row[0].ljust(widths[0]), *padded[1:]]))
    return "\n".join(lines)


def _rich(title: str, head: list[str], grid: Grid) -> str:
    from rich import markup
    from rich.box import SIMPLE
    from rich.console import Console
    from rich.table import Table

    drawn = Table(title=title, title_justify="left", box=SIMPLE, pad_edge=False)
    for index, name in enumerate(head):
        drawn.add_column(markup.escape(name), justify="left" if index == 0 else "right", no_wrap=True)
    for row in grid:
        drawn.add_row(*(markup.escape(cell) for cell in row))
    sink = io.StringIO()
    needed = sum(max(len(row[i]) for row in [head, *grid]) + 3 for i in range(len(head)))
    Console(file=sink, width=max(needed, shutil.get_terminal_size().columns)).print(drawn)
    return "\n".join(line.rstrip() for line in sink.getvalue().splitlines())
