"""How the groups of a jagged form are cut into calls of torch's batched product.

oneDNN multiplies 16-bit matrices on the processor's own instructions, but costs many microseconds
per call and has no entry for groups of different sizes. So neighbouring groups are padded to one
height and multiplied in a single batched call; a group much larger than its neighbours is a call of
its own, because padding others to its height would cost more. Only neighbours can share a call:
their right operands lie at one stride, and copying those would cost what the call saves.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multigemm.backends.cpu.groups import Index

CAPS = (8, 16, 32, 64, 128, 256)
SINGLE_US, BATCH_US, GATHER_US = 24.0, 10.0, 8.0
FLOP_PER_US = 2e6
SINGLE_BYTES_PER_US, BATCH_BYTES_PER_US, COPY_BYTES_PER_US = 25e3, 36e3, 10e3
"""Measured on two cores of a server processor; only their proportions matter, to within a factor."""


class Segment(NamedTuple):
    """Groups first..last-1, each padded to `height` rows; `even` if none needs padding."""

    first: int
    last: int
    height: int
    even: bool


class _Cut(NamedTuple):
    first: npt.NDArray[np.intp]
    last: npt.NDArray[np.intp]
    height: Index
    rows: Index


def _cut(sizes: Index, cap: int) -> _Cut:
    """Runs of neighbours of at most `cap` rows; a larger group is a run of its own."""
    large = sizes > cap
    starts = np.flatnonzero(np.concatenate(([True], large[1:] | large[:-1])))
    stops = np.append(starts[1:], len(sizes))
    return _Cut(starts, stops, np.maximum.reduceat(sizes, starts), np.add.reduceat(sizes, starts))


def _cost(cut: _Cut, k: int, n: int) -> float:
    """Microseconds, roughly."""
    count = cut.last - cut.first
    single = (count == 1) & (cut.height > 0)
    batch = (count > 1) & (cut.height > 0)
    padded = np.where(cut.height > 0, cut.height * count, 0)
    even = padded == cut.rows
    arithmetic = padded.sum() * (2.0 * k * n / FLOP_PER_US)
    weights = single.sum() * (2.0 * k * n / SINGLE_BYTES_PER_US) + count[batch].sum() * (
        2.0 * k * n / BATCH_BYTES_PER_US
    )
    gathered = padded[batch & ~even].sum() * (2.0 * (k + n) / COPY_BYTES_PER_US)
    calls = single.sum() * SINGLE_US + batch.sum() * BATCH_US + (batch & ~even).sum() * GATHER_US
    return float(arithmetic + weights + gathered + calls)


def segments(sizes: Index, k: int, n: int) -> list[Segment]:
    """The cheapest of a few cuts; runs without any row are left out."""
    if not len(sizes) or not sizes.any():
        return []
    top = int(sizes.max())
    cuts = [_cut(sizes, cap) for cap in (0, *(c for c in CAPS if c < top), top)]
    best = min(cuts, key=lambda cut: _cost(cut, k, n))
    even = best.height * (best.last - best.first) == best.rows
    columns = (best.first, best.last, best.height, even)
    return [Segment(*row) for row in zip(*(column.tolist() for column in columns), strict=True) if row[2] > 0]
