"""Each config of the cpu backend on every form, dtype, epilogue and layout, and in the corners of the contract."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backend import Backend
from multigemm.backends.cpu import BACKEND
from multigemm.backends.cpu.epilogue import store
from multigemm.errors import InvalidSetting
from multigemm.planning.staging import staged_spec
from multigemm.problem.spec import FORMS, Form
from multigemm.testing import DeviceCase, Layout, Limits, random_case
from multigemm.testing.deep_oracles import ORACLES, run_oracles, threads
from multigemm.testing.oracles import bind, inspect
from multigemm.testing.strategies import DTYPES, legal
from tests.model_mutants.faults import FUSED_HUNTING
from tests.support.cpu_cases import CPU, case_of, each_config, examine

FLOATS = DTYPES[:-1]
SORTS: dict[str, dict[str, Any]] = {
    "floats of 32 and 64 bits": {"dtypes": ("float32", "float64")},
    "floats of 16 bits": {"dtypes": ("bfloat16", "float16")},
    "int8": {"dtypes": ("int8",)},
    "quantised": {"quantised": 1},
}
LIMITS = Limits(work=1 << 15, groups=130)
COUNT, COUNT_FUSED = 40, 140


def test_it_is_a_backend_that_refuses_other_devices() -> None:
    spec = staged_spec(DeviceCase.from_case(case_of("batched"), CPU).problem)
    assert isinstance(BACKEND, Backend)
    assert BACKEND.availability().ok
    assert BACKEND.not_supported_reasons(spec, CPU) == []
    assert "cuda:0" in BACKEND.not_supported_reasons(spec, torch.device("cuda", 0))[0]
    with pytest.raises(InvalidSetting, match="Config"):
        BACKEND.plan(spec, 3, CPU)


# --- forms, dtypes, epilogues, layouts -------------------------------------------------------------------


def look_further(count: int, limits: Limits, **changes: Any) -> None:
    """Runs so many generated problems, with these changes, under each config, and each then under one of the costlier
    oracles."""
    oracles, met = list(ORACLES.values()), set[int]()
    for seed in range(count):
        case, chosen = legal(replace(random_case(seed, limits), **changes)), seed % len(oracles)
        for device_case, subject, outcome in examine(case):
            if run_oracles([oracles[chosen]], device_case, subject, outcome, seed):
                met.add(chosen)
            assert outcome.ok, f"{outcome.config} {case!r}\n{outcome.findings}"
    assert len(met) >= 2, "other contents, and the edge of memory"


@pytest.mark.slow
@pytest.mark.parametrize("sort", SORTS)
@pytest.mark.parametrize("form", FORMS)
def test_generated_problems(form: Form, sort: str) -> None:
    """Any layout, epilogue, result dtype and sizes; sizes and contents that change or lie; the edge of memory."""
    look_further(COUNT, replace(LIMITS, forms=(form,), **SORTS[sort]))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_generated_products_of_bfloat16(form: Form) -> None:
    """Without an epilogue, as the config bmm takes them."""
    plain = {"alpha": 1.0, "beta": 0.0, "c_dtype": "", "bias": "", "activation": None, "out_dtype": "", "alias": False}
    limits = replace(LIMITS, forms=(form,), dtypes=("bfloat16",))
    look_further(COUNT, limits, **plain, bias_dtype="", batch_invariant=False)


@pytest.mark.slow
@pytest.mark.parametrize("sort", ["plain", "quantised"])
def test_generated_fused_problems(sort: str) -> None:
    look_further(COUNT_FUSED, replace(FUSED_HUNTING, quantised=int(sort == "quantised")))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", "float64"])
def test_the_stride_of_an_extent_of_one_means_nothing(dtype: str) -> None:
    forms: tuple[Form, ...] = ("batched", "jagged_m")
    for form in forms:
        for device_case, subject in each_config(case_of(form, dtype, n=1, k=1)):
            for x in (device_case.problem.a, device_case.problem.b):
                assert isinstance(x, torch.Tensor)
                x.as_strided_(x.shape, (*x.stride()[:-1], 2**40))
            launch, _ = bind(device_case, subject)
            device_case.prefill(0)
            launch()
            assert mg.verify(device_case.problem, device_case.out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_sizes_that_take_different_paths(dtype: str) -> None:
    many = tuple(int(x) for x in np.random.default_rng(3).integers(0, 40, 70))
    for sizes in (many, (300, 1, 2, 260, 0, 3), (16,) * 65, (128, 120, 125), (1,) * 130, (600, *(4,) * 64)):
        for shared in (False, True):
            examine(case_of("jagged_m", dtype, sizes, n=65, k=70, shared=shared))


@pytest.mark.parametrize("k", [1023, 1024, 1025, 2500])
def test_int8_sums_are_exact_beyond_float32(k: int) -> None:
    a, b = (torch.full(shape, -128, dtype=torch.int8) for shape in ((2, 3, k), (2, k, 4)))
    a[1] = torch.randint(-128, 128, a[1].shape)
    b[0, k // 2] = 127
    problem = mg.GroupedGemmProblem(a, b)
    for config in BACKEND.configs(problem.spec, CPU):
        assert torch.equal(mg.plan(problem, "cpu", config)(), (a.long() @ b.long()).int())


def test_int8_wraps() -> None:
    a, b = (torch.full(shape, -128, dtype=torch.int8) for shape in ((1, 2, 131073), (1, 131073, 3)))
    assert int(mg.grouped_gemm(a, b, backend="cpu")[0, 0, 0]) == 131073 * 2**14 - 2**32
    examine(case_of("batched", "int8", alpha=2**31 - 3, beta=-(2**31) + 5, c_dtype="int32"))


# --- sizes -----------------------------------------------------------------------------------------------


def test_valid_rows_that_lie_are_clamped() -> None:
    honest = case_of("masked", lengths=(0, 6, 2))
    for device_case, subject in each_config(honest):
        region = device_case.placed.layout.index
        assert region is not None
        region.view(device_case.inputs).copy_(torch.tensor([-5, 1000, 2]))
        launch, _ = bind(device_case, subject)
        device_case.prefill(0)
        launch()
        region.view(device_case.inputs).copy_(torch.tensor([0, 8, 2]))
        assert mg.verify(device_case.problem, device_case.out)


@pytest.mark.parametrize("dtype", ["int8", "bfloat16", "float32", "float64"])
def test_operands_beyond_31_bits_are_not_copied_for_a_few_of_their_elements(dtype: str) -> None:
    """A copy would take 8 to 34 GB; these operands hold one element."""
    total = 2**31 + 5
    one = torch.ones(1, 1, dtype=getattr(torch, dtype))
    a, b = one.expand(2, total), one.expand(total, 3)
    out = mg.grouped_gemm(a, b, offsets=[total - 7, total - 3, total], jagged="k", backend="cpu")
    assert out[:, 0, 0].tolist() == [4, 3]


# --- values ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("k", [20, 33, 100])
def test_special_values_stay_in_their_rows_and_columns(dtype: str, k: int) -> None:
    for lengths in ((5, 0, 17, 1, 8), (3, 1, 0, 7) * 20, (40, 50, 33)):
        for seed in range(3):
            examine(case_of("jagged_m", dtype, lengths, mode="special", head=2, tail=2, k=k, n=40, seed=seed))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("sides", [(), ("a",), ("b",), ("a", "b"), ("out",)], ids=str)
def test_rows_and_columns_never_meet(form: Form, sides: tuple[str, ...]) -> None:
    """A vector unit that reads K in steps may read into the next row: its infinities must not get out, nor the NaN
    that lie behind each line."""
    for shared in (False, True) if form in ("jagged_m", "jagged_n") else (False,):
        for pad in (0, 40):
            layouts: dict[str, Any] = {x: Layout("col" if x in sides else "row", pad) for x in ("a", "b", "out")}
            rest: dict[str, Any] = {"mode": "special", "k": 33, "n": 40, "shared": shared, "given": True}
            examine(case_of(form, "bfloat16", (40, 50, 33), **layouts, **rest))


@pytest.mark.parametrize("activation", ["relu", "gelu", "gelu_tanh", "silu"])
def test_activations_of_special_values(activation: str) -> None:
    specials = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e30, -1e30])
    a, b = torch.empty(1, 1, 0), torch.empty(1, 0, 7)
    out = mg.grouped_gemm(a, b, bias=specials, activation=activation, backend="cpu")
    f = torch.nn.functional
    want = f.gelu(specials, approximate="tanh") if activation == "gelu_tanh" else getattr(f, activation)(specials)
    want[1] = float("inf")
    torch.testing.assert_close(out[0, 0], want, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("narrow", [torch.float16, torch.bfloat16])
def test_float64_rounds_once(narrow: torch.dtype) -> None:
    bits = -8 if narrow == torch.bfloat16 else -11
    above, below = 1 + 2.0**bits + 2.0**-40, 1 + 3 * 2.0**bits - 2.0**-40
    x = torch.tensor([above, below, -above, 1e300, -1e300, 1e-300, 0.0, float("inf"), float("nan"), 1 + 2.0**bits],
                     dtype=torch.float64)  # fmt: skip
    out = torch.empty(10, dtype=narrow)
    store(x, out)
    inf, step = float("inf"), 2 * 2.0**bits
    want = [1 + step, 1 + step, -1 - step, inf, -inf, 0.0, 0.0, inf, float("nan"), 1.0]
    torch.testing.assert_close(out.double(), torch.tensor(want, dtype=torch.float64), rtol=0, atol=0, equal_nan=True)
    gen = torch.Generator().manual_seed(0)
    many = torch.randn(4096, generator=gen, dtype=torch.float64) * torch.logspace(-9, 5, 4096, dtype=torch.float64)
    rounded = torch.empty(4096, dtype=torch.float16)
    store(many, rounded)
    with np.errstate(over="ignore"):
        assert np.array_equal(rounded.numpy(), many.numpy().astype(np.float16))


# --- the process around a launch -------------------------------------------------------------------------

GLOBAL_SWITCHES: dict[str, Callable[[], object]] = {
    "matmul_precision": lambda: torch.set_float32_matmul_precision("medium"),
    "default_dtype": lambda: torch.set_default_dtype(torch.float64),
    "default_device": lambda: torch.set_default_device("meta"),
}


@contextmanager
def switched(switch: str) -> Iterator[None]:
    GLOBAL_SWITCHES[switch]()
    try:
        yield
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("switch", GLOBAL_SWITCHES)
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_global_switches_change_nothing(switch: str, dtype: str) -> None:
    for lengths in ((64, 64, 64), (100, 7, 61)):
        for device_case, subject, outcome in examine(case_of("jagged_m", dtype, lengths, n=64, k=128)):
            bound, _ = bind(device_case, subject)
            with switched(switch):
                for launch in (bind(device_case, subject)[0], bound):
                    device_case.outputs.copy_(device_case.prefills[0])
                    launch()
                    got = device_case.outputs.clone()
                    if switch == "matmul_precision" and outcome.config.kernel == "blas":
                        continue  # by the loop, which may add up in another order
                    assert outcome.result is not None and torch.equal(got, outcome.result)
            inspect(device_case.placed, got, device_case.prefills[0], outcome)
            assert outcome.ok, outcome.findings


def test_autocast_and_gradients_are_left_alone() -> None:
    for device_case, subject in each_config(case_of("jagged_m", lengths=(64, 64), n=64, k=64, activation="silu")):
        a, b, out = device_case.problem.a, device_case.problem.b, device_case.out
        assert isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and isinstance(out, torch.Tensor)
        a.requires_grad_()
        b.requires_grad_()
        with torch.autocast("cpu", torch.bfloat16):
            bind(device_case, subject)[0]()
        assert not out.requires_grad
        assert mg.verify(device_case.problem, out)


def test_inference_tensors() -> None:
    for dtype in ("float32", "bfloat16", "float16"):
        with torch.inference_mode():
            made = list(each_config(case_of("jagged_m", dtype)))
        for device_case, subject in made:
            bind(device_case, subject)[0]()
            assert mg.verify(device_case.problem, device_case.out)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_several_threads_and_bound_launches_share_nothing(dtype: str) -> None:
    for device_case, subject, outcome in examine(case_of("jagged_m", dtype, (30, 0, 2, 64, 5) * 4, n=40)):
        threads(device_case, subject, outcome, times=10)
        assert outcome.ok, outcome.findings
    pairs = zip(
        *(each_config(case_of("jagged_m", dtype, beta=1.0, c_dtype=dtype, seed=seed)) for seed in (0, 9)), strict=True
    )
    for (one, subject), (two, _) in pairs:
        launches = [(each, bind(each, subject)[0]) for each in (one, two)]
        for device_case, launch in (*launches, launches[0]):
            launch()
            assert mg.verify(device_case.problem, device_case.out)


def test_threads_of_torch_are_left_alone() -> None:
    before = torch.get_num_threads()
    examine(case_of("jagged_m", lengths=(9,) * 70))
    assert torch.get_num_threads() == before
