"""The suite can fail: every planted fault is seen, and the unplanted models are never accused."""

import os
from typing import Any

import pytest
import torch

from multigemm.testing import Subject, random_case
from multigemm.testing.oracles import check_pairs
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import Limits
from tests.model_mutants.faults import (
    EQUIVALENT,
    FUSED_HUNTING,
    FUSED_MUTANTS,
    HUNTING,
    MUTANTS,
    QUANTISED_HUNTING,
    QUANTISED_MUTANTS,
    hunt,
    mutant,
    planted,
)
from tests.model_mutants.fused_kernel import FusedBackend
from tests.model_mutants.kernel import Kernel, ModelBackend

CPU = torch.device("cpu")
UNPLANTED = int(os.environ.get("UNPLANTED_PROBLEMS", "200"))


def test_there_are_enough_of_them() -> None:
    assert len(MUTANTS) >= 84 and len(QUANTISED_MUTANTS) >= 11 and len(FUSED_MUTANTS) >= 34


@pytest.mark.parametrize("name", [*MUTANTS, *QUANTISED_MUTANTS, *EQUIVALENT])
def test_each_fault_has_its_place_in_the_model_kernel(name: str) -> None:
    assert planted(name) is not Kernel


LATE = {"float64 rounded twice": 550}
"""How many of the first problems do not show a fault: a hunt for it passes over them."""


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_each_planted_fault_is_seen(name: str) -> None:
    kill = hunt(mutant(name), first=LATE.get(name, 0))
    assert kill.killed, f"{name} survived {kill.tried} problems"


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED_MUTANTS)
def test_each_fault_of_quantised_operands_is_seen(name: str) -> None:
    assert hunt(mutant(name), problems=60, limits=QUANTISED_HUNTING).killed


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED_MUTANTS)
def test_each_fault_of_fused_problems_is_seen(name: str) -> None:
    assert hunt(mutant(name), problems=400, limits=FUSED_HUNTING).killed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "limits", "problems"),
    [
        (ModelBackend(), HUNTING, UNPLANTED),
        (ModelBackend(), QUANTISED_HUNTING, UNPLANTED),
        (FusedBackend(), FUSED_HUNTING, 150),
        *((mutant(name), HUNTING, 100) for name in EQUIVALENT),
    ],
    ids=["model", "quantised", "fused", *EQUIVALENT],
)
def test_right_models_and_harmless_changes_are_not_accused(backend: Any, limits: Limits, problems: int) -> None:
    kill = hunt(backend, problems=problems, limits=limits)
    assert not kill.killed, f"{kill.case}: {kill.text}"


def test_each_backend_of_a_batch_is_judged_by_its_own_result() -> None:
    """Outputs come home in one copy; a view into it once read the first backend's result for all."""
    device_case = DeviceCase.from_case(random_case(8, HUNTING), CPU)
    for rho in (True, False):
        backends = (ModelBackend(), mutant("columns one short"), ModelBackend())
        pairs = [(device_case, Subject(backend)) for backend in backends]
        right, wrong, also_right = check_pairs(pairs, rho=rho)
        assert right.ok and also_right.ok
        assert not wrong.ok
