"""The choices of the cpu backend: which kernel forms the products."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from multigemm.backends.cpu.epilogue import is_plain
from multigemm.backends.cpu.jit import lanes, missing
from multigemm.backends.cpu.leaks import can_be_checked
from multigemm.backends.cpu.mkl import has_fast_bf16, library
from multigemm.problem.spec import ProblemSpec

Kernel = Literal["tiles", "bmm", "blas", "loop", "ordered"]
KERNELS: tuple[Kernel, ...] = ("bmm", "tiles", "blas", "loop", "ordered")

SMALL_PRODUCT = 1 << 23
"""Multiply-adds of an average product (by its bucket) up to which tiles are the better guess."""
SMALL_BF16 = 1 << 20
"""The same where bfloat16 products cannot be stacked, and each call of torch's product costs its time."""

TILES = {32: ((14, 2), (12, 2), (8, 3), (6, 4), (14, 1)), 16: ((6, 2), (4, 3), (3, 4), (12, 1))}
"""Tiles that fit the vector registers that there are, beside one row of B and one element of A."""


@dataclass(frozen=True, slots=True)
class Config:
    """How products are formed.

    `bmm`    torch's batched product over padded neighbours: bfloat16 in and out, no epilogue
    `tiles`  compiled tiles of `rows` x `vectors` registers for small float32 products; larger ones as `blas`
    `blas`   batched BLAS calls, with a float32 or float64 accumulator
    `loop`   one product after another through NumPy
    `ordered` one product after another, each element summed over k in order: what batch-invariant problems take
    """

    kernel: Kernel = "loop"
    rows: int = 0
    vectors: int = 0


def suits(spec: ProblemSpec) -> bool:
    """Whether torch's own bfloat16 product is this spec's answer."""
    return is_plain(spec) and spec.compute == spec.out.dtype == torch.bfloat16


def average_work(spec: ProblemSpec) -> float | None:
    """Multiply-adds of an average product as far as the buckets tell; None if extents differ by group."""
    extents = (spec.m, spec.n) if spec.form == "jagged_k" else (spec.m, spec.k) if spec.form == "jagged_n" else None
    first, second = extents or (spec.n, spec.k)
    if first is None or second is None:
        return None
    return spec.total * first * second / max(1, spec.groups)


def _registers() -> int:
    return 16 if lanes() == 8 else 32


def _tile_configs(spec: ProblemSpec) -> tuple[Config, ...]:
    if missing():
        return ()
    width = spec.m if spec.out.order == "col" else spec.n
    narrow = width is not None and width <= lanes()
    tiles = sorted(TILES[_registers()], key=lambda tile: tile[1] != 1) if narrow else TILES[_registers()]
    return tuple(Config("tiles", rows, vectors) for rows, vectors in tiles)


def _too_large_to_copy(spec: ProblemSpec) -> bool:
    """Whether BLAS would read whole copies of operands beyond 2^31 elements, of which groups may own a few."""
    dtype = torch.float32 if spec.acc is torch.int32 else spec.acc
    return any(x.wide and (x.order == "strided" or x.dtype is not dtype) for x in (spec.a, spec.b))


def _order(spec: ProblemSpec) -> tuple[Config, ...]:
    """Tiles for small products; torch's batches for bfloat16 that can be stacked; BLAS for the rest."""
    if spec.batch_invariant:
        return (Config("ordered"),)
    tiles, bmm, blas, loop = _tile_configs(spec), (Config("bmm"),), (Config("blas"),), (Config("loop"),)
    if _too_large_to_copy(spec):
        return loop + bmm + blas + tiles
    work = average_work(spec)
    if suits(spec) and not (work is not None and work <= SMALL_BF16 and spec.form in ("per_group", "jagged_k")):
        return bmm + blas + tiles + loop
    return tiles + blas + bmm + loop if work is not None and work <= SMALL_PRODUCT else blas + tiles + bmm + loop


def candidates(spec: ProblemSpec) -> tuple[Config, ...]:
    """Valid configs for this spec, the best guess first."""
    return tuple(config for config in _order(spec) if not invalid_reasons(config, spec))


def _tile_reasons(config: Config, spec: ProblemSpec) -> list[str]:
    if spec.acc == torch.float64:
        return ["tiles are float32, and this accumulator is float64: use blas"]
    if config.rows < 1 or config.vectors < 1:
        return [f"a tile of {config.rows} x {config.vectors} registers is empty: use at least 1 x 1"]
    if missing():
        return [missing()]
    registers, needed = _registers(), (config.rows + 1) * config.vectors + 1
    if needed > registers:
        return [
            f"a tile of {config.rows} x {config.vectors} needs {needed} of {registers} registers: use a smaller one"
        ]
    return []


def invalid_reasons(config: Config, spec: ProblemSpec) -> list[str]:
    """Why a config cannot run this spec; empty if it can."""
    if config.kernel not in KERNELS:
        return [f"kernel {config.kernel!r} is unknown: use one of {', '.join(KERNELS)}"]
    if spec.batch_invariant and config.kernel != "ordered":
        return [f"batch_invariant=True: the bits of a row depend on its neighbours in {config.kernel}: use ordered"]
    if config.kernel in ("blas", "tiles") and library() is None:
        return ["torch carries no batched BLAS that can be called by address here: use loop"]
    if config.kernel == "bmm" and not suits(spec):
        return [f"bmm takes plain bfloat16 products, not {spec.compute} to {spec.out.dtype} with an epilogue: use blas"]
    if config.kernel == "bmm" and not can_be_checked(spec):
        return [f"bmm takes {spec.form} only if rows of A cannot meet, not K = {spec.k} and A {spec.a.order}: use blas"]
    if config.kernel == "bmm" and not has_fast_bf16():
        return ["this processor has no bfloat16 products: use blas or loop"]
    return _tile_reasons(config, spec) if config.kernel == "tiles" else []
