"""From a warp's sums to memory by way of its own piece of shared memory, in rows of 64 sums.

Rows consist of 16-byte chunks, which are swizzled by the row number. What `mma_words` has turned by pairs is
put back in order here: `turned_a` or `turned_b` say which of both.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba.call import KIND
from multigemm.backends.numba.epilogue import make_any_finish, make_any_store
from multigemm.backends.numba.fma import make_fma_stage
from multigemm.backends.numba.hopper_epilogue import make_flush_32
from multigemm.backends.numba.memory import BYTES
from multigemm.backends.numba.mma_fragments import make_warp_stage
from multigemm.backends.numba.mma_shape import KEPT_COLUMNS
from multigemm.backends.numba.mma_words import LLVM
from multigemm.backends.numba.ptx_asm import CONSTRAINT, with_arity
from multigemm.backends.numba.runtime import synchronising

LANES = 32
TYPES = {"i32": types.int32, "f64": types.float64}
int32 = types.int32


@cache
def make_way_out(kind, acc, kept, a_lies_across, b_lies_across):
    """(stage, flush): stage(sums, address of the warp's piece, lane), but see `make_warp_stage`; and `make_flush`."""
    if kind == "f32":
        return make_fma_stage(kept, a_lies_across, b_lies_across), make_flush_32(LANES)
    if acc == "f32":
        return make_warp_stage(kept), make_flush_32(LANES)
    turned = kind == "i8"
    return make_stage(acc, kept, turned and a_lies_across, turned and b_lies_across), make_flush(acc)


def _runs(rows, columns, size, turned_a, turned_b):
    """(row, byte, which sums) of neighbours that a lane holds, but for what depends on the lane."""
    for i, half in product(range(rows), range(2)):
        row = i * 16 + (half if turned_a else half * 8)
        for j in range(0, columns, 2 if turned_b else 1):
            first = (i * columns + j) * 4 + half * 2
            yield row, j * 8 * size, [first, first + 4, first + 1, first + 5] if turned_b else [first, first + 1]


@cache
def make_stage(acc, kept, turned_a, turned_b):
    """stage(sums, address of the warp's piece, lane) for int32 and float64."""
    rows, columns, size, kind = kept // 16, KEPT_COLUMNS // 8, BYTES[acc], TYPES[acc]
    pitch, word, number = KEPT_COLUMNS * size, ir.IntType(32), LLVM[TYPES[acc]]
    suffix, letter, swizzle = f"b{8 * size}", CONSTRAINT[kind], make_swizzle(acc)

    def generate(context, builder, signature, arguments):
        acc, base, twist = arguments
        for row, at, which in _runs(rows, columns, size, turned_a, turned_b):
            where = builder.add(base, builder.xor(twist, ir.Constant(word, at)))
            values = [builder.extract_value(acc, x) for x in which]
            names = ", ".join(f"${x + 1}" for x in range(len(values)))
            text = f"st.shared.v{len(values)}.{suffix} [$0+{row * pitch}], {{{names}}};"
            emit = ir.FunctionType(ir.VoidType(), [word] + [number] * len(values))
            constraints = ",".join(["r"] + [letter] * len(values)) + ",~{memory}"
            builder.call(ir.InlineAsm(emit, text, constraints, side_effect=True), [where, *values])
        return context.get_dummy_value()

    takes = (types.UniTuple(kind, rows * columns * 4), types.int32, types.int32)
    put = with_arity(3, lambda _types: (types.void(*takes), generate))

    @synchronising
    def stage(sums, piece, lane):
        row, quad = int32(lane >> 2), int32(lane & 3)
        if turned_a:
            row = int32(row * 2)
        start, twist = int32(piece + row * pitch), int32(swizzle(row) * 16)
        if turned_b:
            put(sums, start, int32(twist ^ (quad * 4 * size)))
        else:
            put(sums, int32(start + quad * 2 * size), twist)

    return stage


@cache
def make_swizzle(acc):
    """swizzle(row) -> what a chunk's number is xor-ed with: alike for rows 8 apart, and for 2i and 2i + 1 of int32."""

    @synchronising
    def whole(row):
        return ((row // 2) % 4) * 2

    @synchronising
    def double(row):
        return (row % 2) * 4

    return whole if acc == "i32" else double


@cache
def make_flush(acc):
    """flush(...): a chunk per lane, with the whole epilogue, to any type and strides; as `make_flush_32`."""
    finish, store, swizzle = make_any_finish(acc), make_any_store(acc), make_swizzle(acc)
    size, own = BYTES[acc], KIND[acc]
    each, pitch = 16 // size, KEPT_COLUMNS * size
    chunks = KEPT_COLUMNS // each
    step = LANES // chunks
    if acc == "i32":
        load, load_one, put_one = ptx.load_shared_u32x4, ptx.load_shared_u32, ptx.store_shared_u32
        send = ptx.store_global_u32x4
    else:
        load, load_one, put_one = ptx.load_shared_f64x2, ptx.load_shared_f64, ptx.store_shared_f64
        send = ptx.store_global_f64x2

    @synchronising
    def flush(staging, out, c, bias, style, alpha, beta, rows, columns, lane, above):
        out_at, out_row, out_col = out
        c_at, c_row, c_col = c
        bias_at, bias_col = bias
        kind, _, c_kind, bias_kind, activation, plain = style
        chunk, first = lane % chunks, lane // chunks
        column = chunk * each
        count = min(max(columns - column, 0), each)
        wide = kind == own and out_col == 1 and count == each and ((out_at | (out_row * size)) & 15) == 0
        for row in range(first, rows, step):
            cell = int32(staging + row * pitch + (chunk ^ swizzle(row)) * 16)
            if plain == 0:
                for i in range(count):
                    value = load_one(cell + i * size)
                    at, b = (above + row) * c_row + (column + i) * c_col, (column + i) * bias_col
                    value = finish(value, alpha, beta, activation, c_kind, c_at, at, bias_kind, bias_at, b)
                    put_one(cell + i * size, value)
            if wide:
                send(out_at + (row * out_row + column) * size, load(cell))
            else:
                for i in range(count):
                    store(out_at, row * out_row + (column + i) * out_col, load_one(cell + i * size), kind)

    return flush
