"""How the forms look to the warp-specialised kernel: pure Python on specs and addresses.

The kernel knows three ways of cutting work into tiles. "rows": jagged rows, listed as records by a
small kernel that runs before it (jagged_m, masked, and jagged_n, which is jagged_m of the transposed
problem: C^T = B^T A^T). "batched" and "k": every group has the same tiles.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import torch

from multigemm.backends.triton.config import STRIP, Config, consumers, depth_of, part_of
from multigemm.planning.operands import Packed, Strided
from multigemm.problem.spec import OperandSpec, Order, ProblemSpec

TURNED = {"row": "col", "col": "row", "strided": "strided"}


def _turn(operand: OperandSpec) -> OperandSpec:
    return replace(operand, order=cast(Any, TURNED[operand.order]))


def packed_order(spec: ProblemSpec, name: str) -> Order:
    """How a copied operand lies: as before where the kernel takes that, which makes the copy a straight one.

    Jagged directions must run across the rows in memory; weights may lie either way. tf32 is multiplied
    along memory only.
    """
    if spec.compute == torch.float32:
        return "row" if name == "a" else "col"
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


def canonical(spec: ProblemSpec) -> ProblemSpec:
    """jagged_n as jagged_m of the transposed problem; other forms as they are."""
    if spec.form != "jagged_n":
        return spec
    c = None if spec.c is None else _turn(spec.c)
    return replace(spec, form="jagged_m", m=None, n=spec.m, a=_turn(spec.b), b=_turn(spec.a), out=_turn(spec.out), c=c)


def _turned(x: Strided | None) -> Strided | None:
    return None if x is None else Strided(x.ptr, x.group, x.col, x.row)


def canonical_shape(shape: Packed) -> Packed:
    """The same for addresses: operands change places, rows and columns too."""
    if shape.jagged != "n":
        return shape
    a, b, out = cast(Strided, _turned(shape.b)), cast(Strided, _turned(shape.a)), cast(Strided, _turned(shape.out))
    return Packed(shape.groups, shape.n, shape.m, shape.k, "m", a, b, out, _turned(shape.c), shape.bias)


def cut_of(spec: ProblemSpec) -> str:
    """How the kernel cuts work into tiles."""
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
    """Whether a tile is stored while the next one multiplies: its result waits in registers that must be free."""
    plain = spec.c is None and spec.bias is None and spec.activation != "gelu"
    kept = piece_of(config) * spec.out.dtype.itemsize
    return store_of(spec) == "tma" and plain and kept <= 512


def searchable(config: Config) -> int:
    """Groups whose sizes the loading warp can hold, and search by itself; three consumers leave it fewer registers."""
    return 128 if consumers(config) == 3 else 256


def searched(spec: ProblemSpec, config: Config) -> bool:
    """Whether the kernel finds its rows by itself: few groups."""
    return cut_of(spec) == "rows" and spec.groups <= searchable(config)


def listed(spec: ProblemSpec, config: Config) -> bool:
    """Whether a small kernel runs first, to list the tile rows."""
    return cut_of(spec) == "rows" and not searched(spec, config)


def drawn(spec: ProblemSpec, config: Config) -> bool:
    """Whether tiles are drawn from a counter. Those of a batch are all alike: they are dealt out."""
    return config.order == "drawn" and cut_of(spec) != "batched"


def start_multiple(spec: ProblemSpec) -> int:
    """Tiles of column-major rows start at multiples of 16 bytes: a copy may not start in between."""
    return 16 // spec.a.dtype.itemsize if cut_of(spec) == "rows" and spec.a.order == "col" else 1


def piece_of(config: Config) -> int:
    """Columns of one wgmma; with three consumers the assembler has no registers for 256 at once."""
    return min(config.block_n, 128) if consumers(config) == 3 else config.block_n


def boxes(spec: ProblemSpec, config: Config) -> dict[str, tuple[int, ...]]:
    """The box that one copy moves, per operand, outermost first."""
    columns, deep = piece_of(config), depth_of(spec)
    out = (1, 1, STRIP, part_of(config, spec))
    if spec.form == "jagged_k":
        return {"a_desc": (1, 1, deep, STRIP), "b_desc": (1, 1, deep, columns), "out_desc": out}
    a = (STRIP, deep) if spec.a.order == "row" else (deep, STRIP)
    b = (1, deep, columns) if spec.b.order == "row" else (1, columns, deep)
    return {"a_desc": a, "b_desc": b, "out_desc": out}


def fits(spec: ProblemSpec, shape: Packed) -> bool:
    """Whether strides that a spec does not hold fit the maps: groups a whole number of rows apart."""
    rows = [shape.a] if spec.form in ("batched", "masked") else []
    rows += [shape.out] if store_of(spec) == "tma" else []
    return all(x.group == 0 or (x.row > 0 and x.group % x.row == 0) for x in rows)


def aligned_stride(extent: int) -> int:
    """A legal row stride for a matrix of one row, whose own stride says nothing."""
    return max(8, -(-extent // 8) * 8)
