# mypy: ignore-errors
"""Triton kernels of a mixture-of-experts layer: its sort, its gathers and its sums.

Plain torch moves rows again and again: a weighted sum over k gathered rows moves each four times. Here rows are read
where they lie, once. All sums are of integers or in a fixed order, so the same call gives the same bits.

The functions of the operators run steps at once; a layer that is bound as a whole (bound_layer.py) takes the same steps
and binds them to its memory.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from multigemm.backends.triton.build import starts_early
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket
from multigemm.torch_internals import on_device_of


class Step(NamedTuple):
    """A launch of a kernel. `waits`: by itself, until the launch before it is over, so that it may start early."""

    kernel: Any
    grid: tuple
    warps: int
    values: dict
    waits: bool = False


def run_steps(x, *steps):
    """Runs steps on the device of x."""
    with on_device_of(x):
        for kernel, grid, warps, values, waits in steps:
            early = {"launch_pdl": True} if waits else {}
            kernel[grid](**values, num_warps=warps, **early)


def lined(x):
    """x with a last stride of 1, copied if need be."""
    return x if x.stride(1) == 1 else x.contiguous()


def columns_at_once(width, least, most):
    """The number of columns that a program handles at once."""
    return min(bucket(max(width, least)), most)


def wide_type(dtype):
    return tl.float64 if dtype is torch.float64 else tl.float32


# --- a counting sort of pairs by expert -------------------------------------------------------------
#
# A program puts one block of pairs into order. Where the first of an expert's pairs in the block goes is a count: of
# all pairs with a smaller expert, and of those with the same expert in the blocks before. For a few blocks each program
# counts all pairs itself; for many, two launches before it count blocks and add them up.

MOST_EXPERTS = 1023
SORT_BLOCK, LEAST_SORT_BLOCK = 1024, 128
COUNTING_BLOCKS = 8
"""The largest number of blocks whose programs count all pairs themselves."""
START_EXPERTS, START_BLOCKS = 16, 128  # experts whose counts one program adds up, and blocks of them at a time


@triton.jit
def _known(pairs, at, live, experts):
    """Expert numbers; `experts` for those outside of 0..experts-1."""
    expert = tl.load(pairs + at, mask=live, other=0)
    return tl.where((expert >= 0) & (expert < experts), expert, experts).to(tl.int32)


@triton.jit
def _fetch_ahead(expert, live, weights, program, experts, expert_stride, line_stride, lines, BINS: tl.constexpr,
                 FETCH: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """Brings beginnings of lines of the weights of the first experts that have pairs into the L2 cache."""
    bins = tl.arange(0, BINS)
    there = ((tl.histogram(expert, BINS, mask=live) > 0) & (bins < experts)).to(tl.int32)
    chunks = (lines + LINES - 1) // LINES
    asked = program // chunks
    found = tl.sum(tl.where((there > 0) & (tl.cumsum(there, 0) == asked + 1), bins, 0))
    line = program % chunks * LINES + tl.arange(0, LINES)
    at = weights + found.to(tl.int64) * expert_stride + line.to(tl.int64) * line_stride
    wanted = ((line < lines) & (tl.sum(there) > asked)).to(tl.int32)
    tl.inline_asm_elementwise(FETCH, "=r,l,r", [at, wanted], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["total", "experts"])
def _count_kernel(pairs, counts, total, experts, SIZE: tl.constexpr, BINS: tl.constexpr):
    """counts[block, expert]: the block's pairs of this expert and of smaller ones."""
    block = tl.program_id(0)
    at = block.to(tl.int64) * SIZE + tl.arange(0, SIZE)
    live = at < total
    found = tl.histogram(_known(pairs, at, live, experts), BINS, mask=live)
    tl.store(counts + block.to(tl.int64) * BINS + tl.arange(0, BINS), tl.cumsum(found, 0))


@triton.jit(do_not_specialize=["blocks", "experts"])
def _start_kernel(counts, ends, blocks, experts, ROWS: tl.constexpr, BINS: tl.constexpr, PART: tl.constexpr):
    """Behind the counts: where the first of an expert's pairs in a block goes. A program takes PART experts."""
    bins, rows = tl.program_id(0) * PART + tl.arange(0, PART), tl.arange(0, ROWS)
    start, last = tl.zeros((PART,), dtype=tl.int32), tl.zeros((PART,), dtype=tl.int32)
    for first in range(0, blocks, ROWS):
        at = (first + rows)[:, None] * BINS + bins[None, :]
        live = (first + rows < blocks)[:, None]
        start += tl.sum(tl.load(counts + at - 1, mask=live & (bins > 0)[None, :], other=0), 0)
        last += tl.sum(tl.load(counts + at, mask=live, other=0), 0)
    tl.store(ends + bins, last, mask=bins < experts)
    for first in range(0, blocks, ROWS):
        at = (first + rows)[:, None] * BINS + bins[None, :]
        live = (first + rows < blocks)[:, None]
        smaller = tl.load(counts + at - 1, mask=live & (bins > 0)[None, :], other=0)
        found = tl.load(counts + at, mask=live, other=0) - smaller
        tl.store(counts + blocks * BINS + at, start[None, :] + tl.cumsum(found, 0) - found, mask=live)
        start += tl.sum(found, 0)


@triton.jit(do_not_specialize=["total", "experts", "blocks", "lines"])
def _sort_kernel(pairs, starts, order, inverse, ends, rows, weights, total, experts, blocks, expert_stride, line_stride,
                 lines, COUNTED: tl.constexpr, K: tl.constexpr, ORDER: tl.constexpr, SIZE: tl.constexpr,
                 BINS: tl.constexpr, EARLY: tl.constexpr, FETCH: tl.constexpr, LINES: tl.constexpr):  # fmt: skip
    """Sorts one block. COUNTED: `starts` says where its pairs go, else all pairs are counted here. Programs behind
    those of the blocks fetch weights ahead, if `FETCH` is the instruction that does."""
    if EARLY:  # the launch behind it, which waits for it
        tl.extra.cuda.gdc_launch_dependents()
    block, lane, bins = tl.program_id(0), tl.arange(0, SIZE), tl.arange(0, BINS)
    if FETCH != "":  # noqa: SIM102  (known to the compiler, unlike what follows)
        if block >= blocks:
            live = lane < total
            _fetch_ahead(_known(pairs, lane, live, experts), live, weights, block - blocks, experts, expert_stride,
                         line_stride, lines, BINS, FETCH, LINES)  # fmt: skip
            return
    first = block * SIZE
    live = first + lane < total
    expert = _known(pairs, first + lane, live, experts)
    own = tl.histogram(expert, BINS, mask=live)
    if COUNTED:
        start = tl.load(starts + (blocks + block) * BINS + bins)
    else:
        before, every = tl.zeros((BINS,), dtype=tl.int32), tl.zeros((BINS,), dtype=tl.int32)
        for other in range(blocks):
            at = other * SIZE + lane
            found = tl.histogram(_known(pairs, at, at < total, experts), BINS, mask=at < total)
            before += tl.where(other < block, found, 0)
            every += found
        upto = tl.cumsum(every, 0)
        if block == 0:
            tl.store(ends + bins, upto, mask=bins < experts)
        start = upto - every + before
    place = start - (tl.cumsum(own, 0) - own)  # of an expert's first pair, less its place in the block
    key = tl.sort(tl.where(live, expert, BINS) * SIZE + lane)
    live = key < BINS * SIZE
    to = tl.gather(place, tl.where(live, key // SIZE, 0), 0) + lane
    pair = first + key % SIZE
    if ORDER:
        tl.store(order + to, pair.to(order.dtype.element_ty), mask=live)
    tl.store(inverse + pair, to.to(inverse.dtype.element_ty), mask=live)
    if K > 0:
        tl.store(rows + to, pair // K, mask=live)


def sort_blocks(total, experts):
    """The number of blocks of pairs, bins of a block, and pairs of a block."""
    size = min(max(LEAST_SORT_BLOCK, bucket(total)), SORT_BLOCK)
    return tiles_of(total, size), max(16, bucket(experts + 1)), size


AT_ONCE_COLUMNS = 132 * 128
"""The columns of weights that all multiprocessors usually multiply at once."""
AHEAD_BYTES = 24 << 20
"""The largest number of bytes of weights to fetch ahead: what memory delivers while pairs are sorted and the first
product starts, and half of the cache."""
AHEAD_LINES = 128
NOTHING_AHEAD = {"expert_stride": 0, "line_stride": 0, "lines": 0, "FETCH": ""}
LEAST_PIECE = 512
"""The bytes of a line from which on fetching it ahead is worth an instruction."""
FETCH = """{{
    .reg .pred wanted;
    setp.ne.s32 wanted, $2, 0;
    @wanted cp.async.bulk.prefetch.L2.global [$1], {};
    mov.u32 $0, 0;
}}"""


def weights_ahead(weights, stacked, pairs):
    """(programs, arguments) of the sort of so many pairs for fetching the weights [E, out, in] of the product behind it
    ahead, or `stacked` [E, in, out]: a part of the sums of all columns that are multiplied first. None where that is of
    no use, or the instruction does not exist or takes no such addresses."""
    experts, outer, inner = weights.shape
    size, columns = weights.element_size(), inner if stacked else outer
    if not (weights.is_cuda and starts_early(weights.get_device())) or weights.stride(2) != 1 or not weights.numel():
        return None
    if (weights.data_ptr() | weights.stride(0) * size | weights.stride(1) * size) % 16:
        return None
    first = min(pairs, experts, tiles_of(AT_ONCE_COLUMNS, columns))
    if stacked:
        piece = inner * size // 16 * 16
        lines = min(outer, AHEAD_BYTES // (first * max(piece, 1)))
    else:
        lines = min(outer, AT_ONCE_COLUMNS)
        piece = min(inner * size, AHEAD_BYTES // (first * lines)) // 16 * 16
    if piece < LEAST_PIECE or not lines:
        return None
    values = {"weights": weights, "expert_stride": weights.stride(0), "line_stride": weights.stride(1), "lines": lines,
              "FETCH": FETCH.format(piece)}  # fmt: skip
    return first * tiles_of(lines, AHEAD_LINES), values


def sort_steps(pairs, order, inverse, ends, counts, rows=None, top_k=0, ahead=None):
    """`counts` (`sort_scratch`) is used where there are many blocks; `rows` (int32) receives the pairs' tokens.

    `order` may be None; it and `inverse` are int32 or int64. `ahead`: what the sort of a few blocks fetches besides
    (`weights_ahead`).
    """
    total, experts = pairs.numel(), ends.shape[0]
    blocks, bins, size = sort_blocks(total, experts)
    counted, warps = blocks > COUNTING_BLOCKS, 8 if size > 256 else 4
    programs, fetched = (0, NOTHING_AHEAD) if ahead is None or counted else ahead
    known = {"total": total, "experts": experts, "SIZE": size, "BINS": bins}
    told = {
        "pairs": pairs, "starts": counts if counted else ends, "order": inverse if order is None else order,
        "inverse": inverse, "ends": ends, "rows": inverse if rows is None else rows, "weights": pairs, "blocks": blocks,
        "COUNTED": counted, "K": top_k, "ORDER": order is not None, "LINES": AHEAD_LINES,
        "EARLY": pairs.is_cuda and starts_early(pairs.get_device()), **known, **fetched,
    }  # fmt: skip
    sort = Step(_sort_kernel, (blocks + programs,), warps, told)
    if not counted:
        return [sort]
    starts = {
        "counts": counts, "ends": ends, "blocks": blocks, "experts": experts, "ROWS": START_BLOCKS, "BINS": bins,
        "PART": START_EXPERTS,
    }  # fmt: skip
    count = Step(_count_kernel, (blocks,), warps, {"pairs": pairs, "counts": counts, **known})
    return [count, Step(_start_kernel, (bins // START_EXPERTS,), 8, starts), sort]


def sort_by_expert(pairs, experts):
    """Sorts pairs [S], S > 0. Returns (order [S], inverse [S], ends [experts])."""
    pairs, total = pairs.contiguous(), pairs.shape[0]
    order, inverse = (torch.empty(total, dtype=torch.int64, device=pairs.device) for _ in range(2))
    ends = torch.empty(experts, dtype=torch.int32, device=pairs.device)
    counts = torch.empty(sort_scratch(total, experts) // 4, dtype=torch.int32, device=pairs.device)
    run_steps(pairs, *sort_steps(pairs, order, inverse, ends, counts))
    return order, inverse, ends


def sort_pairs(index, experts, order=None, up=None, stacked=False):
    """index [tokens, k] -> (tokens of the pairs by expert [S], where each pair went [tokens, k], ends), all int32.

    `order` [S] (int32) receives which pair each one was; `up`: weights of the product behind it, `stacked` or not.
    """
    index, total = index.contiguous(), index.numel()
    ahead = None if up is None else weights_ahead(up, stacked, total)
    rows, place, ends = (torch.empty(n, dtype=torch.int32, device=index.device) for n in (total, total, experts))
    counts = torch.empty(sort_scratch(total, experts) // 4, dtype=torch.int32, device=index.device)
    run_steps(index, *sort_steps(index, order, place, ends, counts, rows, index.shape[1], ahead))
    return rows, place.view(index.shape), ends


# --- rows to their experts --------------------------------------------------------------------------

MOST_COLUMNS = 2048
PLACED_PAIRS = 256
"""The largest number of pairs of which each counts those before it: counting costs their square."""


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


SPREAD_BLOCK = 8192
"""The number of elements that a program of `_spread_kernel` writes at once."""


@triton.jit(do_not_specialize=["count"])
def _spread_kernel(x, place, rows, count, width, stride, K: tl.constexpr, PAIRS: tl.constexpr, BLOCK: tl.constexpr):
    """Copies a part of one token's row to the places of its pairs. It is read once: a gather by place would read it K
    times, far apart. (The product behind it shall not start earlier: Qwen3-30B's layer, 16384 tokens, 1.014 of the
    time. To start while the sort before it runs gains nothing. H100, 2026-11-24.)"""
    token = tl.program_id(0).to(tl.int64)
    cols, pair = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, PAIRS)
    inside = cols < width
    to = tl.load(place + token * K + pair, mask=pair < K, other=-1).to(tl.int64)
    value = tl.load(x + token * stride + cols, mask=inside)
    at = rows + to[:, None] * width + cols[None, :]
    live = ((to >= 0) & (to < count))[:, None] & inside[None, :]
    tl.store(at, tl.broadcast_to(value[None, :], (PAIRS, BLOCK)), mask=live)


def spread_step(x, place, rows):
    """The step that copies the rows of x [tokens, H] to the places of their pairs [tokens, k] in `rows` [count, H];
    pairs with a place outside of it are left out. All rows are contiguous along their last dimension."""
    (tokens, width), top_k = x.shape, place.shape[1]
    pairs = bucket(top_k)
    block = columns_at_once(width, 16, max(SPREAD_BLOCK // pairs, 16))
    values = {"count": rows.shape[0], "width": width, "stride": x.stride(0), "K": top_k, "PAIRS": pairs, "BLOCK": block}
    return Step(_spread_kernel, (tokens, tiles_of(width, block)), 4, {"x": x, "place": place, "rows": rows, **values})


def rows_of_pairs(x, place, count):
    """x [tokens, H], place [tokens, k] -> [count, H]: the row of each pair's token at the pair's place."""
    x = lined(x)
    rows = torch.empty(count, x.shape[1], dtype=x.dtype, device=x.device)
    if rows.numel() and place.numel():
        run_steps(x, spread_step(x, place.contiguous(), rows))
    return rows


def can_sort(pairs, experts):
    """Whether the counting sort can handle this many experts."""
    return pairs > 0 and 0 < experts <= MOST_EXPERTS


def sort_scratch(pairs, experts):
    """The bytes for the counts of the pairs' blocks."""
    blocks, bins, _ = sort_blocks(pairs, experts)
    return 2 * 4 * blocks * bins if blocks > COUNTING_BLOCKS else 0


def arrival_steps(index, x, rows, inverse, ends, counts):
    """Sorts the pairs of `index` [tokens, k] by expert and copies tokens to them; few pairs take one kernel."""
    pairs, experts, top_k, width = index.numel(), ends.shape[0], index.shape[1], x.shape[1]
    block = columns_at_once(width, 16, MOST_COLUMNS)
    grid, common = (pairs, tiles_of(width, block)), {"width": width, "stride": x.stride(0), "K": top_k, "BLOCK": block}
    if pairs <= PLACED_PAIRS:
        _, bins, size = sort_blocks(pairs, experts)
        known = {"total": pairs, "experts": experts, "SIZE": size, "BINS": bins}
        memory = {"pairs": index, "x": x, "rows": rows, "inverse": inverse, "ends": ends}
        return [Step(_place_kernel, grid, 4, {**memory, **known, **common})]
    return [*sort_steps(index, None, inverse, ends, counts), spread_step(x, inverse.view(index.shape), rows)]


# --- sums of the rows of each expert: one program owns some columns of one expert, in a fixed order ----

SUMMED_LINES, SUMMED_COLUMNS = 64, 64


@triton.jit
def _expert_sum_kernel(rows, order, weights, ends, out, width, WEIGHTED: tl.constexpr, WIDE: tl.constexpr,
                       LINES: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    expert = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, last = tl.load(ends + expert - 1, mask=expert > 0, other=0), tl.load(ends + expert)
    acc = tl.zeros((LINES, BLOCK), dtype=WIDE)
    for start in range(first, last, LINES):
        line = start + tl.arange(0, LINES)
        at = line.to(tl.int64)[:, None] * width + cols[None, :]
        value = tl.load(rows + at, mask=(line < last)[:, None] & (cols < width)[None, :], other=0.0).to(WIDE)
        if WEIGHTED:
            pair = tl.load(order + line, mask=line < last, other=0)
            value *= tl.load(weights + pair, mask=line < last, other=0.0).to(WIDE)[:, None]
        acc += value
    tl.store(out + expert * width + cols, tl.sum(acc, 0).to(out.dtype.element_ty), mask=cols < width)


def sum_by_expert(rows, ends, dtype, order=None, weights=None):
    """rows [S, n], contiguous -> [E, n]: the sum of each expert's rows, weighted by `weights` of pairs `order`."""
    experts, width = ends.shape[0], rows.shape[1]
    out = torch.empty(experts, width, dtype=dtype, device=rows.device)
    if out.numel():
        values = {
            "rows": rows, "order": ends if order is None else order, "weights": rows if weights is None else weights,
            "ends": ends, "out": out, "width": width, "WEIGHTED": weights is not None,
            "WIDE": wide_type(torch.promote_types(rows.dtype, dtype)), "LINES": SUMMED_LINES, "BLOCK": SUMMED_COLUMNS,
        }  # fmt: skip
        run_steps(rows, Step(_expert_sum_kernel, (experts, tiles_of(width, SUMMED_COLUMNS)), 4, values))
    return out


# --- rows home: one program owns one token, and sums in a fixed order -------------------------------


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
def _sum_backward_kernel(grad, rows, index, weights, drows, dweights, width, grad_stride, stride, K: tl.constexpr,
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


def warps_for(block):
    return 4 if block > 256 else 1


def sum_step(rows, index, weights, out, top_k):
    """Each token's weighted sum; all tensors contiguous along their last dimension."""
    width = rows.shape[1]
    block = columns_at_once(width, 1, MOST_COLUMNS)
    values = {
        "rows": rows, "index": index, "weights": rows if weights is None else weights, "out": out, "width": width,
        "stride": rows.stride(0), "K": top_k, "WEIGHTED": weights is not None, "WIDE": wide_type(rows.dtype),
        "BLOCK": block,
    }  # fmt: skip
    return Step(_sum_kernel, (out.shape[0], tiles_of(width, block)), warps_for(block), values)


def weighted_sum(rows, index, weights, top_k):
    """out[t] = sum over j of weights[t, j] * rows[index[t * k + j]]."""
    rows = lined(rows)
    out = torch.empty(index.shape[0] // top_k, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if out.numel():
        weights = None if weights is None else weights.contiguous()
        run_steps(rows, sum_step(rows, index, weights, out, top_k))
    return out


def weighted_sum_backward(grad, rows, index, weights):
    """(gradient of rows, gradient of weights); every row is the target of exactly one pair."""
    grad, rows, weights = lined(grad), lined(rows), weights.contiguous()
    drows = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    dweights = torch.zeros(weights.shape, dtype=weights.dtype, device=rows.device)
    if drows.numel():
        block = columns_at_once(rows.shape[1], 1, MOST_COLUMNS)
        values = {
            "grad": grad, "rows": rows, "index": index, "weights": weights, "drows": drows, "dweights": dweights,
            "width": rows.shape[1], "grad_stride": grad.stride(0), "stride": rows.stride(0), "K": weights.shape[1],
            "WIDE": wide_type(rows.dtype), "BLOCK": block,
        }  # fmt: skip
        run_steps(rows, Step(_sum_backward_kernel, (weights.shape[0],), warps_for(block), values))
    return drows, dweights
