"""Zeroed counters in device memory, with which the blocks of a launch count drawn tiles and finished parts.

Each bound problem borrows some, and its launches leave them zero. They were zeroed before any stream could see them, so
a bound problem may be launched on any stream, at once, and in a CUDA graph. Returned words join the end of a queue, so
that they are reused long after their last launch. A graph may be replayed after the bound problem is gone, so words
that were ever captured are never returned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from weakref import finalize

import torch
from torch import Tensor

SLOTS = {8: 8192, 256: 1024, 4096: 64}
"""The number of slots of each size, in words."""


@cache
def pool(index: int, size: int) -> tuple[Tensor, deque[int]]:
    """All words of one size on a device, and the free slots."""
    memory = torch.zeros(size * SLOTS[size], dtype=torch.int32, device=torch.device("cuda", index))
    torch.cuda.synchronize(index)
    return memory, deque(range(SLOTS[size]))


def ready(index: int, words: int) -> None:
    """Allocates the words of this size and of smaller sizes in advance, because a capture cannot allocate them."""
    for size in SLOTS:
        pool(index, size)
        if words <= size:
            return


class Words:
    """Zeroed words of one size. Borrowed ones return when this object is gone, unless they were captured."""

    def __init__(self, index: int, words: int) -> None:
        self.pin: Callable[[], object] | None = None
        """Called when a launch is captured; None where the words came from no pool."""
        size = next((size for size in SLOTS if words <= size), 0)
        slot = self._borrow(index, size) if size else None
        self.tensor = self._own(index, words) if slot is None else slot

    def _borrow(self, index: int, size: int) -> Tensor | None:
        memory, free = pool(index, size)
        try:
            slot = free.popleft()
        except IndexError:
            return None
        self.pin = finalize(self, free.append, slot).detach
        return memory[size * slot : size * (slot + 1)]

    @staticmethod
    def _own(index: int, words: int) -> Tensor:
        """Separate words: zeroed by each replay if they are captured, else before any other stream sees them."""
        made = torch.zeros(words, dtype=torch.int32, device=torch.device("cuda", index))
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.current_stream(made.device).synchronize()
        return made

    @property
    def address(self) -> int:
        """The device address that kernels receive."""
        return self.tensor.data_ptr()
