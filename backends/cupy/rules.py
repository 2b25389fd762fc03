"""What the rules of a choice are made of: a layout, numbers of tokens and groups, and conditions over them.

The numbers are integers, for one problem, or arrays, for all sizes that may come (`choice.first_choices`). What is
fitted to times is so in bfloat16 on an H100 or H200 (docs/notes/cupy-hopper.md); `multigemm tune` times every config
of a class of problems, which is how to fit it anew.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from multigemm.backends.cupy.config import COLUMNS, WIDE, Config
from multigemm.backends.cupy.support import (
    MAX_GROUPS,
    MAX_LISTED_GROUPS,
    MAX_ROWS,
    SMALL_MAX_ROWS,
    has_odd_lines,
    hopper_plain_kind,
    hopper_reasons,
    is_swapped,
    sends,
    small_list_reasons,
    small_reasons,
)
from multigemm.cuda.device import first_gpu_processors
from multigemm.planning.tiles import Number
from multigemm.problem.spec import ProblemSpec

FEW_COLUMNS = 15
"""Odd numbers of blocks of columns up to which clusters of two would waste too much."""
Condition = Any
"""Whether something holds: a bool, or an array of them."""
Rule = tuple[Condition, tuple[Config, ...]]
"""A condition, and the configs to use where it holds, the best first."""


class Layout(NamedTuple):
    """What is known of a problem without its numbers of tokens and groups, beyond `spec`."""

    spec: ProblemSpec
    small: bool
    small_list: bool
    hopper: bool
    odd_lines: bool
    sends: bool
    plain: bool
    columns: int
    """The blocks of columns of a result."""
    k: int
    """The inner extent; 0 if it differs by group and none is known."""
    processors: int


class Counts(NamedTuple):
    """Numbers of tokens, numbers of groups, and tokens per group."""

    total: Number
    groups: Number
    mean: Number


@lru_cache(maxsize=1024)
def layout_of(spec: ProblemSpec) -> Layout:
    """The layout of a spec."""
    columns = max(-(-((spec.m if is_swapped(spec) else spec.n) or spec.largest) // COLUMNS), 1)
    return Layout(
        spec, not small_reasons(spec), not small_list_reasons(spec), not hopper_reasons(spec), has_odd_lines(spec),
        sends(spec), hopper_plain_kind(spec) > 0, columns, spec.k or spec.largest, first_gpu_processors(),
    )  # fmt: skip


def takes(config: Config, spec: ProblemSpec, total: Number, groups: Number) -> Condition:
    """Whether a config that is valid for a layout is also valid for these numbers, as `is_valid` says."""
    if config.kernel == "generic":
        return True
    if config.kernel == "small":
        return (total <= SMALL_MAX_ROWS) & (
            groups <= (MAX_LISTED_GROUPS if spec.form == "per_group" else SMALL_MAX_ROWS)
        )
    fits = groups <= (MAX_LISTED_GROUPS if config.kernel == "small_list" else min(config.groups_at_most, MAX_GROUPS))
    if config.columns != COLUMNS and spec.form in ("jagged_m", "jagged_n"):
        return fits & (total <= MAX_ROWS)  # support.sends
    return fits


def holds_somewhere(holds: Condition) -> bool:
    """Whether a condition holds for any of the numbers."""
    return bool(holds.nonzero()[0].size if isinstance(holds, np.ndarray) else holds)


def larger(x: Number, y: Number) -> Number:
    """The larger of two, element by element."""
    return np.maximum(x, y) if isinstance(x, np.ndarray) or isinstance(y, np.ndarray) else max(x, y)


def rows_of(layout: Layout, counts: Counts) -> Number:
    """Rows per group; a whole tile if another direction is jagged."""
    return counts.mean if layout.spec.form != "jagged_k" else WIDE.rows


def height_of(layout: Layout) -> int:
    """Rows of a result of jagged k, as the Hopper kernel's tiles count them."""
    return (layout.spec.n if is_swapped(layout.spec) else layout.spec.m) or COLUMNS


def most_tiles(layout: Layout, counts: Counts, side: int) -> Number:
    """An upper bound on the tiles of any sizes; 0 if there are none, or if some extent of a list differs."""
    spec = layout.spec
    if spec.form != "jagged_k" and spec.k is None:
        return 0 * counts.total
    rows = (spec.m or 0) * counts.groups if spec.form == "jagged_k" else counts.total
    columns = spec.m if spec.form == "jagged_n" else spec.n
    return (rows // side + counts.groups) * -(-(columns or 0) // side) * (rows > 0)


def result_tiles(spec: ProblemSpec, counts: Counts, side: int) -> Number:
    """The number of result tiles of jagged k, whose results all have one size."""
    return counts.groups * -(-(spec.m or 0) // side) * -(-(spec.n or 0) // side)


def sends_at(layout: Layout, counts: Counts) -> Condition:
    """Whether the copy engine stores the results, as `support.sends` says, for these numbers."""
    return layout.sends & ((counts.total <= MAX_ROWS) | (layout.spec.form not in ("jagged_m", "jagged_n")))
