"""On a GPU: every config of the cublas and numba backends, whichever is chosen first, on fixed problems under every
oracle: the answer, what no group owns, sizes that change or lie, other streams, graphs, threads."""

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
from multigemm.problem.spec import ProblemSpec
from multigemm.testing import Case, DeviceCase, Scale, Subject, check
from multigemm.testing.case import Layout
from multigemm.testing.deep_oracles import GPU_ORACLES, ORACLES, THREAD_ORACLES, run_oracles
from multigemm.testing.placed_case import spec_of

CUBLAS = (CublasConfig("auto"), CublasConfig("loop"), CublasConfig("batched"), CublasConfig("streams", 3),
          CublasConfig("grouped"), CublasConfig("grouped_mm"))  # fmt: skip
NUMBA = (numba.GENERIC, numba.GENERIC_LARGE, numba.GENERIC_LOW, numba.MMA, numba.MMA_SMALL, numba.MMA_TALL,
         numba.FMA_TALL, numba.FMA_SMALL, numba.HOPPER, numba.HOPPER_MEDIUM, numba.HOPPER_NARROW,
         *(replace(x, cluster=1) for x in (numba.HOPPER, numba.HOPPER_MEDIUM, numba.HOPPER_NARROW)), numba.QUANTISED,
         numba.QUANTISED_FEW, numba.FLOAT8_TALL, numba.FLOAT8_MEDIUM, numba.FLOAT8_LOW)  # fmt: skip
WAYS = [*(("cublas", config) for config in CUBLAS), *(("numba", config) for config in NUMBA)]
Problem = Callable[[Any, ProblemSpec, torch.device], str]
PROBLEM_WITH: dict[str, Problem] = {"cublas": cublas_choice.problem_with, "numba": numba_choice.problem_with}
TURNED = Layout("col")
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
    "m, alpha 0": along_m(alpha=0.0, mode="special"),
    "n": Case(form="jagged_n", **{**JAGGED, "m": 72, "k": 104, "a": TURNED}),
    "k": along_k(),
    "k, offsets on the host": along_k(where="list"),
    "k, ends, odd": along_k(kind="ends", head=0, m=19, n=11),
    "k, a given result": along_k(given=True, where="list"),
    "batched": Case(form="batched", dtype="bfloat16", m=72, n=136, k=104, lengths=(0, 0, 0)),
    "masked": Case(form="masked", dtype="bfloat16", m=72, n=136, k=104, lengths=(5, 0, 72)),
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
    "list, epilogue": a_list("float16", **EPILOGUE, activation="relu"),
    **{f"list, {name}": a_list(name) for name in ("int8", "float32", "float64")},
    **{f"list, {name}, turned": a_list(name, a=TURNED, b=TURNED) for name in ("int8", "float32", "float64")},
    "list, tf32": a_list("float32", precision="tf32", mode="normal"),
    "list, tf32, turned": a_list("float32", precision="tf32", mode="normal", a=TURNED, b=TURNED),
}
SHALLOW = ("edge of memory",)
"""Oracles that need memory of their own: a campaign has it."""


def examine(subject: Subject, case: Case, device: torch.device) -> list[str]:
    """What is found wrong with a case that the subject's config runs."""
    device_case = DeviceCase.from_case(case, device)
    outcome = check(device_case, subject)
    if not outcome.findings:
        named = ORACLES | THREAD_ORACLES | (GPU_ORACLES if device.type == "cuda" else {})
        run_oracles((oracle for name, oracle in named.items() if name not in SHALLOW), device_case, subject, outcome)
    return [*map(str, outcome.findings), *outcome.refusals]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(("backend", "config"), WAYS, ids=str)
def test_every_config_under_every_oracle(backend: str, config: Any, name: str) -> None:
    subject, device = Subject(backend), torch.device("cuda", torch.cuda.current_device())
    spec = DeviceCase.from_case(CASES[name], device).problem.spec
    if problem := PROBLEM_WITH[backend](config, spec, device):
        pytest.skip(problem)
    subject.pin(config)  # a relation may make a problem of it that needs another config
    assert str(subject.recipe(spec, device).config) == str(config)
    assert examine(subject, CASES[name], device) == []


def test_every_config_has_a_case(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the GPU that has all kernels, none is left out for want of a problem that it runs."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    specs, device = [spec_of(case) for case in CASES.values()], torch.device("cuda", 0)
    for backend, config in WAYS:
        assert any(not PROBLEM_WITH[backend](config, spec, device) for spec in specs), config


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_cases_are_right(name: str) -> None:
    """The cpu backend stands for one that is right."""
    assert examine(Subject("cpu"), CASES[name], torch.device("cpu")) == []
