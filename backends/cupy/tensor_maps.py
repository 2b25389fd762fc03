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

import ctypes
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from multigemm.cuda.driver import check, library

FAR = 1 << 30
EDGE = 0x7FFF0000
TYPES = {torch.float16: 6, torch.bfloat16: 9}  # CU_TENSOR_MAP_DATA_TYPE_*
NO_SWIZZLE, SWIZZLE_128B, PROMOTION_256B = 0, 3, 3
SIZE = 128
BLANK = bytes(SIZE)


@dataclass(frozen=True, slots=True)
class Side:
    """An operand as its role sees it: `mn` is its row or column extent, strides in bytes."""

    ptr: int
    mn: int
    k: int
    groups: int
    step: int
    group: int
    k_contiguous: bool
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Lines:
    """Contiguous lines of `length` elements, `pitch` bytes apart, at any address."""

    ptr: int
    pitch: int
    count: int
    length: int
    dtype: torch.dtype


def encode(
    dtype: torch.dtype,
    ptr: int,
    dims: tuple[int, ...],
    strides: tuple[int, ...],
    box: tuple[int, ...],
    swizzle: int = SWIZZLE_128B,
) -> bytes:
    """One tensor map; raises LibraryError where the driver refuses it."""
    sizes, steps, boxes, ones = _arrays(len(dims))
    sizes[:], steps[:], boxes[:] = dims, strides, box
    buffer = ctypes.create_string_buffer(SIZE + 64)
    start = (ctypes.addressof(buffer) + 63) // 64 * 64
    code = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(start), TYPES[dtype], len(dims), ctypes.c_void_p(ptr), sizes, steps, boxes, ones,
        0, swizzle, PROMOTION_256B, 0,
    )  # fmt: skip
    if code:
        check(code, f"cuTensorMapEncodeTiled(dims={dims}, strides={strides}, box={box})")
    return ctypes.string_at(start, SIZE)


def _arrays(rank: int) -> tuple[Any, Any, Any, Any]:
    return (
        (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * (rank - 1))(),
        (ctypes.c_uint32 * rank)(), (ctypes.c_uint32 * rank)(*([1] * rank)),
    )  # fmt: skip


@lru_cache(maxsize=4096)
def plain(side: Side, rows: int) -> bytes:
    """A map with boxes of `rows` of mn where k is contiguous, else of 64 mn by 64 k.

    Remembered: an allocator hands out the same addresses again, so a loop of calls encodes few maps.
    """
    if min(side.mn, side.k, side.groups) == 0:
        return BLANK  # nothing will ever be loaded through it
    step, group = max(side.step, 16), max(side.group, 16)
    if side.k_contiguous:
        return encode(side.dtype, side.ptr, (side.k, side.mn, side.groups), (step, group), (64, rows, 1))
    return encode(side.dtype, side.ptr, (side.mn, side.k, side.groups), (step, group), (64, 64, 1))


def ragged(side: Side) -> bytes:
    """A map for jagged k (see the module docstring); mn is contiguous."""
    if min(side.mn, side.k) == 0:
        return BLANK
    step = max(side.step, 16)
    return encode(side.dtype, side.ptr, (side.mn, FAR, EDGE, EDGE), (step, step, 2**35 - step), (64, 64, 1, 1))


@lru_cache(maxsize=1024)
def results(side: Side) -> bytes:
    """A map for stores of boxes of 64 rows by 64 columns (`mn`), that stop at any row.

    Dims (mn, rows', end, wrap, group): as in `ragged`, rows' = FAR - left lies inside the extent while rows are left.
    """
    if min(side.mn, side.k, side.groups) == 0:
        return BLANK
    step = max(side.step, 16)
    dims, strides = (side.mn, FAR, EDGE, EDGE, side.groups), (step, step, 2**35 - step, max(side.group, 16))
    return encode(side.dtype, side.ptr, dims, strides, (64, 64, 1, 1, 1))


@lru_cache(maxsize=4096)
def eighths(lines: Lines, inner: int, height: int) -> bytes:
    """Eight maps with boxes of `inner` elements by `height` lines: one for the lines of each residue modulo 8.

    Lines eight apart are a multiple of 16 bytes apart whatever their pitch. Each map begins at the aligned address
    before its first line. A residue without any line gets the first one's: what it reads belongs to no column and no k.
    """
    if min(lines.count, lines.length) == 0:
        return BLANK * 8
    text = b""
    for residue in range(8):
        count = (lines.count - residue + 7) // 8
        start = lines.ptr + residue * lines.pitch if count > 0 else lines.ptr
        dims = (start % 16 // lines.dtype.itemsize + lines.length, max(count, 1), 1)
        steps = (max(8 * lines.pitch, 16), 16)
        text += encode(lines.dtype, start // 16 * 16, dims, steps, (inner, height, 1), NO_SWIZZLE)
    return text


def piece_height(rows: int, most: int) -> int:
    """Rows of a group's pieces: as few pieces as `most` allows, equal, rounded up to 8 (schedule.cuh)."""
    pieces = max(-(-rows // most), 1)
    return max((-(-rows // pieces) + 7) // 8 * 8, 8)


def list_box(rows: int, most: int, cluster: int) -> int:
    """Rows that each block of a cluster loads at once from a list's matrix (schedule.cuh)."""
    height = piece_height(rows, most)
    return -(-height // (8 * cluster)) * 8
