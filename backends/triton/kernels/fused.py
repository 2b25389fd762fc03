# mypy: ignore-errors
"""The kernels of fused problems: rows picked by index, a gate, weights of rows; and sums of rows.

`fused_kernel` is the pointer kernel with more at both ends of its products. An index that means no row becomes an
address within the operand, which a mask keeps from being read: the element is 0. A gate joins two columns of the
products: g and u of a column have a sum each, or, where they lie side by side, come apart after the products.
`sum_rows_kernel` adds rows in a fixed order: those that `combine` names, or those that go to one place.
"""

import triton
import triton.language as tl

from multigemm.backends.triton.kernels.epilogue import activate, finish, narrow, scalar_of
from multigemm.backends.triton.kernels.generic import (
    addends,
    bias_of,
    corner,
    dot,
    extents_of,
    matrix,
    offsets,
    operand,
    store_tile,
    write_outside,
)
from multigemm.backends.triton.kernels.schedule import all_tiles, group_of_tile, owned_range, place

PREACT = tl.constexpr(17)
PREACT_ROW = tl.constexpr(18)


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
def fused_kernel(a, b, c, out, bias, ends, table, prefix, preact, row_scale, a_rows, b_rows,
                 m, n, k, groups, head, a_extent, b_extent,
                 a_group, a_row, a_col, b_group, b_row, b_col, c_group, c_row, c_col,
                 out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
                 preact_group, preact_row, preact_col, scale_group, gate_alpha_bits, gate_beta_bits, limit_bits,
                 FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
                 STAGES: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, OUT_ORDER: tl.constexpr,
                 PREACT_ORDER: tl.constexpr, A_BYTES: tl.constexpr, B_BYTES: tl.constexpr, OUT_BYTES: tl.constexpr,
                 PREACT_BYTES: tl.constexpr, WIDE: tl.constexpr, EVEN_K: tl.constexpr, HAS_C: tl.constexpr,
                 HAS_BIAS: tl.constexpr, ALPHA: tl.constexpr, ACTIVATION: tl.constexpr, PRECISION: tl.constexpr,
                 ACC: tl.constexpr, ZERO: tl.constexpr, CHUNK: tl.constexpr, SIZES: tl.constexpr, GATE: tl.constexpr,
                 GATE_ALPHA: tl.constexpr, GATE_BETA: tl.constexpr, LIMIT: tl.constexpr, PREACT_OUT: tl.constexpr,
                 ROW_SCALE: tl.constexpr, A_ROWS: tl.constexpr, B_ROWS: tl.constexpr, EARLY: tl.constexpr,
                 INTERPRETED: tl.constexpr):  # fmt: skip
    """One persistent program, as `pointer_kernel`. m, n and k are the extents of the result and of the tokens; the
    row m of a table too. BN counts columns of the products, of which a gate joins two. GATE is its layout.
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
    UNIFORM: tl.constexpr = FORM == "batched" or FORM == "jagged_k" or (FORM == "masked" and ZERO)
    A_BY_M: tl.constexpr = A_ROWS and FORM == "jagged_m"
    A_BY_K: tl.constexpr = A_ROWS and FORM == "jagged_k"
    B_BY_N: tl.constexpr = B_ROWS and FORM == "jagged_n"
    B_BY_K: tl.constexpr = B_ROWS and FORM == "jagged_k"
    total, found, stride = all_tiles(prefix, ends, table, m, n, groups, head, FORM, BM, TILE, UNIFORM, CHUNK, SIZES)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        g, first = group_of_tile(tile, found, stride, prefix, groups, UNIFORM, CHUNK)

        # 1. the group's extents, and where it starts along the jagged direction
        gm, gn, gk, start = extents_of(g, m, n, k, ends, table, head, FORM, ALPHA, 1, A_ORDER, B_ORDER, OUT_ORDER,
                                       SIZES, CHUNK)  # fmt: skip
        covered_m = m if UNIFORM else gm
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
        second = gn.to(tl.int64) if B_ORDER == "row" else gn * b_c

        # 3. the products; both operands are zero where k, a row or a column lies outside the group or is absent
        acc = tl.zeros((BM, LOADED), ACC)
        other = tl.zeros((BM, LOADED), ACC)
        if rows_left > 0:
            for step in tl.range(0, (gk + BK - 1) // BK, num_stages=STAGES):
                k_left = gk - step * BK
                if A_BY_K:
                    x = tl.load(a_ptrs + offsets(i, a_r, a_number, a_c, A_ORDER, WIDE),
                                mask=in_rows[:, None] & a_picked[None, :], other=0)  # fmt: skip
                    # one step ahead, so that operands are asked for without a wait for their places
                    a_number, a_picked = picked(a_rows, skip_k + step * BK + BK + kk, kk < k_left - BK, a_extent, WIDE)
                elif EVEN_K:
                    x = tl.load(a_ptrs, mask=a_there[:, None], other=0)
                else:
                    x = tl.load(a_ptrs, mask=a_there[:, None] & (kk < k_left)[None, :], other=0)
                if B_BY_K:
                    y = tl.load(b_ptrs + offsets(b_number, b_r, jj, b_c, B_ORDER, WIDE),
                                mask=b_picked[:, None] & in_cols[None, :], other=0)  # fmt: skip
                    b_number, b_picked = picked(b_rows, skip_k + step * BK + BK + kk, kk < k_left - BK, b_extent, WIDE)
                elif EVEN_K:
                    y = tl.load(b_ptrs, mask=b_there[None, :], other=0)
                else:
                    y = tl.load(b_ptrs, mask=(kk < k_left)[:, None] & b_there[None, :], other=0)
                acc = dot(x, y, acc, PRECISION, ACC, INTERPRETED)
                if HALVES:
                    if EVEN_K:
                        z = tl.load(b_ptrs + second, mask=b_there[None, :], other=0)
                    else:
                        z = tl.load(b_ptrs + second, mask=(kk < k_left)[:, None] & b_there[None, :], other=0)
                    other = dot(x, z, other, PRECISION, ACC, INTERPRETED)
                if not A_BY_K:
                    a_ptrs += a_step
                if not B_BY_K:
                    b_ptrs += b_step

        # 4. the epilogue: alpha, C and bias; preact_out; activation or gate; row_scale
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
                p_base, p_r, p_c = operand(table, g, preact, PREACT, PREACT_ROW, PREACT_BYTES)
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
        owned = in_rows[:, None] & (j < cols_left)[None, :]
        store_tile(result, owned, out_base, out_r, out_c, skip_m + row0, skip_n + col0, i, j, rows_left, cols_left, m,
                   row0, FORM, OUT_ORDER, WIDE, ZERO, False)  # fmt: skip

    # 5. what no group owns, where the output is the library's own
    if ZERO and (FORM == "jagged_m" or FORM == "jagged_n"):
        write_outside(out, ends, m, n, groups, head, out_row, out_col, FORM, BM, TILE, SIZES, CHUNK)


@triton.jit
def first_from(places, tokens, row):
    """The first of sorted places at or behind a row."""
    low = row * 0
    high = low + tokens
    while low < high:
        middle = (low + high) // 2
        before = tl.load(places + middle) < row
        low = tl.where(before, middle + 1, low)
        high = tl.where(before, high, middle)
    return low


@triton.jit
def plus_row(total, y, s, low, high, n, columns, weights, at, WEIGHTED: tl.constexpr):
    """The sum with row s, times its weight; as it was where no group owns such a row, whose weight is not read."""
    there = (s >= low) & (s < high)
    row = tl.where(there, s, 0).to(tl.int64)
    # the interpreter takes no vector and scalar joined as a mask
    term = tl.load(y + row * n + columns, mask=columns < tl.where(there, n, 0), other=0).to(total.dtype)
    if WEIGHTED:
        term *= tl.load(weights + at, mask=there, other=0).to(total.dtype)
    return tl.where(there, total + term, total)


@triton.jit
def sum_rows_kernel(y, out, c, ends, index, weights, order, tokens, n, rows, groups, head,
                    out_row, out_col, c_row, c_col, beta_bits, TERMS: tl.constexpr, UNROLLED: tl.constexpr,
                    BLOCK: tl.constexpr, OUT_ORDER: tl.constexpr, SCATTERS: tl.constexpr, HAS_C: tl.constexpr,
                    WEIGHTED: tl.constexpr, ACC: tl.constexpr, SIZES: tl.constexpr, CHUNK: tl.constexpr,
                    EARLY: tl.constexpr, INTERPRETED: tl.constexpr):  # fmt: skip
    """One block of columns of one row: sum of y[index[row, j]] * weights[row, j], j ascending, then + beta * C.

    With SCATTERS, `index` are sorted places, `order` the rows that go there: those with the place `row`, ascending.
    """
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    across = (n + BLOCK - 1) // BLOCK
    row = tl.program_id(0) // across
    columns = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < n
    low, high = owned_range(ends, groups, head, tokens, SIZES, CHUNK)
    total = tl.zeros((BLOCK,), ACC)
    if SCATTERS:
        for at in range(first_from(index, tokens, row), first_from(index, tokens, row + 1)):
            total = plus_row(total, y, tl.load(order + at), low, high, n, columns, weights, at, False)
    elif UNROLLED:
        for j in tl.static_range(TERMS):
            at = row.to(tl.int64) * TERMS + j
            total = plus_row(total, y, tl.load(index + at), low, high, n, columns, weights, at, WEIGHTED)
    else:
        for j in range(TERMS):
            at = row.to(tl.int64) * TERMS + j
            total = plus_row(total, y, tl.load(index + at), low, high, n, columns, weights, at, WEIGHTED)
    wide_row = row.to(tl.int64)
    if HAS_C:
        given = tl.load(c + wide_row * c_row + columns.to(tl.int64) * c_col, mask=inside, other=0)
        total += scalar_of(beta_bits, ACC) * given.to(ACC)
    out_ptrs = out + wide_row * out_row
    if OUT_ORDER == "row":
        out_ptrs += columns
    else:
        out_ptrs += columns.to(tl.int64) * out_col
    tl.store(out_ptrs, narrow(total, out.dtype.element_ty, INTERPRETED), mask=inside)
