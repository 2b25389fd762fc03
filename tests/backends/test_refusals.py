"""What cupy and numba refuse, in words that name what was seen and what to do: no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from multigemm.backends.cupy import BACKEND as CUPY
from multigemm.backends.numba import BACKEND as NUMBA
from multigemm.backends.numba import support
from multigemm.problem.spec import GIANT, OperandSpec
from multigemm.settings import settings
from tests.support.cupy_world import GPU, SPEC


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(support, "capability_of", lambda device: (9, 0))


@pytest.mark.parametrize("backend", [CUPY, NUMBA], ids=lambda backend: backend.name)
@pytest.mark.parametrize(
    ("change", "refused"),
    [
        ({"n": GIANT - 1}, False),
        ({"n": GIANT, "longest": GIANT}, True),
        ({"total": 2**31}, False),
        ({"total": 2**31, "longest": 2**31 - 1}, True),
        ({"form": "batched", "m": 2**20, "total": 2**34}, False),
        ({"form": "per_group", "n": None, "k": None, "total": 2**34, "largest": 2**31}, False),
        ({"form": "per_group", "n": None, "k": None, "total": 2**14, "largest": 2**10, "longest": 2**33}, True),
    ],
    ids=str,
)
def test_extents_that_31_bits_do_not_count_are_refused(change: dict[str, Any], refused: bool, backend: Any) -> None:
    """A kernel counts them in int32; what is beyond came out as if it was negative, and all of it was wrong."""
    reasons = backend.not_supported_reasons(replace(SPEC, **change), GPU)
    assert [(str(change["longest"]) in reason and "split" in reason) for reason in reasons] == [True] * refused


@pytest.mark.parametrize(("backend", "remedy"), [(CUPY, ".cuda()"), (NUMBA, "MULTIGEMM_EMULATE=1")])
def test_a_cpu_device_is_refused_with_the_remedy(backend: Any, remedy: str) -> None:
    if settings().emulate:
        pytest.skip("this process emulates")
    (reason,) = backend.not_supported_reasons(SPEC, torch.device("cpu"))
    assert "cpu" in reason and remedy in reason


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"compute": torch.complex64}, "complex64"),
        ({"out": OperandSpec(torch.int32)}, "int32"),
        ({"out": OperandSpec(torch.uint8)}, "uint8"),
    ],
)
def test_cupy_names_the_dtypes_that_it_saw(change: dict[str, Any], word: str) -> None:
    reasons = CUPY.not_supported_reasons(replace(SPEC, **change), GPU)
    assert reasons and any(word in reason for reason in reasons)
