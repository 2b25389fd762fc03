"""Binds the Hopper kernel for float8: maps of bytes, and the scales of the row side and of the weight side.

Its sides are those of `hopper`, and k is contiguous in both.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import HEIGHTS, Side, result_map
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, Config
from multigemm.backends.cupy.hopper import Clusters, results_of
from multigemm.backends.cupy.quantised import grid_bytes
from multigemm.backends.cupy.support import has_block_scales, is_swapped, plain_kind, sends
from multigemm.cuda.arguments import Argument, Fields, join
from multigemm.cuda.driver import on_device
from multigemm.cuda.tensor_map import BLANK, encode_together
from multigemm.planning.operands import Operands, Packed, Strided, view_of
from multigemm.problem.spec import OperandSpec, ProblemSpec

LINE = 128
"""Bytes, so numbers, of k in a line of a stage."""


def sides(spec: ProblemSpec) -> tuple[OperandSpec, OperandSpec]:
    """The operands of the row side and of the weight side."""
    return (spec.b, spec.a) if is_swapped(spec) else (spec.a, spec.b)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: which float8, how results leave, where scales change, and the config."""
    x, w = sides(spec)
    lines = w.scale is not None and w.scale.rows == 1
    e5m2 = tuple(s.dtype is torch.float8_e5m2 for s in (w, x))
    bfloat = spec.out.dtype is torch.bfloat16
    return _source(e5m2, has_block_scales(spec), lines, bfloat, plain_kind(spec), sends(spec), config)


@lru_cache(maxsize=1024)
def _source(
    e5m2: tuple[bool, ...], blocks: bool, lines: bool, bfloat: bool, plain: int, sent: bool, config: Config
) -> Source:
    shared = config.shared_bytes(plain > 0)
    defines = (
        ("W_E5M2", int(e5m2[0])), ("X_E5M2", int(e5m2[1])), ("BLOCK_SCALES", int(blocks)), ("W_LINES", int(lines)),
        ("BFLOAT", int(bfloat)), ("PLAIN", plain), ("SEND", int(sent)), ("ROWS", config.rows),
        ("STAGES", config.stages), ("CLUSTER", config.cluster), ("STEP", config.step), ("SHARED", shared),
    )  # fmt: skip
    return Source("hopper_fp8.cu", "hopper_fp8", defines, shared)


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels that the spec's problems may launch under this config."""
    return (source(spec, config),)


def _side(view: Strided, step: int, mn: int, k: int, groups: int) -> Side:
    return Side(view.ptr, mn, k, groups if view.group else 1, step, view.group, True, torch.uint8)


def sides_of(view: Packed, swapped: bool) -> tuple[Side, Side]:
    """The row side and the weight side of a packed form."""
    left = _side(view.a, view.a.row, view.m, view.k, view.groups)
    right = _side(view.b, view.b.col, view.n, view.k, view.groups)
    return (right, left) if swapped else (left, right)


def line_maps(side: Side, heights: tuple[int, ...]) -> Fields:
    """Maps with boxes of 128 of k by so many lines."""
    if side.mn == 0 or side.k == 0 or side.groups == 0:
        return join([BLANK] * len(heights))
    boxes = tuple((LINE, height, 1) for height in heights)
    strides = max(side.step, 16), max(side.group, 16)
    return encode_together(side.dtype, side.ptr, (side.k, side.mn, side.groups), strides, boxes)


def side_grids(ops: Operands, columns: int) -> Fields:
    """The scales of the row side and of the weight side, and how many columns the latter has (`SideGrids`)."""
    given: Any = [("scale_a", ops.scale_a, ops.spec.a.scale), ("scale_b", ops.scale_b, ops.spec.b.scale)]
    grids = [grid_bytes(*each) for each in (reversed(given) if is_swapped(ops.spec) else given)]
    return join([*grids, columns.to_bytes(8, "little")])


class HopperFp8:
    """The Hopper kernel for float8, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._clusters, self._index = Clusters(load(source(spec, config), index), spec, config), index
        self._swapped, self._sends, self._out = is_swapped(spec), sends(spec), spec.out.dtype

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        view = view_of(ops)
        x, w = sides_of(view, self._swapped)
        with on_device(self._index):
            maps = [line_maps(w, (COLUMNS,)), line_maps(x, HEIGHTS)]
            if self._sends:
                maps.append(result_map(results_of(view, self._swapped, self._out)))
        more: list[Argument] = [side_grids(ops, w.mn), tuple(maps)]
        return self._clusters.bound(ops, view, more, columns=w.mn)
