"""Fused problems on the generic kernel and the sum of rows, which run on the CPU from their own sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config
from multigemm.planning.staging import staged_spec
from multigemm.testing.fused_problems import check, random_problem
from tests.backends.cupy import emulation

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not emulation.can_run(), reason="needs g++ on x86-64")]
PROBLEMS = 30


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulation.install(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        (torch.bfloat16, configs.GENERIC_64), (torch.float16, configs.GENERIC), (torch.float32, configs.GENERIC_32),
        (torch.float64, configs.GENERIC_64),
    ],
    ids=["bf16", "fp16", "fp32", "fp64"],
)  # fmt: skip
def test_random_problems(dtype: torch.dtype, config: Config) -> None:
    backend, ran, layouts = emulation.EmulatedBackend(config), 0, set[Any]()
    for seed in range(4000):
        drawn = random_problem(seed)
        spec = staged_spec(drawn.problem)
        layout = spec.a.order == "col", spec.b.order == "col"
        if spec.compute != dtype or (len(layouts) == 2 and layout not in layouts):
            continue
        if backend.not_supported_reasons(spec, torch.device("cpu")):
            continue
        layouts.add(layout)
        assert check(drawn, backend) == [], seed
        ran += 1
        if ran == PROBLEMS:
            break
    assert ran == PROBLEMS
