"""Two warps of the Hopper kernel keep the copy engine (TMA) busy, one with the weights, one with the rows.

What a tile fixes is worked out before its loop over k: with few rows a block of k is multiplied in 300 ns. A stage is
128 bytes of k: the block's own 128 columns, and the tile's rows, of which each block of a cluster loads a part for all.
Nothing is read past a group's end but the up to 7 rows that fill the last step of 8, and no tile stores those.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from numba.cuda import types

from multigemm.backends.numba.arguments import JAGGED_K, JAGGED_M, JAGGED_N
from multigemm.backends.numba.config import (
    A_MAP,
    B_MAP,
    BOX_STEP,
    COLUMNS,
    LISTED_MAPS,
    MOST_BOX_ROWS,
    ROW_BYTES,
    WEIGHT_BYTES,
    Layout,
)
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.hopper_tiles import (
    HALVES,
    ONCE,
    STOP,
    all_room,
    first_place,
    group_of,
    make_half,
    make_ring,
    make_room,
    make_take,
    same_in_all_lanes,
)
from multigemm.backends.numba.kernels.runtime import synchronising
from multigemm.cuda.operand_maps import FAR

MAP_BYTES = 128
AHEAD = 8
"""Blocks of k before a tile's end at which the next tile is asked for."""
SHORT_K = 3584
"""k up to which weights that one tile reads leave the L2 cache first; with a longer one it does not pay."""
READERS = 2
"""Rows that more tiles than this read stay in the L2 cache."""
ACROSS_BYTES = 64 * ROW_BYTES
"""Of a box of 64 columns or rows that lie across k."""
int32, int64 = types.int32, types.int64
_load_3, _load_4 = ptx.make_tma_load(3), ptx.make_tma_load(4)
_multicast_3, _multicast_4 = ptx.make_tma_multicast(3), ptx.make_tma_multicast(4)


@synchronising
def first_k(p, tile):
    """The coordinate of a tile's first k: of a jagged one counted back from the group's end."""
    k = int32(0)
    if p.jagged == JAGGED_K:
        k = int32(FAR - tile.k)
    return k


@synchronising
def maps_of(p, maps, g):
    """The tensor maps of a group."""
    if p.table != 0:
        maps += g * (LISTED_MAPS * MAP_BYTES)
    return maps


@cache
def make_load_weights(config, signature):
    """load_weights(p, longest_k, maps, base, rank): a warp's whole life; of a cluster's first block it asks for the
    next tile."""
    at = Layout(config, signature)
    bk, full, ask, begins, cluster = at.bk, at.full, at.ask, at.begins, config.cluster
    across, ragged = signature.b_order == "row", signature.ragged_k
    take, half = make_take(config, signature), make_half(config)
    (bytes_of, fit, advance), (make_space, drain) = make_ring(config, signature), make_room(config, signature)

    @synchronising
    def load(stage, barrier, map_at, k, j, g, end, hint):
        ptx.mbarrier_expect_tx(barrier, WEIGHT_BYTES)
        if ragged:
            _load_4(stage, map_at, barrier, (j, k, end, int32(FAR)), hint)
            _load_4(int32(stage + ACROSS_BYTES), map_at, barrier, (int32(j + 64), k, end, int32(FAR)), hint)
        elif across:
            _load_3(stage, map_at, barrier, (j, k, g), hint)
            _load_3(int32(stage + ACROSS_BYTES), map_at, barrier, (int32(j + 64), k, g), hint)
        else:
            _load_3(stage, map_at, barrier, (k, j, g), hint)

    @synchronising
    def load_weights(p, longest_k, maps, base, rank):
        ring, room, number, fenced = first_place(), all_room(), int32(0), int32(-1)
        while True:
            tile = half(same_in_all_lanes(take(base, number)), rank)
            if tile.height == STOP:
                break
            g, size = group_of(tile), bytes_of(p, longest_k, tile)
            blocks = int32((tile.k + (bk - 1)) // bk)
            map_at = maps_of(p, maps, g) + B_MAP * MAP_BYTES
            hint = int64(ptx.EVICT_NORMAL)
            if (tile.group & ONCE) != 0 and p.b_group != 0 and tile.k <= SHORT_K:
                hint = int64(ptx.EVICT_FIRST)
            j = int32(tile.column + rank * COLUMNS)
            if p.jagged == JAGGED_N:
                j = int32(j + tile.start)
            k, end, of_b = first_k(p, tile), int32(tile.start + tile.k), int32(0)
            if p.b_group != 0:
                of_b = g
            ask_at = int32(-1)
            if rank == 0:
                ask_at = max(int32(blocks - AHEAD), int32(0))
            if blocks == 0:
                if rank == 0 and ptx.elected():
                    ptx.mbarrier_arrive(int32(base + ask))
            else:
                ring = fit(ring, size)
                if fenced < 0 or (p.table != 0 and fenced != g):
                    fenced = g
                    if ptx.elected():
                        ptx.fence_tensormap(map_at)
            block = int32(0)
            while block < blocks:
                barrier, stage = int32(base + full + ring.place * 8), int32(base + ring.at)
                room = make_space(base, int32(base + begins), ring, room, size)
                if ptx.elected():
                    load(stage, barrier, map_at, k, j, of_b, end, hint)
                    if block == ask_at:
                        ptx.mbarrier_arrive(int32(base + ask))
                k, block = int32(k + bk), ptx.unforeseen(int32(block + 1))
                ring = advance(ring, size)
            number = int32(number + 1)
        if cluster > 1:  # a block must not end while others will still arrive at its barriers
            drain(base, ring, room)

    return load_weights


@cache
def make_load_rows(config, signature):
    """load_rows(p, longest_k, maps, base, rank): a warp's whole life."""
    at, cluster = Layout(config, signature), config.cluster
    bk, full, places, everyone = at.bk, at.full, at.places, (1 << config.cluster) - 1
    begins = at.begins + (places * 4 if config.variable else 0)
    across, ragged = signature.a_order == "col", signature.ragged_k
    take, half = make_take(config, signature), make_half(config)
    (bytes_of, fit, advance), (make_space, _) = make_ring(config, signature), make_room(config, signature)
    keep = READERS * cluster * COLUMNS

    @synchronising
    def load_box(to, map_at, barrier, x, y, z, w, blocks, hint):
        if cluster == 1 and ragged:
            _load_4(to, map_at, barrier, (x, y, z, w), hint)
        elif cluster == 1:
            _load_3(to, map_at, barrier, (x, y, z), hint)
        elif ragged:
            _multicast_4(to, map_at, barrier, (x, y, z, w), blocks, hint)
        else:
            _multicast_3(to, map_at, barrier, (x, y, z), blocks, hint)

    @synchronising
    def load_across(stage, barrier, map_at, k, i, g, end, height, first, apart, blocks, hint):
        """Boxes of 64 rows: every one that is `apart` 64 from the one before."""
        z = end if ragged else g
        row = first
        while row < height:
            load_box(int32(stage + row * ROW_BYTES), map_at, barrier, int32(i + row), k, z, int32(FAR), blocks, hint)
            row = int32(row + apart)

    @synchronising
    def load_along(stage, barrier, map_at, k, i, g, first, upper, lower, second_at, blocks, hint):
        """One box; or two of at most MOST_BOX_ROWS where no other block loads the second."""
        none = int32(0)
        if upper > 0:
            load_box(int32(stage + first * ROW_BYTES), map_at, barrier, k, int32(i + first), g, none, blocks, hint)
        if cluster == 1 and lower > 0:
            to = int32(stage + MOST_BOX_ROWS * ROW_BYTES)
            load_box(to, second_at, barrier, k, int32(i + MOST_BOX_ROWS), g, none, blocks, hint)

    @synchronising
    def part_of(p, tile, rank, alone):
        """(first row, rows of the first box, of the second): this block's part of a tile's rows that are loaded."""
        part, first = tile.height, int32(0)
        if p.table != 0:
            part = tile.start
        elif not alone:
            part = int32((tile.height // BOX_STEP + (cluster - 1)) // cluster * BOX_STEP)
        if not alone:
            first = int32(rank * part)
        rows = part
        if p.table == 0:
            rows = min(part, int32(tile.height - first))
        upper = rows
        if p.table == 0:
            upper = min(rows, int32(MOST_BOX_ROWS))
        return first, upper, int32(rows - upper)

    @synchronising
    def map_of(at, rows):
        """The map with boxes of so many rows."""
        return at + (max(rows, int32(BOX_STEP)) // BOX_STEP - 1) * MAP_BYTES

    @synchronising
    def bit_of(rows):
        """Which of the maps that is, as a bit; none for no rows."""
        return int32((int32(1) << (max(rows, int32(BOX_STEP)) // BOX_STEP)) >> 1) if rows > 0 else int32(0)

    @synchronising
    def load_rows(p, longest_k, maps, base, rank):
        ring, room, number, fenced, group = first_place(), all_room(), int32(0), int32(0), int32(-1)
        hint = int64(ptx.EVICT_NORMAL)
        if p.n > keep and p.jagged != JAGGED_N:
            hint = int64(ptx.EVICT_LAST)
        while True:
            tile = half(same_in_all_lanes(take(base, number)), rank)
            if tile.height == STOP:
                break
            g, size = group_of(tile), bytes_of(p, longest_k, tile)
            blocks = int32((tile.k + (bk - 1)) // bk)
            alone = cluster == 1 or (tile.group & HALVES) != 0
            receivers = int32(everyone)
            if alone:
                receivers = int32(int32(1) << rank)
            i, k, end, of_a = tile.row, first_k(p, tile), int32(tile.start + tile.k), int32(0)
            if p.jagged == JAGGED_M:
                i = int32(i + tile.start)
            if p.a_group != 0:
                of_a = g
            map_at = maps_of(p, maps, g) + A_MAP * MAP_BYTES
            first, upper, lower = part_of(p, tile, rank, alone)
            second_at, expected, used = map_at, int32(0), int32(1)
            if across:
                expected = int32(((tile.height + 63) & ~63) * ROW_BYTES)
            elif p.table != 0:
                expected = int32(tile.start * (cluster * ROW_BYTES))
            else:
                expected = int32(tile.height * ROW_BYTES)
                used = int32(bit_of(upper) | bit_of(lower))
                second_at, map_at = map_of(map_at, lower), map_of(map_at, upper)
            step, row = int32(64), int32(0)
            if not alone:
                step, row = int32(64 * cluster), int32(64 * rank)
            if blocks > 0:
                ring = fit(ring, size)
                if p.table != 0 and group != g:
                    fenced, group = int32(0), g
                if (used & ~fenced) != 0:
                    fenced = int32(fenced | used)
                    if ptx.elected():
                        ptx.fence_tensormap(map_at)
                        if lower > 0:
                            ptx.fence_tensormap(second_at)
            block = int32(0)
            while block < blocks:
                barrier, stage = int32(base + full + ring.place * 8), int32(base + ring.at + WEIGHT_BYTES)
                room = make_space(base, int32(base + begins), ring, room, size)
                if ptx.elected():
                    ptx.mbarrier_expect_tx(barrier, expected)
                    if across:
                        load_across(stage, barrier, map_at, k, i, of_a, end, tile.height, row, step, receivers, hint)
                    else:
                        load_along(stage, barrier, map_at, k, i, of_a, first, upper, lower, second_at, receivers, hint)
                k, block = int32(k + bk), ptx.unforeseen(int32(block + 1))
                ring = advance(ring, size)
            number = int32(number + 1)

    return load_rows
