"""The kernels `loop` and `ordered`: one product after another, for every strided, empty or overlapping operand, for
quantised operands, and for results in which a row's bits do not depend on its neighbours.

`ordered` sums each element over k in order. BLAS picks its kernel by the shape of a product, so it cannot be used.
NumPy adds one k after the other to all elements of some rows, a product and a sum, each rounded, or each exact up to
2^32 in int8. torch's element-wise loops take the last elements of a thread's share one by one, with other code and, for
some functions, other bits than whole vectors. So its epilogue works on pieces that are padded to whole vectors, lie in
contiguous memory and are taken by one thread.

Quantised operands are multiplied in blocks of K in float64, in which every element times its scale is exact. float32
would be twice as fast, but an element times its scale can overflow float32 where the product does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import numpy as np
import torch
from torch import Tensor

from multigemm.backend import Launch
from multigemm.backends.cpu.epilogue import finish, store
from multigemm.backends.cpu.groups import Group, Index, Sizes, each_group, unowned
from multigemm.planning.operands import Operands
from multigemm.problem.arrays import numpy_view
from multigemm.problem.scales import Scale
from multigemm.quantize import decode, decode_scale

INT8_EXACT_K = 1024
"""Products of int8 are at most 2^14, so float32 sums of 2^10 of them are exact integers."""
AT_ONCE = 1 << 16
"""Elements to which NumPy adds before the next k, so that they stay in the cache."""
PIECE, VECTOR = 1 << 14, 256
"""Elements that torch leaves to one thread, and a multiple of what its vectorized loops take in a step."""
QUANTISED_K = 1024
"""K of one product of quantised operands, so that copies stay small; even, since bytes hold two of K."""


def bind_loop(ops: Operands, ordered: bool = False) -> Launch:
    """The loop over groups, right for every strided, empty or overlapping operand. `ordered`: a row's bits do not
    depend on its neighbours."""
    spec, sizes = ops.spec, Sizes(ops)
    quantised = QuantisedProducts(ops) if spec.quantised else None

    def launch() -> None:
        sizes.changed()
        start, end = sizes.start, sizes.end
        if spec.zero_unowned:
            for part in unowned(ops, start, end):
                part.zero_()
        for g, group in enumerate(each_group(ops, start, end)):
            a, b = (group.a[:, :0], group.b[:0]) if spec.alpha == "zero" else (group.a, group.b)
            if quantised is not None:
                acc = quantised.product(g, group, start, end, ordered)
            else:
                acc = ordered_product(a, b, spec.acc) if ordered else product(a, b, spec.acc)
            if ordered:
                finish_in_pieces(acc, group, ops)
            else:
                store(finish(acc, spec, ops.alpha, ops.beta, group.c, group.bias), group.out)

    return launch


# --- sums of products --------------------------------------------------------------------------------


def _matmul32(a: Tensor, b: Tensor) -> Tensor:
    """A float32 product by NumPy, which does not obey torch's switches of lower precision."""
    out = torch.empty((a.shape[0], b.shape[1]), dtype=torch.float32, device="cpu")
    with np.errstate(all="ignore"):
        np.matmul(numpy_view(a.contiguous()), numpy_view(b.contiguous()), out=out.numpy())
    return out


def _matmul8(a: Tensor, b: Tensor) -> Tensor:
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=torch.int32, device="cpu")
    for k in range(0, a.shape[1], INT8_EXACT_K):
        part = _matmul32(a[:, k : k + INT8_EXACT_K].float(), b[k : k + INT8_EXACT_K].float())
        out.add_(part.to(torch.int32))
    return out


def product(a: Tensor, b: Tensor, acc: torch.dtype) -> Tensor:
    """a @ b in the accumulator's precision, in a fresh tensor; zeros where K is 0."""
    if a.shape[1] == 0 or a.shape[0] == 0 or b.shape[1] == 0:
        return torch.zeros((a.shape[0], b.shape[1]), dtype=acc, device="cpu")
    if acc == torch.int32:
        return _matmul8(a, b)
    if acc == torch.float64:
        return torch.mm(a, b, out=torch.empty((a.shape[0], b.shape[1]), dtype=acc, device="cpu"))
    return _matmul32(a.float(), b.float())


def ordered_product(a: Tensor, b: Tensor, acc: torch.dtype) -> Tensor:
    """a @ b in the accumulator's precision, in a fresh tensor, with each element summed in the order of k."""
    out = torch.zeros((a.shape[0], b.shape[1]), dtype=acc, device="cpu")
    left, right, sums = numpy_view(a.to(acc)), numpy_view(b.to(acc).contiguous()), out.numpy()
    height = max(1, AT_ONCE // max(1, b.shape[1]))
    with np.errstate(all="ignore"):
        for first in range(0, a.shape[0], height):
            rows = sums[first : first + height]
            added = np.empty_like(rows)
            for k in range(a.shape[1]):
                np.multiply(left[first : first + height, k, None], right[k], out=added)
                np.add(rows, added, out=rows)
    return out


class QuantisedProducts:
    """The products of one bound problem, group by group. Scales are read anew each time."""

    def __init__(self, ops: Operands) -> None:
        self._ops, spec = ops, ops.spec
        self._a, self._b, self._zero = (
            None if grid is None or of is None else Scale(grid, grid, of)
            for grid, of in ((ops.scale_a, spec.a.scale), (ops.scale_b, spec.b.scale), (ops.zero_b, spec.b.scale))
        )

    def product(self, g: int, group: Group, start: Index | None, end: Index | None, ordered: bool = False) -> Tensor:
        """a @ b of group g, in float32; `ordered`: with bits that no neighbour of a row changes."""
        jagged = self._ops.spec.jagged
        span = (0, 0) if jagged is None else (int(cast(Index, start)[g]), int(cast(Index, end)[g]))
        (m, k), n = group.a.shape, group.b.shape[1]
        spans = {
            name: slice(*span) if name == jagged else slice(0, extent)
            for name, extent in (("m", m), ("n", n), ("k", k))
        }
        total = torch.zeros((m, n), dtype=torch.float64, device="cpu")
        if m and n and k and self._ops.spec.alpha != "zero":
            scales = [
                None if x is None else x.of_group(g, spans[rows], spans["k"], side, jagged == "k")
                for x, rows, side in ((self._a, "m", "a"), (self._b, "n", "b"), (self._zero, "n", "b"))
            ]
            for k0 in range(0, k, QUANTISED_K):
                self._add(total, group, slice(k0, min(k0 + QUANTISED_K, k)), scales, ordered)
        return total.to(torch.float32)

    def _add(self, total: Tensor, group: Group, ks: slice, scales: list[Tensor | None], ordered: bool) -> None:
        packed = self._ops.spec.b.packed
        of_a, of_b, zero = scales
        held = slice(ks.start // 2, ks.stop // 2) if packed else ks
        a, b = decode(group.a[:, ks]).double(), decode(group.b[held], packed).double()
        if zero is not None:
            b -= _along_k(zero, ks, 0).double()
        if of_a is not None:
            a *= decode_scale(_along_k(of_a, ks, 1)).double()
        if of_b is not None:
            b *= decode_scale(_along_k(of_b, ks, 0)).double()
        with np.errstate(all="ignore"):
            total += ordered_product(a, b, torch.float64) if ordered else torch.mm(a, b)


def _along_k(scale: Tensor, ks: slice, axis: int) -> Tensor:
    """The part of a scale for some of K, along which it may have one entry for all."""
    return scale if scale.shape[axis] == 1 else scale.narrow(axis, ks.start, ks.stop - ks.start)


# --- an epilogue whose bits do not depend on where an element lies ------------------------------------


def finish_in_pieces(acc: Tensor, group: Group, ops: Operands) -> None:
    """The epilogue of one product, with every element computed by the same code wherever it lies."""
    c, bias = group.c, group.bias
    old = None if c is None else c.to(acc.dtype)
    added = None if bias is None else bias.to(acc.dtype).expand(acc.shape)

    def finished(sums: Tensor, *extras: Tensor | None) -> Tensor:
        return finish(sums, ops.spec, ops.alpha, ops.beta, *extras)

    group.out.copy_(in_pieces(finished, group.out.dtype, acc, old, added))


def in_pieces(function: Callable[..., Tensor], dtype: torch.dtype, first: Tensor, *more: Tensor | None) -> Tensor:
    """An element-wise function of tensors of one shape, rounded to `dtype`. An element's bits do not depend on
    others.

    The function may overwrite its arguments.
    """
    flat = [None if x is None else _padded(x) for x in (first, *more)]
    assert flat[0] is not None
    rounded = torch.empty(flat[0].shape, dtype=dtype, device="cpu")
    for begin in range(0, rounded.shape[0], PIECE):
        part = slice(begin, begin + PIECE)
        result = function(*(None if x is None else x[part] for x in flat))
        if result.is_floating_point():  # processors keep the bits of either operand, GPUs of none
            result.masked_fill_(result.isnan(), torch.nan)
        store(result, rounded[part])
    return rounded[: first.numel()].view(first.shape)


def _padded(x: Tensor) -> Tensor:
    """All elements in one line, padded with zeros to whole vectors."""
    made = torch.zeros(-(-x.numel() // VECTOR) * VECTOR, dtype=x.dtype, device="cpu")
    made[: x.numel()].view(x.shape).copy_(x)
    return made
