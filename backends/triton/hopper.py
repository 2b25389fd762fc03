"""The warp-specialised kernel: how it sees each form, its sources, its tensor maps, its launches.

The kernel knows three ways of cutting work into tiles. "rows": jagged rows, listed as records by a
small kernel that runs before it (jagged_m, masked, and jagged_n, which is jagged_m of the transposed
problem: C^T = B^T A^T). "batched" and "k": every group has the same tiles.

A *ragged* tensor map bounds a sub-range of rows [start, start + size) in hardware, with a start and size
that are known only to the device. It has two more dimensions than the matrix; with row stride r and
coordinates (2^30, start + size, 2^30 - size + i, column) the address is
    2^30 * (2^34 - r) + (start + size) * r + (2^30 - size + i) * r = (start + i) * r   (mod 2^64 bytes)
because 2^64 divides 2^30 * 2^34 elements, and the third coordinate passes its limit 2^30 exactly
where i reaches size. Loads there give zeros, stores there are dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, cast

import torch

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, load
from multigemm.backends.triton.config import (
    SEARCHED_GROUPS,
    STRIP,
    Config,
    consumers,
    depth_of,
    part_of,
    piece_of,
    raw_bytes,
)
from multigemm.backends.triton.generic import (
    TYPES,
    OperandCopy,
    after_copies,
    bits_of,
    pack_source,
    packed_spec,
    sizes_address,
)
from multigemm.cuda.arguments import Address, Fields
from multigemm.cuda.counters import Words, ready
from multigemm.cuda.device import processors
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import BoundKernel, LaunchSequence
from multigemm.cuda.tensor_map import BLANK, PROMOTION_128B, PROMOTION_256B, encode_together
from multigemm.planning.operands import ABSENT, Operands, Packed, Strided, packed
from multigemm.planning.tiles import most_tiles, tiles_of
from multigemm.problem.spec import Form, OperandSpec, Order, ProblemSpec

TURNED = {"row": "col", "col": "row", "strided": "strided"}
EXTENTS = ("m", "n", "k", "groups", "head", "a_rows", "b_step", "out_rows")
STRIDES = ("c_group", "c_row", "c_col", "out_group", "out_row", "out_col", "bias_group", "bias_col",
           "alpha_bits", "beta_bits")  # fmt: skip
RECORD_ROWS = 32
RECORD_STEP = 512
BILLION = 1 << 30
FAR = 0x7FFF0000
BESIDE = {rank: (0,) * (2 * rank) for rank in (2, 3, 4)}
"""A descriptor's extents and strides travel beside its map; the kernels read neither."""


def _turn(operand: OperandSpec) -> OperandSpec:
    return replace(operand, order=cast(Any, TURNED[operand.order]))


def canonical(spec: ProblemSpec) -> ProblemSpec:
    """The spec of jagged_n as jagged_m of the transposed problem; other forms unchanged."""
    if spec.form != "jagged_n":
        return spec
    c = None if spec.c is None else _turn(spec.c)
    return replace(spec, form="jagged_m", m=None, n=spec.m, a=_turn(spec.b), b=_turn(spec.a), out=_turn(spec.out), c=c)


def _turned(x: Strided | None) -> Strided | None:
    return None if x is None else Strided(x.ptr, x.group, x.col, x.row)


def canonical_shape(shape: Packed) -> Packed:
    """`canonical` for addresses: operands change places, and so do rows and columns."""
    if shape.jagged != "n":
        return shape
    a, b, out = cast(Strided, _turned(shape.b)), cast(Strided, _turned(shape.a)), cast(Strided, _turned(shape.out))
    return Packed(shape.groups, shape.n, shape.m, shape.k, "m", a, b, out, _turned(shape.c), shape.bias)


def cut_of(spec: ProblemSpec) -> str:
    """How the kernel divides work into tiles."""
    return {"jagged_m": "rows", "masked": "rows", "jagged_k": "k"}.get(spec.form, "batched")


def store_of(spec: ProblemSpec) -> str:
    """How a tile is written: through a bounded tensor map where the output allows one.

    A copy writes whole pieces of 16 bytes, also where a row of the result ends within one: rows whose length
    is no multiple are stored by the threads. (A result of one row is aligned whatever its length.)
    """
    size = spec.out.dtype.itemsize
    aligned = spec.out.order == "row" and spec.out.align == 16 and size in (2, 4)
    if aligned and start_multiple(spec) == 1 and (spec.n or 0) * size % 16 == 0:
        return "tma"
    return "row" if spec.out.order == "row" else "col"


def stores_late(spec: ProblemSpec, config: Config) -> bool:
    """Whether a tile is stored while the next one is multiplied, which needs registers for its result."""
    plain = spec.c is None and spec.bias is None and spec.activation != "gelu"
    kept = piece_of(config, spec) * spec.out.dtype.itemsize
    return store_of(spec) == "tma" and plain and kept <= 512


def searchable(config: Config) -> int:
    """The number of groups whose sizes the loading warp can hold and search. With three consumers it has fewer
    registers."""
    return SEARCHED_GROUPS // 2 if consumers(config) == 3 else SEARCHED_GROUPS


def searched(spec: ProblemSpec, config: Config) -> bool:
    """Whether the loading warp finds its rows itself: for few groups."""
    return cut_of(spec) == "rows" and spec.groups <= searchable(config)


def sums_sizes(spec: ProblemSpec, config: Config) -> bool:
    """`generic.sums_sizes` for as many groups as the loading warp holds; the generic kernel then sums too."""
    return spec.sizes is not None and cut_of(spec) != "batched" and spec.groups <= searchable(config)


def listed(spec: ProblemSpec, config: Config) -> bool:
    """Whether a small kernel runs first to list the tile rows."""
    return cut_of(spec) == "rows" and not searched(spec, config)


def drawn(spec: ProblemSpec, config: Config) -> bool:
    """Whether tiles are drawn from a counter. Those of a batch are all alike and are dealt out in turn."""
    return config.order == "drawn" and cut_of(spec) != "batched"


def start_multiple(spec: ProblemSpec) -> int:
    """The multiple at which tiles of column-major rows start: 16 bytes, because a copy cannot start in between."""
    return 16 // spec.a.dtype.itemsize if cut_of(spec) == "rows" and spec.a.order == "col" else 1


def boxes(spec: ProblemSpec, config: Config) -> dict[str, tuple[int, ...]]:
    """The box of one copy per operand, outermost dimension first."""
    columns, deep = piece_of(config, spec), depth_of(spec)
    out = (1, 1, STRIP, part_of(config, spec))
    if spec.form == "jagged_k" and spec.a.order == "col":
        return {"a_desc": (1, 1, deep, STRIP), "b_desc": (1, 1, deep, columns), "out_desc": out}
    a = (STRIP, deep) if spec.a.order == "row" else (deep, STRIP)
    b = (1, deep, columns) if spec.b.order == "row" else (1, columns, deep)
    return {"a_desc": a, "b_desc": b, "out_desc": out}


def fits(spec: ProblemSpec, shape: Packed) -> bool:
    """Whether strides that a spec does not hold fit the maps: groups must be a whole number of rows apart."""
    rows = [shape.a] if spec.form in ("batched", "masked") else []
    rows += [shape.out] if store_of(spec) == "tma" else []
    return all(x.group == 0 or (x.row > 0 and x.group % x.row == 0) for x in rows)


def aligned_stride(extent: int) -> int:
    """A legal row stride for a matrix of one row, whose own stride has no meaning: 16 bytes of the narrowest
    elements."""
    return max(16, -(-extent // 16) * 16)


def _layout(rank: int, size: int) -> str:
    return f"NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth={8 * size}, rank={rank})"


def descriptor(dtype: torch.dtype, box: tuple[int, ...]) -> str:
    return f"tensordesc<{TYPES[dtype]}[{', '.join(map(str, box))}],{_layout(len(box), dtype.itemsize)}>"


def names_of(config: Config) -> tuple[str, ...]:
    """The arguments, in the kernel's order."""
    data = ("c", "out", "bias", "records", "ends")
    if config.shift_b:
        extents = tuple(name for name in EXTENTS if name != "b_step")
        return ("a_desc", "out_desc", "b", *data, *extents, "raw_at", "b_group", "b_line", *STRIDES)
    return ("a_desc", "b_desc", "out_desc", *data, *EXTENTS, *STRIDES)


def hopper_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The kernel for a spec, which depends on classes only, not on extents."""
    spec = canonical(packed_spec(given, config))
    module, name = ("hopper_shift_b", "shift_b_kernel") if config.shift_b else ("hopper", "hopper_kernel")
    types = argument_types(spec, config)
    arguments = tuple((argument, types[argument]) for argument in names_of(config))
    constants = kernel_constants(spec, config, given.form)
    if config.shift_b:
        del constants["PIECE"], constants["MASKED"], constants["LATE"], constants["WIDE"]
        # two rings leave no room for rows of 32 bits to turn in
        constants["STORE"] = "row" if spec.out.dtype.itemsize == 4 else constants["STORE"]
    room = raw_bytes(config, spec) if config.shift_b else 0
    return KernelSource(f"multigemm.backends.triton.kernels.{module}", name, arguments, tuple(constants.items()),
                        gluon=True, room=room)  # fmt: skip


def kernel_constants(spec: ProblemSpec, config: Config, form: Form) -> dict[str, Any]:
    """The constexpr arguments. `form` is that of the given problem."""
    return {**_cut(spec, config), **_end(spec, config, form), **_roles(spec, config)}


def argument_types(spec: ProblemSpec, config: Config) -> dict[str, str]:
    """The types of all arguments that either kernel takes."""
    box, out_dtype = boxes(spec, config), spec.out.dtype
    return {
        "a_desc": descriptor(spec.a.dtype, box["a_desc"]),
        "b_desc": descriptor(spec.b.dtype, box["b_desc"]),
        "out_desc": descriptor(out_dtype, box["out_desc"]),
        "c": "*" + TYPES[spec.c.dtype if spec.c else out_dtype],
        "out": "*" + TYPES[out_dtype],
        "bias": "*" + TYPES[spec.bias or out_dtype],
        "records": "*i32",
        "ends": "*" + TYPES[(spec.sizes if sums_sizes(spec, config) else spec.index) or torch.int32],
        **dict.fromkeys((*EXTENTS, "raw_at"), "i32"),
        **dict.fromkeys(("b", "b_group", "b_line", *STRIDES), "i64"),
    }


def _cut(spec: ProblemSpec, config: Config) -> dict[str, Any]:
    """The constants for dividing work into tiles, and for the operands' layout."""
    return {
        "FORM": "search" if searched(spec, config) else cut_of(spec),
        "BN": config.block_n,
        "PIECE": piece_of(config, spec),
        "PART": part_of(config, spec),
        "MOST": config.block_m // STRIP,
        "STAGES": config.stages,
        "WIDTH": config.width,
        "ORDER": "drawn" if drawn(spec, config) else "dealt",
        "ALIGN": start_multiple(spec),
        "MASKED": spec.form == "masked",
        "SIZES": sums_sizes(spec, config),
        "A_ORDER": spec.a.order,
        "B_ORDER": spec.b.order,
        "WIDE": config.wide_tails,
    }


def _end(spec: ProblemSpec, config: Config, form: Form) -> dict[str, Any]:
    """The constants of the epilogue and the store."""
    return {
        "STORE": store_of(spec),
        "C": spec.c.order if spec.c else None,
        "BIAS": None if spec.bias is None else "down" if form == "jagged_n" else "across",
        "ALPHA": spec.alpha,
        "ACTIVATION": spec.activation,
        "LATE": stores_late(spec, config),
        "ZERO": _zeroed(spec),
    }


def _zeroed(spec: ProblemSpec) -> str | None:
    """Which rows the kernel zeroes: those that no group owns, of the whole result or ("masked") of each group."""
    if not spec.zero_unowned or cut_of(spec) != "rows":
        return None
    return "masked" if spec.form == "masked" else "rows"


def _roles(spec: ProblemSpec, config: Config) -> dict[str, int]:
    """The registers of each role."""
    if config.shift_b:
        # of low tiles: lines along k take the warps that load them more registers, those along n the others
        low = (184, 48, 96) if spec.b.order == "row" else (176, 48, 112)
        numbers = (200, 40, 72) if config.block_m == 256 else low
        return dict(zip(("CONSUMER_REGISTERS", "PRODUCER_REGISTERS", "LOADER_REGISTERS"), numbers, strict=True))
    few = consumers(config) == 3
    return {"CONSUMERS": consumers(config), "CONSUMER_REGISTERS": 160 if few else 232,
            "PRODUCER_REGISTERS": 32 if few else 40}  # fmt: skip


def records_source(given: ProblemSpec, config: Config) -> KernelSource:
    """The small kernel that lists the tile rows of jagged groups."""
    spec = canonical(packed_spec(given, config))
    signature = {"records": "*i32", "ends": "*" + TYPES[spec.index or torch.int32],
                 **dict.fromkeys(("m", "groups", "head"), "i32")}  # fmt: skip
    constants = {
        "KIND": "masked" if spec.form == "masked" else cut_of(spec),
        "STRIP": STRIP,
        "MOST": config.block_m // STRIP,
        "ALIGN": start_multiple(spec),
        "ROWS": RECORD_ROWS,
        "STEP": RECORD_STEP,
    }
    return KernelSource("multigemm.backends.triton.kernels.schedule", "write_records", tuple(signature.items()),
                        tuple(constants.items()))  # fmt: skip


def hopper_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one, copies, the list of tile rows."""
    found = {"main": hopper_source(spec, config)}
    for name in config.pack:
        found[f"pack {name}"] = pack_source(getattr(spec, name), name, spec)
    if listed(canonical(packed_spec(spec, config)), config):
        found["records"] = records_source(spec, config)
    return found


def inner_box(box: tuple[int, ...], dtype: torch.dtype) -> tuple[tuple[int, ...]]:
    """A box in the driver's order, innermost dimension first, limited there to one swizzled row of 128 bytes.

    The kernel issues as many copies as it needs.
    """
    return ((min(box[-1], 128 // dtype.itemsize), *box[-2::-1]),)


Box = tuple[tuple[int, ...]]


def ragged_map(address: int, dtype: torch.dtype, columns: int, stride: int, box: Box) -> Fields:
    """A ragged map of rows of `columns` elements, `stride` elements apart."""
    line, size = stride * dtype.itemsize, dtype.itemsize
    return encode_together(
        dtype, address, (columns, BILLION, FAR, FAR), (line, line, (2**34 * size - line) % 2**64), box
    )


def unread(out: Strided) -> int:
    """An address for the map of an operand without elements, taken from the result: a map requires a multiple of 16
    bytes."""
    value = out.ptr // 16 * 16
    return out.ptr.at(value) if isinstance(out.ptr, Address) else value


def map_of_a(spec: ProblemSpec, shape: Packed, box: Box) -> Fields:
    a, dtype, address = shape.a, spec.a.dtype, shape.a.ptr or unread(shape.out)
    if spec.form == "jagged_k" and spec.a.order == "col":
        return ragged_map(address, dtype, shape.m, a.col or aligned_stride(shape.m), box)
    if spec.a.order == "row":
        rows = shape.m if not a.group else a.group // max(1, a.row) * (shape.groups - 1) + shape.m
        line = (a.row or aligned_stride(shape.k)) * dtype.itemsize
        return encode_together(dtype, address, (shape.k, rows), (line,), box)
    line = (a.col or aligned_stride(shape.m)) * dtype.itemsize
    return encode_together(dtype, address, (shape.m, shape.k), (line,), box)


def weights_promotion(order: Order) -> int:
    """The L2 promotion of weights. For weights along k, the 128 bytes after a box are those of the next block."""
    return PROMOTION_128B if order == "row" else PROMOTION_256B


def map_of_b(spec: ProblemSpec, shape: Packed, box: Box) -> Fields:
    b, dtype, address = shape.b, spec.b.dtype, shape.b.ptr or unread(shape.out)
    if spec.form == "jagged_k" and spec.b.order == "row":
        return ragged_map(address, dtype, shape.n, b.row or aligned_stride(shape.n), box)
    inner, outer, line = (shape.n, shape.k, b.row) if spec.b.order == "row" else (shape.k, shape.n, b.col)
    line = line or aligned_stride(inner)
    lines = (line * dtype.itemsize, (b.group or line) * dtype.itemsize)
    layout = (inner, outer, shape.groups if b.group else 1), lines, box
    return encode_together(dtype, address, *layout, promotion=weights_promotion(spec.b.order))


def map_of_out(spec: ProblemSpec, shape: Packed, box: Box) -> Fields:
    """The map for results that are stored in whole tiles."""
    return ragged_map(shape.out.ptr, spec.out.dtype, shape.n, shape.out.row or aligned_stride(shape.n), box)


class HopperPlan:
    """The kernels of one spec and config, loaded on one device; `instead` plans the generic kernel."""

    def __init__(self, given: ProblemSpec, config: Config, index: int, instead: Callable[[], Recipe]) -> None:
        kernels = {name: load(source, index) for name, source in self._sources(given, config).items()}
        self._config, self._index, self._instead = config, index, cache(instead)
        self._main, self._records = kernels["main"], kernels.get("records")
        self._copies = [self._copy(name, given, kernels[f"pack {name}"]) for name in config.pack]
        self._spec = canonical(packed_spec(given, config))
        self._drawn, self._slack = drawn(self._spec, config), start_multiple(self._spec) > 1
        self._stores_maps, self._sums = store_of(self._spec) == "tma", sums_sizes(self._spec, config)
        self._map_boxes()
        self._most = processors(index)
        ready(index, 8)

    _sources = staticmethod(hopper_sources)
    _copy: Any = OperandCopy

    def _map_boxes(self) -> None:
        box, spec = boxes(self._spec, self._config), self._spec
        self._boxes = tuple(
            inner_box(box[name], operand.dtype)
            for name, operand in (("a_desc", spec.a), ("b_desc", spec.b), ("out_desc", spec.out))
        )
        self._beside_a, self._beside_b = BESIDE[len(box["a_desc"])], BESIDE[len(box["b_desc"])]

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem. The generic kernel runs strides that no map expresses."""
        shape = packed(ops)
        launches: list[BoundKernel] = []
        for copy in self._copies:
            shape, launch = copy.bind(shape, ops)
            launches += [launch] if launch else []
        seen = canonical_shape(shape)
        if not self._fits(ops, seen):
            return self._instead().bind(ops)
        launches += self._products(ops, seen)
        return launches[0] if len(launches) == 1 else LaunchSequence(launches)

    def _fits(self, ops: Operands, shape: Packed) -> bool:
        return fits(self._spec, shape)

    def _products(self, ops: Operands, shape: Packed) -> list[BoundKernel]:
        """The launch that lists tile rows, if needed, and the main launch. Without a list the main one counts in words
        that it leaves at zero."""
        at, across = sizes_address(ops, self._sums), tiles_of(shape.n, self._config.block_n)

        def programs(tokens: int) -> int:
            return min(max(1, self._tile_rows(shape.groups, tokens) * across), self._most)

        def blocks(tokens: int) -> int:
            return tiles_of(max(1, self._tile_rows(shape.groups, tokens)), RECORD_ROWS)

        grid, counted = programs(shape.m), programs if self._maps_follow(shape) else None
        if self._records is not None:
            room = blocks(max(shape.m, ops.spec.total)) * RECORD_ROWS  # for every number of tokens of the spec
            records = torch.empty(8 * (1 + room), dtype=torch.int32, device=ops.device)
            place = records.data_ptr()
            cut = [place, at, shape.m, shape.groups, int(ops.head)]
            listing = self._records.bound(cut, blocks(shape.m), (records,), grid_for=blocks)
            main = self._main.bound(self._arguments(ops, shape, place, at), grid, (records,), grid_for=counted)
            return [listing, main]
        if self._drawn:
            words = Words(self._index, 8)
            values = self._arguments(ops, shape, words.address, at)
            return [self._main.bound(values, grid, (words,), words.pin, grid_for=counted)]
        return [self._main.bound(self._arguments(ops, shape, 0, at), grid, grid_for=counted)]

    def _maps_follow(self, shape: Packed) -> bool:
        """Whether no map has a stride that depends on the number of tokens, as that of one column of all rows does."""
        return self._spec.a.order == "row" or shape.a.col != 0

    def _tile_rows(self, groups: int, rows: int) -> int:
        """An upper bound of the rows of tiles, without knowing sizes on the device."""
        block = self._config.block_m
        if self._spec.form != "jagged_m":
            return groups * tiles_of(rows, block)
        # a start that is rounded down can cost one more tile per group
        return most_tiles(rows, groups, block) + (groups if self._slack else 0)

    def _arguments(self, ops: Operands, shape: Packed, records: int, ends: int) -> list[int | bytes]:
        """The arguments, in the order of `names_of`."""
        spec, a, b, out = self._spec, shape.a, shape.b, shape.out
        c, bias = shape.c or ABSENT, shape.bias or ABSENT
        out_rows = out.group // max(1, out.row) if self._stores_maps else 0
        maps = self._maps(shape)
        data = (c.ptr, out.ptr, bias.ptr, records, ends, shape.m, shape.n, shape.k, shape.groups, int(ops.head),
                a.group // max(1, a.row))  # fmt: skip
        strides = (c.group, c.row, c.col, out.group, out.row, out.col, bias.group, bias.col,
                   bits_of(ops.alpha, spec), bits_of(ops.beta, spec))  # fmt: skip
        if self._config.shift_b:
            line = b.row if spec.b.order == "row" else b.col
            return [*maps, b.ptr, *data, out_rows, self._main.code.room_at, b.group, line, *strides]
        return [*maps, *data, int(b.group != 0), out_rows, *strides]

    def _maps(self, shape: Packed) -> list[int | bytes]:
        """The descriptors of a, of b if a map delivers it, and of out, which is blank if the threads store."""
        spec, (a_box, b_box, out_box) = self._spec, self._boxes
        with on_device(self._index):
            found: list[int | bytes] = [map_of_a(spec, shape, a_box), *self._beside_a]
            if not self._config.shift_b:
                found += [map_of_b(spec, shape, b_box), *self._beside_b]
            return [*found, map_of_out(spec, shape, out_box) if self._stores_maps else BLANK, *BESIDE[4]]


def plan_hopper(spec: ProblemSpec, config: Config, index: int, why: str, instead: Callable[[], Recipe]) -> Recipe:
    """Compiles (or loads) the kernels. `instead` plans the generic kernel for strides that no map expresses."""
    name = ("hopper, weights through registers" if config.shift_b else "hopper") + after_copies(config)
    sums = sums_sizes(canonical(packed_spec(spec, config)), config)
    return Recipe(name, config, HopperPlan(spec, config, index, instead).bind, why, sums_sizes=sums)
