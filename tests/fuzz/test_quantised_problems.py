"""Random problems with quantised operands: all of them drawn, the cpu backend right, planted faults seen."""

from __future__ import annotations

import pytest

from multigemm.problem.spec import FORMS
from multigemm.select import registry
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.model_mutants import QUANTISED_MUTANTS
from multigemm.testing.quantised_problems import GRAINS, KINDS, WEIGHTS, findings, random_problem


def test_every_kind_is_drawn() -> None:
    seen = {trait for seed in range(400) for trait in random_problem(seed).traits}
    wanted = {f"form:{form}" for form in FORMS} | {f"values:{kind}" for kind in KINDS}
    wanted |= {f"{side}:{grain}" for side in "ab" for grain in GRAINS} | {f"format:{name}" for name in WEIGHTS}
    wanted |= {
        "format:float8",
        "zero",
        "fast",
        "scale:float32",
        "scale:float8_e8m0fnu",
        "scale:bfloat16",
        "scale:float16",
    }
    wanted |= {f"layout:{how}" for how in ("row", "col", "gap", "shifted")}
    assert not wanted - seen


@pytest.mark.slow
def test_the_cpu_backend_is_right() -> None:
    assert list(findings(registry.get("cpu"), 300)) == []


@pytest.mark.slow
def test_the_unplanted_model_is_accepted() -> None:
    assert list(findings(ModelBackend(), 150)) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED_MUTANTS)
def test_each_planted_fault_is_seen(name: str) -> None:
    assert next(findings(ModelBackend(name, QUANTISED_MUTANTS[name]), 400), None) is not None
