"""The report as data, and its evaluation: wins, losses, and how far `auto` is behind.

The schema is versioned. A file is written so that a reader sees all of it or nothing. A row is one entry on one
workload. A row without a time holds the reason: refusals, failures and skips are results, and a report without them
would show only the winners. The table, the page, the plots and the README all use these functions, so that they agree.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Literal

from multigemm import interrupts
from multigemm.bench.workloads import geomean
from multigemm.errors import InvalidSetting
from multigemm.select.timing import Timing

SCHEMA = 1
AUTO, STATIC = "auto", "auto-static"
"""The backend that `auto` takes, and the one that its static order would take without measuring."""
HOST_SIZES = "[host sizes]"
INVARIANT = "[batch invariant]"
"""Ends the name of an entry that solves a problem under batch_invariant=True."""
BEHIND = 1.03
"""A choice of `auto` that is slower than the fastest single backend by more than this is counted."""
KILLED = "took its process with it"
"""A note of a row whose entry hung, crashed or destroyed the CUDA context."""
NOISY, NOISY_SHARE = 0.15, 0.25
"""Repeats that differ by more, and the share of such times from which on a report says so."""
Status = Literal["ok", "refused", "failed", "skipped"]


@dataclass
class Sample:
    """A distribution of times in microseconds, reduced to what a report stores of a Timing."""

    median: float
    q20: float
    q80: float
    best: float
    spread: float
    count: int

    @classmethod
    def of(cls, timing: Timing) -> Sample:
        spread = timing.spread if math.isfinite(timing.spread) else 0.0
        return cls(
            median=round(timing.median, 3),
            q20=round(timing.quantile(0.2), 3),
            q80=round(timing.quantile(0.8), 3),
            best=round(timing.best, 3),
            spread=round(spread, 4),
            count=len(timing.samples),
        )


@dataclass
class Row:
    """One entry on one workload. Times are microseconds; `us` is the better of eager and graph, `loaded_us` the mean of
    the calls back to back, with a warm L2, whose `joules` were counted.

    `problem_class` and `fields` (the config), as the tuning table knows them, let a report serve as a tuning.
    """

    case: str
    name: str
    suite: str
    form: str
    distribution: str
    dtype: str
    shape: str
    groups: int
    flops: int
    bytes: int
    floor_us: float
    entry: str
    kind: str
    status: Status
    reason: str = ""
    kernel: str = ""
    config: str = ""
    why: str = ""
    us: float | None = None
    spread: float = 0.0
    eager: Sample | None = None
    graph: Sample | None = None
    hot_us: float | None = None
    host_us: float | None = None
    whole_host_us: float | None = None
    joules: float | None = None
    loaded_us: float | None = None
    build_s: float = 0.0
    tflops: float | None = None
    gbps: float | None = None
    of_floor: float | None = None
    of_dense: float | None = None
    notes: list[str] = field(default_factory=list)
    problem_class: str = ""
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass
class Report:
    """A run: the machine, the method and the rows."""

    machine: dict[str, Any]
    method: dict[str, Any]
    rates: dict[str, dict[str, float]]
    rows: list[Row] = field(default_factory=list)
    absent: dict[str, str] = field(default_factory=dict)
    unfinished: list[str] = field(default_factory=list)
    schema: int = SCHEMA

    def timed(self) -> list[Row]:
        return [row for row in self.rows if row.us is not None]

    def cases(self) -> list[str]:
        """The keys of the workloads in the order in which they ran."""
        return list(by_case(self.rows))


def write(path: Path, report: Report) -> None:
    """Writes a report, completely or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    interrupts.write_whole(path, dumps(report))


def dumps(report: Report) -> str:
    """A report as JSON with one line per row, so that a version control's diff shows which row changed."""
    whole = asdict(report)
    rows = [_lean(row) for row in whole.pop("rows")]
    head = json.dumps(whole, indent=1, allow_nan=False)
    lines = ",\n  ".join(json.dumps(row, allow_nan=False) for row in rows)
    return head[: head.rindex("}")].rstrip() + f',\n "rows": [\n  {lines}\n ]\n}}\n'


def _lean(row: dict[str, Any]) -> dict[str, Any]:
    return {k: v for k, v in row.items() if v is not None and v not in ("", [], {})}


def read(path: Path) -> Report:
    """Reads a report from its file or folder. Raises InvalidSetting for another schema or none."""
    path = path / "report.json" if path.is_dir() else path
    try:
        raw = json.loads(path.read_text())
    except (OSError, json.JSONDecodeError) as error:
        raise InvalidSetting(f"{path} cannot be read as a report: {error}") from error
    if not isinstance(raw, dict) or raw.get("schema") != SCHEMA:
        seen = raw.get("schema") if isinstance(raw, dict) else None
        raise InvalidSetting(f"{path} has schema {seen}, and this version reads {SCHEMA}: measure again")
    rows = [row(r) for r in raw.pop("rows")]
    return Report(rows=rows, **{f.name: raw[f.name] for f in fields(Report) if f.name in raw})


def row(raw: dict[str, Any]) -> Row:
    """Rebuilds a row from `asdict`."""
    for name in ("eager", "graph"):
        if raw.get(name) is not None:
            raw[name] = Sample(**raw[name])
    known = {f.name for f in fields(Row)}
    return Row(**{k: v for k, v in raw.items() if k in known})


# --- judgements -------------------------------------------------------------------------------------


def family(entry: str) -> str:
    """The name of an entry without the number of its config."""
    return entry.partition("#")[0]


def by_entry(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by entry, in order of first appearance."""
    return _by(rows, lambda row: row.entry)


def by_case(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """Rows by workload, in order of first appearance."""
    return _by(rows, lambda row: row.case)


def _by(rows: Iterable[Row], key: Callable[[Row], str]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def fastest(rows: Iterable[Row]) -> Row | None:
    """The entry with the least time. Ceilings are left out because they compute something else, `auto` because it is
    another entry under a second name, and batch-invariant entries because they are measured only for their cost."""
    own = (row for row in rows if row.kind != "ceiling" and not row.entry.endswith(INVARIANT))
    timed = [row for row in own if row.us and not row.entry.startswith(AUTO)]
    return min(timed, key=lambda row: row.us or 0.0, default=None)


def contenders(rows: Iterable[Row]) -> tuple[Row | None, Row | None]:
    """Our fastest kernel and the fastest peer. The backend cublas does not count as a kernel of ours."""
    mine = list(rows)
    ours = fastest(row for row in mine if row.kind == "backend" and not row.entry.startswith("cublas"))
    return ours, fastest(row for row in mine if row.kind == "peer")


@dataclass(frozen=True, slots=True)
class Duel:
    """Our fastest kernel beside the fastest peer on one workload.

    `ratio` is the peer's time over ours: from 1 on the workload is won, below 1 it is lost.
    """

    case: str
    shape: str
    ours: str
    peer: str
    ratio: float

    @property
    def won(self) -> bool:
        return self.ratio >= 1


def duels(report: Report) -> list[Duel]:
    """Every workload that both a kernel of ours and a peer ran, the worst first."""
    found = []
    for case, rows in by_case(report.timed()).items():
        ours, peer = contenders(rows)
        if ours and ours.us and peer and peer.us:
            found.append(Duel(case, ours.shape, ours.entry, peer.entry, peer.us / ours.us))
    return sorted(found, key=lambda duel: duel.ratio)


@dataclass(frozen=True, slots=True, order=True)
class Regret:
    """The ratio of the time of `auto` to the fastest single backend, how far repeats of the two rows differ, and the
    seconds that choosing and planning took."""

    ratio: float
    case: str
    fastest: str
    on_host: bool
    spread: float
    planned_s: float

    @property
    def place(self) -> str:
        return f"{self.case} {HOST_SIZES}" if self.on_host else self.case

    def beyond(self, factor: float, doubt: bool = False) -> bool:
        """Whether the ratio is above `factor`; with `doubt`, by more than repeats differ, which a tie never is."""
        return self.ratio > factor + doubt * self.spread


def auto_regret(report: Report, rule: str = AUTO) -> list[Regret]:
    """How far `auto` (or "auto-static") is behind the fastest single backend with the same information, worst first.

    With sizes on the device, entries with sizes on the host do not count.
    """
    found = []
    for rows in by_case(row for row in report.timed() if row.kind == "backend").values():
        for auto in (row for row in rows if row.entry in (rule, rule + HOST_SIZES)):
            on_host = auto.entry.endswith(HOST_SIZES)
            best = fastest(row for row in rows if on_host or not row.entry.endswith(HOST_SIZES))
            if best is not None:
                ratio, spread = (auto.us or 0.0) / (best.us or 1.0), max(auto.spread, best.spread)
                found.append(Regret(ratio, auto.case, best.entry, on_host, spread, auto.build_s))
    return sorted(found, reverse=True)


def promises(report: Report) -> list[tuple[Row, Row]]:
    """Rows of a backend without and with batch_invariant=True, workload by workload."""
    pairs = []
    for rows in by_case(report.timed()).values():
        of_entry = {row.entry: row for row in rows}
        pairs += [(row, of_entry[name + INVARIANT]) for name, row in of_entry.items() if name + INVARIANT in of_entry]
    return pairs


def of_best_peer(report: Report, rows: Iterable[Row]) -> float:
    """The geometric mean of the best peer's time over these rows' own, workload by workload."""
    best = {case: fastest(row for row in mine if row.kind == "peer") for case, mine in by_case(report.timed()).items()}
    pairs = [(best[row.case], row.us) for row in rows if row.us]
    return geomean(peer.us / us for peer, us in pairs if peer is not None and peer.us)


def unrest_warning(report: Report) -> str:
    """A warning about a noisy machine, with the remedy; "" if repeats agree."""
    timed = report.timed()
    noisy = [row for row in timed if row.spread > NOISY]
    if len(noisy) <= NOISY_SHARE * len(timed):
        return ""
    on_cpu = report.machine.get("device_type") == "cpu"
    remedy = "OMP_WAIT_POLICY=passive and fewer OMP_NUM_THREADS" if on_cpu else "--rest 80, or another --device"
    return (
        f"WARNING: repeats differ by more than {NOISY:.0%} in {len(noisy)} of {len(timed)} times: something else uses "
        f"this machine. Stop it and measure again; else try {remedy}"
    )


def digits(value: float) -> str:
    """A number with three significant digits, as a whole number from 1000 on: 5.53, 22.0, 711, 2398. "" if unknown."""
    if math.isnan(value):
        return ""
    places = 2 - math.floor(math.log10(float(f"{value:.3g}"))) if value > 0 else 0
    return f"{value:.{max(0, places)}f}" if value > 0 else f"{value:g}"
