"""Where the entries of scales and zero points lie: the numbers by which kernels of all backends find them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from multigemm.cuda.arguments import Address
from multigemm.planning.operands import Operands
from multigemm.problem.scales import covered_in_list

SCALES = ("scale_a", "scale_b", "zero_b")
"""The keywords, in the order in which all kernels take them."""
WHOLE_K = 40
"""The shift of a k to its entry where one entry covers all of K."""


ScaleGrid = tuple[int, int, int, int, int, int]
"""Address; elements from group to group, from line (row of a, column of b) to line, and from entry to entry along K;
and two shifts: a line's entry is the line shifted down by the first, that of a k likewise by the second."""
NO_GRID: ScaleGrid = (0, 0, 0, 0, 0, WHOLE_K)


def _shifts(rows: int, k: int) -> tuple[int, int]:
    """Of an entry that covers so many lines, and so much of K; 0 for all of either."""
    return max(rows, 1).bit_length() - 1, k.bit_length() - 1 if k else WHOLE_K


def packed_grids(ops: Operands) -> list[ScaleGrid]:
    """The grids of `SCALES` of a packed form; `NO_GRID` for an absent one."""
    found, a, b = list[ScaleGrid](), ops.spec.a.scale, ops.spec.b.scale
    given: Any = (("scale_a", ops.scale_a, a), ("scale_b", ops.scale_b, b), ("zero_b", ops.zero_b, b))
    for name, grid, covers in given:
        absent = grid is None or covers is None
        found.append(NO_GRID if absent else grid_of(name, grid, covers.rows, covers.k))
    return found


def grid_of(name: str, grid: Tensor, rows: int, k: int) -> ScaleGrid:
    """A grid [groups or 1, rows, K] (of b: [.., K, columns]) whose entries cover so many rows (or columns) and so much
    of K, 0 for all. A direction with one entry has stride 0. `name` is the grid's keyword."""
    extents, steps, (line, deep) = grid.shape, grid.stride(), (1, 2) if name == "scale_a" else (2, 1)
    return (
        Address(grid.data_ptr(), name),
        steps[0] if extents[0] > 1 else 0,
        steps[line] if extents[line] > 1 else 0,
        steps[deep] if extents[deep] > 1 else 0,
        *_shifts(rows, k),
    )


def listed_grids(ops: Operands) -> Iterator[list[tuple[ScaleGrid, Tensor | None]]]:
    """The grids of `SCALES`, and the matrices themselves, of each group of a list. Their shapes say how much an entry
    covers, which may differ by matrix. No launch follows their addresses."""
    for g, (a, b) in enumerate(zip(ops.a, ops.b, strict=True)):
        found = list[tuple[ScaleGrid, Tensor | None]]()
        for name in SCALES:
            if (grids := getattr(ops, name)) is None:
                found.append((NO_GRID, None))
                continue
            matrix, lines = (grids[g], a.shape[0]) if name == "scale_a" else (grids[g].mT, b.shape[1])
            (line, deep), (rows, k) = matrix.stride(), covered_in_list(matrix, lines, a.shape[1])
            steps = line if matrix.shape[0] > 1 else 0, deep if matrix.shape[1] > 1 else 0
            found.append(((matrix.data_ptr(), 0, *steps, *_shifts(rows, k)), grids[g]))
        yield found
