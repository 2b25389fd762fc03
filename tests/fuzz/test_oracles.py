"""How often a bound launch runs before it is believed, and how further oracles are run."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Recipe
from multigemm.planning.operands import Operands
from multigemm.testing import oracles
from multigemm.testing.deep_oracles import run_oracles


class TinyDeviceCase:
    """Old contents and operands of a few bytes, on a device that says that it is one."""

    def __init__(self, kind: str) -> None:
        self.device, self.problem = SimpleNamespace(type=kind), None
        self.inputs = self.pristine = torch.zeros(8, dtype=torch.uint8)
        self.outputs = torch.zeros(8, dtype=torch.uint8)

    def prefill(self, number: int) -> None:
        self.outputs.fill_(number + 100)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_launch_that_clears_its_counters_once_too_seldom_is_seen(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    device_case, launches = TinyDeviceCase(kind), list[int]()

    def launch() -> None:
        launches.append(1)
        if len(launches) < 3:  # afterwards its counter says that no tile is left
            device_case.outputs.fill_(7)

    recipe = SimpleNamespace(kernel="", config=None)
    subject: Any = SimpleNamespace(name="mine", refusals=lambda spec, device: [])
    monkeypatch.setattr(oracles, "staged_spec", lambda problem: None)
    monkeypatch.setattr(oracles, "bind", lambda device_case, subject: (launch, recipe))
    first, last = oracles._launch_twice(device_case, subject).outputs  # type: ignore[arg-type]
    assert first.eq(7).all()
    assert last.eq(101 if kind == "cuda" else 7).all(), "on a GPU the third launch is the one that is compared"


def test_a_bound_launch_keeps_its_operands_while_it_may_run() -> None:
    """A backend's launch need not; sizes on the host lie in memory that staging made."""
    held: list[Any] = []

    def bind(ops: Operands) -> Any:
        assert ops.ends is not None
        held.append(weakref.ref(ops.ends))
        return lambda: None

    problem = mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(2, 3, 2), sizes=[1, 3])
    device_case: Any = SimpleNamespace(problem=problem, device=problem.device, out=torch.empty(4, 2))
    subject: Any = SimpleNamespace(recipe=lambda spec, device: Recipe("mine", None, bind))
    run, _ = oracles.bind(device_case, subject)
    gc.collect()
    run()
    assert held[0]() is not None


def test_oracles_stop_at_the_first_finding_and_an_exception_is_one() -> None:
    seen: list[str] = []

    def skips(*_: Any) -> bool:
        seen.append("skips")
        return False

    def fails(*_: Any) -> int:
        seen.append("fails")
        raise RuntimeError("lost")

    nothing: Any = None
    outcome = oracles.Outcome("mine")
    assert run_oracles([fails, skips], nothing, nothing, outcome) is False
    assert seen == ["fails"] and outcome.findings[0].oracle == "exception" and "lost" in outcome.findings[0].text
    assert run_oracles([skips], nothing, nothing, oracles.Outcome("mine")) is False
    assert run_oracles([lambda *_: 2], nothing, nothing, oracles.Outcome("mine")) is True
