"""Fused problems as a dimension of what is drawn: all kinds come, planted faults are seen, failures are made small."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from multigemm.backend import Recipe
from multigemm.fuzz.plan import Options, Tally
from multigemm.fuzz.shrink import shrink, simpler
from multigemm.fuzz.worker import Position, Worker
from multigemm.select import registry
from multigemm.testing import Case, Fused, Layout, PlacedCase, RowNumbers, Scale, Subject, check_case, classes, corpus
from multigemm.testing.deep_oracles import ORACLES, run_oracles
from multigemm.testing.fused_model import FAULTS, Model, model
from multigemm.testing.oracles import check
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import REQUIRED_FUSED, RandomChooser, kinds, redrawn
from tests.support.fused_cases import CPU, FUSED, findings, fused_cases

HUNTED = 400
"""Cases within which each fault has to show."""


@pytest.mark.slow
def test_every_class_is_drawn() -> None:
    seen = {name for case in fused_cases(900) for name in classes(case)}
    assert not REQUIRED_FUSED - seen
    quantised = {name for case in fused_cases(60, limits=replace(FUSED, quantised=1)) for name in classes(case)}
    assert quantised >= {"quantised", "fused", "scale_b:row", "a_rows:lies", "combine:lies"}


@pytest.mark.slow
@pytest.mark.parametrize("quantised", [0, 1])
def test_the_cpu_backend_is_right(quantised: int) -> None:
    assert list(findings(registry.get("cpu"), 100, limits=replace(FUSED, quantised=quantised))) == []


@pytest.mark.slow
def test_the_cpu_backend_is_right_on_many() -> None:
    assert list(findings(registry.get("cpu"), 800, first=1000, limits=replace(FUSED, quantised=4))) == []


@pytest.mark.slow
def test_the_model_is_right() -> None:
    assert list(findings(model(), 150)) == []


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_seen(fault: str) -> None:
    assert next(findings(model(fault), HUNTED), None) is not None


@pytest.mark.slow
@pytest.mark.parametrize("name", ORACLES)
def test_the_costlier_oracles_hold(name: str) -> None:
    """Sizes that change or lie, operands at the edge of memory, other contents, rows by number."""
    subject, met = Subject("cpu"), 0
    for number, case in enumerate(fused_cases(40)):
        device_case = DeviceCase.from_case(case, CPU)
        outcome = check(device_case, subject)
        met += run_oracles([ORACLES[name]], device_case, subject, outcome, number)
        assert outcome.ok, (case, outcome.findings)
    assert met > 5


def writes(where: str) -> Model:
    """The model, and then a number where it must not be: beside preact_out, or in the weights of rows."""
    right = model()

    def plan(spec: Any, config: Any, device: torch.device) -> Recipe:
        def bind(ops: Any) -> Any:
            launch = right.plan(spec, config, device).bind(ops)
            x = getattr(ops.fused, where)
            target = x if where == "row_scale" else x.as_strided((1,), (1,), x.storage_offset() - 1)
            return lambda: (launch(), target.fill_(3.0))

        return Recipe("writes", config, bind)

    return replace(right, plan=plan)


@pytest.mark.parametrize(("where", "oracle"), [("preact", "guard"), ("row_scale", "inputs")])
def test_a_write_into_weights_or_beside_preact_is_seen(where: str, oracle: str) -> None:
    case = Case(n=4, k=3, lengths=(2, 2), activation="relu", fused=Fused(row_scale="float32", preact=True))
    assert oracle in {finding.oracle for finding in check_case(case, writes(where)).findings}


def test_a_case_survives_json_and_its_own_repr() -> None:
    names = {"Case": Case, "Fused": Fused, "Layout": Layout, "RowNumbers": RowNumbers, "Scale": Scale}
    for case in fused_cases(60):
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
        assert eval(repr(case), names) == case


@pytest.mark.slow
def test_a_kind_keeps_what_kernels_are_compiled_for() -> None:
    for number, kind in enumerate(fused_cases(40)):
        other = redrawn(kind, RandomChooser(number), FUSED)
        for name in ("activation", "form", "out_dtype"):
            assert getattr(other, name) == getattr(kind, name)
        for name in ("weights", "row_scale", "preact", "glu_layout", "terms"):
            assert getattr(other.fused, name) == getattr(kind.fused, name)
    assert sum(kind.is_fused for kind in kinds(replace(FUSED, fused=4), 60)) >= 15


@pytest.mark.slow
def test_every_simpler_case_is_legal() -> None:
    for case in fused_cases(6):
        for candidate in list(simpler(case))[:60]:
            PlacedCase.build(candidate)


def test_a_failure_is_shrunk_stored_and_replayed(tmp_path: Path) -> None:
    """What is left of a problem is what the fault needs."""
    faulty = model("limit lost")

    def fails(case: Case) -> bool:
        return bool(check_case(case, faulty).findings)

    small = shrink(next(case for case in fused_cases(200) if fails(case)), fails)
    assert small.gated and small.fused.glu_limit is not None
    assert not (small.bias or small.fused.row_scale or small.fused.preact or small.fused.a_rows.given)
    path = corpus.save(tmp_path, {"case": small.to_dict(), "backend": "cpu", "oracle": "value"})
    entry = corpus.load(path)
    assert entry.case == small and fails(entry.case) and check_case(entry.case, "cpu").ok
    assert "Fused" in corpus.snippet(small, "cpu", "cpu")


def test_a_worker_counts_and_reports_them() -> None:
    told = Tally()
    options = Options(("cpu",), fused=1, seed=3, work=1 << 12, longest=40, groups=8)
    worker = Worker(options, SimpleNamespace(send=told.add), Position())
    for number in range(12):
        worker.problem(number)
    worker.send()
    assert told.problems == 12 and told.fused_checks["cpu"] == told.classes["fused"] > 6
    assert not told.failures
    worker.subjects["cpu", 0] = Subject(model("limit lost"))
    for number in range(200):
        worker.problem(number)
        worker.send()
        if told.failures:
            break
    (failure,) = told.failures
    assert failure.oracle == "value" and failure.shrunk is not None and "fused" in failure.shrunk
