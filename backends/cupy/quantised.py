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
from multigemm.planning.operands import Operands
from multigemm.planning.scale_grids import NO_GRID, SCALES, ScaleGrid, listed_grids, packed_grids
from multigemm.problem.spec import ProblemSpec

THREADS = 128
GRID = struct.Struct("<4q4i")
CODES: dict[torch.dtype | str, int] = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 4, torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6, torch.float8_e8m0fnu: 7, "int4": 8, "uint4": 9, "e2m1": 10,
}  # fmt: skip
NO_BYTES = fields(GRID.pack(*NO_GRID[:4], 0, *NO_GRID[4:], 0), ())


def grid_bytes(place: ScaleGrid, grid: Tensor | None, jagged_k: bool = False) -> Fields:
    """A grid as bytes of `Grid` (kernels/scales.cuh)."""
    if grid is None:
        return NO_BYTES
    raw = GRID.pack(*place[:4], CODES[grid.dtype], *place[4:], jagged_k)
    return fields(raw, slot_of(place[0], 0))


def packed_bytes(ops: Operands) -> list[Fields]:
    """The grids of a packed form: scale_a, scale_b and zero_b."""
    given: Any = (ops.scale_a, ops.scale_b, ops.zero_b)
    jagged_k = ops.spec.form == "jagged_k"
    return [grid_bytes(place, grid, jagged_k) for place, grid in zip(packed_grids(ops), given, strict=True)]


def grids_of(ops: Operands) -> tuple[Fields, Tensor | None]:
    """The kernel's second argument (`Grids`), and the table of a list's grids on the device."""
    if ops.spec.form != "per_group":
        return join([*packed_bytes(ops), bytes(8)]), None
    table = to_device(_list_table(ops), ops.device)
    return join([*[NO_BYTES] * len(SCALES), table.data_ptr().to_bytes(8, "little")]), table


def _list_table(ops: Operands) -> npt.NDArray[np.int64]:
    """The three grids of each group."""
    parts = [grid_bytes(*grid) for grids in listed_grids(ops) for grid in grids]
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
