"""A report as Markdown tables, so that a README's numbers are generated and can be checked against their file."""

from __future__ import annotations

import math

from multigemm.bench.results import AUTO, BEHIND, HOST_SIZES, Regret, Report, Row, auto_regret, by_entry
from multigemm.bench.workloads import geomean

LABELS = {
    "torch_grouped": "torch `grouped_mm`",
    "torch_grouped_nt": "torch `grouped_mm`, weights turned beforehand",
    "torch_loop": "torch loop of `mm`",
    "cublas_grouped": "`cublasGemmGroupedBatchedEx`",
}


def summary(report: Report) -> str:
    """Geometric means of the fraction of the floor, per entry and distribution, and against the best peer."""
    kinds = list(dict.fromkeys(row.distribution for row in report.rows))
    best = best_peer(report)
    lines = [_line(["", *kinds, "all", "timed", "of the best peer"]), _line(["---", *["---:"] * (len(kinds) + 3)])]
    for rows in by_entry(report.rows).values():
        cells = [_mean([r for r in rows if r.distribution == kind]) for kind in kinds]
        against = geomean(best[r.case] / r.us for r in rows if r.us and r.case in best)
        timed = sum(r.us is not None for r in rows)
        lines.append(_line([_name(rows[0]), *cells, _mean(rows), str(timed), _number(against)]))
    return "\n".join(lines)


def short(report: Report) -> str:
    """The fraction of the floor of whoever ran every workload; the best of each column in bold."""
    kinds, shares = _shares(report)
    lines = [_line(["", *kinds]), _line(["---", *["---:"] * len(kinds)])]
    return "\n".join(lines + [_line([name, *cells]) for name, cells in shares.items()])


def both(rested: Report, sustained: Report) -> str:
    """The same of a run with pauses and of one without, side by side."""
    kinds, first = _shares(rested)
    others, second = _shares(sustained)
    heads = [*(f"rested: {kind}" for kind in kinds), *(f"sustained: {kind}" for kind in others)]
    lines = [_line(["", *heads]), _line(["---", *["---:"] * len(heads)])]
    for name in dict.fromkeys([*first, *second]):
        cells = [*first.get(name, [""] * len(kinds)), *second.get(name, [""] * len(others))]
        lines.append(_line([name, *cells]))
    return "\n".join(lines)


def _shares(report: Report) -> tuple[list[str], dict[str, list[str]]]:
    """Distributions, and by entry its fractions of the floor."""
    kinds = list(dict.fromkeys(row.distribution for row in report.rows))
    whole = [
        rows
        for rows in by_entry(report.rows).values()
        if rows[0].kind != "ceiling" and all(row.us for row in rows) and not rows[0].entry.startswith(AUTO)
    ]
    cells = [[_mean([r for r in rows if kind in (r.distribution, "")]) for kind in (*kinds, "")] for rows in whole]
    best = [max(column, default="") for column in zip(*cells, strict=True)]
    found = {}
    for rows, mine in zip(whole, cells, strict=True):
        bold = [f"**{cell}**" if cell == top else cell for cell, top in zip(mine, best, strict=True)]
        name = _name(rows[0]).replace(f"{HOST_SIZES}**", "** (sizes on the host)")
        found[LABELS.get(name, name)] = bold
    return [*kinds, "all"], found


def details(report: Report) -> str:
    """Microseconds per workload and entry; the fastest that is no ceiling in bold."""
    entries = by_entry(report.rows)
    cells = {(row.case, row.entry): row for row in report.rows}
    lines = [_line(["workload", "floor", *entries]), _line(["---", *["---:"] * (len(entries) + 1)])]
    for case in report.cases():
        rows = [cells.get((case, name)) for name in entries]
        fastest = min((r.us for r in rows if r and r.us and r.kind != "ceiling"), default=None)
        floor = next(r.floor_us for r in rows if r)
        lines.append(_line([case, f"{floor:.1f}", *(_time(r, fastest) for r in rows)]))
    return "\n".join(lines)


def losses(report: Report) -> str:
    """Where every kernel of ours is slower than the best peer: the nearest of them, its share of the peer's speed.

    cuBLAS behind our name is no kernel of ours.
    """
    ours = [r for r in report.timed() if r.kind == "backend" and not r.entry.startswith((AUTO, "cublas"))]
    best, found = best_peer(report), []
    for case in best:
        nearest = min((r for r in ours if r.case == case), key=lambda r: r.us or math.inf, default=None)
        if nearest is not None and nearest.us and nearest.us > best[case]:
            found.append((best[case] / nearest.us, case, nearest.entry))
    lines = [_line(["workload", "nearest", "of the best peer"]), _line(["---", "---", "---:"])]
    return "\n".join(lines + [_line([case, entry, _number(share)]) for share, case, entry in sorted(found)])


def auto(report: Report) -> str:
    """How far `auto` is behind the fastest single backend, per suite and place of the sizes, and where it is worst."""
    suites = {row.case: row.suite for row in report.rows}
    found: dict[tuple[str, str], list[Regret]] = {}
    for regret in auto_regret(report):
        found.setdefault((suites[regret.case], "host" if regret.on_host else "device"), []).append(regret)
    lines = [
        _line(
            ["suite", "sizes on", "choices", "mean", f"above {BEHIND}", "surely", "worst", "repeats differ by", "where"]
        ),
        _line(["---"] * 2 + ["---:"] * 6 + ["---"]),
    ]
    for (suite, sizes), regrets in sorted(found.items(), key=lambda item: list(suites.values()).index(item[0][0])):
        worst = regrets[0]
        counts = [sum(r.beyond(BEHIND, doubt) for r in regrets) for doubt in (False, True)]
        numbers = [str(len(regrets)), _number(geomean(r.ratio for r in regrets)), *map(str, counts)]
        where = f"{worst.case}: {worst.fastest} is faster" if worst.ratio > 1 else ""
        lines.append(_line([suite, sizes, *numbers, _number(worst.ratio), _number(worst.spread), where]))
    return "\n".join(lines)


def best_peer(report: Report) -> dict[str, float]:
    """The fastest peer's time per workload."""
    found: dict[str, float] = {}
    for row in report.timed():
        if row.kind == "peer" and row.us:
            found[row.case] = min(row.us, found.get(row.case, row.us))
    return found


def _line(cells: list[str]) -> str:
    return "| " + " | ".join(cells) + " |"


def _name(row: Row) -> str:
    return f"**{row.entry}**" if row.kind == "backend" else row.entry


def _mean(rows: list[Row]) -> str:
    return _number(geomean(r.of_floor for r in rows if r.of_floor))


def _number(value: float) -> str:
    return "" if value != value else f"{value:.3f}"


def _time(row: Row | None, fastest: float | None) -> str:
    if row is None or row.us is None:
        return "" if row is None else row.status
    bold = row.us == fastest and row.kind != "ceiling"
    return f"**{row.us:.1f}**" if bold else f"{row.us:.1f}"
