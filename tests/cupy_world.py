"""A driver that only counts, and problems of every form, for tests of the cupy backend without a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import (
    driver,
    hopper,
    tensor_maps,
    wave,
)
from multigemm.cuda import counters
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.spec import OperandSpec, ProblemSpec

GPU = torch.device("cuda", 0)
WAVE_KERNELS = {(config, slots): 2 for config in configs.WAVES[1:] for slots in wave.SLOTS}
BF16 = OperandSpec(torch.bfloat16)
SPEC = ProblemSpec("jagged_m", 32, None, 4096, 7168, 8192, 0, BF16, BF16, BF16, compute=torch.bfloat16)


ODD = {"a": replace(BF16, align=2), "b": replace(BF16, align=2)}


def batch(**change: object) -> ProblemSpec:
    return replace(replace(SPEC, form="batched", groups=4), **change)  # type: ignore[arg-type]


class FakeDriver:
    """Answers every driver call with success, counts the calls and remembers which kernels were launched."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.launched: list[int] = []
        self.capturing = False

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*args: Any) -> int:
            self.calls.append(name)
            if name == "cuOccupancyMaxActiveClusters":
                args[0]._obj.value = 66
            if name == "cuLaunchKernelEx":
                self.launched.append(args[1].value)
            return 0

        return call


def install(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    """Binding and launching on CPU tensors, as far as the driver's door."""
    fake = FakeDriver()
    monkeypatch.setattr(driver, "library", lambda: fake)
    monkeypatch.setattr(tensor_maps, "library", lambda: fake)
    pool = (torch.zeros(24, dtype=torch.int32), deque(range(3)))
    monkeypatch.setattr(counters, "pool", lambda index, size: pool)
    monkeypatch.setattr(
        counters.Words, "_own", staticmethod(lambda index, words: torch.zeros(words, dtype=torch.int32))
    )
    monkeypatch.setattr(torch._C, "_cuda_isCurrentStreamCapturing", lambda: fake.capturing, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 7, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)
    hopper._packed_maps.cache_clear()
    driver.resident_clusters.cache_clear()
    return fake


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
        "per_group": lambda: mg.GroupedGemmProblem([x, x[:8]], [w[0], w[0]]),
        "odd list": lambda: mg.GroupedGemmProblem([half(48, 63), half(8, 61)], [half(63, 101), half(61, 128)]),
        "odd weights": lambda: mg.GroupedGemmProblem(x, w[:, :, 1:], ends=ends),
        "odd": lambda: mg.GroupedGemmProblem(torch.zeros(48, 63, dtype=torch.bfloat16), w[:, :63], ends=ends),
    }[form]()
    return stage(problem, staged_spec(problem), allocate(problem)).ops
