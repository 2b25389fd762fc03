"""Launches that an eager call may repeat: what was bound for the same addresses need not be bound again.

Binding (tensor maps, argument blocks) costs more on the host than launching. In a loop, eager calls
meet the same memory again and again, since torch's allocator hands out the same blocks. A launch
that is kept must not keep memory alive, so it is bound to tensors that merely point at the
caller's: valid whenever a call comes with those very addresses, because then the memory lives.

Sharing a launch between calls is safe although launches own workspaces: the result is fresh memory
of the current stream's pool, so calls with one result address are ordered by one stream. Under
capture nothing is kept or taken, since a graph may outlive any cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

Bound = TypeVar("Bound")
"""A launch, or several."""
KEPT = 4096
"""A step of training makes six products in each layer, at addresses of their own."""
WORKSPACE = 64 << 20
"""Launches that are kept may own this many bytes of device memory together."""


class _Memory:
    """Memory that someone else owns, as the array interface describes it."""

    def __init__(self, x: Tensor) -> None:
        size = x.element_size()
        interface = {
            "shape": tuple(x.shape),
            "strides": tuple(s * size for s in x.stride()),
            "typestr": np.dtype(f"i{size}").str,
            "data": (x.data_ptr(), False),
            "version": 3,
        }
        setattr(self, "__cuda_array_interface__" if x.is_cuda else "__array_interface__", interface)


def borrow(x: Tensor | None) -> Tensor | None:
    """A tensor over the memory of `x` that does not keep it alive."""
    if x is None:
        return None
    memory = _Memory(x)
    bits = torch.as_tensor(memory, device=x.device) if x.is_cuda else torch.from_numpy(np.asarray(memory))
    return bits.view(x.dtype)


class Launches:
    """What was bound, by the operands' addresses, then the result's; one for all calls, so that its size has one bound.

    `kept` is the same dictionary for good, so that a caller may look it up without a call in between. So is `fronts`,
    for short ways to what is kept.
    """

    def __init__(self) -> None:
        self.kept: dict[Any, tuple[Any, dict[Any, Any]]] = {}
        self.fronts: dict[Any, Any] = {}
        self._met: set[Any] = set()
        self._workspaces: dict[Any, int] = {}
        self._count = self._bytes = 0

    def met(self, operands: Any, result: Any) -> bool:
        """Whether these addresses have come before; most never come again, and keeping a launch costs time."""
        if (operands, result) in self._met:
            return True
        if len(self._met) >= 4 * KEPT:
            self._met.clear()
        self._met.add((operands, result))
        return False

    def keep(self, operands: Any, route: Any, result: Any, bind: Callable[[], Bound]) -> Bound:
        """What `bind` makes, kept unless its workspace is large; starts anew when there are too many."""
        launch = self._measured(route, bind)
        workspace = self._workspaces[route]
        if self._count >= KEPT or self._bytes + workspace > WORKSPACE:
            self.clear()
        if workspace <= WORKSPACE // 16:
            self.kept.setdefault(operands, (route, {}))[1][result] = launch
            self._count += 1
            self._bytes += workspace
        return launch

    def _measured(self, route: Any, bind: Callable[[], Bound]) -> Bound:
        """Asks the allocator, which is slow, once for each route: its metadata say how much a launch owns."""
        if route in self._workspaces:
            return bind()
        before = owned(route.device)
        launch = bind()
        self._workspaces[route] = owned(route.device) - before
        return launch

    def clear(self) -> None:
        """Forgets everything; launches that still run on the device are ordered before what reuses their memory."""
        self.kept.clear()
        self.fronts.clear()
        self._met.clear()
        self._workspaces.clear()
        self._count = self._bytes = 0


def owned(device: torch.device) -> int:
    """Bytes that live tensors hold on a GPU, to tell what a bind has allocated."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
