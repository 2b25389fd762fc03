"""Workloads that nobody picked: what the order of backends goes by, and what `auto` is put to the test with.

`spread` covers the space evenly, and every form, layout and dtype: what the static order of backends goes by;
`random` is drawn by a seed and left out of every tuning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from multigemm.bench.workloads import DTYPES, Workload

UNTUNED = "random"
UNEVEN_AND_EVEN = ("balanced", "zipf", "empty", "multinomial", "uniform")
OF_EVERY_KIND, OF_USUAL, OF_FORMS, SPREAD = 800, 1600, 2800, 3200
"""Up to these, shapes of every kind; packed rows of 16-bit floats; every kind again; extents without a factor."""
SEED = 20
GROUPS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 160, 256)
OTHERS = (
    ("fp32", "int8"),
    ("tf32", "shared"),
    ("fp16", "fp64"),
    ("int8", "fp32"),
    ("shared", "tf32"),
    ("fp64", "fp16"),
)
KINDS = " ".join("m mt k m list mt batched m masked mt m {} mt odd m n mt {}".format(*pair) for pair in OTHERS).split()
"""What `spread` deals out in turn: packed rows (t: with transposed weights), the other forms, the other dtypes."""
USUAL = ("m", "mt")
FORMS = "k list masked mt batched m n k list masked fp16 mt m fp32 tf32 fp64 int8".split()  # noqa: SIM905
SECTIONS = ((OF_EVERY_KIND, KINDS), (OF_USUAL, USUAL), (OF_FORMS, FORMS), (SPREAD, ("odd",)))
ANY_KIND = "m mt k m list mt m batched mt m fp16 mt masked m k mt list m mt n".split()  # noqa: SIM905
LONG = {"fp32": 1e10, "fp64": 1e10, "int8": 1e10, "tf32": 3e10, "n": 2e10, "odd": 5e10}
"""Products at most, where they are fewer than usual: a tenth of a millisecond or so."""


@dataclass(frozen=True, slots=True)
class Room:
    """Bounds of what is drawn: the least N and K in octaves, products and elements at most."""

    least: float
    products: float
    elements: int


ROOM = Room(6.5, 1.5e11, 2**28)
MORE_ROOM = Room(7.5, 6e11, 2**30)


def spread_out() -> list[Workload]:
    """Every kind of problem over many octaves of its extents, evenly: Halton's sequence, one base per extent."""
    cases: list[Workload] = []
    index = 0
    while len(cases) < SPREAD:
        index += 1
        kinds = next(its for end, its in SECTIONS if len(cases) < end)
        kind = kinds[len(cases) % len(kinds)]
        place = [_radical_inverse(index, base) for base in (2, 3, 5, 7)]
        room = MORE_ROOM if kinds is USUAL else ROOM
        cases += _placed(f"spread_{len(cases):03d}", "spread", kind, place, index, room)
    return cases


def _radical_inverse(index: int, base: int) -> float:
    """The digits of `index` behind the point, in reverse order."""
    value, weight = 0.0, 1.0 / base
    while index:
        index, digit = divmod(index, base)
        value, weight = value + digit * weight, weight / base
    return value


def _placed(name: str, suite: str, kind: str, place: Sequence[float], index: int, room: Room = ROOM) -> list[Workload]:
    """One workload of a kind at a place in the unit cube: rows per group, N, K, groups; none if it is too long.

    Extents are multiples of 64 as models have them, some of 8, and for the kind "odd" of nothing.
    """
    step = 1 if kind == "odd" else 8 if index % 4 == 3 else 64
    groups = GROUPS[int(place[3] * len(GROUPS))]
    rows = max(1, int(2.0 ** (place[0] * (8 if kind == "n" else 11.5))))
    n, k = (max(step, int(step * round(2.0 ** (room.least + (13 - room.least) * p) / step))) for p in place[1:3])
    if groups * rows * n * k > LONG.get(kind, room.products) or groups * (n * k + rows * (n + k)) > room.elements:
        return []
    spread = UNEVEN_AND_EVEN[index % len(UNEVEN_AND_EVEN)]
    case = Workload(name, suite, groups=groups, n=n, k=k, total=groups * rows, distribution=spread, seed=index)
    case = replace(case, trans_b=kind.endswith("t") or (kind not in ("m", "k") and index % 2 == 0))
    if kind in DTYPES:
        return [replace(case, dtype=kind)]
    if kind == "list":
        unequal = [(max(1, rows >> (g % 3)) if index % 3 == 1 else rows, n, k) for g in range(min(groups, 64))]
        return [
            replace(case, form="per_group", groups=len(unequal), products=tuple(unequal), distribution="list", total=0)
        ]
    if kind == "k":
        return [replace(case, form="jagged_k", m=n, n=k, k=0, trans_a=True)] if groups * n * k < 2**28 else []
    if kind == "n":
        return [replace(case, form="jagged_n", m=n, n=0)]
    if kind == "masked":
        return [replace(case, form="masked", m=rows, total=max(1, groups * rows // 2), cap=rows)]
    if kind == "batched":
        return [replace(case, form="batched", m=rows, total=0, distribution="balanced")]
    return [replace(case, shared_b=kind == "shared")]


def random(seed: int = SEED) -> list[Workload]:
    """Of the usual seed: packed rows, G, T, N and K over three octaves each. Of any other: every kind of problem."""
    draw = np.random.default_rng(seed)
    cases: list[Workload] = []
    while len(cases) < 20:
        index = len(cases)
        name = f"random_{index:02d}" if seed == SEED else f"random_{seed}_{index:02d}"
        if seed != SEED:
            cases += _placed(
                name, UNTUNED, ANY_KIND[index], draw.uniform(0, 1, 4).tolist(), int(draw.integers(1, 10**6))
            )
            continue
        step = 64 if index % 4 else 8
        groups = int(draw.choice([2, 6, 12, 24, 48, 96, 160]))
        n, k = (int(step * round(2.0 ** draw.uniform(8, 12) / step)) for _ in range(2))
        total = int(groups * 2.0 ** draw.uniform(2, 9))
        kind = str(draw.choice(["balanced", "zipf", "empty", "multinomial"]))
        case = Workload(name, UNTUNED, groups=groups, n=n, k=k, total=total, distribution=kind)
        cases.append(replace(case, trans_b=bool(index % 3 == 2)))
    return cases
