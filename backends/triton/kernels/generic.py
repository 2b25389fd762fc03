# mypy: ignore-errors
"""The pointer kernel: right for every form, stride, alignment, dtype and size.

It masks both operands along K, so that what lies beyond a group never meets an accumulator, and it
addresses with 64 bits across tiles (and inside a tile where the operand is `WIDE`). Operand order,
divisibility and the epilogue are compile-time classes; sizes, strides and counts are not.

Of fused problems, an index that means no row becomes an address within the operand, which a mask keeps from being read:
the element is 0. A gate joins two columns of the products: g and u of a column have a sum each, or, where they lie side
by side, come apart after the products.

Beside it: copies of operands that no tensor map can express into aligned rows (odd leading dimensions, unaligned
bases, zero or non-unit strides). One pass over memory costs less than element-wise loads in every tile wherever an
operand is used by more than a few tiles.
"""

import triton
import triton.language as tl

from multigemm.backends.triton.kernels.epilogue import activate, finish, narrow, scalar_of
from multigemm.backends.triton.kernels.schedule import (
    COLUMNS,
    TABLE_K,
    TABLE_M,
    TABLE_N,
    all_tiles,
    group_of_tile,
    owned_range,
    place,
    range_of,
)

TABLE_STRIDES = tl.constexpr(8)
"""Of a, b, c and out, two columns each."""
TABLE_BIAS = tl.constexpr(4)
TABLE_BIAS_COL = tl.constexpr(16)
TABLE_TILE_M = tl.constexpr(17)
TABLE_TILE_N = tl.constexpr(18)
"""Only where a row stands for a tile (lists.py)."""
TABLE_PREACT = tl.constexpr(17)
TABLE_PREACT_ROW = tl.constexpr(18)
"""Of `preact_out`, where a row stands for a group."""


@triton.jit
def offsets(i, row, j, col, ORDER: tl.constexpr, WIDE: tl.constexpr):
    """i * row + j * col inside a tile, where the unit stride is a constant the compiler can vectorise."""
    if not WIDE:
        row = row.to(tl.int32)
        col = col.to(tl.int32)
    if ORDER == "row":
        return i[:, None] * row + j[None, :]
    elif ORDER == "col":
        return i[:, None] + j[None, :] * col
    else:
        return i[:, None] * row + j[None, :] * col


@triton.jit
def corner(base, i, row, j, col, ORDER: tl.constexpr):
    """base + i * row + j * col in 64 bits, for the first element of a tile."""
    if ORDER == "row":
        return base + (i.to(tl.int64) * row + j)
    elif ORDER == "col":
        return base + (i + j.to(tl.int64) * col)
    else:
        return base + (i.to(tl.int64) * row + j.to(tl.int64) * col)


@triton.jit
def operand(table, g, like, POINTER: tl.constexpr, STRIDE: tl.constexpr, BYTES: tl.constexpr):
    """Pointer and strides of one matrix of a list; BYTES is the alignment that all of them share."""
    SIZE: tl.constexpr = like.dtype.element_ty.primitive_bitwidth // 8
    row_of = table + g.to(tl.int64) * COLUMNS
    address = tl.load(row_of + POINTER)
    row = tl.load(row_of + STRIDE)
    col = tl.load(row_of + STRIDE + 1)
    base = address.to(tl.pointer_type(like.dtype.element_ty))
    if BYTES > SIZE:
        # hints stick to the operation they are given to, so they stand here, not in a helper
        base = tl.multiple_of(base, BYTES)
        row = tl.multiple_of(row, BYTES // SIZE)
        col = tl.multiple_of(col, BYTES // SIZE)
    return base, row, col


@triton.jit
def matrix(table, g, like, group, row, col, FORM: tl.constexpr, NAME: tl.constexpr, BYTES: tl.constexpr):
    """Pointer and strides of a group's "a", "b", "c" or "out": from the table of a list, else from what `like` points
    to."""
    if FORM == "per_group":
        POINTER: tl.constexpr = 0 if NAME == "a" else 1 if NAME == "b" else 2 if NAME == "c" else 3
        base, row, col = operand(table, g, like, POINTER, TABLE_STRIDES + 2 * POINTER, BYTES)
    else:
        base = like + g.to(tl.int64) * group
    return base, row, col


@triton.jit
def extents_of(g, m, n, k, ends, table, head, FORM: tl.constexpr, ALPHA: tl.constexpr, MULTIPLE: tl.constexpr,
               A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, OUT_ORDER: tl.constexpr, SIZES: tl.constexpr,
               CHUNK: tl.constexpr):  # fmt: skip
    """The group's extents (m, n, k), and where it starts along the jagged direction.

    MULTIPLE: of a list's extents that run along memory (`extents_multiple` in lists.py); masks then keep loads whole.
    """
    gm, gn, gk = m, n, k
    start = g * 0
    if FORM == "per_group":
        row_of = table + g.to(tl.int64) * COLUMNS
        gm = tl.load(row_of + TABLE_M).to(tl.int32)
        gn = tl.load(row_of + TABLE_N).to(tl.int32)
        gk = tl.load(row_of + TABLE_K).to(tl.int32)
        if MULTIPLE > 1:
            if A_ORDER == "col" or OUT_ORDER == "col":
                gm = tl.multiple_of(gm, MULTIPLE)
            if B_ORDER == "row" or OUT_ORDER == "row":
                gn = tl.multiple_of(gn, MULTIPLE)
            if A_ORDER == "row" or B_ORDER == "col":
                gk = tl.multiple_of(gk, MULTIPLE)
    elif FORM == "masked":
        gm = tl.minimum(tl.maximum(tl.load(ends + g).to(tl.int64), 0), m).to(tl.int32)
    elif FORM == "jagged_m":
        start, end = range_of(ends, g, head, m, SIZES, CHUNK)
        gm = end - start
    elif FORM == "jagged_n":
        start, end = range_of(ends, g, head, n, SIZES, CHUNK)
        gn = end - start
    elif FORM == "jagged_k":
        start, end = range_of(ends, g, head, k, SIZES, CHUNK)
        gk = end - start
    if ALPHA == "zero":
        gk = gk * 0
    return gm, gn, gk, start


@triton.jit
def addends(table, g, c, c_group, c_row, c_col, bias, bias_group, bias_col, unread, row, column, i, j,
            FORM: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr):  # fmt: skip
    """Pointers to the tile's elements of C and to those of its bias, a row; `unread` for what is absent."""
    c_ptrs = unread
    bias_ptrs = unread
    if HAS_C:
        c_base, c_r, c_c = matrix(table, g, c, c_group, c_row, c_col, FORM, "c", 1)
        c_ptrs = corner(c_base, row, c_r, column, c_c, "strided") + offsets(i, c_r, j, c_c, "strided", True)
    if HAS_BIAS:
        bias_base, bias_c = bias_of(table, g, bias, bias_group, bias_col, FORM)
        bias_ptrs = bias_base + (column + j).to(tl.int64)[None, :] * bias_c
    return c_ptrs, bias_ptrs


@triton.jit
def bias_of(table, g, bias, group, col, FORM: tl.constexpr):
    """Pointer and stride of a group's bias."""
    if FORM == "per_group":
        row_of = table + g.to(tl.int64) * COLUMNS
        base = tl.load(row_of + TABLE_BIAS).to(tl.pointer_type(bias.dtype.element_ty))
        col = tl.load(row_of + TABLE_BIAS_COL)
    else:
        base = bias + g.to(tl.int64) * group
    return base, col


@triton.jit
def store_tile(result, owned, out, out_r, out_c, row, column, i, j, rows_left, cols_left, m, row0, FORM: tl.constexpr,
               OUT_ORDER: tl.constexpr, WIDE: tl.constexpr, ZERO: tl.constexpr, WHOLE: tl.constexpr):  # fmt: skip
    """Writes what is `owned` by the group; with ZERO, zeros in the rows that a mask leaves out; of WHOLE tiles all."""
    out_ptrs = corner(out, row, out_r, column, out_c, OUT_ORDER) + offsets(i, out_r, j, out_c, OUT_ORDER, WIDE)
    if FORM == "masked" and ZERO:
        result = tl.where((i < rows_left)[:, None], result, 0).to(out.dtype.element_ty)
        owned = (i < m - row0)[:, None] & (j < cols_left)[None, :]
    if WHOLE:
        tl.store(out_ptrs, result)
    else:
        tl.store(out_ptrs, result, mask=owned)


@triton.jit
def write_zeros(out, row, col, rows, columns, first_row, first_column, BM: tl.constexpr, BN: tl.constexpr):
    """Zeros in out[first_row:rows, first_column:columns], shared out among the programs."""
    across = (columns - first_column + BN - 1) // BN
    down = (rows - first_row + BM - 1) // BM
    for tile in range(tl.program_id(0), down * across, tl.num_programs(0)):
        i = first_row + tile // across * BM + tl.arange(0, BM)
        j = first_column + tile % across * BN + tl.arange(0, BN)
        ptrs = out + i[:, None].to(tl.int64) * row + j[None, :].to(tl.int64) * col
        tl.store(ptrs, tl.zeros((BM, BN), out.dtype.element_ty), mask=(i < rows)[:, None] & (j < columns)[None, :])


@triton.jit
def write_outside(out, ends, m, n, groups, head, out_row, out_col, FORM: tl.constexpr, BM: tl.constexpr,
                  BN: tl.constexpr, SIZES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Zeros before the first group and behind the last one."""
    low, high = owned_range(ends, groups, head, m if FORM == "jagged_m" else n, SIZES, CHUNK)
    if FORM == "jagged_m":
        write_zeros(out, out_row, out_col, low, n, 0, 0, BM, BN)
        write_zeros(out, out_row, out_col, m, n, high, 0, BM, BN)
    else:
        write_zeros(out, out_row, out_col, m, low, 0, 0, BM, BN)
        write_zeros(out, out_row, out_col, m, n, 0, high, BM, BN)


@triton.jit
def dot(x, y, acc, PRECISION: tl.constexpr, ACC: tl.constexpr, INTERPRETED: tl.constexpr):
    """acc + x @ y; in float32 for the interpreter, which multiplies no bfloat16."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=ACC)


@triton.jit
def gathered(acc, partials, arrived, slot, part, SPLITS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr):
    """The sum of a tile's parts for the program that finishes last (else anything), and whether this is that program.

    The parts are added in their own order: the same call gives the same bits. The last one clears the count.
    """
    place = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    base = partials + slot.to(tl.int64) * (SPLITS * BM * BN)
    tl.store(base + part * (BM * BN) + place, acc)
    # all threads' parts before the count, which one thread does for all
    tl.debug_barrier()
    last = tl.atomic_add(arrived + slot, 1, sem="acq_rel") == SPLITS - 1
    if last:
        acc = tl.zeros((BM, BN), acc.dtype)
        for other in range(SPLITS):
            acc += tl.load(base + other * (BM * BN) + place, cache_modifier=".cg")
        tl.store(arrived + slot, 0)
    return acc, last


@triton.jit
def picked(rows, at, there, extent, WIDE: tl.constexpr):
    """The numbers of rows at these places, and which of them are rows; the number 0 stands for those that are not."""
    number = tl.load(rows + at, mask=there, other=-1).to(tl.int64)
    there = (number >= 0) & (number < extent)
    number = tl.where(there, number, 0)
    if not WIDE:
        number = number.to(tl.int32)
    return number, there


@triton.jit
def gated(g, u, alpha_bits, beta_bits, limit_bits, KIND: tl.constexpr, HAS_ALPHA: tl.constexpr,
          HAS_BETA: tl.constexpr, HAS_LIMIT: tl.constexpr):  # fmt: skip
    """act(min(g, limit)) * (clamp(u, -limit, limit) + beta); `where` rather than `minimum` keeps NaN."""
    if HAS_LIMIT:
        limit = scalar_of(limit_bits, g.dtype)
        g = tl.where(g > limit, limit, g)
        u = tl.where(u > limit, limit, u)
        u = tl.where(u < -limit, -limit, u)
    if HAS_BETA:
        u = u + scalar_of(beta_bits, u.dtype)
    if KIND == "glu":
        g = 1.0 / (1.0 + tl.exp(-g))
    elif KIND == "swiglu" and HAS_ALPHA:
        g = g / (1.0 + tl.exp(-scalar_of(alpha_bits, g.dtype) * g))
    elif KIND == "swiglu":
        g = activate(g, "silu")
    elif KIND == "geglu":
        g = activate(g, "gelu")
    elif KIND == "geglu_tanh":
        g = activate(g, "gelu_tanh")
    else:
        g = activate(g, "relu")
    return g * u


@triton.jit
def pointer_kernel(a, b, c, out, bias, ends, table, prefix, partials, arrived, preact, row_scale, a_rows, b_rows,
                   m, n, k, groups, head, places, a_extent, b_extent,
                   a_group, a_row, a_col, b_group, b_row, b_col, c_group, c_row, c_col,
                   out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
                   preact_group, preact_row, preact_col, scale_group, gate_alpha_bits, gate_beta_bits, limit_bits,
                   FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
                   STAGES: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, OUT_ORDER: tl.constexpr,
                   A_BYTES: tl.constexpr, B_BYTES: tl.constexpr, OUT_BYTES: tl.constexpr, WIDE: tl.constexpr,
                   EVEN_K: tl.constexpr, MULTIPLE: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr,
                   ALPHA: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
                   ZERO: tl.constexpr, SPLITS: tl.constexpr, CHUNK: tl.constexpr, SIZES: tl.constexpr,
                   GATE: tl.constexpr, GATE_ALPHA: tl.constexpr, GATE_BETA: tl.constexpr, LIMIT: tl.constexpr,
                   PREACT_OUT: tl.constexpr, PREACT_ORDER: tl.constexpr, PREACT_BYTES: tl.constexpr,
                   ROW_SCALE: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, EARLY: tl.constexpr,
                   INTERPRETED: tl.constexpr):  # fmt: skip
    """One persistent program: tiles program_id, + num_programs, ... of the concatenation of all groups.

    With CHUNK = 0 the table has a row per tile instead of a row per group, and `groups` counts those; with
    CHUNK < 0 each of these tiles is whole, in all three extents, and nothing is masked.
    With SIZES, `ends` are the sizes of up to CHUNK groups, which each program sums up.
    With SPLITS > 1 each tile is the work of that many programs, along K.
    Of fused problems m, n and k are the extents of the result and of the tokens; the row m of a table too. BN counts
    columns of the products, of which a gate joins two. GATE is its layout. What a problem lacks is no argument, and
    nothing is compiled for it.
    """
    if EARLY:
        # started before the launch ahead is over, and lets the next one start so
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALVES: tl.constexpr = GATE == "halves" or GATE == "halves_up_first"
    PAIRS: tl.constexpr = GATE == "interleaved"
    # columns of the result in a tile, and those that are loaded at once
    TILE: tl.constexpr = BN // 2 if HALVES or PAIRS else BN
    LOADED: tl.constexpr = BN // 2 if HALVES else BN
    EACH: tl.constexpr = 2 if PAIRS else 1
    FUSED: tl.constexpr = HALVES or PAIRS or PREACT_OUT or ROW_SCALE or A_ROWS or B_ROWS
    UNIFORM: tl.constexpr = FORM == "batched" or FORM == "jagged_k" or (FORM == "masked" and ZERO)
    A_BY_M: tl.constexpr = A_ROWS and FORM == "jagged_m"
    A_BY_K: tl.constexpr = A_ROWS and FORM == "jagged_k"
    B_BY_N: tl.constexpr = B_ROWS and FORM == "jagged_n"
    B_BY_K: tl.constexpr = B_ROWS and FORM == "jagged_k"
    total, found, stride = all_tiles(prefix, ends, table, m, n, groups, head, FORM, BM, TILE, UNIFORM, CHUNK, SIZES)
    if SPLITS > 1:
        # sizes that lie may claim more tiles than there are places for their parts
        total = tl.minimum(total, places)
    for work in range(tl.program_id(0), total * SPLITS, tl.num_programs(0)):
        tile = work // SPLITS
        g, first = group_of_tile(tile, found, stride, prefix, groups, UNIFORM, CHUNK)

        # 1. the group's extents, and where it starts along the jagged direction
        gm, gn, gk, start = extents_of(g, m, n, k, ends, table, head, FORM, ALPHA, MULTIPLE, A_ORDER, B_ORDER,
                                       OUT_ORDER, SIZES, CHUNK)  # fmt: skip
        covered_m = m if UNIFORM else gm
        if CHUNK <= 0:
            row_of = table + g.to(tl.int64) * COLUMNS
            tile_m = tl.load(row_of + TABLE_TILE_M).to(tl.int32)
            tile_n = tl.load(row_of + TABLE_TILE_N).to(tl.int32)
        else:
            tile_m, tile_n = place(tile - first, (covered_m + BM - 1) // BM, (gn + TILE - 1) // TILE, WIDTH)
        skip_m = start if FORM == "jagged_m" else 0
        skip_n = start if FORM == "jagged_n" else 0
        skip_k = start if FORM == "jagged_k" else 0

        # 2. where each operand's tile lies, in 64 bits; picked rows have places of their own
        wide_g = g.to(tl.int64)
        a_base, a_r, a_c = matrix(table, g, a, a_group, a_row, a_col, FORM, "a", A_BYTES)
        b_base, b_r, b_c = matrix(table, g, b, b_group, b_row, b_col, FORM, "b", B_BYTES)
        out_base, out_r, out_c = matrix(table, g, out, out_group, out_row, out_col, FORM, "out", OUT_BYTES)
        row0 = tile_m * BM
        col0 = tile_n * TILE
        none = row0 * 0
        i = tl.arange(0, BM)
        j = tl.arange(0, TILE)
        jj = tl.arange(0, LOADED)
        kk = tl.arange(0, BK)
        rows_left = gm - row0
        cols_left = gn - col0
        if FUSED:
            # once for a tile, where plain problems make these masks in the loop and behind it, as they were measured
            in_rows = i < rows_left
            in_cols = jj < EACH * cols_left
            a_there = in_rows
            b_there = in_cols
        if A_BY_M:
            a_number, a_there = picked(a_rows, skip_m + row0 + i, in_rows, a_extent, WIDE)
            a_ptrs = a_base + offsets(a_number, a_r, kk, a_c, A_ORDER, WIDE)
        elif A_BY_K:
            a_ptrs = corner(a_base, row0, a_r, none, a_c, A_ORDER)
            a_number, a_picked = picked(a_rows, skip_k + kk, kk < gk, a_extent, WIDE)
        else:
            a_ptrs = corner(a_base, skip_m + row0, a_r, skip_k + none, a_c, A_ORDER) + offsets(
                i, a_r, kk, a_c, A_ORDER, WIDE)  # fmt: skip
        if B_BY_N:
            b_number, b_there = picked(b_rows, skip_n + col0 + jj, in_cols, b_extent, WIDE)
            b_ptrs = b_base + offsets(kk, b_r, b_number, b_c, B_ORDER, WIDE)
        elif B_BY_K:
            b_ptrs = corner(b_base, none, b_r, col0, b_c, B_ORDER)
            b_number, b_picked = picked(b_rows, skip_k + kk, kk < gk, b_extent, WIDE)
        else:
            b_ptrs = corner(b_base, skip_k + none, b_r, skip_n + EACH * col0, b_c, B_ORDER) + offsets(
                kk, b_r, jj, b_c, B_ORDER, WIDE)  # fmt: skip
        a_step = BK if A_ORDER == "row" else BK * a_c
        b_step = BK if B_ORDER == "col" else BK * b_r
        if HALVES:
            second = gn.to(tl.int64) if B_ORDER == "row" else gn * b_c

        # 3. the products; both operands are zero where k, a row or a column lies outside the group or is absent
        acc = tl.zeros((BM, LOADED), ACC)
        if HALVES:
            other = tl.zeros((BM, LOADED), ACC)
        if CHUNK <= 0:
            # a listed tile has rows: a branch here would have it read the rest of its table row after the extents
            busy: tl.constexpr = True
        else:
            busy = rows_left > 0
        if busy:
            first_step = 0
            last_step = (gk + BK - 1) // BK
            if SPLITS > 1:
                each = (last_step + SPLITS - 1) // SPLITS
                first_step = tl.minimum(work % SPLITS * each, last_step)
                last_step = tl.minimum(first_step + each, last_step)
                a_ptrs += first_step.to(tl.int64) * a_step
                b_ptrs += first_step.to(tl.int64) * b_step
            for step in tl.range(first_step, last_step, num_stages=STAGES):
                k_left = gk - step * BK
                if A_BY_K:
                    x = tl.load(a_ptrs + offsets(i, a_r, a_number, a_c, A_ORDER, WIDE),
                                mask=in_rows[:, None] & a_picked[None, :], other=0)  # fmt: skip
                    # one step ahead, so that operands are asked for without a wait for their places
                    a_number, a_picked = picked(a_rows, skip_k + step * BK + BK + kk, kk < k_left - BK, a_extent, WIDE)
                elif CHUNK < 0:
                    x = tl.load(a_ptrs)
                elif EVEN_K:
                    x = tl.load(a_ptrs, mask=(a_there if FUSED else i < rows_left)[:, None], other=0)
                else:
                    in_a = (a_there if FUSED else i < rows_left)[:, None] & (kk < k_left)[None, :]
                    x = tl.load(a_ptrs, mask=in_a, other=0)
                if B_BY_K:
                    y = tl.load(b_ptrs + offsets(b_number, b_r, jj, b_c, B_ORDER, WIDE),
                                mask=b_picked[:, None] & in_cols[None, :], other=0)  # fmt: skip
                    b_number, b_picked = picked(b_rows, skip_k + step * BK + BK + kk, kk < k_left - BK, b_extent, WIDE)
                elif CHUNK < 0:
                    y = tl.load(b_ptrs)
                elif EVEN_K:
                    y = tl.load(b_ptrs, mask=(b_there if FUSED else j < cols_left)[None, :], other=0)
                else:
                    in_b = (kk < k_left)[:, None] & (b_there if FUSED else j < cols_left)[None, :]
                    y = tl.load(b_ptrs, mask=in_b, other=0)
                acc = dot(x, y, acc, PRECISION, ACC, INTERPRETED)
                if HALVES:
                    if EVEN_K:
                        in_b = b_there[None, :]
                    z = tl.load(b_ptrs + second, mask=in_b, other=0)
                    other = dot(x, z, other, PRECISION, ACC, INTERPRETED)
                if not A_BY_K:
                    a_ptrs += a_step
                if not B_BY_K:
                    b_ptrs += b_step

        # 4. the epilogue: alpha, C and bias; preact_out; activation or gate; row_scale
        if SPLITS > 1:
            acc, last = gathered(acc, partials, arrived, tile, work % SPLITS, SPLITS, BM, BN)
            # who is not the last stores nothing: a tile without columns
            cols_left = tl.where(last, cols_left, 0)
        if not FUSED:
            owned = (i < rows_left)[:, None] & (j < cols_left)[None, :]
            in_rows = i < rows_left
            in_cols = j < cols_left
        c_ptrs, bias_ptrs = addends(table, g, c, c_group, c_row, c_col, bias, bias_group, bias_col, out_base,
                                    skip_m + row0, skip_n + EACH * col0, i, jj, FORM, HAS_C, HAS_BIAS)  # fmt: skip
        acc = finish(acc, alpha_bits, beta_bits, c_ptrs, in_rows[:, None] & in_cols[None, :], bias_ptrs,
                     in_cols[None, :], ACC, ALPHA == "any", HAS_C, HAS_BIAS, None, INTERPRETED)  # fmt: skip
        if HALVES:
            if HAS_BIAS:
                bias_ptrs += gn * bias_of(table, g, bias, bias_group, bias_col, FORM)[1]
            other = finish(other, alpha_bits, beta_bits, out_base, in_rows[:, None], bias_ptrs, in_cols[None, :], ACC,
                           ALPHA == "any", False, HAS_BIAS, None, INTERPRETED)  # fmt: skip
        if PREACT_OUT:
            if FORM == "per_group":
                p_base, p_r, p_c = operand(table, g, preact, TABLE_PREACT, TABLE_PREACT_ROW, PREACT_BYTES)
            else:
                p_base, p_r, p_c = preact + wide_g * preact_group, preact_row, preact_col
            p_ptrs = corner(p_base, skip_m + row0, p_r, skip_n + EACH * col0, p_c, PREACT_ORDER) + offsets(
                i, p_r, jj, p_c, PREACT_ORDER, WIDE)  # fmt: skip
            in_preact = in_rows[:, None] & in_cols[None, :]
            tl.store(p_ptrs, narrow(acc, preact.dtype.element_ty, INTERPRETED), mask=in_preact)
            if HALVES:
                p_ptrs += gn.to(tl.int64) if PREACT_ORDER == "row" else gn * p_c
                tl.store(p_ptrs, narrow(other, preact.dtype.element_ty, INTERPRETED), mask=in_preact)
        if GATE == "halves":
            acc = gated(acc, other, gate_alpha_bits, gate_beta_bits, limit_bits, ACTIVATION, GATE_ALPHA, GATE_BETA,
                        LIMIT)  # fmt: skip
        elif GATE == "halves_up_first":
            acc = gated(other, acc, gate_alpha_bits, gate_beta_bits, limit_bits, ACTIVATION, GATE_ALPHA, GATE_BETA,
                        LIMIT)  # fmt: skip
        elif PAIRS:
            gate, up = tl.split(tl.reshape(acc, (BM, TILE, 2)))
            acc = gated(gate, up, gate_alpha_bits, gate_beta_bits, limit_bits, ACTIVATION, GATE_ALPHA, GATE_BETA,
                        LIMIT)  # fmt: skip
        else:
            acc = activate(acc, ACTIVATION)
        if ROW_SCALE:
            scale = tl.load(row_scale + wide_g * scale_group + skip_m + row0 + i, mask=in_rows, other=0)
            acc = acc * scale.to(ACC)[:, None]
        result = narrow(acc, out.dtype.element_ty, INTERPRETED)
        if FUSED:
            owned = in_rows[:, None] & (j < cols_left)[None, :]
        store_tile(result, owned, out_base, out_r, out_c, skip_m + row0, skip_n + col0, i, j, rows_left, cols_left, m,
                   row0, FORM, OUT_ORDER, WIDE, ZERO, CHUNK < 0)  # fmt: skip

    # 5. what no group owns, where the output is the library's own
    if ZERO and (FORM == "jagged_m" or FORM == "jagged_n"):
        write_outside(out, ends, m, n, groups, head, out_row, out_col, FORM, BM, TILE, SIZES, CHUNK)


@triton.jit
def pack_kernel(source, target, rows, columns, group, row, col, target_group, target_row,
                BM: tl.constexpr, BN: tl.constexpr, ALONG: tl.constexpr):  # fmt: skip
    """target[g, i, j] = source[g, i, j] for one block; the grid is flat over (g, block of rows, block of columns).

    ALONG tells the direction of the source's unit stride: "row" like the target's, "col", or "none".
    The end of a target row is padding up to a multiple of eight, which is written too, with zeros: a
    store that stopped at `columns` would fall apart into single elements.
    """
    across = (columns + BN - 1) // BN
    down = (rows + BM - 1) // BM
    block = tl.program_id(0)
    g = (block // (across * down)).to(tl.int64)
    i = (block // across % down) * BM + tl.arange(0, BM)
    j = (block % across) * BN + tl.arange(0, BN)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    base = source + g * group
    if ALONG == "row":
        read = base + i[:, None].to(tl.int64) * row + j[None, :]
    elif ALONG == "col":
        read = base + i[:, None] + j[None, :].to(tl.int64) * col
    else:
        read = base + i[:, None].to(tl.int64) * row + j[None, :].to(tl.int64) * col
    values = tl.load(read, mask=inside, other=0)
    write = target + g * target_group + i[:, None].to(tl.int64) * target_row + j[None, :]
    tl.store(write, values, mask=(i < rows)[:, None] & (j < target_row.to(tl.int32))[None, :])
