"""Backends to try, what is known of them beforehand, and what a trial did; for tests of `measure_once`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability
from multigemm.select import measure_once as trial
from multigemm.select import table as tuning
from multigemm.select import timing
from multigemm.select.candidates import Candidate
from multigemm.select.measured import Measured
from multigemm.select.measured_cache import SOURCE, FirstMet
from multigemm.select.timing import Timing
from multigemm.settings import settings
from tests.fake_backends import Dawdler

CPU = torch.device("cpu")
FLOPS = 2.0 * 4 * 3 * 2  # of `problem()`
Install = Callable[..., None]


def unset(monkeypatch: pytest.MonkeyPatch, cache: Path) -> None:
    """As whoever has set nothing finds it: a cache that holds nothing, and measuring is on."""
    monkeypatch.setenv("MULTIGEMM_CACHE_DIR", str(cache))
    monkeypatch.delenv("MULTIGEMM_MEASURE")
    settings.cache_clear()
    monkeypatch.setattr(trial, "HOPELESS", math.inf)  # a busy host makes naps longer


def noted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """Who was timed together, trial by trial."""
    found: list[list[str]] = []
    real = timing.measure

    def measure(variants: Mapping[str, Any], *given: Any, **more: Any) -> dict[str, Timing]:
        found.append(list(variants))
        return real(variants, *given, **more)

    monkeypatch.setattr(trial, "measure", measure)
    return found


def pair() -> tuple[Dawdler, Dawdler]:
    """Two backends; the one that comes first is clearly slower."""
    return Dawdler("slow", 1, nap_s=0.003), Dawdler("fast", 2, nap_s=0.0005)


def learn(posed: mg.GroupedGemmProblem, flops: float, **us: float) -> None:
    """As if these backends had been timed on a problem, all with their first config."""
    key = tuning.spec_key(posed.spec, equal=True)
    every = [Measured(name, {}, took, "cpu", key, ran="16", groups=1, flops=flops) for name, took in us.items()]
    tuning.table().learn(FirstMet({m.backend: replace(m, source=SOURCE) for m in every}, {}))


def times_of(posed: mg.GroupedGemmProblem, flops: float = FLOPS) -> dict[str, Measured]:
    """What was measured of a problem."""
    met = tuning.table().first_met(posed.spec, CPU, True, flops)
    return {} if met is None else dict(met.times)


def known(name: str, slowness: float | None = None, error: float = 0.2, expected: bool = True) -> Candidate:
    us = None if expected else 10.0
    return Candidate(name, Availability(True), (), us, slowness, "", expected and slowness is not None, error)
