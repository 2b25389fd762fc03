"""The Hopper kernel: TMA, a ring of barriers, wgmma, one persistent block per multiprocessor.

C^T = B^T A^T: the columns of C (weights) lie on the side of wgmma that is always 64 wide, its rows
(tokens) on the side that comes in steps of 8. So a ragged group wastes at most a few rows, and the
tile height is chosen for each group: every height that is a multiple of `step` has a main loop of its own.

Three warpgroups. The first produces: its warp 0 walks the schedule, describes each tile in a ring of
`SLOTS` records and fills a ring of `stages` stages by TMA; its other warps zero the rows that no
group owns. The other two consume: each multiplies 64 columns by all rows of the tile, and writes
them out while the producer already loads the next tile.

Shared memory, from a multiple of 1024: stages of [128 columns | n_max rows] x 128 bytes of k,
staging for the epilogue, tile records, barriers. An operand that is contiguous along k lies as rows
of 128 bytes; one that is not lies as boxes of 64 elements x the k of a stage. Both are swizzled.

Where offsets cut k, the last stage of a group holds foreign k: the consumers overwrite it with zeros.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

import numpy as np
from numba import cuda
from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba import ptx_hopper as hw
from multigemm.backends.numba.call import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.hopper_epilogue import STAGING, make_write
from multigemm.backends.numba.hopper_shape import COLUMNS, ROW_BYTES, SLOT_BYTES, SLOTS, WEIGHT_BYTES, Layout
from multigemm.backends.numba.memory import BYTES
from multigemm.backends.numba.operand import make_operands
from multigemm.backends.numba.ptx_asm import make_zeros, shared_address
from multigemm.backends.numba.runtime import kernel, synchronising
from multigemm.backends.numba.schedule import extent, make_zero_unowned
from multigemm.backends.numba.warp_schedule import make_warp_schedule

PRODUCER_REGISTERS, CONSUMER_REGISTERS = 56, 224
CONSUMERS = 256
CONSUMER_WARPS = 8
BOTH_BARRIER = 3
MAP_BYTES = 128
int32 = types.int32
_tma = hw.make_tma_load(3)
_wait_one = hw.make_wgmma_wait(1)
_less, _more = hw.make_setmaxnreg(PRODUCER_REGISTERS, False), hw.make_setmaxnreg(CONSUMER_REGISTERS, True)


@cache
def make_producer(config, signature):
    """produce(p, maps, base, lane): warp 0's whole life."""
    at = Layout(config, signature)
    n_max, stages, box_rows, bk = config.n_max, config.stages, config.step, at.bk
    full, empty, slot_full, slot_empty = at.full, at.empty, at.slot_full, at.slot_empty
    stage_bytes, slots_at = at.stage_bytes, at.slots
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    scan, locate, piece = make_warp_schedule(n_max, COLUMNS)

    @synchronising
    def fill(stage, barrier, a_map, b_map, i, j, k, a_k, b_k, a_g, b_g, height):
        """Loads one stage; i, j, k are coordinates in the packed operands."""
        for half in range(2):
            x, y = (j + half * 64, b_k) if b_across else (b_k, j + half * 64)
            _tma(stage + half * (WEIGHT_BYTES // 2), b_map, barrier, (int32(x), int32(y), int32(b_g)))
        tokens = stage + WEIGHT_BYTES
        if a_across:
            for row in range(0, height, 64):
                _tma(tokens + row * ROW_BYTES, a_map, barrier, (int32(i + row), int32(a_k), int32(a_g)))
        else:
            for row in range(0, height, box_rows):
                _tma(tokens + row * ROW_BYTES, a_map, barrier, (int32(a_k), int32(i + row), int32(a_g)))

    @synchronising
    def produce(p, maps, base, lane):
        low, high, total = scan(p, lane)
        step = int32(0)
        seen = int32(-1)
        g, first, end = int32(0), int32(0), int32(0)
        tile = int32(cuda.blockIdx.x)
        slot_step = int32(0)
        while tile < total:
            if tile >= end:
                g, first, end = locate(p, low, high, lane, tile)
            m, n, k, start = extent(p, g)
            i0, rows, j0 = piece(m, n, tile - first)
            height = ((rows + int32(box_rows - 1)) // int32(box_rows)) * int32(box_rows)
            depth = (int32(k) + int32(bk - 1)) // int32(bk)
            if lane == 0:
                slot = slot_step % SLOTS
                hw.mbarrier_wait(base + slot_empty + slot * 8, ((slot_step // SLOTS) & 1) ^ 1)
                record = base + slots_at + slot * SLOT_BYTES
                ptx.store_shared_i64x2(record, height, depth)
                ptx.store_shared_i64x2(record + 16, g, start)
                ptx.store_shared_i64x2(record + 32, i0, j0)
                ptx.store_shared_i64x2(record + 48, rows, n)
                ptx.store_shared_i64x2(record + 64, k, 0)
                hw.mbarrier_arrive(base + slot_full + slot * 8)
                a_map, b_map = maps, maps + MAP_BYTES
                if p.table != 0:
                    a_map += g * (2 * MAP_BYTES)
                    b_map += g * (2 * MAP_BYTES)
                if seen < 0 or (p.table != 0 and seen != g):
                    hw.fence_tensormap(a_map)
                    hw.fence_tensormap(b_map)
                    seen = g
                i, j, k0 = i0, j0, int32(0)
                if p.jagged == JAGGED_M:
                    i += int32(start)
                elif p.jagged == JAGGED_N:
                    j += int32(start)
                elif p.jagged == JAGGED_K:
                    k0 += int32(start)
                a_g, b_g = int32(0), int32(0)
                if p.a_group != 0:
                    a_g = g
                if p.b_group != 0:
                    b_g = g
                loaded = height
                if a_across:
                    loaded = ((height + 63) // 64) * 64
                for block in range(depth):
                    stage = step % stages
                    barrier = base + full + stage * 8
                    hw.mbarrier_wait(base + empty + stage * 8, ((step // stages) & 1) ^ 1)
                    hw.mbarrier_expect_tx(barrier, WEIGHT_BYTES + loaded * ROW_BYTES)
                    at_k = k0 + block * bk
                    fill(base + stage * stage_bytes, barrier, a_map, b_map, i, j, k0, at_k, at_k, a_g, b_g, height)
                    step += int32(1)
            slot_step += int32(1)
            tile += int32(cuda.gridDim.x)
        if lane == 0:
            slot = slot_step % SLOTS
            hw.mbarrier_wait(base + slot_empty + slot * 8, ((slot_step // SLOTS) & 1) ^ 1)
            ptx.store_shared_i64x2(base + slots_at + slot * SLOT_BYTES, 0, 0)
            hw.mbarrier_arrive(base + slot_full + slot * 8)

    return produce


@cache
def make_zero_tail(config, signature):
    """zero_tail(stage, valid, height, thread): clears k >= valid of a stage, by all consumers."""
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    size, bk = BYTES[signature.compute], ROW_BYTES // BYTES[signature.compute]

    @synchronising
    def clear_rows(start, boxes, valid, thread):
        """Boxes of bk rows (k) x 128 bytes."""
        chunks = (bk - valid) * 8
        for index in range(thread, boxes * chunks, CONSUMERS):
            box, chunk = index // chunks, index % chunks
            ptx.store_shared_u32x4(start + box * bk * ROW_BYTES + valid * ROW_BYTES + chunk * 16, (0, 0, 0, 0))

    @synchronising
    def clear_columns(start, rows, valid, thread):
        """Rows of 128 bytes of k, their 16-byte chunks swizzled."""
        for index in range(thread, rows * (bk - valid), CONSUMERS):
            row, byte = index // (bk - valid), (valid + index % (bk - valid)) * size
            where = start + row * ROW_BYTES + ((byte // 16) ^ (row % 8)) * 16 + byte % 16
            if size == 2:
                ptx.store_shared_u16(where, 0)
            else:
                ptx.store_shared_u32(where, 0)

    @synchronising
    def zero_tail(stage, valid, height, thread):
        if b_across:
            clear_rows(stage, 2, valid, thread)
        else:
            clear_columns(stage, COLUMNS, valid, thread)
        if a_across:
            clear_rows(stage + WEIGHT_BYTES, (height + 63) // 64, valid, thread)
        else:
            clear_columns(stage + WEIGHT_BYTES, height, valid, thread)
        hw.fence_async()
        ptx.named_barrier(BOTH_BARRIER, CONSUMERS)

    return zero_tail


@cache
def make_multiply(config, signature, n):
    """multiply(base, step, depth, tail, warpgroup, thread) -> the 64 x n accumulators of this warpgroup."""
    at = Layout(config, signature)
    stages, stage_bytes, full, empty = config.stages, at.stage_bytes, at.full, at.empty
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    kind = at.kind
    zeros, result = make_zeros(n // 2), hw.make_wgmma_result(n)
    wgmma = hw.make_wgmma(kind, n, b_across, a_across)
    # Steps of 32 bytes of k, or of 16 rows of k, in units of 16 bytes.
    b_step, a_step = (128 if b_across else 2), (128 if a_across else 2)
    weights = hw.make_descriptor(WEIGHT_BYTES // 2, 1024)
    tokens = hw.make_descriptor(64 * ROW_BYTES, 1024)
    zero_tail = make_zero_tail(config, signature)

    @synchronising
    def multiply(base, step, depth, tail, warpgroup, thread):
        acc = zeros()
        before = int32(0)
        for block in range(depth):
            stage = step % stages
            where = base + stage * stage_bytes
            hw.mbarrier_wait(base + full + stage * 8, (step // stages) & 1)
            if tail != 0 and block == depth - 1:
                zero_tail(where, tail, n, warpgroup * 128 + thread)
            b = weights(where + warpgroup * (WEIGHT_BYTES // 2))
            a = tokens(where + WEIGHT_BYTES)
            hw.wgmma_fence()
            acc = wgmma(acc, b, a)
            acc = wgmma(acc, b + b_step, a + a_step)
            acc = wgmma(acc, b + 2 * b_step, a + 2 * a_step)
            acc = wgmma(acc, b + 3 * b_step, a + 3 * a_step)
            hw.wgmma_commit()
            _wait_one()
            if block > 0 and thread % 32 == 0:
                hw.mbarrier_arrive(base + empty + before * 8)
            before = stage
            step += int32(1)
        acc = result(acc)
        if depth > 0 and thread % 32 == 0:
            hw.mbarrier_arrive(base + empty + before * 8)
        return acc

    return multiply


@cache
def make_tile(config, signature, n):
    """tile(...): the main loop and the epilogue for tiles of n rows."""
    multiply, write = make_multiply(config, signature, n), make_write(n, signature)

    @synchronising
    def tile(base, step, depth, tail, warpgroup, thread, staging, out, c, bias, alpha, beta, rows, columns):
        acc = multiply(base, step, depth, tail, warpgroup, thread)
        write(acc, staging, warpgroup + 1, out, c, bias, alpha, beta, rows, columns, thread)

    return tile


@cache
def make_consumer(config, signature):
    """consume(p, alpha, beta, base, warpgroup, thread): the whole life of a consumer thread."""
    at = Layout(config, signature)
    slot_full, slot_empty, slots_at, staging_at, bk = at.slot_full, at.slot_empty, at.slots, at.staging, at.bk
    size, c_size, bias_size = BYTES[signature.out], BYTES[signature.c or "f32"], BYTES[signature.bias or "f32"]
    _, _, operand_c, operand_out, operand_bias = make_operands(BYTES[signature.compute], size, c_size, bias_size)
    dispatch = make_dispatch(config, signature)

    @synchronising
    def consume(p, alpha, beta, base, warpgroup, thread):
        step, slot_step = int32(0), int32(0)
        staging = base + staging_at + warpgroup * STAGING
        while True:
            slot = slot_step % SLOTS
            record = base + slots_at + slot * SLOT_BYTES
            hw.mbarrier_wait(base + slot_full + slot * 8, (slot_step // SLOTS) & 1)
            height, depth = ptx.load_shared_i64x2(record)
            g, start = ptx.load_shared_i64x2(record + 16)
            i0, j0 = ptx.load_shared_i64x2(record + 32)
            rows, n = ptx.load_shared_i64x2(record + 48)
            k, _ = ptx.load_shared_i64x2(record + 64)
            hw.mbarrier_arrive(base + slot_empty + slot * 8)
            slot_step += int32(1)
            if height == 0:
                break
            out_at, out_row, out_col = operand_out(p, g, start)
            c_at, c_row, c_col = operand_c(p, g, start)
            bias_at, bias_col = operand_bias(p, g, start)
            j = j0 + warpgroup * 64
            out = out_at + (i0 * out_row + j * out_col) * size, out_row, out_col
            c = c_at + (i0 * c_row + j * c_col) * c_size, c_row, c_col
            bias = bias_at + j * bias_col * bias_size, bias_col
            tail = int32(0)
            if p.jagged == JAGGED_K:
                tail = int32(k % bk)
            dispatch(
                int32(height), base, step, int32(depth), tail, warpgroup, thread, staging, out, c, bias,
                alpha, beta, int32(rows), int32(n - j),
            )  # fmt: skip
            step += int32(depth)

    return consume


@cache
def make_dispatch(config, signature):
    """dispatch(height, ...): the tile function of that height, found by halving."""

    def build(heights):
        if len(heights) == 1:
            return make_tile(config, signature, heights[0])
        middle = len(heights) // 2
        lower, upper, limit = build(heights[:middle]), build(heights[middle:]), heights[middle - 1]
        if len(heights) == 2:
            small, large = lower, upper

            @synchronising
            def choose(
                height, base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns
            ):
                if height <= limit:
                    small(base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns)
                else:
                    large(base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns)

            return choose
        if middle == 1:
            lower = build_single(lower)

        @synchronising
        def halve(height, base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns):
            if height <= limit:
                lower(height, base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns)
            else:
                upper(height, base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns)

        return halve

    def build_single(tile):
        @synchronising
        def only(height, base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns):
            tile(base, step, depth, tail, group, thread, staging, out, c, bias, alpha, beta, rows, columns)

        return only

    heights = list(range(config.step, config.n_max + 1, config.step))
    built = build(heights)
    return build_single(built) if len(heights) == 1 else built


@cache
def make_kernel(config, signature):
    """The kernel for one pipeline shape and one set of dtypes and layouts."""
    at = Layout(config, signature)
    stages, full, empty, slot_full, slot_empty = config.stages, at.full, at.empty, at.slot_full, at.slot_empty
    produce, consume = make_producer(config, signature), make_consumer(config, signature)
    zero_unowned, zeroes = make_zero_unowned(signature.out, "f32"), signature.zero_unowned
    helpers = 96

    @kernel
    def hopper(p, alpha, beta, maps):
        base = (shared_address(cuda.shared.array(0, np.uint8)) + int32(1023)) & int32(~1023)
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(stages):
                hw.mbarrier_init(base + full + stage * 8, 1)
                hw.mbarrier_init(base + empty + stage * 8, CONSUMER_WARPS)
            for slot in range(SLOTS):
                hw.mbarrier_init(base + slot_full + slot * 8, 1)
                hw.mbarrier_init(base + slot_empty + slot * 8, CONSUMERS)
            hw.fence_mbarrier_init()
        cuda.syncthreads()
        hw.grid_dependency_wait()
        if thread < 128:
            _less()
            if thread < 32:
                produce(p, maps, base, thread)
            elif zeroes:
                zero_unowned(p, cuda.blockIdx.x * helpers + thread - 32, cuda.gridDim.x * helpers, types.float32(0))
        else:
            _more()
            consume(p, types.float32(alpha), types.float32(beta), base, thread // 128 - 1, thread % 128)

    return hopper
