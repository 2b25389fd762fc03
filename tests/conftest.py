"""What every test shares: GPU tests are skipped with a reason, hypothesis is deterministic in CI."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import settings as hypothesis_settings

from multigemm.backends import registry
from multigemm.backends.triton.support import imported_to_compile
from multigemm.select import choose
from multigemm.select import table as tuning
from multigemm.settings import settings
from tests.support import trial_cases

hypothesis_settings.register_profile("ci", derandomize=True, deadline=None, print_blob=True, max_examples=50)
hypothesis_settings.register_profile("nightly", deadline=None, print_blob=True, max_examples=1000)
hypothesis_settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


forget_tunings = tuning.table.cache_clear  # of the real one, whatever a test puts in its place
MACHINES_CACHE = os.environ.get("MULTIGEMM_CACHE_DIR", "")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device, and torch sees none here")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    """Modules and tests outlive every test: the garbage collector need not walk them again, nor walk as often what a
    compiler in Python makes."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 50, 50)


def pytest_report_header() -> str:
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    return f"multigemm: torch {torch.__version__}, {device}"


@pytest.fixture(autouse=True)
def same_values_each_time() -> None:
    """A test that draws without a seed of its own still draws the same in every run.

    Without a GPU `torch.manual_seed` would keep the seed and a formatted stack for each kind of device that may come.
    """
    torch.default_generator.manual_seed(0)
    if torch.cuda.is_available():
        torch.cuda.manual_seed_all(0)
    np.random.seed(0)


@pytest.fixture(autouse=True)
def private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tests neither read nor write the user's own cache of tunings and kernels, and choose by what is known already."""
    folder = tmp_path_factory.getbasetemp() / "cache"
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(folder))
    monkeypatch.setenv("MULTIGEMM_MEASURE", "0")
    settings.cache_clear()
    yield folder
    settings.cache_clear()


@pytest.fixture
def setting(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Sets variables of the environment by their names; `settings()` reads them anew, and again after the test."""

    def put(**variables: object) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, str(value))
        settings.cache_clear()
        forget_tunings()

    yield put
    forget_tunings()


@pytest.fixture
def interpreter(setting: Callable[..., None]) -> None:
    """Triton's kernels run in its interpreter, which is chosen for a process before triton is imported: tests of other
    files import it to compile, at any time before these."""
    if torch.cuda.is_available() or imported_to_compile():
        pytest.skip("the interpreter must be chosen before triton is imported, without a GPU: run this file alone")
    setting(MULTIGEMM_EMULATE=1)
    if find_spec("triton"):
        from tests.support.triton_interpreted import quicken

        quicken()


@pytest.fixture
def own_tunings(setting: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tunings of a test stay its own; compiled kernels may come from the machine's cache."""
    if MACHINES_CACHE:
        setting(MULTIGEMM_CACHE_DIR=MACHINES_CACHE)
    own = tuning.TuningTable(tmp_path)
    monkeypatch.setattr(tuning, "table", lambda: own)
    choose.forget()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Replaces the whole registry by the given backends, and forgets what was chosen and known, as a new process."""

    def put(*backends: Any) -> None:
        by_name = {b.name: b for b in backends}
        monkeypatch.setattr(registry, "names", lambda: tuple(by_name))
        monkeypatch.setattr(registry, "get", by_name.__getitem__)
        forget_tunings()
        choose.forget()

    yield put
    forget_tunings()
    choose.forget()


@pytest.fixture
def fresh(install: Callable[..., None], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """`install` for whoever has set nothing, and whose cache holds nothing: "auto" measures."""
    trial_cases.unset(monkeypatch, tmp_path)
    return install


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Who was timed together, trial by trial."""
    return trial_cases.noted(monkeypatch)
