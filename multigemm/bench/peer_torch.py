"""What PyTorch itself offers: grouped_mm with either memory order of the weights, a loop, and bmm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from multigemm.bench.check import group_inputs, group_outputs
from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.operands import Tensors
from multigemm.bench.workloads import Workload


def without_epilogue(tensors: Tensors) -> None:
    """Peers run plain products only; an epilogue of their own making would not be a fair copy."""
    if tensors.workload.bias:
        raise Refused("this adapter runs products without a bias")
    if tensors.workload.dtype == "tf32":
        raise Refused("this adapter does not switch torch to tf32")


def grouped_mm() -> Callable[..., Any]:
    found = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if found is None:
        raise Refused(f"torch {torch.__version__} has no grouped_mm")
    return found  # type: ignore[no-any-return]


def _grouped(tensors: Tensors) -> Prepared:
    without_epilogue(tensors)
    if tensors.offsets is None:
        raise Refused("grouped_mm takes packed groups with offsets, not lists or masks")
    if isinstance(tensors.b, Tensor) and tensors.workload.shared_b:
        raise Refused("grouped_mm takes one weight per group, not a shared one")
    if tensors.offsets.is_cuda and _odd_start(tensors.workload):
        raise Refused("grouped_mm asserts on the device, and ends its context, where groups begin off 16 bytes")
    call, ends, a, b = grouped_mm(), tensors.offsets[1:].contiguous(), tensors.a, tensors.b
    return Prepared(lambda: call(a, b, offs=ends), None, "grouped_mm", why="allocates its result")


def _odd_start(workload: Workload) -> int:
    """A start of a group that is counted along rows of memory and lies off 16 bytes; 0 if there is none."""
    along_rows = {"jagged_n": True, "jagged_k": workload.trans_b or not workload.trans_a}.get(workload.form, False)
    starts = workload.sizes.cumsum()[:-1] if along_rows else ()
    return next((int(start) for start in starts if workload.torch_dtype.itemsize * int(start) % 16), 0)


def _grouped_nt(tensors: Tensors) -> Prepared:
    """The same call on weights that lie in memory as [G, N, K], which torch's kernels prefer."""
    b = tensors.b
    if not isinstance(b, Tensor) or b.dim() != 3 or tensors.workload.trans_b:
        raise Refused("the other memory order is only of interest for [G, K, N] weights in row order")
    without_epilogue(tensors)
    if tensors.workload.form != "jagged_m" or tensors.offsets is None:
        raise Refused("packed rows only")
    call, ends, a = grouped_mm(), tensors.offsets[1:].contiguous(), tensors.a
    turned = b.transpose(1, 2).contiguous().transpose(1, 2)
    return Prepared(
        lambda: call(a, turned, offs=ends), None, "grouped_mm", why="weights turned to [G, N, K] beforehand"
    )


def _loop(tensors: Tensors) -> Prepared:
    without_epilogue(tensors)
    if tensors.workload.dtype == "int8":
        raise Refused("torch.mm has no int8")
    pairs = [
        (a, b, out)
        for (a, b), out in zip(group_inputs(tensors), group_outputs(tensors, tensors.out), strict=True)
        if out.numel()
    ]

    def loop() -> None:
        for a, b, out in pairs:
            torch.mm(a, b, out=out)

    return Prepared(loop, tensors.out, "torch.mm per group", why="knows the sizes on the host")


def _bmm(tensors: Tensors) -> Prepared:
    without_epilogue(tensors)
    workload = tensors.workload
    if workload.dtype == "int8":
        raise Refused("torch.bmm has no int8")
    if len(set(workload.extents)) != 1:
        raise Refused("bmm needs equal groups")
    m, n, k = workload.extents[0]
    pairs = group_inputs(tensors)
    if workload.form == "jagged_m" and isinstance(tensors.a, Tensor) and isinstance(tensors.b, Tensor):
        if workload.shared_b or workload.trans_a:
            raise Refused("bmm needs one weight per group and rows in order")
        a, b = tensors.a.view(len(pairs), m, k), tensors.b
    elif isinstance(tensors.a, list):
        a, b = torch.stack([x for x, _ in pairs]), torch.stack([y for _, y in pairs])
    elif workload.form == "batched":
        a, b = tensors.a, tensors.b  # type: ignore[assignment]
    else:
        raise Refused("bmm would need copies of the operands")
    out = torch.empty(len(pairs), m, n, dtype=a.dtype, device=a.device)
    result = (
        list(out)
        if isinstance(tensors.out, list)
        else out.view(len(pairs) * m, n)
        if workload.form == "jagged_m"
        else out
    )
    return Prepared(lambda: torch.bmm(a, b, out=out), result, "torch.bmm", why="stacked beforehand")


ENTRIES = {
    name: Entry(name, "peer", prepare)
    for name, prepare in (
        ("torch_grouped", _grouped),
        ("torch_grouped_nt", _grouped_nt),
        ("torch_loop", _loop),
        ("torch_bmm", _bmm),
    )
}
