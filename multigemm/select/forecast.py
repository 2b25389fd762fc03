"""How the backends stand to each other at a shape that nobody measured: what the shapes around it say.

For each two backends a model (`select.pair`) tells the ratio of their times that is to be expected at a place.
A place has what any kernel meets (octaves of the extents, of the work, of the bytes, of how the lines of the
operands are aligned) and what these two would make of it: their tiles, how many rounds of them the processors
need and how much of the last round is idle. Nothing in between is written by hand: the lengths, amplitudes and
weights of the measurements are fitted to thousands of them by `multigemm.bench.fit`, which also leaves each
measured shape out in turn; by how much those around it then err is what a forecast is held to be uncertain by.
What a user measured near by corrects it, and makes it more certain.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from multigemm.select.nearest import Estimate, Footprint
from multigemm.select.pair import Meeting, Own, Pair, read
from multigemm.select.shape import Shape, even, families_of, knows_sizes, labels, point

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


class Lately:
    """What a user measured on one device: classes, with what each backend took."""

    def __init__(self, classes: Iterable[tuple[Asked, Mapping[str, float]]] = ()) -> None:
        self.classes = {(asked.key, asked.shape.flops): (asked, us) for asked, us in classes}
        self._rows: dict[tuple[str, str, str], dict[tuple[str, float], Meeting | None]] = {}
        self._own: dict[tuple[str, str, str], Own] = {}
        self._lock = threading.Lock()

    def add(self, asked: Asked, us: Mapping[str, float]) -> None:
        """One more class, or what it takes now."""
        place = asked.key, asked.shape.flops
        with self._lock:
            self.classes[place] = asked, us
            self._own.clear()
            for rows in self._rows.values():
                rows.pop(place, None)

    def of(self, model: Pair) -> Own:
        """All in which the two backends of a model met, as it sees them."""
        with self._lock:
            if model.names not in self._own:
                rows = self._rows.setdefault(model.names, {})
                for place in sorted(self.classes.keys() - rows.keys()):  # in one order, whatever the process
                    rows[place] = _row(model, *self.classes[place])
                self._own[model.names] = Own([row for row in rows.values() if row is not None])
            return self._own[model.names]


def _row(model: Pair, asked: Asked, us: Mapping[str, float]) -> Meeting | None:
    """One class as a model sees it; None where it is of another family, or the two backends did not meet."""
    called = model.one, model.two
    if model.family not in families_of(asked.key) or not set(called) <= _named(asked).keys():
        return None
    one, two, at, words = _meeting_point(asked, called)
    return Meeting(np.array(at), model.codes(words), math.log(us[one] / us[two]))


@dataclass(frozen=True, slots=True)
class Known:
    """Everything that was fitted, for GPUs of one generation."""

    models: Mapping[tuple[str, str, str], Pair]
    capability: str = ""

    def estimates(self, asked: Asked, lately: Lately | None = None) -> list[Estimate]:
        """How many times slower than the fastest each backend is to be expected, of those that it knows at this place;
        empty if it knows fewer than two. `lately` is what the user measured on this device."""
        lately = Lately() if lately is None else lately
        told = next(filter(None, (self._ratios(asked, lately, family) for family in families_of(asked.key))), [])
        if not told:
            return []
        levels = levels_of([(one, two, mean, error) for one, two, _, mean, error, _ in told])
        best, second, *_ = sorted(levels, key=lambda name: levels[name])
        found = []
        for name, level in levels.items():
            rivals = {name, second if name == best else best}
            met = [t for t in told if {t[0], t[1]} == rivals] or [t for t in told if name in t[:2]]
            _, _, model, _, error, nearest = min(met, key=lambda t: t[4])
            source = f"forecast from {len(model.weights)} measured ratios, give or take {100 * error:.0f} %, "
            source += f"the nearest of {model.cases[nearest]}"
            found.append(Estimate(name, math.exp(level - levels[best]), source, error))
        return found

    def _ratios(self, asked: Asked, lately: Lately, family: str) -> list[tuple[str, str, Pair, float, float, int]]:
        """What the models of one family say: two backends, the model, the ratio, its error, the nearest point."""
        names, told = _named(asked), []
        for (its, first, second), model in self.models.items():
            if its == family and first in names and second in names:
                one, two, at, words = _meeting_point(asked, (first, second))
                mean, error, nearest = model.expected(at, words)
                shift, error = model.correction(at, words, lately.of(model), error)
                told.append((one, two, model, mean + shift, error, nearest))
        return told


def _named(asked: Asked) -> dict[str, str]:
    """The backends by what models call them."""
    return {label: name for name, ran in asked.ran.items() for label in labels(name, ran, asked.key)}


def _meeting_point(asked: Asked, called: tuple[str, str]) -> tuple[str, str, list[float], tuple[str, str, str]]:
    """Two backends, and the point where they meet, with its marks."""
    one, two = (_named(asked)[name] for name in called)
    shape = asked.shape if knows_sizes(asked.key, called) else even(asked.shape)
    at = point(asked.key, shape, asked.device, asked.footprints.get(one, ()), asked.footprints.get(two, ()))
    return one, two, at, (asked.ran[one], asked.ran[two], asked.key.split()[0])


def levels_of(told: Sequence[tuple[str, str, float, float]]) -> dict[str, float]:
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


@lru_cache(maxsize=1)
def shipped() -> Known:
    """What ships with the package."""
    path = Path(__file__).parent / "tuned" / FILE
    models = read(path) if path.exists() else []
    return Known({p.names: p for p in models}, CAPABILITY)
