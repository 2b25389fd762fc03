"""Strides as BLAS sees them: which matrices are a leading dimension and a transpose, and which are not.

BLAS knows column-major matrices with one leading dimension. A row-major matrix is the transpose of
one, so a row-major result is computed as C^T = B^T A^T, with the operands swapped. Whatever has no
unit stride, repeats elements by a zero stride, or overlaps itself has no such form and needs a copy.
So does a matrix whose lines lie further apart than cuBLAS counts: `countable` is the one rule of that.
"""

from __future__ import annotations

from typing import NamedTuple

from multigemm.backends.cublas.library import NO_TRANSPOSE, TRANSPOSE

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
