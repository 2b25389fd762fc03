"""The kernel for everything: any dtype, any stride, any form, on plain cores, in plain Numba.

A block computes BM x BN tiles: threads copy BK columns of A and BK rows of B into shared memory, in
the accumulator's type and with 0 where a tile hangs over its group (on both operands, so nothing
outside can reach a sum), then each thread adds TM x TN products from registers. The same text runs
in Numba's CUDA simulator, with small tiles. Sums run over k in one fixed order, so bits repeat.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda

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
from multigemm.backends.numba.kernels.runtime import SIMULATED, device, kernel
from multigemm.backends.numba.kernels.schedule import extent, make_schedule, make_zero_unowned


@cache
def make_kernel(config, signature):
    """The kernel for one tile shape and one set of dtypes."""
    bm, bn, bk, tm, tn, threads = config.bm, config.bn, config.bk, config.tm, config.tn, config.threads
    rows, columns, in_bytes, products = bm // tm, bn // tn, BYTES[signature.compute], tm * tn
    # Neighbouring threads read along the contiguous direction.
    a_down, b_down = signature.a_order == "col", signature.b_order != "col"
    acc = ACCUMULATOR[signature.compute]
    acc_type, cast = numpy_type(acc), caster(acc)
    load, store = loader(signature.compute), storer(signature.out, acc)
    finish = make_finish(acc, signature.activation, signature.c, signature.bias)
    scan, locate, tile_in_group = make_schedule(bm, bn, threads)
    zero_unowned = make_zero_unowned()
    operand_a, operand_b, operand_c, operand_out, operand_bias = make_operands(in_bytes)
    zeroes, zero = signature.zero_unowned, 0 if acc == "i32" else 0.0
    # One row more than the tile keeps a transposed store off a single shared-memory bank.
    pad = 0 if SIMULATED else 1
    a_pitch, b_pitch = bm + pad, bn + pad
    a_count, b_count = bm * bk // threads, bn * bk // threads
    a_words, b_words, prefix_words = bk * a_pitch, bk * b_pitch, threads + 1

    @device
    def place(index, height, down):
        """(row of the operand's own dimension, k) of the `index`-th element of a tile."""
        return (index % height, index // height) if down else (index // bk, index % bk)

    @device
    def fetch(held, count, base, outer_stride, k_stride, outer, depth, k0, height, down, thread):
        """Reads this thread's part of [height, bk] of an operand; 0 outside outer x depth."""
        for x in range(count):
            i, j = place(thread + x * threads, height, down)
            value = cast(0)
            if i < outer and k0 + j < depth:
                value = cast(load(base, i * outer_stride + (k0 + j) * k_stride))
            held[x] = value

    @device
    def put(tile, held, count, pitch, height, down, thread):
        """Writes it to shared memory, transposed to [bk, height]."""
        for x in range(count):
            i, j = place(thread + x * threads, height, down)
            tile[j * pitch + i] = held[x]

    @kernel
    def generic(p, alpha, beta):
        a_tile = cuda.shared.array(a_words, acc_type)
        b_tile = cuda.shared.array(b_words, acc_type)
        prefix = cuda.shared.array(prefix_words, np.int64)
        thread, block, blocks = cuda.threadIdx.x, cuda.blockIdx.x, cuda.gridDim.x
        row, column = thread // columns, thread % columns
        scale, keep = cast(alpha), cast(beta)
        total = scan(p, prefix, thread)
        sums = cuda.local.array(products, acc_type)
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
            a += i0 * a_row * in_bytes
            b += j0 * b_col * in_bytes
            for x in range(products):
                sums[x] = zero
            fetch(held_a, a_count, a, a_row, a_col, m - i0, k, 0, bm, a_down, thread)
            fetch(held_b, b_count, b, b_col, b_row, n - j0, k, 0, bn, b_down, thread)
            for k0 in range(0, k, bk):
                cuda.syncthreads()
                put(a_tile, held_a, a_count, a_pitch, bm, a_down, thread)
                put(b_tile, held_b, b_count, b_pitch, bn, b_down, thread)
                cuda.syncthreads()
                # The next part is on its way while this one is multiplied; past k nothing is read.
                fetch(held_a, a_count, a, a_row, a_col, m - i0, k, k0 + bk, bm, a_down, thread)
                fetch(held_b, b_count, b, b_col, b_row, n - j0, k, k0 + bk, bn, b_down, thread)
                for kk in range(bk):
                    for x in range(tm):
                        left[x] = a_tile[kk * a_pitch + row + x * rows]
                    for y in range(tn):
                        right[y] = b_tile[kk * b_pitch + column + y * columns]
                    for x in range(tm):
                        for y in range(tn):
                            sums[x * tn + y] += left[x] * right[y]
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
            zero_unowned(p, block * threads + thread, blocks * threads)

    return generic
