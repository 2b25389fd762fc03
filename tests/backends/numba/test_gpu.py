"""The Numba backend on a GPU: compilations counted, launches that overlap, that follow their operands, on any thread.

That every config is right is shown beside this folder, in test_gpu_configs.py.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import multigemm as mg

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")
pytestmark = pytest.mark.gpu

from multigemm.backends.numba import BACKEND  # noqa: E402
from multigemm.backends.numba.config import (  # noqa: E402
    GENERIC,
    HOPPER,
    HOPPER_MEDIUM,
    HOPPER_NARROW,
    MMA,
    MMA_SMALL,
)
from multigemm.cuda.arguments import MOST_COPIES  # noqa: E402
from multigemm.planning.staging import allocate, stage, staged_spec  # noqa: E402
from tests.support.cuda_driver import addresses_of  # noqa: E402

DEVICE = "cuda"
ALONE = replace(HOPPER, cluster=1)


def values(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().to(DEVICE)


def test_groups_beyond_one_scan() -> None:
    """More groups than 32 x 32 take the scheduler through several scans."""
    groups = 2500
    sizes = torch.randint(0, 6, (groups,), generator=torch.Generator().manual_seed(8))
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)]).int().to(DEVICE)
    a = torch.randint(-3, 4, (int(sizes.sum()), 64), device=DEVICE).bfloat16()
    b = torch.randint(-3, 4, (groups, 64, 136), device=DEVICE).bfloat16()
    problem = mg.GroupedGemmProblem(a, b, offsets=offsets)
    wanted = torch.bmm(a[:, None].float(), b.float()[torch.repeat_interleave(torch.arange(groups), sizes).to(DEVICE)])
    for config in BACKEND.configs(problem.spec, torch.device(DEVICE, 0)):
        got = mg.solve(problem, backend="numba", config=config)
        assert torch.equal(got.float(), wanted[:, 0].bfloat16().float()), config


@pytest.mark.parametrize("config", [MMA_SMALL, MMA, HOPPER_NARROW, HOPPER_MEDIUM, ALONE], ids=str)
@pytest.mark.parametrize("form", ["batched", "list", "jagged"])
def test_launches_that_overlap_keep_their_order(config: Any, form: str) -> None:
    """Each product reads what the one before it wrote, and new sizes; with a rest between them, and without."""
    weights, start = values(3, 128, 128, seed=9) / 12, values(3, 128, 128, seed=10)
    ends = torch.tensor([128, 256, 384], dtype=torch.int32, device=DEVICE)
    there, back = torch.empty_like(start), torch.empty_like(start)

    def problem(source: torch.Tensor, out: torch.Tensor) -> mg.GroupedGemmProblem:
        if form == "list":
            return mg.GroupedGemmProblem(list(source), list(weights), out=list(out))
        if form == "batched":
            return mg.GroupedGemmProblem(source, weights, out=out)
        return mg.GroupedGemmProblem(source.view(384, 128), weights, ends=ends, out=out.view(384, 128))

    plans = [mg.plan(problem(*pair), backend="numba", config=config) for pair in ((back, there), (there, back))]

    def run(rest: bool) -> torch.Tensor:
        back.copy_(start)
        for step in range(60):
            plans[step % 2]()
            if step % 7 == 0:
                ends[:2] += 8 if step % 2 else -8
            if rest:
                torch.cuda.synchronize()
        ends.copy_(torch.tensor([128, 256, 384]))
        torch.cuda.synchronize()
        return back.clone()

    wanted = run(rest=True)
    assert wanted.any()
    assert all(torch.equal(run(rest=False), wanted) for _ in range(5))


def needs(config: Any) -> None:
    major = torch.cuda.get_device_capability()[0]
    if config.kernel == "hopper" and major != 9:
        pytest.skip(f"needs compute capability 9.x, this GPU has {major}.x")


@pytest.mark.parametrize("config", [GENERIC, MMA_SMALL, HOPPER_NARROW, HOPPER_MEDIUM, HOPPER, ALONE], ids=str)
def test_a_launch_follows_its_operands(config: Any) -> None:
    """Other operands in each call, more of them than copies of the maps are kept; on two streams; without any rest."""
    needs(config)
    sets = MOST_COPIES + 6
    offsets = torch.tensor([0, 40, 40, 130, 256], dtype=torch.int32, device=DEVICE)
    problems, staged = [], []
    for seed in range(sets):
        a, b = values(256, 128, seed=seed), values(4, 128, 256, seed=seed + 1000)
        problem = mg.GroupedGemmProblem(a, b, offsets=offsets.clone())
        problems.append(problem)
        staged.append(stage(problem, staged_spec(problem), allocate(problem)).ops)
    recipe = BACKEND.plan(problems[0].spec, config, torch.device(DEVICE, torch.cuda.current_device()))
    launch: Any = recipe.bind(staged[0])
    launch()
    order = [*range(sets), *torch.randint(0, sets, (300,), generator=torch.Generator().manual_seed(1)).tolist()]
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for step, which in enumerate(order):
        if step % 100 == 0:
            torch.cuda.synchronize()
        with torch.cuda.stream(other if step // 100 % 2 else torch.cuda.current_stream()):
            staged[which].out.zero_()
            launch.move(addresses_of(staged[which]))
            launch()
    torch.cuda.synchronize()
    wrong = [i for i, problem in enumerate(problems) if not mg.verify(problem, staged[i].out)]
    assert not wrong
