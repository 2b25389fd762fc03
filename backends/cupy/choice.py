"""Chooses a config without measuring, by rules in order of preference. The first rule that applies wins.

Numbers of tokens and groups change from call to call, and compiling a kernel at that moment would stall the call for
seconds. So the rules take these numbers as integers, for one problem, or as arrays, for all sizes that may come:
`first_choices` returns every config that any of them would choose, and the first call of a layout compiles these
together.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import torch

from multigemm.backends.cupy.config import (
    ALONE,
    COLUMNS,
    FP8,
    FP8_ALONE,
    FP8_BROAD,
    FP8_BROAD_ALONE,
    FP8_MIDDLE,
    FP8_NARROW,
    FP8_SINGLE,
    FP8_WIDE,
    FUSED_TOGETHER,
    GATED,
    GATHERED,
    GATHERED_TOGETHER,
    MIDDLE,
    NARROW,
    QUANTISED,
    SHIFT_A,
    SHIFT_A_MIDDLE,
    SHIFT_B,
    SHIFT_B_MIDDLE,
    SHIFT_B_NARROW,
    SINGLE,
    SLIM,
    SMALL_32,
    SMALL_64,
    SMALL_DEEP,
    SMALL_LISTS,
    TURNS,
    WEIGHTS_LOW,
    WEIGHTS_MIDDLE,
    WEIGHTS_NARROW,
    WEIGHTS_WIDE,
    WIDE,
    Config,
    capability_of,
    reasons_against,
    shape_fits,
)
from multigemm.backends.cupy.hopper_choice import hopper_rules
from multigemm.backends.cupy.odd_choice import odd_rules
from multigemm.backends.cupy.rules import FEW_COLUMNS, Counts, Layout, Rule, height_of, layout_of, rows_of, takes
from multigemm.backends.cupy.small_choice import few_tiles_rules, generic_rules
from multigemm.backends.cupy.support import (
    MAX_GROUPS,
    gathered_reasons,
    has_block_scales,
    has_gate,
    is_swapped,
    picks_rows,
    trades_sides,
    words_of,
)
from multigemm.planning.fused import products_spec
from multigemm.problem.spec import HALVES, ProblemSpec

WORDS_WORK, COPIED_WORDS_WORK = 1 << 25, 1 << 30
"""Products (rows x columns x k) of tf32 or int8 from which the Hopper kernel is taken, and after copies.

The first are the fewest that were measured, where it takes 0.5 to 0.8 of the generic kernel's time; the second a guess.
"""
SPARSE_ROWS = 32
"""Rows per group up to which tf32 and int8 want low tiles and many stages."""
FP8_SPARSE_ROWS = 32
"""Rows per group up to which float8 wants low tiles and many stages."""
CROWDED_ROWS = 100
"""Rows per group from which some groups of a random routing have more than 128, and tiles are higher."""
PICKED_ROWS = 48
"""Rows per group up to which picked rows are read where they lie, and not copied first."""
FULL_ROWS = 2
"""Rows of a masked group for each one that counts, as a guess: what lies behind the mask reads no weights. Lowest tiles
for 64 rows, H100, 2026-11-24, K = 7168, time over that of the next higher ones: 0.76 to 0.99 if 16 of them count on
average, 0.75 to 0.97 if 32 do, 1.03 to 1.23 if 48 or all do."""
FEW_WEIGHT_ROWS = 64
"""Rows per group up to which quantised weights are taken by tiles of as many; not measured."""
TOTALS = (0, *(1 << i for i in range(21)))
GROUPS = (*(1 << i for i in range(10)), MAX_GROUPS)
"""The numbers of tokens and groups for which kernels are compiled in advance."""


def _without_counts(spec: ProblemSpec) -> ProblemSpec:
    return replace(spec, total=0, groups=1)


class Judge:
    """Decides which configs are valid for a spec, like `is_valid`, but asks each kernel's module only once."""

    def __init__(self, spec: ProblemSpec, capability: tuple[int, int], known: Mapping[str, bool] | None = None) -> None:
        self._spec, self._capability, self._runs = spec, capability, dict(known or {})

    def accepts(self, config: Config) -> bool:
        """Whether the config can run the spec on the device."""
        runs = self._runs.get(config.kernel)
        if runs is None:
            runs = self._runs[config.kernel] = not reasons_against(config.kernel, self._spec)
        return runs and shape_fits(config, self._spec, self._capability)


def _order(spec: ProblemSpec) -> Iterator[Config]:
    """All configs, the best guess first; some occur more than once."""
    counts = Counts(spec.total, spec.groups, spec.total // max(spec.groups, 1))
    stages = _rules(layout_of(_without_counts(spec)), counts)
    return (config for rules in stages for holds, some in rules if holds for config in some)


@lru_cache(maxsize=1024)
def ranked(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Every shipped config that is valid for `spec`, the best guess first: the valid ones of `_order`."""
    spec = products_spec(spec)
    judge = Judge(spec, capability)
    return tuple(c for c in dict.fromkeys(_order(spec)) if judge.accepts(c))


def heuristic(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> Config:
    """The best guess without measuring."""
    return ranked(spec, capability)[0]


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """The configs of `ranked` for a device."""
    return list(ranked(spec, capability_of(device)))


def first_choices(spec: ProblemSpec, capability: tuple[int, int]) -> tuple[Config, ...]:
    """The heuristic's choices for the spec's layouts and extents, over all numbers of tokens and groups."""
    spec = replace(products_spec(spec), total=0, groups=1, largest=0)
    total, groups = (x.ravel() for x in np.meshgrid(np.array(TOTALS, float), np.array(GROUPS, float)))
    layout = layout_of(spec)
    known = {"small": layout.small, "small_list": layout.small_list, "hopper": layout.hopper}
    found, left, judge = dict[Config, None](), np.ones(total.size, bool), Judge(spec, capability, known)
    for rules in _rules(layout, Counts(total, groups, total // groups)):
        for holds, some in rules:
            for config in some:
                taken = left & holds
                if taken.nonzero()[0].size and judge.accepts(config):
                    taken &= takes(config, spec, total, groups)
                    if taken.nonzero()[0].size:
                        found[config] = None
                        left &= ~taken
        if not left.nonzero()[0].size:
            break
    return tuple(found)


def _rules(layout: Layout, counts: Counts) -> Iterator[list[Rule]]:
    """The rules in order of preference: pieces as high as the average group; copies only where they pay.

    They come in stages, because later ones need not be computed if an earlier one decides for all sizes.
    """
    if layout.spec.quantised:
        yield _quantised_rules(layout, counts)
        return
    if layout.spec.fused is not None and (layout.hopper or not gathered_reasons(layout.spec)):
        yield _fused_rules(layout, counts)
    words = layout.spec.fused is None and layout.spec.compute not in HALVES and bool(words_of(layout.spec))
    if words:
        yield _words_rules(layout, counts)
    if layout.spec.compute is torch.float64 and layout.hopper:
        yield _double_rules(layout, counts)
    if layout.spec.compute not in HALVES or layout.spec.fused is not None:
        yield list(generic_rules(layout, counts))
        yield [(words, WORDS), (words, tuple(replace(config, kernel="packed") for config in WORDS))]
        return
    yield few_tiles_rules(layout, counts)
    ladders = hopper_rules(layout, counts)
    yield [(holds, ladder.configs) for holds, ladder in ladders]
    yield odd_rules(layout, counts, ladders)
    shifting = (SHIFT_A, SHIFT_A_MIDDLE, SHIFT_B, SHIFT_B_MIDDLE, SHIFT_B_NARROW)
    yield [(True, (*shifting, SMALL_32, SMALL_64, SMALL_DEEP, *SMALL_LISTS))]


def _quantised_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for quantised operands: high tiles, which skewed sizes need, except for few rows per group.

    Fitted to times on an H200. Scales that cover all of k, 2026-11-22: e4m3, the 11 shapes of the suite `moe`, sizes
    balanced, zipf and with empty groups: a block alone takes 0.93 to 1.03 of the time of a cluster of two. Rows by
    blocks of 128 x 128, 2026-11-23, five shapes, balanced and zipf: tiles of 192 columns take 0.89 to 0.96 of the time
    of 128, and a cluster as long as a block alone, within 2 %.
    """
    rows = rows_of(layout, counts)
    if layout.spec.quantised == "weights":
        low = rows <= WEIGHTS_LOW.rows * (FULL_ROWS if layout.spec.form == "masked" else 1)
        return [(low, (WEIGHTS_LOW,)),
                (rows <= FEW_WEIGHT_ROWS, (WEIGHTS_NARROW,)), (rows <= WEIGHTS_MIDDLE.rows, (WEIGHTS_MIDDLE,)),
                (True, (WEIGHTS_WIDE, WEIGHTS_MIDDLE, WEIGHTS_NARROW, QUANTISED))]  # fmt: skip
    sparse = rows <= FP8_SPARSE_ROWS
    odd = layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    high = (FP8_ALONE, FP8_WIDE) if odd or has_block_scales(layout.spec) else (FP8_WIDE, FP8_ALONE)
    if trades_sides(layout.spec):
        high = (*((FP8_BROAD, FP8_BROAD_ALONE) if _fill_broad_tiles(layout) else ()), FP8_SINGLE, FP8_MIDDLE)
    return [(sparse, (FP8_SINGLE, FP8_NARROW)), (True, (*high, *FP8, QUANTISED))]


def _fill_broad_tiles(layout: Layout) -> bool:
    """Whether tiles of 192 columns pad the columns by at most 8 % more than tiles of 128."""
    columns = (layout.spec.m if is_swapped(layout.spec) else layout.spec.n) or layout.spec.largest
    return -(-columns // FP8_BROAD.columns) * FP8_BROAD.columns <= 1.08 * layout.columns * COLUMNS


def _fused_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for gates and picked rows on Hopper: tiles as high as the average group needs.

    Rows of small groups are picked on their way: the time is that of the weights (H200, 2026-11-23: 446 us of 443 for
    Mixtral's first product at 64 tokens). Those of large ones, which tiles read again and again, are copied first.
    Clusters that share the weights of picked rows come last: they were never timed.
    """
    rows, gated, picks = rows_of(layout, counts), has_gate(layout.spec), picks_rows(layout.spec)
    plain = GATED if gated else FUSED_TOGETHER
    found = list[Rule]()
    for height, holds in ((64, rows <= 48), (128, (rows > 48) & (rows <= CROWDED_ROWS)), (256, rows > CROWDED_ROWS)):
        alike = sorted(plain, key=lambda c: abs(c.rows - height))
        gathered = sorted(GATHERED if gated else (*GATHERED_TOGETHER, *GATHERED), key=lambda c: abs(c.rows - height))
        alone, shared = [c for c in gathered if c.cluster == 1], [c for c in gathered if c.cluster > 1]
        copied = [replace(c, kernel="gathered") for c in alike]
        if not picks:
            found.append((holds, tuple(alike)))
            continue
        found.append((holds & (rows <= PICKED_ROWS), (*alone, *copied, *shared)))
        found.append((holds & (rows > PICKED_ROWS), (*copied, *alone, *shared)))
    return found


TURNS_ALONE = replace(TURNS, cluster=1)
WORDS = (TURNS, TURNS_ALONE, WIDE, ALONE, MIDDLE, SINGLE, NARROW, SLIM)
"""The Hopper kernel's configs for tf32 and int8."""


def _words_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for tf32 and int8, after copies where TMA and wgmma need them: low tiles if each multiprocessor gets at
    most one.

    Else tall ones, which read the weights of a large group once.

    Fitted to times on an H200, 2026-11-23 (docs/notes/cupy-hopper.md); groups of up to 32 rows were not measured.
    """
    spec, rows = layout.spec, rows_of(layout, counts)
    height = height_of(layout) if spec.form == "jagged_k" else rows
    depth = height if spec.form == "jagged_k" else layout.k or COLUMNS
    work = counts.total * layout.columns * COLUMNS * depth
    odd = layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    turns, wide = ((TURNS_ALONE, TURNS), (ALONE, WIDE)) if odd else ((TURNS, TURNS_ALONE), (WIDE, ALONE))
    low, middle = (-(-height // side) * counts.groups * layout.columns <= layout.processors for side in (64, 128))
    found, left = list[Rule](), True
    for holds, some in (
        (low, (SLIM, SINGLE)),
        (middle, (SINGLE, SLIM)),
        (rows <= SPARSE_ROWS, (SINGLE, MIDDLE, NARROW)),
        (rows <= 128, (*turns, MIDDLE, SINGLE)),
        (True, (*turns, *wide, MIDDLE)),
    ):
        found.append((left & holds & (work >= WORDS_WORK), some))
        found.append((left & holds & (work >= COPIED_WORDS_WORK), tuple(replace(c, kernel="packed") for c in some)))
        left = left & (holds ^ True)
    return found


def _double_rules(layout: Layout, counts: Counts) -> list[Rule]:
    """The rules for float64 that TMA can read: low tiles if each multiprocessor gets at most one."""
    height = height_of(layout) if layout.spec.form == "jagged_k" else rows_of(layout, counts)
    low, middle = (-(-height // side) * counts.groups * layout.columns <= layout.processors for side in (64, 128))
    odd = layout.columns % 2 == 1 and layout.columns <= FEW_COLUMNS
    tall = (SINGLE, MIDDLE) if odd else (MIDDLE, SINGLE)
    return [(low, (SLIM, SINGLE)), (middle, (SINGLE, SLIM)), (True, (*tall, SLIM, NARROW))]
