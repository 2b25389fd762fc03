"""Binds the kernel for quantised operands of any kind: as the generic one, with the grids of scales and zero points."""

from __future__ import annotations

import struct
from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import problem_bytes, table_of
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.cuda.arguments import Address, Fields, fields, join, slot_of
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.launch import without_move
from multigemm.planning.operands import Operands, view_of
from multigemm.planning.tiles import most_tiles_by_rows
from multigemm.problem.spec import ProblemSpec, ScaleSpec

THREADS = 128
GRID = struct.Struct("<4q4i")
WHOLE_K = 40
CODES: dict[torch.dtype | str, int] = {
    torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.int8: 3, torch.uint8: 4, torch.float8_e4m3fn: 5,
    torch.float8_e5m2: 6, torch.float8_e8m0fnu: 7, "int4": 8, "uint4": 9, "e2m1": 10,
}  # fmt: skip
NO_GRID = GRID.pack(0, 0, 0, 0, 0, 0, WHOLE_K, 0)


def grid_bytes(grid: Tensor, spec: ScaleSpec, name: str, jagged_k: bool = False, listed: bool = False) -> Fields:
    """A grid [groups or 1, lines, K] (of b: [.., K, lines]) as `Grid` in kernels/scales.cuh; `name`: its operand's.

    That of a matrix in a list has an address that no launch follows.
    """
    side = name[-1]
    line, k = (1, 2) if side == "a" else (2, 1)
    strides = (
        grid.stride(0) if spec.by_group else 0,
        grid.stride(line) if spec.rows else 0,
        grid.stride(k) if spec.k else 0,
    )
    line_shift = max(spec.rows, 1).bit_length() - 1
    k_shift = spec.k.bit_length() - 1 if spec.k else WHOLE_K
    at = grid.data_ptr() if listed else Address(grid.data_ptr(), name)
    raw = GRID.pack(at, *strides, CODES[grid.dtype], line_shift, k_shift, jagged_k)
    return fields(raw, slot_of(at, 0))


def _listed(grid: Tensor, extents: tuple[int, int], name: str) -> bytes:
    """The grid of one matrix of a list, whose shape says how much a number covers: the matrices may differ."""
    counts = grid.shape if name[-1] == "a" else grid.shape[::-1]
    rows, k = (
        0 if count == 1 else next(q for q in blocks if -(-extent // q) == count)
        for count, extent, blocks in zip(counts, extents, ((1, 128), (128, 64, 32)), strict=True)
    )
    return grid_bytes(grid[None], ScaleSpec(grid.dtype, False, rows, k), name, listed=True)


def grids_of(ops: Operands) -> tuple[Fields, Tensor | None]:
    """The kernel's second argument, and the table of a list's grids on the device."""
    of_a, of_b = ops.spec.a.scale, ops.spec.b.scale
    grids = {"scale_a": (ops.scale_a, of_a), "scale_b": (ops.scale_b, of_b), "zero_b": (ops.zero_b, of_b)}
    if ops.spec.form != "per_group":
        jagged_k = ops.spec.form == "jagged_k"
        parts = [
            NO_GRID if grid is None or of is None else grid_bytes(cast(Tensor, grid), of, name, jagged_k)
            for name, (grid, of) in grids.items()
        ]
        return join([*parts, bytes(8)]), None
    rows = list[bytes]()
    for g, (a, b) in enumerate(zip(ops.a, ops.b, strict=True)):
        extents = {"a": (a.shape[0], a.shape[1]), "b": (b.shape[1], a.shape[1])}
        rows += [
            NO_GRID if grid is None else _listed(grid[g], extents[name[-1]], name) for name, (grid, _) in grids.items()
        ]
    table = to_device(np.frombuffer(b"".join(rows), dtype=np.int64).reshape(-1, GRID.size // 8), ops.device)
    return join([*[NO_GRID] * 3, table.data_ptr().to_bytes(8, "little")]), table


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: what the operands hold, and their contiguous directions."""
    defines = (
        ("A_CODE", CODES[spec.a.dtype]), ("B_CODE", CODES[spec.b.packed or spec.b.dtype]),
        ("A_K", int(spec.a.order != "col")), ("B_K", int(spec.b.order == "col")),
    )  # fmt: skip
    return Source("quantised.cu", "quantised", defines)


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels that the spec's problems may launch under this config."""
    return (source(spec, config),)


class Quantised:
    """The kernel for quantised operands of any kind, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._kernel, self._tile, self._processors = load(source(spec, config), index), config.tile, processors(index)
        self._most = self._processors * config.blocks_per_sm
        zeroes = spec.zero_unowned and spec.form in ("jagged_m", "jagged_n", "masked")
        self._least = self._processors if zeroes else 1

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        table, view = table_of(ops), view_of(ops)
        grids, listed = grids_of(ops)

        bound = self._kernel.bound(
            [problem_bytes(ops, table, view), grids],
            grid=self._blocks(most_tiles_by_rows(ops, view, self._tile, self._tile)(view.m)),
            threads=THREADS,
            keep=(table, listed),
        )  # for one number of tokens: strides of scales may be that
        return bound if table is None else without_move(bound)

    def _blocks(self, tiles: int) -> int:
        return max(self._least, min(tiles, self._most))
