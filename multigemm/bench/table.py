"""A report as text: sections for a terminal, the same and more as a Markdown page, and tables inside other pages.

A page with tables holds, on lines of their own,

    <!-- bench PATH/report.json summary moe -->
    <!-- end bench -->

and `multigemm bench embed README.md docs/results.md` fills in what lies between them. PATH is relative to the
current folder; the suites, comma separated, may be left out. The view `both` takes two reports, comma separated.
`--check` only says whether anything would change.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from multigemm.bench import reports
from multigemm.bench.reports import (
    AUTO,
    BEHIND,
    HOST_SIZES,
    STATIC,
    Regret,
    Report,
    Row,
    auto_regret,
    by_case,
    by_entry,
    digits,
    duels,
    fastest,
    of_best_peer,
    promises,
    unrest_warning,
)
from multigemm.bench.suites import LAYER_PRODUCTS, layer_of
from multigemm.bench.workloads import geomean, rows_and_weights

Grid = list[list[str]]
"""Rows of cells; the first row holds the headings, the first column names."""
SHOWN = 5
BEYOND = "auto is one of the others, and dense is one torch.mm of as many FLOPs: neither counts"
NUMBERS = (
    "workload", "entry", "us", "20 %", "80 %", "samples", "repeats differ by", "hot us", "host us", "host us, call",
    "TFLOP/s", "GB/s", "J a call", "us under load", "W under load", "TFLOP/J", "of floor", "of dense", "kernel",
)  # fmt: skip
METHOD = (
    "Every answer was checked against a float32 reference, element by element, before it was timed. Floor: the larger "
    "of FLOPs over the dense rate and bytes over the copy rate; bytes count A, C and the B of every group with rows "
    "once. A workload is won where the fastest kernel of multigemm (cuBLAS is none) takes at most as long as the "
    "fastest peer."
)
LABELS = {
    "torch_grouped": "torch `grouped_mm`",
    "torch_grouped_nt": "torch `grouped_mm`, weights turned beforehand",
    "torch_loop": "torch loop of `mm`",
    "cublas_grouped": "`cublasGemmGroupedBatchedEx`",
}
PUBLISHED_MS = {
    128: (0.020480, 0.013312),
    256: (0.023552, 0.018432),
    512: (0.032768, 0.026624),
    1024: (0.071680, 0.087040),
}
"""What Triton's tutorial publishes for its four cubes of N in fp16: cuBLAS and Triton on its authors' A100, a landmark
and no contest."""


class Best(str):
    """A cell that stands out: with a star in a terminal, bold in Markdown."""

    __slots__ = ()


# --- grids ------------------------------------------------------------------------------------------


def times(report: Report) -> Grid:
    """Microseconds per workload and entry; the fastest that is no ceiling stands out."""
    entries = list(by_entry(report.rows))
    grid = [["workload", "floor", *entries]]
    for case, rows in by_case(report.rows).items():
        best, of_entry = fastest(rows), by_entry(rows)
        cells = [_time(of_entry[name][0], best) if name in of_entry else "" for name in entries]
        grid.append([case, digits(rows[0].floor_us), *cells])
    return grid


def _time(row: Row, best: Row | None) -> str:
    if row.us is None:
        return row.status
    return Best(digits(row.us)) if row is best else digits(row.us)


def means(report: Report) -> Grid:
    """Per entry: the geometric mean of the fraction of the floor by distribution, the number of workloads on which it
    was the fastest, the best peer's time over its own, and its host time."""
    kinds = distributions(report)
    wins = Counter(best.entry for rows in by_case(report.rows).values() if (best := fastest(rows)))
    heads = ["", *kinds, "all", "timed", "fastest", "of the best peer", "host us", "J a call"]
    grid = [heads]
    for name, rows in by_entry(report.rows).items():
        shares = [_share([r for r in rows if r.distribution == kind]) for kind in kinds]
        counts = [str(sum(r.us is not None for r in rows)), str(wins[name])]
        ratio = digits(of_best_peer(report, rows))
        host, joules = (digits(geomean(filter(None, values))) for values in zip(*((r.host_us, r.joules) for r in rows)))
        grid.append([name, *shares, _share(rows), *counts, ratio, host, joules])
    return without_empty_columns(grid)


def without_empty_columns(grid: Grid) -> Grid:
    """Removes the columns without any value."""
    kept = [index for index, column in enumerate(zip(*grid[1:], strict=True)) if index == 0 or any(column)]
    return [[row[index] for index in kept] for row in grid]


def shares(report: Report) -> Grid:
    """The fraction of the floor of each entry that ran every workload; the best of each column stands out."""
    kinds = distributions(report)
    whole = {
        name: rows
        for name, rows in by_entry(report.rows).items()
        if rows[0].kind != "ceiling" and all(row.us for row in rows) and not name.startswith(AUTO)
    }
    columns = [
        [_share([r for r in rows if kind in (r.distribution, "")]) for rows in whole.values()] for kind in (*kinds, "")
    ]
    marked = [[Best(cell) if cell == max(column) else cell for cell in column] for column in columns]
    return [
        ["", *kinds, "all"],
        *([name, *cells] for name, cells in zip(whole, zip(*marked, strict=True), strict=True)),
    ]


def won_or_lost(report: Report) -> Grid:
    """Our fastest kernel beside the fastest peer, the worst workload first; won ones stand out."""
    grid = [["workload", "ours", "best peer", "its time over ours"]]
    for duel in duels(report):
        ratio = digits(duel.ratio)
        grid.append([duel.case, duel.ours, duel.peer, Best(ratio) if duel.won else ratio])
    return grid


def losses(report: Report) -> Grid:
    """Every lost workload: our nearest kernel, and its fraction of the best peer's speed."""
    lost = [[duel.case, duel.ours, digits(duel.ratio)] for duel in duels(report) if not duel.won]
    return [["workload", "nearest", "of the best peer"], *lost]


def heat_map(report: Report) -> Grid:
    """The best peer's time over ours by rows per group (down) and by N x K (across), each in steps of 4."""
    cells: dict[tuple[int, int], list[float]] = {}
    for duel in duels(report):
        if place := rows_and_weights(duel.shape):
            row, column = (max(0, math.floor(math.log(max(extent, 1), 4))) for extent in place)
            cells.setdefault((row, column), []).append(duel.ratio)
    columns = sorted({column for _, column in cells})
    grid = [["rows per group", *(f"NxK {_short(4**column)}+" for column in columns)]]
    for row in sorted({row for row, _ in cells}):
        means = [digits(geomean(cells.get((row, column), ()))) for column in columns]
        grid.append([f"{4**row} to {4 ** (row + 1) - 1}", *means])
    return grid


def _short(count: int) -> str:
    """A power of 4 in units of 1024."""
    step = min(3, (count.bit_length() - 1) // 10)
    return f"{count >> 10 * step}{' KMG'[step]}".strip()


def choices(report: Report) -> Grid:
    """How far `auto` is behind the fastest single backend, per suite and place of the sizes, and where it is worst."""
    suites = {row.case: row.suite for row in report.rows}
    found: dict[tuple[str, str], list[Regret]] = {}
    for regret in auto_regret(report):
        found.setdefault((suites[regret.case], "host" if regret.on_host else "device"), []).append(regret)
    heads = ["suite", "sizes on", "choices", "mean", f"above {BEHIND}", "surely", "worst", "repeats differ by", "where"]
    grid = [heads]
    for (suite, sizes), regrets in sorted(found.items(), key=lambda item: list(suites.values()).index(item[0][0])):
        worst = regrets[0]
        counts = [sum(r.beyond(BEHIND, doubt) for r in regrets) for doubt in (False, True)]
        numbers = [str(len(regrets)), f"{geomean(r.ratio for r in regrets):.3f}", *map(str, counts)]
        where = f"{worst.case}: {worst.fastest} is faster" if worst.ratio > 1 else ""
        grid.append([suite, sizes, *numbers, f"{worst.ratio:.3f}", f"{worst.spread:.3f}", where])
    return grid


def promised(report: Report) -> Grid:
    """The fraction of its speed that a backend keeps under batch_invariant=True, per suite, and where it keeps
    least."""
    found: dict[tuple[str, str], list[tuple[float, bool, str]]] = {}
    for free, bound in promises(report):
        other = (free.kernel, free.config) != (bound.kernel, bound.config)
        ratio = (free.us or 0.0) / (bound.us or 1.0)
        found.setdefault((free.entry, free.suite), []).append((ratio, other, free.case))
    grid = [["", "suite", "workloads", "of its speed", "with another kernel or config", "least", "where"]]
    for (entry, suite), each in found.items():
        least, _, where = min(each)
        mean, others = geomean(ratio for ratio, _, _ in each), sum(other for _, other, _ in each)
        grid.append([entry, suite, str(len(each)), f"{mean:.3f}", str(others), f"{least:.3f}", where])
    return grid


def energy(report: Report) -> Grid:
    """Millijoules per token of both products of a layer, per workload of `layer-products`, and their time meanwhile;
    the least stands out."""
    layers: dict[tuple[str, int], list[Row]] = {}
    for row in report.rows:
        if row.suite == LAYER_PRODUCTS and row.kind != "ceiling":
            layers.setdefault(layer_of(row.name), []).append(row)
    entries = list(by_entry(row for rows in layers.values() for row in rows))
    grid = [["layer, tokens", *entries]]
    for (model, tokens), rows in layers.items():
        whole = {name: mine for name, mine in by_entry(rows).items() if all(row.joules for row in mine)}
        millijoules = {
            name: 1e3 * math.fsum(row.joules or 0.0 for row in mine) / tokens for name, mine in whole.items()
        }
        us = {name: math.fsum(row.loaded_us or 0.0 for row in mine) for name, mine in whole.items()}
        grid.append([f"{model}, {tokens}: mJ", *_least_marked(millijoules, entries)])
        grid.append([f"{model}, {tokens}: us", *_least_marked(us, entries)])
    shown = without_empty_columns(grid)
    return shown if len(shown[0]) > 1 else shown[:1]


def _least_marked(values: Mapping[str, float], entries: Sequence[str]) -> list[str]:
    """A cell for each entry, some without a value; the least stands out. `auto` never does, because it is another entry
    under a second name."""
    least = min((value for name, value in values.items() if not name.startswith(AUTO)), default=math.nan)
    shown = {name: digits(value) for name, value in values.items()}
    return [Best(shown[name]) if values.get(name) == least else shown.get(name, "") for name in entries]


def distributions(report: Report) -> list[str]:
    return list(dict.fromkeys(row.distribution for row in report.rows))


def _share(rows: Sequence[Row]) -> str:
    return digits(geomean(r.of_floor for r in rows if r.of_floor))


def numbers(report: Report) -> Grid:
    """All numbers of every timed row, with the kernel that ran and why."""
    grid = [list(NUMBERS)]
    for r in report.timed():
        shown = min(filter(None, (r.eager, r.graph)), key=lambda sample: sample.median, default=None)
        sample = [digits(shown.q20), digits(shown.q80), str(shown.count)] if shown else [""] * 3
        watts, per_joule = None, None
        if r.joules and r.loaded_us:
            watts, per_joule = r.joules / r.loaded_us * 1e6, r.flops / r.joules / 1e12
        values = (r.hot_us, r.host_us, r.whole_host_us, r.tflops, r.gbps, r.joules, r.loaded_us, watts, per_joule)
        cells = [digits(value) if value else "" for value in (*values, r.of_floor, r.of_dense)]
        notes = "; ".join(filter(None, (r.kernel, r.config, r.why, *r.notes)))
        grid.append([r.case, r.entry, digits(r.us or 0), *sample, f"{r.spread:.3f}", *cells, notes])
    return without_empty_columns(grid)


# --- words ------------------------------------------------------------------------------------------


def header(report: Report) -> str:
    """Machine, commit and method."""
    m, how = report.machine, report.method
    clocks = m.get("clocks") or {}
    power = ""
    if "sm_clock_mhz" in clocks:
        power = f", power cap {clocks['power_cap_w']} W, SM clock {clocks['sm_clock_mhz']} MHz"
    rates = rates_text(report.rates)
    if how["rates"] == "given" and how.get("measured_rates"):
        rates += f"; measured in this run: {rates_text(how['measured_rates'])}"
    rest = f"idle for {how['rest']:.0%} of the time, in pauses between bursts of 25 ms; " if how.get("rest") else ""
    return "\n".join(
        [
            f"{m['device']}{power}; {m['date']}; commit {m['commit']}",
            ", ".join(f"{name} {version}" for name, version in m.get("packages", {}).items()),
            f"ceilings ({how['rates']}): {rates}",
            f"method: {how['style']}, flush: {how['flush']}, up to {how['reps']} rounds, interleaved, medians; "
            f"{rest}the better of eager and CUDA graph; "
            f"the clock costs {overhead_text(how['overhead_us'])}, not subtracted",
        ]
    )


def rates_text(rates: dict[str, dict[str, float]]) -> str:
    return ", ".join(f"{name} {digits(r['tflops'])} TFLOP/s, {digits(r['tbps'])} TB/s" for name, r in rates.items())


def overhead_text(overhead_us: dict[str, float]) -> str:
    return ", ".join(f"{digits(us)} us ({name.replace('_', ' ')})" for name, us in overhead_us.items())


def won_and_lost(report: Report) -> str:
    """How many workloads our kernels won and lost against the best peer; "" without peers."""
    found = duels(report)
    if not found:
        return ""
    won = sum(duel.won for duel in found)
    mean = geomean(duel.ratio for duel in found)
    return (
        f"our fastest kernel against the best peer: {won} won, {len(found) - won} lost; the peer's time over ours: "
        f"{digits(mean)} (geometric mean), {digits(found[0].ratio)} at worst on {found[0].case} ({found[0].peer})"
    )


def auto_summary(report: Report) -> str:
    """How far `auto` is behind; "" if it did not run beside a single backend."""
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
    planned = [1e3 * r.planned_s for r in regrets]
    middle, most = digits(statistics.median(planned)), digits(max(planned))
    lines.append(f"to choose and plan took {middle} ms (median), {most} ms at most")
    if static := auto_regret(report, STATIC):
        mean, worst = geomean(r.ratio for r in static), static[0]
        lines.append(f"its static order, without measuring: {mean:.3f}; at worst {worst.ratio:.3f} on {worst.place}")
    return "\n".join(lines)


def tutorial(report: Report) -> str:
    """Triton's tutorial in its own form beside the published figures; "" unless the report holds its cubes."""
    rows = {n: {r.entry: r for r in report.timed() if r.case == f"seed_cube_{n}/list/fp16"} for n in PUBLISHED_MS}
    if not any(rows.values()):
        return ""
    entries = list(dict.fromkeys(name for found in rows.values() for name in found))
    lines = ["group-gemm-performance (ms):", "  ".join(["       N", "published cuBLAS", "published Triton", *entries])]
    for n, (cublas, triton) in PUBLISHED_MS.items():
        cells = [f"{float(n):8.1f}", f"{cublas:16.6f}", f"{triton:16.6f}"]
        for name in entries:
            us = rows[n][name].us if name in rows[n] else None
            cells.append(f"{'-' if us is None else f'{us / 1e3:.6f}':>{max(len(name), 8)}}")
        lines.append("  ".join(cells))
    style, device = report.method.get("style"), report.machine.get("device")
    return "\n".join([*lines, f"(measured: {style}, {device}; --style do_bench measures as the tutorial does)"])


def reasons(report: Report) -> str:
    """The reasons for missing times, each once, with the number of occurrences."""
    counted = Counter((r.entry, r.status, r.reason) for r in report.rows if r.us is None)
    lines = [f"{entry}: {status} on {count} workload(s): {why}" for (entry, status, why), count in counted.items()]
    lines += [f"{name}: absent: {why}" for name, why in report.absent.items()]
    if left := report.unfinished:
        more = ", ..." if len(left) > SHOWN else ""
        lines.append(
            f"{len(left)} workload(s) not reached (more --seconds, or --resume): {', '.join(left[:SHOWN])}{more}"
        )
    return "\n".join(lines)


# --- sections ---------------------------------------------------------------------------------------


class Section(NamedTuple):
    """A section of the report: an introduction and a table. A section without either is left out.

    A terminal shows the table only where there are no words. `page_only`: too long for a terminal.
    """

    title: str
    grid: Callable[[Report], Grid] = lambda report: [[]]
    words: Callable[[Report], str] = lambda report: ""
    page_only: bool = False


SECTIONS = (
    Section("", words=header),
    Section(f"microseconds (the fastest stands out; {BEYOND})", times),
    Section("fraction of the floor, geometric means", means),
    Section("won and lost", won_or_lost, won_and_lost),
    Section("the best peer's time over ours, by the size of a group: geometric means", heat_map),
    Section("what batch_invariant=True leaves", promised),
    Section("both products of a layer: millijoules of a token, and microseconds meanwhile", energy),
    Section("auto over the fastest single backend", choices, auto_summary),
    Section("", words=tutorial),
    Section("every number (times in microseconds)", numbers, page_only=True),
    Section("", words=reasons),
    Section("", words=unrest_warning),
)


def text(report: Report) -> str:
    """The report as plain text, with everything needed to judge its numbers. A star marks the fastest."""
    parts = []
    for section in SECTIONS:
        if section.page_only:
            continue
        if words := section.words(report):
            parts.append(words)
        elif len(grid := section.grid(report)) > 1:
            parts.append(f"{section.title}\n{plain(grid)}")
    return "\n\n".join(parts)


def plain(grid: Grid) -> str:
    """A table with aligned columns: names to the left, numbers to the right."""
    shown = [[f"*{cell}" if isinstance(cell, Best) else cell for cell in row] for row in grid]
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    lines = []
    for name, *cells in shown:
        padded = [cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)]
        lines.append("  ".join([name.ljust(widths[0]), *padded]).rstrip())
    return "\n".join(lines)


def page(report: Report, pictures: Sequence[Path] = ()) -> str:
    """The report as a Markdown page, with every number. The fastest is bold; `pictures` lie beside the page."""
    command = f"Measured with `{report.method.get('command', 'multigemm bench')}`."
    parts = [f"# Grouped GEMM on {report.machine['device']}, {report.machine['date'][:10]}", command, METHOD]
    parts += [f"![{path.stem}]({path.name})" for path in pictures]
    for section in SECTIONS:
        words, grid = section.words(report), section.grid(report)
        if section.title and len(grid) > 1:
            parts.append(f"## {section.title[0].upper()}{section.title[1:]}")
        if words:
            parts.append(f"```\n{words}\n```")
        if len(grid) > 1:
            parts.append(markdown(grid))
    return "\n\n".join(parts) + "\n"


# --- Markdown ---------------------------------------------------------------------------------------


def markdown(grid: Grid, names: Callable[[str], str] = str) -> str:
    """A Markdown table; `names` writes the first column."""
    numeric = [any(cell.replace(".", "").isdecimal() for cell in column) for column in zip(*grid[1:], strict=True)]
    lines = [_line(grid[0]), _line(["---:" if number else "---" for number in numeric or [False] * len(grid[0])])]
    for name, *cells in grid[1:]:
        lines.append(_line([names(name), *(f"**{cell}**" if isinstance(cell, Best) else cell for cell in cells)]))
    return "\n".join(lines)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _bold_backends(report: Report, labels: bool = False) -> Callable[[str], str]:
    kinds = {row.entry: row.kind for row in report.rows}

    def name(entry: str) -> str:
        if kinds.get(entry) != "backend":
            return LABELS.get(entry, entry) if labels else entry
        if labels and entry.endswith(HOST_SIZES):
            return f"**{entry.removesuffix(HOST_SIZES)}** (sizes on the host)"
        return f"**{entry}**"

    return name


def summary(report: Report) -> str:
    means_of_entries = markdown(means(report), _bold_backends(report))
    return f"{_where(report)}; `{report.method['command']}`\n\n{means_of_entries}"


def both(rested: Report, sustained: Report) -> str:
    """The shares of a run with pauses and of one without, side by side."""
    (_, *heads), *first = shares(rested)
    (_, *others), *second = shares(sustained)
    left, right = ({name: cells for name, *cells in rows} for rows in (first, second))
    grid = [["", *(f"rested: {head}" for head in heads), *(f"sustained: {head}" for head in others)]]
    for name in dict.fromkeys([*left, *right]):
        grid.append([name, *left.get(name, [""] * len(heads)), *right.get(name, [""] * len(others))])
    every = Report({}, {}, {}, [*rested.rows, *sustained.rows])
    return markdown(grid, _bold_backends(every, labels=True))


def _where(report: Report) -> str:
    m = report.machine
    versions = ", ".join(f"{name} {version}" for name, version in m["packages"].items() if name != "numpy")
    power = f" ({m['clocks']['power_cap_w']:.0f} W)" if "power_cap_w" in m.get("clocks", {}) else ""
    return f"{m['device']}{power}, {versions}; {m['date'][:10]}, commit {m['commit']}"


def _fenced(view: Callable[[Report], str]) -> Callable[[Report], str]:
    return lambda report: f"```\n{view(report)}\n```"


VIEWS: dict[str, Callable[..., str]] = {
    "summary": summary,
    "command": _fenced(lambda report: report.method["command"]),
    "short": lambda report: markdown(shares(report), _bold_backends(report, labels=True)),
    "details": lambda report: markdown(times(report)),
    "losses": lambda report: markdown(losses(report)),
    "reasons": _fenced(reasons),
    "auto": lambda report: markdown(choices(report)),
    "tutorial": _fenced(tutorial),
    "energy": lambda report: markdown(energy(report), _bold_backends(report)),
    "header": _fenced(header),
    "both": both,
}
BLOCK = re.compile(r"(<!-- bench (\S+) (\w+)(?: (\S+))? -->\n).*?(<!-- end bench -->)", re.DOTALL)


def filled(page: str, root: Path) -> str:
    """The page with every block drawn anew."""

    def draw(match: re.Match[str]) -> str:
        found = [reports.read(root / path) for path in match[2].split(",")]
        for report in found if match[4] else ():
            report.rows = [row for row in report.rows if row.suite in match[4].split(",")]
        return f"{match[1]}{VIEWS[match[3]](*found)}\n{match[5]}"

    return BLOCK.sub(draw, page)


def embed(pages: Sequence[Path], check: bool = False) -> int:
    """Rewrites pages; with `check`, returns 1 if one differs from the reports that it shows."""
    stale = [page for page in pages if filled(page.read_text(), Path.cwd()) != page.read_text()]
    for page in stale if not check else ():
        page.write_text(filled(page.read_text(), Path.cwd()))
    print("\n".join(f"{'stale' if check else 'rewritten'}: {page}" for page in stale) or "nothing to do")
    return 1 if check and stale else 0
