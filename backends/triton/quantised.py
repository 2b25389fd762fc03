"""The kernel of quantised operands: its sources, and how a problem's data is bound to compiled code.

Elements that the target multiplies in float8 are loaded as such (`native`). Elsewhere, and in the interpreter, elements
are bytes and become float16, which holds each of them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, capability_of, compile_all, load
from multigemm.backends.triton.config import Config, folded, swapped
from multigemm.backends.triton.generic import (
    ABSENT,
    CHUNK,
    NO_SHAPE,
    TYPES,
    argument_types,
    chunk_of,
    chunks,
    constants,
    hints,
    most_tiles_of,
    most_tiles_of_rows,
    numbers,
    prefix_source,
    programs,
    sizes_address,
    sums_sizes,
    uniform,
)
from multigemm.backends.triton.lists import is_empty, most_tiles_of_list
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.launch import NOTHING, BoundKernel, LaunchSequence, without_move
from multigemm.planning.operands import Operands, Packed, Strided, group_table, packed, strides_of
from multigemm.problem.scales import BLOCKS, ROW_BLOCK
from multigemm.problem.spec import FLOAT8, ProblemSpec, ScaleSpec

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
SCALES = ("scale_a", "scale_b", "zero_b")
SCALE_COLUMNS = 15
"""Of a list's scales: address, distance of lines and of blocks along K, and shifts to both, for each of SCALES."""
NOT_HERE = ("MULTIPLE", "PRECISION", "ACC", "SPLITS")
"""Constants of the generic kernel that this one has not."""
HOPPER = 90


def native(capability: int) -> bool:
    """Whether float8 is multiplied as such: by Hopper's wgmma and by tcgen05 of Blackwell's data-centre chips.

    mma.sync of float8 (Ada, consumer Blackwell) sums as narrowly as wgmma, and Triton would join its sums to those
    before: there float16 is as right, at half the rate.
    """
    return capability // 10 in (9, 10)


def byte_types(spec: ProblemSpec, capability: int) -> bool:
    """Whether elements are loaded as bytes. Weights in float8 are converted by instructions where there are some."""
    return not native(capability) or spec.b.dtype not in FLOAT8


def _types(spec: ProblemSpec, capability: int) -> dict[str, str]:
    """The types of the arguments, in the order in which the kernel takes them."""
    found = argument_types(spec)
    if byte_types(spec, capability):
        found |= {name: "*u8" for name, x in (("a", spec.a), ("b", spec.b)) if x.dtype.itemsize == 1}
    scales = {"scale_a": spec.a.scale, "scale_b": spec.b.scale}
    of_scales = {name: "*" + ("fp32" if x is None else TYPES[x.dtype]) for name, x in scales.items()}
    zero = None if spec.b.scale is None else spec.b.scale.zero
    of_scales |= {"zero_b": "*" + TYPES[zero or torch.uint8], "scales": "*i64"}
    pointers = {name: found.pop(name) for name in ("a", "b", "c", "out", "bias", "ends", "table", "prefix")}
    for name in ("partials", "arrived", "places"):
        del found[name]
    strides = [f"{part}_{along}" for part in ("sa", "sb", "zb") for along in ("group", "line", "deep")]
    return {**pointers, **of_scales, **found, **dict.fromkeys(strides, "i64")}


def quantised_constants(spec: ProblemSpec, config: Config, capability: int, chunk: int = CHUNK) -> dict[str, Any]:
    """The constexpr arguments; a `capability` of 0 is the interpreter's."""
    found = {name: value for name, value in constants(spec, config, chunk=chunk).items() if name not in NOT_HERE}
    a, b = spec.a.scale, spec.b.scale
    of_a, of_b = (x or ScaleSpec(torch.float32) for x in (a, b))
    e8m0 = torch.float8_e8m0fnu
    return found | {
        "A_FORMAT": FORMATS.get(spec.a.dtype, ""),
        "B_FORMAT": spec.b.packed or FORMATS[spec.b.dtype],
        "NATIVE": not byte_types(spec, capability),
        "PACKED": bool(spec.b.packed),
        "SWAPPED": swapped(config),
        "PROMOTED": spec.quantised == "float8" and spec.accumulate == "promoted",
        "FOLDED": folded(config, spec),
        "SA": a is not None, "SB": b is not None, "ZB": of_b.zero is not None,
        "SA_E8M0": of_a.dtype is e8m0, "SB_E8M0": of_b.dtype is e8m0,
        "SA_ROWS": of_a.rows, "SA_K": of_a.k, "SB_ROWS": of_b.rows, "SB_K": of_b.k,
    }  # fmt: skip


def quantised_source(spec: ProblemSpec, config: Config, capability: int, chunk: int = CHUNK) -> KernelSource:
    return KernelSource(
        module="multigemm.backends.triton.kernels.quantised",
        name="quantised_kernel",
        signature=tuple(_types(spec, capability).items()),
        constants=tuple(quantised_constants(spec, config, capability, chunk).items()),
        divisibility=hints(spec),
        warps=config.warps,
        stages=config.stages,
    )


def quantised_sources(spec: ProblemSpec, config: Config, capability: int) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one for few groups and for many, and the one that counts tiles."""
    counts = chunks(spec, config)
    found = {f"main {chunk}": quantised_source(spec, config, capability, chunk) for chunk in counts}
    return found if uniform(spec) else {**found, "prefix": prefix_source(spec, config)}


def scale_strides(ops: Operands) -> list[Strided]:
    """Address and distances of each of SCALES: group, line, and block along K as the column; 0 where one entry is all."""
    found = []
    for name in SCALES:
        grid = getattr(ops, name)
        if not isinstance(grid, Tensor):
            found.append(ABSENT)
            continue
        at, group, row, col = strides_of(grid, name)
        found.append(Strided(at, group, *((row, col) if name == "scale_a" else (col, row))))
    return found


def scale_table(ops: Operands) -> npt.NDArray[np.int64]:
    """[G, SCALE_COLUMNS] for lists, each of whose matrices may be covered in its own way."""
    table = np.zeros((ops.spec.groups, SCALE_COLUMNS), dtype=np.int64)
    for part, name in enumerate(SCALES):
        for g, grid in enumerate(getattr(ops, name) or ()):
            lines, k = ops.a[g].shape if name == "scale_a" else (ops.b[g].shape[1], ops.a[g].shape[1])
            along_lines, along_k = grid.shape if name == "scale_a" else grid.shape[::-1]
            at, _, row, col = strides_of(grid)
            line, deep = (row, col) if name == "scale_a" else (col, row)
            shifts = _shift(along_lines, lines, (1, ROW_BLOCK)), _shift(along_k, k, BLOCKS)
            table[g, 5 * part : 5 * part + 5] = (at, line, deep, *shifts)
    return table


def _shift(entries: int, extent: int, blocks: Sequence[int]) -> int:
    """The bits to drop from a place along an axis for its entry."""
    return next((q.bit_length() - 1 for q in blocks if -(-extent // q) == entries), 0)


def quantised_numbers(ops: Operands, shape: Packed, scales: Sequence[Strided]) -> list[int]:
    """The arguments behind the pointers."""
    plain = numbers(ops, shape, ops.spec.groups, 0)
    del plain[5]  # places
    return [*plain, *(x for scale in scales for x in scale[1:])]


class QuantisedPlan:
    """The kernels of one spec and config, loaded on one device."""

    __slots__ = ("_config", "_count", "_main")

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        sources = quantised_sources(spec, config, capability_of(index))
        compile_all(sources, index)
        self._config, self._main = config, load(sources[f"main {chunk_of(spec, config)}"], index)
        counted = spec.groups > CHUNK and "prefix" in sources
        self._count = load(sources["prefix"], index) if counted else None

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        if ops.spec.form == "per_group":
            return NOTHING if is_empty(ops) else self._bind_list(ops)
        if not cast(Tensor, ops.out).numel():
            return NOTHING
        shape = packed(ops)
        at = sizes_address(ops, sums_sizes(ops.spec))
        return self._bind(ops, shape, most_tiles_of(shape, self._config), scale_strides(ops), sizes=at)

    def _bind_list(self, ops: Operands) -> Launch:
        table, scales = (to_device(rows, ops.device) for rows in (group_table(ops), scale_table(ops)))
        tiles = most_tiles_of_list(ops, self._config)
        bound: Any = self._bind(ops, NO_SHAPE, tiles, [ABSENT] * len(SCALES), table=table, scales=scales)
        return without_move(bound)

    def _bind(
        self, ops: Operands, shape: Packed, tiles: int, of_scales: Sequence[Strided], *, sizes: int = 0,
        table: Tensor | None = None, scales: Tensor | None = None,
    ) -> BoundKernel | LaunchSequence:  # fmt: skip
        """The main kernel's launch, behind one that counts the tiles of more groups than it counts at once."""
        config, index, groups = self._config, self._main.index, ops.spec.groups
        prefix = None if self._count is None else torch.empty(groups, dtype=torch.int32, device=ops.device)
        counted, listed, marks = (0 if x is None else x.data_ptr() for x in (prefix, table, scales))
        data = [shape.a.ptr, shape.b.ptr, (shape.c or ABSENT).ptr, shape.out.ptr, (shape.bias or ABSENT).ptr, sizes,
                listed, counted, *(x.ptr for x in of_scales), marks]  # fmt: skip

        def grid_for(tokens: int) -> int:
            return programs(most_tiles_of_rows(shape, tokens, config), config, processors(index))

        keep = tuple(x for x in (prefix, table, scales) if x is not None)
        values = [*data, *quantised_numbers(ops, shape, of_scales)]
        main = self._main.bound(values, programs(tiles, config, processors(index)), keep, grid_for=grid_for)
        if self._count is None:
            return main
        values = [counted, sizes, listed, shape.m, shape.n, groups, int(ops.head)]
        return LaunchSequence([self._count.bound(values, 1, keep, grid_for=lambda tokens: 1), main])


def plan_quantised(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    """Compiles (or loads) the kernels of problems with quantised operands; `bind` then only lays out arguments."""
    return Recipe("quantised", config, QuantisedPlan(spec, config, index).bind, why, sums_sizes=sums_sizes(spec))
