"""Fused problems in steps: the kernels round a plain product, as host code round the products of the cpu backend."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backend import BuiltinBackend, Recipe
from multigemm.backends.cpu import BACKEND as CPU
from multigemm.cuda import nvrtc
from multigemm.planning import fused_steps
from multigemm.planning.fused_steps import SOURCE, plan_in_steps, product_spec, steps_reasons
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.testing import DeviceCase
from tests.support import host_kernels
from tests.support.fused_cases import findings, fused_cases
from tests.support.nvrtc_here import nvrtc_here


def reasons(spec: Any, device: torch.device) -> list[str]:
    if spec.fused is None or spec.quantised:
        return ["nothing to take in steps"]
    return steps_reasons(spec) or list(CPU.not_supported_reasons(product_spec(spec), device))


def plan(spec: Any, config: Any, device: torch.device) -> Recipe:
    return plan_in_steps(spec, CPU.plan(product_spec(spec), config, device), 0)


IN_STEPS = BuiltinBackend(
    "cpu", CPU.availability, reasons, lambda spec, device: CPU.configs(product_spec(spec), device)[:1], plan
)


def planned(problem: mg.GroupedGemmProblem) -> tuple[Recipe, Any]:
    """The recipe of a problem, and its staged operands."""
    spec = staged_spec(problem)
    recipe = plan(spec, CPU.configs(product_spec(spec), problem.device)[0], problem.device)
    return recipe, stage(problem, spec, allocate(problem)).ops


def solved(problem: mg.GroupedGemmProblem) -> torch.Tensor:
    recipe, ops = planned(problem)
    recipe.bind(ops)()
    result: torch.Tensor = ops.out
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where host code is built, once for all tests."""
    return tmp_path_factory.mktemp("steps")


@pytest.fixture
def bound(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[str]:
    """Kernels on the host; the memory between them begins as NaN."""
    allocated = fused_steps._allocated

    def of_nan(*given: Any) -> Any:
        lent, parts = allocated(*given)
        return lent if lent is None else lent.fill_(255), parts

    monkeypatch.setattr(fused_steps, "_allocated", of_nan)
    return host_kernels.install(monkeypatch, folder)


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, 100])
def test_random_problems(first: int, bound: list[str]) -> None:
    assert list(findings(IN_STEPS, 25 if first == 0 else 75, first=first)) == []
    assert set(bound) == {"gather_rows", "finish_rows", "sum_rows"}


def test_the_launches_of_a_layer(bound: list[str]) -> None:
    x, up, down = torch.randn(6, 8), torch.randn(3, 8, 10), torch.randn(3, 5, 8)
    rows, cut = torch.randint(-1, 7, (12,)), [4, 0, 7]
    first = mg.GroupedGemmProblem(x, up, a_rows=rows, activation="swiglu", preact_out=torch.empty(12, 10), sizes=cut)
    sums = (torch.randint(-1, 13, (6, 2)), torch.rand(6, 2))
    second = mg.GroupedGemmProblem(torch.randn(12, 5), down, combine=sums, sizes=cut)
    for problem, names in ((first, ["gather_rows", "finish_rows"]), (second, ["sum_rows"])):
        recipe, ops = planned(problem)
        assert f"in steps: {len(names) + 1} launches" in recipe.why
        del bound[:]
        recipe.bind(ops)
        assert bound == names


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "right", "wrong"),
    [
        (0, "from[i] >= 0 && from[i] < t.extent ?", "from[i] >= 0 && from[i] < t.extent - 1 ?"),
        (0, "if (s + i < t.tokens) to[i", "if (s + i < t.tokens - 1) to[i"),
        (3, "u > limit ? limit : u < -limit ? -limit : u", "u > limit ? limit : u"),
        (3, "(u + (calc)t.beta)", "u"),
        (20, "s >= owned.low && s < owned.high;", "s >= owned.low && s <= owned.high;"),
        (4, "there[i] = at + i < last && s", "there[i] = s"),
        (11, "LAYOUT == 1 ? j : t.columns + j, u_at = LAYOUT == 1 ? t.columns + j : j", "j, u_at = t.columns + j"),
        (4, "weight[i] = load<SCALE>(t.weights, at + i < last ? at + i : at)", "weight[i] = (calc)1"),
        (1, "i >= owned.low && i < owned.high", "i >= owned.low && i < owned.high - 1"),
        (1, "values[e] = t.scale ? v * scale : v", "values[e] = v"),
    ],
)
def test_a_planted_fault_is_found(
    first: int, right: str, wrong: str, bound: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a random problem, of which the one that finds it soonest comes first: each builds kernels."""
    assert SOURCE.count(right) == 1
    monkeypatch.setattr(fused_steps, "SOURCE", SOURCE.replace(right, wrong))
    assert next(findings(IN_STEPS, 60, first=first), None) is not None


def test_every_kernel_compiles_for_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bound for random problems, by NVRTC."""
    library = nvrtc_here()
    monkeypatch.setattr(nvrtc, "compiler", lambda: library)
    asked: Counter[tuple[str, tuple[str, ...]]] = Counter()

    class Loaded:
        def bound(self, *_: Any, **__: Any) -> Any:
            return lambda: None

    def loaded(source: str, name: str, defines: tuple[str, ...], index: int) -> Loaded:
        asked[name, defines] += 1
        return Loaded()

    monkeypatch.setattr(nvrtc, "loaded", loaded)
    for case in fused_cases(60):
        problem = DeviceCase.from_case(case, torch.device("cpu")).problem
        if not reasons(staged_spec(problem), problem.device):
            recipe, ops = planned(problem)
            recipe.bind(ops)
    kernels = {name: [defines for asked_name, defines in asked if asked_name == name] for name, _ in asked}
    assert kernels.keys() == {"gather_rows", "finish_rows", "sum_rows"}
    for name, defines in ((name, each) for name, found in kernels.items() for each in found[:2]):
        assert nvrtc.compile_source(SOURCE, name, ("--gpu-architecture=sm_90", "--std=c++17", *defines))


def test_nothing_to_sum_is_zeros(bound: list[str]) -> None:
    """No pairs, so nothing of the memory between the steps is anywhere."""
    sums = (torch.tensor([[-1, 0], [3, -(2**63)]]), torch.rand(2, 2))
    problem = mg.GroupedGemmProblem(
        torch.ones(3, 16), torch.ones(2, 16, 4), sizes=[0, 0], a_rows=torch.zeros(0, dtype=torch.int32), combine=sums,
        activation="swiglu", c=torch.ones(2, 2), beta=0.5,
    )  # fmt: skip
    assert solved(problem).tolist() == [[0.5, 0.5]] * 2 and bound == ["sum_rows"]


def test_no_index_reads_beside_the_operand(bound: list[str]) -> None:
    memory = torch.full((8, 16), torch.nan)
    memory[2:6] = 1
    rows = torch.tensor([-1, 4, 2**31 - 1, 2**31, -(2**63), 3])
    problem = mg.GroupedGemmProblem(memory[2:6], torch.ones(1, 16, 2), sizes=[6], a_rows=rows)
    assert solved(problem)[:, 0].tolist() == [0, 0, 0, 0, 0, 16] and bound == ["gather_rows"]


def test_lists_are_refused() -> None:
    problem = mg.GroupedGemmProblem([torch.randn(3, 4)], [torch.randn(4, 6)], activation="swiglu")
    assert "lists" in steps_reasons(staged_spec(problem))[0]
    assert replace(staged_spec(problem), fused=None).form == "per_group"


def test_sums_of_no_tokens_are_what_is_added(bound: list[str]) -> None:
    """The rows between the product and the sums are no memory then; binding ended in a KeyError."""
    x, y, c = torch.ones(0, 4), torch.ones(1, 4, 6), torch.arange(12.0).view(2, 6)
    index = torch.full((2, 3), -1)
    problem = mg.GroupedGemmProblem(x, y, sizes=[0], combine=(index, None), c=c, beta=2.0)
    assert torch.equal(solved(problem), 2 * c) and bound == ["sum_rows"]


def test_int8_with_preact_is_refused() -> None:
    """Its int32 sums ended in a KeyError while the step that rounds them was bound."""
    x, y = torch.ones(6, 4, dtype=torch.int8), torch.ones(1, 4, 6, dtype=torch.int8)
    problem = mg.GroupedGemmProblem(x, y, sizes=[6], activation="relu", preact_out=torch.empty(6, 6, dtype=torch.int32))
    assert "int8" in steps_reasons(staged_spec(problem))[0]
