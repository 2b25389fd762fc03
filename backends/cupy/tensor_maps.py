"""Tensor maps: how the copy engine (TMA) sees an operand. Encoded on the host, when a problem is bound.

A box is 64 elements (128 bytes, the swizzle's width) along the contiguous direction, but for the last of five kinds:

* an operand with k contiguous: dims (k, mn, group), boxes of 64 k by some rows of mn;
* an operand with mn contiguous: dims (mn, k, group), boxes of 64 mn by 64 k;
* the same for jagged k: dims (mn, k', end, wrap). A group's last block of k must end in zeros although
  the next group's rows follow in memory, so k' counts back from the group's end: k' = FAR - left lies
  inside the extent FAR while `left` > 0 and outside after it, where TMA fills in zeros. The address,
  base + wrap * FAR + (k' + end) * step, is brought back by `wrap`, whose stride times FAR is
  -FAR * step modulo 2^64;
* results, which the copy engine stores: the same for their rows, since a piece ends at any row;
* lines that begin anywhere, by eight maps: see `eighths`.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from multigemm.cuda.arguments import Fields, along, join
from multigemm.cuda.tensor_map import BLANK, NO_SWIZZLE, SIZE, encode_together, repeat

FAR = 1 << 30
EDGE = 0x7FFF0000
HEIGHTS = tuple((64, 8 * (i + 1), 1) for i in range(16))
"""The boxes of rows of each height."""
BLANK_ROWS = bytes(SIZE * 15)
"""Instead of the maps of the other heights, where one map serves all."""


class Side(NamedTuple):
    """An operand as its role sees it: `mn` is its row or column extent, strides in bytes."""

    ptr: int
    mn: int
    k: int
    groups: int
    step: int
    group: int
    k_contiguous: bool
    dtype: torch.dtype


class Lines(NamedTuple):
    """Contiguous lines of `length` elements, `pitch` bytes apart, at any address."""

    ptr: int
    pitch: int
    number: int
    length: int
    dtype: torch.dtype


def plain(side: Side, rows: int) -> Fields:
    """A map with boxes of `rows` of mn where k is contiguous, else of 64 mn by 64 k."""
    return _plain(side, ((64, rows, 1),))


def _plain(side: Side, boxes: tuple[tuple[int, ...], ...]) -> Fields:
    """A map for each of the boxes where k is contiguous, else one of 64 mn by 64 k."""
    if side.mn == 0 or side.k == 0 or side.groups == 0:
        return join([BLANK] * (len(boxes) if side.k_contiguous else 1))  # nothing will ever be loaded through it
    strides = side.step if side.step > 16 else 16, side.group if side.group > 16 else 16
    if side.k_contiguous:
        return encode_together(side.dtype, side.ptr, (side.k, side.mn, side.groups), strides, boxes)
    return encode_together(side.dtype, side.ptr, (side.mn, side.k, side.groups), strides, ((64, 64, 1),))


def each(side: Side, height: int, count: int) -> Fields:
    """The maps of `count` matrices of a stack, each as if it stood alone: with `plain`'s boxes."""
    alone = plain(side._replace(groups=1, group=0), height)
    if side.mn == 0 or side.k == 0:
        return join([alone] * count)
    return alone if count == 1 else repeat(alone, [side.group * i for i in range(count)])


def rows(side: Side) -> tuple[bytes, ...]:
    """Of the row side 16 maps: one for each box height, or one and 15 blank ones where mn is contiguous."""
    return (_plain(side, HEIGHTS),) if side.k_contiguous else (_plain(side, HEIGHTS), BLANK_ROWS)


def ragged(side: Side) -> Fields:
    """A map for jagged k (see the module docstring); mn is contiguous."""
    if side.mn == 0 or side.k == 0:
        return BLANK
    step = max(side.step, 16)
    extents, strides = (side.mn, FAR, EDGE, EDGE), (step, step, 2**35 - step)
    return encode_together(side.dtype, side.ptr, extents, strides, ((64, 64, 1, 1),))


def results(side: Side) -> Fields:
    """A map for stores of boxes of 64 rows by 64 columns (`mn`), that stop at any row.

    Dims (mn, rows', end, wrap, group): as in `ragged`, rows' = FAR - left lies inside the extent while rows are left.
    """
    if side.mn == 0 or side.k == 0 or side.groups == 0:
        return BLANK
    step = max(side.step, 16)
    extents, strides = (side.mn, FAR, EDGE, EDGE, side.groups), (step, step, 2**35 - step, max(side.group, 16))
    return encode_together(side.dtype, side.ptr, extents, strides, ((64, 64, 1, 1, 1),))


def eighths(lines: Lines, inner: int, height: int) -> tuple[Fields, ...]:
    """Eight maps with boxes of `inner` elements by `height` lines: one for the lines of each residue modulo 8.

    Lines eight apart are a multiple of 16 bytes apart whatever their pitch. Each map begins at the aligned address
    before its first line. A residue without any line gets the first one's: what it reads belongs to no column and no k.
    """
    if lines.number == 0 or lines.length == 0:
        return (BLANK,) * 8
    parts, strides = [], (max(8 * lines.pitch, 16), 16)
    for residue in range(8):
        count = (lines.number - residue + 7) // 8
        start = lines.ptr + (residue * lines.pitch if count > 0 else 0)
        extents = (start % 16 // lines.dtype.itemsize + lines.length, max(count, 1), 1)
        base = along(lines.ptr, start - start % 16)
        parts.append(encode_together(lines.dtype, base, extents, strides, ((inner, height, 1),), swizzle=NO_SWIZZLE))
    return tuple(parts)


def piece_height(rows: int, most: int) -> int:
    """Rows of a group's pieces: as few pieces as `most` allows, equal, rounded up to 8 (schedule.cuh)."""
    pieces = max(-(-rows // most), 1)
    return max((-(-rows // pieces) + 7) // 8 * 8, 8)


def list_box(rows: int, most: int, cluster: int) -> int:
    """Rows that each block of a cluster loads at once from a list's matrix (schedule.cuh)."""
    height = piece_height(rows, most)
    return -(-height // (8 * cluster)) * 8
