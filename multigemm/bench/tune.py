"""Tuning: every config of every backend, checked, then timed side by side on real workloads.

What is stored belongs to a class of problems (`select.problem_class`), not to one workload: the sizes of
groups are known on the device alone, so that even and skewed groups share a class. A config is
therefore judged on all workloads of its class by its regret, the factor by which it is slower than
the fastest of all backends and configs on each; the smallest worst regret wins. Configs that fail
stay in the record with their reasons.

Sizes on the host are classes of their own. A backend that plans by them is tried with sizes in either
place, side by side with the others, whose kernels run alike and whose times count in both classes.
"""

from __future__ import annotations

import gc
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch

from multigemm import api
from multigemm.bench.entries import as_fields, available_backends, problem
from multigemm.bench.operands import Tensors, Truth, make, poison, reference
from multigemm.bench.reports import HOST_SIZES, Report, Row, replace_file
from multigemm.bench.suites import UNTUNED
from multigemm.bench.supervise import Marker
from multigemm.bench.workloads import Workload, geomean
from multigemm.planning.plan import Plan
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.select import registry
from multigemm.select.problem_class import class_of
from multigemm.select.table import Entry, Measured, device_name
from multigemm.select.timing import Call, Timing, describe, measure

KEEP_WITHIN = 1.25
"""Configs within this factor of their backend's best, at a quick look, are measured carefully."""
RUNNERS_UP = 4
STRIKES = 3
FIRST_WINS_WITHIN = 1.01
Choice = tuple[str, int]


@dataclass(frozen=True)
class TriedConfig:
    """A config as data, so that a run can be carried on by another process."""

    text: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, config: Any) -> TriedConfig:
        return cls(str(config), as_fields(config))


@dataclass
class ClassResult:
    """What was tried for one class: `us[choice][workload]`, the configs by choice, and the failures."""

    key: str
    us: dict[Choice, dict[str, float]] = field(default_factory=dict)
    configs: dict[Choice, TriedConfig] = field(default_factory=dict)
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
        replace_file(self.path, json.dumps({"done": self.done, "classes": classes, "bad": self.bad}))

    @classmethod
    def load(cls, path: Path) -> State:
        raw = json.loads(path.read_text())
        classes = {}
        for c in raw["classes"]:
            us = {(name, index): times for name, index, times in c["us"]}
            configs = {(name, index): TriedConfig(text, values) for name, index, text, values in c["configs"]}
            classes[c["key"]] = ClassResult(c["key"], us, configs, c["failures"])
        return cls(path, raw["done"], classes, raw["bad"])


@dataclass(frozen=True)
class Posed:
    """A workload as a problem with its sizes in one place, and what is known of its class."""

    problem: GroupedGemmProblem
    result: ClassResult


@dataclass(frozen=True)
class Limits:
    """Bounds on the work: seconds for all, configs per backend, milliseconds per measurement."""

    total_s: float = 600.0
    configs: int = 0
    quick_ms: float = 80.0
    careful_ms: float = 250.0


@dataclass
class Tuner:
    """One tuning run on one device."""

    device: torch.device
    backends: Sequence[str]
    limits: Limits = Limits()
    say: Callable[[str], None] = print
    classes: dict[str, ClassResult] = field(default_factory=dict)
    started: float = field(default_factory=time.monotonic)
    unfinished: list[str] = field(default_factory=list)
    marker: Marker = Marker(None)
    state: State = field(default_factory=lambda: State(None))
    _tried: dict[Choice, TriedConfig] = field(default_factory=dict)

    def run(self, cases: Sequence[Workload]) -> list[Entry]:
        """Tries everything within the limits; the entries to keep, one per class."""
        self.classes |= self.state.classes
        for case in cases:
            if case.key in self.state.done:
                continue
            if time.monotonic() - self.started > self.limits.total_s:
                self.unfinished.append(case.key)
                continue
            self._case(case)
            self.state.classes = self.classes
            self.state.done.append(case.key)
            self.state.save()
        return self.measured()

    def measured(self) -> list[Entry]:
        """The winners so far."""
        return winners(self.classes.values(), device_name(self.device))

    def _case(self, case: Workload) -> None:
        self.marker.say("making tensors and reference", case=case.key)
        tensors = make(case, self.device)
        truth = reference(tensors)
        posed = self._posed(tensors)
        self.say(f"{case.key}  [{'] ['.join(p.result.key for p in posed.values())}]")
        calls, capturable = self._plans(posed, tensors, truth)
        del truth
        times = self._times(calls, capturable)
        for where, p in posed.items():
            self._file(case.key, p.result, of_place(times, where))
        self._tell(times)
        calls.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def _posed(self, tensors: Tensors) -> dict[str, Posed]:
        """The problem with its sizes on the device (key "") and, if that is another class to anyone, on the host."""
        found: dict[str, Posed] = {}
        both = tensors.offsets is not None and any(map(plans_by_sizes, self.backends))
        for where in ("", HOST_SIZES) if both else ("",):
            whole = problem(tensors, where == HOST_SIZES)
            key = str(class_of(whole, staged_spec(whole)))
            if key not in [p.result.key for p in found.values()]:
                found[where] = Posed(whole, self.classes.setdefault(key, ClassResult(key)))
        return found

    def _plans(
        self, posed: Mapping[str, Posed], tensors: Tensors, truth: Truth
    ) -> tuple[dict[Choice, Call], set[Choice]]:
        """A checked plan for each config that can run, and which of them can be captured.

        The first config of each backend is tried in any case, the others while the time budget lasts.
        """
        calls: dict[Choice, Call] = {}
        capturable: set[Choice] = set()
        late = 0
        for name, where, index, config in self._tries(posed):
            choice, tried, result = (name + where, index), TriedConfig.of(config), posed[where].result
            if index and time.monotonic() - self.started > self.limits.total_s:
                late += 1
                continue
            self._tried[choice] = tried
            if why := self.state.skipped(name, tried.text):
                result.failures.setdefault(name, {})[tried.text] = why
                continue
            self.marker.say("checking", case=tensors.workload.key, backend=name, config=tried.text)
            plan = self._verified(posed[where].problem, name, config, tensors, truth)
            if isinstance(plan, str):
                result.failures.setdefault(name, {})[tried.text] = plan
                self.say(f"  {name}: {config} failed: {plan}")
                self._synchronize()  # raises if the device is lost, which ends this process
                continue
            calls[choice] = plan
            if not plan.syncs:
                capturable.add(choice)
        if late:
            self.say(f"  {late} configs not tried within the time budget")
        return calls, capturable

    def _verified(
        self, whole: GroupedGemmProblem, name: str, config: Any, tensors: Tensors, truth: Truth
    ) -> Plan | str:
        """A plan whose result is right, or what is wrong with it: a config's failure is part of the record."""
        try:
            plan = api.plan(whole, name, config)
            poison(tensors)
            plan()
            self._synchronize()
            return truth.verdict(tensors.out) or plan
        except Exception as error:
            return describe(error)

    def _tries(self, posed: Mapping[str, Posed]) -> list[tuple[str, str, int, Any]]:
        """Every config to try: the first of each backend, then the second of each, so that time may run out."""
        found = []
        for name in self.backends:
            backend = registry.get(name)
            for where in posed if plans_by_sizes(name) else ("",):
                spec = staged_spec(posed[where].problem)
                if reasons := backend.not_supported_reasons(spec, self.device):
                    self.say(f"  {name}{where}: cannot: {'; '.join(reasons)}")
                    continue
                configs = list(backend.configs(spec, self.device))[: self.limits.configs or None]
                found += [(name, where, index, config) for index, config in enumerate(configs)]
        return sorted(found, key=lambda t: t[2])

    def _file(self, case: str, result: ClassResult, times: Mapping[Choice, float]) -> None:
        """Times of one workload, by the label that they were measured under, into a class."""
        for (label, index), us in times.items():
            choice = label.removesuffix(HOST_SIZES), index
            result.us.setdefault(choice, {})[case] = us
            result.configs.setdefault(choice, self._tried[label, index])

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _times(self, calls: dict[Choice, Call], capturable: set[Choice]) -> dict[Choice, float]:
        """A quick look at all; a careful one at those near their backend's best."""
        quick = {c: t.best for c, t in self._measure(calls, "cold", 3, self.limits.quick_ms).items() if t.ok}
        near = {
            c: calls[c] for c, us in quick.items() if us <= KEEP_WITHIN * min(quick[d] for d in quick if d[0] == c[0])
        }
        careful = {
            c: self._typical(t) for c, t in self._measure(near, "cold", 9, self.limits.careful_ms).items() if t.ok
        }
        if self.device.type == "cuda":
            graphs = {c: call for c, call in near.items() if c in capturable}
            for choice, timing in self._measure(graphs, "graph", 9, self.limits.careful_ms).items():
                if timing.ok:
                    careful[choice] = min(timing.median, careful.get(choice, math.inf))
        return {**quick, **careful}

    def _typical(self, timing: Timing) -> float:
        """The median; on a CPU, which other processes share, the quantile that they disturb less."""
        return timing.median if self.device.type == "cuda" else timing.quantile(0.2)

    def _measure(self, calls: dict[Choice, Call], mode: Any, least: int, budget_ms: float) -> dict[Choice, Timing]:
        named = {f"{name} {index}": call for (name, index), call in calls.items()}
        tried = dict(zip(named, calls, strict=True))

        def watch(label: str) -> None:
            choice = tried.get(label)
            config = self._tried[choice].text if choice else ""
            self.marker.say(
                f"timing {mode}", backend=choice[0].removesuffix(HOST_SIZES) if choice else "", config=config
            )

        taken = measure(named, self.device, mode, min_reps=least, budget_ms=budget_ms, watch=watch)
        return {choice: taken[f"{choice[0]} {choice[1]}"] for choice in calls}

    def _tell(self, us: Mapping[Choice, float]) -> None:
        for backend in dict.fromkeys(name for name, _ in us):
            ranked = sorted((c for c in us if c[0] == backend), key=lambda choice: us[choice])
            first = us.get((backend, 0), math.nan)
            self.say(
                f"  {backend}: {us[ranked[0]]:.1f} us with {self._tried[ranked[0]].text} "
                f"(first guess {first:.1f} us, {len(ranked)} timed)"
            )
            told = [
                f"{'/'.join(map(str, self._tried[c].fields.values()))} {us[c]:.1f}" for c in ranked[1 : 1 + RUNNERS_UP]
            ]
            if told:
                self.say(f"    then {', '.join(told)}{' ...' if len(ranked) > 1 + RUNNERS_UP else ''}")


def of_place(times: Mapping[Choice, float], where: str) -> dict[Choice, float]:
    """The times that count for sizes in one place: who planned for it, else who does not care."""
    special = {label for label, _ in times if label.endswith(HOST_SIZES)}
    if not where:
        return {choice: us for choice, us in times.items() if choice[0] not in special}
    return {choice: us for choice, us in times.items() if choice[0] + HOST_SIZES not in special}


def plans_by_sizes(name: str) -> bool:
    """Whether a backend runs something else where it has the sizes on the host."""
    return bool(getattr(registry.get(name), "decides_at_bind", False))


def tunable(names: Sequence[str], device: torch.device) -> tuple[list[str], dict[str, str]]:
    """The backends to tune here, and why others are not."""
    states = available_backends(device)
    for name in names:
        registry.get(name)  # raises for one that does not exist
    asked = {name: states.get(name, "computes nothing") for name in names or states}
    return [name for name, why in asked.items() if not why], {name: why for name, why in asked.items() if why}


# --- what is kept -----------------------------------------------------------------------------------


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
            new, old = TriedConfig(row.config, row.fields), result.configs.get((backend, 0))
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
