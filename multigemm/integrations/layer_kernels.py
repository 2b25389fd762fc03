# mypy: ignore-errors
"""The launches of a mixture-of-experts layer that are not products, each bound to the layer's memory.

With few pairs one kernel finds where each goes and copies its row there; with more, the counting sort's kernels run
and then one that gathers. The gate and the weighted sum are those of the layer that runs in steps: the same bits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from multigemm.integrations import gate_kernels, routing_kernels, sort_kernels
from multigemm.integrations.bound_kernels import bound
from multigemm.integrations.sort_kernels import BLOCK, MOST_EXPERTS, _known
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket

MOST_COLUMNS = 2048


@triton.jit(do_not_specialize=["total", "experts"])
def _place_kernel(pairs, x, rows, inverse, ends, total, experts, width, stride, K: tl.constexpr, SIZE: tl.constexpr,
                  BINS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    """Each program counts the pairs that go before its own, and copies a part of its row."""
    pair = tl.program_id(0)
    lane = tl.arange(0, SIZE)
    live = lane < total
    expert = _known(pairs, lane, live, experts)
    mine = _known(pairs, pair, True, experts)
    to = tl.sum((live & ((expert < mine) | ((expert == mine) & (lane < pair)))).to(tl.int32), 0)
    if tl.program_id(1) == 0:
        tl.store(inverse + pair, to.to(tl.int64))
        if pair == 0:
            bins = tl.arange(0, BINS)
            tl.store(ends + bins, tl.cumsum(tl.histogram(expert, BINS, mask=live), 0), mask=bins < experts)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    value = tl.load(x + (pair // K).to(tl.int64) * stride + cols, mask=inside)
    tl.store(rows + to.to(tl.int64) * width + cols, value, mask=inside)


@triton.jit
def _gather_kernel(x, order, rows, width, stride, K: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(order + row) // K
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = cols < width
    tl.store(rows + row * width + cols, tl.load(x + token * stride + cols, mask=inside), mask=inside)


def can(pairs: int, experts: int) -> bool:
    """Whether the counting sort takes so many experts."""
    return pairs > 0 and 0 < experts <= MOST_EXPERTS


def scratch(pairs: int, experts: int) -> tuple[int, int]:
    """Bytes for the order of pairs and for the counts of their blocks."""
    if pairs <= BLOCK:
        return 0, 0
    blocks, bins, _ = sort_kernels.cut(pairs, experts)
    return 8 * pairs, 4 * blocks * bins


def arrival(index, x, parts, device):
    """Launches that sort the pairs of `index` [tokens, k] by expert and bring their rows."""
    rows, inverse, ends, order = parts.rows, parts.inverse, parts.ends, parts.order
    pairs, experts, top_k, width = index.numel(), ends.shape[0], index.shape[1], x.shape[1]
    block = min(bucket(max(width, 16)), MOST_COLUMNS)
    grid, common = (pairs, tiles_of(width, block)), {"width": width, "stride": x.stride(0), "K": top_k, "BLOCK": block}
    if pairs <= BLOCK:
        known = {"total": pairs, "experts": experts, "SIZE": BLOCK, "BINS": max(16, bucket(experts + 1))}
        place = bound(_place_kernel, grid, device, pairs=index, x=x, rows=rows, inverse=inverse, ends=ends,
                      **known, **common)  # fmt: skip
        return [place]
    steps = sort_kernels.steps(index, order, inverse, ends, parts.counts)
    sort = [bound(kernel, shape, device, warps, **values) for kernel, shape, warps, values in steps]
    return [*sort, bound(_gather_kernel, grid, device, x=x, order=order, rows=rows, **common)]


def gate(hidden, out, gelu, device):
    """`out = act(gate) * up` for rows [gate | up]."""
    kernel, grid, values = gate_kernels.forward_step(hidden, out, gelu)
    return bound(kernel, grid, device, **values)


def home(rows, inverse, weights, out, device):
    """Each token's weighted sum."""
    kernel, grid, warps, values = routing_kernels.sum_step(rows, inverse, weights, out, weights.shape[1])
    return bound(kernel, grid, device, warps, **values)
