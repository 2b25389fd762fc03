"""From accumulators to memory, for the Hopper kernel: through shared memory, so that stores are wide.

A warpgroup holds 64 columns of C x n rows, each thread two neighbouring rows of one column per
register pair. Two ways out:

* `fast`: nothing but one rounding to a 16-bit type; `stmatrix` transposes into rows of 128 bytes,
  ROWS_16 at a time, and each thread moves 16 bytes;
* `general`: float32 rows of 256 bytes, ROWS_32 at a time, which `flush` brings to memory.

Both swizzle the 16-byte chunks of a row by the row number, so that no two lanes meet in a bank.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba.call import KIND
from multigemm.backends.numba.flush import make_flush, style_of
from multigemm.backends.numba.ptx_asm import I32, floats, with_arity
from multigemm.backends.numba.runtime import synchronising

WARPGROUP = 128
ROWS_16, ROWS_32 = 128, 64
STAGING = 16384
"""Bytes of one warpgroup's staging."""
PASS_ROWS = 16
"""Rows of 128 bytes that the 128 threads of a warpgroup move at once."""
VOID = ir.VoidType()
int32 = types.int32


def _emit(builder, text, constraints, values):
    function = ir.FunctionType(VOID, [value.type for value in values])
    builder.call(ir.InlineAsm(function, text, constraints + ",~{memory}", side_effect=True), values)


def _by_round(n, rows, emit):
    """stage(acc, round, ...): the stores of one round of `rows` rows, chosen by a switch.

    A tuple cannot be indexed by a run-time number, so each round has its own straight code.
    """

    def generate(context, builder, signature, arguments):
        acc, which, *addresses = arguments
        done = builder.append_basic_block("staged")
        switch = builder.switch(which, done)
        for number in range(-(-n // rows)):
            block = builder.append_basic_block(f"round{number}")
            switch.add_case(ir.Constant(ir.IntType(32), number), block)
            with builder.goto_block(block):
                emit(builder, acc, addresses, range(number * rows, min(n, number * rows + rows)))
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    return generate


@cache
def make_stage_16(n, kind):
    """stage(acc, round, this lane's address): packs, transposes and stores one round of rows."""
    text = (
        "{{ .reg .b32 a, b, c, d; cvt.rn.{k}x2.f32 a, $2, $1; cvt.rn.{k}x2.f32 b, $4, $3; "
        "cvt.rn.{k}x2.f32 c, $6, $5; cvt.rn.{k}x2.f32 d, $8, $7; "
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{at}], {{a, b, c, d}}; }}"
    )

    def emit(builder, acc, addresses, rows):
        for row in rows[::16]:
            values = [builder.extract_value(acc, row // 2 + i) for i in range(8)]
            where = (row - rows[0]) * 128
            _emit(builder, text.format(k=kind, at=where), "r,f,f,f,f,f,f,f,f", [addresses[0], *values])

    takes = (floats(n // 2), I32, I32)
    return with_arity(3, lambda _types: (types.void(*takes), _by_round(n, ROWS_16, emit)))


@cache
def make_stage_32(n):
    """stage(acc, round, address of this lane's column, address of its column + 8)."""

    def emit(builder, acc, addresses, rows):
        for row in rows[::8]:
            for i in range(4):
                value = builder.extract_value(acc, row // 2 + i)
                where = (row - rows[0] + i % 2) * 256
                _emit(builder, f"st.shared.f32 [$0+{where}], $1;", "r,f", [addresses[i // 2], value])

    takes = (floats(n // 2), I32, I32, I32)
    return with_arity(4, lambda _types: (types.void(*takes), _by_round(n, ROWS_32, emit)))


@synchronising
def lane_address_16(staging, thread):
    """Where this lane's row of each stmatrix lies: rows 0-7 or 8-15, columns of its warp."""
    lane, warp = thread % 32, thread // 32
    row, chunk = (lane // 16) * 8 + lane % 8, warp * 2 + (lane // 8) % 2
    return staging + row * 128 + (chunk ^ (row % 8)) * 16


@synchronising
def lane_address_32(staging, thread, upper):
    """Where this lane's first register goes: row 2 * (lane % 4), column lane / 4 (+ 8) of its warp."""
    lane, warp = thread % 32, thread // 32
    column = warp * 16 + lane // 4 + upper * 8
    return staging + (lane % 4) * 512 + ((column // 4) ^ ((lane % 4) * 2)) * 16 + (column % 4) * 4


@cache
def make_flush_16():
    """flush(staging, address of the first row, bytes per row, rows, columns left, thread): 16 bytes per thread."""
    load, store = ptx.load_shared_u32x4, ptx.store_global_u32x4
    down = PASS_ROWS * 128

    @synchronising
    def four_passes(at, step, source):
        """Four rows of this thread: all loads first, so that they wait together."""
        v0, v1, v2, v3 = load(source), load(source + down), load(source + 2 * down), load(source + 3 * down)
        store(at, v0)
        store(at + step, v1)
        store(at + 2 * step, v2)
        store(at + 3 * step, v3)

    @synchronising
    def flush(staging, target, pitch, rows, columns, thread):
        chunk, row = int32(thread & 7), int32(thread >> 3)
        source = int32(staging + row * 128 + (chunk ^ (row & 7)) * 16)
        at, step = target + row * pitch + chunk * 16, PASS_ROWS * pitch
        left = int32((rows - row + int32(PASS_ROWS - 1)) // int32(PASS_ROWS))
        if chunk * 8 + 8 <= columns:
            while left >= 4:
                four_passes(at, step, source)
                left, source = int32(left - 4), int32(source + 4 * down)
                at += 4 * step
            while left > 0:
                store(at, load(source))
                left, source = int32(left - 1), int32(source + down)
                at += step
        else:
            while left > 0:
                for i in range(min(columns - chunk * 8, 8)):
                    ptx.store_global_u16(at + i * 2, ptx.load_shared_u16(source + i * 2))
                left, source = int32(left - 1), int32(source + down)
                at += step

    return flush


@cache
def make_write(n, kind, others):
    """write(acc, ...): one warpgroup's part of a tile, by the way that fits; `kind` is the operands' type.

    `others` tells where C and bias lie, which only the general way has to know.
    """
    fast_kind = KIND[kind] if kind in ("f16", "bf16") else -1
    stage_16 = make_stage_16(n, kind if fast_kind > 0 else "f16")
    stage_32, flush_16, flush_32 = make_stage_32(n), make_flush_16(), make_flush("f32", WARPGROUP)

    @synchronising
    def write_fast(acc, staging, barrier, out, rows, columns, thread):
        out_at, out_row, _ = out
        lane_at = lane_address_16(staging, thread)
        for number in range((rows + int32(ROWS_16 - 1)) // int32(ROWS_16)):
            first = int32(number * ROWS_16)
            stage_16(acc, int32(number), lane_at)
            ptx.named_barrier(barrier, WARPGROUP)
            target = out_at + first * out_row * 2
            flush_16(staging, target, out_row * 2, min(rows - first, int32(ROWS_16)), columns, thread)
            ptx.named_barrier(barrier, WARPGROUP)

    @synchronising
    def write_any(acc, staging, barrier, p, tile, out, alpha, beta, rows, columns, thread):
        _, _, g, start, i0, j = tile
        out_at, out_row, out_col = out
        c, bias = others(p, g, start, i0, j)
        lower, upper = lane_address_32(staging, thread, 0), lane_address_32(staging, thread, 1)
        for number in range((rows + int32(ROWS_32 - 1)) // int32(ROWS_32)):
            first = int32(number * ROWS_32)
            stage_32(acc, int32(number), lower, upper)
            ptx.named_barrier(barrier, WARPGROUP)
            here, height = (out_at + first * out_row * p.out_size, out_row, out_col), min(rows - first, ROWS_32)
            flush_32(staging, here, c, bias, style_of(p), alpha, beta, height, columns, thread, first)
            ptx.named_barrier(barrier, WARPGROUP)

    @synchronising
    def write(acc, staging, barrier, p, tile, out, alpha, beta, rows, columns, thread):
        out_at, out_row, out_col = out
        fast = p.plain != 0 and p.out_kind == fast_kind and out_col == 1
        if fast and ((out_at | (out_row * 2)) & 15) == 0:
            write_fast(acc, staging, barrier, out, rows, columns, thread)
        else:
            write_any(acc, staging, barrier, p, tile, out, alpha, beta, rows, columns, thread)

    return write
