"""Odd strides and alignments on the fast kernel: copy the operand into a readable layout first.

The copy is one more pass over the operand, at memory speed; the portable kernel would lose far more
on anything large. The workspace belongs to the bound problem.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any, cast

import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config, packed_spec
from multigemm.backends.cupy.driver import launcher
from multigemm.layouts import Operands, strides_of
from multigemm.spec import OperandSpec, ProblemSpec

SOURCE = Source("pack.cu", "pack", ())
COPY = struct.Struct("<2Q8q")
THREADS, SIDE, BLOCKS_PER_SM = 256, 64, 8


def _copy_of(x: Tensor, wanted: OperandSpec, function: int, sms: int) -> tuple[Tensor, Callable[[], None]]:
    """A view of fresh memory with x's shape and the wanted contiguous direction, and the launch that fills it."""
    view, by_rows = strides_of(x), wanted.order == "row"
    rows, cols = x.shape[-2:]
    outer, inner = (rows, cols) if by_rows else (cols, rows)
    groups = x.shape[0] if x.dim() == 3 and view.group else 1
    pitch = (inner + 7) // 8 * 8
    memory = torch.empty(max(groups * outer * pitch, 1), dtype=x.dtype, device=x.device)
    step = (outer * pitch if view.group else 0,) if x.dim() == 3 else ()
    copy = memory.as_strided(x.shape, (*step, *((pitch, 1) if by_rows else (1, pitch))))
    from_outer, from_inner = (view.row, view.col) if by_rows else (view.col, view.row)
    argument = COPY.pack(
        view.ptr, memory.data_ptr(), groups, outer, inner, view.group, from_outer, from_inner, outer * pitch, pitch
    )
    tiles = groups * -(-outer // SIDE) * -(-inner // SIDE)
    grid = max(1, min(tiles, BLOCKS_PER_SM * sms))
    return copy, launcher(function, [argument], grid=grid, threads=THREADS, index=x.device.index or 0, keep=(x, memory))


def prepare(spec: ProblemSpec, config: Config, index: int) -> tuple[int, int]:
    """The copying kernel and the fast kernel for what the copies look like."""
    return load(SOURCE, index)[0], hopper.prepare(packed_spec(spec), config, index)


def bind(ops: Operands, config: Config, functions: tuple[int, int], sms: int) -> Launch:
    """Copies of the operands that need one, then the fast kernel on them."""
    spec = packed_spec(ops.spec)
    operands: dict[str, Any] = {}
    steps: list[Callable[[], object]] = []
    for name in ("a", "b"):
        x, wanted = cast(Tensor, getattr(ops, name)), getattr(spec, name)
        if wanted != getattr(ops.spec, name):
            x, step = _copy_of(x, wanted, functions[0], sms)
            steps.append(step)
        operands[name] = x
    steps.append(hopper.bind(replace(ops, spec=spec, **operands), config, functions[1]))

    def launch() -> None:
        for step in steps:
            step()

    return launch
