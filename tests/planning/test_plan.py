"""Plans: what they follow, keep, refuse and say; and the stream that a launch for CuPy goes to."""

from __future__ import annotations

import copy
import pickle
import sys
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import Recipe
from multigemm.planning import binding as bound
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate
from multigemm.problem.arrays import _RawStream, cupy_stream
from tests.support.fake_backends import problem
from tests.support.problem_cases import CUT, A, B, refuse


def test_host_lists_are_copied_and_live_tensors_are_followed() -> None:
    a, b = torch.ones(6, 1), torch.tensor([[[1.0]], [[2.0]]])
    cut, live = [0, 2, 6], torch.tensor([0, 2, 6])
    frozen, following = (
        mg.plan(mg.GroupedGemmProblem(a, b, offsets=cut)),
        mg.plan(mg.GroupedGemmProblem(a, b, offsets=live)),
    )
    cut[1], live[1] = 5, 5
    assert frozen().flatten().tolist() == [1, 1, 2, 2, 2, 2]
    assert following().flatten().tolist() == [1, 1, 1, 1, 1, 2]


def test_live_sizes_and_strided_offsets_are_followed() -> None:
    a, b = torch.ones(6, 1), torch.tensor([[[1.0]], [[2.0]]])
    sizes, spaced = torch.tensor([2, 4]), torch.tensor([0, 99, 2, 99, 6, 99])
    by_size = mg.plan(mg.GroupedGemmProblem(a, b, sizes=sizes))
    by_offset = mg.plan(mg.GroupedGemmProblem(a, b, offsets=spaced[::2]))
    assert by_size().flatten().tolist() == by_offset().flatten().tolist() == [1, 1, 2, 2, 2, 2]
    sizes.copy_(torch.tensor([5, 1]))
    spaced[2] = 5
    assert by_size().flatten().tolist() == by_offset().flatten().tolist() == [1, 1, 1, 1, 1, 2]


def test_plan_sees_operands_changed_in_place_and_keeps_its_output() -> None:
    a, b = torch.ones(2, 3), torch.ones(3, 2)
    plan = mg.plan(mg.GroupedGemmProblem(a, b))
    first = plan()
    assert first.eq(3).all()
    a.mul_(2)
    assert plan() is first
    assert first.eq(6).all()


def test_plan_runs_another_problem_of_its_spec_only() -> None:
    problem = mg.GroupedGemmProblem(torch.ones(2, 3), torch.ones(3, 2))
    plan = mg.plan(problem)
    other = mg.GroupedGemmProblem(torch.full((2, 3), 2.0), torch.ones(3, 2))
    assert plan.run(other).eq(6).all()
    with pytest.raises(mg.InvalidProblem, match="m is 5 instead of 2"):
        plan.run(mg.GroupedGemmProblem(torch.ones(5, 3), torch.ones(3, 2)))


def test_a_result_without_elements_takes_no_launch() -> None:
    """Of any backend, in any form: its `bind` never sees one."""

    def bind(ops: Operands) -> Callable[[], object]:
        bound_to.append(ops)
        return lambda: None

    bound_to: list[Operands] = []
    recipe = Recipe("", None, bind)
    matrix, nothing = torch.ones(4, 3), torch.ones(0, 3)
    for a, b, cut, launches in (
        (nothing, torch.ones(2, 3, 5), {"offsets": [0, 0, 0]}, False),
        (matrix, torch.ones(2, 3, 0), {"offsets": [0, 1, 4]}, False),
        (torch.ones(0, 4, 3), torch.ones(0, 3, 5), {}, False),
        ([nothing, nothing], [torch.ones(3, 5)] * 2, {}, False),
        ([], [], {}, False),
        ([nothing, matrix], [torch.ones(3, 5)] * 2, {}, True),
        (torch.ones(4, 0), torch.ones(2, 0, 5), {"offsets": [0, 1, 4]}, True),  # zeros are to be written
    ):
        posed = mg.GroupedGemmProblem(a, b, **cut)  # type: ignore[arg-type]
        bound.bind(bound.Choice("", recipe, posed.spec, ""), posed, allocate(posed)).launch()
        assert len(bound_to) == launches
        bound_to.clear()


def test_a_plan_does_not_lose_a_gradient_of_another_problem() -> None:
    plan = mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT))
    other = mg.GroupedGemmProblem(A.clone().requires_grad_(), B, offsets=CUT)
    refuse("a plan has no gradient", lambda: plan.run(other))


def test_a_plan_is_for_one_device() -> None:
    plan, other = (mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT)), mg.GroupedGemmProblem(A, B, offsets=CUT))
    other.device = torch.device("cuda", 1)
    refuse("this plan is for cpu and the problem is on cuda:1", lambda: plan.run(other))


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_plan_cannot_be_copied_and_says_so(copied: Callable[[Any], Any]) -> None:
    plan = mg.plan(mg.GroupedGemmProblem(A, B, offsets=CUT))
    with pytest.raises(mg.MultigemmError, match="bound to memory and cannot be copied: make another"):
        copied(plan)


def test_plan_repr_tells_backend_kernel_config_and_why() -> None:
    text = repr(mg.plan(problem(), "cpu"))
    assert text.startswith("Plan(cpu: ")
    assert "asked for by name" in text


def test_a_plan_made_in_a_capture_stays_in_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """What fills its workspaces was only recorded."""
    state = [True]
    monkeypatch.setattr(bound, "capturing", lambda device: state[0])
    plan = mg.plan(mg.GroupedGemmProblem(torch.ones(4, 3), torch.ones(2, 3, 5), sizes=[1, 3]), "cpu")
    assert torch.equal(plan(), torch.full((4, 5), 3.0))
    state[0] = False
    with pytest.raises(mg.InvalidProblem, match="outside of a capture"):
        plan()


def test_the_stream_of_cupy_is_asked_at_each_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[Any] = []
    stream = SimpleNamespace(ptr=7)

    class Using:
        def __init__(self, raw: Any) -> None:
            self.raw = raw

        def __enter__(self) -> None:
            entered.append(self.raw)

        def __exit__(self, *_: object) -> None:
            entered.append(None)

    fake = SimpleNamespace(cuda=SimpleNamespace(get_current_stream=lambda: stream))
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    monkeypatch.setattr(torch.cuda, "stream", Using)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda raw, device: raw)
    launches: list[str] = []
    launch = partial(bound._on_stream_of_cupy, torch.device("cpu"), lambda: launches.append("go"))
    launch()
    assert (launches, entered) == (["go"], [])
    stream.ptr = 9
    assert cupy_stream(torch.device("cpu")) == 9
    launch()
    assert (launches, entered) == (["go", "go"], [9, None])


def test_a_raw_stream_speaks_the_protocol() -> None:
    assert _RawStream(11).__cuda_stream__() == (0, 11)
