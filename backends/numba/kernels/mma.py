"""The tensor-core kernel for sm_80 and later: cp.async, ldmatrix, mma.sync; or, for IEEE float32, plain FMA.

A block of four warps computes a tile of C, 128 x 128 in the large config, of which each warp keeps
64 x 64 in 128 registers per thread, over stages of 128 bytes of k. While one is multiplied, the next
are on their way.
The sums leave through shared memory, so that stores are wide and the epilogue is that of every kernel.
Each warp walks the schedule for itself, with shuffles alone, which saves a small problem its barriers.

On Hopper the kernel may be started before its predecessor has ended. What a predecessor cannot have
written (the table of a list, which the host fills when it binds) is read at once, all else after the wait.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from multigemm.backends.numba.arguments import KIND
from multigemm.backends.numba.config import (
    ALIGNMENT,
    KEPT_COLUMNS,
    ROW_BYTES,
    SIZE,
    THREADS,
    WARPS,
    kept_rows,
    piece_step,
    staging_bytes,
)
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.memory import ACCUMULATOR, BYTES, caster, make_operands
from multigemm.backends.numba.kernels.mma_fragments import (
    make_copy,
    make_fma_step,
    make_fragments,
    make_warp_step,
    make_warp_store,
)
from multigemm.backends.numba.kernels.ptx import make_zeros, shared_address
from multigemm.backends.numba.kernels.runtime import kernel, synchronising
from multigemm.backends.numba.kernels.schedule import LANES, extent, make_warp_schedule, make_zero_unowned
from multigemm.backends.numba.kernels.tensor_epilogue import make_way_out, style_of

DIRECT_ROWS = 16
"""Of a warp's share; a higher one is stored by way of shared memory."""
int32 = types.int32


def make_in_turn(load_a, load_b, warp_step, steps):
    """products(sums, first step, A's tile, B's tile, first row, first column, lane): `steps`, a power of two, which
    the compiler interleaves."""

    @synchronising
    def one(acc, step, a, b, first_row, first_column, lane):
        return warp_step(acc, load_a(a, step, first_row, lane), load_b(b, step, first_column, lane))

    if steps == 1:
        return one
    half = make_in_turn(load_a, load_b, warp_step, steps // 2)

    @synchronising
    def both(acc, step, a, b, first_row, first_column, lane):
        acc = half(acc, step, a, b, first_row, first_column, lane)
        return half(acc, step + steps // 2, a, b, first_row, first_column, lane)

    return both


@cache
def make_main_loop(config, kind, a_across, b_across, a_aligned, b_aligned):
    """loop(base, a, b, rows, columns, k, thread) -> the warp's accumulators."""
    bm, bn, stages = config.bm, config.bn, config.stages
    size = SIZE[kind]
    bk, b_at = ROW_BYTES // size, bm * ROW_BYTES
    stage_bytes, ahead = (bm + bn) * ROW_BYTES, stages - 1
    copy_a, a_lies_across = make_copy(kind, bm, THREADS, a_across, a_aligned)
    copy_b, b_lies_across = make_copy(kind, bn, THREADS, b_across, b_aligned)
    kept, across_warps = kept_rows(config), bn // KEPT_COLUMNS
    load_a = make_fragments(kind, a_lies_across, True, bm, kept)
    load_b = make_fragments(kind, b_lies_across, False, bn, KEPT_COLUMNS)
    plain = kind == "f32"
    warp_step = make_fma_step(kept, a_lies_across, b_lies_across) if plain else make_warp_step(kind, kept)
    in_turn = make_in_turn(load_a, load_b, warp_step, 8)
    zeros = make_zeros(kept * KEPT_COLUMNS // 32, ptx.SUMS[kind])
    wait = ptx.make_cp_async_wait(stages - 2)

    @synchronising
    def loop(base, a, b, rows, columns, k, thread):
        a_base, a_row, a_col = a
        b_base, b_row, b_col = b
        lane, warp = thread & 31, thread >> 5
        first_row = int32(warp // int32(across_warps) * kept)
        first_column = int32(warp % int32(across_warps) * KEPT_COLUMNS)
        acc = zeros()
        blocks = int32((k + (bk - 1)) // bk)
        for block in range(ahead):
            if block < blocks:
                where = base + block * stage_bytes
                copy_a(where, a_base, a_row, a_col, rows, k, block * bk, thread)
                copy_b(where + b_at, b_base, b_col, b_row, columns, k, block * bk, thread)
            ptx.cp_async_commit()
        stage, filled = int32(0), int32(ahead)
        for block in range(blocks):
            wait()
            cuda.syncthreads()
            if block + ahead < blocks:
                where = base + filled * stage_bytes
                k0 = (block + ahead) * bk
                copy_a(where, a_base, a_row, a_col, rows, k, k0, thread)
                copy_b(where + b_at, b_base, b_col, b_row, columns, k, k0, thread)
            ptx.cp_async_commit()
            tile = int32(base + stage * stage_bytes)
            if plain:
                acc = in_turn(acc, 0, tile, tile + b_at, first_row, first_column, lane)
            else:
                # One step of fragments is loaded ahead of the products that need them.
                a0, b0 = load_a(tile, 0, first_row, lane), load_b(tile + b_at, 0, first_column, lane)
                a1, b1 = load_a(tile, 1, first_row, lane), load_b(tile + b_at, 1, first_column, lane)
                acc = warp_step(acc, a0, b0)
                a0, b0 = load_a(tile, 2, first_row, lane), load_b(tile + b_at, 2, first_column, lane)
                acc = warp_step(acc, a1, b1)
                a1, b1 = load_a(tile, 3, first_row, lane), load_b(tile + b_at, 3, first_column, lane)
                acc = warp_step(acc, a0, b0)
                acc = warp_step(acc, a1, b1)
            stage, filled = int32(stage + 1), int32(filled + 1)
            if stage == stages:
                stage = int32(0)
            if filled == stages:
                filled = int32(0)
        cuda.syncthreads()
        return acc

    return loop


@synchronising
def no_store(acc, address, pitch, rows, columns):
    """Of tall tiles, and of other types, no sums leave straight from the registers."""


@cache
def make_kernel(config, signature, overlap):
    """The kernel for one tile shape and one set of dtypes and layouts; `overlap`: it waits for its predecessor."""
    bm, bn = config.bm, config.bn
    kind = "tf32" if signature.compute == "f32" and config.tensor else signature.compute
    in_size, acc_name = BYTES[signature.compute], ACCUMULATOR[signature.compute]
    operand_a, operand_b, operand_c, operand_out, operand_bias = make_operands(in_size)
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    a_aligned, b_aligned = signature.a_aligned, signature.b_aligned
    main_loop = make_main_loop(config, kind, a_across, b_across, a_aligned, b_aligned)
    scan, locate, piece = make_warp_schedule(bm, bn, piece_step(kind))
    zero_unowned = make_zero_unowned(LANES)
    kept, across_warps = kept_rows(config), bn // KEPT_COLUMNS
    stage, flush = make_way_out(kind, acc_name, kept, a_across and a_aligned, b_across and b_aligned)
    piece_bytes, scale = staging_bytes(config, BYTES[acc_name]), caster(acc_name)
    direct = kind in ("f16", "bf16") and kept <= DIRECT_ROWS
    direct_kind, store = KIND[signature.compute], make_warp_store(kind, kept) if direct else no_store

    @kernel
    def mma(p, alpha, beta):
        base = (shared_address(cuda.shared.array(0, np.uint8)) + int32(ALIGNMENT - 1)) & int32(-ALIGNMENT)
        thread = int32(cuda.threadIdx.x)
        lane, warp = thread & 31, thread >> 5
        staging = int32(base + warp * piece_bytes)
        if overlap:
            ptx.grid_dependents_launch()
            if (p.ends | p.valid) != 0:
                ptx.grid_dependency_wait()
        low, high, total = scan(p, lane)
        for tile in range(cuda.blockIdx.x, total, cuda.gridDim.x):
            g, first, _ = locate(p, low, high, lane, int32(tile))
            m, n, k, start = extent(p, g)
            i0, height, j0 = piece(m, n, int32(int32(tile) - first))
            a, a_row, a_col = operand_a(p, g, start)
            b, b_row, b_col = operand_b(p, g, start)
            left = a + i0 * a_row * in_size, a_row, a_col
            right = b + j0 * b_col * in_size, b_row, b_col
            if overlap:
                ptx.grid_dependency_wait()
            acc = main_loop(base, left, right, height, n - j0, k, thread)
            above = warp // int32(across_warps) * kept
            i, j = i0 + above, j0 + warp % int32(across_warps) * KEPT_COLUMNS
            rows, columns = min(height - above, kept), n - j
            out, out_row, out_col = operand_out(p, g, start)
            out = out + (i * out_row + j * out_col) * p.out_size
            pitch = out_row * 2
            direct_here = direct and p.plain != 0 and p.out_kind == direct_kind
            if direct_here and out_col == 1 and ((out | pitch | (columns * 2)) & 3) == 0:
                row, column = int32(lane >> 2), int32((lane & 3) * 2)
                here = out + row * pitch + column * 2
                store(acc, here, pitch * 8, int32(int32(rows) - row), int32(int32(columns) - column))
            else:
                stage(acc, staging, lane)
                cuda.syncwarp()
                c, c_row, c_col = operand_c(p, g, start)
                bias, bias_col = operand_bias(p, g, start)
                here = out, out_row, out_col
                there = c + (i * c_row + j * c_col) * p.c_size, c_row, c_col
                vector = bias + j * bias_col * p.bias_size, bias_col
                flush(
                    staging, here, there, vector, style_of(p), scale(alpha), scale(beta), rows, columns, lane, 0
                )  # fmt: skip
            cuda.syncthreads()
        if overlap:
            # Also without a tile: whoever waits for this kernel relies on all before it having ended too.
            ptx.grid_dependency_wait()
        if p.zeroes != 0:
            zero_unowned(p, lane, cuda.blockIdx.x * WARPS + warp, cuda.gridDim.x * WARPS)

    return mma
