"""Binds the Hopper kernel: tensor maps, a counter for its clusters, one launch.

The kernel computes C^T = W^T X^T. `W`, the weight side, gives the columns that lie contiguous in the
result; `X` gives the rows. For jagged n, and where the result is stored by columns, A and B swap roles.
"""

from __future__ import annotations

import struct
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import tensor_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, Config
from multigemm.backends.cupy.driver import allow_shared, launcher, resident_clusters
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most, view_of
from multigemm.backends.cupy.specs import is_swapped, plain_kind, sends
from multigemm.backends.cupy.tensor_maps import Side
from multigemm.cuda.counters import Words, ready
from multigemm.cuda.device import to_device
from multigemm.planning.operands import Operands, Packed, Strided
from multigemm.problem.spec import ProblemSpec

THREADS = 384
COUNTERS = 2
"""Words that a launch counts in: the next tile, and clusters that are done."""
LAUNCH = struct.Struct("<2q4i")
READERS = 2
"""Rows that more tiles than this read again and again are asked to stay in the L2 cache."""
BUSY_ROWS = 208
"""A group with this many rows keeps the tensor cores as busy as its weights keep the memory."""


class Roles(NamedTuple):
    """Which way round a spec is computed, and which of its sides have k contiguous."""

    swapped: bool
    x_k: bool
    w_k: bool


def roles(spec: ProblemSpec) -> Roles:
    """A is the row side unless swapped."""
    swapped, a_k, b_k = is_swapped(spec), spec.a.order == "row", spec.b.order == "col"
    return Roles(swapped, b_k, a_k) if swapped else Roles(swapped, a_k, b_k)


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: what `defines` says, and who stores the results."""
    return Source("hopper.cu", "hopper", (*defines(spec, config), ("SEND", int(sends(spec)))))


def defines(spec: ProblemSpec, config: Config) -> tuple[tuple[str, int], ...]:
    """Dtype, layouts, whether the epilogue is plain, and the config."""
    role, plain = roles(spec), plain_kind(spec)
    return (
        ("BFLOAT", int(spec.compute == torch.bfloat16)), ("X_K", int(role.x_k)), ("W_K", int(role.w_k)),
        ("RAGGED_K", int(spec.form == "jagged_k")), ("LISTED", int(spec.form == "per_group")),
        ("PLAIN", plain), ("ROWS", config.rows), ("STAGES", config.stages),
        ("CLUSTER", config.cluster), ("STEP", config.step), ("PINGPONG", int(config.pingpong)),
        ("SHARED", config.shared_bytes(plain > 0)),
    )  # fmt: skip


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """Dynamic shared memory, as hopper.cu lays it out (an upper bound for the bookkeeping)."""
    return config.shared_bytes(plain_kind(spec) > 0)


def prepare(spec: ProblemSpec, config: Config, index: int) -> int:
    """Compiles (or finds) and loads the kernel, and readies the device's counters."""
    function, _ = load(source(spec, config), index)
    allow_shared(function, shared_bytes(spec, config))
    ready(index, COUNTERS)
    return function


def _side(
    view: Strided, mn_step: int, k_step: int, mn: int, k: int, groups: int, k_contiguous: bool, dtype: torch.dtype
) -> Side:
    step = (mn_step if k_contiguous else k_step) * dtype.itemsize
    stacked = groups if view.group else 1
    return Side(view.ptr, mn, k, stacked, step, view.group * dtype.itemsize, k_contiguous, dtype)


def _results(view: Packed, swapped: bool, dtype: torch.dtype) -> Side:
    """The output as columns and rows of the weight and the row side."""
    out = view.out
    rows, columns, step = (view.n, view.m, out.col) if swapped else (view.m, view.n, out.row)
    return _side(out, 0, step, columns, rows, view.groups, False, dtype)


def _sides(view: Packed, role: Roles, dtype: torch.dtype) -> tuple[Side, Side]:
    """The row side and the weight side of a packed form."""
    a_k, b_k = (role.w_k, role.x_k) if role.swapped else (role.x_k, role.w_k)
    a = _side(view.a, view.a.row, view.a.col, view.m, view.k, view.groups, a_k, dtype)
    b = _side(view.b, view.b.col, view.b.row, view.n, view.k, view.groups, b_k, dtype)
    return (b, a) if role.swapped else (a, b)


@lru_cache(maxsize=1024)
def _packed_maps(x: Side, w: Side, ragged: bool) -> bytes:
    """One map of the weight side; of the row side one for each box height, or one where mn is contiguous.

    Remembered: a call that meets the same addresses again, as an allocator makes it likely, encodes nothing.
    """
    if ragged:
        return tensor_maps.ragged(w) + tensor_maps.ragged(x) + tensor_maps.BLANK * 15
    if not x.k_contiguous:
        return tensor_maps.plain(w, COLUMNS) + tensor_maps.plain(x, 0) + tensor_maps.BLANK * 15
    return tensor_maps.plain(w, COLUMNS) + b"".join(tensor_maps.plain(x, 8 * (i + 1)) for i in range(16))


def _matrix(x: Tensor, mn_dim: int, k_contiguous: bool) -> Side:
    stride = [s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)]
    step = stride[mn_dim if k_contiguous else 1 - mn_dim] * x.element_size()
    return Side(x.data_ptr(), x.shape[mn_dim], x.shape[1 - mn_dim], 1, step, 0, k_contiguous, x.dtype)


def _listed_maps(ops: Operands, config: Config) -> Tensor:
    """[G, 2] maps in device memory: weight side, row side; a matrix that occurs twice is encoded once."""
    role = roles(ops.spec)
    made: dict[Any, bytes] = {}

    def one(side: Side, rows: int) -> bytes:
        key = (side, rows)
        if key not in made:
            made[key] = tensor_maps.plain(side, rows)
        return made[key]

    text = bytearray()
    for a, b in zip(ops.a, ops.b, strict=True):
        pair = (
            _matrix(a, 0, role.w_k if role.swapped else role.x_k),
            _matrix(b, 1, role.x_k if role.swapped else role.w_k),
        )
        x, w = pair[::-1] if role.swapped else pair
        text += one(w, COLUMNS) + one(x, tensor_maps.list_box(x.mn, config.rows, config.cluster))
    return to_device(np.frombuffer(text, dtype=np.int64).reshape(-1, 32), ops.device)


def bind(ops: Operands, config: Config, function: int) -> Launch:
    """Lays out the arguments of one problem."""
    spec, index = ops.spec, ops.device.index or 0
    table, listed, maps, keep_rows = table_of(ops), None, tensor_maps.BLANK * 17, False
    view, role = view_of(ops), roles(spec)
    if table is not None:
        listed = _listed_maps(ops, config)
    else:
        x, w = _sides(view, role, spec.compute)
        maps = _packed_maps(x, w, spec.form == "jagged_k")
        if sends(spec):
            maps += tensor_maps.results(_results(view, role.swapped, spec.out.dtype))
        keep_rows = w.mn > READERS * COLUMNS * config.cluster
    counter = Words(index, COUNTERS)
    options = LAUNCH.pack(
        0 if listed is None else listed.data_ptr(), counter.address,
        int(role.swapped), BUSY_ROWS, int(spec.out.align == 16), int(keep_rows),
    )  # fmt: skip
    across = COLUMNS * config.cluster
    tiles = tiles_at_most(ops, view, *((across, config.rows) if role.swapped else (config.rows, across)))
    shared = shared_bytes(spec, config)
    clusters = max(1, min(tiles, resident_clusters(function, config.cluster, THREADS, shared)))
    return launcher(
        function,
        [problem_bytes(ops, table, view), options, maps],
        grid=clusters * config.cluster,
        threads=THREADS,
        shared=shared,
        cluster=config.cluster,
        overlap=True,
        index=index,
        keep=(ops, table, listed, counter),
        captured=counter.pin,
    )
