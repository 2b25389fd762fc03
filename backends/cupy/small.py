"""Binds the kernel for small problems: one thread block per tile, in a grid in which a block finds its tile fast."""

from __future__ import annotations

import struct
from collections.abc import Callable

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import problem_bytes
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import BLOCK_K, SMALL_STAGES, Config
from multigemm.backends.cupy.support import MAX_LISTED_GROUPS, begins_anywhere, is_swapped, plain_kind
from multigemm.cuda.launch import BoundKernel, without_move
from multigemm.planning.operands import Operands, Packed, view_of
from multigemm.problem.spec import ProblemSpec

LISTED = struct.Struct(f"<{5 * MAX_LISTED_GROUPS}i{6 * MAX_LISTED_GROUPS}q")
NEVER = 0x7FFFFFFF
HOPPER = (9, 0)


def _plain(spec: ProblemSpec) -> bool:
    """Whether results go straight from the registers: alpha * A @ B, contiguous along columns."""
    return plain_kind(spec) == (2 if is_swapped(spec) else 1)


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """The ring of k-blocks in bytes, as small.cu lays it out."""
    a_k, b_k, side = spec.a.order != "col", spec.b.order == "col", config.tile
    a = side * (BLOCK_K + 8) if a_k else BLOCK_K * (side + 8)
    b = side * (BLOCK_K + 8) if b_k else BLOCK_K * (side + 8)
    return 2 * (config.stages or SMALL_STAGES) * (a + b)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The source of the kernel: dtype, layouts, where lines start, tile, where groups come from, whether the epilogue
    is plain."""
    defines = (
        ("BFLOAT", int(spec.compute == torch.bfloat16)), ("A_K", int(spec.a.order != "col")),
        ("B_K", int(spec.b.order == "col")), ("TILE_M", config.tile), ("TILE_N", config.tile),
        ("A_ODD", int(begins_anywhere(spec, "a"))), ("B_ODD", int(begins_anywhere(spec, "b"))),
        ("DEPTH", config.stages or SMALL_STAGES),
        ("LISTED", int(spec.form == "per_group")), ("PLAIN", int(_plain(spec))),
        ("PAIRS", int(spec.out.align >= 4 and spec.form != "jagged_n")),
        ("SHARED", shared_bytes(spec, config)),
    )  # fmt: skip
    return Source("small.cu", "small", defines, shared_bytes(spec, config))


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
    rows += [(NEVER, 1, *[0] * 9)] * (MAX_LISTED_GROUPS - len(rows))
    return LISTED.pack(*(value for column in zip(*rows, strict=True) for value in column)), tiles


def _grid(view: Packed, rows: int, side: int, plain: bool) -> tuple[int, int, int]:
    """Tiles across, tiles down, and groups; along a jagged direction as many tiles as any offsets could need."""
    down, across = -(-rows // side), -(-view.n // side)
    if (
        view.jagged == "m" and plain and view.b.group == 0
    ):  # one B for all: the kernel cuts rows as if there were no groups
        return max(across, 1), max(down, 1), 1
    if view.jagged == "m":
        return max(across, 1), max(down + view.groups, 1), 1
    if view.jagged == "n":
        return max(down, 1), max(across + view.groups, 1), 1
    return max(across, 1), max(down, 1), max(view.groups, 1)


class Small:
    """The kernel for small problems, loaded for those of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._kernel, self._tile, self._plain = load(source(spec, config), index), config.tile, _plain(spec)
        self._shared, self._listed = shared_bytes(spec, config), spec.form == "per_group"
        self._overlap = torch.cuda.get_device_capability(index) >= HOPPER

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        view = view_of(ops)
        arguments: list[bytes] = [problem_bytes(ops, None, view)]
        if not self._listed:

            def grid_for(rows: int) -> tuple[int, int, int]:
                return _grid(view, rows, self._tile, self._plain)

            return self._bound(arguments, grid_for(view.m), grid_for)
        listed, tiles = _listed(ops, self._tile)
        return without_move(self._bound([*arguments, listed], (tiles, 1, 1)))

    def _bound(
        self,
        arguments: list[bytes],
        grid: tuple[int, int, int],
        grid_for: Callable[[int], tuple[int, int, int]] | None = None,
    ) -> BoundKernel:
        return self._kernel.bound(
            arguments,
            grid=grid,
            threads=4 * self._tile,
            shared=self._shared,
            overlap=self._overlap,
            grid_for=grid_for,
        )
