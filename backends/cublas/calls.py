"""Products become library calls, in one of three ways: one each, one per shape, one for all.

All scalars, extents and addresses are converted here, once; a launch passes them on as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cublas.leading import Shape, countable
from multigemm.backends.cublas.library import (
    COMPUTE_32F,
    COMPUTE_32I,
    COMPUTE_64F,
    COMPUTE_TF32,
    DEFAULT_ALGORITHM,
    REAL_TYPES,
    Call,
    Cublas,
    scalar,
)
from multigemm.backends.cublas.products import Bytes, Product, even_steps, merged
from multigemm.cuda.device import to_device
from multigemm.problem.spec import ProblemSpec

GROUPED = "cublasGemmGroupedBatchedEx"
ADDRESS_ALIGNMENT = 16
LONG, MIXED_GROUPS = 6e9, 1023
"""Multiply-adds of a call whose products are left in their order, and how many of them at most."""
LARGEST_BATCH = 65535
"""More products than this go in several calls: a grid's third extent, which some kernels use, ends there."""


class Types:
    """What one call computes, as ctypes arguments: element types, compute type, references to both scalars."""

    __slots__ = ("alpha", "beta", "compute", "operand", "out", "tail")

    def __init__(self, operand: torch.dtype, compute: int, out: torch.dtype, alpha: float, beta: float) -> None:
        self.operand, self.out = ctypes.c_int(REAL_TYPES[operand]), ctypes.c_int(REAL_TYPES[out])
        self.compute = ctypes.c_int(compute)
        self.alpha, self.beta = scalar(compute, alpha), scalar(compute, beta)
        self.tail = self.compute, ctypes.c_int(DEFAULT_ALGORITHM)


@dataclass(slots=True)
class Batch:
    """Calls in order, and what must live as long as they may be made: addresses on the device, descriptions."""

    calls: list[Call] = field(default_factory=list)
    keep: list[Any] = field(default_factory=list)


def compute_type(spec: ProblemSpec) -> int:
    """float32 means IEEE unless the problem asks for tf32; the 16-bit types add up in float32."""
    if spec.compute is torch.float64:
        return COMPUTE_64F
    if spec.compute is torch.int8:
        return COMPUTE_32I
    return COMPUTE_TF32 if spec.compute is torch.float32 and spec.precision == "tf32" else COMPUTE_32F


types = lru_cache(maxsize=256)(Types)
"""Nobody writes into them, so calls share them."""


def _batch_arguments(s: Shape, at: Sequence[int], t: Types, strides: Sequence[int] | None, count: int) -> Any:
    """The arguments of a call for `count` products of one shape."""
    op, extent = ctypes.c_int, ctypes.c_int64
    m, n, k, *leads = map(extent, s[2:])
    steps: Any = ((), (), ()) if strides is None else zip(map(extent, strides))
    (first, second, out), (one, two, three) = map(ctypes.c_void_p, at), steps
    return (
        op(s.op_first), op(s.op_second), m, n, k, ctypes.byref(t.alpha), first, t.operand, leads[0], *one,
        second, t.operand, leads[1], *two, ctypes.byref(t.beta), out, t.out, leads[2], *three, extent(count), *t.tail,
    )  # fmt: skip


def one_each(library: Cublas, products: Sequence[Product], t: Types) -> Batch:
    """One cublasGemmEx per product. This loop is most of what a bind costs, so it calls nothing but constructors."""
    address, extent, op, function = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int, library.gemm
    alpha, beta, known, found = ctypes.byref(t.alpha), ctypes.byref(t.beta), dict[Shape, Any](), list[Call]()
    for shape, first, second, out in products:
        if shape not in known:
            op_first, op_second, *extents = shape
            known[shape] = (op(op_first), op(op_second), *map(extent, extents))
        *extents, ld_first, ld_second, ld_out = known[shape]
        arguments = (
            *extents, alpha, address(first), t.operand, ld_first, address(second), t.operand, ld_second,
            beta, address(out), t.out, ld_out, *t.tail,
        )  # fmt: skip
        found.append((function, arguments, "cublasGemmEx"))
    return Batch(found)


def one_per_shape(library: Cublas, products: list[Product], t: Types, size: Bytes, device: torch.device) -> Batch:
    """Products of one shape in one batched call: strided where they lie evenly, else by addresses on the device.

    The latter takes half a microsecond more: its kernel has to fetch the addresses first. So products are
    put in the order of their results in memory, whatever the order in which they were given.
    """
    batch = Batch()
    for _, given in merged(products):
        same = sorted(given, key=itemgetter(3))  # the address of the result
        for first in range(0, len(same), LARGEST_BATCH):
            _batched(library, same[first : first + LARGEST_BATCH], t, size, device, batch)
    return batch


def _batched(library: Cublas, same: list[Product], t: Types, size: Bytes, device: torch.device, into: Batch) -> None:
    strides, (shape, *base) = _strides(same, size), same[0]
    if len(same) == 1 or (strides is None and not aligned(same)):
        into.calls += one_each(library, same, t).calls
    elif strides is not None:
        args = _batch_arguments(shape, base, t, strides, len(same))
        into.calls.append((library.strided, args, "cublasGemmStridedBatchedEx"))
    else:
        tables = _addresses(same, device)
        into.keep.append(tables)
        row = tables.stride(0) * tables.element_size()
        at = [tables.data_ptr() + i * row for i in range(3)]
        args = _batch_arguments(shape, at, t, None, len(same))
        into.calls.append((library.pointers, args, "cublasGemmBatchedEx"))


def _strides(same: list[Product], size: Bytes) -> tuple[int, int, int] | None:
    """Elements from each operand to the next, where they are constant and cuBLAS counts so far; else None."""
    steps = even_steps(same)
    if steps is None:
        return None
    first, second, out = steps[0] // size.operand, steps[1] // size.operand, steps[2] // size.out
    near = countable(first, size.operand) and countable(second, size.operand) and countable(out, size.out)
    return (first, second, out) if near else None


def aligned(products: Sequence[Product]) -> bool:
    """Whether every address is one that a call by addresses may be given.

    The library cannot see addresses that lie on the device; it takes them to be as aligned as the
    leading dimensions let it hope, and faults on others.
    """
    return not any((p.first | p.second | p.out) % ADDRESS_ALIGNMENT for p in products)


def _addresses(products: Sequence[Product], device: torch.device) -> Tensor:
    rows = np.array([p[1:] for p in products], dtype=np.int64)
    return to_device(np.ascontiguousarray(rows.T), device)


def _in_groups(products: list[Product]) -> list[tuple[Shape, list[Product]]]:
    """Products of equal shape as one group of the call, which spares it work for each; but long ones as they come.

    Among those, some are bound by their sums and others by reading their weights: side by side they hide each other,
    and one kind behind the other took up to a twelfth longer.
    """
    work = sum(p.shape.m * p.shape.n * p.shape.k for p in products)
    if work > LONG and MIXED_GROUPS >= len(products) > 1 and any(p.shape != products[0].shape for p in products):
        return [(p.shape, [p]) for p in products]
    return merged(products)


def one_for_all(library: Cublas, products: list[Product], t: Types, device: torch.device) -> Batch:
    """A single cublasGemmGroupedBatchedEx."""
    groups = _in_groups(products)
    tables = _addresses([p for _, same in groups for p in same], device)
    at = [ctypes.c_void_p(tables.data_ptr() + i * tables.stride(0) * 8) for i in range(3)]
    count, shapes = len(groups), [shape for shape, _ in groups]
    columns = list(zip(*shapes, strict=True))
    ops = [(ctypes.c_int * count)(*column) for column in columns[:2]]
    m, n, k, ld_first, ld_second, ld_out = ((ctypes.c_int64 * count)(*column) for column in columns[2:])
    alpha, beta = ((type(v) * count)(*([v.value] * count)) for v in (t.alpha, t.beta))
    members = (ctypes.c_int64 * count)(*(len(same) for _, same in groups))
    args = (*ops, m, n, k, alpha, at[0], t.operand, ld_first, at[1], t.operand, ld_second, beta, at[2], t.out, ld_out,
            ctypes.c_int64(count), members, t.compute)  # fmt: skip
    assert library.grouped is not None, "the variant is refused without this entry point"
    return Batch([(library.grouped, args, GROUPED)], [tables])
