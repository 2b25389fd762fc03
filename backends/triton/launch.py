"""spec + config -> Recipe for the pointer kernel: what is compile-time, and how a problem's data is bound.

Compile-time classes: dtypes, operand order, alignment, whether K fills whole blocks, the epilogue's
shape. Everything else (sizes, strides, addresses, group counts, alpha, beta) is an argument.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backend import Launch, Recipe
from multigemm.backends.triton.compile import Cubin, KernelSource, cubin
from multigemm.backends.triton.config import Config
from multigemm.errors import InvalidProblem
from multigemm.layouts import Operands, Packed, group_table, packed, to_device
from multigemm.schedule import most_tiles, tiles_of
from multigemm.spec import OperandSpec, ProblemSpec

CHUNK = 256
FEW = 32
"""Groups that the scheduler counts at once; up to FEW of them inside each warp, without a barrier."""
PREFIX_STEP = 1024
TYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
ACCUMULATORS = {torch.float32: "tl.float32", torch.float64: "tl.float64", torch.int32: "tl.int32"}
POINTERS = ("a", "b", "c", "out", "bias", "ends", "table", "prefix")
EXTENTS = ("m", "n", "k", "groups", "head")
STRIDES = ("a_group", "a_row", "a_col", "b_group", "b_row", "b_col", "c_group", "c_row", "c_col",
           "out_group", "out_row", "out_col", "bias_group", "bias_col", "alpha_bits", "beta_bits")  # fmt: skip
UNIFORM = ("batched", "jagged_k")


def uniform(spec: ProblemSpec) -> bool:
    """Every group has the same number of tiles, so a tile's group is a division."""
    return spec.form in UNIFORM or (spec.form == "masked" and spec.zero_unowned)


def bits_of(value: float, spec: ProblemSpec) -> int:
    """alpha and beta as 64 bits: of a float64, or an integer for int8."""
    if spec.acc == torch.int32:
        return int(value)
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _types(spec: ProblemSpec) -> dict[str, str]:
    pointers = {
        "a": spec.a.dtype,
        "b": spec.b.dtype,
        "c": spec.c.dtype if spec.c else spec.out.dtype,
        "out": spec.out.dtype,
        "bias": spec.bias or spec.out.dtype,
        "ends": spec.index or torch.int32,
        "table": torch.int64,
        "prefix": torch.int32,
    }
    names = {name: "*" + TYPES[dtype] for name, dtype in pointers.items()}
    return {**names, **dict.fromkeys(EXTENTS, "i32"), **dict.fromkeys(STRIDES, "i64")}


def _hints(spec: ProblemSpec) -> tuple[tuple[str, int], ...]:
    """What the compiler may assume: addresses and strides that the spec's alignment classes promise."""
    hints: list[tuple[str, int]] = []
    for name, operand in (("a", spec.a), ("b", spec.b), ("out", spec.out)):
        if spec.form != "per_group":
            hints.append((name, operand.align))
            each = operand.align // operand.dtype.itemsize
            hints += [(f"{name}_{part}", each) for part in ("group", "row", "col")]
    for name in "mnk":
        extent = 0 if name == spec.jagged else getattr(spec, name) or 0
        hints.append((name, 16 if extent and extent % 16 == 0 else 8 if extent and extent % 8 == 0 else 1))
    return tuple(hint for hint in hints if hint[1] > 1)


def _bytes(operand: OperandSpec) -> int:
    return operand.align


def even_k(spec: ProblemSpec, config: Config) -> bool:
    """K fills whole blocks in every group, so that no load needs a mask along K."""
    return spec.form not in ("per_group", "jagged_k") and bool(spec.k) and cast(int, spec.k) % config.block_k == 0


def multiple_of(spec: ProblemSpec) -> int:
    """Elements in 16 bytes, the widest access."""
    return max(1, 16 // spec.compute.itemsize)


def extents_multiple(ops: Operands) -> int:
    """That number if it divides every extent of a list that runs along memory, else 1: masks then cut no access."""
    spec = ops.spec
    along = {0: "col" in (spec.a.order, spec.out.order), 1: "row" in (spec.b.order, spec.out.order),
             2: spec.a.order == "row" or spec.b.order == "col"}  # fmt: skip
    whole = multiple_of(spec)
    shapes = ((*a.shape, b.shape[1]) for a, b in zip(ops.a, ops.b, strict=True))
    wanted = ((m, n, k) for m, k, n in shapes)
    return whole if all(x % whole == 0 for extents in wanted for i, x in enumerate(extents) if along[i]) else 1


def chunks(spec: ProblemSpec, config: Config) -> tuple[int, ...]:
    """The numbers of groups at once that kernels are compiled for: both for problems of any small size."""
    return (CHUNK, FEW) if config.programs == 0 and not uniform(spec) else (CHUNK,)


def constants(spec: ProblemSpec, config: Config, multiple: int = 1, chunk: int = CHUNK) -> dict[str, Any]:
    """The constexpr arguments of the pointer kernel; `multiple` speaks of the extents of lists."""
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
        "A_BYTES": _bytes(spec.a),
        "B_BYTES": _bytes(spec.b),
        "OUT_BYTES": _bytes(spec.out),
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
        "CHUNK": chunk,
        "INTERPRETED": False,
    }


def pointer_source(spec: ProblemSpec, config: Config, multiple: int = 1, chunk: int = CHUNK) -> KernelSource:
    return KernelSource(
        module="multigemm.backends.triton.kernels",
        name="pointer_kernel",
        signature=tuple(_types(spec).items()),
        constants=tuple(constants(spec, config, multiple, chunk).items()),
        divisibility=_hints(spec),
        warps=config.warps,
        stages=config.stages,
    )


def prefix_constants(spec: ProblemSpec, config: Config) -> dict[str, Any]:
    return {"FORM": spec.form, "BM": config.block_m, "BN": config.block_n,
            "COLUMNS": 20, "TABLE_M": 5, "TABLE_N": 6, "STEP": PREFIX_STEP}  # fmt: skip


def prefix_source(spec: ProblemSpec, config: Config) -> KernelSource:
    """The kernel that counts tiles of more groups than one vector holds."""
    types = _types(spec)
    names = ("prefix", "ends", "table", "m", "n", "groups", "head")
    return KernelSource(
        module="multigemm.backends.triton.schedule_device",
        name="write_prefix",
        signature=tuple((name, types[name]) for name in names),
        constants=tuple(prefix_constants(spec, config).items()),
    )


ZERO_NAMES = ("m", "n", "groups", "head", "out_group", "out_row", "out_col")


def zero_source(spec: ProblemSpec) -> KernelSource:
    """The kernel that zeroes what no group owns, for kernels that only write what groups own."""
    types = _types(spec)
    return KernelSource(
        module="multigemm.backends.triton.kernels",
        name="zero_kernel",
        signature=tuple((name, types[name]) for name in ("out", "ends", *ZERO_NAMES)),
        constants=(("FORM", spec.form), ("BM", 32), ("BN", 128)),
    )


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
    return max(1, min(tiles, config.programs * available) if config.programs else tiles)


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
    ops: Operands, spec: ProblemSpec, config: Config, kernels: Callable[[int], Cubin], count: Cubin | None
) -> Launch:
    from multigemm.backends.triton.driver import launcher

    if is_empty(ops):
        return nothing
    shape = None if spec.form == "per_group" else packed(ops)
    table = to_device(group_table(ops), ops.device) if shape is None else None
    counted = count is not None and spec.groups > CHUNK
    prefix = torch.empty(spec.groups, dtype=torch.int32, device=ops.device) if counted else None
    values = {**_addresses(ops, table, prefix), **scalars(ops, shape)}
    index = ops.device.index if ops.device.index is not None else torch.cuda.current_device()
    grid = programs(bound_on_tiles(ops, shape, config), config, processors(index))
    main = kernels(extents_multiple(ops) if shape is None else 1)
    keep = (ops, table, prefix)
    order = [values[name] for name in (*POINTERS, *EXTENTS, *STRIDES)]
    run = launcher(main, index, grid, order, keep)
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


def plan_pointer(spec: ProblemSpec, config: Config, device: torch.device, why: str) -> Recipe:
    """Compiles (or loads) the kernels of this spec; `bind` then only packs arguments."""
    if device.type == "cpu":
        from multigemm.backends.triton.emulate import bind_emulated

        return Recipe("pointer (interpreted)", config, lambda ops: bind_emulated(ops, config), why)
    major, minor = torch.cuda.get_device_capability(device)

    def kernels(multiple: int) -> Cubin:
        found = {
            chunk: cubin(pointer_source(spec, config, multiple, chunk), 10 * major + minor)
            for chunk in chunks(spec, config)
        }
        return found[FEW if spec.groups <= FEW and FEW in found else CHUNK]

    kernels(multiple_of(spec) if spec.form == "per_group" and spec.a.align == spec.b.align == 16 else 1)
    count = None if uniform(spec) else cubin(prefix_source(spec, config), 10 * major + minor)
    return Recipe("pointer", config, lambda ops: _bind_cuda(ops, spec, config, kernels, count), why)
