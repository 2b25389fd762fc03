"""Fused problems on the generic kernel and the sum of rows, which run on the CPU from their own sources."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import hopper
from multigemm.backends.cupy.config import Config
from multigemm.planning.fused import products_spec
from multigemm.planning.staging import staged_spec
from multigemm.testing.fused_problems import check, random_problem
from tests.backends.cupy import emulation
from tests.support.fused_layers import layer_problem

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not emulation.can_run(), reason="needs g++ on x86-64")]
PROBLEMS, ON_HOPPER, LAYOUTS = 30, 12, 4


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


@pytest.mark.parametrize(
    "config",
    [configs.GATED[0], configs.GATED[3], configs.GATHERED[1], configs.WIDE, configs.GATHERED_TOGETHER[2]],
    ids=lambda c: f"{c.kernel}-{c.rows}x{c.cluster}{'-turns' if c.pingpong else ''}",
)
def test_problems_of_layers_on_hopper(config: Config) -> None:
    """Threads and copies come in a random order."""
    backend, ran, layouts = emulation.EmulatedBackend(config), 0, set[Any]()
    for seed in range(2000):
        drawn = layer_problem(seed, largest=140)
        spec = staged_spec(drawn.problem)
        if backend.not_supported_reasons(spec, torch.device("cpu")):
            continue
        source = hopper.source(products_spec(spec), config)
        if len(layouts) == LAYOUTS and source not in layouts:
            continue
        layouts.add(source)
        assert check(drawn, backend) == [], (seed, drawn.traits)
        ran += 1
        if ran == ON_HOPPER:
            break
    assert ran == ON_HOPPER
