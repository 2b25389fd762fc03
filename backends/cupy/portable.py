"""Binds the portable kernel: one launch of resident thread blocks for any problem."""

from __future__ import annotations

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.driver import launcher
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most
from multigemm.layouts import Operands
from multigemm.spec import ProblemSpec

THREADS = 256
F16, BF16, TF32, F32, F64, I8 = range(6)
TILES = {F16: (128, 128), BF16: (128, 128), TF32: (128, 128), F32: (128, 128), F64: (64, 64), I8: (64, 64)}


def kind_of(spec: ProblemSpec) -> int:
    """Which arithmetic the kernel is compiled for."""
    if spec.compute == torch.float32:
        return TF32 if spec.precision == "tf32" else F32
    return {torch.float16: F16, torch.bfloat16: BF16, torch.float64: F64, torch.int8: I8}[spec.compute]


def source(spec: ProblemSpec) -> Source:
    """The kernel's key: arithmetic and contiguous directions, nothing else."""
    a_k, b_k = int(spec.a.order != "col"), int(spec.b.order == "col")
    return Source("portable.cu", "portable", (("KIND", kind_of(spec)), ("A_K", a_k), ("B_K", b_k)))


def bind(ops: Operands, config: Config, function: int, sms: int) -> Launch:
    """Lays out the arguments of one problem."""
    table = table_of(ops)
    tiles = tiles_at_most(ops, *TILES[kind_of(ops.spec)])
    grid = max(1, sms if ops.spec.zero_unowned else 1, min(tiles, sms * config.blocks_per_sm))
    return launcher(
        function,
        [problem_bytes(ops, table)],
        grid=grid,
        threads=THREADS,
        index=ops.device.index or 0,
        keep=(ops, table),
    )


def prepare(spec: ProblemSpec, index: int) -> int:
    """Compiles (or finds) and loads the kernel of a spec."""
    return load(source(spec), index)[0]
