"""The backend that answers nothing: it takes everything, and touches nothing."""

from __future__ import annotations

import torch

from multigemm.backend import Backend
from multigemm.backends.null import BACKEND
from multigemm.problem.spec import FORMS, INPUT_DTYPES
from tests.support.cpu_cases import Case, build, filler


def test_it_is_a_backend() -> None:
    assert isinstance(BACKEND, Backend)
    assert BACKEND.name == "null"
    assert BACKEND.availability().ok


def test_it_accepts_everything_and_writes_nothing() -> None:
    for form in FORMS:
        for dtype in INPUT_DTYPES:
            ops = build(Case(form, dtype))
            for device in (torch.device("cpu"), torch.device("cuda", 1)):
                assert BACKEND.not_supported_reasons(ops.spec, device) == []
                recipe = BACKEND.plan(ops.spec, BACKEND.configs(ops.spec, device)[0], device)
                assert not recipe.syncs
                launch = recipe.bind(ops)
                assert launch() is None
            outs = ops.out if isinstance(ops.out, list) else [ops.out]
            assert all(bool((out == filler(out.dtype)).all()) for out in outs)
