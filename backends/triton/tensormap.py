"""Tensor maps: what the copy engine has to know about an operand, 128 bytes encoded by the driver.

A *ragged* map bounds a sub-range of rows [start, start + size) in hardware, with a start and size
that are known only to the device. It has two more dimensions than the matrix; with row stride r and
coordinates (2^30, start + size, 2^30 - size + i, column) the address is
    2^30 * (2^34 - r) + (start + size) * r + (2^30 - size + i) * r = (start + i) * r   (mod 2^64 bytes)
because 2^64 divides 2^30 * 2^34 elements, and the third coordinate passes its limit 2^30 exactly
where i reaches size. Loads there give zeros, stores there are dropped.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from multigemm.backends.triton.driver import align_up
from multigemm.cuda.driver import check, library

BILLION = 1 << 30
FAR = 0x7FFF0000
KINDS = {torch.float16: 6, torch.float32: 7, torch.float64: 8, torch.bfloat16: 9}
SWIZZLE_128, PROMOTE_256, ZERO_FILL = 3, 3, 0


def encode(
    address: int, dtype: torch.dtype, extents: Sequence[int], strides: Sequence[int], box: Sequence[int]
) -> bytes:
    """The map of a tensor with the given extents, strides (in elements, the last is 1) and box, outermost first."""
    rank, size = len(extents), dtype.itemsize
    buffer = ctypes.create_string_buffer(128 + 64)
    at = align_up(ctypes.addressof(buffer), 64)
    # the inner box is what one swizzled row of 128 bytes holds; the kernel issues as many as it needs
    boxes = [*box[:-1], min(box[-1], 128 // size)]
    result = library().cuTensorMapEncodeTiled(
        ctypes.c_void_p(at),
        ctypes.c_int(KINDS[dtype]),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(address),
        (ctypes.c_uint64 * rank)(*(max(1, x) for x in reversed(extents))),
        (ctypes.c_uint64 * max(1, rank - 1))(*(stride * size % 2**64 for stride in reversed(strides[:-1]))),
        (ctypes.c_uint32 * rank)(*reversed(boxes)),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        ctypes.c_int(0),
        ctypes.c_int(SWIZZLE_128),
        ctypes.c_int(PROMOTE_256),
        ctypes.c_int(ZERO_FILL),
    )
    check(result, f"cuTensorMapEncodeTiled({extents}, {strides}, {boxes})")
    return ctypes.string_at(at, 128)


def encode_ragged(address: int, dtype: torch.dtype, columns: int, stride: int, box: Sequence[int]) -> bytes:
    """A ragged map of rows of `columns` elements, `stride` elements apart."""
    extents = (FAR, FAR, BILLION, columns)
    return encode(address, dtype, extents, (2**34 - stride, stride, stride, 1), (1, 1, *box))
