"""Tensor maps: the 128-byte descriptors of operands that the copy engine (TMA) reads and the driver encodes.

A map holds the operand's address in one word. That word's position is found once, by encoding one map at two addresses.
A map whose other bytes also depend on the address could not follow an operand, and raises.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterable, Sequence
from functools import cache, lru_cache
from struct import Struct
from typing import Any, NamedTuple

import torch

from multigemm.cuda.arguments import Address, Fields, Slot, Tokens, fields
from multigemm.cuda.driver import NO_CONTEXT, check, library, use_context
from multigemm.errors import LibraryError
from multigemm.torch_internals import current_device

SIZE = 128
BLANK = fields(bytes(SIZE), ())
"""The map of an operand through which nothing is loaded."""
NO_SWIZZLE, SWIZZLE_64B, SWIZZLE_128B, ZERO_FILL = 0, 2, 3, 0
PROMOTION_128B, PROMOTION_256B = 2, 3
"""Bytes that the L2 cache asks memory for at least. Boxes of weights that lie across k are 128 bytes wide, and the 128
bytes beside them belong to another box: with 256 an H200 streams such weights at 4.09 TB/s, with 128 at 4.33."""
TYPES = {
    torch.uint8: 0, torch.int8: 0, torch.float8_e4m3fn: 0, torch.float8_e5m2: 0, torch.int32: 3, torch.int64: 5,
    torch.float16: 6, torch.float32: 7, torch.float64: 8,
    torch.bfloat16: 9,
}  # fmt: skip  # CU_TENSOR_MAP_DATA_TYPE_*
MOST_DIMS, MOST_BOXES = 5, 16
_WORDS = Struct(f"<{SIZE // 8}Q")


class _Scratch:
    """Arrays of one rank into which the arguments of every encoding are written, and references to them.

    The references are made once, since ctypes takes a ready one four times as fast as it converts an argument.
    """

    def __init__(self, rank: int) -> None:
        self.extents, self.strides = (ctypes.c_uint64 * rank)(), (ctypes.c_uint64 * (rank - 1))()
        self.steps = (ctypes.c_uint32 * rank)(*[1] * rank)
        self.layout = ctypes.byref(self.extents), ctypes.byref(self.strides)
        self.ones = ctypes.byref(self.steps)
        self.memory = (ctypes.c_char * (SIZE * MOST_BOXES + 64))()
        skipped = -ctypes.addressof(self.memory) % 64  # CUtensorMap is aligned to 64 bytes
        self.view = memoryview(self.memory).cast("B")[skipped:]
        self.maps = [ctypes.byref(self.memory, skipped + SIZE * i) for i in range(MOST_BOXES)]


class _Scratches(threading.local):
    """The arrays of each rank, one set per thread: the driver runs outside of Python's lock."""

    def __init__(self) -> None:
        self.of_rank = {rank: _Scratch(rank) for rank in range(1, MOST_DIMS + 1)}


_scratches = _Scratches()


@lru_cache(maxsize=256)
def _box_references(boxes: tuple[tuple[int, ...], ...]) -> tuple[Any, ...]:
    return tuple(ctypes.byref((ctypes.c_uint32 * len(box))(*box)) for box in boxes)


def encode_together(
    dtype: torch.dtype,
    address: int,
    extents: Sequence[int],
    strides: Sequence[int],
    boxes: tuple[tuple[int, ...], ...],
    *,
    swizzle: int = SWIZZLE_128B,
    promotion: int = PROMOTION_256B,
) -> Fields:
    """Maps of a tensor, one for each of at most 16 boxes, one behind the other.

    Extents and boxes in elements, strides in bytes modulo 2^64, all with the innermost dimension first (whose stride
    is the element's size, and left out). The address and the strides are multiples of 16 bytes. Needs no memory behind
    the address, and gives a thread without a context that of its current device.

    Raises LibraryError, with the layout, where the driver refuses it.
    """
    layout = _Layout(dtype, int(address), tuple(extents), tuple(strides), boxes, (swizzle, promotion))
    made = Fields(_encoded(layout))
    if isinstance(address, Address):
        made.slots = (Slot(_place_of_address(), address.operand, address - address.base, len(boxes), SIZE),)
    if Tokens in map(type, extents):
        made.counted = ((0, CountedMaps(layout)),)
    return made


class _Layout(NamedTuple):
    """The arguments of `encode_together`; `modes` are swizzle and promotion."""

    dtype: torch.dtype
    address: int
    extents: Sequence[int]
    strides: Sequence[int]
    boxes: tuple[tuple[int, ...], ...]
    modes: tuple[int, int]


def _encoded(layout: _Layout) -> memoryview:
    """The maps in memory of this thread, which the next call overwrites."""
    dtype, address, extents, strides, boxes, modes = layout
    own, rank, call = _scratches.of_rank[len(extents)], len(extents), library().cuTensorMapEncodeTiled
    own.extents[:], own.strides[:] = extents, strides  # type: ignore[call-overload]  # a tuple serves as well
    sizes, steps = own.layout
    kind, ones, place = TYPES[dtype], own.ones, ctypes.c_void_p(address)
    for target, box in zip(own.maps, _box_references(boxes), strict=False):
        given = target, kind, rank, place, sizes, steps, box, ones, 0, *modes, ZERO_FILL
        if code := call(*given):
            text = f"cuTensorMapEncodeTiled({dtype}, address {address:#x}, {extents=}, {strides=}, {boxes=})"
            if code == NO_CONTEXT:
                use_context(current_device())
                code = call(*given)
            check(code, text)
    return own.view[: SIZE * len(boxes)]


class CountedMaps:
    """Maps of one tensor with an extent that is the number of tokens, one per box.

    The maps differ only in the words of the box. So the words that another number of tokens changes are found by
    encoding the first map, and change in the same way in the others (`alike` checks this).
    """

    __slots__ = ("_known", "_layout", "repeats")
    step = SIZE

    def __init__(self, layout: _Layout) -> None:
        self._layout, self.repeats = layout, len(layout.boxes)
        self._known: tuple[int, tuple[int, ...]] = -1, ()

    def changes(self, before: int, after: int) -> list[tuple[int, int]]:
        """The words that differ between two numbers of tokens: their offsets in bytes, and their values for the second
        number."""
        known, old = self._known
        if known != before:
            old = self._words(before)
        new = self._words(after)
        self._known = after, new
        return [(8 * i, word) for i, word in enumerate(new) if word != old[i]]

    def alike(self, before: int, after: int) -> bool:
        """Whether those words change in the same way in the maps of all boxes."""
        old, new = (bytearray(self._encoded(count, self._layout.boxes)) for count in (before, after))
        for offset, word in self.changes(before, after):
            for at in range(offset, len(old), SIZE):
                old[at : at + 8] = word.to_bytes(8, "little")
        return old == new

    def _words(self, count: int) -> tuple[int, ...]:
        return _WORDS.unpack(self._encoded(count, self._layout.boxes[:1]))

    def _encoded(self, count: int, boxes: tuple[tuple[int, ...], ...]) -> memoryview:
        extents = [count if type(extent) is Tokens else extent for extent in self._layout.extents]
        return _encoded(self._layout._replace(extents=extents, boxes=boxes))


def repeat(encoded: Fields, distances: Iterable[int]) -> Fields:
    """One map at several byte distances from its address, for the matrices of a stack, all of one layout."""
    place = _place_of_address()
    (before, word, behind), slots, parts = (encoded[:place], encoded[place : place + 8], encoded[place + 8 :]), [], []
    address = int.from_bytes(word, "little")
    for i, distance in enumerate(distances):
        parts += [before, (address + distance).to_bytes(8, "little"), behind]
        slots += [Slot(s.offset + SIZE * i, s.operand, s.distance + distance) for s in encoded.slots]
    return fields(b"".join(parts), slots)


@cache
def _place_of_address() -> int:
    """The position of the address in a map."""
    low, high = 1 << 40, (1 << 40) + (1 << 46) + 4096
    one, other = (encode_together(torch.uint8, at, (64, 64), (64,), ((64, 1),)) for at in (low, high))
    places = [i for i in range(0, SIZE, 8) if one[i : i + 8] != other[i : i + 8]]
    words = [int.from_bytes(x[places[0] : places[0] + 8], "little") for x in (one, other) if len(places) == 1]
    if words != [low, high]:
        raise LibraryError(
            f"this driver's tensor maps differ in words {places} at two addresses: one word that holds the address is "
            "needed to follow an operand; use backend='cublas' and report it"
        )
    return places[0]
