"""Whether strided arrays share an element: exactly, not by their address ranges.

Columns of one matrix that interleave are legal outputs; two outputs that meet in one element are
not. Every question is a linear equation in bounded integers, answered without touching memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import gcd
from typing import Any

import numpy as np
from torch import Tensor

from multigemm.arrays import _Memory


def overlaps_itself(x: Tensor) -> bool:
    """Whether two different index tuples of `x` name one address (for up to three dimensions)."""
    if x.numel() < 2:
        return False
    dims = sorted(((abs(s), n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1), reverse=True)
    reach = 0
    for stride, extent in reversed(dims):
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    strides, extents = [s for s, _ in dims], [n for _, n in dims]
    return _has_nonzero_solution(strides, extents)


def _has_nonzero_solution(strides: Sequence[int], extents: Sequence[int]) -> bool:
    """Some d != 0 with |d_i| < extents_i and sum d_i * strides_i = 0."""
    if 0 in strides:
        return True
    if len(strides) < 2:
        return False
    if len(strides) == 2:
        g = gcd(*strides)
        return strides[1] // g < extents[0] and strides[0] // g < extents[1]
    short = min(range(3), key=lambda i: extents[i])
    rest = [i for i in range(3) if i != short]
    s, n = [strides[i] for i in rest], [extents[i] for i in rest]
    if _has_nonzero_solution(s, n):
        return True
    return any(_solvable(s, n, d * strides[short]) for d in range(1, extents[short]))


def _solvable(s: Sequence[int], n: Sequence[int], target: int) -> bool:
    """Some |x| < n0, |y| < n1 with s0*x + s1*y = target."""
    g = gcd(s[0], s[1])
    if target % g:
        return False
    s0, s1, t = s[0] // g, s[1] // g, target // g
    x0 = t * pow(s0, -1, s1) % s1 if s1 > 1 else 0
    y0 = (t - s0 * x0) // s1
    # all solutions: x = x0 + s1*i, y = y0 - s0*i
    low = max(_ceil_div(-(n[0] - 1) - x0, s1), _ceil_div(y0 - (n[1] - 1), s0))
    high = min((n[0] - 1 - x0) // s1, (y0 + n[1] - 1) // s0)
    return low <= high


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _footprint(x: Tensor) -> tuple[int, int]:
    """First byte and one past the last byte of a tensor whose strides are not negative."""
    last = sum(s * (n - 1) for s, n in zip(x.stride(), x.shape, strict=True))
    start = x.data_ptr()
    return start, start + (last + 1) * x.element_size()


def _shadow(x: Tensor) -> Any:
    """A NumPy array at the same addresses, never read: the exact overlap test needs only its geometry."""
    size = x.element_size()
    interface = {
        "version": 3,
        "shape": tuple(x.shape),
        "strides": tuple(s * size for s in x.stride()),
        "typestr": f"|V{size}",
        "data": (x.data_ptr(), True),
    }
    return np.asarray(_Memory(interface, x))


def share_memory(x: Tensor, y: Tensor) -> bool:
    """Whether `x` and `y` have a byte in common."""
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False
    (x0, x1), (y0, y1) = _footprint(x), _footprint(y)
    if x1 <= y0 or y1 <= x0:
        return False
    return bool(np.shares_memory(_shadow(x), _shadow(y)))


def same_view(x: Tensor, y: Tensor) -> bool:
    """Whether the two are one and the same view of memory."""
    return x is y or (
        x.data_ptr() == y.data_ptr()
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and x.device == y.device
    )


def first_shared_pair(tensors: Iterable[Tensor]) -> tuple[int, int] | None:
    """Two positions whose tensors share an element, or None; only neighbours in memory are compared."""
    spans = sorted((*_footprint(t), i, t) for i, t in enumerate(tensors) if t.numel())
    open_spans: list[tuple[int, int, Tensor]] = []
    for start, end, i, tensor in spans:
        open_spans = [(e, j, other) for e, j, other in open_spans if e > start]
        for _, j, other in open_spans:
            if share_memory(tensor, other):
                return min(i, j), max(i, j)
        open_spans.append((end, i, tensor))
    return None
