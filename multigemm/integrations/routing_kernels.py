# mypy: ignore-errors
"""Triton kernels of the routing: a token's rows are read where they lie, so no sorted copy is made on the way home.

In plain torch a weighted sum over k gathered rows moves every row four times (gather, multiply, sum);
here once. One program owns one token, and sums in a fixed order: the same bits each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multigemm.integrations.eager import on_device_of
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket

MOST = 2048  # columns per step


@triton.jit
def _sum_kernel(rows, index, weights, out, width, stride, K: tl.constexpr, WEIGHTED: tl.constexpr,
                WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < width
    acc = tl.zeros((BLOCK,), dtype=WIDE)
    for j in tl.static_range(K):
        row = tl.load(index + token * K + j).to(tl.int64)
        value = tl.load(rows + row * stride + cols, mask=live, other=0.0).to(WIDE)
        if WEIGHTED:
            value *= tl.load(weights + token * K + j).to(WIDE)
        acc += value
    tl.store(out + token * width + cols, acc.to(out.dtype.element_ty), mask=live)


@triton.jit
def _backward_kernel(grad, rows, index, weights, drows, dweights, width, grad_stride, stride, K: tl.constexpr,
                     WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    for j in tl.static_range(K):
        row = tl.load(index + token * K + j).to(tl.int64)
        weight = tl.load(weights + token * K + j).to(WIDE)
        dot = tl.zeros((BLOCK,), dtype=WIDE)
        for start in range(0, width, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            live = cols < width
            g = tl.load(grad + token * grad_stride + cols, mask=live, other=0.0).to(WIDE)
            dot += g * tl.load(rows + row * stride + cols, mask=live, other=0.0).to(WIDE)
            tl.store(drows + row * width + cols, (g * weight).to(drows.dtype.element_ty), mask=live)
        tl.store(dweights + token * K + j, tl.sum(dot).to(dweights.dtype.element_ty))


def _block(width: int) -> int:
    return min(bucket(max(width, 1)), MOST)


def _wide(dtype: torch.dtype):
    return tl.float64 if dtype is torch.float64 else tl.float32


def sum_step(rows, index, weights, out, top_k):
    """Kernel, grid, warps and arguments of a weighted sum; all tensors contiguous along their last dimension."""
    width = rows.shape[1]
    block = _block(width)
    values = {
        "rows": rows, "index": index, "weights": rows if weights is None else weights, "out": out, "width": width,
        "stride": rows.stride(0), "K": top_k, "WEIGHTED": weights is not None, "WIDE": _wide(rows.dtype),
        "BLOCK": block,
    }  # fmt: skip
    return _sum_kernel, (out.shape[0], tiles_of(width, block)), 4 if block > 256 else 1, values


def weighted_sum(rows, index, weights, top_k):
    """out[t] = sum over j of weights[t, j] * rows[index[t * k + j]]."""
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    out = torch.empty(index.shape[0] // top_k, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        weights = None if weights is None else weights.contiguous()
        kernel, grid, warps, values = sum_step(rows, index, weights, out, top_k)
        with on_device_of(rows):
            kernel[grid](**values, num_warps=warps)
    return out


def weighted_sum_backward(grad, rows, index, weights):
    """(gradient of rows, gradient of weights); every row is the target of exactly one pair."""
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    drows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    dweights = torch.zeros(weights.shape, dtype=weights.dtype, device=rows.device)
    if drows.numel():
        block = _block(rows.shape[1])
        with on_device_of(rows):
            _backward_kernel[(weights.shape[0],)](
                grad, rows, index, weights.contiguous(), drows, dweights, rows.shape[1], grad.stride(0),
                rows.stride(0), K=weights.shape[1], WIDE=_wide(rows.dtype), BLOCK=block,
                num_warps=4 if block > 256 else 1,
            )  # fmt: skip
    return drows, dweights
