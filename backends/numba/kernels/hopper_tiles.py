"""What the warps of a Hopper kernel agree on: which tile comes next, and where its stages lie.

When a launch starts, all threads of a block count the tiles of its groups. One thread of each block then finds tiles:
in the first block of a cluster it draws their numbers from a counter in device memory, since ragged tiles take unequal
times, and announces them to all warps of the cluster by a record in a ring of `SLOTS`. Which block computes a tile
never changes its bits.

Groups are in one of two queues: those with so many rows that arithmetic bounds them, and those that memory bounds. The
order mixes both, so that at any time some clusters stream weights while others keep the tensor cores busy, and ends
with the short ones.

Stages lie one behind the other in a ring of bytes. In a kernel for tiles of 256 rows they are as large as a tile's rows
need: a lower tile has more of them in flight, as what a stage holds is multiplied sooner, but memory answers just as
late.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from typing import NamedTuple

from numba import cuda
from numba.cuda import types

from multigemm.backends.numba.config import COLUMNS, MOST_GROUPS, RECORD_BYTES, ROW_BYTES, SLOTS, WEIGHT_BYTES, Layout
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.runtime import synchronising
from multigemm.backends.numba.kernels.schedule import (
    ALL,
    LANES,
    extent,
    make_pieces,
    make_run_of,
    make_running_sum,
)

int32, int64, uint32 = types.int32, types.int64, types.uint32

# Tiles.


class Tile(NamedTuple):
    """What is announced of a tile."""

    group: int
    """With `ONCE` and `HALVES` added."""
    height: int
    """Its rows, rounded up to 8; `STOP`: there are no more tiles."""
    rows: int
    row: int
    """The first row, within the group."""
    column: int
    """The first column of the cluster's, within the group."""
    k: int
    start: int
    """Where the group begins in the jagged direction. Of a list: the rows that each block of a cluster loads at
    once."""
    width: int
    """The columns of the group."""


STOP = -1
ONCE, HALVES = 2 * MOST_GROUPS, MOST_GROUPS
"""Marks of a tile. `ONCE`: no other tile reads the same weights. `HALVES`: its columns are one block's, so each block
of a cluster takes half of its rows."""
GROUP = MOST_GROUPS - 1
"""The bits of a group's number."""
BUSY_ROWS = 208
"""Rows from which a group keeps the tensor cores as busy as its weights keep the memory."""
BUSY_K = 288
"""Of jagged k: from which a tile's products take longer than its results need to leave."""
WARPS = 12
LOW_HALF = 0xFFFFFFFF


@synchronising
def group_of(tile):
    """The number of a tile's group."""
    return int32(tile.group & GROUP)


@cache
def make_half(config):
    """half(tile, rank) -> a block's half of a tile that has `HALVES`; other tiles as they are."""
    halves = config.cluster == 2

    @synchronising
    def half(tile, rank):
        if not halves or (tile.group & HALVES) == 0:
            return tile
        height = int32((tile.height // 8 + 1) // 2 * 8)
        before = int32(rank * height)
        rows = max(min(int32(tile.rows - before), height), int32(0))
        column = int32(tile.column - rank * COLUMNS)  # where each block adds its rank
        return Tile(tile.group, height, rows, int32(tile.row + before), column, tile.k, tile.start, tile.width)

    return half


@cache
def make_count(config, signature):
    """count(p, g) -> the tiles of a group, in the half of a word that is its queue's: the upper one is the busy
    queue's."""
    count_of, _ = make_pieces(config.n_max, COLUMNS * config.cluster, config.even)
    ragged_k = signature.ragged_k

    @synchronising
    def count(p, g):
        m, n, k, _ = extent(p, g)
        tiles = int64(count_of(m, n))
        if (k >= BUSY_K) if ragged_k else (m >= BUSY_ROWS):
            tiles = tiles << 32
        return tiles

    return count


@cache
def make_finder(config, signature):
    """(count_all, find): count_all(p, base, thread) -> tiles of both queues; find(p, base, number, all_tiles) -> Tile.

    Counts are pairs, as `make_count` has them. Each thread of the first `runs` counts a run of groups, and leaves in
    shared memory how many tiles come before it.
    """
    at, cluster, n_max = Layout(config, signature), config.cluster, config.n_max
    runs, runs_at, sums_at, columns = at.runs, at.counts, at.sums, COLUMNS * config.cluster
    halves, count, (_, piece) = config.halves, make_count(config, signature), make_pieces(n_max, columns, config.even)
    run_of, running_sum = make_run_of(runs), make_running_sum(int64)

    @synchronising
    def count_all(p, base, thread):
        lane, warp = int32(thread & 31), int32(thread >> 5)
        mine = int64(0)
        if thread < runs:
            each = run_of(p)
            g = int32(thread * each)
            last = min(int32(g + each), int32(p.groups))
            while g < last:  # a launch behind another kernel finds none of this code in the caches: one copy of it
                mine += count(p, g)
                g = ptx.unforeseen(int32(g + 1))
        upto = running_sum(mine, lane)
        if lane == LANES - 1:
            ptx.store_shared_i64(int32(base + sums_at + warp * 8), upto)
        cuda.syncthreads()
        of_warps = int64(0)
        if lane < WARPS:
            of_warps = ptx.load_shared_i64(int32(base + sums_at + lane * 8))
        of_warps = running_sum(of_warps, lane)
        before = cuda.shfl_sync(ALL, of_warps, max(int32(warp - 1), int32(0)))
        if warp == 0:
            before = int64(0)
        if thread < runs:
            ptx.store_shared_i64(int32(base + runs_at + thread * 8), before + upto - mine)
        return cuda.shfl_sync(ALL, of_warps, WARPS - 1)

    @synchronising
    def place_of(number, busy, lean, clusters):
        """(whether tile `number` is in the lean queue, its place there): where there are both kinds, lean ones are
        spread evenly, but as many as run at once are kept for the end, so that clusters stop at about the same time."""
        in_lean, place = busy == 0, number
        if busy > 0 and lean > 0:
            kept = min(lean, clusters)
            mixed, spread = int32(busy + lean - kept), int32(lean - kept)
            in_lean = True
            if number >= mixed:
                place = int32(lean - (busy + lean - number))
            else:
                share = int64(number) * spread
                place = int32(share // mixed)  # lean ones among the first `number`
                if share - int64(place) * mixed + spread < mixed:  # as many among one more
                    in_lean, place = False, int32(number - place)
        return in_lean, place

    @synchronising
    def group_at(p, base, in_lean, place):
        """(group of a place in a queue, first place of the group)."""
        each = run_of(p)
        words = int32(base + runs_at)
        if not in_lean:
            words = int32(words + 4)
        low, high = int32(0), int32(uint32(uint32(p.groups) + uint32(each - 1)) // uint32(each))
        while high - low > 1:
            middle = int32((low + high) >> 1)
            if ptx.load_shared_u32(int32(words + middle * 8)) <= place:
                low = middle
            else:
                high = middle
        g, first = int32(low * each), ptx.load_shared_u32(int32(words + low * 8))
        last = min(int32(g + each), int32(p.groups))
        while g + 1 < last:
            tiles = count(p, g)
            here = int32(tiles & LOW_HALF) if in_lean else int32(tiles >> 32)
            if place < first + here:
                break
            first = int32(first + here)
            g = ptx.unforeseen(int32(g + 1))
        return g, first

    @synchronising
    def list_box(m):
        """Rows that each block of a cluster loads at once from a list's matrix; as arguments.list_box."""
        _, rows, _ = piece(m, 1, int32(0))
        return int32(((rows + 7) // 8 + (cluster - 1)) // cluster * 8)

    @synchronising
    def find(p, base, number, all_tiles):
        busy, lean = int32(all_tiles >> 32), int32(all_tiles & LOW_HALF)
        in_lean, place = place_of(number, busy, lean, int32(cuda.gridDim.x // cluster))
        g, first = group_at(p, base, in_lean, place)
        m, n, k, start = extent(p, g)
        row, rows, column = piece(m, n, int32(place - first))
        height = int32((rows + 7) & ~7)
        marked = g
        if halves and p.table == 0 and n - column <= COLUMNS:
            marked = int32(marked | HALVES)
        elif m <= n_max:
            marked = int32(marked | ONCE)
        if p.table != 0:
            start = list_box(m)
        return Tile(marked, height, rows, row, column, int32(k), int32(start), int32(n))

    return count_all, find


@cache
def make_records(config, signature):
    """(await_record, free_slot): await_record(base, number) -> the record of this block's tile `number`, once it is
    announced; free_slot(base, number) tells that this warp, or thread, has read it."""
    at = Layout(config, signature)
    full, empty, records = at.tile_full, at.tile_empty, at.records
    leave = ptx.make_arrive_at_each(1)

    @synchronising
    def await_record(base, number):
        slot = int32(number & (SLOTS - 1))
        ptx.mbarrier_wait(int32(base + full + slot * 8), int32((number // SLOTS) & 1))
        return int32(base + records + slot * RECORD_BYTES)

    @synchronising
    def free_slot(base, number):
        leave(int32(base + empty + (number & (SLOTS - 1)) * 8), int32(0))

    return await_record, free_slot


@cache
def make_take(config, signature):
    """take(base, number) -> Tile: the next one, for a whole warp, which frees the slot once all lanes have read it."""
    await_record, free_slot = make_records(config, signature)

    @synchronising
    def take(base, number):
        tile = read_tile(await_record(base, number))
        cuda.syncwarp()
        free_slot(base, number)
        return tile

    return take


@synchronising
def read_tile(record):
    """The tile of a record in shared memory."""
    a, b = ptx.load_shared_u32x4(record), ptx.load_shared_u32x4(int32(record + 16))
    return Tile(a[0], a[1], a[2], a[3], b[0], b[1], b[2], b[3])


@synchronising
def same_in_all_lanes(tile):
    """The tile in registers that a warp may share, as the compiler knows by shuffles."""
    a = cuda.shfl_sync(ALL, tile.group, 0), cuda.shfl_sync(ALL, tile.height, 0), cuda.shfl_sync(ALL, tile.rows, 0)
    b = cuda.shfl_sync(ALL, tile.row, 0), cuda.shfl_sync(ALL, tile.column, 0), cuda.shfl_sync(ALL, tile.k, 0)
    return Tile(*a, *b, cuda.shfl_sync(ALL, tile.start, 0), cuda.shfl_sync(ALL, tile.width, 0))


@cache
def make_announce(config, signature):
    """announce_tiles(p, counters, base, rank, all_tiles): the life of the thread of each block that finds tiles.

    The counter's answer and the search take as long as several blocks of k. In the other block of a cluster it tells
    each slot what is to come. The first tile follows from the cluster's number, and each block finds it itself.
    """
    at, cluster = Layout(config, signature), config.cluster
    full, empty, records, ask = at.tile_full, at.tile_empty, at.records, at.ask
    find, (await_record, free_slot) = make_finder(config, signature)[1], make_records(config, signature)

    @synchronising
    def announce(base, number, tile, here):
        """`here`: in this block alone."""
        slot = int32(number & (SLOTS - 1))
        barrier, record = int32(base + full + slot * 8), int32(base + records + slot * RECORD_BYTES)
        ptx.mbarrier_wait(int32(base + empty + slot * 8), int32(((number // SLOTS) & 1) ^ 1))
        a, b = (tile.group, tile.height, tile.rows, tile.row), (tile.column, tile.k, tile.start, tile.width)
        if cluster == 1 or here:
            ptx.store_shared_u32x4(record, a)
            ptx.store_shared_u32x4(int32(record + 16), b)
            ptx.mbarrier_arrive(barrier)
        else:
            ptx.mbarrier_expect_tx(barrier, RECORD_BYTES)
            for other in range(cluster):
                ptx.store_async_u32x4(record, barrier, int32(other), a)
                ptx.store_async_u32x4(int32(record + 16), barrier, int32(other), b)

    @synchronising
    def take_height(base, number):
        """The height of the next tile, by this thread for itself."""
        height = ptx.load_shared_u32(int32(await_record(base, number) + 4))
        free_slot(base, number)
        return height

    @synchronising
    def finish(counters, clusters):
        """The last cluster to end leaves both counters at 0, for the next launch."""
        cuda.threadfence()
        if ptx.atomic_add(counters + 4, 1) == clusters - 1:
            ptx.store_global_u32(counters, 0)
            ptx.store_global_u32(counters + 4, 0)

    @synchronising
    def announce_tiles(p, counters, base, rank, all_tiles):
        clusters = int32(cuda.gridDim.x // cluster)
        total = int32((all_tiles >> 32) + (all_tiles & LOW_HALF))
        tile_number, number = int32(cuda.blockIdx.x // cluster), int32(0)
        none, zero = int32(STOP), int32(0)
        while True:
            height = none
            if rank == 0 or number == 0:
                tile = Tile(zero, none, zero, zero, zero, zero, zero, zero)
                if tile_number < total:
                    tile = find(p, base, tile_number, all_tiles)
                announce(base, number, tile, number == 0)
                height = tile.height
            else:
                ptx.mbarrier_expect_tx(int32(base + full + (number & (SLOTS - 1)) * 8), RECORD_BYTES)
            if rank == 0:
                if height == STOP:
                    break
                # Not too early: who is late shall take fewer.
                ptx.mbarrier_wait(int32(base + ask), int32(number & 1))
                tile_number = total
                if total > clusters:
                    tile_number = int32(clusters + ptx.atomic_add(counters, 1))
            elif take_height(base, number) == STOP:
                break
            number = int32(number + 1)
        if rank == 0:
            if total > clusters:
                finish(counters, clusters)
            if cluster > 1:  # warps of other blocks still arrive at this block's slots
                for last in range(max(int32(number - (SLOTS - 1)), zero), number + 1):
                    ptx.mbarrier_wait(int32(base + empty + (last & (SLOTS - 1)) * 8), int32((last // SLOTS) & 1))

    return announce_tiles


# Stages.


class Ring(NamedTuple):
    """A position in the ring of stages: where the next one lies, the number of its barriers, and their parity."""

    at: int
    place: int
    parity: int


class Room(NamedTuple):
    """What a warp that loads knows of the ring's room, as if the ring were endless.

    It waits for the stages in their order, and for no more of them than the next one needs: those that begin a ring's
    length or more before its end.
    """

    begin: int
    """Where the last stage begins, and where that is in the true ring."""
    at: int
    oldest: int
    """Where the oldest stage begins that may still be full; its barriers and their parity."""
    place: int
    parity: int


@synchronising
def first_place():
    """The beginning of a ring."""
    return Ring(int32(0), int32(0), int32(0))


@synchronising
def all_room():
    """An empty ring."""
    return Room(int32(0), int32(0), int32(0), int32(0), int32(0))


@cache
def make_next_place(places):
    """next_place(place, parity): the barriers of the next stage of a ring, and their parity."""

    @synchronising
    def next_place(place, parity):
        place = int32(place + 1)
        if place == places:
            place, parity = int32(0), int32(parity ^ 1)
        return place, parity

    return next_place


@cache
def make_ring(config, signature):
    """(bytes_of, fit, advance): the way that all warps go through the ring.

    bytes_of(p, longest_k, tile) are those of each of a tile's stages; fit(ring, bytes) comes before its first one, and
    advance(ring, bytes) after each. A stage that would reach past the end begins at the start.
    """
    at, variable, step, cluster = Layout(config, signature), config.variable, config.step, config.cluster
    most, ring_bytes, places, across = at.stage_bytes, at.ring_bytes, at.places, signature.a_order == "col"

    @synchronising
    def bytes_of(p, longest_k, tile):
        found = int32(most)
        if variable and tile.k <= longest_k:
            rows = tile.height
            if across:
                rows = int32((rows + 63) & ~63)
            else:
                if p.table != 0:
                    rows = max(rows, int32(tile.start * cluster))
                rows = int32((rows + (step - 1)) & ~(step - 1))
            found = int32(WEIGHT_BYTES + rows * ROW_BYTES)
        return found

    @synchronising
    def fit(ring, size):
        where = ring.at
        if variable and int32(where + size) > ring_bytes:
            where = int32(0)
        return Ring(where, ring.place, ring.parity)

    @synchronising
    def advance(ring, size):
        where, place, parity = int32(ring.at + size), int32(ring.place + 1), ring.parity
        if variable and int32(where + size) > ring_bytes:
            where = int32(0)
        if place == places:
            place, parity = int32(0), int32(parity ^ 1)
            if not variable:
                where = int32(0)
        return Ring(where, place, parity)

    return bytes_of, fit, advance


@cache
def make_room(config, signature):
    """(take, drain): take(base, begins, ring, room, bytes) -> Room waits until the next stage can be filled;
    drain(base, ring, room) until all have been handed back. `begins` are words of the warp's own, one for each
    place."""
    at, variable, places = Layout(config, signature), config.variable, Layout(config, signature).places
    empty, ring_bytes, next_place = at.empty, at.ring_bytes, make_next_place(at.places)

    @synchronising
    def take(base, begins, ring, room, size):
        if not variable:
            ptx.mbarrier_wait(int32(base + empty + ring.place * 8), int32(ring.parity ^ 1))
            return room
        moved = int32(ring.at - room.at)
        if moved < 0:
            moved = int32(moved + ring_bytes)
        begin, oldest, place, parity = int32(room.begin + moved), room.oldest, room.place, room.parity
        ptx.store_shared_u32(int32(begins + ring.place * 4), begin)
        while int32(begin + size - ring_bytes - oldest) > 0:
            ptx.mbarrier_wait(int32(base + empty + place * 8), parity)
            place, parity = next_place(place, parity)
            oldest = ptx.load_shared_u32(int32(begins + place * 4))
        return Room(begin, ring.at, oldest, place, parity)

    @synchronising
    def drain(base, ring, room):
        if variable:
            place, parity = room.place, room.parity
            while place != ring.place:
                ptx.mbarrier_wait(int32(base + empty + place * 8), parity)
                place, parity = next_place(place, parity)
        else:
            place, parity = ring.place, ring.parity
            for _ in range(places):
                ptx.mbarrier_wait(int32(base + empty + place * 8), int32(parity ^ 1))
                place, parity = next_place(place, parity)

    return take, drain
