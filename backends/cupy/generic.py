"""Binds the generic kernel: one launch of resident thread blocks for any problem."""

from __future__ import annotations

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import problem_bytes, table_of
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config, generic_bytes, kind_of, shapes_of
from multigemm.cuda.device import processors
from multigemm.cuda.launch import without_move
from multigemm.planning.operands import Operands, view_of
from multigemm.planning.tiles import most_tiles_by_rows
from multigemm.problem.spec import ProblemSpec


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: arithmetic, contiguous directions and the tile, no sizes."""
    shape = shapes_of(spec)[config.tile]
    defines = (
        ("KIND", kind_of(spec)), ("A_K", int(spec.a.order != "col")), ("B_K", int(spec.b.order == "col")),
        ("TILE", config.tile), ("BLOCK_K", shape.depth), ("STAGES", shape.stages),
        ("BLOCK_THREADS", shape.threads), ("RESIDENT", shape.resident), ("SHARED", generic_bytes(spec, config.tile)),
    )  # fmt: skip
    return Source("generic.cu", "generic", defines, generic_bytes(spec, config.tile))


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels that the spec's problems may launch under this config."""
    return (source(spec, config),)


class Generic:
    """The generic kernel, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._kernel, self._tile = load(source(spec, config), index), config.tile
        self._threads = shapes_of(spec)[config.tile].threads
        self._shared, self._processors = generic_bytes(spec, config.tile), processors(index)
        self._most = self._processors * config.blocks_per_sm
        zeroes = spec.zero_unowned and spec.form in ("jagged_m", "jagged_n", "masked")
        self._least = self._processors if zeroes else 1

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        table, view = table_of(ops), view_of(ops)
        most_tiles = most_tiles_by_rows(ops, view, self._tile, self._tile)

        def grid_for(tokens: int) -> int:
            return self._blocks(most_tiles(tokens))

        bound = self._kernel.bound(
            [problem_bytes(ops, table, view)],
            grid=grid_for(view.m),
            threads=self._threads,
            shared=self._shared,
            keep=(table,),
            grid_for=grid_for,
        )
        return bound if table is None else without_move(bound)

    def _blocks(self, tiles: int) -> int:
        return max(self._least, min(tiles, self._most))
