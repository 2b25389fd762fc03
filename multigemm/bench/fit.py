"""Fits what `auto` forecasts by: `python -m multigemm.bench.fit OUT REPORT... [--former FILE]`, from reports.

For each two backends and each family of dtypes: the ratios of their times on every workload that both ran, the
lengths and amplitudes under which these ratios are likeliest (gradient ascent), the weights that follow, and the
error at each workload if it, on whatever device, is left out. `multigemm.select.pair` says what all of it means.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations, product
from pathlib import Path

import numpy as np
import torch

from multigemm.bench import results
from multigemm.bench.drawn import UNTUNED
from multigemm.bench.results import HOST_SIZES, Report, Row
from multigemm.bench.suites import suite
from multigemm.bench.workloads import Workload
from multigemm.errors import MultigemmError
from multigemm.select import pair
from multigemm.select.measured import ON_DEVICE
from multigemm.select.pair import Array, Pair
from multigemm.select.shape import ON_H100, Shape, even, families_of, knows_sizes, labels, point, summary

WAITS = "chosen at each launch"
"""What such a backend tells that has to wait for the sizes: `auto` passes over it."""
FEW = 4
"""A backend that ran less than this part of what another did ran few shapes."""
LEAST_SHAPES = 4
"""Two backends that met on fewer are not modelled."""
STEPS, RATE, FITTED_ON = 60, 0.12, 700
"""Of gradient ascent; and shapes, drawn at random, that lengths are fitted on: the weights take all."""
Names = tuple[str, str, str]
"""A family and two backends."""
PRIOR = 0.02
"""Holds the logarithms of lengths near that of 3 where the data do not care."""
LEAST_NOISE = 0.008
"""Of a measured ratio: repeats differ by about as much."""


@dataclass(frozen=True)
class Run:
    """One backend on one workload on one device."""

    case: str
    device: str
    key: str
    shape: Shape
    us: float
    ran: str
    footprint: tuple[int, ...]


def shape_of(case: Workload) -> Shape:
    """As `shape.shape_of`; of masked problems the rows that there may be, for nobody knows how many count."""
    shape = summary(case.extents)
    return shape._replace(m=float(case.m)) if case.form == "masked" else shape


def runs(reports: Iterable[Report], left_out: Sequence[str] = (UNTUNED,)) -> dict[tuple[str, str], dict[str, Run]]:
    """By device and workload, what each backend took: of several reports the mean, if it ran alike in all."""
    found: dict[tuple[str, str], dict[str, list[Run]]] = defaultdict(lambda: defaultdict(list))
    known: dict[str, dict[str, Workload]] = {}
    for report in reports:
        device = report.machine["device"]
        for row in report.rows:
            if row.kind != "backend" or row.us is None or not row.spec or row.suite in left_out:
                continue
            name = suite_of(row)
            if name not in known:
                known[name] = {case.key: case for case in suite(name)}
            shape = shape_of(known[name][row.case])
            run = Run(row.case, device, row.spec, shape, row.us, row.ran, tuple(row.footprint))
            its = found[device, row.case][row.entry]
            if its and its[-1].ran != run.ran:
                its.clear()
            its.append(run)
    return {place: {name: _mean(its) for name, its in by.items()} for place, by in found.items()}


def suite_of(row: Row) -> str:
    """The suite that makes a row's workload again; random ones carry their seed in the name."""
    parts = row.name.split("_")
    return f"{UNTUNED}:{parts[1]}" if row.suite == UNTUNED and len(parts) == 3 else row.suite


def _mean(its: Sequence[Run]) -> Run:
    us = math.exp(sum(math.log(run.us) for run in its) / len(its))
    return Run(its[-1].case, its[-1].device, its[-1].key, its[-1].shape, us, its[-1].ran, its[-1].footprint)


def pairs(found: dict[tuple[str, str], dict[str, Run]]) -> dict[Names, list[tuple[Run, Run]]]:
    """By family and two backends, every workload that both ran. A backend that decides by the sizes counts for each
    decision by itself, and is compared with those that do not."""
    met: dict[Names, list[tuple[Run, Run]]] = defaultdict(list)
    for by in found.values():
        for one, two in combinations(sorted(by), 2):
            if one.removesuffix(HOST_SIZES) == two.removesuffix(HOST_SIZES) or WAITS in by[one].ran + by[two].ran:
                continue
            a, b = by[one], by[two]
            key = next((run.key for run in (a, b) if not run.key.endswith(ON_DEVICE)), a.key)
            called = [labels(name.removesuffix(HOST_SIZES), by[name].ran, by[name].key) for name in (one, two)]
            for first, second in product(*called):
                shape = a.shape if knows_sizes(key, (first, second)) else even(a.shape)
                met[families_of(key)[0], first, second].append((replace(a, shape=shape), replace(b, shape=shape)))
    return met


def lean(met: dict[Names, Ratios]) -> dict[Names, Ratios]:
    """Without what costs time at each forecast and tells little: two backends that met on very few workloads are not
    modelled, and one that ran few is compared only with those that it met most often."""
    met = {key: its for key, its in met.items() if len(set(its.cases)) >= LEAST_SHAPES}
    most: dict[tuple[str, str], int] = defaultdict(int)
    for (family, *names), its in met.items():
        for name in (*names, ""):
            most[family, name] = max(most[family, name], len(its.logs))
    few = {place for place, count in most.items() if FEW * count < most[place[0], ""] and ": " not in place[1]}
    return {
        (family, one, two): its
        for (family, one, two), its in met.items()
        if all(len(its.logs) == most[family, name] for name in (one, two) if (family, name) in few)
    }


@dataclass(frozen=True)
class Ratios:
    """Logarithms of the ratios of two backends' times, each at its point, with its marks and its workload."""

    points: Array
    words: list[tuple[str, str, str]]
    logs: Array
    cases: list[str]

    @property
    def places(self) -> list[tuple[str, bool]]:
        """Which workload on which device each is of."""
        return list(zip(self.cases, self.points[:, ON_H100].astype(bool).tolist(), strict=True))


def ratios(its: Sequence[tuple[Run, Run]]) -> Ratios:
    """What two backends took for the same workloads."""
    points = np.array([point(a.key, a.shape, a.device, a.footprint, b.footprint) for a, b in its])
    words = [(a.ran, b.ran, a.key.split()[0]) for a, b in its]
    logs = np.log([a.us / b.us for a, b in its])
    return Ratios(points.astype(np.float16).astype(np.float64), words, logs, [a.case for a, _ in its])  # as kept


def fitted_to(model: Pair) -> Ratios:
    """What a model was fitted to: its weights tell, for they were solved for."""
    logs = model.covariance() @ model.weights + model.scalars["noise"] * model.weights
    words = [tuple(v[i] for v, i in zip(model.vocabulary, marks, strict=True)) for marks in model.marks.tolist()]
    return Ratios(model.points, words, logs, model.cases)


def joined(new: Ratios, old: Ratios) -> Ratios:
    """Both; of what was measured again the new."""
    again = set(new.places)
    kept = [index for index, place in enumerate(old.places) if place not in again]
    points, logs = np.concatenate([new.points, old.points[kept]]), np.concatenate([new.logs, old.logs[kept]])
    return Ratios(
        points, [*new.words, *(old.words[i] for i in kept)], logs, [*new.cases, *(old.cases[i] for i in kept)]
    )


def fit(key: Names, its: Ratios, steps: int = STEPS, former: Pair | None = None) -> Pair:
    """The model of two backends, with the error of each point if its workload is left out; from a former one's lengths
    on, if there is one."""
    words = list(zip(*its.words, strict=True))
    vocabulary = [list(dict.fromkeys(w)) for w in words]
    marks = np.array([[v.index(x) for x in w] for v, w in zip(vocabulary, words, strict=True)]).T
    chosen = _subset(its.cases)
    lengths, scalars = _likeliest(its.points[chosen], marks[chosen], its.logs[chosen], steps, former)
    nothing = np.zeros(len(its.logs))
    model = Pair(*key, its.points, marks, vocabulary, lengths, scalars, nothing, nothing, its.cases)
    weights, errors = solved(model, its.logs)
    return replace(model, weights=weights, errors=errors)


def solved(model: Pair, y: Array) -> tuple[Array, Array]:
    """The weights of all points; and the error at each, if those of its workload are left out."""
    inverse = np.linalg.inv(model.covariance() + model.scalars["noise"] * np.eye(len(y)))
    weights, errors = inverse @ y, np.zeros(len(y))
    together = defaultdict(list)
    for index, case in enumerate(model.cases):
        together[case].append(index)
    for indices in together.values():
        errors[indices] = -np.linalg.solve(inverse[np.ix_(indices, indices)], weights[indices])
    return weights, errors


def _subset(cases: Sequence[str]) -> Array:
    names = list(dict.fromkeys(cases))
    kept = set(np.random.default_rng(0).permutation(names)[:FITTED_ON].tolist())
    return np.array([index for index, case in enumerate(cases) if case in kept])


def _likeliest(
    points: Array, marks: Array, y: Array, steps: int, former: Pair | None
) -> tuple[Array, dict[str, Array]]:
    """Lengths and amplitudes under which the ratios are likeliest."""
    z, ratios = torch.tensor(points), torch.tensor(y)
    differ = torch.tensor((marks[:, None] != marks[None]).astype(float))
    start = {"lengths": [math.log(3.0)] * z.shape[1], "marks": [0.0] * 3, "amplitude": 2 * math.log(0.3)}
    start |= {"slope": 2 * math.log(0.03), "noise": 2 * math.log(0.02)}
    if former is not None and len(former.lengths) == z.shape[1]:
        start = {name: np.log(x).tolist() for name, x in {"lengths": former.lengths, **former.scalars}.items()}
    p = {name: torch.tensor(x, dtype=torch.float64, requires_grad=True) for name, x in start.items()}
    ascent = torch.optim.Adam(list(p.values()), lr=RATE)
    for _ in range(steps):
        ascent.zero_grad()
        loss = _surprise(z, differ, ratios, p) + PRIOR * ((p["lengths"] - math.log(3.0)) ** 2).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        ascent.step()
        with torch.no_grad():
            p["noise"].clamp_(min=2 * math.log(LEAST_NOISE))
    found = {name: np.exp(x.detach().numpy()) for name, x in p.items()}
    return found.pop("lengths"), found


def _surprise(z: torch.Tensor, differ: torch.Tensor, y: torch.Tensor, p: dict[str, torch.Tensor]) -> torch.Tensor:
    """Minus the logarithm of the likelihood."""
    q = z * torch.exp(-p["lengths"])
    square = (q * q).sum(-1)
    apart = (square[:, None] + square[None] - 2 * q @ q.T).clamp_min(0.0) + differ @ p["marks"].exp()
    far = (3.0 * apart + 1e-9).sqrt()
    covariance = p["amplitude"].exp() * (1 + far) * torch.exp(-far) + p["slope"].exp() * (z @ z.T) + pair.LEVEL
    lower = torch.linalg.cholesky(covariance + p["noise"].exp() * torch.eye(len(y), dtype=torch.float64))
    solution = torch.cholesky_solve(y[:, None], lower)[:, 0]
    surprise: torch.Tensor = 0.5 * (y * solution).sum() + lower.diagonal().log().sum()
    return surprise


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("reports", type=Path, nargs="+")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--former", type=Path, default=None, help="a file of before, whose ratios count too")
    parser.add_argument("--more", type=int, default=STEPS, help="steps for models that it holds")
    args = parser.parse_args(words)
    known = {} if args.former is None else {model.names: model for model in pair.read(args.former)}
    met = {key: ratios(its) for key, its in pairs(runs(map(results.read, args.reports))).items()}
    for key, model in known.items():
        met[key] = joined(met[key], fitted_to(model)) if key in met else fitted_to(model)
    models = []
    for key, its in lean(met).items():
        model = fit(key, its, args.more if key in known else args.steps, known.get(key))
        print(
            f"{', '.join(key)}: {len(its.logs)} points of {len(set(its.cases))} workloads; left out in turn, they err "
            f"by {np.median(np.abs(model.errors)):.3f} in the median, {np.sqrt((model.errors**2).mean()):.3f} rms",
            flush=True,
        )
        models.append(model)
    if not models:
        raise MultigemmError("no two backends ran the same workloads in these reports")
    pair.write(args.out, models)
    return 0


if __name__ == "__main__":
    sys.exit(main())
