"""`multigemm bench compare OLD NEW`: what became slower, beyond what two runs of one commit differ by.

Three questions, from the most to the least certain:

1. An entry: is the median of its ratios new/old, over its workloads, above 1.04 (on a noisy machine
   above 4 standard errors, but never above 1.055, so that ten per cent cannot hide)?
2. A row: is its ratio above 1.05 (and 5 standard deviations of all rows, and its own spread), by more
   than 0.6 us?
3. Everything: are all ceilings and peers slower by one and the same factor above 1.05?

Every ratio is first divided by the drift of the same workload, which is the median ratio of the
peers and ceilings that were timed interleaved with it: a machine that runs cooler or is shared
moves them as well, and a change of our code does not. (Without three of them, the drift of the
whole run; none if torch's version differs. Where they moved by more than a factor of 2, nothing is
judged, and where that is so everywhere, or the reports have no row of ours in common, there is no
comparison.) The ratio of a row is the smallest of its ratios at the median, the 0.2 quantile and the
best sample, because noise moves the upper quantiles and slower code moves all.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field

from multigemm.bench.reports import Report, Row, Sample, digits
from multigemm.errors import InvalidSetting

ENTRY_LIMIT = 1.04
NOISY_ENTRY_LIMIT = 1.055
ROW_LIMIT = 1.05
DRIFT_LIMIT = 1.05
SLACK_US = 0.6
UNSOUND = 0.25
LOST = 2.0
SHOWN = 8
MIN_CONTROLS = 3


@dataclass(frozen=True)
class Change:
    """One row in both reports. `ratio` is new/old, `corrected` is the ratio divided by the drift."""

    case: str
    entry: str
    kind: str
    old_us: float
    new_us: float
    ratio: float
    corrected: float
    allowed: float

    @property
    def slower(self) -> bool:
        expected = self.old_us * self.ratio / self.corrected
        return self.ratio > 1 and self.corrected > self.allowed and self.new_us - expected > SLACK_US

    @property
    def faster(self) -> bool:
        return self.corrected < 1 / self.allowed and self.old_us - self.new_us > SLACK_US


@dataclass
class Comparison:
    """All changes and the verdicts."""

    changes: list[Change]
    entries: dict[str, float]
    limits: dict[str, float]
    drift: float
    uniform: bool
    lost: list[str] = field(default_factory=list)
    only_old: list[str] = field(default_factory=list)
    unjudged: list[str] = field(default_factory=list)

    @property
    def regressions(self) -> list[str]:
        """The regressions as sentences; empty if nothing became slower."""
        found = list(self.lost)
        found += [
            f"{name}: {(ratio - 1) * 100:+.1f} % over its workloads"
            for name, ratio in self.entries.items()
            if ratio > self.limits[name]
        ]
        found += [
            f"{c.entry} on {c.case}: {digits(c.old_us)} -> {digits(c.new_us)} us, {(c.corrected - 1) * 100:+.1f} % "
            f"(allowed {(c.allowed - 1) * 100:.1f} %)"
            for c in self.changes
            if c.slower and c.kind == "backend"
        ]
        if self.uniform:
            found.append(
                f"everything, peers and ceilings too: {(self.drift - 1) * 100:+.1f} % (clock, power or machine)"
            )
        return found

    def text(self) -> str:
        lines = [f"{len(self.changes)} rows in both; drift of peers and ceilings {(self.drift - 1) * 100:+.1f} %"]
        lines += [f"  {name:24s} {(ratio - 1) * 100:+6.1f} % time" for name, ratio in self.entries.items()]
        lines += [
            f"faster: {c.entry} on {c.case}: {digits(c.old_us)} -> {digits(c.new_us)} us"
            for c in self.changes
            if c.faster and c.kind == "backend"
        ]
        lines += [f"only in the old report: {text}" for text in self.only_old[:SHOWN]]
        lines += [f"... and {len(self.only_old) - SHOWN} more"] if len(self.only_old) > SHOWN else []
        lines += [f"not judged, for its peers moved by more than {LOST:g} x: {case}" for case in self.unjudged]
        bad = self.regressions
        return "\n".join([*lines, *(f"REGRESSION {text}" for text in bad), f"{len(bad)} regressions"])


def compare(old: Report, new: Report) -> Comparison:
    """Compares two reports of the same device. Raises InvalidSetting if they cannot be compared."""
    before = {(r.case, r.entry): r for r in old.rows}
    after = {(r.case, r.entry): r for r in new.rows}
    both = [(before[key], after[key]) for key in before if key in after and before[key].us and after[key].us]
    if old.machine["device"] != new.machine["device"]:
        raise InvalidSetting(
            f"the reports are of {old.machine['device']} and {new.machine['device']}: compare one device"
        )
    if not any(a.kind == "backend" for a, _ in both):
        raise InvalidSetting("the reports have no time of a backend in common: measure the same workloads and backends")
    drift = _drift(both, old, new)
    pairs = [(a, b, _ratio(a, b)) for a, b in both]
    unjudged = [case for case in dict.fromkeys(a.case for a, _ in both) if drift.lost(case)]
    judged = {a.case for a, _ in both if a.kind == "backend"} - set(unjudged)
    if not judged:
        raise InvalidSetting(
            f"nothing can be judged: peers moved by more than {LOST:g} x everywhere; measure both again"
        )
    ours: dict[str, list[float]] = {}
    for a, _, ratio in pairs:
        if a.kind == "backend" and a.case in judged:
            ours.setdefault(a.entry, []).append(ratio / drift.of(a.case))
    sigma = _scatter(ours)
    changes = [_change(a, b, ratio, drift.of(a.case), sigma, drift.discord(a.case)) for a, b, ratio in pairs]
    entries = {name: statistics.median(ratios) for name, ratios in ours.items()}
    errors = {name: 1.25 * sigma / math.sqrt(len(ratios)) for name, ratios in ours.items()}
    limits = {name: min(max(ENTRY_LIMIT, 1 + 4 * error), NOISY_ENTRY_LIMIT) for name, error in errors.items()}
    lost = [
        f"{b.entry} on {b.case}: ran before, now {b.status}: {b.reason}"
        for key, b in after.items()
        if b.kind == "backend" and not b.us and key in before and before[key].us
    ]
    gone = sorted({f"{entry} on {case}" for case, entry in before if (case, entry) not in after})
    return Comparison(changes, entries, limits, drift.whole, drift.uniform, lost, gone, unjudged)


def _scatter(ours: dict[str, list[float]]) -> float:
    """The standard deviation of ratios about their entry's median, from the median deviation: robust
    against the few rows that really changed."""
    away = [abs(ratio - statistics.median(ratios)) for ratios in ours.values() for ratio in ratios if len(ratios) > 2]
    return 1.4826 * statistics.median(away) if away else 0.0


def _change(a: Row, b: Row, ratio: float, drift: float, sigma: float, discord: float) -> Change:
    allowed = max(ROW_LIMIT, 1 + 5 * sigma) + max(a.spread, b.spread) + discord + max(_restless(a), _restless(b))
    return Change(a.case, a.entry, a.kind, a.us or 0.0, b.us or 0.0, ratio, ratio / drift, allowed)


def _restless(row: Row) -> float:
    """The width of the middle 60 per cent of the samples, if it is unusually large."""
    sample = _source(row)
    width = (sample.q80 - sample.q20) / sample.median if sample is not None else 0.0
    return width if width > 0.2 else 0.0


def _ratio(a: Row, b: Row) -> float:
    """new/old: the smallest of the ratios of several statistics, which noise moves differently."""
    old_us, new_us = a.us or math.nan, b.us or math.nan
    old, new = _source(a), _source(b)
    ratios = [new_us / old_us]
    if old is not None and new is not None:
        ratios += [new.q20 / old.q20, new.best / old.best]
    return min(ratios)


def _source(row: Row) -> Sample | None:
    """The sample whose median is `us`; None if the file contradicts itself."""
    near = [s for s in (row.eager, row.graph) if s is not None and row.us and abs(s.median - row.us) <= 0.002 * row.us]
    return near[0] if near else None


@dataclass
class Drift:
    """How the peers and ceilings changed, per workload and overall."""

    controls: dict[str, list[float]]
    whole: float = 1.0
    uniform: bool = False

    def of(self, case: str) -> float:
        here = self.controls.get(case, ())
        return statistics.median(here) if len(here) >= MIN_CONTROLS else self.whole

    def lost(self, case: str) -> bool:
        """Whether the controls of a workload changed so much that it cannot be judged."""
        return not 1 / LOST < self.of(case) < LOST

    def discord(self, case: str) -> float:
        """The part of a row's change that may come from the machine: how far the controls of a workload disagree, and
        how far they moved if that is so far that the machine was busy with something else."""
        if self.lost(case):
            return math.inf
        here = sorted(self.controls.get(case, ()))
        if len(here) < MIN_CONTROLS:
            return 0.0
        middle = statistics.median(here)
        moved = max(middle, 1 / middle) - 1
        return statistics.median(abs(ratio - middle) for ratio in here) / middle + (moved if moved > UNSOUND else 0.0)


def _drift(both: list[tuple[Row, Row]], old: Report, new: Report) -> Drift:
    """The drift per workload, the drift of the run, and whether everything changed by one factor."""
    same = old.machine.get("packages", {}).get("torch") == new.machine.get("packages", {}).get("torch")
    controls: dict[str, list[float]] = {}
    for a, b in both:
        if a.kind != "backend":
            controls.setdefault(a.case, []).append(_ratio(a, b))
    every = [r for ratios in controls.values() for r in ratios]
    if len(every) < MIN_CONTROLS or not same:
        return Drift({})
    whole = statistics.median(every)
    return Drift(controls, whole, whole > DRIFT_LIMIT and _width(every) < (whole - 1.0) / 3)


def _width(values: Iterable[float]) -> float:
    """The interquartile range."""
    low, _, high = statistics.quantiles(values, n=4)
    return high - low
