"""All products of a launch as arrays of extents and addresses: what a batched BLAS call reads.

Built with NumPy over all groups at once, so that no Python runs per group. BLAS is column-major: a
row-major C = A B is the column-major C^T = B^T A^T, so for a row-major C the operands swap places
and nothing is copied. A matrix is fit for BLAS if one stride is 1 and the other at least the extent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import numpy.typing as npt
from torch import Tensor

from multigemm.backends.cpu.groups import Index
from multigemm.planning.operands import TABLE, Operands, Strided, group_table, packed

_N, _T = ord("N"), ord("T")


def leading(rows: int, cols: int, row: int, col: int) -> tuple[bool, int] | None:
    """(row-major?, leading dimension) of a matrix, or None if BLAS cannot address it."""
    if (cols <= 1 or col == 1) and (rows <= 1 or row >= max(1, cols)):
        return True, (row if rows > 1 else max(1, cols))
    if (rows <= 1 or row == 1) and (cols <= 1 or col >= max(1, rows)):
        return False, (col if cols > 1 else max(1, rows))
    return None


def fits(matrix: Tensor) -> bool:
    """Whether BLAS can address each matrix of this tensor (a matrix or a stack of them)."""
    return leading(*matrix.shape[-2:], *matrix.stride()[-2:]) is not None


@dataclass(slots=True)
class Table:
    """One row per product with m, n, k > 0, in BLAS's column-major terms (so m and n may have swapped)."""

    transa: npt.NDArray[np.uint8]
    transb: npt.NDArray[np.uint8]
    m: Index
    n: Index
    k: Index
    a: Index
    lda: Index
    b: Index
    ldb: Index
    c: Index
    ldc: Index

    @property
    def count(self) -> int:
        return len(self.m)

    @property
    def uniform(self) -> bool:
        """Whether all products have one shape and one layout."""
        columns = (self.transa, self.transb, self.m, self.n, self.k, self.lda, self.ldb, self.ldc)
        return self.count > 0 and all(bool((column == column[0]).all()) for column in columns)

    def keep(self, chosen: npt.NDArray[np.bool_]) -> Table:
        """The products that a mask names, without a copy if it names all of them."""
        return self if chosen.all() else self.take(chosen)

    def take(self, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> Table:
        """Some of the products."""
        return Table(*(np.ascontiguousarray(getattr(self, name)[rows]) for name in self.__slots__))


def _swapped(a: tuple[bool, Index, Index], b: tuple[bool, Index, Index], c: tuple[bool, Index, Index],
             m: Index, n: Index, k: Index) -> Table:  # fmt: skip
    """Operands as (row-major?, address, leading dimension) into column-major order."""
    if c[0]:
        (a, b), (m, n) = (b, a), (n, m)
    flag = _N if c[0] else _T
    other = _T if c[0] else _N
    flags = [np.full(len(m), flag if row_major else other, np.uint8) for row_major, _, _ in (a, b)]
    table = Table(flags[0], flags[1], m, n, k, a[1], a[2], b[1], b[2], c[1], c[2])
    return table.keep((m > 0) & (n > 0) & (k > 0))


def _operand(s: Strided, rows: int, cols: int, size: int, at_row: Index | int, at_col: Index | int,
             group: Index) -> tuple[bool, Index, Index]:  # fmt: skip
    order = leading(rows, cols, s.row, s.col)
    assert order is not None
    address = s.ptr + size * (group * s.group + at_row * s.row + at_col * s.col)
    return order[0], address, np.full(len(group), order[1], np.int64)


def one_product(ops: Operands) -> bool:
    """Whether all groups use one matrix, so that their rows (or columns) are a single product."""
    other = {"m": ops.b, "n": ops.a}.get(ops.spec.jagged or "")
    return isinstance(other, Tensor) and other.dim() == 2


def packed_table(ops: Operands, start: Index | None, end: Index | None) -> Table:
    """The products of a packed form; a, b and out of `ops` are tensors that fit BLAS."""
    p = packed(ops)
    if one_product(ops) and start is not None and end is not None and len(end):
        start, end = start[:1], end[-1:]
        p = replace(p, groups=1)
    group = np.arange(p.groups, dtype=np.int64)
    m, n, k = (np.full(p.groups, extent, np.int64) for extent in (p.m, p.n, p.k))
    at: dict[str, Index | int] = {"m": 0, "n": 0, "k": 0}
    if p.jagged:
        start, end = cast(Index, start), cast(Index, end)
        at[p.jagged] = start
        m, n, k = (end - start if p.jagged == x else extent for x, extent in (("m", m), ("n", n), ("k", k)))
    elif end is not None:
        m = end
    size = [x.element_size() for x in (ops.a, ops.b, ops.out) if isinstance(x, Tensor)]
    return _swapped(
        _operand(p.a, p.m, p.k, size[0], at["m"], at["k"], group),
        _operand(p.b, p.k, p.n, size[1], at["k"], at["n"], group),
        _operand(p.out, p.m, p.n, size[2], at["m"], at["n"], group),
        m, n, k,
    )  # fmt: skip


def list_tables(ops: Operands) -> list[Table]:
    """The products of a list: one table for each combination of row- and column-major operands."""
    t = group_table(ops)
    if not len(t):
        return []
    m, n, k = t[:, TABLE.M], t[:, TABLE.N], t[:, TABLE.K]
    a = _orders(m, k, t[:, TABLE.A_ROW], t[:, TABLE.A_COL])
    b = _orders(k, n, t[:, TABLE.B_ROW], t[:, TABLE.B_COL])
    c = _orders(m, n, t[:, TABLE.OUT_ROW], t[:, TABLE.OUT_COL])
    kinds = a[0] * 4 + b[0] * 2 + c[0]
    tables = []
    for kind in np.unique(kinds):
        r = np.flatnonzero(kinds == kind)
        sides = [(bool(x[0][r[0]]), t[r, at], x[1][r]) for x, at in ((a, TABLE.A), (b, TABLE.B), (c, TABLE.OUT))]
        tables.append(_swapped(sides[0], sides[1], sides[2], m[r], n[r], k[r]))
    return tables


def _orders(rows: Index, cols: Index, row: Index, col: Index) -> tuple[Index, Index]:
    """Per matrix: row-major (1) or not (0), and the leading dimension; all of them fit BLAS."""
    row_major = ((cols <= 1) | (col == 1)) & ((rows <= 1) | (row >= np.maximum(1, cols)))
    by_row = np.where(rows > 1, row, np.maximum(1, cols))
    by_col = np.where(cols > 1, col, np.maximum(1, rows))
    return row_major.astype(np.int64), np.where(row_major, by_row, by_col)


def merged(tables: Sequence[Table]) -> Table:
    """Several tables as one."""
    if len(tables) == 1:
        return tables[0]
    if not tables:
        flags, longs = np.zeros(0, np.uint8), np.zeros(0, np.int64)
        return Table(flags, flags, *[longs] * 9)
    parts = [[getattr(table, name) for name in Table.__slots__] for table in tables]
    return Table(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))
