"""Binds the Hopper kernel: tensor maps, a tile counter, one launch; after copies if TMA cannot read the operands.

The kernel computes C^T = W^T X^T. `W`, the weight side, gives the columns that lie contiguous in the
result; `X` gives the rows. For jagged n, and where the result is stored by columns, A and B swap roles.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cupy import arguments
from multigemm.backends.cupy.arguments import problem_bytes, table_of
from multigemm.backends.cupy.build import Source, load
from multigemm.backends.cupy.config import COLUMNS, Config, stages_plain
from multigemm.backends.cupy.fused import GATE_CODES, problem_argument
from multigemm.backends.cupy.support import (
    hopper_plain_kind,
    is_biased,
    is_swapped,
    packed_spec,
    pads_rows,
    picks_rows,
    picks_weights,
    sends,
    stores_anywhere,
    words_of,
)
from multigemm.cuda.arguments import Argument, fields, join, slot_of
from multigemm.cuda.counters import Words, ready
from multigemm.cuda.device import processors, to_device
from multigemm.cuda.driver import on_device
from multigemm.cuda.launch import BoundKernel, Kernel, LaunchSequence, MovableLaunch, in_turn, without_move
from multigemm.cuda.operand_maps import Side, plain_map, ragged_map, result_map, side_of
from multigemm.cuda.tensor_map import BLANK
from multigemm.planning.fused import lending, view_of_tokens
from multigemm.planning.fused_steps import gather_steps, gathered_spec
from multigemm.planning.operands import Operands, Packed, Strided, strides_of, view_of
from multigemm.planning.tiles import most_tiles_by_rows
from multigemm.problem.fused import Fused
from multigemm.problem.spec import OperandSpec, ProblemSpec

THREADS = 384
COUNTERS = 2
"""The words in which a launch counts: the next tile, and the clusters that are done."""
LAUNCH = struct.Struct("<2q4i")
NO_MAPS = join([BLANK] * 17)
"""The placeholder for a packed form's maps."""
READERS = 2
"""Rows that more tiles than this read are marked to stay in the L2 cache."""
BUSY_ROWS = 208
"""A group with this many rows keeps the tensor cores as busy as its weights keep the memory."""


class Roles(NamedTuple):
    """How A and B take the roles W and X, and which of them have k contiguous."""

    swapped: bool
    x_k: bool
    w_k: bool


def roles(spec: ProblemSpec) -> Roles:
    """The roles of a spec: A is the row side unless `swapped`."""
    swapped, a_k, b_k = is_swapped(spec), spec.a.order == "row", spec.b.order == "col"
    return Roles(swapped, b_k, a_k) if swapped else Roles(swapped, a_k, b_k)


def source(spec: ProblemSpec, config: Config, copied: int = 0) -> Source:
    """The source of the kernel: the definitions of `defines`, how results are stored, and which sides the launch before
    it copies (`copied_sides`)."""
    wide = config.pingpong and stores_anywhere(spec)
    more = *((("COPIED_SIDES", copied),) if copied else ()), *((("WIDE_ROWS", 1),) if wide else ())
    return _source(layout_of(spec), sends(spec), config, more)


@lru_cache(maxsize=1024)
def _source(layout: Layout, sent: bool, config: Config, more: tuple[tuple[str, int], ...]) -> Source:
    more = (*defines(layout, config), ("SEND", int(sent)), *layout.fused, *more)
    return Source("hopper.cu", "hopper", more, config.shared_bytes(layout.staged))


IN_TWO_BOXES, SIDE_BY_SIDE = 1, 2
"""How a gate's columns come (kernels/gated.cuh)."""


def gate_kind(spec: ProblemSpec) -> int:
    """How a gate's columns come; 0 without a gate."""
    if spec.fused is None or not spec.fused.layout:
        return 0
    return SIDE_BY_SIDE if spec.b.order == "row" and spec.fused.layout == "interleaved" else IN_TWO_BOXES


def fused_defines(spec: ProblemSpec) -> tuple[tuple[str, int], ...]:
    """The definitions of a fused problem: whether rows are picked, and those of the weight side; the gate; and whether
    results are plain except for a number for each row."""
    if (fused := spec.fused) is None:
        return ()
    gate = gate_kind(spec)
    act = GATE_CODES[spec.activation] if gate and spec.activation else 0
    row_scaled = hopper_plain_kind(spec) > 0 and fused.row_scale is not None
    return (
        ("FUSED", 1), ("GATHER", int(picks_rows(spec))), ("PICKS_W", int(picks_weights(spec))), ("GATE", gate),
        ("ACT", act), ("PREACT", int(bool(gate) and fused.preact is not None)), ("ROW_SCALED", int(row_scaled)),
    )  # fmt: skip


class Layout(NamedTuple):
    """The compile-time facts of a kernel besides its config."""

    element: str
    """The element type of the operands: BFLOAT, TF32, INT8, DOUBLE, or "" for float16."""
    role: Roles
    ragged: bool
    listed: bool
    plain: int
    staged: bool
    """Whether results lie in the staging as they are stored."""
    fused: tuple[tuple[str, int], ...] = ()
    biased: bool = False


def layout_of(spec: ProblemSpec) -> Layout:
    """The compile-time facts of the problems of a spec."""
    element = words_of(spec) or {torch.bfloat16: "BFLOAT", torch.float64: "DOUBLE"}.get(spec.compute, "")
    ragged, listed = spec.form == "jagged_k", spec.form == "per_group"
    plain, staged = hopper_plain_kind(spec), stages_plain(spec)
    return Layout(element, roles(spec), ragged, listed, plain, staged, fused_defines(spec), is_biased(spec))


def defines(layout: Layout, config: Config) -> tuple[tuple[str, int], ...]:
    """The definitions of a kernel: dtype, layouts, whether the epilogue is plain, and the config."""
    element, role, ragged, listed, plain, staged, _, biased = layout
    operands = (element, 1) if element else ("BFLOAT", 0)
    return (
        operands, ("X_K", int(role.x_k)), ("W_K", int(role.w_k)),
        ("RAGGED_K", int(ragged)), ("LISTED", int(listed)),
        ("PLAIN", plain), ("ROWS", config.rows), ("STAGES", config.stages),
        ("CLUSTER", config.cluster), ("STEP", config.step), ("PINGPONG", int(config.pingpong)),
        ("SHARED", config.shared_bytes(staged)), *((("BIASED", 1),) if biased else ()),
    )  # fmt: skip


def shared_bytes(spec: ProblemSpec, config: Config) -> int:
    """The dynamic shared memory in bytes, as hopper.cu lays it out (an upper bound for the bookkeeping)."""
    return config.shared_bytes(stages_plain(spec))


def results_of(view: Packed, swapped: bool, dtype: torch.dtype) -> Side:
    """The output as columns and rows of the weight and the row side."""
    out = view.out
    rows, columns, step = (view.n, view.m, out.col) if swapped else (view.m, view.n, out.row)
    return side_of(out.ptr, step, out.group, columns, rows, view.groups, False, dtype)


def sides_of(view: Packed, role: Roles, dtype: torch.dtype) -> tuple[Side, Side]:
    """The row side and the weight side of a packed form."""
    a, b = view.a, view.b
    a_k, b_k = (role.w_k, role.x_k) if role.swapped else (role.x_k, role.w_k)
    left = side_of(a.ptr, a.row if a_k else a.col, a.group, view.m, view.k, view.groups, a_k, dtype)
    right = side_of(b.ptr, b.col if b_k else b.row, b.group, view.n, view.k, view.groups, b_k, dtype)
    return (right, left) if role.swapped else (left, right)


def matrix_side(x: Tensor, mn_dim: int, k_contiguous: bool) -> Side:
    """One matrix of a list as a side. `mn_dim` is its dimension other than k."""
    stride = [s if n > 1 else 0 for n, s in zip(x.shape, x.stride(), strict=True)]
    step = stride[mn_dim if k_contiguous else 1 - mn_dim] * x.dtype.itemsize
    return Side(x.data_ptr(), x.shape[mn_dim], x.shape[1 - mn_dim], 1, step, 0, k_contiguous, x.dtype)


class Clusters:
    """Launches a kernel of resident clusters: with a counter, and at most as many clusters as fit or have work."""

    def __init__(self, kernel: Kernel, spec: ProblemSpec, config: Config) -> None:
        self._kernel, self._config = kernel, config
        self._swapped = is_swapped(spec) or config.kernel == "hopper_shift_a"
        self._shared, across = shared_bytes(spec, config), config.columns * config.cluster
        self._most = kernel.resident_clusters(config.cluster, THREADS, self._shared)
        rows = config.rows
        if config.kernel == "hopper_gather":  # its blocks share columns, and not rows
            rows, across = rows * config.cluster, COLUMNS
        self._tile = (across, rows) if self._swapped else (rows, across)
        self._aligned = spec.out.align == 16
        ready(kernel.index, COUNTERS)

    def bound(
        self,
        ops: Operands,
        view: Packed,
        more: Sequence[Argument],
        *,
        columns: int = 0,
        listed: Tensor | None = None,
        keep: Sequence[object] = (),
        overlap: bool = True,
    ) -> BoundKernel:
        """A launch for one problem. `columns`: those of the weight side, 0 for a list, whose maps are `listed`. `more`:
        the kernel's arguments after the problem and its options. `overlap`: as in `Kernel.bound`."""
        table, counter = table_of(ops), Words(self._kernel.index, COUNTERS)
        options = LAUNCH.pack(
            0 if listed is None else listed.data_ptr(), counter.address,
            self._swapped, BUSY_ROWS, self._aligned, columns > READERS * self._config.cluster * self._config.columns,
        )  # fmt: skip

        most_tiles = most_tiles_by_rows(ops, view, *self._tile)

        def grid_for(tokens: int) -> int:
            return self._blocks(most_tiles(tokens))

        return self._kernel.bound(
            [problem_argument(ops, table, view), options, *more],
            grid=grid_for(view.m),
            threads=THREADS,
            shared=self._shared,
            cluster=self._config.cluster,
            overlap=overlap,
            keep=(table, listed, counter, *keep),
            on_capture=counter.pin,
            # Swapped: `columns` would be tokens. Picked rows: indices say how many tokens there are.
            grid_for=None if self._swapped or picks_rows(ops.spec) else grid_for,
        )

    def _blocks(self, tiles: int) -> int:
        return max(1, min(tiles, self._most)) * self._config.cluster


class Hopper:
    """The Hopper kernel, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int, copied: int = 0) -> None:
        kernel = load(source(spec, config, copied), index)
        self._clusters, self._config, self._index = Clusters(kernel, spec, config), config, index
        self._role, self._dtype, self._results, self._sends = roles(spec), spec.compute, spec.out.dtype, sends(spec)
        self._listed, self._ragged = spec.form == "per_group", spec.form == "jagged_k"
        self._gate = gate_kind(spec)

    def bind(self, ops: Operands) -> Launch:
        """Lays out the arguments of one problem."""
        if ops.fused is not None:
            return self._bound_fused(ops)
        bound = self.bound(ops, view_of(ops))
        return without_move(bound) if self._listed else bound

    def _bound_fused(self, ops: Operands) -> BoundKernel:
        """The launch of a fused problem, with a map of columns of g and u where it has a gate."""
        view, fused = view_of_tokens(ops), cast(Fused, ops.fused)
        # An address must be there, though nothing is read.
        if fused.a_rows is not None and not cast(Tensor, ops.a).numel():
            view = replace(view, a=Strided(view.b.ptr, 0, 0, 0))
        if fused.b_rows is not None and not cast(Tensor, ops.b).numel():
            view = replace(view, b=Strided(view.a.ptr, 0, 0, 0))
        x, w = sides_of(view, self._role, self._dtype)
        with on_device(self._index):
            maps = list(self._maps(view, x, w))
            if fused.gate is not None and self._gate == IN_TWO_BOXES:
                maps[0] = arguments.gate_map(w, fused.gate.layout == "interleaved")
            elif not self._ragged and picks_rows(ops.spec):
                maps[0] = plain_map(w, COLUMNS // self._config.cluster)  # blocks load a part for all
        return self._clusters.bound(ops, view, [tuple(maps)], columns=w.mn)

    def bound(self, ops: Operands, view: Packed, overlap: bool = True) -> BoundKernel:
        """The launch of one problem. Its packed formula may be that of copies."""
        if self._listed:
            return self._clusters.bound(ops, view, [NO_MAPS], listed=self._listed_maps(ops), overlap=overlap)
        x, w = sides_of(view, self._role, self._dtype)
        with on_device(self._index):
            maps = self._maps(view, x, w)
        return self._clusters.bound(ops, view, [maps], columns=w.mn, overlap=overlap)

    def _maps(self, view: Packed, x: Side, w: Side) -> tuple[bytes, ...]:
        """One map of the weight side, 16 of the row side, and one of the results if the copy engine stores them."""
        if self._ragged and x.k_contiguous:
            padded = x._replace(k=padded_k(view, tile_side(self._dtype)))
            maps: tuple[bytes, ...] = (ragged_map(w), *arguments.row_maps(padded))
        elif self._ragged:
            maps = (ragged_map(w), ragged_map(x), arguments.BLANK_ROWS)
        else:
            maps = (plain_map(w, COLUMNS), *arguments.row_maps(x))
        if self._sends:
            return (*maps, result_map(results_of(view, self._role.swapped, self._results)))
        return maps

    def _listed_maps(self, ops: Operands) -> Tensor:
        """[G, 2] maps in device memory: weight side, row side. A matrix that occurs several times is encoded once."""
        role, made, parts = self._role, dict[tuple[Side, int], bytes](), list[bytes]()
        a_k, b_k = (role.w_k, role.x_k) if role.swapped else (role.x_k, role.w_k)
        with on_device(self._index):
            for a, b in zip(ops.a, ops.b, strict=True):
                x, w = matrix_side(a, 0, a_k), matrix_side(b, 1, b_k)
                x, w = (w, x) if role.swapped else (x, w)
                for key in ((w, COLUMNS), (x, arguments.list_box(x.mn, self._config.rows, self._config.cluster))):
                    if key not in made:
                        made[key] = plain_map(*key)
                    parts.append(made[key])
        return to_device(np.frombuffer(b"".join(parts), dtype=np.int64).reshape(-1, 32), ops.device)


# Copies of operands that TMA cannot read.
#
# Odd strides and alignments on the fast kernel: copy the operand into a readable layout first.
#
# The copy is one more pass over the operand, at memory speed; the generic kernel would lose far more
# on anything large. One launch copies all that a problem needs, lists included. The workspace belongs
# to the bound problem.

COPY_SOURCE = Source("pack.cu", "pack", ())
"""The source for elements of 16 bits."""
COPY_RECORD = struct.Struct("<2Q9q")
COPY_JOB = struct.Struct("<Q2I")
COPY_THREADS, BAND, PIECE_BYTES, BLOCKS_PER_SM = 256, 32, 512, 8
LONG_LINE, LINE_START = 1024, 128
"""Bytes from which on a copy's lines begin at multiples of 128 bytes, of which a box of the copy engine then meets one
and not two. H200, 2026-11-25: 0.92 to 1.05 of a product's time with lines of 1 to 2 KiB, 0.85 to 1.05 with longer ones
(81 comparisons, 0.97 in the mean); with shorter lines up to 1.06."""


def tile_side(dtype: torch.dtype) -> int:
    """The side, in elements, of the squares in which a copy is transposed. Groups of a padded copy start at multiples
    of it."""
    return 128 if dtype.itemsize == 1 else 64


def copy_source(dtype: torch.dtype) -> Source:
    """The kernel that copies elements of a dtype."""
    return COPY_SOURCE if dtype.itemsize == 2 else Source("pack.cu", "pack", (("ELEMENT", dtype.itemsize),))


def padding_source(dtype: torch.dtype) -> Source:
    """The kernel that copies rows of a jagged k (`PaddedRows`)."""
    return Source("pack.cu", "pack_ragged", (("ELEMENT", dtype.itemsize), ("RAGGED", 1)))


def _workspace(elements: int, like: Tensor) -> Tensor:
    return torch.empty(elements, dtype=like.dtype, device=like.device)


class _Copies:
    """Collects the copies of one problem: source, destination, and work units of each."""

    def __init__(self) -> None:
        self.records: list[bytes] = []
        self.units = 0
        self.memory: list[Tensor] = []

    def add(self, x: Tensor, wanted: OperandSpec, operand: str | None) -> Tensor:
        """A view of fresh memory with x's shape and the wanted contiguous direction. `operand`: as in `strides_of`."""
        view, by_rows = strides_of(x, operand), wanted.order == "row"
        rows, cols = x.shape[-2:]
        outer, inner = (rows, cols) if by_rows else (cols, rows)
        groups = x.shape[0] if x.dim() == 3 and view.group else 1
        whole = (LINE_START if inner * x.itemsize >= LONG_LINE else 16) // x.itemsize
        side = tile_side(x.dtype)
        pitch = -(-inner // whole) * whole
        memory = _workspace(max(groups * outer * pitch, 1), x)
        self.memory.append(memory)
        step = (outer * pitch if view.group else 0,) if x.dim() == 3 else ()
        from_outer, from_inner = (view.row, view.col) if by_rows else (view.col, view.row)
        if inner == 1:
            from_inner = 1  # a stride that is never used must not send the copy through shared memory
        units = groups * (
            -(-outer // BAND) * -(-inner * x.itemsize // PIECE_BYTES)
            if from_inner == 1
            else -(-outer // side) * -(-inner // side)
        )
        if units:
            source = (view.group, from_outer, from_inner)
            record = (view.ptr, memory.data_ptr(), groups, outer, inner, *source, outer * pitch, pitch, self.units)
            self.records.append(fields(COPY_RECORD.pack(*record), slot_of(view.ptr, 0)))
            self.units += units
        return memory.as_strided(x.shape, (*step, *((pitch, 1) if by_rows else (1, pitch))))

    def bound(self, kernel: Kernel, ops: Operands, tokens: bool) -> BoundKernel | None:
        """One launch for all copies; None without copies. `tokens`: the copied operands depend on the number of
        tokens."""
        if not self.units:
            return None
        listed = None
        if len(self.records) > 2:
            listed = to_device(np.frombuffer(b"".join(self.records), dtype=np.int64).reshape(-1, 11), ops.device)
        head = COPY_JOB.pack(0 if listed is None else listed.data_ptr(), len(self.records), self.units)
        two = self.records[:2] if listed is None else []
        argument = join([head, *two, bytes((2 - len(two)) * COPY_RECORD.size)])
        grid = min(self.units, BLOCKS_PER_SM * processors(kernel.index))
        grid_for = None if tokens else lambda _: grid
        kept = (*self.memory, listed)
        return kernel.bound([argument], grid=grid, threads=COPY_THREADS, keep=kept, grid_for=grid_for)


class Copied(NamedTuple):
    """A problem with copies in place of some operands, its packed formula, and the launch that fills the copies."""

    ops: Operands
    view: Packed
    launch: BoundKernel | None

    def then(self, product: MovableLaunch) -> Launch:
        """The copies, if there are any, followed by the product."""
        launch = product if self.launch is None else LaunchSequence((self.launch, product))
        return without_move(launch) if self.ops.spec.form == "per_group" else launch


def with_copies(ops: Operands, view: Packed, spec: ProblemSpec, kernel: Kernel, also: str = "") -> Copied:
    """The problem with copies of the operands for which `spec` has another layout, and of `also`."""
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
    tokens = ops.spec.jagged == "k" or ("a" in operands and ops.spec.jagged == "m")
    return Copied(replace(ops, spec=spec, **operands), view, copies.bound(kernel, ops, tokens))


class PaddedRows:
    """Copies the row side of a jagged k, with elements of 4 bytes or 1 byte, so that k is contiguous.

    Every group begins at a multiple of `tile_side` and ends in zeros. Offsets are read on the device.
    """

    def __init__(self, spec: ProblemSpec, index: int) -> None:
        self._name = "b" if is_swapped(spec) else "a"
        self._kernel, self._side = load(padding_source(spec.compute), index), tile_side(spec.compute)

    def given(self, spec: ProblemSpec, copied: ProblemSpec) -> ProblemSpec:
        """The copied spec, except for the rows, which this class copies."""
        return replace(copied, **{self._name: getattr(spec, self._name)})

    def bound(self, ops: Operands, view: Packed) -> tuple[Packed, BoundKernel]:
        """The packed formula with the copy in the place of the rows, and the launch that fills it."""
        x, rows = (view.a, view.m) if self._name == "a" else (view.b, view.n)
        mn, k = (x.row, x.col) if self._name == "a" else (x.col, x.row)
        length = padded_k(view, self._side)
        memory = _workspace(max(rows * length, 1), cast(Tensor, getattr(ops, self._name)))
        record = COPY_RECORD.pack(x.ptr, memory.data_ptr(), 1, rows, length, 0, mn, k, 0, length, 0)
        copy = fields(record, slot_of(x.ptr, 0))
        tiles = length // self._side * -(-rows // self._side)
        grid = max(1, min(tiles, BLOCKS_PER_SM * processors(self._kernel.index)))
        given = [problem_bytes(ops, None, view), copy]
        launch = self._kernel.bound(given, grid=grid, threads=COPY_THREADS, keep=(memory,))
        place = Strided(memory.data_ptr(), 0, *((length, 1) if self._name == "a" else (1, length)))
        return (replace(view, a=place) if self._name == "a" else replace(view, b=place)), launch


def padded_k(view: Packed, side: int) -> int:
    """The length of k in a padded copy. Group g starts at `side` * (start // side + g) (pipeline.cuh)."""
    return (int(view.k) // side + view.groups + 1) * side


def copied_sides(spec: ProblemSpec, copied: ProblemSpec) -> int:
    """What is copied: 1 for rows, 2 for weights, 3 for both; 0 also where `PaddedRows` alone copies."""
    a, b = (2, 1) if is_swapped(spec) else (1, 2)
    sides = a * (copied.a is not spec.a) + b * (copied.b is not spec.b)
    return sides | 1 if sides and pads_rows(spec) else sides  # padded rows are copied whatever their layout


def copied_sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels that the spec's problems may launch under this config."""
    copied = packed_spec(spec)
    own = (source(copied, config, copied_sides(spec, copied)), copy_source(spec.compute))
    return (*own, padding_source(spec.compute)) if pads_rows(spec) else own


class CopiedHopper:
    """The copying kernel, and the Hopper kernel for the copies' layout, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._spec = packed_spec(spec)
        self._copy = load(copy_source(spec.compute), index)
        self._product = Hopper(self._spec, config, index, copied_sides(spec, self._spec))
        self._rows = PaddedRows(spec, index) if pads_rows(spec) else None

    def bind(self, ops: Operands) -> Launch:
        """Copies of the operands that need one, then the fast kernel on them."""
        if self._rows is None:
            copied = with_copies(ops, view_of(ops), self._spec, self._copy)
            # Its kernel waits for copies only. Without any it may not begin before another launch is over.
            return copied.then(self._product.bound(copied.ops, copied.view, overlap=copied.launch is not None))
        copied = with_copies(ops, view_of(ops), self._rows.given(ops.spec, self._spec), self._copy)
        view, rows = self._rows.bound(copied.ops, copied.view)
        product = self._product.bound(replace(copied.ops, spec=self._spec), view)
        return copied.then(LaunchSequence((rows, product)))


# Rows that are picked by index, copied one behind the other first.


def gathered_sources(spec: ProblemSpec, config: Config) -> tuple[Source, ...]:
    """All kernels of this folder that problems of the spec may launch under this config."""
    return (source(gathered_spec(spec), config),)


class GatheredHopper:
    """The step that copies picked rows, and the Hopper kernel on the copies, loaded for the problems of one spec."""

    def __init__(self, spec: ProblemSpec, config: Config, index: int) -> None:
        self._spec, self._index = gathered_spec(spec), index
        self._product = Hopper(self._spec, config, index)

    def bind(self, ops: Operands) -> Launch:
        """Copies of the rows, and then the products of the copies."""
        steps, copies, memory = gather_steps(ops, self._index)
        left = None if self._spec.fused is None else replace(cast(Fused, ops.fused), a_rows=None, b_rows=None)
        if ops.lent is None:
            product = self._product.bind(replace(ops, spec=self._spec, fused=left, lent=memory, **copies))
            return lending([*steps, product], memory)
        # A call lends memory once: here to the rows that are summed.
        product = self._product.bind(replace(ops, spec=self._spec, fused=left, **copies))
        launch, kept = in_turn([*steps, product]), [memory]
        return lambda: (launch(), kept)
