"""The portable kernel's tiles: which there are for each kind of arithmetic, what lies behind them, what they cost."""

from __future__ import annotations

from typing import NamedTuple

import torch

from multigemm.problem.spec import ProblemSpec

F16, BF16, TF32, I8, F64, F32 = range(6)
SIZES = {F16: 2, BF16: 2, TF32: 4, I8: 1, F64: 8, F32: 4}
SHARED = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448, (11, 0): 232448}
LEAST_SHARED = 101376
"""Bytes that a thread block may have, on GPUs that are not listed."""
PLACE = 1024
"""Of them, for the tile in hand and the walk over the groups."""


class Shape(NamedTuple):
    """What a tile's side leaves open: k of a stage, stages, threads, and blocks that a multiprocessor must hold.

    `cost` is what a product takes, relative to the kind's other tiles where all processors are busy.
    """

    depth: int
    stages: int
    threads: int
    resident: int
    cost: float = 1.0


SHAPES = {
    F16: {128: Shape(32, 4, 256, 1), 64: Shape(64, 4, 128, 3)},
    I8: {128: Shape(64, 4, 256, 1), 64: Shape(128, 4, 128, 2, 1.5), 32: Shape(128, 4, 64, 3, 2.0)},
    TF32: {128: Shape(32, 2, 128, 2), 64: Shape(32, 4, 128, 2, 1.8), 32: Shape(32, 6, 64, 3, 3.4)},
    F64: {128: Shape(32, 3, 256, 1), 64: Shape(16, 3, 128, 3, 1.1), 32: Shape(16, 6, 64, 3, 1.8)},
    F32: {128: Shape(32, 2, 256, 2), 64: Shape(32, 4, 128, 3, 1.4), 32: Shape(32, 8, 64, 3, 2.0)},
}  # fmt: skip
"""By side. Low tiles of 16 bits have a kernel of their own."""


def kind_of(spec: ProblemSpec) -> int:
    """Which arithmetic the kernel is compiled for."""
    if spec.compute == torch.float32:
        return TF32 if spec.precision == "tf32" else F32
    return {torch.float16: F16, torch.bfloat16: BF16, torch.float64: F64, torch.int8: I8}[spec.compute]


def shapes_of(spec: ProblemSpec) -> dict[int, Shape]:
    """The tiles of a problem's arithmetic."""
    kind = kind_of(spec)
    return SHAPES[F16 if kind == BF16 else kind]


def _lines(kind: int, depth: int, side: int) -> tuple[int, int]:
    """Elements of an operand's stage, padding included: in lines of k, and in lines across it (mma_tile.cuh)."""
    along, across = {F64: (4, 4), F32: (0, 4)}.get(kind, (16 // SIZES[kind], 8))
    return side * (depth + along), depth * (side + across)


def shared_bytes(spec: ProblemSpec, side: int) -> int:
    """Dynamic shared memory: the ring of k-blocks or the staging of results (portable.cu)."""
    kind, shape = kind_of(spec), shapes_of(spec)[side]
    along, across = _lines(kind, shape.depth, side)
    stage = 2 * (across if kind == F32 else max(along, across)) * SIZES[kind]
    return max(shape.stages * stage, shape.threads // 32 * 16 * 36 * max(SIZES[kind], 4))


def fits(spec: ProblemSpec, side: int, capability: tuple[int, int]) -> bool:
    """Whether there is such a tile, and room for it on a device."""
    limit = SHARED.get(capability, LEAST_SHARED) - PLACE
    return side in shapes_of(spec) and shared_bytes(spec, side) <= limit
