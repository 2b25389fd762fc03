"""Binds the kernel for all quantised operands: like the generic one, with grids of scales and zero points."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.generic import ResidentBlocks
from multigemm.cuda.arguments import Fields, fields, join, slot_of
from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, strides_of
from multigemm.problem.scales import covered_in_list
from multigemm.problem.spec import ProblemSpec, ScaleSpec

THREADS = 128
GRID = struct.Struct("<4q4i")
WHOLE_K = 40
"""The shift of a grid whose entries cover all of K."""
CODES: dict[torch.dtype | str, int] = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 4, torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6, torch.float8_e8m0fnu: 7, "int4": 8, "uint4": 9, "e2m1": 10,
}  # fmt: skip
NO_GRID = fields(GRID.pack(0, 0, 0, 0, 0, 0, WHOLE_K, 0), ())


def grid_bytes(
    name: str, grid: Tensor | None, spec: ScaleSpec | None, jagged_k: bool = False, listed: bool = False
) -> Fields:
    """A grid [groups or 1, lines, K] (of b: [.., K, lines]) as bytes of `Grid` (kernels/scales.cuh). `name`: its
    keyword.

    `listed`: the grid of a matrix in a list, whose address no launch follows.
    """
    if grid is None or spec is None:
        return NO_GRID
    at, group, row, column = strides_of(grid, None if listed else name)
    line, k = (row, column) if name[-1] == "a" else (column, row)
    line_shift = max(spec.rows, 1).bit_length() - 1
    k_shift = spec.k.bit_length() - 1 if spec.k else WHOLE_K
    raw = GRID.pack(at, group, line, k, CODES[grid.dtype], line_shift, k_shift, jagged_k)
    return fields(raw, slot_of(at, 0))


def grids_of(ops: Operands) -> tuple[Fields, Tensor | None]:
    """The kernel's second argument (`Grids`), and the table of a list's grids on the device."""
    of_a, of_b = ops.spec.a.scale, ops.spec.b.scale
    if ops.spec.form == "per_group":
        table = to_device(_list_table(ops), ops.device)
        return join([*[NO_GRID] * 3, table.data_ptr().to_bytes(8, "little")]), table
    given: Any = (("scale_a", ops.scale_a, of_a), ("scale_b", ops.scale_b, of_b), ("zero_b", ops.zero_b, of_b))
    grids = [grid_bytes(name, grid, of, jagged_k=ops.spec.form == "jagged_k") for name, grid, of in given]
    return join([*grids, bytes(8)]), None


def _list_table(ops: Operands) -> npt.NDArray[np.int64]:
    """The three grids of each group. Their shapes say how much an entry covers, which may differ by matrix."""
    parts = list[bytes]()
    for g, (a, b) in enumerate(zip(ops.a, ops.b, strict=True)):
        (m, k), n = a.shape, b.shape[1]
        for name, grids, lines in (("scale_a", ops.scale_a, m), ("scale_b", ops.scale_b, n), ("zero_b", ops.zero_b, n)):
            grid, of = None if grids is None else grids[g], None
            if grid is not None:
                covered = covered_in_list(grid if name == "scale_a" else grid.mT, lines, k)
                grid, of = grid[None], ScaleSpec(grid.dtype, False, *covered)
            parts.append(grid_bytes(name, grid, of, listed=True))
    return np.frombuffer(b"".join(parts), dtype=np.int64).reshape(-1, GRID.size // 8)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The source of the kernel: the operands' formats and their contiguous directions."""
    defines = (
        ("A_CODE", CODES[spec.a.dtype]), ("B_CODE", CODES[spec.b.packed or spec.b.dtype]),
        ("A_K", int(spec.a.order != "col")), ("B_K", int(spec.b.order == "col")),
    )  # fmt: skip
    return Source("quantised.cu", "quantised", defines)


class Quantised:
    """The kernel for quantised operands of any kind, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._blocks = ResidentBlocks(load(source(spec, config), index), spec, config, THREADS)

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        grids, listed = grids_of(ops)
        return self._blocks.bound(ops, [grids], keep=(listed,))
