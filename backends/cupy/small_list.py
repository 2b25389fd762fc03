"""Binds the kernel for lists and batches of few tiles: maps, shapes and tiles of all groups are in its argument."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import arguments, hopper
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import BLOCK_K, COLUMNS, SHARED_LIMIT, SMALL_LISTS, Config
from multigemm.backends.cupy.hopper import Copied
from multigemm.backends.cupy.support import MAX_LISTED_GROUPS, packed_spec
from multigemm.cuda.arguments import along, fields, slot_of
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import NOTHING, MovableLaunch
from multigemm.cuda.operand_maps import Side
from multigemm.cuda.tensor_map import SIZE
from multigemm.planning.operands import Operands, Packed, strides_of, view_of
from multigemm.problem.spec import ProblemSpec

THREADS = 288
SLOTS = (4, MAX_LISTED_GROUPS)
"""The groups that an argument holds; a short argument arrives sooner."""
LISTED = 160
"""The tiles whose places the argument holds; the places of others are in device memory."""
STAGED = 128
"""The rows of results that are stored at once; 64 for higher tiles."""
PLACE = np.dtype([("group", "<i4"), ("blocks", "<i4"), ("down", "<i4"), ("across", "<i4")])
SHAPE, TAIL = struct.Struct("<2i2q"), struct.Struct("<qf2i")

# The model of a list's time, fitted on 2026-11-21 to 14 lists in bfloat16 (docs/notes/cupy-hopper.md): of all it
# picks the fastest height. `multigemm tune --suite small --backends cupy` times all heights.

START = 2000
"""Cycles of a thread block besides its products."""
ROW = 4
"""Cycles to store a row of results."""
SLOW_ROW, SLOW_FROM = 6, 256
"""Tiles so high store a row in so many cycles: four rounds through the staging, with nothing to multiply meanwhile."""
LINE = 4
"""Cycles to multiply a row by a block of 64 x 128 weights."""
PORT = 2.03
"""Cycles to receive a line of 64 elements."""
LATENCY = 2800
"""Cycles from asking for a stage until it is there."""
RATE = 8000
"""Bytes per cycle that the L2 cache delivers to all processors together."""


class Groups(NamedTuple):
    """Groups that have results, those with the longest k first.

    `shapes` holds m, k and n of each, `outs` where the result lies and the bytes from row to row. Of a list, `w` and
    `x` hold the weight and the row side of each group; of a batch one side each, and `stacked` says how many.
    """

    shapes: tuple[tuple[int, int, int], ...]
    outs: Sequence[tuple[int, int]]
    w: Sequence[Side]
    x: Sequence[Side]
    stacked: int = 1


def stage_bytes(x_k: bool, config: Config) -> int:
    """The bytes of both operands of a block of k. Contiguous rows come in boxes of 64."""
    rows = config.rows if x_k else -(-config.rows // 64) * 64
    return (COLUMNS + rows) * 2 * BLOCK_K


def stages_of(x_k: bool, config: Config) -> int:
    """As many stages as the config asks for, if they fit."""
    return min((SHARED_LIMIT - _besides(config)) // stage_bytes(x_k, config), config.stages)


def _besides(config: Config) -> int:
    """The bytes of both warpgroups' staged results, of barriers, and of alignment at worst."""
    rows = config.rows if config.rows <= STAGED else 64
    return 2 * -(-rows // 32) * 32 * 128 + 1024 + 128


@cache
def shared_bytes(x_k: bool, config: Config) -> int:
    """The bytes of the ring of stages, at a multiple of 1024, and of the staging."""
    return stages_of(x_k, config) * stage_bytes(x_k, config) + _besides(config) - 128


@cache
def _source(bfloat: bool, x_k: bool, w_k: bool, config: Config, slots: int) -> Source:
    defines = (
        ("BFLOAT", int(bfloat)), ("X_K", int(x_k)), ("W_K", int(w_k)), ("ROWS", config.rows),
        ("STAGES", stages_of(x_k, config)), ("GROUPS", slots), ("STEP", 16), ("PINGPONG", 0),
    )  # fmt: skip
    return Source("small_list.cu", "small_list", defines, shared_bytes(x_k, config))


def source(spec: ProblemSpec, config: Config, slots: int = MAX_LISTED_GROUPS) -> Source:
    """The source of the kernel: dtype, layouts, config, and the number of groups that its argument holds."""
    role = hopper.roles(packed_spec(spec))
    return _source(spec.compute == torch.bfloat16, role.x_k, role.w_k, config, slots)


def heights(config: Config) -> tuple[Config, ...]:
    """The configs among which a problem's sizes decide."""
    return (config,) if config.rows else SMALL_LISTS[1:]


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """One kernel for each height and number of slots, and the copying kernel if needed."""
    copied = packed_spec(spec)
    role, bfloat = hopper.roles(copied), spec.compute == torch.bfloat16
    own = [_source(bfloat, role.x_k, role.w_k, c, slots) for c in heights(config) for slots in SLOTS]
    return (*own, *([hopper.COPY_SOURCE] if copied != spec else []))


@lru_cache(maxsize=1024)
def height_for(shapes: tuple[tuple[int, int, int], ...], sms: int) -> Config:
    """The height whose last block would finish first. (m, k, n) are those of the groups, the longest k first."""
    return min(SMALL_LISTS[1:], key=lambda config: _cycles(shapes, config, sms))


def _cycles(shapes: tuple[tuple[int, int, int], ...], config: Config, sms: int) -> float:
    """The estimated cycles. Tiles are dealt in alternating order; all blocks together read at most what the L2
    delivers."""
    tiles = [-(-m // config.rows) * -(-n // COLUMNS) for m, _, n in shapes]
    blocks = np.repeat(np.array([-(-k // BLOCK_K) for _, k, _ in shapes], np.int64), tiles)
    rounds = -(-len(blocks) // sms)
    each = max(LINE * config.rows, PORT * (COLUMNS + config.rows), LATENCY / config.stages)
    turns = np.zeros((rounds, sms))
    turns.reshape(-1)[: len(blocks)] = blocks * each + (SLOW_ROW if config.rows >= SLOW_FROM else ROW) * config.rows
    turns[1::2] = turns[1::2, ::-1]
    traffic = int(blocks.sum()) * 2 * BLOCK_K * (COLUMNS + config.rows)
    return START + max(float(turns.sum(0).max()), ROW * config.rows + traffic / RATE)


@lru_cache(maxsize=32)
def places(shapes: tuple[tuple[int, int, int], ...], rows: int) -> np.ndarray[Any, Any]:
    """All tiles of groups of (m, k, n), in the order in which they are dealt. Read-only, because cached."""
    tiles = []
    for group, (m, k, n) in enumerate(shapes):
        down, across = np.indices((-(-m // rows), -(-n // COLUMNS)), np.int32).reshape(2, -1)
        one = np.empty(down.size, PLACE)
        one["group"], one["blocks"], one["down"], one["across"] = group, -(-k // BLOCK_K), down, across
        tiles.append(one)
    found = np.concatenate([np.empty(0, PLACE), *tiles])
    found.flags.writeable = False
    return found


def groups_of_list(ops: Operands) -> Groups:
    """The groups of a list."""
    role = hopper.roles(ops.spec)
    kept = [(a, b, out) for a, b, out in zip(ops.a, ops.b, ops.out, strict=True) if out.shape[0] and out.shape[1]]
    kept.sort(key=lambda group: -group[0].shape[1])
    return Groups(
        tuple((a.shape[0], a.shape[1], b.shape[1]) for a, b, _ in kept),
        [(out.data_ptr(), 2 * strides_of(out).row) for _, _, out in kept],
        [hopper.matrix_side(b, 1, role.w_k) for _, b, _ in kept],
        [hopper.matrix_side(a, 0, role.x_k) for a, _, _ in kept],
    )


def groups_of_batch(spec: ProblemSpec, view: Packed) -> Groups:
    """The groups of a batch, which are all equal."""
    if not (view.m and view.n):
        return Groups((), (), (), ())
    x, w = hopper.sides_of(view, hopper.roles(spec), spec.compute)
    out = view.out
    outs = [(along(out.ptr, out.ptr + 2 * g * out.group), 2 * out.row) for g in range(view.groups)]
    return Groups(((view.m, view.k, view.n),) * view.groups, outs, (w,), (x,), view.groups)


def groups_of(ops: Operands, view: Packed) -> Groups:
    """The groups of a list or a batch."""
    return groups_of_list(ops) if ops.spec.form == "per_group" else groups_of_batch(ops.spec, view)


def layout(ops: Operands, groups: Groups, config: Config, slots: int) -> tuple[tuple[bytes, ...], int, Tensor | None]:
    """The kernel's argument (maps, places and shapes of all groups), the number of tiles, and those that do not fit
    into the argument."""
    blank = bytes(SIZE * (slots - len(groups.shapes)))
    read = ops.spec.alpha != "zero"
    tiles = places(tuple((m, k if read else 0, n) for m, k, n in groups.shapes), config.rows)
    more = None if len(tiles) <= LISTED else to_device(tiles[LISTED:].view(np.int32), ops.device)
    shapes = [
        fields(SHAPE.pack(m, n, out, pitch), slot_of(out, 8))
        for (m, _, n), (out, pitch) in zip(groups.shapes, groups.outs, strict=True)
    ]
    others = 0 if more is None else more.data_ptr()
    raw = (
            *(arguments.stacked_maps(side, COLUMNS, groups.stacked) for side in groups.w), blank,
            *(arguments.stacked_maps(side, config.rows, groups.stacked) for side in groups.x), blank,
            tiles[:LISTED].tobytes().ljust(PLACE.itemsize * LISTED, b"\0"),
            *shapes, bytes(SHAPE.size * (slots - len(shapes))),
            TAIL.pack(others, float(ops.alpha), ops.spec.out.align == 16, len(tiles)),
    )  # fmt: skip
    return raw, len(tiles), more


class SmallList:
    """The kernel for lists and batches of few tiles, in all its heights, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._spec, self._config, self._processors = packed_spec(spec), config, processors(index)
        self._copy = load(hopper.COPY_SOURCE, index) if self._spec != spec else None
        loaded = [load(each, index) for each in sources(self._spec, config)]
        self._kernels = dict(zip(product(heights(config), SLOTS), loaded, strict=True))
        self._x_k = hopper.roles(self._spec).x_k
        self._index = index

    def bind(self, ops: Operands) -> Launch:
        """Copies of the operands that need one, then the product."""
        view = view_of(ops)
        copied = Copied(ops, view, None)
        if self._copy is not None:
            copied = hopper.with_copies(ops, view, self._spec, self._copy)
        return copied.then(self._product(copied.ops, copied.view))

    def _product(self, ops: Operands, view: Packed) -> MovableLaunch:
        groups = groups_of(ops, view)
        if not groups.shapes:
            return NOTHING
        config = self._config if self._config.rows else height_for(groups.shapes, self._processors)
        slots = SLOTS[len(groups.shapes) > SLOTS[0]]
        with on_device(self._index):
            argument, tiles, more = layout(ops, groups, config, slots)
        return self._kernels[config, slots].bound(
            [argument],
            grid=min(tiles, self._processors),
            threads=THREADS,
            shared=shared_bytes(self._x_k, config),
            overlap=True,
            keep=(more,),
        )
