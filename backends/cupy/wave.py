"""Binds the kernel for lists and batches of few tiles: maps, shapes and tiles of all groups are its argument."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper, packing, tensor_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, SHARED_LIMIT, WAVES, Config
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.params import view_of
from multigemm.backends.cupy.specs import LIST, packed_spec
from multigemm.backends.cupy.tensor_maps import Side
from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, Strided, strides_of
from multigemm.problem.spec import ProblemSpec

THREADS, BLOCK_K = 288, 64
SLOTS = (4, LIST)
"""Groups that an argument holds: a short one is there sooner."""
LISTED = 160
"""Tiles whose places the argument holds; those of the others lie in device memory."""
STAGED = 128
"""Rows of results that leave at once; of higher tiles 64."""
PLACE = np.dtype([("group", "<i4"), ("blocks", "<i4"), ("down", "<i4"), ("across", "<i4")])
SHAPE, TAIL = struct.Struct("<2i2q"), struct.Struct("<qf2i")

START, ROW, LINE, PORT, LATENCY, RATE = 2000, 4, 4, 2.03, 2800, 8000
"""Cycles: of a block besides its products, of storing a row, of multiplying one by 64 x 128, of receiving a line of 64,
from asking for a stage until it is there; bytes per cycle that the L2 cache delivers. Fitted to lists, all heights."""
SLOW_ROW, SLOW_FROM = 6, 256
"""Tiles so high store a row in so many cycles: four rounds through the staging, with nothing to multiply meanwhile."""


Functions = dict[tuple[Config, int], int]
"""Handles by height and slots."""


class Matrix(NamedTuple):
    """Where a matrix starts, and its strides in elements."""

    ptr: int
    row: int
    col: int


class Group(NamedTuple):
    """One group's matrices and extents."""

    a: Matrix
    b: Matrix
    out: Matrix
    m: int
    k: int
    n: int


def stage_bytes(spec: ProblemSpec, config: Config) -> int:
    """Both operands of a block of k; rows that are contiguous come in boxes of 64."""
    rows = config.rows if hopper.roles(packed_spec(spec)).x_k else -(-config.rows // 64) * 64
    return (COLUMNS + rows) * 2 * BLOCK_K


def stages_of(spec: ProblemSpec, config: Config) -> int:
    """As many as the config wants, if they fit."""
    return min((SHARED_LIMIT - _besides(config)) // stage_bytes(spec, config), config.stages)


def _besides(config: Config) -> int:
    """The staging of both warpgroups' results, barriers, and what alignment may cost."""
    rows = config.rows if config.rows <= STAGED else 64
    return 2 * -(-rows // 32) * 32 * 128 + 1024 + 128


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """The ring of stages, at a multiple of 1024, and the staging."""
    return stages_of(spec, config) * stage_bytes(spec, config) + _besides(config) - 128


def source(spec: ProblemSpec, config: Config, slots: int = LIST) -> Source:
    """The kernel's key: dtype, layouts, the config and how many groups it takes."""
    role = hopper.roles(packed_spec(spec))
    defines = (
        ("BFLOAT", int(spec.compute == torch.bfloat16)), ("X_K", int(role.x_k)), ("W_K", int(role.w_k)),
        ("ROWS", config.rows), ("STAGES", stages_of(spec, config)), ("GROUPS", slots), ("STEP", 16), ("PINGPONG", 0),
    )  # fmt: skip
    return Source("wave.cu", "wave", defines)


def heights(config: Config) -> tuple[Config, ...]:
    """The configs that a problem's sizes may choose from."""
    return (config,) if config.rows else WAVES[1:]


def prepare(spec: ProblemSpec, config: Config, index: int) -> tuple[int, Functions]:
    """Compiles (or finds) and loads the copying kernel, where it is needed, and one for each height and argument."""
    functions = {(c, slots): load(source(spec, c, slots), index)[0] for c in heights(config) for slots in SLOTS}
    for (c, _), function in functions.items():
        allow_shared(function, shared_bytes(spec, c))
    return load(packing.SOURCE, index)[0] if packed_spec(spec) != spec else 0, functions


@lru_cache(maxsize=1024)
def height_for(shapes: tuple[tuple[int, int, int], ...], sms: int) -> Config:
    """The height whose last block would end first; (m, k, n) of the groups, those with the longest k first."""
    return min(WAVES[1:], key=lambda config: _cycles(shapes, config, sms))


def _cycles(shapes: tuple[tuple[int, int, int], ...], config: Config, sms: int) -> float:
    """Tiles are dealt there and back; nor can all blocks together take more than the cache delivers."""
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
    """All tiles of groups of (m, k, n), in the order in which they are dealt: read only, for all who ask."""
    tiles = []
    for group, (m, k, n) in enumerate(shapes):
        down, across = np.indices((-(-m // rows), -(-n // COLUMNS)), np.int32).reshape(2, -1)
        one = np.empty(down.size, PLACE)
        one["group"], one["blocks"], one["down"], one["across"] = group, -(-k // BLOCK_K), down, across
        tiles.append(one)
    found = np.concatenate([np.empty(0, PLACE), *tiles])
    found.flags.writeable = False
    return found


def _matrix(x: Tensor) -> Matrix:
    return _nth(strides_of(x), 0)


def _nth(x: Strided, group: int) -> Matrix:
    return Matrix(x.ptr + 2 * group * x.group, x.row, x.col)


def groups_of(ops: Operands) -> list[Group]:
    """The groups that have results, those with the longest k first: their tiles start first."""
    if ops.spec.form == "per_group":
        listed = zip(ops.a, ops.b, ops.out, strict=True)
        groups = [
            Group(_matrix(a), _matrix(b), _matrix(out), a.shape[0], a.shape[1], b.shape[1]) for a, b, out in listed
        ]
    else:
        v = view_of(ops)
        groups = [Group(_nth(v.a, g), _nth(v.b, g), _nth(v.out, g), v.m, v.k, v.n) for g in range(v.groups)]
    return sorted((g for g in groups if g.m and g.n), key=lambda g: -g.k)


def layout(ops: Operands, groups: Sequence[Group], config: Config, slots: int) -> tuple[bytes, int, Tensor | None]:
    """The kernel's argument, the number of tiles, and the places of those beyond the argument's."""
    role, dtype = hopper.roles(ops.spec), ops.spec.compute
    w_maps, x_maps, shapes = bytearray(), bytearray(), bytearray()
    for a, b, out, m, k, n in groups:
        w = Side(b.ptr, n, k, 1, 2 * (b.col if role.w_k else b.row), 0, role.w_k, dtype)
        x = Side(a.ptr, m, k, 1, 2 * (a.row if role.x_k else a.col), 0, role.x_k, dtype)
        w_maps += tensor_maps.plain(w, COLUMNS)
        x_maps += tensor_maps.plain(x, config.rows)
        shapes += SHAPE.pack(m, n, out.ptr, 2 * out.row)
    missing = slots - len(groups)
    maps = w_maps + tensor_maps.BLANK * missing + x_maps + tensor_maps.BLANK * missing
    read = ops.spec.alpha != "zero"
    tiles = places(tuple((g.m, g.k if read else 0, g.n) for g in groups), config.rows)
    more = None if len(tiles) <= LISTED else to_device(tiles[LISTED:].view(np.int32), ops.device)
    spots = tiles[:LISTED].tobytes().ljust(PLACE.itemsize * LISTED, b"\0")
    others = 0 if more is None else more.data_ptr()
    tail = TAIL.pack(others, float(ops.alpha), int(ops.spec.out.align == 16), len(tiles))
    return bytes(maps + spots + shapes + bytes(SHAPE.size * missing) + tail), len(tiles), more


def bind(ops: Operands, config: Config, kernels: tuple[int, Functions], sms: int) -> Launch:
    """Copies of the operands that need one, then the product."""
    pack, functions = kernels
    copied, copy = packing.with_copies(ops, packed_spec(ops.spec), pack, sms)
    return packing.after(copy, _bind(copied, config, functions, sms))


def _bind(ops: Operands, config: Config, functions: Functions, sms: int) -> Launch:
    groups = groups_of(ops)
    if not config.rows:
        config = height_for(tuple((g.m, g.k, g.n) for g in groups), sms)
    slots = SLOTS[len(groups) > SLOTS[0]]
    argument, tiles, more = layout(ops, groups, config, slots)
    if tiles == 0:
        return _nothing
    return launcher(
        functions[config, slots],
        [argument],
        grid=min(tiles, sms),
        threads=THREADS,
        shared=shared_bytes(ops.spec, config),
        overlap=True,
        index=ops.device.index or 0,
        keep=(ops, more),
    )


def _nothing() -> None:
    """What is launched for results without a single element."""
