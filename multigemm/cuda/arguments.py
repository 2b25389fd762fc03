"""The arguments of a kernel, laid out once and updated for the operands of later calls.

A launch is bound to one set of operands. A later call of the same class differs in the operands' addresses, and may
differ in its number of tokens; nothing else in the arguments changes. An `Address` is an integer that remembers its
operand, a `Tokens` is an integer that is the number of tokens. `Fields` are bytes that remember where such words lie in
them. An `ArgumentBlock` holds a kernel's arguments in memory: `move` writes new addresses into it, `resize` a new
number of tokens.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.cuda.device import index_of, to_device
from multigemm.torch_internals import current_raw_stream

if TYPE_CHECKING:
    from multigemm.cuda.tensor_map import CountedMaps

PLAIN_OPERANDS = ("a", "b", "out", "c", "bias", "ends", "valid_rows", "sizes", "scale_a", "scale_b", "zero_b")
FUSED_OPERANDS = ("a_rows", "b_rows", "preact", "row_scale", "index", "weights")
"""The additional operands of a fused problem; `index` is that of `combine`, or `out_rows`."""
OPERANDS = (*PLAIN_OPERANDS, *FUSED_OPERANDS, "work")
"""The operands whose addresses a later call may change, in the order of `Addresses`. `work` is memory between the
launches of one call, which the caller lends."""
PLACES = (*OPERANDS, "fields")
"""What an `Address` may belong to: an operand, or the launch's own `DeviceFields`."""
UNKNOWN = (None,) * len(PLACES)
"""The addresses before the first move."""
_NUMBERS = {name: number for number, name in enumerate(PLACES)}
Addresses = tuple[int, ...]
"""The address of each of `OPERANDS`, 0 for one that is absent; then of the launch's `DeviceFields`, if any."""
JAGGED_CODES = {None: 0, "m": 1, "n": 2, "k": 3}
"""How kernels are told which direction offsets cut."""
ACTIVATION_CODES = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
"""How kernels are told the activation."""
WORD = 2**64 - 1
BUFFER_POINTER, BUFFER_SIZE, BUFFER_END = 1, 2, 0  # CU_LAUNCH_PARAM_*
ALLOCATED = 512
"""The granularity in bytes of torch's allocator."""
MOST_COPIES = 64
"""The number of copies that one launch keeps; the oldest is dropped first."""


class Address(int):
    """The address of an operand, or an address at a fixed distance from it."""

    operand: int
    base: int

    def __new__(cls, value: int, operand: str, base: int | None = None) -> Address:
        made = int.__new__(cls, value)
        made.operand = _NUMBERS[operand]
        made.base = value if base is None else base
        return made

    def at(self, value: int) -> Address:
        """Another address of the same operand, which keeps its distance when the operand moves."""
        return Address(value, PLACES[self.operand], self.base)


def along(address: int, value: int) -> int:
    """Another address of the operand to which an address belongs, if it belongs to one."""
    return address.at(value) if isinstance(address, Address) else value


class Tokens(int):
    """The number of tokens of a problem whose rows or inner extents are cut. Arithmetic on it gives an ordinary
    integer."""

    __slots__ = ()


class Slot(NamedTuple):
    """Words that hold the address of an operand plus `distance` bytes: `repeats` of them, `step` bytes apart."""

    offset: int
    operand: int
    distance: int
    repeats: int = 1
    step: int = 8


class Fields(bytes):
    """Bytes that contain words which later calls change.

    `slots` are the offsets of addresses, `tokens` the offsets of words that equal the number of tokens, `counted` the
    offsets of parts that depend on it in another way.
    """

    slots: tuple[Slot, ...] = ()
    tokens: tuple[int, ...] = ()
    counted: tuple[tuple[int, CountedMaps], ...] = ()


def fields(
    raw: bytes, slots: Iterable[Slot], tokens: Iterable[int] = (), counted: Iterable[tuple[int, CountedMaps]] = ()
) -> Fields:
    """Makes `Fields` of bytes and the offsets of the words that later calls change."""
    made = Fields(raw)
    made.slots, made.tokens, made.counted = tuple(slots), tuple(tokens), tuple(counted)
    return made


def slot_of(address: int, offset: int) -> tuple[Slot, ...]:
    """The slot of an address at an offset; none if the address belongs to no operand."""
    if not isinstance(address, Address):
        return ()
    return (Slot(offset, address.operand, address - address.base),)


def tokens_at(values: Iterable[int | float], start: int = 0) -> list[int]:
    """The offsets of those of some 64-bit words that are the number of tokens. The first word has the offset
    `start`."""
    return [start + 8 * i for i, value in enumerate(values) if type(value) is Tokens]


def words(*values: int | float) -> Fields:
    """Integers and addresses as 64-bit words, floats as doubles."""
    kinds = "".join(["d" if type(x) is float else "q" for x in values])
    slots = [Slot(8 * i, x.operand, x - x.base) for i, x in enumerate(values) if type(x) is Address]
    return fields(struct.pack(f"<{kinds}", *values), slots, tokens_at(values))


def join(parts: Iterable[bytes]) -> Fields:
    """Concatenates parts, with the offsets of everything that later calls change."""
    raw, slots, tokens = bytearray(), list[Slot](), list[int]()
    counted: list[tuple[int, CountedMaps]] = []
    for part in parts:
        if isinstance(part, Fields):
            at = len(raw)
            slots += [Slot(offset + at, *rest) for offset, *rest in part.slots]
            tokens += [offset + at for offset in part.tokens]
            counted += [(offset + at, each) for offset, each in part.counted]
        raw += part
    return fields(bytes(raw), slots, tokens, counted)


Argument = int | bytes | tuple[bytes, ...]
"""One argument of a kernel: an integer, a structure, or a structure in parts that lie one behind the other."""


class ArgumentBlock:
    """The arguments of one kernel in memory that outlives its launches, and the pointers to them.

    An integer takes 8 bytes; structures (tensor maps) begin at a multiple of 64.
    """

    __slots__ = ("_addresses", "_counts", "_memory", "_resizers", "_slots", "_words", "_writers", "pointers", "size")
    pointers: Any
    extra: Any = None
    """The launch options that point to one packed buffer, for a block without `pointers`."""

    def __init__(self, arguments: Sequence[Argument]) -> None:
        places, end = list[int](), 0
        for argument in arguments:
            if isinstance(argument, int):
                places.append(end)
                end += 8
            else:
                places.append((end + 63) & -64)
                size = len(argument) if isinstance(argument, bytes) else sum(map(len, argument))
                end = places[-1] + ((size + 7) & -8)
        self.size, used = end, max(end, 8)
        self._memory = bytearray(used + 64)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
        skipped = -address % 64
        view = memoryview(self._memory)[skipped : skipped + used]  # as long as it lives, the bytes stay where they are
        self._words = view.cast("Q")
        self.pointers = _pointers(len(places))(*[address + skipped + place for place in places])
        self._slots, self._counts = _write(arguments, places, view, self._words)
        self._writers: tuple[tuple[int, list[Writer]], ...] | None = None
        self._resizers: tuple[list[int], list[_Resizer]] | None = None
        self._addresses: Sequence[int | None] = ()

    def move(self, addresses: Addresses) -> None:
        """Writes the addresses of operands that changed since the last move."""
        if self._writers is None:
            self._writers, self._addresses = self.writers(), UNKNOWN
        before, self._addresses = self._addresses, UNKNOWN  # should this be interrupted
        for operand, writers in self._writers:
            address = addresses[operand]
            if address != before[operand]:
                for distance, words, place in writers:
                    words[place] = address + distance
        self._addresses = addresses

    def writers(self) -> tuple[tuple[int, list[Writer]], ...]:
        """For each operand what is written when it moves."""
        words, found = self._words, np.frombuffer(self._words, dtype=np.uint64)
        writers = dict[int, list[Writer]]()
        for start, slots in self._slots:
            for slot in slots:
                places = _words_of(slot, start)
                where = (words, places.start) if slot.repeats == 1 else (found, places)
                writers.setdefault(slot.operand, []).append((slot.distance, *where))
        return tuple(writers.items())

    def resize(self, before: int, after: int) -> None:
        """Writes another number of tokens; `before` is the current one."""
        if self._resizers is None:
            self._resizers = self._make_resizers()
        plain, counted = self._resizers
        words = self._words
        for place in plain:
            words[place] = after
        for part, fills in counted:
            for offset, value in part.changes(before, after):
                fills[offset // 8](value)

    def can_resize(self, before: int, after: int) -> bool:
        """Whether `resize` between two numbers of tokens gives the same as laying out the arguments anew."""
        return all(each.alike(before, after) for _, part in self._counts for _, each in part.counted)

    def _make_resizers(self) -> tuple[list[int], list[_Resizer]]:
        """The words that are the number of tokens; the parts that depend on it, and what writes each word of them."""
        found = np.frombuffer(self._words, dtype=np.uint64)
        plain, counted = list[int](), list[_Resizer]()
        for start, part in self._counts:
            plain += [(start + offset) // 8 for offset in part.tokens]
            for offset, each in part.counted:
                slots = (Slot(offset + 8 * i, 0, 0, each.repeats, each.step) for i in range(each.step // 8))
                counted.append((each, [found[_words_of(slot, start)].fill for slot in slots]))
        return plain, counted

    def bases(self) -> dict[int, int]:
        """The current addresses of the operands whose addresses the block holds, by their number."""
        words = self._words
        return {x.operand: words[(start + x.offset) // 8] - x.distance for start, slots in self._slots for x in slots}

    def snapshot(self) -> npt.NDArray[np.int64]:
        """The words as they are now."""
        return np.frombuffer(self._words, dtype=np.int64).copy()

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether some word lies inside one of these ranges of memory and is no slot, so that it would not move."""
        found = np.frombuffer(self._words, dtype=np.uint64)
        fixed = np.ones(len(found), dtype=bool)
        for start, slots in self._slots:
            for slot in slots:
                fixed[_words_of(slot, start)] = False
        return any(bool((fixed & (found >= start) & (found < end)).any()) for start, end in spans)


class PackedArguments(ArgumentBlock):
    """The arguments of a kernel that takes only 64-bit words, as one buffer, which the launch's `extra` points to.

    Laying out many words at once takes a fraction of the time of an argument for each.
    """

    __slots__ = ("_size", "extra")

    def __init__(self, arguments: Fields) -> None:
        super().__init__([arguments])
        self._size = ctypes.c_size_t(len(arguments))
        self.extra = (ctypes.c_void_p * 5)(
            BUFFER_POINTER, self.pointers[0], BUFFER_SIZE, ctypes.addressof(self._size), BUFFER_END
        )
        self.pointers = None


class DeviceFields:
    """Bytes in device memory that contain operands' addresses, such as tensor maps that a kernel loads itself.

    A copy is never rewritten, because earlier kernels may still read it. Operands at other addresses, or with another
    number of tokens, get a new copy. The latest copies are kept, because operands mostly return to earlier addresses.

    A copy belongs to the stream on which it was uploaded: launches there come after the upload, and its memory is
    reused there only after the last launch that reads it.
    """

    __slots__ = ("_content", "_copies", "_device", "_index", "_operands", "_tokens", "address")

    def __init__(self, content: Fields, device: torch.device) -> None:
        self._content, self._device, self._index = ArgumentBlock([content]), device, index_of(device)
        bases = self._content.bases()
        self._operands = tuple(bases)
        self._copies: dict[tuple[int, ...], Tensor] = {}
        self._tokens = -1
        first = self._upload((current_raw_stream(self._index), self._tokens, *bases.values()))
        self.address = Address(first.data_ptr(), "fields")
        """The address of the first copy: an argument of the kernel, which changes when the launch moves."""

    def follow(self, addresses: Addresses) -> int:
        """The address of the copy for these operands. Makes a new one, in front of the next launch on the current
        stream."""
        key = (current_raw_stream(self._index), self._tokens, *(addresses[operand] for operand in self._operands))
        found = self._copies.get(key)
        if found is None:
            self._content.move(addresses)
            found = self._upload(key)
        return found.data_ptr()

    def can_resize(self, before: int, after: int) -> bool:
        """Whether `resize` gives the same as laying out the bytes anew."""
        return self._content.can_resize(before, after)

    def resize(self, before: int, after: int) -> None:
        """Makes the next copy one for another number of tokens."""
        self._content.resize(before, after)
        self._tokens = after

    @property
    def nbytes(self) -> int:
        """The device memory of the copies, in units of the allocator's smallest block."""
        return MOST_COPIES * max(ALLOCATED, next(iter(self._copies.values())).nbytes)

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether some word holds an address in one of these memory ranges and would not be updated."""
        return self._content.stays_behind(spans)

    def _upload(self, key: tuple[int, ...]) -> Tensor:
        if len(self._copies) >= MOST_COPIES:
            del self._copies[next(iter(self._copies))]
        copy = self._copies[key] = to_device(self._content.snapshot(), self._device)
        return copy


Writer = tuple[int, Any, int | slice]
"""A distance from an operand's address, and where it is written: words in memory, and the place or places there."""
_Resizer = tuple["CountedMaps", list[Callable[[int], None]]]
_COUNT = fields(b"", (), (0,))
"""An argument that is the number of tokens."""
_pointers = cache(lambda count: ctypes.c_void_p * max(1, count))
"""The type of an array of pointers; at least one, since the driver is handed its address."""


def _write(
    arguments: Sequence[Argument], places: list[int], view: memoryview, into: memoryview
) -> tuple[list[tuple[int, Sequence[Slot]]], list[tuple[int, Fields]]]:
    """Writes arguments into a block. Returns the slots, and the parts that depend on the number of tokens, each with
    the position to which its offsets are relative."""
    slots, counts = list[tuple[int, Sequence[Slot]]](), list[tuple[int, Fields]]()
    for argument, place in zip(arguments, places, strict=True):
        if isinstance(argument, int):
            into[place // 8] = argument & WORD
            if isinstance(argument, Address):
                slots.append((place, slot_of(argument, 0)))
            elif isinstance(argument, Tokens):
                counts.append((place, _COUNT))
            continue
        for part in (argument,) if isinstance(argument, bytes) else argument:
            view[place : place + len(part)] = part
            if isinstance(part, Fields):
                slots.append((place, part.slots))
                if part.tokens or part.counted:
                    counts.append((place, part))
            place += len(part)
    return slots, counts


def _words_of(slot: Slot, start: int) -> slice:
    """The positions of a slot's words in a block of words."""
    first, step = (start + slot.offset) // 8, slot.step // 8
    return slice(first, first + (slot.repeats - 1) * step + 1, step)
