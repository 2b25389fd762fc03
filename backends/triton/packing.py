# mypy: ignore-errors
"""Copies an operand that no tensor map can express into aligned rows, so that the fast kernel can read it.

Odd leading dimensions, unaligned bases, zero or non-unit strides: one pass over memory costs less
than element-wise loads in every tile wherever an operand is used by more than a few tiles.
"""

import triton
import triton.language as tl


@triton.jit
def pack_kernel(source, target, rows, columns, group, row, col, target_group, target_row,
                BM: tl.constexpr, BN: tl.constexpr, ALONG_ROWS: tl.constexpr):  # fmt: skip
    """target[g, i, j] = source[g, i, j] for one block; the grid is flat over (g, block of rows, block of columns)."""
    across = (columns + BN - 1) // BN
    down = (rows + BM - 1) // BM
    block = tl.program_id(0).to(tl.int64)
    g = block // (across * down)
    i = (block // across % down) * BM + tl.arange(0, BM)
    j = (block % across) * BN + tl.arange(0, BN)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    base = source + g * group
    if ALONG_ROWS:
        read = base + i[:, None] * row + j[None, :]
    else:
        read = base + i[:, None] * row + j[None, :] * col
    values = tl.load(read, mask=inside, other=0)
    tl.store(target + g * target_group + i[:, None] * target_row + j[None, :], values, mask=inside)
