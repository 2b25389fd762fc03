# mypy: ignore-errors
"""Copies an operand that no tensor map can express into aligned rows, so that the fast kernel can read it.

Odd leading dimensions, unaligned bases, zero or non-unit strides: one pass over memory costs less
than element-wise loads in every tile wherever an operand is used by more than a few tiles.
"""

import triton
import triton.language as tl


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
