"""Binds the Hopper kernel for quantised weights: a map of their codes, maps of the rows, and the weights' scales."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import Side, result_map, row_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import BLOCK_K, CODE_LINE, COLUMNS, LOW_ROWS, Config
from multigemm.backends.cupy.hopper import Clusters, results_of
from multigemm.backends.cupy.quantised import CODES, grid_bytes
from multigemm.backends.cupy.support import folds_scales, plain_kind, sends
from multigemm.cuda.arguments import Argument, Fields, join
from multigemm.cuda.driver import on_device
from multigemm.cuda.tensor_map import BLANK, NO_SWIZZLE, SWIZZLE_64B, encode_together
from multigemm.planning.operands import Operands, Packed, view_of
from multigemm.problem.spec import OperandSpec, ProblemSpec, ScaleSpec


def stage_of(b: OperandSpec, config: Config) -> tuple[int, int]:
    """How many 64 of k a stage has, and in how many boxes the weights come: in low tiles one for each warpgroup."""
    if config.rows > 64 or b.dtype.is_floating_point:
        return 1, 1
    return (4, 2) if b.packed else (2, 2)


def low_stage_bytes(b: OperandSpec, config: Config) -> int:
    """The bytes of a stage of the lowest tiles (FEW_BYTES in pipeline.cuh): codes and rows."""
    deep, boxes = stage_of(b, config)
    rows = (deep - 1) * (LOW_ROWS + 2) * 128 + LOW_ROWS * 128
    return -(-(boxes * COLUMNS * CODE_LINE + rows) // 1024) * 1024


def source(spec: ProblemSpec, config: Config) -> Source:
    """The source of the kernel: formats of weights and scales, how results are stored, and the config."""
    even = -(-(spec.k or 0) // 32) % 2 == 0
    return _source(
        spec.b, even, spec.compute is torch.bfloat16, plain_kind(spec), sends(spec), folds_scales(spec), config
    )


@lru_cache(maxsize=1024)
def _source(b: OperandSpec, even: bool, bfloat: bool, plain: int, sent: bool, folds: bool, config: Config) -> Source:
    scale, shared = b.scale or ScaleSpec(torch.float32), config.shared_bytes(plain > 0)
    zero = -1 if scale.zero is None else CODES[scale.zero]
    pairs = even and scale.dtype is torch.float8_e8m0fnu and scale.k == 32 and scale.order == "col" and scale.align >= 2
    deep, boxes = stage_of(b, config)
    low = config.rows == LOW_ROWS
    stages = config.stages
    if low:
        stages = config.low_ring_bytes(plain > 0) // low_stage_bytes(b, config)
    elif deep > 1:
        stages = config.ring_bytes // (deep * config.rows * 128 + boxes * COLUMNS * CODE_LINE)
    defines = (
        ("W_CODE", CODES[b.packed or b.dtype]), ("BFLOAT", int(bfloat)), ("SCALE_K", scale.k),
        ("SCALE_CODE", CODES[scale.dtype]), ("ZERO_CODE", zero), ("FOLD", int(folds)), ("PAIRS", int(pairs)),
        ("PLAIN", plain), ("SEND", int(sent)), ("ROWS", max(config.rows, 64)), ("LOW", int(low)), ("STAGES", stages),
        ("DEEP", deep), ("W_BOXES", boxes), ("CLUSTER", config.cluster), ("STEP", config.step), ("SHARED", shared),
    )  # fmt: skip
    return Source("hopper_weights.cu", "hopper_weights", defines, shared)


def code_map(view: Packed, packed: bool, deep: int) -> Fields:
    """A map of the weights' bytes with boxes of `deep` times 64 of k of each column."""
    k, b = view.k // 2 if packed else view.k, view.b
    groups = view.groups if b.group else 1
    if view.n == 0 or k == 0 or groups == 0:
        return BLANK
    line = BLOCK_K * deep // 2 if packed else BLOCK_K
    box, swizzle = (line, COLUMNS, 1), SWIZZLE_64B if line == CODE_LINE else NO_SWIZZLE
    strides = max(b.col, 16), max(b.group, 16)
    return encode_together(torch.uint8, b.ptr, (k, view.n, groups), strides, (box,), swizzle=swizzle)


def row_side(view: Packed, dtype: torch.dtype) -> Side:
    """The activations as a `Side`, for maps of rows."""
    a, size = view.a, dtype.itemsize
    return Side(a.ptr, view.m, view.k, view.groups if a.group else 1, a.row * size, a.group * size, True, dtype)


class HopperWeights:
    """The Hopper kernel for quantised weights, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._clusters, self._index = Clusters(load(source(spec, config), index), spec, config), index
        deep, boxes = stage_of(spec.b, config)
        self._sends, self._spec, self._box = sends(spec), spec, deep // boxes

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        view, spec = view_of(ops), self._spec
        with on_device(self._index):
            maps = [code_map(view, bool(spec.b.packed), self._box), *row_maps(row_side(view, spec.compute))]
            if self._sends:
                maps.append(result_map(results_of(view, False, spec.out.dtype)))
        given: Any = (("scale_b", ops.scale_b), ("zero_b", ops.zero_b))
        grids = [grid_bytes(name, grid, ops.spec.b.scale) for name, grid in given]
        more: list[Argument] = [join([*grids, view.n.to_bytes(8, "little")]), tuple(maps)]
        return self._clusters.bound(ops, view, more, columns=view.n)
