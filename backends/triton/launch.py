"""spec + config -> Recipe for the pointer kernel: how a problem's data is bound to compiled code."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.compile import Cubin, KernelSource, cubin
from multigemm.backends.triton.config import Config
from multigemm.backends.triton.pointer_sources import (
    CHUNK,
    EXTENTS,
    FEW,
    LISTED,
    POINTERS,
    STRIDES,
    WHOLE,
    ZERO_NAMES,
    chunks,
    few_slots,
    few_source,
    multiple_of,
    pointer_source,
    prefix_source,
    uniform,
)
from multigemm.backends.triton.pointer_tiles import few_groups, tile_table, whole
from multigemm.cuda.counters import SLOTS, Words, ready
from multigemm.cuda.device import to_device
from multigemm.errors import InvalidProblem
from multigemm.planning.operands import Operands, Packed, group_table, packed
from multigemm.planning.tiles import most_tiles, tiles_of
from multigemm.problem.spec import ProblemSpec


def bits_of(value: float, spec: ProblemSpec) -> int:
    """alpha and beta as 64 bits: of a float64, or an integer for int8."""
    if spec.acc == torch.int32:
        return int(value)
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def extents_multiple(ops: Operands) -> int:
    """That number if it divides every extent of a list that runs along memory, else 1: masks then cut no access."""
    spec = ops.spec
    along = {0: "col" in (spec.a.order, spec.out.order), 1: "row" in (spec.b.order, spec.out.order),
             2: spec.a.order == "row" or spec.b.order == "col"}  # fmt: skip
    whole = multiple_of(spec)
    shapes = ((*a.shape, b.shape[1]) for a, b in zip(ops.a, ops.b, strict=True))
    wanted = ((m, n, k) for m, k, n in shapes)
    return whole if all(x % whole == 0 for extents in wanted for i, x in enumerate(extents) if along[i]) else 1


def zero_launcher(ops: Operands, code: Cubin, index: int) -> Callable[[], None]:
    """A launch of that kernel for one problem."""
    from multigemm.backends.triton.driver import launcher

    values = {**_addresses(ops, None, None), **scalars(ops, packed(ops))}
    return launcher(code, index, processors(index), [values[name] for name in ("out", "ends", *ZERO_NAMES)], (ops,))


def bound_on_tiles(ops: Operands, shape: Packed | None, config: Config) -> int:
    """At most this many tiles, without knowing device sizes."""
    if shape is None:
        sizes = ((a.shape[0], b.shape[1]) for a, b in zip(ops.a, ops.b, strict=True))
        return sum(tiles_of(m, config.block_m) * tiles_of(n, config.block_n) for m, n in sizes)
    down, across = tiles_of(shape.m, config.block_m), tiles_of(shape.n, config.block_n)
    if shape.jagged == "m":
        return most_tiles(shape.m, shape.groups, config.block_m) * across
    if shape.jagged == "n":
        return down * most_tiles(shape.n, shape.groups, config.block_n)
    return shape.groups * down * across


def scalars(ops: Operands, shape: Packed | None) -> dict[str, int]:
    """The integer arguments, by name."""
    names = dict.fromkeys((*EXTENTS, *STRIDES), 0)
    names |= {"groups": ops.spec.groups, "head": int(ops.head)}
    names |= {"alpha_bits": bits_of(ops.alpha, ops.spec), "beta_bits": bits_of(ops.beta, ops.spec)}
    if shape is None:
        return names
    names |= {"m": shape.m, "n": shape.n, "k": shape.k}
    for name in ("a", "b", "c", "out", "bias"):
        strided = getattr(shape, name)
        if strided is not None:
            names |= {f"{name}_group": strided.group, f"{name}_col": strided.col}
            if name != "bias":
                names[f"{name}_row"] = strided.row
    return names


def group_sizes(ops: Operands) -> Tensor | None:
    """The device array that the scheduler reads: ends, or the valid rows of the masked form."""
    sizes = ops.valid_rows if ops.spec.form == "masked" else ops.ends
    if sizes is not None and sizes.dtype != ops.spec.index:
        raise InvalidProblem(f"sizes are {sizes.dtype}, the kernel was compiled for {ops.spec.index}")
    return sizes


@cache
def processors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def programs(tiles: int, config: Config, available: int) -> int:
    """The size of the grid; at least one program, which writes what no group owns."""
    work = tiles * config.splits
    return max(1, min(work, config.programs * available) if config.programs else work)


def parts_of(ops: Operands, places: int, config: Config) -> Tensor:
    """Where programs that share a tile leave their parts, for so many tiles."""
    shape = (places, config.splits, config.block_m, config.block_n)
    return torch.empty(shape, dtype=ops.spec.acc, device=ops.device)


def nothing() -> None:
    """The launch of a problem without any output element."""


def is_empty(ops: Operands) -> bool:
    outs = ops.out if isinstance(ops.out, list) else [ops.out]
    return all(out.numel() == 0 for out in outs)


def _addresses(ops: Operands, table: Tensor | None, prefix: Tensor | None) -> dict[str, int]:
    found: dict[str, int] = dict.fromkeys(POINTERS, 0)
    sizes = group_sizes(ops)
    tensors: dict[str, object] = {"ends": sizes, "table": table, "prefix": prefix}
    if table is None:
        tensors |= {"a": ops.a, "b": ops.b, "c": ops.c, "out": ops.out, "bias": ops.bias}
    return found | {name: tensor.data_ptr() for name, tensor in tensors.items() if isinstance(tensor, Tensor)}


def _bind_cuda(
    ops: Operands, spec: ProblemSpec, config: Config, kernels: Callable[[int, int], Cubin], count: Cubin | None,
    few: Cubin | None,
) -> Launch:  # fmt: skip
    from multigemm.backends.triton.driver import index_of, launcher

    if is_empty(ops):
        return nothing
    if few is not None and (launch := _few(ops, spec, config, few)):
        return launch
    shape = None if spec.form == "per_group" else packed(ops)
    listed = tile_table(ops, config) if shape is None else None
    table = to_device(group_table(ops) if listed is None else listed, ops.device) if shape is None else None
    counted = count is not None and spec.groups > CHUNK and listed is None
    prefix = torch.empty(spec.groups, dtype=torch.int32, device=ops.device) if counted else None
    values = {**_addresses(ops, table, prefix), **scalars(ops, shape)}
    if listed is not None:
        values["groups"] = len(listed)
    index = index_of(ops.device)
    tiles = bound_on_tiles(ops, shape, config)
    grid = programs(tiles, config, processors(index))
    arrived = None
    space: list[object] = []
    if config.splits > 1:
        places = max(1, tiles)
        arrived, partials = Words(index, places), parts_of(ops, places, config)
        space = [arrived, partials]
        values |= {"places": places, "arrived": arrived.address, "partials": partials.data_ptr()}
    main = kernels(extents_multiple(ops) if shape is None else 1, chunk_of(spec, config, listed))
    keep = (ops, table, prefix, *space)
    order = [values[name] for name in (*POINTERS, *EXTENTS, *STRIDES)]
    run = launcher(main, index, grid, order, keep, arrived.pin if arrived else None)
    if not counted:
        return run
    names = ("prefix", "ends", "table", "m", "n", "groups", "head")
    before = launcher(cast(Cubin, count), index, 1, [values[name] for name in names], keep)
    return _both(before, run)


def _both(before: Callable[[], None], run: Callable[[], None]) -> Launch:
    def launch() -> None:
        before()
        run()

    return launch


def never(group: tuple[int, ...]) -> tuple[int, ...]:
    """A group that no tile reaches: its first tile is too far."""
    return (2**31 - 1, *group[1:])


def few_values(groups: list[tuple[int, ...]], slots: int) -> list[tuple[int, ...]]:
    """The arguments for all slots: no tile reaches those behind the last group."""
    return [*groups, *[never(groups[-1])] * (slots - len(groups))]


def _few(ops: Operands, spec: ProblemSpec, config: Config, code: Cubin) -> Launch | None:
    """A launch whose argument is the list, where its tiles are whole."""
    from multigemm.backends.triton.driver import index_of, launcher

    found = few_groups(ops, config)
    if found is None:
        return None
    groups, tiles = found
    values = [value for group in few_values(groups, few_slots(spec, config)) for value in group]
    return launcher(code, index_of(ops.device), tiles, [*values, bits_of(ops.alpha, spec)], (ops,))


def chunk_of(spec: ProblemSpec, config: Config, tiles: npt.NDArray[np.int64] | None) -> int:
    """How many groups the kernel counts at once; LISTED or WHOLE if it need not count."""
    if tiles is not None:
        return WHOLE if WHOLE in chunks(spec, config) and whole(tiles, config) else LISTED
    return FEW if spec.groups <= FEW and FEW in chunks(spec, config) else CHUNK


def pointer_sources_of(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one for few groups and for many, and the one that counts tiles."""
    usual = multiple_of(spec) if spec.form == "per_group" and spec.a.align == spec.b.align == 16 else 1
    found = {f"main {chunk}": pointer_source(spec, config, usual, chunk) for chunk in chunks(spec, config)}
    if few_slots(spec, config):
        found["few"] = few_source(spec, config)
    return found if uniform(spec) else {**found, "prefix": prefix_source(spec, config)}


def plan_pointer(spec: ProblemSpec, config: Config, device: torch.device, why: str) -> Recipe:
    """Compiles (or loads) the kernels of this spec; `bind` then only packs arguments."""
    if device.type == "cpu":
        from multigemm.backends.triton.emulate import bind_emulated

        return Recipe("pointer (interpreted)", config, lambda ops: bind_emulated(ops, config), why)
    from multigemm.backends.triton.driver import index_of

    major, minor = torch.cuda.get_device_capability(device)

    def kernels(multiple: int, chunk: int) -> Cubin:
        return cubin(pointer_source(spec, config, multiple, chunk), 10 * major + minor)

    codes = {name: cubin(source, 10 * major + minor) for name, source in pointer_sources_of(spec, config).items()}
    count, few = codes.get("prefix"), codes.get("few")
    if config.splits > 1:
        ready(index_of(device), max(SLOTS))
    return Recipe("pointer", config, lambda ops: _bind_cuda(ops, spec, config, kernels, count, few), why)
