"""Kinds of problems: what compiled kernels are keyed by, apart from sizes and values.

A campaign over a fixed set of kinds compiles each kernel once and then spends its time on running.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from multigemm.testing.case import PLAIN, Case, Layout, classes
from multigemm.testing.strategies import (
    DISTINCT,
    WHOLE,
    Chooser,
    Limits,
    draw_case,
    legal,
    random_case,
    settled,
    stretched,
    structure,
)


def redrawn(kind: Case, ch: Chooser, limits: Limits) -> Case:
    """Other sizes, values and offsets of the same kind: same form, dtypes, layouts and epilogue.

    Compiled kernels are keyed by the kind, so a campaign that draws several problems of each spends
    its time on running rather than on compiling.
    """
    sizes = structure(ch, replace(limits, forms=(kind.form,)))
    keep: dict[str, Any] = {name: sizes[name] for name in ("m", "n", "k", "lengths", "dims", "tail") if name in sizes}
    if kind.kind == "offsets" and "head" in sizes:
        keep["head"] = ch.choice((0, 0, 1, 3, 9))
    whole = kind.mode in WHOLE
    alike = [m for m in limits.modes if (m in WHOLE) == whole]
    modes = [m for m in alike if m not in ("bitmask", "special")]
    if kind.a.zero or kind.b.zero:
        modes = [m for m in modes if m not in DISTINCT]
    mode = kind.mode if kind.dtype == "int8" or kind.mode in ("bitmask", "special") or not modes else ch.choice(modes)
    case = replace(kind, **keep, mode=mode, seed=ch.integer(0, 2**31 - 1))
    return settled(stretched(ch, case, limits), limits)


def cousin(kind: Case, ch: Chooser, limits: Limits) -> Case:
    """Another problem with the kind's dtypes and the layouts of its operands; its own form and epilogue."""
    if kind.dtype_b:
        return redrawn(kind, ch, limits)
    other = draw_case(ch, replace(limits, dtypes=(kind.dtype,)))
    kept = {name: getattr(kind, name) for name in ("precision", "a", "b", "aligned")}
    if {other.c_dtype, other.bias_dtype} <= {"", kind.dtype, "float32"} and not other.alias:
        kept["out_dtype"] = kind.out_dtype
    if kind.a.zero or kind.b.zero:
        kept["mode"] = kind.mode
    return settled(replace(other, **kept), limits)


def _pairs(case: Case) -> set[tuple[str, str]]:
    """Pairs of what a compiled kernel may depend on: form, dtypes, layouts, epilogue."""
    traits = [
        name
        for name in classes(case)
        if not name.startswith(("odd:", "zero:", "empty:", "groups:", "long:", "stretched:", "mode:"))
    ]
    traits += [f"result:{case.result_dtype}", f"sides:{case.a.order}{case.b.order}"]
    if case.dtype == "int8" or case.mode in ("bitmask", "special"):
        traits.append(f"mode:{case.mode}")
    return {(x, y) for x in traits for y in traits if x <= y}


def kinds(limits: Limits, count: int, seed: int = 0) -> list[Case]:
    """`count` cases: the plainest of each form first, then those that together show as many pairs of traits
    as a greedy choice can find.

    Sizes and values are to be drawn anew with `redrawn`: a campaign over a fixed set of kinds compiles
    each kernel once and then spends its time on running.
    """
    pool = [random_case(seed + i, limits) for i in range(max(1200, 12 * count))]
    fast = [case for case in pool if case.aligned and case.dtype in ("float16", "bfloat16") and not case.dtype_b]
    first = [*plain_kinds(limits)[: count // 4], *_cover(fast, count // 3)]
    return first + _cover([case for case in pool if case not in first], count - len(first))


def plain_kinds(limits: Limits) -> list[Case]:
    """What users run most: 16-bit floats without an epilogue, laid out as fast kernels like them."""
    found = []
    for dtype, order, mode in (("bfloat16", "row", "int"), ("float16", "col", "normal")):
        for form in limits.forms if dtype in limits.dtypes else ():
            a, b = (Layout("col"), PLAIN) if form == "jagged_k" else (PLAIN, Layout(order))
            sizes = {"dims": ((16, 16, 16),)} if form == "per_group" else {"m": 16, "n": 16, "k": 16, "lengths": (16,)}
            case = Case(form=form, dtype=dtype, mode=mode, aligned=True, a=a, b=b, **sizes)
            found.append(legal(case))
    return found


def _cover(pool: list[Case], count: int) -> list[Case]:
    """Greedily the cases that show the most new pairs of traits."""
    traits = [_pairs(case) for case in pool]
    seen: set[tuple[str, str]] = set()
    chosen: list[int] = []
    for _ in range(min(count, len(pool))):
        best = max((i for i in range(len(pool)) if i not in chosen), key=lambda i: len(traits[i] - seen))
        chosen.append(best)
        seen |= traits[best]
    return [pool[i] for i in chosen]
