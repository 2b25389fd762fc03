"""The tutorial's way in Triton as a peer: on request, because it compiles and tries three tiles per workload."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.operands import Tensors
from multigemm.bench.peer_libraries import by_rows, packed_rows

TILES = ((128, 256, 64, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 4, 4))
"""Rows, columns, depth, warps, stages."""
NAME = "triton_tutorial"


def _microseconds(call: Callable[[], object]) -> float:
    """The best of three calls after one; a rough clock, for a choice among three."""
    times: list[float] = []
    event: Any = torch.cuda.Event
    for _ in range(4):
        start, end = event(enable_timing=True), event(enable_timing=True)
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return min(times[1:])


def _prepare(tensors: Tensors) -> Prepared:
    a, b, _ = packed_rows(tensors, "bf16", "fp16")
    if a.shape[1] % 8 or b.shape[2] % 8:
        raise Refused("its descriptors take rows that are multiples of 16 bytes")
    triton: Any = importlib.import_module("triton")
    kernel: Any = importlib.import_module("multigemm.bench.walk").walk
    triton.set_allocator(lambda size, align, stream: torch.empty(size, device=a.device, dtype=torch.int8))
    weights, out = by_rows(b), a.new_empty(a.shape[0], b.shape[2])
    assert tensors.offsets is not None
    ends, (groups, n, k) = tensors.offsets[1:].contiguous(), weights.shape
    programs = torch.cuda.get_device_properties(a.device).multi_processor_count

    def with_tile(tile: tuple[int, ...]) -> Callable[[], object]:
        *blocks, warps, stages = tile
        return lambda: kernel[(programs,)](
            a, weights, out, ends, groups, n, k, *blocks, stages, num_warps=warps, num_stages=stages
        )

    best = min(TILES, key=lambda tile: _microseconds(with_tile(tile)))
    config = "x".join(map(str, best[:3])) + f", {best[3]} warps, {best[4]} stages"
    return Prepared(with_tile(best), out, "walk", config, why="weights as [G, N, K]; the best of three tiles")


ENTRY = Entry(NAME, "peer", _prepare)
