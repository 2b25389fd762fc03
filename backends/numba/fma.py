"""float32 as IEEE arithmetic has it, in the frame of the mma.sync kernel: a warp's products on plain cores.

Four lanes share the rows of a warp's part, eight its columns. From a tile that lies along k a lane reads
four k of a row at once, and its rows are 4 (columns: 8) apart; from one that lies across, four neighbours
of one k, and its rows are fours that lie 16 (columns: 32) apart.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types

from multigemm.backends.numba.mma_shape import KEPT_COLUMNS, ROW_BYTES
from multigemm.backends.numba.ptx_asm import floats, with_arity
from multigemm.backends.numba.runtime import synchronising

DOWN, ACROSS, STEP = 4, 8, 4
"""Lanes along the rows and along the columns; k of a step."""
int32 = types.int32
SINGLE, WORD = ir.FloatType(), ir.IntType(32)


@synchronising
def lane_row(lane):
    return (lane & 1) | ((lane >> 3) & 2)


@synchronising
def lane_column(lane):
    return (lane >> 1) & 7


def _make_loads(places):
    """loads(even, odd) -> four floats from each place (which of both addresses, bytes from there)."""
    four = ir.LiteralStructType([SINGLE] * 4)
    result = floats(4 * len(places))

    def generate(context, builder, signature, arguments):
        out = ir.Constant(context.get_value_type(result), ir.Undefined)
        for number, (which, offset) in enumerate(places):
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
            call = ir.InlineAsm(ir.FunctionType(four, [WORD]), text, "=f,=f,=f,=f,r,~{memory}", side_effect=True)
            values = builder.call(call, [arguments[which]])
            for x in range(4):
                out = builder.insert_value(out, builder.extract_value(values, x), 4 * number + x)
        return out

    return with_arity(2, lambda _types: (result(types.int32, types.int32), generate))


@cache
def make_vectors(across, left, width, kept):
    """load(tile, step, first, lane) -> this lane's elements of 4 k: along, row by row; across, k by k."""
    lanes = DOWN if left else ACROSS
    count, pitch = kept // lanes, width * 4
    lane_of = lane_row if left else lane_column
    if across:
        loads = _make_loads([(0, k * pitch + i * lanes * 16) for k in range(STEP) for i in range(count // 4)])
    else:
        loads = _make_loads([(i % 2 if left else 0, i * lanes * ROW_BYTES) for i in range(count)])

    @synchronising
    def from_across(tile, step, first, lane):
        at = int32(tile + step * (STEP * pitch) + (first + lane_of(lane) * 4) * 4)
        return loads(at, at)

    @synchronising
    def from_along(tile, step, first, lane):
        row = int32(lane_of(lane))
        base = int32(tile + (first + row) * ROW_BYTES)
        return loads(int32(base + ((step ^ row) << 4)), int32(base + ((step ^ (row + 4)) << 4)))

    return from_across if across else from_along


def _element(across, count, i, k):
    return k * count + i if across else i * STEP + k


@cache
def make_fma_step(kept, a_across, b_across):
    """step(acc, a, b) -> acc: 4 k of a lane's rows and columns."""
    rows, columns = kept // DOWN, KEPT_COLUMNS // ACROSS

    def generate(context, builder, signature, arguments):
        acc, a, b = arguments
        sums = [builder.extract_value(acc, x) for x in range(rows * columns)]
        for k, i, j in product(range(STEP), range(rows), range(columns)):
            x = builder.extract_value(a, _element(a_across, rows, i, k))
            y = builder.extract_value(b, _element(b_across, columns, j, k))
            sums[i * columns + j] = builder.fma(x, y, sums[i * columns + j])
        for x, value in enumerate(sums):
            acc = builder.insert_value(acc, value, x)
        return acc

    takes = (floats(rows * columns), floats(rows * STEP), floats(columns * STEP))
    return with_arity(3, lambda _types: (takes[0](*takes), generate))


@cache
def make_fma_stage(kept, a_across, b_across):
    """stage(acc, address of the warp's piece, lane): rows of 256 bytes, swizzled as `make_flush` reads them."""
    rows, columns = kept // DOWN, KEPT_COLUMNS // ACROSS
    width = 4 if b_across else 1
    names = "{$1, $2, $3, $4}" if b_across else "$1"
    vector, constraints = ".v4" if b_across else "", "r" + ",f" * width + ",~{memory}"
    emit = ir.FunctionType(ir.VoidType(), [WORD] + [SINGLE] * width)

    def generate(context, builder, signature, arguments):
        acc, base, twist = arguments
        for i in range(rows):
            row = i // 4 * 16 + i % 4 if a_across else i * DOWN
            turn = (i % 4 // 2) * 32 if a_across else (i % 2) * 64
            for j in range(0, columns, width):
                values = [builder.extract_value(acc, i * columns + j + x) for x in range(width)]
                where = builder.add(base, builder.xor(twist, ir.Constant(WORD, (j * ACROSS * 4) ^ turn)))
                text = f"st.shared{vector}.f32 [$0+{row * 256}], {names};"
                builder.call(ir.InlineAsm(emit, text, constraints, side_effect=True), [where, *values])
        return context.get_dummy_value()

    takes = (floats(rows * columns), types.int32, types.int32)
    put = with_arity(3, lambda _types: (types.void(*takes), generate))

    @synchronising
    def stage(acc, piece, lane):
        row, column = int32(lane_row(lane)), int32(lane_column(lane))
        turn = int32((row & 1) * 64) if a_across else int32((row >> 1) * 32)
        first = int32(row * 4) if a_across else row
        if b_across:
            put(acc, int32(piece + first * 256), int32(turn ^ (column * 16)))
        else:
            put(acc, int32(piece + first * 256 + column * 4), turn)

    return stage
