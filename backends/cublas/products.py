"""The products of one problem, as the library will be called: pure host arithmetic on strides and addresses.

BLAS knows column-major matrices with one leading dimension. A row-major matrix is the transpose of
one, so a row-major result is computed as C^T = B^T A^T, with the operands swapped. Whatever has no
unit stride, repeats elements by a zero stride, or overlaps itself has no such form and needs a copy.
So does a matrix whose lines lie further apart than cuBLAS counts: `countable` is the one rule of that.
Groups are cut by host offsets, empty ones dropped, and joined where the same matrix product says
it: all groups that share their weights are one product over all rows.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from multigemm.planning.operands import TABLE, Packed

Ints = npt.NDArray[np.int64]
NO_TRANSPOSE, TRANSPOSE = 0, 1
FARTHEST_ELEMENTS, FARTHEST_BYTES = 1 << 30, 1 << 31
"""From this distance on some kernels of cuBLAS 13 count in too few bits: seen with 16-bit results whose rows lie
2^30 + 8 elements apart (illegal memory access) and with int8 rows 2^31 elements apart (NOT_SUPPORTED). torch's
grouped_mm cuts leading dimensions to 32 bits. The documentation promises 64 bits and names no limit, so this one holds
for every operand and every dtype, whichever kernel the library picks."""


def countable(distance: int, itemsize: int) -> bool:
    """Whether cuBLAS may be given lines, or matrices of a strided batch, that lie so many elements apart."""
    return distance < FARTHEST_ELEMENTS and distance * itemsize < FARTHEST_BYTES


class Leading(NamedTuple):
    """A matrix that BLAS can read: stored by rows or by columns, with that leading dimension."""

    by_rows: bool
    ld: int


class Shape(NamedTuple):
    """What two calls must have in common to be one batched call: extents, transposes, leading dimensions.

    In the library's order: `m` is the contiguous extent of the result.
    """

    op_first: int
    op_second: int
    m: int
    n: int
    k: int
    ld_first: int
    ld_second: int
    ld_out: int


def leading(rows: int, cols: int, row: int, col: int, itemsize: int) -> Leading | None:
    """The BLAS form of a [rows, cols] matrix with strides row and col in elements, or None.

    A stride of a dimension with one element means nothing and is replaced by the smallest legal one.
    A contiguous column counts as stored by columns: int8 calls are told of K's contiguity that way.
    """
    if cols <= 1 and row == 1 and rows > 1:
        return Leading(False, rows)
    if cols <= 1 or col == 1:
        if rows <= 1:
            return Leading(True, max(cols, 1))
        if row >= max(cols, 1):
            return Leading(True, row) if countable(row, itemsize) else None
    if rows <= 1 or row == 1:
        if cols <= 1:
            return Leading(False, max(rows, 1))
        if col >= max(rows, 1):
            return Leading(False, col) if countable(col, itemsize) else None
    return None


def shape_of(m: int, n: int, k: int, a: Leading, b: Leading, out: Leading) -> Shape:
    """The call's shape; for a result by rows the library's first operand is B, else it is A."""
    if out.by_rows:
        first = NO_TRANSPOSE if b.by_rows else TRANSPOSE
        second = NO_TRANSPOSE if a.by_rows else TRANSPOSE
        return Shape(first, second, n, m, k, b.ld, a.ld, out.ld)
    first = TRANSPOSE if a.by_rows else NO_TRANSPOSE
    second = TRANSPOSE if b.by_rows else NO_TRANSPOSE
    return Shape(first, second, m, n, k, a.ld, b.ld, out.ld)


# --- groups and products ---

Forms = tuple[Leading | None, Leading | None, Leading | None]


class Product(NamedTuple):
    """One matrix product: its shape, and the addresses of first and second operand and result."""

    shape: Shape
    first: int
    second: int
    out: int


class Bytes(NamedTuple):
    """Element sizes of the operands (equal for a and b) and of the result."""

    operand: int
    out: int


def cut(offsets: Ints, extent: int) -> tuple[list[int], list[int]]:
    """Where each group starts, clamped as the kernels clamp it, and its length."""
    bounds = offsets.tolist()
    starts, lengths, start = [], [], bounds[0]
    for end in bounds[1:]:
        start = 0 if start < 0 else extent if start > extent else start
        length = (extent if end > extent else end) - start
        starts.append(start)
        lengths.append(length if length > 0 else 0)
        start = end
    return starts, lengths


def joined(extent: int, group: int, stride: int) -> int | None:
    """The stride of the stacked rows of all groups as one matrix, or None if they do not line up."""
    if extent == 1:
        return group
    return stride if group == extent * stride else None


def _as_one(p: Packed) -> Packed | None:
    """A batch that shares one operand, as one product of stacked rows (or columns); None if it is not one."""
    if p.groups < 2:
        return None
    if p.b.group == 0 and p.a.group:
        a, out = joined(p.m, p.a.group, p.a.row), joined(p.m, p.out.group, p.out.row)
        if a is not None and out is not None:
            whole = p.groups * p.m
            return Packed(1, whole, p.n, p.k, None, p.a._replace(group=0, row=a), p.b,
                          p.out._replace(group=0, row=out), None, None)  # fmt: skip
    if p.a.group == 0 and p.b.group:
        b, out = joined(p.n, p.b.group, p.b.col), joined(p.n, p.out.group, p.out.col)
        if b is not None and out is not None:
            whole = p.groups * p.n
            return Packed(1, p.m, whole, p.k, None, p.a, p.b._replace(group=0, col=b),
                          p.out._replace(group=0, col=out), None, None)  # fmt: skip
    return None


def packed_forms(p: Packed, size: Bytes) -> Forms:
    """The BLAS forms of a, b and out of a packed problem; None where a copy is needed."""
    return (
        leading(p.m, p.k, p.a.row, p.a.col, size.operand),
        leading(p.k, p.n, p.b.row, p.b.col, size.operand),
        leading(p.m, p.n, p.out.row, p.out.col, size.out),
    )


class Cuts(NamedTuple):
    """A packed problem and its groups: where each starts and how long it is along `axis`, or whole ones (None).

    `shape` is that of the whole; `varies` names its field that `lengths` replace.
    """

    p: Packed
    shape: Shape
    by_rows: bool
    axis: str | None
    varies: str
    starts: list[int]
    lengths: list[int]


def packed_cuts(p: Packed, size: Bytes, offsets: Ints | None, valid: Ints | None, forms: Forms) -> Cuts:
    """The groups of a packed problem, in order, empty ones among them; groups that one product computes are one.

    Where the host does not know what is cut (`offsets` and `valid` are None), matrices are taken whole. `forms` are
    those of `packed_forms`.
    """
    if valid is not None:
        return _cuts(p, forms, "m", [0] * p.groups, np.clip(valid, 0, p.m).tolist())
    if p.jagged is None or offsets is None:
        count = p.groups if p.jagged is None else 1
        if count > 1 and (one := _as_one(p)) is not None and all(of_one := packed_forms(one, size)):
            p, forms, count = one, of_one, 1
        return _cuts(p, forms, None, [0] * count, [1] * count)
    starts, lengths = cut(offsets, p.m if p.jagged == "m" else p.n if p.jagged == "n" else p.k)
    shares = (p.jagged == "m" and p.b.group == 0) or (p.jagged == "n" and p.a.group == 0)
    if (
        shares
        and starts
        and starts[1:] == [start + length for start, length in zip(starts[:-1], lengths, strict=False)]
    ):
        starts, lengths = starts[:1], [sum(lengths)]  # one matrix for all groups, which follow each other: one product
    return _cuts(p, forms, p.jagged, starts, lengths)


def _cuts(p: Packed, forms: Forms, axis: str | None, starts: list[int], lengths: list[int]) -> Cuts:
    of_a, of_b, of_out = forms
    assert of_a is not None and of_b is not None and of_out is not None, "operands that are not expressible are staged"
    by_rows = of_out.by_rows
    varies = {"m": "n" if by_rows else "m", "n": "m" if by_rows else "n", "k": "k", None: ""}[axis]
    return Cuts(p, shape_of(p.m, p.n, p.k, of_a, of_b, of_out), by_rows, axis, varies, starts, lengths)


def packed_products(cuts: Cuts, size: Bytes) -> list[Product]:
    """The non-empty products of the groups. Products with K = 0 are left out too."""
    p, shape, by_rows, axis, varies, starts, lengths = cuts
    op_first, op_second, m, n, k, *leads = shape
    new = tuple.__new__  # a named tuple's own constructor is a Python call, here some for each group
    shapes, found = dict[int, Shape](), list[Product]()
    a_step, b_step, out_step = _steps(p, axis)
    (a, a_group, *_), (b, b_group, *_), (out, out_group, *_) = p.a, p.b, p.out
    for g, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if varies:
            if length not in shapes:
                m, n, k = length if varies == "m" else m, length if varies == "n" else n, length if varies == "k" else k
                shapes[length] = new(Shape, (op_first, op_second, m, n, k, *leads))
            shape = shapes[length]
        if not (shape.m and shape.n and shape.k):
            continue
        at_a = a + (g * a_group + start * a_step) * size.operand
        at_b = b + (g * b_group + start * b_step) * size.operand
        at_out = out + (g * out_group + start * out_step) * size.out
        found.append(new(Product, (shape, at_b, at_a, at_out) if by_rows else (shape, at_a, at_b, at_out)))
    return found


def _steps(p: Packed, axis: str | None) -> tuple[int, int, int]:
    """How far a, b and out move per element of the direction that is cut."""
    if axis == "m":
        return p.a.row, 0, p.out.row
    if axis == "n":
        return 0, p.b.col, p.out.col
    return (p.a.col, p.b.row, 0) if axis == "k" else (0, 0, 0)


def list_products(table: Ints, size: Bytes) -> list[Product]:
    """The non-empty products of a list, in order."""
    found = []
    for r in table.tolist():
        m, n, k = r[TABLE.M], r[TABLE.N], r[TABLE.K]
        if m and n and k:
            a = leading(m, k, r[TABLE.A_ROW], r[TABLE.A_COL], size.operand)
            b = leading(k, n, r[TABLE.B_ROW], r[TABLE.B_COL], size.operand)
            out = leading(m, n, r[TABLE.OUT_ROW], r[TABLE.OUT_COL], size.out)
            assert a is not None and b is not None and out is not None, "what is not expressible is staged"
            pair = (r[TABLE.B], r[TABLE.A]) if out.by_rows else (r[TABLE.A], r[TABLE.B])
            found.append(Product(shape_of(m, n, k, a, b, out), *pair, r[TABLE.OUT]))
    return found


def merged(products: list[Product]) -> list[tuple[Shape, list[Product]]]:
    """Products of one shape together, the largest work first, order kept within a shape."""
    found: dict[Shape, list[Product]] = {}
    for product in products:
        found.setdefault(product[0], []).append(product)
    return sorted(found.items(), key=_largest_first)


def _largest_first(group: tuple[Shape, list[Product]]) -> tuple[int, Shape]:
    shape = group[0]
    return -shape.m * shape.n * shape.k, shape


def even_steps(products: list[Product]) -> tuple[int, int, int] | None:
    """The constant distance in bytes between successive addresses of each operand, or None."""
    if len(products) < 2:
        return 0, 0, 1
    (_, *before), (_, *after) = products[:2]
    steps = np.array(after) - np.array(before)
    table = np.array([p[1:] for p in products], dtype=np.int64)
    first, second, out = steps.tolist()
    even = first >= 0 and second >= 0 and out > 0 and bool((table[1:] - table[:-1] == steps).all())
    return (first, second, out) if even else None
