"""Binds the kernel for small problems: one thread block per tile, the grid laid out so that no block searches long."""

from __future__ import annotations

import struct

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import STAGES, Config
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.few_tiles import BLOCK_K
from multigemm.backends.cupy.params import problem_bytes, view_of
from multigemm.backends.cupy.specs import LIST, begins_anywhere, is_swapped, plain_kind
from multigemm.planning.operands import Operands, Packed
from multigemm.problem.spec import ProblemSpec

LISTED = struct.Struct(f"<{5 * LIST}i{6 * LIST}q")
NEVER = 0x7FFFFFFF
HOPPER = (9, 0)


def _plain(spec: ProblemSpec) -> bool:
    """Whether results leave straight from the registers: alpha * A @ B, contiguous along its columns."""
    return plain_kind(spec) == (2 if is_swapped(spec) else 1)


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """The ring of k-blocks, as small.cu lays it out."""
    a_k, b_k, side = spec.a.order != "col", spec.b.order == "col", config.tile
    a = side * (BLOCK_K + 8) if a_k else BLOCK_K * (side + 8)
    b = side * (BLOCK_K + 8) if b_k else BLOCK_K * (side + 8)
    return 2 * (config.stages or STAGES) * (a + b)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: dtype, layouts, how lines begin, tile, where groups come from, if the epilogue is plain."""
    defines = (
        ("BFLOAT", int(spec.compute == torch.bfloat16)), ("A_K", int(spec.a.order != "col")),
        ("B_K", int(spec.b.order == "col")), ("TILE_M", config.tile), ("TILE_N", config.tile),
        ("A_ODD", int(begins_anywhere(spec, "a"))), ("B_ODD", int(begins_anywhere(spec, "b"))),
        ("DEPTH", config.stages or STAGES),
        ("LISTED", int(spec.form == "per_group")), ("PLAIN", int(_plain(spec))),
        ("PAIRS", int(spec.out.align >= 4 and spec.form != "jagged_n")),
        ("SHARED", shared_bytes(spec, config)),
    )  # fmt: skip
    return Source("small.cu", "small", defines)


def prepare(spec: ProblemSpec, config: Config, index: int) -> int:
    """Compiles (or finds) and loads the kernel of a spec."""
    function = load(source(spec, config), index)[0]
    allow_shared(function, shared_bytes(spec, config))
    return function


def _listed(ops: Operands, side: int) -> tuple[bytes, int]:
    """A list's groups as the kernel's second argument, and the number of tiles."""
    a_line, b_line, tiles = int(ops.spec.a.order == "col"), int(ops.spec.b.order == "col"), 0
    rows: list[tuple[int, ...]] = []
    for a, b, out in zip(ops.a, ops.b, ops.out, strict=True):
        (m, k), n = a.shape, b.shape[1]
        across, down = -(-n // side), -(-m // side)
        pitches = (2 * a.stride(a_line), 2 * b.stride(b_line), 2 * out.stride(0))  # a single line's goes unused
        rows.append((tiles, max(across, 1), m, n, k, a.data_ptr(), b.data_ptr(), out.data_ptr(), *pitches))
        tiles += across * down
    rows += [(NEVER, 1, *[0] * 9)] * (LIST - len(rows))
    return LISTED.pack(*(value for column in zip(*rows, strict=True) for value in column)), tiles


def _grid(view: Packed, side: int, plain: bool) -> tuple[int, int, int]:
    """Tiles across, down and groups; along a jagged direction as many as any offsets could need."""
    down, across = -(-view.m // side), -(-view.n // side)
    if (
        view.jagged == "m" and plain and view.b.group == 0
    ):  # one B for all: the kernel cuts rows as if there were no groups
        return max(across, 1), max(down, 1), 1
    if view.jagged == "m":
        return max(across, 1), max(down + view.groups, 1), 1
    if view.jagged == "n":
        return max(down, 1), max(across + view.groups, 1), 1
    return max(across, 1), max(down, 1), max(view.groups, 1)


def bind(ops: Operands, config: Config, function: int) -> Launch:
    """Lays out the arguments of one problem."""
    view = view_of(ops)
    arguments = [problem_bytes(ops, None, view)]
    if ops.spec.form == "per_group":
        listed, tiles = _listed(ops, config.tile)
        arguments.append(listed)
        if tiles == 0:
            return _nothing
        grid = (tiles, 1, 1)
    else:
        grid = _grid(view, config.tile, _plain(ops.spec))
    return launcher(
        function,
        arguments,
        grid=grid,
        threads=4 * config.tile,
        shared=shared_bytes(ops.spec, config),
        overlap=torch.cuda.get_device_capability(ops.device) >= HOPPER,
        index=ops.device.index or 0,
        keep=ops,
    )


def _nothing() -> None:
    """What a list without a single element of a result launches."""
