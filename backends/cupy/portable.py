"""Binds the portable kernel: one launch of resident thread blocks for any problem."""

from __future__ import annotations

from multigemm.backend import Launch
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.driver import allow_shared, launcher
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most, view_of
from multigemm.backends.cupy.shapes import kind_of, shapes_of, shared_bytes
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: arithmetic, contiguous directions and the tile, no sizes."""
    shape = shapes_of(spec)[config.tile]
    defines = (
        ("KIND", kind_of(spec)), ("A_K", int(spec.a.order != "col")), ("B_K", int(spec.b.order == "col")),
        ("TILE", config.tile), ("BLOCK_K", shape.depth), ("STAGES", shape.stages),
        ("BLOCK_THREADS", shape.threads), ("RESIDENT", shape.resident), ("SHARED", shared_bytes(spec, config.tile)),
    )  # fmt: skip
    return Source("portable.cu", "portable", defines)


def bind(ops: Operands, config: Config, function: int, sms: int) -> Launch:
    """Lays out the arguments of one problem."""
    table, view = table_of(ops), view_of(ops)
    tiles = tiles_at_most(ops, view, config.tile, config.tile)
    zeroes = ops.spec.zero_unowned and ops.spec.form in ("jagged_m", "jagged_n", "masked")
    grid = max(1, sms if zeroes else 1, min(tiles, sms * config.blocks_per_sm))
    return launcher(
        function,
        [problem_bytes(ops, table, view)],
        grid=grid,
        threads=shapes_of(ops.spec)[config.tile].threads,
        shared=shared_bytes(ops.spec, config.tile),
        index=ops.device.index or 0,
        keep=(ops, table),
    )


def prepare(spec: ProblemSpec, config: Config, index: int) -> int:
    """Compiles (or finds) and loads the kernel of a spec."""
    function = load(source(spec, config), index)[0]
    allow_shared(function, shared_bytes(spec, config.tile))
    return function
