"""Binds the kernel for lists and batches of one wave: maps, shapes and tiles of all groups are its argument."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from functools import lru_cache
from heapq import heappop, heappush
from typing import NamedTuple

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper, packing, tensor_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, WAVES, Config
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.params import view_of
from multigemm.backends.cupy.specs import LIST, packed_spec
from multigemm.backends.cupy.tensor_maps import Side
from multigemm.layouts import Operands, Strided, strides_of
from multigemm.spec import ProblemSpec

THREADS, BLOCK_K = 288, 64
SLOTS = (4, LIST)
"""Groups that an argument holds: a short one is there sooner."""
NEVER = 0x7FFFFFFF
SHAPE, TAIL = struct.Struct("<4i2q"), struct.Struct("<fi")


START, ROW, LINE, LATENCY, RATE = 2000, 4, 4, 2800, 8000
"""Cycles: of a block besides its products, of storing a row, of multiplying one by 64 x 128, from asking for a stage
until it is there; bytes per cycle that the L2 cache delivers. Fitted to 14 lists, each with all heights, on an H100."""


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


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """The ring of stages, at a multiple of 1024."""
    rows = config.rows if hopper.roles(packed_spec(spec)).x_k else -(-config.rows // 64) * 64
    return config.stages * (COLUMNS + rows) * 128 + 1024


def source(spec: ProblemSpec, config: Config, slots: int = LIST) -> Source:
    """The kernel's key: dtype, layouts, the config and how many groups it takes."""
    role = hopper.roles(packed_spec(spec))
    defines = (
        ("BFLOAT", int(spec.compute == torch.bfloat16)), ("X_K", int(role.x_k)), ("W_K", int(role.w_k)),
        ("ROWS", config.rows), ("STAGES", config.stages), ("GROUPS", slots), ("STEP", 32), ("PINGPONG", 0),
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
    """Each free processor takes the next tile; nor can all of them together take more than the cache delivers."""
    once = START + ROW * config.rows
    tiles: Counter[int] = Counter()
    for m, k, n in shapes:
        tiles[-(-k // BLOCK_K)] += -(-m // config.rows) * -(-n // COLUMNS)
    free, end = [(0.0, sms)], 0.0  # when, and how many processors
    for blocks, left in tiles.items():
        while left:
            when, count = heappop(free)
            taken = min(count, left)
            if count > taken:
                heappush(free, (when, count - taken))
            done = when + once + blocks * max(LINE * config.rows, LATENCY / config.stages)
            heappush(free, (done, taken))
            left, end = left - taken, max(end, done)
    traffic = sum(blocks * count for blocks, count in tiles.items()) * 2 * BLOCK_K * (COLUMNS + config.rows)
    return max(end, once + traffic / RATE)


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


def layout(ops: Operands, groups: Sequence[Group], config: Config, slots: int) -> tuple[bytes, int]:
    """The kernel's argument, and the number of tiles."""
    role, dtype = hopper.roles(ops.spec), ops.spec.compute
    w_maps, x_maps, shapes = bytearray(), bytearray(), bytearray()
    first: list[int] = []
    tiles = 0
    for a, b, out, m, k, n in groups:
        across = -(-n // COLUMNS)
        w = Side(b.ptr, n, k, 1, 2 * (b.col if role.w_k else b.row), 0, role.w_k, dtype)
        x = Side(a.ptr, m, k, 1, 2 * (a.row if role.x_k else a.col), 0, role.x_k, dtype)
        w_maps += tensor_maps.plain(w, COLUMNS)
        x_maps += tensor_maps.plain(x, config.rows)
        shapes += SHAPE.pack(across, m, n, k if ops.spec.alpha != "zero" else 0, out.ptr, 2 * out.row)
        first.append(tiles)
        tiles += across * -(-m // config.rows)
    missing = slots - len(first)
    maps = w_maps + tensor_maps.BLANK * missing + x_maps + tensor_maps.BLANK * missing
    numbers = struct.pack(f"<{slots}i", *first, *[NEVER] * missing)
    tail = TAIL.pack(float(ops.alpha), int(ops.spec.out.align == 16))
    return bytes(maps + numbers + shapes + bytes(SHAPE.size * missing) + tail), tiles


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
    argument, tiles = layout(ops, groups, config, slots)
    if tiles == 0:
        return _nothing
    return launcher(
        functions[config, slots],
        [argument],
        grid=tiles,
        threads=THREADS,
        shared=shared_bytes(ops.spec, config),
        overlap=True,
        index=ops.device.index or 0,
        keep=ops,
    )


def _nothing() -> None:
    """What is launched for results without a single element."""
