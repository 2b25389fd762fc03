"""The cublas backend on a GPU: where library calls end or go wrong without a word: counts, extents, alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas.config import Config
from tests.support.cublas_gpu_cases import ALL, exact_rows, ints, offsets_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("groups", [1023, 1024, 1500])
@pytest.mark.parametrize("config", ALL, ids=lambda c: c.variant)
@pytest.mark.parametrize("where", ["host", "device"])
def test_more_groups_than_grouped_mm_takes(groups: int, config: Config, where: str) -> None:
    sizes = [g % 3 for g in range(groups)]
    a, b = ints(sum(sizes), 16), ints(groups, 16, 8, seed=1)
    given = offsets_of(sizes) if where == "device" else offsets_of(sizes).tolist()
    try:
        out = mg.grouped_gemm(a, b, offsets=given, backend="cublas", config=config)
    except mg.BackendUnsupported:
        assert config.variant == "grouped_mm"
        assert groups > 1023
        return
    weights = torch.repeat_interleave(b.double(), torch.tensor(sizes, device="cuda"), 0)
    assert torch.equal(out.double(), torch.einsum("tk,tkn->tn", a.double(), weights))


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.variant)
@pytest.mark.parametrize("jagged", ["m", "k"])
def test_no_k_whatever_the_strides(config: Config, jagged: str) -> None:
    """torch's grouped_mm refuses such operands, and BLAS would ask for a leading dimension."""
    for stride in (0, 1, 3, 8):
        if jagged == "m":
            a = ints(16).as_strided((16, 0), (stride, 1))
            b = ints(16).as_strided((2, 0, 8), (stride, 8, 1))
            out = torch.full((16, 8), float("nan"), device="cuda").bfloat16()
        else:
            a, b = ints(16).as_strided((16, 0), (1, stride)), ints(16).as_strided((0, 8), (stride, 1))
            out = torch.full((2, 16, 8), float("nan"), device="cuda").bfloat16()
        sizes = [10, 6] if jagged == "m" else [0, 0]
        problem = mg.GroupedGemmProblem(a, b, sizes=sizes, jagged=jagged, out=out)
        try:
            mg.plan(problem, backend="cublas", config=config)()
        except mg.BackendUnsupported:
            assert config.variant.startswith("grouped")
            continue
        assert bool((out == 0).all())


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.variant)
@pytest.mark.parametrize("pad", [8, 3])
def test_odd_leading_dimensions(config: Config, pad: int) -> None:
    """A variant takes them and is right, or says that it cannot."""
    sizes = [9, 0, 40, 1]
    a, out = ints(50, 64 + pad)[:, :64], torch.zeros(50, 48 + pad, device="cuda").bfloat16()[:, :48]
    b = ints(4, 64, 48 + pad, seed=1)[..., :48]
    problem = mg.GroupedGemmProblem(a, b, sizes=sizes, out=out)
    try:
        mg.plan(problem, backend="cublas", config=config)()
    except mg.BackendUnsupported:
        assert pad % 8
        assert config.variant.startswith("grouped")
        return
    assert torch.equal(out.double(), exact_rows(a, b, sizes))


@pytest.mark.parametrize("config", [Config("grouped"), Config("batched")], ids=lambda c: c.variant)
@pytest.mark.parametrize("rows", ["equal", "uneven", "gaps"])
def test_more_products_than_65535(config: Config, rows: str) -> None:
    """Equal ones at equal distances; of eight shapes; and equal ones that only a table of addresses can name."""
    count = 110001
    a, b = ints(count, 8, 8), ints(count, 8, 8, seed=1)
    valid = [{"equal": 8, "uneven": g % 8 + 1, "gaps": 8 * (g % 3 > 0)}[rows] for g in range(count)]
    out = mg.grouped_gemm(a, b, valid_rows=valid, backend="cublas", config=config)
    want = a.double() @ b.double()
    want[torch.arange(8, device="cuda") >= torch.tensor(valid, device="cuda")[:, None]] = 0
    assert torch.equal(out.double(), want)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int8])
def test_a_batch_above_65535(dtype: torch.dtype) -> None:
    a, b = ints(70001, 2, 3, dtype=dtype), ints(70001, 3, 1, dtype=dtype, seed=1)
    config = Config("auto") if dtype is torch.int8 else Config("batched")
    count = 300 if dtype is torch.int8 else 70001
    out = mg.grouped_gemm(a[:count], b[:count], backend="cublas", config=config)
    assert torch.equal(out.double(), a[:count].double() @ b[:count].double())


@pytest.mark.parametrize("config", [Config("loop"), Config("batched"), Config("auto")], ids=lambda c: c.variant)
def test_more_than_two_to_the_31_elements(config: Config) -> None:
    k, rows = 1024, 2**21 + 64
    a, b = torch.zeros(rows, k, dtype=torch.bfloat16, device="cuda"), ints(2, k, 8, seed=1)
    a[-40:] = ints(40, k)
    out = mg.grouped_gemm(a, b, sizes=[rows - 10, 10], out_dtype=torch.float32, backend="cublas", config=config)
    assert torch.equal(out[-10:].double(), a[-10:].double() @ b[1].double())
    assert torch.equal(out[-40:-10].double(), a[-40:-10].double() @ b[0].double())


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.variant)
@pytest.mark.parametrize("where", ["host", "device"])
def test_weights_of_more_than_two_to_the_31_elements(config: Config, where: str) -> None:
    groups, k = 520, 2048
    b = torch.zeros(groups, k, k, dtype=torch.bfloat16, device="cuda")
    a, b[0], b[-1] = ints(24, k), ints(k, k, seed=1), ints(k, k, seed=2)
    offsets = offsets_of([8] + [0] * (groups - 2) + [16])
    given = offsets if where == "device" else offsets.tolist()
    out = mg.grouped_gemm(a, b, offsets=given, backend="cublas", config=config)
    assert torch.equal(out[:8], (a[:8].double() @ b[0].double()).bfloat16())
    assert torch.equal(out[8:], (a[8:].double() @ b[-1].double()).bfloat16())


@pytest.mark.parametrize(
    ("config", "activation"),
    [*((config, None) for config in ALL), (Config("auto"), "silu")],
    ids=lambda x: x.variant if isinstance(x, Config) else str(x),
)
def test_results_of_more_than_two_to_the_31_elements(config: Config, activation: str | None) -> None:
    """With an activation a kernel of ours goes over all of them, behind the library."""
    n, rows = 1024, 2**21 + 64
    a, b = torch.zeros(rows, 8, dtype=torch.bfloat16, device="cuda"), ints(2, 8, n, seed=1)
    a[-40:] = ints(40, 8)
    keywords: dict[str, Any] = {"backend": "cublas", "config": config, "activation": activation}
    out = mg.grouped_gemm(a, b, sizes=[rows - 16, 16], **keywords)
    want = torch.cat([a[-40:-16].double() @ b[0].double(), a[-16:].double() @ b[1].double()])
    if activation is None:
        assert torch.equal(out[-40:].double(), want)
    else:
        want = torch.nn.functional.silu(want)
        assert bool(((out[-40:].double() - want).abs() <= want.abs() * 2.0**-8 + 1e-5).all())
    assert bool((out[:-40] == 0).all())


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.variant)
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize(("k", "n"), [(37, 31), (64, 32)])
def test_odd_extents_and_unaligned_bases(config: Config, shift: int, k: int, n: int) -> None:
    """A variant takes them and is right, or says that it cannot."""
    sizes, store = [3, 17, 0, 30], ints(50 * k + 1)
    a = store[shift : shift + 50 * k].view(50, k)
    b = ints(4 * k * n + 1, seed=1)[shift : shift + 4 * k * n].view(4, k, n)
    try:
        out = mg.grouped_gemm(a, b, sizes=sizes, backend="cublas", config=config)
    except mg.BackendUnsupported:
        assert shift or k % 8
        assert config.variant.startswith("grouped")
        return
    assert torch.equal(out.double(), exact_rows(a, b, sizes))


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_narrow_products(n: int, k: int, transposed: bool) -> None:
    b = ints(3, n, k, seed=1).transpose(1, 2) if transposed else ints(3, k, n, seed=1)
    a, sizes = ints(8, k), [1, 6, 1]
    for config in ALL:
        try:
            out = mg.grouped_gemm(a, b, sizes=sizes, backend="cublas", config=config)
        except mg.BackendUnsupported:
            assert config.variant.startswith("grouped")
            continue
        assert torch.equal(out.double(), exact_rows(a, b, sizes))
