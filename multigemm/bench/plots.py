"""PNG plots, for a README or a talk: runtime over size, the roofline, speed-ups per distribution."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

from multigemm.bench.results import Report, Row, by_entry
from multigemm.bench.workloads import geomean

EXTRA = "plots need matplotlib: pip install 'multigemm[report]'"
COLOURS = (
    "#2f6fde", "#d9822b", "#2a9d62", "#b3423f", "#7d5bbf", "#8a6d3b", "#c75a9b",
    "#5f6b7a", "#a3a329", "#2aa5b5", "#e0599a", "#4b4bb5", "#6fae3f", "#b58a2a",
)  # fmt: skip


def missing() -> str:
    """ "" or the sentence that says how to get plots."""
    return "" if importlib.util.find_spec("matplotlib") else EXTRA


def draw(report: Report, folder: Path) -> list[Path]:
    """All plots that the report has data for."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    done = [runtime(report, folder / "runtime.png"), roofline(report, folder / "roofline.png")]
    done.append(speedups(report, folder / "speedup.png"))
    return [path for path in done if path is not None]


def _figure(width: float = 9.0, height: float = 5.0) -> tuple[Any, Any]:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(width, height), layout="constrained")
    axes.grid(True, which="major", alpha=0.25)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def _finish(figure: Any, path: Path, report: Report) -> Path:
    from matplotlib import pyplot

    m = report.machine
    figure.supxlabel(f"{m['device']} · {m['date'][:10]} · commit {m['commit']}", fontsize=7, color="#667")
    figure.savefig(path, dpi=140)
    pyplot.close(figure)
    return path


def _colours(report: Report) -> dict[str, str]:
    return {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(by_entry(report.rows))}


def runtime(report: Report, path: Path) -> Path | None:
    """Runtime over work, as the Triton tutorial draws it; one line per entry."""
    rows = report.timed()
    if not rows:
        return None
    figure, axes = _figure()
    colours = _colours(report)
    for name, mine in by_entry(rows).items():
        points = sorted((r.flops / 1e9, r.us or 0.0) for r in mine)
        style = "--" if mine[0].kind == "ceiling" else "-" if mine[0].kind == "backend" else ":"
        axes.plot(*zip(*points, strict=True), style, marker="o", ms=3.5, lw=1.4, label=name, color=colours[name])
    floors = sorted({(r.flops / 1e9, r.floor_us) for r in rows})
    axes.plot(*zip(*floors, strict=True), color="black", lw=1, label="floor")
    axes.set(xscale="log", yscale="log", xlabel="work (GFLOP)", ylabel="runtime (us)", title="Runtime over size")
    axes.legend(fontsize=7, ncols=2, frameon=False)
    return _finish(figure, path, report)


def roofline(report: Report, path: Path) -> Path | None:
    """TFLOP/s over FLOP per byte under the two ceilings measured in the same run."""
    rows = report.timed()
    if not rows:
        return None
    figure, axes = _figure()
    colours = _colours(report)
    for name, mine in by_entry(rows).items():
        axes.scatter(
            [r.flops / r.bytes for r in mine],
            [r.tflops for r in mine],
            s=16,
            label=name,
            color=colours[name],
            alpha=0.8,
        )
    for name, ceiling in report.rates.items():
        knee = ceiling["tflops"] / ceiling["tbps"]
        low = min(r.flops / r.bytes for r in rows) / 1.5
        high = max(max(r.flops / r.bytes for r in rows) * 1.5, knee * 1.5)
        axes.plot([low, knee, high], [low * ceiling["tbps"], ceiling["tflops"], ceiling["tflops"]], color="black", lw=1)
        axes.annotate(f" {name}", (knee, ceiling["tflops"]), fontsize=7, va="bottom")
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title="Roofline (ceilings measured)")
    axes.legend(fontsize=7, ncols=2, frameon=False)
    return _finish(figure, path, report)


def speedups(report: Report, path: Path) -> Path | None:
    """Each entry's time against the best peer's, per distribution; below 1 is a loss and is drawn too."""
    best: dict[str, float] = {}
    for row in report.timed():
        if row.kind == "peer":
            best[row.case] = min(best.get(row.case, row.us or 0.0), row.us or 0.0)
    ours = {n: r for n, r in by_entry(report.timed()).items() if r[0].kind == "backend"}
    kinds = list(dict.fromkeys(r.distribution for r in report.rows))
    if not best or not ours:
        return None
    figure, axes = _figure()
    width, colours = 0.8 / len(ours), _colours(report)
    for index, (name, rows) in enumerate(ours.items()):
        heights = [_speedup([r for r in rows if r.distribution == kind], best) for kind in kinds]
        shift = (index - (len(ours) - 1) / 2) * width
        places = [i + shift for i in range(len(kinds))]
        axes.bar(places, heights, width * 0.92, label=name, color=colours[name])
    axes.axhline(1.0, color="black", lw=1)
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(ylabel="best peer's time / ours", title="Speed-up over the best peer, case by case (geometric means)")
    axes.legend(fontsize=7, ncols=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.07))
    return _finish(figure, path, report)


def _speedup(rows: list[Row], best: dict[str, float]) -> float:
    value = geomean(best[r.case] / r.us for r in rows if r.us and r.case in best)
    return 0.0 if value != value else value
