"""What `auto` is worth on shapes that nobody tuned, by the tables that ship: each class is left out in turn and guessed
from the others. A slip in distances, units or names of configs shows here, though every formula has its own test."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from multigemm.bench.workloads import geomean
from multigemm.measured import unfold
from multigemm.nearest import ANY_OFFSET, NOISE, Sample, estimates, solved

TUNED = sorted((Path(__file__).parents[1] / "multigemm" / "tuned").glob("*.json"))
EVERY = 4
"""Of the classes, this one is guessed; all others are known."""


def classes(where: str) -> list[Sample]:
    """Times and configs of each class whose sizes lie in one place, of the last table that holds it."""
    found: dict[str, Sample] = {}
    for path in TUNED:
        here: dict[str, Sample] = {}
        for entry in json.loads(path.read_text())["entries"]:
            for m in unfold(entry, path.name):
                if m.key.endswith(where):
                    old = here.get(m.key, Sample(m.key))
                    us, ran = {**old.us, m.backend: m.us}, {**old.ran, m.backend: m.ran}
                    footprints = {**old.footprints, m.backend: m.footprint}
                    here[m.key] = Sample(m.key, us, ran, m.groups, m.flops, footprints=footprints)
        found |= here
    return [s for s in found.values() if len(s.us) > 1]


def behind(known: list[Sample]) -> list[float]:
    """How many times slower than the fastest the guessed one is, for some of the classes."""
    ratios = []
    for index in range(0, len(known), EVERY):
        left_out = known[index]
        asked = Sample(left_out.key, {}, left_out.ran, left_out.groups, footprints=left_out.footprints)
        guess = estimates(asked, [s for s in known if s is not left_out])
        usable = [e for e in guess if e.backend in left_out.us]
        chosen = min(usable, key=lambda e: e.slowness).backend
        ratios.append(left_out.us[chosen] / min(left_out.us.values()))
    return ratios


def test_choices_for_classes_left_out_are_near_the_fastest() -> None:
    known = classes("device-sizes")
    ratios = behind(known)
    assert len(ratios) > 50
    assert geomean(ratios) < 1.025
    assert sum(ratio > 1.1 for ratio in ratios) <= 0.065 * len(ratios)


def test_equations_are_solved_as_exactly_as_their_condition_allows() -> None:
    places = np.random.default_rng(0).normal(size=(120, 4))
    apart = np.sqrt(((places[:, None] - places[None]) ** 2).sum(-1))
    matrix = np.exp(-apart / 10) + ANY_OFFSET + NOISE * np.eye(120)
    truth = np.random.default_rng(1).normal(size=120)
    assert solved(matrix, matrix @ truth) == pytest.approx(truth, abs=1e-5)
    assert solved(np.array([[4.0]]), np.array([2])) == pytest.approx([0.5])
