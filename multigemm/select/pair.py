"""How two backends stand to each other: a smooth random function of the place, fitted to measured ratios.

The logarithm of the ratio of their times is modelled by kriging, a Gaussian process with Matern's covariance 3/2:

    covariance(x, y) = amplitude * (1 + d) * exp(-d) + slope * <x, y> + level,    d = sqrt(3) * |x - y| / lengths

`multigemm.select.shape` makes the coordinates of a place; `multigemm.bench.fit` fits lengths, amplitudes and weights.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

NEAR = 12
"""Measured shapes, the nearest, that tell how uncertain a forecast is."""
LEAST_ERROR = 0.01
LEVEL = 0.3
"""The variance of how two backends stand to each other on the whole."""
SCALARS = ("marks", "amplitude", "slope", "noise")


@dataclass
class Meeting:
    """What a user measured of two backends, as a model of them sees it: a point with its marks, the logarithm of the
    ratio, and by how much that surprised the model, once that was asked."""

    point: Array
    marks: Array
    ratio: float
    surprise: float | None = None


class Own:
    """All of them."""

    def __init__(self, every: Sequence[Meeting]) -> None:
        self.every = every
        self.points, self.marks = (np.array([getattr(met, name) for met in every]) for name in ("point", "marks"))


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
        return self._alike(np.array(at), self.codes(words))

    def codes(self, words: Sequence[str]) -> Array:
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

    def correction(self, at: Sequence[float], words: Sequence[str], own: Own, error: float) -> tuple[float, float]:
        """By how much to correct what is expected here, for the surprises that a user's measurements near by were, and
        how uncertain that leaves what was uncertain by `error`; what was measured elsewhere leaves it as it was."""
        if not own.every:
            return 0.0, error
        apart = (((own.points - np.array(at)) / self.lengths) ** 2).sum(-1)
        alike = self._near(apart, self.codes(words), own.marks)
        near = np.argsort(-alike, kind="stable")[:NEAR]
        surprise = [self._surprise(own.every[i]) for i in near]
        known = self._among(own.points[near], own.marks[near]) + self.scalars["noise"] * np.eye(len(near))
        shift, explained = alike[near] @ np.linalg.solve(known, np.stack([surprise, alike[near]], axis=1))
        amplitude = float(self.scalars["amplitude"])
        open_yet = max(amplitude, error**2) * (1.0 - float(explained) / amplitude) + float(self.scalars["noise"])
        return float(shift), min(error, math.sqrt(max(open_yet, LEAST_ERROR**2)))

    def _surprise(self, met: Meeting) -> float:
        if met.surprise is None:
            met.surprise = met.ratio - float(self._alike(met.point, met.marks) @ self.weights)
        return met.surprise

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
