"""What a problem looks like to a model of times: its shape, and what kernels make of it, as coordinates.

Everything that is smooth in a time lies in these numbers: octaves of the extents, of the work, of the bytes, of
how the lines of operands are aligned; and what a backend's own tiles make of them: how many rounds the processors
need, how much of the last one is idle, how much of the tiles is empty.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from multigemm.planning.operands import Operands
from multigemm.select.measured import ON_DEVICE
from multigemm.select.nearest import PROCESSORS, Footprint, place_of

LONGEST_LINE = 256
"""Bytes; lines that begin at multiples of it are as well aligned as any."""
BLOCK = 64
"""Elements of K that kernels take at once; what is missing of the last block is wasted."""
USUAL_TILES = (128, 256, 1)
MOST = 4.0
"""Octaves of rounds or of waste; more are like as many."""
DECIDED = "bound: "
"""Before what a backend that decides by the sizes tells of its decision: it is then modelled for each by itself."""
UNALIGNED, ALIGNED = ", unaligned", 16
ELEMENT = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8, "int8": 1}
OF_PLACE = (3.0, 2.0, 2.0, 3.0, 4.0, 4.0, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5, 0.5, 0.5, 0.5, 1.0, 0.5)
ON_H100 = 14
"""Which coordinate tells the two GPUs apart that were measured."""
OF_TILES = (1.5, 0.3, 1.0, 1.0, 1.0, 1.0)
SCALES = OF_PLACE + 2 * OF_TILES
"""Octaves, or parts of them, that count as one step of each coordinate before any length is fitted."""


class Shape(NamedTuple):
    """How large a problem is: groups, and the means of M, N and K over them; where the host knows the sizes, how many
    times the mean the largest group is, and the share of groups that are not empty."""

    groups: int
    m: float
    n: float
    k: float
    peak: float = 1.0
    filled: float = 1.0

    @property
    def flops(self) -> float:
        return 2.0 * self.groups * self.m * self.n * self.k


def shape_of(ops: Operands) -> Shape:
    """The shape of a problem as far as the host knows it."""
    spec = ops.spec
    if isinstance(ops.a, list):
        return summary([_extents(a, b) for a, b in zip(ops.a, ops.b, strict=True)])
    m, n, k = map(float, _extents(ops.a, ops.b))
    if spec.jagged is None or not spec.groups:
        return Shape(spec.groups, m, n, k)
    along = "mnk".index(spec.jagged)
    if ops.host_offsets is None:
        mean = (m, n, k)[along] / spec.groups
        return Shape(spec.groups, *(mean if axis == along else x for axis, x in enumerate((m, n, k))))
    extents = np.tile((m, n, k), (spec.groups, 1))
    extents[:, along] = np.maximum(np.diff(ops.host_offsets), 0)
    return summary(extents)


def shape_in(key: str, groups: int, flops: float) -> Shape | None:
    """The shape that a class and its counts tell of; None where they do not."""
    place = place_of(key, groups, flops)
    if place is None or any(extent is None for extent in place.extents):
        return None
    along, one, two, count = (extent or 0.0 for extent in place.extents)
    m, n, k = {"jagged_n": (one, along, two), "jagged_k": (one, two, along)}.get(place.form, (along, one, two))
    return Shape(int(count), m, n, k)


def summary(extents: Any) -> Shape:
    """The shape of groups of these (M, N, K)."""
    each = np.asarray(extents, dtype=float).reshape(-1, 3)
    if not len(each):
        return Shape(0, 0.0, 0.0, 0.0)
    work = each.prod(axis=1)
    mean = work.mean()
    peak, filled = (work.max() / mean, (work > 0).mean()) if mean else (1.0, 1.0)
    m, n, k = each.mean(axis=0).tolist()
    return Shape(len(each), m, n, k, float(peak), float(filled))


def _extents(a: Any, b: Any) -> tuple[int, int, int]:
    return a.shape[-2], b.shape[-1], a.shape[-1]


def even(shape: Shape) -> Shape:
    """The same without what only the host may know."""
    return shape._replace(peak=1.0, filled=1.0)


def labels(backend: str, ran: str, key: str) -> list[str]:
    """What models call a backend: one that decides by the sizes, by what it decided; and where the host knows them, by
    that it did, for few shapes may have met with one decision."""
    decided = ran.partition(DECIDED)[2]
    if not decided:
        return [backend]
    return [f"{backend}: {decided}"] + ([] if key.endswith(ON_DEVICE) else [f"{backend}: by sizes"])


def knows_sizes(key: str, names: Sequence[str]) -> bool:
    """Whether how uneven groups are counts between two backends: where the host knows it, of packed forms to one that
    decides by it."""
    if key.endswith(ON_DEVICE):
        return False
    return not key.startswith("jagged") or any(": " in name for name in names)


def families_of(key: str) -> list[str]:
    """Only classes of one family say anything about each other: of 16-bit floats, else of a dtype and its precision.
    In what dtype results are written changes less than that. Operands that are not aligned make a family of their own,
    for they are multiplied in other ways; where nothing is known of it, the aligned ones have to do."""
    place = place_of(key)
    if place is None:
        return []
    usual = f"{place.precision} {place.family[1]}"
    return [f"{usual}{UNALIGNED}", usual] if any(x.align < ALIGNED for x in place.operands) else [usual]


def coordinates(key: str, shape: Shape, device: str) -> list[float]:
    """What any kernel meets at a place."""
    place = place_of(key)
    assert place is not None
    groups, m, n, k = shape.groups, max(shape.m, 0.5), max(shape.n, 0.5), max(shape.k, 0.5)
    a, b, out = place.operands
    size = ELEMENT[a.dtype]
    weights = 1 if b.shared else groups
    traffic = size * (groups * m * k + weights * n * k + groups * m * n)
    lines = (k if a.order == "row" else m), (n if b.order == "row" else k), (n if out.order == "row" else m)
    extents = [math.log2(x) for x in (m, n, k, max(groups, 1), 2.0 * max(groups, 1) * m * n * k, max(traffic, 1.0))]
    flags = a.order == "col", b.order == "col", b.shared, a.dtype == "float16", "H200" not in device
    tail = math.log2(math.ceil(k / BLOCK) * BLOCK / k)
    uneven = math.log2(shape.peak), math.log2(shape.filled)
    return [*extents, *(aligned(line, size) for line in lines), tail, *map(float, flags), *uneven]


def aligned(extent: float, size: int) -> float:
    """Octaves of bytes by whose multiples lines of so many elements follow each other."""
    line = max(int(extent), 1) * size
    return math.log2(min(line & -line, LONGEST_LINE))


def of_tiles(shape: Shape, footprint: Footprint) -> list[float]:
    """What a backend's tiles make of a place: rounds on all processors, how much of the last is idle, how much of the
    tiles is empty, a tile's height and width, processors that work on one. Who does not say has the usual tiles."""
    if not shape.groups:
        return [0.0] * len(OF_TILES)
    high, wide, shared = footprint or USUAL_TILES
    m, n = max(shape.m, 0.5), max(shape.n, 0.5)
    tiles = math.ceil(m / high) * math.ceil(n / wide)
    rounds = shape.groups * tiles * shared / PROCESSORS
    idle, empty = math.log2(math.ceil(rounds) / rounds), math.log2(tiles * high * wide / (m * n))
    return [min(math.log2(rounds), MOST), idle, min(empty, MOST), *map(math.log2, (high, wide, shared))]


def point(key: str, shape: Shape, device: str, one: Footprint, two: Footprint) -> list[float]:
    """A place as two backends meet it, in steps."""
    every = [*coordinates(key, shape, device), *of_tiles(shape, one), *of_tiles(shape, two)]
    return [x / scale for x, scale in zip(every, SCALES, strict=True)]
