"""Runs the portable kernels in Triton's interpreter on CPU tensors: the same source, without a GPU.

The interpreter replaces Triton's operators when the library is imported, so MULTIGEMM_EMULATE must be set before that;
`support` refuses with a reason if it is too late.
"""

from __future__ import annotations

import os
import threading
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.triton.build import KernelSource, constants_of
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.generic import (
    CHUNK,
    TYPES,
    bits_of,
    chunk_of,
    fused_tensors,
    group_sizes,
    numbers,
    parts_of,
    pointer_source,
    prefix_source,
    programs,
    sums_sizes,
    table_of,
    tiles_by_rows,
    uniform,
    view_of_result,
)
from multigemm.backends.triton.lists import few_groups, few_slots, few_source, few_values, list_chunk, tile_table
from multigemm.backends.triton.quantised import (
    quantised_numbers,
    quantised_source,
    scale_table,
)
from multigemm.backends.triton.sum_rows import sum_grid, sum_numbers, sum_operands, sum_source
from multigemm.planning.fused import bind_sums
from multigemm.planning.operands import Operands, group_table, view_of
from multigemm.planning.scale_grids import NO_GRID, SCALES, packed_grids

Given = dict[str, Tensor | None]
"""Operands by argument name."""
_alone = threading.RLock()
"""The interpreter puts its own functions into triton.language while a kernel runs, for all threads of the process."""


def bind_emulated(ops: Operands, config: Config) -> Launch:
    """A launch that interprets the kernel program by program.

    The interpreter computes in NumPy, which warns of the NaN, infinities and overflow that a GPU computes silently.
    NumPy keeps what it warns of for each thread, so the caller's other threads are warned as before.
    """
    launch = _bind(ops, config)

    def alone() -> None:
        with _alone, np.errstate(all="ignore"):
            launch()

    return alone


def _bind(ops: Operands, config: Config) -> Launch:
    spec = ops.spec
    if spec.fused is not None and spec.fused.scatters:
        return bind_sums(ops, lambda inner: _bind(inner, config), _bind_sum)
    if spec.quantised:
        return _bind_quantised(ops, config)
    if few_slots(spec, config) and (few := few_groups(ops, config)):
        return _bind_few(ops, config, *few)
    return _bind_pointer(ops, config)


# --- any kernel ---------------------------------------------------------------------------------------


def _kernel(source: KernelSource) -> tuple[Any, dict[str, Any]]:
    """The kernel that the interpreter runs in place of a compiled one, and its constants."""
    os.environ["TRITON_INTERPRET"] = "1"
    constants = constants_of(source)
    if "INTERPRETED" in constants:
        constants["INTERPRETED"] = True
    return getattr(import_module(source.module), source.name), constants


def _absent(kind: str) -> Tensor:
    """A placeholder for an absent operand, of the type in the kernel's signature."""
    return torch.empty(1, dtype=next(dtype for dtype, name in TYPES.items() if kind == "*" + name))


def _interpreted(source: KernelSource, given: Given, values: dict[str, int], grid: int) -> Launch:
    """Interprets a kernel with these tensors and numbers."""
    kernel, constants = _kernel(source)
    arguments: dict[str, Any] = {}
    for name, kind in source.signature:
        found = given.get(name, values.get(name))
        arguments[name] = _absent(str(kind)) if found is None else found
    return lambda: kernel[(grid,)](**arguments, **constants)


def _operands(ops: Operands, table: Any = None) -> Given:
    """Operands that every kernel of products takes; those of a list stand in a table."""
    spec, listed = ops.spec, ops.spec.form == "per_group"
    names = () if listed else ("a", "b", "c", "out", "bias")
    return {name: getattr(ops, name) for name in names} | {
        "ends": group_sizes(ops, sums_sizes(spec)),
        "table": None if table is None else torch.from_numpy(table),
        "prefix": torch.empty(max(1, spec.groups), dtype=torch.int32),
    }


def _behind_a_count(launch: Launch, ops: Operands, config: Config, given: Given, values: dict[str, int]) -> Launch:
    """A launch behind the one that counts the tiles of more groups than the kernel counts at once."""
    if ops.spec.groups <= CHUNK or uniform(ops.spec):
        return launch
    count = _interpreted(prefix_source(ops.spec, config), given, values, 1)

    def both() -> None:
        count()
        launch()

    return both


# --- each kernel --------------------------------------------------------------------------------------


def space_of(ops: Operands, places: int, config: Config) -> dict[str, Tensor]:
    """The memory in which programs that share a tile leave their parts and count themselves."""
    places = places if config.splits > 1 else 0
    return {"partials": parts_of(ops, places, config), "arrived": torch.zeros(places, dtype=torch.int32)}


def _bind_pointer(ops: Operands, config: Config) -> Launch:
    spec, shape = ops.spec, view_of_result(ops)
    listed = spec.form == "per_group" and spec.fused is None
    tiles = tile_table(ops, config) if listed else None
    chunk = list_chunk(spec, config, tiles) if listed else chunk_of(spec, config)
    table = tiles if tiles is not None else table_of(ops) if spec.form == "per_group" else None
    most = tiles_by_rows(ops, shape, config)(shape.m)
    places = max(1, most)
    given = _operands(ops, table) | fused_tensors(ops) | space_of(ops, places, config)
    values = numbers(ops, shape, spec.groups if table is None else len(table), places)
    source = pointer_source(spec, config, chunk=chunk)
    launch = _interpreted(source, given, values, programs(most, config, 1))
    return launch if tiles is not None else _behind_a_count(launch, ops, config, given, values)


def _bind_few(ops: Operands, config: Config, groups: list[tuple[int, ...]], tiles: int) -> Launch:
    """Interprets the kernel whose argument is the list, with addresses turned into tensors."""
    kernel, constants = _kernel(few_source(ops.spec, config))
    found = {x.data_ptr(): x for xs in (ops.a, ops.b, ops.out) for x in xs}
    slots = few_values(groups, few_slots(ops.spec, config))
    given = tuple((*g[:6], found[g[6]], g[7], found[g[8]], g[9], found[g[10]], g[11]) for g in slots)
    return lambda: kernel[(tiles,)](given, bits_of(ops.alpha, ops.spec), **constants)


def _bind_quantised(ops: Operands, config: Config) -> Launch:
    """Interprets the kernel of quantised operands, with bytes and codes of scales as uint8."""
    spec, listed, shape = ops.spec, ops.spec.form == "per_group", view_of(ops)
    given = _operands(ops, group_table(ops) if listed else None)
    given |= {"scales": torch.from_numpy(scale_table(ops))} if listed else {x: getattr(ops, x) for x in SCALES}
    given |= {name: _bytes(given.get(name)) for name in ("a", "b", "scale_a", "scale_b")}
    grids = [NO_GRID] * len(SCALES) if listed else packed_grids(ops)
    values, source = quantised_numbers(ops, shape, grids), quantised_source(spec, config, 0, chunk_of(spec, config))
    launch = _interpreted(source, given, values, programs(tiles_by_rows(ops, shape, config)(shape.m), config, 1))
    return _behind_a_count(launch, ops, config, given, values)


def _bytes(x: Tensor | None) -> Tensor | None:
    """The codes of elements of 8 bits."""
    return x if x is None or x.dtype.itemsize > 1 else x.view(torch.uint8)


def _bind_sum(ops: Operands, rows: Tensor, index: Tensor, order: Tensor | None) -> Launch:
    sums = sums_sizes(ops.spec)
    given = {**sum_operands(ops, rows, index, order), "ends": group_sizes(ops, sums)}
    return _interpreted(sum_source(ops.spec, sums), given, sum_numbers(ops, rows.shape[0]), sum_grid(ops.spec, ops))
