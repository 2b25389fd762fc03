"""What measured classes of problems say about a class that nobody measured.

Times of another shape mean nothing by themselves, but how the backends stand to each other changes
slowly from shape to shape. So the expectation for a backend is the weighted geometric mean of its
slowness (its time over that of the fastest there) in the nearest classes. Distances count octaves of
the extents; what changes which kernel runs, such as the alignment or the memory order of an operand,
counts as some octaves.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

LIKE_ROWS = ("jagged_m", "masked", "batched", "per_group")
HALF = ("float16", "bfloat16")
WORDS = 11
NEAREST = 8
OTHER_FORM, OTHER_ALIGNMENT, OTHER_SIZES, OTHER_ORDER, OTHER_SHARING = 3.0, 3.0, 2.0, 1.0, 1.0
OTHER_HALF, UNKNOWN_EXTENT = 0.25, 1.0
OCTAVES = (1.0, 0.5, 0.5, 0.5)


@dataclass(frozen=True, slots=True)
class Operand:
    """The part of a class that one operand's layout makes."""

    dtype: str
    order: str
    align: int
    shared: bool


@dataclass(frozen=True, slots=True)
class Place:
    """A class of problems as a point: `extents` are rows (or the jagged extent) per group, the two others, groups."""

    form: str
    extents: tuple[float | None, ...]
    operands: tuple[Operand, ...]
    precision: str
    sizes: str


@dataclass(frozen=True, slots=True)
class Estimate:
    """How many times slower than the fastest a backend is expected to be, and why."""

    backend: str
    slowness: float
    source: str


@lru_cache(maxsize=4096)
def place_of(key: str) -> Place | None:
    """The point of a class; None for a text that names none."""
    words = key.split()
    if len(words) != WORDS:
        return None
    form, precision, sizes = words[0], words[9], words[10]
    groups, m, n, k, total = (_number(word) for word in words[1:6])
    each = None if total is None else total / max(groups or 1.0, 1.0)
    along = {"jagged_n": n, "jagged_k": k}.get(form, m)
    others = {"jagged_n": (m, k), "jagged_k": (m, n)}.get(form, (n, k))
    return Place(form, (along or each, *others, groups), tuple(map(_operand, words[6:9])), precision, sizes)


def _number(word: str) -> float | None:
    return None if word[1:] == "*" else float(word[1:])


def _operand(word: str) -> Operand:
    dtype, layout, *more = word.split("/")
    order = layout.rstrip("0123456789")
    return Operand(dtype, order, int(layout[len(order) :] or 16), bool(more))


def distance(x: Place, y: Place) -> float | None:
    """How far y is from x in octaves; None where one says nothing about the other."""
    if x.precision != y.precision or not all(map(_same_kind, x.operands, y.operands)):
        return None
    if x.form != y.form and not (x.form in LIKE_ROWS and y.form in LIKE_ROWS):
        return None
    far = OTHER_FORM * (x.form != y.form) + OTHER_SIZES * (x.sizes != y.sizes)
    far += sum(map(_other_layout, x.operands, y.operands))
    return far + sum(w * _octaves(p, q) for w, p, q in zip(OCTAVES, x.extents, y.extents, strict=True))


def _same_kind(x: Operand, y: Operand) -> bool:
    return x.dtype == y.dtype or (x.dtype in HALF and y.dtype in HALF)


def _other_layout(x: Operand, y: Operand) -> float:
    return (
        OTHER_HALF * (x.dtype != y.dtype)
        + OTHER_ORDER * (x.order != y.order)
        + OTHER_ALIGNMENT * ((x.align < 16) != (y.align < 16))
        + OTHER_SHARING * (x.shared != y.shared)
    )


def _octaves(p: float | None, q: float | None) -> float:
    if p is None or q is None:
        return 0.0 if p is q else UNKNOWN_EXTENT
    return abs(math.log2(max(p, 0.5)) - math.log2(max(q, 0.5)))


def estimates(want: str, known: Mapping[str, Mapping[str, float]]) -> list[Estimate]:
    """What `known`, microseconds by class and backend, lets one expect of the class `want`."""
    here = place_of(want)
    if here is None:
        return []
    places = [(key, place) for key, times in known.items() if len(times) > 1 and (place := place_of(key)) is not None]
    found = [(far, key) for key, place in places if (far := distance(here, place)) is not None]
    near = sorted(found)[:NEAREST]
    if not near:
        return []
    source = f"from {len(near)} measured classes, the nearest {near[0][1]}"
    names = dict.fromkeys(name for _, key in near for name in known[key])
    return [Estimate(name, _expected(name, near, known), source) for name in names]


def _expected(name: str, near: Sequence[tuple[float, str]], known: Mapping[str, Mapping[str, float]]) -> float:
    """The weighted geometric mean of a backend's slowness where it was measured."""
    logs = [
        (1.0 / (0.25 + far * far), math.log(known[key][name] / min(known[key].values())))
        for far, key in near
        if name in known[key]
    ]
    return math.exp(sum(w * x for w, x in logs) / sum(w for w, _ in logs))
