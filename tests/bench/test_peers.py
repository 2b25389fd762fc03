"""Adapters of libraries that are not installed here, against stand-ins that follow the published signatures."""

from __future__ import annotations

import sys
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from multigemm.bench import machine, peers
from multigemm.bench.entries import Refused
from multigemm.bench.operands import make
from multigemm.bench.peers import PEERS, _odd_start
from multigemm.bench.workloads import Workload

LIBRARIES = ("deep_gemm", "quack", "fbgemm", "triton_kernels")
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


def quack_config(tile_m: int, tile_n: int, swap_ab: bool = False, device_capacity: int = 9) -> Any:
    return types.SimpleNamespace(
        tile_m=tile_m, tile_n=tile_n, pingpong=True, cluster_m=2, cluster_n=1, swap_ab=swap_ab,
        device_capacity=device_capacity,
    )  # fmt: skip


QUACK_CONFIGS = [
    quack_config(128, 128), quack_config(128, 208), quack_config(128, 192, swap_ab=True),
    quack_config(128, 192, device_capacity=10), quack_config(256, 192),
]  # fmt: skip


def config_of(call: Any) -> Any:
    return call.keywords["config"]


def install(monkeypatch: pytest.MonkeyPatch) -> None:
    def contiguous(a: Tensor, b: Tensor, d: Tensor, m_indices: Tensor) -> None:
        assert a.shape[0] % 4 == 0
        for row, group in enumerate(m_indices.tolist()):
            if group >= 0:
                d[row] = a[row] @ b[group].T

    def gemm(
        a: Tensor, b: Tensor, out: Tensor, c: None, *, config: Any, dynamic_scheduler: bool, **ends: Any
    ) -> Tensor:
        assert not config.swap_ab and config.device_capacity == 9
        if "cu_seqlens_k" in ends:
            sizes = torch.diff(ends["cu_seqlens_k"]).tolist()
            parts = zip(torch.split(a, sizes, 1), torch.split(b, sizes), strict=True)
            return out.copy_(torch.stack([x @ y for x, y in parts]))
        return out.copy_(by_sizes(a, list(b), torch.diff(ends["cu_seqlens_m"]).tolist()))

    def fbgemm(x: Tensor, w: Tensor, m_sizes: Tensor) -> Tensor:
        return by_sizes(x, [part.T for part in w.chunk(m_sizes.numel())], m_sizes.tolist())

    def matmul(a: Tensor, b: Tensor, bias: None, a_ragged_metadata: list[int]) -> Tensor:
        return by_sizes(a, list(b), a_ragged_metadata)

    module(
        monkeypatch, "deep_gemm", m_grouped_bf16_gemm_nt_contiguous=contiguous,
        get_mk_alignment_for_contiguous_layout=lambda: 4,
    )  # fmt: skip
    module(monkeypatch, "quack.gemm_interface", gemm_tuned=types.SimpleNamespace(fn=gemm))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(peers, "_microseconds", lambda call: abs(call().numel() and config_of(call).tile_n - 192))
    module(
        monkeypatch, "quack.gemm_config", get_all_configs=lambda: QUACK_CONFIGS,
        config_supports=lambda config, varlen_m: config.tile_m == 128 or not varlen_m,
    )  # fmt: skip
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
    assert tensors.reference().verdict(ready.result(ready.call())) == ""


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


def test_quack_runs_the_best_config_that_fits_and_names_it(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch)
    ready = PEERS["quack"].prepare(make(CASES[0], "cpu"))
    assert ready.config == "128x208, ping-pong, cluster 2x1" and ready.why == "the best of its 2 configs"
    gradients = Workload("k", "t", "jagged_k", groups=3, m=8, n=16, total=37, trans_a=True, distribution="zipf")
    tensors = make(gradients, "cpu")
    ready = PEERS["quack"].prepare(tensors)
    assert ready.config == "256x192, ping-pong, cluster 2x1"
    assert tensors.reference().verdict(ready.result(ready.call())) == ""
    with pytest.raises(Refused, match="tokens are rows"):
        PEERS["quack"].prepare(make(replace(gradients, trans_a=False), "cpu"))


def test_triton_kernels_of_before_3_7_is_called_by_its_own_name(monkeypatch: pytest.MonkeyPatch) -> None:
    def matmul_ogs(a: Tensor, b: Tensor, bias: None, *, routing_data: Any, precision_config: str, y: Tensor) -> Tensor:
        assert precision_config == "plain"
        return y.copy_(by_sizes(a, list(b), routing_data[4]))

    module(
        monkeypatch, "triton_kernels.matmul_ogs", matmul_ogs=matmul_ogs, RoutingData=lambda *words: words,
        PrecisionConfig=lambda: "plain",
    )  # fmt: skip
    details = "triton_kernels.tensor_details.ragged_tensor"
    module(monkeypatch, details, make_ragged_tensor_metadata=lambda sizes, rows: sizes.tolist())
    tensors = make(CASES[0], "cpu")
    ready = PEERS["triton_kernels"].prepare(tensors)
    assert ready.kernel == "triton_kernels.matmul_ogs"
    assert tensors.reference().verdict(ready.result(ready.call())) == ""


def test_starts_off_16_bytes_are_seen_where_groups_lie_along_rows() -> None:
    columns = Workload("n", "t", "jagged_n", groups=3, m=8, k=16, total=37, distribution="zipf")
    assert _odd_start(columns) == columns.sizes[0]
    assert _odd_start(replace(columns, total=48, distribution="balanced")) == 0
    gradients = Workload("k", "t", "jagged_k", groups=3, m=8, n=16, total=37, trans_a=True, distribution="zipf")
    assert _odd_start(gradients) == 0
    assert _odd_start(replace(gradients, trans_a=False)) > 0
    assert _odd_start(CASES[0]) == 0


def test_a_peer_that_only_lies_on_the_path_has_its_modules_version(monkeypatch: pytest.MonkeyPatch) -> None:
    peer = types.ModuleType("a_peer_without_metadata")
    monkeypatch.setitem(sys.modules, peer.__name__, peer)
    assert machine.versions([peer.__name__, "no_such_package"]) == {}
    peer.__version__ = "2.6"  # type: ignore[attr-defined]
    assert machine.versions([peer.__name__, "no_such_package"]) == {peer.__name__: "2.6"}
