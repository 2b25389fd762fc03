"""From rows of 64 staged sums to memory: alpha, C, bias, the activation and one rounding, to any type and strides.

A row consists of chunks of 16 bytes. They are swizzled by the row's number, so that no two lanes of a warp meet in a
bank, neither when sums are staged nor here.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba.call import KIND
from multigemm.backends.numba.epilogue import BF16, F16, F32, make_any_finish, make_any_store
from multigemm.backends.numba.memory import BYTES
from multigemm.backends.numba.mma_shape import KEPT_COLUMNS
from multigemm.backends.numba.runtime import synchronising

CHUNK = 16
"""Bytes."""
int32 = types.int32


@cache
def make_swizzle(acc):
    """swizzle(row) -> what a chunk's number is xor-ed with: alike for rows 8 apart; of 4 bytes, for 2i and 2i + 1."""

    @synchronising
    def single(row):
        return ((row // 2) % 4) * 2

    @synchronising
    def double(row):
        return (row % 2) * 4

    return double if acc == "f64" else single


def _of_one_kind(load, store, own):
    @synchronising
    def send(where, cell, kind):
        store(where, load(cell))

    @synchronising
    def fits(kind):
        return kind == own

    return send, fits


def _of_three_kinds():
    kinds = (F32, F16, BF16)
    pack_half, pack_brain = ptx.make_pack("f16"), ptx.make_pack("bf16")

    @synchronising
    def send(where, cell, kind):
        v = ptx.load_shared_f32x4(cell)
        if kind == F32:
            ptx.store_global_f32x4(where, v)
        elif kind == F16:
            ptx.store_global_u32x2(where, (pack_half(v[0], v[1]), pack_half(v[2], v[3])))
        else:
            ptx.store_global_u32x2(where, (pack_brain(v[0], v[1]), pack_brain(v[2], v[3])))

    @synchronising
    def fits(kind):
        return kind in kinds

    return send, fits


@cache
def _ways(acc):
    """(load, store of one staged sum; send(address, chunk, kind), fits(kind)): how a whole chunk leaves, if its kind
    has such a way."""
    if acc == "i32":
        whole = _of_one_kind(ptx.load_shared_u32x4, ptx.store_global_u32x4, KIND[acc])
        return ptx.load_shared_u32, ptx.store_shared_u32, *whole
    if acc == "f64":
        whole = _of_one_kind(ptx.load_shared_f64x2, ptx.store_global_f64x2, KIND[acc])
        return ptx.load_shared_f64, ptx.store_shared_f64, *whole
    return ptx.load_shared_f32, ptx.store_shared_f32, *_of_three_kinds()


@cache
def make_flush(acc, threads):
    """flush(...) by so many threads, a chunk of a row each; `acc` is the sums' type."""
    finish, store, swizzle = make_any_finish(acc), make_any_store(acc), make_swizzle(acc)
    load, keep, send, fits = _ways(acc)
    size = BYTES[acc]
    each, pitch = CHUNK // size, KEPT_COLUMNS * size
    chunks = KEPT_COLUMNS // each
    step = threads // chunks

    @synchronising
    def flush(staging, out, c, bias, style, alpha, beta, rows, columns, thread, above):
        """`out` and `c` are (address, row stride, column stride); `above` rows of C lie before the first."""
        out_at, out_row, out_col = out
        c_at, c_row, c_col = c
        bias_at, bias_col = bias
        kind, out_size, c_kind, bias_kind, activation, plain = style
        chunk, first = thread % chunks, thread // chunks
        column = chunk * each
        count = min(max(columns - column, 0), each)
        aligned = ((out_at | (out_row * out_size)) & (each * out_size - 1)) == 0
        wide = out_col == 1 and count == each and aligned and fits(kind)
        for row in range(first, rows, step):
            cell = int32(staging + row * pitch + (chunk ^ swizzle(row)) * CHUNK)
            if plain == 0:
                for i in range(count):
                    at, b = (above + row) * c_row + (column + i) * c_col, (column + i) * bias_col
                    value = load(cell + i * size)
                    value = finish(value, alpha, beta, activation, c_kind, c_at, at, bias_kind, bias_at, b)
                    keep(cell + i * size, value)
            if wide:
                send(out_at + (row * out_row + column) * out_size, cell, kind)
            else:
                for i in range(count):
                    store(out_at, row * out_row + (column + i) * out_col, load(cell + i * size), kind)

    return flush


@synchronising
def style_of(p):
    """What `flush` has to know of the epilogue."""
    return p.out_kind, p.out_size, p.c_kind, p.bias_kind, p.activation, p.plain
