"""A tiled kernel in NumPy, written as a real one would be: the body that planted faults are put into.

It walks tiles of BM x BN x BK through flat memory with pointers, strides and masks, clamps offsets,
and stores through a mask, so a fault in it behaves as the same fault would on a GPU: a missing mask
reads or overwrites a neighbour, a wrong stride lands elsewhere. Memory outside every buffer does not
exist for it: an access beyond the storage is dropped, as if nothing had noticed.

`Faults` names every place where something may be wrong; the correct kernel has none of them set.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import ml_dtypes
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.backend import Availability, Launch, Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.spec import ProblemSpec
from multigemm.reference.dtypes import numpy_dtype, round_once
from multigemm.reference.numpy_reference import activate

Array = npt.NDArray[Any]
Index = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Tile:
    """The model's config."""

    bm: int = 16
    bn: int = 16
    bk: int = 16


class Flat:
    """The whole storage that a tensor lies in, as one flat array, and the tensor's place in it."""

    def __init__(self, tensor: Tensor) -> None:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        size = tensor.dtype.itemsize
        whole = storage[: storage.numel() // size * size]
        name = str(tensor.dtype).removeprefix("torch.")
        kind = {1: torch.uint8, 2: torch.int16}[size] if hasattr(ml_dtypes, name) else tensor.dtype
        data = whole.view(kind).numpy()
        self.data: Array = data.view(getattr(ml_dtypes, name)) if hasattr(ml_dtypes, name) else data
        self.base = tensor.storage_offset()

    def load(self, index: Index, mask: Array) -> Array:
        inside = mask & (index >= 0) & (index < self.data.size)
        got: Array = np.zeros(index.shape, self.data.dtype)
        got[inside] = self.data[index[inside]]  # and no other one: the storage may begin with an unmapped page
        return got

    def store(self, index: Index, mask: Array, values: Array) -> None:
        inside = mask & (index >= 0) & (index < self.data.size)
        self.data[index[inside]] = values[inside]


@dataclass(slots=True)
class Matrix:
    """One group's matrix: flat memory, element offset, strides."""

    flat: Flat
    base: int
    row: int
    col: int

    def at(self, i: Index, j: Index) -> Index:
        found: Index = self.base + i[:, None] * self.row + j[None, :] * self.col
        return found


@dataclass(slots=True)
class Group:
    """One group as a kernel sees it after its prologue."""

    index: int
    m: int
    n: int
    k: int
    a: Matrix
    b: Matrix
    out: Matrix
    c: Matrix | None
    bias: Matrix | None
    starts: dict[str, int] = field(default_factory=dict)


Round = Callable[[Array, torch.dtype], Array]


def _no_change(x: Any) -> Any:
    return x


@dataclass(slots=True)
class Faults:
    """Every deviation from the correct kernel; see multigemm.testing.model_mutants for the ones that are planted."""

    mask_k_a: bool = True
    mask_k_b: bool = True
    mask_m_load: bool = True
    mask_n_load: bool = True
    mask_m_store: bool = True
    mask_n_store: bool = True
    k_steps: Callable[[int], int] = _no_change
    start: Callable[[int, int], int] = lambda value, group: value
    end: Callable[[int, int], int] = lambda value, group: value
    clamp: bool = True
    ignore_head: bool = False
    group_of: dict[str, Callable[[int, int], int]] = field(default_factory=dict)
    extent: Callable[[str, int], int] = lambda name, value: value
    stale: bool = False
    tiles: Callable[[list[tuple[int, int]]], list[tuple[int, int]]] = _no_change
    index: Callable[[Index], Index] = _no_change
    swap: str = ""
    transpose_out: bool = False
    epilogue: str = ""
    reads_c_at_beta_zero: bool = False
    round: Round = round_once
    accumulate: torch.dtype | None = None
    inputs: Callable[[Array], Array] = _no_change
    zero_head: bool = True
    zero_tail: bool = True
    zero_when_given: bool = False
    skip_empty_k: bool = False
    skip_nan: bool = False
    early_metadata: bool = False
    adds_to_out: bool = False
    writes_input: bool = False
    leaves_last_group: bool = False
    read_past_n: bool = False
    drift: bool = False
    split_rounds: bool = False
    contiguous: str = ""
    valid_rows_ignored: bool = False
    shared_bias: bool = False
    one_bias_column: bool = False
    alpha_zero_multiplies: bool = False
    factor: Callable[[float], float] = _no_change
    old: Callable[[Array], Array] = _no_change
    bias: Callable[[Array], Array] = _no_change
    sum: Callable[[Array], Array] = _no_change
    activate: Callable[[Array, str | None], Array] = activate
    scale_block: Callable[[Index, int, int, int], Index] = lambda block, start, k, q: block
    """Entry of a scale along K, from where its group starts, how long K is, and how much an entry covers."""
    scale_group: Callable[[int], int] = _no_change
    scale: Callable[[Array], Array] = _no_change
    """A scale, from the numbers that are stored."""
    low_first: bool = True
    parts: Callable[[int, int], int] = lambda rows, groups: 1
    backwards: Callable[[int], bool] = lambda tile: False


class ModelBackend:
    """The model kernel behind the Backend protocol."""

    batch_invariant = True
    takes_quantised = True

    def __init__(self, name: str = "model", faults: Faults | None = None, tile: Tile | None = None) -> None:
        self._name, self.faults, self.tile = name, faults or Faults(), tile or Tile()

    @property
    def name(self) -> str:
        return self._name

    def availability(self) -> Availability:
        return Availability(ok=True)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return [] if device.type == "cpu" else [f"the model runs in host memory, and the operands are on {device}"]

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return (self.tile, Tile(8, 32, 8))

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        return Recipe("model", config, lambda ops: Kernel(ops, config, self.faults).bound())


class Kernel:
    """One bound problem."""

    def __init__(self, ops: Operands, tile: Tile, faults: Faults) -> None:
        self.ops, self.tile, self.f, self.spec = ops, tile, faults, ops.spec
        self.calls = 0
        scales = (ops.scale_a, ops.scale_b, ops.zero_b)
        self.flats = {id(t): Flat(t) for x in (ops.a, ops.b, ops.out, ops.c, ops.bias, *scales) for t in _tensors(x)}
        self.remembered = self.sizes() if faults.early_metadata else None

    def bound(self) -> Launch:
        return self.launch

    # --- the prologue: groups, their extents and where they lie ----------------------------------

    def sizes(self) -> tuple[list[int], list[int]]:
        """start and end of every group along the jagged direction (or 0 and the valid rows)."""
        ops = self.ops
        if ops.valid_rows is not None:
            rows = [min(max(int(r), 0), cast(Tensor, ops.a).shape[1]) for r in ops.valid_rows.tolist()]
            if self.f.valid_rows_ignored:
                rows = [cast(Tensor, ops.a).shape[1]] * len(rows)
            return [0] * len(rows), rows
        if ops.ends is None:
            return [0] * self.spec.groups, [0] * self.spec.groups
        ends = [int(e) for e in ops.ends.tolist()]
        first = int(ops.ends.as_strided((1,), (1,), ops.ends.storage_offset() - 1)) if ops.head else 0
        if self.f.ignore_head:
            first = 0
        starts = [first, *ends[:-1]] if ends else []
        starts = [self.f.start(s, g) for g, s in enumerate(starts)]
        ends = [self.f.end(e, g) for g, e in enumerate(ends)]
        if self.f.clamp:
            total = self.jagged_extent()
            starts = [min(max(s, 0), total) for s in starts]
            ends = [min(max(e, s), total) for s, e in zip(starts, ends, strict=True)]
        return starts, ends

    def jagged_extent(self) -> int:
        a, b = cast(Tensor, self.ops.a), cast(Tensor, self.ops.b)
        return {"m": a.shape[0], "n": b.shape[-1], "k": a.shape[-1]}[self.spec.jagged or "m"]

    def matrix(self, name: str, x: Any, g: int, rows: int, cols: int) -> Matrix:
        """Group g of an operand, moved by `rows` and `cols` elements; the faults may pick another group or stride."""
        if name in self.f.group_of:
            g = self.f.group_of[name](g, self.spec.groups)
        tensor = x[g] if isinstance(x, list) else x
        flat = self.flats[id(tensor)]
        row, col = tensor.stride(-2), tensor.stride(-1)
        if self.f.contiguous == name:
            row, col = tensor.shape[-1], 1
        if self.f.swap == name:
            row, col = col, row
        group = g * tensor.stride(0) if tensor.dim() == 3 and not isinstance(x, list) else 0
        return Matrix(flat, flat.base + group + rows * row + cols * col, row, col)

    def bias_of(self, g: int, skip: int) -> Matrix | None:
        x = self.ops.bias
        if x is None:
            return None
        tensor: Tensor = x[g] if isinstance(x, list) else x
        flat = self.flats[id(tensor)]
        group = g * tensor.stride(0) if tensor.dim() == 2 and not self.f.shared_bias else 0
        col = 0 if self.f.one_bias_column else int(tensor.stride(-1))
        return Matrix(flat, int(flat.base + group + skip * tensor.stride(-1)), 0, col)

    def group(self, g: int, start: int, end: int) -> Group:
        ops, jagged = self.ops, self.spec.jagged
        a, b = (x[g] if isinstance(x, list) else x for x in (ops.a, ops.b))
        extents = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
        skip = {"m": 0, "n": 0, "k": 0}
        if jagged:
            extents[jagged], skip[jagged] = end - start, start
        elif self.spec.form == "masked":
            extents["m"] = end
        extents = {name: self.f.extent(name, value) for name, value in extents.items()}
        if self.spec.alpha == "zero" and not self.f.alpha_zero_multiplies:
            extents["k"] = 0
        left = self.matrix("a", ops.a, g, skip["m"], skip["k"])
        right = self.matrix("b", ops.b, g, skip["k"], skip["n"])
        out = self.matrix("out", ops.out, g, skip["m"], skip["n"])
        c = None if ops.c is None else self.matrix("c", ops.c, g, skip["m"], skip["n"])
        if self.f.reads_c_at_beta_zero and c is None:
            c = out
        return Group(g, extents["m"], extents["n"], extents["k"], left, right, out, c, self.bias_of(g, skip["n"]), skip)

    # --- the walk ---------------------------------------------------------------------------------

    def launch(self) -> None:
        self.calls += 1
        starts, ends = self.remembered or self.sizes()
        if self.spec.zero_unowned or self.f.zero_when_given:
            self.write_zeros(starts, ends)
        walk: list[tuple[int, int]] = []
        groups = [self.group(g, s, e) for g, (s, e) in enumerate(zip(starts, ends, strict=True))]
        for group in groups:
            across = -(-group.n // self.tile.bn)
            if group.m * across > 1 << 20:
                raise IndexError(f"group {group.index} claims {group.m} x {group.n} elements: a GPU would fault here")
            walk += [(group.index, t) for t in range(-(-group.m // self.tile.bm) * across)]
        acc: Array | None = None
        for g, t in self.f.tiles(walk):
            if self.f.leaves_last_group and g == len(groups) - 1 and g > 0:
                continue
            acc = self.run_tile(groups[g], t, acc)
        if self.f.writes_input and groups:
            groups[0].a.flat.data[groups[0].a.base - 1] = 0

    def write_zeros(self, starts: list[int], ends: list[int]) -> None:
        """What no group owns: the head and the tail of a jagged result, rows past the valid ones."""
        out = self.ops.out
        if isinstance(out, list) or not (self.spec.jagged in ("m", "n") or self.spec.form == "masked"):
            return
        if self.spec.form == "masked":
            for g, rows in enumerate(ends):
                if self.f.zero_tail:
                    out[g, rows:] = 0
            return
        lines = out if self.spec.jagged == "m" else out.t()
        if self.f.zero_head:
            lines[: starts[0] if starts else 0] = 0
        if self.f.zero_tail:
            lines[ends[-1] if ends else 0 :] = 0

    # --- one tile ---------------------------------------------------------------------------------

    def run_tile(self, g: Group, t: int, before: Array | None) -> Array:
        tile, f = self.tile, self.f
        across = -(-g.n // tile.bn)
        i = f.index((t // across) * tile.bm + np.arange(tile.bm, dtype=np.int64))
        j = f.index((t % across) * tile.bn + np.arange(tile.bn, dtype=np.int64))
        acc = self.products(g, i, j, before if f.stale else None, t)
        if f.skip_empty_k and g.k == 0:
            return acc
        rows, cols = (i < g.m)[:, None], (j < g.n)[None, :]
        result = f.round(self.finish(g, acc, i, j, rows & cols), self.spec.out.dtype)
        store = (rows if f.mask_m_store else rows | True) & (cols if f.mask_n_store else cols | True)
        index = g.out.at(i, j)
        if f.transpose_out and tile.bm == tile.bn:
            result = result.T
        if f.adds_to_out:
            result = (g.out.flat.load(index, store).astype(result.dtype) + result).astype(result.dtype)
        g.out.flat.store(index, store, result.astype(numpy_dtype(self.spec.out.dtype)))
        return acc

    def acc_dtype(self) -> Any:
        return {torch.float64: np.float64, torch.int32: np.int64}.get(self.spec.acc, np.float32)

    def products(self, g: Group, i: Index, j: Index, before: Array | None, t: int) -> Array:
        tile, f = self.tile, self.f
        acc = np.zeros((tile.bm, tile.bn), self.acc_dtype()) if before is None else before.copy()
        if self.spec.batch_invariant and before is None:
            return self.sums_in_order(g, i, j, f.parts(g.m, self.spec.groups), f.backwards(t))
        steps = f.k_steps(-(-g.k // tile.bk))
        for step in range(steps):
            kk = step * tile.bk + np.arange(tile.bk, dtype=np.int64)
            left = (i < g.m) if f.mask_m_load else np.ones(tile.bm, bool)
            right = (j < g.n + (1 if f.read_past_n else 0)) if f.mask_n_load else np.ones(tile.bn, bool)
            inside = kk < g.k
            every = np.ones(tile.bk, bool)
            x = g.a.flat.load(g.a.at(i, kk), left[:, None] & (inside if f.mask_k_a else every)[None, :])
            y = g.b.flat.load(g.b.at(kk, j), (inside if f.mask_k_b else every)[:, None] & right[None, :])
            if self.spec.quantised:
                x, y = self.dequantised(g, i, j, kk)
            acc = self.step(acc, x, y, step, steps)
        if self.spec.acc == torch.int32:
            return acc.astype(np.int32).astype(np.int64)
        return acc

    def sums_in_order(self, g: Group, i: Index, j: Index, parts: int, backwards: bool) -> Array:
        """The products of a batch-invariant problem: one k after the other, whatever the tile."""
        kk = np.arange(g.k, dtype=np.int64)
        x = g.a.flat.load(g.a.at(i, kk), np.broadcast_to((i < g.m)[:, None], (len(i), g.k)))
        y = g.b.flat.load(g.b.at(kk, j), np.broadcast_to((j < g.n)[None, :], (g.k, len(j))))
        total = np.zeros((len(i), len(j)), self.acc_dtype())
        for part in np.array_split(kk, parts):
            acc = np.zeros_like(total)
            for k in part[::-1] if backwards else part:
                acc = self.step(acc, x[:, k, None], y[k, None], 0, 1)
            with np.errstate(all="ignore"):
                total = total + acc
        if self.spec.acc == torch.int32:
            return total.astype(np.int32).astype(np.int64)
        return total

    # --- quantised operands -----------------------------------------------------------------------

    def dequantised(self, g: Group, i: Index, j: Index, kk: Index) -> tuple[Array, Array]:
        """Elements of a and b less their zero points, times their scales, in float64; 0 outside the group."""
        inside, packed = kk < g.k, self.spec.b.packed
        rows, columns = (i < g.m)[:, None] & inside[None, :], inside[:, None] & (j < g.n)[None, :]
        x = g.a.flat.load(g.a.at(i, kk), rows).astype(np.float64)
        y: Array = g.b.flat.load(g.b.at(kk // 2 if packed else kk, j), columns)
        if packed:
            high = (kk % 2 == 1) == self.f.low_first
            codes = np.where(high[:, None], y.view(np.uint8) >> 4, y.view(np.uint8) & 15)
            y = _decode_nibbles(codes, packed)
        y = y.astype(np.float64)
        if self.ops.zero_b is not None:
            y = y - self.scale_of(g, "b", self.ops.zero_b, j, kk, columns.T).T
        with np.errstate(all="ignore"):
            if self.ops.scale_a is not None:
                x = x * self.float_scale(self.scale_of(g, "a", self.ops.scale_a, i, kk, rows))
            if self.ops.scale_b is not None:
                y = y * self.float_scale(self.scale_of(g, "b", self.ops.scale_b, j, kk, columns.T)).T
        return np.where(rows, x, 0), np.where(columns, y, 0)

    def float_scale(self, stored: Array) -> Array:
        """Scales as a kernel would convert them."""
        return self.f.scale(stored).astype(np.float64)

    def scale_of(self, g: Group, side: str, grids: Any, i: Index, kk: Index, mask: Array) -> Array:
        """The stored number for each line and each of K."""
        spec = self.spec.a.scale if side == "a" else self.spec.b.scale
        assert spec is not None
        grid = grids[g.index] if isinstance(grids, list) else grids
        row, col = (grid.stride(-2), grid.stride(-1)) if side == "a" else (grid.stride(-1), grid.stride(-2))
        lines, blocks = grid.shape[-2:] if side == "a" else grid.shape[:-3:-1]
        jagged_k, direction = self.spec.jagged == "k", "m" if side == "a" else "n"
        extent = g.m if side == "a" else g.n
        cover, q = spec.rows, spec.k
        if isinstance(grids, list):
            cover = 0 if lines == 1 else 1 if lines == extent else 128
            q = 0 if blocks == 1 else next(q for q in (128, 64, 32) if -(-g.k // q) == blocks)
        start = g.starts["k"] if jagged_k else 0
        line = np.zeros_like(i) if not cover else (g.starts[direction] + i) // cover
        block = np.zeros_like(kk)
        if q:
            block = self.f.scale_block(kk // q + (start // q + g.index if jagged_k else 0), start, g.k, q)
        group = self.f.scale_group(g.index) * grid.stride(0) if spec.by_group and grid.dim() == 3 else 0
        flat = self.flats[id(grid)]
        return flat.load(Matrix(flat, int(flat.base + group), row, col).at(line, block), mask)

    def step(self, acc: Array, x: Array, y: Array, step: int, steps: int) -> Array:
        f, kind = self.f, self.acc_dtype()
        wide = np.float64 if self.spec.quantised else kind  # an element times its scale may leave float32's range
        x, y = f.inputs(x.astype(wide)), f.inputs(y.astype(wide))
        if f.skip_nan:
            x, y = (np.where(x == 0, 0, x), np.where(np.isfinite(y) | (x != 0).any(), y, 0))
            x, y = np.nan_to_num(x, nan=0.0), np.nan_to_num(y, nan=0.0)
        with np.errstate(all="ignore"):
            acc = f.sum((acc + (x @ y)).astype(kind))
        if f.accumulate is not None or (f.split_rounds and step == steps // 2):
            narrow = f.accumulate or self.spec.out.dtype
            acc = round_once(acc, narrow).astype(kind)
        if f.drift and self.calls % 2 == 0:
            acc = acc * kind(1 + 2**-7)
        return acc

    def finish(self, g: Group, acc: Array, i: Index, j: Index, inside: Array) -> Array:
        """alpha, beta, bias and the activation, in the accumulator's precision."""
        f, order = self.f, self.f.epilogue
        wide = self.spec.acc == torch.int32
        kind = np.float32 if wide and order == "integers through float32" else acc.dtype.type
        with np.errstate(all="ignore"):
            acc, bias = acc.astype(kind), None
            if g.bias is not None:
                bias = g.bias.flat.load(g.bias.at(i, j), np.broadcast_to((j < g.n)[None, :], acc.shape))
                bias = f.bias(bias.astype(kind))
            if order == "activation first":
                acc = f.activate(acc, self.spec.activation)
            if order == "bias before alpha" and bias is not None:
                acc = acc + bias
            if (self.spec.alpha == "any" and order != "no alpha") or f.alpha_zero_multiplies:
                acc = acc * kind(f.factor(self.ops.alpha))
            if g.c is not None:
                beta = 1.0 if order == "beta is one" else f.factor(self.ops.beta)
                old = g.c.flat.load(g.c.at(i, j), inside).astype(kind)
                acc = acc + f.old(old) * kind(beta)
            if bias is not None and order not in ("bias before alpha", "no bias"):
                acc = acc + bias
            if wide:
                ends = (-(2**31), 2**31 - 1) if order == "integers saturate" else (-(2**62), 2**62)
                acc = np.clip(acc.astype(np.int64), *ends).astype(np.int32).astype(np.int64)
            if order == "rounds before activation":
                acc = round_once(acc, self.spec.out.dtype).astype(kind)
            if order not in ("activation first", "no activation"):
                acc = f.activate(acc, self.spec.activation)
        return np.asarray(acc)


def _decode_nibbles(codes: Array, packed: str) -> Array:
    if packed == "e2m1":
        return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    whole = codes.astype(np.float32)
    return np.where(whole > 7, whole - 16, whole) if packed == "int4" else whole


def _tensors(x: Any) -> list[Tensor]:
    return [] if x is None else list(x) if isinstance(x, list) else [x]
