# mypy: ignore-errors
"""Triton kernels of gated activations: `act(gate) * up` in one pass, and its gradient in another.

Plain torch moves the hidden rows five times forward and some ten times backward, which costs as much as
a GEMM of a fine-grained mixture of experts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multigemm.backends.triton.kernels.epilogue import normal_area
from multigemm.integrations.eager import on_device_of
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket

BLOCK = 1024


@triton.jit
def _parts(gate, GELU: tl.constexpr):
    """(act(gate), its derivative)."""
    if GELU:
        area = normal_area(gate)
        slope = area + gate * tl.exp(-0.5 * gate * gate) * 0.3989422804014327
        return gate * area, slope
    s = 1.0 / (1.0 + tl.exp(-gate))
    return gate * s, s * (1.0 + gate * (1.0 - s))


@triton.jit
def _forward(x, out, width, stride, GELU: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < width
    gate = tl.load(x + row * stride + cols, mask=live, other=0.0).to(WIDE)
    up = tl.load(x + row * stride + width + cols, mask=live, other=0.0).to(WIDE)
    act, _ = _parts(gate, GELU)
    tl.store(out + row * width + cols, (act * up).to(out.dtype.element_ty), mask=live)


@triton.jit
def _backward(grad, x, dx, width, grad_stride, stride, GELU: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < width
    g = tl.load(grad + row * grad_stride + cols, mask=live, other=0.0).to(WIDE)
    gate = tl.load(x + row * stride + cols, mask=live, other=0.0).to(WIDE)
    up = tl.load(x + row * stride + width + cols, mask=live, other=0.0).to(WIDE)
    act, slope = _parts(gate, GELU)
    target = dx + row * 2 * width + cols
    tl.store(target, (g * up * slope).to(dx.dtype.element_ty), mask=live)
    tl.store(target + width, (g * act).to(dx.dtype.element_ty), mask=live)


def _shape(rows, width, dtype, gelu):
    """Grid and constants of either kernel."""
    block = min(bucket(max(width, 16)), BLOCK)
    wide = tl.float64 if dtype is torch.float64 else tl.float32
    return (rows, tiles_of(width, block)), {"width": width, "GELU": gelu, "WIDE": wide, "BLOCK": block}


def forward_step(x, out, gelu):
    """Kernel, grid and arguments of the forward launch."""
    grid, values = _shape(*out.shape, x.dtype, gelu)
    return _forward, grid, {"x": x, "out": out, "stride": x.stride(0), **values}


def gated(x, gelu):
    """x [S, 2*I] -> [S, I]."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        kernel, grid, values = forward_step(x, out, gelu)
        with on_device_of(x):
            kernel[grid](**values)
    return out


def gated_backward(grad, x, gelu):
    """The gradient of x."""
    x = x if x.stride(1) == 1 else x.contiguous()
    grad = grad if grad.stride(1) == 1 else grad.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        grid, values = _shape(x.shape[0], x.shape[1] // 2, x.dtype, gelu)
        with on_device_of(x):
            _backward[grid](grad=grad, x=x, dx=dx, grad_stride=grad.stride(0), stride=x.stride(0), **values)
    return dx
