"""Libraries that a user may have installed: DeepGEMM, QuACK, FBGEMM, OpenAI's triton_kernels.

All four multiply packed rows by one weight per group. Each wants its own layout, which is prepared
outside the timing; results come back in the workload's own row order, so that they can be checked.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from multigemm.bench.entries import Entry, Prepared, Refused
from multigemm.bench.operands import Tensors
from multigemm.bench.peer_torch import without_epilogue


def packed_rows(tensors: Tensors, *dtypes: str) -> tuple[Tensor, Tensor, Tensor]:
    """(a [T, K], b [G, K, N], sizes [G] on the device), or why this library does not fit."""
    workload = tensors.workload
    without_epilogue(tensors)
    if workload.form != "jagged_m" or workload.shared_b or tensors.offsets is None:
        raise Refused("takes packed rows with one weight per group")
    if workload.dtype not in dtypes:
        raise Refused(f"takes {' or '.join(dtypes)}")
    assert isinstance(tensors.a, Tensor)
    assert isinstance(tensors.b, Tensor)
    return tensors.a, tensors.b, torch.diff(tensors.offsets)


def by_rows(b: Tensor) -> Tensor:
    """The weights as [G, N, K] in memory."""
    return b.transpose(1, 2).contiguous()


def _deep_gemm(tensors: Tensors) -> Prepared:
    """Rows are padded to the library's alignment beforehand; -1 marks the padding."""
    a, b, _ = packed_rows(tensors, "bf16")
    deep_gemm: Any = importlib.import_module("deep_gemm")
    step = int(deep_gemm.get_mk_alignment_for_contiguous_layout())
    sizes = [int(s) for s in tensors.workload.sizes]
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // step) * step)
    rows = torch.cat([torch.arange(size) + start for size, start in zip(sizes, starts, strict=False)]).to(a.device)
    padded = a.new_zeros(starts[-1], a.shape[1])
    padded[rows] = a
    owner = torch.full((starts[-1],), -1, dtype=torch.int32, device=a.device)
    owner[rows] = torch.repeat_interleave(
        torch.arange(len(sizes), dtype=torch.int32), torch.tensor(sizes)
    ).to(a.device)  # fmt: skip
    out = a.new_full((starts[-1], b.shape[2]), float("nan"))
    weights = by_rows(b)

    def call() -> object:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(padded, weights, out, owner)
        return Padded(out, rows)

    return Prepared(call, None, "m_grouped_bf16_gemm_nt_contiguous", why=f"rows padded to {step} beforehand")


class Padded:
    """A padded result; `unpadded` is taken only when it is checked, never while it is timed."""

    def __init__(self, padded: Tensor, rows: Tensor) -> None:
        self.padded, self.rows = padded, rows

    def unpadded(self) -> Tensor:
        return self.padded[self.rows]


def _quack(tensors: Tensors) -> Prepared:
    a, b, _ = packed_rows(tensors, "bf16", "fp16")
    gemm: Any = importlib.import_module("quack.gemm_interface").gemm
    weights = by_rows(b).transpose(1, 2)
    offsets, out = tensors.offsets, tensors.out
    return Prepared(
        lambda: gemm(a, weights, out=out, cu_seqlens_m=offsets), out, "quack.gemm", why="weights as [G, N, K]"
    )


def _fbgemm(tensors: Tensors) -> Prepared:
    a, b, sizes = packed_rows(tensors, "bf16")
    name = "fbgemm_gpu.experimental.gemm.triton_gemm.grouped_gemm"
    grouped_gemm: Any = importlib.import_module(name).grouped_gemm
    weights = by_rows(b).reshape(-1, b.shape[1])
    return Prepared(lambda: grouped_gemm(a, weights, sizes), None, "grouped_gemm (Triton)", why="weights as [G*N, K]")


def _triton_kernels(tensors: Tensors) -> Prepared:
    """The folder python/triton_kernels of Triton's repository since 3.6 began; the package of that name is another."""
    a, b, sizes = packed_rows(tensors, "bf16", "fp16")
    matmul: Any = importlib.import_module("triton_kernels.matmul").matmul
    make: Any = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata
    metadata = make(sizes, a.shape[0])
    return Prepared(
        lambda: matmul(a, b, None, a_ragged_metadata=metadata),
        None,
        "triton_kernels.matmul",
        why="metadata made beforehand",
    )


MODULE_OF = {"deep_gemm": "deep_gemm", "quack": "quack", "fbgemm": "fbgemm_gpu", "triton_kernels": "triton_kernels"}
ENTRIES = {
    name: Entry(name, "peer", prepare)
    for name, prepare in (
        ("deep_gemm", _deep_gemm),
        ("quack", _quack),
        ("fbgemm", _fbgemm),
        ("triton_kernels", _triton_kernels),
    )
}
