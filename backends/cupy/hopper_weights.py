"""Binds the Hopper kernel for quantised weights: a map of their codes, maps of the rows, and the weights' scales."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import row_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import BLOCK_K, CODE_LINE, COLUMNS, LOW_ROWS, Config
from multigemm.backends.cupy.hopper import Clusters, results_of
from multigemm.backends.cupy.quantised import CODES, packed_bytes
from multigemm.backends.cupy.support import folds_scales, plain_kind, sends
from multigemm.cuda.arguments import Argument, Fields, join
from multigemm.cuda.driver import on_device
from multigemm.cuda.operand_maps import result_map, side_of
from multigemm.cuda.tensor_map import (
    BLANK,
    NO_SWIZZLE,
    PROMOTION_128B,
    PROMOTION_256B,
    SWIZZLE_64B,
    SWIZZLE_128B,
    encode_together,
)
from multigemm.planning.operands import Operands, Packed, view_of
from multigemm.problem.spec import OperandSpec, ProblemSpec, ScaleSpec

SHORT_COLUMN = 1024
"""Bytes of a column up to which the L2 cache asks memory for 128 of them in place of 256. H100, 2026-11-24, low tiles:
0.88 to 0.99 of the time with 384 and 768 bytes, 1.04 to 1.06 with 2048 to 7168; none between was measured."""
SET_ROOM = 4608
"""Bytes of a set of scales and zero points, at most, if it serves more than one stage."""


def stage_of(b: OperandSpec, config: Config) -> tuple[int, int]:
    """How many 64 of k a stage has, and in how many boxes the weights come: lines of 128 bytes in the lowest tiles."""
    if config.rows == LOW_ROWS:
        return (4, 1) if b.packed else (2, 1)
    if config.rows > 64 or b.dtype.is_floating_point:
        return 1, 1
    return (4, 2) if b.packed else (2, 2)


class NumberSet(NamedTuple):
    """How the scales of the lowest tiles come (kernels/stage_numbers.cuh)."""

    stages: int
    """The stages that a set serves."""
    run: int
    """How many of a column lie side by side in memory: all of a set, or one."""
    align: int
    """What each of these runs begins at a multiple of, in bytes; of single ones that of a line of columns."""
    room: int
    """Bytes of a set, its zero points included."""


def number_set(b: OperandSpec, deep: int) -> NumberSet:
    """How scales come: as many stages at once as there is room for, since memory is read 32 bytes at a time."""
    sets = [_number_set(b, deep, stages) for stages in (4, 2, 1)]
    return next((found for found in sets if found.room <= SET_ROOM), sets[-1])


def _number_set(b: OperandSpec, deep: int, stages: int) -> NumberSet:
    scale = b.scale or ScaleSpec(torch.float32)
    size, count = scale.dtype.itemsize, BLOCK_K * deep * stages // scale.k if scale.k else 1
    run = count if scale.order == "col" and count > 1 else 1
    align = scale.align if run > 1 or (scale.order == "row" and scale.rows == 1) else size
    room = COLUMNS * count // run * _bytes_of_run(run, size, align)
    points = 0 if scale.zero is None else COLUMNS * count // run * _bytes_of_run(run, 1, align // size)
    return NumberSet(stages, run, align, room + points)


def _bytes_of_run(run: int, size: int, align: int) -> int:
    """The bytes of the pieces that hold a run (NumberPieces in kernels/stage_numbers.cuh)."""
    length = run * size
    aligned = min(length & -length, align)
    return length if aligned >= 4 or (run == 1 and align >= 4) else (length + 7 - aligned) // 4 * 4


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
    deep, boxes = stage_of(b, config)
    more: tuple[tuple[str, int], ...]
    if config.rows == LOW_ROWS:
        numbers = number_set(b, deep)
        ring = (config.low_room(plain > 0, sent) - 2 * numbers.room) // 1024 * 1024
        more = (
            ("LOW", 1), ("RING", ring), ("SET_STAGES", numbers.stages), ("SCALE_RUN", numbers.run),
            ("SCALE_ALIGN", numbers.align),
        )  # fmt: skip
    else:
        pairs = scale.dtype is torch.float8_e8m0fnu and scale.k == 32 and scale.order == "col" and scale.align >= 2
        stage = deep * config.rows * 128 + boxes * COLUMNS * CODE_LINE
        more = (("PAIRS", int(pairs and even)), ("STAGES", config.ring_bytes // stage if deep > 1 else config.stages))
    defines = (
        ("W_CODE", CODES[b.packed or b.dtype]), ("BFLOAT", int(bfloat)), ("SCALE_K", scale.k),
        ("SCALE_CODE", CODES[scale.dtype]), ("ZERO_CODE", zero), ("FOLD", int(folds)),
        ("PLAIN", plain), ("SEND", int(sent)), ("ROWS", max(config.rows, 64)),
        ("DEEP", deep), ("W_BOXES", boxes), ("CLUSTER", config.cluster), ("STEP", config.step), ("SHARED", shared),
        *more,
    )  # fmt: skip
    return Source("hopper_weights.cu", "hopper_weights", defines, shared)


def code_map(view: Packed, packed: bool, deep: int) -> Fields:
    """A map of the weights' bytes with boxes of `deep` times 64 of k of each column."""
    k, b = view.k // 2 if packed else view.k, view.b
    groups = view.groups if b.group else 1
    if view.n == 0 or k == 0 or groups == 0:
        return BLANK
    line = BLOCK_K * deep // (2 if packed else 1)
    box, swizzle = (line, COLUMNS, 1), {128: SWIZZLE_128B, 64: SWIZZLE_64B}.get(line, NO_SWIZZLE)
    strides = max(b.col, 16), max(b.group, 16)
    modes = {"swizzle": swizzle, "promotion": PROMOTION_128B if line == 128 and k <= SHORT_COLUMN else PROMOTION_256B}
    return encode_together(torch.uint8, b.ptr, (k, view.n, groups), strides, (box,), **modes)


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
            a = view.a
            rows = side_of(a.ptr, a.row, a.group, view.m, view.k, view.groups, True, spec.compute)
            maps = [code_map(view, bool(spec.b.packed), self._box), *row_maps(rows)]
            if self._sends:
                maps.append(result_map(results_of(view, False, spec.out.dtype)))
        _, *of_b = packed_bytes(ops)
        more: list[Argument] = [join([*of_b, view.n.to_bytes(8, "little")]), tuple(maps)]
        return self._clusters.bound(ops, view, more, columns=view.n)
