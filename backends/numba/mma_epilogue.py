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

from multigemm.backends.numba.flush import CHUNK, make_flush, make_swizzle
from multigemm.backends.numba.fma import make_fma_stage
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
        stage = make_fma_stage(kept, a_lies_across, b_lies_across)
    elif acc == "f32":
        stage = make_warp_stage(kept)
    else:
        turned = kind == "i8"
        stage = make_stage(acc, kept, turned and a_lies_across, turned and b_lies_across)
    return stage, make_flush(acc, LANES)


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
        start, twist = int32(piece + row * pitch), int32(swizzle(row) * CHUNK)
        if turned_b:
            put(sums, start, int32(twist ^ (quad * 4 * size)))
        else:
            put(sums, int32(start + quad * 2 * size), twist)

    return stage
