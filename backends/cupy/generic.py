"""Binds the generic kernel: one launch of resident thread blocks for any problem."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import problem_bytes, table_of
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config, generic_bytes, is_copied, kind_of, shapes_of
from multigemm.backends.cupy.fused import problem_argument, table_with_preacts
from multigemm.backends.cupy.support import picks_rows
from multigemm.cuda.arguments import Argument
from multigemm.cuda.device import processors
from multigemm.cuda.launch import Kernel, without_move
from multigemm.planning.fused import view_of_tokens
from multigemm.planning.operands import Operands, Packed, view_of
from multigemm.planning.tiles import most_tiles_by_rows
from multigemm.problem.spec import ProblemSpec


def source(spec: ProblemSpec, config: Config) -> Source:
    """The source of the kernel: arithmetic, contiguous directions and tile, without sizes."""
    shape, shared = shapes_of(spec)[config.tile], generic_bytes(spec, config.tile)
    defines: tuple[tuple[str, int], ...] = (
        ("KIND", kind_of(spec)), ("A_K", int(spec.a.order != "col")), ("B_K", int(spec.b.order == "col")),
        ("TILE", config.tile), ("BLOCK_K", shape.depth), ("STAGES", shape.stages),
        ("BLOCK_THREADS", shape.threads), ("RESIDENT", shape.resident), ("SHARED", shared),
    )  # fmt: skip
    if spec.fused is not None:
        defines = (*defines, ("FUSED", 1))
    elif config.tile == 128 and is_copied(spec):
        defines = (*defines, ("COPIED", 1))
    return Source("generic.cu", "generic", defines, shared)


class ResidentBlocks:
    """Launches a kernel whose resident thread blocks process one square tile after another."""

    def __init__(self, kernel: Kernel, spec: ProblemSpec, config: Config, threads: int, shared: int = 0) -> None:
        self._kernel, self._tile, self._threads, self._shared = kernel, config.tile, threads, shared
        self._most = processors(kernel.index) * config.blocks_per_sm
        zeroes = spec.zero_unowned and spec.form in ("jagged_m", "jagged_n", "masked")
        self._least = processors(kernel.index) if zeroes else 1

    def bound(self, ops: Operands, more: Sequence[Argument] = (), keep: Sequence[object] = ()) -> Launch:
        """A launch for one problem. `more`: the kernel's arguments after the problem."""
        table, view = table_of(ops), view_of(ops)
        return self.bound_as(ops, table, view, [problem_bytes(ops, table, view), *more], keep)

    def bound_as(
        self, ops: Operands, table: Tensor | None, view: Packed, given: Sequence[Argument], keep: Sequence[object] = ()
    ) -> Launch:
        """A launch with these arguments, for a list with a table or for one formula."""
        most_tiles = most_tiles_by_rows(ops, view, self._tile, self._tile)

        def grid_for(tokens: int) -> int:
            return max(self._least, min(most_tiles(tokens), self._most))

        bound = self._kernel.bound(
            given,
            grid=grid_for(view.m),
            threads=self._threads,
            shared=self._shared,
            keep=(table, *keep),
            grid_for=None if picks_rows(ops.spec) else grid_for,  # indices say how many tokens there are
        )
        return bound if table is None else without_move(bound)


class Generic:
    """The generic kernel, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        kernel, threads = load(source(spec, config), index), shapes_of(spec)[config.tile].threads
        self._blocks = ResidentBlocks(kernel, spec, config, threads, generic_bytes(spec, config.tile))

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        if ops.fused is None:
            return self._blocks.bound(ops)
        table, view = table_with_preacts(ops), view_of_tokens(ops)
        return self._blocks.bound_as(ops, table, view, [problem_argument(ops, table, view)])
