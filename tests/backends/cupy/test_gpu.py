"""The cupy backend on a GPU: every kernel on every form, sizes that change under a graph, no recompilation."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import BACKEND, choice
from multigemm.planning.staging import allocate, stage, staged_spec
from tests.support.cuda_driver import addresses_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
Make = Callable[[], mg.GroupedGemmProblem]
OFFSETS = [3, 103, 103, 220, 300]


def r(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.randn(shape, device="cuda").to(dtype)


def cut() -> torch.Tensor:
    return torch.tensor(OFFSETS, device="cuda")


FORMS: dict[str, Make] = {
    "jagged_m": lambda: mg.GroupedGemmProblem(r(304, 136), r(4, 136, 264), offsets=cut()),
    "jagged_m, one block of columns": lambda: mg.GroupedGemmProblem(r(304, 136), r(4, 136, 72), offsets=cut()),
    "jagged_m, three blocks, few rows": lambda: mg.GroupedGemmProblem(
        r(60, 136), r(9, 136, 384), sizes=torch.tensor([1, 0, 8, 9, 16, 2, 0, 23, 1], device="cuda")
    ),
    "jagged_k, one block of columns": lambda: mg.GroupedGemmProblem(
        r(304, 264).T, r(304, 72), offsets=cut(), jagged="k"
    ),
    "jagged_m, weights by columns": lambda: mg.GroupedGemmProblem(r(304, 136), r(4, 264, 136).mT, offsets=cut()),
    "jagged_m, rows by columns": lambda: mg.GroupedGemmProblem(r(136, 304).T, r(4, 136, 264), offsets=cut()),
    "jagged_m, rows by columns, odd results": lambda: mg.GroupedGemmProblem(
        r(136, 304).T, r(4, 136, 263), offsets=cut()
    ),
    "odd batch": lambda: mg.GroupedGemmProblem(r(3, 301, 135), r(3, 135, 263)),
    "jagged_m, one B": lambda: mg.GroupedGemmProblem(r(304, 136), r(136, 264), offsets=cut()),
    "jagged_n": lambda: mg.GroupedGemmProblem(r(4, 72, 136), r(136, 304), offsets=cut(), jagged="n"),
    "jagged_k": lambda: mg.GroupedGemmProblem(r(304, 264).T, r(304, 136), offsets=cut(), jagged="k"),
    "batched": lambda: mg.GroupedGemmProblem(r(3, 300, 136), r(3, 136, 264)),
    "masked": lambda: mg.GroupedGemmProblem(
        r(3, 300, 136), r(3, 136, 264), valid_rows=torch.tensor([0, 300, 77], device="cuda")
    ),
    "list": lambda: mg.GroupedGemmProblem([r(300, 64), r(5, 128), r(0, 8)], [r(64, 264), r(128, 8), r(8, 16)]),
    "list, odd rows in the result": lambda: mg.GroupedGemmProblem(
        [r(172, 8), r(31, 72)], [r(8, 256), r(72, 40)], out=[r(172, 259)[:, :256], r(31, 41)[:, :40]]
    ),
    "odd list": lambda: mg.GroupedGemmProblem([r(300, 65), r(5, 127), r(0, 8)], [r(65, 263), r(127, 7), r(8, 16)]),
    "odd weights by columns": lambda: mg.GroupedGemmProblem(r(304, 136), r(4, 264, 137)[..., 1:].mT, offsets=cut()),
    "jagged_n, odd": lambda: mg.GroupedGemmProblem(r(4, 71, 135), r(135, 303), offsets=cut(), jagged="n"),
    "masked, any epilogue": lambda: mg.GroupedGemmProblem(
        r(3, 300, 136), r(3, 136, 264), valid_rows=torch.tensor([0, 300, 77], device="cuda"), bias=r(264),
        activation="relu",
    ),
    "odd strides": lambda: mg.GroupedGemmProblem(r(304, 137), r(4, 137, 263), offsets=cut()),
    "any epilogue": lambda: mg.GroupedGemmProblem(
        r(304, 136), r(4, 136, 264), offsets=cut(), alpha=0.5, beta=2.0, c=r(304, 264), bias=r(4, 264),
        activation="gelu", out_dtype=torch.float32,
    ),
    "float64": lambda: mg.GroupedGemmProblem(r(2, 70, 50, dtype=torch.float64), r(2, 50, 90, dtype=torch.float64)),
    "float64, any epilogue": lambda: mg.GroupedGemmProblem(
        r(304, 137, dtype=torch.float64), r(4, 263, 137, dtype=torch.float64).mT, offsets=cut(), alpha=0.5, beta=2.0,
        c=r(304, 263, dtype=torch.float64), bias=r(4, 263, dtype=torch.float64), activation="silu",
    ),
    "float32": lambda: mg.GroupedGemmProblem(
        r(304, 136, dtype=torch.float32), r(4, 136, 264, dtype=torch.float32), offsets=cut()
    ),
    "float32, odd": lambda: mg.GroupedGemmProblem(
        r(304, 138, dtype=torch.float32)[:, 1:], r(4, 137, 263, dtype=torch.float32), offsets=cut()
    ),
    "float32, turned": lambda: mg.GroupedGemmProblem(
        r(136, 304, dtype=torch.float32).T, r(4, 264, 136, dtype=torch.float32).mT, offsets=cut()
    ),
    "float32, both k apart": lambda: mg.GroupedGemmProblem(
        r(304, 272, dtype=torch.float32)[:, ::2], r(4, 136, 528, dtype=torch.float32)[..., ::2], offsets=cut()
    ),
    "float32, jagged k, any epilogue": lambda: mg.GroupedGemmProblem(
        r(304, 263, dtype=torch.float32).T, r(304, 135, dtype=torch.float32), offsets=cut(), jagged="k", alpha=0.5,
        bias=r(4, 135, dtype=torch.float32), activation="gelu",
    ),
    "float32, jagged n": lambda: mg.GroupedGemmProblem(
        r(4, 71, 135, dtype=torch.float32), r(135, 303, dtype=torch.float32), offsets=cut(), jagged="n"
    ),
    "int8": lambda: mg.GroupedGemmProblem(
        torch.randint(-9, 9, (304, 137), device="cuda", dtype=torch.int8),
        torch.randint(-9, 9, (4, 137, 263), device="cuda", dtype=torch.int8), offsets=cut(),
    ),
    "int8, turned": lambda: mg.GroupedGemmProblem(
        torch.randint(-9, 9, (144, 304), device="cuda", dtype=torch.int8).T,
        torch.randint(-9, 9, (4, 264, 144), device="cuda", dtype=torch.int8).mT, offsets=cut(), alpha=3,
    ),
    "tf32, odd, turned": lambda: mg.GroupedGemmProblem(
        r(137, 304, dtype=torch.float32).T, r(4, 263, 137, dtype=torch.float32).mT, offsets=cut(), precision="tf32",
        bias=r(263, dtype=torch.float32), activation="relu",
    ),
    "tf32, jagged m, weights by columns": lambda: mg.GroupedGemmProblem(
        r(304, 136, dtype=torch.float32), r(4, 264, 136, dtype=torch.float32).mT, offsets=cut(), precision="tf32"
    ),
    "tf32, jagged k": lambda: mg.GroupedGemmProblem(
        r(304, 264, dtype=torch.float32).T, r(304, 136, dtype=torch.float32), offsets=cut(), jagged="k",
        precision="tf32",
    ),
    "int8, jagged m": lambda: mg.GroupedGemmProblem(
        torch.randint(-128, 128, (304, 144), device="cuda", dtype=torch.int8),
        torch.randint(-128, 128, (4, 144, 272), device="cuda", dtype=torch.int8), offsets=cut(),
    ),
    "int8, jagged k": lambda: mg.GroupedGemmProblem(
        torch.randint(-128, 128, (304, 144), device="cuda", dtype=torch.int8).T,
        torch.randint(-128, 128, (304, 272), device="cuda", dtype=torch.int8), offsets=cut(), jagged="k",
    ),
    "tf32": lambda: mg.GroupedGemmProblem(
        r(2, 150, 50, dtype=torch.float32), r(2, 50, 190, dtype=torch.float32), precision="tf32"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMS)
def test_every_config_gives_the_right_answer_twice(name: str) -> None:
    problem = FORMS[name]()
    for config in choice.candidates(staged_spec(problem), problem.device):
        plan = mg.plan(problem, backend="cupy", config=config)
        first = [x.clone() for x in _arrays(plan())]
        assert mg.verify(problem, plan()), (config, str(mg.verify(problem, plan())))
        assert all(torch.equal(x, y) for x, y in zip(first, _arrays(plan()), strict=True)), config


def _arrays(result: torch.Tensor | list[torch.Tensor]) -> list[torch.Tensor]:
    return list(result) if isinstance(result, list) else [result]


def test_a_graph_sees_new_sizes() -> None:
    offsets = cut()
    problem = mg.GroupedGemmProblem(r(304, 136), r(4, 136, 264), offsets=offsets)
    plan = mg.plan(problem, backend="cupy")
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    for seed in range(20):
        rng = random.Random(seed)
        offsets.copy_(torch.tensor(sorted(rng.randint(0, 304) for _ in range(5))))
        graph.replay()
        assert mg.verify(problem, out), seed


@pytest.mark.parametrize("odd", [0, 1], ids=["aligned", "odd"])
def test_ten_thousand_launches_in_one_graph_are_right_for_random_sizes(odd: int) -> None:
    """40 rounds of 250 launches, all configs in turn, each with sizes of its own, compared exactly within the graph."""
    rounds, launches, rows, groups, k, n = 40, 250, 300, 6, 136 - odd, 264 - odd
    a = torch.randint(-2, 3, (rows, k), device="cuda").bfloat16()
    b = torch.randint(-2, 3, (groups, k, n), device="cuda").bfloat16()
    products = (a.double() @ b.double()).bfloat16()  # of every row with every group: whole numbers, rounded once
    row = torch.arange(rows, device="cuda").expand(launches, rows).contiguous()
    offsets = torch.zeros(launches, groups + 1, dtype=torch.int64, device="cuda")
    out = torch.empty(launches, rows, n, dtype=torch.bfloat16, device="cuda")
    problems = [mg.GroupedGemmProblem(a, b, offsets=own, out=result) for own, result in zip(offsets, out, strict=True)]
    choices = choice.candidates(staged_spec(problems[0]), a.device)
    plans = [mg.plan(p, backend="cupy", config=choices[i % len(choices)]) for i, p in enumerate(problems)]
    drawn = torch.zeros(rounds, *offsets.shape, dtype=torch.int64, device="cuda")
    wrong = torch.zeros(rounds, launches, dtype=torch.bool, device="cuda")

    def one_round(number: int) -> None:
        offsets.copy_(drawn[number])
        out.fill_(-12345.0)
        for plan in plans:
            plan()
        group = torch.searchsorted(offsets, row, right=True) - 1
        owned = (group >= 0) & (group < groups)
        expected = torch.where(owned[..., None], products[group.clamp(0, groups - 1), row], -12345.0)
        wrong[number] = (out != expected).flatten(1).any(1)

    one_round(0)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(rounds):
            one_round(number)
    random_sizes = torch.Generator("cuda").manual_seed(7)
    for replay in range(3):
        drawn.copy_(torch.randint(0, rows + 1, drawn.shape, device="cuda", generator=random_sizes).sort(dim=2).values)
        wrong.fill_(True)
        graph.replay()
        places = wrong.nonzero().tolist()
        assert not places, (replay, places[:5], {str(plans[i].config) for _, i in places})


MOVED = [name for name in FORMS if "list" not in name]


@pytest.mark.parametrize("name", MOVED)
def test_a_launch_that_was_moved_solves_the_problem_that_it_was_moved_to(name: str) -> None:
    device = torch.device("cuda", 0)
    first, second = FORMS[name](), FORMS[name]()
    spec = staged_spec(first)
    assert staged_spec(second) == spec
    here = stage(first, spec, allocate(first))
    for config in choice.candidates(spec, device):
        out = allocate(second)
        there = stage(second, spec, out)
        if [x % 256 for x in addresses_of(here.ops)] != [x % 256 for x in addresses_of(there.ops)]:
            continue  # another class of problems
        launch: Any = BACKEND.plan(spec, config, device).bind(here.ops)
        launch()
        for step in there.before:
            step()
        launch.move(addresses_of(there.ops))
        launch()
        assert mg.verify(second, out[0] if second.squeezed else out), config


@pytest.mark.parametrize("name", FORMS)
def test_a_thread_that_never_touched_cuda_solves_every_form(name: str) -> None:
    """As the thread on which autograd runs backward: binding and launching must not need its context."""
    problem, found = FORMS[name](), list[object]()

    def work() -> None:
        for config in choice.candidates(staged_spec(problem), torch.device("cuda", 0)):
            try:
                found.append(mg.verify(problem, mg.plan(problem, backend="cupy", config=config)()))
            except Exception as error:
                found.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found and all(found) and not [x for x in found if isinstance(x, Exception)]
