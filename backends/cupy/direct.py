"""Binds the Hopper kernel that reads weights of any alignment itself, and rows that TMA can read.

The weights come by eight tensor maps (`tensor_maps.eighths`). Rows that TMA cannot read are copied first: they are the
smaller operand, and every block of a cluster would have to shift them anew. So are stacks of weights that do not lie a
whole number of lines apart; of 2^31 elements or more the portable kernel reads them, since no copy is as large.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper, packing, portable, tensor_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, PORTABLE, Config
from multigemm.backends.cupy.driver import allow_shared, launcher, resident_clusters
from multigemm.backends.cupy.hopper import Roles
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most, view_of
from multigemm.backends.cupy.specs import direct_spec, plain_kind, weights_of
from multigemm.backends.cupy.tensor_maps import BLANK, SIZE, Lines, Side
from multigemm.cuda.counters import Words, ready
from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, Packed, strides_of
from multigemm.problem.spec import ProblemSpec

EIGHTHS = struct.Struct("<q2I2i")
BLOCK_K, SKEW = 64, 32
"""As in pipeline.cuh and weights.cuh, in elements."""
LOW = 0xFFFFFFFF
"""What the kernel is told of an address and a pitch: it needs them modulo 16."""


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: that of the Hopper kernel for the same layouts, and what its rings and its schedule hold."""
    more = ("WSTAGES", config.weight_stages), ("MOST_GROUPS", config.groups_at_most)
    return Source("direct.cu", "direct", (*hopper.defines(direct_spec(spec), config), *more))


def prepare(spec: ProblemSpec, config: Config, index: int) -> tuple[int, int, int]:
    """The copying kernel, the product, and for weights that are too large to copy the portable one."""
    function, _ = load(source(spec, config), index)
    allow_shared(function, config.shared_bytes(plain_kind(spec) > 0))
    ready(index, hopper.COUNTERS)
    other = portable.prepare(spec, PORTABLE, index) if weights_of(spec).wide else 0
    return load(packing.SOURCE, index)[0], function, other


@lru_cache(maxsize=1024)
def _row_maps(x: Side) -> bytes:
    """The row side's maps, in the place where the kernel looks for them; the weights have none."""
    if not x.k_contiguous:
        return BLANK + tensor_maps.plain(x, 0) + BLANK * 15
    return BLANK + b"".join(tensor_maps.plain(x, 8 * (i + 1)) for i in range(16))


def _listed_maps(ops: Operands, config: Config) -> Tensor:
    """[G, 2] maps in device memory, of which the kernel reads the row side's."""
    role, text = hopper.roles(ops.spec), bytearray()
    for x in ops.b if role.swapped else ops.a:
        side = hopper._matrix(x, int(role.swapped), role.x_k)
        height = tensor_maps.list_box(side.mn, config.rows, config.cluster)
        text += BLANK + tensor_maps.plain(side, height)
    return to_device(np.frombuffer(text, dtype=np.int64).reshape(-1, 32), ops.device)


class Weights(NamedTuple):
    """The weight side of a packed form: where it is, elements from line to line and from group to group, extents."""

    operand: str
    ptr: int
    step: int
    group: int
    number: int
    length: int


def _weights(view: Packed, role: Roles) -> Weights:
    """Lines along k, or across it."""
    name, x, mn = ("a", view.a, view.m) if role.swapped else ("b", view.b, view.n)
    along_k, across_k = (x.row, x.col) if role.swapped else (x.col, x.row)
    step = along_k if role.w_k else across_k
    number, length = (mn, view.k) if role.w_k else (view.k, mn)
    return Weights(name, x.ptr, step or x.group or 8, x.group, number, length)  # a single line has no step


def _stack(w: Weights, groups: int, dtype: torch.dtype) -> tuple[Lines, int]:
    """All groups' lines as one run, and how many of them lie from group to group."""
    per_group = w.group // w.step
    return Lines(w.ptr, w.step * dtype.itemsize, (groups - 1) * per_group + w.number, w.length, dtype), per_group


def _weight_maps(lines: Lines, role: Roles) -> bytes:
    inner, height = (BLOCK_K, COLUMNS // 8) if role.w_k else (COLUMNS, BLOCK_K // 8)
    return tensor_maps.eighths(lines, inner + SKEW, height)


def _listed_weights(ops: Operands, role: Roles) -> Tensor:
    """[G, 8] maps in device memory."""
    text = bytearray()
    for x in ops.a if role.swapped else ops.b:
        strides = strides_of(x)
        line = int(role.swapped != role.w_k)  # which of its directions counts the lines
        step = (strides.row, strides.col)[line] or 8
        lines = Lines(x.data_ptr(), step * x.element_size(), x.shape[line], x.shape[1 - line], x.dtype)
        text += _weight_maps(lines, role)
    return to_device(np.frombuffer(text, dtype=np.int64).reshape(-1, 8 * SIZE // 8), ops.device)


def bind(ops: Operands, config: Config, functions: tuple[int, int, int], sms: int) -> Launch:
    """Copies of what neither TMA nor eight maps can read, then the product; or the portable kernel."""
    spec = direct_spec(ops.spec)
    w = _weights(view_of(ops), hopper.roles(spec))
    also = w.operand if w.group % w.step else ""
    if also and weights_of(ops.spec).wide:
        return portable.bind(ops, PORTABLE, functions[2], sms)
    copied, copy = packing.with_copies(ops, spec, functions[0], sms, also)
    which = int(spec != ops.spec) + 2 * bool(also) if copy else 0
    return packing.after(copy, _bind(copied, config, functions[1], which))


def _bind(ops: Operands, config: Config, function: int, copied: int) -> Launch:
    spec, index = ops.spec, ops.device.index or 0
    table, listed, keep_rows = table_of(ops), None, False
    maps, weight_maps, where = BLANK * 17, BLANK * 8, (0, 0, 0, 0)
    view, role = view_of(ops), hopper.roles(spec)
    if table is not None:
        listed = _listed_maps(ops, config), _listed_weights(ops, role)
        where = (listed[1].data_ptr(), 0, 0, 0)
    else:
        x, side = hopper._sides(view, role, spec.compute)
        lines, per_group = _stack(_weights(view, role), view.groups, spec.compute)
        maps, weight_maps = _row_maps(x), _weight_maps(lines, role)
        where = (0, lines.ptr & LOW, lines.pitch & LOW, per_group)
        keep_rows = side.mn > hopper.READERS * COLUMNS * config.cluster
    counter = Words(index, hopper.COUNTERS)
    options = hopper.LAUNCH.pack(
        0 if listed is None else listed[0].data_ptr(), counter.address,
        int(role.swapped), hopper.BUSY_ROWS, int(spec.out.align == 16), int(keep_rows),
    )  # fmt: skip
    across = COLUMNS * config.cluster
    tiles = tiles_at_most(ops, view, *((across, config.rows) if role.swapped else (config.rows, across)))
    shared = config.shared_bytes(plain_kind(spec) > 0)
    clusters = max(1, min(tiles, resident_clusters(function, config.cluster, hopper.THREADS, shared)))
    return launcher(
        function,
        [problem_bytes(ops, table, view), options, maps, weight_maps, EIGHTHS.pack(*where, copied)],
        grid=clusters * config.cluster,
        threads=hopper.THREADS,
        shared=shared,
        cluster=config.cluster,
        overlap=True,
        index=index,
        keep=(ops, table, listed, counter),
        captured=counter.pin,
    )
