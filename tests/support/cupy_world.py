"""Problems of every form, bound as far as the driver's door, for tests of the cupy backend without a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from multigemm.backends.cupy import build, generic, hopper, hopper_fp8, launch, small_list
from multigemm.backends.cupy.config import Config
from multigemm.cuda.device import memory_rate
from multigemm.planning.operands import Operands
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
    memory_rate.cache_clear()
    monkeypatch.setattr(build, "cubin_of", lambda source, arch: source.entry.encode())
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    for module in (hopper, hopper_fp8, generic, small_list):
        monkeypatch.setattr(module, "processors", lambda index: 132)
    return fake


def bound(config: Config, ops: Operands) -> Any:
    """A launch of the kernel that a config names."""
    return launch.KERNELS[config.kernel].loaded(ops.spec, config, 0).bind(ops)
