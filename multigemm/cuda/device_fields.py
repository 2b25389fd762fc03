"""Bytes in device memory with addresses of operands in them, such as tensor maps that a kernel loads by itself.

A copy in device memory is never written again: kernels in front of this one may still read it. Operands that lie
elsewhere get a copy of their own, and the latest copies stay, since operands mostly return to where they lay before.
So does another number of tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from multigemm.cuda.arguments import Address, Addresses, ArgumentBlock, Fields
from multigemm.cuda.device import index_of, to_device
from multigemm.torch_internals import current_raw_stream

ALLOCATED = 512
"""Bytes that torch's allocator rounds to."""
MOST_COPIES = 64
"""Copies that one launch keeps; the oldest goes first."""


class DeviceFields:
    """Copies of some words in device memory, for the addresses that their operands have or lately had.

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
        """Where the first copy lies: an argument for the kernel, which changes when the launch moves."""

    def follow(self, addresses: Addresses) -> int:
        """Where the copy for these addresses lies; makes one, in front of the next launch on the current stream."""
        key = (current_raw_stream(self._index), self._tokens, *(addresses[operand] for operand in self._operands))
        found = self._copies.get(key)
        if found is None:
            self._content.move(addresses)
            found = self._upload(key)
        return found.data_ptr()

    @property
    def counted(self) -> bool:
        """Whether parts of it have to be computed anew for another number of tokens."""
        return self._content.counted

    def can_resize(self, before: int, after: int) -> bool:
        """Whether `resize` gives what laying out the bytes anew would give."""
        return self._content.can_resize(before, after)

    def resize(self, before: int, after: int) -> None:
        """The next copy is for another number of tokens."""
        self._content.resize(before, after)
        self._tokens = after

    @property
    def nbytes(self) -> int:
        """Device memory that the copies may take, by the allocator's least piece."""
        return MOST_COPIES * max(ALLOCATED, next(iter(self._copies.values())).nbytes)

    def stays_behind(self, spans: Sequence[tuple[int, int]]) -> bool:
        """Whether some word lies inside one of these ranges of memory and would not follow."""
        return self._content.stays_behind(spans)

    def _upload(self, key: tuple[int, ...]) -> Tensor:
        if len(self._copies) >= MOST_COPIES:
            del self._copies[next(iter(self._copies))]
        copy = self._copies[key] = to_device(self._content.snapshot(), self._device)
        return copy
