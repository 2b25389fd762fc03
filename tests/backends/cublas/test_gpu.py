"""On a GPU: what no group owns, lies, global switches, epilogues; and where library calls end or go wrong without a
word: counts, extents, alignment, distances."""

from __future__ import annotations

import ctypes
import random
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas import grouped_mm
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.library import cublas, handle
from multigemm.planning.launch_cache import LAUNCHES
from tests.support.cublas_far_cases import ARENA, DTYPES, cases
from tests.support.cublas_gpu_cases import ALL, exact_rows, ints, offsets_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(autouse=True)
def _switches() -> Iterator[None]:
    """torch's global switches as they were, whatever a test sets."""
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    yield
    matmul.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before


def test_tf32_only_on_request() -> None:
    a, b = torch.rand(2, 128, 256, device="cuda"), torch.rand(2, 256, 64, device="cuda")
    exact = a.double() @ b.double()
    torch.backends.cuda.matmul.allow_tf32 = True
    for config in (Config("loop"), Config("batched"), Config("grouped"), Config("streams", 2)):
        ieee = mg.grouped_gemm(a, b, backend="cublas", config=config)
        fast = mg.grouped_gemm(a, b, precision="tf32", backend="cublas", config=config)
        assert (ieee.double() - exact).abs().max() < 1e-3
        assert 1e-4 < (fast.double() - exact).abs().max() < 1e-1


def test_the_math_mode_comes_back() -> None:
    a, b, mode = ints(2, 16, 16), ints(2, 16, 16), ctypes.c_int(-1)
    plan = mg.plan(mg.GroupedGemmProblem(a, b), backend="cublas", config=Config("loop"))
    torch.backends.cuda.matmul.allow_tf32 = True
    blas = handle()
    cublas().get_math_mode(blas, ctypes.byref(mode))
    before = mode.value
    plan()
    cublas().get_math_mode(blas, ctypes.byref(mode))
    assert mode.value == before
    assert torch.backends.cuda.matmul.allow_tf32


def test_16_bit_partial_sums_stay_off() -> None:
    """Sums that cancel: split K rounded to 16 bits would leave a remainder."""
    k = 65536
    a = torch.full((1, 8, k), 1.0, device="cuda")
    a[..., k // 2 :] = -1.0
    b = torch.rand(1, k // 2, 8, device="cuda").bfloat16()
    b = torch.cat([b, b], 1)
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = True
    out = mg.grouped_gemm(a.bfloat16(), b, out_dtype=torch.float32, backend="cublas")
    assert out.abs().max() < k * 2.0**-22 * k / 2


@pytest.mark.parametrize(
    "value", [1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 3 * 2.0**-8 - 2.0**-40, 3e300, -float("inf")]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_float64_rounds_once(value: float, dtype: torch.dtype) -> None:
    a, b = (torch.full((1, 1, 1), v, device="cuda", dtype=torch.float64) for v in (value, 1.0))
    out = mg.grouped_gemm(a, b, out_dtype=dtype, backend="cublas").item()
    bits = 7 if dtype is torch.bfloat16 else 10
    if abs(value) > 1e300:
        assert out == np.sign(value) * np.inf
    else:
        scaled = (value - 1) * 2.0**bits
        assert out == 1 + cast(float, np.rint(scaled)) * 2.0**-bits


def _halves(want: torch.Tensor, bits: int) -> torch.Tensor:
    """Half a unit in the last place of a result with so many bits behind the leading one."""
    return torch.exp2(want.abs().clamp_min(1e-30).log2().floor() - bits - 1)


@pytest.mark.parametrize("config", [Config("loop"), Config("batched"), Config("streams", 2)], ids=lambda c: c.variant)
@pytest.mark.parametrize("what", ["c", "bias"])
@pytest.mark.parametrize("shape", [(64, 32, 8, 32), (4, 256, 128, 64), (2, 16, 16, 4096)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(config: Config, what: str, shape: tuple[int, int, int, int], dtype: torch.dtype) -> None:
    """Some of the library's kernels round a product to 16 bits and then add c to it."""
    g, m, n, k = shape
    gen = torch.Generator("cuda").manual_seed(3)
    a, b, added = (torch.randn(s, generator=gen, device="cuda").to(dtype) for s in ((g, m, k), (g, k, n), (g, m, n)))
    more: dict[str, Any] = {"c": added, "beta": 1.0} if what == "c" else {"bias": added[:, 0].contiguous()}
    plan = mg.plan(mg.GroupedGemmProblem(a, b, **more), backend="cublas", config=config)
    want = a.double() @ b.double() + (added if what == "c" else added[:, :1]).double()
    noise = (a.double().abs() @ b.double().abs()) * k * 2.0**-22
    for _ in range(2):
        assert bool(
            ((plan().double() - want).abs() <= _halves(want, 7 if dtype is torch.bfloat16 else 10) + noise).all()
        )


def test_int8_wraps_and_adds_c() -> None:
    k = 140_000
    a = torch.full((1, 4, k), -128, dtype=torch.int8, device="cuda")
    b = torch.full((1, k, 4), -128, dtype=torch.int8, device="cuda")
    c = torch.arange(16, dtype=torch.int32, device="cuda").view(1, 4, 4)
    out = mg.grouped_gemm(a, b, c=c, beta=2, backend="cublas")
    total = k * 128 * 128
    wrapped = (total + 2**31) % 2**32 - 2**31
    assert torch.equal(out, wrapped + 2 * c)


# --- torch's grouped_mm, with an output -------------------------------------------------------------


@pytest.mark.parametrize("layout", ["rows", "transposed weights", "sliced result", "weight gradients"])
@pytest.mark.parametrize("private", [True, False])
def test_grouped_mm_gives_torchs_bits(monkeypatch: pytest.MonkeyPatch, layout: str, private: bool) -> None:
    """Through the dispatch mode, and through the public function where torch's private names are missing."""
    if not private:
        monkeypatch.setattr(grouped_mm, "redispatched_grouped_mm", None)
    gen = torch.Generator("cuda").manual_seed(1)
    values = partial(torch.randn, generator=gen, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([96, 96, 300, 512], device="cuda", dtype=torch.int32)
    a, b, out, jagged = values(512, 256), values(4, 256, 192), values(512, 192), "m"
    if layout == "transposed weights":
        b = values(4, 192, 256).transpose(1, 2)
    elif layout == "sliced result":
        out = values(512, 384)[:, :192]
    elif layout == "weight gradients":
        a, b, out, jagged = values(512, 256).t(), values(512, 192), values(4, 256, 192), "k"
        ends = torch.tensor([96, 128, 304, 512], device="cuda", dtype=torch.int32)
    problem = mg.GroupedGemmProblem(a, b, ends=ends, out=out, jagged=jagged)
    got = mg.plan(problem, backend="cublas", config=Config("grouped_mm"))()
    assert got.data_ptr() == out.data_ptr()
    assert torch.equal(out, torch.nn.functional.grouped_mm(a, b, offs=ends))


def test_an_error_of_grouped_mm_is_torchs_own() -> None:
    """And the dispatch mode is gone behind it."""
    groups = 1100
    a, b, out = ints(64, 64), ints(1, 64, 64).expand(groups, -1, -1), ints(64, 64)
    with pytest.raises(RuntimeError, match="1024 groups"):
        grouped_mm.grouped_mm_into(a, b, torch.full((groups,), 64, device="cuda", dtype=torch.int32), out)
    assert torch.empty_strided((64, 64), (64, 1), device="cuda", dtype=out.dtype).data_ptr() != out.data_ptr()
    torch.cuda.synchronize()


def test_plans_can_be_thrown_away_while_their_calls_run() -> None:
    """Nothing is freed too early or kept for ever."""
    ends = torch.tensor([512, 1024, 1500, 2048], device="cuda", dtype=torch.int32)
    before = 0
    for turn in range(30):
        a, b = ints(2048, 1024, seed=turn), ints(4, 1024, 1024, seed=turn + 1)
        plan = mg.plan(mg.GroupedGemmProblem(a, b, ends=ends), backend="cublas", config=Config("grouped_mm"))
        for _ in range(3):
            got = plan()
        want = torch.nn.functional.grouped_mm(a, b, offs=ends)
        del plan, a, b
        assert torch.equal(got, want)
        del got, want
        torch.cuda.synchronize()
        if turn == 2:
            before = torch.cuda.memory_allocated()
    assert torch.cuda.memory_allocated() == before


# --- calls that the cache of launches serves ---


@pytest.mark.parametrize("kind", ["offsets", "a first offset", "ends", "sizes", "list"])
@pytest.mark.parametrize("jagged", ["m", "k"])
@pytest.mark.parametrize("config", [Config("auto"), Config("grouped_mm"), Config("grouped"), Config("batched")])
def test_a_warm_call_follows_its_operands(kind: str, jagged: str, config: Config) -> None:
    """Fresh operands at each call, token counts of one class, numbers that change, NaN behind the last row."""
    groups, served = 5, LAUNCHES.served
    for turn in range(12):
        sizes, head = [8 * ((turn + g) % 4) for g in range(groups)], 8 * (kind == "a first offset")
        rows = head + sum(sizes) + 8 * (turn % 3)
        offsets = offsets_of(sizes, head)
        cuts: dict[str, dict[str, Any]] = {
            "offsets": {"offsets": offsets}, "a first offset": {"offsets": offsets.long()},
            "ends": {"ends": offsets[1:].contiguous()}, "sizes": {"sizes": offsets.diff()}, "list": {"sizes": sizes},
        }  # fmt: skip
        given = cuts[kind]
        a, b = ints(rows, 64, seed=turn), ints(groups, 64, 48, seed=turn + 50)
        a[head + sum(sizes) :], a[:head] = float("nan"), float("nan")
        if jagged == "m":
            out = mg.grouped_gemm(a, b, backend="cublas", config=config, **given)
            assert torch.equal(out, exact_rows(a, b, sizes, head).to(out.dtype)), turn
            continue
        dy = ints(rows, 48, seed=turn + 50)
        out = mg.grouped_gemm(a.t(), dy, jagged="k", backend="cublas", config=config, **given)
        for g, (start, end) in enumerate(pairwise(offsets.tolist())):
            want = a[start:end].t().double() @ dy[start:end].double()
            assert torch.equal(out[g], want.to(out.dtype)), (turn, g)
    if jagged == "m" and (kind == "list" or config.variant in ("auto", "grouped_mm")):
        assert LAUNCHES.served > served


@pytest.mark.parametrize("numbers", [[60, 20, 90], [-5, 4, 900], [2**31 - 1] * 3, [0, 0, 0]], ids=str)
@pytest.mark.parametrize("kind", ["offsets", "ends", "sizes"])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_warm_call_clamps_as_a_plan_does(numbers: list[int], kind: str, dtype: torch.dtype) -> None:
    a, b = ints(100, 64), ints(3, 64, 64, seed=1)
    good = [3, 10, 30, 60] if kind == "offsets" else [10, 30, 60]
    live, cut = torch.tensor(good, dtype=dtype, device="cuda"), cast(dict[str, Any], {})
    cut[kind] = live
    plan: Any = mg.plan(mg.GroupedGemmProblem(a, b, **cut), backend="cublas")
    for _ in range(3):
        assert torch.equal(mg.grouped_gemm(a, b, backend="cublas", **cut), plan())
    served = LAUNCHES.served
    live.copy_(torch.tensor([3, *numbers] if kind == "offsets" else numbers))
    assert torch.equal(mg.grouped_gemm(a, b, backend="cublas", **cut), plan())
    assert LAUNCHES.served == served + 1


@pytest.mark.parametrize("jagged", ["m", "k"])
@pytest.mark.parametrize("config", [Config("auto"), Config("grouped"), Config("grouped_mm")], ids=lambda x: x.variant)
def test_new_sizes_on_the_host_have_the_bits_of_a_plan(jagged: str, config: Config) -> None:
    """Most calls wait behind a busy stream, while later ones write their sizes over what these passed."""
    chance, made, served = random.Random(4), list[Any](), LAUNCHES.served
    rows, b, dy = (
        torch.randn(*shape, device="cuda").bfloat16() for shape in ((2048, 256), (40, 256, 128), (2048, 128))
    )
    for turn in range(24):
        if turn == 8:
            torch.cuda._sleep(300_000_000)  # type: ignore[no-untyped-call]
        sizes, tokens = [8 * chance.randrange(6) for _ in range(39)] + [56], 1736 + 8 * chance.randrange(20)
        a, other = (rows[:tokens], b) if jagged == "m" else (rows[:tokens].t(), dy[:tokens])
        keywords: Any = {"offsets": [0, *np.cumsum(sizes).tolist()], "jagged": jagged}
        made.append((a, other, keywords, mg.grouped_gemm(a, other, backend="cublas", config=config, **keywords)))
    assert LAUNCHES.served >= served + 22
    for a, other, keywords, got in made:
        plan: Any = mg.plan(mg.GroupedGemmProblem(a, other, **keywords), backend="cublas", config=config)
        assert torch.equal(got, plan())


# --- counts, extents, alignment, distances ---


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_distance_is_right_or_refused(dtype: torch.dtype) -> None:
    """Each dtype in a process of its own, and in another one behind a case that ends it."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < ARENA + (2 << 30):
        pytest.skip(f"needs {(ARENA >> 30) + 2} GB of free GPU memory")
    name, start, bad, ran = str(dtype).removeprefix("torch."), 0, list[str](), 0
    while start < len(list(cases(dtype))):
        command = [sys.executable, "-m", "tests.support.cublas_far_cases", "cuda", name, str(start)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        said = done.stdout.splitlines()
        pairs = list(zip(said[::2], said[1::2], strict=False))
        ran += sum(answer == "right" for _, answer in pairs)
        bad += [f"{case}: {answer}" for case, answer in pairs if answer == "wrong"]
        if said and said[-1] == "all":
            break
        assert said, done.stderr[-2000:]
        bad.append(f"{said[-1]}: {done.stderr.strip().splitlines()[-1]}")
        start = int(said[-1].split()[0]) + 1
    assert bad == []
    assert ran >= 30
