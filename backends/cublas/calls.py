"""Products become library calls, in one of three ways: one each, one per shape, one for all.

All scalars, extents and addresses are converted here, once; a launch passes them on as they are.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from multigemm.backends.cublas.leading import Shape
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
from multigemm.backends.cublas.products import Product, even_steps, merged
from multigemm.cuda.device import to_device
from multigemm.problem.spec import ProblemSpec

GROUPED = "cublasGemmGroupedBatchedEx"
ADDRESS_ALIGNMENT = 16
LONG, MIXED_GROUPS = 6e9, 1023
"""Multiply-adds of a call whose products are left in their order, and how many of them at most."""
LARGEST_BATCH = 65535
"""More products than this go in several calls: a grid's third extent, which some kernels use, ends there."""


@dataclass(frozen=True, slots=True)
class Types:
    """What one call computes: element types, compute type and the two scalars."""

    operand: int
    out: int
    compute: int
    alpha: Any
    beta: Any


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


def types(spec: ProblemSpec, out: torch.dtype, alpha: float, beta: float) -> Types:
    """The types of a call that writes `out`."""
    compute = compute_type(spec)
    scalars = scalar(compute, alpha), scalar(compute, beta)
    return Types(REAL_TYPES[spec.compute], REAL_TYPES[out], compute, *scalars)


def _operands(product: Product, t: Types, strides: tuple[int, int, int] | None) -> tuple[Any, ...]:
    s, steps = product.shape, [(), (), ()] if strides is None else [(ctypes.c_int64(v),) for v in strides]
    address, extent = ctypes.c_void_p, ctypes.c_int64
    return (
        ctypes.c_int(s.op_first), ctypes.c_int(s.op_second), extent(s.m), extent(s.n), extent(s.k),
        ctypes.byref(t.alpha),
        address(product.first), ctypes.c_int(t.operand), extent(s.ld_first), *steps[0],
        address(product.second), ctypes.c_int(t.operand), extent(s.ld_second), *steps[1],
        ctypes.byref(t.beta),
        address(product.out), ctypes.c_int(t.out), extent(s.ld_out), *steps[2],
    )  # fmt: skip


def _tail(t: Types, batch: int | None) -> tuple[Any, ...]:
    count = () if batch is None else (ctypes.c_int64(batch),)
    return (*count, ctypes.c_int(t.compute), ctypes.c_int(DEFAULT_ALGORITHM))


def one_each(library: Cublas, products: Sequence[Product], t: Types) -> Batch:
    """One cublasGemmEx per product."""
    return Batch([Call(library.gemm, _operands(p, t, None) + _tail(t, None), "cublasGemmEx") for p in products])


def one_per_shape(
    library: Cublas, products: list[Product], t: Types, size: tuple[int, int], device: torch.device
) -> Batch:
    """Products of one shape in one batched call: strided where they lie evenly, else by addresses on the device.

    The latter takes half a microsecond more: its kernel has to fetch the addresses first. So products are
    put in the order of their results in memory, whatever the order in which they were given.
    """
    batch = Batch()
    for _, given in merged(products):
        same = sorted(given, key=lambda p: p.out)
        for first in range(0, len(same), LARGEST_BATCH):
            _batched(library, same[first : first + LARGEST_BATCH], t, size, device, batch)
    return batch


def _batched(
    library: Cublas, same: list[Product], t: Types, size: tuple[int, int], device: torch.device, into: Batch
) -> None:
    steps = even_steps(same)
    if len(same) == 1 or (steps is None and not aligned(same)):
        into.calls += one_each(library, same, t).calls
    elif steps is not None:
        strides = steps[0] // size[0], steps[1] // size[0], steps[2] // size[1]
        args = _operands(same[0], t, strides) + _tail(t, len(same))
        into.calls.append(Call(library.strided, args, "cublasGemmStridedBatchedEx"))
    else:
        tables = _addresses(same, device)
        into.keep.append(tables)
        row = tables.stride(0) * tables.element_size()
        at = [tables.data_ptr() + i * row for i in range(3)]
        args = _operands(Product(same[0].shape, *at), t, None) + _tail(t, len(same))
        into.calls.append(Call(library.pointers, args, "cublasGemmBatchedEx"))


def aligned(products: Sequence[Product]) -> bool:
    """Whether every address is one that a call by addresses may be given.

    The library cannot see addresses that lie on the device; it takes them to be as aligned as the
    leading dimensions let it hope, and faults on others.
    """
    return not any((p.first | p.second | p.out) % ADDRESS_ALIGNMENT for p in products)


def _addresses(products: Sequence[Product], device: torch.device) -> Tensor:
    rows = np.array([(p.first, p.second, p.out) for p in products], dtype=np.int64)
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
    kind, out = ctypes.c_int(t.operand), ctypes.c_int(t.out)
    members = (ctypes.c_int64 * count)(*(len(same) for _, same in groups))
    args = (*ops, m, n, k, alpha, at[0], kind, ld_first, at[1], kind, ld_second, beta, at[2], out, ld_out,
            ctypes.c_int64(count), members, ctypes.c_int(t.compute))  # fmt: skip
    assert library.grouped is not None, "the variant is refused without this entry point"
    return Batch([Call(library.grouped, args, GROUPED)], [tables])
