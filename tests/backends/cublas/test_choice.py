"""Which cublas variant runs and why not, and what surrounds a library call; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch

from multigemm.backends.cublas import BACKEND, choice, config, epilogue, launch, library
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.grouped_mm import legal
from multigemm.backends.cublas.products import TRANSPOSE, Products, Shape
from multigemm.backends.cublas.support import EXTENT
from multigemm.cuda import nvrtc
from multigemm.cuda.arguments import ACTIVATION_CODES
from multigemm.errors import CompileError
from multigemm.planning.staging import shape_only_operands, staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ProblemSpec
from tests.support.nvrtc_here import nvrtc_here

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


def _spec(
    groups: int = 4, rows: int = 64, n: int = 64, k: int = 64, dtype: torch.dtype = torch.bfloat16, **more: Any
) -> ProblemSpec:
    extra = {"sizes": [rows] * groups} | more
    a, b = torch.zeros(groups * rows, k, dtype=dtype), torch.zeros(groups, k, n, dtype=dtype)
    return GroupedGemmProblem(a, b, **extra).spec


def _products(*shapes: Shape) -> Products:
    different = list(dict.fromkeys(shapes))
    return Products(different, np.array([*map(different.index, shapes)]), np.zeros((3, len(shapes)), np.int64))


def _sized(*rows: int, n: int = 4096, k: int = 4096) -> Products:
    return _products(*(Shape(0, 0, n, m, k, n, k, n) for m in rows))


def _chosen(spec: ProblemSpec, products: Products) -> Config:
    how = launch.method(spec, Config("auto"), CUDA)
    return choice.choose(spec, products, how.grouped, how.grouped_mm)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))


def _zipf(groups: int, total: float) -> list[int]:
    return [int(total / rank) for rank in range(1, groups + 1)]


CHOICES: list[tuple[int, torch.dtype, Products, Config]] = [
    (4, torch.bfloat16, _sized(100), Config("loop")),
    (4, torch.bfloat16, _sized(100, 100, 100), Config("batched")),
    (2, torch.bfloat16, _products(*[Shape(TRANSPOSE, 0, 896, 1, 5632, 5632, 5632, 896)] * 2), Config("batched")),
    (256, torch.bfloat16, _sized(*range(1, 257), n=512, k=1024), Config("grouped_mm")),
    (256, torch.bfloat16, _sized(*_zipf(256, 16384 / 6.12), n=512, k=1024), Config("grouped")),
    (8, torch.bfloat16, _sized(6000, 3000, 2000, 1500, 1200, 1000, 900, 784, n=14336), Config("streams", 4)),
    (4, torch.bfloat16, _sized(200, 100, 50, 20, n=14336), Config("streams", 4)),
    (4, torch.int8, _sized(5, 5), Config("loop")),
    # all estimates are above what separate calls take the host
    (16, torch.bfloat16, _sized(*_zipf(16, 400)), Config("streams", 4)),
    (16, torch.bfloat16, _sized(*_zipf(16, 1200)), Config("grouped_mm")),
    # many skewed groups of some rows: cuBLAS' grouped kernel took a fifth longer for the first two of these
    *(
        (128, torch.bfloat16, _sized(*(m + 1 for m in _zipf(128, 16384 / 5.43)), n=n, k=k), Config("grouped_mm"))
        for k, n in ((1536, 4096), (2816, 1408), (704, 2816))
    ),
]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(("groups", "dtype", "products", "config"), CHOICES, ids=lambda x: str(x)[:40])
def test_the_choice_follows_the_sizes(groups: int, dtype: torch.dtype, products: Products, config: Config) -> None:
    assert _chosen(_spec(groups=groups, dtype=dtype), products) == config


@pytest.mark.parametrize("form", ["jagged_m", "jagged_k"])
@pytest.mark.parametrize("op", [0, TRANSPOSE])
def test_extents_that_all_products_share_give_the_estimates_of_columns(form: Any, op: int) -> None:
    lengths = -np.sort(-np.random.default_rng(0).integers(1, 3000, 40))
    spec = replace(_spec(40), form=form)
    extents = (768, lengths, 2048) if form == "jagged_m" else (768, 2048, lengths)
    rows = np.stack(np.broadcast_arrays(*extents)).T.tolist()
    listed = _products(*(Shape(op, 0, m, n, k, 1, 1, 1) for m, n, k in rows))
    whole = Shape(op, 0, 768, 2048, 2048, 1, 1, 1)
    shared = choice.CutWork(spec, whole, form == "jagged_m").cut(lengths, int(lengths.sum()))
    columns = choice.work_of(spec, listed)
    assert choice.separately(shared) == choice.separately(columns)
    assert choice.by_grouped(shared) == choice.by_grouped(columns)
    assert choice.by_grouped_mm(spec, shared) == choice.by_grouped_mm(spec, columns)


def test_a_graph_holds_single_calls_where_one_large_product_is_among_few() -> None:
    spec, shapes = _spec(dtype=torch.float16), [Shape(0, 0, n, n, n, n, n, n) for n in (1024, 512, 256, 128)]
    assert choice.apart_in_a_graph(spec, _products(*shapes))
    assert not choice.apart_in_a_graph(spec, _sized(64, 128, 192, 256, n=128, k=256))
    assert not choice.apart_in_a_graph(spec, _products(*shapes * 3))


@pytest.mark.usefixtures("hopper")
def test_the_grouped_call_is_not_chosen_for_a_wide_intermediate() -> None:
    wide: dict[str, Any] = {"activation": "relu"}
    small, half = _sized(*range(3, 12), n=64, k=64), torch.float16
    assert _chosen(_spec(dtype=half), small) == Config("grouped")
    assert _chosen(_spec(dtype=half, **wide), small) == Config("streams", 4)


def test_the_grouped_call_gets_no_packed_copies() -> None:
    """Their rows follow each other without a gap, at any address."""
    spec = GroupedGemmProblem(torch.zeros(2, 16, 16)[..., ::4], torch.zeros(2, 4, 8)).spec
    assert spec.a.order == "strided"
    assert "16 bytes" in config.grouped_reasons(spec)[0]


def _told(problem: GroupedGemmProblem, variant: Any = "auto") -> str:
    ops = replace(shape_only_operands(problem, staged_spec(problem)), device=CUDA)
    tell = launch.plan(ops.spec, Config(variant), CUDA).tell
    return "" if tell is None else tell(ops)


@pytest.mark.usefixtures("hopper")
def test_the_bound_variant_is_told() -> None:
    a, b = torch.zeros(1200, 64, dtype=torch.bfloat16), torch.zeros(3, 64, 64, dtype=torch.bfloat16)
    even = GroupedGemmProblem(a, b, sizes=[400, 400, 400])
    assert "'batched', streams=0) for 3 products" in _told(even)
    assert "for 2 products" in _told(GroupedGemmProblem(a, b, sizes=[1000, 0, 200]))
    assert "for 1 products" in _told(GroupedGemmProblem(a[:, ::2], b[:, ::2], sizes=[0, 0, 200]))
    assert _told(even, "loop") == ""
    assert "nothing" in _told(GroupedGemmProblem(a[:0], b, sizes=[0, 0, 0]))


@pytest.mark.usefixtures("hopper")
def test_sizes_on_the_device_are_told() -> None:
    a, b = torch.zeros(1200, 64, dtype=torch.bfloat16), torch.zeros(3, 64, 64, dtype=torch.bfloat16)
    problem = GroupedGemmProblem(a, b, sizes=[400, 400, 400])
    spec = replace(problem.spec, device_sizes=True)
    live = replace(shape_only_operands(problem, spec), device=CUDA, host_offsets=None)
    assert "on the device" in cast(Any, launch.plan(spec, Config("auto"), CUDA).tell)(live)
    halves = replace(spec, compute=torch.float16)
    assert "at each launch" in cast(Any, launch.plan(halves, Config("auto"), CUDA).tell)(replace(live, spec=halves))


@pytest.mark.usefixtures("hopper")
def test_grouped_mm_says_what_it_cannot() -> None:
    def reasons(spec: ProblemSpec) -> str:
        return " ".join(config.grouped_mm_reasons(spec, CUDA))

    assert reasons(_spec()) == ""
    assert "bfloat16 only" in reasons(_spec(dtype=torch.float16))
    assert "1023 groups, got 1024" in reasons(_spec(groups=1024, rows=1, n=8, k=8))
    assert "16 bytes" in reasons(_spec(k=63))
    assert "epilogue" in reasons(_spec(activation="relu"))
    batch = torch.zeros(2, 8, 8, dtype=torch.bfloat16)
    assert "not batched" in reasons(GroupedGemmProblem(batch, batch).spec)


def test_grouped_mm_needs_a_gpu_that_has_its_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (8, 0))
    assert "compute capability" in config.grouped_mm_reasons(_spec(), CUDA)[0]


def test_the_grouped_call_is_kept_from_addresses_it_faults_on() -> None:
    assert config.grouped_reasons(_spec()) == []
    assert "16 bytes" in config.grouped_reasons(_spec(k=63))[0]
    assert "int8" in config.grouped_reasons(_spec(dtype=torch.int8))[0]
    assert "float32" in config.grouped_reasons(_spec(activation="silu"))[0]
    assert config.grouped_reasons(_spec(dtype=torch.float32, activation="silu")) == []
    columns = torch.zeros(64, 256, dtype=torch.float32)
    by_rows = GroupedGemmProblem(torch.zeros(4, 64, 64), columns, sizes=[64] * 4, jagged="n").spec
    assert "16 bytes" in config.grouped_reasons(by_rows)[0]


@pytest.mark.usefixtures("hopper")
def test_sizes_are_read_back_only_where_a_call_needs_them() -> None:
    def reads(spec: ProblemSpec, variant: Any = "auto") -> bool:
        return launch.method(spec, Config(variant), CUDA).syncs

    aligned, odd = replace(_spec(), device_sizes=True), replace(_spec(k=63), device_sizes=True)
    assert not reads(aligned)
    assert not reads(aligned, "grouped_mm")
    assert reads(aligned, "batched")
    assert reads(odd)
    assert not reads(replace(odd, alpha="zero"))
    assert not reads(replace(odd, b=replace(odd.b, shared=True)))
    assert not reads(_spec(k=63))
    assert not reads(replace(odd, form="masked"), "batched")


@pytest.mark.usefixtures("hopper")
def test_every_candidate_is_valid_and_auto_comes_first() -> None:
    spec = _spec()
    found = choice.candidates(spec, CUDA)
    assert found[0] == Config("auto")
    assert {c.variant for c in found} == set(config.VARIANTS) - {"scaled_grouped_mm"}
    assert not any(choice.problem_with(c, spec, CUDA) for c in found)
    assert choice.problem_with(Config("loop", 2), spec, CUDA)
    assert "positive" in choice.problem_with(Config("streams"), spec, CUDA)
    assert "unknown" in choice.problem_with(Config(cast(Any, "magic")), spec, CUDA)


def test_plain_products_need_no_intermediate() -> None:
    assert config.plain(_spec())
    assert config.plain(_spec(out_dtype=torch.float32))
    assert not config.plain(_spec(out_dtype=torch.float16))
    bias = torch.zeros(64, dtype=torch.bfloat16)
    assert config.plain(_spec(bias=bias, out_dtype=torch.float32))
    assert not config.plain(_spec(bias=bias))
    assert not config.plain(_spec(bias=bias, out_dtype=torch.float32, activation="relu"))
    assert not config.plain(_spec(dtype=torch.float64, bias=torch.zeros(64), c=torch.zeros(256, 64).double(), beta=1.0))
    assert config.plain(_spec(dtype=torch.float64, c=torch.zeros(256, 64).double(), beta=1.0))
    assert not config.plain(_spec(c=torch.zeros(256, 64, dtype=torch.bfloat16), beta=1.0))
    assert config.result_type(_spec(activation="relu")) is torch.float32
    assert config.result_type(_spec(dtype=torch.float64, out_dtype=torch.bfloat16)) is torch.float64


def test_reasons_name_the_value_the_limit_and_the_remedy() -> None:
    assert "cpu" in BACKEND.not_supported_reasons(_spec(), CPU)[0]
    assert BACKEND.not_supported_reasons(_spec(), CUDA) == []
    assert BACKEND.not_supported_reasons(replace(_spec(), longest=EXTENT), CUDA) == []
    assert "split the problem" in BACKEND.not_supported_reasons(replace(_spec(), longest=EXTENT + 1), CUDA)[0]
    x, dy = torch.zeros(8, 16, dtype=torch.int8), torch.zeros(16, 8, dtype=torch.int8)
    spec = GroupedGemmProblem(x, dy, sizes=[8, 8], jagged="k").spec
    assert "multiple of 4" in BACKEND.not_supported_reasons(spec, CUDA)[0]


def test_compute_types_say_the_precision() -> None:
    single = _spec(dtype=torch.float32)
    assert library.compute_type(single) == 68
    assert library.compute_type(replace(single, precision="tf32")) == 77
    assert library.compute_type(replace(_spec(), precision="tf32")) == 68
    assert library.compute_type(_spec(dtype=torch.float64)) == 70
    assert library.compute_type(_spec(dtype=torch.int8)) == 72


# --- calls, and what surrounds them --------------------------------------------------------------


def test_grouped_mm_sees_legal_strides_on_single_rows() -> None:
    row = torch.zeros(1, 13)
    assert legal(row, True).stride() == (16, 1)
    assert legal(torch.zeros(13, 1), False).stride() == (1, 16)
    assert legal(torch.zeros(4, 24)[:, :13], True).stride() == (24, 1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("acc", "out"),
    [(torch.int32, torch.int32), (torch.float64, torch.bfloat16), (torch.bfloat16, torch.bfloat16)]
    + [(torch.float32, out) for out in (torch.float16, torch.bfloat16, torch.float64)],
)
def test_the_epilogue_compiles(monkeypatch: pytest.MonkeyPatch, acc: torch.dtype, out: torch.dtype) -> None:
    here = nvrtc_here()
    monkeypatch.setattr(nvrtc, "compiler", lambda: here)
    act = 1 if acc is torch.int32 else ACTIVATION_CODES["gelu"]
    extra = epilogue.TYPE_CODES[torch.int32 if acc is torch.int32 else torch.float16]
    codes = {"ACC": epilogue.TYPE_CODES[acc], "C": extra, "BIAS": extra, "OUT": epilogue.TYPE_CODES[out], "ACT": act}
    options = ("--gpu-architecture=sm_90", "--std=c++17", *(f"-D{k}={v}" for k, v in codes.items()), *epilogue.LAYOUT)
    assert nvrtc.compile_source(epilogue.FINISH, "finish", options)[:4] == b"\x7fELF"


def test_a_broken_kernel_shows_the_compilers_log(monkeypatch: pytest.MonkeyPatch) -> None:
    here = nvrtc_here()
    monkeypatch.setattr(nvrtc, "compiler", lambda: here)
    assert nvrtc.compile_source(epilogue.CLAMP_OFFSETS, "clamp_offsets", ("--gpu-architecture=sm_80",))
    with pytest.raises(CompileError, match="undefined_name"):
        nvrtc.compile_source("__global__ void f() { undefined_name; }", "f", ("--gpu-architecture=sm_80",))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_backend_says_why() -> None:
    state = BACKEND.availability()
    assert not state.ok
    assert state.reason
