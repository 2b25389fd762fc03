"""The products of one problem, as the library will be called: pure host arithmetic on addresses.

Groups are cut by host offsets, empty ones dropped, and joined where the same matrix product says
it: all groups that share their weights are one product over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multigemm.backends.cublas.leading import Leading, Shape, leading, shape_of
from multigemm.planning.operands import TABLE, Packed

Ints = npt.NDArray[np.int64]
Forms = tuple[Leading | None, Leading | None, Leading | None]


class Product(NamedTuple):
    """One matrix product: its shape, the addresses of first and second operand and result, and of a bias (or 0)."""

    shape: Shape
    first: int
    second: int
    out: int
    bias: int = 0


@dataclass(frozen=True, slots=True)
class Bytes:
    """Element sizes of the operands (equal for a and b) and of the result."""

    operand: int
    out: int


def cut(offsets: Ints, extent: int) -> tuple[Ints, Ints]:
    """Starts and ends per group, clamped as the kernels clamp them."""
    starts = np.clip(offsets[:-1], 0, extent)
    return starts, np.clip(offsets[1:], starts, extent)


def joined(extent: int, group: int, stride: int) -> int | None:
    """The stride of the stacked rows of all groups as one matrix, or None if they do not line up."""
    if extent == 1:
        return group
    return stride if group == extent * stride else None


def _as_one(p: Packed) -> Packed | None:
    """A batch that shares one operand, as one product of stacked rows (or columns); None if it is not one."""
    if p.jagged is not None or p.groups < 2 or (p.bias is not None and p.bias.group):
        return None
    if p.b.group == 0 and p.a.group:
        a, out = joined(p.m, p.a.group, p.a.row), joined(p.m, p.out.group, p.out.row)
        if a is not None and out is not None:
            whole = p.groups * p.m
            return Packed(1, whole, p.n, p.k, None, p.a._replace(group=0, row=a), p.b,
                          p.out._replace(group=0, row=out), None, p.bias)  # fmt: skip
    if p.a.group == 0 and p.b.group and p.bias is None:
        b, out = joined(p.n, p.b.group, p.b.col), joined(p.n, p.out.group, p.out.col)
        if b is not None and out is not None:
            whole = p.groups * p.n
            return Packed(1, p.m, whole, p.k, None, p.a, p.b._replace(group=0, col=b),
                          p.out._replace(group=0, col=out), None, None)  # fmt: skip
    return None


def packed_forms(p: Packed) -> Forms:
    """The BLAS forms of a, b and out of a packed problem; None where a copy is needed."""
    return (
        leading(p.m, p.k, p.a.row, p.a.col),
        leading(p.k, p.n, p.b.row, p.b.col),
        leading(p.m, p.n, p.out.row, p.out.col),
    )


def _shares(p: Packed) -> bool:
    if p.bias is not None and p.bias.group:
        return False
    return (p.jagged == "m" and p.b.group == 0) or (p.jagged == "n" and p.a.group == 0)


def packed_products(p: Packed, size: Bytes, offsets: Ints | None, valid: Ints | None) -> list[Product]:
    """The non-empty products of a packed problem, groups in order. Products with K = 0 are left out too."""
    if valid is None and (one := _as_one(p)) is not None and all(packed_forms(one)):
        p = one
    starts, ends = np.zeros(p.groups, np.int64), np.zeros(p.groups, np.int64)
    if offsets is not None and p.groups:
        starts, ends = cut(offsets, {"m": p.m, "n": p.n, "k": p.k}[p.jagged or "m"])
        if _shares(p) and np.array_equal(starts[1:], ends[:-1]):
            starts, ends = starts[:1], ends[-1:]
    lengths = (ends - starts).tolist() if valid is None else np.clip(valid, 0, p.m).tolist()
    return _cut_products(p, size, starts.tolist(), lengths, _expressible(packed_forms(p)), valid is not None)


def _cut_products(
    p: Packed, size: Bytes, starts: list[int], lengths: list[int], forms: tuple[Leading, Leading, Leading], masked: bool
) -> list[Product]:
    a_step, b_step, out_step = _steps(p)
    by_rows, found = forms[2].by_rows, []
    shapes: dict[int, Shape] = {}
    cut_by = "m" if masked else p.jagged
    for g, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        shape = shapes.get(length)
        if shape is None:
            m, n, k = (length if cut_by == axis else whole for axis, whole in (("m", p.m), ("n", p.n), ("k", p.k)))
            shape = shapes[length] = shape_of(m, n, k, *forms)
        if not (shape.m and shape.n and shape.k):
            continue
        a = p.a.ptr + (g * p.a.group + start * a_step) * size.operand
        b = p.b.ptr + (g * p.b.group + start * b_step) * size.operand
        out = p.out.ptr + (g * p.out.group + start * out_step) * size.out
        bias = 0 if p.bias is None else p.bias.ptr + g * p.bias.group * size.out
        found.append(Product(shape, b, a, out, bias) if by_rows else Product(shape, a, b, out, bias))
    return found


def _steps(p: Packed) -> tuple[int, int, int]:
    """How far a, b and out move per element of the jagged direction."""
    return {
        "m": (p.a.row, 0, p.out.row),
        "n": (0, p.b.col, p.out.col),
        "k": (p.a.col, p.b.row, 0),
        None: (0, 0, 0),
    }[p.jagged]


def _expressible(forms: Forms) -> tuple[Leading, Leading, Leading]:
    """The forms of operands that were staged before, so that none is missing."""
    a, b, out = forms
    assert a is not None
    assert b is not None
    assert out is not None
    return a, b, out


def list_forms(table: Ints) -> list[Forms]:
    """The BLAS forms of a, b and out of each product of a list."""
    return [
        (
            leading(r[TABLE.M], r[TABLE.K], r[TABLE.A_ROW], r[TABLE.A_COL]),
            leading(r[TABLE.K], r[TABLE.N], r[TABLE.B_ROW], r[TABLE.B_COL]),
            leading(r[TABLE.M], r[TABLE.N], r[TABLE.OUT_ROW], r[TABLE.OUT_COL]),
        )
        for r in table.tolist()
    ]


def list_products(table: Ints) -> list[Product]:
    """The non-empty products of a list, in order."""
    found = []
    for row, (a, b, out) in zip(table.tolist(), list_forms(table), strict=True):
        m, n, k = row[TABLE.M], row[TABLE.N], row[TABLE.K]
        if m and n and k:
            forms = _expressible((a, b, out))
            shape, by_rows = shape_of(m, n, k, *forms), forms[2].by_rows
            pair = (row[TABLE.B], row[TABLE.A]) if by_rows else (row[TABLE.A], row[TABLE.B])
            found.append(Product(shape, *pair, row[TABLE.OUT], row[TABLE.BIAS]))
    return found


def merged(products: list[Product]) -> list[tuple[Shape, list[Product]]]:
    """Products of one shape together, the largest work first, order kept within a shape."""
    keyed = sorted(products, key=lambda p: (-p.shape.m * p.shape.n * p.shape.k, p.shape))
    return [(shape, list(same)) for shape, same in groupby(keyed, key=lambda p: p.shape)]


def even_steps(products: list[Product]) -> tuple[int, int, int] | None:
    """The constant distance in bytes between successive addresses of each operand, or None."""
    table = np.array([(p.first, p.second, p.out) for p in products], dtype=np.int64)
    steps = np.diff(table, axis=0)
    if len(steps) and not (steps == steps[0]).all():
        return None
    first, second, out = (int(v) for v in (steps[0] if len(steps) else (0, 0, 0)))
    return None if min(first, second) < 0 or out <= 0 else (first, second, out)
