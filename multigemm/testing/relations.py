"""Metamorphic relations: a problem changed in a way whose effect on the answer is known.

Each relation gives another case with its own contents and says how its result leads back to the
first one. The changed problem is judged by the reference like any other; beyond that the two results
must agree to the last bit where every sum is exact, where nothing that a kernel may depend on has
changed (empty groups, under the same config), where a power of two only shifts exponents, and, for
batch-invariant cases, where each row meets the same columns, whatever config ran.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from multigemm.problem.arrays import dtype_name
from multigemm.testing.case import Case, RowNumbers
from multigemm.testing.oracles import Finding, Outcome, check
from multigemm.testing.placed_case import DeviceCase, PlacedCase
from multigemm.testing.subject import Subject
from multigemm.testing.values import Array, Operand, Values

Blocks = list[Array]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Relation:
    """A derived problem. `recover` turns its groups' results into the first problem's, times `factor`, or into the part
    of them that `select` takes.

    `same_bits` holds when both must agree bit for bit although sums are rounded; `same_rows` says that each row meets
    the same columns in both, so that batch invariance promises the same bits, down to the signs of zeros.
    """

    name: str
    case: Case
    values: Values
    recover: Callable[[Blocks], Blocks]
    same_bits: bool = False
    factor: float = 1.0
    same_rows: bool = True
    select: Callable[[Blocks], Blocks] = lambda y: y


def _insert(x: Operand | None, at: list[int], filler: float) -> Operand | None:
    if x is None:
        return None
    if isinstance(x, list):
        raise TypeError("lists are handled by the caller")
    return np.insert(x, at, 77 if x.dtype.kind == "i" else filler, axis=0)


def _grouped(case: Case) -> tuple[bool, bool, bool]:
    """Whether a, b and c have a group axis."""
    stacked = case.form in ("batched", "masked")
    return (
        stacked or (case.form == "jagged_n" and not case.shared),
        stacked or (case.form == "jagged_m" and not case.shared),
        stacked or case.form == "jagged_k",
    )


def empties(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Adds and removes groups without rows (or columns, or k), which must not matter, whatever their operands hold."""
    case, values = placed.case, placed.values
    if case.form in ("batched", "per_group"):
        return None
    at = sorted(int(p) for p in rng.integers(0, case.groups, 3, endpoint=True))
    lengths = np.insert(np.array(case.lengths, dtype=np.int64), at, 0)
    has = _grouped(case)
    filled = Values(
        _insert(values.a, at, np.nan) if has[0] else values.a,  # type: ignore[arg-type]
        _insert(values.b, at, np.nan) if has[1] else values.b,  # type: ignore[arg-type]
        _insert(values.c, at, 1.0) if has[2] else values.c,
        _insert(values.bias, at, 1.0) if case.bias == "gn" else values.bias,
    )
    fresh = {p + i for i, p in enumerate(at)}
    wider = replace(case, lengths=tuple(int(n) for n in lengths))
    return Relation("empty groups", wider, filled, lambda y: [b for g, b in enumerate(y) if g not in fresh], True)


def _rearranged(
    placed: PlacedCase, lengths: Sequence[int], groups: Sequence[int], along: Index | None = None
) -> tuple[Case, Values]:
    """The problem whose group i has the matrices of the given one's group `groups[i]`, and at place j along the jagged
    extent what that has at `along[j]`."""
    case, values = placed.case, placed.values
    axes = {"m": (0, None, 0), "n": (None, 1, 1), "k": (1, 0, None)}.get(case.jagged, (None, None, None))

    def moved(x: Any, axis: int | None, has_groups: bool) -> Any:
        if x is None:
            return None
        x = x[groups] if has_groups else x
        return x if axis is None or along is None else np.take(x, along, axis=axis)

    a, b, c = (
        moved(x, axis, has_groups)
        for x, axis, has_groups in zip((values.a, values.b, values.c), axes, _grouped(case), strict=True)
    )
    bias = moved(values.bias, 0 if case.form == "jagged_n" else None, case.bias == "gn")
    return replace(case, lengths=tuple(map(int, lengths))), Values(a, b, c, bias)


def permuted(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Reorders the groups, which must not matter."""
    case, values = placed.case, placed.values
    order = [int(g) for g in rng.permutation(case.groups)]
    back = np.argsort(order)

    def recover(y: Blocks) -> Blocks:
        return [y[int(g)] for g in back]

    if case.form == "per_group":
        lists = [None if x is None else [x[g] for g in order] for x in (values.a, values.b, values.c, values.bias)]
        moved = replace(case, dims=tuple(case.dims[g] for g in order))
        return Relation("permuted groups", moved, Values(*lists), recover)  # type: ignore[arg-type]
    along = _along(case, [np.arange(length) for length in case.lengths], order)
    return Relation("permuted groups", *_rearranged(placed, [case.lengths[g] for g in order], order, along), recover)


def _along(case: Case, parts: Sequence[Index], order: Sequence[int]) -> Index:
    """Places along the jagged extent: the head, of each group in order the places counted from its start, the tail."""
    starts = np.cumsum([case.head, *case.lengths])
    groups = [starts[g] + parts[g] for g in order]
    return np.concatenate([np.arange(case.head), *groups, np.arange(starts[-1], case.total)]).astype(np.int64)


def split(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Splits a group's rows (or columns) into two groups with the same other operand."""
    case = placed.case
    long = [g for g, n in enumerate(case.lengths) if n > 1]
    if case.form not in ("jagged_m", "jagged_n") or not long:
        return None
    g = int(rng.choice(long))
    first = int(rng.integers(1, case.lengths[g]))
    lengths = (*case.lengths[:g], first, case.lengths[g] - first, *case.lengths[g + 1 :])
    groups = [*range(g + 1), *range(g, case.groups)]
    axis = 0 if case.form == "jagged_m" else 1

    def recover(y: Blocks) -> Blocks:
        return [*y[:g], np.concatenate(y[g : g + 2], axis=axis), *y[g + 2 :]]

    return Relation("split group", *_rearranged(placed, lengths, groups), recover)


def transposed(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Computes (B^T A^T)^T: jagged rows become jagged columns."""
    case, values = placed.case, placed.values
    if case.bias or case.form == "masked":
        return None

    def turn(x: Any) -> Any:
        if x is None:
            return None
        return [each.T for each in x] if isinstance(x, list) else np.swapaxes(x, -1, -2)

    names: dict[str, Any] = {"jagged_m": "jagged_n", "jagged_n": "jagged_m"}
    turned = replace(
        case, form=names.get(case.form, case.form), m=case.n, n=case.m, dims=tuple((n, m, k) for m, n, k in case.dims),
        dtype=case.dtype_b or case.dtype, dtype_b=case.dtype,
        a=case.b.turned, b=case.a.turned, c=case.c.turned, out=case.out.turned,
        out_dtype=dtype_name(case.result_dtype) if case.compute != torch.int8 else "",
    )  # fmt: skip
    turned_values = Values(turn(values.b), turn(values.a), turn(values.c), None)
    return Relation("transposed", turned, turned_values, turn, same_rows=False)


def as_list(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Passes a packed problem as a list of products."""
    case = placed.case
    if case.form == "per_group" or case.groups > 64:
        return None
    views = list(placed.problem.groups())

    def contents(name: str) -> list[Array]:
        from multigemm.reference.dtypes import widen

        return [widen(getattr(view, name)) for view in views]

    listed = replace(
        case, form="per_group", dims=tuple(case.sizes()), m=0, n=0, k=0, lengths=(), head=0, tail=0, shared=False,
        bias="n" if case.bias else "", a=replace(case.a, pad=0), b=replace(case.b, pad=0), c=case.c,
        out=replace(case.out, pad=0),
    )  # fmt: skip
    listed = replace(listed, c=listed.out) if case.alias else listed
    c = contents("c") if case.c_dtype else None
    bias = contents("bias") if case.bias else None
    return Relation("as a list", listed, Values(contents("a"), contents("b"), c, bias), lambda y: y)


def scaled(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Multiplies by a power of two, which only shifts exponents."""
    case, values = placed.case, placed.values
    plain = not case.beta and not case.bias and case.activation in (None, "relu") and case.compute != torch.int8
    if not plain or case.mode not in ("normal", "uniform", "cancel"):
        return None
    times: Any = [x * 4.0 for x in values.a] if isinstance(values.a, list) else values.a * 4.0
    return Relation("scaled by 4", case, replace(values, a=times), lambda y: y, True, 4.0, same_rows=False)


def _crowd(count: int, rng: np.random.Generator) -> tuple[Index, Index]:
    """Rows in another order with copies of some among them, and where each of the first `count` lies then."""
    rows = np.concatenate((np.arange(count), rng.integers(0, count, int(rng.integers(0, 9)) if count else 0)))
    order = rng.permutation(len(rows))
    return rows[order], np.argsort(order)[:count]


def crowded(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Reorders each group's rows, and adds other rows."""
    case = placed.case
    if case.form != "jagged_m":
        return None
    crowds = [_crowd(length, rng) for length in case.lengths]
    groups = range(case.groups)
    along = _along(case, [rows for rows, _ in crowds], groups)

    def recover(y: Blocks) -> Blocks:
        return [block[places] for block, (_, places) in zip(y, crowds, strict=True)]

    return Relation(
        "rows among others", *_rearranged(placed, [len(rows) for rows, _ in crowds], groups, along), recover
    )


def alone(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Computes some rows and columns of one group alone, as a list of one product."""
    listed = as_list(placed, rng)
    case, values = (placed.case, placed.values) if listed is None else (listed.case, listed.values)
    owners = [g for g, (m, n, _) in enumerate(case.dims) if m and n]
    if case.form != "per_group" or not owners:
        return None
    g = int(rng.choice(owners))
    m, n, k = case.dims[g]
    rows, columns = (slice(*np.sort(rng.choice(extent + 1, 2, replace=False)).tolist()) for extent in (m, n))
    a, b, c, bias = (None if x is None else x[g] for x in (values.a, values.b, values.c, values.bias))
    assert a is not None
    assert b is not None
    part = Values(
        [a[rows]], [b[:, columns]], None if c is None else [c[rows, columns]], None if bias is None else [bias[columns]]
    )
    single = replace(case, dims=((rows.stop - rows.start, columns.stop - columns.start, k),))
    return Relation("alone", single, part, lambda y: y, select=lambda y: [y[g][rows, columns]])


def every_row(placed: PlacedCase, rng: np.random.Generator) -> Relation | None:
    """Passes indices that name every row in order, which must change no bit."""
    case = placed.case
    if case.form not in ("jagged_m", "jagged_k") or case.fused.a_rows.given or case.fused.b_rows.given:
        return None
    by_number = replace(case.fused, a_rows=RowNumbers(case.total, "int32", "every"))
    return Relation("rows by number", replace(case, fused=by_number), placed.values, lambda y: y, same_bits=True)


RELATIONS = (empties, permuted, split, transposed, as_list, scaled, crowded, alone, every_row)
FUSED_RELATIONS = (every_row,)


def blocks(placed: PlacedCase, outputs: torch.Tensor) -> Blocks:
    """Each group's part of a result; all of it if its rows are sums of rows of any group."""
    from multigemm.reference.dtypes import to_numpy

    views = placed.results(outputs)
    if placed.case.form == "per_group" or placed.case.fused.rows is not None:
        return [to_numpy(view) for view in views]
    whole = to_numpy(views[0])
    return [whole[view.where] for view in placed.problem.groups()]


def _disagreement(one: Blocks, two: Blocks, factor: float) -> str:
    for g, (x, y) in enumerate(zip(one, two, strict=True)):
        p, q = x.astype(np.float64) * factor, y.astype(np.float64)
        same = (p == q) | (np.isnan(p) & np.isnan(q))
        if factor != 1.0:
            same |= (np.abs(p) < 2.0**-9) | ~np.isfinite(q)  # subnormal or overflowing results round differently
        if not same.all():
            at = tuple(map(int, np.argwhere(~same)[0]))
            return f"group {g}, element {at}: {p[at]!r} became {q[at]!r} ({int((~same).sum())} differ)"
    return ""


def _differing_bits(one: Blocks, two: Blocks) -> str:
    """Whether any bit differs, including signs of zeros and payloads of NaN."""
    for g, (x, y) in enumerate(zip(one, two, strict=True)):
        p, q = (np.ascontiguousarray(v).view(np.dtype(f"u{v.dtype.itemsize}")) for v in (x, y))
        if (p != q).any():
            at = tuple(map(int, np.argwhere(p != q)[0]))
            seen = f"{x[at]!r} (0x{int(p[at]):x}) became {y[at]!r} (0x{int(q[at]):x})"
            return f"group {g}, element {at}: {seen}, and batch_invariant=True ({int((p != q).sum())} differ)"
    return ""


def relate(device_case: DeviceCase, subject: Subject, outcome: Outcome, seed: int) -> int:
    """Checks the relations that fit a case which was found right. Returns how many were checked."""
    placed, rng, done = device_case.placed, np.random.default_rng(seed), 0
    case = placed.case
    if outcome.result is None or case.quantised or case.a.zero or case.b.zero or case.c.zero:
        return 0
    for make in FUSED_RELATIONS if case.is_fused else RELATIONS:
        relation = make(placed, rng)
        if relation is None:
            continue
        done += 1
        other = DeviceCase.build(PlacedCase.build(relation.case, relation.values), device_case.device)
        second = check(other, subject)
        outcome.findings += [Finding(f"relation: {relation.name}", str(f)) for f in second.findings]
        if second.findings or not second.ran or second.result is None:
            continue
        same_kernel = subject.own_kernels and (second.kernel, second.config) == (outcome.kernel, outcome.config)
        promised = case.batch_invariant and relation.same_rows
        if not (placed.exact or promised or (relation.same_bits and same_kernel)):
            continue
        first = relation.select(blocks(placed, outcome.result))
        derived = relation.recover(blocks(other.placed, second.result))
        text = _disagreement(first, derived, relation.factor)
        if promised and not text:
            text = _differing_bits(first, derived)
        if text:
            outcome.findings.append(Finding(f"relation: {relation.name}", text))
    return done
