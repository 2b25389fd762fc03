"""Memory that a backend takes for itself, between bands of its own.

Operands and results lie between guard bands; a workspace, a list of tiles, a count that a backend takes
from torch while it binds does not, and what lies behind it is whatever the allocator left there. Here
each gets a band on either side: a store into one shows, and what a kernel reads there is chosen so that
it leads astray.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

BAND = 1 << 14
"""Bytes on either side; a multiple of what an allocator aligns to."""
KNOWN = {"dtype", "device"}
"""Options of an allocation that gets bands; any other call is torch's own."""


@dataclass(slots=True)
class Fences:
    """The allocations so far, each with its bands, and the byte that fills those."""

    fill: int
    bands: list[Tensor] = field(default_factory=list)

    def around(self, size: tuple[int, ...], dtype: torch.dtype, device: Any) -> Tensor:
        """Memory for a tensor, a band before it and one behind it."""
        count = dtype.itemsize
        for extent in size:
            count *= extent
        whole = torch.full((2 * BAND + count,), self.fill, dtype=torch.uint8, device=device)
        self.bands += [whole[:BAND], whole[BAND + count :]]
        return whole[BAND : BAND + count].view(dtype).reshape(size)

    def broken(self) -> int:
        """How many bytes of the bands were written."""
        return sum(int((band != self.fill).sum()) for band in self.bands)


def _size_of(sizes: tuple[Any, ...]) -> tuple[int, ...]:
    whole = sizes[0] if len(sizes) == 1 and not isinstance(sizes[0], int) else sizes
    return tuple(int(extent) for extent in whole)


@contextmanager
def fenced(fill: int) -> Iterator[Fences]:
    """What is allocated meanwhile by `torch.empty` and `torch.zeros` lies between bands."""
    fences, torch_empty, torch_zeros = Fences(fill), torch.empty, torch.zeros

    def made(sizes: tuple[Any, ...], options: dict[str, Any]) -> Tensor | None:
        size = _size_of(sizes) if sizes and options.keys() <= KNOWN else ()
        if not size or 0 in size:
            return None
        return fences.around(size, options.get("dtype") or torch.get_default_dtype(), options.get("device"))

    def empty(*sizes: Any, **options: Any) -> Tensor:
        own = made(sizes, options)
        return torch_empty(*sizes, **options) if own is None else own

    def zeros(*sizes: Any, **options: Any) -> Tensor:
        own = made(sizes, options)
        return torch_zeros(*sizes, **options) if own is None else own.zero_()

    with patch.object(torch, "empty", empty), patch.object(torch, "zeros", zeros):
        yield fences
