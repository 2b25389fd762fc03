"""Which configs to try for quantised operands, the best guess first."""

from __future__ import annotations

from dataclasses import replace

from multigemm.backends.triton.config import (
    INVARIANT_TILE,
    PROMOTION,
    SHARED_LIMIT,
    Config,
    depth_of,
    finest_block,
    foldable,
    invariant_depth,
    problem_with,
    shared_memory,
)
from multigemm.backends.triton.estimates import shape_of, tiles_in, typical_rows
from multigemm.backends.triton.hopper_choice import ordered
from multigemm.backends.triton.pointer_choice import heavy, in_pieces, lowest_tile
from multigemm.cuda.device import first_gpu_processors
from multigemm.problem.spec import MIXED, ProblemSpec

FEW_ROWS_OF_FLOAT8 = 16
"""Rows per group up to which a low tile of the portable kernel beats the warp-specialised one: 262 us, 294 (H200, 4
rows of each of 64 groups, K = N = 4096)."""
BRIEF_BLOCKS = 2
"""Blocks of a jagged K of float8 that a multiprocessor multiplies in all, up to which the portable kernel beats copies
and the warp-specialised one: one block takes 8.6 us, after copies 17.5; 4 (by the mean of unequal groups) 52.7, 22.8;
32 blocks 136, 33 (H100, 2026-11-25). Between 1 and 4 nothing was measured."""


def quantised_candidates(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs for quantised operands, the best guess first: the warp-specialised kernel if it supports them,
    except for few rows, where one of its two warpgroups would be idle, and for a jagged K too short for copies."""
    fast = float8_candidates(spec) if capability[0] == 9 else []
    portable = portable_quantised(spec, capability)
    few = shape_of(spec).rows <= FEW_ROWS_OF_FLOAT8 or (spec.form == "jagged_k" and _brief(portable[0], spec))
    return [*portable[:1], *fast, *portable[1:]] if few else [*fast, *portable]


def _brief(config: Config, spec: ProblemSpec) -> bool:
    """Whether the busiest multiprocessor has few blocks of 128 of K in all."""
    rounds, blocks = -(-tiles_in(config, spec) // first_gpu_processors()), -(-shape_of(spec).deep // PROMOTION)
    return rounds * blocks <= BRIEF_BLOCKS


def float8_candidates(spec: ProblemSpec) -> list[Config]:
    """Configs of the warp-specialised kernel for float8, the best guess first; empty if it cannot run.

    Measured on an H200 (us; 8192 rows of 32 groups, K = 7168, N = 4096; in front of 192x128 by three warpgroups): with
    scales of 1x128 and 128x128, 420 by 256x128, 429 by 128x256, 562; of rows 382, 382 and 411. Weight gradients in
    blocks: 128x128 takes 1.006 to 1.028 times as long as 256x128 (H100, six problems with 256 to 2048 of K).
    """
    pack = ("a", "b") if spec.form == "jagged_k" else ()
    tall = Config("hopper", block_m=256, block_n=128, block_k=depth_of(spec), stages=4, warps=4, pack=pack)
    wide = replace(tall, block_m=128, block_n=256)
    flat = replace(tall, block_m=128, block_n=128, stages=6)
    ranked = [tall, wide, flat] if finest_block(spec) else [wide, tall, flat]
    shallow = [replace(config, stages=config.stages - 1) for config in ranked]  # beside results of 32 bits
    ranked = [x if shared_memory(x, spec) <= SHARED_LIMIT else y for x, y in zip(ranked, shallow, strict=True)]
    found = [config for config in ranked if not problem_with(config, spec)]
    return ordered(found, spec) if found else []


def portable_quantised(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> list[Config]:
    """Valid configs of the kernel `quantised`, the best guess first. Those for few rows were measured.

    A tile as low as its tokens wastes no products. Few tokens wait for weights: long steps and several programs on a
    multiprocessor keep more bytes on their way. Many tokens share every weight with as many rows as registers hold
    beside a second sum. Steps are short where elements need registers of their own: converted ones, and those with an
    address each.
    """
    if spec.batch_invariant:
        rows, columns, warps = INVARIANT_TILE
        fixed = Config("quantised", rows, columns, invariant_depth(spec), warps=warps, stages=3, programs=2)
        return [config for config in (fixed, replace(fixed, stages=2)) if not problem_with(config, spec)][:1]
    rows, converted = typical_rows(spec), spec.quantised == "weights" or capability[0] < 9
    single = not in_pieces(spec)
    deep = PROMOTION if foldable(spec) else finest_block(spec) or PROMOTION
    short = min(deep, 64 if foldable(spec) or not single else 32)
    low = Config("quantised", lowest_tile(rows), 64, deep, warps=4, stages=4, programs=4)
    mid = Config("quantised", 64, 128, deep, warps=4, stages=4, programs=2)
    high = Config("quantised", 128, 128, deep, warps=8, stages=4, programs=1)
    small = Config("quantised", 64, 64, deep, warps=4, stages=3, programs=3)
    if converted:
        mid = replace(mid, warps=8)
    if capability[0] >= 10:
        low = replace(low, block_n=64 if converted else 128, warps=8, programs=3)
        mid = replace(mid, warps=4 if converted else 8)
    elif not heavy(spec) and spec.activation in (None, "relu"):
        low = _few_rows(spec, low, capability[0] == 9)
    if burdened_quantised(spec) or capability[0] < 9:
        mid, high = replace(mid, warps=8), replace(high, block_n=64)
    if burdened_quantised(spec) and capability[0] < 9:
        mid = high = replace(mid, block_n=64)
        small = replace(small, warps=8, block_n=32)
    if converted or single:
        mid, high, small = (replace(config, block_k=short) for config in (mid, high, small))
    if single:
        low = replace(low, block_k=short)
    sizes = [low, small, mid] if rows <= 32 else [mid, small, high] if rows <= 96 else [high, mid, small]
    if rows > 32 and tiles_in(sizes[0], spec) < first_gpu_processors():
        sizes = [small, *(config for config in sizes if config is not small)]
    return [config for config in dict.fromkeys(sizes) if not problem_with(config, spec)]


def _few_rows(spec: ProblemSpec, low: Config, wgmma: bool) -> Config:
    """The tile for few rows, whose time is that of reading weights: warps that do not wait for each other keep the most
    bytes in flight.

    Measured on an H200 (us; 4 rows of each of 32 groups, K = 7168, N = 4096, Triton 3.6; in front of 64 columns by four
    warps, which wgmma multiplies): float8 weights 240, 257; int8 244, 337; int4 220, 286; e2m1 279, 344. float8 on both
    sides is multiplied by wgmma alone: 448 in blocks of 32 by 128 columns, 511 by 64.
    """
    if spec.b.packed:
        return replace(low, warps=2, stages=3, programs=8)
    if spec.quantised == "weights":
        return replace(low, block_n=32, warps=1, programs=8)
    return replace(low, block_n=128, stages=6, programs=3) if low.block_k == 32 and wgmma else low


def burdened_quantised(spec: ProblemSpec) -> bool:
    """Whether addresses, the epilogue, or scales per column and block take registers that a large tile needs."""
    scale = spec.b.scale
    columns = scale is not None and bool(scale.k) and scale.rows in (1, MIXED) and not foldable(spec)
    return heavy(spec) or columns or spec.activation not in (None, "relu")


def emulated_quantised(spec: ProblemSpec) -> Config:
    """The configs for the interpreter with quantised operands."""
    deep = PROMOTION if foldable(spec) else finest_block(spec) or PROMOTION
    return Config("quantised", 64, 64, deep, warps=4, stages=1, width=2, programs=3)
