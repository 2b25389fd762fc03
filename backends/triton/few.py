# mypy: ignore-errors
"""The kernel for lists of a few groups, whole tiles each: what a program has to know is its argument.

With a table in memory a cold launch asks memory twice in a row, for the table and then for operands, and small
lists are little more than such waits. Arguments are there when a program starts; picking a group among a few of
them is a handful of predicated reads of constants. One tile per program, nothing is masked.
"""

import triton
import triton.language as tl

from multigemm.backends.triton.epilogue import finish
from multigemm.backends.triton.kernels import corner, offsets


@triton.jit
def quotient(x, inverse):
    """x // d for inverse = 2^31 / d, rounded up: exact for x below 2^15 and any d up to 2^31, for what rounding adds,
    less than x / 2^31, is less than 1 / d up to d = 2^16, and any larger d is more than 2 * x."""
    return tl.umulhi(2 * x.to(tl.uint32), inverse.to(tl.uint32)).to(tl.int32)


@triton.jit
def place_few(local, down, across, by_band, by_low, WIDTH: tl.constexpr):
    """schedule_device.place without its divisions, which a program waits for: `by_band` is the inverse of the tiles in
    a band, `by_low` that of the height of the last band, where it is lower."""
    FULL: tl.constexpr = (2**31 + WIDTH - 1) // WIDTH
    band = quotient(local, by_band)
    inside = local - band * (WIDTH * across)
    height = tl.minimum(down - band * WIDTH, WIDTH)
    tile_n = quotient(inside, tl.where(height == WIDTH, FULL, by_low))
    return band * WIDTH + inside - tile_n * height, tile_n


@triton.jit
def few_kernel(groups, alpha_bits,
               BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, WIDTH: tl.constexpr, STAGES: tl.constexpr,
               A_ORDER: tl.constexpr, B_ORDER: tl.constexpr, OUT_ORDER: tl.constexpr, ALPHA: tl.constexpr,
               ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, ACC: tl.constexpr,
               INTERPRETED: tl.constexpr):  # fmt: skip
    """One tile. A group: its first tile, blocks of k, tiles down and across, the inverses for `place_few`, then address
    and distance of lines (rows or columns, as they lie) of a, b and out, all of them aligned to 16 bytes."""
    tile = tl.program_id(0)
    first, steps, down, across, by_band, by_low, a, a_line, b, b_line, out, out_line = groups[0]
    for g in tl.static_range(1, len(groups)):
        (first_g, steps_g, down_g, across_g, by_band_g, by_low_g, a_g, a_line_g, b_g, b_line_g, out_g,
         out_line_g) = groups[g]  # fmt: skip
        reached = tile >= first_g
        first = tl.where(reached, first_g, first)
        steps = tl.where(reached, steps_g, steps)
        down = tl.where(reached, down_g, down)
        across = tl.where(reached, across_g, across)
        by_band = tl.where(reached, by_band_g, by_band)
        by_low = tl.where(reached, by_low_g, by_low)
        a = tl.where(reached, a_g, a)
        a_line = tl.where(reached, a_line_g, a_line)
        b = tl.where(reached, b_g, b)
        b_line = tl.where(reached, b_line_g, b_line)
        out = tl.where(reached, out_g, out)
        out_line = tl.where(reached, out_line_g, out_line)
    PER_LINE: tl.constexpr = 128 // a.dtype.element_ty.primitive_bitwidth
    OUT_PER_LINE: tl.constexpr = 128 // out.dtype.element_ty.primitive_bitwidth
    a = tl.multiple_of(a, 16)
    a_line = tl.multiple_of(a_line, PER_LINE)
    b = tl.multiple_of(b, 16)
    b_line = tl.multiple_of(b_line, PER_LINE)
    out = tl.multiple_of(out, 16)
    out_line = tl.multiple_of(out_line, OUT_PER_LINE)
    tile_m, tile_n = place_few(tile - first, down, across, by_band, by_low, WIDTH)
    row = tile_m * BM
    col = tile_n * BN
    i = tl.arange(0, BM)
    j = tl.arange(0, BN)
    kk = tl.arange(0, BK)
    a_ptrs = corner(a, row, a_line, 0 * row, a_line, A_ORDER) + offsets(i, a_line, kk, a_line, A_ORDER, False)
    b_ptrs = corner(b, 0 * col, b_line, col, b_line, B_ORDER) + offsets(kk, b_line, j, b_line, B_ORDER, False)
    a_step = BK if A_ORDER == "row" else BK * a_line
    b_step = BK if B_ORDER == "col" else BK * b_line
    acc = tl.zeros((BM, BN), ACC)
    for _ in tl.range(0, steps, num_stages=STAGES):
        x = tl.load(a_ptrs)
        y = tl.load(b_ptrs)
        if INTERPRETED and a.dtype.element_ty == tl.bfloat16:
            x = x.to(tl.float32)
            y = y.to(tl.float32)
        acc = tl.dot(x, y, acc, input_precision=PRECISION, out_dtype=ACC)
        a_ptrs += a_step
        b_ptrs += b_step
    result = finish(acc, alpha_bits, alpha_bits, out, None, out, None, out.dtype.element_ty, ALPHA == "any", False,
                    False, ACTIVATION, INTERPRETED)  # fmt: skip
    out_ptrs = corner(out, row, out_line, col, out_line, OUT_ORDER) + offsets(
        i, out_line, j, out_line, OUT_ORDER, False)  # fmt: skip
    tl.store(out_ptrs, result)
