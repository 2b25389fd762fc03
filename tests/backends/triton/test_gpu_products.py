"""The Triton backend's results on a GPU: every form, dtype, epilogue and config, each way to the tiles."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config
from multigemm.backends.triton.config import problem_with
from multigemm.backends.triton.hopper_choice import hopper_candidates
from multigemm.planning.staging import staged_spec
from tests.support.triton_gpu_cases import FORMS, SIZES, draw, problem, tensor

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def test_lists_of_many_tiles() -> None:
    sizes = [(1500, 1400, 40), (700, 33, 96), (3, 2000, 8)] * 2
    given = mg.GroupedGemmProblem([draw(m, k) for m, _, k in sizes], [draw(k, n) for _, n, k in sizes])
    for config in BACKEND.configs(staged_spec(given), given.device):
        small = replace(config, block_m=32, block_n=32, block_k=64, warps=4)  # 8668 tiles: more than the host lists
        for chosen in (config, small):
            assert mg.verify(given, mg.solve(given, backend="triton", config=chosen)), chosen


@pytest.mark.parametrize("turned", [False, True], ids=["tokens are rows", "along k"])
@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.float8_e8m0fnu])
@pytest.mark.parametrize("covers", ["1x128", "row", "group", "tensor"])
def test_float8_weight_gradients_of_every_config(covers: str, scale_dtype: torch.dtype, turned: bool) -> None:
    """Groups of a jagged k are copied such that k is contiguous; those without tokens give C alone."""
    offsets = torch.tensor([3, 3, 4, 131, 431, 559, 1259], dtype=torch.int32).cuda()
    x, y, c = draw(1300, 272), draw(1300, 144), draw(6, 272, 144, dtype=torch.float32)
    cut: dict[str, Any] = {"offsets": offsets, "jagged": "k"}
    a = mg.quantize.quantize(x.T, "e4m3", covers, scale_dtype=scale_dtype, **cut)
    b = mg.quantize.quantize(y, "e5m2", covers, side="b", scale_dtype=scale_dtype, **cut)
    left, right = (a.data.contiguous(), b.data.T.contiguous().T) if turned else (a.data, b.data)
    with_c: dict[str, Any] = {"c": c, "beta": 0.5, "alpha": -2.0}
    for out_dtype, more in ((torch.bfloat16, dict[str, Any]()), (torch.float32, with_c)):
        given = mg.GroupedGemmProblem(left, right, scale_a=a.scale, scale_b=b.scale, out_dtype=out_dtype, **cut, **more)
        for config in BACKEND.configs(staged_spec(given), given.device):
            verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
            assert verdict, f"{config}: {verdict}"


@pytest.mark.parametrize("form", FORMS)
def test_tiles_shared_out_along_k(form: str) -> None:
    given = problem(form, 72, 1100, bias=None)
    config = Config(block_m=32, block_n=64, block_k=64, warps=4, stages=3, programs=0, splits=4)
    plan = mg.plan(given, backend="triton", config=config)
    results = [[out.clone() for out in made] if isinstance(made, list) else made.clone() for made in (plan(), plan())]
    assert mg.verify(given, results[0])
    assert all(torch.equal(x, y) for x, y in zip(*results, strict=True)), "the same call gives the same bits"


def test_sizes_that_lie_with_tiles_shared_out_along_k() -> None:
    """More tiles than honest sizes can have find no place for their parts: they must not look for one."""
    ends = torch.arange(1, 131, dtype=torch.int32, device="cuda") * 3
    a = torch.randn(390, 512, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(130, 512, 24, device="cuda", dtype=torch.bfloat16)
    config = Config(block_m=16, block_n=32, block_k=64, warps=4, stages=3, programs=0, splits=4)
    plan = mg.plan(given := mg.GroupedGemmProblem(a, b, ends=ends), backend="triton", config=config)
    right = plan().clone()
    assert mg.verify(given, right)
    honest = ends.clone()
    ends.copy_(torch.arange(130, device="cuda") % 2 * 390)
    plan()
    ends.copy_(honest)
    assert torch.equal(plan(), right)


@pytest.mark.parametrize("extents", [(256, 128), (131, 77)], ids=["aligned", "odd"])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_m_nt", "jagged_n", "batched", "masked"])
def test_tf32_on_the_ring(form: str, extents: tuple[int, int]) -> None:
    given = problem(form, *extents, dtype=torch.float32, precision="tf32")
    found = hopper_candidates(staged_spec(given))
    assert found
    for config in found[:2]:
        verdict = mg.verify(given, mg.solve(given, backend="triton", config=config))
        assert verdict, f"{config}: {verdict}"


@pytest.mark.parametrize("index", [None, torch.int32, torch.int64], ids=["offsets", "sizes", "long sizes"])
@pytest.mark.parametrize("groups", [1, 7, 128, 129, 256, 257])
@pytest.mark.parametrize("form", ["m", "masked", "n", "k"])
def test_tiles_dealt_and_drawn_find_their_groups(form: str, groups: int, index: torch.dtype | None) -> None:
    """By offsets, behind rows that no group owns; or by sizes, which the kernel sums up."""
    generator = torch.Generator().manual_seed(groups)
    sizes = torch.randint(0, 150, (groups,), generator=generator)
    sizes[:: max(2, groups // 3)] = 0
    total = int(sizes.sum()) + 11
    offsets = (torch.cat([torch.zeros(1), sizes]).cumsum(0) + 3).to(torch.int32).cuda()
    cut: dict[str, torch.Tensor] = {"offsets": offsets} if index is None else {"sizes": sizes.to(index).cuda()}
    if form == "masked":
        given = mg.GroupedGemmProblem(draw(groups, 150, 72), draw(groups, 72, 264), valid_rows=sizes.int().cuda())
    elif form == "m":
        given = mg.GroupedGemmProblem(draw(total, 72), draw(groups, 72, 264), **cut)  # type: ignore[arg-type]
    elif form == "n":
        given = mg.GroupedGemmProblem(draw(264, 72), draw(72, total), jagged="n", **cut)  # type: ignore[arg-type]
    else:
        given = mg.GroupedGemmProblem(draw(total, 264).T, draw(total, 72), jagged="k", **cut)  # type: ignore[arg-type]
    for at, config in enumerate(hopper_candidates(staged_spec(given))[:2]):
        plan = mg.plan(given, backend="triton", config=replace(config, order="dealt" if at == 1 else "drawn"))
        for _ in range(3):  # the counter is left as it was found
            tensor(plan()).fill_(torch.nan)
        verdict = mg.verify(given, plan())
        assert verdict, f"{config}: {verdict}"


TWO_WIDTHS = Config("hopper", block_m=256, block_n=128, stages=4, warps=4, wide_tails=True)


@pytest.mark.parametrize("order", ["drawn", "dealt"])
@pytest.mark.parametrize("n", [128, 264, 1160, 1288])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_m_nt", "jagged_n", "masked"])
def test_tiles_of_two_widths(form: str, n: int, order: Literal["drawn", "dealt"]) -> None:
    """Tails of 1 to 128 rows beside tall tiles and alone, odd and even numbers of blocks of columns."""
    options: dict[str, Any] = {"bias": draw(len(SIZES), n), "activation": "relu"} if form == "jagged_m_nt" else {}
    given = problem(form, n, **options)
    config = replace(TWO_WIDTHS, order=order, width=1 if n == 1160 else 8)
    assert problem_with(config, staged_spec(given)) == ""
    plan = mg.plan(given, backend="triton", config=config)
    for _ in range(3):  # the counter is left as it was found
        tensor(plan()).fill_(torch.nan)
    verdict = mg.verify(given, plan())
    assert verdict, str(verdict)


@pytest.mark.parametrize("index", [None, torch.int32, torch.int64], ids=["offsets", "sizes", "long sizes"])
@pytest.mark.parametrize(("groups", "most"), [(1, 700), (200, 60), (256, 60), (256, 150), (40, 900)])
def test_tiles_of_two_widths_find_their_groups(groups: int, most: int, index: torch.dtype | None) -> None:
    """As many groups as the kernel holds, few, and one alone, which offsets or sizes cut."""
    sizes = torch.randint(0, most, (groups,), generator=torch.Generator().manual_seed(groups))
    sizes[:: max(2, groups // 3)] = 0
    offsets = (torch.cat([torch.zeros(1), sizes]).cumsum(0) + 3).to(torch.int32).cuda()
    total = int(sizes.sum()) + 11
    cut = {"offsets": offsets} if index is None else {"sizes": sizes.to(index).cuda()}
    given = mg.GroupedGemmProblem(draw(total, 72), draw(groups, 72, 1160), **cut)  # type: ignore[arg-type]
    plan = mg.plan(given, backend="triton", config=TWO_WIDTHS)
    tensor(plan()).fill_(torch.nan)
    verdict = mg.verify(given, plan())
    assert verdict, str(verdict)


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


SQUARE = Config(block_m=64, block_n=64, block_k=64, warps=4, stages=4, width=4, programs=0)
SMALL = Config(block_m=32, block_n=32, block_k=64, warps=4, stages=3, programs=0)


def matrix(rows: int, columns: int, dtype: torch.dtype, turned: bool = False) -> torch.Tensor:
    """Whole numbers, whose products are exact."""
    shape = (columns, rows) if turned else (rows, columns)
    values = torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(rows + 7 * columns)).to(dtype).cuda()
    return values.T if turned else values


def listed(shapes: list[tuple[int, int, int]], dtype: torch.dtype, a_turned: bool = False, b_turned: bool = False,
           **options: object) -> mg.GroupedGemmProblem:  # fmt: skip
    a = [matrix(m, k, dtype, a_turned) for m, _, k in shapes]
    b = [matrix(k, n, dtype, b_turned) for _, n, k in shapes]
    return mg.GroupedGemmProblem(a, b, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "turned"),
    [
        (torch.bfloat16, (False, False)),
        (torch.bfloat16, (True, False)),
        (torch.float16, (False, True)),
        (torch.float32, (False, False)),
        (torch.float64, (True, False)),
        (torch.int8, (False, True)),
    ],
    ids=str,
)
def test_dtypes_and_orders(dtype: torch.dtype, turned: tuple[bool, bool]) -> None:
    given = listed([(512, 256, 192), (64, 128, 1024), (0, 64, 64), (192, 320, 64)], dtype, *turned)
    config = Config(block_m=64, block_n=32, block_k=32, warps=4, stages=3, width=3, programs=0)
    assert mg.verify(given, mg.plan(given, backend="triton", config=config)())


@pytest.mark.parametrize(("groups", "config"), [(1, SQUARE), (4, SMALL), (4, SQUARE), (5, SQUARE)])
def test_numbers_of_groups(groups: int, config: Config) -> None:
    shapes = [(64 * (1 + g * 5 % 7), 64 * (1 + g * 3 % 4), 64 * (g % 6)) for g in range(groups)]
    given = listed(shapes, torch.bfloat16)
    assert mg.verify(given, mg.plan(given, backend="triton", config=config)())


def test_what_a_user_gets_of_mixed_squares_in_a_graph() -> None:
    sizes = (1024, 512, 256, 128)
    given = listed([(s, s, s) for s in sizes], torch.float16, alpha=0.5, activation="relu")
    plan = mg.plan(given, backend="triton")
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    for value in (*out, *given.a):
        assert isinstance(value, torch.Tensor)
        value.neg_()
    graph.replay()
    torch.cuda.synchronize()
    assert mg.verify(given, out)


@pytest.mark.parametrize(
    ("tile", "turned", "programs"),
    [
        ((128, 256, 4), (False, False), 0),
        ((256, 128, 4), (False, True), 1),
        ((128, 128, 6), (True, False), 0),
        ((64, 128, 4), (True, True), 1),
        ((64, 128, 4), (False, False), 0),
    ],
    ids=str,
)
def test_maps_of_ragged_lists(tile: tuple[int, int, int], turned: tuple[bool, bool], programs: int) -> None:
    shapes = [(520, 264, 200), (8, 8, 1000), (264, 776, 8), (0, 64, 64), (1040, 128, 64)]
    given = listed(shapes, torch.bfloat16, *turned)
    config = Config("hopper", block_m=tile[0], block_n=tile[1], stages=tile[2], warps=4, width=3, programs=programs)
    assert mg.verify(given, mg.plan(given, backend="triton", config=config)())


@pytest.mark.parametrize("tile", [(64, 128, 4), (128, 256, 4)], ids=str)
def test_tiles_in_several_rounds(tile: tuple[int, int, int]) -> None:
    given = listed([(2048, 1544, 192), (1024, 1032, 0), (2056, 2048, 1024), (200, 4096, 64)], torch.bfloat16)
    config = Config("hopper", block_m=tile[0], block_n=tile[1], stages=tile[2], warps=4, width=4, programs=1)
    plan = mg.plan(given, backend="triton", config=config)
    for _ in range(20):
        out = plan()
    assert mg.verify(given, out)


@pytest.mark.parametrize("groups", [4, 7, 16])
def test_maps_of_more_groups_and_odd_results(groups: int) -> None:
    shapes = [(37 * (1 + g * 5 % 7), 64 * (1 + g * 3 % 4), 64 * (g % 6)) for g in range(groups)]
    given = listed(shapes, torch.float16, alpha=0.5, activation="relu", out_dtype=torch.float32)
    outs = [torch.full((m, n + 3), 7.0, device="cuda")[:, 1 : n + 1] for m, n, _ in shapes]
    config = Config("hopper", block_m=128, block_n=128, stages=5, warps=4, width=4)
    assert mg.verify(given, mg.plan(given, backend="triton", config=config)())
    sliced = mg.GroupedGemmProblem(given.a, given.b, out=outs)
    assert mg.verify(sliced, mg.plan(sliced, backend="triton", config=config)())


@pytest.mark.parametrize("out_dtype", [torch.float32, torch.float64], ids=str)
def test_wider_results_by_every_config_that_is_offered(out_dtype: torch.dtype) -> None:
    """They turn through more shared memory than 16-bit results."""
    given = listed([(264, 520, 192), (40, 264, 64)], torch.bfloat16, out_dtype=out_dtype)
    for config in BACKEND.configs(staged_spec(given), torch.device("cuda", 0)):
        assert mg.verify(given, mg.plan(given, backend="triton", config=config)())


@pytest.mark.parametrize("extents", [(72, 64, 64), (64, 72, 64), (64, 64, 72)])
def test_lists_that_are_not_whole_are_right_too(extents: tuple[int, int, int]) -> None:
    given = listed([(128, 128, 256), extents], torch.bfloat16)
    assert mg.verify(given, mg.plan(given, backend="triton", config=SQUARE)())
