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
from multigemm.problem.arrays import Memory


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
    return any(_meet(_place(part[:1]), _place(part[1:])) for part in starts)


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
        size, first = x.element_size(), x.data_ptr()
        strides = tuple(s * size for s in x.stride())
    else:
        interface = x.__array_interface__ if isinstance(x, np.ndarray) else x.__cuda_array_interface__
        size, first, strides = x.itemsize, interface["data"][0], tuple(x.strides)
    reach = [s * (n - 1) for s, n in zip(strides, x.shape, strict=True)]
    low, high = sum(r for r in reach if r < 0), sum(r for r in reach if r > 0)
    return _Place(first + low, first + high + size, tuple(x.shape), strides, first, size)


def _shadow(x: _Place) -> Any:
    """A NumPy array at the same addresses, never read: NumPy's exact overlap test needs only addresses and strides."""
    interface = {
        "version": 3, "shape": x.shape, "strides": x.strides, "typestr": f"|V{x.size}", "data": (x.first, True),
    }  # fmt: skip
    return np.asarray(Memory(interface, None))


def _meet(x: _Place, y: _Place) -> bool:
    if x.end <= y.start or y.end <= x.start or x.empty or y.empty:
        return False
    apart = _apart_as_rectangles(x, y)
    return bool(np.shares_memory(_shadow(x), _shadow(y))) if apart is None else not apart


def _apart_as_rectangles(x: _Place, y: _Place) -> bool | None:
    """Whether two blocks of one row-major matrix differ in rows or in columns; None if they are not such blocks."""
    if len(x.shape) != 2 or len(y.shape) != 2 or x.strides != y.strides or x.size != y.size:
        return None
    pitch, step = x.strides
    row, col = divmod(y.first - x.first, pitch) if pitch > 0 else (0, 0)
    widths = x.shape[1] * step, y.shape[1] * step
    if step != x.size or max(widths) > pitch:
        return None
    # y starts `row` rows below and `col` bytes right of x; its columns may run over into the next row
    if col + widths[1] > pitch:
        return None
    return col >= widths[0] or row >= x.shape[0] or -row >= y.shape[0]


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


def meetings(outs: Sequence[Tensor], others: Sequence[Any]) -> Iterator[tuple[int, int]]:
    """The pairs (i, j) for which outs[i] shares a byte with others[j]. Only neighbours in memory are compared.

    All tensors must lie on one device. An operand that occurs many times is compared once.
    """
    near_by = _near_by(outs, others)
    if not near_by:  # the rule, and on the path of a call with `out`
        return
    groups = [_place(x) for x in outs], {j: _place(others[j]) for j in near_by}
    twins: dict[_Place, list[int]] = {}
    for j, place in groups[1].items():
        twins.setdefault(place, []).append(j)
    spans = [(p.start, p.end, 0, i) for i, p in enumerate(groups[0]) if not p.empty]
    spans += [(p.start, p.end, 1, js[0]) for p, js in twins.items() if not p.empty]
    near: tuple[list[tuple[int, int]], list[tuple[int, int]]] = [], []
    for start, end, side, at in sorted(spans):
        other = near[1 - side]
        other[:] = [s for s in other if s[0] > start]
        for _, to in other:
            i, j = (at, to) if side == 0 else (to, at)
            if _meet(groups[0][i], groups[1][j]):
                yield from ((i, twin) for twin in twins[groups[1][j]])
        near[side].append((end, at))


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
    """Two positions whose tensors share an element, or None. Only neighbours in memory are compared."""
    if len(tensors) < 2:
        return None
    places = [(_place(t), i) for i, t in enumerate(tensors)]
    near: list[tuple[_Place, int]] = []
    for place, i in sorted((p, i) for p, i in places if not p.empty):
        near = [(other, j) for other, j in near if other.end > place.start]
        for other, j in near:
            if _meet(place, other):
                return min(i, j), max(i, j)
        near.append((place, i))
    return None


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
