# mypy: ignore-errors
"""A counting sort of pairs by expert in Triton.

Where a pair goes is a count: of the pairs with a smaller expert, and of those with the same expert before it. Pairs
that fit one block count each other; else each block counts its experts, one program adds up, and each block
counts among its own. Only sums of integers, so the same bits each time.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multigemm.integrations.eager import on_device_of
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket

MOST_EXPERTS = 1023
BLOCK = 256  # counting a block costs its square
WIDE_BLOCK = 1024
TILE = 8192  # counts that one program adds up at a time
MOST_COUNTS = 64 * TILE


@triton.jit
def _known(pairs, at, live, experts):
    """Expert numbers; `experts` for those outside of 0..experts-1."""
    expert = tl.load(pairs + at, mask=live, other=0)
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)


@triton.jit
def _ahead(pairs, expert, first, lane, total, experts, ALL: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr):
    """How many pairs of a block go before each: those of its expert before it and, if ALL, of smaller experts."""
    ahead = tl.zeros((SIZE,), dtype=tl.int32)
    for start in range(0, SIZE, STEP):
        other = start + tl.arange(0, STEP)
        live = first + other < total
        theirs = tl.where(live, _known(pairs, first + other, live, experts), experts + 1)[None, :]
        before = (theirs == expert[:, None]) & (other[None, :] < lane[:, None])
        if ALL:
            before = before | (theirs < expert[:, None])
        ahead += tl.sum(before.to(tl.int32), 1)
    return ahead


@triton.jit(do_not_specialize=["total", "experts"])
def _one_block_kernel(pairs, order, inverse, ends, total, experts, SIZE: tl.constexpr, BINS: tl.constexpr):
    lane = tl.arange(0, SIZE)
    live = lane < total
    expert = _known(pairs, lane, live, experts)
    bins = tl.arange(0, BINS)
    tl.store(ends + bins, tl.cumsum(tl.histogram(expert, BINS, mask=live), 0), mask=bins < experts)
    to = _ahead(pairs, expert, 0, lane, total, experts, True, SIZE, 32)
    tl.store(order + to, lane.to(tl.int64), mask=live)
    tl.store(inverse + lane, to.to(tl.int64), mask=live)


@triton.jit(do_not_specialize=["total", "experts"])
def _count_kernel(pairs, counts, total, experts, SIZE: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    at = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < total
    found = tl.histogram(_known(pairs, at, live, experts), BINS, mask=live)
    tl.store(counts + block.to(tl.int64) * BINS + tl.arange(0, BINS), found)


@triton.jit(do_not_specialize=["blocks", "experts"])
def _start_kernel(counts, ends, blocks, experts, ROWS: tl.constexpr, BINS: tl.constexpr):
    """counts[block, expert] becomes where the first of that expert's pairs in that block goes."""
    bins, rows = tl.arange(0, BINS), tl.arange(0, ROWS)
    total = tl.zeros((BINS,), dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        at = (first + rows)[:, None] * BINS + bins[None, :]
        total += tl.sum(tl.load(counts + at, mask=(first + rows < blocks)[:, None], other=0), 0)
    last = tl.cumsum(total, 0)
    tl.store(ends + bins, last, mask=bins < experts)
    start = last - total
    for first in range(0, blocks, ROWS):
        at = (first + rows)[:, None] * BINS + bins[None, :]
        live = (first + rows < blocks)[:, None]
        found = tl.load(counts + at, mask=live, other=0)
        tl.store(counts + at, start[None, :] + tl.cumsum(found, 0) - found, mask=live)
        start += tl.sum(found, 0)


@triton.jit(do_not_specialize=["total", "experts"])
def _move_kernel(pairs, starts, order, inverse, total, experts, SIZE: tl.constexpr, BINS: tl.constexpr):
    block = tl.program_id(0)
    first = block * SIZE
    lane = tl.arange(0, SIZE)
    live = first + lane < total
    expert = _known(pairs, first + lane, live, experts)
    start = tl.load(starts + block.to(tl.int64) * BINS + expert, mask=live, other=0)
    to = start + _ahead(pairs, expert, first, lane, total, experts, False, SIZE, 32)
    tl.store(order + to, (first + lane).to(tl.int64), mask=live)
    tl.store(inverse + first + lane, to.to(tl.int64), mask=live)


def cut(total, experts):
    """Blocks of pairs, bins of each, and pairs in a block: counting a block costs its square, adding up its bins."""
    bins = max(16, bucket(experts + 1))
    size = BLOCK if tiles_of(total, BLOCK) * bins <= MOST_COUNTS else WIDE_BLOCK
    return tiles_of(total, size), bins, size


def steps(pairs, order, inverse, ends, counts):
    """Kernel, grid, warps and arguments of each launch; `counts` [blocks, bins] where there are several blocks."""
    total, experts = pairs.numel(), ends.shape[0]
    blocks, bins, size = cut(total, experts)
    known = {"total": total, "experts": experts, "SIZE": size, "BINS": bins}
    if total <= BLOCK:
        return [
            (_one_block_kernel, (1,), 4, {"pairs": pairs, "order": order, "inverse": inverse, "ends": ends, **known})
        ]
    rows = {"counts": counts, "ends": ends, "blocks": blocks, "experts": experts, "ROWS": TILE // bins, "BINS": bins}
    moved = {"pairs": pairs, "starts": counts, "order": order, "inverse": inverse, **known}
    return [
        (_count_kernel, (blocks,), 4, {"pairs": pairs, "counts": counts, **known}),
        (_start_kernel, (1,), 8, rows),
        (_move_kernel, (blocks,), 4, moved),
    ]


def sort_by_expert(pairs, experts):
    """pairs [S], S > 0 -> (order [S], inverse [S], ends [experts])."""
    pairs, total = pairs.contiguous(), pairs.shape[0]
    order, inverse = (torch.empty(total, dtype=torch.int64, device=pairs.device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=pairs.device)
    counts = None if total <= BLOCK else torch.empty(cut(total, experts)[:2], dtype=torch.int32, device=pairs.device)
    with on_device_of(pairs):
        for kernel, grid, warps, values in steps(pairs, order, inverse, ends, counts):
            kernel[grid](**values, num_warps=warps)
    return order, inverse, ends
