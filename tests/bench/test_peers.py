"""Adapters of libraries that are not installed here, against stand-ins that follow the published signatures."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from multigemm.bench.entries import Refused
from multigemm.bench.operands import make, reference
from multigemm.bench.peers import PEERS, _odd_start, peer_entries
from multigemm.bench.workloads import Workload
from tests.support.python_process import run_python

LIBRARIES = ("deep_gemm", "quack", "fbgemm", "triton_kernels")
TUTORIAL = "triton_tutorial"
CASES = [
    Workload("zipf", "t", groups=5, n=8, k=16, total=37, distribution="zipf"),
    Workload("holes", "t", groups=8, n=4, k=8, total=19, distribution="empty"),
    Workload("even", "t", groups=2, n=4, k=8, total=16),
]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **members: Any) -> None:
    parts = name.split(".")
    for end in range(1, len(parts) + 1):
        path = ".".join(parts[:end])
        monkeypatch.setitem(sys.modules, path, types.ModuleType(path))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


def by_sizes(a: Tensor, weights: list[Tensor], sizes: list[int]) -> Tensor:
    return torch.cat([rows @ w for rows, w in zip(torch.split(a, sizes), weights, strict=True)])


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    def contiguous(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
        assert a.shape[0] % 4 == 0
        for row, group in enumerate(m_indices.tolist()):
            if group >= 0:
                d[row] = a[row] @ b[group].T

    def gemm(a: Tensor, b: Tensor, out: Tensor, cu_seqlens_m: Tensor) -> Tensor:
        assert b.stride(-2) == 1
        return out.copy_(by_sizes(a, list(b), torch.diff(cu_seqlens_m).tolist()))

    def fbgemm(x: Tensor, w: Tensor, m_sizes: Tensor) -> Tensor:
        return by_sizes(x, [part.T for part in w.chunk(m_sizes.numel())], m_sizes.tolist())

    def matmul(a: Tensor, b: Tensor, bias: None, a_ragged_metadata: list[int]) -> Tensor:
        return by_sizes(a, list(b), a_ragged_metadata)

    module(
        monkeypatch, "deep_gemm", m_grouped_bf16_gemm_nt_contiguous=contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: 4,
    )  # fmt: skip
    module(monkeypatch, "quack.gemm_interface", gemm=gemm)
    module(monkeypatch, "fbgemm_gpu.experimental.gemm.triton_gemm.grouped_gemm", grouped_gemm=fbgemm)
    module(monkeypatch, "triton_kernels.matmul", matmul=matmul)
    module(monkeypatch, "triton_kernels.tensor", make_ragged_tensor_metadata=lambda sizes, rows: sizes.tolist())


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("name", LIBRARIES)
def test_an_adapter_hands_over_and_takes_back_the_right_rows(
    monkeypatch: pytest.MonkeyPatch, name: str, case: Workload
) -> None:
    install(monkeypatch)
    tensors = make(case, "cpu")
    ready = PEERS[name].prepare(tensors)
    assert reference(tensors).verdict(ready.result(ready.call())) == ""


@pytest.mark.parametrize("name", LIBRARIES)
@pytest.mark.parametrize(
    "case",
    [
        Workload("list", "t", "per_group", 1, products=((4, 4, 4),)),
        Workload("fp32", "t", groups=2, n=4, k=8, total=16, dtype="fp32"),
        Workload("shared", "t", groups=2, n=4, k=8, total=16, shared_b=True),
        Workload("bias", "t", groups=2, n=4, k=8, total=16, bias=True),
    ],
    ids=lambda case: case.name,
)
def test_an_adapter_refuses_what_its_library_does_not_take(name: str, case: Workload) -> None:
    with pytest.raises(Refused, match=r"take|bias"):
        PEERS[name].prepare(make(case, "cpu"))


def test_starts_off_16_bytes_are_seen_where_groups_lie_along_rows() -> None:
    columns = Workload("n", "t", "jagged_n", groups=3, m=8, k=16, total=37, distribution="zipf")
    assert _odd_start(columns) == columns.sizes[0]
    assert _odd_start(replace(columns, total=48, distribution="balanced")) == 0
    gradients = Workload("k", "t", "jagged_k", groups=3, m=8, n=16, total=37, trans_a=True, distribution="zipf")
    assert _odd_start(gradients) == 0
    assert _odd_start(replace(gradients, trans_a=False)) > 0
    assert _odd_start(CASES[0]) == 0


def test_the_tutorials_way_runs_where_it_is_asked_for() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert TUTORIAL not in {entry.name for entry in peer_entries([], cuda)[0]}
    assert [entry.name for entry in peer_entries([TUTORIAL], cuda)[0]] == [TUTORIAL]
    assert peer_entries([TUTORIAL], cpu)[1] == {TUTORIAL: "needs a CUDA device"}
    with pytest.raises(Refused, match="16 bytes"):
        PEERS[TUTORIAL].prepare(make(replace(CASES[0], n=9), cpu))


@pytest.mark.slow
def test_the_tutorials_way_compiles_for_hopper() -> None:
    program = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from multigemm.bench.tutorial_kernel import tutorial_kernel
types = {"a": "*bf16", "b": "*bf16", "out": "*bf16", "ends": "*i32", "groups": "i32", "n": "i32", "k": "i32"}
tile = {"BM": 128, "BN": 128, "BK": 64, "STAGES": 3}
source = ASTSource(tutorial_kernel, {**types, **dict.fromkeys(tile, "constexpr")}, constexprs=tile)
print(triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8, "num_stages": 3}).asm["ptx"])
"""
    made = run_python("-c", program)
    assert "wgmma.mma_async" in made.stdout
    assert "cp.async.bulk.tensor" in made.stdout
