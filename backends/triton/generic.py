"""The kernel for any packed problem: its sources, and the binding of a problem's data.

Compile-time classes: dtypes, operand order, alignment, whether K fills whole blocks, the epilogue's
shape. Everything else (sizes, strides, addresses, group counts, alpha, beta) is an argument.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, TritonKernel, compile_all, load
from multigemm.backends.triton.config import Config, is_tf32
from multigemm.cuda.counters import SLOTS as POOLED
from multigemm.cuda.counters import Words, ready
from multigemm.cuda.device import processors
from multigemm.cuda.launch import BoundKernel, LaunchSequence
from multigemm.errors import InvalidProblem
from multigemm.planning.operands import ABSENT, Operands, Packed, Strided, address_of, packed
from multigemm.planning.tiles import most_packed_tiles, tiles_of
from multigemm.problem.spec import OperandSpec, Order, ProblemSpec

CHUNK = 256
BLOCK_ROWS, BLOCK_COLUMNS = 32, 128
"""What one program of a copy takes."""
FEW = 32
"""The groups that the scheduler counts at once; up to FEW of them inside each warp, without a barrier."""
LISTED = 0
"""The value in place of a chunk size for lists: the host knows all extents and has listed the tiles (see lists.py)."""
WHOLE = -1
"""The value for listed tiles that are all whole, so that nothing has to be masked."""
PREFIX_STEP = 1024
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.float8_e8m0fnu: "u8",
    torch.int32: "i32",
    torch.int64: "i64",
}
ACCUMULATORS = {torch.float32: "tl.float32", torch.float64: "tl.float64", torch.int32: "tl.int32"}
EXTENTS = ("m", "n", "k", "groups", "head", "places")
STRIDES = ("a_group", "a_row", "a_col", "b_group", "b_row", "b_col", "c_group", "c_row", "c_col",
           "out_group", "out_row", "out_col", "bias_group", "bias_col", "alpha_bits", "beta_bits")  # fmt: skip
UNIFORM = ("batched", "jagged_k")


def uniform(spec: ProblemSpec) -> bool:
    """Whether every group has the same number of tiles, so that a tile's group follows by division."""
    return spec.form in UNIFORM or (spec.form == "masked" and spec.zero_unowned)


def sums_sizes(spec: ProblemSpec) -> bool:
    """Whether the kernel itself sums sizes on the device, so that no launch has to write ends first."""
    return spec.sizes is not None and spec.groups <= CHUNK


def argument_types(spec: ProblemSpec) -> dict[str, str]:
    pointers = {
        "a": spec.a.dtype,
        "b": spec.b.dtype,
        "c": spec.c.dtype if spec.c else spec.out.dtype,
        "out": spec.out.dtype,
        "bias": spec.bias or spec.out.dtype,
        "ends": (spec.sizes if sums_sizes(spec) else spec.index) or torch.int32,
        "table": torch.int64,
        "prefix": torch.int32,
        "partials": spec.acc,
        "arrived": torch.int32,
    }
    names = {name: "*" + TYPES[dtype] for name, dtype in pointers.items()}
    return {**names, **dict.fromkeys(EXTENTS, "i32"), **dict.fromkeys(STRIDES, "i64")}


def hints(spec: ProblemSpec) -> tuple[tuple[str, int], ...]:
    """What the compiler may assume of addresses and strides, by the spec's alignment classes."""
    found: list[tuple[str, int]] = []
    for name, operand in (("a", spec.a), ("b", spec.b), ("out", spec.out)):
        if spec.form != "per_group":
            found.append((name, operand.align))
            each = operand.align // operand.dtype.itemsize
            found += [(f"{name}_{part}", each) for part in ("group", "row", "col")]
    for name in "mnk":
        extent = 0 if name == spec.jagged else getattr(spec, name) or 0
        found.append((name, 16 if extent and extent % 16 == 0 else 8 if extent and extent % 8 == 0 else 1))
    return tuple(hint for hint in found if hint[1] > 1)


def even_k(spec: ProblemSpec, config: Config) -> bool:
    """Whether K is a multiple of the block in every group, so that no load needs a mask along K."""
    return spec.form not in ("per_group", "jagged_k") and bool(spec.k) and cast(int, spec.k) % config.block_k == 0


def multiple_of(spec: ProblemSpec) -> int:
    """The number of elements in 16 bytes, the widest access."""
    return max(1, 16 // spec.compute.itemsize)


def chunks(spec: ProblemSpec, config: Config) -> tuple[int, ...]:
    """The chunk sizes for which kernels are compiled: all that a problem of this spec may need."""
    return (CHUNK, FEW) if config.programs == 0 and not uniform(spec) else (CHUNK,)


def chunk_of(spec: ProblemSpec, config: Config) -> int:
    """The number of groups that the kernel counts at once."""
    return FEW if spec.groups <= FEW and FEW in chunks(spec, config) else CHUNK


def constants(spec: ProblemSpec, config: Config, multiple: int = 1, chunk: int = CHUNK) -> dict[str, Any]:
    """The constexpr arguments of the pointer kernel. `multiple` is a divisor of the extents of lists."""
    return {
        "FORM": spec.form,
        "BM": config.block_m,
        "BN": config.block_n,
        "BK": config.block_k,
        "WIDTH": config.width,
        "STAGES": config.stages,
        "A_ORDER": spec.a.order,
        "B_ORDER": spec.b.order,
        "OUT_ORDER": spec.out.order,
        "A_BYTES": spec.a.align,
        "B_BYTES": spec.b.align,
        "OUT_BYTES": spec.out.align,
        "WIDE": spec.a.wide or spec.b.wide or spec.out.wide,
        "EVEN_K": even_k(spec, config),
        "MULTIPLE": multiple,
        "HAS_C": spec.c is not None,
        "HAS_BIAS": spec.bias is not None,
        "ALPHA": spec.alpha,
        "ACTIVATION": spec.activation,
        "PRECISION": "tf32" if spec.precision == "tf32" else "ieee",
        "ACC": ACCUMULATORS[spec.acc],
        "ZERO": spec.zero_unowned,
        "SPLITS": config.splits,
        "CHUNK": chunk,
        "SIZES": sums_sizes(spec),
        "INTERPRETED": False,
    }


def pointer_source(spec: ProblemSpec, config: Config, multiple: int = 1, chunk: int = CHUNK) -> KernelSource:
    return KernelSource(
        module="multigemm.backends.triton.kernels.generic",
        name="pointer_kernel",
        signature=tuple(argument_types(spec).items()),
        constants=tuple(constants(spec, config, multiple, chunk).items()),
        divisibility=hints(spec),
        warps=config.warps,
        stages=config.stages,
    )


def prefix_constants(spec: ProblemSpec, config: Config) -> dict[str, Any]:
    return {"FORM": spec.form, "BM": config.block_m, "BN": config.block_n, "STEP": PREFIX_STEP}


def prefix_source(spec: ProblemSpec, config: Config) -> KernelSource:
    """The kernel that counts the tiles of more groups than one vector holds."""
    types = argument_types(spec)
    names = ("prefix", "ends", "table", "m", "n", "groups", "head")
    return KernelSource(
        module="multigemm.backends.triton.kernels.schedule",
        name="write_prefix",
        signature=tuple((name, types[name]) for name in names),
        constants=tuple(prefix_constants(spec, config).items()),
    )


def generic_sources(spec: ProblemSpec, config: Config) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one for few and for many groups, copies, and the one that counts tiles."""
    seen = packed_spec(spec, config)
    found = {f"main {chunk}": pointer_source(seen, config, chunk=chunk) for chunk in chunks(spec, config)}
    found |= {f"pack {name}": pack_source(getattr(spec, name), name, spec) for name in config.pack}
    return found if uniform(spec) else {**found, "prefix": prefix_source(spec, config)}


def bits_of(value: float, spec: ProblemSpec) -> int:
    """alpha and beta as 64 bits: of a float64, or of an integer for int8."""
    if spec.acc == torch.int32:
        return int(value)
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def group_sizes(ops: Operands, sums: bool) -> Tensor | None:
    """The device array that the scheduler reads: ends, the valid rows of the masked form, or sizes that it sums."""
    compiled = ops.spec.sizes if sums else ops.spec.index
    sizes = ops.sizes if sums else ops.valid_rows if ops.spec.form == "masked" else ops.ends
    if sizes is not None and sizes.dtype != compiled:
        raise InvalidProblem(f"sizes are {sizes.dtype}, the kernel was compiled for {compiled}")
    return sizes


def sizes_address(ops: Operands, sums: bool) -> int:
    """The address of that array."""
    name = "sizes" if sums else "valid_rows" if ops.spec.form == "masked" else "ends"
    return address_of(group_sizes(ops, sums), name)


def numbers(ops: Operands, shape: Packed, groups: int, places: int) -> list[int]:
    """The arguments EXTENTS and STRIDES. `places`: the number of tiles that programs share."""
    a, b, c, out, bias = shape.a, shape.b, shape.c or ABSENT, shape.out, shape.bias or ABSENT
    alpha, beta = bits_of(ops.alpha, ops.spec), bits_of(ops.beta, ops.spec)
    return [shape.m, shape.n, shape.k, groups, int(ops.head), places,
            a.group, a.row, a.col, b.group, b.row, b.col, c.group, c.row, c.col,
            out.group, out.row, out.col, bias.group, bias.col, alpha, beta]  # fmt: skip


def most_tiles_of(shape: Packed, rows: int, config: Config) -> int:
    """An upper bound of the number of tiles with this many rows, without knowing sizes on the device."""
    return most_packed_tiles(shape.jagged, shape.groups, rows, shape.n, config.block_m, config.block_n)


def programs(tiles: int, config: Config, available: int) -> int:
    """The size of the grid: at least one program, which zeroes what no group owns."""
    work = tiles * config.splits
    return max(1, min(work, config.programs * available) if config.programs else work)


def parts_of(ops: Operands, places: int, config: Config) -> Tensor:
    """The memory for the parts of tiles that programs share."""
    shape = (places, config.splits, config.block_m, config.block_n)
    return torch.empty(shape, dtype=ops.spec.acc, device=ops.device)


def bind_main(
    kernel: TritonKernel, ops: Operands, shape: Packed, config: Config, tiles: int, groups: int, *,
    sizes: int = 0, table: int = 0, prefix: int = 0, keep: tuple[object, ...] = (),
) -> BoundKernel:  # fmt: skip
    """The launch of the main kernel for at most this many tiles. Programs that share a tile get memory for their
    parts."""
    c, bias, grid = shape.c or ABSENT, shape.bias or ABSENT, programs(tiles, config, processors(kernel.index))
    data = [shape.a.ptr, shape.b.ptr, c.ptr, shape.out.ptr, bias.ptr, sizes, table, prefix]
    if config.splits == 1:

        def grid_for(tokens: int) -> int:
            return programs(most_tiles_of(shape, tokens, config), config, processors(kernel.index))

        return kernel.bound([*data, 0, 0, *numbers(ops, shape, groups, 0)], grid, keep, grid_for=grid_for)
    places = max(1, tiles)
    arrived, parts = Words(kernel.index, places), parts_of(ops, places, config)
    values = [*data, parts.data_ptr(), arrived.address, *numbers(ops, shape, groups, places)]
    return kernel.bound(values, grid, (*keep, arrived, parts), arrived.pin)


def bind_counted(
    count: TritonKernel, main: TritonKernel, ops: Operands, shape: Packed, config: Config, tiles: int, *,
    sizes: int = 0, table: int = 0, keep: tuple[object, ...] = (),
) -> LaunchSequence:  # fmt: skip
    """The launch of the main kernel after one that counts tiles, for more groups than it counts at once."""
    groups = ops.spec.groups
    prefix = torch.empty(groups, dtype=torch.int32, device=ops.device)
    values = [prefix.data_ptr(), sizes, table, shape.m, shape.n, groups, int(ops.head)]
    last = bind_main(main, ops, shape, config, tiles, groups, sizes=sizes, table=table, prefix=prefix.data_ptr(),
                     keep=(*keep, prefix))  # fmt: skip
    return LaunchSequence([count.bound(values, 1, (prefix,), grid_for=lambda tokens: 1), last])


# Copies of operands into aligned rows, before the main kernel reads them.


def packed_order(spec: ProblemSpec, name: str) -> Order:
    """The order of a copied operand: unchanged if the kernel reads it, which makes the copy a straight one.

    Jagged directions must run across the rows in memory; weights may lie either way. tf32 is multiplied along memory
    only, float8 too, float32 across the weights' k only.
    """
    if spec.quantised:
        return "row" if name == "a" else "col"
    if spec.compute == torch.float32:
        return "col" if name == "b" and is_tf32(spec) else "row"
    if spec.form == "jagged_k":
        return "col" if name == "a" else "row"
    weights = "a" if spec.form == "jagged_n" else "b"
    if name == weights:
        return "col" if getattr(spec, name).order == "col" else "row"
    return "col" if spec.form == "jagged_n" else "row"


def packed_spec(spec: ProblemSpec, config: Config) -> ProblemSpec:
    """The spec that the kernel sees once operands were packed: aligned rows, or columns."""
    changes: dict[str, Any] = {}
    for name in config.pack:
        changes[name] = replace(getattr(spec, name), align=16, dense=True, order=packed_order(spec, name))
    return replace(spec, **changes)


def pack_source(operand: OperandSpec, name: str, spec: ProblemSpec) -> KernelSource:
    """The copy of one operand into aligned rows."""
    order = packed_order(spec, name)
    along = "none" if operand.order == "strided" else "row" if operand.order == order else "col"
    types = "*" + TYPES[operand.dtype]
    numbers = {**dict.fromkeys(("rows", "columns"), "i32"),
               **dict.fromkeys(("group", "row", "col", "target_group", "target_row"), "i64")}  # fmt: skip
    return KernelSource("multigemm.backends.triton.kernels.generic", "pack_kernel",
                        tuple({"source": types, "target": types, **numbers}.items()),
                        (("BM", BLOCK_ROWS), ("BN", BLOCK_COLUMNS), ("ALONG", along)),
                        (("target", 16), ("target_group", 8), ("target_row", 8)))  # fmt: skip


def line_of(columns: int, size: int) -> int:
    """The elements from row to row of a copy: whole lines of 128 bytes, which are read at once, or multiples of 16
    bytes."""
    whole = 128 // size if columns >= 256 else 8
    return -(-columns // whole) * whole


def after_copies(config: Config) -> str:
    """The part of a plan's kernel name that mentions copies."""
    return f", after a copy of {' and '.join(config.pack)} into aligned rows" if config.pack else ""


class OperandCopy:
    """Copies an operand into aligned rows for the main kernel.

    An operand that the kernel wants as "col" is copied as its transpose, row by row.
    """

    __slots__ = ("_dtype", "_kernel", "_turned", "name")

    def __init__(self, name: str, spec: ProblemSpec, kernel: TritonKernel) -> None:
        self.name, self._kernel = name, kernel
        self._turned, self._dtype = packed_order(spec, name) == "col", getattr(spec, name).dtype

    def bind(self, shape: Packed, ops: Operands) -> tuple[Packed, BoundKernel | None]:
        """The operands' addresses after the copy, and the launch of the copy; None for an operand without elements."""
        x: Strided = getattr(shape, self.name)
        groups = shape.groups if x.group else 1
        rows, columns = (shape.m, shape.k) if self.name == "a" else (shape.k, shape.n)
        if self._turned:
            rows, columns, x = columns, rows, Strided(x.ptr, x.group, x.col, x.row)
        line = line_of(columns, self._dtype.itemsize)
        target = torch.empty((groups, rows, line), dtype=self._dtype, device=ops.device)
        row, col = (1, line) if self._turned else (line, 1)
        moved = Strided(target.data_ptr(), rows * line if groups > 1 else 0, row, col)
        shape = replace(shape, a=moved) if self.name == "a" else replace(shape, b=moved)
        if not x.ptr:  # weights of no group count as one, which a copy would read at address 0
            return shape, None
        values = [x.ptr, moved.ptr, rows, columns, x.group, x.row, x.col, rows * line, line]
        grid = max(1, groups * tiles_of(rows, BLOCK_ROWS) * tiles_of(columns, BLOCK_COLUMNS))
        tokens = shape.jagged == "k" or (self.name == "a" and shape.jagged == "m")
        return shape, self._kernel.bound(values, grid, (target,), grid_for=None if tokens else lambda _: grid)


class GenericPlan:
    """The kernels of one spec and config, loaded on one device."""

    __slots__ = ("_config", "_copies", "_count", "_main")

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        sources = generic_sources(spec, config)
        compile_all(sources, index)
        self._config, self._main = config, load(sources[f"main {chunk_of(spec, config)}"], index)
        self._copies = [OperandCopy(name, spec, load(sources[f"pack {name}"], index)) for name in config.pack]
        counted = spec.groups > CHUNK and "prefix" in sources
        self._count = load(sources["prefix"], index) if counted else None
        if config.splits > 1:
            ready(index, max(POOLED))

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem: copies, if there are any, and then the product."""
        shape, copies = packed(ops), list[BoundKernel]()
        for copy in self._copies:
            shape, launch = copy.bind(shape, ops)
            copies += [launch] if launch else []
        product = self._product(ops, shape)
        return LaunchSequence([*copies, product]) if copies else product

    def _product(self, ops: Operands, shape: Packed) -> BoundKernel | LaunchSequence:
        config, at = self._config, sizes_address(ops, sums_sizes(ops.spec))
        tiles = most_tiles_of(shape, shape.m, config)
        if self._count is None:
            return bind_main(self._main, ops, shape, config, tiles, shape.groups, sizes=at)
        return bind_counted(self._count, self._main, ops, shape, config, tiles, sizes=at)


def plan_generic(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    """Compiles (or loads) the kernels of a packed problem; `bind` then only lays out arguments."""
    name = "pointer" + after_copies(config)
    return Recipe(name, config, GenericPlan(spec, config, index).bind, why, sums_sizes=sums_sizes(spec))
