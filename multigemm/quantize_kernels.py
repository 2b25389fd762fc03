# mypy: ignore-errors
"""The Triton kernel of `quantize` to float8, for scales that no group cuts. It gives the same bits as quantize.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

LONGEST_ROW = 8192
"""The largest K that a program holds at once, for a scale of a whole row."""
ELEMENTS = 4096
"""The elements that a program handles, where scales cover less."""


@triton.jit
def rounded(size, FRACTION: tl.constexpr):
    """The codes of sizes from 0 to the largest number, rounded to nearest, ties to even: e4m3 (3 bits of a fraction) or
    e5m2 (2). Added to 2^23 times their spacing,
    subnormal numbers leave their codes in the low bits."""
    BIAS: tl.constexpr = 7 if FRACTION == 3 else 15
    AROUND: tl.constexpr = 16384.0 if FRACTION == 3 else 128.0
    DROPPED: tl.constexpr = 23 - FRACTION
    bits = size.to(tl.int32, bitcast=True)
    even = (bits >> DROPPED) & 1
    normal = ((bits + even + ((1 << (DROPPED - 1)) - 1)) >> DROPPED) - ((127 - BIAS) << FRACTION)
    low = (size + AROUND).to(tl.int32, bitcast=True) & 0xFF
    return tl.where(bits < ((128 - BIAS) << 23), low, normal)


@triton.jit
def quantize_kernel(x, data, scale, lines, k, x_group, x_line, x_k, data_group, scale_group, scale_line, scale_k,
                    TOP: tl.constexpr, E8M0: tl.constexpr, SQUARE: tl.constexpr, ROWS: tl.constexpr,
                    BLOCK: tl.constexpr, FRACTION: tl.constexpr):  # fmt: skip
    """One program: ROWS lines by one block of K, with a number for each line or (SQUARE) for all of them."""
    group = tl.program_id(2).to(tl.int64)
    line = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    deep = tl.program_id(1).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = (line < lines)[:, None] & (deep < k)[None, :]
    values = tl.load(x + group * x_group + line[:, None] * x_line + deep[None, :] * x_k, mask=live, other=0)
    values = values.to(tl.float32)
    magnitude = tl.abs(values)
    finite = magnitude < float("inf")
    high = tl.max(tl.where(finite, magnitude, 0.0), 1)
    if SQUARE:
        high = tl.max(high, 0) + tl.zeros((ROWS,), tl.float32)
    span = tl.maximum(tl.div_rn(high * 0.5, tl.zeros_like(high) + TOP * 0.5), 1.1754943508222875e-38)
    number = tl.where(high == 0.0, 1.0, span)
    if E8M0:
        bits = number.to(tl.int32, bitcast=True)
        code = (bits >> 23) + tl.where((bits & 0x7FFFFF) != 0, 1, 0)
        kept = code.to(tl.uint8)
        number = (code << 23).to(tl.float32, bitcast=True)
    else:
        kept = number
    quotient = tl.div_rn(magnitude, number[:, None] + tl.zeros_like(values))
    codes = rounded(tl.minimum(tl.where(finite, quotient, 0.0), TOP), FRACTION)
    sign = (values.to(tl.int32, bitcast=True) >> 24) & 0x80
    codes = tl.where(finite, codes | sign, 0x7F).to(tl.uint8)
    tl.store(data + group * data_group + line[:, None] * k + deep[None, :], codes, mask=live)
    places = scale + group * scale_group + tl.program_id(1).to(tl.int64) * scale_k
    if SQUARE:
        one = tl.arange(0, ROWS) == 0
        tl.store(places + tl.program_id(0).to(tl.int64) * scale_line + line * 0, kept, mask=one)
    else:
        tl.store(places + line * scale_line, kept, mask=line < lines)


def takes(x: torch.Tensor, scale: str) -> bool:
    """Whether the kernel can quantise this stack [groups, lines, K] with scales of this kind."""
    if scale == "row":
        return 0 < x.shape[2] <= LONGEST_ROW and x.numel() > 0
    return scale in ("1x32", "1x64", "1x128", "128x128") and x.numel() > 0


def quantised(
    x: torch.Tensor, dtype: torch.dtype, top: float, scale: str, e8m0: bool, grid: torch.Tensor
) -> torch.Tensor:
    """The data of a stack [groups, lines, K]; its scales are written into `grid` [groups, entries, blocks]."""
    groups, lines, k = x.shape
    data = torch.empty((groups, lines, k), dtype=dtype, device=x.device)
    square, block = scale == "128x128", triton.next_power_of_2(k)
    if scale != "row":
        block = int(scale.partition("x")[2])
    rows = 128 if square else max(1, ELEMENTS // block)
    stored = grid.view(torch.uint8) if e8m0 else grid
    programs = (triton.cdiv(lines, rows), triton.cdiv(k, block), groups)
    quantize_kernel[programs](
        x, data.view(torch.uint8), stored, lines, k, *x.stride(), lines * k, *grid.stride(), TOP=top, E8M0=e8m0,
        SQUARE=square, ROWS=rows, BLOCK=block, FRACTION=3 if dtype is torch.float8_e4m3fn else 2,
        num_warps=8 if rows * block > ELEMENTS else 4,
    )  # fmt: skip
    return data
