"""The configs of all kernels as frozen values, and the predicate `is_valid`, which says what each can run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

import torch

from multigemm.backends.cupy.support import (
    MAX_GROUPS,
    folds_scales,
    fp8_reasons,
    gather_reasons,
    gathered_reasons,
    has_gate,
    has_odd_lines,
    hopper_plain_kind,
    hopper_reasons,
    packed_reasons,
    packed_spec,
    picks_rows,
    picks_weights,
    shift_a_reasons,
    shift_b_reasons,
    small_list_reasons,
    small_reasons,
    trades_sides,
    turns_weights,
    weights_reasons,
    words_of,
)
from multigemm.cuda.summation import INTEGERS, Summation, difference
from multigemm.planning.fused import products_spec
from multigemm.planning.fused_steps import gathered_spec
from multigemm.problem.spec import HALVES, ProblemSpec

SHIFTING = ("hopper_shift_a", "hopper_shift_b")
"""Kernels that shift lines which begin anywhere into place."""
COLUMNS = 128
"""Columns of a result that one thread block of the Hopper kernel owns."""
TURNS_GROUPS = 448
"""Groups that the Hopper kernel's schedule holds where the stages leave it little shared memory."""
ODD_COLUMNS = 144
"""Columns of 128 bytes that a stage of weights takes whose lines begin anywhere, in the larger of both layouts
(hopper_shift_b.cu)."""
CODE_LINE = 64
"""Bytes of a column of quantised weights in a stage, at most."""
LOW_ROWS = 32
"""Rows of the lowest tiles of quantised weights, whose kernel has two thread blocks on each multiprocessor."""
LOW_GROUPS = 640
"""Groups that their schedule holds."""
LOW_SHARED = 115712
"""Bytes of shared memory for each of the two: half of a multiprocessor's 228 KB, less 1 KB that a block needs more."""
SHARED_LIMIT = 232448
"""Bytes of shared memory that one thread block may have on compute capability 9.0."""


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a problem.

    `generic` takes any problem, in tiles of `tile` squared (32 is not for 16 bits), with `blocks_per_sm` resident
    blocks. `hopper` cuts a group's rows into pieces of at most `rows`, whose width on wgmma's n side is a multiple
    of `step`; `stages` blocks of 64 k are in flight, or more of lower pieces; `cluster` thread blocks share their
    rows; `pingpong`: the two warpgroups of a block work on a tile each, not together on one, so that one stores
    while the other multiplies. `packed` copies the operands that TMA cannot read and then runs `hopper` on the
    copies. `hopper_shift_b` copies the rows at most and shifts the weights into place itself; `hopper_shift_a`
    does the opposite for rows of a jagged m, where `rows` are columns of the result. `small` gives each tile
    of `tile` squared a thread block of its own, with four blocks of k in flight, or `stages` where lines begin
    anywhere. `small_list` gives a thread block to each tile of a list or batch, laid out by the host; `rows` 0 leaves
    their height to it, which knows all sizes. `quantised` takes any quantised operands, in tiles of 64 squared;
    `hopper_fp8` is `hopper` for float8, with 128 of k in a stage, and tiles of
    `columns`; `hopper_weights` is `hopper` for quantised weights.
    `hopper_gather` is `hopper` for rows picked by index, which two warps copy on their way; the blocks of a cluster
    share weights there, and `rows` are those of one block. `gathered` copies picked rows first and runs `hopper`.
    """

    kernel: Literal[
        "generic",
        "hopper",
        "packed",
        "hopper_shift_a",
        "hopper_shift_b",
        "small",
        "small_list",
        "quantised",
        "hopper_fp8",
        "hopper_gather",
        "gathered",
        "hopper_weights",
    ] = "generic"
    blocks_per_sm: int = 2
    tile: int = 128
    rows: int = 0
    stages: int = 0
    cluster: int = 1
    step: int = 16
    pingpong: bool = False
    columns: int = COLUMNS

    def shared_bytes(self, plain: bool) -> int:
        """The dynamic shared memory of the Hopper kernel and of `hopper_shift_b`, in bytes."""
        if self.rows == LOW_ROWS:
            return LOW_SHARED
        staging = 2 * (8192 if plain else 9216) * (1 if self.columns == COLUMNS else self.columns // 64)
        return self.ring_bytes + staging + self._scales + self._bookkeeping

    @property
    def ring_bytes(self) -> int:
        """The bytes of all stages: 128 of k of each row, and as many, or fewer of codes, of each column."""
        line = CODE_LINE if self.kernel == "hopper_weights" else 128
        columns = ODD_COLUMNS if self.kernel in SHIFTING else self.columns
        return self.stages * (self.rows * 128 + columns * line)

    def low_room(self, plain: bool, sent: bool) -> int:
        """The bytes that the lowest tiles have for stages, and for scales and zero points."""
        return LOW_SHARED - 2 * (LOW_ROWS * COLUMNS if sent else 8192 if plain else 9216) - self._bookkeeping

    @property
    def _scales(self) -> int:
        """The bytes of the scales of all stages, of which the lowest tile has the most (pipeline.cuh)."""
        return self._places * (self.rows + self.columns) * 4 if self.kernel == "hopper_fp8" else 0

    @property
    def _places(self) -> int:
        """The number of stages of the lowest tiles for which there is room (PLACES in pipeline.cuh)."""
        if self.kernel == "hopper_fp8" and self.rows <= 128:  # all are of one size
            return self.stages
        most, least = (ODD_COLUMNS, ODD_COLUMNS - 8) if self.kernel in SHIFTING else (self.columns, self.columns)
        return self.stages * (self.rows + most) // (least + self.step) + 1

    @property
    def _bookkeeping(self) -> int:
        """The bytes of the schedule, of tiles, barriers, and what alignment may cost (Shared in pipeline.cuh)."""
        picked = 4 * self.rows if self.kernel == "hopper_gather" else 0
        loaders = 3 if self.kernel in ("hopper_gather", "hopper_fp8") else 2
        barriers = 3 if self.kernel in SHIFTING else 2
        tiles = max(768, 376 + (8 * barriers + 4 * loaders) * self._places)
        if self.kernel == "hopper_weights":  # whose stages are smaller
            tiles = 1024
        return 16 * self.groups_at_most + 1024 + tiles + picked

    @property
    def groups_at_most(self) -> int:
        """The number of groups that the schedule can hold in its shared memory."""
        high = self.kernel in SHIFTING and self.rows == SHIFT_B.rows
        if self.rows == LOW_ROWS:
            return LOW_GROUPS
        return TURNS_GROUPS if self.pingpong or self.columns != COLUMNS or high else MAX_GROUPS


F16, BF16, TF32, I8, F64, F32 = range(6)
SIZES = {F16: 2, BF16: 2, TF32: 4, I8: 1, F64: 8, F32: 4}
SHARED_MEMORY = {(8, 0): 166912, (8, 7): 166912, (9, 0): 232448, (10, 0): 232448, (10, 3): 232448, (11, 0): 232448}
LEAST_SHARED = 101376
"""Bytes that a thread block may have, on GPUs that are not listed."""
PLACE_BYTES = 1280
"""The bytes of shared memory for the current tile, the next one and the search for their groups."""


class Shape(NamedTuple):
    """The parameters of a tile besides its side: k of a stage, stages, threads, and resident blocks of a
    multiprocessor.

    `cost` is the time of a product relative to the kind's other tiles, if all processors are busy.
    """

    depth: int
    stages: int
    threads: int
    resident: int
    cost: float = 1.0


SHAPES = {
    F16: {128: Shape(32, 4, 256, 1), 64: Shape(64, 4, 128, 3)},
    I8: {128: Shape(64, 4, 256, 1), 64: Shape(128, 4, 128, 2, 1.5), 32: Shape(128, 4, 64, 3, 2.0)},
    TF32: {128: Shape(32, 2, 128, 2), 64: Shape(32, 4, 128, 2, 1.8), 32: Shape(32, 6, 64, 3, 3.4)},
    F64: {128: Shape(32, 3, 256, 1), 64: Shape(16, 3, 128, 3, 1.1), 32: Shape(16, 6, 64, 3, 1.8)},
    F32: {128: Shape(32, 2, 128, 2), 64: Shape(32, 4, 128, 3, 1.4), 32: Shape(32, 8, 64, 3, 2.0)},
}  # fmt: skip
SHAPES[BF16] = SHAPES[F16]
"""The tiles by side. Low tiles of 16 bits have a kernel of their own."""
COPIED_SHAPES = {128: Shape(64, 2, 128, 2), 64: SHAPES[F16][64]._replace(cost=1.75)}
"""The tiles of 16 bits where `is_copied`. H200, 2026-11-23, 8 x 2048 cubed, bf16: those of 128 are 1.65 to 1.7 times as
fast as in `SHAPES`; a third stage gave 3 % more, but multiprocessors of sm_80 hold two blocks of two stages only. Those
of 64 reach 0.55 to 0.6 of their rate with more than 100 rows per group (seven shapes of `moe`, 2026-11-25)."""


def kind_of(spec: ProblemSpec) -> int:
    """The arithmetic for which the kernel is compiled."""
    if spec.compute == torch.float32:
        return TF32 if spec.precision == "tf32" else F32
    return {torch.float16: F16, torch.bfloat16: BF16, torch.float64: F64, torch.int8: I8}[spec.compute]


def is_copied(spec: ProblemSpec) -> bool:
    """Whether the generic kernel can copy 16-bit operands asynchronously: all lines begin at multiples of 16 bytes."""
    if spec.compute.itemsize != 2 or spec.fused is not None or has_odd_lines(spec):
        return False
    return "strided" not in (spec.a.order, spec.b.order)


def shapes_of(spec: ProblemSpec) -> dict[int, Shape]:
    """The tiles for a problem's arithmetic."""
    copied = spec.a.align == spec.b.align == 16 and is_copied(spec)
    return COPIED_SHAPES if copied else SHAPES[kind_of(spec)]


def _lines(kind: int, depth: int, side: int) -> tuple[int, int]:
    """The elements of an operand's stage with padding: in lines along k, or across k (mma_tile.cuh)."""
    along, across = {F64: (4, 4), F32: (0, 4)}.get(kind, (16 // SIZES[kind], 8))
    return side * (depth + along), depth * (side + across)


def _ring_bytes(kind: int, shape: Shape, side: int) -> int:
    """The shared memory of the ring of k-blocks, or of the staging of results if that is more (generic.cu)."""
    along, across = _lines(kind, shape.depth, side)
    stage = 2 * (across if kind == F32 else max(along, across)) * SIZES[kind]
    return max(shape.stages * stage, shape.threads // 32 * 16 * 36 * max(SIZES[kind], 4))


def generic_bytes(spec: ProblemSpec, side: int) -> int:
    """The dynamic shared memory of the generic kernel in bytes."""
    return _ring_bytes(kind_of(spec), shapes_of(spec)[side], side)


def place_bytes(spec: ProblemSpec, side: int) -> int:
    """The static shared memory in bytes: fused problems keep an address for each line of a tile (picked_load.cuh)."""
    return PLACE_BYTES + (0 if spec.fused is None else 2 * side * 9 + 256)


def tile_fits(spec: ProblemSpec, side: int, capability: tuple[int, int]) -> bool:
    """Whether the tile exists and a device has the shared memory for it."""
    limit = SHARED_MEMORY.get(capability, LEAST_SHARED) - place_bytes(spec, side)
    shape = shapes_of(spec).get(side)
    return shape is not None and _ring_bytes(kind_of(spec), shape, side) <= limit


GENERIC = Config(blocks_per_sm=1)
GENERIC_PAIR = Config(blocks_per_sm=2)
GENERIC_64 = Config(blocks_per_sm=3, tile=64)
GENERIC_32 = Config(blocks_per_sm=3, tile=32)
WIDE = Config("hopper", rows=256, stages=4, cluster=2)
MIDDLE = Config("hopper", rows=128, stages=6, cluster=2)
NARROW = Config("hopper", rows=64, stages=8, cluster=2)
SINGLE = Config("hopper", rows=128, stages=6, cluster=1)
SLIM = Config("hopper", rows=64, stages=8, cluster=1)
TURNS = Config("hopper", rows=192, stages=5, cluster=2, pingpong=True)
ALONE = Config("hopper", rows=256, stages=4, cluster=1)
SHIFT_A = Config("hopper_shift_a", rows=256, stages=4, cluster=2, step=8)
SHIFT_A_MIDDLE = Config("hopper_shift_a", rows=128, stages=5, cluster=2, step=8)
SHIFT_B = Config("hopper_shift_b", rows=256, stages=4, cluster=2, step=8)
SHIFT_B_MIDDLE = Config("hopper_shift_b", rows=128, stages=5, cluster=2, step=8)
SHIFT_B_NARROW = Config("hopper_shift_b", rows=64, stages=7, cluster=2, step=8)
SMALL_LIST = Config("small_list")
SMALL_LISTS = (
    SMALL_LIST,
    *(Config("small_list", rows=r, stages=s) for r, s in ((64, 8), (80, 7), (128, 6), (192, 5), (256, 4))),
)
SMALL_32 = Config("small", tile=32)
SMALL_64 = Config("small", tile=64)
SMALL_DEEP = Config("small", tile=32, stages=8)
QUANTISED = Config("quantised", blocks_per_sm=2, tile=64)
FP8_WIDE = Config("hopper_fp8", rows=192, stages=4, cluster=2)
FP8_MIDDLE = Config("hopper_fp8", rows=128, stages=5, cluster=2)
FP8_NARROW = Config("hopper_fp8", rows=64, stages=7, cluster=2)
FP8_SINGLE = Config("hopper_fp8", rows=128, stages=5, cluster=1)
FP8_ALONE = Config("hopper_fp8", rows=192, stages=4, cluster=1)
FP8_BROAD = Config("hopper_fp8", rows=128, stages=4, cluster=2, columns=192)
FP8_BROAD_ALONE = Config("hopper_fp8", rows=128, stages=4, cluster=1, columns=192)
FP8 = (FP8_WIDE, FP8_MIDDLE, FP8_NARROW, FP8_SINGLE, FP8_ALONE, FP8_BROAD, FP8_BROAD_ALONE)
GATED = tuple(
    Config("hopper", rows=rows, stages=stages, cluster=cluster, pingpong=True)
    for rows, stages in ((192, 5), (128, 6), (64, 8))
    for cluster in (2, 1)
)
"""The configs for gates: a warpgroup multiplies all columns of a tile, those of g and of u."""
GATHERED = tuple(replace(c, kernel="hopper_gather") for c in GATED)
"""The configs for picked rows, with a gate or plain."""
GATHERED_TOGETHER = tuple(
    Config("hopper_gather", rows=rows, stages=stages, cluster=cluster)
    for rows, stages in ((256, 4), (192, 4), (128, 6), (64, 8))
    for cluster in (2, 1)
)
"""The configs for picked rows without a gate: both warpgroups share a tile."""
FUSED_TOGETHER = (TURNS, WIDE, ALONE, MIDDLE, SINGLE, NARROW, SLIM)
"""The configs for preact_out and row_scale without a gate, and for copies of picked rows."""
WEIGHTS_WIDE = Config("hopper_weights", rows=256, stages=4, cluster=2)
WEIGHTS_MIDDLE = Config("hopper_weights", rows=128, stages=8, cluster=2)
WEIGHTS_NARROW = Config("hopper_weights", rows=64, stages=12, cluster=1, step=8)
WEIGHTS_LOW = Config("hopper_weights", rows=LOW_ROWS, stages=4, cluster=1, step=8)
WEIGHTS = (WEIGHTS_WIDE, WEIGHTS_MIDDLE, WEIGHTS_NARROW, WEIGHTS_LOW)
SMALL_STAGES = 4
"""Blocks of k that the small kernel has in flight, if a config does not say it."""
BLOCK_K = 64
"""k of a stage."""

REASONS = {
    "hopper": hopper_reasons,
    "packed": packed_reasons,
    "hopper_shift_a": shift_a_reasons,
    "hopper_shift_b": shift_b_reasons,
    "small": small_reasons,
    "small_list": small_list_reasons,
    "hopper_fp8": fp8_reasons,
    "hopper_gather": gather_reasons,
    "gathered": gathered_reasons,
    "hopper_weights": weights_reasons,
}
FOR_FUSED = ("generic", "hopper", "hopper_gather", "gathered")
"""Kernels that take picked rows, gates, preact_out and row_scale."""
TAKE_TURNS = ("hopper", "packed", "hopper_gather", "gathered")
"""Kernels whose warpgroups may multiply a tile each (`pingpong`)."""
FOR_QUANTISED = ("quantised", "hopper_fp8", "hopper_weights")
"""Kernels that take quantised operands, and no others."""


def is_valid(config: Config, spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> bool:
    """Whether `config` runs `spec` on a device, within the limits of shared memory and registers."""
    spec = products_spec(spec)
    return not reasons_against(config.kernel, spec) and shape_fits(config, spec, capability)


def summation_of(config: Config, spec: ProblemSpec) -> Summation:
    """How a config sums: no kernel cuts K into parts."""
    if config.kernel in FOR_QUANTISED:
        widths = {"quantised": 8, "hopper_fp8": 32, "hopper_weights": 16}
        return Summation("mma.sync" if config.kernel == "quantised" else "wgmma", widths[config.kernel])
    kind = kind_of(spec)
    if kind == I8:
        return INTEGERS
    if kind == F64 and config.kernel == "hopper":
        return Summation("fused multiply-add", 8)
    if config.kernel not in ("generic", "small"):
        return Summation("wgmma", 8, truncated=True) if kind == TF32 else Summation("wgmma", 16)
    if kind in (F16, BF16, TF32):
        return Summation("mma.sync", 8 if kind == TF32 else 16)
    return Summation("fused multiply-add", padded=shapes_of(spec)[config.tile].depth)


def variance(config: Config, spec: ProblemSpec, capability: tuple[int, int]) -> str:
    """Why a config does not have the bits that batch invariance demands; "" if it does."""
    if not spec.batch_invariant:
        return ""
    wanted = QUANTISED if spec.quantised else GENERIC_64
    return difference(summation_of(config, spec), summation_of(wanted, spec), capability)


def reasons_against(kernel: str, spec: ProblemSpec) -> list[str]:
    """Why a kernel cannot run a spec with any config. The generic kernel runs all plain operands."""
    spec = products_spec(spec)
    if spec.fused is not None and kernel not in FOR_FUSED:
        return [f"rows picked by index, a gate, preact_out or row_scale: {', '.join(FOR_FUSED)} take them"]
    if bool(spec.quantised) != (kernel in FOR_QUANTISED):
        takers = f"{', '.join(FOR_QUANTISED[:-1])} and {FOR_QUANTISED[-1]}"
        return [f"operands are quantised: {takers} take them" if spec.quantised else "operands are not quantised"]
    check = REASONS.get(kernel)
    return check(spec) if check else []


def shape_fits(config: Config, spec: ProblemSpec, capability: tuple[int, int]) -> bool:
    """Whether a config belongs to its kernel, fits a device, and gives the bits that the problem demands."""
    if config.kernel == "quantised":
        return config == QUANTISED
    if config.kernel == "generic":
        fits = 1 <= config.blocks_per_sm <= 3 and tile_fits(spec, config.tile, capability)
        return fits and not variance(config, spec, capability)
    if variance(config, spec, capability):
        return False
    if config.kernel == "small":
        return config in (SMALL_32, SMALL_64) or (config == SMALL_DEEP and has_odd_lines(spec))
    if config.kernel == "hopper_fp8" and config.rows not in (64, 128, 192):
        return False
    broad = config.kernel == "hopper_fp8" and config.rows == 128 and trades_sides(spec)
    if config.columns != COLUMNS and not (config.columns == 192 and broad):
        return False
    if config.kernel == "hopper_fp8" and config.step > 16:  # the widths of low tiles (consume_fp8.cuh)
        return False
    if config.rows == LOW_ROWS and config != WEIGHTS_LOW:
        return False
    if config.kernel == "hopper_weights" and not least_weight_rows(spec) <= config.rows <= most_weight_rows(spec):
        return False
    if capability != (9, 0) or config.kernel == "small_list":
        return capability == (9, 0) and config in SMALL_LISTS
    if config.kernel == "hopper_gather" and config.cluster > (1 if picks_weights(spec) else 2):
        return False
    if config.kernel == "gathered":
        return shape_fits(replace(config, kernel="hopper"), gathered_spec(spec), capability)
    if config.kernel == "hopper" and picks_rows(spec):
        return False
    if config.kernel == "packed":
        spec = packed_spec(spec)
    if spec.compute not in HALVES and words_of(spec) and not _fits_words(config, spec):
        return False
    if spec.compute is torch.float64 and (config.pingpong or config.rows > 128):
        return False
    if has_gate(spec) and not (config.pingpong and config.rows <= most_gated_rows(spec)):
        return False
    return _runs_clusters(config, stages_plain(spec)) and spec.groups <= config.groups_at_most


def _fits_words(config: Config, spec: ProblemSpec) -> bool:
    """Whether wgmma has a config's widths for int8, and a thread has registers for weights that it transposes."""
    return config.step >= 16 and not (config.pingpong and turns_weights(spec))


def most_gated_rows(spec: ProblemSpec) -> int:
    """The largest number of rows of a tile with a gate, limited by registers: fewer if g and u are written too."""
    return 192 if spec.fused is None or spec.fused.preact is None else 128


def stages_plain(spec: ProblemSpec) -> bool:
    """Whether the staging has the size for plain results and gates, rather than for any epilogue."""
    return hopper_plain_kind(spec) > 0 or has_gate(spec)


def most_weight_rows(spec: ProblemSpec) -> int:
    """The largest number of rows of a tile of `hopper_weights`: sums of a block of k take as many registers again."""
    scale = spec.b.scale
    return 128 if scale is not None and scale.k and not folds_scales(spec) else 256


def least_weight_rows(spec: ProblemSpec) -> int:
    """The smallest number of rows of a tile of `hopper_weights`: in the lowest, a box of codes lies in one block of
    scales, if these do not multiply the weights."""
    scale, box = spec.b.scale, 128 if spec.b.packed else 64
    whole = scale is None or not scale.k or scale.k >= box or folds_scales(spec)
    return LOW_ROWS if whole else WEIGHTS_NARROW.rows


@cache
def _runs_clusters(config: Config, plain: bool) -> bool:
    """Whether a config belongs to a kernel of resident clusters, and fits with plain results or without.

    A ring whose stages have many heights (`stage_bytes` in pipeline.cuh) leaves up to one stage unused where it wraps,
    and consumers hold two: the current block and the one before it.
    """
    least = 3 if config.rows > 128 else 2
    turns = not config.pingpong or (config.kernel in TAKE_TURNS and config.rows <= 192 and plain)
    known = (
        config.rows in (*((LOW_ROWS,) if config.kernel == "hopper_weights" else ()), 64, 128, 192, 256)
        and config.cluster in (1, 2, 4)
        and config.step in (8, 16, 32, 64)
    )
    return turns and known and config.stages >= least and config.shared_bytes(plain) <= SHARED_LIMIT


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """The compute capability of a device; Hopper's for a device without one, so that configs can be listed on a
    laptop."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else (9, 0)
