"""Binds the portable kernel: one launch of resident thread blocks for any problem."""

from __future__ import annotations

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most, view_of
from multigemm.layouts import Operands
from multigemm.spec import ProblemSpec

F16, BF16, TF32, I8, F32, F64 = range(6)
SIZES = {F16: 2, BF16: 2, TF32: 4, F32: 4, F64: 8, I8: 1}
BLOCK_K = {
    (F16, 128): 32, (F16, 64): 64, (TF32, 128): 16, (TF32, 64): 32, (I8, 128): 64, (I8, 64): 128,
    (F32, 128): 16, (F64, 64): 16,
}  # fmt: skip


def kind_of(spec: ProblemSpec) -> int:
    """Which arithmetic the kernel is compiled for."""
    if spec.compute == torch.float32:
        return TF32 if spec.precision == "tf32" else F32
    return {torch.float16: F16, torch.bfloat16: BF16, torch.float64: F64, torch.int8: I8}[spec.compute]


def side_of(kind: int, config: Config) -> int:
    """The side of a tile; only the tensor-core kinds come in two sizes."""
    return config.tile if kind <= I8 else 128 if kind == F32 else 64


def threads_of(kind: int, side: int) -> int:
    """Threads per block."""
    return 128 if kind <= I8 and side == 64 else 256


def shared_bytes(kind: int, side: int) -> int:
    """Dynamic shared memory: the ring of k-blocks or the staging of results (portable.cu), padding included."""
    size, depth = SIZES[kind], BLOCK_K[(F16 if kind == BF16 else kind, side)]
    tensor_cores = kind <= I8
    rows = (side * (depth + 16 // size), depth * (side + 8)) if tensor_cores else (depth * (side + 16 // size),)
    stages = 4 if tensor_cores else 2
    staging = threads_of(kind, side) // 32 * 16 * 36 * 4 if tensor_cores else 16 * (side + 4) * max(size, 4)
    return max(stages * 2 * max(rows) * size, staging)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: arithmetic, contiguous directions and the tile, no sizes."""
    kind, a_k, b_k = kind_of(spec), int(spec.a.order != "col"), int(spec.b.order == "col")
    side = side_of(kind, config)
    defines = (("KIND", kind), ("A_K", a_k), ("B_K", b_k), ("TILE", side), ("SHARED", shared_bytes(kind, side)))
    return Source("portable.cu", "portable", defines)


def bind(ops: Operands, config: Config, function: int, sms: int) -> Launch:
    """Lays out the arguments of one problem."""
    table, view, kind = table_of(ops), view_of(ops), kind_of(ops.spec)
    side = side_of(kind, config)
    tiles = tiles_at_most(ops, view, side, side)
    zeroes = ops.spec.zero_unowned and ops.spec.form in ("jagged_m", "jagged_n", "masked")
    grid = max(1, sms if zeroes else 1, min(tiles, sms * config.blocks_per_sm))
    return launcher(
        function,
        [problem_bytes(ops, table, view)],
        grid=grid,
        threads=threads_of(kind, side),
        shared=shared_bytes(kind, side),
        index=ops.device.index or 0,
        keep=(ops, table),
    )


def prepare(spec: ProblemSpec, config: Config, index: int) -> int:
    """Compiles (or finds) and loads the kernel of a spec."""
    function = load(source(spec, config), index)[0]
    kind = kind_of(spec)
    allow_shared(function, shared_bytes(kind, side_of(kind, config)))
    return function
