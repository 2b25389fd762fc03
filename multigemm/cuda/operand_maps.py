"""Tensor maps of operands that a kernel multiplies in boxes of 128 bytes, and of results: as cupy and numba have them.

A box is 128 bytes (the swizzle's width), so 64 elements of 16 bits, along the contiguous direction. Four kinds:

* an operand with k contiguous: dims (k, mn, group), boxes of 64 k by some rows of mn;
* an operand with mn contiguous: dims (mn, k, group), boxes of 64 mn by 64 k (of 4 bytes 32 by 32, of 8 bytes 16 by 16);
* the same for jagged k: dims (mn, k', end, wrap). A group's last block of k must end in zeros although
  the next group's rows follow in memory, so k' counts back from the group's end: k' = FAR - left lies
  inside the extent FAR while `left` > 0 and outside after it, where TMA fills in zeros. The address,
  base + wrap * FAR + (k' + end) * step, is brought back by `wrap`, whose stride times FAR is
  -FAR * step modulo 2^64;
* results, which the copy engine stores: the same for their rows, since a piece ends at any row.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from multigemm.cuda.arguments import Fields, join
from multigemm.cuda.tensor_map import BLANK, PROMOTION_128B, encode_together

FAR = 1 << 30
"""In maps that count back from an end: the position of the end, behind which nothing is read or written. So no group
has more of a jagged k."""
EDGE = 0x7FFF0000
"""The extent of a dimension of a map in which nothing ends."""
LINE_BYTES = 128
"""Bytes of a line of a box."""
HEIGHTS = tuple(range(8, 129, 8))
"""Rows of the boxes that the row side comes in."""


class Side(NamedTuple):
    """One operand in its role: `mn` is its row or column extent; strides are in bytes."""

    ptr: int
    mn: int
    k: int
    groups: int
    step: int
    group: int
    k_contiguous: bool
    dtype: torch.dtype


def side_of(
    ptr: int, step: int, group: int, mn: int, k: int, groups: int, k_contiguous: bool, dtype: torch.dtype
) -> Side:
    """An operand whose lines are `step` elements apart and its matrices `group`; 0 if all groups share one."""
    size = dtype.itemsize
    return Side(ptr, mn, k, groups if group else 1, step * size, group * size, k_contiguous, dtype)


@cache
def _boxes(line: int, heights: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple((line, height, 1) for height in heights)


def plain_map(side: Side, *heights: int) -> Fields:
    """Maps with boxes of so many rows of mn, one for each height, if k is contiguous; else one map with boxes of one
    line of mn by as many k."""
    if side.mn == 0 or side.k == 0 or side.groups == 0:
        return join([BLANK] * (len(heights) if side.k_contiguous else 1))  # nothing will ever be loaded through it
    strides = side.step or 16, side.group or 16  # a stride that is never multiplied is 0
    line = LINE_BYTES // side.dtype.itemsize
    if side.k_contiguous:
        return encode_together(side.dtype, side.ptr, (side.k, side.mn, side.groups), strides, _boxes(line, heights))
    across = (side.mn, side.k, side.groups), strides, _boxes(line, (line,))
    return encode_together(side.dtype, side.ptr, *across, promotion=PROMOTION_128B)


def ragged_map(side: Side) -> Fields:
    """A map for jagged k with mn contiguous (see the module docstring)."""
    if side.mn == 0 or side.k == 0:
        return BLANK
    step, line = side.step or 16, LINE_BYTES // side.dtype.itemsize
    extents, strides = (side.mn, FAR, EDGE, EDGE), (step, step, 2**35 - step)
    return encode_together(side.dtype, side.ptr, extents, strides, ((line, line, 1, 1),))


def result_map(side: Side) -> Fields:
    """A map for stores that stop at any row, in boxes of 64 rows by 64 columns (`mn`), or 32 by 32 of 4 bytes.

    Dims (mn, rows', end, wrap, group); as in `ragged_map`, rows' = FAR - left lies inside the extent while rows are
    left.
    """
    if side.mn == 0 or side.k == 0 or side.groups == 0:
        return BLANK
    step = side.step or 16
    extents, strides = (side.mn, FAR, EDGE, EDGE, side.groups), (step, step, 2**35 - step, side.group or 16)
    line = LINE_BYTES // side.dtype.itemsize
    return encode_together(side.dtype, side.ptr, extents, strides, ((line, line, 1, 1, 1),))
