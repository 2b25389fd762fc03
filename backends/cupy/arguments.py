"""What kernels are handed: a problem packed byte by byte (`Problem` in kernels/common.cuh), and tensor maps.

Whatever a kernel must know at run time is in the first, so that extents, strides, addresses and epilogue never cause a
compilation. The maps tell the copy engine (TMA) where an operand lies; the host encodes them when a problem is bound.

Beside those of `multigemm.cuda.operand_maps` there are maps of weights with a gate, and of lines that begin anywhere
(`weight_maps`).
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch
from torch import Tensor

from multigemm.cuda.arguments import (
    ACTIVATION_CODES,
    JAGGED_CODES,
    Address,
    Fields,
    Slot,
    along,
    fields,
    join,
    tokens_at,
)
from multigemm.cuda.device import to_device
from multigemm.cuda.operand_maps import HEIGHTS, Side, plain_map
from multigemm.cuda.tensor_map import BLANK, NO_SWIZZLE, PROMOTION_128B, SIZE, encode_together, repeat
from multigemm.planning.operands import ABSENT, Operands, Packed, group_table

PROBLEM = struct.Struct("<" + "4q" * 5 + "3q2d3q12i")
ADDRESSES = (0, 32, 64, 96, 128, 160, 168)
"""The positions of a, b, out, c, bias, ends and valid rows in `Problem`."""
ROWS = 200
"""The position of m in `Problem`."""
TYPES = {torch.float16: 1, torch.bfloat16: 2, torch.float32: 3, torch.float64: 4, torch.int32: 5, None: 0}


def table_of(ops: Operands) -> Tensor | None:
    """The table of a list's groups on the device; None for packed forms."""
    return to_device(group_table(ops), ops.device) if ops.spec.form == "per_group" else None


def problem_bytes(ops: Operands, table: Tensor | None, view: Packed) -> Fields:
    """The bytes of `Problem` (kernels/common.cuh), the first argument of every kernel."""
    spec, a, b, out, c, bias = ops.spec, view.a, view.b, view.out, view.c or ABSENT, view.bias or ABSENT
    ends, end_bytes = _sizes(ops.ends, "ends")
    valid_rows, valid_bytes = _sizes(ops.valid_rows, "valid_rows")
    raw = PROBLEM.pack(
        *a, *b, *out, *c, *bias, ends, valid_rows, 0 if table is None else table.data_ptr(),
        float(ops.alpha), float(ops.beta), view.m, view.n, view.k, spec.groups, JAGGED_CODES[view.jagged],
        end_bytes == 8, ops.head, valid_bytes == 8, spec.zero_unowned, ACTIVATION_CODES[spec.activation],
        TYPES[spec.out.dtype], TYPES[None if spec.c is None else spec.c.dtype], TYPES[spec.bias],
        spec.alpha != "zero", spec.form == "batched" or spec.form == "masked",
    )  # fmt: skip
    addresses = zip(ADDRESSES, (a.ptr, b.ptr, out.ptr, c.ptr, bias.ptr, ends, valid_rows), strict=True)
    slots = [Slot(at, x.operand, x - x.base) for at, x in addresses if isinstance(x, Address)]
    return fields(raw, slots, tokens_at((view.m, view.n, view.k), ROWS))


def _sizes(tensor: Tensor | None, operand: str) -> tuple[int, int]:
    """The address of a tensor of sizes and the bytes of an element; zeros without one."""
    return (0, 0) if tensor is None else (Address(tensor.data_ptr(), operand), tensor.itemsize)


# Tensor maps.

BLANK_ROWS = bytes(SIZE * 15)
"""The placeholder for the maps of the other heights, if one map serves all."""


class Lines(NamedTuple):
    """Contiguous lines of `length` elements, `pitch` bytes apart, at any address."""

    ptr: int
    pitch: int
    number: int
    length: int
    dtype: torch.dtype


def stacked_maps(side: Side, height: int, count: int) -> Fields:
    """The maps of `count` matrices of a stack, each of a single matrix, with the boxes of `plain_map`."""
    alone = plain_map(side._replace(groups=1, group=0), height)
    if side.mn == 0 or side.k == 0:
        return join([alone] * count)
    return alone if count == 1 else repeat(alone, [side.group * i for i in range(count)])


def row_maps(side: Side) -> tuple[bytes, ...]:
    """The 16 maps of the row side: one per box height, or one and 15 blank ones if mn is contiguous."""
    maps = plain_map(side, *HEIGHTS)
    return (maps,) if side.k_contiguous else (maps, BLANK_ROWS)


def gate_map(side: Side, interleaved: bool) -> Fields:
    """A map of weights whose columns are those of g and of u, with an axis for which of the two.

    Boxes are 64 features by 64 k. `interleaved`: g and u side by side, where k is contiguous; else in halves.
    """
    if side.mn == 0 or side.k == 0 or side.groups == 0:
        return BLANK
    features, step, group = side.mn // 2, max(side.step, 16), max(side.group, 16)
    if side.k_contiguous:
        apart = (step, 2 * step) if interleaved else (features * step, step)
        extents, box = (side.k, 2, features, side.groups), (64, 1, 64, 1)
        return encode_together(side.dtype, side.ptr, extents, (*apart, group), (box,))
    extents, strides = (features, side.k, 2, side.groups), (step, features * side.dtype.itemsize, group)
    return encode_together(side.dtype, side.ptr, extents, strides, ((64, 64, 1, 1),), promotion=PROMOTION_128B)


def weight_maps(lines: Lines, inner: int, height: int) -> tuple[Fields, ...]:
    """Eight maps with boxes of `inner` elements by `height` lines, one for the lines of each residue modulo 8.

    Lines eight apart are a multiple of 16 bytes apart, whatever their pitch. Each map starts at the aligned address
    before its first line. A residue without lines gets the first map: what is read through it belongs to no column and
    no k.
    """
    if lines.number == 0 or lines.length == 0:
        return (BLANK,) * 8
    parts, strides = [], (max(8 * lines.pitch, 16), 16)
    for residue in range(8):
        count = (lines.number - residue + 7) // 8
        start = lines.ptr + (residue * lines.pitch if count > 0 else 0)
        extents = (start % 16 // lines.dtype.itemsize + lines.length, max(count, 1), 1)
        base, box = along(lines.ptr, start - start % 16), (inner, height, 1)
        modes = {"swizzle": NO_SWIZZLE, "promotion": PROMOTION_128B}  # a box's line is 1.5 or 2.5 times 128 bytes
        parts.append(encode_together(lines.dtype, base, extents, strides, (box,), **modes))
    return tuple(parts)


def piece_height(rows: int, most: int) -> int:
    """The rows of a group's pieces: as few equal pieces as `most` allows, rounded up to 8 (schedule.cuh)."""
    pieces = max(-(-rows // most), 1)
    return max((-(-rows // pieces) + 7) // 8 * 8, 8)


def list_box(rows: int, most: int, cluster: int) -> int:
    """The rows that each block of a cluster loads at once from a list's matrix (schedule.cuh)."""
    height = piece_height(rows, most)
    return -(-height // (8 * cluster)) * 8
