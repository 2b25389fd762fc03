"""Plans of the Triton backend on a GPU: graphs, streams, compilations, moved operands, what a call costs."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config
from multigemm.cuda.arguments import OPERANDS
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from tests.support.triton_gpu_cases import offsets_of, problem, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_a_graph_sees_new_sizes_and_new_values() -> None:
    given = problem("jagged_m", n=512, k=512)
    for config in BACKEND.configs(staged_spec(given), given.device):
        plan = mg.plan(given, backend="triton", config=config)
        plan()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = plan()
        offsets_of(given).copy_(torch.tensor([0, 0, 500, 501, 501, 640, 900, 1000, 1200], dtype=torch.int32))
        tensor(given.a).mul_(2)
        graph.replay()
        assert mg.verify(given, out)


def test_the_current_stream_is_used() -> None:
    given = problem("jagged_m")
    plan = mg.plan(given, backend="triton")
    cuda: Any = torch.cuda
    side = cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        cuda._sleep(20_000_000)
        tensor(given.a).mul_(2)
        out = plan()
    side.synchronize()
    assert mg.verify(given, out)


def test_a_plan_costs_the_host_little() -> None:
    plan = mg.plan(problem("jagged_m"), backend="triton")
    best = float("inf")
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(50):
            plan()
        best = min(best, (time.perf_counter() - start) / 50)
    assert best < 30e-6


def elsewhere(given: mg.GroupedGemmProblem) -> mg.GroupedGemmProblem:
    """A problem of the same class, with other values and operands that lie elsewhere."""
    sizes = given.grouping or given.valid_rows
    assert sizes is not None and sizes.live is not None
    options: dict[str, Any] = {"valid_rows" if given.valid_rows else sizes.kind: sizes.live.clone()}
    options |= {"jagged": given.form[-1]} if given.grouping else {}
    return mg.GroupedGemmProblem(torch.randn_like(tensor(given.a)), torch.randn_like(tensor(given.b)), **options)


def addresses(ops: Operands) -> tuple[int, ...]:
    found = (getattr(ops, name, None) for name in OPERANDS)
    return tuple(x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in found)


def on_a_new_thread(work: Callable[[], Any]) -> Any:
    """Where no CUDA context is current, as on the threads of autograd."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


@pytest.mark.parametrize("run", [lambda work: work(), on_a_new_thread], ids=["here", "new thread"])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_k", "jagged_n", "masked"])
@pytest.mark.parametrize("extent", [512, 509])
def test_a_launch_follows_the_operands(form: str, extent: int, run: Callable[[Callable[[], Any]], Any]) -> None:
    """Every shipped config, bound to some operands and moved to others of the same class."""
    first = problem(form, n=extent, k=512)
    problems = [first, elsewhere(first)]
    spec, device = staged_spec(first), first.device
    assert staged_spec(problems[1]) == spec
    outs = [tensor(allocate(x)) for x in problems]
    staged = [stage(x, spec, out).ops for x, out in zip(problems, outs, strict=True)]

    def bound(config: Any) -> Any:
        return BACKEND.plan(spec, config, device).bind(staged[0])

    for config in BACKEND.configs(spec, device):
        launch = run(partial(bound, config))
        for given, ops, out in zip(problems, staged, outs, strict=True):
            out.fill_(float("nan"))
            launch.move(addresses(ops))
            run(launch)
            assert mg.verify(given, out), config


RING = Config("hopper", block_m=128, block_n=128, stages=5, warps=4, order="drawn")
SHARED = Config(block_m=32, block_n=64, block_k=64, warps=4, stages=3, programs=0, splits=4)
COUNTING = {"search": (6, RING), "listed": (300, RING), "shared": (6, SHARED)}


def deep_problem(groups: int) -> mg.GroupedGemmProblem:
    rows = 5 * groups + 100
    offsets = torch.linspace(0, rows, groups + 1).to(torch.int32).cuda()
    a = torch.randn(rows, 1024, device="cuda", dtype=torch.bfloat16)
    return mg.GroupedGemmProblem(
        a, torch.randn(groups, 1024, 136, device="cuda", dtype=torch.bfloat16), offsets=offsets
    )


def dirty() -> None:
    """Leaves memory behind whose words are not zero."""
    held = [torch.full((1 << 12,), 7, dtype=torch.int32, device="cuda") for _ in range(64)]
    torch.cuda.synchronize()
    del held


@pytest.mark.parametrize("kind", COUNTING)
def test_a_plan_runs_at_once_on_another_stream(kind: str) -> None:
    groups, config = COUNTING[kind]
    given = deep_problem(groups)
    mg.plan(given, backend="triton", config=config)()
    cuda: Any = torch.cuda
    side = cuda.Stream()
    dirty()
    cuda._sleep(50_000_000)  # what this stream is asked for now comes late
    plan = mg.plan(given, backend="triton", config=config)
    with torch.cuda.stream(side):
        out = plan()
    side.synchronize()
    assert mg.verify(given, out)
    torch.cuda.synchronize()
    assert mg.verify(given, plan())


@pytest.mark.parametrize("kind", COUNTING)
def test_a_call_in_a_graph_and_plans_beside_it(kind: str) -> None:
    groups, config = COUNTING[kind]
    given = deep_problem(groups)
    plan = mg.plan(given, backend="triton", config=config)
    plan()
    graph = torch.cuda.CUDAGraph()
    dirty()
    with torch.cuda.graph(graph):
        out = mg.solve(given, backend="triton", config=config)
        again = plan()
    others = [mg.plan(given, backend="triton", config=config) for _ in range(3)]
    for other in others:
        graph.replay()
        assert mg.verify(given, other())
    out.zero_()
    graph.replay()
    assert mg.verify(given, out)
    assert mg.verify(given, again)
