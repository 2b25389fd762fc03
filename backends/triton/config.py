"""The configs (kernel, tile, pipeline depth, raster width, number of programs), and which of them can run a spec.

One predicate, `problem_with`, says whether a config can run a spec; candidates (see choice.py) are
filtered by it and a config given by hand is held to it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch

from multigemm.backends.triton.build import triton_version
from multigemm.cuda.summation import ALIKE, INTEGERS, Summation, difference
from multigemm.planning.fused import columns_of, products_spec
from multigemm.planning.fused_steps import needs_finish, product_spec, steps_reasons
from multigemm.problem.spec import MIXED, OperandSpec, ProblemSpec

SHARED_LIMIT = 227 * 1024
BY_MMA_SYNC = (8, 12)
"""Major compute capabilities of the GPUs whose tensor cores are fed from registers."""
STRIP = 64
"""Rows of one wgmma: the granule of the Hopper kernel's tiles."""
SEARCHED_GROUPS = 256
"""Groups up to which the loading warp finds a tile by itself, and so one of two widths."""
LIST_GROUPS = 16
"""Groups of a list whose maps are a kernel's arguments."""
LIST_TILES = ((64, 128), (128, 128), (128, 256), (256, 128))


@dataclass(frozen=True, slots=True)
class Config:
    """`hopper` is the warp-specialised kernel, also of float8; `pointer` takes plain operands, `quantised` the others.

    `programs` per multiprocessor; 0 launches one program per tile instead of a persistent grid.

    `pack`: operands that are first copied into aligned rows (hopper; pointer: float32 weights along k); both of float8
    with a jagged k, such that k is contiguous.
    `splits` (pointer): programs that share a tile along K, where K is long and tiles are few.
    `shift_b` (hopper): weights that no tensor map expresses pass through registers, instead of being copied first.
    `order` (hopper): tiles are dealt out in turn, or drawn from a counter as programs become free, which
    balances tiles that differ.
    `wide_tails` (hopper, 256x128): the last 128 rows or fewer of a jagged group are tiles of twice the columns.
    """

    kernel: Literal["pointer", "hopper", "quantised"] = "pointer"
    block_m: int = 128
    block_n: int = 128
    block_k: int = 64
    warps: int = 8
    stages: int = 3
    width: int = 8
    programs: int = 1
    pack: tuple[str, ...] = ()
    order: Literal["dealt", "drawn"] = "drawn"
    splits: int = 1
    shift_b: bool = False
    wide_tails: bool = False


def blocks_held(config: Config, capability: tuple[int, int]) -> int:
    """The blocks of K of a pipeline in shared memory. Where products are mma.sync's, Triton keeps one fewer than there
    are stages."""
    return config.stages - (capability[0] in BY_MMA_SYNC)


def shared_bytes(config: Config, spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> int:
    """An upper bound of the pipeline's shared memory in bytes: elements, and indices of picked rows of a jagged K."""
    indices = 0
    if spec.form == "jagged_k" and spec.fused is not None:
        indices = 8 * sum(rows is not None for rows in (spec.fused.a_rows, spec.fused.b_rows))
    line = (config.block_m + config.block_n) * spec.compute.itemsize + indices
    return blocks_held(config, capability) * config.block_k * line


def accumulator_registers(config: Config, spec: ProblemSpec) -> int:
    """The 32-bit registers per thread of the accumulator."""
    return config.block_m * config.block_n * spec.acc.itemsize // 4 // (32 * config.warps)


def mappable(operand: OperandSpec) -> bool:
    """Whether a tensor map can describe the operand in place."""
    return operand.align >= 16 and operand.dense and operand.order != "strided"


def consumers(config: Config) -> int:
    """The number of multiplying warpgroups in the Hopper kernel."""
    return 3 if config.block_m == 3 * STRIP else 2


def tiles_per_consumer(config: Config) -> int:
    """The number of strips that one consumer holds at once."""
    return config.block_m // STRIP // consumers(config)


def is_float8(spec: ProblemSpec) -> bool:
    return spec.quantised == "float8"


def piece_of(config: Config, spec: ProblemSpec) -> int:
    """The columns of one wgmma. With three consumers, or with a block's part besides the sums, registers do not suffice
    for 256."""
    return min(config.block_n, 128) if consumers(config) == 3 or is_float8(spec) else config.block_n


def part_of(config: Config, spec: ProblemSpec) -> int:
    """The columns of one part of the epilogue: those that fit the staging buffer of 256 bytes per row, or a
    consumer's."""
    narrow = config.shift_b or is_float8(spec)
    return STRIP if narrow else min(config.block_n, 256 // max(2, spec.out.dtype.itemsize))


def depth_of(spec: ProblemSpec) -> int:
    """The elements of K in a block of the Hopper kernel: one swizzled row of 128 bytes."""
    return 128 // spec.compute.itemsize


def raw_bytes(config: Config, spec: ProblemSpec) -> int:
    """The bytes of the ring of shifted weights: lines of 128 elements along n, or 128 lines of one slot more than
    stages along k; each line is padded by 16 bytes."""
    return 128 * (128 * (config.stages + 1) + 16) if spec.b.order == "col" else config.stages * 64 * 272


def brings_scales(spec: ProblemSpec) -> bool:
    """Whether scales of float8 come into shared memory together with the operands: one for each line of a block of a
    jagged K."""
    return spec.form == "jagged_k" and is_float8(spec) and finest_block(spec) > 0


def hopper_shared(config: Config, spec: ProblemSpec) -> int:
    """The shared memory of the warp-specialised kernel in bytes: the ring, and a strip of output per consumer.

    For shifted weights there are two rings; results are transposed through 16 KB, and barriers take less than another.
    """
    if config.shift_b:
        return config.stages * config.block_m * 128 + raw_bytes(config, spec) + 17 * 1024
    line = 128 + (4 if brings_scales(spec) else 0)
    ring = config.stages * (config.block_m + config.block_n) * line
    return ring + consumers(config) * STRIP * part_of(config, spec) * spec.out.dtype.itemsize + 1024


def shared_memory(config: Config, spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> int:
    """An upper bound of the shared memory in bytes of a program with this config."""
    if config.kernel == "quantised":
        return quantised_shared(config, spec, capability)
    if config.kernel != "hopper":
        return shared_bytes(config, spec, capability)
    if spec.fused is not None:
        spec = product_spec(products_spec(spec))
    return list_shared(config, spec) if spec.form == "per_group" else hopper_shared(config, spec)


def shift_b_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the weights cannot pass through registers; "" if they can."""
    if spec.form != "jagged_m" or spec.compute.itemsize != 2:
        return f"{spec.form} of {spec.compute}: weights of jagged rows pass through registers, in 16 bits"
    if spec.b.order == "strided" or "b" in config.pack:
        return f"b is {spec.b.order}, pack={config.pack}: weights pass through registers in whole lines, uncopied"
    if spec.a.order != "row" and "a" not in config.pack:
        return f"a is {spec.a.order}: rows that meet shifted weights lie along k; pack it"
    if config.block_m not in (128, 256) or config.block_n != 128:
        return f"tile {config.block_m}x{config.block_n}: two warpgroups hold 64 columns each, so 128|256 x 128"
    if max(spec.n or 0, spec.k or 0) >= 2**30:
        return f"n={spec.n}, k={spec.k}: bytes along a line of shifted weights are counted in 31 bits"
    if spec.c is not None or spec.activation == "gelu":
        return "four more warps leave no registers for a C to read or for gelu"
    if spec.out.order != "row" or spec.out.dtype.itemsize > 4:
        return f"{spec.out.order} results of {spec.out.dtype}: two rings leave room to turn rows of up to 32 bits"
    if config.block_m == 256 and not ((light(spec) or spec.b.order == "col") and thrifty()):
        return "four more warps leave registers for 128x128 here: 256x128 takes plain results of few groups, Triton 3.6"
    return ""


@cache
def thrifty() -> bool:
    """Whether the installed Triton keeps four more warps beside a large tile in registers: 3.6 does; 3.9 spills 80 to
    120 bytes."""
    return triton_version().startswith("3.6.")


def light(spec: ProblemSpec) -> bool:
    """Whether results are plain and the loading warp can find the groups with 32-bit sizes."""
    plain = spec.bias is None and spec.activation in (None, "relu")
    return plain and spec.groups <= 256 and spec.index != torch.int64


def hopper_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the warp-specialised kernel cannot run this spec with this config; "" if it can."""
    if spec.form == "per_group" and not spec.quantised:
        return list_problem(config, spec)
    if (config.splits, config.programs) != (1, 1):
        return (
            f"splits={config.splits}, programs={config.programs}: one program per multiprocessor, tiles unshared; use 1"
        )
    if spec.quantised:
        return float8_problem(config, spec) or _ring_problem(config, spec)
    shifted = shift_b_problem(config, spec) if config.shift_b else ""
    return _kind_problem(spec) or shifted or _maps_problem(config, spec) or _ring_problem(config, spec)


def list_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the warp-specialised kernel cannot run this list with this config; "" if it can."""
    if spec.groups > LIST_GROUPS or spec.c is not None or spec.bias is not None:
        return f"{spec.groups} groups, C or bias: it takes up to {LIST_GROUPS}, plain results; kernel='pointer'"
    if spec.compute not in (torch.float16, torch.bfloat16):
        return f"{spec.compute} products: kernel='hopper' multiplies lists of 16-bit floats, kernel='pointer' the rest"
    if spec.out.dtype.itemsize > 4:
        return (
            f"results in {spec.out.dtype}: kernel='hopper' has those of lists in 16 or 32 bits, kernel='pointer' in all"
        )
    if not (mappable(spec.a) and mappable(spec.b)) or spec.out.order != "row":
        return "tensor maps need aligned rows of unit stride, and results lie in rows here; kernel='pointer' takes all"
    tile = f"tile {config.block_m}x{config.block_n}x{config.block_k}"
    if (config.block_m, config.block_n) not in LIST_TILES or config.block_k != depth_of(spec):
        return f"{tile}: lists take {', '.join(f'{m}x{n}' for m, n in LIST_TILES)}, blocks of {depth_of(spec)}"
    if config.splits != 1:
        return f"splits={config.splits}: tiles of lists are unshared; use 1"
    large = config.block_m * config.block_n > 128 * 128
    if config.pack or config.shift_b or (spec.activation not in (None, "relu") and large):
        seen = f"{tile}, pack={config.pack}, shift_b={config.shift_b}, {spec.activation}"
        return f"{seen}: lists are read as they lie, and activations take registers"
    if list_shared(config, spec) > SHARED_LIMIT:
        return f"{list_shared(config, spec)} bytes of shared memory exceed {SHARED_LIMIT}; use fewer stages"
    return ""


def list_warps(config: Config) -> int:
    """The number of warps that multiply a list's tile: one warpgroup for 64 rows, else two."""
    return 4 if config.block_m == STRIP else 8


def list_ring(config: Config) -> int:
    """The shared memory in bytes of a list's tile: the ring, and at most 4 KB per warp through which 16-bit results are
    transposed."""
    return config.stages * (config.block_m + config.block_n) * 128 + 4096 * list_warps(config)


def list_shared(config: Config, spec: ProblemSpec) -> int:
    """`list_ring` for any results: those of 32 bits take twice the staging."""
    return list_ring(config) + 4096 * list_warps(config) * (spec.out.dtype.itemsize // 4)


def list_registers(config: Config) -> int | None:
    """The registers of a thread with which several programs fit on a multiprocessor."""
    programs = SHARED_LIMIT // list_ring(config)
    return None if programs == 1 else 65536 // (programs * 32 * (list_warps(config) + 4)) // 8 * 8


def _kind_problem(spec: ProblemSpec) -> str:
    """Why no config of the kernel can run this spec; "" if one may."""
    if 0 in (spec.m, spec.n, spec.k) or spec.total > 2**30:
        return f"m={spec.m} n={spec.n} k={spec.k} T<={spec.total}: tensor maps need 1 to 2^30 rows and columns"
    if spec.compute not in (torch.float16, torch.bfloat16) and not is_tf32(spec):
        return f"{spec.compute} products: kernel='hopper' multiplies 16-bit floats and tf32, kernel='pointer' the rest"
    if is_tf32(spec) and spec.form == "jagged_k":
        return "tf32 is multiplied along memory only, where a jagged k cannot start anywhere; kernel='pointer' takes it"
    return ""


def is_tf32(spec: ProblemSpec) -> bool:
    return spec.compute == torch.float32 and spec.precision == "tf32"


def crossed(spec: ProblemSpec) -> bool:
    """Whether float32 on plain cores has weights along k: threads then read columns from the same memory banks."""
    return spec.compute == torch.float32 and spec.precision != "tf32" and spec.b.order == "col"


def turns_weights(spec: ProblemSpec) -> bool:
    """Whether the pointer kernel may have its weights copied first, so that they are contiguous across k."""
    return crossed(spec) and spec.form in ("jagged_m", "batched", "masked") and spec.fused is None


def _maps_problem(config: Config, spec: ProblemSpec) -> str:
    """Which operand no tensor map can deliver in the order in which the kernel multiplies, and why."""
    for name, x in (("a", spec.a), ("b", spec.b)):
        if name in config.pack or (config.shift_b and name == "b"):
            continue
        if not mappable(x):
            seen = f"{name} is {x.order}, {x.align}-byte aligned, dense={x.dense}"
            return f"{seen}: tensor maps need rows of unit stride, 16-byte aligned; pack it"
        if is_tf32(spec) and x.order != ("row" if name == "a" else "col"):
            return f"{name} is {x.order}: tf32 is multiplied along memory only; pack it"
    if spec.form == "jagged_k" and (spec.a.order, spec.b.order) != ("col", "row") and set(config.pack) != {"a", "b"}:
        return (
            f"jagged k runs along {spec.a.order}/{spec.b.order} operands; bounded maps need a as 'col' and b as 'row'"
        )
    if spec.form in ("batched", "masked") and spec.a.order == "col" and "a" not in config.pack:
        return "a stack of column-major a has no two-dimensional map; kernel='pointer' takes it"
    return ""


def wide_tails_problem(config: Config, spec: ProblemSpec) -> str:
    """Why a group's last rows cannot be tiles of twice the columns; "" if they can."""
    if config.kernel != "hopper" or (config.block_m, config.block_n, config.shift_b) != (256, 128, False):
        tile = f"{config.block_m}x{config.block_n}, shift_b={config.shift_b}"
        return f"wide_tails with kernel={config.kernel!r}, {tile}: kernel='hopper' has them with 256x128"
    if spec.quantised or spec.form not in ("jagged_m", "jagged_n", "masked") or spec.groups > SEARCHED_GROUPS:
        kind = f"{spec.quantised or spec.form} of {spec.groups} groups"
        return f"wide_tails: {kind}; jagged rows of up to {SEARCHED_GROUPS} groups have them, unquantised"
    return ""


def _ring_problem(config: Config, spec: ProblemSpec) -> str:
    """Why this tile and this ring do not fit the kernel, its registers or shared memory."""
    tile = f"{config.block_m}x{config.block_n}x{config.block_k}"
    known = config.block_m in (128, 192, 256) and config.block_n in (64, 128, 256)
    if not known or config.block_k != depth_of(spec):
        return f"tile {tile}: the kernel takes 128|192|256 x 64|128|256 x {depth_of(spec)}"
    plain_end = (spec.c, spec.bias) == (None, None) and spec.activation in (None, "relu")
    plain_end = plain_end and spec.out.order == "row" and spec.out.align == 16
    if consumers(config) == 3 and not (plain_end and spec.form != "jagged_n"):
        return "three consumers leave registers for a plain epilogue and an aligned row-major output only"
    heavy_end = spec.c is not None or spec.activation == "gelu"
    if config.block_n * tiles_per_consumer(config) > (128 if heavy_end else 256):
        return f"tile {tile} does not fit the registers of two warpgroups"
    if hopper_shared(config, spec) > SHARED_LIMIT:
        return f"{hopper_shared(config, spec)} bytes of shared memory exceed {SHARED_LIMIT}; use fewer stages"
    return ""


# --- quantised operands -------------------------------------------------------------------------------


def float8_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the warp-specialised kernel cannot run these quantised operands; "" if it can."""
    if not is_float8(spec) or spec.form == "per_group":
        kind = f"{spec.form} of {spec.a.dtype} x {spec.b.dtype}"
        return f"{kind}: kernel='hopper' multiplies packed forms of float8"
    copied = spec.form == "jagged_k"
    if 0 in (spec.m, spec.n, spec.k) or spec.total + copied * PROMOTION * spec.groups > 2**30:
        return f"m={spec.m} n={spec.n} k={spec.k} T<={spec.total}: tensor maps need 1 to 2^30 rows and columns"
    if spec.batch_invariant:
        return "batch_invariant=True: kernel='quantised' multiplies every size by one tile"
    if spec.alpha == "zero" or config.pack != (("a", "b") if copied else ()) or config.shift_b:
        seen = f"alpha={spec.alpha}, pack={config.pack}, shift_b={config.shift_b}"
        return f"{seen}: float8 is multiplied as it lies, or with a jagged K after a copy of a and b"
    if config.block_m == 3 * STRIP or config.block_n < 128:
        return f"tile {config.block_m}x{config.block_n}: two warpgroups multiply float8, by 128 columns"
    for name, x, order in (("a", spec.a, "row"), ("b", spec.b, "col")):
        if not copied and (not mappable(x) or x.order != order):
            seen = f"{name} is {x.order}, {x.align}-byte aligned, dense={x.dense}"
            return f"{seen}: wgmma multiplies float8 along K, in aligned rows of it; kernel='quantised' takes all"
        if x.scale is not None and x.scale.k not in (0, PROMOTION):
            return f"scale_{name} covers {x.scale.k} of K: products start anew after {PROMOTION} of it"
        if x.scale is not None and x.scale.align < x.scale.dtype.itemsize:
            seen = f"scale_{name} is {x.scale.align}-byte aligned"
            return f"{seen}: it is read {x.scale.dtype.itemsize} bytes at a time here; kernel='quantised' takes all"
    columns = spec.a.scale if spec.form == "jagged_n" else spec.b.scale
    if not copied and finest_block(spec) and columns is not None and columns.rows == 1:
        return "a scale for each column beside blocks of K: one number for 128 columns or for all"
    tall = spec.out.dtype.itemsize < 4 and (config.block_m, config.block_n) == (256, 128)
    if brings_scales(spec) and not tall and (config.block_m, config.block_n) != (128, 128):
        seen = f"tile {config.block_m}x{config.block_n}, results in {spec.out.dtype}"
        return f"{seen}: blocks of a jagged K leave registers for 128x128, or 256x128 with results of 16 bits"
    return ""


NARROW = 64
"""Below this many rows of tokens they are on the instruction's narrow side, because its other side takes at least
64."""
PROMOTION = 128
"""Elements of K that products of float8 may stay in the tensor core's own sums."""
INVARIANT_TILE = (64, 64, 4)
"""Rows, columns and warps of batch-invariant problems with quantised operands: one instruction for all sizes."""


def swapped(config: Config) -> bool:
    """Whether weights are on the side of the instruction that is 64 wide, for few tokens."""
    return config.block_m < NARROW


def finest_block(spec: ProblemSpec) -> int:
    """The smallest part of K that one entry of any scale covers, among 32, 64 and 128; 0 if none is divided along K."""
    blocks = [x.scale.k for x in (spec.a, spec.b) if x.scale is not None and x.scale.k]
    return 32 if MIXED in blocks else min(blocks, default=0)


def foldable(spec: ProblemSpec) -> bool:
    """Whether scales may multiply the weights in registers: one rounding to bfloat16 is allowed, and one to float16 if
    the scale has no more digits and no wider range."""
    scale = spec.b.scale
    if spec.quantised != "weights" or scale is None or scale.k not in (32, 64):
        return False
    return spec.compute is torch.bfloat16 or scale.dtype is torch.float16


def folded(config: Config, spec: ProblemSpec) -> bool:
    """Whether a step along K is longer than a block of the weights' scales, which then multiply weights in
    registers."""
    return foldable(spec) and config.block_k > finest_block(spec)


def quantised_shared(config: Config, spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> int:
    """An upper bound in bytes: the pipeline, a converted block of each operand, and staged results. For mma.sync only
    packed weights are converted in shared memory, and scales come to registers."""
    m, n, k = config.block_m, config.block_n, config.block_k
    held = m * k * spec.a.dtype.itemsize + (n * k // 2 if spec.b.packed else n * k)
    numbers = 4 * (m + n * (k // finest_block(spec) if folded(config, spec) else 1))
    converted = 2 * (m + n) * k
    if capability[0] in BY_MMA_SYNC:
        numbers, converted = 0, 2 * n * k if spec.b.packed else 0
    return max(blocks_held(config, capability) * (held + numbers) + converted, 4 * m * n)


FEWEST_REGISTERS = 112
"""The smallest number of registers of a thread besides a tile's two sums: addresses, codes and decoded numbers."""


def quantised_registers(config: Config) -> int | None:
    """The registers of a thread with which the launched programs fit beside each other; None if they would not suffice,
    or if there are no more."""
    each = 65536 // (config.programs * 32 * config.warps) // 8 * 8 if config.programs else 256
    needed = 2 * config.block_m * config.block_n // (32 * config.warps) + FEWEST_REGISTERS
    return each if needed <= each <= 248 else None


def quantised_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the kernel of quantised operands cannot run this spec with this config; "" if it can."""
    if config.pack or config.shift_b or config.splits != 1:
        return (
            f"pack={config.pack}, shift_b={config.shift_b}, splits={config.splits}: quantised operands are read as "
            "they lie, by one program for each tile; use none of these"
        )
    for name in ("block_m", "block_n"):
        block = getattr(config, name)
        if not isinstance(block, int) or not 16 <= block <= 256 or block & (block - 1):
            return f"{name}={block} must be a power of two from 16 to 256"
    if config.block_k not in (32, 64, 128):
        return f"block_k={config.block_k} must be 32, 64 or {PROMOTION}, the longest sum without promotion"
    finest = finest_block(spec)
    if finest and config.block_k > finest and not folded(config, spec):
        return f"block_k={config.block_k}: one number covers {finest} of K, and a step has one for each line"
    if quantised_shared(config, spec) > SHARED_LIMIT:
        return f"{quantised_shared(config, spec)} bytes of shared memory exceed {SHARED_LIMIT}; use fewer stages"
    if 2 * config.block_m * config.block_n // (32 * config.warps) > 160:
        return f"tile {config.block_m}x{config.block_n} of {config.warps} warps: two sums do not fit the registers"
    tile = (config.block_m, config.block_n, config.warps)
    if spec.batch_invariant and (tile != INVARIANT_TILE or config.block_k != invariant_depth(spec)):
        rows, columns, warps = INVARIANT_TILE
        return f"batch_invariant=True takes {rows}x{columns}x{invariant_depth(spec)} by {warps} warps alone"
    return ""


def invariant_depth(spec: ProblemSpec) -> int:
    """K of a step of batch-invariant problems: always a whole block, so that a short K is summed like a part of a long
    one."""
    return finest_block(spec) or PROMOTION


CHOICES = {"kernel": ("pointer", "hopper", "quantised"), "order": ("dealt", "drawn"), "warps": (1, 2, 4, 8, 16),
           "splits": (1, 2, 4, 8, 16), "shift_b": (False, True), "pack": ((), ("a",), ("b",), ("a", "b")),
           "wide_tails": (False, True)}  # fmt: skip
LIMITS = {"stages": (1, 32), "width": (1, 4096), "programs": (0, 64)}


def value_problem(config: Config) -> str:
    """Which value of a config, which a user may have written, is invalid for every spec; "" if none is."""
    for name, known in CHOICES.items():
        if (value := getattr(config, name)) not in known:
            return f"{name}={value!r} is none of {', '.join(map(repr, known))}"
    for name, (low, high) in LIMITS.items():
        value = getattr(config, name)
        if not isinstance(value, int) or not low <= value <= high:
            return f"{name}={value!r} is no number from {low} to {high}; the default is {getattr(Config(), name)}"
    return ""


def fused_problem(config: Config, spec: ProblemSpec) -> str:
    """Why no fused kernel has this config; "" if one does. The warp-specialised kernel computes a product among
    steps."""
    if config.kernel == "hopper":
        if spec.batch_invariant and needs_finish(spec):
            return "batch_invariant=True: a gate in a step of its own rounds unlike one inside of kernel='pointer'"
        return "; ".join(steps_reasons(spec)) or problem_with(config, product_spec(spec))
    if config.kernel != "pointer" or config.splits != 1:
        return (
            f"kernel={config.kernel!r}, splits={config.splits}: picked rows, gates, preact_out and row_scale are parts "
            "of kernel='pointer', by one program for each tile"
        )
    if columns_of(spec, config.block_n) < 16:
        return f"block_n={config.block_n}: a gate joins two columns of products, so 32 at least"
    return ""


def problem_with(config: Config, spec: ProblemSpec) -> str:
    """Why this config cannot run this spec; "" if it can."""
    if reason := value_problem(config):
        return reason
    spec = products_spec(spec)
    if spec.fused is not None and ((reason := fused_problem(config, spec)) or config.kernel == "hopper"):
        return reason
    if config.kernel == "pointer" if spec.quantised else config.kernel == "quantised":
        held = "quantised" if spec.quantised else "plain"
        return f"kernel={config.kernel!r}: {held} operands have kernels of their own"
    if config.wide_tails and (reason := wide_tails_problem(config, spec)):
        return reason
    problems = {"hopper": hopper_problem, "quantised": quantised_problem, "pointer": pointer_problem}
    return problems[config.kernel](config, spec) or variance(config, spec)


INVARIANT = Config(block_m=64, block_n=64, block_k=16)
"""What batch-invariant problems are summed like: blocks of K as short as any, so that all are padded alike."""


def _tensor_unit(config: Config) -> Literal["mma.sync", "wgmma"]:
    return "wgmma" if config.kernel == "hopper" else "mma.sync"


def summation_of(config: Config, spec: ProblemSpec) -> Summation:
    """How a config sums. For the pointer kernel mma.sync stands for both instructions between which Triton chooses."""
    if spec.compute == torch.int8:
        return INTEGERS
    if spec.quantised:
        return Summation(_tensor_unit(config), 32 if spec.quantised == "float8" else 16)
    tensor_cores = spec.compute.itemsize == 2 or is_tf32(spec)
    if not tensor_cores:
        return Summation("fused multiply-add", padded=config.block_k, parts=config.splits > 1)
    return Summation(_tensor_unit(config), 8 if is_tf32(spec) else 16, parts=config.splits > 1)


def variance(config: Config, spec: ProblemSpec) -> str:
    """Why a config does not have the bits that batch invariance demands; "" if it does."""
    if not spec.batch_invariant:
        return ""
    return difference(summation_of(config, spec), summation_of(INVARIANT, spec), (9, 0))


def one_instruction(spec: ProblemSpec, capability: tuple[int, int]) -> bool:
    """Whether tiles of all sizes use one instruction on such a GPU, or instructions that sum alike."""
    on_tensor_cores = summation_of(INVARIANT, spec).unit == "mma.sync" and not spec.quantised
    return not on_tensor_cores or capability[0] < 9 or capability in ALIKE


def pointer_problem(config: Config, spec: ProblemSpec) -> str:
    """Why the pointer kernel cannot run this spec with this config; "" if it can."""
    if config.shift_b or (config.pack and not (config.pack == ("b",) and turns_weights(spec))):
        return (
            f"pack={config.pack}, shift_b={config.shift_b}: the pointer kernel reads operands as they lie, or packs "
            "float32 weights along k; use neither"
        )
    for name in ("block_m", "block_n", "block_k"):
        block = getattr(config, name)
        if not isinstance(block, int) or block < 16 or block & (block - 1):
            return f"{name}={block} must be a power of two of at least 16"
    if spec.compute == torch.int8 and config.block_k < 32:
        return f"block_k={config.block_k} is below 32, which int8 products need"
    if shared_bytes(config, spec) > SHARED_LIMIT:
        return f"{shared_bytes(config, spec)} bytes of shared memory exceed {SHARED_LIMIT}; use fewer stages"
    if accumulator_registers(config, spec) > 160:
        return f"{accumulator_registers(config, spec)} accumulator registers per thread exceed 160; use more warps"
    return ""
