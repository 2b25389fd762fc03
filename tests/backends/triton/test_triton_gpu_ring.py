"""The warp-specialised kernel on a GPU: tf32, the ways to its tiles, weights through registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config
from multigemm.backends.triton.choice import hopper_candidates
from multigemm.backends.triton.config import problem_with
from multigemm.planning.staging import staged_spec
from tests.support.triton_gpu_cases import draw, problem, tensor

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


@pytest.mark.parametrize("extents", [(131, 77), (259, 513), (135, 104)])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_m_nt"])
def test_unaligned_weights_through_registers(form: str, extents: tuple[int, int]) -> None:
    given = problem(form, *extents)
    spec = staged_spec(given)
    pack = () if spec.a.align == 16 else ("a",)
    low = Config("hopper", block_m=128, block_n=128, warps=4, stages=5, pack=pack, shift_b=True)
    shifting = [config for config in (low, replace(low, block_m=256, stages=4)) if not problem_with(config, spec)]
    assert low in shifting
    for config in shifting:
        plan = mg.plan(given, backend="triton", config=config)
        tensor(plan()).fill_(torch.nan)
        assert mg.verify(given, plan()), config


@pytest.mark.parametrize("skipped", [1, 7])
def test_lines_along_k_may_start_anywhere(skipped: int) -> None:
    """Weights that begin off 16 bytes: their first lines are read from before them, and from nowhere else."""
    whole = draw(8, 200, 72 + skipped)
    offsets = torch.tensor([0, 5, 5, 70, 71, 130, 300, 640, 704], dtype=torch.int32).cuda()
    given = mg.GroupedGemmProblem(draw(704, 72), whole[:, :, skipped:].transpose(1, 2), offsets=offsets)
    whole[:, :, :skipped] = torch.nan
    low = Config("hopper", block_m=128, block_n=128, warps=4, stages=5, shift_b=True)
    if reason := problem_with(low, staged_spec(given)):
        pytest.skip(reason)
    assert mg.verify(given, mg.solve(given, backend="triton", config=low))


@pytest.mark.parametrize("block_m", [128, 256])
@pytest.mark.parametrize("along", ["n", "k"])
def test_shifted_weights_and_wide_aligned_results(along: str, block_m: int) -> None:
    """Rows of float32 that the copy engine stores take the most shared memory beside two rings."""
    offsets = torch.tensor([0, 300, 300, 901]).to(torch.int32).cuda()
    weights = draw(3, 141, 264 + 1)[:, :, :264] if along == "n" else draw(3, 264, 141).transpose(1, 2)
    given = mg.GroupedGemmProblem(draw(901, 141), weights, offsets=offsets, out_dtype=torch.float32)
    stages = {128: 6, 256: 4}[block_m]
    config = Config("hopper", block_m=block_m, block_n=128, warps=4, stages=stages, shift_b=True, pack=("a",))
    if reason := problem_with(config, staged_spec(given)):
        pytest.skip(reason)
    verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
    assert verdict, str(verdict)


@pytest.mark.parametrize("block_m", [128, 256])
@pytest.mark.parametrize("along", ["n", "k"])
def test_shifted_weights_give_the_same_bits_each_time(along: str, block_m: int) -> None:
    """Two rings, seven warps that fill them and eight that empty them: an order that is missing shows now and then."""
    offsets = torch.tensor([0, 300, 300, 900, 1400, 2047, 3333, 4100]).to(torch.int32).cuda()
    weights = draw(7, 1029, 1531) if along == "n" else draw(7, 1531, 1029).transpose(1, 2)
    given = mg.GroupedGemmProblem(draw(4100, 1029), weights, offsets=offsets)
    stages = {128: 6, 256: 4}[block_m]
    config = Config("hopper", block_m=block_m, block_n=128, warps=4, stages=stages, shift_b=True, pack=("a",))
    if reason := problem_with(config, staged_spec(given)):
        pytest.skip(reason)
    plan = mg.plan(given, backend="triton", config=config)
    first = tensor(plan()).clone()
    assert mg.verify(given, first)
    differing = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(400):
        tensor(plan()).fill_(torch.nan)
        differing += (tensor(plan()).view(torch.int16) != first.view(torch.int16)).sum()
    assert int(differing) == 0


@pytest.mark.parametrize("block_m", [128, 256])
@pytest.mark.parametrize("along", ["n", "k"])
@pytest.mark.parametrize("depth", [1, 63, 65, 129, 300])
def test_shifted_weights_meet_no_neighbours(depth: int, along: str, block_m: int) -> None:
    """Whole 16 bytes are read round each line: what lies beside it, and behind the end of k, reaches no result."""
    sizes = [0, 1, 64, 65, 128, 129, 200, 256, 257, 500]
    offsets = torch.tensor([0, *sizes]).cumsum(0).to(torch.int32).cuda()
    shape = (len(sizes), depth + 3, 175 + 3) if along == "n" else (len(sizes), 175 + 3, depth + 3)
    whole = torch.full(shape, torch.nan, dtype=torch.bfloat16, device="cuda")
    weights = whole[:, 1:-2, 1:-2]
    weights.copy_(draw(*weights.shape))
    weights[4] = torch.inf
    rows = torch.full((sum(sizes), depth + 8 - depth % 8), torch.nan, dtype=torch.bfloat16, device="cuda")[:, :depth]
    rows.copy_(draw(sum(sizes), depth))
    given = mg.GroupedGemmProblem(rows, weights if along == "n" else weights.transpose(1, 2), offsets=offsets)
    stages = {128: 6, 256: 4}[block_m]
    config = Config("hopper", block_m=block_m, block_n=128, warps=4, stages=stages, shift_b=True)
    if reason := problem_with(config, staged_spec(given)):
        pytest.skip(reason)
    plan = mg.plan(given, backend="triton", config=config)
    tensor(plan()).fill_(torch.nan)
    verdict = mg.verify(given, plan())
    assert verdict, str(verdict)
