"""On a GPU: configs of our backends, whichever is chosen first, on fixed problems under every oracle: the answer, what
no group owns, sizes that change or lie, other streams, graphs, threads. Launches that are moved to other operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from multigemm.backends.cublas import choice as cublas_choice
from multigemm.backends.cublas.config import Config as CublasConfig
from multigemm.backends.numba import choice as numba_choice
from multigemm.backends.numba import config as numba
from multigemm.planning.staging import stage, staged_spec
from multigemm.problem.spec import ProblemSpec
from multigemm.testing import Case, DeviceCase, Outcome, Scale, Subject, check
from multigemm.testing.case import Layout
from multigemm.testing.deep_oracles import GPU_ORACLES, ORACLES, THREAD_ORACLES, run_oracles
from multigemm.testing.oracles import fetch, inspect
from multigemm.testing.placed_case import spec_of
from tests.support.cuda_driver import addresses_of

CUBLAS = (CublasConfig("auto"), CublasConfig("loop"), CublasConfig("batched"), CublasConfig("streams", 3),
          CublasConfig("grouped"), CublasConfig("grouped_mm"), cublas_choice.SCALED)  # fmt: skip
NUMBA = (numba.GENERIC, numba.GENERIC_LARGE, numba.GENERIC_LOW, numba.MMA, numba.MMA_SMALL, numba.MMA_TALL,
         numba.FMA_TALL, numba.FMA_SMALL, numba.HOPPER, numba.HOPPER_MEDIUM, numba.HOPPER_NARROW,
         *(replace(x, cluster=1) for x in (numba.HOPPER, numba.HOPPER_MEDIUM, numba.HOPPER_NARROW)), numba.QUANTISED,
         numba.QUANTISED_FEW, numba.FLOAT8_TALL, numba.FLOAT8_MEDIUM, numba.FLOAT8_LOW)  # fmt: skip
FIXED: dict[str, tuple[Any, ...]] = {"cublas": CUBLAS, "numba": NUMBA}
"""Whose configs are tried whether they are offered or not."""
Problem = Callable[[Any, ProblemSpec, torch.device], str]
PROBLEM_WITH: dict[str, Problem] = {"cublas": cublas_choice.problem_with, "numba": numba_choice.problem_with}
TURNED, APART = Layout("col"), Layout(step=2)
EPILOGUE: dict[str, Any] = {"alpha": 0.5, "beta": -1.5, "c_dtype": "float32", "bias": "n", "bias_dtype": "float32",
                            "mode": "normal"}  # fmt: skip
JAGGED: dict[str, Any] = {"dtype": "bfloat16", "lengths": (5, 0, 40, 1, 90), "head": 3, "tail": 7}
DIMS = ((40, 136, 104), (0, 24, 16), (72, 8, 264), (16, 152, 0), (200, 64, 64))


def along_m(**more: Any) -> Case:
    return Case(form="jagged_m", **{**JAGGED, "n": 136, "k": 104, **more})


def along_k(**more: Any) -> Case:
    return Case(form="jagged_k", **{**JAGGED, "m": 104, "n": 136, "a": TURNED, **more})


def in_float8(a: str, b: str, **more: Any) -> Case:
    """Operands that are contiguous along k, in lines at multiples of 16 bytes; their scales cover `a` and `b`."""
    scales: dict[str, Any] = {"scale_a": Scale(a), "scale_b": Scale(b)}
    lines: dict[str, Any] = {"a": Layout("row", pad=-16), "b": Layout("col", pad=-16)}
    return Case(
        **{"form": "jagged_m", **JAGGED, "n": 136, "k": 300, **scales, **lines, **more, "dtype": "float8_e4m3fn"}
    )


def a_list(dtype: str, **more: Any) -> Case:
    return Case(form="per_group", dtype=dtype, dims=DIMS, **more)


CASES = {
    "m": along_m(),
    "m, ends": along_m(kind="ends", head=0, index="int32"),
    "m, sizes": along_m(kind="sizes", head=0),
    "m, sizes on the host": along_m(kind="sizes", head=0, where="list"),
    "m, offsets on the host": along_m(where="list"),
    "m, a given result": along_m(given=True),
    "m, a given result, offsets on the host": along_m(given=True, where="list"),
    "m, in place": along_m(given=True, alias=True, beta=1.0, c_dtype="bfloat16"),
    "m, epilogue": along_m(**EPILOGUE, activation="gelu"),
    "m, epilogue, offsets on the host": along_m(**EPILOGUE, activation="silu", where="list"),
    "m, float32, bias": along_m(dtype="float32", bias="n", bias_dtype="float32", alpha=0.5),
    "m, float32, bias, offsets on the host": along_m(dtype="float32", bias="n", bias_dtype="float32", where="list"),
    "m, odd": along_m(n=19, k=21),
    "m, weights along k": along_m(b=TURNED, activation="gelu_tanh", mode="normal"),
    "m, one weight": along_m(shared=True),
    "m, many columns": along_m(n=264, k=136),
    "m, few columns": along_m(n=72),
    "m, few rows": along_m(kind="sizes", head=0, n=384, lengths=(1, 0, 8, 9, 16, 2, 0, 23, 1)),
    "m, rows across k": along_m(a=TURNED, n=264),
    "m, rows across k, odd": along_m(a=TURNED, n=263),
    "m, odd weights along k": along_m(b=Layout("col", pad=1, shift=1), n=264),
    "m, long and odd": along_m(dtype="float16", n=263, k=137),
    **{f"m, {name}": along_m(dtype=name, n=263, k=137) for name in ("int8", "float32", "float64")},
    **{f"m, {name}, turned": along_m(dtype=name, a=TURNED, b=TURNED, n=264, k=144) for name in ("int8", "float32")},
    "m, float32, k apart": along_m(dtype="float32", a=APART, b=APART),
    "m, float64, epilogue": along_m(
        **{**EPILOGUE, "bias_dtype": "float64", "c_dtype": "float64"}, dtype="float64", b=TURNED, activation="silu"
    ),
    "m, tf32, along k": along_m(dtype="float32", precision="tf32", b=TURNED),
    "m, tf32, turned, odd": along_m(
        dtype="float32",
        precision="tf32",
        a=TURNED,
        b=TURNED,
        n=263,
        k=137,
        bias="n",
        bias_dtype="float32",
        activation="relu",
    ),
    "m, alpha 0": along_m(alpha=0.0, mode="special"),
    "n": Case(form="jagged_n", **{**JAGGED, "m": 72, "k": 104, "a": TURNED}),
    "n, odd": Case(form="jagged_n", **{**JAGGED, "m": 71, "k": 135}),
    "n, float32": Case(form="jagged_n", **{**JAGGED, "dtype": "float32", "m": 71, "k": 135}),
    "k": along_k(),
    "k, few columns": along_k(m=264, n=72),
    "k, float32, epilogue": along_k(
        dtype="float32", m=263, n=135, alpha=0.5, bias="gn", bias_dtype="float32", activation="gelu"
    ),
    "k, tf32": along_k(dtype="float32", precision="tf32", m=264),
    "k, int8": along_k(dtype="int8", m=144, n=272),
    "k, offsets on the host": along_k(where="list"),
    "k, ends, odd": along_k(kind="ends", head=0, m=19, n=11),
    "k, a given result": along_k(given=True, where="list"),
    "batched": Case(form="batched", dtype="bfloat16", m=72, n=136, k=104, lengths=(0, 0, 0)),
    "batched, odd": Case(form="batched", dtype="bfloat16", m=301, n=263, k=135, lengths=(0, 0, 0)),
    "batched, float64": Case(form="batched", dtype="float64", m=70, n=90, k=50, lengths=(0, 0)),
    "batched, tf32": Case(form="batched", dtype="float32", precision="tf32", m=150, n=190, k=50, lengths=(0, 0)),
    "masked": Case(form="masked", dtype="bfloat16", m=72, n=136, k=104, lengths=(5, 0, 72)),
    "masked, epilogue": Case(
        form="masked",
        dtype="bfloat16",
        m=300,
        n=264,
        k=136,
        lengths=(0, 300, 77),
        bias="n",
        bias_dtype="bfloat16",
        activation="relu",
    ),
    "masked, a given result": Case(form="masked", dtype="float16", m=8, n=64, k=512, lengths=(8, 0, 3), given=True),
    "m, float8, blocks": in_float8("1x128", "128x128", lengths=(5, 0, 330, 129, 64)),
    "m, float8, rows": in_float8("row", "row", dtype_b="float8_e5m2", lengths=(200, 0, 1)),
    "m, float8, epilogue": in_float8(
        "1x128", "group", **{**EPILOGUE, "mode": "int"}, out_dtype="float32", activation="silu"
    ),
    "m, float8, odd": in_float8("", "tensor", n=19, k=21, out_dtype="float16"),
    "m, float8, one weight": in_float8("row", "128x128", shared=True),
    "masked, float8": in_float8("128x128", "row", form="masked", m=200, lengths=(5, 0, 200), scale_b=Scale("tensor")),
    "n, float8": in_float8("128x128", "tensor", form="jagged_n", m=150, lengths=(5, 0, 130)),
    "list": a_list("bfloat16"),
    "list, odd lines of the result": a_list("bfloat16", out=Layout(pad=3), given=True),
    "list, odd": Case(form="per_group", dtype="bfloat16", dims=((300, 263, 65), (5, 7, 127), (0, 16, 8))),
    "list, epilogue": a_list("float16", **EPILOGUE, activation="relu"),
    **{f"list, {name}": a_list(name) for name in ("int8", "float32", "float64")},
    **{f"list, {name}, turned": a_list(name, a=TURNED, b=TURNED) for name in ("int8", "float32", "float64")},
    "list, tf32": a_list("float32", precision="tf32", mode="normal"),
    "list, tf32, turned": a_list("float32", precision="tf32", mode="normal", a=TURNED, b=TURNED),
}
SHALLOW = ("edge of memory",)
"""Oracles that need memory of their own: a campaign has it."""


def examine(subject: Subject, case: Case, device: torch.device, deep: bool = True) -> list[str]:
    """What is found wrong with a case that the subject's config runs; if `deep`, under every oracle."""
    device_case = DeviceCase.from_case(case, device)
    outcome = check(device_case, subject)
    if deep and not outcome.findings:
        named = ORACLES | THREAD_ORACLES | (GPU_ORACLES if device.type == "cuda" else {})
        run_oracles((oracle for name, oracle in named.items() if name not in SHALLOW), device_case, subject, outcome)
    return [*map(str, outcome.findings), *outcome.refusals]


def configs_of(subject: Subject, spec: ProblemSpec, device: torch.device, name: str) -> dict[Any, bool]:
    """The configs of a backend for a case, and whether every oracle sees them: of many that are offered it sees the
    first, the last and one in turn, and the others of triton, whose kernels take seconds to compile, are left out."""
    if subject.name in FIXED:
        problem_with = PROBLEM_WITH[subject.name]
        return {config: True for config in FIXED[subject.name] if not problem_with(config, spec, device)}
    offered = subject.configs(spec, device)
    deep = offered[0], offered[[*CASES].index(name) % len(offered)], offered[-1]
    return {config: config in deep for config in (deep if subject.name == "triton" else offered)}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("backend", ["cublas", "numba", "cupy", "triton"])
def test_every_config_under_every_oracle(backend: str, name: str) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    spec = DeviceCase.from_case(CASES[name], device).problem.spec
    if refused := Subject(backend).refusals(spec, device):
        pytest.skip(f"{backend} refuses it: {refused[0]}")
    configs = configs_of(Subject(backend), spec, device, name)
    assert configs
    for config, deep in configs.items():
        subject = Subject(backend)
        subject.pin(config)  # a relation may make a problem of it that needs another config
        assert str(subject.recipe(spec, device).config) == str(config)
        assert examine(subject, CASES[name], device, deep) == [], config


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.form != "per_group"])
@pytest.mark.parametrize("backend", ["cupy", "triton"])
def test_a_launch_follows_its_operands(backend: str, name: str) -> None:
    """Bound to some operands and moved to others of the same class."""
    subject, device = Subject(backend), torch.device("cuda", torch.cuda.current_device())
    here, there = (DeviceCase.from_case(replace(CASES[name], seed=seed), device) for seed in (1, 2))
    spec = staged_spec(here.problem)
    first, second = (stage(x.problem, spec, x.out) for x in (here, there))
    for config in configs_of(subject, spec, device, name):
        launch: Any = subject.backend.plan(spec, config, device).bind(first.ops)
        if not hasattr(launch, "move"):
            continue
        launch()
        there.prefill(0)
        for step in second.before:
            step()
        launch.move(addresses_of(second.ops))
        launch()
        outcome = Outcome(backend, config=config)
        inspect(there.placed, fetch(there), there.placed.prefills[0], outcome)
        assert outcome.ok, (config, outcome.findings)


def test_every_config_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU that has all kernels, none is left out for want of a problem that it runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    specs, device = [spec_of(case) for case in CASES.values()], torch.device("cuda", 0)
    for backend, configs in FIXED.items():
        for config in configs:
            assert any(not PROBLEM_WITH[backend](config, spec, device) for spec in specs), config


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_right(name: str) -> None:
    """The cpu backend stands for one that is right."""
    assert examine(Subject("cpu"), CASES[name], torch.device("cpu")) == []
