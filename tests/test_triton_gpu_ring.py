"""The warp-specialised kernel on a GPU: tf32, the ways to its tiles, weights through registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config
from multigemm.backends.triton.candidates import hopper_candidates
from multigemm.backends.triton.config import problem_with
from multigemm.staging import staged_spec
from tests.triton_gpu_cases import draw, problem, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


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


@pytest.mark.parametrize("extents", [(131, 77), (259, 513), (135, 104), (1, 3), (130, 1500), (1085, 189)])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_m_nt"])
def test_unaligned_weights_copied_beside_the_product(form: str, extents: tuple[int, int]) -> None:
    given = problem(form, *extents)
    pack = ("b",) if staged_spec(given).a.align == 16 else ("a", "b")
    config = Config("hopper", block_m=128, block_n=128, warps=4, stages=5, pack=pack, ahead=True)
    if reason := problem_with(config, staged_spec(given)):
        pytest.skip(reason)
    plan = mg.plan(given, backend="triton", config=config)
    for _ in range(3):  # what was counted is left as it was found
        tensor(plan()).fill_(torch.nan)
    assert mg.verify(given, plan())
    tensor(given.b).mul_(2)
    assert mg.verify(given, plan()), "new weights are copied anew"


@pytest.mark.parametrize("skipped", [1, 7])
@pytest.mark.parametrize("turned", [False, True])
def test_lines_of_weights_may_start_anywhere(skipped: int, turned: bool) -> None:
    """What lies between lines and between groups does not reach the products; empty groups are left out."""
    rows, columns = (200, 72) if turned else (72, 200)
    whole = draw(8, rows + 1, columns + skipped)
    whole[:, :, :skipped] = torch.nan
    whole[:, rows:] = torch.nan
    whole[1] = torch.nan  # of a group without rows
    weights = whole[:, :rows, skipped:]
    offsets = torch.tensor([0, 5, 5, 70, 71, 130, 300, 640, 704], dtype=torch.int32).cuda()
    given = mg.GroupedGemmProblem(draw(704, 72), weights.transpose(1, 2) if turned else weights, offsets=offsets)
    config = Config("hopper", block_m=128, block_n=128, warps=4, stages=5, pack=("b",), ahead=True)
    if reason := problem_with(config, staged_spec(given)):
        pytest.skip(reason)
    assert mg.verify(given, mg.solve(given, backend="triton", config=config))


def test_copies_beside_the_product_end_on_any_stream_and_in_graphs() -> None:
    given = problem("jagged_m", 515, 333)
    config = Config("hopper", block_m=128, block_n=128, warps=4, stages=5, pack=("a", "b"), ahead=True)
    if reason := problem_with(config, staged_spec(given)):
        pytest.skip(reason)
    plans = [mg.plan(given, backend="triton", config=config) for _ in range(3)]
    for plan in plans:
        plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plans[0]()
    streams = [torch.cuda.Stream() for _ in plans[1:]]  # type: ignore[no-untyped-call]
    torch.cuda.synchronize()
    results = []
    for plan, stream in zip(plans[1:], streams, strict=True):
        with torch.cuda.stream(stream):
            for _ in range(20):
                made = plan()
            results.append(made)
    for _ in range(20):
        graph.replay()
    torch.cuda.synchronize()
    assert all(mg.verify(given, made) for made in (*results, out))
