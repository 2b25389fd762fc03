"""The producing warp of the Hopper kernel: which tile comes next, and its stages by TMA.

It runs ahead of the consumers by a ring of stages, and tells them of each tile by a record in a ring
of its own. In a cluster every block loads its own columns, and a share of the rows for all blocks.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba import cuda
from numba.cuda import types

from multigemm.backends.numba import ptx
from multigemm.backends.numba import ptx_hopper as hw
from multigemm.backends.numba.call import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.hopper_shape import (
    COLUMNS,
    MAPS,
    ROW_BYTES,
    SLOT_BYTES,
    SLOTS,
    TURNS,
    WEIGHT_BYTES,
    Layout,
    token_boxes,
)
from multigemm.backends.numba.runtime import synchronising
from multigemm.backends.numba.schedule import extent
from multigemm.backends.numba.warp_schedule import ALL, make_warp_schedule

MAP_BYTES = 128
B_MAP = 1
int32 = types.int32
_tma, _multicast = hw.make_tma_load(3), hw.make_tma_multicast(3)


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
                    hw.mbarrier_wait(base + turn_empty + slot * 8, phase ^ 1)
                hw.mbarrier_expect_tx(base + turn_full + slot * 8, 4)
                if rank == 0:
                    for other in range(cluster):
                        where = hw.map_shared(base + turn + slot * 4, other)
                        hw.store_async(where, mine, hw.map_shared(base + turn_full + slot * 8, other))
                hw.mbarrier_wait(base + turn_full + slot * 8, phase)
                tile = ptx.load_shared_u32(base + turn + slot * 4)
                hw.mbarrier_arrive_cluster(hw.map_shared(base + turn_empty + slot * 8, 0))
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
            hw.fence_tensormap(these)
        at, size = these + MAP_BYTES, int32(largest)
        while missing > B_MAP and size >= smallest:
            if missing & size:
                hw.fence_tensormap(at)
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
    scan, locate, piece = make_warp_schedule(config.n_max, COLUMNS * cluster)
    fill = make_fill(config, signature)
    take, finish = make_turns(config, signature)
    acquire = make_acquire(config, signature)

    @synchronising
    def announce(base, slot_step, height, depth, g, start, i0, j0, rows, n, k):
        """Writes a record for the consumers; height 0 ends them."""
        slot = slot_step & (SLOTS - 1)
        hw.mbarrier_wait(base + slot_empty + slot * 8, ((slot_step // SLOTS) & 1) ^ 1)
        record = base + slots_at + slot * SLOT_BYTES
        ptx.store_shared_i64x2(record, height, depth)
        ptx.store_shared_i64x2(record + 16, g, start)
        ptx.store_shared_i64x2(record + 32, i0, j0)
        ptx.store_shared_i64x2(record + 48, rows, n)
        ptx.store_shared_i64x2(record + 64, k, 0)
        hw.mbarrier_arrive(base + slot_full + slot * 8)

    @synchronising
    def produce(p, maps, counters, base, lane):
        # The host has written the table of a list; sizes, counters and operands may be a predecessor's.
        if (p.ends | p.valid) != 0:
            hw.grid_dependency_wait()
        low, high, total = scan(p, lane)
        rank = int32(0)
        if cluster > 1:
            rank = hw.cluster_rank()
        stage, phase = int32(0), int32(1)
        seen, fenced = int32(-1), int32(0)
        g, first, end = int32(0), int32(0), int32(0)
        slot_step = int32(0)
        turn = int32(cuda.blockIdx.x // cluster)
        clusters = int32(cuda.gridDim.x // cluster)
        if total > clusters:
            hw.grid_dependency_wait()
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
                hw.grid_dependency_wait()
                for _ in range(depth):
                    barrier = base + full + stage * 8
                    hw.mbarrier_wait(base + empty + stage * 8, phase)
                    hw.mbarrier_expect_tx(barrier, expected)
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
