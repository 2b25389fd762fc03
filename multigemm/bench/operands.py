"""Tensors for a workload, and the `Operands` that a backend binds.

The runner builds user-level problems from `Tensors`; `as_operands` stages them by hand, so that a
kernel can be timed alone, without dispatch above it. Data is random and never zero: zeros draw less
power and let a GPU run up to a fifth faster than it ever will.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.bench.workloads import Workload
from multigemm.layouts import Operands
from multigemm.spec import OperandSpec, Order, ProblemSpec

Matrices = Tensor | list[Tensor]


@dataclass
class Tensors:
    """The data of one workload. Lists where the form is a list; `offsets` [G+1] int32 on the device."""

    workload: Workload
    a: Matrices
    b: Matrices
    out: Matrices
    bias: Matrices | None
    offsets: Tensor | None
    valid_rows: Tensor | None
    host_offsets: npt.NDArray[np.int64] | None


def make(workload: Workload, device: torch.device | str) -> Tensors:
    """Seeded random tensors of a workload on a device; `out` starts as NaN (or a rare int)."""
    where = torch.device(device)
    source = torch.Generator(where).manual_seed(workload.seed + 1)

    def matrix(*shape: int, transposed: bool = False) -> Tensor:
        return _random(shape, workload.torch_dtype, source, where, transposed)

    if workload.products:
        return _make_list(workload, matrix, where)
    groups, total = workload.groups, int(workload.sizes.sum())
    m, n, k, ta, tb = workload.m, workload.n, workload.k, workload.trans_a, workload.trans_b
    form, one = workload.form, workload.shared_b
    if form == "jagged_m":
        a, b, out = matrix(total, k, transposed=ta), _weights(matrix, groups, k, n, one, tb), (total, n)
    elif form == "jagged_n":
        a, b, out = matrix(groups, m, k, transposed=ta), matrix(k, total, transposed=tb), (m, total)
    elif form == "jagged_k":
        a, b, out = matrix(m, total, transposed=ta), matrix(total, n, transposed=tb), (groups, m, n)
    else:
        a, b, out = matrix(groups, m, k, transposed=ta), _weights(matrix, groups, k, n, one, tb), (groups, m, n)
    jagged = form.startswith("jagged")
    host = np.concatenate([[0], np.cumsum(workload.sizes)]).astype(np.int64) if jagged else None
    offsets = None if host is None else torch.tensor(host, dtype=torch.int32, device=where)
    valid = torch.tensor(workload.sizes, dtype=torch.int32, device=where) if form == "masked" else None
    bias = _random((n,), workload.torch_dtype, source, where) if workload.bias else None
    return Tensors(workload, a, b, _poisoned(out, workload.out_dtype, where), bias, offsets, valid, host)


def _make_list(workload: Workload, matrix: object, where: torch.device) -> Tensors:
    make_one = cast("type[Tensor]", matrix)
    a = [make_one(m, k, transposed=workload.trans_a) for m, _, k in workload.products]
    if workload.shared_b:
        _, n, k = workload.products[0]
        b = [make_one(k, n, transposed=workload.trans_b)] * len(a)
    else:
        b = [make_one(k, n, transposed=workload.trans_b) for _, n, k in workload.products]
    out = [_poisoned((m, n), workload.out_dtype, where) for m, n, _ in workload.products]
    bias = [make_one(n) for _, n, _ in workload.products] if workload.bias else None
    return Tensors(workload, a, b, cast(Matrices, out), cast("Matrices | None", bias), None, None, None)


def _weights(matrix: object, groups: int, k: int, n: int, shared: bool, transposed: bool) -> Tensor:
    make_one = cast("type[Tensor]", matrix)
    shape = (k, n) if shared else (groups, k, n)
    return make_one(*shape, transposed=transposed)


def _random(
    shape: tuple[int, ...], dtype: torch.dtype, source: torch.Generator, where: torch.device, transposed: bool = False
) -> Tensor:
    """Normal values (small integers for int8); `transposed` keeps the shape and swaps the memory order."""
    memory = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
    if dtype == torch.int8:
        values = torch.randint(-8, 9, memory, dtype=dtype, generator=source, device=where)
    else:
        values = torch.randn(memory, dtype=dtype, generator=source, device=where)
    return values.transpose(-1, -2) if transposed else values


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, where: torch.device) -> Tensor:
    return torch.full(shape, float("nan") if dtype.is_floating_point else -(2**30), dtype=dtype, device=where)


def poison(tensors: Tensors) -> None:
    """Makes the output unlike any answer, so that a kernel which writes nothing is found out."""
    for out in tensors.out if isinstance(tensors.out, list) else [tensors.out]:
        out.fill_(float("nan") if out.dtype.is_floating_point else -(2**30))


def bucket(count: int) -> int:
    """The power of two at or above; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _operand_spec(matrices: Matrices, shared: bool = False) -> OperandSpec:
    every = matrices if isinstance(matrices, list) else [matrices]
    orders = {_order(t) for t in every if t.numel()} or {cast(Order, "row")}
    align = min((_align(t) for t in every if t.numel()), default=16)
    wide = any(sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True)) >= 2**31 for t in every if t.numel())
    order: Order = orders.pop() if len(orders) == 1 else "strided"
    return OperandSpec(every[0].dtype, order, align, True, shared, wide)


def _order(tensor: Tensor) -> Order:
    if tensor.stride(-1) == 1:
        return "row"
    return "col" if tensor.stride(-2) == 1 else "strided"


def _align(tensor: Tensor) -> int:
    width = tensor.element_size()
    strides = [s * width for n, s in zip(tensor.shape, tensor.stride(), strict=True) if n > 1 and s != 1]
    return next(a for a in (16, 8, 4, 2, 1) if all(step % a == 0 for step in [tensor.data_ptr(), *strides]))


def as_operands(tensors: Tensors, out: Matrices | None = None) -> Operands:
    """What dispatch would hand to a backend for this workload; `out` replaces the workload's own."""
    workload, result = tensors.workload, tensors.out if out is None else out
    first = tensors.a[0] if isinstance(tensors.a, list) else tensors.a
    same = [len({extent[axis] for extent in workload.extents}) <= 1 for axis in range(3)]
    jagged = {"jagged_m": 0, "jagged_n": 1, "jagged_k": 2, "masked": 0}.get(workload.form)
    extents = list(workload.extents[0]) if workload.extents else [0, 0, 0]
    m, n, k = (
        extents[axis] if (same[axis] and workload.products) or (not workload.products and axis != jagged) else None
        for axis in range(3)
    )
    if workload.form == "masked":
        m = workload.m
    spec = ProblemSpec(
        form=workload.form,
        groups=len(workload.products) or workload.groups,
        m=m,
        n=n,
        k=k,
        total=bucket(int(workload.sizes.sum())) if workload.form != "masked" else bucket(workload.groups * workload.m),
        largest=bucket(int(workload.sizes.max(initial=0))) if workload.products or workload.form == "batched" else 0,
        a=_operand_spec(tensors.a),
        b=_operand_spec(tensors.b, workload.shared_b),
        out=_operand_spec(result),
        bias=None if tensors.bias is None else workload.torch_dtype,
        compute=workload.torch_dtype,
        precision="tf32" if workload.dtype == "tf32" else "ieee",
        index=None if tensors.offsets is None and tensors.valid_rows is None else torch.int32,
        device_sizes=tensors.offsets is not None or tensors.valid_rows is not None,
        zero_unowned=False,
    )
    ends = None if tensors.offsets is None else tensors.offsets[1:]
    return Operands(
        spec=spec, a=tensors.a, b=tensors.b, out=result, bias=tensors.bias, ends=ends, head=ends is not None,
        valid_rows=tensors.valid_rows, host_offsets=tensors.host_offsets, device=first.device,
    )  # fmt: skip
