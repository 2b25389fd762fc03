"""The pointer kernel in Triton's interpreter: every form and dtype, ragged, judged by the reference."""

from __future__ import annotations

import importlib
import os
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm import torch_internals
from multigemm.backends.triton import BACKEND, Config, emulate
from multigemm.backends.triton.emulate import space_of
from multigemm.backends.triton.generic import LISTED, WHOLE
from multigemm.backends.triton.lists import list_chunk, tile_table
from multigemm.integrations import layer_ops
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.operands import TABLE
from multigemm.planning.staging import stage
from multigemm.problem.fused import Gate
from tests.support import activation_cases, tile_walk
from tests.support.concurrency import on_new_threads

if TYPE_CHECKING:
    import triton.language as tl

FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
DTYPES = [*FLOATS, torch.int8]
pytestmark = pytest.mark.usefixtures("interpreter")


def draw(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randint(-9, 10, shape, dtype=dtype) if dtype == torch.int8 else torch.randn(*shape).to(dtype)


def check(*operands: Any, **options: Any) -> Any:
    problem = mg.GroupedGemmProblem(*operands, **options)
    out = mg.solve(problem, backend="triton")
    verdict = mg.verify(problem, out)
    assert verdict, str(verdict)
    return out


OFFSETS = torch.tensor([2, 5, 5, 70, 100, 101])
FORMS: dict[str, Any] = {
    "jagged_m": lambda d: ((draw(d, 110, 37), draw(d, 5, 37, 70)), {"offsets": OFFSETS}),
    "shared": lambda d: ((draw(d, 110, 37), draw(d, 37, 20)), {"offsets": OFFSETS}),
    "jagged_n": lambda d: ((draw(d, 40, 37), draw(d, 37, 110)), {"offsets": OFFSETS, "jagged": "n"}),
    "jagged_k": lambda d: ((draw(d, 110, 40).T, draw(d, 110, 20)), {"offsets": OFFSETS, "jagged": "k"}),
    "batched": lambda d: ((draw(d, 3, 40, 37), draw(d, 3, 20, 37).transpose(1, 2)), {}),
    "masked": lambda d: ((draw(d, 3, 80, 37), draw(d, 3, 37, 20)), {"valid_rows": torch.tensor([0, 65, 80])}),
    "per_group": lambda d: (
        ([draw(d, 5, 37), draw(d, 0, 8), draw(d, 70, 0), draw(d, 3, 16)],
         [draw(d, 37, 66), draw(d, 8, 5), draw(d, 0, 9), draw(d, 16, 16)]), {}),
}  # fmt: skip


EVERY_FORM = [(form, torch.bfloat16) for form in FORMS]
EVERY_DTYPE = [(form, dtype) for form in ("shared", "per_group") for dtype in DTYPES if dtype != torch.bfloat16]


@pytest.mark.parametrize(("form", "dtype"), [*EVERY_FORM, *EVERY_DTYPE], ids=str)
def test_every_form_and_dtype(form: str, dtype: torch.dtype) -> None:
    """Only lists turn addresses into pointers to a dtype; all other forms meet it in the same lines."""
    operands, options = FORMS[form](dtype)
    check(*operands, **options)


@activation_cases.EACH
def test_activations_down_to_where_they_underflow(activation: str, dtype: torch.dtype) -> None:
    activation_cases.check_emulated("triton", activation, dtype)


@pytest.mark.parametrize("dtype", activation_cases.TAILS, ids=str)
def test_the_kernel_of_geglu_down_to_where_it_underflows(dtype: torch.dtype) -> None:
    """It shares the formula: gelu(gate) * 1."""
    from multigemm.integrations.gate_kernels import gate_step

    x = activation_cases.thinned(activation_cases.points("gelu", dtype))
    out = torch.empty(len(x), 1, dtype=dtype)
    kernel, grid, _, values, _ = gate_step(Gate("geglu"), torch.stack([x, torch.ones_like(x)], 1), out)  # type: ignore[no-untyped-call]
    kernel[grid](**values)
    verdict = mg.verify(activation_cases.problem_of(x, "gelu"), out[None])
    assert verdict, verdict.text


@pytest.mark.parametrize("activation", [None, "relu", "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_epilogues(dtype: torch.dtype, activation: str | None) -> None:
    c, bias = draw(torch.float32, 110, 20), draw(dtype, 5, 20)
    check(draw(dtype, 110, 37), draw(dtype, 5, 37, 20), offsets=OFFSETS, alpha=-0.5, beta=2.0, c=c, bias=bias,
          activation=activation, out_dtype=torch.float32)  # fmt: skip


def test_integers_wrap_and_scale_exactly() -> None:
    a, b = draw(torch.int8, 110, 37), draw(torch.int8, 5, 37, 20)
    c = torch.full((110, 20), 2**30, dtype=torch.int32)
    bias = torch.arange(20, dtype=torch.int32)
    check(a, b, offsets=OFFSETS, alpha=3, beta=5, c=c, bias=bias, activation="relu")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_float64_is_rounded_once(dtype: torch.dtype) -> None:
    halfway = 1 + torch.finfo(dtype).eps / 2
    values = torch.tensor([[halfway + 1e-12], [halfway - 1e-12], [halfway], [1e30], [float("inf")], [1e-9]])
    values = values.to(torch.float64)
    values[:3, 0] = torch.tensor([halfway + 1e-12, halfway - 1e-12, halfway], dtype=torch.float64)
    out = check(values, torch.ones(1, 1, dtype=torch.float64), out_dtype=dtype)
    assert out[0, 0] > out[1, 0] == 1


def test_subnormal_results_keep_their_place() -> None:
    values = torch.tensor([[-6.43e-40], [2.0**-133], [3e-39], [0.0]])
    assert check(values, torch.ones(1, 1), out_dtype=torch.bfloat16)[1, 0] == 2.0**-133


def test_nan_stays_in_its_rows_and_columns() -> None:
    a, b = draw(torch.float32, 110, 37), draw(torch.float32, 5, 37, 20)
    a[3, 0], b[2, 36, 7] = float("nan"), float("inf")
    out = check(a, b, offsets=OFFSETS)
    assert out[3].isnan().all() and out[4].isfinite().all()


def warned_while_solving(operands: Any, **options: Any) -> tuple[list[str], Any]:
    """The warnings that escape from a product in the interpreter, and NumPy's handling of such errors after it."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        mg.solve(mg.GroupedGemmProblem(*operands, **options), backend="triton")
    return [str(x.message) for x in caught], np.geterr()


@pytest.mark.parametrize(
    ("dtype", "activation"),
    [*((dtype, "gelu") for dtype in FLOATS), *((torch.float32, kind) for kind in (None, "gelu_tanh", "silu", "relu"))],
    ids=str,
)
def test_what_a_gpu_computes_silently_warns_of_nothing(dtype: torch.dtype, activation: str | None) -> None:
    """NaN, infinities and overflow are values; NumPy, in which the interpreter computes, warns of each."""
    a, b = draw(dtype, 8, 37), draw(dtype, 37, 20)
    a[0], a[1], a[2, :2] = torch.nan, torch.inf, torch.tensor([torch.inf, -torch.inf])
    a[3] = a[4] = b[5] = torch.finfo(dtype).max
    a[4] = -a[4]
    before = np.geterr()
    for operands, options in (((a, b), {"sizes": torch.tensor([3, 5])}), (([a, a], [b, b]), {})):
        messages, after = warned_while_solving(operands, activation=activation, alpha=3.0, **options)
        assert not messages
        assert after == before


def test_only_the_thread_that_interprets_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the interpreter runs in one thread, NumPy warns in another one as ever."""
    inside: dict[str, Any] = {}

    def interpreted() -> None:
        inside["here"] = np.geterr()
        with ThreadPoolExecutor(1) as other:
            inside["beside"] = other.submit(np.geterr).result(30)

    monkeypatch.setattr(emulate, "_bind", lambda ops, config: interpreted)
    before = np.geterr()
    mg.solve(mg.GroupedGemmProblem(torch.ones(8, 8), torch.ones(8, 8)), backend="triton")
    assert set(inside["here"].values()) == {"ignore"}
    assert inside["beside"] == before == np.geterr()
    assert "warn" in before.values()


def test_rows_without_owner_stay_untouched_in_a_given_output() -> None:
    out = torch.full((110, 20), 7.5)
    check(draw(torch.float32, 110, 37), draw(torch.float32, 5, 37, 20), offsets=OFFSETS, out=out)
    assert (out[:2] == 7.5).all() and (out[101:] == 7.5).all()


@pytest.mark.parametrize("groups", [1, 256, 257])
def test_group_counts_around_one_vector(groups: int) -> None:
    """Tokens of groups on both sides of each border; the others are empty, since a tile takes 0.1 s here."""
    sizes = torch.zeros(groups, dtype=torch.int64)
    sizes[[g for g in (0, 1, 31, 32, 150, 254, 255, 256, groups - 1) if g < groups]] = torch.tensor(2)
    rows = int(sizes.sum()) + 2
    check(draw(torch.float32, rows, 5), draw(torch.float32, groups, 5, 4), ends=sizes.cumsum(0))


SIZES = torch.tensor([0, 3, 65, 0, 30])


@pytest.mark.parametrize(("groups", "index"), [(5, torch.int64), (32, torch.int32), (33, torch.int32)], ids=str)
@pytest.mark.parametrize("jagged", ["m", "n", "k"])
def test_sizes_are_summed_up_by_the_kernel(jagged: str, groups: int, index: torch.dtype) -> None:
    """Rows behind the last group become zero."""
    sizes = torch.zeros(groups, dtype=index)
    sizes[-5:] = SIZES.to(index)
    rows = int(sizes.sum()) + 7
    a, b = {
        "m": (draw(torch.float32, rows, 9), draw(torch.float32, groups, 9, 6)),
        "n": (draw(torch.float32, 6, 9), draw(torch.float32, 9, rows)),
        "k": (draw(torch.float32, rows, 6).T, draw(torch.float32, rows, 5)),
    }[jagged]
    check(a, b, sizes=sizes, jagged=jagged)


@pytest.mark.parametrize("jagged", ["m", "n"])
def test_more_sizes_than_the_kernel_sums_up(jagged: Any) -> None:
    test_sizes_are_summed_up_by_the_kernel(jagged, 257, torch.int64)


def test_repeated_calls_follow_sizes_on_the_device() -> None:
    """The third call binds what the second one kept."""
    a, b = draw(torch.float32, 60, 9), draw(torch.float32, 3, 9, 6)
    served = LAUNCHES.served
    for _ in range(3):
        sizes = torch.tensor([1, 50, 6])
        given = mg.GroupedGemmProblem(a, b, sizes=sizes)
        assert mg.verify(given, mg.grouped_gemm(a, b, sizes=sizes, backend="triton"))
    assert LAUNCHES.served == served + 1


@pytest.mark.parametrize("lies", [[-5, 50, 2**40, 3], [64, 64, 64, 64], [2**62, 2**62, -(2**62), 1]])
def test_sizes_that_lie_stay_inside(lies: list[int]) -> None:
    sizes = torch.full((4,), 9)
    memory = torch.full((64 + 64, 8), 9.0)
    given = mg.GroupedGemmProblem(
        draw(torch.float32, 64, 8), draw(torch.float32, 4, 8, 8), sizes=sizes, out=memory[32:96]
    )
    plan = mg.plan(given, backend="triton")
    sizes.copy_(torch.tensor(lies))
    plan()
    assert (memory[:32] == 9).all()
    assert (memory[96:] == 9).all()


def test_offsets_that_lie_stay_inside() -> None:
    problem = mg.GroupedGemmProblem(draw(torch.float32, 64, 8), draw(torch.float32, 4, 8, 8), sizes=[9, 9, 9, 9])
    memory = torch.full((64 + 64, 8), 9.0)
    ops = stage(problem, problem.spec, memory[32:96]).ops
    ops.ends, ops.head = torch.tensor([-5, 50, 20, 400, 60], dtype=problem.spec.index)[1:], True
    recipe = BACKEND.plan(problem.spec, BACKEND.configs(problem.spec, problem.device)[0], problem.device)
    recipe.bind(ops)()
    assert (memory[:32] == 9).all()
    assert (memory[96:] == 9).all()


def test_strides_of_every_kind() -> None:
    base = draw(torch.float16, 220, 150)
    a = base[::2, 1:75:2]
    b = draw(torch.float16, 1, 37, 1).expand(5, 37, 21)
    out = torch.zeros(21, 110, dtype=torch.float16).T
    check(a, b, offsets=OFFSETS, out=out)


def test_zero_alpha_reads_neither_operand() -> None:
    nan = torch.full((8, 8), float("nan"))
    out = check(nan, nan, alpha=0.0, beta=2.0, c=torch.ones(8, 8))
    assert (out == 2).all()


def test_threads_are_interpreted_one_after_the_other() -> None:
    """The interpreter changes triton.language while it runs: side by side, two gave errors and wrong numbers."""
    a, b = draw(torch.float32, 9, 7), draw(torch.float32, 3, 7, 5)
    plans = [mg.plan(mg.GroupedGemmProblem(a, b, sizes=[2, 3, 4]), "triton") for _ in range(4)]
    with ThreadPoolExecutor(4) as pool:
        outs = list(pool.map(lambda plan: plan(), plans))
    for plan, out in zip(plans, outs, strict=True):
        assert mg.verify(plan.problem, out).ok


@pytest.mark.parametrize("along", ["row", "col", "none"])
@pytest.mark.parametrize(("rows", "columns"), [(33, 130), (65, 17), (7, 256), (64, 255)])
def test_copies_into_aligned_rows(rows: int, columns: int, along: str) -> None:
    from multigemm.backends.triton.kernels.generic import pack_kernel

    groups, line = 3, (columns + 7) // 8 * 8
    strides = {
        "row": ((rows + 1) * (columns + 3), columns + 3, 1),
        "col": ((rows + 1) * (columns + 3), 1, rows + 1),
        "none": (3, 2 * columns + 5, 2),
    }[along]
    source = torch.randn(8 * (rows + 3) * (columns + 5)).as_strided((groups, rows, columns), strides)
    target = torch.full((groups * rows * line + 64,), 7.0)
    grid = (groups * -(-rows // 32) * -(-columns // 128),)
    packing: Any = pack_kernel
    packing[grid](source, target, rows, columns, *strides, rows * line, line, BM=32, BN=128, ALONG=along)
    copied = target[:-64].view(groups, rows, line)
    assert torch.equal(copied[..., :columns], source)
    assert not copied[..., columns:].any(), "the padding is zero"
    assert (target[-64:] == 7).all(), "nothing behind the target is written"


def test_lists_of_too_many_tiles_are_searched_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigemm.backends.triton.lists.MOST_LISTED", 3)
    operands, options = FORMS["per_group"](torch.float32)
    check(*operands, **options)


@pytest.mark.parametrize(("pairs", "experts"), [(1, 1), (5, 3), (128, 60), (129, 7), (256, 140), (300, 300), (513, 7)])
def test_the_counting_sort_is_a_stable_sort(pairs: int, experts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one block of pairs; of two, which count all pairs each; and of more, whose counts are added up in parts."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    kernels: Any = importlib.import_module("multigemm.integrations.layer_kernels")
    monkeypatch.setattr(kernels, "SORT_BLOCK", kernels.LEAST_SORT_BLOCK)
    monkeypatch.setattr(kernels, "COUNTING_BLOCKS", 2)
    monkeypatch.setattr(kernels, "START_BLOCKS", 2)
    monkeypatch.setattr(
        torch_internals, "current_device", lambda: -1
    )  # which is where tensors on the CPU say that they lie
    for low, high in ((0, experts), (-1, experts + 2)):
        numbers = torch.randint(low, high, (pairs,), generator=torch.Generator().manual_seed(pairs))
        results = kernels.sort_by_expert(numbers, experts), layer_ops.sort_by_expert(numbers, experts)
        for got, want in zip(*results, strict=True):
            assert torch.equal(got, want)
            assert got.dtype is want.dtype


@pytest.mark.parametrize(
    ("form", "dtype"),
    [*((form, torch.float16) for form in FORMS), ("shared", torch.float64), ("shared", torch.int8)],
)
def test_tiles_shared_out_along_k(form: str, dtype: torch.dtype) -> None:
    operands, options = FORMS[form](dtype)
    given = mg.GroupedGemmProblem(*operands, **options)
    config = Config(block_m=64, block_n=64, block_k=32, warps=4, stages=1, programs=2, splits=2)
    launch = mg.plan(given, backend="triton", config=config)
    first = mg.verify(given, launch())
    assert first, str(first)
    if form == "shared":
        assert mg.verify(given, launch()), "the counts of the first launch are cleared"


def test_sizes_that_lie_find_a_place_for_the_parts_of_every_tile(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, torch.Tensor]] = []

    def spaced(ops: Any, tiles: int, config: Config) -> dict[str, torch.Tensor]:
        """The workspace between guards, as a slice of more memory."""
        wide = {}
        for name, tensor in space_of(ops, tiles, config).items():
            whole = torch.full((tensor.numel() * 3,), 77, dtype=tensor.dtype)
            whole[tensor.numel() : 2 * tensor.numel()] = tensor.flatten()
            wide[name] = whole
        made.append(wide)
        return {name: whole[whole.numel() // 3 : whole.numel() // 3 * 2] for name, whole in wide.items()}

    monkeypatch.setattr("multigemm.backends.triton.emulate.space_of", spaced)
    ends = torch.tensor([4, 6, 9, 20, 21, 40], dtype=torch.int32)
    a, b = torch.randn(40, 70), torch.randn(6, 70, 16)
    config = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=3, splits=4)
    given = mg.GroupedGemmProblem(a, b, ends=ends)
    launch = mg.plan(given, backend="triton", config=config)
    assert mg.verify(given, launch())
    ends.copy_(torch.tensor([0, 40, 0, 40, 0, 40], dtype=torch.int32))  # half of the groups claim all rows
    launch()
    for whole in (tensor for space in made for tensor in space.values()):
        third = whole.numel() // 3
        assert (whole[:third] == 77).all() and (whole[2 * third :] == 77).all(), "nothing beside it is written"


def test_a_finaliser_that_calls_while_a_kernel_is_interpreted_does_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = torch.randn(6, 16), torch.randn(2, 16, 8)
    results, bind, interruptions = list[torch.Tensor](), emulate._bind, [1]

    def interrupted(ops: Any, config: Config) -> Any:
        launch = bind(ops, config)

        def run() -> None:
            if interruptions and interruptions.pop():
                results.append(mg.plan(mg.GroupedGemmProblem(a, b, sizes=[6, 0]), backend="triton")())
            launch()

        return run

    monkeypatch.setattr(emulate, "_bind", interrupted)
    given = mg.GroupedGemmProblem(a, b, sizes=[2, 4])
    plan = mg.plan(given, backend="triton")
    on_new_threads(plan)
    assert mg.verify(given, plan())
    assert mg.verify(mg.GroupedGemmProblem(a, b, sizes=[6, 0]), results[0])


def test_records_of_sizes_that_lie_stay_in_their_list() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    from multigemm.backends.triton.kernels.schedule import write_records

    ends = (torch.arange(40, dtype=torch.int32) % 2) * 1000  # every second group claims all 1000 rows
    records = torch.full((8 * (1 + 64) + 8,), -7, dtype=torch.int32)
    kernel: Any = write_records
    kernel[(2,)](records, ends, 1000, 40, 0, KIND="rows", STRIP=64, MOST=2, ALIGN=1, ROWS=32, STEP=64)
    assert records[0] == 64, "20 groups of 8 tile rows find 64 places"
    assert (records[8 : 8 * 65].view(64, 8)[:, :7] != -7).all()
    assert (records[8 * 65 :] == -7).all()


def test_as_many_groups_as_are_counted_at_once() -> None:
    """Their counts come from the sizes; the prefix sums, which nobody wrote, would tell anything."""
    groups = 32
    offsets = (torch.arange(groups + 1, dtype=torch.int32) + 7) // 8 * 2  # of every eighth group two rows
    rows = int(offsets[-1])
    given = mg.GroupedGemmProblem(torch.randn(rows, 16), torch.randn(groups, 16, 8), offsets=offsets)
    config = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=0)
    assert mg.verify(given, mg.solve(given, backend="triton", config=config))


@pytest.mark.parametrize("last", [16, 15])
@pytest.mark.parametrize("turned", [False, True])
def test_lists_of_whole_tiles_are_read_unmasked(last: int, turned: bool) -> None:
    """One extent that ends within a block makes the list an ordinary one."""
    shapes = [(32, 48, 16), (16, 16, 32), (16, 32, last)]
    a = [torch.randn(k, m).T if turned else torch.randn(m, k) for m, _, k in shapes]
    b = [torch.randn(n, k).T if turned else torch.randn(k, n) for _, n, k in shapes]
    c = [torch.randn(m, n) for m, n, _ in shapes]
    given = mg.GroupedGemmProblem(a, b, c=c, beta=0.5, activation="relu")
    config = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=3)
    ops = stage(given, given.spec, [torch.empty(m, n) for m, n, _ in shapes]).ops
    assert list_chunk(ops.spec, config, tile_table(ops, config)) == (WHOLE if last == 16 else LISTED)
    assert mg.verify(given, mg.solve(given, backend="triton", config=config))


@pytest.mark.parametrize("columns", [31, 32])
def test_tiles_shared_out_are_no_more_than_their_places(columns: int) -> None:
    """A tile too many per group would leave none for the last group."""
    given = mg.GroupedGemmProblem(torch.randn(3, 20, 70), torch.randn(3, 70, columns))
    config = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=3, splits=2)
    assert mg.verify(given, mg.solve(given, backend="triton", config=config))


def test_no_count_is_read_behind_the_last_one() -> None:
    global locate, tl  # a kernel sees the names of its module only
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from multigemm.backends.triton.kernels.schedule import locate

    def find(found: Any, prefix: Any, groups: Any, out: Any, CHUNK: tl.constexpr) -> None:
        pivots = tl.load(found + tl.arange(0, CHUNK))
        tile = tl.program_id(0)
        group, first = locate(tile, pivots, 3, prefix, groups, CHUNK)
        tl.store(out + 2 * tile, group)
        tl.store(out + 2 * tile + 1, first)

    prefix = torch.tensor([1, 2, 3, 4, 5, 6, 7, 0, 0], dtype=torch.int32)  # seven groups of one tile; then nothing
    out = torch.full((14,), -1, dtype=torch.int32)
    kernel: Any = triton.jit(find)
    kernel[(7,)](torch.tensor([3, 6, 7, 7], dtype=torch.int32), prefix, 7, out, CHUNK=4)
    assert out.view(7, 2).tolist() == [[tile, tile] for tile in range(7)]


FEW_SIZES, MANY_SIZES = [(40, 20), (0, 9), (17, 33)], [(g * 7 % 33, 20 - g) for g in range(17)]


@pytest.mark.parametrize(("sizes", "width"), [(FEW_SIZES, 1), (FEW_SIZES, 3), (MANY_SIZES, 3)])
def test_the_device_visits_each_tile_once_in_bands(sizes: list[tuple[int, int]], width: int) -> None:
    global all_tiles, group_of_tile, place, tl  # a kernel sees the names of its module only
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from multigemm.backends.triton.kernels.schedule import all_tiles, group_of_tile, place, write_prefix

    def walk(out: Any, prefix: Any, table: Any, groups: Any, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
             M: tl.constexpr, N: tl.constexpr, COLUMNS: tl.constexpr) -> None:  # fmt: skip
        tile = tl.program_id(0)
        _, found, stride = all_tiles(prefix, table, table, 0, 0, groups, 0, "per_group", 16, 8, False, CHUNK, False)
        group, first = group_of_tile(tile, found, stride, prefix, groups, False, CHUNK)
        rows = tl.load(table + COLUMNS * group + M).to(tl.int32)
        columns = tl.load(table + COLUMNS * group + N).to(tl.int32)
        i, j = place(tile - first, (rows + 15) // 16, (columns + 7) // 8, WIDTH)
        tl.store(out + 3 * tile, group)
        tl.store(out + 3 * tile + 1, i)
        tl.store(out + 3 * tile + 2, j)

    shapes = [(-(-m // 16), -(-n // 8)) for m, n in sizes]
    ends = list(accumulate(down * across for down, across in shapes))
    prefix = torch.zeros(len(sizes), dtype=torch.int32)
    table = torch.zeros(len(sizes), TABLE.COLUMNS, dtype=torch.int64)
    table[:, [TABLE.M, TABLE.N]] = torch.tensor(sizes)
    columns = {"M": int(TABLE.M), "N": int(TABLE.N), "COLUMNS": int(TABLE.COLUMNS)}
    count: Any = write_prefix
    count[(1,)](prefix, table, table, 0, 0, len(sizes), 0, "per_group", 16, 8, STEP=16)
    assert prefix.tolist() == ends
    out = torch.full((ends[-1], 3), -1, dtype=torch.int32)
    kernel: Any = triton.jit(walk)
    kernel[(ends[-1],)](out, prefix, table, len(sizes), WIDTH=width, CHUNK=4, **columns)
    assert out.tolist() == [
        [g, *tile_walk.place(tile, *shape, width)]
        for g, shape in enumerate(shapes)
        for tile in range(shape[0] * shape[1])
    ]


@pytest.mark.parametrize("most", [1, 3])
def test_the_device_splits_rows_evenly(most: int) -> None:
    """Into as few tiles as hold them, of strips of 64, at most `most` in each: five under a limit of 4 are 3 + 2."""
    os.environ["TRITON_INTERPRET"] = "1"
    from multigemm.backends.triton.kernels.schedule import write_records

    sizes = torch.tensor([0, 1, 63, 64, 65, 300, 0, 449])
    strips = -(-sizes // 64)
    tiles = -(-strips // most)
    wanted = list(zip(tiles.tolist(), (-(-strips // tiles.clamp(min=1))).tolist(), strict=True))
    rows = int(tiles.sum())
    records = torch.full((8 * (1 + 64),), -7, dtype=torch.int32)
    kernel: Any = write_records
    kernel[(2,)](records, sizes.cumsum(0).to(torch.int32), int(sizes.sum()), len(sizes), 0, KIND="rows", STRIP=64,
                 MOST=most, ALIGN=1, ROWS=32, STEP=16)  # fmt: skip
    assert records[0] == rows
    found = {int(g): (int(tiles), int(strips)) for g, _, tiles, strips, *_ in records[8:].view(64, 8)[:rows]}
    assert found == {g: pair for g, pair in enumerate(wanted) if pair[0]}


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("across", [1, 2, 7])
def test_tiles_of_two_widths_cover_each_block_of_a_group_once(across: int, width: int) -> None:
    """Tall tiles have 3 or 4 strips of 64 rows and a block of columns; wide ones up to 2 strips and two blocks."""
    global place_of_two_widths, tiles_of_two_widths, tl  # a kernel sees the names of its module only
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from multigemm.backends.triton.kernels.schedule import place_of_two_widths, tiles_of_two_widths

    def walk(out: Any, counts: Any, across: Any, WIDTH: tl.constexpr, MOST: tl.constexpr) -> None:
        strips = tl.program_id(0) + 1
        tiles = tiles_of_two_widths(strips, across)
        tl.store(counts + strips - 1, tiles)
        local = tl.arange(0, MOST)
        strip, count, column = place_of_two_widths(tl.minimum(local, tiles - 1), strips, across, WIDTH)
        at = out + ((strips - 1) * MOST + local) * 3
        tl.store(at, strip, mask=local < tiles)
        tl.store(at + 1, count, mask=local < tiles)
        tl.store(at + 2, column, mask=local < tiles)

    out, counts = torch.zeros(40, 128, 3, dtype=torch.int32), torch.zeros(40, dtype=torch.int32)
    kernel: Any = triton.jit(walk)
    kernel[(40,)](out, counts, across, WIDTH=width, MOST=128)
    for strips, tiles in enumerate(counts.tolist(), start=1):
        found = [tuple(tile) for tile in out[strips - 1, :tiles].tolist()]
        blocks = Counter(
            (row, column + beside)
            for strip, count, column in found
            for row in range(strip, strip + count)
            for beside in range(1 + (count <= 2))
            if column + beside < across
        )
        assert blocks == Counter({(row, column): 1 for row in range(strips) for column in range(across)})
        wide = [(at, tile) for at, tile in enumerate(found) if tile[1] <= 2]
        assert all(strip + count == strips and column % 2 == 0 for _, (strip, count, column) in wide)
        for at, (strip, _, column) in wide:  # behind the tall tiles of its columns in the last band
            band = -(-strip // 4) // width * width * 4
            above = {(row, beside) for row in range(band, strip, 4) for beside in range(column, column + 2)}
            above = {(row, beside) for row, beside in above if beside < across}
            assert {tile[::2] for tile in found[at - len(above) : at]} == above


@pytest.mark.parametrize(("rows", "tall", "wide"), [(64, 0, 1), (128, 0, 2), (192, 3, 0), (256, 4, 0), (320, 3, 2),
                                                     (384, 4, 2), (576, 7, 2)])  # fmt: skip
def test_strips_of_wide_tiles(rows: int, tall: int, wide: int) -> None:
    """As many as leave tall tiles of 3 or 4 strips, which alone are as fast for the weights that they read."""
    global wide_strips, tl  # a kernel sees the names of its module only
    os.environ["TRITON_INTERPRET"] = "1"
    import triton
    import triton.language as tl

    from multigemm.backends.triton.kernels.schedule import wide_strips

    def ask(out: Any, strips: Any) -> None:
        tl.store(out, wide_strips(strips))

    out = torch.full((1,), -1, dtype=torch.int32)
    kernel: Any = triton.jit(ask)
    kernel[(1,)](out, rows // 64)
    assert int(out) == wide and tall + wide == rows // 64
