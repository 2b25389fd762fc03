"""What was tried for each class of problems, and who wins: by measurement or by reports of `multigemm bench`."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

from multigemm.bench.drawn import UNTUNED
from multigemm.bench.entries import as_fields
from multigemm.bench.results import HOST_SIZES, Report, Row
from multigemm.bench.whole import write_whole
from multigemm.bench.workloads import geomean
from multigemm.select.table import Entry, Measured

STRIKES = 3
FIRST_WINS_WITHIN = 1.01
Choice = tuple[str, int]


@dataclass(frozen=True)
class Tried:
    """A config as data, so that a run can be carried on by another process."""

    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> Tried:
        return cls(str(config), as_fields(config))


@dataclass
class ClassResult:
    """What was tried for one class: `us[choice][workload]`, the configs by choice, and the failures."""

    key: str
    us: dict[Choice, dict[str, float]] = field(default_factory=dict)
    configs: dict[Choice, Tried] = field(default_factory=dict)
    failures: dict[str, dict[str, str]] = field(default_factory=dict)

    def best(self) -> dict[str, float]:
        """The fastest of all, per workload."""
        found: dict[str, float] = {}
        for times in self.us.values():
            for case, us in times.items():
                found[case] = min(us, found.get(case, us))
        return found

    def regret(self, choice: Choice) -> float:
        """The worst factor behind the fastest; infinite for a choice that lacks a workload."""
        best, mine = self.best(), self.us[choice]
        return max((mine.get(case, math.inf) / us for case, us in best.items()), default=math.inf)

    def winner(self, backend: str) -> Choice | None:
        """The backend's choice of least regret; its first config unless another is clearly better."""
        mine = sorted(choice for choice in self.us if choice[0] == backend and math.isfinite(self.regret(choice)))
        if not mine:
            return None
        top = min(mine, key=self.regret)
        first = mine[0]
        return first if first[1] == 0 and self.regret(first) <= FIRST_WINS_WITHIN * self.regret(top) else top


@dataclass
class State:
    """What outlives a process: finished workloads, their results, and configs that hang or crash."""

    path: Path | None
    done: list[str] = field(default_factory=list)
    classes: dict[str, ClassResult] = field(default_factory=dict)
    bad: dict[str, dict[str, str]] = field(default_factory=dict)

    def skipped(self, backend: str, config: str) -> str:
        """Why a config is not tried again; a backend with several such configs is left alone."""
        bad = self.bad.get(backend, {})
        if config in bad:
            return bad[config]
        return f"not tried: {len(bad)} other configs hung or crashed" if len(bad) >= STRIKES else ""

    def save(self) -> None:
        if self.path is None:
            return
        classes = [
            {
                "key": c.key,
                "us": [[*choice, times] for choice, times in c.us.items()],
                "configs": [[*choice, *astuple(tried)] for choice, tried in c.configs.items()],
                "failures": c.failures,
            }
            for c in self.classes.values()
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, json.dumps({"done": self.done, "classes": classes, "bad": self.bad}))

    @classmethod
    def load(cls, path: Path) -> State:
        raw = json.loads(path.read_text())
        classes = {}
        for c in raw["classes"]:
            us = {(name, index): times for name, index, times in c["us"]}
            configs = {(name, index): Tried(text, values) for name, index, text, values in c["configs"]}
            classes[c["key"]] = ClassResult(c["key"], us, configs, c["failures"])
        return cls(path, raw["done"], classes, raw["bad"])


def winners(classes: Iterable[ClassResult], device: str, bind: bool = True) -> list[Entry]:
    """What to keep of each class: the winning config of each backend, with its mean time and the failures.

    Unless `bind`, configs are left to the backends.
    """
    found = []
    for result in classes:
        kept = {}
        for backend in dict.fromkeys(name for name, _ in result.us):
            choice = result.winner(backend)
            if choice is not None:
                config = result.configs[choice].fields if bind else {}
                us = round(geomean(result.us[choice].values()), 2)
                kept[backend] = Measured(us, config, dict(result.failures.get(backend, {})))
        if kept:
            found.append(Entry(device, result.key, kept))
    return found


def from_reports(reports: Sequence[Report]) -> list[Entry]:
    """The same from reports of `multigemm bench`, which measured each backend with its first guess.

    Of a workload that several reports measured with one config the mean counts, else the last report.

    No config is stored, so that the table decides between backends, and each backend's heuristic, which
    may have learnt since, between its configs.
    """
    classes: dict[tuple[str, str], ClassResult] = {}
    samples: dict[tuple[str, str, str, str], list[float]] = {}
    for report in reports:
        device = "cpu" if report.machine["device_type"] == "cpu" else report.machine["device"]
        for row, spec in _class_rows(report):
            result = classes.setdefault((device, spec), ClassResult(spec))
            backend = row.entry.removesuffix(HOST_SIZES)
            if row.us is None:
                result.failures.setdefault(backend, {})[row.config] = row.reason
                continue
            new, old = Tried(row.config, row.fields), result.configs.get((backend, 0))
            if old is not None and old != new:  # another version of the backend: its old times are of no use
                result.us[backend, 0].clear()
            taken = samples.setdefault((device, spec, backend, row.case), [])
            if old is not None and row.case not in result.us[backend, 0]:
                taken.clear()
            taken.append(row.us)
            result.configs[backend, 0] = new
            result.us.setdefault((backend, 0), {})[row.case] = geomean(taken)
    devices = dict.fromkeys(device for device, _ in classes)
    return [m for d in devices for m in winners([c for (name, _), c in classes.items() if name == d], d, bind=False)]


def _class_rows(report: Report) -> list[tuple[Row, str]]:
    """Rows of backends with the class that each is about, without those that show what `auto` does untuned.

    Where a backend was measured with host sizes too, the others' rows count for that class as well: they
    never look at host sizes, and only times of the same workloads can be compared.
    """
    rows = [row for row in report.rows if row.kind == "backend" and row.problem_class and row.suite != UNTUNED]
    found = [(row, row.problem_class) for row in rows]
    knowing = [row for row in rows if row.entry.endswith(HOST_SIZES)]
    for special in knowing:
        own = {row.entry.removesuffix(HOST_SIZES) for row in knowing if row.case == special.case}
        found += [
            (row, special.problem_class)
            for row in rows
            if row.case == special.case and not (row.entry.endswith(HOST_SIZES) or row.entry in own)
        ]
    return found
