"""How the backends stand to each other at a shape that nobody measured: what the shapes around it say.

For each two backends the logarithm of the ratio of their times is modelled as a smooth random function of
the place (kriging, or a Gaussian process with Matern's covariance 3/2):

    covariance(x, y) = amplitude * (1 + d) * exp(-d) + slope * <x, y> + level,    d = sqrt(3) * |x - y| / lengths

A place has what any kernel meets (octaves of the extents, of the work, of the bytes, of how the lines of the
operands are aligned) and what these two would make of it: their tiles, how many rounds of them the processors
need and how much of the last round is idle. Nothing in between is written by hand: the lengths, amplitudes and
weights of the measurements are fitted to thousands of them by `multigemm.bench.fit`, which also leaves each
measured shape out in turn; by how much those around it then err is what a forecast is held to be uncertain by.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from multigemm.nearest import Estimate, Footprint
from multigemm.shape import Shape, even, families_of, knows_sizes, labels, point

Array = npt.NDArray[Any]

NEAR = 12
"""Measured shapes, the nearest, that tell how uncertain a forecast is."""
LEAST_ERROR = 0.01
LEVEL = 0.3
"""The variance of how two backends stand to each other on the whole."""
SCALARS = ("marks", "amplitude", "slope", "noise")
FILE, CAPABILITY = "forecast.npz", "9.0"
"""What ships, and the generation of GPUs that it was measured on."""


@dataclass(frozen=True, slots=True)
class Asked:
    """A class of problems, its size, and per backend what it would run there and in which tiles."""

    key: str
    shape: Shape
    device: str
    ran: Mapping[str, str]
    footprints: Mapping[str, Footprint]


class Own(NamedTuple):
    """What a user measured: a point with its marks, and the logarithm of the ratio of two backends' times."""

    point: list[float]
    words: tuple[str, str, str]
    ratio: float


@dataclass(frozen=True, eq=False)
class Pair:
    """How two backends stand to each other in one family: points, marks and weights of what was measured; how far
    points may lie apart along each coordinate, and by marks, amplitude, slope and noise; the errors when left out."""

    family: str
    one: str
    two: str
    points: Array
    marks: Array
    vocabulary: list[list[str]]
    lengths: Array
    scalars: dict[str, Array]
    weights: Array
    errors: Array
    cases: list[str]

    @property
    def names(self) -> tuple[str, str, str]:
        """The family and the two backends."""
        return self.family, self.one, self.two

    @cached_property
    def _scaled(self) -> tuple[Array, Array, Array]:
        """The points in lengths, their squares, and the points times the slopes."""
        scaled = np.ascontiguousarray(self.points / self.lengths)
        return scaled, (scaled**2).sum(1), self.points * self.scalars["slope"]

    def covariance(self) -> Array:
        """Of the measured points with each other."""
        every = range(len(self.points))
        return np.array([self._alike(self.points[i], self.marks[i]) for i in every])

    def toward(self, at: Sequence[float], words: Sequence[str]) -> Array:
        """How alike the ratio at a point is to each measured one, as a covariance."""
        return self._alike(np.array(at), self._codes(words))

    def _codes(self, words: Sequence[str]) -> Array:
        """Marks as numbers; what was never met is like nothing."""
        return np.array([v.index(word) if word in v else -1 for v, word in zip(self.vocabulary, words, strict=True)])

    def _alike(self, point: Array, marks: Array) -> Array:
        scaled, squares, sloped = self._scaled
        here = point / self.lengths
        apart = squares + (here @ here) - 2.0 * np.einsum("jk,k->j", scaled, here)
        found: Array = self._near(apart, marks, self.marks) + np.einsum("jk,k->j", sloped, point) + LEVEL
        return found

    def _near(self, apart: Array, marks: Array, others: Array) -> Array:
        """The part of the covariance that fades with the distance, whose square but for marks is given."""
        apart = apart + ((marks[..., None, :] != others) * self.scalars["marks"]).sum(-1)
        far = np.sqrt(3.0 * np.maximum(apart, 0.0) + 1e-9)
        found: Array = self.scalars["amplitude"] * (1 + far) * np.exp(-far)
        return found

    def _among(self, points: Array, marks: Array) -> Array:
        """The same of some points with each other."""
        scaled = points / self.lengths
        return self._near(((scaled[:, None] - scaled[None]) ** 2).sum(-1), marks, marks)

    def correction(self, at: Sequence[float], words: Sequence[str], own: Sequence[Own]) -> float:
        """By how much to correct what is expected here, for the surprises that a user's measurements near by were."""
        if not own:
            return 0.0
        points, marks = np.array([o.point for o in own]), np.array([self._codes(o.words) for o in own])
        apart = (((points - np.array(at)) / self.lengths) ** 2).sum(-1)
        alike = self._near(apart, self._codes(words), marks)
        near = np.argsort(-alike, kind="stable")[:NEAR]
        surprise = np.array(
            [own[i].ratio - float(self.toward(own[i].point, own[i].words) @ self.weights) for i in near]
        )
        known = self._among(points[near], marks[near]) + self.scalars["noise"] * np.eye(len(near))
        return float(alike[near] @ np.linalg.solve(known, surprise))

    def expected(self, at: Sequence[float], words: Sequence[str]) -> tuple[float, float, int]:
        """The logarithm of the ratio of times to expect, how uncertain that is, and the nearest point.

        Uncertain by what the nearest points leave open, and at least by how much the model errs at them if left out.
        """
        alike = self.toward(at, words)
        near = np.argpartition(-alike, min(NEAR, len(alike) - 1))[:NEAR]
        near = near[np.argsort(-alike[near], kind="stable")]
        points, sloped = self.points[near], self._scaled[2][near]
        known = self._among(points, self.marks[near]) + np.einsum("ik,jk->ij", sloped, points) + LEVEL
        known += self.scalars["noise"] * np.eye(len(near))
        whole = self.scalars["amplitude"] + float((self.scalars["slope"] * np.square(at)).sum()) + LEVEL
        left = float(whole - alike[near] @ np.linalg.solve(known, alike[near]) + self.scalars["noise"])
        error = float((self.errors[near] ** 2).mean())
        return float(alike @ self.weights), math.sqrt(max(left, error, LEAST_ERROR**2)), int(near[0])


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that was fitted, for GPUs of one generation."""

    models: Mapping[tuple[str, str, str], Pair]
    capability: str = ""

    def estimates(self, asked: Asked, own: Sequence[tuple[Asked, Mapping[str, float]]] = ()) -> list[Estimate]:
        """How many times slower than the fastest each backend is to be expected, of those that it knows at this place;
        empty if it knows fewer than two. `own` are classes with their times that the user measured on this device."""
        told = next(filter(None, (self._ratios(asked, own, family) for family in families_of(asked.key))), [])
        if not told:
            return []
        levels = _levels([(one, two, mean, error) for one, two, _, mean, error, _ in told])
        best, second, *_ = sorted(levels, key=lambda name: levels[name])
        found = []
        for name, level in levels.items():
            rivals = {name, second if name == best else best}
            met = [t for t in told if {t[0], t[1]} == rivals] or [t for t in told if name in t[:2]]
            _, _, model, _, error, nearest = min(met, key=lambda t: t[4])
            source = f"forecast from {len(model.weights)} measured ratios, give or take {100 * error:.0f} %, "
            source += f"the nearest of {model.cases[nearest]}"
            found.append(Estimate(name, math.exp(level - levels[best]), source))
        return found

    def _ratios(
        self, asked: Asked, own: Sequence[tuple[Asked, Mapping[str, float]]], family: str
    ) -> list[tuple[str, str, Pair, float, float, int]]:
        """What the models of one family say: two backends, the model, the ratio, its error, the nearest point."""
        names, told = _named(asked), []
        for (its, first, second), model in self.models.items():
            if its == family and first in names and second in names:
                one, two, at, words = _met(asked, (first, second))
                lately = [
                    Own(*_met(a, (first, second))[2:], math.log(us[one] / us[two])) for a, us in _both(own, model)
                ]
                mean, error, nearest = model.expected(at, words)
                told.append((one, two, model, mean + model.correction(at, words, lately), error, nearest))
        return told


def _named(asked: Asked) -> dict[str, str]:
    """The backends by what models call them."""
    return {label: name for name, ran in asked.ran.items() for label in labels(name, ran, asked.key)}


def _met(asked: Asked, called: tuple[str, str]) -> tuple[str, str, list[float], tuple[str, str, str]]:
    """Two backends, and the point where they meet, with its marks."""
    one, two = (_named(asked)[name] for name in called)
    shape = asked.shape if knows_sizes(asked.key, called) else even(asked.shape)
    at = point(asked.key, shape, asked.device, asked.footprints.get(one, ()), asked.footprints.get(two, ()))
    return one, two, at, (asked.ran[one], asked.ran[two], asked.key.split()[0])


def _both(own: Sequence[tuple[Asked, Mapping[str, float]]], model: Pair) -> list[tuple[Asked, Mapping[str, float]]]:
    """The user's classes in which the two backends of a model met."""
    return [
        (asked, us)
        for asked, us in own
        if model.family in families_of(asked.key) and {model.one, model.two} <= _named(asked).keys()
    ]


def _levels(told: Sequence[tuple[str, str, float, float]]) -> dict[str, float]:
    """Logarithms of times, but for a constant, that fit the ratios of pairs best (least squares by their errors); of
    the backends that hang together with the first."""
    names = [told[0][0]]
    for name in names:  # each brings those that it was compared with
        names += [x for x in dict.fromkeys(x for t in told if name in t[:2] for x in t[:2]) if x not in names]
    told = [t for t in told if t[0] in names]
    rows = np.zeros((len(told), len(names)))
    for row, (one, two, _, error) in zip(rows, told, strict=True):
        row[names.index(one)], row[names.index(two)] = 1.0 / error, -1.0 / error
    right = np.array([mean / error for _, _, mean, error in told])
    normal = rows.T @ rows + 1e-9 * np.eye(len(names))
    return dict(zip(names, np.linalg.solve(normal, rows.T @ right).tolist(), strict=True))


def write(path: Path, models: Iterable[Pair]) -> None:
    """All models in one file of arrays."""
    kept: list[dict[str, Any]] = []
    arrays: dict[str, Any] = {}
    for index, p in enumerate(models):
        kept.append({"pair": p.names, "words": p.vocabulary, "cases": p.cases})
        arrays |= {f"points{index}": p.points.astype(np.float16), f"codes{index}": p.marks.astype(np.int16)}
        arrays |= {f"lengths{index}": p.lengths, f"weights{index}": p.weights}
        arrays[f"errors{index}"] = p.errors.astype(np.float16)
        arrays |= {f"{name}{index}": value for name, value in p.scalars.items()}
    arrays["models"] = np.frombuffer(json.dumps(kept).encode(), dtype=np.uint8)
    np.savez_compressed(path, **arrays)


def read(path: Path) -> list[Pair]:
    """What `write` wrote."""
    with np.load(path) as file:
        arrays = {name: file[name] for name in file.files}
    found = []
    for index, kept in enumerate(json.loads(arrays["models"].tobytes())):
        own = {name: arrays[f"{name}{index}"] for name in ("points", "codes", "lengths", "weights", "errors")}
        scalars = {name: arrays[f"{name}{index}"] for name in SCALARS}
        points, errors = own["points"].astype(np.float64), own["errors"].astype(np.float64)
        words, cases = kept["words"], kept["cases"]
        family, one, two = kept["pair"]
        last = own["lengths"], scalars, own["weights"], errors, cases
        found.append(Pair(family, one, two, points, own["codes"], words, *last))
    return found


@lru_cache(maxsize=1)
def shipped() -> Known:
    """What ships with the package."""
    path = Path(__file__).parent / "tuned" / FILE
    models = read(path) if path.exists() else []
    return Known({p.names: p for p in models}, CAPABILITY)
