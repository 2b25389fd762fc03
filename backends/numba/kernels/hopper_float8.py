"""The Hopper kernel for float8: tiles, ring and warps that load as in `hopper`, and other consumers.

Hopper's tensor cores keep 14 bits of a float8 sum that they carry on. So the products of a stage, 128 of k, start from
zero and are promoted: added to float32 sums, times their scales where those change along k. Scales that hold for all
of k multiply the sums at the end. While one warpgroup promotes, the tensor cores work for the other one.

Rows are on the first side of wgmma, 64 to a strip, so that a thread has two rows of a strip and needs two row scales:
with rows on the side of n it would need those of all rows. Each lane reads the scale of one row two stages
ahead, and once in 32 stages that of the columns for one of them; shuffles hand them round. Of at most 64 rows each
warpgroup multiplies its half of the 128 columns; of more rows it multiplies all columns of one strip, or of two.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache

from llvmlite import ir
from numba import cuda
from numba.cuda import types

from multigemm.backends.numba.arguments import JAGGED_M, JAGGED_N
from multigemm.backends.numba.config import COLUMNS, ROW_BYTES, WEIGHT_BYTES, Layout
from multigemm.backends.numba.kernels import hopper, ptx
from multigemm.backends.numba.kernels.hopper import by_limit, make_release, make_targets
from multigemm.backends.numba.kernels.hopper_tiles import (
    STOP,
    group_of,
    make_next_place,
    make_records,
    read_tile,
)
from multigemm.backends.numba.kernels.memory import element_pointer, loader
from multigemm.backends.numba.kernels.ptx import F32, I32, I64, LLVM, emitted, floats, make_zeros
from multigemm.backends.numba.kernels.runtime import synchronising
from multigemm.backends.numba.kernels.schedule import ALL
from multigemm.backends.numba.kernels.tensor_epilogue import STRIP, make_strip_write

SCALE_BYTES = 4
BLOCK_K = 128
"""k of a stage."""
STRIP_BYTES = STRIP * ROW_BYTES
HALF = COLUMNS // 2
int32, int64, float32 = types.int32, types.int64, types.float32
_single = loader("f32")


@cache
def make_promote(count, first, most, scales):
    """promote(sums, parts, upper, lower) -> sums: adds `count` parts, from the sum `first` on.

    Unless the scales are "whole", times the scale of their row.
    """

    def generate(builder, sums, parts, upper, lower):
        for i in range(count):
            part, total = builder.extract_value(parts, i), builder.extract_value(sums, first + i)
            of_row = upper if i % 4 < 2 else lower
            made = builder.fadd(part, total) if scales == "whole" else builder.fma(part, of_row, total)
            sums = builder.insert_value(sums, made, first + i)
        return sums

    return emitted(generate, floats(most), floats(most), floats(count), F32, F32)


def _by_columns(builder, count, upper, lower, address, each, column, last):
    """(number of a sum, the product of the scales of its row and its column), for every sum of a strip."""
    for i in range(0, count, 4):
        for x in range(2):
            own = builder.add(column, ir.Constant(LLVM[I32], i * 2 + x))
            own = builder.select(builder.icmp_signed("<", own, last), own, last)
            at = builder.add(address, builder.mul(builder.sext(own, LLVM[I64]), each))
            factor = builder.load(element_pointer(builder, "f32", at, ir.Constant(LLVM[I64], 0)))
            yield i + x, builder.fmul(upper, factor)
            yield i + x + 2, builder.fmul(lower, factor)


@cache
def make_by_columns(count, first, most, promoted):
    """scale(sums, upper, lower, address, each, column, last) -> sums: times the scales of their rows and columns, from
    the sum `first` on; or, if `promoted`, promote(sums, parts, upper, ...) -> sums: adds parts times these scales.

    `address` is that of the scale of column 0, and `each` bytes lie from one to the next; `column` is this lane's first
    one, `last` the last one that exists.
    """

    def generate(builder, sums, *given):
        for i, scale in _by_columns(builder, count, *given[-6:]):
            total = builder.extract_value(sums, first + i)
            if promoted:
                total = builder.fma(builder.extract_value(given[0], i), scale, total)
            else:
                total = builder.fmul(total, scale)
            sums = builder.insert_value(sums, total, first + i)
        return sums

    parts = (floats(count),) if promoted else ()
    return emitted(generate, floats(most), floats(most), *parts, F32, F32, I64, I64, I32, I32)


# What a consumer has to know of its tile it reads from the tile's record, before the products and again behind them: so
# no register holds it while two strips are multiplied, which leave none.


@synchronising
def share_of(rows, columns, warpgroup):
    """(first row, first column, rows, columns, strips) of a warpgroup's part of a tile; 0 strips: half the columns."""
    row, column, strips = int32(0), int32(0), int32(0)
    if rows <= STRIP:
        column = int32(warpgroup * HALF)
        columns = min(int32(columns - column), int32(HALF))
    elif rows <= 2 * STRIP:
        row, strips = int32(warpgroup * STRIP), int32(1)
        rows = min(int32(rows - row), int32(STRIP))
    else:
        row, strips = int32(warpgroup * (2 * STRIP)), int32(2)
        rows = min(int32(rows - row), int32(2 * STRIP))
        if rows <= STRIP:
            strips = int32(1)
    return row, column, rows, columns, strips


@synchronising
def read_part(record):
    """(group, its start, first row and first column in it, rows, columns) of this warpgroup's part of a tile."""
    tile = read_tile(record)
    first = int32(tile.column + ptx.cluster_rank() * COLUMNS)
    row, column, rows, columns, _ = share_of(tile.rows, int32(tile.width - first), int32((ptx.thread_again() >> 7) - 1))
    return group_of(tile), tile.start, int32(tile.row + row), int32(first + column), rows, columns


@synchronising
def depth_of(k):
    """The blocks of k."""
    return int32((k + (BLOCK_K - 1)) // BLOCK_K)


@cache
def make_find_scales(strips):
    """find_scales(p, q, record) -> addresses of the scales of this lane's row and of the first column.

    Then the bytes from one column's scale to the next, 0 where columns share theirs. Lanes 0 to 15 have the rows of
    their warp in the first strip, the others those in the second one (with one strip, the same). A row or column that
    does not exist gets the last one's.
    """

    @synchronising
    def find_scales(p, q, record):
        g, start, i, j, rows, columns = read_part(record)
        thread = ptx.thread_again()
        row = int32(((thread >> 5) & 3) * 16 + (thread & 15))
        if strips == 2:
            row = int32(row + ((thread >> 4) & 1) * STRIP)
        i += max(min(row, int32(rows - 1)), int32(0))
        j += min(int32(columns - 1), int32(0))
        of_a = g * q.scale_a_group + (i >> q.scale_a_line_shift) * q.scale_a_line
        of_b = g * q.scale_b_group + (j >> q.scale_b_line_shift) * q.scale_b_line
        if p.jagged == JAGGED_M:
            of_a += start * q.scale_a_line
        elif p.jagged == JAGGED_N:
            of_b += start * q.scale_b_line
        each = int64(0)
        if q.scale_b_line_shift == 0:
            each = q.scale_b_line * SCALE_BYTES
        return q.scale_a + of_a * SCALE_BYTES, q.scale_b + of_b * SCALE_BYTES, each

    return find_scales


@cache
def make_load_32():
    """load_32(p, q, record, block, depth) -> the scale of the columns in a block of k for each lane, from `block` on.

    A block that does not exist gets the last one's.
    """
    find_scales = make_find_scales(1)

    @synchronising
    def load_32(p, q, record, block, depth):
        _, of_b, _ = find_scales(p, q, record)
        own = min(int32(block + (ptx.thread_again() & 31)), int32(depth - 1))
        return _single(of_b + own * q.scale_b_deep * SCALE_BYTES, 0)

    return load_32


@cache
def make_start(signature, width):
    """start(parts, tokens, weights, never) -> parts: starts the products of a strip and `width` columns with a stage.

    They start from zero; what `parts` was before only says in which registers they are (`make_wgmma_of_bytes`).
    """
    first, second, third, fourth = (
        ptx.make_wgmma_of_bytes(signature.a, signature.b, width, k, k == 0) for k in (0, 2, 4, 6)
    )

    @synchronising
    def start(parts, tokens, weights, never):
        ptx.wgmma_fence()
        parts = first(parts, tokens, weights, never)
        parts = second(parts, tokens, weights, never)
        parts = third(parts, tokens, weights, never)
        parts = fourth(parts, tokens, weights, never)
        ptx.wgmma_commit()
        return parts

    return start


@synchronising
def of_rows(value, strip):
    """The numbers of a thread's upper and lower row of a strip, from the lanes that have them."""
    first = int32(((ptx.thread_again() & 31) >> 2) + strip * 16)
    return cuda.shfl_sync(ALL, value, first), cuda.shfl_sync(ALL, value, int32(first + 8))


@synchronising
def lane_columns(record):
    """(this lane's first column in a part of a tile, the last one that exists)."""
    return int32((ptx.thread_again() & 3) * 2), max(int32(read_part(record)[5] - 1), int32(0))


@cache
def make_finish(strips, width, most):
    """finish(p, q, sums, record) -> sums: times scales that hold for all of k."""
    count, find_scales = width // 2, make_find_scales(strips)
    scale_first, scale_second = (make_by_columns(count, first, most, False) for first in (0, most - count))

    @synchronising
    def finish(p, q, sums, record):
        if read_tile(record).k == 0:
            return sums
        of_a, of_b, each = find_scales(p, q, record)
        column, last = lane_columns(record)
        value = _single(of_a, 0)
        upper, lower = of_rows(value, 0)
        sums = scale_first(sums, upper, lower, of_b, each, column, last)
        if strips == 2:
            upper, lower = of_rows(value, 1)
            sums = scale_second(sums, upper, lower, of_b, each, column, last)
        return sums

    return finish


@synchronising
def of_none(value, strip):
    """As `of_rows`, where all rows have the same number."""
    return value, value


@cache
def make_promotion(signature, count, first, most):
    """promote(sums, parts, upper, lower, address, each, record) -> sums: adds parts, times scales of blocks of k."""
    promote = make_promote(count, first, most, signature.scales)
    by_columns = make_by_columns(count, first, most, True)

    @synchronising
    def without_columns(sums, parts, upper, lower, address, each, record):
        return promote(sums, parts, upper, lower)

    @synchronising
    def with_columns(sums, parts, upper, lower, address, each, record):
        column, last = lane_columns(record)
        return by_columns(sums, parts, upper, lower, address, each, column, last)

    return with_columns if signature.scales == "columns" else without_columns


@cache
def make_multiply(config, signature, strips, width):
    """multiply(p, q, base, stage, phase, depth, record, first) -> (sums, next stage, its phase).

    `first` is the warpgroup's first row, or its first column if it has half of them. Its sums fill the beginning of as
    many registers as the largest part of a tile takes.
    """
    at = Layout(config, signature)
    next_place, stage_bytes, full = make_next_place(config.stages), at.stage_bytes, at.full
    most, count = config.n_max // 2, width // 2
    blocked, by_columns, half = signature.scales != "whole", signature.scales == "columns", width == HALF
    zeros, settled = make_zeros(most), ptx.make_settled(most)
    start, result, release = make_start(signature, width), ptx.make_wgmma_result(width), make_release(config, signature)
    promote_first = make_promotion(signature, count, 0, most)
    promote_last = make_promotion(signature, count, (strips - 1) * count, most)
    of_strip, finish = of_rows if blocked else of_none, make_finish(strips, width, most)
    no_parts, find_scales, load_32 = make_zeros(count), make_find_scales(strips), make_load_32()

    @synchronising
    def multiply(p, q, base, stage, phase, depth, record, first):
        of_a, of_b, each = int64(0), int64(0), int64(0)
        value = next_a = these_b = float32(1.0)
        if depth > 0:
            if blocked:
                of_a, of_b, each = find_scales(p, q, record)
                value = _single(of_a, 0)
                if not by_columns:
                    these_b = load_32(p, q, record, int32(0), depth)
                    value = value * cuda.shfl_sync(ALL, these_b, 0)
                of_a += min(int32(depth - 1), int32(1)) * q.scale_a_deep * SCALE_BYTES
                next_a = _single(of_a, 0)
            ptx.mbarrier_wait(base + full + stage * 8, phase)
        sums, parts, next_b = zeros(), no_parts(), these_b
        for block in range(1, depth + 1):
            a = int32(base + stage * stage_bytes)
            b, a = a, int32(a + WEIGHT_BYTES)
            if half:
                b = int32(b + first * ROW_BYTES)
            else:
                a = int32(a + first * ROW_BYTES)
            a, b = ptx.descriptor_half(a), ptx.descriptor_half(b)
            parts = start(parts, a, b, stage)
            upper, lower = of_strip(value, 0)
            if strips == 2:
                parts = result(parts)
                sums = settled(promote_first(sums, parts, upper, lower, of_b, each, record))
                parts = start(parts, int32(a + (STRIP_BYTES >> 4)), b, stage)
                upper, lower = of_strip(value, 1)
            if blocked:
                # Beside the products: the scales of the next block, whose products then follow without delay.
                value = next_a
                if not by_columns:
                    if (block & 31) == 0:
                        these_b = next_b
                    elif (block & 31) == 8:
                        next_b = load_32(p, q, record, int32(block + 24), depth)
                    value = value * cuda.shfl_sync(ALL, these_b, block & 31)
                if block + 1 < depth:
                    of_a += q.scale_a_deep * SCALE_BYTES
                    next_a = _single(of_a, 0)
            parts = result(parts)
            release(base, stage)
            stage, phase = next_place(stage, phase)
            if block < depth:
                ptx.mbarrier_wait(base + full + stage * 8, phase)
            sums = settled(promote_last(sums, parts, upper, lower, of_b, each, record))
            if by_columns:
                of_b += q.scale_b_deep * SCALE_BYTES
        if not blocked:
            sums = finish(p, q, sums, record)
        return sums, stage, phase

    return multiply


@cache
def make_dispatch(config, signature):
    """dispatch(strips, ...): `multiply` for a part of a tile, of the parts that tiles of this config have."""
    parts = (1, HALF), (1, COLUMNS), (2, COLUMNS)
    highest = config.n_max // (2 * STRIP)
    return by_limit({strips: make_multiply(config, signature, *parts[strips]) for strips in range(highest + 1)})


@cache
def make_prefetch(signature):
    """prefetch(p, q, record): brings the first scales of a tile into the L2 cache, or all that hold for all of k."""
    find_scales, along_k = make_find_scales(2), signature.scales == "blocks"

    @synchronising
    def prefetch(p, q, record):
        tile = read_tile(record)
        depth = depth_of(tile.k)
        if tile.height != STOP and depth != 0:
            of_a, of_b, each = find_scales(p, q, record)
            lane, last = int32(ptx.thread_again() & 31), lane_columns(record)[1]
            if along_k:
                of_b += min(lane, int32(depth - 1)) * q.scale_b_deep * SCALE_BYTES
            else:
                of_b += min(int32(lane * 4), last) * each
            ptx.prefetch(of_a)
            ptx.prefetch(of_b)

    return prefetch


@cache
def make_consumer(config, signature):
    """consume(...): the whole life of a consumer thread, as in `hopper`; `q` are the `Grids`."""
    at, dispatch = Layout(config, signature), make_dispatch(config, signature)
    staging_at, (await_record, free_slot) = at.staging, make_records(config, signature)
    write = make_strip_write(config.n_max // STRIP, signature.out, read_part, *make_targets(signature))
    prefetch, whole = make_prefetch(signature), signature.scales == "whole"

    @synchronising
    def consume(p, q, alpha, beta, longest_k, maps, base, rank, warpgroup, thread):
        stage, phase, number = int32(0), int32(0), int32(0)
        while True:
            record = await_record(base, number)
            tile = read_tile(record)
            if tile.height == STOP:
                cuda.syncwarp()
                free_slot(base, number)
                break
            if whole:
                prefetch(p, q, record)
            row, column, _, _, strips = share_of(tile.rows, int32(0), int32(warpgroup))
            first = int32(row + column)
            sums, stage, phase = dispatch(strips, p, q, base, stage, phase, depth_of(tile.k), record, first)
            if not whole:  # the next tile's scales come while this one's results leave
                prefetch(p, q, await_record(base, int32(number + 1)))
            write(sums, p, record, base + staging_at, alpha, beta)
            cuda.syncwarp()
            free_slot(base, number)
            number = int32(number + 1)

    return consume


@cache
def make_kernel(config, signature):
    """The kernel for one pipeline shape, two formats, and scales that change along k or do not."""
    return hopper.make_kernel(config, signature, make_consumer)
