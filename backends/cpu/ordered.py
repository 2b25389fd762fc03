"""The `ordered` kernel: each element is summed over k in order, whatever its neighbours, for batch-invariant problems.

BLAS picks its kernel by the shape of a product, so it cannot be used. NumPy adds one k after the other to all elements
of some rows, a product and a sum, each rounded, or each exact up to 2^32 in int8.

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
from multigemm.backends.cpu.groups import Group
from multigemm.planning.operands import Operands
from multigemm.problem.arrays import numpy_view

AT_ONCE = 1 << 16
"""Elements to which NumPy adds before the next k, so that they stay in the cache."""
PIECE, VECTOR = 1 << 14, 256
"""Elements that torch leaves to one thread, and a multiple of what its vectorized loops take in a step."""


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
