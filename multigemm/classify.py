"""From tensors to the classes that kernels are chosen by: `OperandSpec` and buckets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from multigemm.spec import OperandSpec, Order

WIDE = 2**31


def bucket(n: int) -> int:
    """The power of two at or above `n`; 0 for 0."""
    return 1 << (n - 1).bit_length() if n > 0 else 0


def _largest_power(value: int) -> int:
    """The largest power of two, at most 16, that divides `value`."""
    value |= 16
    return value & -value


@lru_cache(maxsize=4096)
def _classify(
    dtype: torch.dtype, shape: tuple[int, ...], stride: tuple[int, ...], phase: int, shared: bool
) -> OperandSpec:
    size = dtype.itemsize
    rows, cols = shape[-2:]
    row, col = stride[-2] if rows > 1 else 0, stride[-1] if cols > 1 else 0
    groups, group = (shape[0], stride[0]) if len(shape) == 3 else (1, 0)
    if groups == 1:
        group = 0
    shared = shared or (groups > 1 and group == 0)
    found: list[tuple[int, Order, bool]] = []
    # (alignment, order, no element twice) for each direction that may count as contiguous
    if col == 1 or cols <= 1:
        found.append((_largest_power(phase | row * size | group * size), "row", rows <= 1 or row >= max(cols, 1)))
    if row == 1 or rows <= 1:
        found.append((_largest_power(phase | col * size | group * size), "col", cols <= 1 or col >= max(rows, 1)))
    if found:
        align, order, dense = max(found, key=lambda f: (f[2], f[0]))
    else:
        align, order, dense = _largest_power(phase | row * size | col * size | group * size), "strided", False
    reach = sum(max(n - 1, 0) * s for n, s in zip(shape, stride, strict=True))
    return OperandSpec(dtype, order, align, dense, shared, max(reach, *shape) >= WIDE)


def classify(x: Tensor, shared: bool = False) -> OperandSpec:
    """The class of one matrix or stack of matrices."""
    return _classify(x.dtype, x.shape, x.stride(), x.data_ptr() & 15, shared)


def classify_fresh(dtype: torch.dtype, shapes: Sequence[tuple[int, ...]]) -> OperandSpec:
    """The class of results that multigemm will allocate: contiguous, each on an aligned address."""
    strides = ((*((shape[1] * shape[2],) if len(shape) == 3 else ()), shape[-1], 1) for shape in shapes)
    return _common({_classify(dtype, s, t, 0, False) for s, t in zip(shapes, strides, strict=True)}, dtype)


def classify_list(matrices: Sequence[Tensor], dtype: torch.dtype) -> OperandSpec:
    """What holds for every matrix of a list."""
    return _common({classify(x) for x in matrices if x.numel()}, dtype)


def _common(classes: set[OperandSpec], dtype: torch.dtype) -> OperandSpec:
    if len(classes) <= 1:
        return next(iter(classes), OperandSpec(dtype))
    orders = {c.order for c in classes}
    return replace(
        next(iter(classes)),
        order=orders.pop() if len(orders) == 1 else "strided",
        align=min(c.align for c in classes),
        dense=all(c.dense for c in classes),
        wide=any(c.wide for c in classes),
    )
