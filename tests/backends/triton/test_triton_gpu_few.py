"""Lists whose groups are the kernel's arguments, on a GPU: dtypes, orders, numbers of groups, graphs."""

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config
from multigemm.planning.staging import staged_spec

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]
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
