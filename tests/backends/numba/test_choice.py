"""Which kernel the Numba backend picks, and why not a faster one: pure Python, no GPU, no Numba."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from multigemm.backend import Backend
from multigemm.backends.numba import BACKEND, choice, support
from multigemm.backends.numba.config import (
    FMA_SMALL,
    FMA_TALL,
    GENERIC,
    GENERIC_LARGE,
    GENERIC_LOW,
    HOPPER,
    MMA,
    MMA_SMALL,
    MMA_TALL,
    Config,
    GenericConfig,
    HopperConfig,
    MmaConfig,
    effective,
    signature_of,
)
from multigemm.errors import InvalidSetting
from multigemm.problem.spec import OperandSpec, ProblemSpec
from tests.support.python_process import run_python

GPU = torch.device("cuda", 0)
BF16 = OperandSpec(torch.bfloat16)


def spec(**changes: object) -> ProblemSpec:
    base = ProblemSpec(
        "jagged_m", 8, None, 1024, 512, 4096, 0, BF16, BF16, BF16, compute=torch.bfloat16, index=torch.int32
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def kernels(problem: ProblemSpec) -> list[str]:
    return [config.kernel for config in choice.candidates(problem, GPU)]


@pytest.mark.slow
def test_is_a_backend_and_imports_nothing_heavy() -> None:
    assert isinstance(BACKEND, Backend)
    program = "import sys, multigemm.backends.numba; print([m for m in ('numba', 'llvmlite') if m in sys.modules])"
    assert run_python("-c", program).stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("change", "first"),
    [
        ({"form": "batched", "groups": 4, "m": 1024, "n": 1024, "total": 4096}, GENERIC_LARGE),
        ({"form": "batched", "groups": 3, "m": 1001, "n": 777, "total": 3003}, GENERIC_LARGE),
        ({"form": "batched", "groups": 2, "m": 512, "n": 512, "total": 1024}, GENERIC),
        ({"form": "batched", "groups": 1, "m": 512, "n": 512, "total": 512}, GENERIC_LOW),
        ({"form": "jagged_n", "groups": 4, "m": 256, "n": None, "total": 1 << 17}, GENERIC_LARGE),
        ({"groups": 64, "n": 2048, "total": 256}, GENERIC_LOW),
        ({"form": "batched", "groups": 4, "m": 1024, "n": 1024, "total": 4096, "activation": "silu"}, GENERIC),
    ],
    ids=str,
)
def test_plain_cores_take_tiles_that_leave_no_multiprocessor_idle(
    change: dict[str, Any], first: GenericConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "capability_of", lambda _device: (7, 5))
    single = OperandSpec(torch.float32)
    found = choice.candidates(spec(compute=torch.float32, a=single, b=single, out=single, **change), GPU)
    assert found[0] == first and {GENERIC, GENERIC_LOW} <= set(found)


@pytest.mark.usefixtures("hopper")
def test_aligned_halves_go_to_wgmma_first_and_always_have_plain_cores_last() -> None:
    found = kernels(spec())
    assert found[0] == "hopper"
    assert found[-1] == "generic"
    assert "mma" in found


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "part"),
    [
        ({"a": replace(BF16, align=8)}, "aligned to 8 bytes"),
        ({"b": replace(BF16, order="strided")}, "not contiguous"),
        ({"a": replace(BF16, dense=False)}, "not contiguous"),
        ({"a": replace(BF16, order="col")}, "offsets cut"),
        ({"form": "jagged_n"}, "offsets cut"),
        ({"form": "jagged_k"}, "offsets cut"),
        ({"compute": torch.float32}, "does not run on these tensor cores"),
        ({"compute": torch.float32, "precision": "tf32"}, "contiguous along k"),
        ({"form": "jagged_k", "a": replace(BF16, order="col"), "total": 1 << 31}, "a jagged k reach 1073741824"),
        ({"groups": (1 << 29) + 1}, "record numbers 536870912"),
    ],
)
def test_obstacles_are_named(changes: dict[str, object], part: str) -> None:
    problem = spec(**changes)
    assert part in support.hopper_obstacle(problem, GPU)
    assert "hopper" not in kernels(problem)
    assert kernels(problem)[-1] == "generic"


@pytest.mark.usefixtures("hopper")
def test_weight_gradients_and_tf32_reach_wgmma_where_they_can() -> None:
    for total in (4096, 1 << 30):
        assert kernels(spec(form="jagged_k", a=replace(BF16, order="col"), total=total))[0] == "hopper"
    single = replace(BF16, dtype=torch.float32)
    problem = spec(compute=torch.float32, precision="tf32", a=single, b=replace(single, order="col"))
    assert kernels(problem)[0] == "hopper"


def product_of(dtype: torch.dtype, precision: str = "ieee", **changes: object) -> ProblemSpec:
    operand = OperandSpec(dtype)
    out = OperandSpec({torch.int8: torch.int32}.get(dtype, dtype))
    return spec(compute=dtype, precision=precision, a=operand, b=operand, out=out, **changes)


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("dtype", "precision", "tall", "small"),
    [
        (torch.float64, "ieee", MMA_TALL, MMA_SMALL),
        (torch.float32, "ieee", FMA_TALL, FMA_SMALL),
        (torch.float32, "tf32", MMA, MMA_SMALL),
        (torch.int8, "ieee", MMA, MMA_SMALL),
    ],
    ids=str,
)
def test_other_dtypes_take_the_tile_with_which_the_busiest_multiprocessor_has_least_to_do(
    dtype: torch.dtype, precision: str, tall: MmaConfig, small: MmaConfig
) -> None:
    """Tall ones where groups fill them and k is deep; small ones for few rows, and where tiles are few."""
    many = product_of(dtype, precision, groups=8, total=8192, n=2048, k=2048)
    low = product_of(dtype, precision, groups=32, total=320, n=1088, k=3456)
    few = product_of(dtype, precision, groups=1, total=512, n=512, k=2048)
    for problem, wanted in ((many, [tall, small]), (low, [small, tall]), (few, [small, tall])):
        found = choice.candidates(problem, GPU)
        assert found[:2] == wanted
        assert {config.kernel for config in found[2:]} == {"generic"}


def test_float32_that_begins_anywhere_stays_on_plain_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability_of", lambda _device: (9, 0))
    single = OperandSpec(torch.float32)
    for a, b, first in ((16, 16, "mma"), (4, 16, "generic"), (16, 8, "generic")):
        posed = replace(product_of(torch.float32), a=replace(single, align=a), b=replace(single, align=b))
        assert kernels(posed)[0] == first
    odd = replace(product_of(torch.float64), a=replace(OperandSpec(torch.float64), align=8))
    assert kernels(odd)[0] == "mma"


def test_older_gpus_get_what_they_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability_of", lambda _device: (8, 0))
    assert kernels(spec())[0] == "mma"
    assert kernels(product_of(torch.int8))[0] == "mma"
    assert kernels(product_of(torch.float32))[0] == "mma"
    assert set(kernels(product_of(torch.float64))) == {"generic"}
    assert "float64 needs compute capability (9, 0)" in support.mma_obstacle(product_of(torch.float64), GPU)
    monkeypatch.setattr(support, "capability_of", lambda _device: (7, 5))
    assert set(kernels(spec(compute=torch.float16))) == {"generic"}
    assert "bfloat16 needs" in support.not_supported_reasons(spec(), GPU)[0]


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("changes", "n_max", "cluster"),
    [
        ({"total": 8 * 300}, 256, 2),
        ({"total": 64 * 50, "groups": 64, "k": 4096}, 256, 2),
        ({"total": 64 * 50, "groups": 64, "k": 1024}, 128, 2),
        ({"total": 64 * 20, "groups": 64, "k": 4096}, 128, 1),
        ({"total": 8192, "n": 11 * 128}, 256, 1),
        ({"total": 8192, "n": 45 * 128}, 256, 2),
        ({"form": "jagged_k", "a": replace(BF16, order="col"), "m": 2048, "k": None, "total": 8192}, 256, 2),
        ({"form": "jagged_k", "a": replace(BF16, order="col"), "m": 2048, "k": None, "total": 800}, 256, 1),
    ],
)
def test_tiles_are_tall_and_shared_where_that_pays(changes: dict[str, Any], n_max: int, cluster: int) -> None:
    """Low for few rows, unless k is long; alone for few rows, few and odd blocks of columns, a short jagged k."""
    found = choice.candidates(spec(**changes), GPU)[0]
    assert isinstance(found, HopperConfig)
    assert (found.n_max, found.cluster) == (n_max, cluster)


@pytest.mark.parametrize(
    ("changes", "sent"),
    [
        ({}, True),
        ({"form": "masked", "m": 64}, True),
        ({"form": "jagged_k", "a": replace(BF16, order="col")}, True),
        ({"form": "jagged_n"}, False),
        ({"form": "per_group"}, False),
        ({"n": 1020}, False),
        ({"out": replace(BF16, align=8)}, False),
        ({"out": replace(BF16, order="col")}, False),
        ({"out": OperandSpec(torch.float32)}, False),
        ({"bias": torch.bfloat16}, False),
        ({"alpha": "other"}, False),
        ({"total": 1 << 31}, False),
    ],
)
def test_plain_results_in_lines_of_16_bytes_leave_by_the_copy_engine(changes: dict[str, Any], sent: bool) -> None:
    assert signature_of(spec(**changes)).sent == sent
    assert effective(HopperConfig(), signature_of(spec(**changes))).sent == sent
    assert not effective(MmaConfig(), signature_of(spec(**changes))).sent


def test_facts_that_a_kernel_ignores_do_not_compile_it_twice() -> None:
    one, two = signature_of(spec()), signature_of(spec(form="jagged_k", a=replace(BF16, align=2)))
    assert effective(GenericConfig(), one) == replace(effective(GenericConfig(), two), zero_unowned=one.zero_unowned)
    assert effective(MmaConfig(), one) != effective(MmaConfig(), two)
    assert effective(HopperConfig(), one).a_aligned


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "changes",
    [{}, {"n": 64}, {"c": BF16}, {"total": 64},
     {"compute": torch.float64}, {"compute": torch.float32}, {"compute": torch.int8}],
)  # fmt: skip
def test_every_candidate_can_run(changes: dict[str, object]) -> None:
    problem = spec(**changes)
    for config in choice.candidates(problem, GPU):
        assert choice.problem_with(config, problem, GPU) == ""


@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    ("config", "changes", "part"),
    [
        (GenericConfig(bm=7), {}, "not made of parts of 4 x 4"),
        (GenericConfig(tm=0), {}, "not made of parts of 0 x 4"),
        (GenericConfig(bn=-64), {}, "not made of parts"),
        (GenericConfig(bk=1), {}, "cannot share 64 x 1"),
        (GenericConfig(128, 128, 16, 2, 2), {}, "1024 threads at most"),
        (GenericConfig(256, 256, 32, 8, 8), {}, "shared memory exceed 49152"),
        (MmaConfig(bn=96), {}, "the kernel is made for MmaConfig(bm=128"),
        (MMA, {"compute": torch.float64}, "the kernel is made for MmaConfig(bm=128, bn=64"),
        (FMA_TALL, {}, "the kernel is made for MmaConfig(bm=128, bn=128"),
        (MMA_SMALL, {"compute": torch.float32}, "tensor=False"),
        (HOPPER, {"compute": torch.float64}, "does not run on these tensor cores"),
        (HopperConfig(n_max=100), {}, "the kernel is made for HopperConfig(n_max=256"),
        (HopperConfig(64, 8, 8, cluster=4), {}, "the kernel is made for"),
        (HOPPER, {"a": replace(BF16, align=8)}, "TMA needs 16"),
    ],
)
def test_configs_given_by_hand(config: Config, changes: dict[str, object], part: str) -> None:
    problem = spec(**changes)
    assert part in choice.problem_with(config, problem, GPU)
    with pytest.raises(InvalidSetting, match="cannot run this problem"):
        BACKEND.plan(problem, config, GPU)
