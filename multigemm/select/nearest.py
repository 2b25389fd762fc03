"""What measured classes of problems say about a class that nobody measured.

Times of another shape mean nothing by themselves, but how the backends stand to each other changes
slowly from shape to shape. So each backend's log time is modelled as

    y[sample, backend] = offset[sample] + level[backend] + g[backend](place),

where `offset`, what a sample costs any backend, is unknown and irrelevant, and g is a smooth random
function: two of its values are the more alike, exp(-distance), the nearer their places are. The best
linear guess of g at a new place (kriging) follows from the samples around it. Distances count octaves
of the extents and of the number of the result's tiles; what changes which kernel runs, such as the
alignment or the memory order of an operand, or that the backend itself chose another config there,
counts as some octaves. A backend that says which tiles its config makes is judged by them, its values
being alike where the tiles are, and how many rounds of them the processors need, and how much of a GPU the
last round leaves idle: that goes up and down within an octave, where no neighbour tells of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

LIKE_ROWS = ("jagged_m", "masked", "batched", "per_group")
HALF = ("float16", "bfloat16")
WORDS = 11
NEAREST = 80
LENGTHS = (40.0, 52.0, 12.0, 160.0, 19.0)
"""Octaves of rows per group, of the two other extents, of the groups and of the result's tiles, after which values are
unlike (a factor e). They, and the numbers below, were fitted to hundreds of measured shapes: by their likelihood, and
by what is lost where each shape is left out in turn."""
OWN_LENGTHS = (7.5, 18.0, 8.0, 12.0)
"""The same for a backend's own tiles: of processors idle in the last round, of rounds, of a tile's height and width."""
MOST_ROUNDS = 3.0
"""Octaves of rounds; more are like as many."""
TILE = 128.0
"""Most kernels cut the result into tiles of about this height and width; groups of fewer rows waste a part of them."""
OTHER_FORM, OTHER_JAGGED, OTHER_ALIGNMENT, OTHER_SIZES = 0.02, 0.4, 0.2, 0.55
OTHER_ORDER, OTHER_SHARING, OTHER_HALF, OTHER_DETAIL = 0.045, 0.3, 0.02, 0.05
OTHER_UNKNOWN, OTHER_CONFIG, TYPICAL = 0.1, 2.0, 9.0
"""What is unknown counts as this many octaves, and as unlike what is known: a distance has to remain one between
points of a space, or the guess has no solution."""
NOISE = 0.001
"""Of a measurement, as a part of the variance of g."""
ANY_OFFSET = 1e4
"""The variance of what is not known beforehand: the offsets and levels."""
PROCESSORS = 132
"""Of the GPUs that tables ship for, and that backends' estimates were fitted on; others round to rounds elsewhere, but
hardly by more."""
TYPICAL_ERROR = 0.2
"""By how much (a logarithm) what is expected of two backends errs where nothing tells it better."""
WITHIN_BUCKET = 0.72
"""Where in its bucket, a power of two, a number of rows lies on average."""


Footprint = tuple[int, ...]
"""Rows and columns of a result's tile, and how many processors work on one; nothing where a backend does not say."""


@dataclass(frozen=True, slots=True)
class Operand:
    """The part of a class that one operand's layout makes."""

    dtype: str
    order: str
    align: int
    shared: bool


@dataclass(frozen=True)
class Place:
    """A class of problems as a point: `extents` are rows (or the jagged extent) per group, the two others, groups."""

    form: str
    extents: tuple[float | None, ...]
    operands: tuple[Operand, ...]
    precision: str
    sizes: str

    @cached_property
    def family(self) -> tuple[object, ...]:
        """Only classes of one family say anything about each other."""
        return (self.precision, *("half" if x.dtype in HALF else x.dtype for x in self.operands))

    @cached_property
    def octaves(self) -> tuple[float, ...]:
        """The extents and the tiles of the result as logarithms; NaN for unknown ones."""
        every = (*self.extents, self.tiles(TILE, TILE))
        return tuple(math.nan if x is None else math.log2(max(x, 0.5)) for x in every)

    def tiles(self, high: float, wide: float) -> float | None:
        """About how many tiles of this height and width the results have."""
        along, one, two, groups = self.extents
        rows, columns = (one, two) if self.form == "jagged_k" else (along, one)
        if rows is None or columns is None or groups is None:
            return None
        return groups * max(1.0, math.ceil(rows / high)) * max(1.0, math.ceil(columns / wide))

    def own(self, footprint: Footprint) -> tuple[float, ...]:
        """What a backend's tiles make of this place, in octaves: by how much whole rounds on all processors are more
        than the tiles, rounds, height and width of a tile; zeros where unknown."""
        tiles = self.tiles(*footprint[:2]) if len(footprint) == 3 else None
        if not tiles:
            return (0.0,) * len(OWN_LENGTHS)
        high, wide, processors = footprint
        rounds = tiles * processors / PROCESSORS
        idle = math.log2(math.ceil(rounds) / rounds)
        return idle, min(math.log2(rounds), MOST_ROUNDS), math.log2(high), math.log2(wide)

    @cached_property
    def marks(self) -> tuple[object, ...]:
        """What is the same or not, in the order of `MARKS`."""
        unknown = tuple(map(math.isnan, self.octaves))
        a, b, out = self.operands
        orders = a.order, b.order, out.order
        loads = tuple(x.align < 16 for x in self.operands)
        jagged = "rows" if self.form in LIKE_ROWS else self.form
        return (self.form, jagged, self.sizes, a.dtype, b.shared, unknown, *orders, *loads)


MARKS = np.array(
    [OTHER_FORM, OTHER_JAGGED, OTHER_SIZES, OTHER_HALF, OTHER_SHARING, OTHER_UNKNOWN]
    + 3 * [OTHER_ORDER]
    + 3 * [OTHER_ALIGNMENT]
)


@dataclass(frozen=True, slots=True)
class Sample:
    """A class that was measured, or is asked about: microseconds, config and footprint by backend; how large it was.

    `device` is where it was measured; that is only told, for it changes the offset and hardly the rest.
    """

    key: str
    us: Mapping[str, float] = field(default_factory=dict)
    ran: Mapping[str, str] = field(default_factory=dict)
    groups: int = 0
    flops: float = 0.0
    device: str = ""
    footprints: Mapping[str, Footprint] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Estimate:
    """How many times slower than the fastest a backend is expected to be, why, and by how much (a logarithm) that
    typically errs."""

    backend: str
    slowness: float
    source: str
    error: float = TYPICAL_ERROR


@lru_cache(maxsize=16384)
def place_of(key: str, groups: int = 0, flops: float = 0.0) -> Place | None:
    """The point of a class; None for a text that names none. Groups and operations, where known, tell more than
    the buckets of the text."""
    words = key.split()
    if len(words) != WORDS:
        return None
    form, precision, sizes = words[0], words[9], words[10]
    count, m, n, k, total = (_number(word) for word in words[1:6])
    count = float(groups) if groups else count
    along, one, two = {"jagged_n": (n, m, k), "jagged_k": (k, m, n)}.get(form, (m, n, k))
    if along is None and flops and one and two:
        along = flops / (2.0 * one * two * max(count or 1.0, 1.0))
    if along is None and total is not None:
        along = WITHIN_BUCKET * total / max(count or 1.0, 1.0)
    return Place(form, (along, one, two, count), tuple(map(_operand, words[6:9])), precision, sizes)


def _number(word: str) -> float | None:
    return None if word[1:] == "*" else float(word[1:])


def _operand(word: str) -> Operand:
    dtype, layout, *more = word.split("/")
    order = layout.rstrip("0123456789")
    return Operand(dtype, order, int(layout[len(order) :] or 16), bool(more))


class Space:
    """Samples of one family and the class that is asked about (the last), with their distances."""

    def __init__(self, samples: Sequence[Sample], places: Sequence[Place]) -> None:
        self.samples, self._places = samples, places
        self._extents = np.nan_to_num(np.array([p.octaves for p in places]), nan=TYPICAL) / np.array(LENGTHS)
        codes: dict[object, int] = {}
        self._marks = np.array([[codes.setdefault(mark, len(codes)) for mark in p.marks] for p in places])

    def distances(self, rows: Sequence[int] | Array, columns: Sequence[int] | Array) -> tuple[Array, Array]:
        """Between the places of two sets of samples, whatever the backend: by extents, squared, and by marks."""
        apart = self._extents[rows][:, None] - self._extents[columns][None]
        other = self._marks[rows][:, None] != self._marks[columns][None]
        return (apart**2).sum(-1), np.einsum("ijk,k->ij", other, MARKS)

    def alike(self, backend: str, chosen: Sequence[int] | Array) -> Array:
        """How alike a backend's values at the chosen samples are: 1 for the same."""
        apart, other = self.distances(chosen, chosen)
        ran = np.array([self.samples[i].ran.get(backend, "") for i in chosen])
        footprints = [self.samples[i].footprints.get(backend, ()) for i in chosen]
        own = np.array([self._places[i].own(f) for i, f in zip(chosen, footprints, strict=True)]) / np.array(
            OWN_LENGTHS
        )
        known = np.array([len(f) > 0 for f in footprints])
        alone = known[:, None] != known[None]  # as unlike as two unknown configs, or these would be no distances
        differs = np.where(known[:, None] & known[None], OTHER_DETAIL, OTHER_CONFIG) * (
            alone | (ran[:, None] != ran[None])
        )
        far = np.sqrt(apart + ((own[:, None] - own[None]) ** 2).sum(-1)) + other + differs
        found: Array = np.exp(-far)
        return found


def estimates(want: Sample, known: Sequence[Sample]) -> list[Estimate]:
    """What the samples `known` let one expect of the class `want`."""
    here = place_of(want.key, want.groups, want.flops)
    if here is None:
        return []
    placed = [(s, p) for s in known if len(s.us) > 1 and (p := place_of(s.key, s.groups, s.flops)) is not None]
    placed = [(s, p) for s, p in placed if p.family == here.family]
    if not placed:
        return []
    space = Space([*(s for s, _ in placed), want], [*(p for _, p in placed), here])
    apart, other = (d[0] for d in space.distances([len(placed)], range(len(placed))))
    near = np.argsort(np.sqrt(apart) + other, kind="stable")[:NEAREST]
    first = placed[near[0]][0]
    source = f"from {len(near)} measured classes, the nearest {first.key}{first.device and f' on {first.device}'}"
    levels = _kriging(space, [*near, len(placed)])
    best = min(levels.values())
    return [Estimate(name, math.exp(level - best), source) for name, level in levels.items()]


def _kriging(space: Space, chosen: Sequence[int]) -> dict[str, float]:
    """The expected log time of each backend at the last of the chosen samples, but for what all have in common."""
    last = len(chosen) - 1
    names = list(dict.fromkeys(name for i in chosen[:last] for name in space.samples[i].us))
    points = [(at, name) for at, i in enumerate(chosen[:last]) for name in names if name in space.samples[i].us]
    place = np.array([at for at, _ in points])
    kind = np.array([names.index(name) for _, name in points])
    y = np.log([space.samples[chosen[at]].us[name] for at, name in points])
    y = y - np.array([y[place == at].mean() for at in range(last)])[place]
    alike = [space.alike(name, chosen) for name in names]
    same = kind[:, None] == kind[None]
    stacked = np.stack(alike)
    covariance = same * (stacked[kind[:, None], place[:, None], place[None]] + ANY_OFFSET)
    covariance = covariance + ANY_OFFSET * (place[:, None] == place[None]) + NOISE * np.eye(len(points))
    weights = solved(covariance, y)
    found = {}
    for index, name in enumerate(names):
        toward = (kind == index) * (alike[index][last][place] + ANY_OFFSET)
        found[name] = float((toward * weights).sum())
    return found


def solved(matrix: Array, right: Array) -> Array:
    """x with matrix x = right, for a positive definite matrix: Cholesky's factors, one column at a time.

    Not by LAPACK: its threads wait for each other at every step, and on a busy host of many cores the 320 unknowns
    took up to 2 s, in the first call of whoever asked for "auto". A sum by einsum runs in this thread: 12 ms.
    """
    lower = np.tril(matrix)
    for j in range(len(right)):
        lower[j:, j] -= np.einsum("ik,k->i", lower[j:, :j], lower[j, :j])
        lower[j:, j] /= math.sqrt(lower[j, j])
    x = np.array(right, dtype=np.float64)
    for j in range(len(x)):
        x[j] = (x[j] - (lower[j, :j] * x[:j]).sum()) / lower[j, j]
    for j in reversed(range(len(x))):
        x[j] = (x[j] - (lower[j + 1 :, j] * x[j + 1 :]).sum()) / lower[j, j]
    return x
