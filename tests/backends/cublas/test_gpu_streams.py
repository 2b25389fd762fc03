"""The cublas backend on a GPU: graphs, streams, threads, and sizes on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas import grouped_mm
from multigemm.backends.cublas.config import Config
from tests.support.cublas_gpu_cases import ALL, NEEDS_SIZES, captured, cuda, exact_rows, ints, offsets_of

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("config", ALL, ids=lambda c: c.variant)
def test_a_captured_plan_follows_its_operands(config: Config) -> None:
    sizes = [7, 0, 25, 8]
    a, b = ints(40, 64), ints(4, 64, 32, seed=1)
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=sizes), backend="cublas", config=config)
    graph, out = captured(plan)
    for seed in (3, 4):
        a.copy_(ints(40, 64, seed=seed))
        graph.replay()
        assert torch.equal(out.double(), exact_rows(a, b, sizes))


def test_a_graph_of_few_unlike_products_holds_other_calls() -> None:
    """One call eagerly, one per product in a graph; both see the operands of the moment."""
    a, b = ([ints(n, n, seed=n + i) for n in (1024, 512, 256, 128)] for i in (0, 1))
    plan = mg.plan(mg.GroupedGemmProblem(a, b), backend="cublas")
    assert "'grouped'" in plan.why
    graph, out = captured(plan)
    calls: list[Callable[[], object]] = [plan, graph.replay, plan, graph.replay]
    for turn, run in enumerate(calls):
        for x in a:
            x.copy_(ints(*x.shape, seed=turn))
        run()
        assert all(
            torch.equal(z.double(), (x.double() @ y.double()).to(z.dtype).double())
            for x, y, z in zip(a, b, out, strict=True)
        )


@pytest.mark.parametrize("copies", [True, False])
def test_rows_before_the_first_group_may_come_and_go(monkeypatch: pytest.MonkeyPatch, copies: bool) -> None:
    """Into a given output, which keeps every row that no group owns, in one graph for all offsets."""
    monkeypatch.setattr(grouped_mm, "LARGEST_COPY", 10**9 if copies else 0)
    a, b, offsets = ints(40, 64), ints(3, 64, 32, seed=1), offsets_of([10, 20, 10])
    out = torch.empty(40, 32, device="cuda").bfloat16()
    plan = mg.plan(mg.GroupedGemmProblem(a, b, offsets=offsets, out=out), backend="cublas")
    graph, _ = captured(plan)
    for head, sizes in ((0, [0, 30, 0]), (7, [5, 20, 8]), (0, [12, 0, 28]), (40, [0, 0, 0])):
        offsets.copy_(offsets_of(sizes, head))
        out.fill_(77)
        graph.replay()
        end = head + sum(sizes)
        assert torch.equal(out[head:end].double(), exact_rows(a, b, sizes, head)[head:end])
        assert bool((out[:head] == 77).all())
        assert bool((out[end:] == 77).all())


@pytest.mark.parametrize("config", NEEDS_SIZES, ids=lambda c: c.variant)
@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_run_allocates_nothing(config: Config, activation: str | None) -> None:
    if activation and config.variant == "grouped":
        pytest.skip("has no epilogue")
    a, b = ints(40, 64), ints(4, 64, 32, seed=1)
    problem = mg.GroupedGemmProblem(a, b, sizes=[7, 0, 25, 8], activation=activation)
    plan = mg.plan(problem, backend="cublas", config=config)
    plan()
    plan()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    for _ in range(3):
        plan()
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.parametrize("where", ["host", "ends", "offsets"])
def test_grouped_mm_allocates_what_its_plan_says(where: str) -> None:
    """Two pieces inside torch at each call, and neither a result nor anything of ours."""
    a, b, sizes = ints(512, 256), ints(4, 256, 192, seed=1), [96, 0, 204, 212]
    offsets = offsets_of(sizes)
    grouping: Any = {"host": {"sizes": sizes}, "ends": {"ends": offsets[1:]}, "offsets": {"offsets": offsets}}[where]
    plan = mg.plan(mg.GroupedGemmProblem(a, b, **grouping), backend="cublas", config=Config("grouped_mm"))
    assert "two small pieces of memory" in repr(plan)
    for _ in range(2):
        plan()
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()
    for _ in range(5):
        plan()
    after = torch.cuda.memory_stats()
    assert 0 < after["allocation.all.allocated"] - before["allocation.all.allocated"] <= 2 * 5
    assert after["allocated_bytes.all.allocated"] - before["allocated_bytes.all.allocated"] < 5 << 20
    assert after["reserved_bytes.all.current"] == before["reserved_bytes.all.current"]


def test_plans_run_beside_each_other() -> None:
    """Split sums on two streams need two workspaces."""
    many = [(16, 64, 8192 + 64 * i) for i in range(3)]
    problems = []
    for turn in range(4):
        a = [ints(m, k, seed=turn + i) for i, (m, _, k) in enumerate(many)]
        b = [ints(k, n, seed=turn + 9 + i) for i, (_, n, k) in enumerate(many)]
        config = Config("streams", 2) if turn % 2 else Config("loop")
        plan = mg.plan(mg.GroupedGemmProblem(a, b, out_dtype=torch.float32), backend="cublas", config=config)
        problems.append((a, b, plan, cuda.Stream()))
    torch.cuda.synchronize()
    for _ in range(6):
        for _, _, plan, stream in problems:
            with torch.cuda.stream(stream):
                plan()
    torch.cuda.synchronize()
    for a, b, plan, _ in problems:
        assert all(torch.equal(z.double(), x.double() @ y.double()) for x, y, z in zip(a, b, plan(), strict=True))


def _long(seed: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Products whose K the library splits, in a workspace, and which take the device longer than the host."""
    many = [(16, 2048, 8192 + 64 * i) for i in range(4)]
    a = [ints(m, k, seed=seed + i) for i, (m, _, k) in enumerate(many)]
    return a, [ints(k, n, seed=seed + 9 + i) for i, (_, n, k) in enumerate(many)]


def _on_streams(a: Any, b: Any) -> mg.Plan:
    problem = mg.GroupedGemmProblem(a, b, out_dtype=torch.float32)
    return mg.plan(problem, backend="cublas", config=Config("streams", 3))


def test_workspaces_are_lent_to_one_launch_after_another() -> None:
    """However many plans there are: each of the side streams has 32 MiB."""
    a, b = _long(0)
    _on_streams(a, b)()
    before = torch.cuda.memory_allocated()
    plans = [_on_streams(a, b) for _ in range(5)]
    for plan in plans:
        plan()
    assert torch.cuda.memory_allocated() - before < 8 << 20


def test_graphs_run_beside_launches_on_the_same_side_streams() -> None:
    """A graph that was captured with lent side streams has workspaces of its own."""
    (a, b), (c, d) = _long(3), _long(40)
    recorded, eager = _on_streams(a, b), _on_streams(c, d)
    results = recorded(), eager()
    graph, side = torch.cuda.CUDAGraph(), cuda.Stream()
    with torch.cuda.graph(graph, stream=side):
        recorded()
        recorded()
    torch.cuda.synchronize()
    for _ in range(10):
        graph.replay()
        with torch.cuda.stream(side):  # the stream of the capture, whose sides these launches borrow
            eager()
    torch.cuda.synchronize()
    for result, x, y in zip(results, (a, c), (b, d), strict=True):
        assert all(torch.equal(z.double(), p.double() @ q.double()) for p, q, z in zip(x, y, result, strict=True))


@pytest.mark.parametrize("config", NEEDS_SIZES, ids=lambda c: c.variant)
def test_a_variant_that_reads_sizes_says_so(config: Config) -> None:
    a, b = ints(40, 64), ints(3, 64, 32, seed=1)
    plan = mg.plan(mg.GroupedGemmProblem(a, b, offsets=offsets_of([10, 20, 10])), backend="cublas", config=config)
    assert plan.syncs
    plan()
    graph = torch.cuda.CUDAGraph()
    side = torch.zeros(1, device="cuda")
    with torch.cuda.graph(graph):
        side += 1
        with pytest.raises(mg.NotCapturable):
            plan()
    graph.replay()
    assert torch.equal(plan().double(), exact_rows(a, b, [10, 20, 10]))


def test_host_sizes_never_wait() -> None:
    a, b = ints(40, 63), ints(3, 63, 31, seed=1)
    for config in (Config("loop"), Config("batched"), Config("streams", 2)):
        plan = mg.plan(
            mg.GroupedGemmProblem(a, b, sizes=[10, 20, 10], activation="relu"), backend="cublas", config=config
        )
        cuda.set_sync_debug_mode("error")
        try:
            plan()
        finally:
            cuda.set_sync_debug_mode("default")
