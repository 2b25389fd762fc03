"""Binds the Hopper kernel for float8: maps of bytes, and the scales of the row side and of the weight side.

Its sides are those of `hopper`, and k is contiguous in both. Operands of a jagged k are copied first, so that it is,
and so that each group begins at a multiple of 128.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import torch

from multigemm.backend import Launch
from multigemm.backends.cupy.arguments import problem_bytes, row_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.hopper import Clusters, Roles, results_of, sides_of
from multigemm.backends.cupy.quantised import packed_bytes
from multigemm.backends.cupy.support import has_block_scales, is_swapped, plain_kind, sends
from multigemm.cuda.arguments import Argument, Fields, join
from multigemm.cuda.device import processors
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import Kernel, in_turn
from multigemm.cuda.operand_maps import plain_map, result_map
from multigemm.planning.operands import Operands, Packed, Strided, view_of
from multigemm.problem.spec import OperandSpec, ProblemSpec

LINE = 128
"""k of a block: a group's copy begins at a multiple of it."""


def sides(spec: ProblemSpec) -> tuple[OperandSpec, OperandSpec]:
    """The operands of the row side and of the weight side."""
    return (spec.b, spec.a) if is_swapped(spec) else (spec.a, spec.b)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The source of the kernel: float8 format, how results are stored, where scales change, and the config."""
    x, w = sides(spec)
    lines = w.scale is not None and w.scale.rows == 1
    e5m2 = tuple(s.dtype is torch.float8_e5m2 for s in (w, x))
    bfloat = spec.out.dtype is torch.bfloat16
    jagged_k = spec.form == "jagged_k"
    return _source(e5m2, has_block_scales(spec), lines, bfloat, plain_kind(spec), sends(spec), jagged_k, config)


@lru_cache(maxsize=1024)
def _source(
    e5m2: tuple[bool, ...],
    blocks: bool,
    lines: bool,
    bfloat: bool,
    plain: int,
    sent: bool,
    jagged_k: bool,
    config: Config,
) -> Source:
    shared = config.shared_bytes(plain > 0)
    defines = (
        ("W_E5M2", int(e5m2[0])), ("X_E5M2", int(e5m2[1])), ("BLOCK_SCALES", int(blocks)), ("W_LINES", int(lines)),
        ("JAGGED_K", int(jagged_k)), ("BFLOAT", int(bfloat)), ("PLAIN", plain), ("SEND", int(sent)),
        ("ROWS", config.rows), ("TILE_COLUMNS", config.columns), ("STAGES", config.stages),
        ("CLUSTER", config.cluster), ("STEP", config.step), ("SHARED", shared),
    )  # fmt: skip
    return Source("hopper_fp8.cu", "hopper_fp8", defines, shared)


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels that the spec's problems may launch under this config."""
    return (source(spec, config), *([COPY_SOURCE] if spec.form == "jagged_k" else []))


def side_grids(ops: Operands, columns: int) -> Fields:
    """The scales of the row side and the weight side, and the number of columns of the latter (`SideGrids`)."""
    of_a, of_b, _ = packed_bytes(ops)
    sides = (of_b, of_a) if is_swapped(ops.spec) else (of_a, of_b)
    return join([*sides, columns.to_bytes(8, "little")])


COPY_SOURCE = Source("k_major.cu", "k_major", ())
COPY_THREADS, COPIES_PER_SM = 256, 8


class KMajorCopies:
    """Copies of the operands of a jagged k, with k contiguous. The bound problem owns their memory."""

    def __init__(self, view: Packed, ops: Operands) -> None:
        self.blocks = int(view.k) // LINE + view.groups
        pitch = self.blocks * LINE
        self.memory = [torch.empty(lines * pitch, dtype=torch.uint8, device=ops.device) for lines in (view.m, view.n)]
        a, b = (x.data_ptr() for x in self.memory)
        self.view = replace(view, k=pitch, a=Strided(a, 0, pitch, 1), b=Strided(b, 0, 1, pitch))

    def launch(self, kernel: Kernel, ops: Operands, view: Packed) -> Launch:
        """The launch that fills them."""
        to = join([*(x.data_ptr().to_bytes(8, "little") for x in (*self.memory,)), self.blocks.to_bytes(8, "little")])
        units = self.blocks * (-(-view.m // LINE) + -(-view.n // LINE))
        grid = max(1, min(units, COPIES_PER_SM * processors(kernel.index)))
        given: list[Argument] = [problem_bytes(ops, None, view), to]
        return kernel.bound(given, grid=grid, threads=COPY_THREADS, keep=tuple(self.memory))


class HopperFp8:
    """The Hopper kernel for float8, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._clusters, self._index = Clusters(load(source(spec, config), index), spec, config), index
        self._swapped, self._sends, self._out = is_swapped(spec), sends(spec), spec.out.dtype
        self._columns = config.columns
        self._copy = load(COPY_SOURCE, index) if spec.form == "jagged_k" else None

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        view = view_of(ops)
        if self._copy is None:
            return self._product(ops, view, view)
        copies = KMajorCopies(view, ops)
        return in_turn([copies.launch(self._copy, ops, view), self._product(ops, view, copies.view)])

    def _product(self, ops: Operands, view: Packed, read: Packed) -> Launch:
        """The launch of the products, which reads the operands `read`."""
        x, w = sides_of(read, Roles(self._swapped, True, True), torch.uint8)
        with on_device(self._index):
            maps = [plain_map(w, self._columns), *row_maps(x)]
            if self._sends:
                maps.append(result_map(results_of(view, self._swapped, self._out)))
        more: list[Argument] = [side_grids(ops, w.mn), tuple(maps)]
        return self._clusters.bound(ops, view, more, columns=w.mn)
