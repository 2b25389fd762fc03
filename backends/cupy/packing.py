"""Odd strides and alignments on the fast kernel: copy the operand into a readable layout first.

The copy is one more pass over the operand, at memory speed; the portable kernel would lose far more
on anything large. One launch copies all that a problem needs, lists included. The workspace belongs
to the bound problem.
"""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.params import view_of
from multigemm.backends.cupy.specs import packed_spec
from multigemm.cuda.arguments import fields, join, slot_of
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.launch import BoundKernel, Kernel, LaunchSequence, MovableLaunch, without_move
from multigemm.planning.operands import Operands, Packed, strides_of
from multigemm.problem.spec import OperandSpec, ProblemSpec

SOURCE = Source("pack.cu", "pack", ())
COPY = struct.Struct("<2Q9q")
JOB = struct.Struct("<Q2I")
THREADS, SIDE, BAND, PIECE, BLOCKS_PER_SM = 256, 64, 32, 256, 8


def _workspace(elements: int, like: Tensor) -> Tensor:
    return torch.empty(elements, dtype=like.dtype, device=like.device)


class _Copies:
    """Collects the copies of one problem: where from, where to, and how many units of work each is."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.units = 0
        self.memory: list[Tensor] = []

    def add(self, x: Tensor, wanted: OperandSpec, operand: str | None) -> Tensor:
        """A view of fresh memory with x's shape and the wanted contiguous direction. `operand`: as `strides_of`."""
        view, by_rows = strides_of(x, operand), wanted.order == "row"
        rows, cols = x.shape[-2:]
        outer, inner = (rows, cols) if by_rows else (cols, rows)
        groups = x.shape[0] if x.dim() == 3 and view.group else 1
        pitch = (inner + 7) // 8 * 8
        memory = _workspace(max(groups * outer * pitch, 1), x)
        self.memory.append(memory)
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
            self.records.append(fields(COPY.pack(*record), slot_of(view.ptr, 0)))
            self.units += units
        return memory.as_strided(x.shape, (*step, *((pitch, 1) if by_rows else (1, pitch))))

    def bound(self, kernel: Kernel, ops: Operands, tokens: bool) -> BoundKernel | None:
        """One launch for all of them; None where there is nothing to copy. `tokens`: rows of tokens are copied."""
        if not self.units:
            return None
        listed = None
        if len(self.records) > 2:
            listed = to_device(np.frombuffer(b"".join(self.records), dtype=np.int64).reshape(-1, 11), ops.device)
        head = JOB.pack(0 if listed is None else listed.data_ptr(), len(self.records), self.units)
        two = self.records[:2] if listed is None else []
        argument = join([head, *two, bytes((2 - len(two)) * COPY.size)])
        grid = min(self.units, BLOCKS_PER_SM * processors(kernel.index))
        grid_for = None if tokens else lambda _: grid
        return kernel.bound([argument], grid=grid, threads=THREADS, keep=(*self.memory, listed), grid_for=grid_for)


class Copied(NamedTuple):
    """A problem with copies in the place of some operands, its packed formula, and the launch that fills them."""

    ops: Operands
    view: Packed
    launch: BoundKernel | None

    def then(self, product: MovableLaunch) -> Launch:
        """The copies, if there are any, and then the product."""
        launch = product if self.launch is None else LaunchSequence((self.launch, product))
        return without_move(launch) if self.ops.spec.form == "per_group" else launch


def with_copies(ops: Operands, view: Packed, spec: ProblemSpec, kernel: Kernel, also: str = "") -> Copied:
    """The problem with copies of the operands that `spec` wants otherwise, and of `also`."""
    copies, operands = _Copies(), dict[str, Any]()
    for name in ("a", "b"):
        x, wanted = getattr(ops, name), getattr(spec, name)
        if name != also and wanted == getattr(ops.spec, name):
            continue
        if isinstance(x, Tensor):
            operands[name] = copies.add(x, wanted, name)
            place = strides_of(operands[name])  # not the operand's own: the copy stays where it is
            view = replace(view, a=place) if name == "a" else replace(view, b=place)
        else:
            operands[name] = [copies.add(t, wanted, None) for t in x]
    tokens = "a" in operands and ops.spec.jagged == "m"
    return Copied(replace(ops, spec=spec, **operands), view, copies.bound(kernel, ops, tokens))


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels that the spec's problems may launch under this config."""
    return (hopper.source(packed_spec(spec), config), SOURCE)


class Packing:
    """The copying kernel and the fast kernel for what the copies look like, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._spec = packed_spec(spec)
        self._copy, self._product = load(SOURCE, index), hopper.Hopper(self._spec, config, index)

    def bind(self, ops: Operands) -> Launch:
        """Copies of the operands that need one, then the fast kernel on them."""
        copied = with_copies(ops, view_of(ops), self._spec, self._copy)
        return copied.then(self._product.bound(copied.ops, copied.view))
