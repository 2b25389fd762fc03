"""The arguments of a kernel, laid out once, which follow the operands when these lie elsewhere in a later call.

A launch is bound to one set of operands. A later call of the same class differs in nothing but where the operands lie,
so its arguments are the old ones with other addresses. An `Address` is an integer that remembers which operand it
belongs to; `Fields` are bytes that remember where addresses stand in them; an `ArgumentBlock` holds the arguments of a
kernel in memory, and `move` writes new addresses into it.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

OPERANDS = ("a", "b", "out", "c", "bias", "ends", "valid_rows", "sizes")
"""What may lie elsewhere in a later call, in the order in which `Addresses` hold it."""
Addresses = tuple[int, ...]
"""The address of each of `OPERANDS`, 0 for one that is absent."""
WORD = 2**64 - 1


class Address(int):
    """Where an operand lies, or a place at a fixed distance from there."""

    operand: int
    base: int

    def __new__(cls, value: int, operand: str, base: int | None = None) -> Address:
        made = super().__new__(cls, value)
        made.operand = OPERANDS.index(operand)
        made.base = value if base is None else base
        return made

    def at(self, value: int) -> Address:
        """Another place of the same operand, which keeps its distance when the operand moves."""
        return Address(value, OPERANDS[self.operand], self.base)


class Slot(NamedTuple):
    """A word that holds `distance` bytes more than the address of an operand."""

    offset: int
    operand: int
    distance: int


class Fields(bytes):
    """Bytes with addresses in them."""

    slots: tuple[Slot, ...] = ()


def fields(raw: bytes, slots: Iterable[Slot]) -> Fields:
    """Bytes, and where addresses stand in them."""
    made = Fields(raw)
    made.slots = tuple(slots)
    return made


def slot_of(address: int, offset: int) -> tuple[Slot, ...]:
    """The slot of an address at an offset; none where it is no address of an operand."""
    if not isinstance(address, Address):
        return ()
    return (Slot(offset, address.operand, address - address.base),)


def slots_of(part: bytes) -> tuple[Slot, ...]:
    """Where addresses stand in bytes."""
    return part.slots if isinstance(part, Fields) else ()


def words(*values: int | float) -> Fields:
    """Integers and addresses as 64-bit words, floats as doubles."""
    raw = b"".join(struct.pack("<d", x) if isinstance(x, float) else (x & WORD).to_bytes(8, "little") for x in values)
    return fields(raw, (slot for i, x in enumerate(values) for slot in slot_of(x, 8 * i)))  # type: ignore[arg-type]


def join(parts: Iterable[bytes]) -> Fields:
    """Parts one behind the other, with all their addresses."""
    raw, slots = bytearray(), []
    for part in parts:
        slots += [slot._replace(offset=slot.offset + len(raw)) for slot in slots_of(part)]
        raw += part
    return fields(bytes(raw), slots)


class ArgumentBlock:
    """The arguments of one kernel in memory that outlives its launches, and the pointers to them.

    An integer takes 8 bytes; bytes (structures, tensor maps) begin at a multiple of 64. The pointers stand behind them.
    """

    __slots__ = ("_addresses", "_memory", "_slots", "_words", "pointers", "size")

    def __init__(self, arguments: Sequence[int | bytes]) -> None:
        content, places, slots = list[int](), list[int](), list[tuple[int, int, int]]()
        for argument in arguments:
            start = len(content)
            if type(argument) is int:
                content.append(argument & WORD)
            elif isinstance(argument, bytes):
                start += -start % 8
                content += [0] * (start - len(content))
                slots += [(start + at // 8, operand, distance) for at, operand, distance in slots_of(argument)]
                content += struct.unpack(f"<{-(-len(argument) // 8)}Q", argument + bytes(-len(argument) % 8))
            else:
                if isinstance(argument, Address):
                    slots.append((start, argument.operand, argument - argument.base))
                content.append(argument & WORD)
            places.append(start)
        self.size = end = 8 * len(content)
        self._memory = (ctypes.c_char * (64 + end + 8 * len(places)))()
        skipped = -ctypes.addressof(self._memory) % 64
        first = ctypes.addressof(self._memory) + skipped
        content += [first + 8 * place for place in places]
        struct.pack_into(f"<{len(content)}Q", self._memory, skipped, *content)
        self.pointers = (ctypes.c_void_p * len(places)).from_buffer(self._memory, skipped + end)
        self._words = memoryview(self._memory)[skipped : skipped + end].cast("B").cast("Q")
        self._slots = tuple(slots)
        self._addresses: Addresses | None = None

    def move(self, addresses: Addresses) -> None:
        """Writes other addresses of the operands."""
        if addresses == self._addresses:
            return
        memory = self._words
        for place, operand, distance in self._slots:
            memory[place] = addresses[operand] + distance
        self._addresses = addresses

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether some word lies inside one of these ranges of memory and is no slot, so that it would not move."""
        found = np.frombuffer(self._words, dtype=np.uint64)
        fixed = np.ones(len(found), dtype=bool)
        fixed[[place for place, _, _ in self._slots]] = False
        return any(bool((fixed & (found >= start) & (found < end)).any()) for start, end in spans)
