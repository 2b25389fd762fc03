"""Random fused problems: all kinds drawn, the cpu backend and a plain model right, planted faults seen."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from multigemm.problem.spec import ACTIVATIONS, FORMS, GATES, GLU_LAYOUTS
from multigemm.select import registry
from multigemm.testing.fused_model import FAULTS, model
from multigemm.testing.fused_problems import DTYPES, KINDS, Memory, findings, main, random_problem

HUNTED = 400
"""Problems within which each fault has to show."""


def test_every_kind_is_drawn() -> None:
    seen = {trait for seed in range(700) for trait in random_problem(seed).traits}
    wanted = {f"form:{form}" for form in FORMS} | {f"dtype:{dtype}" for dtype in DTYPES}
    wanted |= {f"values:{kind}" for kind in KINDS} | {f"act:{act}" for act in (None, *ACTIVATIONS)}
    wanted |= {f"gate:{gate}" for gate in GATES} | {f"layout:{layout}" for layout in GLU_LAYOUTS}
    wanted |= {f"{name}:{how}" for name in ("a_rows", "b_rows", "combine", "out_rows") for how in ("lies", "honest")}
    wanted |= {"glu_alpha", "glu_beta", "glu_limit", "row_scale", "weights", "c", "out", "preact_out", "no groups"}
    wanted |= {"empty groups", "batch invariant", "index:host", "index:torch.int32", "index:torch.int64"}
    assert not wanted - seen


def test_the_cpu_backend_is_right() -> None:
    assert list(findings(registry.get("cpu"), 150)) == []


@pytest.mark.slow
def test_the_cpu_backend_is_right_on_many() -> None:
    assert list(findings(registry.get("cpu"), 2000, first=1000)) == []


def test_the_command_says_who_is_wrong_and_who_takes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--problems", "5"]) == 0
    assert "cpu: 0 findings; it takes 5 of the first 5 problems" in capsys.readouterr().out
    assert main(["--problems", "3", "--backend", "null"]) == 1, "null writes nothing"
    assert main(["--problems", "3", "--backend", "cublas"]) == 1
    assert "cublas: 0 findings; it takes 0" in capsys.readouterr().out


def test_the_model_is_right() -> None:
    assert list(findings(model(), 150)) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_seen(fault: str) -> None:
    assert next(findings(model(fault), HUNTED), None) is not None


def test_writes_beside_a_tensor_are_seen() -> None:
    memory = Memory(np.random.default_rng(0), torch.device("cpu"))
    x, y = memory.place("x", torch.ones(3, 4)), memory.place("y", torch.ones(3, 4), written=True)
    y.fill_(2)
    assert memory.changed() == []
    y.as_strided((1,), (1,), y.storage_offset() - 1).fill_(0)
    assert memory.changed() == ["y"]
    x[0, 0] = 3
    assert memory.changed() == ["x", "y"]
