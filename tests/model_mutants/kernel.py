"""A tiled kernel in NumPy, written like a real one, in which faults are planted.

It walks tiles of BM x BN x BK through flat memory with pointers, strides and masks, clamps offsets,
and stores through a mask, so a fault in it behaves as the same fault would on a GPU: a missing mask
reads or overwrites a neighbour, a wrong stride lands elsewhere. Memory outside every buffer does not
exist for it: an access beyond the storage is dropped, as if nothing had noticed.

tests.model_mutants.faults makes kernels of this source with a line or two changed.
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

from multigemm.backend import Availability, Recipe
from multigemm.planning.operands import Operands
from multigemm.problem.arrays import dtype_name
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
    """The storage of a tensor as one flat array, and the tensor's position in it."""

    def __init__(self, tensor: Tensor) -> None:
        storage = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage())
        size = tensor.dtype.itemsize
        whole = storage[: storage.numel() // size * size]
        name = dtype_name(tensor.dtype)
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

    def load(self, i: Index, j: Index, mask: Array) -> Array:
        return self.flat.load(self.at(i, j), mask)

    def at(self, i: Index, j: Index) -> Index:
        found: Index = self.base + i[:, None] * self.row + j[None, :] * self.col
        return found


@dataclass(slots=True)
class Group:
    """One group as a kernel sees it after its prologue. `starts`: where it begins in the jagged direction."""

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


class Kernel:
    """One bound problem."""

    def __init__(self, ops: Operands, tile: Tile) -> None:
        self.ops, self.tile, self.spec = ops, tile, ops.spec
        scales = (ops.scale_a, ops.scale_b, ops.zero_b)
        self.flats = {id(t): Flat(t) for x in (ops.a, ops.b, ops.out, ops.c, ops.bias, *scales) for t in _tensors(x)}

    # --- the prologue: groups, their extents and where they lie ----------------------------------

    def sizes(self) -> tuple[list[int], list[int]]:
        """Start and end of every group along the jagged direction; for other forms 0 and the valid rows."""
        ops = self.ops
        if ops.valid_rows is not None:
            most = cast(Tensor, ops.a).shape[1]
            rows = [min(max(int(r), 0), most) for r in ops.valid_rows.tolist()]
            return [0] * len(rows), rows
        if ops.ends is None:
            return [0] * self.spec.groups, [0] * self.spec.groups
        ends = [int(e) for e in ops.ends.tolist()]
        first = int(ops.ends.as_strided((1,), (1,), ops.ends.storage_offset() - 1)) if ops.head else 0
        starts = [first, *ends[:-1]] if ends else []
        total = self.jagged_extent()
        starts = [min(max(s, 0), total) for s in starts]
        ends = [min(max(e, s), total) for s, e in zip(starts, ends, strict=True)]
        return starts, ends

    def jagged_extent(self) -> int:
        a, b = cast(Tensor, self.ops.a), cast(Tensor, self.ops.b)
        return {"m": a.shape[0], "n": b.shape[-1], "k": a.shape[-1]}[self.spec.jagged or "m"]

    def matrix(self, x: Any, g: int, rows: int, cols: int) -> Matrix:
        """Group g of an operand, moved by `rows` and `cols` elements."""
        tensor = x[g] if isinstance(x, list) else x
        flat = self.flats[id(tensor)]
        row, col = tensor.stride(-2), tensor.stride(-1)
        group = g * tensor.stride(0) if tensor.dim() == 3 and not isinstance(x, list) else 0
        return Matrix(flat, flat.base + group + rows * row + cols * col, row, col)

    def bias_of(self, g: int, skip: int) -> Matrix | None:
        x = self.ops.bias
        if x is None:
            return None
        tensor: Tensor = x[g] if isinstance(x, list) else x
        flat = self.flats[id(tensor)]
        group = g * tensor.stride(0) if tensor.dim() == 2 else 0
        return Matrix(flat, int(flat.base + group + skip * tensor.stride(-1)), 0, int(tensor.stride(-1)))

    def group(self, g: int, start: int, end: int) -> Group:
        ops, jagged = self.ops, self.spec.jagged
        a, b = (x[g] if isinstance(x, list) else x for x in (ops.a, ops.b))
        extents = {"m": a.shape[-2], "n": b.shape[-1], "k": a.shape[-1]}
        skip = {"m": 0, "n": 0, "k": 0}
        if jagged:
            extents[jagged], skip[jagged] = end - start, start
        elif self.spec.form == "masked":
            extents["m"] = end
        if self.spec.alpha == "zero":
            extents["k"] = 0
        left = self.matrix(ops.a, g, skip["m"], skip["k"])
        right = self.matrix(ops.b, g, skip["k"], skip["n"])
        out = self.matrix(ops.out, g, skip["m"], skip["n"])
        c = None if ops.c is None else self.matrix(ops.c, g, skip["m"], skip["n"])
        return Group(g, extents["m"], extents["n"], extents["k"], left, right, out, c, self.bias_of(g, skip["n"]), skip)

    # --- the walk ---------------------------------------------------------------------------------

    def launch(self) -> None:
        starts, ends = self.sizes()
        if self.spec.zero_unowned:
            self.write_zeros(starts, ends)
        walk: list[tuple[int, int]] = []
        groups = [self.group(g, s, e) for g, (s, e) in enumerate(zip(starts, ends, strict=True))]
        for group in groups:
            across = -(-group.n // self.tile.bn)
            if group.m * across > 1 << 20:
                raise IndexError(f"group {group.index} claims {group.m} x {group.n} elements: a GPU would fault here")
            walk += [(group.index, t) for t in range(-(-group.m // self.tile.bm) * across)]
        for g, t in walk:
            self.run_tile(groups[g], t)

    def write_zeros(self, starts: list[int], ends: list[int]) -> None:
        """Zeroes what no group owns: head and tail of a jagged result, rows past the valid ones."""
        out = self.ops.out
        if isinstance(out, list) or not (self.spec.jagged in ("m", "n") or self.spec.form == "masked"):
            return
        if self.spec.form == "masked":
            for g, rows in enumerate(ends):
                out[g, rows:] = 0
            return
        lines = out if self.spec.jagged == "m" else out.t()
        lines[: starts[0] if starts else 0] = 0
        lines[ends[-1] if ends else 0 :] = 0

    # --- one tile ---------------------------------------------------------------------------------

    def run_tile(self, g: Group, t: int) -> None:
        tile = self.tile
        across = -(-g.n // tile.bn)
        i = (t // across) * tile.bm + np.arange(tile.bm, dtype=np.int64)
        j = (t % across) * tile.bn + np.arange(tile.bn, dtype=np.int64)
        acc = self.products(g, i, j)
        rows, cols = (i < g.m)[:, None], (j < g.n)[None, :]
        result = round_once(self.finish(g, acc, i, j, rows & cols), self.spec.out.dtype)
        g.out.flat.store(g.out.at(i, j), rows & cols, result.astype(numpy_dtype(self.spec.out.dtype)))

    def acc_dtype(self) -> Any:
        return {torch.float64: np.float64, torch.int32: np.int64}.get(self.spec.acc, np.float32)

    def products(self, g: Group, i: Index, j: Index) -> Array:
        if self.spec.batch_invariant:
            return self.sums_in_order(g, i, j, np.arange(g.k))
        acc = np.zeros((self.tile.bm, self.tile.bn), self.acc_dtype())
        steps = -(-g.k // self.tile.bk)
        for step in range(steps):
            x, y = self.load(g, i, j, step * self.tile.bk + np.arange(self.tile.bk, dtype=np.int64))
            acc = self.step(acc, x, y)
        return _wrapped(acc) if self.spec.acc == torch.int32 else acc

    def sums_in_order(self, g: Group, i: Index, j: Index, ks: Index) -> Array:
        """The sums of a batch-invariant problem: one k after the other, whatever the tile."""
        acc = np.zeros((len(i), len(j)), self.acc_dtype())
        x, y = self.load(g, i, j, ks)
        for k in range(len(ks)):
            acc = self.step(acc, x[:, k, None], y[k, None])
        return _wrapped(acc) if self.spec.acc == torch.int32 else acc

    def load(self, g: Group, i: Index, j: Index, kk: Index) -> tuple[Array, Array]:
        """Elements of a and b; 0 outside the group."""
        rows, cols, inside = i < g.m, j < g.n, kk < g.k
        if self.spec.quantised:
            return self.dequantised(g, i, j, kk, rows[:, None] & inside, inside[:, None] & cols)
        x = g.a.load(i, kk, rows[:, None] & inside[None, :])
        y = g.b.load(kk, j, inside[:, None] & cols[None, :])
        return x, y

    def step(self, acc: Array, x: Array, y: Array) -> Array:
        kind = self.acc_dtype()
        wide = np.float64 if self.spec.quantised else kind  # an element times its scale may leave float32's range
        x, y = (v.astype(wide) for v in (x, y))
        with np.errstate(all="ignore"):
            return np.asarray(acc + x @ y, kind)

    def finish(self, g: Group, acc: Array, i: Index, j: Index, inside: Array) -> Array:
        """Applies alpha, beta, bias and the activation in the accumulator's precision."""
        kind = acc.dtype.type
        with np.errstate(all="ignore"):
            if self.spec.alpha == "any":
                acc = acc * kind(self.ops.alpha)
            if g.c is not None:
                old = g.c.load(i, j, inside).astype(kind)
                acc = acc + old * kind(self.ops.beta)
            if g.bias is not None:
                bias = g.bias.load(i, j, np.broadcast_to((j < g.n)[None, :], acc.shape)).astype(kind)
                acc = acc + bias
            if self.spec.acc == torch.int32:
                acc = _wrapped(acc)
            acc = activate(acc, self.spec.activation)
        return np.asarray(acc)

    # --- quantised operands -----------------------------------------------------------------------

    def dequantised(self, g: Group, i: Index, j: Index, kk: Index, rows: Array, columns: Array) -> tuple[Array, Array]:
        """Elements of a and b where the masks allow them, less their zero points, times their scales, in float64."""
        packed = self.spec.b.packed
        x = g.a.load(i, kk, rows).astype(np.float64)
        y: Array = g.b.load(kk // 2 if packed else kk, j, columns)
        if packed:
            high = kk % 2 == 1
            codes = np.where(high[:, None], y.view(np.uint8) >> 4, y.view(np.uint8) & 15)
            y = _decode_nibbles(codes, packed)
        y = y.astype(np.float64)
        with np.errstate(all="ignore"):
            if self.ops.zero_b is not None:
                y = y - self.scale_of(g, "b", self.ops.zero_b, j, kk, columns.T).T
            if self.ops.scale_a is not None:
                x = x * self.scale_of(g, "a", self.ops.scale_a, i, kk, rows)
            if self.ops.scale_b is not None:
                y = y * self.scale_of(g, "b", self.ops.scale_b, j, kk, columns.T).T
        return np.where(rows, x, 0), np.where(columns, y, 0)

    def scale_of(self, g: Group, side: str, grids: Any, i: Index, kk: Index, mask: Array) -> Array:
        """The scale of each line and each k, in float64."""
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
            block = kk // q + (start // q + g.index if jagged_k else 0)
        group = g.index * grid.stride(0) if spec.by_group and grid.dim() == 3 else 0
        flat = self.flats[id(grid)]
        stored = Matrix(flat, int(flat.base + group), row, col).load(line, block, mask)
        return stored.astype(np.float64)


class ModelBackend:
    """The model kernel, or one like it, behind the Backend protocol."""

    batch_invariant = True
    takes_quantised = True

    def __init__(self, name: str = "model", kernel: type[Kernel] = Kernel) -> None:
        self._name, self.kernel = name, kernel

    @property
    def name(self) -> str:
        return self._name

    def availability(self) -> Availability:
        return Availability(ok=True)

    def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
        return [] if device.type == "cpu" else [f"the model runs in host memory, and the operands are on {device}"]

    def configs(self, spec: ProblemSpec, device: torch.device) -> Sequence[Any]:
        return (Tile(), Tile(8, 32, 8))

    def plan(self, spec: ProblemSpec, config: Any, device: torch.device) -> Recipe:
        return Recipe("model", config, lambda ops: self.bind(ops, config))

    def bind(self, ops: Operands, config: Any) -> Callable[[], None]:
        """A launch over operands."""
        return self.kernel(ops, config).launch


def _wrapped(acc: Array) -> Array:
    """Integer sums modulo 2^32."""
    return acc.astype(np.int64).astype(np.int32).astype(np.int64)


def _decode_nibbles(codes: Array, packed: str) -> Array:
    if packed == "e2m1":
        return codes.astype(np.uint8).view(ml_dtypes.float4_e2m1fn)
    whole = codes.astype(np.float32)
    return np.where(whole > 7, whole - 16, whole) if packed == "int4" else whole


def _tensors(x: Any) -> list[Tensor]:
    return [] if x is None else list(x) if isinstance(x, list) else [x]
