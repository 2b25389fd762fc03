"""Random fused problems: all kinds drawn, the cpu backend and a plain model right, planted faults seen."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, cast

import numpy as np
import pytest
import torch

from multigemm.backend import Backend, BuiltinBackend, Recipe
from multigemm.fuzz.plan import Options, Tally
from multigemm.fuzz.shrink import shrink
from multigemm.fuzz.worker import Position, Worker, drawn
from multigemm.planning.operands import Operands
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import ACTIVATIONS, FORMS, GATES, GLU_LAYOUTS
from multigemm.select import registry
from multigemm.testing import Case, Subject, check_case, corpus
from multigemm.testing.fused_model import FAULTS, model
from multigemm.testing.fused_problems import (
    DTYPES,
    KINDS,
    Memory,
    examine,
    findings,
    main,
    random_problem,
    run,
    simpler_than,
)

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


@pytest.mark.slow
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


@pytest.mark.slow
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


# --- as a dimension of a campaign ---------------------------------------------------------------------


def test_a_case_may_stand_for_a_fused_problem() -> None:
    case = Case(fused=3, without=("bias", "out"))
    assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
    assert repr(case) == "Case(form='jagged_m', dtype='float32', fused=3, without=('bias', 'out'))"
    outcome = check_case(case, "cpu")
    assert outcome.ran and outcome.ok and outcome.kernel
    assert check_case(case, "cublas").refusals


def test_what_is_left_out_was_there() -> None:
    for seed in range(40):
        whole = random_problem(seed)
        for case in simpler_than(Case(fused=seed)):
            (name,) = case.without
            assert name == "weights" or name in whole.keywords
            less = random_problem(seed, without=case.without)
            assert less.keywords.keys() < whole.keywords.keys() or name == "weights"
            assert less.problem.out_shape == whole.problem.out_shape


class Foreign(BuiltinBackend):
    """A backend from elsewhere, which says that it knows of fused problems."""

    takes_fused: ClassVar[bool] = True


def faulty(fault: str) -> Subject:
    planted = model(fault)
    return Subject(Foreign(*(getattr(planted, field.name) for field in fields(planted))))


def test_a_failure_is_shrunk_stored_and_replayed(tmp_path: Path) -> None:
    """What is left of a problem is what the fault needs."""
    subject = faulty("limit lost")

    def fails(case: Case) -> bool:
        return bool(examine(case, subject, torch.device("cpu")).findings)

    number = next(n for n in range(200) if fails(Case(fused=n)))
    small = shrink(Case(fused=number), fails)
    left = random_problem(small.fused, without=small.without).keywords
    assert "glu_limit" in left and not left.keys() & {"bias", "row_scale", "preact_out", "alpha"}
    path = corpus.save(tmp_path, {"case": small.to_dict(), "backend": "cpu", "oracle": "fused"})
    entry = corpus.load(path)
    assert entry.case == small and fails(entry.case) and check_case(entry.case, "cpu").ok
    assert f"fused={number}" in corpus.snippet(small, "cpu", "cpu")


def test_a_campaign_draws_one_in_so_many() -> None:
    options = Options(("cpu",), fused=4, seed=7)
    cases = [drawn(options, number) for number in range(12)]
    assert [case.fused for case in cases] == [-1, -1, -1, 10, -1, -1, -1, 14, -1, -1, -1, 18]
    assert all(drawn(replace(options, fused=0), number).fused < 0 for number in range(12))


def test_a_worker_counts_and_reports_them() -> None:
    told = Tally()
    worker = Worker(Options(("cpu",), fused=1, seed=3), SimpleNamespace(send=told.add), Position())
    for number in range(6):
        worker.problem(number)
    assert (told.problems, told.fused_checks["cpu"], told.classes["fused"]) == (6, 6, 6)
    assert not told.failures and any(name.startswith("fused form:") for name in told.classes)
    worker.subjects["cpu", 0] = faulty("limit lost")
    for number in range(200):
        worker.problem(number)
        if told.failures:
            break
    (failure,) = told.failures
    assert failure.oracle == "fused" and failure.shrunk is not None and failure.case["fused"] == number + 3


class Watching:
    """A backend whose launch keeps nothing, and looks whether the ends that were made for it are still there."""

    name = "watching"

    def __init__(self) -> None:
        self.alive: list[bool] = []

    def configs(self, spec: Any, device: torch.device) -> list[Any]:
        return [None]

    def plan(self, spec: Any, config: Any, device: torch.device) -> Recipe:
        return Recipe("watching", config, self._bind)

    def _bind(self, ops: Operands) -> Callable[[], None]:
        ends = weakref.ref(cast(torch.Tensor, ops.ends))
        return lambda: self.alive.append(ends() is not None)


def test_ends_that_were_made_of_sizes_on_the_host_live_until_the_launch() -> None:
    """Else a launch that allocates (a sort of `out_rows`) overwrites them before the next one reads them."""
    backend, a, b = Watching(), torch.randn(30, 8), torch.randn(3, 8, 5)
    run(cast(Backend, backend), GroupedGemmProblem(a, b, sizes=[10, 0, 20]))
    assert backend.alive == [True]
