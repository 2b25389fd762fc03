"""The Hopper kernel: TMA, a ring of barriers, wgmma, one persistent block per multiprocessor.

C^T = B^T A^T: the columns of C (weights) lie on the side of wgmma that is always 64 wide, its rows
(tokens) on the side that comes in steps of 8. So a ragged group wastes at most a few rows, and the
tile height is chosen for each group: every height that is a multiple of `step` has main loops of its own.

Three warpgroups. The first one's warps load weights, load rows (`hopper_load`), find tiles (`hopper_tiles`), and zero
the rows that no group owns. The other two multiply: each 64 columns by all rows of a tile.

Shared memory, from a multiple of 1024: the ring of stages of [128 columns | rows] x 128 bytes of k, staging for
results, tile records, counts of tiles, barriers. An operand that is contiguous along k lies as rows of 128 bytes; one
that is not lies as boxes of 64 elements x the k of a stage. Both are swizzled.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import cuda
from numba.cuda import types

from multigemm.backends.numba.arguments import JAGGED_M
from multigemm.backends.numba.config import (
    COLUMNS,
    OUT_MAP,
    ROW_BYTES,
    SLOTS,
    WEIGHT_BYTES,
    Float8Signature,
    Layout,
)
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.hopper_load import MAP_BYTES, make_load_rows, make_load_weights
from multigemm.backends.numba.kernels.hopper_tiles import (
    STOP,
    WARPS,
    first_place,
    group_of,
    make_announce,
    make_finder,
    make_half,
    make_ring,
    make_take,
)
from multigemm.backends.numba.kernels.memory import BYTES, make_operands
from multigemm.backends.numba.kernels.ptx import make_zeros, shared_address
from multigemm.backends.numba.kernels.runtime import kernel, synchronising
from multigemm.backends.numba.kernels.schedule import ALL, LANES, make_zero_unowned
from multigemm.backends.numba.kernels.tensor_epilogue import (
    LATE_ROWS,
    WARPGROUP,
    lane_address_16,
    make_late,
    make_write,
)
from multigemm.cuda.operand_maps import FAR

int32 = types.int32
CONSUMERS = 256
_wait_one = ptx.make_wgmma_wait(1)

# The consuming warpgroups: wgmma on the stages as they fill, then the way out.
#
# Each of the two warpgroups owns 64 of the block's 128 columns and all rows of the tile. Every height
# of a tile has main loops of its own, since the shape of wgmma is part of the instruction.


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
def make_release(config, signature):
    """release(base, place): tells all blocks that load into a stage that this warp is through with it; -1: with
    none."""
    arrive, empty = ptx.make_arrive_at_each(config.cluster), Layout(config, signature).empty

    @synchronising
    def release(base, place):
        arrive(int32(base + empty + place * 8), place)

    return release


@cache
def make_block(config, signature, n):
    """block(acc, base, ring, warpgroup) -> acc: waits for a stage and starts to multiply it.

    The sums fill the beginning of as many registers as the largest n takes.
    """
    at = Layout(config, signature)
    a_across, b_across = signature.a_order == "col", signature.b_order == "row"
    # Steps of 32 bytes of k, or of 16 rows of k, in units of 16 bytes.
    steps = tuple((step * (128 if b_across else 2), step * (128 if a_across else 2)) for step in range(4))
    wgmma = ptx.make_wgmma(at.kind, n, b_across, a_across, within=config.n_max // 2, steps=steps)
    weights = ptx.make_descriptor(WEIGHT_BYTES // 2, 1024)
    tokens = ptx.make_descriptor(64 * ROW_BYTES, 1024)
    full = at.full

    @synchronising
    def block(acc, base, ring, warpgroup):
        ptx.mbarrier_wait(int32(base + full + ring.place * 8), ring.parity)
        stage = int32(base + ring.at)
        b, a = weights(int32(stage + warpgroup * (WEIGHT_BYTES // 2))), tokens(int32(stage + WEIGHT_BYTES))
        ptx.wgmma_fence()
        acc = wgmma(acc, b, a)
        ptx.wgmma_commit()
        return acc

    return block


class Results(NamedTuple):
    """Packed results of a tile that are still to be stored: the `rows` before row `end`, 64 columns from `column`
    on."""

    column: int
    end: int
    group: int
    rows: int


@cache
def make_send(config, signature):
    """send(words, to, base, maps, warpgroup, thread) -> (words, to): the first LATE_ROWS rows leave by the copy engine.

    The map counts rows back from `end` and drops what would lie behind it, as it drops columns that do not exist.
    """
    at = Layout(config, signature)
    staging_at, staging_bytes = at.staging, at.staging_bytes
    _, _, put, drop = make_late(config.n_max, signature.compute)

    @synchronising
    def send(words, to, base, maps, warpgroup, thread):
        staging, far = int32(base + staging_at + warpgroup * staging_bytes), int32(FAR)
        sender = int32(thread == 0)
        ptx.tma_store_read(sender)  # the staging of the round before
        ptx.named_barrier(int32(warpgroup + 1), WARPGROUP)
        put(words, lane_address_16(staging, thread))
        ptx.fence_async()
        ptx.named_barrier(int32(warpgroup + 1), WARPGROUP)
        where = (to.column, int32(far - to.rows), to.end, far, to.group)
        ptx.tma_store(sender, staging, maps + OUT_MAP * MAP_BYTES, where)
        return drop(words), Results(to.column, to.end, to.group, int32(to.rows - LATE_ROWS))

    return send


@synchronising
def results_of(p, tile, rank, warpgroup):
    """Where a warpgroup's part of a tile goes."""
    g, end = group_of(tile), int32(tile.row + tile.rows)
    column = int32(tile.column + rank * COLUMNS + warpgroup * (COLUMNS // 2))
    if p.jagged == JAGGED_M:
        g, end = int32(0), int32(end + tile.start)
    return Results(column, end, g, tile.rows)


@cache
def make_multiply_and_send(config, signature, n):
    """multiply(words, to, maps, base, ring, size, blocks, warpgroup, thread) -> (words, ring).

    All blocks of a tile. While the first ones are multiplied, the results of the tile before leave; those of this one
    are kept in their place.
    """
    most = config.n_max // 2
    zeros, result = make_zeros(n // 2, within=most), ptx.make_wgmma_result(n, within=most)
    block, send, release = (
        make_block(config, signature, n),
        make_send(config, signature),
        make_release(config, signature),
    )
    advance, pack = make_ring(config, signature)[2], make_late(config.n_max, signature.compute)[1](n)

    @synchronising
    def multiply(words, to, maps, base, ring, size, blocks, warpgroup, thread):
        acc, before, left = zeros(), int32(-1), blocks
        while to.rows > 0:
            acc = block(acc, base, ring, warpgroup)
            words, to = send(words, to, base, maps, warpgroup, thread)
            _wait_one()
            release(base, before)
            before, ring, left = ring.place, advance(ring, size), int32(left - 1)
        while left > 0:
            acc = block(acc, base, ring, warpgroup)
            _wait_one()
            release(base, before)
            before, ring, left = ring.place, advance(ring, size), ptx.unforeseen(int32(left - 1))
        acc = result(acc)
        release(base, before)
        return pack(acc), ring

    return multiply


@cache
def make_multiply(config, signature, n):
    """multiply(p, tile, base, ring, size, blocks, rank, warpgroup, thread) -> (sums, where they go, ring).

    One epilogue serves every n. Where the sums go is worked out while the last products are under way.
    """
    most = config.n_max // 2
    zeros, result = make_zeros(n // 2, within=most), ptx.make_wgmma_result(n, within=most)
    block, advance = make_block(config, signature, n), make_ring(config, signature)[2]
    release, target = make_release(config, signature), make_targets(signature)[0]

    @synchronising
    def multiply(p, tile, base, ring, size, blocks, rank, warpgroup, thread):
        acc, before, left = zeros(), int32(-1), blocks
        while left > 0:
            acc = block(acc, base, ring, warpgroup)
            _wait_one()
            release(base, before)
            before, ring, left = ring.place, advance(ring, size), ptx.unforeseen(int32(left - 1))
        j = int32(tile.column + rank * COLUMNS + warpgroup * (COLUMNS // 2))
        out = target(p, group_of(tile), tile.start, tile.row, j)
        acc = result(acc)
        release(base, before)
        return acc, out, ring

    return multiply


def by_limit(functions):
    """dispatch(number, ...): calls the function of the least limit that the number does not exceed, by halving."""
    limits = sorted(functions)
    if len(limits) == 1:
        only = functions[limits[0]]

        @synchronising
        def call(number, *given):
            return only(*given)

        return call
    middle = (len(limits) + 1) // 2
    limit = limits[middle - 1]
    lower, upper = (by_limit({x: functions[x] for x in half}) for half in (limits[:middle], limits[middle:]))

    @synchronising
    def choose(number, *given):
        if number <= limit:
            found = lower(number, *given)
        else:
            found = upper(number, *given)
        return found

    return choose


def _by_height(config, signature, make):
    """dispatch(height, ...): `make(config, signature, n)` of the least n that covers so many rows."""
    heights = range(config.step, config.n_max + 1, config.step)
    return by_limit({n: make(config, signature, n) for n in heights})


@cache
def make_sending_consumer(config, signature):
    """consume(p, q, alpha, beta, longest_k, maps, base, rank, warpgroup, thread): the whole life of a consumer thread.

    Results wait in registers and leave while the next tile is multiplied. `q` is what a kernel is launched with beside
    `p`; this one has nothing. `longest_k`: up to which k stages are as large as the rows of their tile need.
    """
    bk, take, half = Layout(config, signature).bk, make_take(config, signature), make_half(config)
    (bytes_of, fit, _), send = make_ring(config, signature), make_send(config, signature)
    nothing = make_late(config.n_max, signature.compute)[0]
    dispatch = _by_height(config, signature, make_multiply_and_send)

    @synchronising
    def consume(p, q, alpha, beta, longest_k, maps, base, rank, warpgroup, thread):
        ring, number, words, none = first_place(), int32(0), nothing(), int32(0)
        to = Results(none, none, none, none)
        if thread == 0:
            ptx.fence_tensormap(maps + OUT_MAP * MAP_BYTES)
        while True:
            tile = half(take(base, number), rank)
            if tile.height == STOP:
                break
            size, blocks = bytes_of(p, longest_k, tile), int32((tile.k + (bk - 1)) // bk)
            if blocks > 0:
                ring = fit(ring, size)
            while to.rows > blocks * LATE_ROWS:  # fewer blocks than there are rows to store
                words, to = send(words, to, base, maps, warpgroup, thread)
            words, ring = dispatch(tile.height, words, to, maps, base, ring, size, blocks, warpgroup, thread)
            to = results_of(p, tile, rank, warpgroup)
            number = int32(number + 1)
        while to.rows > 0:
            words, to = send(words, to, base, maps, warpgroup, thread)
        ptx.tma_store_wait()

    return consume


@cache
def make_storing_consumer(config, signature):
    """The same for results that the copy engine cannot store."""
    at, take, half = Layout(config, signature), make_take(config, signature), make_half(config)
    staging_at, staging_bytes, bk = at.staging, at.staging_bytes, at.bk
    dispatch = _by_height(config, signature, make_multiply)
    bytes_of, fit, _ = make_ring(config, signature)
    write = make_write(config.n_max, signature.compute, make_targets(signature)[1])

    @synchronising
    def consume(p, q, alpha, beta, longest_k, maps, base, rank, warpgroup, thread):
        ring, number = first_place(), int32(0)
        staging = int32(base + staging_at + warpgroup * staging_bytes)
        while True:
            tile = half(take(base, number), rank)
            if tile.height == STOP:
                break
            size, blocks = bytes_of(p, longest_k, tile), int32((tile.k + (bk - 1)) // bk)
            if blocks > 0:
                ring = fit(ring, size)
            acc, out, ring = dispatch(tile.height, p, tile, base, ring, size, blocks, rank, warpgroup, thread)
            j = int32(tile.column + rank * COLUMNS + warpgroup * (COLUMNS // 2))
            place = group_of(tile), tile.start, tile.row, j
            write(acc, staging, warpgroup + 1, p, place, out, alpha, beta, tile.rows, int32(tile.width - j), thread)
            number = int32(number + 1)

    return consume


# The kernel: barriers, then a role for each warp.

REGISTERS = 56, 224
"""Of a producing and of a consuming thread."""
CONSUMER_WARPS = CONSUMERS // 32
LOADERS = 2


@cache
def make_barriers(config, signature):
    """init(base): sets the barriers of a block up."""
    at, cluster = Layout(config, signature), config.cluster
    places, full, empty, tile_full, tile_empty, ask = at.places, at.full, at.empty, at.tile_full, at.tile_empty, at.ask

    @synchronising
    def init(base):
        for place in range(places):
            ptx.mbarrier_init(int32(base + full + place * 8), LOADERS)
            ptx.mbarrier_init(int32(base + empty + place * 8), CONSUMER_WARPS * cluster)
        for slot in range(SLOTS):
            ptx.mbarrier_init(int32(base + tile_full + slot * 8), 1)
            # All warps that multiply or load, and the threads that announce in other blocks.
            readers = (CONSUMER_WARPS + LOADERS) * cluster + (cluster - 1)
            ptx.mbarrier_init(int32(base + tile_empty + slot * 8), readers)
        ptx.mbarrier_init(int32(base + ask), 1)
        ptx.fence_mbarrier_init()
        ptx.fence_async()

    return init


@cache
def make_kernel(config, signature, make_consumer=None):
    """The kernel for one pipeline shape and one set of dtypes and layouts."""
    less, more = ptx.make_setmaxnreg(REGISTERS[0], False), ptx.make_setmaxnreg(REGISTERS[1], True)
    cluster, init = config.cluster, make_barriers(config, signature)
    load_weights, load_rows = make_load_weights(config, signature), make_load_rows(config, signature)
    count_all, announce_tiles = make_finder(config, signature)[0], make_announce(config, signature)
    consume = (make_consumer or (make_sending_consumer if signature.sent else make_storing_consumer))(config, signature)
    zero_unowned = make_zero_unowned(LANES)

    @synchronising
    def produce(p, longest_k, maps, counters, base, rank, all_tiles, warp, lane):
        if warp == 0:
            load_weights(p, longest_k, maps, base, rank)
        elif warp == 1:
            load_rows(p, longest_k, maps, base, rank)
        elif warp == 2:
            if lane == 0:
                announce_tiles(p, counters, base, rank, all_tiles)
        elif p.zeroes != 0:
            zero_unowned(p, lane, cuda.blockIdx.x, cuda.gridDim.x)

    @synchronising
    def run(p, q, alpha, beta, longest_k, maps, counters):
        base = (shared_address(cuda.shared.array(0, np.uint8)) + int32(1023)) & int32(~1023)
        thread = int32(cuda.threadIdx.x)
        warp, rank = cuda.shfl_sync(ALL, int32(thread >> 5), 0), int32(0)  # known to be the same for a whole warp
        if cluster > 1:
            rank = ptx.cluster_rank()
        if warp == WARPS - 1 and ptx.elected():
            init(base)
        cuda.syncwarp()
        ptx.grid_dependents_launch()
        ptx.grid_dependency_wait()
        if cluster > 1:
            ptx.cluster_arrive()
        all_tiles = count_all(p, base, thread)
        cuda.syncthreads()
        if cluster > 1:
            ptx.cluster_wait()
        if warp < 4:
            less()
            produce(p, longest_k, maps, counters, base, rank, all_tiles, warp, int32(thread & 31))
        else:
            more()
            warpgroup = int32((warp >> 2) - 1)
            of_sums, of_c = types.float32(alpha), types.float32(beta)
            consume(p, q, of_sums, of_c, longest_k, maps, base, rank, warpgroup, int32(thread & 127))

    @kernel
    def hopper(p, alpha, beta, longest_k, maps, counters):
        run(p, 0, alpha, beta, longest_k, maps, counters)

    @kernel
    def hopper_float8(p, q, alpha, beta, longest_k, maps, counters):
        run(p, q, alpha, beta, longest_k, maps, counters)

    return hopper_float8 if isinstance(signature, Float8Signature) else hopper
