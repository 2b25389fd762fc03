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

from multigemm.backends.numba.arguments import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.config import (
    COLUMNS,
    MAPS,
    ROW_BYTES,
    SLOT_BYTES,
    SLOTS,
    TURNS,
    WEIGHT_BYTES,
    Float8Signature,
    Layout,
    token_boxes,
)
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.memory import BYTES, make_operands
from multigemm.backends.numba.kernels.ptx import make_zeros, shared_address
from multigemm.backends.numba.kernels.runtime import kernel, synchronising
from multigemm.backends.numba.kernels.schedule import ALL, extent, make_warp_schedule, make_zero_unowned
from multigemm.backends.numba.kernels.tensor_epilogue import STAGING, make_write

# The producing warp: which tile comes next, and its stages by TMA.
#
# It runs ahead of the consumers by a ring of stages, and tells them of each tile by a record in a ring
# of its own. In a cluster every block loads its own columns, and a share of the rows for all blocks.

MAP_BYTES = 128
B_MAP = 1
int32 = types.int32
_tma, _multicast = ptx.make_tma_load(3), ptx.make_tma_multicast(3)


@cache
def make_fill(config, signature):
    """fill(...): loads one stage. Each block of a cluster loads its own columns, and its share of the rows for all."""
    cluster, mask = config.cluster, (1 << config.cluster) - 1
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    boxes = token_boxes(config)
    largest, smallest = boxes[0], boxes[-1]

    @synchronising
    def load_tokens(stage, barrier, map_at, x, y, g):
        where = (int32(x), int32(y), int32(g))
        if cluster == 1:
            _tma(stage, map_at, barrier, where)
        else:
            _multicast(stage, map_at, barrier, where, mask)

    @synchronising
    def fill(stage, barrier, maps, rank, i, j, k, a_g, b_g, height):
        """i, j, k are coordinates in the packed operands; j is this block's first column."""
        half = WEIGHT_BYTES // 2
        if b_across:
            _tma(stage, maps, barrier, (int32(j), int32(k), b_g))
            _tma(stage + half, maps, barrier, (int32(j + 64), int32(k), b_g))
        else:
            _tma(stage, maps, barrier, (int32(k), int32(j), b_g))
            _tma(stage + half, maps, barrier, (int32(k), int32(j + 64), b_g))
        tokens, map_at = stage + WEIGHT_BYTES, maps + MAP_BYTES
        if a_across:
            for row in range(rank * 64, height, cluster * 64):
                load_tokens(tokens + row * ROW_BYTES, barrier, map_at, i + row, k, a_g)
        else:
            # The share of this block is a sum of box heights, one map each, the largest first.
            share = int32(height // cluster)
            row, size = int32(rank * share), int32(largest)
            while size >= smallest:
                if share & size:
                    load_tokens(tokens + row * ROW_BYTES, barrier, map_at, k, i + row, a_g)
                    row = int32(row + size)
                size = int32(size >> 1)
                map_at += MAP_BYTES

    return fill


@cache
def make_turns(config, signature):
    """(take, finish): which tile comes next. First come, first served, since ragged tiles take unequal times.

    The first block of each cluster draws a ticket from a counter in global memory when it starts a
    tile, and hands the next tile number to every block of the cluster when it has loaded it. Which
    block computes a tile never changes the tile's bits.
    """
    at, cluster = Layout(config, signature), config.cluster
    turn, turn_full, turn_empty = at.turn, at.turn_full, at.turn_empty

    @synchronising
    def take(base, lane, rank, step, mine, shared):
        """The next tile, in all lanes."""
        tile = mine
        if not shared:
            tile = int32(0x7FFFFFFF)
        elif cluster == 1:
            tile = cuda.shfl_sync(ALL, mine, 0)
        else:
            slot, phase = int32(step & (TURNS - 1)), int32((step // TURNS) & 1)
            if lane == 0:
                if rank == 0:
                    ptx.mbarrier_wait(base + turn_empty + slot * 8, phase ^ 1)
                ptx.mbarrier_expect_tx(base + turn_full + slot * 8, 4)
                if rank == 0:
                    for other in range(cluster):
                        where = ptx.map_shared(base + turn + slot * 4, other)
                        ptx.store_async(where, mine, ptx.map_shared(base + turn_full + slot * 8, other))
                ptx.mbarrier_wait(base + turn_full + slot * 8, phase)
                tile = ptx.load_shared_u32(base + turn + slot * 4)
                ptx.mbarrier_arrive_cluster(ptx.map_shared(base + turn_empty + slot * 8, 0))
            tile = cuda.shfl_sync(ALL, tile, 0)
        return tile

    @synchronising
    def finish(counters, clusters):
        """The last cluster to end leaves both counters at 0, for the next launch."""
        if ptx.atomic_add(counters + 4, 1) == clusters - 1:
            ptx.store_global_u32(counters, 0)
            ptx.store_global_u32(counters + 4, 0)

    return take, finish


@cache
def make_acquire(config, signature):
    """acquire(these, height, fenced) -> the tensor maps that this thread may use by now, as bits.

    A map in global memory is fenced before its first use; each fence takes a while, so those of boxes
    that no tile needs are left out. A's maps are numbered by the heights of their boxes.
    """
    boxes, cluster = token_boxes(config), config.cluster
    across = signature.a_order == "col"
    largest, smallest = boxes[0], boxes[0] if across else boxes[-1]

    @synchronising
    def acquire(these, height, fenced):
        needed = int32(largest | B_MAP)
        if not across:
            needed = int32(int32(height // cluster) | B_MAP)
        missing = int32(needed & ~fenced)
        if missing & B_MAP:
            ptx.fence_tensormap(these)
        at, size = these + MAP_BYTES, int32(largest)
        while missing > B_MAP and size >= smallest:
            if missing & size:
                ptx.fence_tensormap(at)
            size = int32(size >> 1)
            at += MAP_BYTES
        return int32(fenced | needed)

    return acquire


@cache
def make_producer(config, signature):
    """produce(p, maps, counters, base, lane): warp 0's whole life."""
    at = Layout(config, signature)
    stages, rows_step, bk, cluster = config.stages, config.step, at.bk, config.cluster
    full, empty, slot_full, slot_empty = at.full, at.empty, at.slot_full, at.slot_empty
    stage_bytes, slots_at, loads_64 = at.stage_bytes, at.slots, signature.a_order == "col"
    scan, locate, piece = make_warp_schedule(config.n_max, COLUMNS * cluster, config.even)
    fill = make_fill(config, signature)
    take, finish = make_turns(config, signature)
    acquire = make_acquire(config, signature)

    @synchronising
    def announce(base, slot_step, height, depth, g, start, i0, j0, rows, n, k):
        """Writes a record for the consumers; height 0 ends them."""
        slot = slot_step & (SLOTS - 1)
        ptx.mbarrier_wait(base + slot_empty + slot * 8, ((slot_step // SLOTS) & 1) ^ 1)
        record = base + slots_at + slot * SLOT_BYTES
        ptx.store_shared_i64x2(record, height, depth)
        ptx.store_shared_i64x2(record + 16, g, start)
        ptx.store_shared_i64x2(record + 32, i0, j0)
        ptx.store_shared_i64x2(record + 48, rows, n)
        ptx.store_shared_i64x2(record + 64, k, 0)
        ptx.mbarrier_arrive(base + slot_full + slot * 8)

    @synchronising
    def produce(p, maps, counters, base, lane):
        # The host has written the table of a list; sizes, counters and operands may be a predecessor's.
        if (p.ends | p.valid) != 0:
            ptx.grid_dependency_wait()
        low, high, total = scan(p, lane)
        rank = int32(0)
        if cluster > 1:
            rank = ptx.cluster_rank()
        stage, phase = int32(0), int32(1)
        seen, fenced = int32(-1), int32(0)
        g, first, end = int32(0), int32(0), int32(0)
        slot_step = int32(0)
        turn = int32(cuda.blockIdx.x // cluster)
        clusters = int32(cuda.gridDim.x // cluster)
        if total > clusters:
            ptx.grid_dependency_wait()
        while turn < total:
            ticket = int32(0)
            if total > clusters and lane == 0 and rank == 0:
                ticket = ptx.atomic_add(counters, 1)
            if turn < first or turn >= end:
                g, first, end = locate(p, low, high, lane, turn)
            m, n, k, start = extent(p, g)
            i0, rows, j0 = piece(m, n, int32(turn - first))
            j0 = int32(j0 + rank * COLUMNS)
            height = int32(((rows + (rows_step - 1)) // rows_step) * rows_step)
            depth = int32((k + (bk - 1)) // bk)
            if lane == 0:
                announce(base, slot_step, height, depth, g, start, i0, j0, rows, n, k)
                these = maps
                if p.table != 0:
                    these += g * (MAPS * MAP_BYTES)
                if p.table != 0 and seen != g:
                    fenced, seen = int32(0), g
                fenced = acquire(these, height, fenced)
                i, j, at_k = i0, j0, int32(0)
                if p.jagged == JAGGED_M:
                    i = int32(i + start)
                elif p.jagged == JAGGED_N:
                    j = int32(j + start)
                elif p.jagged == JAGGED_K:
                    at_k = int32(start)
                a_g, b_g = int32(0), int32(0)
                if p.a_group != 0:
                    a_g = g
                if p.b_group != 0:
                    b_g = g
                loaded = height
                if loads_64:
                    loaded = int32(((height + 63) // 64) * 64)
                expected = int32(WEIGHT_BYTES + loaded * ROW_BYTES)
                ptx.grid_dependency_wait()
                for _ in range(depth):
                    barrier = base + full + stage * 8
                    ptx.mbarrier_wait(base + empty + stage * 8, phase)
                    ptx.mbarrier_expect_tx(barrier, expected)
                    fill(base + stage * stage_bytes, barrier, these, rank, i, j, at_k, a_g, b_g, height)
                    at_k = int32(at_k + bk)
                    stage = int32(stage + 1)
                    if stage == stages:
                        stage = int32(0)
                        phase = int32(phase ^ 1)
            turn = take(base, lane, rank, slot_step, int32(ticket + clusters), total > clusters)
            slot_step = int32(slot_step + 1)
        if lane == 0 and rank == 0 and total > clusters:
            finish(counters, clusters)
        if lane == 0:
            announce(base, slot_step, 0, 0, 0, 0, 0, 0, 0, 0, 0)

    return produce


# The consuming warpgroups: wgmma on the stages as they fill, then the epilogue.
#
# Each of the two warpgroups owns 64 of the block's 128 columns and all rows of the tile. Every height
# of a tile has a main loop of its own, since the shape of wgmma is part of the instruction; the epilogue is shared.

CONSUMERS = 256
BOTH_BARRIER = 3
_wait_one = ptx.make_wgmma_wait(1)


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
        ptx.fence_async()
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
                ptx.mbarrier_arrive(base + empty + stage * 8)
        elif lane < cluster:
            ptx.mbarrier_arrive_cluster(ptx.map_shared(base + empty + stage * 8, lane))

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
    wgmma = ptx.make_wgmma(at.kind, n, b_across, a_across, within=most)
    result, release = ptx.make_wgmma_result(n, within=most), make_release(config, signature)
    # Steps of 32 bytes of k, or of 16 rows of k, in units of 16 bytes.
    b_step, a_step = (128 if b_across else 2), (128 if a_across else 2)
    weights = ptx.make_descriptor(WEIGHT_BYTES // 2, 1024)
    tokens = ptx.make_descriptor(64 * ROW_BYTES, 1024)
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
            ptx.mbarrier_wait(base + full + stage * 8, phase)
            if ragged_k and tail != 0 and block == depth - 1:
                zero_tail(where, tail, n, warpgroup * 128 + thread)
            b = weights(where + warpgroup * (WEIGHT_BYTES // 2))
            a = tokens(where + WEIGHT_BYTES)
            ptx.wgmma_fence()
            acc = wgmma(acc, b, a)
            acc = wgmma(acc, b + b_step, a + a_step)
            acc = wgmma(acc, b + 2 * b_step, a + 2 * a_step)
            acc = wgmma(acc, b + 3 * b_step, a + 3 * a_step)
            ptx.wgmma_commit()
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
    """consume(p, q, alpha, beta, base, warpgroup, thread): the whole life of a consumer thread.

    `q` is what a kernel is launched with beside `p`; this one has nothing.
    """
    at, stages = Layout(config, signature), config.stages
    slot_full, slot_empty, slots_at, staging_at, bk = at.slot_full, at.slot_empty, at.slots, at.staging, at.bk
    dispatch = make_dispatch(config, signature)
    write = make_write(config.n_max, signature.compute, make_targets(signature)[1])

    @synchronising
    def consume(p, q, alpha, beta, base, warpgroup, thread):
        stage, phase, slot_step = int32(0), int32(0), int32(0)
        staging = base + staging_at + warpgroup * STAGING
        while True:
            slot = slot_step & (SLOTS - 1)
            record = base + slots_at + slot * SLOT_BYTES
            ptx.mbarrier_wait(base + slot_full + slot * 8, (slot_step // SLOTS) & 1)
            height, depth = ptx.load_shared_i64x2(record)
            g, start = ptx.load_shared_i64x2(record + 16)
            i0, j0 = ptx.load_shared_i64x2(record + 32)
            rows, n = ptx.load_shared_i64x2(record + 48)
            k, _ = ptx.load_shared_i64x2(record + 64)
            ptx.mbarrier_arrive(base + slot_empty + slot * 8)
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


# The kernel: barriers, then a role for each warp.

REGISTERS = 72, 216
"""Of a producing and of a consuming thread."""
CONSUMER_WARPS = CONSUMERS // 32


@cache
def make_kernel(config, signature, make_consumer=make_consumer, registers=REGISTERS):
    """The kernel for one pipeline shape and one set of dtypes and layouts, with `registers` for its two roles."""
    less, more = ptx.make_setmaxnreg(registers[0], False), ptx.make_setmaxnreg(registers[1], True)
    at = Layout(config, signature)
    stages, full, empty, slot_full, slot_empty = config.stages, at.full, at.empty, at.slot_full, at.slot_empty
    cluster, turn_full, turn_empty = config.cluster, at.turn_full, at.turn_empty
    produce, consume = make_producer(config, signature), make_consumer(config, signature)
    zero_unowned = make_zero_unowned()
    helpers = 96

    @synchronising
    def run(p, q, alpha, beta, maps, counters):
        base = (shared_address(cuda.shared.array(0, np.uint8)) + int32(1023)) & int32(~1023)
        thread = int32(cuda.threadIdx.x)
        if thread == 0:
            for stage in range(stages):
                ptx.mbarrier_init(base + full + stage * 8, 1)
                ptx.mbarrier_init(base + empty + stage * 8, CONSUMER_WARPS * cluster)
            for slot in range(SLOTS):
                ptx.mbarrier_init(base + slot_full + slot * 8, 1)
                ptx.mbarrier_init(base + slot_empty + slot * 8, CONSUMERS)
            for slot in range(TURNS):
                ptx.mbarrier_init(base + turn_full + slot * 8, 1)
                ptx.mbarrier_init(base + turn_empty + slot * 8, cluster)
            ptx.fence_mbarrier_init()
        if cluster > 1:
            ptx.cluster_arrive()
            ptx.cluster_wait()
        else:
            cuda.syncthreads()
        # Set up by now, maybe before the kernel in front of this one has ended; nothing of its was read yet.
        ptx.grid_dependents_launch()
        if thread >= 32:
            ptx.grid_dependency_wait()
        if thread < 128:
            less()
            if thread < 32:
                produce(p, maps, counters, base, thread)
            elif p.zeroes != 0:
                zero_unowned(p, cuda.blockIdx.x * helpers + thread - 32, cuda.gridDim.x * helpers)
        else:
            more()
            consume(p, q, types.float32(alpha), types.float32(beta), base, thread // 128 - 1, thread % 128)
        if cluster > 1:  # a block must not end while another may still write into it
            ptx.cluster_arrive()
            ptx.cluster_wait()

    @kernel
    def hopper(p, alpha, beta, maps, counters):
        run(p, 0, alpha, beta, maps, counters)

    @kernel
    def hopper_float8(p, q, alpha, beta, maps, counters):
        run(p, q, alpha, beta, maps, counters)

    return hopper_float8 if isinstance(signature, Float8Signature) else hopper
