"""The kernel of quantised operands: its sources, and the binding of a problem's data.

Elements that the target multiplies in float8 are loaded as such (`native`). Elsewhere, and in the interpreter, elements
are bytes and become float16, which holds each of them exactly.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, capability_of, compile_all, load
from multigemm.backends.triton.config import Config, folded, quantised_registers, swapped
from multigemm.backends.triton.generic import (
    CHUNK,
    TYPES,
    chunk_of,
    chunks,
    constants,
    counted,
    counting_kernel,
    hints,
    multiple_of,
    numbers,
    pointers,
    prefix_of,
    prefix_source,
    programs,
    signature,
    sizes_address,
    sums_sizes,
    uniform,
)
from multigemm.backends.triton.lists import extents_multiple
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.launch import without_move
from multigemm.planning.operands import Operands, Packed, group_table, view_of
from multigemm.planning.scale_grids import NO_GRID, SCALES, WHOLE_K, ScaleGrid, listed_grids, packed_grids
from multigemm.planning.tiles import most_tiles_by_rows
from multigemm.problem.spec import FLOAT8, ProblemSpec, ScaleSpec

FORMATS = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2", torch.int8: "int8"}
SCALE_COLUMNS = 15
"""Of a list's scales: address, distance of lines and of blocks along K, and shifts to both, for each of SCALES."""
STRIDES = tuple(f"{part}_{along}" for part in ("sa", "sb", "zb") for along in ("group", "line", "deep"))


def native(capability: int) -> bool:
    """Whether float8 is multiplied by float8 instructions: Hopper's wgmma, or tcgen05 of Blackwell's data-centre chips.

    mma.sync of float8 (Ada, consumer Blackwell) sums with as few bits as wgmma, and Triton would not restart its sums
    from zero. There float16 is used, as exact and at half the rate.
    """
    return capability // 10 in (9, 10)


def byte_types(spec: ProblemSpec, capability: int) -> bool:
    """Whether elements are loaded as bytes. Weights in float8 are converted by instructions if there are any."""
    return not native(capability) or spec.b.dtype not in FLOAT8


def by_bits(spec: ProblemSpec, capability: int) -> bool:
    """Whether weights are decoded by instructions on four bytes at once. The interpreter has none.

    int8 with zero points exceeds what bfloat16 holds. float8 has conversion instructions, because its NaN cannot be
    decoded this way.
    """
    integers = spec.b.dtype is torch.int8 and (spec.b.scale is None or spec.b.scale.zero is None)
    return capability > 0 and (bool(spec.b.packed) or integers)


def narrow_fold(spec: ProblemSpec, config: Config, capability: int) -> bool:
    """Whether folded scales multiply the weights in the activations' dtype. The product of two such numbers is rounded
    once there, exactly as after a product in float32."""
    scale = spec.b.scale
    if scale is None or scale.zero is not None or not folded(config, spec) or not by_bits(spec, capability):
        return False
    return scale.dtype in (spec.compute, torch.float8_e8m0fnu)


def _signature(spec: ProblemSpec, capability: int) -> tuple[tuple[str, str], ...]:
    """The types of the arguments, in the order in which the kernel takes them."""
    operands, zero = (("a", spec.a), ("b", spec.b)), None if spec.b.scale is None else spec.b.scale.zero
    pointers = {name: "*u8" for name, x in operands if byte_types(spec, capability) and x.dtype.itemsize == 1}
    pointers |= {f"scale_{name}": "*" + TYPES[x.scale.dtype if x.scale else torch.float32] for name, x in operands}
    pointers |= {"zero_b": "*" + TYPES[zero or torch.uint8], "scales": "*i64"}
    return signature(spec, pointers, (), STRIDES)


def quantised_constants(
    spec: ProblemSpec, config: Config, capability: int, chunk: int = CHUNK, multiple: int = 1
) -> dict[str, Any]:
    """The constexpr arguments. A `capability` of 0 is the interpreter's. `multiple` is a divisor of the extents of
    lists."""
    a, b = spec.a.scale, spec.b.scale
    of_a, of_b = (x or ScaleSpec(torch.float32) for x in (a, b))
    e8m0 = torch.float8_e8m0fnu
    return constants(spec, config, multiple, chunk) | {
        "A_FORMAT": FORMATS.get(spec.a.dtype, ""),
        "B_FORMAT": spec.b.packed or FORMATS[spec.b.dtype],
        "NATIVE": not byte_types(spec, capability),
        "BITS": by_bits(spec, capability),
        "PACKED": bool(spec.b.packed),
        "SWAPPED": swapped(config),
        "PROMOTED": spec.quantised == "float8" and spec.accumulate == "promoted",
        "FOLDED": folded(config, spec),
        "NARROW_FOLD": narrow_fold(spec, config, capability),
        "SA": a is not None, "SB": b is not None, "ZB": of_b.zero is not None,
        "SA_E8M0": of_a.dtype is e8m0, "SB_E8M0": of_b.dtype is e8m0,
        "SA_ROWS": of_a.rows, "SA_K": of_a.k, "SB_ROWS": of_b.rows, "SB_K": of_b.k,
    }  # fmt: skip


def quantised_source(
    spec: ProblemSpec, config: Config, capability: int, chunk: int = CHUNK, multiple: int = 1
) -> KernelSource:
    return KernelSource(
        module="multigemm.backends.triton.kernels.quantised",
        name="quantised_kernel",
        signature=_signature(spec, capability),
        constants=tuple(quantised_constants(spec, config, capability, chunk, multiple).items()),
        divisibility=hints(spec),
        warps=config.warps,
        stages=config.stages,
        registers=quantised_registers(config),
    )


def quantised_sources(spec: ProblemSpec, config: Config, capability: int) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one for few groups and for many, and of lists also for extents that masks need
    not cut an access at; and the one that counts tiles."""
    multiples = (1, multiple_of(spec)) if spec.form == "per_group" and spec.a.align == spec.b.align == 16 else (1,)
    found = {
        f"main {chunk} {multiple}": quantised_source(spec, config, capability, chunk, multiple)
        for chunk in chunks(spec, config)
        for multiple in multiples
    }
    return found if uniform(spec) else {**found, "prefix": prefix_source(spec, config)}


def scale_table(ops: Operands) -> npt.NDArray[np.int64]:
    """[G, SCALE_COLUMNS] for lists, whose matrices may each have another coverage."""
    table = np.zeros((ops.spec.groups, len(SCALES), SCALE_COLUMNS // len(SCALES)), dtype=np.int64)
    for g, grids in enumerate(listed_grids(ops)):
        table[g] = [(at, line, deep, down, along % WHOLE_K) for (at, _, line, deep, down, along), _ in grids]
    return table.reshape(-1, SCALE_COLUMNS)


def quantised_numbers(ops: Operands, shape: Packed, scales: Sequence[ScaleGrid]) -> dict[str, int]:
    """The arguments after the pointers."""
    return numbers(ops, shape, ops.spec.groups) | dict(
        zip(STRIDES, chain.from_iterable(scale[1:4] for scale in scales), strict=True)
    )


class QuantisedPlan:
    """The kernels of one spec and config, loaded on one device."""

    __slots__ = ("_config", "_count", "_index", "_main")

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        sources = quantised_sources(spec, config, capability_of(index))
        compile_all(sources, index)
        own = f"main {chunk_of(spec, config)} "
        self._config, self._index = config, index
        self._main = {
            int(name.removeprefix(own)): load(source, index) for name, source in sources.items() if name.startswith(own)
        }
        self._count = counting_kernel(sources, spec, index)

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem: the main kernel's, after a kernel that counts the tiles of many
        groups."""
        shape, config, index = view_of(ops), self._config, self._index
        tiles = most_tiles_by_rows(ops, shape, config.block_m, config.block_n)

        def grid_for(tokens: int) -> int:
            return programs(tiles(tokens), config, processors(index))

        listed = ops.spec.form == "per_group"
        tables = [to_device(rows, ops.device) for rows in (group_table(ops), scale_table(ops))] if listed else []
        table, scales = (x.data_ptr() for x in tables) if listed else (0, 0)
        of_scales = [NO_GRID] * len(SCALES) if listed else packed_grids(ops)
        sizes = 0 if listed else sizes_address(ops, sums_sizes(ops.spec))
        prefix = None if self._count is None else prefix_of(ops)
        values = pointers(shape, sizes, table, prefix) | quantised_numbers(ops, shape, of_scales)
        values |= dict(zip(SCALES, (x for x, *_ in of_scales), strict=True)) | {"scales": scales}
        main = self._main[extents_multiple(ops) if len(self._main) > 1 else 1]
        bound = main.bound(main.ordered(values), grid_for(shape.m), (prefix, *tables), grid_for=grid_for)
        launch = bound if self._count is None else counted(self._count, bound, values)
        return without_move(launch) if listed else launch


def plan_quantised(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    """Compiles (or loads) the kernels of problems with quantised operands; `bind` then only lays out arguments."""
    return Recipe("quantised", config, QuantisedPlan(spec, config, index).bind, why, sums_sizes=sums_sizes(spec))
