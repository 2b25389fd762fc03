"""What may be chosen for a spec: kernel, tile, pipeline depth, raster width, number of programs.

One predicate, `problem_with`, says whether a config can run a spec; candidates are filtered by it
and a config given by hand is held to it too. Nothing here depends on a token count beyond the
buckets that a spec carries.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from multigemm.spec import OperandSpec, ProblemSpec

SHARED_LIMIT = 227 * 1024
STRIP = 64
"""Rows of one wgmma: the granule of the Hopper kernel's tiles."""


@dataclass(frozen=True, slots=True)
class Config:
    """`programs` per multiprocessor; 0 launches one program per tile instead of a persistent grid.

    `pack` (hopper): operands that are first copied into aligned rows.
    `order` (hopper): tiles are dealt out in turn, or drawn from a counter as programs become free. What is
    dealt needs no launch before it where the groups are few; what is drawn balances tiles that differ.
    """

    kernel: Literal["pointer", "hopper"] = "pointer"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    width: int = 8
    programs: int = 1
    pack: tuple[str, ...] = ()
    order: Literal["dealt", "drawn"] = "drawn"


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


def mappable(operand: OperandSpec) -> bool:
    """Whether a tensor map can describe the operand as it lies."""
    return operand.align >= 16 and operand.dense and operand.order != "strided"


def consumers(config: Config) -> int:
    """Warpgroups that multiply in the Hopper kernel."""
    return 3 if config.block_m == 3 * STRIP else 2


def tiles_per_consumer(config: Config) -> int:
    """Strips that one consumer holds at once."""
    return config.block_m // STRIP // consumers(config)


def part_of(config: Config, spec: ProblemSpec) -> int:
    """Columns that one part of the epilogue takes: what the staging buffer holds, 256 bytes a row."""
    return min(config.block_n, 256 // max(2, spec.out.dtype.itemsize))


def depth_of(spec: ProblemSpec) -> int:
    """Elements of K in a block of the Hopper kernel: one swizzled row of 128 bytes."""
    return 128 // spec.compute.itemsize


def hopper_shared(config: Config, spec: ProblemSpec) -> int:
    """Shared memory of the warp-specialised kernel: the ring, and a strip of output per consumer."""
    ring = config.stages * (config.block_m + config.block_n) * 128
    return ring + consumers(config) * STRIP * part_of(config, spec) * spec.out.dtype.itemsize + 1024


def shared_memory(config: Config, spec: ProblemSpec) -> int:
    """Bytes of shared memory that a program of this config needs, at most."""
    return hopper_shared(config, spec) if config.kernel == "hopper" else shared_bytes(config, spec)


def hopper_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the warp-specialised kernel cannot run this spec with this config, or ''."""
    if spec.form == "per_group":
        return "lists of matrices have no whole-operand tensor map; kernel='pointer' takes them"
    if 0 in (spec.m, spec.n, spec.k) or spec.total > 2**30:
        return f"m={spec.m} n={spec.n} k={spec.k} T<={spec.total}: tensor maps need 1 to 2^30 rows and columns"
    tf32 = spec.compute == torch.float32 and spec.precision == "tf32"
    if spec.compute not in (torch.float16, torch.bfloat16) and not tf32:
        return f"{spec.compute} products: kernel='hopper' multiplies 16-bit floats and tf32, kernel='pointer' the rest"
    if tf32 and spec.form == "jagged_k":
        return "tf32 is multiplied along memory only, where a jagged k cannot start anywhere; kernel='pointer' takes it"
    for name, x in (("a", spec.a), ("b", spec.b)):
        if not mappable(x) and name not in config.pack:
            seen = f"{name} is {x.order}, {x.align}-byte aligned, dense={x.dense}"
            return f"{seen}: tensor maps need rows of unit stride, 16-byte aligned; pack it"
        if tf32 and name not in config.pack and x.order != ("row" if name == "a" else "col"):
            return f"{name} is {x.order}: tf32 is multiplied along memory only; pack it"
    if spec.form == "jagged_k" and (spec.a.order, spec.b.order) != ("col", "row") and set(config.pack) != {"a", "b"}:
        return (
            f"jagged k runs along {spec.a.order}/{spec.b.order} operands; bounded maps need a as 'col' and b as 'row'"
        )
    if spec.form in ("batched", "masked") and spec.a.order == "col" and "a" not in config.pack:
        return "a stack of column-major a has no two-dimensional map; kernel='pointer' takes it"
    if (
        config.block_m not in (128, 192, 256)
        or config.block_n not in (64, 128, 256)
        or config.block_k != depth_of(spec)
    ):
        tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
        return f"tile {tile}: the kernel takes 128|192|256 x 64|128|256 x {depth_of(spec)}"
    heavy_end = spec.c is not None or spec.activation == "gelu"
    columns = config.block_n * tiles_per_consumer(config)
    plain_end = (spec.c, spec.bias) == (None, None) and spec.activation in (None, "relu")
    plain_end = plain_end and spec.out.order == "row" and spec.out.align == 16
    if consumers(config) == 3 and not (plain_end and spec.form != "jagged_n"):
        return "three consumers leave registers for a plain epilogue and an aligned row-major output only"
    if columns > (128 if heavy_end else 256):
        return f"tile {config.block_m}x{config.block_n} does not fit the registers of two warpgroups"
    if hopper_shared(config, spec) > SHARED_LIMIT:
        return f"{hopper_shared(config, spec)} bytes of shared memory exceed {SHARED_LIMIT}; use fewer stages"
    return ""


def problem_with(config: Config, spec: ProblemSpec) -> str:
    """Why this config cannot run this spec, or ''."""
    if config.kernel == "hopper":
        return hopper_problem(config, spec)
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
        small = Config(block_m=32, block_n=32, block_k=64, warps=4, stages=3, programs=0)
        if (spec.k or 0) > 512:
            small = replace(small, block_k=128, stages=4)
        return [small, replace(small, block_m=64), replace(small, block_n=64), replace(small, block_m=16, block_n=64)]
    if rows <= 32:
        thin = Config(block_m=_pow2(rows, 16, 32), block_n=128, block_k=64, warps=4, stages=5, programs=2)
        return [thin, replace(thin, block_n=64, stages=6, programs=3), replace(thin, block_k=128, stages=3)]
    big = Config(block_m=128, block_n=128, block_k=64, warps=8, stages=3, programs=2)
    mid = Config(block_m=128, block_n=64, block_k=64, warps=4, stages=4, programs=3)
    low = Config(block_m=64, block_n=128, block_k=64, warps=4, stages=4, programs=2)
    if heavy(spec):
        low = replace(low, block_k=32)
        return [replace(low, warps=8), replace(low, block_n=64)]
    if spec.form == "per_group":
        square = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4, programs=0)
        wide = replace(big, stages=5, programs=0)
        return [square, low, mid, wide] if rows <= 600 else [wide, low, mid]
    if rows <= 96:
        return [low, big, mid]
    return [big, mid, low]


def heavy(spec: ProblemSpec) -> bool:
    """Element-wise addresses or a C to read take the registers that a large tile would need."""
    aligned = min(spec.a.align, spec.b.align, spec.out.align) == 16 and spec.form != "jagged_n"
    return not aligned or spec.c is not None


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


def _ranked(spec: ProblemSpec, large: Config, wide: Config, tall: Config, flat: Config) -> tuple[Config, ...]:
    """The order that measurements on an H100 support (docs/triton-tuning.md), by rows per group."""
    rows = typical_columns(spec) if spec.form == "jagged_n" else typical_rows(spec)
    if (_across(spec) or 256) <= 128:
        return tall, flat
    if spec.form == "jagged_k" or 384 < rows <= 1536:
        return wide, large, tall, flat
    if 32 < rows <= 384:
        return tall, wide, large, flat
    return large, wide, tall, flat


def _across(spec: ProblemSpec) -> int:
    """Columns of the result as the warp-specialised kernel sees them: jagged columns are its rows."""
    return (spec.m if spec.form == "jagged_n" else spec.n) or 0


def hopper_candidates(spec: ProblemSpec) -> list[Config]:
    """Configs of the warp-specialised kernel, the best guess first; empty where it cannot run."""
    large = Config("hopper", block_m=192, block_n=256, stages=3, warps=4)
    wide = Config("hopper", block_m=128, block_n=256, stages=4, warps=4)
    tall = Config("hopper", block_m=256, block_n=128, stages=4, warps=4)
    flat = Config("hopper", block_m=128, block_n=128, stages=5, warps=4)
    along = {"a": "row", "b": "col"} if spec.compute == torch.float32 else {"a": spec.a.order, "b": spec.b.order}
    operands = (("a", spec.a), ("b", spec.b))
    pack = tuple(name for name, x in operands if not mappable(x) or x.order != along[name])
    ranked = _ranked(spec, large, wide, tall, flat)
    found = [replace(config, pack=pack, block_k=depth_of(spec)) for config in ranked]
    found.append(replace(found[0], order="dealt"))
    return [config for config in found if not problem_with(config, spec)]


def pointer_candidates(spec: ProblemSpec) -> list[Config]:
    """Valid configs of the pointer kernel, the best guess first."""
    size = spec.compute.itemsize
    by_size = {1: lambda: _eight_bit(spec), 2: lambda: _sixteen_bit(spec), 4: lambda: _thirty_two_bit(spec)}
    found = by_size.get(size, _sixty_four_bit)()
    return [config for config in found if not problem_with(config, spec)]


def candidates(spec: ProblemSpec, capability: tuple[int, int]) -> list[Config]:
    """Valid configs for a spec on a device, the best guess first."""
    fast = hopper_candidates(spec) if capability[0] == 9 and worth_a_ring(spec) else []
    return [*fast, *pointer_candidates(spec)]


def worth_a_ring(spec: ProblemSpec) -> bool:
    """Big enough for a persistent grid and a launch that lists tiles: much to write, or many weights to read."""
    columns = _across(spec) or 1
    rows = spec.total if spec.form != "jagged_k" else spec.m or 1
    weights = spec.groups * columns * (spec.k or 0)
    return rows * columns > 2**18 or (columns >= 64 and weights > 2**23)
