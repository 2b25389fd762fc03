"""Binds the portable kernel: one launch of resident thread blocks for any problem."""

from __future__ import annotations

from typing import NamedTuple

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most, view_of
from multigemm.layouts import Operands
from multigemm.spec import ProblemSpec

F16, BF16, TF32, I8, F64, F32 = range(6)
SIZES = {F16: 2, BF16: 2, TF32: 4, I8: 1, F64: 8, F32: 4}


class Shape(NamedTuple):
    """What a tile's side leaves open: k of a stage, stages, threads, and blocks that a multiprocessor must hold."""

    depth: int
    stages: int
    threads: int
    resident: int


SHAPES = {
    (F16, 128): Shape(32, 4, 256, 1), (F16, 64): Shape(64, 4, 128, 3),
    (I8, 256): Shape(64, 3, 256, 1), (I8, 128): Shape(64, 4, 256, 1),
    (I8, 64): Shape(128, 4, 128, 2), (I8, 32): Shape(128, 4, 64, 3),
    (TF32, 256): Shape(16, 3, 256, 1), (TF32, 128): Shape(16, 4, 128, 2),
    (TF32, 64): Shape(32, 4, 128, 2), (TF32, 32): Shape(32, 6, 64, 3),
    (F64, 128): Shape(8, 4, 256, 1), (F64, 64): Shape(8, 6, 128, 3), (F64, 32): Shape(16, 6, 64, 3),
    (F32, 128): Shape(16, 4, 256, 2), (F32, 64): Shape(32, 4, 128, 3), (F32, 32): Shape(32, 8, 64, 3),
}  # fmt: skip


def kind_of(spec: ProblemSpec) -> int:
    """Which arithmetic the kernel is compiled for."""
    if spec.compute == torch.float32:
        return TF32 if spec.precision == "tf32" else F32
    return {torch.float16: F16, torch.bfloat16: BF16, torch.float64: F64, torch.int8: I8}[spec.compute]


def shape_of(spec: ProblemSpec, config: Config) -> Shape:
    """The kernel's inner measures."""
    kind = kind_of(spec)
    return SHAPES[F16 if kind == BF16 else kind, config.tile]


def _lines(kind: int, depth: int, side: int) -> tuple[int, int]:
    """Elements of an operand's stage, padding included: in lines of k, and in lines across it (mma_tile.cuh)."""
    along, across = {F64: (4, 4), F32: (0, 4)}.get(kind, (16 // SIZES[kind], 8))
    return side * (depth + along), depth * (side + across)


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """Dynamic shared memory: the ring of k-blocks or the staging of results (portable.cu)."""
    kind, shape = kind_of(spec), shape_of(spec, config)
    lines = [_lines(kind, shape.depth, side) for side in config.footprint[:2]]
    stage = sum(across if kind == F32 else max(along, across) for along, across in lines) * SIZES[kind]
    return max(shape.stages * stage, shape.threads // 32 * 16 * 36 * max(SIZES[kind], 4))


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: arithmetic, contiguous directions and the tile, no sizes."""
    kind, a_k, b_k, shape = kind_of(spec), spec.a.order != "col", spec.b.order == "col", shape_of(spec, config)
    rows, columns, _ = config.footprint
    defines = (
        ("KIND", kind), ("A_K", int(a_k)), ("B_K", int(b_k)), ("TILE_M", rows), ("TILE_N", columns),
        ("BLOCK_K", shape.depth), ("STAGES", shape.stages), ("BLOCK_THREADS", shape.threads),
        ("RESIDENT", shape.resident), ("SHARED", shared_bytes(spec, config)),
    )  # fmt: skip
    return Source("portable.cu", "portable", defines)


def bind(ops: Operands, config: Config, function: int, sms: int) -> Launch:
    """Lays out the arguments of one problem."""
    table, view = table_of(ops), view_of(ops)
    tiles = tiles_at_most(ops, view, *config.footprint[:2])
    zeroes = ops.spec.zero_unowned and ops.spec.form in ("jagged_m", "jagged_n", "masked")
    grid = max(1, sms if zeroes else 1, min(tiles, sms * config.blocks_per_sm))
    return launcher(
        function,
        [problem_bytes(ops, table, view)],
        grid=grid,
        threads=shape_of(ops.spec, config).threads,
        shared=shared_bytes(ops.spec, config),
        index=ops.device.index or 0,
        keep=(ops, table),
    )


def prepare(spec: ProblemSpec, config: Config, index: int) -> int:
    """Compiles (or finds) and loads the kernel of a spec."""
    function = load(source(spec, config), index)[0]
    allow_shared(function, shared_bytes(spec, config))
    return function
