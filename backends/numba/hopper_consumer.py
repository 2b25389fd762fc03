"""The consuming warpgroups of the Hopper kernel: wgmma on the stages as they fill, then the epilogue.

Each of the two warpgroups owns 64 of the block's 128 columns and all rows of the tile. Every height
of a tile has a main loop of its own, since the shape of wgmma is part of the instruction; the epilogue is shared.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba import ptx_hopper as hw
from multigemm.backends.numba.call import JAGGED_K
from multigemm.backends.numba.hopper_epilogue import STAGING, make_write
from multigemm.backends.numba.hopper_shape import ROW_BYTES, SLOT_BYTES, SLOTS, WEIGHT_BYTES, Layout
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
    """zero_tail(stage, valid, height, thread): clears k >= valid of a stage, by all consumers.

    Only a jagged k ends within a stage, and its operands lie across it (choice.hopper_obstacle): rows of a box are k.
    """
    bk = ROW_BYTES // BYTES[signature.compute]

    @synchronising
    def clear(start, boxes, valid, thread):
        """Boxes of bk rows (k) x 128 bytes: 8 threads clear a row."""
        for box in range(boxes):
            first = int32(start + box * (bk * ROW_BYTES) + (thread & 7) * 16)
            for row in range(int32(valid + (thread >> 3)), int32(bk), int32(CONSUMERS // 8)):
                ptx.store_shared_u32x4(first + row * ROW_BYTES, (0, 0, 0, 0))

    @synchronising
    def zero_tail(stage, valid, height, thread):
        clear(stage, 2, valid, thread)
        clear(stage + WEIGHT_BYTES, (height + 63) // 64, valid, thread)
        hw.fence_async()
        ptx.named_barrier(BOTH_BARRIER, CONSUMERS)

    return zero_tail


@cache
def make_release(config, signature):
    """release(base, stage, lane): tells all blocks that load into a stage that this warp is through with it."""
    empty, cluster = Layout(config, signature).empty, config.cluster

    @synchronising
    def release(base, stage, lane):
        if cluster == 1:
            if lane == 0:
                hw.mbarrier_arrive(base + empty + stage * 8)
        elif lane < cluster:
            hw.mbarrier_arrive_cluster(hw.map_shared(base + empty + stage * 8, lane))

    return release


@cache
def make_targets(signature):
    """(target, others): where out, and where C and bias of this warpgroup's part of a tile lie, and their strides."""
    _, _, operand_c, operand_out, operand_bias = make_operands(BYTES[signature.compute])

    @synchronising
    def target(p, g, start, i0, j):
        at, row, col = operand_out(p, g, start)
        return at + (i0 * row + j * col) * p.out_size, row, col

    @synchronising
    def others(p, g, start, i0, j):
        at, row, col = operand_c(p, g, start)
        bias_at, bias_col = operand_bias(p, g, start)
        return (at + (i0 * row + j * col) * p.c_size, row, col), (bias_at + j * bias_col * p.bias_size, bias_col)

    return target, others


@cache
def make_multiply(config, signature, n):
    """multiply(p, tile, base, stage, phase, warpgroup, thread) -> (64 x n sums, where they go).

    The sums fill the beginning of as many registers as the largest n takes, so that one epilogue
    serves every n. Where they go is worked out while the last products are under way.
    """
    at = Layout(config, signature)
    stages, stage_bytes, full, most = config.stages, at.stage_bytes, at.full, config.n_max // 2
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    zeros = make_zeros(n // 2, within=most)
    wgmma = hw.make_wgmma(at.kind, n, b_across, a_across, within=most)
    result, release = hw.make_wgmma_result(n, within=most), make_release(config, signature)
    # Steps of 32 bytes of k, or of 16 rows of k, in units of 16 bytes.
    b_step, a_step = (128 if b_across else 2), (128 if a_across else 2)
    weights = hw.make_descriptor(WEIGHT_BYTES // 2, 1024)
    tokens = hw.make_descriptor(64 * ROW_BYTES, 1024)
    zero_tail, ragged_k = make_zero_tail(config, signature), signature.ragged_k
    target, _ = make_targets(signature)

    @synchronising
    def multiply(p, tile, base, stage, phase, warpgroup, thread):
        depth, tail, g, start, i0, j = tile
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
        out = target(p, g, start, i0, j)
        acc = result(acc)
        if before >= 0:
            release(base, before, lane)
        return acc, out

    return multiply


@cache
def make_dispatch(config, signature):
    """dispatch(height, ...): `multiply` for tiles of that height, found by halving."""

    def build(heights):
        if len(heights) == 1:
            return make_leaf(heights[0])
        middle = len(heights) // 2
        lower, upper, limit = build(heights[:middle]), build(heights[middle:]), heights[middle - 1]

        @synchronising
        def halve(height, p, tile, base, stage, phase, warpgroup, thread):
            if height <= limit:
                found = lower(height, p, tile, base, stage, phase, warpgroup, thread)
            else:
                found = upper(height, p, tile, base, stage, phase, warpgroup, thread)
            return found

        return halve

    def make_leaf(n):
        multiply = make_multiply(config, signature, n)

        @synchronising
        def leaf(_, p, tile, base, stage, phase, warpgroup, thread):
            return multiply(p, tile, base, stage, phase, warpgroup, thread)

        return leaf

    return build(list(range(config.step, config.n_max + 1, config.step)))


@cache
def make_consumer(config, signature):
    """consume(p, alpha, beta, base, warpgroup, thread): the whole life of a consumer thread."""
    at, stages = Layout(config, signature), config.stages
    slot_full, slot_empty, slots_at, staging_at, bk = at.slot_full, at.slot_empty, at.slots, at.staging, at.bk
    dispatch = make_dispatch(config, signature)
    write = make_write(config.n_max, signature.compute, make_targets(signature)[1])

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
            tail = int32(0)
            if p.jagged == JAGGED_K:
                tail = int32(k % bk)
            tile = int32(depth), tail, g, start, i0, j0 + warpgroup * 64
            acc, out = dispatch(int32(height), p, tile, base, stage, phase, warpgroup, thread)
            columns = int32(n - j0) - int32(warpgroup * 64)
            write(acc, staging, warpgroup + 1, p, tile, out, alpha, beta, int32(rows), columns, thread)
            after = int32(stage + depth)
            phase = int32(phase ^ ((after // stages) & 1))
            stage = int32(after % stages)

    return consume
