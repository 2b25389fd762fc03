"""The choices that a kernel leaves open, as frozen values, and the one predicate that judges them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from multigemm.backends.cupy import few_tiles, shapes
from multigemm.backends.cupy.specs import (
    MAX_GROUPS,
    direct_reasons,
    has_odd_lines,
    hopper_reasons,
    is_swapped,
    packed_reasons,
    plain_kind,
    sends,
    small_reasons,
    wave_reasons,
)
from multigemm.cuda.device import FITTED_PROCESSORS as PROCESSORS
from multigemm.problem.spec import ProblemSpec

COLUMNS = 128
"""Columns of a result that one thread block of the Hopper kernel owns."""
TURNS_GROUPS = 448
"""Groups that the Hopper kernel's schedule holds where the stages leave it little room."""
ODD_WEIGHTS = 24576
"""Bytes of a stage of weights whose lines begin anywhere, the larger of both layouts (weights.cuh)."""
SHARED_LIMIT = 232448
"""Bytes of shared memory that one thread block may have on compute capability 9.0."""


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a problem.

    `portable` takes any problem, in tiles of `tile` squared (32 is not for 16 bits), with `blocks_per_sm` resident
    blocks. `hopper` cuts a group's rows into pieces of at most `rows`, whose width on wgmma's n side is a multiple
    of `step`; `stages` blocks of 64 k are in flight, or more of lower pieces; `cluster` thread blocks share their
    rows; `pingpong`: the two warpgroups of a block work on a tile each, not together on one, so that one stores
    while the other multiplies. `packed` copies the operands that TMA cannot read and then runs `hopper` on the
    copies. `direct` copies the rows at most and shifts the weights into place itself. `small` gives each tile of
    `tile` squared a thread block of its own, with four blocks of k in flight, or `stages` where lines begin anywhere.
    `wave` gives a thread block to each tile of a list or batch, laid out by the host; `rows` 0 leaves their height
    to it, which knows all sizes.
    """

    kernel: Literal["portable", "hopper", "packed", "direct", "small", "wave"] = "portable"
    blocks_per_sm: int = 2
    tile: int = 128
    rows: int = 0
    stages: int = 0
    cluster: int = 1
    step: int = 16
    pingpong: bool = False

    def shared_bytes(self, plain: bool) -> int:
        """Dynamic shared memory of the Hopper kernel, and of the one that shifts its weights."""
        weights = self.weight_stages * ODD_WEIGHTS if self.kernel == "direct" else self.stages * COLUMNS * 128
        return self.stages * self.rows * 128 + weights + 2 * (8192 if plain else 9216) + self._bookkeeping

    @property
    def _bookkeeping(self) -> int:
        """Bytes of the schedule, of tiles and barriers."""
        return 16 * self.groups_at_most + 1024 + 768

    @property
    def weight_stages(self) -> int:
        """Stages of weights in a ring of their own (direct.cu): as many as fit beside those of the rows."""
        room = SHARED_LIMIT - self.stages * self.rows * 128 - 2 * 9216 - self._bookkeeping
        return min(room // ODD_WEIGHTS, self.stages)

    @property
    def footprint(self) -> tuple[int, int, int]:
        """Rows and columns of a result that thread blocks make together, and how many: what a round of them takes."""
        if self.kernel in ("portable", "small"):
            return self.tile, self.tile, 1
        return self.rows or 256, COLUMNS * self.cluster, self.cluster

    @property
    def groups_at_most(self) -> int:
        """What its share of the shared memory lets the schedule hold."""
        full = self.pingpong or (self.kernel == "direct" and self.rows == DIRECT.rows)
        return TURNS_GROUPS if full else MAX_GROUPS


PORTABLE = Config(blocks_per_sm=1)
PAIR = Config(blocks_per_sm=2)
SMALL = Config(blocks_per_sm=3, tile=64)
TINY = Config(blocks_per_sm=3, tile=32)
WIDE = Config("hopper", rows=256, stages=4, cluster=2)
MIDDLE = Config("hopper", rows=128, stages=6, cluster=2)
NARROW = Config("hopper", rows=64, stages=8, cluster=2)
SINGLE = Config("hopper", rows=128, stages=6, cluster=1)
SLIM = Config("hopper", rows=64, stages=8, cluster=1)
TURNS = Config("hopper", rows=192, stages=5, cluster=2, pingpong=True)
ALONE = Config("hopper", rows=256, stages=4, cluster=1)
DIRECT = Config("direct", rows=256, stages=4, cluster=2, step=8)
DIRECT_MIDDLE = Config("direct", rows=128, stages=6, cluster=2, step=8)
DIRECT_NARROW = Config("direct", rows=64, stages=7, cluster=2, step=8)
WAVE = Config("wave")
WAVES = (WAVE, *(Config("wave", rows=r, stages=s) for r, s in ((64, 8), (80, 7), (128, 6), (192, 5), (256, 4))))
CUBE = Config("small", tile=32)
CUBE64 = Config("small", tile=64)
DEEP = Config("small", tile=32, stages=8)
ONE_WAVE = 160
"""Tiles of the small kernel that run at once, with room for the rounding of totals to powers of two."""
RESIDENT, ROUNDS, FULL_ROWS, WAVE_WORK = 264, 528, 192, 1 << 34
"""Tiles of 128 x 128 up to which the wave kernel is faster; of 256 x 128, rows and products, if nothing is copied."""
FEW_K, STAGES = 1024, 4
"""k per group up to which results of jagged k that one round of low tiles covers are not cut into tall ones; blocks of
k that the small kernel has in flight, if a config does not say it."""

SMALL_ROWS, SMALL_COLUMNS = 2048, 1024
"""Below these a result has fewer tiles than the GPU has processors: small tiles, no clusters."""
WORTH_COPYING = 1 << 24
"""Products (rows x columns x k) from which a copy costs less than the portable kernel."""
SPARSE_ROWS, FEW_ROWS = 32, 1024
"""Rows per group up to which weights that are shifted as they are read want low tiles and many stages; up to which they
are shifted at all: more rows repay a copy of the weights."""
SHORT_K, BRIEF_K = 768, 128
"""Up to here a list's odd operands are copied for the wave kernel, whatever the tiles; small tiles beat a wave."""
FEW_COLUMNS, LONG_K = 15, 2048
"""Odd numbers of blocks of columns up to which clusters of two would waste too much; k from which tiles of few rows are
as high as for many: then a large group's weights are read once."""
HALVES = (torch.float16, torch.bfloat16)
THIN_K = 128
"""k per group of jagged k up to which storing is most of the work: clusters would share rows that cost nothing."""
MANY_ROWS = 448
"""Rows per group from which warpgroups take turns: lower tiles read weights more often, but hide their stores."""


def is_valid(config: Config, spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> bool:
    """Whether `config` runs `spec` on a device: the limits of shared memory and registers included."""
    if config.kernel == "portable":
        return 1 <= config.blocks_per_sm <= 3 and shapes.fits(spec, config.tile, capability)
    if config.kernel == "small":
        known = config in (CUBE, CUBE64) or (config == DEEP and has_odd_lines(spec))
        return known and not small_reasons(spec)
    if config.kernel == "wave":
        return config in WAVES and capability == (9, 0) and not wave_reasons(spec)
    stages = config.weight_stages if config.kernel == "direct" else config.stages
    known = config.rows in (64, 128, 192, 256) and stages >= 2
    fits = known and config.shared_bytes(plain_kind(spec) > 0) <= SHARED_LIMIT
    shape = config.cluster in (1, 2, 4) and config.step in (8, 16, 32, 64)
    shape = shape and spec.groups <= config.groups_at_most
    shape = shape and (not config.pingpong or (config.rows <= 192 and plain_kind(spec) > 0))
    check = {"packed": packed_reasons, "direct": direct_reasons}.get(config.kernel, hopper_reasons)
    reasons = check(spec)
    return fits and shape and capability == (9, 0) and not reasons


def heuristic(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> Config:
    """The best guess without measuring: the first valid one of `_order`."""
    return next(c for c in _order(spec) if is_valid(c, spec, capability))


def _order(spec: ProblemSpec) -> list[Config]:
    """All configs, the best guess first: pieces as high as the average group; copies only where they pay."""
    if spec.compute not in HALVES:
        return _portable_order(spec)
    small, wave = _small_order(spec) or _few_k_order(spec), _wave_order(spec)
    first = (*wave, *small) if (spec.k or spec.largest) > BRIEF_K else (*small, *wave)
    rest = (DIRECT, DIRECT_MIDDLE, DIRECT_NARROW, CUBE, CUBE64, DEEP, *WAVES)
    return list(dict.fromkeys((*first, *_larger(spec), *rest)))


def _portable_order(spec: ProblemSpec) -> list[Config]:
    """What runs nowhere else: the tile with which the busiest processor has least to do."""
    here = [c for c in (PAIR, PORTABLE, SMALL, TINY) if c.tile in shapes.shapes_of(spec)]
    alone = shapes.shapes_of(spec)[128].resident == 1
    here.remove(PAIR if alone else PORTABLE)
    return [*sorted(here, key=lambda config: _longest_time(spec, config.tile)), PAIR if alone else PORTABLE]


def _longest_time(spec: ProblemSpec, tile: int) -> float:
    """Of the processor that has most tiles."""
    return spec.busiest(tile, tile, PROCESSORS) * shapes.shapes_of(spec)[tile].cost


def _wave_order(spec: ProblemSpec) -> list[Config]:
    """A block for each tile, where few rounds of blocks take all of them; lists may hide larger columns than rows."""
    columns, k = max(spec.n or spec.largest, 1), spec.k or spec.largest
    rows = _rows_per_group(spec)
    if spec.total == 0 or rows < 64 or wave_reasons(spec):
        return []
    low, high = (max(-(-spec.total // tile), spec.groups) * -(-columns // COLUMNS) for tile in (128, 256))
    if hopper_reasons(spec):
        return [WAVE] if low <= RESIDENT or k <= SHORT_K else []
    several = high <= ROUNDS and rows >= FULL_ROWS and spec.total * columns * k <= WAVE_WORK
    return [WAVE] if low <= RESIDENT or several else []


def _small_order(spec: ProblemSpec) -> list[Config]:
    """The small kernel where one wave of its tiles is enough and k is short, the larger tile for the longer k."""
    if small_reasons(spec) or has_odd_lines(spec):
        return []
    tiles, k = {c: few_tiles.most_tiles(spec, c.tile) for c in (CUBE, CUBE64)}, spec.usual("k")
    if 0 < tiles[CUBE] <= ONE_WAVE and k <= (FEW_K if spec.form == "jagged_k" else 512):
        return [CUBE, CUBE64]
    return [CUBE64, CUBE] if 0 < tiles[CUBE64] <= ONE_WAVE and k <= 256 else []


def _few_k_order(spec: ProblemSpec) -> list[Config]:
    """Jagged k that one round of low tiles covers: the small kernel for one block of k, which is all start and end.

    Else the Hopper kernel's low tiles, which leave fewer processors idle than its tall ones and end sooner.
    """
    k = spec.usual("k")
    if spec.form != "jagged_k" or small_reasons(spec) or hopper_reasons(spec) or k > FEW_K:
        return []
    brief = k <= few_tiles.BLOCK_K and 0 < few_tiles.result_tiles(spec, CUBE64.tile) <= few_tiles.AT_ONCE
    single = 0 < few_tiles.result_tiles(spec, SINGLE.rows) <= PROCESSORS
    return [c for c, good in ((CUBE64, brief), (SINGLE, single)) if good]


def _odd_order(spec: ProblemSpec) -> list[Config]:
    """The small kernel where lines begin anywhere and it is clearly faster; more blocks of k in flight where there are
    more, if all tiles still run at once."""
    if small_reasons(spec) or not has_odd_lines(spec) or not few_tiles.odd_tiles_win(spec, CUBE.tile):
        return []
    deep = few_tiles.blocks(spec) > STAGES and few_tiles.most_tiles(spec, DEEP.tile) <= few_tiles.AT_ONCE
    return [DEEP, CUBE] if deep else [CUBE, DEEP]


def _larger(spec: ProblemSpec) -> list[Config]:
    fast, rows = _hopper_order(spec), _rows_per_group(spec)
    usual = fast[0] if rows > FEW_ROWS else next(c for c in fast if not c.pingpong)
    tall = rows > FEW_ROWS and not sends(spec) and usual in (ALONE, TURNS)  # odd results: high tiles end least often
    copied, other = (replace(c, kernel="packed") for c in (WIDE if tall else usual, usual))
    work = spec.total * (spec.n or 256) * (spec.k or 256)
    if work >= WORTH_COPYING:
        shifted = DIRECT_MIDDLE if rows <= SPARSE_ROWS else DIRECT
        few = (spec.total // max(spec.groups, 1)) <= FEW_ROWS
        return [*fast, *((shifted, copied) if few else (copied, shifted)), other, PORTABLE, SMALL]
    portable = (SMALL, PORTABLE) if spec.total <= SMALL_ROWS else (PORTABLE, SMALL)
    return [*fast, *_odd_order(spec), *portable, copied]


def _rows_per_group(spec: ProblemSpec) -> int:
    """What is known of them before any size is: the mean; a whole tile where the jagged direction is another."""
    return spec.total // max(spec.groups, 1) if spec.form != "jagged_k" else WIDE.rows


def _tall_tiles(spec: ProblemSpec, rows: int) -> int:
    """Tiles of 256 rows and 128 columns, if all groups have as many rows; enough of them for jagged k."""
    pieces = -(-rows // WIDE.rows) * spec.groups if spec.form != "jagged_k" else PROCESSORS + 1
    return pieces * _columns(spec)


def _columns(spec: ProblemSpec) -> int:
    """Blocks of columns that a result has; a cluster of two leaves the last of an odd number of them alone."""
    return max(-(-((spec.m if is_swapped(spec) else spec.n) or spec.largest) // COLUMNS), 1)


def _hopper_order(spec: ProblemSpec) -> list[Config]:
    if spec.total <= SMALL_ROWS and (spec.n or 0) <= SMALL_COLUMNS and spec.form != "jagged_k":
        return [SINGLE, SLIM, WIDE] if spec.form == "per_group" or spec.total > 1024 else [SLIM, SINGLE, WIDE]
    rows = _rows_per_group(spec)
    if rows > 64 and _tall_tiles(spec, rows) <= PROCESSORS:
        return [SINGLE, SLIM, WIDE]
    if rows <= 32:
        return [SINGLE, NARROW, MIDDLE, WIDE]
    if rows <= 64 and (spec.k or spec.largest) < LONG_K:
        return [MIDDLE, WIDE, NARROW]
    columns = _columns(spec)
    known = spec.form not in ("jagged_k", "per_group")  # a list's columns change from call to call
    thin = spec.form == "jagged_k" and spec.total <= THIN_K * spec.groups
    single = [ALONE] if thin or (known and columns % 2 and columns <= FEW_COLUMNS) else []
    turns = [TURNS] if plain_kind(spec) and spec.groups <= TURNS_GROUPS else []
    first = turns if (rows > MANY_ROWS or spec.form == "jagged_k") and not sends(spec) else []
    return list(dict.fromkeys((*single, *first, WIDE, *turns, ALONE, MIDDLE, NARROW)))


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Every shipped config that is valid for `spec`, the best guess first."""
    capability = capability_of(device)
    return [c for c in _order(spec) if is_valid(c, spec, capability)]


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """A device's; Hopper's where there is none to ask, so that configs can be listed on a laptop."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else (9, 0)
