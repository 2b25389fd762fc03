"""Tensor maps: how TMA is told where an operand lies. Encoded by the driver, from plain numbers.

A map is 128 bytes. Every operand is described with three dimensions (contiguous, the other one,
group); a dimension of one element gets a stride that TMA accepts, since it is never multiplied.
"""

from __future__ import annotations

import ctypes
from ctypes import c_uint32, c_uint64, c_void_p
from functools import cache
from typing import Any

from multigemm.cuda.driver import check, library

MAP_BYTES = 128
GRANULE = 16
DATA_TYPE = {"f16": 6, "f32": 7, "bf16": 9}
SWIZZLE_128B, PROMOTE_256B, NO_INTERLEAVE, FILL_ZEROS = 3, 3, 0, 0


@cache
def _encode() -> Any:
    return library().cuTensorMapEncodeTiled


def encode(
    name: str, size: int, address: int, extents: tuple[int, int, int], strides: tuple[int, int], box: tuple[int, int]
) -> bytes:
    """The map of [group, other, contiguous] elements of `size` bytes; strides (other, group) in elements.

    `box` is (contiguous, other); its first extent times `size` is 128 bytes, the width of the swizzle.
    An operand without elements is described as one granule, which no kernel ever loads.
    """
    if min(extents) <= 0 or address == 0:
        raise ValueError(f"a tensor map needs elements and an address, not extents {extents} at {address:#x}")
    row = -(-extents[0] * size // GRANULE) * GRANULE
    pitch = strides[0] * size if extents[1] > 1 else row
    group = strides[1] * size if extents[2] > 1 else max(pitch * extents[1], row)
    target = (ctypes.c_uint8 * (MAP_BYTES + 64))()
    where = -(-ctypes.addressof(target) // 64) * 64
    code = _encode()(
        c_void_p(where), DATA_TYPE[name], 3, c_void_p(address), (c_uint64 * 3)(*extents),
        (c_uint64 * 2)(pitch, group), (c_uint32 * 3)(*box, 1), (c_uint32 * 3)(1, 1, 1),
        NO_INTERLEAVE, SWIZZLE_128B, PROMOTE_256B, FILL_ZEROS,
    )  # fmt: skip
    check(code, f"cuTensorMapEncodeTiled(extents={extents}, strides={strides}, box={box})")
    return ctypes.string_at(where, MAP_BYTES)
