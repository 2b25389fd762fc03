"""Where the entries of scales and zero points lie: the numbers by which kernels of all backends find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor

from multigemm.planning.operands import Operands, strides_of
from multigemm.problem.scales import covered_in_list
from multigemm.problem.spec import ScaleSpec

SCALES = ("scale_a", "scale_b", "zero_b")
"""The keywords, in the order in which all kernels take them."""
WHOLE_K = 40
"""The shift of a k to its entry where one entry covers all of K."""


class ScaleGrid(NamedTuple):
    """Address, elements from group to group, from line (row of a, column of b) to line and along K, and two shifts.

    A line's entry is the line shifted down by `line_shift`, times `line`; that of a k likewise.
    """

    ptr: int
    group: int
    line: int
    deep: int
    line_shift: int
    k_shift: int


NO_GRID = ScaleGrid(0, 0, 0, 0, 0, WHOLE_K)


def grid_of(name: str, grid: Tensor | None, covers: ScaleSpec | None, listed: bool = False) -> ScaleGrid:
    """A grid [groups or 1, rows, K] (of b: [.., K, columns]), or one of a list's matrices, whose address no launch
    follows; `NO_GRID` for an absent one. `name` is its keyword."""
    if grid is None or covers is None:
        return NO_GRID
    at, group, row, column = strides_of(grid, None if listed else name)
    line, deep = (row, column) if name == "scale_a" else (column, row)
    k_shift = covers.k.bit_length() - 1 if covers.k else WHOLE_K
    return ScaleGrid(at, group, line, deep, max(covers.rows, 1).bit_length() - 1, k_shift)


def packed_grids(ops: Operands) -> list[ScaleGrid]:
    """Those of `SCALES` of a packed form."""
    a, b, given = ops.spec.a.scale, ops.spec.b.scale, ops
    grids: Any = (("scale_a", given.scale_a, a), ("scale_b", given.scale_b, b), ("zero_b", given.zero_b, b))
    return [grid_of(*grid) for grid in grids]


def listed_grids(ops: Operands) -> Iterator[list[tuple[ScaleGrid, Tensor | None]]]:
    """Those of `SCALES`, and the matrices themselves, of each group of a list. Their shapes say how much an entry
    covers, which may differ by matrix."""
    for g, (a, b) in enumerate(zip(ops.a, ops.b, strict=True)):
        found = list[tuple[ScaleGrid, Tensor | None]]()
        for name in SCALES:
            grid = None if (grids := getattr(ops, name)) is None else grids[g]
            covers = None
            if grid is not None:
                lines = a.shape[0] if name == "scale_a" else b.shape[1]
                covered = covered_in_list(grid if name == "scale_a" else grid.mT, lines, a.shape[1])
                covers = ScaleSpec(grid.dtype, False, *covered)
            found.append((grid_of(name, grid, covers, listed=True), grid))
        yield found
