# mypy: ignore-errors
"""Triton kernels of the gates of a mixture-of-experts layer, forward and backward.

Plain torch moves rows five times in a gate forward, and some ten times backward. Here they are read and written once.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multigemm.backends.triton.kernels.epilogue import normal_area
from multigemm.integrations.layer_kernels import Step, columns_at_once, lined, run_steps, wide_type
from multigemm.planning.tiles import tiles_of
from multigemm.problem.fused import Gate
from multigemm.problem.spec import bucket

GATE_COLUMNS = 1024


@triton.jit
def act_parts(g, KIND: tl.constexpr, ALPHA: tl.constexpr):
    """(act(g), its derivative) of what a gate applies to g."""
    if KIND == "geglu":
        area = normal_area(g)
        act = g * area
        slope = area + g * tl.exp(-0.5 * g * g) * 0.3989422804014327
    elif KIND == "reglu":
        act = tl.where(g <= 0, 0.0, g)
        slope = tl.where(g <= 0, 0.0, 1.0).to(g.dtype)
    elif KIND == "geglu_tanh":
        # 0.5 * (1 + tanh(y)) = 1 / (1 + exp(-2 y))
        s = 1.0 / (1.0 + tl.exp(-1.5957691216057308 * (g + 0.044715 * g * g * g)))
        act = g * s
        slope = s + act * (1.0 - s) * 1.5957691216057308 * (1.0 + 0.134145 * g * g)
    elif KIND == "glu":
        act = 1.0 / (1.0 + tl.exp(-g))
        slope = act * (1.0 - act)
    else:
        s = 1.0 / (1.0 + tl.exp(-ALPHA * g))
        act = g * s
        slope = s * (1.0 + ALPHA * g * (1.0 - s))
    return act, slope


@triton.jit
def _load_gate(row, start, width, LAYOUT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """BLOCK columns of g and u from `start` on, of the row at this address; zeros behind the last."""
    if LAYOUT == "interleaved":  # side by side, so that a thread loads whole words
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        g, u = tl.split(tl.reshape(tl.load(row + both, mask=both < 2 * width, other=0.0), (BLOCK, 2)))
    else:
        cols = start + tl.arange(0, BLOCK)
        first = tl.load(row + cols, mask=cols < width, other=0.0)
        second = tl.load(row + width + cols, mask=cols < width, other=0.0)
        if LAYOUT == "halves":
            g, u = first, second
        else:
            g, u = second, first
    return g.to(WIDE), u.to(WIDE)


@triton.jit
def _store_gate(row, g, u, start, width, stored, LAYOUT: tl.constexpr, BLOCK: tl.constexpr):
    """Stores what belongs to columns of g and u from `start` on, as far as the first `stored` of `width`."""
    g, u = g.to(row.dtype.element_ty), u.to(row.dtype.element_ty)
    if LAYOUT == "interleaved":
        both = 2 * start + tl.arange(0, 2 * BLOCK)
        tl.store(row + both, tl.interleave(g, u), mask=both < 2 * stored)
    else:
        cols = start + tl.arange(0, BLOCK)
        if LAYOUT == "halves":
            first, second = g, u
        else:
            first, second = u, g
        tl.store(row + cols, first, mask=cols < stored)
        tl.store(row + width + cols, second, mask=cols < stored)


@triton.jit
def limited(g, u, BETA: tl.constexpr, LIMIT: tl.constexpr, WIDE: tl.constexpr):
    """(g, u + BETA) within their limits; NaN stays."""
    if LIMIT is not None:
        g = tl.where(g > LIMIT, LIMIT, g).to(WIDE)
        u = tl.where(u > LIMIT, LIMIT, tl.where(u < -LIMIT, -LIMIT, u)).to(WIDE)
    if BETA != 0:
        u = u + BETA
    return g, u


@triton.jit
def _gate_kernel(x, out, width, stride, KIND: tl.constexpr, LAYOUT: tl.constexpr, ALPHA: tl.constexpr,
                 BETA: tl.constexpr, LIMIT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    g, u = _load_gate(x + row * stride, start, width, LAYOUT, WIDE, BLOCK)
    g, u = limited(g, u, BETA, LIMIT, WIDE)
    act, _ = act_parts(g, KIND, ALPHA)
    cols = start + tl.arange(0, BLOCK)
    tl.store(out + row * width + cols, (act * u).to(out.dtype.element_ty), mask=cols < width)


@triton.jit
def _gate_backward_kernel(grad, x, dx, width, grad_stride, stride, KIND: tl.constexpr, WIDE: tl.constexpr,
                          BLOCK: tl.constexpr):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * BLOCK
    cols = start + tl.arange(0, BLOCK)
    d = tl.load(grad + row * grad_stride + cols, mask=cols < width, other=0.0).to(WIDE)
    g, u = _load_gate(x + row * stride, start, width, "halves", WIDE, BLOCK)
    act, slope = act_parts(g, KIND, 1.0)
    _store_gate(dx + row * 2 * width, d * u * slope, d * act, start, width, width, "halves", BLOCK)


def gate_constants(gate):
    """A problem's gate as compile-time constants of a kernel."""
    kind, layout, alpha, beta, limit = gate
    return {"KIND": kind, "LAYOUT": layout, "ALPHA": alpha, "BETA": beta, "LIMIT": limit}


def _usual_gate(gelu):
    return Gate("geglu" if gelu else "swiglu")


def _gate_grid(rows, width, dtype):
    """The grid of the forward and backward gate kernels, and what they know of columns."""
    block = columns_at_once(width, 16, GATE_COLUMNS)
    return (rows, tiles_of(width, block)), {"width": width, "WIDE": wide_type(dtype), "BLOCK": block}


def gate_step(gate, x, out):
    """The step that writes a problem's gate of the rows x [S, 2*I] to out [S, I]."""
    grid, values = _gate_grid(*out.shape, x.dtype)
    return Step(_gate_kernel, grid, 4, {"x": x, "out": out, "stride": x.stride(0), **values, **gate_constants(gate)})


def gated_rows(gate, x):
    """x [S, 2*I] -> [S, I], by a problem's gate."""
    x = lined(x)
    out = torch.empty(x.shape[0], x.shape[1] // 2, dtype=x.dtype, device=x.device)
    if out.numel():
        run_steps(x, gate_step(gate, x, out))
    return out


def gated(x, gelu):
    """The operator's: rows [gate | up] by GEGLU or SwiGLU."""
    return gated_rows(_usual_gate(gelu), x)


def gated_backward(grad, x, gelu):
    """The gradient of x."""
    x, grad = lined(x), lined(grad)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if dx.numel():
        grid, values = _gate_grid(x.shape[0], x.shape[1] // 2, x.dtype)
        memory = {"grad": grad, "x": x, "dx": dx, "grad_stride": grad.stride(0), "stride": x.stride(0)}
        run_steps(x, Step(_gate_backward_kernel, grid, 4, {**memory, **values, "KIND": _usual_gate(gelu).kind}))
    return dx


@triton.jit
def _pair_backward_kernel(preact, dh, order, weights, ends, dpreact, weighted, dweights, places, grad, bias, width,
                          experts, features, grad_stride, K: tl.constexpr, MOVED: tl.constexpr, BIAS: tl.constexpr,
                          KIND: tl.constexpr, LAYOUT: tl.constexpr, ALPHA: tl.constexpr, BETA: tl.constexpr,
                          LIMIT: tl.constexpr, WIDE: tl.constexpr, BINS: tl.constexpr,
                          BLOCK: tl.constexpr):  # fmt: skip
    """One pair that an expert has: the gradient of g and u, weight * h, and the gradient of the weight. The first two
    go to the pair's place if `MOVED`. Operands are read before it is known whether an expert has the pair."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row).to(tl.int64)
    place = row
    if MOVED:
        place = tl.load(places + row).to(tl.int64)
    there = row < tl.load(ends + experts - 1)
    weight = tl.load(weights + pair).to(WIDE)
    dot = tl.zeros((BLOCK,), dtype=WIDE)
    for start in range(0, width, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        d = tl.load(dh + row * width + cols, mask=cols < width, other=0.0).to(WIDE)
        given_g, given_u = _load_gate(preact + row * 2 * width, start, width, LAYOUT, WIDE, BLOCK)
        g, u = limited(given_g, given_u, BETA, LIMIT, WIDE)
        act, slope = act_parts(g, KIND, ALPHA)
        h = act * u
        dg, du = d * weight * u * slope, d * weight * act
        if LIMIT is not None:
            dg = tl.where(given_g <= LIMIT, dg, 0.0)
            du = tl.where((given_u <= LIMIT) & (given_u >= -LIMIT), du, 0.0)
        owned = tl.where(there, width, 0)  # as many columns are stored
        _store_gate(dpreact + place * 2 * width, dg, du, start, width, owned, LAYOUT, BLOCK)
        tl.store(weighted + place * width + cols, (h * weight).to(weighted.dtype.element_ty), mask=cols < owned)
        dot += d * h
    if BIAS:
        bins = tl.arange(0, BINS)
        before = tl.load(ends + bins, mask=bins < experts, other=0) <= row
        expert = tl.sum((before & (bins < experts)).to(tl.int64))
        flowing = tl.where(there, features, 0)
        for start in range(0, flowing, BLOCK):
            cols = start + tl.arange(0, BLOCK)
            flow = tl.load(grad + pair // K * grad_stride + cols, mask=cols < features, other=0.0).to(WIDE)
            dot += flow * tl.load(bias + expert * features + cols, mask=cols < features, other=0.0).to(WIDE)
    tl.store(dweights + pair, tl.sum(dot).to(dweights.dtype.element_ty), mask=there)


def pair_backward(gate, preact, dh, order, weights, ends, added=None, into=None):
    """(gradient of preact, weight * h, gradient of the weights [tokens, k]) of pairs `order`; all contiguous but
    `added`. Nothing is written of pairs that no expert has, but gradients of zero for their weights.

    `gate` is a problem's. `added`: the gradient of the layer's result, and the experts' biases that the results of the
    pairs had. `into`: memory for the first two, of more pairs, and the row of each pair there.
    """
    count, width = dh.shape
    if into is None:
        dpreact, weighted, places = torch.empty_like(preact), torch.empty_like(dh, dtype=preact.dtype), ends
    else:
        dpreact, weighted, places = into
    grad, bias = (dh, dh) if added is None else (lined(added[0]), added[1].contiguous())
    dweights = torch.zeros_like(weights)
    if dh.numel():
        experts = ends.shape[0]
        values = {
            "preact": preact, "dh": dh, "order": order, "weights": weights, "ends": ends, "dpreact": dpreact,
            "weighted": weighted, "dweights": dweights, "places": places, "grad": grad, "bias": bias, "width": width,
            "experts": experts, "features": bias.shape[1], "grad_stride": grad.stride(0), "K": weights.shape[1],
            "MOVED": into is not None, "BIAS": added is not None, "BINS": bucket(experts), **gate_constants(gate),
            "WIDE": wide_type(preact.dtype), "BLOCK": columns_at_once(width, 16, GATE_COLUMNS),
        }  # fmt: skip
        run_steps(dh, Step(_pair_backward_kernel, (count,), 4, values))
    return dpreact, weighted, dweights
