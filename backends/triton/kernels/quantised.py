# mypy: ignore-errors
"""The kernel of quantised operands: float8 on both sides, or quantised weights under 16-bit activations.

One kernel for every form, layout, granularity and format, as constants say. A step along K lies inside one block of
every scale, so that a step has one number for a row and one for a column: its product starts from zero, and is added
to the sum times both numbers. Without blocks along K the numbers wait for the end, and float8 products still start
from zero at each step, since Hopper's tensor cores keep 14 bits of the sums that they carry on (PROMOTED). Numbers of
weights in finer blocks than a step are multiplied in registers (FOLDED).

Weights are read as rows of K, [BN, BK], and few tokens stand on the narrow side of the instruction (SWAPPED). What the
target multiplies in float8 is loaded as such; else elements are bytes, and become float16 by their bits.
"""

import triton
import triton.language as tl

from multigemm.backends.triton.kernels.epilogue import finish, narrow
from multigemm.backends.triton.kernels.generic import (
    addends,
    corner,
    extents_of,
    matrix,
    offsets,
    store_tile,
    write_outside,
)
from multigemm.backends.triton.kernels.schedule import (
    all_tiles,
    group_of_tile,
    group_range,
    place,
    range_of,
    summed_ranges,
)

SCALE_COLUMNS = tl.constexpr(15)
"""Of a list's scales: address, distance of lines and of blocks along K, and shifts to both, for a, b and zero_b."""
MIXED = tl.constexpr(-1)
ROW_BLOCK = tl.constexpr(128)


# --- formats ------------------------------------------------------------------------------------------


@triton.constexpr_function
def decoder(format, bfloat):
    """Machine code that makes 16-bit numbers of four bytes: of int8 ($2) two pairs; of four bits ($4) a pair of each
    byte, the low ones first. All of it is exact.

    Integers are the low bits of a power of two plus n, from which that is taken again (and 8 or 128 more where they are
    signed; bfloat16 has no bits for 256 + n: a negative n is 128 + n % 128 less 256). Codes of e2m1 are the exponent
    and mantissa of numbers a power of two smaller, subnormal ones included.
    """
    one, power, signed4 = ("0x3F803F80", "0x4300", "0x4308") if bfloat else ("0x3C003C00", "0x6400", "0x6408")
    minus = {"0x4300": "0xC300", "0x4308": "0xC308", "0x6400": "0xE400", "0x6408": "0xE408"}
    if format == "int8" and bfloat:
        first = "mov.b32 one, " + one + ";"
        each = """prmt.b32 w, $2, 0, {pair};
            lop3.b32 t, w, 0x00800080, 0xC300C300, 0xEA;
            lop3.b32 w, w, 0x007F007F, 0x43004300, 0xEA;
            fma.rn.{type} ${i}, w, one, t;"""
    elif format == "int8":
        first = "mov.b32 one, " + one + "; mov.b32 less, 0xE480E480;"
        each = """prmt.b32 w, $2, 0, {pair};
            xor.b32 w, w, 0x64806480;
            fma.rn.{type} ${i}, w, one, less;"""
    elif format == "e2m1":
        shift, kept, factor = ("6", "0x01C001C0", "0x7E807E80") if bfloat else ("3", "0x0E000E00", "0x74007400")
        first = "mov.b32 one, " + factor + "; mov.b32 less, 0x80008000; shl.b32 low, $4, 4;"
        each = """prmt.b32 w, low, $4, {high_bytes};
            shr.b32 t, w, """ + shift + """;
            and.b32 t, t, """ + kept + """;
            lop3.b32 w, w, 0x80008000, t, 0xEA;
            fma.rn.{type} ${i}, w, one, less;"""  # fmt: skip
    else:
        more = signed4 if format == "int4" else power
        first = "mov.b32 one, " + one + "; mov.b32 less, " + minus[more] + minus[more][2:] + "; shr.b32 low, $4, 4;"
        each = """prmt.b32 w, $4, low, {low_bytes};
            lop3.b32 w, w, 0x000F000F, """ + more + more[2:] + """, 0x6A;
            fma.rn.{type} ${i}, w, one, less;"""  # fmt: skip
    body = ""
    for i in range(2 if format == "int8" else 4):
        places = {"i": str(i), "pair": "0x4342" if i else "0x4140", "high_bytes": f"0x{4 + i}0{i}0",
                  "low_bytes": f"0x0{4 + i}0{i}", "type": "bf16x2" if bfloat else "f16x2"}  # fmt: skip
        text = each
        for name, value in places.items():
            text = text.replace("{" + name + "}", value)
        body += text
    return "{ .reg .b32 low, w, t, one, less; " + first + body + " }"


@triton.jit
def scale_of(codes, E8M0: tl.constexpr):
    """Scales in float32; code 0 of e8m0 is 2^-127 and 255 is NaN."""
    if E8M0:
        code = codes.to(tl.int32)
        bits = tl.where(code == 0, 0x00400000, code << 23)
        bits = tl.where(code == 255, 0x7FC00000, bits)
        return bits.to(tl.float32, bitcast=True)
    else:
        return codes.to(tl.float32)


@triton.jit
def narrow_scale(codes, E8M0: tl.constexpr):
    """Scales in 16 bits as they are; those in e8m0 as bfloat16, which holds each of them."""
    if E8M0:
        bits = tl.where(codes == 0, 0x0040, codes.to(tl.int16) << 7)
        return tl.where(codes == 255, 0x7FC0, bits).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        return codes


@triton.jit
def half_of(codes, FORMAT: tl.constexpr):
    """Codes in uint8 as float16, which holds every one of these formats exactly, subnormal numbers included."""
    code = codes.to(tl.uint16)
    if FORMAT == "e5m2":
        return (code << 8).to(tl.float16, bitcast=True)
    elif FORMAT == "e4m3":
        size = code & 0x7F
        value = ((size << 7) | ((code & 0x80) << 8)).to(tl.float16, bitcast=True) * 256.0
        return tl.where(size == 0x7F, float("nan"), value).to(tl.float16)
    elif FORMAT == "e2m1":
        return (((code & 7) << 9) | ((code & 8) << 12)).to(tl.float16, bitcast=True) * 16384.0
    elif FORMAT == "int4":
        whole = code.to(tl.int16)
        return (whole - ((whole & 8) << 1)).to(tl.float16)
    elif FORMAT == "int8":
        whole = code.to(tl.int16)
        return (whole - ((whole & 0x80) << 1)).to(tl.float16)
    else:
        return code.to(tl.float16)


@triton.jit
def decoded(codes, FORMAT: tl.constexpr, DTYPE: tl.constexpr):
    """The bits of 16-bit numbers, of four bytes at a time: int8, or [.., 2] of four bits each, the low ones first."""
    CODE: tl.constexpr = decoder(FORMAT, tl.bfloat16 == DTYPE)
    if FORMAT == "int8":
        return tl.inline_asm_elementwise(CODE, "=&r,=&r,r", [codes], tl.int16, True, 4)
    else:
        pairs = tl.inline_asm_elementwise(CODE, "=&r,=&r,=&r,=&r,r", [codes], tl.int32, True, 4)
        return tl.join((pairs & 0xFFFF).to(tl.int16), (pairs >> 16).to(tl.int16))


@triton.jit
def interleaved(pairs, BN: tl.constexpr, BK: tl.constexpr):
    """[BN, BK / 2] bytes as [BN, BK] codes of four bits: the low ones come first."""
    return tl.reshape(tl.join(pairs & 15, pairs >> 4), (BN, BK))


# --- numbers of a tile --------------------------------------------------------------------------------


@triton.jit
def lines_of(first, i, ROWS: tl.constexpr, VECTOR: tl.constexpr, shift):
    """Which entries along the axis that is not K a tile's lines have: one for all of them, or a vector."""
    if ROWS == MIXED:
        return (first + i) >> shift
    elif ROWS == ROW_BLOCK:
        if VECTOR:
            return (first + i) // ROW_BLOCK
        else:
            return first // ROW_BLOCK
    elif VECTOR:
        return first + i
    else:
        return first * 0


@triton.jit
def read(pointers, i, left, VECTOR: tl.constexpr):
    """The numbers there; of lines beyond the group none is read."""
    if VECTOR:
        return tl.load(pointers, mask=i < left, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def along(numbers, VECTOR: tl.constexpr, AXIS: tl.constexpr):
    """Numbers of lines, to be multiplied with a tile along that axis."""
    if not VECTOR:
        return numbers
    elif AXIS == 0:
        return numbers[:, None]
    else:
        return numbers[None, :]


@triton.jit
def scales_of(scales, g, given, group, line, deep, FORM: tl.constexpr, PART: tl.constexpr):
    """Where a group's scales begin, their distances, and of a list the shifts from a line or a K to its entry."""
    wide_g = g.to(tl.int64)
    if FORM == "per_group":
        entry = scales + wide_g * SCALE_COLUMNS + PART
        base = tl.load(entry).to(tl.pointer_type(given.dtype.element_ty))
        line = tl.load(entry + 1)
        deep = tl.load(entry + 2)
        return base, line, deep, tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32)
    else:
        return given + wide_g * group, line, deep, 0, 0


@triton.jit
def block_of(step, BK: tl.constexpr, K: tl.constexpr, shift):
    """Which block along K a step lies in, counted from the start of its group."""
    if K == MIXED:
        return (step * BK) >> shift
    else:
        return step // (K // BK)


@triton.jit
def numbers_of(pointers, step, deep, shift, i, left, k, BK: tl.constexpr, K: tl.constexpr, VECTOR: tl.constexpr):
    """The numbers of a step's lines, none of a step behind the last one."""
    at = pointers + block_of(step, BK, K, shift) * deep
    if VECTOR:
        return tl.load(at, mask=(i < left) & (step * BK + 0 * i < k), other=0)
    else:
        return tl.load(at, mask=step * BK < k, other=0)


@triton.jit
def folded_numbers(pointers, step, fold, deep, some, k, FOLDS: tl.constexpr, K: tl.constexpr):
    """The numbers of a step's FOLDS blocks, for each column that there is."""
    block = step * FOLDS + fold
    covered = some[:, None] & (block * K < k)[None, :]
    return tl.load(pointers + block.to(tl.int64)[None, :] * deep, mask=covered, other=0)


@triton.jit
def first_block(start, g, K: tl.constexpr, JAGGED_K: tl.constexpr):
    """The entry of a group's first block: in a jagged K blocks are counted from the starts of groups."""
    if JAGGED_K and K > 0:
        return (start // K + g).to(tl.int64)
    else:
        return (g * 0).to(tl.int64)


@triton.jit
def quantised_kernel(a, b, c, out, bias, ends, table, prefix, scale_a, scale_b, zero_b, scales,
                     m, n, k, groups, head,
                     a_group, a_row, a_col, b_group, b_row, b_col, c_group, c_row, c_col,
                     out_group, out_row, out_col, bias_group, bias_col, alpha_bits, beta_bits,
                     sa_group, sa_line, sa_deep, sb_group, sb_line, sb_deep, zb_group, zb_line, zb_deep,
                     FORM: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr,
                     STAGES: tl.constexpr, A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, OUT_ORDER: tl.constexpr,
                     A_BYTES: tl.constexpr, B_BYTES: tl.constexpr, OUT_BYTES: tl.constexpr, WIDE: tl.constexpr,
                     EVEN_K: tl.constexpr, MULTIPLE: tl.constexpr, HAS_C: tl.constexpr, HAS_BIAS: tl.constexpr,
                     ALPHA: tl.constexpr, ACTIVATION: tl.constexpr, ZERO: tl.constexpr, CHUNK: tl.constexpr,
                     SIZES: tl.constexpr, INTERPRETED: tl.constexpr, A_FORMAT: tl.constexpr, B_FORMAT: tl.constexpr,
                     NATIVE: tl.constexpr, BITS: tl.constexpr, PACKED: tl.constexpr, SWAPPED: tl.constexpr,
                     PROMOTED: tl.constexpr, FOLDED: tl.constexpr, NARROW_FOLD: tl.constexpr, SA: tl.constexpr,
                     SB: tl.constexpr, ZB: tl.constexpr, SA_E8M0: tl.constexpr, SB_E8M0: tl.constexpr,
                     SA_ROWS: tl.constexpr, SA_K: tl.constexpr, SB_ROWS: tl.constexpr, SB_K: tl.constexpr):  # fmt: skip
    """One persistent program: tiles program_id, + num_programs, ... of the concatenation of all groups.

    A_FORMAT is "" for 16-bit activations. BITS: weights are decoded four bytes at once. NARROW_FOLD: folded scales
    multiply in the type of activations, with one rounding. SA, SB and ZB: there are scales of a, of b, and zero points;
    ROWS and K are what one number covers, as in `ScaleSpec`. BK divides every block along K, but those that are FOLDED.
    """
    UNIFORM: tl.constexpr = FORM == "batched" or FORM == "jagged_k" or (FORM == "masked" and ZERO)
    JAGGED_K: tl.constexpr = FORM == "jagged_k"
    BLOCKED: tl.constexpr = (SA and SA_K != 0) or (SB and SB_K != 0 and not FOLDED)
    SA_VECTOR: tl.constexpr = SA and (SA_ROWS == 1 or SA_ROWS == MIXED or (SA_ROWS == ROW_BLOCK and BM > ROW_BLOCK))
    SB_VECTOR: tl.constexpr = SB and (SB_ROWS == 1 or SB_ROWS == MIXED or (SB_ROWS == ROW_BLOCK and BN > ROW_BLOCK))
    # the accumulator stands as the instruction has it: tokens x columns, or columns x tokens
    A_AXIS: tl.constexpr = 1 if SWAPPED else 0
    B_AXIS: tl.constexpr = 0 if SWAPPED else 1
    P: tl.constexpr = BN if SWAPPED else BM
    Q: tl.constexpr = BM if SWAPPED else BN
    BKB: tl.constexpr = BK // 2 if PACKED else BK
    Y_ORDER: tl.constexpr = "col" if B_ORDER == "row" else "row" if B_ORDER == "col" else "strided"
    FOLDS: tl.constexpr = BK // SB_K if FOLDED else 1
    total, found, stride = all_tiles(prefix, ends, table, m, n, groups, head, FORM, BM, BN, UNIFORM, CHUNK, SIZES)
    for tile in range(tl.program_id(0), total, tl.num_programs(0)):
        g, first = group_of_tile(tile, found, stride, prefix, groups, UNIFORM, CHUNK)

        # 1. the group's extents, and where it starts along the jagged direction
        gm, gn, gk, start = extents_of(g, m, n, k, ends, table, head, FORM, ALPHA, MULTIPLE, A_ORDER, B_ORDER,
                                       OUT_ORDER, SIZES, CHUNK)  # fmt: skip
        covered_m = m if UNIFORM else gm
        tile_m, tile_n = place(tile - first, (covered_m + BM - 1) // BM, (gn + BN - 1) // BN, WIDTH)
        skip_m = start if FORM == "jagged_m" else 0
        skip_n = start if FORM == "jagged_n" else 0
        skip_k = start if JAGGED_K else 0

        # 2. the first element of each operand's tile, in 64 bits
        a_base, a_r, a_c = matrix(table, g, a, a_group, a_row, a_col, FORM, "a", A_BYTES)
        b_base, b_r, b_c = matrix(table, g, b, b_group, b_row, b_col, FORM, "b", B_BYTES)
        out_base, out_r, out_c = matrix(table, g, out, out_group, out_row, out_col, FORM, "out", OUT_BYTES)
        row0 = tile_m * BM
        col0 = tile_n * BN
        i = tl.arange(0, BM)
        j = tl.arange(0, BN)
        kk = tl.arange(0, BK)
        kb = tl.arange(0, BKB)
        rows_left = gm - row0
        cols_left = gn - col0
        # one pointer that moves and distances that stay: half the registers of a tile of pointers
        a_at = corner(a_base, skip_m + row0, a_r, skip_k + 0 * row0, a_c, A_ORDER)
        a_far = offsets(i, a_r, kk, a_c, A_ORDER, WIDE)
        b_at = corner(b_base, skip_n + col0, b_c, skip_k + 0 * row0, b_r, Y_ORDER)
        b_far = offsets(j, b_c, kb, b_r, Y_ORDER, WIDE)
        a_step = BK if A_ORDER == "row" else BK * a_c
        b_step = BKB if B_ORDER == "col" else BKB * b_r

        acc = tl.zeros((P, Q), tl.float32)
        if rows_left > 0:
            # 3. the numbers of the tile's lines, and those that hold for all of K
            if SA:
                sa_base, sa_r, sa_d, sa_shift, sa_k_shift = scales_of(scales, g, scale_a, sa_group, sa_line, sa_deep,
                                                                      FORM, 0)  # fmt: skip
                sa_lines = lines_of(skip_m + row0, i, SA_ROWS, SA_VECTOR, sa_shift)
                sa_ptrs = sa_base + sa_lines.to(tl.int64) * sa_r + first_block(start, g, SA_K, JAGGED_K) * sa_d
                if BLOCKED and SA_K == 0:
                    sa = along(scale_of(read(sa_ptrs, i, rows_left, SA_VECTOR), SA_E8M0), SA_VECTOR, A_AXIS)
            if SB:
                sb_base, sb_r, sb_d, sb_shift, sb_k_shift = scales_of(scales, g, scale_b, sb_group, sb_line, sb_deep,
                                                                      FORM, 5)  # fmt: skip
                sb_lines = lines_of(skip_n + col0, j, SB_ROWS, SB_VECTOR, sb_shift)
                sb_first = first_block(start, g, SB_K, JAGGED_K)
                sb_ptrs = sb_base + sb_lines.to(tl.int64) * sb_r + sb_first * sb_d
                if BLOCKED and SB_K == 0:
                    sb = along(scale_of(read(sb_ptrs, j, cols_left, SB_VECTOR), SB_E8M0), SB_VECTOR, B_AXIS)
            if ZB:
                zb_base, zb_r, zb_d, _, _ = scales_of(scales, g, zero_b, zb_group, zb_line, zb_deep, FORM, 10)
                zb_ptrs = zb_base + sb_lines.to(tl.int64) * zb_r + sb_first * zb_d
                if SB_K == 0:
                    zero = along(read(zb_ptrs, j, cols_left, SB_VECTOR).to(tl.float16), SB_VECTOR, 0)
            if FOLDED:
                fold = tl.arange(0, FOLDS)
                if SB_VECTOR:
                    fold_lines = sb_lines
                else:
                    fold_lines = sb_lines + 0 * j
                fold_ptrs = sb_base + (fold_lines.to(tl.int64) * sb_r + sb_first * sb_d)[:, None]
                if ZB:
                    fold_zeros = zb_base + (fold_lines.to(tl.int64) * zb_r + sb_first * zb_d)[:, None]

            # 4. the products; both operands are zero where k, a row or a column lies outside the group
            # numbers of a step are asked for one step before: Triton's pipeline takes none of single bytes
            none = 0 * gk
            if SA and SA_K != 0:
                sa_codes = numbers_of(sa_ptrs, none, sa_d, sa_k_shift, i, rows_left, gk, BK, SA_K, SA_VECTOR)
            if SB and SB_K != 0 and not FOLDED:
                sb_codes = numbers_of(sb_ptrs, none, sb_d, sb_k_shift, j, cols_left, gk, BK, SB_K, SB_VECTOR)
                if ZB:
                    zb_codes = numbers_of(zb_ptrs, none, zb_d, sb_k_shift, j, cols_left, gk, BK, SB_K, SB_VECTOR)
            if FOLDED:
                folds = folded_numbers(fold_ptrs, none, fold, sb_d, j < cols_left, gk, FOLDS, SB_K)
            for step in tl.range(0, (gk + BK - 1) // BK, num_stages=STAGES):
                k_left = gk - step * BK
                if SA and SA_K != 0:
                    sa = along(scale_of(sa_codes, SA_E8M0), SA_VECTOR, A_AXIS)
                    sa_codes = numbers_of(sa_ptrs, step + 1, sa_d, sa_k_shift, i, rows_left, gk, BK, SA_K, SA_VECTOR)
                if SB and SB_K != 0 and not FOLDED:
                    sb = along(scale_of(sb_codes, SB_E8M0), SB_VECTOR, B_AXIS)
                    sb_codes = numbers_of(sb_ptrs, step + 1, sb_d, sb_k_shift, j, cols_left, gk, BK, SB_K, SB_VECTOR)
                if ZB and SB_K != 0 and not FOLDED:
                    zero = along(zb_codes.to(tl.float16), SB_VECTOR, 0)
                    zb_codes = numbers_of(zb_ptrs, step + 1, zb_d, sb_k_shift, j, cols_left, gk, BK, SB_K, SB_VECTOR)
                if EVEN_K:
                    in_a = (i < rows_left)[:, None]
                    in_b = (j < cols_left)[:, None]
                else:
                    in_a = (i < rows_left)[:, None] & (kk < k_left)[None, :]
                    in_b = (j < cols_left)[:, None] & (kb < (k_left // 2 if PACKED else k_left))[None, :]
                x = tl.load(a_at + a_far, mask=in_a, other=0.0)
                y = tl.load(b_at + b_far, mask=in_b, other=0.0)
                if BITS:
                    y = decoded(y, B_FORMAT, a.dtype.element_ty)
                    if PACKED:
                        y = tl.reshape(y, (BN, BK))
                    # after the new shape: Triton 3.6 finds no shared layout for a product of what was reshaped
                    y = y.to(a.dtype.element_ty, bitcast=True)
                elif not NATIVE:
                    if A_FORMAT != "":
                        x = half_of(x, A_FORMAT)
                    if PACKED:
                        y = interleaved(y, BN, BK)
                    y = half_of(y, B_FORMAT)
                elif A_FORMAT == "":
                    # Triton makes finite numbers of infinities and NaN on the way from e5m2 to bfloat16
                    y = y.to(tl.float16)
                if ZB and not FOLDED:
                    y = y - zero.to(y.dtype)
                if NARROW_FOLD:
                    numbers = narrow_scale(folds, SB_E8M0)
                    folds = folded_numbers(fold_ptrs, step + 1, fold, sb_d, j < cols_left, gk, FOLDS, SB_K)
                    y = tl.reshape(tl.reshape(y, (BN, FOLDS, SB_K)) * numbers[:, :, None], (BN, BK))
                elif FOLDED:
                    numbers = folds
                    folds = folded_numbers(fold_ptrs, step + 1, fold, sb_d, j < cols_left, gk, FOLDS, SB_K)
                    y = tl.reshape(y, (BN, FOLDS, SB_K)).to(tl.float32)
                    if ZB:
                        zeros = folded_numbers(fold_zeros, step, fold, zb_d, j < cols_left, gk, FOLDS, SB_K)
                        y = y - zeros.to(tl.float32)[:, :, None]
                    y = tl.reshape(y * scale_of(numbers, SB_E8M0)[:, :, None], (BN, BK))
                if A_FORMAT == "" and not (BITS and (NARROW_FOLD or not FOLDED)):
                    if FOLDED or not INTERPRETED:
                        y = narrow(y, a.dtype.element_ty, INTERPRETED)
                    if INTERPRETED:
                        x = x.to(tl.float32)
                        y = y.to(tl.float32)
                left = y if SWAPPED else x
                right = tl.trans(x) if SWAPPED else tl.trans(y)
                if BLOCKED:
                    part = tl.dot(left, right, input_precision="ieee")
                    if SA and SB:
                        acc += part * (sa * sb)
                    elif SA:
                        acc += part * sa
                    else:
                        acc += part * sb
                elif PROMOTED:
                    acc += tl.dot(left, right, input_precision="ieee")
                else:
                    acc = tl.dot(left, right, acc, input_precision="ieee")
                a_at += a_step
                b_at += b_step

            # no block along K: the numbers are read last, and do not touch the sum of no products
            if not BLOCKED and gk > 0:
                if SA:
                    sa = along(scale_of(read(sa_ptrs, i, rows_left, SA_VECTOR), SA_E8M0), SA_VECTOR, A_AXIS)
                if SB and not FOLDED:
                    sb = along(scale_of(read(sb_ptrs, j, cols_left, SB_VECTOR), SB_E8M0), SB_VECTOR, B_AXIS)
                if SA and SB:
                    acc = acc * (sa * sb)
                elif SA:
                    acc = acc * sa
                elif SB and not FOLDED:
                    acc = acc * sb

        # 5. the epilogue
        if SWAPPED:
            sums = tl.trans(acc)
        else:
            sums = acc
        owned = (i < rows_left)[:, None] & (j < cols_left)[None, :]
        c_ptrs, bias_ptrs = addends(table, g, c, c_group, c_row, c_col, bias, bias_group, bias_col, out_base,
                                    skip_m + row0, skip_n + col0, i, j, FORM, HAS_C, HAS_BIAS)  # fmt: skip
        in_columns = (j < cols_left)[None, :]
        result = finish(sums, alpha_bits, beta_bits, c_ptrs, owned, bias_ptrs, in_columns, out.dtype.element_ty,
                        ALPHA == "any", HAS_C, HAS_BIAS, ACTIVATION, INTERPRETED)  # fmt: skip
        store_tile(result, owned, out_base, out_r, out_c, skip_m + row0, skip_n + col0, i, j, rows_left, cols_left, m,
                   row0, FORM, OUT_ORDER, WIDE, ZERO, False)  # fmt: skip

    # 6. what no group owns, where the output is the library's own
    if ZERO and (FORM == "jagged_m" or FORM == "jagged_n"):
        write_outside(out, ends, m, n, groups, head, out_row, out_col, FORM, BM, BN, SIZES, CHUNK)


@triton.jit
def group_of_block(block, ends, k, groups, head, BLOCK: tl.constexpr, SIZES: tl.constexpr, CHUNK: tl.constexpr):
    """The last group of a jagged K whose blocks of a copy begin at or before `block`; 0 if none does."""
    found = 0 * groups
    for first in range(0, groups, CHUNK):
        g = first + tl.arange(0, CHUNK)
        if SIZES:
            start, _ = summed_ranges(ends, g, k, g < groups)
        else:
            start, _ = group_range(ends, g, head, k, g < groups)
        found += tl.sum(((g < groups) & (start // BLOCK + g <= block)).to(tl.int32), 0)
    return tl.maximum(found - 1, 0)


@triton.jit
def line_of_slot(slot):
    """The line whose scale stands in a slot. Of every eight lines a thread has sums of two neighbouring ones; those of
    two eights stand in four slots in a row."""
    return slot // 16 * 16 + slot // 2 % 2 * 8 + slot // 4 % 4 * 2 + slot % 2


@triton.jit
def byte_of_each(w0, w1, w2, w3, NUMBER: tl.constexpr):
    """A word of one byte of each of four words."""
    SHIFT: tl.constexpr = 8 * NUMBER
    low = ((w0 >> SHIFT) & 255) | (((w1 >> SHIFT) & 255) << 8)
    return low | (((w2 >> SHIFT) & 255) << 16) | ((w3 >> SHIFT) << 24)


@triton.jit
def pack_groups_kernel(source, scale, target, target_scales, ends, lines, k, groups, head, line_step, k_step,
                       scale_group, scale_line, scale_deep, target_line,
                       BLOCK: tl.constexpr, LINES: tl.constexpr, ALONG: tl.constexpr, WORDS: tl.constexpr,
                       SCALES: tl.constexpr, HAS_SCALE: tl.constexpr, SCALE_K: tl.constexpr, E8M0: tl.constexpr,
                       SIZES: tl.constexpr, CHUNK: tl.constexpr):  # fmt: skip
    """Bytes of a jagged K, in lines of which it is contiguous: LINES lines of a block of BLOCK of K.

    Block j of group g goes to block start // BLOCK + g + j of the target: no two groups share one, and shapes alone
    say how many there may be. Behind a group's end are zeros; blocks of no group stay as they are.
    ALONG tells the direction of the source's unit stride: "lines" (across them), "k" or "none". With WORDS the former
    are a multiple of 16, from addresses that are: four by four bytes turn in registers, and words in shared memory.
    With SCALES a float32 for each line of a block goes to target_scales, in lines of whole LINES; "slots" have the
    order in which `hopper_float8.of_columns` reads them.
    """
    strips = (lines + LINES - 1) // LINES
    block = tl.program_id(0) // strips
    g = group_of_block(block, ends, k, groups, head, BLOCK, SIZES, CHUNK)
    start, end = range_of(ends, g, head, k, SIZES, CHUNK)
    skipped = (block - start // BLOCK - g) * BLOCK
    left = end - start - skipped
    if (skipped >= 0) & (left > 0):
        strip = tl.program_id(0) % strips
        at = source + (start + skipped).to(tl.int64) * k_step
        to = target + block.to(tl.int64) * BLOCK
        if SCALES != "":
            slot = tl.arange(0, LINES)
            line = strip * LINES + (line_of_slot(slot) if SCALES == "slots" else slot)
            of_line = scale + g.to(tl.int64) * scale_group + line.to(tl.int64) * scale_line
            if SCALE_K != 0:
                of_line += block.to(tl.int64) * scale_deep
            if HAS_SCALE:
                numbers = scale_of(tl.load(of_line, mask=line < lines, other=0), E8M0)
            else:
                numbers = tl.full((LINES,), 1.0, tl.float32)
            tl.store(target_scales + (block.to(tl.int64) * strips + strip) * LINES + slot, numbers)
        if WORDS:
            i = strip * (LINES // 4) + tl.arange(0, LINES // 4)
            q = tl.arange(0, BLOCK // 4)
            here = at.to(tl.pointer_type(tl.int32)) + i[None, :]
            step = tl.multiple_of(k_step // 4, 4)
            far = (4 * q)[:, None].to(tl.int64) * step
            some = (i < tl.multiple_of(lines // 4, 4))[None, :]
            w0 = tl.load(here + far, mask=(4 * q < left)[:, None] & some, other=0)
            w1 = tl.load(here + (far + step), mask=(4 * q + 1 < left)[:, None] & some, other=0)
            w2 = tl.load(here + (far + 2 * step), mask=(4 * q + 2 < left)[:, None] & some, other=0)
            w3 = tl.load(here + (far + 3 * step), mask=(4 * q + 3 < left)[:, None] & some, other=0)
            for number in tl.static_range(4):
                line = 4 * i + number
                words = tl.trans(byte_of_each(w0, w1, w2, w3, number))
                there = to.to(tl.pointer_type(tl.int32)) + line.to(tl.int64)[:, None] * (target_line // 4)
                tl.store(there + q[None, :], words, mask=(line < lines)[:, None])
        else:
            i = strip * LINES + tl.arange(0, LINES)
            kk = tl.arange(0, BLOCK)
            if ALONG == "lines":
                some = (kk < left)[:, None] & (i < lines)[None, :]
                values = tl.trans(tl.load(at + kk[:, None].to(tl.int64) * k_step + i[None, :], mask=some, other=0))
            else:
                some = (i < lines)[:, None] & (kk < left)[None, :]
                step = 1 if ALONG == "k" else k_step
                values = tl.load(at + i[:, None].to(tl.int64) * line_step + kk[None, :] * step, mask=some, other=0)
            tl.store(to + i[:, None].to(tl.int64) * target_line + kk[None, :], values, mask=(i < lines)[:, None])
