"""The kernels on plain cores, in plain Numba: `generic` for any dtype, stride and form, `quantised` for any format.

A block computes BM x BN tiles: threads copy BK columns of A and BK rows of B into shared memory, in
the accumulator's type and with 0 where a tile hangs over its group (on both operands, so nothing
outside can reach a sum), then each thread adds TM x TN products from registers. The same text runs
in Numba's CUDA simulator, with small tiles. Sums run over k in one fixed order, so bits repeat.

Quantised operands are float8 on both sides, or weights under 16 bits. Codes of 8 and 4 bits become float32, which holds
each of them exactly, by tables in shared memory; zero points are subtracted there. A step of BK along k lies inside one
block of every scale, so its products are summed by themselves, and added to the sum times both scales, multiplied with
each other first. No scale is read that no element of the tile has.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from math import gcd

import numpy as np
from numba import cuda

from multigemm.backends.numba.arguments import (
    CODES,
    GRID_WORDS,
    GRIDS,
    JAGGED_K,
    JAGGED_M,
    JAGGED_N,
    TABLE_A,
    TABLE_B,
    TABLE_SCALE_A,
    TABLE_SCALE_B,
    TABLE_WORDS,
    TABLE_ZERO,
)
from multigemm.backends.numba.config import QuantisedSignature
from multigemm.backends.numba.kernels.epilogue import make_finish
from multigemm.backends.numba.kernels.memory import (
    ACCUMULATOR,
    BYTES,
    caster,
    loader,
    make_operands,
    numpy_type,
    storer,
)
from multigemm.backends.numba.kernels.runtime import SIMULATED, device, kernel, synchronising
from multigemm.backends.numba.kernels.schedule import LANES, extent, make_schedule, make_zero_unowned
from multigemm.planning.scale_grids import WHOLE_K
from multigemm.problem.spec import BYTE_FORMATS

_code, _word, _single = loader("u8"), loader("i64"), loader("f32")


# --- elements, and what scales them -----------------------------------------------------------------


@cache
def make_number(name, table=None):
    """number(tables, base, index): the element there, in the accumulator's type: one of codes by their `table`."""
    by_table = table is not None and (name in CODES or name not in BYTES)
    load, cast = _code if by_table else loader(name), caster(ACCUMULATOR.get(name, "f32"))

    @device
    def typed(tables, base, index):
        return cast(load(base, index))

    @device
    def by_code(tables, base, index):
        return tables[table + load(base, index)]

    return by_code if by_table else typed


@cache
def make_element_of_b(name):
    """element(tables, base, across, k, k_stride): a byte may hold two along k, the lower k in the low four bits."""
    number = make_number(name, TABLE_B)

    @device
    def whole(tables, base, across, k, k_stride):
        return number(tables, base, k * k_stride + across)

    @device
    def half(tables, base, across, k, k_stride):
        pair = _code(base, (k >> 1) * k_stride + across)
        return tables[TABLE_B + ((pair >> ((k & 1) * 4)) & 15)]

    return half if name in BYTE_FORMATS else whole


@cache
def make_grid(which, size, along):
    """grid(p, q, g, start) -> base, strides and shifts of lines and of k: which entry of a scale a line and a k have.

    `along` is the jagged direction that shifts the lines. Of a jagged k, blocks are counted from each group's start.
    """
    at = which * GRID_WORDS

    @device
    def grid(p, q, g, start):
        base, line, deep, line_shift, k_shift = q[at], q[at + 2], q[at + 3], q[at + 4], q[at + 5]
        if q.listed != 0:
            own = (g * GRIDS + which) * GRID_WORDS
            base = _word(q.listed, own)
            line, deep = _word(q.listed, own + 2), _word(q.listed, own + 3)
            line_shift, k_shift = _word(q.listed, own + 4), _word(q.listed, own + 5)
        else:
            offset = g * q[at + 1]
            if p.jagged == along:
                offset += start * line
            elif p.jagged == JAGGED_K and k_shift != WHOLE_K:
                offset += ((start >> k_shift) + g) * deep
            base += offset * size
        return base, line, deep, line_shift, k_shift

    return grid


# --- the walk over tiles ----------------------------------------------------------------------------


@cache
def make_kernel(config, signature):
    """The kernel for one tile shape, and one set of dtypes or formats."""
    scaled = isinstance(signature, QuantisedSignature)
    bm, bn, bk, tm, tn, threads = config.bm, config.bn, config.bk, config.tm, config.tn, config.threads
    rows, columns, products = bm // tm, bn // tn, tm * tn
    # Neighbouring threads read along the contiguous direction.
    a_down, b_down = signature.a_order == "col", signature.b_order != "col"
    acc = "f32" if scaled else ACCUMULATOR[signature.compute]
    acc_type, cast, zero = numpy_type(acc), caster(acc), 0 if acc == "i32" else 0.0
    store = storer(signature.out, acc)
    finish = make_finish(acc, signature.activation, signature.c, signature.bias)
    scan, locate, tile_in_group = make_schedule(bm, bn, threads)
    zeroes, lanes = signature.zero_unowned, gcd(threads, LANES)
    zero_unowned, teams = make_zero_unowned(lanes), threads // lanes
    # One row more than the tile keeps a transposed store off a single shared-memory bank.
    pad = 0 if SIMULATED else 1
    a_pitch, b_pitch = bm + pad, bn + pad
    a_count, b_count = bm * bk // threads, bn * bk // threads
    a_words, b_words, prefix_words = bk * a_pitch, bk * b_pitch, threads + 1
    if scaled:
        a_bytes, b_bytes = BYTES[signature.a], 1
        has_a, has_b, has_zero = (x is not None for x in (signature.scale_a, signature.scale_b, signature.zero))
        element_a, element_b = make_number(signature.a, TABLE_A), make_element_of_b(signature.b)
        number_a = make_number(signature.scale_a or "f32", TABLE_SCALE_A)
        number_b = make_number(signature.scale_b or "f32", TABLE_SCALE_B)
        number_zero = make_number(signature.zero or "u8", TABLE_ZERO)
        grid_a = make_grid(0, BYTES[signature.scale_a or "f32"], JAGGED_M)
        grid_b = make_grid(1, BYTES[signature.scale_b or "f32"], JAGGED_N)
        grid_zero = make_grid(2, 1, JAGGED_N)
    else:
        a_bytes = b_bytes = BYTES[signature.compute]
        has_a = has_b = has_zero = False
        element_a = element_b = make_number(signature.compute)
        number_a = number_b = number_zero = grid_a = grid_b = grid_zero = None
    operand_a, _, operand_c, operand_out, operand_bias = make_operands(a_bytes)
    operand_b = make_operands(b_bytes)[1]

    @device
    def place(index, height, down):
        """(row of the operand's own dimension, k) of the `index`-th element of a tile."""
        return (index % height, index // height) if down else (index // bk, index % bk)

    @device
    def fetch_a(held, tables, base, row_stride, k_stride, outer, depth, k0, thread):
        """Reads this thread's part of [bm, bk] of A; 0 outside outer x depth."""
        for x in range(a_count):
            i, j = place(thread + x * threads, bm, a_down)
            value = cast(0)
            if i < outer and k0 + j < depth:
                value = element_a(tables, base, i * row_stride + (k0 + j) * k_stride)
            held[x] = value

    @device
    def fetch_b(held, tables, base, column_stride, k_stride, outer, depth, k0, points, first, thread):
        """The same of [bn, bk] of B, less its zero `points`; `first` is the tile's first column."""
        for x in range(b_count):
            i, j = place(thread + x * threads, bn, b_down)
            value = cast(0)
            if i < outer and k0 + j < depth:
                if scaled:
                    value = element_b(tables, base, i * column_stride, k0 + j, k_stride)
                else:
                    value = element_b(tables, base, i * column_stride + (k0 + j) * k_stride)
                if has_zero:
                    base_of_points, line, deep, line_shift, k_shift = points
                    at = ((first + i) >> line_shift) * line + ((k0 + j) >> k_shift) * deep
                    value -= number_zero(tables, base_of_points, at)
            held[x] = value

    @device
    def put(tile, held, count, pitch, height, down, thread):
        """Writes it to shared memory, transposed to [bk, height]."""
        for x in range(count):
            i, j = place(thread + x * threads, height, down)
            tile[j * pitch + i] = held[x]

    @synchronising
    def walk(p, q, alpha, beta):
        """All tiles of this block; `q` are the `Grids` of quantised operands."""
        a_tile = cuda.shared.array(a_words, acc_type)
        b_tile = cuda.shared.array(b_words, acc_type)
        tables = cuda.shared.array(TABLE_WORDS, acc_type) if scaled else 0
        prefix = cuda.shared.array(prefix_words, np.int64)
        thread, block, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
        row, column = thread // columns, thread % columns
        scale, keep = cast(alpha), cast(beta)
        if scaled:
            for x in range(thread, TABLE_WORDS, threads):
                tables[x] = _single(q.tables, x)
        total = scan(p, prefix, thread)
        if scaled:
            cuda.syncthreads()
        sums = cuda.local.array(products, acc_type)
        parts = cuda.local.array(products, acc_type) if scaled else sums
        left = cuda.local.array(tm, acc_type)
        right = cuda.local.array(tn, acc_type)
        held_a = cuda.local.array(a_count, acc_type)
        held_b = cuda.local.array(b_count, acc_type)
        for tile in range(block, total, blocks):
            g, number = locate(p, prefix, tile)
            m, n, k, start = extent(p, g)
            ti, tj = tile_in_group(m, n, number)
            i0, j0 = ti * bm, tj * bn
            a, a_row, a_col = operand_a(p, g, start)
            b, b_row, b_col = operand_b(p, g, start)
            a += i0 * a_row * a_bytes
            b += j0 * b_col * b_bytes
            points = 0
            if scaled:
                points = grid_zero(p, q, g, start)
                scale_a, line_a, deep_a, line_shift_a, k_shift_a = grid_a(p, q, g, start)
                scale_b, line_b, deep_b, line_shift_b, k_shift_b = grid_b(p, q, g, start)
            for x in range(products):
                sums[x] = zero
            fetch_a(held_a, tables, a, a_row, a_col, m - i0, k, 0, thread)
            fetch_b(held_b, tables, b, b_col, b_row, n - j0, k, 0, points, j0, thread)
            for k0 in range(0, k, bk):
                cuda.syncthreads()
                put(a_tile, held_a, a_count, a_pitch, bm, a_down, thread)
                put(b_tile, held_b, b_count, b_pitch, bn, b_down, thread)
                cuda.syncthreads()
                # The next part is on its way while this one is multiplied; past k nothing is read.
                fetch_a(held_a, tables, a, a_row, a_col, m - i0, k, k0 + bk, thread)
                fetch_b(held_b, tables, b, b_col, b_row, n - j0, k, k0 + bk, points, j0, thread)
                if scaled:
                    for x in range(products):
                        parts[x] = zero
                for kk in range(bk):
                    for x in range(tm):
                        left[x] = a_tile[kk * a_pitch + row + x * rows]
                    for y in range(tn):
                        right[y] = b_tile[kk * b_pitch + column + y * columns]
                    for x in range(tm):
                        for y in range(tn):
                            parts[x * tn + y] += left[x] * right[y]
                if scaled:
                    for x in range(tm):
                        i = i0 + row + x * rows
                        left[x] = 1.0
                        if has_a and i < m:
                            at = (i >> line_shift_a) * line_a + (k0 >> k_shift_a) * deep_a
                            left[x] = number_a(tables, scale_a, at)
                    for y in range(tn):
                        j = j0 + column + y * columns
                        right[y] = 1.0
                        if has_b and j < n:
                            at = (j >> line_shift_b) * line_b + (k0 >> k_shift_b) * deep_b
                            right[y] = number_b(tables, scale_b, at)
                    for x in range(tm):
                        for y in range(tn):
                            sums[x * tn + y] += parts[x * tn + y] * (left[x] * right[y])
            out, out_row, out_col = operand_out(p, g, start)
            c, c_row, c_col = operand_c(p, g, start)
            bias, bias_col = operand_bias(p, g, start)
            for x in range(tm):
                i = i0 + row + x * rows
                for y in range(tn):
                    j = j0 + column + y * columns
                    if i < m and j < n:
                        at = i * c_row + j * c_col
                        value = finish(sums[x * tn + y], scale, keep, c, at, bias, j * bias_col)
                        store(out, i * out_row + j * out_col, value)
        if zeroes:
            zero_unowned(p, thread % lanes, block * teams + thread // lanes, blocks * teams)

    @kernel
    def generic(p, alpha, beta):
        walk(p, 0, alpha, beta)

    @kernel
    def quantised(p, q, alpha, beta):
        walk(p, q, alpha, beta)

    return quantised if scaled else generic
