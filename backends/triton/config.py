"""What may be chosen for a spec: kernel, tile, pipeline depth, raster width, number of programs.

One predicate, `problem_with`, says whether a config can run a spec; candidates are filtered by it
and a config given by hand is held to it too. Nothing here depends on a token count beyond the
buckets that a spec carries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from multigemm.spec import ProblemSpec

SHARED_LIMIT = 227 * 1024


@dataclass(frozen=True, slots=True)
class Config:
    """`programs` per multiprocessor; 0 launches one program per tile instead of a persistent grid."""

    kernel: Literal["pointer"] = "pointer"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    width: int = 8
    programs: int = 1


def _pow2(value: int, low: int, high: int) -> int:
    return max(low, min(high, 1 << max(0, value - 1).bit_length()))


def typical_rows(spec: ProblemSpec) -> int:
    """About how many rows the result of one group has, from what a spec knows."""
    groups = max(1, spec.groups)
    if spec.form in ("jagged_m", "per_group", "batched", "masked") and spec.total:
        return max(1, spec.total // groups)
    return spec.m or 256


def typical_columns(spec: ProblemSpec) -> int:
    """The same for columns; lists carry no bucket for n, so their rows stand in for it."""
    if spec.form == "jagged_n":
        return max(1, spec.total // max(1, spec.groups))
    return spec.n if spec.n is not None else typical_rows(spec)


def shared_bytes(config: Config, spec: ProblemSpec) -> int:
    """An upper estimate of the pipeline's shared memory."""
    size = spec.compute.itemsize
    return config.stages * (config.block_m + config.block_n) * config.block_k * size


def accumulator_registers(config: Config, spec: ProblemSpec) -> int:
    """32-bit registers per thread that the accumulator takes."""
    return config.block_m * config.block_n * spec.acc.itemsize // 4 // (32 * config.warps)


def problem_with(config: Config, spec: ProblemSpec) -> str:
    """Why this config cannot run this spec, or ''."""
    for name in ("block_m", "block_n", "block_k"):
        block = getattr(config, name)
        if block < 16 or block & (block - 1):
            return f"{name}={block} must be a power of two of at least 16"
    if spec.compute == torch.int8 and config.block_k < 32:
        return f"block_k={config.block_k} is below 32, which int8 products need"
    if shared_bytes(config, spec) > SHARED_LIMIT:
        return f"{shared_bytes(config, spec)} bytes of shared memory exceed {SHARED_LIMIT}; use fewer stages"
    if accumulator_registers(config, spec) > 160:
        return f"{accumulator_registers(config, spec)} accumulator registers per thread exceed 160; use more warps"
    return ""


def _sixteen_bit(spec: ProblemSpec) -> list[Config]:
    rows, columns = typical_rows(spec), typical_columns(spec)
    if rows * columns <= 160 * 160:
        small = Config(block_m=32, block_n=64, block_k=128, warps=4, stages=2, programs=0)
        return [small, replace(small, block_m=64), replace(small, block_n=32), replace(small, block_m=16, block_k=64)]
    if rows <= 32:
        thin = Config(block_m=_pow2(rows, 16, 32), block_n=128, block_k=64, warps=4, stages=5, programs=2)
        return [thin, replace(thin, block_n=64, stages=6, programs=3), replace(thin, block_k=128, stages=3)]
    big = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=2)
    mid = Config(block_m=128, block_n=64, block_k=64, warps=4, stages=4, programs=3)
    low = Config(block_m=64, block_n=128, block_k=64, warps=4, stages=4, programs=3)
    wide = Config(block_m=128, block_n=256, block_k=64, warps=8, stages=3, programs=1)
    if rows <= 96:
        return [low, big, mid]
    if spec.form == "per_group":
        return [mid, big, low, wide]
    return [big, wide, mid, low]


def _thirty_two_bit(spec: ProblemSpec) -> list[Config]:
    if spec.precision == "tf32":
        first = Config(block_m=128, block_n=128, block_k=32, warps=8, stages=3, programs=1)
        return [first, Config(block_m=64, block_n=64, block_k=32, warps=4, stages=3, programs=3)]
    first = Config(block_m=64, block_n=64, block_k=16, warps=4, stages=3, programs=3)
    return [first, replace(first, block_m=32, block_n=32, programs=4)]


def _sixty_four_bit() -> list[Config]:
    first = Config(block_m=64, block_n=64, block_k=16, warps=8, stages=3, programs=1)
    return [first, replace(first, block_m=32, block_n=32, warps=4, programs=2)]


def _eight_bit(spec: ProblemSpec) -> list[Config]:
    first = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=1)
    small = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=3, programs=2)
    return [first, small] if typical_rows(spec) > 64 else [small, first]


def emulated() -> list[Config]:
    """For the interpreter, whose cost is the number of operations, not of elements."""
    return [Config(block_m=64, block_n=64, block_k=64, warps=4, stages=1, width=2, programs=3)]


def candidates(spec: ProblemSpec) -> list[Config]:
    """Valid configs for a spec, the best guess first."""
    size = spec.compute.itemsize
    by_size = {1: lambda: _eight_bit(spec), 2: lambda: _sixteen_bit(spec), 4: lambda: _thirty_two_bit(spec)}
    found = by_size.get(size, _sixty_four_bit)()
    return [config for config in found if not problem_with(config, spec)]
