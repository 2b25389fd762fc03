"""Problems of every form, bound as far as the driver's door, for tests of the cupy backend without a GPU."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import build, generic, hopper, launch, small_list
from multigemm.backends.cupy.config import Config
from multigemm.backends.cupy.launch import KERNELS
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.spec import OperandSpec, ProblemSpec
from tests.support import cuda_driver
from tests.support.cuda_driver import FakeDriver

GPU = torch.device("cuda", 0)
BF16 = OperandSpec(torch.bfloat16)
SPEC = ProblemSpec("jagged_m", 32, None, 4096, 7168, 8192, 0, BF16, BF16, BF16, compute=torch.bfloat16)


ODD = {"a": replace(BF16, align=2), "b": replace(BF16, align=2)}


def batch(**change: object) -> ProblemSpec:
    return replace(replace(SPEC, form="batched", groups=4), **change)  # type: ignore[arg-type]


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """The fake driver as a Hopper GPU, for which kernels compile to their names."""
    fake = cuda_driver.install(monkeypatch)
    monkeypatch.setattr(build, "_loaded", {})
    launch._load_layout.cache_clear()
    monkeypatch.setattr(build, "cubin_of", lambda source, arch: source.entry.encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (hopper, generic, small_list):
        monkeypatch.setattr(module, "processors", lambda index: 132)
    return fake


def bound(config: Config, ops: Operands) -> Any:
    """A launch of the kernel that a config names."""
    return KERNELS[config.kernel].loaded(ops.spec, config, 0).bind(ops)


def staged(problem: mg.GroupedGemmProblem) -> Operands:
    """A problem as `bind` sees it."""
    return stage(problem, staged_spec(problem), allocate(problem)).ops


def operands(form: str) -> Operands:
    """One small problem of a form on the CPU."""
    half = partial(torch.zeros, dtype=torch.bfloat16)
    x, w = half(48, 64), half(3, 64, 128)
    ends = torch.tensor([8, 24, 48])
    problem = {
        "jagged_m": lambda: mg.GroupedGemmProblem(x, w, ends=ends),
        "jagged_n": lambda: mg.GroupedGemmProblem(w.mT.contiguous(), x.T.contiguous(), ends=ends, jagged="n"),
        "jagged_k": lambda: mg.GroupedGemmProblem(x.T, torch.zeros_like(x), ends=ends, jagged="k"),
        "batched": lambda: mg.GroupedGemmProblem(torch.zeros(3, 16, 64, dtype=torch.bfloat16), w),
        "masked": lambda: mg.GroupedGemmProblem(
            torch.zeros(3, 16, 64, dtype=torch.bfloat16), w, valid_rows=torch.tensor([1, 0, 16])
        ),
        "odd batch": lambda: mg.GroupedGemmProblem(half(3, 64, 63), half(3, 63, 128)),
        "twice": lambda: mg.GroupedGemmProblem(w, w.mT),
        "epilogue": lambda: mg.GroupedGemmProblem(
            x, w, offsets=torch.tensor([0, 8, 24, 48]), alpha=0.5, beta=2.0, c=half(48, 128), bias=half(3, 128),
            activation="relu",
        ),
        "per_group": lambda: mg.GroupedGemmProblem([x, x[:8]], [w[0], w[0]]),
        "odd list": lambda: mg.GroupedGemmProblem([half(48, 63), half(8, 61)], [half(63, 101), half(61, 128)]),
        "odd weights": lambda: mg.GroupedGemmProblem(x, w[:, :, 1:], ends=ends),
        "odd": lambda: mg.GroupedGemmProblem(torch.zeros(48, 63, dtype=torch.bfloat16), w[:, :63], ends=ends),
    }[form]()  # fmt: skip
    return staged(problem)
