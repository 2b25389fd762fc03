"""Tensor maps: what the copy engine (TMA) has to know about an operand, 128 bytes that the driver encodes.

A map holds the operand's address in one word. Where that word stands is found once, by encoding one map at two
addresses; a map whose other bytes depend on the address as well could not follow an operand, and says so.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from multigemm.cuda.arguments import Fields, fields, slot_of
from multigemm.cuda.driver import check, library

SIZE = 128
BLANK = fields(bytes(SIZE), ())
"""The map of an operand through which nothing is loaded."""
NO_SWIZZLE, SWIZZLE_128B, PROMOTION_256B, ZERO_FILL = 0, 3, 3, 0
TYPES = {
    torch.uint8: 0, torch.int32: 3, torch.int64: 5, torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9,
}  # fmt: skip  # CU_TENSOR_MAP_DATA_TYPE_*
MOST_DIMS = 5


class _Scratch:
    """Arrays of one rank that the arguments of every encoding are written to; one set for each call at a time."""

    def __init__(self, rank: int) -> None:
        self.extents = (ctypes.c_uint64 * rank)()
        self.strides = (ctypes.c_uint64 * max(rank - 1, 1))()
        self.box = (ctypes.c_uint32 * rank)()
        self.ones = (ctypes.c_uint32 * rank)(*[1] * rank)
        self.memory = (ctypes.c_char * (SIZE + 64))()
        self.start = (ctypes.addressof(self.memory) + 63) // 64 * 64


@cache
def _encoder() -> Any:
    call = library().cuTensorMapEncodeTiled
    call.argtypes = [
        ctypes.c_void_p, ctypes.c_int, ctypes.c_uint32, ctypes.c_void_p, *[ctypes.c_void_p] * 4, *[ctypes.c_int] * 4,
    ]  # fmt: skip
    call.restype = ctypes.c_int
    return call


def encode(
    dtype: torch.dtype,
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    boxes: Sequence[Sequence[int]],
    *,
    swizzle: int = SWIZZLE_128B,
) -> list[Fields]:
    """One map of a tensor for each of `boxes`. Extents and boxes in elements, strides in bytes modulo 2^64, all with
    the innermost dimension first (whose stride is the element's size, and left out).

    Raises LibraryError, with the layout, where the driver refuses it. Needs neither a context nor memory behind the
    address.
    """
    rank = len(extents)
    call, own, kind = _encoder(), _Scratch(rank), TYPES[dtype]
    own.extents[:] = list(extents)
    own.strides[: rank - 1] = list(strides)
    found = []
    place = _place_of_address() if slot_of(address, 0) else 0
    for box in boxes:
        own.box[:] = list(box)
        code = call(
            own.start, kind, rank, address, own.extents, own.strides, own.box, own.ones, 0, swizzle, PROMOTION_256B,
            ZERO_FILL,
        )  # fmt: skip
        if code:
            check(code, f"cuTensorMapEncodeTiled({dtype}, extents={extents}, strides={strides}, box={box})")
        found.append(fields(ctypes.string_at(own.start, SIZE), slot_of(address, place)))
    return found


@cache
def _place_of_address() -> int:
    """Where in a map the address stands."""
    one, other = (
        encode(torch.uint8, at, (64, 64), (64,), [(64, 1)])[0] for at in (1 << 40, (1 << 40) + (1 << 46) + 4096)
    )
    places = [i for i in range(0, SIZE, 8) if one[i : i + 8] != other[i : i + 8]]
    assert len(places) == 1, "a tensor map holds its address in more than one word"
    assert int.from_bytes(one[places[0] : places[0] + 8], "little") == 1 << 40, "a tensor map encodes its address"
    return places[0]
