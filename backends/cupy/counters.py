"""Pairs of zeroed integers in device memory, from which the clusters of a launch take their tiles.

Each bound problem borrows one pair, and its launches leave it zero. A pair comes back when the bound
problem is gone, waits behind all others, and so serves again long after its last launch. A CUDA graph
may be replayed whenever its owner likes, after the bound problem is gone as well: a pair that was ever
captured never comes back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache
from weakref import finalize

import torch
from torch import Tensor

PAIRS = 8192


@cache
def pool(index: int) -> tuple[Tensor, deque[int]]:
    """All pairs of a device, and the numbers of those that are free."""
    memory = torch.zeros(2 * PAIRS, dtype=torch.int32, device=torch.device("cuda", index))
    torch.cuda.synchronize(index)
    return memory, deque(range(PAIRS))


class Counter:
    """A borrowed pair: it goes back to its pool with this object, unless it was pinned."""

    def __init__(self, index: int) -> None:
        memory, free = pool(index)
        self.pin: Callable[[], object] | None = None
        """Called when a launch is captured; None where the pair came from no pool."""
        if free:
            slot = free.popleft()
            self.pair = memory[2 * slot : 2 * slot + 2]
            self.pin = finalize(self, free.append, slot).detach
        else:
            self.pair = torch.zeros(2, dtype=torch.int32, device=memory.device)

    @property
    def address(self) -> int:
        """Where the kernel finds it."""
        return self.pair.data_ptr()
