"""The chart of the README: how close each backend and peer comes to the floor on the kept MoE workloads.

    python benchmarks/chart.py            # writes docs/assets/moe-light.svg and moe-dark.svg
    python benchmarks/chart.py --check    # exits 1 if they differ from the report

Drawn from `benchmarks/results/h200/rested.json`, from entries that ran all 33 workloads of the suite `moe`. A bar is a
geometric mean, a dot is one workload.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from html import escape
from pathlib import Path

from multigemm.bench import reports
from multigemm.bench.reports import Report
from multigemm.bench.workloads import geomean

ROOT = Path(__file__).parents[1]
REPORT = ROOT / "benchmarks" / "results" / "h200" / "rested.json"
FOLDER = ROOT / "docs" / "assets"
LABELS = {
    "cupy": "multigemm cupy",
    "triton": "multigemm triton",
    "numba": "multigemm numba",
    "quack": "QuACK, best of its configs",
    "triton_kernels": "triton_kernels",
    "deep_gemm": "DeepGEMM, rows padded before",
    "torch_grouped": "torch grouped_mm",
}
WIDTH, LEFT, RIGHT, TOP, STEP, BAR = 760, 245, 55, 62, 34, 18
AXIS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SPAN = 1.1
"""The right end of the axis, of the floor."""


@dataclass(frozen=True)
class Colours:
    """One look of the chart."""

    text: str
    faint: str
    ours: str
    peer: str
    dot: str


LOOKS = {
    "light": Colours("#1f2328", "#d0d7de", "#3f51b5", "#9aa4b2", "#1f2328"),
    "dark": Colours("#e6edf3", "#3d444d", "#8c9eff", "#6e7681", "#e6edf3"),
}


def shares(report: Report) -> dict[str, list[float]]:
    """The fraction of the floor on each MoE workload, by entry, the best mean first."""
    rows = [row for row in report.timed() if row.suite == "moe" and row.entry in LABELS and row.of_floor]
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault(row.entry, []).append(row.of_floor or 0.0)
    whole = len({row.case for row in rows})
    complete = {entry: values for entry, values in found.items() if len(values) == whole}
    return dict(sorted(complete.items(), key=lambda item: -geomean(item[1])))


def draw(report: Report, colours: Colours) -> str:
    """The chart as SVG, without a background."""
    entries = shares(report)
    bottom = TOP + STEP * len(entries)
    across = WIDTH - LEFT - RIGHT
    machine, rates, cases = report.machine, report.rates["bf16"], len(next(iter(entries.values())))

    def x(share: float) -> float:
        return round(LEFT + across * share / SPAN, 1)

    title = f"{cases} mixture-of-experts workloads in bfloat16, fraction of the floor (more is faster)"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {bottom + 74}" role="img" '
        f'aria-label="{escape(title)}" font-family="system-ui, sans-serif" font-size="13" fill="{colours.text}">',
        f'<text x="12" y="24" font-size="15" font-weight="600">{escape(title)}</text>',
        '<text x="12" y="44" font-size="12" opacity="0.75">bar: geometric mean; dot: one workload. '
        "Blue: multigemm's kernels; grey: others, in the same run</text>",
    ]
    for share in AXIS:
        parts.append(
            f'<line x1="{x(share)}" y1="{TOP}" x2="{x(share)}" y2="{bottom}" stroke="{colours.faint}"/>'
            f'<text x="{x(share)}" y="{bottom + 18}" text-anchor="middle" font-size="12">{share:.1f}</text>'
        )
    for number, (entry, values) in enumerate(entries.items()):
        y = TOP + STEP * number + (STEP - BAR) / 2
        middle, mean = y + BAR / 2, geomean(values)
        ours = LABELS[entry].startswith("multigemm")
        colour = colours.ours if ours else colours.peer
        weight = ' font-weight="600"' if ours else ""
        parts.append(
            f'<text x="{LEFT - 10}" y="{middle + 4.5}" text-anchor="end"{weight}>{escape(LABELS[entry])}</text>'
            f'<rect x="{LEFT}" y="{y}" width="{round(x(mean) - LEFT, 1)}" height="{BAR}" rx="2" '
            f'fill="{colour}"/>'
        )
        parts += [
            f'<circle cx="{x(v)}" cy="{middle}" r="2.2" fill="{colours.dot}" opacity="0.35"/>' for v in sorted(values)
        ]
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{middle + 4.5}"{weight}>{mean:.3f}</text>')
    origin = f"{machine['device']}, torch {machine['packages']['torch']}, {machine['date'][:10]}, commit"
    notes = (
        f"{origin} {machine['commit'][:7]}; cold L2 cache, below the power limit",
        f"floor: max(FLOPs / {rates['tflops']:.0f} TFLOP/s, bytes / {rates['tbps']:.1f} TB/s), near what dense cuBLAS "
        "and a copy reach on this GPU",
    )
    for line, note in enumerate(notes):
        parts.append(f'<text x="12" y="{bottom + 44 + 18 * line}" font-size="12" opacity="0.75">{escape(note)}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description="draw the README's chart from the kept report")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 if a file differs")
    check = parser.parse_args().check
    report, stale = reports.read(REPORT), False
    for name, colours in LOOKS.items():
        path, text = FOLDER / f"moe-{name}.svg", draw(report, colours)
        stale |= not path.exists() or path.read_text() != text
        if not check:
            path.write_text(text)
    return 1 if check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
