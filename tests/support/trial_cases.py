"""Backends to measure, what is known of them beforehand, and what a trial did; for tests of "auto"."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends import registry
from multigemm.select import measure_once as trial
from multigemm.select import table as tuning
from multigemm.select.problem_class import ProblemClass, Query
from multigemm.select.table import Entry, Measured
from multigemm.select.timing import Timing
from multigemm.settings import settings
from tests.support.fake_backends import Dawdler, problem

CPU = torch.device("cpu")
Install = Callable[..., None]
host_time_us = trial._host_time_us
"""As it is, whatever `unset` puts in its place."""


def unset(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As whoever has set nothing finds it: a cache that holds nothing, and measuring is on; each backend takes as long
    as it means to nap, however busy this machine is."""
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(cache))
    monkeypatch.delenv("MULTIGEMM_MEASURE")
    settings.cache_clear()
    monkeypatch.setattr(trial, "HOPELESS", math.inf)  # a busy host makes naps longer
    monkeypatch.setattr(trial, "measure", by_naps)
    monkeypatch.setattr(trial, "_host_time_us", lambda choice, *_: 1e6 * registry.get(choice.backend).nap_s)  # type: ignore[attr-defined]


def by_naps(variants: Mapping[str, Callable[[], object]], *given: Any, **more: Any) -> dict[str, Timing]:
    """Runs each once; the times are the lengths of their naps."""
    for call in variants.values():
        call()
    return {name: Timing(name, "cold", (max(1e6 * registry.get(name).nap_s, 1.0),) * 3) for name in variants}  # type: ignore[attr-defined]


def noted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Who was timed together, trial by trial."""
    found: list[list[str]] = []
    real = vars(trial)["measure"]

    def measure(variants: Mapping[str, Any], *given: Any, **more: Any) -> dict[str, Timing]:
        found.append(list(variants))
        taken: dict[str, Timing] = real(variants, *given, **more)
        return taken

    monkeypatch.setattr(trial, "measure", measure)
    return found


def pair() -> tuple[Dawdler, Dawdler]:
    """Two backends; the one that comes first is clearly slower."""
    return Dawdler("slow", 1, nap_s=0.003), Dawdler("fast", 2, nap_s=0.0005)


CLASS = re.compile(r"(\w+) g(\d+) m(\d+|\*) n(\d+|\*) k(\d+|\*) t(\d+) (\S+) (\S+) (\S+) (\S+) ([a-z]+-sizes)")


def class_from(text: str) -> ProblemClass:
    """The class that a text of a table or a report names."""
    found = CLASS.fullmatch(text)
    assert found is not None, text
    form, groups, m, n, k, total, *rest = found.groups()
    m, n, k = (None if extent == "*" else int(extent) for extent in (m, n, k))
    return ProblemClass(form, int(groups), m, n, k, int(total), *rest)


def class_in(posed: mg.GroupedGemmProblem) -> ProblemClass:
    return Query(posed).problem_class


def tune(posed: mg.GroupedGemmProblem, config: dict[str, Any] | None = None, **us: float) -> None:
    """As if `multigemm tune` had measured these backends on a problem."""
    times = {name: Measured(took, config or {}) for name, took in us.items()}
    tuning.table().keep([Entry("cpu", str(class_in(posed)), times)])


def kept(posed: mg.GroupedGemmProblem | None = None) -> Entry | None:
    """What "auto" keeps on disk of a problem's class."""
    return tuning.TuningTable().choice(class_in(problem() if posed is None else posed), CPU, [])
