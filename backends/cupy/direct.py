"""Binds the Hopper kernel that reads weights of any alignment itself, and rows that TMA can read.

Rows that TMA cannot read are copied first: they are the smaller operand, and every block of a cluster
would have to shift them anew.
"""

from __future__ import annotations

import struct
from functools import lru_cache

import numpy as np
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import hopper, packing, tensor_maps
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, Config
from multigemm.backends.cupy.driver import allow_shared, launcher, resident_clusters
from multigemm.backends.cupy.params import problem_bytes, table_of, tiles_at_most, view_of
from multigemm.backends.cupy.specs import direct_spec, plain_kind
from multigemm.backends.cupy.tensor_maps import Side
from multigemm.counters import Words, ready
from multigemm.layouts import Operands, to_device
from multigemm.spec import ProblemSpec


def source(spec: ProblemSpec, config: Config) -> Source:
    """The kernel's key: that of the Hopper kernel for the same layouts, and how many groups it takes."""
    most = ("MOST_GROUPS", config.groups_at_most)
    return Source("direct.cu", "direct", (*hopper.defines(direct_spec(spec), config), most))


def prepare(spec: ProblemSpec, config: Config, index: int) -> tuple[int, int]:
    """The copying kernel and the product."""
    function, _ = load(source(spec, config), index)
    allow_shared(function, config.shared_bytes(plain_kind(spec) > 0))
    ready(index, hopper.COUNTERS)
    return load(packing.SOURCE, index)[0], function


@lru_cache(maxsize=1024)
def _row_maps(x: Side) -> bytes:
    """The row side's maps, in the place where the kernel looks for them; the weights have none."""
    if not x.k_contiguous:
        return tensor_maps.BLANK + tensor_maps.plain(x, 0) + tensor_maps.BLANK * 15
    return tensor_maps.BLANK + b"".join(tensor_maps.plain(x, 8 * (i + 1)) for i in range(16))


def _listed_maps(ops: Operands, config: Config) -> Tensor:
    """[G, 2] maps in device memory, of which the kernel reads the row side's."""
    role, text = hopper.roles(ops.spec), bytearray()
    for x in ops.b if role.swapped else ops.a:
        side = hopper._matrix(x, int(role.swapped), role.x_k)
        height = tensor_maps.list_box(side.mn, config.rows, config.cluster)
        text += tensor_maps.BLANK + tensor_maps.plain(side, height)
    return to_device(np.frombuffer(text, dtype=np.int64).reshape(-1, 32), ops.device)


def bind(ops: Operands, config: Config, functions: tuple[int, int], sms: int) -> Launch:
    """Copies of the rows where they need one, then the product."""
    copied, copy = packing.with_copies(ops, direct_spec(ops.spec), functions[0], sms)
    return packing.after(copy, _bind(copied, config, functions[1], copy is not None))


def _bind(ops: Operands, config: Config, function: int, after_copies: bool) -> Launch:
    spec, index = ops.spec, ops.device.index or 0
    table, listed, maps, keep_rows = table_of(ops), None, tensor_maps.BLANK * 17, False
    view, role = view_of(ops), hopper.roles(spec)
    if table is not None:
        listed = _listed_maps(ops, config)
    else:
        x, w = hopper._sides(view, role, spec.compute)
        maps = _row_maps(x)
        keep_rows = w.mn > hopper.READERS * COLUMNS * config.cluster
    counter = Words(index, hopper.COUNTERS)
    options = hopper.LAUNCH.pack(
        0 if listed is None else listed.data_ptr(), counter.address,
        int(role.swapped), hopper.BUSY_ROWS, int(spec.out.align == 16), int(keep_rows),
    )  # fmt: skip
    across = COLUMNS * config.cluster
    tiles = tiles_at_most(ops, view, *((across, config.rows) if role.swapped else (config.rows, across)))
    shared = config.shared_bytes(plain_kind(spec) > 0)
    clusters = max(1, min(tiles, resident_clusters(function, config.cluster, hopper.THREADS, shared)))
    return launcher(
        function,
        [problem_bytes(ops, table, view), options, maps, struct.pack("<i", after_copies)],
        grid=clusters * config.cluster,
        threads=hopper.THREADS,
        shared=shared,
        cluster=config.cluster,
        overlap=True,
        index=index,
        keep=(ops, table, listed, counter),
        captured=counter.pin,
    )
