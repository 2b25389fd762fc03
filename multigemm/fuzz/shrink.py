"""Makes a failing case small: tries simpler cases and keeps those that still fail, until none does.

Only structure shrinks, since the numbers follow from mode and seed. `fails` may run the case in another process, so
that a kernel that kills its process can be shrunk as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

from multigemm.testing.case import Case
from multigemm.testing.strategies import legal

PLAIN = Case()
KEPT = ("form", "dtype", "m", "n", "k", "lengths", "dims", "mode", "seed", "c_dtype", "bias_dtype", "b_format")
"""Fields without a plain value of their own."""
ALONG = {"beta": ("c_dtype", "alias", "c"), "bias": ("bias_dtype",), "given": ("alias", "out")}
"""What becomes plain together with a field, because it means nothing without it."""
COARSE = ("tensor", "group")
"""What a scale may cover, from the simplest on, before it covers parts of a matrix."""


def _changed(case: Case, name: str, value: Any) -> Case:
    changes: dict[str, Any] = {name: value}
    return replace(case, **changes)


def _smaller(value: int) -> list[int]:
    return sorted({v for v in (0, 1, 2, value // 2, value - 1) if 0 <= v < value})


def _fewer_groups(case: Case) -> Iterator[Case]:
    name = "dims" if case.form == "per_group" else "lengths"
    items = getattr(case, name)
    count = len(items)
    step = count
    while step >= 1:
        for begin in range(0, count, step):
            if count > step:
                yield _changed(case, name, items[:begin] + items[begin + step :])
        step //= 2 if step > 1 or count <= 64 else step + 1


def _smaller_sizes(case: Case) -> Iterator[Case]:
    for name in "mnk":
        for value in _smaller(getattr(case, name)):
            if case.form == "masked" and name == "m":
                yield replace(case, m=value, lengths=tuple(min(n, value) for n in case.lengths))
            else:
                yield _changed(case, name, value)
    if case.form == "batched":
        return
    for g, length in enumerate(case.lengths[:16]):
        for value in _smaller(length):
            yield replace(case, lengths=(*case.lengths[:g], value, *case.lengths[g + 1 :]))
    for g, size in enumerate(case.dims[:16]):
        for axis in range(3):
            for value in _smaller(size[axis]):
                smaller = tuple(value if i == axis else e for i, e in enumerate(size))
                yield _changed(case, "dims", (*case.dims[:g], smaller, *case.dims[g + 1 :]))


def _plainer_values(name: str, own: Any, plain: Any) -> Iterator[Any]:
    """Simpler values of a field: the plain one, and for a dataclass those with one simpler field."""
    if own == plain:
        return
    if name == "rows":
        yield from _smaller(own)
    elif name == "covers":
        yield from COARSE[: COARSE.index(own)] if own in COARSE else COARSE
    else:
        yield plain
    for field in fields(own) if is_dataclass(own) else ():
        for value in _plainer_values(field.name, getattr(own, field.name), getattr(plain, field.name)):
            yield replace(own, **{field.name: value})


def _plainer(case: Case) -> Iterator[Case]:
    if case.quantised:
        yield replace(case, dtype="bfloat16", dtype_b="", mode="int", alpha=float(round(case.alpha)))
    for name in (field.name for field in fields(Case) if field.name not in KEPT):
        if case.alias and name in ("c", "out"):
            continue  # one tensor, which has one layout
        for value in _plainer_values(name, getattr(case, name), getattr(PLAIN, name)):
            along = {other: getattr(PLAIN, other) for other in ALONG.get(name, ())}
            yield replace(case, **{name: value}, **along)
    if case.mode != "int" and not case.bias and not case.beta:
        yield replace(case, mode="int", alpha=float(round(case.alpha)))


def simpler(case: Case) -> Iterator[Case]:
    """Cases that are simpler in one respect, the largest step first."""
    for propose in (_fewer_groups, _plainer, _smaller_sizes):
        for candidate in propose(case):
            candidate = legal(candidate)
            if candidate != case:
                yield candidate


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 20.0) -> Case:
    """The smallest failing case found within the time."""
    deadline = time.monotonic() + seconds
    progress = True
    while progress and time.monotonic() < deadline:
        progress = False
        for candidate in simpler(case):
            if time.monotonic() > deadline:
                break
            if fails(candidate):
                case, progress = candidate, True
                break
    return case
