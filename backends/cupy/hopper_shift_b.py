"""Binds the Hopper kernel that reads weights of any alignment, and rows that TMA can read.

The weights come through eight tensor maps (`arguments.weight_maps`). Rows that TMA cannot read are copied first: they
are the smaller operand, and every block of a cluster would have to shift them again. Stacks of weights that do not lie
a whole number of lines apart are copied too. With 2^31 elements or more, for which there is no copy, the generic kernel
reads them.

`hopper_shift_a` is the same kernel with both sides exchanged, for narrow results of a jagged m: it shifts the rows, of
which there is one run of lines for all groups, and copies weights that TMA cannot read.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import arguments, generic, hopper
from multigemm.backends.cupy.arguments import Lines
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import BLOCK_K, COLUMNS, GENERIC, Config
from multigemm.backends.cupy.hopper import NO_MAPS, Clusters, Layout, Roles
from multigemm.backends.cupy.support import sends, shift_a_spec, shift_b_spec, stores_anywhere, weights_of
from multigemm.cuda.arguments import Fields, join
from multigemm.cuda.device import to_device
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import BoundKernel
from multigemm.cuda.operand_maps import plain_map, result_map
from multigemm.cuda.tensor_map import BLANK, SIZE
from multigemm.planning.operands import Operands, Packed, strides_of, view_of
from multigemm.problem.spec import ProblemSpec

EIGHTHS = struct.Struct("<q2I2i")
PIECE = 8
"""Elements of 16 bytes, which a stage has of each line beside those that it is for (hopper_shift_b.cu)."""
NO_WEIGHT_MAPS = join([BLANK] * 8)
"""The placeholder for a packed form's eight maps."""


class _Kind(NamedTuple):
    """What a kernel is compiled for, besides its config."""

    layout: Layout
    wide: bool
    """Whether rows of results begin at any address."""
    sent: bool
    """Whether the copy engine stores the results."""


def source(spec: ProblemSpec, config: Config) -> Source:
    """The source of the kernel: that of the Hopper kernel for the same layouts, and the size of its
    schedule."""
    return _source(_kind_of(spec, config.kernel), config)


@lru_cache(maxsize=1024)
def _kind_of(spec: ProblemSpec, kernel: str) -> _Kind:
    """The layout after copies. `hopper_shift_a` has the rows of a jagged m for weights, and neighbours in memory are
    neighbouring rows there."""
    if kernel == "hopper_shift_b":
        spec = shift_b_spec(spec)
        return _Kind(hopper.layout_of(spec), stores_anywhere(spec), sends(spec))
    layout = hopper.layout_of(shift_a_spec(spec))
    swapped, x_k, w_k = layout.role
    return _Kind(layout._replace(role=Roles(not swapped, w_k, x_k), plain=2), False, False)


@lru_cache(maxsize=1024)
def _source(kind: _Kind, config: Config) -> Source:
    layout, wide, sent = kind
    chosen = {"JAGGED_W": config.kernel == "hopper_shift_a", "WIDE_ROWS": wide, "SEND": sent}
    more = (("MOST_GROUPS", config.groups_at_most), *((name, 1) for name, holds in chosen.items() if holds))
    shared = config.shared_bytes(layout.plain > 0)
    return Source("hopper_shift_b.cu", "hopper_shift_b", (*hopper.defines(layout, config), *more), shared)


def _may_need_generic(spec: ProblemSpec, config: Config) -> bool:
    """Whether groups of the weights may lie too far apart to count their lines; rows of a jagged m have no groups."""
    return weights_of(spec).wide and config.kernel == "hopper_shift_b"


def sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """The product, the copying kernel, and the generic kernel for weights that are too large to copy."""
    other = (generic.source(spec, GENERIC),) if _may_need_generic(spec, config) else ()
    return (source(spec, config), hopper.COPY_SOURCE, *other)


class Weights(NamedTuple):
    """The weight side of a packed form: address, elements from line to line and from group to group, extents."""

    operand: str
    ptr: int
    step: int
    group: int
    number: int
    length: int


def _weights(view: Packed, role: Roles) -> Weights:
    """The weights as lines along k, or across it."""
    name, x, mn = ("a", view.a, view.m) if role.swapped else ("b", view.b, view.n)
    along_k, across_k = (x.row, x.col) if role.swapped else (x.col, x.row)
    step = along_k if role.w_k else across_k
    number, length = (mn, view.k) if role.w_k else (view.k, mn)
    return Weights(name, x.ptr, step or x.group or 8, x.group, number, length)  # a single line has no step


def _stack(w: Weights, groups: int, dtype: torch.dtype) -> tuple[Lines, int]:
    """All groups' lines as one run, and the number of lines from group to group."""
    per_group = w.group // w.step
    return Lines(w.ptr, w.step * dtype.itemsize, (groups - 1) * per_group + w.number, w.length, dtype), per_group


def _weight_maps(lines: Lines, role: Roles) -> tuple[Fields, ...]:
    inner, height = (BLOCK_K, COLUMNS // 8) if role.w_k else (COLUMNS, BLOCK_K // 8)
    return arguments.weight_maps(lines, inner + PIECE, height)


class HopperShiftB:
    """The kernel that shifts its weights, and the other kernels of its problems, loaded for one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        kind = _kind_of(spec, config.kernel)
        self._config, self._index, self._role, self._sent = config, index, kind.layout.role, kind.sent
        self._spec = shift_a_spec(spec) if config.kernel == "hopper_shift_a" else shift_b_spec(spec)
        self._rows_copied = self._spec != spec
        self._copy = load(hopper.COPY_SOURCE, index)
        self._clusters = Clusters(load(source(spec, config), index), spec, config)
        self._other = generic.Generic(spec, GENERIC, index) if _may_need_generic(spec, config) else None

    def bind(self, ops: Operands) -> Launch:
        """Copies what neither TMA nor eight maps can read, then launches the product; or launches the generic
        kernel."""
        view = view_of(ops)
        w = _weights(view, self._role)
        also = w.operand if w.group % w.step else ""
        if also and self._other is not None:
            return self._other.bind(ops)
        copied = hopper.with_copies(ops, view, self._spec, self._copy, also)
        which = int(self._rows_copied) + 2 * bool(also) if copied.launch else 0
        with on_device(self._index):
            return copied.then(self._product(copied.ops, copied.view, which))

    def _product(self, ops: Operands, view: Packed, copied: int) -> BoundKernel:
        if ops.spec.form == "per_group":
            rows, weights = self._listed_rows(ops), self._listed_weights(ops)
            more = [NO_MAPS, NO_WEIGHT_MAPS, EIGHTHS.pack(weights.data_ptr(), 0, 0, 0, copied)]
            return self._clusters.bound(ops, view, more, listed=rows, keep=(weights,))
        x, w = hopper.sides_of(view, self._role, self._spec.compute)
        lines, per_group = _stack(_weights(view, self._role), view.groups, self._spec.compute)
        # Of the address the kernel needs what it is modulo 16, as every address does that it may move to.
        where = EIGHTHS.pack(0, lines.ptr % 16, lines.pitch & 0xFFFFFFFF, per_group, copied)
        maps = (BLANK, *arguments.row_maps(x))  # the weight side's map, which nobody reads, and the row side's
        if self._sent:
            maps = (*maps, result_map(hopper.results_of(view, self._role.swapped, ops.spec.out.dtype)))
        return self._clusters.bound(ops, view, [maps, _weight_maps(lines, self._role), where], columns=w.mn)

    def _listed_rows(self, ops: Operands) -> Tensor:
        """[G, 2] maps in device memory, of which the kernel reads the row side's."""
        parts = list[bytes]()
        for x in ops.b if self._role.swapped else ops.a:
            side = hopper.matrix_side(x, int(self._role.swapped), self._role.x_k)
            height = arguments.list_box(side.mn, self._config.rows, self._config.cluster)
            parts += [BLANK, plain_map(side, height)]
        return to_device(np.frombuffer(b"".join(parts), dtype=np.int64).reshape(-1, 32), ops.device)

    def _listed_weights(self, ops: Operands) -> Tensor:
        """[G, 8] maps in device memory."""
        parts, role = list[bytes](), self._role
        for x in ops.a if role.swapped else ops.b:
            strides = strides_of(x)
            line = int(role.swapped != role.w_k)  # which of its directions counts the lines
            step = (strides.row, strides.col)[line] or 8
            lines = Lines(x.data_ptr(), step * x.element_size(), x.shape[line], x.shape[1 - line], x.dtype)
            parts += _weight_maps(lines, role)
        return to_device(np.frombuffer(b"".join(parts), dtype=np.int64).reshape(-1, 8 * SIZE // 8), ops.device)
