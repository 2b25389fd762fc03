"""Tensors for a workload, and the `Operands` that a backend binds.

The runner builds user-level problems from `Tensors`; `as_operands` stages them by hand, so that a
kernel can be timed alone, without dispatch above it. Data is random and never zero: zeros draw less
power and let a GPU run up to a fifth faster than it ever will.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from multigemm.bench.workloads import Workload
from multigemm.planning.operands import Operands
from multigemm.problem.spec import OperandSpec, Order, ProblemSpec

Matrices = Tensor | list[Tensor]

POISON_INT = -(2**30)


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


@dataclass
class _Maker:
    """Draws matrices of one dtype from one seeded source."""

    workload: Workload
    device: torch.device
    source: torch.Generator
    drawn: bool

    def matrix(self, *shape: int, transposed: bool = False) -> Tensor:
        """Normal values (small integers for int8); `transposed` keeps the shape and swaps the memory order."""
        memory = (*shape[:-2], shape[-1], shape[-2]) if transposed else shape
        dtype = self.workload.torch_dtype
        if not self.drawn:
            values = torch.empty(memory, dtype=dtype, device=self.device)
        elif dtype == torch.int8:
            values = torch.randint(-8, 9, memory, dtype=dtype, generator=self.source, device=self.device)
        else:
            values = torch.randn(memory, dtype=dtype, generator=self.source, device=self.device)
        return values.transpose(-1, -2) if transposed else values

    def weights(self) -> Tensor:
        w = self.workload
        shape = (w.k, w.n) if w.shared_b else (w.groups, w.k, w.n)
        return self.matrix(*shape, transposed=w.trans_b)

    def empty(self, *shape: int) -> Tensor:
        dtype = self.workload.out_dtype
        if not self.drawn:
            return torch.empty(shape, dtype=dtype, device=self.device)
        poison = float("nan") if dtype.is_floating_point else POISON_INT
        return torch.full(shape, poison, dtype=dtype, device=self.device)


def make(workload: Workload, device: torch.device | str, drawn: bool = True) -> Tensors:
    """Seeded random tensors of a workload on a device; `out` starts poisoned. Unless `drawn`, nobody writes them."""
    where = torch.device(device)
    maker = _Maker(workload, where, torch.Generator(where).manual_seed(workload.seed + 1), drawn)
    return _make_list(workload, maker) if workload.products else _make_packed(workload, maker)


def _make_packed(workload: Workload, maker: _Maker) -> Tensors:
    w, total, g = workload, int(workload.sizes.sum()), workload.groups
    a_shape, out_shape = {
        "jagged_m": ((total, w.k), (total, w.n)),
        "jagged_n": ((g, w.m, w.k), (w.m, total)),
        "jagged_k": ((w.m, total), (g, w.m, w.n)),
    }.get(w.form, ((g, w.m, w.k), (g, w.m, w.n)))
    a = maker.matrix(*a_shape, transposed=w.trans_a)
    if w.form in ("jagged_n", "jagged_k"):
        b = maker.matrix(*((w.k, total) if w.form == "jagged_n" else (total, w.n)), transposed=w.trans_b)
    else:
        b = maker.weights()
    bias = maker.matrix(total if w.form == "jagged_n" else w.n) if w.bias else None
    host = offsets = valid = None
    if w.form.startswith("jagged"):
        host = np.concatenate([[0], np.cumsum(w.sizes)]).astype(np.int64)
        offsets = torch.tensor(host, dtype=torch.int32, device=maker.device)
    elif w.form == "masked":
        valid = torch.tensor(w.sizes, dtype=torch.int32, device=maker.device)
    return Tensors(w, a, b, maker.empty(*out_shape), bias, offsets, valid, host)


def _make_list(workload: Workload, maker: _Maker) -> Tensors:
    """A list of tensors. Equal products are members of one tensor, as who batches them has them; else a list of them
    would cost some libraries a table of addresses, and layouts be compared instead of kernels."""
    w, count = workload, len(workload.products)
    together = len(set(w.products)) == 1 and not w.shared_b
    if together:
        m, n, k = w.products[0]
        a: Matrices = list(maker.matrix(count, m, k, transposed=w.trans_a))
        b: Matrices = list(maker.matrix(count, k, n, transposed=w.trans_b))
        out: Matrices = list(maker.empty(count, m, n))
    else:
        a = [maker.matrix(m, k, transposed=w.trans_a) for m, _, k in w.products]
        b = [maker.matrix(k, n, transposed=w.trans_b) for _, n, k in w.products[: 1 if w.shared_b else None]]
        b = list(b) * (count if w.shared_b else 1)
        out = [maker.empty(m, n) for m, n, _ in w.products]
    bias: Matrices | None = [maker.matrix(n) for _, n, _ in w.products] if w.bias else None
    return Tensors(w, a, b, out, bias, None, None, None)


def poison(tensors: Tensors) -> None:
    """Makes the output unlike any answer, so that a kernel which writes nothing is found out."""
    for out in tensors.out if isinstance(tensors.out, list) else [tensors.out]:
        out.fill_(float("nan") if out.dtype.is_floating_point else POISON_INT)


def bucket(count: int) -> int:
    """The power of two at or above; 0 stays 0."""
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _operand_spec(matrices: Matrices, shared: bool = False) -> OperandSpec:
    every = matrices if isinstance(matrices, list) else [matrices]
    orders = {_order(t) for t in every if t.numel()} or {"row"}
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
