"""Binds the kernel for lists and batches of one wave: maps, shapes and tiles of all groups are its argument."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper, packing, tensor_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, LIST, Config, packed_spec
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.params import view_of
from multigemm.backends.cupy.tensor_maps import Side
from multigemm.layouts import Operands, Strided, strides_of
from multigemm.spec import ProblemSpec

THREADS = 288
NEVER = 0x7FFFFFFF
SHAPES = struct.Struct(f"<{5 * LIST}i{2 * LIST}qfi")


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


def shared_bytes(config: Config) -> int:
    """The ring of stages, at a multiple of 1024."""
    return config.stages * (COLUMNS + config.rows) * 128 + 1024


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: dtype, layouts and the config."""
    role = hopper.roles(packed_spec(spec))
    defines = (
        ("BFLOAT", int(spec.compute == torch.bfloat16)), ("X_K", int(role.x_k)), ("W_K", int(role.w_k)),
        ("ROWS", config.rows), ("STAGES", config.stages), ("STEP", 64), ("PINGPONG", 0),
    )  # fmt: skip
    return Source("wave.cu", "wave", defines)


def prepare(spec: ProblemSpec, config: Config, index: int) -> tuple[int, int]:
    """Compiles (or finds) and loads the copying kernel, where it is needed, and that of a spec."""
    function = load(source(spec, config), index)[0]
    allow_shared(function, shared_bytes(config))
    return load(packing.SOURCE, index)[0] if packed_spec(spec) != spec else 0, function


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


def layout(ops: Operands, config: Config) -> tuple[bytes, int]:
    """The kernel's argument, and the number of tiles."""
    role, dtype = hopper.roles(ops.spec), ops.spec.compute
    w_maps, x_maps = bytearray(), bytearray()
    shapes: list[tuple[int, ...]] = []
    tiles = 0
    for a, b, out, m, k, n in groups_of(ops):
        across = -(-n // COLUMNS)
        w = Side(b.ptr, n, k, 1, 2 * (b.col if role.w_k else b.row), 0, role.w_k, dtype)
        x = Side(a.ptr, m, k, 1, 2 * (a.row if role.x_k else a.col), 0, role.x_k, dtype)
        w_maps += tensor_maps.plain(w, COLUMNS)
        x_maps += tensor_maps.plain(x, config.rows)
        shapes.append((tiles, across, m, n, k if ops.spec.alpha != "zero" else 0, out.ptr, 2 * out.row))
        tiles += across * -(-m // config.rows)
    missing = LIST - len(shapes)
    shapes += [(NEVER, 1, *[0] * 5)] * missing
    blank = tensor_maps.BLANK * missing
    values = (value for column in zip(*shapes, strict=True) for value in column)
    packed = SHAPES.pack(*values, float(ops.alpha), int(ops.spec.out.align == 16))
    return bytes(w_maps) + blank + bytes(x_maps) + blank + packed, tiles


def bind(ops: Operands, config: Config, functions: tuple[int, int], sms: int) -> Launch:
    """Copies of the operands that need one, then the product."""
    copied, copy = packing.with_copies(ops, packed_spec(ops.spec), functions[0], sms)
    return packing.after(copy, _bind(copied, config, functions[1]))


def _bind(ops: Operands, config: Config, function: int) -> Launch:
    argument, tiles = layout(ops, config)
    if tiles == 0:
        return _nothing
    return launcher(
        function,
        [argument],
        grid=tiles,
        threads=THREADS,
        shared=shared_bytes(config),
        overlap=True,
        index=ops.device.index or 0,
        keep=ops,
    )


def _nothing() -> None:
    """What is launched for results without a single element."""
