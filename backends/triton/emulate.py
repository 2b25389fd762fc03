"""Runs the pointer kernel in Triton's interpreter on CPU tensors: the same source, without a GPU.

The interpreter replaces Triton's operators when the library is imported, so MULTIGEMM_EMULATE must be set before that;
`support` refuses with a reason if it is too late.
"""

from __future__ import annotations

import os
import threading
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.fused import (
    fused_constants,
    fused_numbers,
    fused_tensors,
    fused_types,
    most_tiles,
    result_tile,
    sum_constants,
    sum_grid,
    sum_numbers,
    sum_operands,
    sum_types,
    table_of,
    view_of_result,
)
from multigemm.backends.triton.generic import (
    CHUNK,
    TYPES,
    bits_of,
    chunk_of,
    constants,
    group_sizes,
    most_tiles_of,
    numbers,
    parts_of,
    prefix_constants,
    programs,
    sums_sizes,
    uniform,
)
from multigemm.backends.triton.lists import (
    few_constants,
    few_groups,
    few_slots,
    few_values,
    list_chunk,
    most_tiles_of_list,
    tile_table,
)
from multigemm.backends.triton.quantised import (
    SCALES,
    quantised_constants,
    quantised_numbers,
    scale_strides,
    scale_table,
)
from multigemm.planning.fused import bind_sums
from multigemm.planning.operands import ABSENT, NO_VIEW, Operands, group_table, packed, view_of
from multigemm.planning.tiles import most_tiles_by_rows


def _kernels() -> tuple[Any, Any, Any]:
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    from multigemm.backends.triton.kernels.generic import pointer_kernel
    from multigemm.backends.triton.kernels.schedule import write_prefix

    return pointer_kernel, write_prefix, tl


def _tensors(ops: Operands, table: npt.NDArray[np.int64] | None) -> dict[str, Tensor]:
    """The operands by argument name; an absent one is an empty tensor of the right type."""
    spec, listed = ops.spec, ops.spec.form == "per_group"

    def one(value: Tensor | list[Tensor] | None, dtype: torch.dtype) -> Tensor:
        return value if isinstance(value, Tensor) and not listed else torch.empty(1, dtype=dtype)

    return {
        "a": one(ops.a, spec.a.dtype),
        "b": one(ops.b, spec.b.dtype),
        "c": one(ops.c, spec.c.dtype if spec.c else spec.out.dtype),
        "out": one(ops.out, spec.out.dtype),
        "bias": one(ops.bias, spec.bias or spec.out.dtype),
        "ends": one(group_sizes(ops, sums_sizes(spec)), spec.index or torch.int32),
        "table": torch.empty(1, dtype=torch.int64) if table is None else torch.from_numpy(table),
        "prefix": torch.empty(max(1, spec.groups), dtype=torch.int32),
    }


def space_of(ops: Operands, places: int, config: Config) -> dict[str, Tensor]:
    """The memory in which programs that share a tile leave their parts and count themselves."""
    places = places if config.splits > 1 else 0
    return {"partials": parts_of(ops, places, config), "arrived": torch.zeros(places, dtype=torch.int32)}


def _bind_few(ops: Operands, config: Config, groups: list[tuple[int, ...]], tiles: int) -> Launch:
    """Interprets the kernel whose argument is the list, with addresses turned into tensors."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    from multigemm.backends.triton.kernels.lists import few_kernel

    spec, kernel = ops.spec, cast(Any, few_kernel)
    found = {x.data_ptr(): x for xs in (ops.a, ops.b, ops.out) for x in xs}
    slots = few_values(groups, few_slots(spec, config))
    given = tuple((*g[:6], found[g[6]], g[7], found[g[8]], g[9], found[g[10]], g[11]) for g in slots)
    options = {**few_constants(spec, config), "INTERPRETED": True}
    options["ACC"] = getattr(tl, options["ACC"].removeprefix("tl."))
    return lambda: kernel[(tiles,)](given, bits_of(ops.alpha, spec), **options)


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


def _bind_quantised(ops: Operands, config: Config) -> Launch:
    """Interprets the kernel of quantised operands, with bytes and codes of scales as uint8."""
    os.environ["TRITON_INTERPRET"] = "1"
    from multigemm.backends.triton.kernels.quantised import quantised_kernel
    from multigemm.backends.triton.kernels.schedule import write_prefix

    spec, kernel, count = ops.spec, cast(Any, quantised_kernel), cast(Any, write_prefix)
    listed, shape = spec.form == "per_group", view_of(ops)
    options = {**quantised_constants(spec, config, 0, chunk_of(spec, config)), "INTERPRETED": True}
    most = most_tiles_by_rows(ops, shape, config.block_m, config.block_n)(shape.m)
    grid, tensors = (programs(most, config, 1),), _tensors(ops, group_table(ops) if listed else None)
    scales = {name: getattr(ops, name) for name in SCALES}
    of_scales = {"scale_a": spec.a.scale, "scale_b": spec.b.scale}
    kinds = {name: torch.float32 if of is None else of.dtype for name, of in of_scales.items()}
    kinds["zero_b"] = (spec.b.scale and spec.b.scale.zero) or torch.uint8
    tensors |= {name: x if isinstance(x, Tensor) else torch.empty(1, dtype=kinds[name]) for name, x in scales.items()}
    tensors["scales"] = torch.from_numpy(scale_table(ops)) if listed else torch.empty(1, dtype=torch.int64)
    given = [_bytes(x) if name in ("a", "b", *of_scales) else x for name, x in tensors.items()]
    strides = [ABSENT] * len(SCALES) if listed else scale_strides(ops)
    arguments = [*given, *quantised_numbers(ops, shape, strides)]

    def launch() -> None:
        if spec.groups > CHUNK and not uniform(spec):
            read = [tensors["prefix"], tensors["ends"], tensors["table"], shape.m, shape.n, spec.groups, int(ops.head)]
            count[(1,)](*read, **prefix_constants(spec, config))
        kernel[grid](*arguments, **options)

    return launch


def _absent(kind: str) -> Tensor:
    """A placeholder for an absent operand, of the type in the kernel's signature."""
    return torch.empty(1, dtype=next(dtype for dtype, name in TYPES.items() if kind == "*" + name))


def _bind_fused(ops: Operands, config: Config) -> Launch:
    """Interprets the kernel of fused products."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    from multigemm.backends.triton.kernels.fused import fused_kernel
    from multigemm.backends.triton.kernels.schedule import write_prefix

    spec, kernel, count = ops.spec, cast(Any, fused_kernel), cast(Any, write_prefix)
    shape, types = view_of_result(ops), fused_types(spec)
    options = {**fused_constants(spec, config, chunk_of(spec, config)), "INTERPRETED": True}
    options["ACC"] = getattr(tl, options["ACC"].removeprefix("tl."))
    tensors = _tensors(ops, table_of(ops) if spec.form == "per_group" else None)
    tensors |= {name: _absent(types[name]) if x is None else x for name, x in fused_tensors(ops).items()}
    grid = (programs(most_tiles(ops, shape, config), config, 1),)
    arguments = [*tensors.values(), *fused_numbers(ops, shape)]

    def launch() -> None:
        if spec.groups > CHUNK and not uniform(spec):
            read = [tensors["prefix"], tensors["ends"], tensors["table"], shape.m, shape.n, spec.groups, int(ops.head)]
            count[(1,)](*read, **prefix_constants(spec, result_tile(spec, config)))
        kernel[grid](*arguments, **options)

    return launch


def _bind_sum(ops: Operands, rows: Tensor, index: Tensor, order: Tensor | None) -> Launch:
    """Interprets the kernel that sums rows."""
    os.environ["TRITON_INTERPRET"] = "1"
    import triton.language as tl

    from multigemm.backends.triton.kernels.fused import sum_rows_kernel

    kernel, sums = cast(Any, sum_rows_kernel), sums_sizes(ops.spec)
    options = {**sum_constants(ops.spec, sums), "INTERPRETED": True}
    options["ACC"] = getattr(tl, options["ACC"].removeprefix("tl."))
    types = sum_types(ops.spec, sums)
    values, grid = sum_numbers(ops, rows.shape[0]), sum_grid(ops.spec, ops)
    given = {**sum_operands(ops, rows, index, order), "ends": group_sizes(ops, sums)}
    found = [_absent(types[name]) if x is None else x for name, x in given.items()]
    return lambda: kernel[(grid,)](*found, *values, **options)


def _bytes(x: Tensor) -> Tensor:
    """The codes of elements of 8 bits."""
    return x.view(torch.uint8) if x.dtype.itemsize == 1 else x


def _bind(ops: Operands, config: Config) -> Launch:
    spec = ops.spec
    if spec.fused is not None and spec.fused.scatters:
        return bind_sums(ops, lambda inner: _bind(inner, config), _bind_sum)
    if spec.fused is not None:
        return _bind_fused(ops, config)
    if spec.quantised:
        return _bind_quantised(ops, config)
    if few_slots(spec, config) and (few := few_groups(ops, config)):
        return _bind_few(ops, config, *few)
    kernel, count, tl = _kernels()
    listed = spec.form == "per_group"
    shape = NO_VIEW if listed else packed(ops)
    tiles = tile_table(ops, config) if listed else None
    table = group_table(ops) if listed and tiles is None else tiles
    chunk = list_chunk(spec, config, tiles) if listed else chunk_of(spec, config)
    options = {**constants(spec, config, chunk=chunk), "INTERPRETED": True}
    options["ACC"] = getattr(tl, options["ACC"].removeprefix("tl."))
    most = most_tiles_of_list(ops, config) if listed else most_tiles_of(shape, shape.m, config)
    grid, places = (programs(most, config, 1),), max(1, most)
    tensors = _tensors(ops, table) | space_of(ops, places, config)
    arguments = [*tensors.values(), *numbers(ops, shape, spec.groups if table is None else len(table), places)]

    def launch() -> None:
        if spec.groups > CHUNK and not uniform(spec) and tiles is None:
            given = [tensors["prefix"], tensors["ends"], tensors["table"]]
            extents = [shape.m, shape.n, spec.groups, int(ops.head)]
            count[(1,)](*given, *extents, **prefix_constants(spec, config))
        kernel[grid](*arguments, **options)

    return launch
