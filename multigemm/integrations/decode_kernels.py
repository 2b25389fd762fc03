# mypy: ignore-errors
"""Triton kernels of a mixture-of-experts layer for one token or a few, whose time is that of reading weights.

Two launches, without a sort. A program of the first one multiplies one pair's row by a few columns of its expert's
weights, and applies the gate; a program of the second one computes a few columns of one token, all pairs in one sum.
Weights are read while earlier ones are multiplied. Every sum has one order, so the same call gives the same bits. The
second launch starts while the first one still runs, and waits for it before it reads rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multigemm.backends.triton.build import starts_early
from multigemm.integrations.gate_kernels import act_parts, gate_constants, limited
from multigemm.integrations.layer_kernels import Step, lined, run_steps, wide_type
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket

# Best of some tiles each for the products of four models with one token, H200, 2026-11-23.
GATED_COLUMNS, WHOLE_BYTES, GATED_BYTES, GATED_STAGES = 2, 4096, 1024, 3
"""Columns of g and of u that a program of the first product computes. It reads all of a short column at once, else this
many bytes, and that many such pieces lie in shared memory."""
SUMMED_BYTES = 8192
"""The bytes that a program of the second product reads at once."""
FEW_COLUMNS, MANY_COLUMNS = 4, 8
"""The columns that a program of the second product computes: many where there are PROGRAMS programs then."""
PROGRAMS = 512
WARPS = 4


@triton.jit
def _weights(first, column_at, live, line, last):
    """Columns of a matrix at some lines; zeros from line `last` on. Nothing reads them again."""
    at = first + column_at[:, None] + line[None, :]
    return tl.load(at, mask=live[:, None] & (line < last)[None, :], other=0.0, eviction_policy="evict_first")


@triton.jit
def _gated_kernel(x, pairs, up, bias, hidden, experts, width, inner, top_k, x_stride, expert_stride, column_stride,
                  BIAS: tl.constexpr, KIND: tl.constexpr, LAYOUT: tl.constexpr, ALPHA: tl.constexpr,
                  BETA: tl.constexpr, LIMIT: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr,
                  BLOCK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """hidden[pair] = gate(x[token] @ up[expert] + bias), for COLUMNS columns of it."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    pair, first = tl.program_id(0), tl.program_id(1) * COLUMNS
    expert = tl.load(pairs + pair).to(tl.int64)
    if (expert < 0) | (expert >= experts):
        return
    lane = tl.arange(0, 2 * COLUMNS)
    if LAYOUT == "interleaved":
        columns = 2 * first + lane
        live = columns < 2 * inner
    else:
        feature = first + lane % COLUMNS
        columns = feature + lane // COLUMNS * inner
        live = feature < inner
    row, column_at = x + (pair // top_k).to(tl.int64) * x_stride, columns.to(tl.int64) * column_stride
    within = tl.arange(0, BLOCK)
    acc = tl.zeros((2 * COLUMNS, BLOCK), dtype=WIDE)
    for start in tl.range(0, width, BLOCK, num_stages=STAGES):
        line = start + within
        value = tl.load(row + line, mask=line < width, other=0.0).to(WIDE)
        acc += _weights(up + expert * expert_stride, column_at, live, line, width).to(WIDE) * value[None, :]
    both = tl.sum(acc, 1)
    if BIAS:
        both += tl.load(bias + expert * 2 * inner + columns, mask=live, other=0.0).to(WIDE)
    if LAYOUT == "interleaved":
        g, u = tl.split(tl.reshape(both, (COLUMNS, 2)))
    else:
        g, u = tl.split(tl.trans(tl.reshape(both, (2, COLUMNS))))
        if LAYOUT == "halves_up_first":
            g, u = u, g
    g, u = limited(g, u, BETA, LIMIT, WIDE)
    act, _ = act_parts(g, KIND, ALPHA)
    at = first + tl.arange(0, COLUMNS)
    tl.store(hidden + pair.to(tl.int64) * inner + at, (act * u).to(hidden.dtype.element_ty), mask=at < inner)


@triton.jit
def _summed_kernel(hidden, pairs, weights, down, bias, out, experts, inner, width, top_k, expert_stride, column_stride,
                   BIAS: tl.constexpr, WIDE: tl.constexpr, COLUMNS: tl.constexpr, BLOCK: tl.constexpr,
                   STAGES: tl.constexpr, TOP: tl.constexpr, EARLY: tl.constexpr):  # fmt: skip
    """out[token] = the sum over its pairs of weight * (hidden[pair] @ down[expert] + bias), for COLUMNS columns."""
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    live, column_at = columns < width, columns.to(tl.int64) * column_stride
    within, lane = tl.arange(0, BLOCK), tl.arange(0, TOP)
    chosen = tl.load(pairs + token * top_k + lane, mask=lane < top_k, other=0)
    there = (lane < top_k) & (chosen >= 0) & (chosen < experts)
    chosen = tl.where(there, chosen, 0).to(tl.int32)
    weight = tl.load(weights + token * top_k + lane, mask=there, other=0.0).to(WIDE)
    first = hidden + token * top_k * inner
    acc = tl.zeros((COLUMNS, BLOCK), dtype=WIDE)
    blocks = (inner + BLOCK - 1) // BLOCK
    if EARLY:
        tl.extra.cuda.gdc_wait()
    for at in tl.range(0, top_k * blocks, num_stages=STAGES):
        # from registers: a load of the expert's number would be a stage of its own before that of its weights
        mine = there & (lane == at // blocks)
        expert = tl.sum(tl.where(mine, chosen, 0), 0).to(tl.int64)
        last = tl.where(tl.sum(mine.to(tl.int32), 0) > 0, inner, 0)
        line = at % blocks * BLOCK + within
        value = tl.load(first + at // blocks * inner + line, mask=line < last, other=0.0).to(WIDE)
        value *= tl.sum(tl.where(mine, weight, 0.0), 0)
        acc += _weights(down + expert * expert_stride, column_at, live, line, last).to(WIDE) * value[None, :]
    result = tl.sum(acc, 1)
    if BIAS:
        for j in range(top_k):
            expert = tl.load(pairs + token * top_k + j).to(tl.int64)
            if (expert >= 0) & (expert < experts):
                scale = tl.load(weights + token * top_k + j).to(WIDE)
                result += scale * tl.load(bias + expert * width + columns, mask=live, other=0.0).to(WIDE)
    tl.store(out + token * width + columns, result.to(out.dtype.element_ty), mask=live)


def decode_steps(net, x, index, weights, up, down, up_bias, down_bias, hidden, out):
    """The steps of a layer with a gate, for hidden [pairs, I]. Lines of weights are contiguous, [E, W, H] and
    [E, H, I]."""
    (tokens, top_k), (pairs, inner), width, size = index.shape, hidden.shape, x.shape[1], x.element_size()
    early = x.is_cuda and starts_early(x.get_device())
    known = {
        "pairs": index, "hidden": hidden, "experts": up.shape[0], "inner": inner, "width": width, "top_k": top_k,
        "WIDE": wide_type(x.dtype), "EARLY": early,
    }  # fmt: skip
    gated = {
        "x": x, "up": up, "bias": up if up_bias is None else up_bias, "BIAS": up_bias is not None,
        "x_stride": x.stride(0), "expert_stride": up.stride(0), "column_stride": up.stride(1),
        "COLUMNS": GATED_COLUMNS, **gate_constants(net.gate),
    }  # fmt: skip
    whole = width * size <= WHOLE_BYTES
    gated |= {"BLOCK": bucket(width) if whole else GATED_BYTES // size, "STAGES": 1 if whole else GATED_STAGES}
    columns = MANY_COLUMNS if tokens * width >= MANY_COLUMNS * PROGRAMS else FEW_COLUMNS
    summed = {
        "weights": weights, "down": down, "bias": down if down_bias is None else down_bias, "out": out,
        "BIAS": down_bias is not None, "expert_stride": down.stride(0), "column_stride": down.stride(1),
        "COLUMNS": columns, "BLOCK": SUMMED_BYTES // columns // size, "STAGES": 3 if columns == MANY_COLUMNS else 4,
        "TOP": max(bucket(top_k), 2),
    }  # fmt: skip
    return [
        Step(_gated_kernel, (pairs, tiles_of(inner, GATED_COLUMNS)), WARPS, {**known, **gated}),
        Step(_summed_kernel, (tokens, tiles_of(width, columns)), WARPS, {**known, **summed}, waits=early),
    ]


def decode(net, x, index, weights, up, down, up_bias, down_bias):
    """The layer's result [tokens, H]."""
    x, index, weights = lined(x), index.contiguous(), weights.contiguous()
    hidden, out = x.new_empty((index.numel(), down.shape[2])), x.new_empty(x.shape)
    run_steps(x, *decode_steps(net, x, index, weights, up, down, up_bias, down_bias, hidden, out))
    return out
