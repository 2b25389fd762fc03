"""The backend that answers nothing: it takes everything, and touches nothing."""

from __future__ import annotations

import torch

from multigemm.backend import Backend
from multigemm.backends.null import BACKEND
from multigemm.problem.spec import FORMS
from multigemm.testing import DeviceCase
from multigemm.testing.strategies import DTYPES
from tests.support.cpu_cases import CPU, case_of, staged


def test_it_is_a_backend() -> None:
    assert isinstance(BACKEND, Backend)
    assert BACKEND.name == "null"
    assert BACKEND.availability().ok


def test_it_accepts_everything_and_writes_nothing() -> None:
    for form in FORMS:
        for dtype in DTYPES:
            device_case = DeviceCase.from_case(case_of(form, dtype), CPU)
            ops = staged(device_case)
            for device in (torch.device("cpu"), torch.device("cuda", 1)):
                assert BACKEND.not_supported_reasons(ops.spec, device) == []
                recipe = BACKEND.plan(ops.spec, BACKEND.configs(ops.spec, device)[0], device)
                assert not recipe.syncs
                assert recipe.bind(ops)() is None
            assert torch.equal(device_case.outputs, device_case.prefills[0])
