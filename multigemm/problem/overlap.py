"""Whether strided arrays share an element, exactly and not by address ranges.

Interleaved columns of one matrix are legal outputs; two outputs that share an element are not. Every question is a
linear equation in bounded integers, which NumPy solves without touching memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from multigemm.errors import InvalidProblem
from multigemm.problem.arrays import Memory, strides_in_bytes


def overlaps_itself(x: Tensor) -> bool:
    """Whether two index tuples of `x` have the same address."""
    dims = sorted((abs(s), n) for s, n in zip(x.stride(), x.shape, strict=True) if n > 1)
    reach = 0
    for stride, extent in dims if x.numel() else ():
        if stride <= reach:
            break
        reach += stride * (extent - 1)
    else:
        return False
    # tuples that differ first along an axis: those that begin with 0 there, and all that do not
    starts = (x[(0,) * axis] for axis in range(x.dim()))
    return any(any(meetings([part[:1]], [part[1:]])) for part in starts)


class _Place(NamedTuple):
    """The byte addresses of the elements of a tensor or array."""

    start: int
    end: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    first: int
    size: int

    @property
    def empty(self) -> bool:
        return 0 in self.shape


def _place(x: Any) -> _Place:
    """The `_Place` of a tensor, or of a NumPy or CuPy array, whose strides may be negative."""
    if isinstance(x, Tensor):
        size, first, strides = x.element_size(), x.data_ptr(), strides_in_bytes(x)
    else:
        interface = x.__array_interface__ if isinstance(x, np.ndarray) else x.__cuda_array_interface__
        size, first, strides = x.itemsize, interface["data"][0], tuple(x.strides)
    reach = [s * (n - 1) for s, n in zip(strides, x.shape, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return _Place(first + low, first + high + size, tuple(x.shape), strides, first, size)


def _shadow(x: _Place) -> Any:
    """A NumPy array at the same addresses, never read: NumPy's exact overlap test needs only addresses and strides."""
    return np.asarray(Memory(x.shape, x.strides, f"|V{x.size}", x.first, read_only=True))


def _span(x: Any) -> tuple[int, int]:
    """The first byte and one past the last byte; meaningless for an empty tensor."""
    if not isinstance(x, Tensor):
        return _place(x)[:2]
    first, last = x.data_ptr(), 1
    for stride, extent in zip(x.stride(), x.shape):
        last += stride * (extent - 1)
    return first, first + last * x.element_size()


def _near_by(outs: Sequence[Tensor], others: Sequence[Any]) -> list[int]:
    """The positions of the others that lie between the first and the last byte of all outputs."""
    spans = [_span(x) for x in outs if x.numel()]
    low, high = min((s for s, _ in spans), default=0), max((e for _, e in spans), default=0)
    return [j for j, (start, end) in enumerate(map(_span, others)) if start < high and end > low]


def _pairs(places: Sequence[_Place], others: Sequence[_Place] | None = None) -> Iterator[tuple[int, int]]:
    """The positions of two places that share a byte: of one of `places` and one of `others`, or of two of `places`.
    Only neighbours in memory are compared."""
    near: list[list[tuple[int, Any, int]]] = [[], []]
    if others is None:
        near[1] = near[0]
    sides = [(place, 0, i) for i, place in enumerate(places)] + [(place, 1, j) for j, place in enumerate(others or ())]
    for place, side, at in sorted(each for each in sides if not each[0].empty):
        shadow, across = _shadow(place), near[1 - side]
        across[:] = [each for each in across if each[0] > place.start]
        for _, other, to in across:
            if np.shares_memory(shadow, other):
                yield (at, to) if side == 0 else (to, at)
        near[side].append((place.end, shadow, at))


def meetings(outs: Sequence[Tensor], others: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The pairs (i, j) for which outs[i] shares a byte with others[j].

    All tensors must lie on one device. An operand that occurs many times is compared once.
    """
    near_by = _near_by(outs, others)
    if not near_by:  # the rule, and on the path of a call with `out`
        return
    twins: dict[_Place, list[int]] = {}
    for j in near_by:
        twins.setdefault(_place(others[j]), []).append(j)
    positions = list(twins.values())
    for i, number in _pairs([_place(x) for x in outs], list(twins)):
        yield from ((i, j) for j in positions[number])


def same_view(x: Tensor, y: Tensor) -> bool:
    """Whether both tensors have the same address, shape and strides."""
    return x is y or (
        x.data_ptr() == y.data_ptr()
        and x.shape == y.shape
        and x.stride() == y.stride()
        and x.dtype == y.dtype
        and x.device == y.device
    )


def first_shared_pair(tensors: Sequence[Tensor]) -> tuple[int, int] | None:
    """Two positions whose tensors share an element, or None."""
    found = next(_pairs([_place(x) for x in tensors]), None) if len(tensors) > 1 else None
    return None if found is None else (min(found), max(found))


def refuse_shared_memory(
    outs: Sequence[Tensor], read: Sequence[tuple[str, Any]], at: Callable[[int], str], out: str = "out"
) -> None:
    """Raises if a result overlaps itself, another result or an array that is read. `c` may be the same view as `out`.

    `read` maps names to arrays, `at(g)` is the text behind an operand's name that denotes entry g, and `out` is the
    name of the result.
    """
    for g, x in enumerate(outs):
        if overlaps_itself(x):
            raise InvalidProblem(f"{out}{at(g)} overlaps itself (strides {x.stride()}): pass another view")
    if pair := first_shared_pair(outs):
        raise InvalidProblem(
            f"{out}[{pair[0]}] and {out}[{pair[1]}] share an element: each result needs its own memory"
        )
    for g, i in meetings(outs, [x for _, x in read]):
        name, x = read[i]
        own_c = out == "out" and name == f"c{at(g)}"
        if not (isinstance(x, Tensor) and own_c and same_view(x, outs[g])):
            raise InvalidProblem(f"{out}{at(g)} shares memory with {name}: pass another {out}")
