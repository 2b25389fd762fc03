"""Odd strides and alignments on the fast kernel: copy the operand into a readable layout first.

The copy is one more pass over the operand, at memory speed; the portable kernel would lose far more
on anything large. One launch copies all that a problem needs, lists included. The workspace belongs
to the bound problem.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.driver import launcher
from multigemm.backends.cupy.specs import packed_spec
from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, strides_of
from multigemm.problem.spec import OperandSpec, ProblemSpec

SOURCE = Source("pack.cu", "pack", ())
COPY = struct.Struct("<2Q9q")
JOB = struct.Struct("<Q2I")
THREADS, SIDE, BAND, PIECE, BLOCKS_PER_SM = 256, 64, 32, 256, 8


class _Copies:
    """Collects the copies of one problem: where from, where to, and how many units of work each is."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.units = 0
        self.keep: list[Any] = []

    def add(self, x: Tensor, wanted: OperandSpec) -> Tensor:
        """A view of fresh memory with x's shape and the wanted contiguous direction."""
        view, by_rows = strides_of(x), wanted.order == "row"
        rows, cols = x.shape[-2:]
        outer, inner = (rows, cols) if by_rows else (cols, rows)
        groups = x.shape[0] if x.dim() == 3 and view.group else 1
        pitch = (inner + 7) // 8 * 8
        memory = torch.empty(max(groups * outer * pitch, 1), dtype=x.dtype, device=x.device)
        self.keep += [x, memory]
        step = (outer * pitch if view.group else 0,) if x.dim() == 3 else ()
        from_outer, from_inner = (view.row, view.col) if by_rows else (view.col, view.row)
        if inner == 1:
            from_inner = 1  # a stride that is never used must not send the copy through shared memory
        units = groups * (
            -(-outer // BAND) * -(-inner // PIECE) if from_inner == 1 else -(-outer // SIDE) * -(-inner // SIDE)
        )
        if units:
            source = (view.group, from_outer, from_inner)
            record = (view.ptr, memory.data_ptr(), groups, outer, inner, *source, outer * pitch, pitch, self.units)
            self.records.append(COPY.pack(*record))
            self.units += units
        return memory.as_strided(x.shape, (*step, *((pitch, 1) if by_rows else (1, pitch))))

    def launch(self, function: int, sms: int, device: torch.device) -> Callable[[], None] | None:
        """One launch for all of them; None where there is nothing to copy."""
        if not self.units:
            return None
        listed = None
        if len(self.records) > 2:
            listed = to_device(np.frombuffer(b"".join(self.records), dtype=np.int64).reshape(-1, 11), device)
        two = b"".join(self.records[:2]) if listed is None else b""
        head = JOB.pack(0 if listed is None else listed.data_ptr(), len(self.records), self.units)
        argument = head + two.ljust(2 * COPY.size, b"\0")
        grid = min(self.units, BLOCKS_PER_SM * sms)
        keep = (self.keep, listed)
        return launcher(function, [argument], grid=grid, threads=THREADS, index=device.index or 0, keep=keep)


def with_copies(
    ops: Operands, spec: ProblemSpec, function: int, sms: int, also: str = ""
) -> tuple[Operands, Callable[[], None] | None]:
    """`ops` with copies of the operands that `spec` wants otherwise, and of `also`; and the launch that fills them."""
    copies = _Copies()
    operands: dict[str, Any] = {}
    for name in ("a", "b"):
        x, wanted = getattr(ops, name), getattr(spec, name)
        if name == also or wanted != getattr(ops.spec, name):
            operands[name] = copies.add(x, wanted) if isinstance(x, Tensor) else [copies.add(t, wanted) for t in x]
    return replace(ops, spec=spec, **operands), copies.launch(function, sms, ops.device)


def prepare(spec: ProblemSpec, config: Config, index: int) -> tuple[int, int]:
    """The copying kernel and the fast kernel for what the copies look like."""
    return load(SOURCE, index)[0], hopper.prepare(packed_spec(spec), config, index)


def bind(ops: Operands, config: Config, functions: tuple[int, int], sms: int) -> Launch:
    """Copies of the operands that need one, then the fast kernel on them."""
    copied, copy = with_copies(ops, packed_spec(ops.spec), functions[0], sms)
    return after(copy, hopper.bind(copied, config, functions[1]))


def after(copy: Callable[[], None] | None, product: Launch) -> Launch:
    """The copies, if there are any, and then the product."""
    if copy is None:
        return product
    first = copy

    def launch() -> None:
        first()
        product()

    return launch
