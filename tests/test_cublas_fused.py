"""cuBLASLt's epilogues on a GPU: bias and relu in the library's kernels, one rounding, graphs and streams."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas.config import Config
from tests.cublas_gpu_cases import captured, cuda, exact_rows, ints

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
FUSED = Config("fused", 3)


def _wanted(a: torch.Tensor, b: torch.Tensor, sizes: list[int], bias: torch.Tensor | None, relu: bool) -> torch.Tensor:
    want = exact_rows(a, b, sizes)
    if bias is not None:
        rows = torch.repeat_interleave(bias.expand(len(sizes), -1), torch.tensor(sizes, device="cuda"), 0)
        want[: len(rows)] += rows.double()
    return want.relu() if relu else want


@pytest.mark.parametrize("sizes", [[7, 0, 25, 8], [16, 16, 16], [1, 300, 64, 3, 0, 132], [0, 0]], ids=str)
@pytest.mark.parametrize("what", ["bias", "bias of all", "bias relu", "relu"])
def test_every_run_is_right(sizes: list[int], what: str) -> None:
    """On whichever stream is current; rows that no group owns are zeros."""
    a, b = ints(sum(sizes) + 3, 64), ints(len(sizes), 64, 48, seed=1)
    bias = None if what == "relu" else ints(48, seed=2) if "all" in what else ints(len(sizes), 48, seed=2)
    relu, side = "relu" in what, cuda.Stream()
    problem = mg.GroupedGemmProblem(a, b, sizes=sizes, bias=bias, activation="relu" if relu else None)
    plan = mg.plan(problem, backend="cublas", config=FUSED)
    for run in range(4):
        torch.cuda.synchronize()
        with torch.cuda.stream(side if run % 2 else torch.cuda.current_stream()):
            a.copy_(ints(len(a), 64, seed=run))
            if bias is not None:
                bias.copy_(ints(*bias.shape, seed=run + 9))
            got = plan().clone()
        torch.cuda.synchronize()
        assert torch.equal(got.double(), _wanted(a, b, sizes, bias, relu))


def test_a_capture_follows_its_operands() -> None:
    sizes = [7, 0, 25, 8]
    a, b, bias = ints(40, 64), ints(4, 64, 32, seed=1), ints(4, 32, seed=2)
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=sizes, bias=bias), backend="cublas", config=FUSED)
    graph, out = captured(plan)
    for seed in (3, 4):
        a.copy_(ints(40, 64, seed=seed))
        bias.copy_(ints(4, 32, seed=seed))
        graph.replay()
        assert torch.equal(out.double(), _wanted(a, b, sizes, bias, relu=False))


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("sizes", [[7, 0, 25, 8], [64, 64], [300, 4]], ids=str)
def test_float32(precision: Any, sizes: list[int]) -> None:
    a, b, bias = ints(sum(sizes), 64), ints(len(sizes), 64, 48, seed=1), ints(len(sizes), 48, seed=2)
    if precision == "ieee":
        a = a.float() + 2.0**-13  # which tf32 would drop
    problem = mg.GroupedGemmProblem(a.float(), b.float(), sizes=sizes, bias=bias.float(), precision=precision)
    plan = mg.plan(problem, backend="cublas", config=FUSED)
    for _ in range(3):
        assert torch.equal(plan().double(), _wanted(a, b, sizes, bias, relu=False))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("k", [8, 64, 4096, 16384])
@pytest.mark.parametrize("rows", [[1, 3, 8], [64, 64, 64], [130, 17, 256]], ids=str)
def test_one_rounding(dtype: torch.dtype, k: int, rows: list[int]) -> None:
    """Also where few rows and a long K make the library split K."""
    gen = torch.Generator("cuda").manual_seed(k)
    shapes = (sum(rows), k), (len(rows), k, 256), (len(rows), 256)
    a, b, bias = (torch.randn(s, generator=gen, device="cuda").to(dtype) for s in shapes)
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=rows, bias=bias, alpha=0.5), backend="cublas", config=FUSED)
    want = _wanted(0.5 * a.double(), b, rows, bias, relu=False)
    noise = exact_rows(a.abs(), b.abs(), rows) * (k**0.5 + 8) * 2.0**-24
    bits = 7 if dtype is torch.bfloat16 else 10
    half = torch.exp2(want.abs().clamp_min(1e-30).log2().floor() - bits - 1).clamp_min(2.0**-25)
    for _ in range(3):
        assert bool(((plan().double() - want).abs() <= half + noise).all())


def test_relu_treats_nan_and_infinity_as_torch_does() -> None:
    a, b = ints(8, 16), ints(2, 16, 8, seed=1)
    a[0], a[1], a[2, 3] = float("nan"), float("inf"), -float("inf")
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=[5, 3], activation="relu"), backend="cublas", config=FUSED)
    got, want = plan().double(), torch.cat([a[:5].double() @ b[0].double(), a[5:].double() @ b[1].double()]).relu()
    assert torch.equal(got.nan_to_num(-1.0), want.nan_to_num(-1.0))


def test_lists_and_weight_gradients_without_k() -> None:
    dims: list[tuple[int, int, int]] = [(16, 24, 32), (8, 8, 0), (1, 16, 64), (0, 8, 8)]
    a, b = [ints(m, k, seed=i) for i, (m, _, k) in enumerate(dims)], [ints(k, n, seed=9) for _, n, k in dims]
    bias = [ints(n, seed=i + 3) for i, (_, n, _) in enumerate(dims)]
    outs: Any = mg.grouped_gemm(a, b, bias=bias, activation="relu", backend="cublas", config=FUSED)
    for x, y, z, out in zip(a, b, bias, outs, strict=True):
        assert torch.equal(out.double(), (x.double() @ y.double() + z.double()).relu())
    x, dy, offsets, each = ints(16, 48), ints(16, 24, seed=4), [0, 8, 8, 16], ints(3, 24, seed=2)
    out = mg.grouped_gemm(x.T, dy, offsets=offsets, jagged="k", bias=each, backend="cublas", config=FUSED)
    for g in range(3):
        cut = slice(offsets[g], offsets[g + 1])
        assert torch.equal(out[g].double(), x[cut].double().T @ dy[cut].double() + each[g].double())


def test_results_of_more_than_two_to_the_31_elements() -> None:
    n, rows = 1024, 2**21 + 64
    a, b = torch.zeros(rows, 8, dtype=torch.bfloat16, device="cuda"), ints(2, 8, n, seed=1)
    a[-40:] = ints(40, 8)
    out: Any = mg.grouped_gemm(a, b, sizes=[rows - 16, 16], activation="relu", backend="cublas", config=FUSED)
    assert torch.equal(out[-16:].double(), (a[-16:].double() @ b[1].double()).relu())
    assert torch.equal(out[-40:-16].double(), (a[-40:-16].double() @ b[0].double()).relu())
    assert bool((out[:-40] == 0).all())


def test_a_batch_above_65535() -> None:
    a, b, bias = ints(70001, 2, 8), ints(70001, 8, 8, seed=1), ints(70001, 8, seed=2)
    out: Any = mg.grouped_gemm(a, b, bias=bias, backend="cublas", config=FUSED)
    assert torch.equal(out.double(), a.double() @ b.double() + bias.double()[:, None])
