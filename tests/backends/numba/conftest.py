"""A Hopper GPU for choices, and the modules of numba's Hopper kernel as plain Python."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from multigemm.backends.numba import choice, support


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (choice, support):
        monkeypatch.setattr(module, "capability_of", lambda device: (9, 0))


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """kernel(machine, fault): the modules of the kernel as plain Python that runs in this machine."""
    from tests.support.numba_pipeline_run import in_plain_python  # imports numba, which not every test here does

    with in_plain_python(monkeypatch) as install:
        yield install
