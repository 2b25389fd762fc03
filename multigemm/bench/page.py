"""The HTML page of a report: a single file without network requests.

All contents are in the text of the page, so that it can be mailed, archived, searched and read offline. A content
security policy forbids every request. The only script sorts a table by the clicked heading.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from multigemm.bench import table
from multigemm.bench.reports import Report, Row, Sample, by_case, by_entry, digits, fastest, unrest_warning

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #777; --shade: #0003; }
@media (prefers-color-scheme: dark) { :root { --soft: #9aa5b1; --shade: #fff4; } }
body { max-width: 1180px; margin: 0 auto; padding: 16px; font: 15px/1.5 system-ui, sans-serif; }
h1, p, li, pre, summary { overflow-wrap: anywhere; }
pre { white-space: pre-wrap; margin: 4px 0 10px; }
h1 { margin: 0; } h2 { margin: 32px 0 0; } p { margin: 4px 0 10px; }
.hint { color: var(--soft); font-size: 13.5px; }
.scroll {
  overflow: auto; width: fit-content; max-width: 100%; max-height: 76vh; box-sizing: border-box;
  border: 1px solid var(--line); border-radius: 8px; margin: 6px 0 14px; scrollbar-width: thin;
  background: linear-gradient(to left, Canvas 28px, transparent 56px) right / 56px 100% no-repeat local,
    linear-gradient(to left, var(--shade), transparent) right / 28px 100% no-repeat scroll;
}
table { border-collapse: separate; border-spacing: 0; font-size: 13px; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 9px; text-align: right; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { position: sticky; top: 0; background: Canvas; z-index: 1; cursor: pointer; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
th:first-child { z-index: 2; }
td.text { text-align: left; white-space: normal; min-width: 200px; }
.best { font-weight: 700; }
summary { cursor: pointer; } li { font-size: 13.5px; }
img { display: block; height: 420px; }
@media (prefers-color-scheme: dark) { img { filter: invert(0.93) hue-rotate(180deg); } }
@media (max-width: 640px) {
  th:first-child, td:first-child { max-width: 150px; overflow: hidden; text-overflow: ellipsis; }
}
"""
SORT = """
document.addEventListener("click", (event) => {
  const head = event.target.closest("th");
  if (!head) return;
  const body = head.closest("table").tBodies[0], column = head.cellIndex;
  const down = head.getAttribute("aria-sort") === "ascending";
  for (const other of head.parentNode.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", down ? "descending" : "ascending");
  const value = (row) => row.cells[column].textContent;
  const word = (text) => text === "" || isNaN(text);
  const order = (x, y) => word(x) - word(y) || (word(x) ? x.localeCompare(y) : x - y) * (down ? -1 : 1);
  body.append(...[...body.rows].sort((a, b) => order(value(a), value(b))));
});
"""
HEAD = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; \
script-src 'unsafe-inline'; img-src data:">
<link rel="icon" href="data:,">
"""
NUMBERS = (
    "workload", "entry", "us", "20 %", "80 %", "samples", "repeats differ by", "hot us", "host us", "host us, call",
    "TFLOP/s", "GB/s", "J a call", "us under load", "W under load", "TFLOP/J", "of floor", "of dense", "kernel",
)  # fmt: skip


def write(report: Report, path: Path, pictures: Sequence[Path] = ()) -> Path:
    """Writes the page of a report, with these PNG files embedded. Returns its path."""
    path.write_text(render(report, pictures))
    return path


def render(report: Report, pictures: Sequence[Path] = ()) -> str:
    """The whole page as text."""
    m = report.machine
    title = f"{m['device']}, {m['date'][:10]}"
    packages = ", ".join(f"{name} {version}" for name, version in m["packages"].items())
    parts = [
        f"{HEAD}<title>multigemm bench: {escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>",
        "<h1>Grouped GEMM, measured</h1>",
        _hint(f"{m['device']} · {m['date'][:10]} · commit {m['commit']} · {packages}"),
        f"<p><b>{escape(warning)}</b></p>" if (warning := unrest_warning(report)) else "",
        *(_part(report, part) for part in PARTS),
        "".join(map(_picture, pictures)),
        "<h2>Every workload, in microseconds</h2>",
        _hint(f"Bold: the fastest; {table.BEYOND}. Click a heading to sort."),
        *_times(report),
        _section("numbers", "Every number", "Times in microseconds.", _fold("All rows", _numbers(report))),
        f'<h2>Not run, and why</h2><ul id="reasons">{_items(table.reasons(report) or ["Everything ran."])}</ul>',
        f'<h2>How it was measured</h2><ul id="method">{_items(_method(report))}</ul>',
        f"<script>{SORT}</script>\n</body>\n</html>\n",
    ]  # fmt: skip
    return "\n".join(part for part in parts if part)


def _section(name: str, title: str, hint: str, body: str) -> str:
    return f'<section id="{name}"><h2>{escape(title)}</h2>{_hint(hint)}{body}</section>'


def _hint(text: str) -> str:
    return f'<p class="hint">{escape(text)}</p>'


def _fold(title: str, body: str, opened: bool = False) -> str:
    return f"<details{' open' if opened else ''}><summary>{escape(title)}</summary>{body}</details>"


def _items(lines: Iterable[str]) -> str:
    return "".join(f"<li>{escape(line)}</li>" for line in lines)


def _picture(path: Path) -> str:
    data = base64.b64encode(path.read_bytes()).decode()
    return f'<div class="scroll"><img alt="{path.stem}" src="data:image/png;base64,{data}"></div>'


def _cell(text: str) -> str:
    return f'<td class="best">{escape(text)}</td>' if isinstance(text, table.Best) else f"<td>{escape(text)}</td>"


def _table(grid: table.Grid, cell: Callable[[str], str] = _cell) -> str:
    """A table in a scrolling box. `cell` formats all cells except the first of each row."""
    heads = "".join(f"<th>{escape(head)}</th>" for head in grid[0])
    lines = (_cell(name) + "".join(map(cell, cells)) for name, *cells in grid[1:])
    rows = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f'<div class="scroll"><table><thead><tr>{heads}</tr></thead><tbody>\n{rows}\n</tbody></table></div>'


def _hot_cell(text: str) -> str:
    """A cell coloured green above 1 and red below; the colour is strongest from a factor of 1.5 on."""
    if not text:
        return "<td></td>"
    strength = min(1.0, abs(math.log(float(text), 1.5)))
    colour = "29 138 85" if float(text) >= 1 else "200 60 50"
    return f'<td style="background: rgb({colour} / {0.12 + 0.6 * strength:.2f})">{text}</td>'


class Part(NamedTuple):
    """A section of the page: an introduction and a table. A section without rows is left out."""

    name: str
    title: str
    hint: str
    grid: Callable[[Report], table.Grid]
    told: Callable[[Report], str] = lambda report: ""
    cell: Callable[[str], str] = _cell
    folded: str = ""


PARTS = (
    Part(
        "means", "Who is fastest",
        "Geometric means of the fraction of the floor, by how the rows fall to the groups; how many workloads an entry "
        "ran, on how many it was the fastest, the best peer's time over its own; and, where measured, its time on the "
        "host and the joules of a call.",
        table.means,
    ),
    Part(
        "duels", "Won and lost",
        "The fastest kernel of multigemm (cuBLAS is none) beside the fastest peer. From 1 on (bold) a workload is won.",
        table.won_or_lost, table.won_and_lost, folded="All, the worst first",
    ),
    Part(
        "heat", f"{table.HEAT_MAP[0].upper()}{table.HEAT_MAP[1:]}",
        "Green: won. Red: lost. A workload counts for its mean rows per group; N x K are the weights of one group.",
        table.heat_map, cell=_hot_cell,
    ),
    Part(
        "auto", "What auto chooses",
        "auto's time over that of the fastest single backend that knew as much.",
        table.choices, table.auto_summary,
    ),
    Part(
        "invariance", "What batch_invariant=True leaves",
        "Each backend's time without the promise over its time with it.",
        table.promised,
    ),
)  # fmt: skip


def _part(report: Report, part: Part) -> str:
    grid, told = part.grid(report), part.told(report)
    if len(grid) == 1:
        return ""
    shown = _table(grid, part.cell)
    words = f"<pre>{escape(told)}</pre>" if told else ""
    return _section(part.name, part.title, part.hint, words + (_fold(part.folded, shown) if part.folded else shown))


def _times(report: Report) -> list[str]:
    """Times and means for each suite and dtype."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in report.rows:
        found.setdefault((row.suite, row.dtype), []).append(row)
    folds = []
    for (suite, dtype), rows in found.items():
        part = Report(report.machine, report.method, report.rates, rows)
        won = [f"{entry} {count}" for entry, count in _fastest_counts(rows)]
        title = f"{suite}, {dtype}: {len(part.cases())} workloads; fastest: {', '.join(won) or 'nobody'}"
        folds.append(_fold(title, _table(table.times(part)) + _table(table.means(part)), opened=True))
    return folds


def _fastest_counts(rows: list[Row]) -> list[tuple[str, int]]:
    best = [row.entry for mine in by_case(rows).values() if (row := fastest(mine))]
    return sorted(((name, best.count(name)) for name in by_entry(rows) if name in best), key=lambda pair: -pair[1])


def _numbers(report: Report) -> str:
    grid: table.Grid = [list(NUMBERS)]
    for r in report.timed():
        shown = _shown(r)
        sample = [digits(shown.q20), digits(shown.q80), str(shown.count)] if shown else [""] * 3
        times = [_or_blank(x) for x in (r.hot_us, r.host_us, r.whole_host_us, r.tflops, r.gbps, *_under_load(r))]
        parts = [_or_blank(x) for x in (r.of_floor, r.of_dense)]
        notes = "; ".join(filter(None, (r.kernel, r.config, r.why, *r.notes)))
        grid.append([r.case, r.entry, digits(r.us or 0), *sample, f"{r.spread:.3f}", *times, *parts, notes])
    return _table(table.without_empty_columns(grid))


def _under_load(row: Row) -> list[float | None]:
    """Joules and microseconds of a call, watts, and 10^12 operations per joule; None for each if nothing was
    counted."""
    if not row.joules or not row.loaded_us:
        return [row.joules, None, None, None]
    return [row.joules, row.loaded_us, row.joules / row.loaded_us * 1e6, row.flops / row.joules / 1e12]


def _shown(row: Row) -> Sample | None:
    """The sample whose median is the row's time."""
    return min(filter(None, (row.eager, row.graph)), key=lambda sample: sample.median, default=None)


def _or_blank(value: float | None) -> str:
    return digits(value) if value else ""


def _method(report: Report) -> list[str]:
    m, how = report.machine, report.method
    rest = f" The device idled for {how['rest']:.0%} of the time, between bursts of 25 ms." if how.get("rest") else ""
    given = (
        f"; measured in this run: {table.rates_text(how.get('measured_rates') or {})}"
        if how["rates"] == "given"
        else ""
    )
    costs = table.overhead_text(how["overhead_us"])
    clocks = ", ".join(f"{name} {value}" for name, value in (m.get("clocks") or {}).items())
    return [
        "Every answer was checked against a float32 reference, element by element, before it was timed; a wrong answer "
        "has no time.",
        f"Style: {how['style']}. Before each call: {how['flush']}. All entries of a workload are interleaved, in an "
        f"order drawn anew for each round, on the same random data; up to {how['reps']} rounds; medians.{rest}",
        f"The time shown is the better of an eager call and a CUDA graph replay. What the clock itself costs ({costs}) "
        "is not subtracted.",
        "Floor: the larger of FLOPs over the dense rate and bytes over the copy rate; bytes count A, C and the B of "
        f"every group with rows once. Ceilings ({how['rates']}): {table.rates_text(report.rates)}{given}. It is a "
        'yardstick, not a hard limit. "dense" is one torch.mm of the same FLOPs.',
        f"Machine: {m['device']}, Python {m['python']}, CUDA {m['cuda'] or 'none'}; {clocks}",
        f"Measured {m['date']} with: {how.get('command', 'multigemm bench')}",
    ]
