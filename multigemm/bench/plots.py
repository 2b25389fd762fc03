"""Pictures of a report: runtime over size, the roofline, speed-ups per distribution, and a chart of one suite."""

from __future__ import annotations

import importlib.util
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigemm.bench.reports import Report, Row, by_case, by_entry, contenders, of_best_peer
from multigemm.bench.workloads import geomean
from multigemm.errors import InvalidSetting

EXTRA = "plots need matplotlib: pip install 'multigemm[report]'"
COLOURS = (
    "#2f6fde", "#d9822b", "#2a9d62", "#b3423f", "#7d5bbf", "#8a6d3b", "#c75a9b",
    "#5f6b7a", "#a3a329", "#2aa5b5", "#e0599a", "#4b4bb5", "#6fae3f", "#b58a2a",
)  # fmt: skip

OURS, PEERS = "multigemm: the fastest kernel", "the fastest peer"
BEST_COLOURS = {OURS: "#2f6fde", PEERS: "#d9822b"}
MARKERS = {OURS: "o", PEERS: "x"}
RATIOS = (0.1, 0.2, 0.5, 0.7, 0.8, 0.9, 1.0, 1.1, 1.2, 1.5, 2.0, 3.0, 5.0, 10.0)
"""Ticks of an axis of speed-ups."""
LEAST_FLOOR_US = 0.1
"""Smaller floors are drawn at this value, because a launch takes microseconds."""


def missing() -> str:
    """A sentence that says how to install what plots need; "" if nothing is missing."""
    return "" if importlib.util.find_spec("matplotlib") else EXTRA


def draw(report: Report, folder: Path) -> list[Path]:
    """Draws every plot for which the report has data."""
    import matplotlib

    matplotlib.use("Agg")
    folder.mkdir(parents=True, exist_ok=True)
    done = [runtime(report, folder / "runtime.png"), roofline(report, folder / "roofline.png")]
    done.append(speedups(report, folder / "speedup.png"))
    return [path for path in done if path is not None]


def _figures(panels: int) -> tuple[Any, list[Any]]:
    from matplotlib import pyplot

    shape: dict[str, Any] = {"figsize": (9.0, 5.0)} if panels == 1 else {"figsize": (4.2 * panels, 4.6)}
    figure, grid = pyplot.subplots(1, panels, layout="constrained", squeeze=False, **shape)
    for axes in grid[0]:
        axes.grid(True, which="major", alpha=0.25)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    return figure, list(grid[0])


def _finish(figure: Any, path: Path, report: Report) -> Path:
    m = report.machine
    figure.supxlabel(f"{m['device']} · {m['date'][:10]} · commit {m['commit']}", fontsize=7, color="#667")
    return save(figure, path)


def save(figure: Any, path: Path) -> Path:
    """Writes a picture and closes it. An SVG is the same in each run, holds text as text and names no other host."""
    from matplotlib import pyplot

    with pyplot.rc_context({"svg.fonttype": "none", "svg.hashsalt": "multigemm"}):
        figure.savefig(path, dpi=140, transparent=path.suffix == ".svg")
    pyplot.close(figure)
    if path.suffix == ".svg":
        svg = re.sub(r"<!DOCTYPE.*?>\s*|<metadata>.*?</metadata>\s*", "", path.read_text(), flags=re.DOTALL)
        path.write_text(svg.replace(' xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href"))
    return path


def _best(report: Report) -> dict[str, list[Row]]:
    """Our fastest kernel and the fastest peer on each workload."""
    pairs = [contenders(rows) for rows in by_case(report.timed()).values()]
    found = {OURS: [ours for ours, _ in pairs if ours], PEERS: [peer for _, peer in pairs if peer]}
    return {label: rows for label, rows in found.items() if rows}


def runtime(report: Report, path: Path) -> Path | None:
    """Runtime over size: of every entry for cubes, as the Triton tutorial draws it; of the best for all workloads.

    A line through hundreds of unlike workloads shows nothing: points are joined by their geometric mean per octave of
    the floor.
    """
    rows = report.timed()
    if len({max(r.floor_us, LEAST_FLOOR_US) for r in rows}) < 2:
        return None
    cubes = {dtype: found for dtype in dict.fromkeys(r.dtype for r in rows) if len(found := _cubes(rows, dtype)) > 1}
    figure, panels = _figures(len(cubes) + 1)
    for axes, (dtype, of_size) in zip(panels, cubes.items(), strict=False):
        for index, (name, mine) in enumerate(by_entry(rows).items()):
            points = [(float(n), by[name]) for n, by in of_size.items() if name in by]
            if not points:
                continue
            line = {"backend": "-", "peer": ":", "ceiling": "--"}[mine[0].kind]
            axes.plot(*_columns(points), ls=line, color=COLOURS[index % len(COLOURS)], marker="o", ms=3.5, label=name)
        axes.set(xscale="log", xlabel=f"N of four {dtype} cubes", ylabel="runtime (us)")
        axes.set_xticks(list(of_size), [str(n) for n in of_size])
        _octave_axis(axes)
        axes.legend(fontsize=6, frameon=False)
    for label, best in _best(report).items():
        points = [(max(r.floor_us, LEAST_FLOOR_US), r.us or 0.0) for r in best]
        panels[-1].scatter(*_columns(points), s=8, alpha=0.4, color=BEST_COLOURS[label], lw=0)
        panels[-1].plot(*_columns(_octaves(points)), marker="o", ms=2.5, color=BEST_COLOURS[label], label=label)
    ends = [f(max(r.floor_us, LEAST_FLOOR_US) for r in rows) for f in (min, max)]
    panels[-1].plot(ends, ends, color="black", lw=1, label="floor")
    panels[-1].set(xscale="log", yscale="log", xlabel="floor of a workload (us)", ylabel="runtime (us)")
    panels[-1].legend(fontsize=9, frameon=False)
    figure.suptitle("Runtime over size")
    return _finish(figure, path, report)


def _cubes(rows: list[Row], dtype: str) -> dict[int, dict[str, float]]:
    """The tutorial's cubes by size: microseconds by entry."""
    found: dict[int, dict[str, float]] = {}
    for row in rows:
        if row.suite == "tutorial" and row.dtype == dtype and row.name.rpartition("_")[2].isdecimal():
            found.setdefault(int(row.name.rpartition("_")[2]), {})[row.entry] = row.us or 0.0
    return dict(sorted(found.items()))


def _octaves(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The geometric means of the points of each octave of x."""
    bins: dict[int, list[tuple[float, float]]] = {}
    for x, y in points:
        bins.setdefault(round(math.log2(x)), []).append((x, y))
    return [(geomean(x for x, _ in some), geomean(y for _, y in some)) for _, some in sorted(bins.items())]


def _octave_axis(axes: Any) -> None:
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.minorticks_off()


def _columns(points: list[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def roofline(report: Report, path: Path) -> Path | None:
    """TFLOP/s over FLOP per byte, of our fastest kernel and the fastest peer, under the ceilings of the same run."""
    rows = [row for row in report.timed() if row.kind != "ceiling"]
    if not rows:
        return None
    figure, (axes,) = _figures(1)
    for label, best in _best(report).items():
        points = [(r.flops / r.bytes, r.tflops or 0.0) for r in best]
        axes.scatter(*_columns(points), s=22, marker=MARKERS[label], label=label, color=BEST_COLOURS[label], alpha=0.8)
    ceilings: dict[tuple[float, float], list[str]] = {}
    for name, ceiling in report.rates.items():
        ceilings.setdefault((ceiling["tflops"], ceiling["tbps"]), []).append(name)
    for (tflops, tbps), names in ceilings.items():
        knee = tflops / tbps
        low = min(r.flops / r.bytes for r in rows) / 1.5
        high = max(max(r.flops / r.bytes for r in rows) * 1.5, knee * 1.5)
        axes.plot([low, knee, high], [low * tbps, tflops, tflops], color="black", lw=1, label="roof")
        axes.annotate(f"{', '.join(names)}  ", (knee, tflops), fontsize=7, va="bottom", ha="right")
    title = f"Roofline (ceilings {report.method['rates']})"
    axes.set(xscale="log", yscale="log", xlabel="FLOP per byte", ylabel="TFLOP/s", title=title)
    axes.legend(fontsize=9, frameon=False)
    return _finish(figure, path, report)


def speedups(report: Report, path: Path) -> Path | None:
    """Each entry's time against the best peer's, per distribution; below 1 is a loss and is drawn too."""
    ours = {n: r for n, r in by_entry(report.timed()).items() if r[0].kind == "backend"}
    kinds = list(dict.fromkeys(r.distribution for r in report.rows))
    if not ours or all(math.isnan(of_best_peer(report, rows)) for rows in ours.values()):
        return None
    figure, (axes,) = _figures(1)
    width = 0.8 / len(ours)
    for index, (name, rows) in enumerate(ours.items()):
        heights = [of_best_peer(report, [r for r in rows if r.distribution == kind]) for kind in kinds]
        shift = (index - (len(ours) - 1) / 2) * width
        places = [i + shift for i in range(len(kinds))]
        axes.bar(
            places,
            [0.0 if math.isnan(h) else h - 1.0 for h in heights],
            width * 0.92,
            1.0,
            label=name,
            color=COLOURS[index % len(COLOURS)],
        )
    axes.axhline(1.0, color="black", lw=1)
    _octave_axis(axes)
    low, high = axes.get_ylim()
    axes.set_yticks([tick for tick in RATIOS if low <= tick <= high])
    axes.set_xticks(range(len(kinds)), kinds)
    axes.set(ylabel="best peer's time / ours", title="Speed-up over the best peer, case by case (geometric means)")
    axes.legend(fontsize=7, ncols=6, frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.07))
    return _finish(figure, path, report)


# --- a chart of one suite: the README's ---------------------------------------------------------------

LABELS = {
    "cupy": "multigemm cupy",
    "triton": "multigemm triton",
    "numba": "multigemm numba",
    "cublas": "cuBLAS, sizes on the device",
    "cublas[host sizes]": "cuBLAS, sizes on the host",
    "quack": "QuACK, best of its configs",
    "triton_kernels": "triton_kernels",
    "deep_gemm": "DeepGEMM, rows padded before",
    "torch_grouped": "torch grouped_mm",
    "torch_grouped_nt": "torch grouped_mm, weights turned",
    "torch_loop": "torch loop of mm",
}


@dataclass(frozen=True, slots=True)
class Look:
    """The colours of a chart on one background."""

    text: str
    ours: str
    vendor: str
    peer: str


LOOKS = {
    "light": Look("#1f2328", "#3f51b5", "#9fa8da", "#9aa4b2"),
    "dark": Look("#e6edf3", "#8c9eff", "#5c6bc0", "#6e7681"),
}


def shares(report: Report, suite: str) -> dict[str, list[float]]:
    """The fraction of the floor on each workload of a suite, for entries that ran all of it; the best mean first."""
    rows = [row for row in report.timed() if row.suite == suite and row.entry in LABELS and row.of_floor]
    whole = len({row.case for row in rows})
    found = {name: [row.of_floor or 0.0 for row in mine] for name, mine in by_entry(rows).items() if len(mine) == whole}
    return dict(sorted(found.items(), key=lambda item: -geomean(item[1])))


def charts(report: Report, prefix: Path) -> list[Path]:
    """Draws the suite that the last part of `prefix` names, as `prefix`-light.svg and `prefix`-dark.svg."""
    found = shares(report, prefix.name)
    if not found:
        raise InvalidSetting(f"--chart {prefix}: the report has no suite {prefix.name!r}, by which the files are named")
    return [
        _chart(report, prefix.name, found, look, prefix.with_name(f"{prefix.name}-{name}.svg"))
        for name, look in LOOKS.items()
    ]


def _chart(report: Report, suite: str, found: dict[str, list[float]], look: Look, path: Path) -> Path:
    """A bar for each entry (the geometric mean), and a dot for each workload."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    colours = {name: look.ours if LABELS[name].startswith("multigemm") else look.peer for name in found}
    colours |= {name: look.vendor for name in found if name.startswith("cublas")}
    style: Any = {"text.color": look.text, "xtick.color": look.text, "ytick.color": look.text, "font.size": 10.0}
    with pyplot.rc_context(style):
        figure, axes = pyplot.subplots(figsize=(9.0, 0.42 * len(found) + 1.6), layout="constrained")
        for place, (name, values) in enumerate(found.items()):
            axes.barh(place, geomean(values), 0.55, color=colours[name])
            axes.scatter(values, [place] * len(values), s=7, color=look.text, alpha=0.35, lw=0, zorder=2)
            axes.text(
                1.13, place, f"{geomean(values):.3f}", va="center", weight="bold" if "multi" in LABELS[name] else None
            )
        axes.set_yticks(range(len(found)), [LABELS[name] for name in found])
        axes.invert_yaxis()
        axes.set(xlim=(0, 1.12), frame_on=False)
        axes.set_axisbelow(True)
        axes.grid(True, axis="x", alpha=0.25)
        axes.tick_params(length=0)
        m, (tflops, tbps) = report.machine, next(iter(report.rates.values())).values()
        count = len(next(iter(found.values())))
        title = f"{count} workloads of the suite {suite}, fraction of the floor (more is faster)"
        axes.set_title(title, loc="left", weight="bold")
        note = (
            f"bar: geometric mean; dot: one workload; floor: max(FLOPs / {tflops:g} TFLOP/s, bytes / {tbps:g} TB/s)\n"
        )
        note += f"{m['device']}, torch {m['packages']['torch']}, {m['date'][:10]}, commit {m['commit'][:7]}"
        axes.set_xlabel(note, loc="left", fontsize=8.5, color=look.text)
        return save(figure, path)
