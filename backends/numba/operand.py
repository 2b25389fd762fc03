"""Where a group's operands begin, for any form: the packed formula or the table of a list."""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from multigemm.backends.numba.call import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.memory import loader
from multigemm.backends.numba.runtime import device
from multigemm.planning.operands import TABLE

_load_i64 = loader("i64")
COLUMNS = int(TABLE.COLUMNS)
A, B, C, OUT, BIAS = int(TABLE.A), int(TABLE.B), int(TABLE.C), int(TABLE.OUT), int(TABLE.BIAS)
A_ROW, B_ROW, C_ROW, OUT_ROW = int(TABLE.A_ROW), int(TABLE.B_ROW), int(TABLE.C_ROW), int(TABLE.OUT_ROW)
BIAS_COL = int(TABLE.BIAS_COL)


@cache
def make_operands(in_size):
    """Device functions (group, start) -> base address and strides of A, B, C, out and bias."""

    @device
    def operand(p, g, start, which, field, stride_field, size):
        """(address, row stride, column stride): A, B, C and out are 0 to 3."""
        base, group, row, col = p.a, p.a_group, p.a_row, p.a_col
        if which == 1:
            base, group, row, col = p.b, p.b_group, p.b_row, p.b_col
        elif which == 2:
            base, group, row, col = p.c, p.c_group, p.c_row, p.c_col
        elif which == 3:
            base, group, row, col = p.out, p.out_group, p.out_row, p.out_col
        if p.table != 0:
            at = g * COLUMNS
            base = _load_i64(p.table, at + field)
            row, col = _load_i64(p.table, at + stride_field), _load_i64(p.table, at + stride_field + 1)
        else:
            along_row = (which != 1 and p.jagged == JAGGED_M) or (which == 1 and p.jagged == JAGGED_K)
            along_col = (which != 0 and p.jagged == JAGGED_N) or (which == 0 and p.jagged == JAGGED_K)
            offset = g * group
            if along_row:
                offset += start * row
            elif along_col:
                offset += start * col
            base += offset * size
        return base, row, col

    @device
    def operand_a(p, g, start):
        return operand(p, g, start, 0, A, A_ROW, in_size)

    @device
    def operand_b(p, g, start):
        return operand(p, g, start, 1, B, B_ROW, in_size)

    @device
    def operand_c(p, g, start):
        return operand(p, g, start, 2, C, C_ROW, p.c_size)

    @device
    def operand_out(p, g, start):
        return operand(p, g, start, 3, OUT, OUT_ROW, p.out_size)

    @device
    def operand_bias(p, g, start):
        """(address, stride)."""
        base, col = p.bias, p.bias_col
        if p.table != 0:
            base, col = _load_i64(p.table, g * COLUMNS + BIAS), _load_i64(p.table, g * COLUMNS + BIAS_COL)
        else:
            offset = g * p.bias_group
            if p.jagged == JAGGED_N:
                offset += start * col
            base += offset * p.bias_size
        return base, col

    return operand_a, operand_b, operand_c, operand_out, operand_bias
