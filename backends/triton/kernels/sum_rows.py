# mypy: ignore-errors
"""Sums of rows after the products of a fused problem, in a fixed order: of those that `combine` names, or of those that
go to one place. The products, with what else is fused, are those of `generic.pointer_kernel`."""

import triton
import triton.language as tl

from multigemm.backends.triton.kernels.epilogue import narrow, scalar_of
from multigemm.backends.triton.kernels.schedule import owned_range


@triton.jit
def first_from(places, tokens, row):
    """The first of sorted places at or behind a row."""
    low = row * 0
    high = low + tokens
    while low < high:
        middle = (low + high) // 2
        before = tl.load(places + middle) < row
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def plus_row(total, y, s, low, high, n, columns, weights, at, WEIGHTED: tl.constexpr):
    """The sum with row s, times its weight; as it was where no group owns such a row, whose weight is not read."""
    there = (s >= low) & (s < high)
    row = tl.where(there, s, 0).to(tl.int64)
    # the interpreter takes no vector and scalar joined as a mask
    term = tl.load(y + row * n + columns, mask=columns < tl.where(there, n, 0), other=0).to(total.dtype)
    if WEIGHTED:
        term *= tl.load(weights + at, mask=there, other=0).to(total.dtype)
    return tl.where(there, total + term, total)


@triton.jit
def sum_rows_kernel(y, out, c, ends, index, weights, order, tokens, n, rows, groups, head,
                    out_row, out_col, c_row, c_col, beta_bits, TERMS: tl.constexpr, UNROLLED: tl.constexpr,
                    BLOCK: tl.constexpr, OUT_ORDER: tl.constexpr, SCATTERS: tl.constexpr, HAS_C: tl.constexpr,
                    WEIGHTED: tl.constexpr, ACC: tl.constexpr, SIZES: tl.constexpr, CHUNK: tl.constexpr,
                    EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """One block of columns of one row: sum of y[index[row, j]] * weights[row, j], j ascending, then + beta * C.

    With SCATTERS, `index` are sorted places, `order` the rows that go there: those with the place `row`, ascending.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    across = (n + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // across
    columns = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    low, high = owned_range(ends, groups, head, tokens, SIZES, CHUNK)
    total = tl.zeros((BLOCK,), ACC)
    if SCATTERS:
        for at in range(first_from(index, tokens, row), first_from(index, tokens, row + 1)):
            total = plus_row(total, y, tl.load(order + at), low, high, n, columns, weights, at, False)
    elif UNROLLED:
        for j in tl.static_range(TERMS):
            at = row.to(tl.int64) * TERMS + j
            total = plus_row(total, y, tl.load(index + at), low, high, n, columns, weights, at, WEIGHTED)
    else:
        for j in range(TERMS):
            at = row.to(tl.int64) * TERMS + j
            total = plus_row(total, y, tl.load(index + at), low, high, n, columns, weights, at, WEIGHTED)
    wide_row = row.to(tl.int64)
    if HAS_C:
        given = tl.load(c + wide_row * c_row + columns.to(tl.int64) * c_col, mask=inside, other=0)
        total += scalar_of(beta_bits, ACC) * given.to(ACC)
    out_ptrs = out + wide_row * out_row
    if OUT_ORDER == "row":
        out_ptrs += columns
    else:
        out_ptrs += columns.to(tl.int64) * out_col
    tl.store(out_ptrs, narrow(total, out.dtype.element_ty, INTERPRETED), mask=inside)
