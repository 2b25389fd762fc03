# mypy: ignore-errors
"""Triton kernels of a layer of experts on many ranks: choose the rows to send, copy them, add returned rows."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from multigemm.integrations.layer_kernels import (
    MOST_COLUMNS,
    Step,
    columns_at_once,
    lined,
    run_steps,
    warps_for,
    wide_type,
)
from multigemm.planning.tiles import tiles_of
from multigemm.problem.spec import bucket

# A token travels once to each rank that has an expert of it. Blocks of tokens count who goes where; then each block
# adds up what goes before its own rows, which lie by chunk of tokens, by rank, by token.

DEPARTURES_BLOCK = 256


@triton.jit
def _owners(index, block, length, tokens, experts, each, K: tl.constexpr, WIDE_K: tl.constexpr, SIZE: tl.constexpr):
    """A block of a chunk: places in it, tokens, the rank of each expert [SIZE, WIDE_K] or -1; how many are none."""
    lane = block * SIZE + tl.arange(0, SIZE)
    token = tl.program_id(1).to(tl.int64) * length + lane
    live = (lane < length) & (token < tokens)
    j = tl.arange(0, WIDE_K)
    there = live[:, None] & (j < K)[None, :]
    expert = tl.load(index + token[:, None] * K + j[None, :], mask=there, other=0).to(tl.int64)
    known = there & (expert >= 0) & (expert < experts)
    owner = tl.where(known, tl.where(known, expert, 0).to(tl.int32) // each, -1)
    return lane, token, owner, tl.sum((there & (owner < 0)).to(tl.int32))


@triton.jit(do_not_specialize=["tokens", "length", "experts", "each", "here", "ranks", "blocks"])
def _count_departures_kernel(index, message, counts, tokens, length, experts, each, here, ranks, blocks, stride,
                             K: tl.constexpr, WIDE_K: tl.constexpr, SIZE: tl.constexpr):  # fmt: skip
    block, chunk = tl.program_id(0), tl.program_id(1)
    _, _, owner, unplaced = _owners(index, block, length, tokens, experts, each, K, WIDE_K, SIZE)
    for rank in range(ranks):
        hits = (owner == rank).to(tl.int32)
        rows = tl.where(rank == here, 0, tl.sum(tl.max(hits, 1)))
        tl.store(counts + (chunk * ranks + rank) * blocks + block, rows)
        to = message + rank * stride
        tl.atomic_add(to, unplaced.to(tl.int64), sem="relaxed")
        tl.atomic_add(to + 1 + 2 * chunk, rows.to(tl.int64), sem="relaxed")
        tl.atomic_add(to + 2 + 2 * chunk, tl.sum(hits).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["tokens", "length", "experts", "each", "here", "ranks", "blocks"])
def _lay_out_departures_kernel(index, counts, sent, place, tokens, length, experts, each, here, ranks, blocks,
                               K: tl.constexpr, WIDE_K: tl.constexpr, SIZE: tl.constexpr,
                               TILE: tl.constexpr):  # fmt: skip
    block, chunk = tl.program_id(0), tl.program_id(1)
    lane, token, owner, _ = _owners(index, block, length, tokens, experts, each, K, WIDE_K, SIZE)
    before, reached = tl.full((), 0, tl.int64), 0
    for rank in range(ranks):
        mine = (chunk * ranks + rank) * blocks + block
        for first in range(reached, mine, TILE):
            at = first + tl.arange(0, TILE)
            before += tl.sum(tl.load(counts + at, mask=at < mine, other=0))
        reached = mine
        goes = tl.max((owner == rank).to(tl.int32), 1)
        goes = tl.where(rank == here, 0, goes)
        to = before + tl.cumsum(goes, 0) - goes
        tl.store(sent + to, token, mask=goes > 0)
        tl.store(place + (chunk.to(tl.int64) * ranks + rank) * length + lane, tl.where(goes > 0, to, -1),
                 mask=lane < length)  # fmt: skip


def _departures(index, experts, each, here, chunks, ranks):
    """The grid and the constants that both kernels share."""
    tokens, top_k = index.shape
    length = -(-tokens // chunks)
    blocks = tiles_of(length, DEPARTURES_BLOCK)
    values = {
        "index": index, "tokens": tokens, "length": length, "experts": experts, "each": each, "here": here,
        "ranks": ranks, "blocks": blocks, "K": top_k, "WIDE_K": bucket(top_k), "SIZE": DEPARTURES_BLOCK,
    }  # fmt: skip
    return (blocks, chunks), values


def count_departures(index, experts, each, here, chunks, into):
    """Adds to `into` [ranks, 1 + 2 chunks]: the number of invalid expert numbers, then rows and pairs of each chunk.

    Returns how many rows each block of tokens sends, an argument of `lay_out_departures`.
    """
    index, ranks = index.contiguous(), into.shape[0]
    grid, values = _departures(index, experts, each, here, chunks, ranks)
    counts = torch.empty((chunks, ranks, grid[0]), dtype=torch.int32, device=index.device)
    if index.numel():
        values |= {"message": into, "stride": into.stride(0), "counts": counts}
        run_steps(index, Step(_count_departures_kernel, grid, 4, values))
    return counts


def lay_out_departures(index, experts, each, here, chunks, counts):
    """Returns the tokens of all rows to send (with spare room), and the position of each row [chunks, ranks, tokens of
    a chunk]."""
    index, ranks = index.contiguous(), counts.shape[1]
    grid, values = _departures(index, experts, each, here, chunks, ranks)
    place = torch.empty((chunks, ranks, values["length"]), dtype=torch.int64, device=index.device)
    sent = torch.empty(place.numel(), dtype=torch.int64, device=index.device)
    if index.numel():
        values |= {"counts": counts, "sent": sent, "place": place, "TILE": 1024}
        run_steps(index, Step(_lay_out_departures_kernel, grid, 4, values))
    elif place.numel():
        place.fill_(-1)
    return sent, place


@triton.jit
def _copy_rows_kernel(x, y, rows, to_x, to_y, x_width, y_width, x_stride, y_stride, to_x_stride, to_y_stride,
                      PICKED: tl.constexpr, BLOCK: tl.constexpr, Y_BLOCK: tl.constexpr):  # fmt: skip
    """A part of a row of x, and the whole row of y."""
    row = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + row).to(tl.int64) if PICKED else row
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    tl.store(to_x + row * to_x_stride + cols, tl.load(x + source * x_stride + cols, mask=cols < x_width),
             mask=cols < x_width)  # fmt: skip
    if tl.program_id(1) == 0:
        at = tl.arange(0, Y_BLOCK)
        tl.store(to_y + row * to_y_stride + at, tl.load(y + source * y_stride + at, mask=at < y_width),
                 mask=at < y_width)  # fmt: skip


def copy_rows(sources, rows, to):
    """Copies the first `rows` rows of a wide and of a narrow matrix; all rows if that is None."""
    (x, y), (to_x, to_y) = map(lined, sources), to
    if not to_x.shape[0]:
        return
    block = columns_at_once(x.shape[1], 16, MOST_COLUMNS)
    values = {
        "x": x, "y": y, "rows": x if rows is None else rows, "to_x": to_x, "to_y": to_y, "x_width": x.shape[1],
        "y_width": y.shape[1], "x_stride": x.stride(0), "y_stride": y.stride(0), "to_x_stride": to_x.stride(0),
        "to_y_stride": to_y.stride(0), "PICKED": rows is not None, "BLOCK": block, "Y_BLOCK": bucket(y.shape[1]),
    }  # fmt: skip
    run_steps(x, Step(_copy_rows_kernel, (to_x.shape[0], tiles_of(x.shape[1], block)), warps_for(block), values))


@triton.jit
def _add_returned_kernel(own, rows, place, out, width, ranks, each, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    """One token: its own row and those that came home for it, by rank."""
    token = tl.program_id(0).to(tl.int64)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = cols < width
    total = tl.load(own + token * width + cols, mask=live, other=0.0).to(WIDE)
    for rank in range(ranks):
        row = tl.load(place + (token // each * ranks + rank) * each + token % each)
        here = cols < tl.where(row >= 0, width, 0)
        total += tl.load(rows + row * width + cols, mask=here, other=0.0).to(WIDE)
    tl.store(out + token * width + cols, total.to(out.dtype.element_ty), mask=live)


def add_returned(own, rows, place):
    """Adds to own [tokens, n] the rows [m, n] that `place` [chunks, ranks, tokens of a chunk] names, and rounds
    once."""
    own, rows = own.contiguous(), rows.contiguous()
    out = torch.empty_like(own)
    if out.numel():
        width = own.shape[1]
        block = columns_at_once(width, 16, MOST_COLUMNS)
        values = {
            "own": own, "rows": rows, "place": place.contiguous(), "out": out, "width": width, "ranks": place.shape[1],
            "each": place.shape[2],
            "WIDE": wide_type(own.dtype), "BLOCK": block,
        }  # fmt: skip
        run_steps(own, Step(_add_returned_kernel, (own.shape[0], tiles_of(width, block)), warps_for(block), values))
    return out
