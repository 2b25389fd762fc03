"""The consuming warpgroups of the Hopper kernel: wgmma on the stages as they fill, then the epilogue.

Each of the two warpgroups owns 64 of the block's 128 columns and all rows of the tile. Every height
of a tile is a function of its own, since the shape of wgmma is part of the instruction.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba import ptx_hopper as hw
from multigemm.backends.numba.call import JAGGED_K
from multigemm.backends.numba.hopper_epilogue import STAGING, make_write, style_of
from multigemm.backends.numba.hopper_shape import COLUMNS, ROW_BYTES, SLOT_BYTES, SLOTS, WEIGHT_BYTES, Layout
from multigemm.backends.numba.memory import BYTES
from multigemm.backends.numba.operand import make_operands
from multigemm.backends.numba.ptx_asm import make_zeros
from multigemm.backends.numba.runtime import synchronising

CONSUMERS = 256
BOTH_BARRIER = 3
int32 = types.int32
_wait_one = hw.make_wgmma_wait(1)


@cache
def make_zero_tail(config, signature):
    """zero_tail(stage, valid, height, thread): clears k >= valid of a stage, by all consumers."""
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    size, bk = BYTES[signature.compute], ROW_BYTES // BYTES[signature.compute]

    @synchronising
    def clear_rows(start, boxes, valid, thread):
        """Boxes of bk rows (k) x 128 bytes: 8 threads clear a row."""
        for box in range(boxes):
            first = int32(start + box * (bk * ROW_BYTES) + (thread & 7) * 16)
            for row in range(int32(valid + (thread >> 3)), int32(bk), int32(CONSUMERS // 8)):
                ptx.store_shared_u32x4(first + row * ROW_BYTES, (0, 0, 0, 0))

    @synchronising
    def clear_columns(start, rows, valid, thread):
        """Rows of 128 bytes of k, their 16-byte chunks swizzled: a thread clears the end of a row."""
        for row in range(int32(thread), int32(rows), int32(CONSUMERS)):
            first, twist = int32(start + row * ROW_BYTES), int32((row & 7) << 4)
            for byte in range(int32(valid * size), int32(ROW_BYTES), int32(size)):
                if size == 2:
                    ptx.store_shared_u16(first + (byte ^ twist), 0)
                else:
                    ptx.store_shared_u32(first + (byte ^ twist), 0)

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
    """multiply(base, stage, phase, depth, tail, warpgroup, thread) -> this warpgroup's 64 x n accumulators."""
    at = Layout(config, signature)
    stages, stage_bytes, full, empty, cluster = config.stages, at.stage_bytes, at.full, at.empty, config.cluster
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    zeros, result = make_zeros(n // 2), hw.make_wgmma_result(n)
    wgmma = hw.make_wgmma(at.kind, n, b_across, a_across)
    # Steps of 32 bytes of k, or of 16 rows of k, in units of 16 bytes.
    b_step, a_step = (128 if b_across else 2), (128 if a_across else 2)
    weights = hw.make_descriptor(WEIGHT_BYTES // 2, 1024)
    tokens = hw.make_descriptor(64 * ROW_BYTES, 1024)
    zero_tail, ragged_k = make_zero_tail(config, signature), signature.ragged_k

    @synchronising
    def release(base, stage, lane):
        """Tells the producers of all blocks that load into this one's stage that the warp is through with it."""
        if cluster == 1:
            if lane == 0:
                hw.mbarrier_arrive(base + empty + stage * 8)
        elif lane < cluster:
            hw.mbarrier_arrive_cluster(hw.map_shared(base + empty + stage * 8, lane))

    @synchronising
    def multiply(base, stage, phase, depth, tail, warpgroup, thread):
        acc = zeros()
        lane = int32(thread & 31)
        before = int32(-1)
        for block in range(depth):
            where = int32(base + stage * stage_bytes)
            hw.mbarrier_wait(base + full + stage * 8, phase)
            if ragged_k and tail != 0 and block == depth - 1:
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
            if before >= 0:
                release(base, before, lane)
            before = stage
            stage = int32(stage + 1)
            if stage == stages:
                stage = int32(0)
                phase = int32(phase ^ 1)
        acc = result(acc)
        if before >= 0:
            release(base, before, lane)
        return acc

    return multiply


@cache
def make_tile(config, signature, n):
    """tile(job): the main loop and the epilogue for tiles of n rows; `make_consumer` says what a job holds."""
    multiply, write = make_multiply(config, signature, n), make_write(n, signature.compute)

    @synchronising
    def tile(job):
        base, stage, phase, depth, tail, group, thread, staging, out, c, bias, style, alpha, beta, rows, columns = job
        acc = multiply(base, stage, phase, depth, tail, group, thread)
        write(acc, staging, group + 1, out, c, bias, style, alpha, beta, rows, columns, thread)

    return tile


@cache
def make_dispatch(config, signature):
    """dispatch(height, job): runs the tile function of that height, found by halving."""

    def leaf(height):
        tile = make_tile(config, signature, height)

        @synchronising
        def only(_, job):
            tile(job)

        return only

    def build(heights):
        if len(heights) == 1:
            return leaf(heights[0])
        middle = len(heights) // 2
        lower, upper, limit = build(heights[:middle]), build(heights[middle:]), heights[middle - 1]

        @synchronising
        def halve(height, job):
            if height <= limit:
                lower(height, job)
            else:
                upper(height, job)

        return halve

    return build(list(range(config.step, config.n_max + 1, config.step)))


@cache
def make_consumer(config, signature):
    """consume(p, alpha, beta, base, warpgroup, thread): the whole life of a consumer thread."""
    at, stages = Layout(config, signature), config.stages
    slot_full, slot_empty, slots_at, staging_at, bk = at.slot_full, at.slot_empty, at.slots, at.staging, at.bk
    _, _, operand_c, operand_out, operand_bias = make_operands(BYTES[signature.compute])
    dispatch = make_dispatch(config, signature)

    @synchronising
    def consume(p, alpha, beta, base, warpgroup, thread):
        stage, phase, slot_step = int32(0), int32(0), int32(0)
        staging = base + staging_at + warpgroup * STAGING
        while True:
            slot = slot_step & (SLOTS - 1)
            record = base + slots_at + slot * SLOT_BYTES
            hw.mbarrier_wait(base + slot_full + slot * 8, (slot_step // SLOTS) & 1)
            height, depth = ptx.load_shared_i64x2(record)
            g, start = ptx.load_shared_i64x2(record + 16)
            i0, j0 = ptx.load_shared_i64x2(record + 32)
            rows, n = ptx.load_shared_i64x2(record + 48)
            k, _ = ptx.load_shared_i64x2(record + 64)
            hw.mbarrier_arrive(base + slot_empty + slot * 8)
            slot_step = int32(slot_step + 1)
            if height == 0:
                break
            out_at, out_row, out_col = operand_out(p, g, start)
            c_at, c_row, c_col = operand_c(p, g, start)
            bias_at, bias_col = operand_bias(p, g, start)
            j = j0 + warpgroup * 64
            out = out_at + (i0 * out_row + j * out_col) * p.out_size, out_row, out_col
            c = c_at + (i0 * c_row + j * c_col) * p.c_size, c_row, c_col
            bias = bias_at + j * bias_col * p.bias_size, bias_col
            tail = int32(0)
            if p.jagged == JAGGED_K:
                tail = int32(k % bk)
            job = (
                base, stage, phase, int32(depth), tail, warpgroup, thread, staging, out, c, bias,
                style_of(p), alpha, beta,
                int32(rows), int32(n - j),
            )  # fmt: skip
            dispatch(int32(height), job)
            after = int32(stage + depth)
            phase = int32(phase ^ ((after // stages) & 1))
            stage = int32(after % stages)

    return consume
