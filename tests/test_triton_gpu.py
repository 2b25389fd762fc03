"""The Triton backend on a GPU: configs forced in turn, graphs, streams, compilations."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config
from multigemm.backends.triton import compile as compiled
from multigemm.backends.triton.candidates import hopper_candidates
from multigemm.backends.triton.config import problem_with
from multigemm.staging import staged_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
SIZES = [5, 0, 70, 1, 130, 300, 640, 64]


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randn(*shape, generator=generator).to(dtype).cuda()


def problem(
    form: str, n: int = 136, k: int = 104, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> mg.GroupedGemmProblem:
    groups, rows, m = len(SIZES), sum(SIZES) + 14, 328
    offsets = (torch.tensor([0, *SIZES]).cumsum(0) + 3).to(torch.int32).cuda()
    valid = torch.tensor([min(m, s) for s in SIZES], dtype=torch.int32).cuda()
    makers: dict[str, Any] = {
        "jagged_m": lambda: ((draw(rows, k, dtype=dtype), draw(groups, k, n, dtype=dtype)), {"offsets": offsets}),
        "jagged_m_nt": lambda: (
            (draw(rows, k, dtype=dtype), draw(groups, n, k, dtype=dtype).transpose(1, 2)),
            {"offsets": offsets},
        ),
        "jagged_n": lambda: (
            (draw(m, k, dtype=dtype), draw(k, rows, dtype=dtype)),
            {"offsets": offsets, "jagged": "n"},
        ),
        "jagged_k": lambda: (
            (draw(rows, m, dtype=dtype).T, draw(rows, n, dtype=dtype)),
            {"offsets": offsets, "jagged": "k"},
        ),
        "batched": lambda: ((draw(groups, m, k, dtype=dtype), draw(groups, k, n, dtype=dtype)), {}),
        "masked": lambda: ((draw(groups, m, k, dtype=dtype), draw(groups, k, n, dtype=dtype)), {"valid_rows": valid}),
        "per_group": lambda: (
            ([draw(s, k, dtype=dtype) for s in SIZES], [draw(k, n + 8 * i, dtype=dtype) for i in range(groups)]),
            {},
        ),
    }
    (a, b), given = makers[form]()
    return mg.GroupedGemmProblem(a, b, **given, **options)


def tensor(operand: Any) -> torch.Tensor:
    assert isinstance(operand, torch.Tensor)
    return operand


def offsets_of(given: mg.GroupedGemmProblem) -> torch.Tensor:
    assert given.grouping is not None
    return tensor(given.grouping.live)


FORMS = ["jagged_m", "jagged_m_nt", "jagged_n", "jagged_k", "batched", "masked", "per_group"]


@pytest.mark.parametrize("extents", [(136, 104), (135, 103)], ids=["aligned", "odd"])
@pytest.mark.parametrize("form", FORMS)
def test_configs_of_every_form(form: str, extents: tuple[int, int]) -> None:
    given = problem(form, *extents)
    spec = staged_spec(given)
    configs = BACKEND.configs(spec, given.device)
    assert configs
    turn = FORMS.index(form)  # the forms take turns through the configs, so that each runs and few compile
    for config in {configs[0], configs[turn % len(configs)], configs[-1]}:
        verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
        assert verdict, f"{config}: {verdict}"


@pytest.mark.parametrize("extents", [(256, 128), (131, 77)], ids=["aligned", "odd"])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_m_nt", "jagged_n", "batched", "masked"])
def test_tf32_on_the_ring(form: str, extents: tuple[int, int]) -> None:
    given = problem(form, *extents, dtype=torch.float32, precision="tf32")
    found = hopper_candidates(staged_spec(given))
    assert found
    for config in found[:2]:
        verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
        assert verdict, f"{config}: {verdict}"


@pytest.mark.parametrize("groups", [1, 7, 128, 129, 256, 257])
@pytest.mark.parametrize("form", ["m", "masked", "n"])
def test_tiles_dealt_and_drawn_find_their_groups(form: str, groups: int) -> None:
    generator = torch.Generator().manual_seed(groups)
    sizes = torch.randint(0, 150, (groups,), generator=generator)
    sizes[:: max(2, groups // 3)] = 0
    total = int(sizes.sum()) + 11
    offsets = (torch.cat([torch.zeros(1), sizes]).cumsum(0) + 3).to(torch.int32).cuda()
    if form == "masked":
        given = mg.GroupedGemmProblem(draw(groups, 150, 72), draw(groups, 72, 264), valid_rows=sizes.int().cuda())
    elif form == "m":
        given = mg.GroupedGemmProblem(draw(total, 72), draw(groups, 72, 264), offsets=offsets)
    else:
        given = mg.GroupedGemmProblem(draw(264, 72), draw(72, total), offsets=offsets, jagged="n")
    for at, config in enumerate(hopper_candidates(staged_spec(given))[:2]):
        plan = mg.plan(given, backend="triton", config=replace(config, order="dealt" if at == 1 else "drawn"))
        for _ in range(3):  # the counter is left as it was found
            tensor(plan()).fill_(torch.nan)
        verdict = mg.verify(given, plan())
        assert verdict, f"{config}: {verdict}"


@pytest.mark.parametrize("extents", [(131, 77), (259, 513), (135, 104)])
def test_unaligned_weights_through_registers(extents: tuple[int, int]) -> None:
    given = problem("jagged_m", *extents)
    spec = staged_spec(given)
    pack = () if spec.a.align == 16 else ("a",)
    low = Config("hopper", block_m=128, block_n=128, warps=4, stages=5, pack=pack, carry=True)
    carrying = [config for config in (low, replace(low, block_m=256, stages=4)) if not problem_with(config, spec)]
    assert low in carrying
    for config in carrying:
        plan = mg.plan(given, backend="triton", config=config)
        tensor(plan()).fill_(torch.nan)
        assert mg.verify(given, plan()), config


def test_lists_of_many_tiles() -> None:
    sizes = [(1500, 1400, 40), (700, 33, 96), (3, 2000, 8)] * 2
    given = mg.GroupedGemmProblem([draw(m, k) for m, _, k in sizes], [draw(k, n) for _, n, k in sizes])
    for config in BACKEND.configs(staged_spec(given), given.device):
        small = replace(config, block_m=32, block_n=32, block_k=64, warps=4)  # 8668 tiles: more than the host lists
        for chosen in (config, small):
            assert mg.verify(given, mg.solve(given, backend="triton", config=chosen)), chosen


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
def test_epilogues_of_every_config(activation: str | None) -> None:
    rows = sum(SIZES) + 14
    given = problem("jagged_m", alpha=-0.5, beta=2.0, c=draw(rows, 136), bias=draw(len(SIZES), 136),
                    activation=activation, out_dtype=torch.float32)  # fmt: skip
    for config in BACKEND.configs(staged_spec(given), given.device)[:2]:
        verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
        assert verdict, f"{config}: {verdict}"


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


def test_new_token_counts_and_group_counts_compile_nothing() -> None:
    def run(groups: int, rows: int) -> None:
        offsets = torch.linspace(0, rows, groups + 1).to(torch.int32).cuda()
        mg.grouped_gemm(draw(rows, 128), draw(groups, 128, 256), offsets=offsets, backend="triton")

    for rows in (64, 700, 20000):
        run(4, rows)
    before = compiled.compilations
    for step in range(20):
        run(1 + 37 * step % 60, 300 + 977 * step % 15000)
    assert compiled.compilations == before


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


@pytest.mark.parametrize("form", FORMS)
def test_tiles_shared_out_along_k(form: str) -> None:
    given = problem(form, 72, 1100, bias=None)
    config = Config(block_m=32, block_n=64, block_k=64, warps=4, stages=3, programs=0, splits=4)
    plan = mg.plan(given, backend="triton", config=config)
    results = [[out.clone() for out in made] if isinstance(made, list) else made.clone() for made in (plan(), plan())]
    assert mg.verify(given, results[0])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), "the same call gives the same bits"
