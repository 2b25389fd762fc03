"""What a forecast is worth: `python -m multigemm.bench.left_out [FILE]`, each measured shape left out in turn.

Per kind of shape: who is fastest how often; how often one backend is alone, all others more than 10 % behind; how
often the forecast by all other shapes picks one that is more than 10 % behind; how often it leaves that open, so that
"auto" measures the backends in question; and how often the one taken then is more than 10 % behind.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from multigemm.backend import Availability
from multigemm.bench.fit import fitted_to
from multigemm.select import forecast, pair
from multigemm.select.candidates import MATTERS, Candidate
from multigemm.select.measure_once import in_question
from multigemm.select.pair import LEAST_ERROR, NEAR, Pair

KERNELS = ("cupy", "triton", "numba")
CUBLAS = {"device": "cublas: grouped_mm, with the sizes on the device", "host": "cublas: by sizes"}
ALWAYS_ON_HOST = ("per_group", "batched")


@dataclass(frozen=True)
class Guess:
    """A ratio of two backends at one place: as it was measured, as all other shapes tell, and how sure of that."""

    one: str
    two: str
    true: float
    told: float
    error: float


@dataclass(frozen=True)
class Chosen:
    """What became of one place: who is fastest, how many times slower each is, whom the forecast picks, and who is in
    question."""

    kind: str
    sizes: str
    slowness: dict[str, float]
    picked: str
    asked: list[str]

    @property
    def fastest(self) -> str:
        return min(self.slowness, key=lambda name: self.slowness[name])

    @property
    def alone(self) -> bool:
        return sorted(self.slowness.values())[1] > MATTERS

    @property
    def measured(self) -> float:
        """How many times slower the one is that is taken once those in question were measured."""
        return min(self.slowness[name] for name in self.asked or [self.picked])


def guesses(model: Pair) -> list[tuple[tuple[str, str, bool], Guess]]:
    """By kind, workload and device, what a model without that workload says."""
    told = fitted_to(model)
    covariance = model.covariance() + model.scalars["noise"] * np.eye(len(told.logs))
    inverse, together = np.linalg.inv(covariance), defaultdict(list)
    for index, case in enumerate(model.cases):
        together[case].append(index)
    open_yet = np.zeros(len(told.logs))
    for its in together.values():
        open_yet[its] = np.diag(np.linalg.inv(inverse[np.ix_(its, its)]))
    found = []
    for index, (case, device) in enumerate(told.places):
        others = covariance[index].copy()
        others[together[case]] = -math.inf
        near = np.argsort(-others, kind="stable")[:NEAR]
        error = math.sqrt(max(open_yet[index], float((model.errors[near] ** 2).mean()), LEAST_ERROR**2))
        true = float(told.logs[index])
        guess = Guess(model.one, model.two, true, true + float(model.errors[index]), error)
        found.append(((f"{told.words[index][2]}, {model.family}", case, device), guess))
    return found


def chosen(models: Iterable[Pair]) -> list[Chosen]:
    """What "auto" makes of every place that at least two kernels were measured at."""
    at: dict[tuple[str, str, bool], list[Guess]] = defaultdict(list)
    for model in models:
        if {model.one, model.two} <= {*KERNELS, *CUBLAS.values()}:
            for place, guess in guesses(model):
                at[place].append(guess)
    found = []
    for (kind, _, _), every in at.items():
        for sizes in ("host",) if kind.startswith(ALWAYS_ON_HOST) else ("device", "host"):
            its = [g for g in every if {g.one, g.two} <= {*KERNELS, CUBLAS[sizes]}]
            if its and (sizes == "device" or any(CUBLAS[sizes] in (g.one, g.two) for g in its)):
                found.append(_chosen(kind, sizes, its))
    return found


def _chosen(kind: str, sizes: str, its: Sequence[Guess]) -> Chosen:
    true = forecast.levels_of([(g.one, g.two, g.true, LEAST_ERROR) for g in its])
    told = forecast.levels_of([(g.one, g.two, g.told, g.error) for g in its])
    best = min(told, key=lambda name: told[name])
    able = []
    for name in sorted(told, key=lambda name: told[name]):
        error = min((g.error for g in its if {g.one, g.two} == {name, best}), default=0.0) or max(
            (g.error for g in its if name in (g.one, g.two)), default=0.0
        )
        slowness = math.exp(told[name] - told[best])
        able.append(Candidate(name, Availability(True), (), None, slowness, "", True, error))
    least = min(true[name] for name in told)
    asked = in_question(able)
    return Chosen(kind, sizes, {n: math.exp(true[n] - least) for n in told}, best, asked if len(asked) > 1 else [])


def table(every: Sequence[Chosen]) -> list[str]:
    """Rows of Markdown, one per kind."""
    by: dict[tuple[str, str], list[Chosen]] = defaultdict(list)
    for c in every:
        by[c.kind.replace(" half", " 16 bits"), c.sizes].append(c)
    names = [*KERNELS, "cublas"]
    titles = ["measured", *names, "alone", "picked beyond 10 %", "left open", "then beyond"]
    lines = [f"| shapes | sizes on | {' | '.join(titles)} |", "| --- | --- |" + " ---: |" * len(titles)]
    for (kind, sizes), its in sorted(by.items()):
        wins = [sum(c.fastest.partition(":")[0] == name for c in its) for name in names]
        beyond = sum(c.slowness[c.picked] > MATTERS for c in its), sum(c.measured > MATTERS for c in its)
        shares = [*wins, sum(c.alone for c in its), beyond[0], sum(bool(c.asked) for c in its)]
        told = " | ".join(f"{100 * share / len(its):.0f} %" for share in shares)
        lines.append(f"| {kind} | {sizes} | {len(its)} | {told} | {100 * beyond[1] / len(its):.1f} % |")
    return lines


def main(words: Sequence[str] | None = None) -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path, nargs="?", help="what `multigemm.bench.fit` wrote; else what ships")
    args = parser.parse_args(words)
    models = pair.read(args.file) if args.file else list(forecast.shipped().models.values())
    print("\n".join(table(chosen(models))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
