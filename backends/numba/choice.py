"""Which configs are valid for a spec on a device, the best guess first, and why."""

from __future__ import annotations

from dataclasses import replace

import torch

from multigemm.backends.numba.config import (
    FMA_SMALL,
    FMA_TALL,
    HOPPER,
    HOPPER_MEDIUM,
    HOPPER_NARROW,
    MMA,
    MMA_SMALL,
    MMA_TALL,
    SIMT,
    SIMT_EMULATED,
    SIMT_LARGE,
    SIMT_LOW,
    Config,
    HopperConfig,
    MmaConfig,
    SimtConfig,
    a_inner_jagged,
    b_inner_jagged,
    signature_of,
    summation_of,
)
from multigemm.backends.numba.layout import COLUMNS, ROW_BYTES
from multigemm.backends.numba.support import capability_of
from multigemm.cuda.summation import difference
from multigemm.problem.spec import ProblemSpec

FEW_ROWS = 64
SOME_ROWS = 128
SHALLOW = 512
"""The k up to which small problems are better off without TMA and wgmma."""
TMA_ALIGN = ROW_ALIGN = 16
MMA_MINIMUM = (8, 0)
DOUBLE_MINIMUM = (9, 0)
"""Where mma.sync multiplies 16 x 8 float64 at once."""
MULTIPROCESSORS = 128
"""Of an ordinary Hopper GPU (they have 114 to 132)."""
HALVES = (torch.float16, torch.bfloat16)
SIMT_COST = {SIMT_LARGE: 1.0, SIMT: 1.9, SIMT_LOW: 2.1}
"""What a product takes in a tile on plain cores, relative to the largest: float32 on an H200."""
SMALL_COST = {MMA_SMALL: 1.17, FMA_SMALL: 1.06}
"""What a product takes in a small tile, relative to a tall one: float64 and float32 on an H100, K of 2048."""
TALL_FILL = 2 * ROW_BYTES
"""Bytes of k in whose time a tall tile begins and ends; beside a small one, more others multiply meanwhile."""
MOST_THREADS = 1024
STATIC_SHARED = 48 * 1024
"""Bytes of shared memory that a kernel may declare."""


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Configs that are right for this spec; the first is the heuristic's choice."""
    return [config for config in _ranked(spec, device) if not variance(config, spec, device)]


def variance(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    """Why a config that runs a problem has not the bits that batch invariance demands, or ''.

    Those of the kernel that takes any layout and size of these dtypes: by mma.sync and its like, or on plain cores.
    """
    if not spec.batch_invariant:
        return ""
    general: Config = SIMT if device.type == "cuda" else SIMT_EMULATED
    if device.type == "cuda" and not mma_obstacle(spec, device):
        general = _mma_sizes(spec)[-1]
    return difference(summation_of(config, spec), summation_of(general, spec), capability_of(device))


def _ranked(spec: ProblemSpec, device: torch.device) -> list[Config]:
    if device.type != "cuda":
        return [SIMT_EMULATED]
    hopper, mma = _hopper(spec, device), _mma(spec, device)
    if _is_plain_float32(spec) and min(spec.a.align, spec.b.align) < ROW_ALIGN:
        return _simt(spec) + mma  # element by element, plain loads wait less than asynchronous copies
    return (mma + hopper if mma and _is_small(spec) else hopper + mma) + _simt(spec)


def _is_plain_float32(spec: ProblemSpec) -> bool:
    return spec.compute == torch.float32 and spec.precision != "tf32"


def _is_small(spec: ProblemSpec) -> bool:
    """Whether all is over so soon that the time to begin counts most, which is shorter without TMA."""
    k = spec.k if spec.k is not None else rows_per_group(spec)
    tiles = spec.groups * -(-_columns(spec) // MMA_SMALL.bn) * -(-max(rows_per_group(spec), 1) // MMA_SMALL.bm)
    return spec.form != "jagged_k" and tiles <= MULTIPROCESSORS and k <= SHALLOW


def rows_per_group(spec: ProblemSpec) -> int:
    """The height of an ordinary group, as far as the host knows it."""
    if spec.largest:
        return spec.largest
    if spec.form in ("jagged_n", "jagged_k", "batched", "masked"):
        return spec.m or 0
    return spec.total // max(spec.groups, 1)


def hopper_obstacle(spec: ProblemSpec, device: torch.device) -> str:
    """Why the Hopper kernel cannot run this; empty when it can."""
    if capability_of(device)[0] != 9:
        return f"needs compute capability 9.x, this GPU has {capability_of(device)}"
    if _dtype_obstacle(spec):
        return _dtype_obstacle(spec)
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if operand.order == "strided" or not operand.dense:
            return f"{name} is not contiguous in one direction, which TMA needs"
        if operand.align < TMA_ALIGN:
            return f"{name} is aligned to {operand.align} bytes, TMA needs {TMA_ALIGN}"
    if a_inner_jagged(spec) or b_inner_jagged(spec):
        return "offsets cut the contiguous direction of an operand, where TMA needs aligned starts"
    if spec.compute == torch.float32 and (spec.a.order != "row" or spec.b.order != "col"):
        return "tf32 operands of wgmma must be contiguous along k"
    return ""


def mma_obstacle(spec: ProblemSpec, device: torch.device) -> str:
    """Why the sm_80 kernel cannot run this; empty when it can."""
    if capability_of(device) < MMA_MINIMUM:
        return f"needs compute capability {MMA_MINIMUM}, this GPU has {capability_of(device)}"
    if spec.compute == torch.float64 and capability_of(device) < DOUBLE_MINIMUM:
        return f"float64 needs compute capability {DOUBLE_MINIMUM}, this GPU has {capability_of(device)}"
    return ""


def _dtype_obstacle(spec: ProblemSpec) -> str:
    if spec.compute in HALVES or (spec.compute == torch.float32 and spec.precision == "tf32"):
        return ""
    return f"{spec.compute} with precision={spec.precision!r} does not run on these tensor cores"


def _mma_sizes(spec: ProblemSpec) -> list[MmaConfig]:
    """The larger tile first."""
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
        sizes.sort(key=lambda config: _duration(config, spec))
        return [*sizes]
    rows = rows_per_group(spec)
    small = rows <= FEW_ROWS or _tiles(spec, rows, MMA.bm) < MULTIPROCESSORS
    return [MMA_SMALL, MMA] if small else [MMA, MMA_SMALL]


def _duration(config: MmaConfig, spec: ProblemSpec) -> float:
    """Of the multiprocessor with most tiles, with what hangs over groups: in products of a tall tile."""
    k = spec.usual("k")
    each = k * SMALL_COST[config] if config in SMALL_COST else k + TALL_FILL // spec.compute.itemsize
    return spec.busiest(config.bm, config.bn, MULTIPROCESSORS) * each


def _hopper(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """The tallest tile that groups fill and that leaves no multiprocessor idle comes first."""
    if hopper_obstacle(spec, device):
        return []
    sizes = [HOPPER, HOPPER_MEDIUM, HOPPER_NARROW]
    rows = rows_per_group(spec)
    first = 0 if rows > SOME_ROWS else 1
    while first < 2 and _tiles(spec, rows, sizes[first].n_max) < MULTIPROCESSORS:
        first += 1
    order = [sizes[first], *sizes[:first], *sizes[first + 1 :]]
    if spec.n is not None and spec.n <= COLUMNS:
        order = [replace(config, cluster=1) for config in order]
    return list(order)


def _tiles(spec: ProblemSpec, rows: int, n_max: int) -> int:
    """About how many blocks have work, if groups are alike (and square, where the width differs by group)."""
    return spec.groups * -(-max(rows, 1) // n_max) * -(-_columns(spec) // COLUMNS)


def _columns(spec: ProblemSpec) -> int:
    return max(spec.n if spec.n is not None else rows_per_group(spec), 1)


def _simt(spec: ProblemSpec) -> list[Config]:
    """First the tile with which the busiest multiprocessor has least to do.

    Large ones need a plain epilogue: others push their sums out of the registers.
    """
    sizes: list[SimtConfig] = [SIMT_LARGE, SIMT, SIMT_LOW]
    if not signature_of(spec).plain or spec.compute == torch.float64:
        sizes.remove(SIMT_LARGE)
    sizes.sort(key=lambda config: spec.busiest(config.bm, config.bn, MULTIPROCESSORS) * SIMT_COST[config])
    return [*sizes]


def obstacle(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    """Why a config, which may be given by hand, cannot run this; empty when it can."""
    return _kernel_obstacle(config, spec, device) or variance(config, spec, device)


def _kernel_obstacle(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    if isinstance(config, SimtConfig):
        return _simt_obstacle(config, spec)
    if device.type != "cuda":
        return "it needs tensor cores, which the simulator lacks: use a SimtConfig"
    if isinstance(config, MmaConfig):
        known: tuple[Config, ...] = tuple(_mma_sizes(spec))
        found = mma_obstacle(spec, device)
    else:
        known = (HOPPER, HOPPER_MEDIUM, HOPPER_NARROW, replace(HOPPER, cluster=1))
        found = hopper_obstacle(spec, device)
    return found or ("" if config in known else f"the kernel is made for {', '.join(map(str, known))}")


def _simt_obstacle(config: SimtConfig, spec: ProblemSpec) -> str:
    """Threads share a tile, and the parts of both operands that a step reads, without a rest."""
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
    """A sentence for a plan's repr: what runs, what keeps a faster kernel from it, and how it sums if that matters."""
    what = _what(config, spec, device)
    return f"{what}; batch invariant: {summation_of(config, spec)}" if spec.batch_invariant else what


def _what(config: Config, spec: ProblemSpec, device: torch.device) -> str:
    if isinstance(config, HopperConfig):
        return f"{spec.compute} on tensor cores (wgmma, TMA), tiles of up to {config.n_max} rows"
    kind = "plain cores"
    if isinstance(config, MmaConfig):
        kind = "tensor cores (mma.sync, cp.async)" if config.tensor else "plain cores (cp.async)"
    if device.type != "cuda":
        return f"{spec.compute} on plain cores, simulated"
    obstacle = hopper_obstacle(spec, device) or "not chosen"
    return f"{spec.compute} on {kind}; wgmma: {obstacle}"
