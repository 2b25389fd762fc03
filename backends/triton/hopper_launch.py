"""spec + config -> Recipe for the warp-specialised kernel: its maps, its records, its launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.compile import Cubin, KernelSource, cubin
from multigemm.backends.triton.config import STRIP, Config, part_of
from multigemm.backends.triton.driver import index_of, launcher
from multigemm.backends.triton.hopper_forms import (
    aligned_stride,
    boxes,
    canonical,
    canonical_shape,
    cut_of,
    drawn,
    fits,
    listed,
    packed_spec,
    start_multiple,
    store_of,
)
from multigemm.backends.triton.hopper_list_launch import list_sources, plan_list
from multigemm.backends.triton.hopper_sources import (
    EXTENTS,
    RECORD_ROWS,
    STRIDES,
    hopper_source,
    names_of,
    records_source,
)
from multigemm.backends.triton.launch import (
    bits_of,
    group_sizes,
    is_empty,
    nothing,
    processors,
    zero_launcher,
)
from multigemm.backends.triton.packing_launch import pack_source, packed_operands
from multigemm.backends.triton.pointer_sources import zero_source
from multigemm.backends.triton.tensormap import encode, encode_ragged
from multigemm.cuda.counters import Words, ready
from multigemm.planning.operands import Operands, Packed
from multigemm.planning.tiles import most_tiles, tiles_of
from multigemm.problem.spec import ProblemSpec


def maps(spec: ProblemSpec, config: Config, shape: Packed) -> dict[str, bytes]:
    """The tensor maps by name; an operand without elements borrows the output's address, unread."""
    a, b, out, box = shape.a, shape.b, shape.out, boxes(spec, config)
    # nothing is read there, but a map wants a multiple of 16 bytes
    unread = out.ptr // 16 * 16
    a_at, b_at = a.ptr or unread, b.ptr or unread
    if spec.form == "jagged_k":
        first = encode_ragged(a_at, spec.a.dtype, shape.m, a.col or aligned_stride(shape.m), box["a_desc"][2:])
        second = encode_ragged(b_at, spec.b.dtype, shape.n, b.row or aligned_stride(shape.n), box["b_desc"][2:])
    else:
        rows = shape.m if not a.group else a.group // max(1, a.row) * (shape.groups - 1) + shape.m
        if spec.a.order == "row":
            first = encode(a_at, spec.a.dtype, (rows, shape.k), (a.row or aligned_stride(shape.k), 1), box["a_desc"])
        else:
            first = encode(a_at, spec.a.dtype, (shape.k, shape.m), (a.col or aligned_stride(shape.m), 1), box["a_desc"])
        second = b"" if config.carry else _map_of_weights(spec, shape, b_at, box["b_desc"])
    third = bytes(128)
    if store_of(spec) == "tma":
        line = out.row or aligned_stride(shape.n)
        third = encode_ragged(out.ptr, spec.out.dtype, shape.n, line, (STRIP, part_of(config, spec)))
    return {"a_desc": first, "b_desc": second, "out_desc": third}


def _map_of_weights(spec: ProblemSpec, shape: Packed, address: int, box: tuple[int, ...]) -> bytes:
    b = shape.b
    groups = shape.groups if b.group else 1
    inner, outer, line = (shape.n, shape.k, b.row) if spec.b.order == "row" else (shape.k, shape.n, b.col)
    line = line or aligned_stride(inner)
    return encode(address, spec.b.dtype, (groups, outer, inner), (b.group or line, line, 1), box)


def _numbers(ops: Operands, spec: ProblemSpec, shape: Packed) -> dict[str, int]:
    names = dict.fromkeys((*EXTENTS, *STRIDES), 0)
    names |= {"m": shape.m, "n": shape.n, "k": shape.k, "groups": shape.groups, "head": int(ops.head)}
    names |= {"alpha_bits": bits_of(ops.alpha, spec), "beta_bits": bits_of(ops.beta, spec)}
    names["a_rows"] = shape.a.group // max(1, shape.a.row)
    names["b_step"] = int(shape.b.group != 0)
    names["out_rows"] = shape.out.group // max(1, shape.out.row) if store_of(spec) == "tma" else 0
    out, c, bias = shape.out, shape.c, shape.bias
    names |= {"b_group": shape.b.group, "b_line": shape.b.row if spec.b.order == "row" else shape.b.col}
    names |= {"out_group": out.group, "out_row": out.row, "out_col": out.col}
    if c is not None:
        names |= {"c_group": c.group, "c_row": c.row, "c_col": c.col}
    if bias is not None:
        names |= {"bias_group": bias.group, "bias_col": bias.col}
    return names


@dataclass
class _Binding:
    """One problem on its way to launches."""

    ops: Operands
    spec: ProblemSpec
    shape: Packed
    config: Config
    kernels: dict[str, Cubin]

    @property
    def index(self) -> int:
        return index_of(self.ops.device)

    @property
    def ends(self) -> int:
        sizes = group_sizes(self.ops)
        return 0 if sizes is None else sizes.data_ptr()

    @property
    def tile_rows(self) -> int:
        """At most this many rows of tiles, without knowing device sizes."""
        shape, block = self.shape, self.config.block_m
        if self.spec.form != "jagged_m":
            return shape.groups * tiles_of(shape.m, block)
        # a start that is rounded down can cost one more tile per group
        slack = shape.groups if start_multiple(self.spec) > 1 else 0
        return most_tiles(shape.m, shape.groups, block) + slack

    @property
    def programs(self) -> int:
        tiles = self.tile_rows * tiles_of(self.shape.n, self.config.block_n)
        return min(max(1, tiles), processors(self.index))

    def listing(self) -> tuple[Tensor, Callable[[], None]]:
        """The list of tile rows behind its counters, and the launch that writes it and clears them."""
        grid = tiles_of(max(1, self.tile_rows), RECORD_ROWS)
        records = torch.empty(8 * (1 + grid * RECORD_ROWS), dtype=torch.int32, device=self.ops.device)
        values = [records.data_ptr(), self.ends, self.shape.m, self.shape.groups, int(self.ops.head)]
        return records, launcher(self.kernels["records"], self.index, grid, values, (self.ops, records))

    def launches(self) -> list[Callable[[], None]]:
        """The list of tile rows, if any, and the kernel itself; without a list, it counts in words left at zero."""
        if listed(self.spec, self.config):
            records, listing = self.listing()
            return [listing, self.main(records, None)]
        words = Words(self.index, 8) if drawn(self.spec, self.config) else None
        return [self.main(words.tensor if words else None, words)]

    def main(self, records: Tensor | None, words: Words | None) -> Callable[[], None]:
        """The launch of the kernel itself."""
        ops = self.ops
        found: dict[str, int | bytes] = {**maps(self.spec, self.config, self.shape)}
        found |= _numbers(ops, self.spec, self.shape)
        found |= {"ends": self.ends, "b": self.shape.b.ptr, "raw_at": self.kernels["main"].room_at}
        tensors = {"c": ops.c, "out": ops.out, "bias": ops.bias, "records": records}
        found |= {name: x.data_ptr() if isinstance(x, Tensor) else 0 for name, x in tensors.items()}
        box = boxes(self.spec, self.config)
        arguments: list[int | bytes] = []
        for name in names_of(self.config):
            # a descriptor's extents and strides travel beside its map; the kernel reads neither
            arguments += [found[name], *[0] * (2 * len(box.get(name, ())))]
        return launcher(self.kernels["main"], self.index, self.programs, arguments, (ops, records, words),
                        words.pin if words else None)  # fmt: skip


def _bind(
    ops: Operands, given: ProblemSpec, config: Config, kernels: dict[str, Cubin], instead: Callable[[], Recipe]
) -> Launch:
    if is_empty(ops):
        return nothing
    shape, copies = packed_operands(ops, config, kernels)
    binding = _Binding(ops, canonical(packed_spec(given, config)), canonical_shape(shape), config, kernels)
    if not fits(binding.spec, binding.shape):
        return instead().bind(ops)
    launches = [*copies, *binding.launches()]
    if "zeros" in kernels:
        launches.append(zero_launcher(ops, kernels["zeros"], binding.index))
    return launches[0] if len(launches) == 1 else partial(_all, launches)


def _all(launches: list[Callable[[], None]]) -> None:
    for launch in launches:
        launch()


def hopper_sources_of(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one, copies, the list of tile rows, zeros."""
    if spec.form == "per_group":
        return list_sources(spec, config)
    found = {"main": hopper_source(spec, config)}
    for name in config.pack:
        found[f"pack {name}"] = pack_source(getattr(spec, name), name, spec)
    if listed(canonical(packed_spec(spec, config)), config):
        found["records"] = records_source(spec, config)
    if cut_of(canonical(spec)) == "rows" and spec.zero_unowned:
        found["zeros"] = zero_source(spec)
    return found


def plan_hopper(
    spec: ProblemSpec, config: Config, device: torch.device, why: str, instead: Callable[[], Recipe]
) -> Recipe:
    """Compiles (or loads) the kernels; `instead` plans the pointer kernel for strides that no map expresses."""
    if spec.form == "per_group":
        return plan_list(spec, config, device, why, instead)
    major, minor = torch.cuda.get_device_capability(device)
    kernels = {name: cubin(source, 10 * major + minor) for name, source in hopper_sources_of(spec, config).items()}
    name = "hopper, weights through registers" if config.carry else "hopper"
    name += f", after a copy of {' and '.join(config.pack)} into aligned rows" if config.pack else ""
    ready(index_of(device), 8)
    return Recipe(name, config, lambda ops: _bind(ops, spec, config, kernels, instead), why)
