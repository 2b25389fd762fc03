"""A cuBLAS that records its calls, in place of the library."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from multigemm.planning import launch_cache
from tests.support.cublas_fake import Fake, install


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the compiled kernels of a module lie."""
    return tmp_path_factory.mktemp("kernels")


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Iterator[Fake]:
    yield install(monkeypatch, folder)
    launch_cache.clear()
