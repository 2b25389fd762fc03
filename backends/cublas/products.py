"""The products of one problem, as the library will be called: pure host arithmetic on strides and addresses.

BLAS knows column-major matrices with one leading dimension. A row-major matrix is the transpose of
one, so a row-major result is computed as C^T = B^T A^T, with the operands swapped. Whatever has no
unit stride, repeats elements by a zero stride, or overlaps itself has no such form and needs a copy.
So does a matrix whose lines lie further apart than cuBLAS counts: `countable` is the one rule of that.
Groups are cut by host offsets, empty ones dropped, and joined where the same matrix product says
it: all groups that share their weights are one product over all rows.
"""

from __future__ import annotations

from dataclasses import dataclass
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
    """Whether cuBLAS accepts lines, or matrices of a strided batch, that lie this many elements apart."""
    return distance < FARTHEST_ELEMENTS and distance * itemsize < FARTHEST_BYTES


class Leading(NamedTuple):
    """A matrix that BLAS can read: row-major or column-major, with a leading dimension."""

    by_rows: bool
    ld: int


class Shape(NamedTuple):
    """What two calls must share to be one batched call: extents, transposes, leading dimensions.

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
    """The shape of a call. For a row-major result the library's first operand is B, else A."""
    if out.by_rows:
        first = NO_TRANSPOSE if b.by_rows else TRANSPOSE
        second = NO_TRANSPOSE if a.by_rows else TRANSPOSE
        return Shape(first, second, n, m, k, b.ld, a.ld, out.ld)
    first = TRANSPOSE if a.by_rows else NO_TRANSPOSE
    second = TRANSPOSE if b.by_rows else NO_TRANSPOSE
    return Shape(first, second, m, n, k, a.ld, b.ld, out.ld)


# --- groups and products ---

Forms = tuple[Leading | None, Leading | None, Leading | None]


@dataclass(frozen=True, slots=True)
class Products:
    """Matrix products in order: their shapes, each once; the number of each product's shape; and addresses.

    `addresses` has a row for the first operands, one for the second ones and one for the results. `bases` are the
    addresses of the packed operands that they lie in, in the same order; None for a list.
    """

    shapes: list[Shape]
    kinds: Ints
    addresses: Ints
    by_rows: bool = True
    bases: tuple[int, int, int] | None = None

    def __len__(self) -> int:
        return len(self.kinds)

    def groups(self) -> list[tuple[Shape, list[int]]]:
        """The products of one shape together, by position, the largest work first."""
        same: list[list[int]] = [[] for _ in self.shapes]
        for place, kind in enumerate(self.kinds.tolist()):
            same[kind].append(place)
        return sorted(zip(self.shapes, same, strict=True), key=_largest_first)


class Bytes(NamedTuple):
    """Element sizes of the operands (equal for a and b) and of the result."""

    operand: int
    out: int


def clamped(offsets: Ints, extent: int) -> tuple[Ints, Ints]:
    """Where each group starts, clamped as the kernels clamp it, and its length."""
    starts = np.minimum(np.maximum(offsets[:-1], 0), extent)
    return starts, np.maximum(np.minimum(offsets[1:], extent) - starts, 0)


def joined(extent: int, group: int, stride: int) -> int | None:
    """The stride of the stacked rows of all groups as one matrix, or None if they do not line up."""
    if extent == 1:
        return group
    return stride if group == extent * stride else None


def _as_one(p: Packed) -> Packed | None:
    """A batch that shares one operand as one product of stacked rows (or columns); None if it is not one."""
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
    """The BLAS forms of a, b and out of a packed problem; None for one that needs a copy."""
    return (
        leading(p.m, p.k, p.a.row, p.a.col, size.operand),
        leading(p.k, p.n, p.b.row, p.b.col, size.operand),
        leading(p.m, p.n, p.out.row, p.out.col, size.out),
    )


def packed_products(p: Packed, size: Bytes, offsets: Ints | None, valid: Ints | None, forms: Forms) -> Products:
    """The non-empty products of a packed problem; groups that one product computes are one.

    Where the host does not know what is cut (`offsets` and `valid` are None), matrices are taken whole. `forms` are
    those of `packed_forms`. Products with K = 0 are left out too.
    """
    if valid is not None:
        return _cut(p, size, forms, "m", np.zeros(p.groups, np.int64), np.minimum(np.maximum(valid, 0), p.m))
    if p.jagged is None or offsets is None:
        count = p.groups if p.jagged is None else 1
        if count > 1 and (one := _as_one(p)) is not None and all(of_one := packed_forms(one, size)):
            p, forms, count = one, of_one, 1
        return _cut(p, size, forms, None, np.zeros(count, np.int64), np.ones(count, np.int64))
    starts, lengths = clamped(offsets, p.m if p.jagged == "m" else p.n if p.jagged == "n" else p.k)
    shares = (p.jagged == "m" and p.b.group == 0) or (p.jagged == "n" and p.a.group == 0)
    if shares and len(starts) and bool((starts[1:] == starts[:-1] + lengths[:-1]).all()):
        starts, lengths = starts[:1], lengths.sum(keepdims=True)  # groups that follow each other in one matrix
    return _cut(p, size, forms, p.jagged, starts, lengths)


def _cut(p: Packed, size: Bytes, forms: Forms, axis: str | None, starts: Ints, lengths: Ints) -> Products:
    """The products of groups with these starts along `axis` and these lengths; of whole matrices if the axis is
    None."""
    of_a, of_b, of_out = forms
    assert of_a is not None and of_b is not None and of_out is not None, "operands that are not expressible are staged"
    by_rows, whole = of_out.by_rows, shape_of(p.m, p.n, p.k, of_a, of_b, of_out)
    cut = {"m": 3 if by_rows else 2, "n": 2 if by_rows else 3, "k": 4, None: 5}[axis]
    there = lengths > 0 if all((*whole[2:cut], *whole[cut + 1 : 5])) else lengths < 0
    (groups,), starts, lengths = there.nonzero(), starts[there], lengths[there]
    numbers, kinds, new = dict[int, int](), list[int](), tuple.__new__
    for length in lengths.tolist():
        kinds.append(numbers.setdefault(length, len(numbers)))
    shapes = [whole] * len(numbers)
    if axis is not None:  # a named tuple's own constructor is a Python call
        shapes = [new(Shape, (*whole[:cut], length, *whole[cut + 1 :])) for length in numbers]
    a_step, b_step, out_step = _steps(p, axis)
    a = p.a.ptr + (groups * p.a.group + starts * a_step) * size.operand
    b = p.b.ptr + (groups * p.b.group + starts * b_step) * size.operand
    out = p.out.ptr + (groups * p.out.group + starts * out_step) * size.out
    addresses = np.array([b, a, out] if by_rows else [a, b, out], dtype=np.int64)
    bases = (p.b.ptr, p.a.ptr, p.out.ptr) if by_rows else (p.a.ptr, p.b.ptr, p.out.ptr)
    return Products(shapes, np.array(kinds, np.int64), addresses, by_rows, bases)


def _steps(p: Packed, axis: str | None) -> tuple[int, int, int]:
    """The distance that a, b and out move per element of the cut direction."""
    if axis == "m":
        return p.a.row, 0, p.out.row
    if axis == "n":
        return 0, p.b.col, p.out.col
    return (p.a.col, p.b.row, 0) if axis == "k" else (0, 0, 0)


def list_products(table: Ints, size: Bytes) -> Products:
    """The non-empty products of a list, in order."""
    shapes, kinds, addresses = dict[Shape, int](), list[int](), list[tuple[int, int, int]]()
    for r in table.tolist():
        m, n, k = r[TABLE.M], r[TABLE.N], r[TABLE.K]
        if m and n and k:
            a = leading(m, k, r[TABLE.A_ROW], r[TABLE.A_COL], size.operand)
            b = leading(k, n, r[TABLE.B_ROW], r[TABLE.B_COL], size.operand)
            out = leading(m, n, r[TABLE.OUT_ROW], r[TABLE.OUT_COL], size.out)
            assert a is not None and b is not None and out is not None, "what is not expressible is staged"
            kinds.append(shapes.setdefault(shape_of(m, n, k, a, b, out), len(shapes)))
            pair = (r[TABLE.B], r[TABLE.A]) if out.by_rows else (r[TABLE.A], r[TABLE.B])
            addresses.append((*pair, r[TABLE.OUT]))
    rows = np.array(addresses, dtype=np.int64).reshape(-1, 3).T
    return Products(list(shapes), np.array(kinds, dtype=np.int64), rows)


def _largest_first(group: tuple[Shape, list[int]]) -> tuple[int, Shape]:
    shape = group[0]
    return -shape.m * shape.n * shape.k, shape


def even_steps(addresses: Ints) -> tuple[int, int, int] | None:
    """The constant distance in bytes between successive addresses of each operand, or None."""
    if addresses.shape[1] < 2:
        return 0, 0, 1
    distances = addresses[:, 1:] - addresses[:, :-1]
    first, second, out = distances[:, 0].tolist()
    even = first >= 0 and second >= 0 and out > 0 and bool((distances == distances[:, :1]).all())
    return (first, second, out) if even else None
