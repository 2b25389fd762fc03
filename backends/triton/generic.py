"""The kernel for any problem in plain numbers, with rows picked by index, gates, `preact_out` and `row_scale`: its
sources, and the binding of a problem's data. Lists without these are bound by `lists`.

Compile-time classes: dtypes, operand order, alignment, whether K fills whole blocks, the epilogue's
shape. Everything else (sizes, strides, addresses, group counts, alpha, beta) is an argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.build import KernelSource, TritonKernel, compile_all, load, starts_early
from multigemm.backends.triton.config import Config, is_tf32
from multigemm.cuda.counters import SLOTS as POOLED
from multigemm.cuda.counters import Words, ready
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.launch import BoundKernel, LaunchSequence, without_move
from multigemm.errors import InvalidProblem
from multigemm.planning.fused import columns_of, view_of_tokens
from multigemm.planning.operands import (
    ABSENT,
    NO_VIEW,
    TABLE,
    Operands,
    Packed,
    Strided,
    address_of,
    group_table,
    packed,
    strides_of,
)
from multigemm.planning.tiles import most_tiles_by_rows, tiles_of
from multigemm.problem.fused import PICKED, Fused
from multigemm.problem.spec import FusedSpec, OperandSpec, Order, ProblemSpec

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
PREFIX_ARGUMENTS = ("prefix", "ends", "table", "m", "n", "groups", "head")
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
EXTENTS = ("m", "n", "k", "groups", "head")
STRIDES = ("a_group", "a_row", "a_col", "b_group", "b_row", "b_col", "c_group", "c_row", "c_col",
           "out_group", "out_row", "out_col", "bias_group", "bias_col", "alpha_bits", "beta_bits")  # fmt: skip
NUMBERS = (*EXTENTS, "places", *STRIDES)
FUSED_STRIDES = ("preact_group", "preact_row", "preact_col", "scale_group", "gate_alpha_bits", "gate_beta_bits",
                 "limit_bits")  # fmt: skip
FUSED_ARGUMENTS = ("preact", "row_scale", "a_rows", "b_rows", "a_extent", "b_extent", *FUSED_STRIDES)
PLAIN_ARGUMENTS = ("partials", "arrived", "places")
"""What the pointer kernel takes for fused problems only, and for others only."""
NOT_FUSED, NO_PREACT = FusedSpec(), OperandSpec(torch.float32)
PREACT, PREACT_ROW = 17, 18
"""Columns of a list's table that its products leave free."""
UNIFORM = ("batched", "jagged_k")


def uniform(spec: ProblemSpec) -> bool:
    """Whether every group has the same number of tiles, so that a tile's group follows by division."""
    return spec.form in UNIFORM or (spec.form == "masked" and spec.zero_unowned)


def sums_sizes(spec: ProblemSpec) -> bool:
    """Whether the kernel itself sums sizes on the device, so that no launch has to write ends first."""
    return spec.sizes is not None and spec.groups <= CHUNK


def pointer_types(spec: ProblemSpec) -> dict[str, str]:
    """The types of the pointers that all portable kernels take."""
    pointers = {
        "a": spec.a.dtype,
        "b": spec.b.dtype,
        "c": spec.c.dtype if spec.c else spec.out.dtype,
        "out": spec.out.dtype,
        "bias": spec.bias or spec.out.dtype,
        "ends": (spec.sizes if sums_sizes(spec) else spec.index) or torch.int32,
        "table": torch.int64,
        "prefix": torch.int32,
    }
    return {name: "*" + TYPES[dtype] for name, dtype in pointers.items()}


def signature(
    spec: ProblemSpec, pointers: dict[str, str], extents: Sequence[str], strides: Sequence[str]
) -> tuple[tuple[str, str], ...]:
    """The types of a portable kernel's arguments in its order: of all, and of more or other ones."""
    types = pointer_types(spec) | pointers | dict.fromkeys((*EXTENTS, *extents), "i32")
    return tuple((types | dict.fromkeys((*STRIDES, *strides), "i64")).items())


def _signature(spec: ProblemSpec) -> tuple[tuple[str, str], ...]:
    """The types of the pointer kernel's arguments."""
    if (fused := spec.fused) is None:
        return signature(spec, {"partials": "*" + TYPES[spec.acc], "arrived": "*i32"}, ("places",), ())
    more = {
        "preact": (fused.preact or spec.out).dtype,
        "row_scale": fused.row_scale or torch.float32,
        "a_rows": fused.a_rows or torch.int32,
        "b_rows": fused.b_rows or torch.int32,
    }
    pointers = {name: "*" + TYPES[dtype] for name, dtype in more.items()}
    return signature(spec, pointers, ("a_extent", "b_extent"), FUSED_STRIDES)


def hints(spec: ProblemSpec) -> tuple[tuple[str, int], ...]:
    """What the compiler may assume of addresses and strides, by the spec's alignment classes."""
    found: list[tuple[str, int]] = []
    operands = {"a": spec.a, "b": spec.b, "out": spec.out}
    if spec.fused is not None:
        operands["preact"] = spec.fused.preact or OperandSpec(spec.out.dtype)
    for name, operand in operands.items():
        if spec.form != "per_group":
            found.append((name, operand.align))
            each = operand.align // operand.dtype.itemsize
            found += [(f"{name}_{part}", each) for part in ("group", "row", "col")]
    for name, extent in (("m", spec.m), ("n", columns_of(spec, spec.n or 0)), ("k", spec.k)):
        known = 0 if name == spec.jagged else extent or 0
        found.append((name, 16 if known and known % 16 == 0 else 8 if known and known % 8 == 0 else 1))
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
    """The constexpr arguments that all portable kernels take. `multiple` is a divisor of the extents of lists."""
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
        "ZERO": spec.zero_unowned,
        "CHUNK": chunk,
        "SIZES": sums_sizes(spec),
        "INTERPRETED": False,
    }


def pointer_constants(
    spec: ProblemSpec, config: Config, multiple: int = 1, chunk: int = CHUNK, early: bool = False
) -> dict[str, Any]:
    """The constexpr arguments of the pointer kernel, and None for arguments that it is compiled without.

    `early`: the kernel is launched before its predecessor is over, and waits for it.
    """
    fused = spec.fused or NOT_FUSED
    preact, found = fused.preact or NO_PREACT, constants(spec, config, multiple, chunk)
    absent = FUSED_ARGUMENTS if spec.fused is None else PLAIN_ARGUMENTS
    return {
        **found,
        **dict.fromkeys(absent),
        "WIDE": found["WIDE"] or preact.wide,
        "PRECISION": "tf32" if spec.precision == "tf32" else "ieee",
        "ACC": ACCUMULATORS[spec.acc],
        "SPLITS": config.splits,
        "GATE": fused.layout,
        "GATE_ALPHA": fused.alpha,
        "GATE_BETA": fused.beta,
        "LIMIT": fused.limit,
        "PREACT_OUT": fused.preact is not None,
        "PREACT_ORDER": preact.order,
        "PREACT_BYTES": preact.align,
        "ROW_SCALE": fused.row_scale is not None,
        "A_ROWS": fused.a_rows is not None,
        "B_ROWS": fused.b_rows is not None,
        "EARLY": early,
    }


def pointer_source(
    spec: ProblemSpec, config: Config, multiple: int = 1, chunk: int = CHUNK, early: bool = False
) -> KernelSource:
    return KernelSource(
        module="multigemm.backends.triton.kernels.generic",
        name="pointer_kernel",
        signature=_signature(spec),
        constants=tuple(pointer_constants(spec, config, multiple, chunk, early).items()),
        divisibility=hints(spec),
        warps=config.warps,
        stages=config.stages,
    )


def prefix_source(spec: ProblemSpec, config: Config) -> KernelSource:
    """The kernel that counts the tiles of more groups than one vector holds."""
    types = pointer_types(spec)
    constants = {"FORM": spec.form, "BM": config.block_m, "BN": columns_of(spec, config.block_n), "STEP": PREFIX_STEP}
    return KernelSource(
        module="multigemm.backends.triton.kernels.schedule",
        name="write_prefix",
        signature=tuple((name, types.get(name, "i32")) for name in PREFIX_ARGUMENTS),
        constants=tuple(constants.items()),
    )


def generic_sources(spec: ProblemSpec, config: Config, early: bool = False) -> dict[str, KernelSource]:
    """The kernels of a plan: the main one for few and for many groups, copies, and the one that counts tiles."""
    seen = packed_spec(spec, config)
    found = {f"main {x}": pointer_source(seen, config, chunk=x, early=early) for x in chunks(spec, config)}
    found |= {f"pack {name}": pack_source(getattr(spec, name), name, spec) for name in config.pack}
    return found if uniform(spec) else {**found, "prefix": prefix_source(spec, config)}


def bits_of(value: float, spec: ProblemSpec) -> int:
    """alpha and beta as 64 bits: of a float64, or of an integer for int8, which has no gate."""
    return int(value if spec.acc == torch.int32 else struct.unpack("<q", struct.pack("<d", value))[0])


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


def pointers(shape: Packed, sizes: int, table: int, prefix: Tensor | None) -> dict[str, int]:
    """The addresses that all portable kernels take. A list's operands have theirs in its table."""
    c, bias, counts = shape.c or ABSENT, shape.bias or ABSENT, 0 if prefix is None else prefix.data_ptr()
    return {"a": shape.a.ptr, "b": shape.b.ptr, "c": c.ptr, "out": shape.out.ptr, "bias": bias.ptr, "ends": sizes,
            "table": table, "prefix": counts}  # fmt: skip


def numbers(ops: Operands, shape: Packed, groups: int, places: int = 0) -> dict[str, int]:
    """The arguments after the pointers. `places`: the number of tiles that programs share."""
    a, b, c, out, bias = shape.a, shape.b, shape.c or ABSENT, shape.out, shape.bias or ABSENT
    alpha, beta = bits_of(ops.alpha, ops.spec), bits_of(ops.beta, ops.spec)
    values = (shape.m, shape.n, shape.k, groups, int(ops.head), places,
              a.group, a.row, a.col, b.group, b.row, b.col, c.group, c.row, c.col,
              out.group, out.row, out.col, bias.group, bias.col, alpha, beta)  # fmt: skip
    found = dict(zip(NUMBERS, values, strict=True))
    return found if ops.fused is None else found | _fused_numbers(ops, ops.fused)


def _fused_numbers(ops: Operands, fused: Fused) -> dict[str, int]:
    """The numbers of a fused problem: the extents from which rows are picked, strides, and the gate's numbers."""
    gate, scale, found = fused.gate, fused.row_scale, {"a_extent": 0, "b_extent": 0}
    for name, x in (("a_rows", ops.a), ("b_rows", ops.b)):
        if getattr(fused, name) is not None:
            found[f"{name[0]}_extent"] = cast(Tensor, x).shape[PICKED[name][cast(str, ops.spec.jagged)]]
    preact = strides_of(fused.preact) if isinstance(fused.preact, Tensor) else ABSENT
    by_group = scale.shape[1] if scale is not None and scale.dim() == 2 else 0
    of_gate = [0, 0, 0] if gate is None else [bits_of(x, ops.spec) for x in (gate.alpha, gate.beta, gate.limit or 0.0)]
    return found | dict(zip(FUSED_STRIDES, (*preact[1:], by_group, *of_gate), strict=True))


def fused_tensors(ops: Operands) -> dict[str, Tensor | None]:
    """The operands that only fused problems have, by argument name."""
    if (fused := ops.fused) is None:
        return {}
    preact = fused.preact if isinstance(fused.preact, Tensor) else None
    a_rows, b_rows = (None if x is None else x.values for x in (fused.a_rows, fused.b_rows))
    return {"preact": preact, "row_scale": fused.row_scale, "a_rows": a_rows, "b_rows": b_rows}


def view_of_result(ops: Operands) -> Packed:
    """The address formula of a problem: extents count tokens, and n is that of the result. `NO_VIEW` for a list."""
    shape = view_of_tokens(ops)
    return shape if shape is NO_VIEW else replace(shape, n=columns_of(ops.spec, shape.n))


def table_of(ops: Operands) -> npt.NDArray[np.int64]:
    """A table row for each product of a list, with the extents of `view_of_result`."""
    table = group_table(ops)
    if ops.fused is not None:
        table[:, TABLE.N] = [columns_of(ops.spec, n) for n in table[:, TABLE.N]]
        for g, preact in enumerate(ops.fused.preacts()):
            s = strides_of(preact)
            table[g, PREACT], table[g, PREACT_ROW], table[g, PREACT_ROW + 1] = s.ptr, s.row, s.col
    return table


def tiles_by_rows(ops: Operands, shape: Packed, config: Config) -> Callable[[int], int]:
    """A function from the rows of a problem to an upper bound on its tiles, without knowing sizes on the device."""
    columns = config.block_n if ops.fused is None else columns_of(ops.spec, config.block_n)
    return most_tiles_by_rows(ops, shape, config.block_m, columns)


def programs(tiles: int, config: Config, available: int) -> int:
    """The size of the grid: at least one program, which zeroes what no group owns."""
    work = tiles * config.splits
    return max(1, min(work, config.programs * available) if config.programs else work)


def parts_of(ops: Operands, places: int, config: Config) -> Tensor:
    """The memory for the parts of tiles that programs share."""
    shape = (places, config.splits, config.block_m, config.block_n)
    return torch.empty(shape, dtype=ops.spec.acc, device=ops.device)


def bind_pointer(
    main: TritonKernel, count: TritonKernel | None, ops: Operands, shape: Packed, config: Config,
    table: Tensor | None = None, overlap: bool = False,
) -> BoundKernel | LaunchSequence:  # fmt: skip
    """The launch of the pointer kernel, after one that counts tiles if there is one. A list has a `table`.

    Programs that share a tile get memory for their parts. Rows that are picked by index say how many tokens there are,
    so that such a launch serves no other number of them.
    """
    sizes, at = (sizes_address(ops, sums_sizes(ops.spec)), 0) if table is None else (0, table.data_ptr())
    prefix, groups = None if count is None else prefix_of(ops), ops.spec.groups if table is None else len(table)
    tiles, keep = tiles_by_rows(ops, shape, config), (table, prefix)

    def grid_for(tokens: int) -> int:
        return programs(tiles(tokens), config, processors(main.index))

    places = max(1, tiles(shape.m)) if config.splits > 1 else 0
    values = pointers(shape, sizes, at, prefix) | numbers(ops, shape, groups, places)
    if ops.fused is not None:
        values |= {name: address_of(x, name) for name, x in fused_tensors(ops).items()}
        launch = main.bound(main.ordered(values), grid_for(shape.m), keep, overlap=overlap)
    elif places == 0:
        values |= {"partials": 0, "arrived": 0}
        launch = main.bound(main.ordered(values), grid_for(shape.m), keep, grid_for=grid_for)
    else:
        arrived, parts = Words(main.index, places), parts_of(ops, places, config)
        values |= {"partials": parts.data_ptr(), "arrived": arrived.address}
        held = (*keep, arrived, parts)
        launch = main.bound(main.ordered(values), grid_for(shape.m), held, arrived.pin)
    return launch if count is None else counted(count, launch, values)


def prefix_of(ops: Operands) -> Tensor:
    """Memory for the counts of tiles."""
    return torch.empty(ops.spec.groups, dtype=torch.int32, device=ops.device)


def counted(count: TritonKernel, launch: BoundKernel, values: dict[str, int]) -> LaunchSequence:
    """A launch with these arguments after the one that counts tiles, for more groups than a kernel counts at once."""
    return LaunchSequence([count.bound(count.ordered(values), 1, grid_for=lambda tokens: 1), launch])


def counting_kernel(sources: dict[str, KernelSource], spec: ProblemSpec, index: int) -> TritonKernel | None:
    """The kernel that counts tiles, if a plan of this spec needs it."""
    return load(sources["prefix"], index) if spec.groups > CHUNK and "prefix" in sources else None


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
    """The kernels of one spec and config, loaded on one device; of a list those of fused problems."""

    __slots__ = ("_config", "_copies", "_count", "_early", "_main")

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        # programs that stay take what room there is while the launch ahead still runs: some processors get one too
        # many, and the others wait for them (Mixtral, 64 tokens, H200: 765 us a layer instead of 696)
        self._early = spec.fused is not None and config.programs == 0 and starts_early(index)
        sources = generic_sources(spec, config, self._early)
        compile_all(sources, index)
        self._config, self._main = config, load(sources[f"main {chunk_of(spec, config)}"], index)
        self._copies = [OperandCopy(name, spec, load(sources[f"pack {name}"], index)) for name in config.pack]
        self._count = counting_kernel(sources, spec, index)
        if config.splits > 1:
            ready(index, max(POOLED))

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem: copies, if there are any, and then the product."""
        if ops.spec.form == "per_group":
            table = to_device(table_of(ops), ops.device)
            return without_move(
                bind_pointer(self._main, self._count, ops, NO_VIEW, self._config, table, overlap=self._early)
            )
        shape, copies = packed(ops) if ops.fused is None else view_of_result(ops), list[BoundKernel]()
        for copy in self._copies:
            shape, launch = copy.bind(shape, ops)
            copies += [launch] if launch else []
        product = bind_pointer(self._main, self._count, ops, shape, self._config, overlap=self._early)
        return LaunchSequence([*copies, product]) if copies else product


def plan_generic(spec: ProblemSpec, config: Config, index: int, why: str) -> Recipe:
    """Compiles (or loads) the kernels of a packed problem; `bind` then only lays out arguments."""
    name = "pointer" + after_copies(config)
    return Recipe(name, config, GenericPlan(spec, config, index).bind, why, sums_sizes=sums_sizes(spec))
