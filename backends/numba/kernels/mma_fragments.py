"""Operand tiles of the sm_80 kernel in shared memory: how they get in, and into registers.

Two layouts, both in 16-byte chunks that are swizzled by the row number:

* along:  one row per row of the operand's own dimension (m or n), 128 bytes of k in each;
* across: one row per k, the tile's `width` elements of the own dimension in each (`make_words` turns them).

Two ways in: `cp.async`, 16 bytes at a time, where the operand is aligned; or element by element, for
any strides and alignment, always into the layout "along".
"""

# mypy: ignore-errors
from __future__ import annotations

from functools import cache
from itertools import product

from llvmlite import ir
from numba.cuda import types

from multigemm.backends.numba.config import KEPT_COLUMNS, ROW_BYTES, SIZE
from multigemm.backends.numba.kernels import ptx
from multigemm.backends.numba.kernels.ptx import (
    F32,
    I32,
    I64,
    LLVM,
    assembly,
    elements,
    emitted,
    floats,
    instruction,
    registers,
    replaced,
    undefined,
)
from multigemm.backends.numba.kernels.runtime import synchronising

# float32 as IEEE arithmetic has it, in the frame of the mma.sync kernel: a warp's products on plain cores.
#
# Four lanes share the rows of a warp's part, eight its columns. From a tile that lies along k a lane reads
# four k of a row at once, and its rows are 4 (columns: 8) apart; from one that lies across, four neighbours
# of one k, and its rows are fours that lie 16 (columns: 32) apart.

DOWN, ACROSS, STEP = 4, 8, 4
"""Lanes along the rows and along the columns; k of a step."""
int32 = types.int32


@synchronising
def lane_row(lane):
    return (lane & 1) | ((lane >> 3) & 2)


@synchronising
def lane_column(lane):
    return (lane >> 1) & 7


def _make_loads(places):
    """loads(even, odd) -> four floats from each place (which of both addresses, bytes from there)."""
    result = floats(4 * len(places))

    def generate(builder, even, odd):
        out = undefined(result)
        for number, (which, offset) in enumerate(places):
            text = f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];"
            values = assembly(builder, text, [odd if which else even], [LLVM[F32]] * 4)
            out = replaced(builder, out, values, 4 * number)
        return out

    return emitted(generate, result, I32, I32)


@cache
def make_vectors(across, left, width, kept):
    """load(tile, step, first, lane) -> this lane's elements of 4 k: along, row by row; across, k by k."""
    lanes = DOWN if left else ACROSS
    count, pitch = kept // lanes, width * 4
    lane_of = lane_row if left else lane_column
    if across:
        loads = _make_loads([(0, k * pitch + i * lanes * 16) for k in range(STEP) for i in range(count // 4)])
    else:
        loads = _make_loads([(i % 2 if left else 0, i * lanes * ROW_BYTES) for i in range(count)])

    @synchronising
    def from_across(tile, step, first, lane):
        at = int32(tile + step * (STEP * pitch) + (first + lane_of(lane) * 4) * 4)
        return loads(at, at)

    @synchronising
    def from_along(tile, step, first, lane):
        row = int32(lane_of(lane))
        base = int32(tile + (first + row) * ROW_BYTES)
        return loads(int32(base + ((step ^ row) << 4)), int32(base + ((step ^ (row + 4)) << 4)))

    return from_across if across else from_along


def _element(across, count, i, k):
    return k * count + i if across else i * STEP + k


@cache
def make_fma_step(kept, a_across, b_across):
    """step(acc, a, b) -> acc: 4 k of a lane's rows and columns."""
    rows, columns = kept // DOWN, KEPT_COLUMNS // ACROSS

    def generate(builder, acc, a, b):
        sums = elements(builder, acc, rows * columns)
        for k, i, j in product(range(STEP), range(rows), range(columns)):
            x = builder.extract_value(a, _element(a_across, rows, i, k))
            y = builder.extract_value(b, _element(b_across, columns, j, k))
            sums[i * columns + j] = builder.fma(x, y, sums[i * columns + j])
        return replaced(builder, acc, sums)

    acc = floats(rows * columns)
    return emitted(generate, acc, acc, floats(rows * STEP), floats(columns * STEP))


@cache
def make_fma_stage(kept, a_across, b_across):
    """stage(acc, address of the warp's piece, lane): rows of 256 bytes, swizzled as `make_flush` reads them."""
    rows, columns = kept // DOWN, KEPT_COLUMNS // ACROSS
    width = 4 if b_across else 1
    names, vector = ("{$1, $2, $3, $4}", ".v4") if b_across else ("$1", "")

    def generate(builder, acc, base, twist):
        for i in range(rows):
            row = i // 4 * 16 + i % 4 if a_across else i * DOWN
            turn = (i % 4 // 2) * 32 if a_across else (i % 2) * 64
            for j in range(0, columns, width):
                values = [builder.extract_value(acc, i * columns + j + x) for x in range(width)]
                where = builder.add(base, builder.xor(twist, ir.Constant(LLVM[I32], (j * ACROSS * 4) ^ turn)))
                assembly(builder, f"st.shared{vector}.f32 [$0+{row * 256}], {names};", [where, *values])

    put = emitted(generate, types.void, floats(rows * columns), I32, I32)

    @synchronising
    def stage(acc, piece, lane):
        row, column = int32(lane_row(lane)), int32(lane_column(lane))
        turn = int32((row & 1) * 64) if a_across else int32((row >> 1) * 32)
        first = int32(row * 4) if a_across else row
        if b_across:
            put(acc, int32(piece + first * 256), int32(turn ^ (column * 16)))
        else:
            put(acc, int32(piece + first * 256 + column * 4), turn)

    return stage


# Registers of mma.sync that `ldmatrix` alone cannot fill: float64, and 4 or 1 bytes that lie across k.
#
# Lane l serves row (of A; column of B) l / 4 and k l % 4 of 8 x 4 elements. Bytes across k come by
# `ldmatrix.trans`, which turns pairs of them: one register then holds two k of two neighbouring rows, and
# two bytes of it belong elsewhere. So of 16 rows the even ones take the place of the first eight.

_ld4t = ptx.make_ldmatrix(4, True)
_even = instruction("prmt.b32 $0, $1, $2, 0x6420;", I32, I32, I32, effects=False)
_odd = instruction("prmt.b32 $0, $1, $2, 0x7531;", I32, I32, I32, effects=False)


def make_twist(kind, across, width):
    """twist(row) -> what the number of a 16-byte chunk in this row is xor-ed with.

    What a warp reads at once then lies in different banks: 8 rows of a chunk each, 4 rows of two
    chunks (float64; tf32 across), or the 8 rows that `bytes_across` names.
    """

    @synchronising
    def by_eight(row):
        return row & 7

    @synchronising
    def by_four(row):
        return (row & 3) << 1

    @synchronising
    def by_pairs(row):
        return (row & 1) | (((row >> 2) & 3) << 1)

    @synchronising
    def by_quads(row):
        return (row >> 2) & 3

    @synchronising
    def none(row):
        return int32(0)

    if kind == "f32" and across:
        return none
    if kind == "f64" or (kind == "tf32" and across):
        return by_four
    if kind == "i8" and across:
        return by_pairs if width == 128 else by_quads
    return by_eight


@cache
def make_words(kind, across, left, width):
    """load(tile, step, first, lane) -> registers of 16 rows x 32 bytes of k; as `make_fragments`."""
    twist = make_twist(kind, across, width)

    @synchronising
    def double(tile, step, own, lane):
        deep = int32(step * 4 + (lane & 3))
        if across:
            return ptx.load_shared_f64(tile + deep * (width * 8) + (((own >> 1) ^ twist(deep)) << 4) + (own & 1) * 8)
        return ptx.load_shared_f64(tile + own * ROW_BYTES + (((deep >> 1) ^ twist(own)) << 4) + (deep & 1) * 8)

    @synchronising
    def doubles(tile, step, first, lane):
        own = int32(first + (lane >> 2))
        return double(tile, step, own, lane), double(tile, step, int32(own + 8), lane)

    @synchronising
    def single(tile, deep, own):
        return ptx.load_shared_u32(tile + deep * (width * 4) + (((own >> 2) ^ twist(deep)) << 4) + (own & 3) * 4)

    @synchronising
    def singles_across(tile, step, first, lane):
        own, deep = int32(first + (lane >> 2)), int32(step * 8 + (lane & 3))
        corner, other = single(tile, deep, own), single(tile, int32(deep + 4), int32(own + 8))
        beside, below = single(tile, deep, int32(own + 8)), single(tile, int32(deep + 4), own)
        if left:
            return corner, beside, below, other
        return corner, below, beside, other

    @synchronising
    def bytes_across(tile, step, first, lane):
        inner = lane & 7
        deep = int32(step * 32 + (lane >> 4) * 16 + (inner >> 1) * 4 + ((lane >> 3) & 1) * 2 + (inner & 1))
        w = _ld4t(tile + deep * width + (((first >> 4) ^ twist(deep)) << 4))
        low, high = _even(w[0], w[1]), _even(w[2], w[3])
        odd_low, odd_high = _odd(w[0], w[1]), _odd(w[2], w[3])
        if left:
            return low, odd_low, high, odd_high
        return low, high, odd_low, odd_high

    return {"f64": doubles, "tf32": singles_across, "i8": bytes_across}[kind]


# Tiles into shared memory, and from there into the registers of mma.sync.

_ld4 = ptx.make_ldmatrix(4)
_load_u16 = instruction("ld.global.u16 $0, [$1];", types.int16, types.int64)
_load_u8 = instruction("ld.global.u8 $0, [$1];", types.int16, types.int64)


@cache
def make_copy_along(size, width, threads, twist):
    """copy(stage, base, outer stride, k stride, outer, depth, k0, thread): rows of 128 bytes of k, asynchronously."""
    per_chunk, pass_rows = 16 // size, threads // 8
    passes = width // pass_rows

    @synchronising
    def copy(stage, base, outer_stride, k_stride, outer, depth, k0, thread):
        chunk, row = thread & 7, thread >> 3
        k = k0 + chunk * per_chunk
        left = int32(min(max(depth - k, 0), per_chunk) * size)
        source, pitch = base + (row * outer_stride + k) * size, pass_rows * size * outer_stride
        target, rows = int32(stage + row * ROW_BYTES + (chunk ^ twist(row)) * 16), int32(outer - row)
        for _ in range(passes):
            # Nothing is read where the count is 0, so the address may lie anywhere.
            ptx.cp_async_16(target, source, left if rows > 0 else int32(0))
            target, rows = int32(target + pass_rows * ROW_BYTES), int32(rows - pass_rows)
            source += pitch

    return copy


@cache
def make_copy_across(size, width, threads, twist):
    """The same for an operand whose own dimension is contiguous: one row per k."""
    per_chunk, chunks, depth_rows = 16 // size, width * size // 16, ROW_BYTES // size
    pass_rows = threads // chunks
    passes = depth_rows // pass_rows
    steady = pass_rows % 4 == 0

    @synchronising
    def copy(stage, base, outer_stride, k_stride, outer, depth, k0, thread):
        chunk, row = thread % int32(chunks), thread // int32(chunks)
        left = int32(min(max(outer - chunk * per_chunk, 0), per_chunk) * size)
        source, pitch = base + ((k0 + row) * k_stride + chunk * per_chunk) * size, pass_rows * size * k_stride
        target = int32(stage + row * (width * size) + (chunk ^ twist(row)) * 16)
        rows = int32(min(depth - k0, depth_rows) - row)
        for _ in range(passes):
            ptx.cp_async_16(target, source, left if rows > 0 else int32(0))
            target, rows = int32(target + pass_rows * width * size), int32(rows - pass_rows)
            if not steady:
                row = int32(row + pass_rows)
                target = int32(stage + row * (width * size) + (chunk ^ twist(row)) * 16)
            source += pitch

    return copy


@cache
def make_gather(size, width, threads, across, twist):
    """The same element by element; neighbouring threads go along the direction that is likely contiguous."""
    depth_rows = ROW_BYTES // size

    @synchronising
    def copy(stage, base, outer_stride, k_stride, outer, depth, k0, thread):
        for index in range(thread, width * depth_rows, threads):
            row, k = index // depth_rows, index % depth_rows
            if across:
                row, k = index % width, index // width
            byte = k * size
            where = int32(stage + row * ROW_BYTES + ((byte // 16) ^ twist(row)) * 16 + byte % 16)
            inside = row < outer and k0 + k < depth
            source = base + (row * outer_stride + (k0 + k) * k_stride) * size
            if size == 1:
                small = types.int16(0)
                if inside:
                    small = _load_u8(source)
                ptx.store_shared_u8(where, small)
            elif size == 2:
                half = types.int16(0)
                if inside:
                    half = _load_u16(source)
                ptx.store_shared_u16(where, half)
            elif size == 4:
                ptx.cp_async_4(where, source, int32(4) if inside else int32(0))
            else:
                ptx.cp_async_8(where, source, int32(8) if inside else int32(0))

    return copy


def make_copy(kind, width, threads, across, aligned):
    """The way in for one operand, and whether its tile lies across."""
    size, lies_across = SIZE[kind], across and aligned
    twist = make_twist(kind, lies_across, width)
    if not aligned:
        return make_gather(size, width, threads, across, twist), False
    return (make_copy_across if across else make_copy_along)(size, width, threads, twist), across


@cache
def make_fragments(kind, across, left, width, rows):
    """load(tile, step, first, lane) -> a warp's words: `rows` (16, 32, 64) of the own dimension x 32 bytes of k.

    `left` is A, whose four matrices go m before k; B's go k before n. Plain cores take 16 bytes of k, see `fma`.
    """
    if kind == "f32":
        return make_vectors(across, left, width, rows)
    pitch = width * 2

    @synchronising
    def matrices(tile, step, first, lane):
        """The words of 16 rows."""
        inner, low, high = lane & 7, (lane >> 3) & 1, lane >> 4
        own, k = (low, high) if left else (high, low)
        if across:
            chunk = (first >> 3) + own
            return _ld4t(tile + (step * 16 + k * 8 + inner) * pitch + ((chunk ^ inner) << 4))
        return _ld4(tile + (first + own * 8 + inner) * ROW_BYTES + (((2 * step + k) ^ inner) << 4))

    sixteen = make_words(kind, across, left, width) if kind == "f64" or (across and SIZE[kind] != 2) else matrices

    @synchronising
    def thirty_two(tile, step, first, lane):
        return sixteen(tile, step, first, lane) + sixteen(tile, step, first + 16, lane)

    @synchronising
    def sixty_four(tile, step, first, lane):
        return thirty_two(tile, step, first, lane) + thirty_two(tile, step, first + 32, lane)

    return {16: sixteen, 32: thirty_two, 64: sixty_four}[rows]


@cache
def make_warp_step(kind, kept):
    """step(acc, a, b) -> acc: a warp's kept x 64 products over 32 bytes of k, all its mma in a row."""
    rows, columns = kept // 16, KEPT_COLUMNS // 8
    shape, high, low = ptx.MMA[kind]
    text = (
        f"mma.sync.aligned.{shape} {{{registers(0, 4)}}}, {{{registers(4, high)}}}, {{{registers(4 + high, low)}}}, "
        f"{{{registers(4 + high + low, 4)}}};"
    )
    total, part = ptx.SUMS[kind], types.float64 if kind == "f64" else I32

    def generate(builder, acc, a, b):
        a, b = elements(builder, a, rows * high), elements(builder, b, columns * low)
        for i, j in product(range(rows), range(columns)):
            first = (i * columns + j) * 4
            sums = [builder.extract_value(acc, first + x) for x in range(4)]
            values = [*a[high * i : high * i + high], *b[low * j : low * j + low], *sums]
            acc = replaced(builder, acc, assembly(builder, text, values, [LLVM[total]] * 4, effects=False), first)
        return acc

    acc = types.UniTuple(total, rows * columns * 4)
    return emitted(generate, acc, acc, types.UniTuple(part, rows * high), types.UniTuple(part, columns * low))


@cache
def make_warp_store(kind, kept):
    """store(acc, address, bytes per 8 rows, rows, columns): rounds and stores from the registers, a pair at a time.

    For tiles so small that the way through shared memory takes longer than narrow stores do. All but
    the sums are this lane's: where its first pair goes, and how many rows and columns are left from there.
    """
    rows, columns = kept // 16, KEPT_COLUMNS // 8
    text = (
        "{{ .reg .pred p; .reg .b32 v; setp.gt.s32 p, $1, {row}; setp.gt.and.s32 p, $2, {column}, p; "
        "cvt.rn.{kind}x2.f32 v, $4, $3; @p st.global.b32 [$0+{at}], v; }}"
    )

    def generate(builder, acc, address, pitch, down, right):
        for half, j in product(range(rows * 2), range(columns)):
            if half > 0 and j == 0:
                address = builder.add(address, pitch)
            first = ((half // 2) * columns + j) * 4 + (half % 2) * 2
            pair = [builder.extract_value(acc, first + x) for x in range(2)]
            line = text.format(row=half * 8, column=j * 8, kind=kind, at=j * 16)
            assembly(builder, line, [address, down, right, *pair])

    return emitted(generate, types.void, floats(rows * columns * 4), I64, I64, I32, I32)
