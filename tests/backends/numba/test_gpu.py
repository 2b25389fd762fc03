"""The Numba backend on a GPU: every shipped config, the contract of a launch, compilations counted."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

import multigemm as mg

pytest.importorskip("numba_cuda", reason="pip install 'multigemm[numba]'")
pytestmark = pytest.mark.gpu

from multigemm.backends.numba import BACKEND, build  # noqa: E402
from multigemm.backends.numba.config import (  # noqa: E402
    FMA_SMALL,
    FMA_TALL,
    GENERIC,
    GENERIC_LARGE,
    GENERIC_LOW,
    HOPPER,
    HOPPER_MEDIUM,
    HOPPER_NARROW,
    MMA,
    MMA_SMALL,
    MMA_TALL,
)
from multigemm.backends.numba.launch import kernel_of  # noqa: E402
from multigemm.cuda.arguments import MOST_COPIES  # noqa: E402
from multigemm.planning.staging import allocate, stage, staged_spec  # noqa: E402
from tests.support.cuda_driver import addresses_of  # noqa: E402
from tests.support.numba_cases import DTYPES, Maker, cases, epilogue, operands  # noqa: E402
from tests.support.numba_contract import checks  # noqa: E402

CONFIGS = (GENERIC, GENERIC_LARGE, GENERIC_LOW, MMA, MMA_SMALL, HOPPER_NARROW, HOPPER_MEDIUM, HOPPER)
DEVICE = "cuda"
SCALE = 8
"""Extents become multiples of 8, so that rows are aligned; offsets do not."""


def size_of(config: Any) -> tuple[str, int]:
    """What makes a config, but for the cluster, which narrow problems do without."""
    return config.kernel, getattr(config, "n_max", getattr(config, "bm", 0))


def offered(config: Any, problem: mg.GroupedGemmProblem) -> bool:
    return size_of(config) in map(size_of, BACKEND.configs(problem.spec, torch.device(DEVICE, 0)))


def check(title: str, problem: mg.GroupedGemmProblem, config: Any) -> None:
    verdict = mg.verify(problem, mg.solve(problem, backend="numba", config=config))
    assert verdict, f"{title} {config}: {verdict}"


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_config_where_it_is_offered(config: Any) -> None:
    few = [case for case in cases(DEVICE, ("bfloat16",), SCALE, layouts=("row",)) if offered(config, case[1])]
    for title, problem in few:
        check(title, problem, config)
    assert few or torch.cuda.get_device_capability()[0] != 9


@pytest.mark.parametrize(
    ("dtype", "precision", "config"),
    [
        *(("int8", "ieee", config) for config in (MMA, MMA_SMALL)),
        *(("float64", "ieee", config) for config in (MMA_TALL, MMA_SMALL)),
        *(("float32", "ieee", config) for config in (FMA_TALL, FMA_SMALL)),
        *(("float32", "tf32", config) for config in (MMA, MMA_SMALL)),
    ],
    ids=str,
)
def test_tiles_of_other_dtypes(dtype: str, precision: Any, config: Any) -> None:
    """Lists whose extents are multiples of 16, so that operands are aligned in both directions, and odd ones."""
    for scale, layout in ((16, "col"), (16, "row"), (7, "row")):
        make = Maker(5, DTYPES[dtype], DEVICE, layout)
        a, b, grouping = operands("per_group", make, scale)
        b = operands("per_group", Maker(5, DTYPES[dtype], DEVICE, "row"), scale)[1]
        plain = mg.GroupedGemmProblem(a, b, precision=precision, **grouping)
        if not offered(config, plain):
            pytest.skip("not of this GPU")
        check(f"{dtype} {precision} {layout} x{scale}", plain, config)
        whole = mg.GroupedGemmProblem(a, b, precision=precision, **grouping, **epilogue(plain, make, "relu"))
        check(f"{dtype} {precision} {layout} x{scale} epilogue", whole, config)


def test_both_majors_and_ragged_k_on_wgmma() -> None:
    make = Maker(3, torch.bfloat16, DEVICE, "row")
    a, b = make.matrix(200, 96).T, make.matrix(200, 136)
    offsets = torch.tensor([3, 3, 70, 71, 140, 197], dtype=torch.int32, device=DEVICE)
    problems = {"wgrad": mg.GroupedGemmProblem(a, b, offsets=offsets, jagged="k")}
    turned, weights = make.matrix(200, 64), make.matrix(5, 136, 64).transpose(1, 2)
    problems["weights along k"] = mg.GroupedGemmProblem(turned, weights, offsets=offsets, activation="gelu")
    for title, problem in problems.items():
        if offered(HOPPER_NARROW, problem):
            check(title, problem, HOPPER_NARROW)


@pytest.mark.parametrize("dtype", DTYPES)
def test_default_config_of_every_dtype(dtype: str) -> None:
    for title, problem in cases(DEVICE, (dtype,), forms=("per_group", "jagged_m", "jagged_k"), layouts=("col",)):
        check(title, problem, None)


def test_contract() -> None:
    wrong = [f"{title} {found}" for title, found in checks(DEVICE, ("bfloat16",), 8) if not found[1]]
    assert not wrong, "\n".join(wrong)


def test_new_token_and_group_counts_compile_nothing() -> None:
    draw = torch.Generator().manual_seed(4)

    def problem(groups: int, total: int) -> mg.GroupedGemmProblem:
        cuts = torch.randint(0, total + 1, (groups - 1,), generator=draw).sort().values
        offsets = torch.cat([torch.tensor([0]), cuts, torch.tensor([total])]).int().to(DEVICE)
        a = torch.randn(total, 64, device=DEVICE, dtype=torch.bfloat16)
        b = torch.randn(groups, 64, 256, device=DEVICE, dtype=torch.bfloat16)
        return mg.GroupedGemmProblem(a, b, offsets=offsets)

    for config in (GENERIC, MMA_SMALL, HOPPER_NARROW):
        mg.solve(problem(3, 100), backend="numba", config=config)
        before = len(build.compilations)
        for _ in range(67):
            groups = int(torch.randint(1, 80, (), generator=draw))
            total = int(torch.randint(groups, 3000, (), generator=draw))
            mg.solve(problem(groups, total), backend="numba", config=config)
        assert len(build.compilations) == before
    torch.cuda.synchronize()


def test_graph_sees_new_offsets_and_operands() -> None:
    make = Maker(1, torch.bfloat16, DEVICE, "row")
    a, b, grouping = operands("jagged_m", make, 8)
    problem = mg.GroupedGemmProblem(a, b, **grouping)
    plan = mg.plan(problem, backend="numba")
    plan()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    for shift in (1, 5, 0):
        grouping["offsets"][1:-1] += shift
        a.copy_(make.matrix(*a.shape))
        graph.replay()
        torch.cuda.synchronize()
        assert mg.verify(problem, out)
    first = out.clone()
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(out, first)


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


@pytest.mark.parametrize("config", [MMA_SMALL, MMA, HOPPER_NARROW, HOPPER_MEDIUM], ids=str)
@pytest.mark.parametrize("form", ["batched", "list", "jagged"])
def test_launches_that_overlap_keep_their_order(config: Any, form: str) -> None:
    """Each product reads what the one before it wrote, and new sizes; with a rest between them, and without."""
    make = Maker(9, torch.bfloat16, DEVICE, "row")
    weights, start = make.matrix(3, 128, 128) / 12, make.matrix(3, 128, 128)
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


@pytest.mark.parametrize("config", [GENERIC, MMA_SMALL, HOPPER_NARROW], ids=str)
def test_a_thread_that_never_touched_cuda_loads_and_launches(config: Any) -> None:
    """On the last device of the host, with everything to be loaded anew."""
    needs(config)
    device = torch.device("cuda", torch.cuda.device_count() - 1)
    a, b = (torch.randn(3, 64, 64, device=device).bfloat16() for _ in range(2))
    ends = torch.tensor([8, 100, 192], dtype=torch.int32, device=device)
    problem = mg.GroupedGemmProblem(a.view(192, 64), b, ends=ends)
    kernel_of.cache_clear()
    found: list[Any] = []

    def solve() -> None:
        try:
            found.append(mg.solve(problem, backend="numba", config=config))
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=solve)
    thread.start()
    thread.join()
    torch.cuda.synchronize(device)
    assert isinstance(found[0], torch.Tensor), found[0]
    assert mg.verify(problem, found[0])


@pytest.mark.parametrize("config", [GENERIC, MMA_SMALL, HOPPER_NARROW, HOPPER_MEDIUM, HOPPER], ids=str)
def test_a_launch_follows_its_operands(config: Any) -> None:
    """Other operands in each call, more of them than copies of the maps are kept; on two streams; without any rest."""
    needs(config)
    sets, make = MOST_COPIES + 6, Maker(4, torch.bfloat16, DEVICE, "row")
    offsets = torch.tensor([0, 40, 40, 130, 256], dtype=torch.int32, device=DEVICE)
    problems, staged = [], []
    for _ in range(sets):
        problem = mg.GroupedGemmProblem(make.matrix(256, 128), make.matrix(4, 128, 256), offsets=offsets.clone())
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
