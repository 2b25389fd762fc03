"""Fused problems on the generic kernel and the sum of rows, which run on the CPU from their own sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config
from multigemm.testing import DeviceCase, Subject, check
from multigemm.testing.placed_case import spec_of
from tests.backends.cupy import emulation
from tests.support.fused_cases import CPU, FUSED, fused_cases

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not emulation.can_run(), reason="needs g++ on x86-64")]
PROBLEMS = 30


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulation.install(monkeypatch, tmp_path)


@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("bfloat16", configs.GENERIC_64), ("float16", configs.GENERIC), ("float32", configs.GENERIC_32),
        ("float64", configs.GENERIC_64),
    ],
    ids=["bf16", "fp16", "fp32", "fp64"],
)  # fmt: skip
def test_random_problems(dtype: str, config: Config) -> None:
    """Of two layouts, each of which is compiled once."""
    backend, ran, layouts = emulation.EmulatedBackend(config), 0, set[Any]()
    for case in fused_cases(4000, limits=replace(FUSED, dtypes=(dtype,))):
        spec = spec_of(case)
        layout = spec.a.order == "col", spec.b.order == "col"
        if (len(layouts) == 2 and layout not in layouts) or backend.not_supported_reasons(spec, CPU):
            continue
        layouts.add(layout)
        outcome = check(DeviceCase.from_case(case, CPU), Subject(backend))
        assert outcome.ran and outcome.ok, (case, outcome)
        ran += 1
        if ran == PROBLEMS:
            break
    assert ran == PROBLEMS
