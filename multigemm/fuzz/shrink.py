"""Makes a failing case small: tries simpler cases and keeps those that still fail, until none does.

Only structure shrinks, since the numbers follow from mode and seed. `fails` may run the case in another process, so
that a kernel that kills its process can be shrunk as well.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields, replace
from typing import Any

from multigemm.testing.case import INDICES, NO_ROWS, PLAIN, UNFUSED, UNSCALED, Case, Fused, Scale
from multigemm.testing.strategies import legal

SIMPLE: dict[str, Any] = {
    f.name: getattr(Case(), f.name)
    for f in fields(Case)
    if f.name not in ("form", "dtype", "m", "n", "k", "lengths", "dims", "mode", "seed")
}


PLAINER = (
    "activation",
    "out_dtype",
    "dtype_b",
    "head",
    "tail",
    "shared",
    "where",
    "index",
    "kind",
    "precision",
    "alpha",
    "accumulate",
)


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


def _plainer(case: Case) -> Iterator[Case]:
    if case.beta or case.c_dtype:
        yield replace(case, beta=0.0, c_dtype="", alias=False, c=PLAIN)
    if case.alias:
        yield replace(case, alias=False)
    if case.bias:
        yield replace(case, bias="", bias_dtype="")
    if case.given and not case.alias:
        yield replace(case, given=False, out=PLAIN)
    if case.quantised:
        yield from _plainer_numbers(case)
    if case.is_fused:
        yield from _less_fused(case)
    for name in PLAINER:
        if getattr(case, name) != SIMPLE[name] and not (name == "kind" and case.head):
            yield _changed(case, name, SIMPLE[name])
    for name in ("a", "b", "c", "out"):
        layout = getattr(case, name)
        if layout != PLAIN and not (case.alias and name in ("c", "out")):
            yield _changed(case, name, PLAIN)
            for part in ("order", "pad", "shift", "step", "zero"):
                if getattr(layout, part) != getattr(PLAIN, part):
                    yield _changed(case, name, replace(layout, **{part: getattr(PLAIN, part)}))
    if case.mode != "int" and not case.bias and not case.beta:
        yield replace(case, mode="int", alpha=float(round(case.alpha)))


def _plainer_numbers(case: Case) -> Iterator[Case]:
    """Simpler cases with operands that are not quantised, or with fewer and plainer scales."""
    unscaled = replace(case, scale_a=UNSCALED, scale_b=UNSCALED, zero_b="")
    yield replace(unscaled, dtype="bfloat16", dtype_b="", b_format="", mode="int", alpha=float(round(case.alpha)))
    if case.zero_b:
        yield replace(case, zero_b="")
    for name in ("scale_a", "scale_b"):
        scale: Scale = getattr(case, name)
        coarser = ["", "tensor", "group"]
        if scale.covers in coarser:
            del coarser[coarser.index(scale.covers) :]
        plainer = [UNSCALED if not covers else Scale(covers) for covers in coarser]
        plainer += [replace(scale, layout=PLAIN), replace(scale, dtype="float32")]
        yield from (_changed(case, name, other) for other in plainer if other != scale)


def _less_fused(case: Case) -> Iterator[Case]:
    """Simpler cases with nothing fused, or with one index, weight or gate number fewer, or with an index that is
    valid."""
    fused = case.fused
    yield replace(case, fused=UNFUSED, activation=None if case.gated else case.activation)
    for name, value in asdict(UNFUSED).items():
        if name not in INDICES and getattr(fused, name) != value:
            yield replace(case, fused=_changed_part(fused, name, value))
    for name in INDICES:
        index = getattr(fused, name)
        simpler_ones = [
            NO_ROWS,
            replace(index, how="honest"),
            replace(index, host=False),
            replace(index, dtype="int64"),
        ]
        simpler_ones += [replace(index, rows=rows) for rows in _smaller(index.rows)]
        for other in simpler_ones if index.given else ():
            yield replace(case, fused=_changed_part(fused, name, other))


def _changed_part(fused: Fused, name: str, value: Any) -> Fused:
    changes: dict[str, Any] = {name: value}
    return replace(fused, **changes)


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
