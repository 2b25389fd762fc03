"""Estimates on the host: an upper bound on the number of tiles, and their time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from multigemm.planning.operands import Operands, Packed
from multigemm.problem.spec import ProblemSpec

Number = Any
"""An integer, or an array of the same quantity for many problems."""


def tiles_of(extent: int, block: int) -> int:
    """The number of blocks that cover an extent; 0 for a negative or zero extent."""
    return max(0, -(-extent // block))


def most_tiles(extent: int, groups: int, block: int) -> int:
    """An upper bound on the tiles of any split of `extent` into `groups` parts, known without the parts.

    Each part rounds up, so the bound is extent // block whole tiles plus one broken tile per group,
    and never more than one tile per element.
    """
    return int(min(extent, extent // block + groups))  # an extent may be a number of `Tokens`


def most_packed_tiles(
    jagged: Literal["m", "n", "k"] | None, groups: int, m: int, n: int, rows: int, columns: int
) -> int:
    """An upper bound on the tiles of a packed form, given its jagged extent T."""
    if jagged == "m":
        return most_tiles(m, groups, rows) * tiles_of(n, columns)
    if jagged == "n":
        return tiles_of(m, rows) * most_tiles(n, groups, columns)
    return groups * tiles_of(m, rows) * tiles_of(n, columns)


def list_tiles(shapes: Iterable[tuple[int, int]], rows: int, columns: int) -> int:
    """The number of tiles of a list, given the (m, n) of each result."""
    return sum(tiles_of(m, rows) * tiles_of(n, columns) for m, n in shapes)


def most_tiles_by_rows(ops: Operands, view: Packed, rows: int, columns: int) -> Callable[[int], int]:
    """A function from the rows of a problem to an upper bound on its tiles of rows x columns. It reads no size on the
    device.

    For a list the number is exact and does not depend on the argument. The function keeps no operand alive.
    """
    if ops.spec.form == "per_group":
        listed = list_tiles(((x.shape[0], x.shape[1]) for x in ops.out), rows, columns)
        return lambda _: listed
    jagged, groups, n = view.jagged, view.groups, view.n
    return lambda m: most_packed_tiles(jagged, groups, m, n, rows, columns)


def typical_extent(spec: ProblemSpec, direction: Literal["m", "n", "k"], mean: Number) -> Number:
    """The extent of an average group: `mean` if offsets cut it, the largest extent if those of a list differ."""
    extent: int | None = getattr(spec, direction)
    if extent is not None:
        return extent
    return mean if direction == spec.jagged else spec.largest


class TileCost(NamedTuple):
    """A tile shape, the relative cost of one product in it when all processors are busy, and its fixed cost: the number
    of elements of k that take as long as its start and end."""

    rows: int
    columns: int
    product: float = 1.0
    ends: float = 0.0


def longest_time(tile: TileCost, groups: Number, rows: Number, columns: Number, k: Number, processors: int) -> Number:
    """The time of the busiest processor if all groups are equal, in units of one product of a tile with cost 1.

    Padding counts: a tile that extends beyond its group takes as long as a full one. Numbers may be arrays.
    """
    tiles = groups * -(-rows // tile.rows) * -(-columns // tile.columns)
    return -(-tiles // processors) * tile.rows * tile.columns * (k * tile.product + tile.ends)
