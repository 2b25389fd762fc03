"""The choices that a kernel leaves open, as frozen values, and the one predicate that judges them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import torch

from multigemm.spec import OperandSpec, Order, ProblemSpec

COLUMNS = 128
"""Columns of a result that one thread block of the Hopper kernel owns."""
MAX_GROUPS, TURNS_GROUPS = 960, 448
"""Groups that the Hopper kernel's schedule holds; those that it holds where the stages leave it less room."""
SHARED_LIMIT = 232448
"""Bytes of shared memory that one thread block may have on compute capability 9.0."""


@dataclass(frozen=True, slots=True)
class Config:
    """One way to run a problem.

    `portable` takes any problem, in tiles of `tile` squared, with `blocks_per_sm` resident blocks. `hopper`
    cuts a group's rows into pieces of at most `rows`, whose width on wgmma's n side is a multiple of
    `step`; `stages` blocks of 64 k are in flight, or more of lower pieces; `cluster` thread blocks share their
    rows; `pingpong`: the two warpgroups of a block work on a tile each, not together on one, so that one stores
    while the other multiplies. `packed` copies the operands that TMA cannot read and then runs `hopper` on the
    copies. `direct` copies the rows at most and shifts the weights into place itself. `small` gives each
    tile of `tile` squared a thread block of its own.
    `wave` gives a thread block to each tile of a list or batch, laid out by the host; `rows` 0 leaves their height
    to it, which knows all sizes.
    """

    kernel: Literal["portable", "hopper", "packed", "direct", "small", "wave"] = "portable"
    blocks_per_sm: int = 2
    tile: int = 128
    rows: int = 0
    stages: int = 0
    cluster: int = 1
    step: int = 16
    pingpong: bool = False

    def shared_bytes(self, plain: bool) -> int:
        """Dynamic shared memory of the Hopper kernel, and of the one that shifts its weights."""
        weights = COLUMNS * (144 if self.kernel == "direct" else 128)
        schedule = 16 * self.groups_at_most + 1024 + 768
        return self.stages * (weights + self.rows * 128) + 2 * (8192 if plain else 9216) + schedule

    @property
    def groups_at_most(self) -> int:
        """What its share of the shared memory lets the schedule hold."""
        full = self.pingpong or (self.kernel == "direct" and self.rows == DIRECT.rows)
        return TURNS_GROUPS if full else MAX_GROUPS


PORTABLE = Config(blocks_per_sm=1)
SMALL = Config(blocks_per_sm=3, tile=64)
WIDE = Config("hopper", rows=256, stages=4, cluster=2)
MIDDLE = Config("hopper", rows=128, stages=6, cluster=2)
NARROW = Config("hopper", rows=64, stages=8, cluster=2)
SINGLE = Config("hopper", rows=128, stages=6, cluster=1)
SLIM = Config("hopper", rows=64, stages=8, cluster=1)
TURNS = Config("hopper", rows=192, stages=5, cluster=2, pingpong=True)
ALONE = Config("hopper", rows=256, stages=4, cluster=1)
DIRECT = Config("direct", rows=256, stages=4, cluster=2, step=8)
DIRECT_MIDDLE = Config("direct", rows=128, stages=5, cluster=2, step=8)
DIRECT_NARROW = Config("direct", rows=64, stages=7, cluster=2, step=8)
WAVE = Config("wave")
WAVES = (WAVE, *(Config("wave", rows=r, stages=s) for r, s in ((64, 8), (96, 7), (128, 6), (192, 5), (256, 4))))
CUBE = Config("small", tile=32)
CUBE64 = Config("small", tile=64)
ONE_WAVE = 160
"""Tiles of the small kernel that run at once, with room for the rounding of totals to powers of two."""
RESIDENT, ROUNDS, FULL_ROWS, WAVE_WORK = 264, 528, 192, 1 << 34
"""Tiles of 128 x 128 up to which the wave kernel is faster; of 256 x 128, rows and products, if nothing is copied."""
LIST, CUBE_ROWS = 16, 8192
"""Groups of a list that the small kernel takes as an argument; rows from which tiles this small only lose."""

PROCESSORS = 132
"""Up to here tall tiles would leave some of them idle: lower ones, each block on its own."""
SMALL_ROWS, SMALL_COLUMNS = 2048, 1024
"""Below these a result has fewer tiles than the GPU has processors: small tiles, no clusters."""
WORTH_COPYING = 1 << 24
"""Products (rows x columns x k) from which a copy costs less than the portable kernel."""
SPARSE_ROWS, FEW_ROWS = 32, 1024
"""Rows per group up to which weights that are shifted as they are read want low tiles and many stages; up to which they
are shifted at all: more rows repay a copy of the weights."""
SHORT_K, BRIEF_K = 768, 128
"""Up to here a list's odd operands are copied for the wave kernel, whatever the tiles; small tiles beat a wave."""
MAX_ROWS = 1 << 30
"""Rows of a result that the copy engine can tell apart."""
FEW_COLUMNS, LONG_K = 15, 2048
"""Odd numbers of blocks of columns up to which clusters of two would waste too much; k from which tiles of few rows are
as high as for many: then a large group's weights are read once."""
MANY_ROWS = 448
"""Rows per group from which warpgroups take turns: lower tiles read weights more often, but hide their stores."""


def is_swapped(spec: ProblemSpec) -> bool:
    """Whether the rows of the result lie on the weight side: where they are contiguous, or jagged n."""
    return spec.form == "jagged_n" or (spec.form in ("batched", "per_group", "jagged_k") and spec.out.order == "col")


def plain_kind(spec: ProblemSpec) -> int:
    """0: any epilogue. alpha * A @ B in the operands' type: 1 along contiguous columns (see is_swapped), 2 rows."""
    plain = spec.c is None and spec.bias is None and spec.activation is None and spec.out.dtype == spec.compute
    along = "col" if is_swapped(spec) else "row"
    return 0 if not plain or spec.out.order == "strided" else 1 if spec.out.order == along else 2


def sends(spec: ProblemSpec) -> bool:
    """Whether the copy engine stores the results: plain ones, in rows of whole 16-byte pieces.

    Where the rows are jagged, k must be contiguous in them: then no piece begins with rows of another group.
    """
    columns, x, along = (spec.m, spec.b, "col") if is_swapped(spec) else (spec.n, spec.a, "row")
    jagged_rows = spec.form in ("jagged_m", "jagged_n")
    known = spec.form != "per_group" and not (jagged_rows and (x.order != along or spec.total > MAX_ROWS))
    return known and plain_kind(spec) == 1 and spec.out.align == 16 and (columns or 1) % 8 == 0


def hopper_reasons(spec: ProblemSpec) -> list[str]:
    """Why the Hopper kernel cannot run a spec; the portable one can."""
    reasons = []
    if spec.compute not in (torch.float16, torch.bfloat16):
        reasons.append(f"{spec.compute} operands")
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if operand.order == "strided" or operand.align < 16 or not operand.dense:
            reasons.append(
                f"{name} is {operand.order}, aligned to {operand.align} bytes: TMA needs a contiguous direction and 16"
            )
    if spec.groups > MAX_GROUPS or spec.groups == 0:
        reasons.append(f"{spec.groups} groups: its schedule holds 1 to {MAX_GROUPS}")
    if spec.form == "jagged_k" and not (spec.a.order == "col" and spec.b.order == "row"):
        reasons.append("jagged k is the contiguous direction of an operand, where a group may start at any address")
    if spec.form == "masked" and spec.out.order == "col":
        reasons.append("a masked result stored by columns")
    return reasons


def small_reasons(spec: ProblemSpec) -> list[str]:
    """Why the small kernel cannot run a spec."""
    half = spec.compute in (torch.float16, torch.bfloat16)
    reasons = [] if half else [f"{spec.compute} operands: it takes float16 and bfloat16"]
    for name, operand in (("a", spec.a), ("b", spec.b)):
        if operand.order == "strided" or operand.align < 16:
            reasons.append(f"{name} is {operand.order}, aligned to {operand.align} bytes: 16-byte copies need 16")
    inner = {"jagged_m": spec.a.order == "col", "jagged_n": spec.b.order == "row"}.get(spec.form, False)
    if inner or (spec.form == "jagged_k" and not (spec.a.order == "col" and spec.b.order == "row")):
        reasons.append("the jagged direction is contiguous in an operand, where a group may start at any address")
    if spec.form == "per_group" and (spec.groups > LIST or plain_kind(spec) != 1 or is_swapped(spec)):
        reasons.append(f"a list of {spec.groups} groups: at most {LIST}, without epilogue, results by rows")
    if spec.groups == 0 or spec.total > CUBE_ROWS or spec.groups > CUBE_ROWS or max(spec.m or 0, spec.n or 0) > 1 << 20:
        reasons.append(
            f"{spec.groups} groups, T<={spec.total}, m={spec.m}, n={spec.n}: 1 to {CUBE_ROWS} and 2^20 at most"
        )
    return reasons


def _copy_reasons(spec: ProblemSpec, copied: ProblemSpec) -> list[str]:
    """Why operands that differ from their copies cannot be copied."""
    pairs = (("a", spec.a, copied.a), ("b", spec.b, copied.b))
    wide = [name for name, old, new in pairs if old.wide and old != new]
    return [f"{name} has 2^31 elements or more, which are not copied: kernel='portable' reads it" for name in wide]


def wave_reasons(spec: ProblemSpec) -> list[str]:
    """Why the kernel for one wave of a list or batch cannot run a spec; operands that TMA cannot read are copied."""
    copied = packed_spec(spec)
    reasons = [*hopper_reasons(copied), *_copy_reasons(spec, copied)]
    if spec.form not in ("per_group", "batched") or spec.groups > LIST:
        reasons.append(f"{spec.groups} groups of {spec.form}: it takes a list or a batch of at most {LIST}")
    if plain_kind(spec) != 1 or is_swapped(spec):
        reasons.append("an epilogue, or a result by columns: it stores plain results by rows")
    return reasons


def packed_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec after the operands that TMA cannot read have been copied."""
    a, b = (_packed(spec, spec.a, "col"), _packed(spec, spec.b, "row"))
    return spec if (a, b) == (spec.a, spec.b) else replace(spec, a=a, b=b)


def _packed(spec: ProblemSpec, operand: OperandSpec, ragged: Order) -> OperandSpec:
    order: Order = ragged if spec.form == "jagged_k" else "row" if operand.order == "strided" else operand.order
    readable = operand.align == 16 and operand.dense and operand.order == order
    return operand if readable else replace(operand, order=order, align=16, dense=True)


def packed_reasons(spec: ProblemSpec) -> list[str]:
    """Why copying first does not help a spec."""
    copied = packed_spec(spec)
    reasons = [*hopper_reasons(copied), *_copy_reasons(spec, copied)]
    if copied is spec:
        reasons.append("nothing needs copying")
    return reasons


def direct_spec(spec: ProblemSpec) -> ProblemSpec:
    """The spec after the rows have been copied, where TMA cannot read them; the weights stay."""
    rows = "b" if is_swapped(spec) else "a"
    return replace(spec, **{rows: getattr(packed_spec(spec), rows)})


def direct_reasons(spec: ProblemSpec) -> list[str]:
    """Why the kernel that shifts its weights cannot, or need not, run a spec."""
    weights = "a" if is_swapped(spec) else "b"
    given, copied = getattr(spec, weights), direct_spec(spec)
    readable = replace(given, align=16, dense=True)
    reasons = hopper_reasons(replace(copied, **{weights: readable}))
    if given == readable:
        reasons.append("nothing needs shifting")
    if spec.form == "jagged_k":
        reasons.append("jagged k: both operands are copied")
    return [*reasons, *_copy_reasons(spec, copied)]


def is_valid(config: Config, spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> bool:
    """Whether `config` runs `spec` on a device: the limits of shared memory and registers included."""
    if config.kernel == "portable":
        return 1 <= config.blocks_per_sm <= 3 and config.tile in (64, 128)
    if config.kernel == "small":
        return config.tile in (32, 64) and not small_reasons(spec)
    if config.kernel == "wave":
        return config in WAVES and capability == (9, 0) and not wave_reasons(spec)
    known = config.rows in (64, 128, 192, 256) and config.stages >= 2
    fits = known and config.shared_bytes(plain_kind(spec) > 0) <= SHARED_LIMIT
    shape = config.cluster in (1, 2, 4) and config.step in (8, 16, 32, 64)
    shape = shape and spec.groups <= config.groups_at_most
    shape = shape and (not config.pingpong or (config.rows <= 192 and plain_kind(spec) > 0))
    check = {"packed": packed_reasons, "direct": direct_reasons}.get(config.kernel, hopper_reasons)
    reasons = check(spec)
    return fits and shape and capability == (9, 0) and not reasons


def heuristic(spec: ProblemSpec, capability: tuple[int, int] = (9, 0)) -> Config:
    """The best guess without measuring: the first valid one of `_order`."""
    return next(c for c in _order(spec) if is_valid(c, spec, capability))


def _order(spec: ProblemSpec) -> list[Config]:
    """All configs, the best guess first: pieces as high as the average group; copies only where they pay."""
    small, wave = _small_order(spec), _wave_order(spec)
    first = (*wave, *small) if (spec.k or spec.largest) > BRIEF_K else (*small, *wave)
    rest = (DIRECT, DIRECT_MIDDLE, DIRECT_NARROW, CUBE, CUBE64, *WAVES)
    return list(dict.fromkeys((*first, *_larger(spec), *rest)))


def _wave_order(spec: ProblemSpec) -> list[Config]:
    """A block for each tile, where few rounds of blocks take all of them; lists may hide larger columns than rows."""
    columns, k = max(spec.n or spec.largest, 1), spec.k or spec.largest
    rows = _rows_per_group(spec)
    if spec.total == 0 or rows < 64 or wave_reasons(spec):
        return []
    low, high = (max(-(-spec.total // tile), spec.groups) * -(-columns // COLUMNS) for tile in (128, 256))
    if hopper_reasons(spec):
        return [WAVE] if low <= RESIDENT or k <= SHORT_K else []
    several = high <= ROUNDS and rows >= FULL_ROWS and spec.total * columns * k <= WAVE_WORK
    return [WAVE] if low <= RESIDENT or several else []


def _small_order(spec: ProblemSpec) -> list[Config]:
    """The small kernel where one wave of its tiles is enough and k is short, the larger tile for the longer k."""
    rows = spec.total if spec.form not in ("jagged_n", "jagged_k") else (spec.m or 0) * spec.groups
    cols = spec.total if spec.form == "jagged_n" else spec.n
    k = spec.total // max(spec.groups, 1) if spec.form == "jagged_k" else spec.k
    if not rows or not cols or k is None or small_reasons(spec):
        return []
    tiles = {c: (rows // c.tile + spec.groups) * -(-cols // c.tile) for c in (CUBE, CUBE64)}
    if tiles[CUBE] <= ONE_WAVE and k <= 512:
        return [CUBE, CUBE64]
    return [CUBE64, CUBE] if tiles[CUBE64] <= ONE_WAVE and k <= 256 else []


def _larger(spec: ProblemSpec) -> list[Config]:
    fast, rows = _hopper_order(spec), _rows_per_group(spec)
    copied = replace(fast[0] if rows > FEW_ROWS else next(c for c in fast if not c.pingpong), kernel="packed")
    work = spec.total * (spec.n or 256) * (spec.k or 256)
    if work >= WORTH_COPYING:
        shifted = DIRECT_MIDDLE if rows <= SPARSE_ROWS else DIRECT
        few = (spec.total // max(spec.groups, 1)) <= FEW_ROWS
        return [*fast, *((shifted, copied) if few else (copied, shifted)), PORTABLE, SMALL]
    return [*fast, SMALL, PORTABLE, copied] if spec.total <= SMALL_ROWS else [*fast, PORTABLE, SMALL, copied]


def _rows_per_group(spec: ProblemSpec) -> int:
    """What is known of them before any size is: the mean; a whole tile where the jagged direction is another."""
    return spec.total // max(spec.groups, 1) if spec.form != "jagged_k" else WIDE.rows


def _tall_tiles(spec: ProblemSpec, rows: int) -> int:
    """Tiles of 256 rows and 128 columns, if all groups have as many rows; enough of them for jagged k."""
    pieces = -(-rows // WIDE.rows) * spec.groups if spec.form != "jagged_k" else PROCESSORS + 1
    return pieces * _columns(spec)


def _columns(spec: ProblemSpec) -> int:
    """Blocks of columns that a result has; a cluster of two leaves the last of an odd number of them alone."""
    return max(-(-((spec.m if is_swapped(spec) else spec.n) or spec.largest) // COLUMNS), 1)


def _hopper_order(spec: ProblemSpec) -> list[Config]:
    if spec.total <= SMALL_ROWS and (spec.n or 0) <= SMALL_COLUMNS and spec.form != "jagged_k":
        return [SINGLE, SLIM, WIDE] if spec.form == "per_group" or spec.total > 1024 else [SLIM, SINGLE, WIDE]
    rows = _rows_per_group(spec)
    if rows > 64 and _tall_tiles(spec, rows) <= PROCESSORS:
        return [SINGLE, SLIM, WIDE]
    if rows <= 32:
        return [SINGLE, NARROW, MIDDLE, WIDE]
    if rows <= 64 and (spec.k or spec.largest) < LONG_K:
        return [MIDDLE, WIDE, NARROW]
    columns = _columns(spec)
    odd = [ALONE] if columns % 2 and columns <= FEW_COLUMNS and spec.form != "jagged_k" else []
    turns = [TURNS] if plain_kind(spec) and spec.groups <= TURNS_GROUPS else []
    first = turns if (rows > MANY_ROWS or spec.form == "jagged_k") and not sends(spec) else []
    return list(dict.fromkeys((*odd, *first, WIDE, *turns, ALONE, MIDDLE, NARROW)))


def candidates(spec: ProblemSpec, device: torch.device) -> list[Config]:
    """Every shipped config that is valid for `spec`, the best guess first."""
    capability = capability_of(device)
    return [c for c in _order(spec) if is_valid(c, spec, capability)]


@cache
def capability_of(device: torch.device) -> tuple[int, int]:
    """A device's; Hopper's where there is none to ask, so that configs can be listed on a laptop."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" and torch.cuda.is_available() else (9, 0)
