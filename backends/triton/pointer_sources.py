"""The pointer kernel and its helpers as sources to compile: what is compile-time, never an extent.

Compile-time classes: dtypes, operand order, alignment, whether K fills whole blocks, the epilogue's
shape. Everything else (sizes, strides, addresses, group counts, alpha, beta) is an argument.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from multigemm.backends.triton.compile import KernelSource
from multigemm.backends.triton.config import Config
from multigemm.problem.spec import ProblemSpec

CHUNK = 256
FEW = 32
"""Groups that the scheduler counts at once; up to FEW of them inside each warp, without a barrier."""
LISTED = 0
"""In their place: the host knows all extents and has listed the tiles (see pointer_tiles)."""
WHOLE = -1
"""The same, where every tile is whole, so that nothing has to be masked."""
SLOTS = 4
"""Groups of a list that are arguments (see few): more of them take longer to read than a table in memory."""
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
POINTERS = ("a", "b", "c", "out", "bias", "ends", "table", "prefix", "partials", "arrived")
EXTENTS = ("m", "n", "k", "groups", "head", "places")
STRIDES = ("a_group", "a_row", "a_col", "b_group", "b_row", "b_col", "c_group", "c_row", "c_col",
           "out_group", "out_row", "out_col", "bias_group", "bias_col", "alpha_bits", "beta_bits")  # fmt: skip
UNIFORM = ("batched", "jagged_k")


def uniform(spec: ProblemSpec) -> bool:
    """Every group has the same number of tiles, so a tile's group is a division."""
    return spec.form in UNIFORM or (spec.form == "masked" and spec.zero_unowned)


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
        "partials": spec.acc,
        "arrived": torch.int32,
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


def even_k(spec: ProblemSpec, config: Config) -> bool:
    """K fills whole blocks in every group, so that no load needs a mask along K."""
    return spec.form not in ("per_group", "jagged_k") and bool(spec.k) and cast(int, spec.k) % config.block_k == 0


def multiple_of(spec: ProblemSpec) -> int:
    """Elements in 16 bytes, the widest access."""
    return max(1, 16 // spec.compute.itemsize)


def whole_worthwhile(spec: ProblemSpec) -> bool:
    """Lists of aligned matrices: where whole tiles are worth a kernel of their own."""
    return spec.form == "per_group" and min(spec.a.align, spec.b.align, spec.out.align) == 16


def chunks(spec: ProblemSpec, config: Config) -> tuple[int, ...]:
    """The numbers of groups at once that kernels are compiled for: all that a problem of this spec may need."""
    if spec.form == "per_group":
        return (LISTED, CHUNK, WHOLE) if whole_worthwhile(spec) and not few_slots(spec, config) else (LISTED, CHUNK)
    return (CHUNK, FEW) if config.programs == 0 and not uniform(spec) else (CHUNK,)


def few_slots(spec: ProblemSpec, config: Config) -> int:
    """The slots of the kernel that takes lists of whole tiles as arguments; 0 where it cannot run."""
    plain = whole_worthwhile(spec) and spec.c is None and spec.bias is None
    lines = "strided" not in (spec.a.order, spec.b.order, spec.out.order)
    lines = lines and not (spec.a.wide or spec.b.wide or spec.out.wide)
    few = spec.groups <= SLOTS and (config.programs, config.splits) == (0, 1)
    return SLOTS if plain and lines and few else 0


def few_constants(spec: ProblemSpec, config: Config) -> dict[str, Any]:
    """The constexpr arguments of that kernel."""
    names = ("BM", "BN", "BK", "WIDTH", "STAGES", "A_ORDER", "B_ORDER", "OUT_ORDER", "ALPHA", "ACTIVATION", "PRECISION",
             "ACC", "INTERPRETED")  # fmt: skip
    every = constants(spec, config)
    return {name: every[name] for name in names}


def few_source(spec: ProblemSpec, config: Config) -> KernelSource:
    types = _types(spec)
    group = ("i32",) * 6 + (types["a"], "i32", types["b"], "i32", types["out"], "i32")
    return KernelSource(
        module="multigemm.backends.triton.few",
        name="few_kernel",
        signature=(("groups", (group,) * few_slots(spec, config)), ("alpha_bits", "i64")),
        constants=tuple(few_constants(spec, config).items()),
        warps=config.warps,
        stages=config.stages,
    )


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
        module="multigemm.backends.triton.zeros",
        name="zero_kernel",
        signature=tuple((name, types[name]) for name in ("out", "ends", *ZERO_NAMES)),
        constants=(("FORM", spec.form), ("BM", 32), ("BN", 128)),
    )
