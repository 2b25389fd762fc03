"""From the sums of tensor cores to memory: through shared memory, so that stores are wide.

Sums are staged in rows of 64. Their 16-byte chunks are swizzled by the row's number, so that no two
lanes meet in a bank, neither when sums are staged nor when `flush` reads them.
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types

from multigemm.backends.numba.arguments import KIND
from multigemm.backends.numba.config import KEPT_COLUMNS
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.epilogue import BF16, F16, F32, make_any_finish, make_any_store
from multigemm.backends.numba.kernels.memory import BYTES
from multigemm.backends.numba.kernels.mma_fragments import make_fma_stage
from multigemm.backends.numba.kernels.ptx import F64, I32, LLVM, assembly, emitted, floats
from multigemm.backends.numba.kernels.runtime import synchronising

# From rows of 64 staged sums to memory: alpha, C, bias, the activation and one rounding, to any type and strides.

CHUNK = 16
"""Bytes."""
int32 = types.int32


@cache
def make_swizzle(acc):
    """swizzle(row) -> what a chunk's number is xor-ed with: alike for rows 8 apart; of 4 bytes, for 2i and 2i + 1."""

    @synchronising
    def single(row):
        return ((row // 2) % 4) * 2

    @synchronising
    def double(row):
        return (row % 2) * 4

    return double if acc == "f64" else single


def _of_one_kind(load, store, own):
    @synchronising
    def send(where, cell, kind):
        store(where, load(cell))

    @synchronising
    def fits(kind):
        return kind == own

    return send, fits


def _of_three_kinds():
    kinds = (F32, F16, BF16)
    pack_half, pack_brain = ptx.make_pack("f16"), ptx.make_pack("bf16")

    @synchronising
    def send(where, cell, kind):
        v = ptx.load_shared_f32x4(cell)
        if kind == F32:
            ptx.store_global_f32x4(where, v)
        elif kind == F16:
            ptx.store_global_u32x2(where, (pack_half(v[0], v[1]), pack_half(v[2], v[3])))
        else:
            ptx.store_global_u32x2(where, (pack_brain(v[0], v[1]), pack_brain(v[2], v[3])))

    @synchronising
    def fits(kind):
        return kind in kinds

    return send, fits


@cache
def _ways(acc):
    """(load, store of one staged sum; send(address, chunk, kind), fits(kind)): how a whole chunk leaves, if its kind
    has such a way."""
    if acc == "i32":
        whole = _of_one_kind(ptx.load_shared_u32x4, ptx.store_global_u32x4, KIND[acc])
        return ptx.load_shared_u32, ptx.store_shared_u32, *whole
    if acc == "f64":
        whole = _of_one_kind(ptx.load_shared_f64x2, ptx.store_global_f64x2, KIND[acc])
        return ptx.load_shared_f64, ptx.store_shared_f64, *whole
    return ptx.load_shared_f32, ptx.store_shared_f32, *_of_three_kinds()


@cache
def make_flush(acc, threads):
    """flush(...) by so many threads, a chunk of a row each; `acc` is the sums' type."""
    finish, store, swizzle = make_any_finish(acc), make_any_store(acc), make_swizzle(acc)
    load, keep, send, fits = _ways(acc)
    size = BYTES[acc]
    each, pitch = CHUNK // size, KEPT_COLUMNS * size
    chunks = KEPT_COLUMNS // each
    step = threads // chunks

    @synchronising
    def flush(staging, out, c, bias, style, alpha, beta, rows, columns, thread, above):
        """`out` and `c` are (address, row stride, column stride); `above` rows of C lie before the first."""
        out_at, out_row, out_col = out
        c_at, c_row, c_col = c
        bias_at, bias_col = bias
        kind, out_size, c_kind, bias_kind, activation, plain = style
        chunk, first = thread % chunks, thread // chunks
        column = chunk * each
        count = min(max(columns - column, 0), each)
        aligned = ((out_at | (out_row * out_size)) & (each * out_size - 1)) == 0
        wide = out_col == 1 and count == each and aligned and fits(kind)
        for row in range(first, rows, step):
            cell = int32(staging + row * pitch + (chunk ^ swizzle(row)) * CHUNK)
            if plain == 0:
                for i in range(count):
                    at, b = (above + row) * c_row + (column + i) * c_col, (column + i) * bias_col
                    value = load(cell + i * size)
                    value = finish(value, alpha, beta, activation, c_kind, c_at, at, bias_kind, bias_at, b)
                    keep(cell + i * size, value)
            if wide:
                send(out_at + (row * out_row + column) * out_size, cell, kind)
            else:
                for i in range(count):
                    store(out_at, row * out_row + (column + i) * out_col, load(cell + i * size), kind)

    return flush


@synchronising
def style_of(p):
    """What `flush` has to know of the epilogue."""
    return p.out_kind, p.out_size, p.c_kind, p.bias_kind, p.activation, p.plain


# The sm_80 kernel: each warp stages its sums in a piece of shared memory of its own.
#
# What `make_words` has turned by pairs is put back in order here: `turned_a` or `turned_b` say which of both.

LANES = 32
TYPES = {"i32": I32, "f32": ptx.F32, "f64": F64}


@cache
def make_way_out(kind, acc, kept, a_lies_across, b_lies_across):
    """(stage, flush): stage(sums, address of the warp's piece, lane); and `make_flush`."""
    if kind == "f32":
        stage = make_fma_stage(kept, a_lies_across, b_lies_across)
    else:
        turned = kind == "i8"
        stage = make_stage(acc, kept, turned and a_lies_across, turned and b_lies_across)
    return stage, make_flush(acc, LANES)


def _runs(rows, columns, size, turned_a, turned_b):
    """(row, byte, which sums) of neighbours that a lane holds, but for what depends on the lane."""
    for i, half in product(range(rows), range(2)):
        row = i * 16 + (half if turned_a else half * 8)
        for j in range(0, columns, 2 if turned_b else 1):
            first = (i * columns + j) * 4 + half * 2
            yield row, j * 8 * size, [first, first + 4, first + 1, first + 5] if turned_b else [first, first + 1]


@cache
def make_stage(acc, kept, turned_a, turned_b):
    """stage(sums, address of the warp's piece, lane) for sums of mma.sync."""
    rows, columns, size, kind = kept // 16, KEPT_COLUMNS // 8, BYTES[acc], TYPES[acc]
    pitch, swizzle = KEPT_COLUMNS * size, make_swizzle(acc)

    def generate(builder, acc, base, twist):
        for row, at, which in _runs(rows, columns, size, turned_a, turned_b):
            where = builder.add(base, builder.xor(twist, ir.Constant(LLVM[I32], at)))
            values = [builder.extract_value(acc, x) for x in which]
            names = ", ".join(f"${x + 1}" for x in range(len(values)))
            text = f"st.shared.v{len(values)}.b{8 * size} [$0+{row * pitch}], {{{names}}};"
            assembly(builder, text, [where, *values])

    put = emitted(generate, types.void, types.UniTuple(kind, rows * columns * 4), I32, I32)

    @synchronising
    def stage(sums, piece, lane):
        row, quad = int32(lane >> 2), int32(lane & 3)
        if turned_a:
            row = int32(row * 2)
        start, twist = int32(piece + row * pitch), int32(swizzle(row) * CHUNK)
        if turned_b:
            put(sums, start, int32(twist ^ (quad * 4 * size)))
        else:
            put(sums, int32(start + quad * 2 * size), twist)

    return stage


# The Hopper kernel: a warpgroup holds 64 columns of C x n rows, each thread two neighbouring rows of one
# column per register pair. Three ways out:
#
# * `sent`: nothing but one rounding to a 16-bit type, in lines that the copy engine (TMA) stores; see `make_late`;
# * `fast`: the same for any lines of 16 bytes; `stmatrix` transposes into rows of 128 bytes, ROWS_16 at a time, and
#   each thread moves 16 bytes;
# * `general`: float32 rows of 256 bytes, ROWS_32 at a time, which `flush` brings to memory.

WARPGROUP = 128
ROWS_16, ROWS_32, LATE_ROWS = 64, 32, 64
PASS_ROWS = 16
"""Rows of 128 bytes that the 128 threads of a warpgroup move at once."""


def _by_round(n, rows, emit):
    """The body of stage(acc, round, ...): the stores of one round of `rows` rows, chosen by a switch.

    A tuple cannot be indexed by a run-time number, so each round has its own straight code.
    """

    def generate(builder, acc, which, *addresses):
        done = builder.append_basic_block("staged")
        switch = builder.switch(which, done)
        for number in range(-(-n // rows)):
            block = builder.append_basic_block(f"round{number}")
            switch.add_case(ir.Constant(LLVM[I32], number), block)
            with builder.goto_block(block):
                emit(builder, acc, addresses, range(number * rows, min(n, number * rows + rows)))
                builder.branch(done)
        builder.position_at_end(done)

    return generate


def _pack_and_store(builder, acc, first, kind, address, at=0, transposed=""):
    """Packs eight sums from `first` on to 16 bits, and stores a warp's as four matrices of 8 x 8."""
    text = (
        f"{{ .reg .b32 a, b, c, d; cvt.rn.{kind}x2.f32 a, $2, $1; cvt.rn.{kind}x2.f32 b, $4, $3; "
        f"cvt.rn.{kind}x2.f32 c, $6, $5; cvt.rn.{kind}x2.f32 d, $8, $7; "
        f"stmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 [$0+{at}], {{a, b, c, d}}; }}"
    )
    assembly(builder, text, [address, *(builder.extract_value(acc, first + i) for i in range(8))])


@cache
def make_late(n_max, kind):
    """(nothing, pack, put, drop) for results that wait in registers, packed, while the next tile is multiplied.

    nothing() -> no results; pack(n)(acc) -> the 64 x n sums of a warpgroup as words of two neighbouring rows, those of
    64 rows after each other; put(words, lane's address) transposes the first 64 rows into rows of 128 bytes in shared
    memory; drop(words) -> the words without those, so that the next 64 rows come first.
    """
    fragment, each = ptx.words(n_max // 4), LATE_ROWS // 4

    def pack(n):
        def generate(builder, acc):
            values = []
            for i in range(n // 4):
                pair = [builder.extract_value(acc, 2 * i + x) for x in range(2)]
                values += assembly(builder, f"cvt.rn.{kind}x2.f32 $0, $2, $1;", pair, [LLVM[I32]], effects=False)
            return ptx.replaced(builder, ptx.undefined(fragment), values)

        return emitted(generate, fragment, floats(n_max // 2))

    def put(builder, words, address):
        for i in range(0, each, 4):
            text = f"stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [$0+{i // 4 * 2048}], {{$1, $2, $3, $4}};"
            assembly(builder, text, [address, *(builder.extract_value(words, i + x) for x in range(4))])

    def drop(builder, words):
        left = [builder.extract_value(words, i) for i in range(each, n_max // 4)]
        return ptx.replaced(builder, ptx.undefined(fragment), left)

    nothing = emitted(lambda builder: ptx.undefined(fragment), fragment)
    return nothing, pack, emitted(put, types.void, fragment, I32), emitted(drop, fragment, fragment)


@cache
def make_stage_16(n, kind):
    """stage(acc, round, this lane's address): packs, transposes and stores one round of rows."""

    def emit(builder, acc, addresses, rows):
        for row in rows[::16]:
            _pack_and_store(builder, acc, row // 2, kind, addresses[0], (row - rows[0]) * 128, ".trans")

    return emitted(_by_round(n, ROWS_16, emit), types.void, floats(n // 2), I32, I32)


@cache
def make_stage_32(n):
    """stage(acc, round, address of this lane's column, address of its column + 8)."""

    def emit(builder, acc, addresses, rows):
        for row in rows[::8]:
            for i in range(4):
                value = builder.extract_value(acc, row // 2 + i)
                where = (row - rows[0] + i % 2) * 256
                assembly(builder, f"st.shared.f32 [$0+{where}], $1;", [addresses[i // 2], value])

    return emitted(_by_round(n, ROWS_32, emit), types.void, floats(n // 2), I32, I32, I32)


@synchronising
def lane_address_16(staging, thread):
    """Where this lane's row of each stmatrix lies: rows 0-7 or 8-15, columns of its warp."""
    lane, warp = thread % 32, thread // 32
    row, chunk = (lane // 16) * 8 + lane % 8, warp * 2 + (lane // 8) % 2
    return staging + row * 128 + (chunk ^ (row % 8)) * 16


@synchronising
def lane_address_32(staging, thread, upper):
    """Where this lane's first register goes: row 2 * (lane % 4), column lane / 4 (+ 8) of its warp."""
    lane, warp = thread % 32, thread // 32
    column = warp * 16 + lane // 4 + upper * 8
    return staging + (lane % 4) * 512 + ((column // 4) ^ ((lane % 4) * 2)) * 16 + (column % 4) * 4


@cache
def make_flush_16():
    """flush(staging, address of the first row, bytes per row, rows, columns left, thread): 16 bytes per thread."""
    load, store = ptx.load_shared_u32x4, ptx.store_global_u32x4
    down = PASS_ROWS * 128

    @synchronising
    def four_passes(at, step, source):
        """Four rows of this thread: all loads first, so that they wait together."""
        v0, v1, v2, v3 = load(source), load(source + down), load(source + 2 * down), load(source + 3 * down)
        store(at, v0)
        store(at + step, v1)
        store(at + 2 * step, v2)
        store(at + 3 * step, v3)

    @synchronising
    def flush(staging, target, pitch, rows, columns, thread):
        chunk, row = int32(thread & 7), int32(thread >> 3)
        source = int32(staging + row * 128 + (chunk ^ (row & 7)) * 16)
        at, step = target + row * pitch + chunk * 16, PASS_ROWS * pitch
        left = int32((rows - row + int32(PASS_ROWS - 1)) // int32(PASS_ROWS))
        if chunk * 8 + 8 <= columns:
            while left >= 4:
                four_passes(at, step, source)
                left, source = int32(left - 4), int32(source + 4 * down)
                at += 4 * step
            while left > 0:
                store(at, load(source))
                left, source = int32(left - 1), int32(source + down)
                at += step
        else:
            while left > 0:
                for i in range(min(columns - chunk * 8, 8)):
                    ptx.store_global_u16(at + i * 2, ptx.load_shared_u16(source + i * 2))
                left, source = int32(left - 1), int32(source + down)
                at += step

    return flush


# The same for sums whose rows are on the first side of wgmma, in rounds of 64 rows x 64 columns, two of which lie side
# by side where there are several. Each warp has 16 of the rows, each thread neighbouring columns of two rows.

STRIP = 64
STAGING = 16384
"""Bytes of one warpgroup's staging."""
HALF_STAGING = STAGING // 2
"""Bytes of a round in 16 bits: two that lie side by side leave together."""
ROUND_REGISTERS = STRIP * KEPT_COLUMNS // WARPGROUP


@cache
def make_strip_stage_16(rounds, kind):
    """stage(acc, round, address of this lane's row, its twist): packs and stores rows of 128 bytes."""

    def emit(builder, acc, addresses, rows):
        base, twist = addresses
        for i in range(0, ROUND_REGISTERS, 8):
            where = builder.add(base, builder.xor(twist, ir.Constant(LLVM[I32], i // 4 * CHUNK)))
            _pack_and_store(builder, acc, rows[0] // 2 + i, kind, where)

    return emitted(_by_round(rounds * STRIP, STRIP, emit), types.void, floats(rounds * ROUND_REGISTERS), I32, I32, I32)


@cache
def make_strip_stage_32(rounds):
    """stage(acc, round, address of this lane's row, its twist): stores float32 rows of 256 bytes."""

    def emit(builder, acc, addresses, rows):
        base, twist = addresses
        for i in range(0, ROUND_REGISTERS, 2):
            where = builder.add(base, builder.xor(twist, ir.Constant(LLVM[I32], i // 4 * 2 * CHUNK)))
            pair = [builder.extract_value(acc, rows[0] // 2 + i + x) for x in range(2)]
            assembly(builder, f"st.shared.v2.f32 [$0+{i % 4 // 2 * 2048}], {{$1, $2}};", [where, *pair])

    return emitted(_by_round(rounds * STRIP, STRIP, emit), types.void, floats(rounds * ROUND_REGISTERS), I32, I32, I32)


@synchronising
def strip_address_16(staging, thread):
    """(address of the row that this lane names to stmatrix, twist): rows 0-7 or 8-15 of its warp, of two chunks."""
    lane, row = thread % 32, thread // 32 * 16 + thread % 16
    return int32(staging + row * 128), int32(((lane // 16) ^ (row % 8)) * CHUNK)


@synchronising
def strip_address_32(staging, thread):
    """(address of this lane's upper row and first column but for its chunk, twist)."""
    lane = thread % 32
    row = thread // 32 * 16 + lane // 4
    chunk = ((row // 2) % 4) * 2 ^ (lane % 4 // 2)
    return int32(staging + row * 256 + (lane % 2) * 8), int32(chunk * CHUNK)


@cache
def make_strip_write(rounds, kind, read_part, target, others):
    """write(acc, p, record, staging, alpha, beta): one warpgroup's part of a tile, as `read_part(record)` tells.

    `kind` is the 16-bit type of results that only need rounding, `staging` that of the first warpgroup. Each round
    works out anew where its results go, since registers that held it would be needed for sums.
    """
    stage_16, stage_32 = make_strip_stage_16(rounds, kind), make_strip_stage_32(rounds)
    flush_16, flush_32, fast_kind = make_flush_16(), make_flush("f32", WARPGROUP), KIND[kind]

    @synchronising
    def write(acc, p, record, staging, alpha, beta):
        for number in range(rounds):
            g, start, i, j, rows, columns = read_part(record)
            row, column = int32((number >> 1) * STRIP), int32((number & 1) * KEPT_COLUMNS)
            beside = min(int32(columns - KEPT_COLUMNS), int32(KEPT_COLUMNS))
            rows, columns = min(int32(rows - row), int32(STRIP)), min(int32(columns - column), int32(KEPT_COLUMNS))
            if rows > 0 and columns > 0:
                thread = ptx.thread_again()
                barrier, thread = int32(thread // WARPGROUP), int32(thread % WARPGROUP)
                piece = int32(staging + (barrier - 1) * STAGING)
                out = target(p, g, start, i + row, j + column)
                out_at, out_row, out_col = out
                aligned = ((out_at | (out_row * 2)) & 15) == 0
                if p.plain != 0 and p.out_kind == fast_kind and out_col == 1 and aligned:
                    if column == 0:
                        lane_at, twist = strip_address_16(piece, thread)
                        stage_16(acc, int32(number), lane_at, twist)
                        if beside > 0:
                            stage_16(acc, int32(number + 1), int32(lane_at + HALF_STAGING), twist)
                        ptx.named_barrier(barrier, WARPGROUP)
                        flush_16(piece, out_at, out_row * 2, rows, columns, thread)
                        if beside > 0:
                            right = int32(piece + HALF_STAGING)
                            flush_16(right, out_at + KEPT_COLUMNS * 2, out_row * 2, rows, beside, thread)
                else:
                    lane_at, twist = strip_address_32(piece, thread)
                    stage_32(acc, int32(number), lane_at, twist)
                    ptx.named_barrier(barrier, WARPGROUP)
                    c, bias = others(p, g, start, i + row, j + column)
                    flush_32(piece, out, c, bias, style_of(p), alpha, beta, rows, columns, thread, 0)
                ptx.named_barrier(barrier, WARPGROUP)

    return write


@cache
def make_write(n, kind, others):
    """write(acc, ...): one warpgroup's part of a tile, by the way that fits; `kind` is the operands' type.

    `others` tells where C and bias lie, which only the general way has to know.
    """
    fast_kind = KIND[kind] if kind in ("f16", "bf16") else -1
    stage_16 = make_stage_16(n, kind if fast_kind > 0 else "f16")
    stage_32, flush_16, flush_32 = make_stage_32(n), make_flush_16(), make_flush("f32", WARPGROUP)

    @synchronising
    def write_fast(acc, staging, barrier, out, rows, columns, thread):
        out_at, out_row, _ = out
        lane_at = lane_address_16(staging, thread)
        for number in range((rows + int32(ROWS_16 - 1)) // int32(ROWS_16)):
            first = int32(number * ROWS_16)
            stage_16(acc, int32(number), lane_at)
            ptx.named_barrier(barrier, WARPGROUP)
            target = out_at + first * out_row * 2
            flush_16(staging, target, out_row * 2, min(rows - first, int32(ROWS_16)), columns, thread)
            ptx.named_barrier(barrier, WARPGROUP)

    @synchronising
    def write_any(acc, staging, barrier, p, tile, out, alpha, beta, rows, columns, thread):
        g, start, i0, j = tile
        out_at, out_row, out_col = out
        c, bias = others(p, g, start, i0, j)
        lower, upper = lane_address_32(staging, thread, 0), lane_address_32(staging, thread, 1)
        for number in range((rows + int32(ROWS_32 - 1)) // int32(ROWS_32)):
            first = int32(number * ROWS_32)
            stage_32(acc, int32(number), lower, upper)
            ptx.named_barrier(barrier, WARPGROUP)
            here, height = (out_at + first * out_row * p.out_size, out_row, out_col), min(rows - first, ROWS_32)
            flush_32(staging, here, c, bias, style_of(p), alpha, beta, height, columns, thread, first)
            ptx.named_barrier(barrier, WARPGROUP)

    @synchronising
    def write(acc, staging, barrier, p, tile, out, alpha, beta, rows, columns, thread):
        out_at, out_row, out_col = out
        fast = p.plain != 0 and p.out_kind == fast_kind and out_col == 1
        if fast and ((out_at | (out_row * 2)) & 15) == 0:
            write_fast(acc, staging, barrier, out, rows, columns, thread)
        else:
            write_any(acc, staging, barrier, p, tile, out, alpha, beta, rows, columns, thread)

    return write
