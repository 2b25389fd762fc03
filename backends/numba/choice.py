"""Which configs are valid for a spec on a device, the best guess first, and why."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

import torch

from multigemm.backends.numba.config import (
    COLUMNS,
    FLOAT8_LOW,
    FLOAT8_MEDIUM,
    FLOAT8_TALL,
    FMA_SMALL,
    FMA_TALL,
    GENERIC,
    GENERIC_EMULATED,
    GENERIC_LARGE,
    GENERIC_LOW,
    HOPPER,
    HOPPER_MEDIUM,
    HOPPER_NARROW,
    MMA,
    MMA_SMALL,
    MMA_TALL,
    QUANTISED,
    QUANTISED_EMULATED,
    QUANTISED_FEW,
    ROW_BYTES,
    Config,
    Float8Config,
    GenericConfig,
    HopperConfig,
    MmaConfig,
    QuantisedConfig,
    float8_signature_of,
    signature_of,
    summation_of,
)
from multigemm.backends.numba.support import capability_of, float8_obstacle, hopper_obstacle, mma_obstacle
from multigemm.cuda.device import first_gpu_processors
from multigemm.cuda.summation import difference
from multigemm.planning.fused_steps import product_spec, taken_in_steps
from multigemm.planning.tiles import TileCost, longest_time, typical_extent
from multigemm.problem.spec import ProblemSpec

T = TypeVar("T")
HOPPER_SIZES = (HOPPER, HOPPER_MEDIUM, HOPPER_NARROW)
FLOAT8_SIZES = (FLOAT8_TALL, FLOAT8_MEDIUM, FLOAT8_LOW)
"""The tiles on wgmma, the tallest first."""
# Fitted numbers, last changed on 2026-11-22 (docs/notes/numba-tensor-cores.md). `multigemm tune --backends numba`
# times every config of a class of problems, which is how to fit them anew.

FEW_ROWS = 64
"""Rows per group up to which the small tile of mma.sync comes first."""
SPARSE_ROWS = 32
"""Rows per group up to which the Hopper kernel takes no tiles of 256 rows first, and blocks need no cluster."""
SOME_ROWS, LONG_K = 64, 2048
"""Up to so many rows it takes none first either, if k is below LONG_K. With a longer one tall tiles pay: the weights of
a large group among the small ones are then read once."""
THIN_K = 128
"""k per group of jagged k up to which storing is most of the work: clusters would share rows that cost nothing."""
FEW_COLUMNS = 15
"""Odd numbers of blocks of columns up to which clusters of two would waste too much."""
SHALLOW = 512
"""k up to which small problems are better off without TMA and wgmma."""
ROW_ALIGN = 16
"""Bytes to which operands of float32 on plain cores are aligned for asynchronous copies to pay."""
FILLED = 0.96
"""The part of the multiprocessors that need a tile for a GPU to count as filled: 127 of an H100's 132."""
GENERIC_COST = {GENERIC_LARGE: 1.0, GENERIC: 1.9, GENERIC_LOW: 2.1}
"""The time of a product in a tile on plain cores, relative to the largest tile: float32 on an H200."""
SMALL_COST = {MMA_SMALL: 1.17, FMA_SMALL: 1.06}
"""The time of a product in a small tile, relative to a tall one: float64 and float32 on an H100, K of 2048."""
TALL_ENDS_BYTES = 2 * ROW_BYTES
"""Bytes of k in whose time a tall tile begins and ends; beside a small one, more others multiply meanwhile."""
MOST_THREADS = 1024
"""Threads of a block, at most."""
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel may declare."""


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Configs that are right for this spec; the first is the heuristic's choice."""
    if taken_in_steps(spec):
        spec = product_spec(spec)
    return [config for config in _ranked(spec, device) if not variance(config, spec, device)]


def variance(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    """Why a config does not have the bits that batch invariance demands; "" if it does.

    The bits are those of the kernel that runs any layout and size of these dtypes: by mma.sync and the like, or on
    plain cores.
    """
    if not spec.batch_invariant:
        return ""
    general: Config = GENERIC if device.type == "cuda" else GENERIC_EMULATED
    if spec.quantised:
        general = QUANTISED
    elif device.type == "cuda" and not mma_obstacle(spec, device):
        general = _mma_sizes(spec)[-1]
    return difference(summation_of(config, spec), summation_of(general, spec), capability_of(device))


def _ranked(spec: ProblemSpec, device: torch.device) -> list[Config]:
    if spec.quantised:
        return _quantised(spec, device)
    if device.type != "cuda":
        return [GENERIC_EMULATED]
    hopper, mma = _hopper(spec, device), _mma(spec, device)
    if _is_plain_float32(spec) and min(spec.a.align, spec.b.align) < ROW_ALIGN:
        return _generic(spec) + mma  # element by element, plain loads wait less than asynchronous copies
    return (mma + hopper if mma and _is_small(spec) else hopper + mma) + _generic(spec)


def _quantised(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """The configs for quantised operands: tensor cores first, then plain ones, the lower tile first for few rows."""
    if device.type != "cuda":
        return [QUANTISED_EMULATED]
    few = rows_per_group(spec) <= QUANTISED.bm // 2
    plain: list[Config] = [QUANTISED_FEW, QUANTISED] if few else [QUANTISED, QUANTISED_FEW]
    return [*_float8(spec, device), *plain]


def _is_plain_float32(spec: ProblemSpec) -> bool:
    return spec.compute == torch.float32 and spec.precision != "tf32"


def _is_small(spec: ProblemSpec) -> bool:
    """Whether the work is so short that the start of a kernel counts most, which is shorter without TMA."""
    k = spec.k if spec.k is not None else rows_per_group(spec)
    tiles = spec.groups * -(-_columns(spec) // MMA_SMALL.bn) * -(-max(rows_per_group(spec), 1) // MMA_SMALL.bm)
    return spec.form != "jagged_k" and tiles <= first_gpu_processors() and k <= SHALLOW


def rows_per_group(spec: ProblemSpec) -> int:
    """The rows of an average group, as far as the host knows them."""
    if spec.largest:
        return spec.largest
    if spec.form in ("jagged_n", "jagged_k", "batched", "masked"):
        return spec.m or 0
    return spec.total // max(spec.groups, 1)


def _mma_sizes(spec: ProblemSpec) -> list[MmaConfig]:
    """The configs on tensor cores with mma.sync, the larger tile first."""
    if spec.compute == torch.float64:
        return [MMA_TALL, MMA_SMALL]
    if _is_plain_float32(spec):
        return [FMA_TALL, FMA_SMALL]
    return [MMA, MMA_SMALL]


def _mma(spec: ProblemSpec, device: torch.device) -> list[Config]:
    if mma_obstacle(spec, device):
        return []
    sizes = _mma_sizes(spec)
    if MMA not in sizes:
        ends = TALL_ENDS_BYTES // spec.compute.itemsize
        costs = {c: TileCost(c.bm, c.bn, *((SMALL_COST[c],) if c in SMALL_COST else (1.0, ends))) for c in sizes}
        return [*_briefest_first(costs, spec, typical_extent(spec, "k", spec.total // max(spec.groups, 1)))]
    rows = rows_per_group(spec)
    small = rows <= FEW_ROWS or _tiles(spec, rows, MMA.bm) < FILLED * first_gpu_processors()
    return [MMA_SMALL, MMA] if small else [MMA, MMA_SMALL]


def _briefest_first(costs: Mapping[T, TileCost], spec: ProblemSpec, k: int) -> list[T]:
    """The configs by the time of the busiest multiprocessor."""
    groups, mean = max(spec.groups, 1), spec.total // max(spec.groups, 1)
    rows, columns = (max(typical_extent(spec, direction, mean), 1) for direction in ("m", "n"))
    return sorted(
        costs, key=lambda config: longest_time(costs[config], groups, rows, columns, k, first_gpu_processors())
    )


def _hopper(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """The configs for Hopper: first the tallest tile that groups fill and that leaves no multiprocessor idle.

    As cupy's kernel, which is built alike, takes them (docs/notes/cupy-hopper.md).
    """
    if hopper_obstacle(spec, device):
        return []
    rows, k = rows_per_group(spec), spec.k if spec.k is not None else spec.largest
    low = spec.form != "jagged_k" and (rows <= SPARSE_ROWS or (rows <= SOME_ROWS and k < LONG_K))
    order = _finer_if_idle(spec, HOPPER_SIZES, int(low))
    alone = rows <= SPARSE_ROWS or order[0] is not HOPPER_SIZES[int(low)]
    if spec.form == "jagged_k":
        alone = alone or spec.total <= THIN_K * spec.groups
    elif spec.form != "per_group":
        blocks = -(-_columns(spec) // COLUMNS)
        alone = alone or (blocks % 2 == 1 and blocks <= FEW_COLUMNS)
    return [replace(config, cluster=1) for config in order] if alone else [*order]


def _float8(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """The configs of the Hopper kernel for float8, if it can run this: first the lowest tile that holds a group."""
    if float8_obstacle(spec, device):
        return []
    sizes, rows = _float8_sizes(spec), rows_per_group(spec)
    return [*_finer_if_idle(spec, sizes, sum(rows <= config.n_max for config in sizes[1:]))]


def _float8_sizes(spec: ProblemSpec) -> tuple[Float8Config, ...]:
    """The tiles of the Hopper kernel for float8. The tallest one has no registers for a scale of each column."""
    return FLOAT8_SIZES[1:] if float8_signature_of(spec).scales == "columns" else FLOAT8_SIZES


def _finer_if_idle(spec: ProblemSpec, sizes: Sequence[HopperConfig], first: int) -> list[HopperConfig]:
    """All sizes, from the tallest on, but one in front: that at `first`, or the next one that gives each multiprocessor
    a tile. Narrow results need no cluster."""
    rows = rows_per_group(spec)
    while first < len(sizes) - 1 and _tiles(spec, rows, sizes[first].n_max) < FILLED * first_gpu_processors():
        first += 1
    order = [sizes[first], *sizes[:first], *sizes[first + 1 :]]
    if spec.n is not None and spec.n <= COLUMNS:
        order = [replace(config, cluster=1) for config in order]
    return order


def _tiles(spec: ProblemSpec, rows: int, n_max: int) -> int:
    """The estimated number of blocks with work, if groups are equal (and square, if widths differ by group)."""
    return spec.groups * -(-max(rows, 1) // n_max) * -(-_columns(spec) // COLUMNS)


def _columns(spec: ProblemSpec) -> int:
    return max(spec.n if spec.n is not None else rows_per_group(spec), 1)


def _generic(spec: ProblemSpec) -> list[Config]:
    """The configs of the generic kernel: first the tile with which the busiest multiprocessor has least to do.

    Large tiles require a plain epilogue: with others their sums do not fit the registers.
    """
    burdened = not signature_of(spec).plain or spec.compute == torch.float64
    costs = {c: TileCost(c.bm, c.bn, x) for c, x in GENERIC_COST.items() if not (burdened and c == GENERIC_LARGE)}
    return [*_briefest_first(costs, spec, 1)]


def problem_with(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    """Why a config, which a user may have given, cannot run this; "" if it can."""
    return _kernel_obstacle(config, spec, device) or variance(config, spec, device)


def _kernel_obstacle(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    if isinstance(config, QuantisedConfig | Float8Config) != bool(spec.quantised):
        return "quantised operands take a QuantisedConfig or a Float8Config, and no others do"
    if isinstance(config, QuantisedConfig):
        fitting = [QUANTISED, QUANTISED_FEW] if device.type == "cuda" else [QUANTISED_EMULATED]
        return "" if config in fitting else f"the kernel is made for {', '.join(map(str, fitting))}"
    if isinstance(config, GenericConfig):
        return _generic_obstacle(config, spec)
    if device.type != "cuda":
        return "it needs tensor cores, which the simulator lacks: use a GenericConfig"
    if isinstance(config, MmaConfig):
        known: tuple[Config, ...] = tuple(_mma_sizes(spec))
        found = mma_obstacle(spec, device)
    else:
        of_float8 = isinstance(config, Float8Config)
        found = float8_obstacle(spec, device) if of_float8 else hopper_obstacle(spec, device)
        sizes = HOPPER_SIZES if not of_float8 or found else _float8_sizes(spec)
        known = tuple(dict.fromkeys((*sizes, *(replace(size, cluster=1) for size in sizes))))
    return found or ("" if config in known else f"the kernel is made for {', '.join(map(str, known))}")


def _generic_obstacle(config: GenericConfig, spec: ProblemSpec) -> str:
    """Why threads cannot share a tile, and the parts of both operands that a step reads, without a remainder."""
    bm, bn, bk, tm, tn = config.bm, config.bn, config.bk, config.tm, config.tn
    if min(bm, bn, bk, tm, tn) < 1 or bm % tm or bn % tn:
        return f"a tile of {bm} x {bn} x {bk} is not made of parts of {tm} x {tn}: use multiples of them"
    if bm * bk % config.threads or bn * bk % config.threads or config.threads > MOST_THREADS:
        return (
            f"its {config.threads} threads cannot share {bm} x {bk} and {bk} x {bn} elements evenly: "
            f"use another bk, and {MOST_THREADS} threads at most"
        )
    needed = bk * (bm + bn + 2) * spec.acc.itemsize + 8 * (config.threads + 1)
    if needed > STATIC_SHARED:
        return f"{needed} bytes of shared memory exceed {STATIC_SHARED}: use a smaller tile"
    return ""


def why(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    """A sentence for a plan's repr: the kernel, what rules out a faster one, and how it sums if that matters."""
    what = _what(config, spec, device)
    return f"{what}; batch invariant: {summation_of(config, spec)}" if spec.batch_invariant else what


def _what(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    if isinstance(config, QuantisedConfig):
        where = ", simulated" if device.type != "cuda" else f"; wgmma: {float8_obstacle(spec, device) or 'not chosen'}"
        return f"{spec.quantised} operands in float32 on plain cores{where}"
    if isinstance(config, Float8Config):
        return f"float8 on tensor cores (wgmma, TMA), promoted after 128 of k, tiles of up to {config.n_max} rows"
    if isinstance(config, HopperConfig):
        return f"{spec.compute} on tensor cores (wgmma, TMA), tiles of up to {config.n_max} rows"
    kind = "plain cores"
    if isinstance(config, MmaConfig):
        kind = "tensor cores (mma.sync, cp.async)" if config.tensor else "plain cores (cp.async)"
    if device.type != "cuda":
        return f"{spec.compute} on plain cores, simulated"
    obstacle = hopper_obstacle(spec, device) or "not chosen"
    return f"{spec.compute} on {kind}; wgmma: {obstacle}"
