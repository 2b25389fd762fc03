"""The `ordered` kernel: each element is summed over k in order, whatever its neighbours, for batch-invariant problems.

BLAS picks its kernel by the shape of a product, so it cannot be used. float32 sums are those of the compiled tiles, a
fused multiply-add for each k, where tiles can be compiled; else, and for float64, a product and a sum, each rounded, of
all elements at once. Sums of int8 are exact whatever forms them.

torch's element-wise loops take the last elements of a thread's share one by one, with other code and, for some
functions, other bits than whole vectors. So the epilogue works on pieces that are padded to whole vectors, lie in
contiguous memory and are taken by one thread.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cpu.epilogue import finish, store
from multigemm.backends.cpu.groups import Group, Index
from multigemm.backends.cpu.jit import Tile, TileCalls, missing
from multigemm.backends.cpu.products import product
from multigemm.backends.cpu.tables import Table
from multigemm.planning.operands import Operands

ROWS_AT_ONCE = 64
"""Rows that one thread multiplies."""
PIECE, VECTOR = 1 << 14, 256
"""Elements that torch leaves to one thread, and a multiple of what its vectorized loops take in a step."""


def make_ordered_product() -> Callable[[Tensor, Tensor, torch.dtype], Tensor]:
    """product(a, b, accumulator's dtype), each element summed in the order of k; compiles tiles where it can."""
    tile = None if missing() else Tile(4, 2)

    def ordered_product(a: Tensor, b: Tensor, acc: torch.dtype) -> Tensor:
        if acc == torch.int32 or 0 in (*a.shape, b.shape[1]):
            return product(a, b, acc)
        left, right = a.to(acc).contiguous(), b.to(acc).contiguous()
        out = torch.zeros((a.shape[0], b.shape[1]), dtype=acc, device="cpu")
        if tile is not None and acc == torch.float32:
            TileCalls(_blocks_of_rows(left, right, out), tile)()
        else:
            _add_each_k(left, right, out)
        return out

    return ordered_product


def _add_each_k(a: Tensor, b: Tensor, out: Tensor) -> None:
    x, y, sums = a.numpy(), b.numpy(), out.numpy()
    with np.errstate(all="ignore"):
        for k in range(a.shape[1]):
            sums += x[:, k, None] * y[k]


def _blocks_of_rows(a: Tensor, b: Tensor, out: Tensor) -> Table:
    """One product as several of a few rows each, which threads share; in BLAS's terms, where operands swap places."""
    (m, k), n = a.shape, b.shape[1]
    first = np.arange(0, m, ROWS_AT_ONCE, dtype=np.int64)

    def each(value: int) -> Index:
        return np.full(len(first), value, np.int64)

    straight, rows = np.full(len(first), ord("N"), np.uint8), np.minimum(m - first, ROWS_AT_ONCE)
    left, right, result = a.data_ptr() + first * (4 * k), each(b.data_ptr()), out.data_ptr() + first * (4 * n)
    return Table(straight, straight, each(n), rows, each(k), right, each(n), left, each(k), result, each(n))


def finish_in_pieces(acc: Tensor, group: Group, ops: Operands) -> None:
    """The epilogue of one product, whose elements are all computed by the same code wherever they lie."""
    c, bias = group.c, group.bias
    whole = _padded(acc)
    old = None if c is None else _padded(c.to(acc.dtype))
    added = None if bias is None else _padded(bias.to(acc.dtype).expand(acc.shape))
    rounded = torch.empty(whole.shape, dtype=group.out.dtype, device="cpu")
    for first in range(0, whole.shape[0], PIECE):
        part = slice(first, first + PIECE)
        sums, *extras = (None if x is None else x[part] for x in (whole, old, added))
        assert sums is not None
        store(finish(sums, ops.spec, ops.alpha, ops.beta, *extras), rounded[part])
    group.out.copy_(rounded[: acc.numel()].view(acc.shape))


def _padded(x: Tensor) -> Tensor:
    """All elements one after the other, and zeros up to whole vectors."""
    made = torch.zeros(-(-x.numel() // VECTOR) * VECTOR, dtype=x.dtype, device="cpu")
    made[: x.numel()].view(x.shape).copy_(x)
    return made
