"""More rows, columns or elements than 31 bits count: right, or refused with a reason; what they just count: right.

No campaign can draw these: the reference would take minutes, and the result alone has 4 GB. All entries are small
whole numbers, so that every element is known, and the result is compared where it lies. What a spec says of such
extents needs no memory: operands may be one element, repeated.
"""

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends import registry
from multigemm.problem.spec import GIANT
from multigemm.settings import settings

BACKENDS = ("cublas", "cupy", "numba", "triton")
COUNTING = ("cupy", "numba", "triton")
"""Backends whose own kernels count in 31 bits."""
LONG = 2**31 + 72
ROOM = 40 << 30
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def room(request: pytest.FixtureRequest) -> Any:
    on_gpu = request.node.get_closest_marker("gpu") is not None and torch.cuda.is_available()
    if on_gpu and torch.cuda.mem_get_info()[0] < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GB of free GPU memory")
    yield
    if on_gpu:
        torch.cuda.empty_cache()


def one(*shape: int) -> torch.Tensor:
    """As many elements as one wants, in the memory of one."""
    return torch.ones((1,) * len(shape), dtype=torch.float16).expand(shape)


def jagged(total: int, **more: Any) -> mg.GroupedGemmProblem:
    return mg.GroupedGemmProblem(one(total, 8), one(2, 8, 4), ends=torch.tensor([5, total]), **more)


PAIRS = {"m": ((LONG, 8), (8, 4)), "n": ((4, 8), (8, LONG)), "k": ((4, LONG), (LONG, 4))}


@pytest.mark.parametrize("direction", PAIRS)
def test_a_spec_knows_the_longest_extent_of_a_list(direction: str) -> None:
    """Where N or K differ by group, no field or bucket speaks of them."""
    a, b = PAIRS[direction]
    small = mg.GroupedGemmProblem([one(3, 5)], [one(5, 6)]).spec
    long = mg.GroupedGemmProblem([one(3, 5), one(*a)], [one(5, 6), one(*b)]).spec
    assert (small.longest, long.longest) == (0, LONG)
    assert getattr(long, direction) is None


@pytest.mark.parametrize("total", [2**30 + 1, GIANT - 1, GIANT, 2**31, LONG])
def test_a_spec_knows_how_much_offsets_cut_where_that_matters(total: int) -> None:
    """Its bucket is the same power of two on both sides of what kernels can count."""
    assert jagged(total).spec.longest == (total if total >= GIANT else 0)
    across = mg.GroupedGemmProblem(one(8, total), one(total, 4), ends=torch.tensor([5, total]), jagged="k")
    assert across.spec.longest == jagged(total).spec.longest


def test_a_spec_counts_the_groups_too() -> None:
    assert mg.GroupedGemmProblem(one(LONG, 1, 8), one(LONG, 8, 4)).spec.longest == LONG


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_a_backend_cannot_count_is_refused_and_nothing_else(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if settings().emulate:
        pytest.skip("this process emulates: problems on a GPU are refused for that")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    reasons = registry.get(backend).not_supported_reasons
    limit = GIANT if backend in COUNTING else 2**32 + 1
    for total in (2**30 + 1, limit - 1):
        assert reasons(jagged(total).spec, GPU) == []
    for n in (limit, 2**33):
        lists = mg.GroupedGemmProblem([one(3, 5), one(4, 8)], [one(5, 6), one(8, n)])
        for problem in (lists, jagged(n)):
            [reason] = reasons(problem.spec, GPU)
            assert str(n) in reason and "split" in reason


def wrong(out: torch.Tensor, right: torch.Tensor) -> int:
    """How many elements differ from `right`, which repeats along the first direction."""
    flat, step = out.reshape(-1, right.numel()), max(1, (1 << 28) // right.numel())
    return sum(int((flat[i : i + step] != right.reshape(1, -1)).sum()) for i in range(0, len(flat), step))


def solved(backend: str, out: torch.Tensor, *operands: torch.Tensor, **more: Any) -> torch.Tensor:
    """The result in memory that held something else; a refusal, which says why, ends the test."""
    problem = mg.GroupedGemmProblem(*operands, out=out.fill_(7), **more)
    if reasons := registry.get(backend).not_supported_reasons(problem.spec, out.device):
        pytest.skip(f"{backend} refuses: {reasons[0]}")
    mg.solve(problem, backend=backend)
    return out


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", ["rows", "columns"])
def test_an_extent_past_31_bits(backend: str, form: str) -> None:
    unit = torch.ones(1, 1, dtype=torch.float16, device="cuda")
    long = unit.expand(LONG, 1) if form == "rows" else unit.expand(1, LONG)
    a, b = (long, 3 * unit) if form == "rows" else (3 * unit, long)
    out = torch.empty((LONG, 1) if form == "rows" else (1, LONG), dtype=torch.float16, device="cuda")
    assert wrong(solved(backend, out, a, b), 3 * unit) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rows", [LONG, GIANT - 1])
def test_packed_rows_as_long_as_31_bits_or_longer(backend: str, rows: int) -> None:
    """Three groups whose ends need up to 64 bits."""
    weights = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float16, device="cuda").reshape(3, 1, 1)
    ends = torch.tensor([rows - 80, rows - 70, rows], device="cuda")
    out = torch.empty(rows, 1, dtype=torch.float16, device="cuda")
    solved(backend, out, torch.ones(1, 1, dtype=torch.float16, device="cuda").expand(rows, 1), weights, ends=ends)
    assert wrong(out[: rows - 80], 3 * torch.ones_like(weights[0])) == 0
    assert out[rows - 80 :].ravel().tolist() == [5.0] * 10 + [7.0] * 70


@pytest.mark.gpu
@pytest.mark.parametrize("backend", COUNTING)
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched"])
def test_the_longest_extent_that_kernels_count(backend: str, form: str) -> None:
    """In memory of its own, by lines of 16 bytes, as the fastest kernels like it."""
    long = torch.ones(GIANT - 8, 8, dtype=torch.float16, device="cuda")
    few, out = torch.ones(8, 8, dtype=torch.float16, device="cuda"), torch.float16
    ends, right = torch.tensor([70, GIANT - 77, GIANT - 8], device="cuda"), 8.0
    more: dict[str, Any] = {"ends": ends}
    shape: tuple[int, ...]
    if form == "jagged_m":
        a, b, shape = long, few[:, :1].expand(3, 8, 1), (GIANT - 8, 1)
    elif form == "jagged_n":
        a, b, shape = few[:1].expand(3, 1, 8), long.T, (1, GIANT - 8)
        more["jagged"] = "n"
    elif form == "jagged_k":
        a, b, shape, out = long[:, :1].T, long[:, :1], (2048, 1, 1), torch.float32
        ends = torch.arange(1, 2049, device="cuda").mul(1 << 20).clamp(max=GIANT - 8)
        more = {"ends": ends, "jagged": "k"}
    else:
        a, b, shape, more = long[None], few[None, :, :1], (1, GIANT - 8, 1), {}
    result = torch.empty(shape, dtype=out, device="cuda").fill_(7)
    problem = mg.GroupedGemmProblem(a, b, out=result, **more)
    assert registry.get(backend).not_supported_reasons(problem.spec, result.device) == []
    mg.solve(problem, backend=backend)
    if form == "jagged_k":
        assert torch.equal(result.ravel(), torch.diff(ends, prepend=ends.new_zeros(1)).float())
        return
    assert wrong(result, torch.full((1,), right, dtype=out, device="cuda")) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_groups_that_begin_past_31_bits(backend: str) -> None:
    """No extent is long, but the result has more elements than 32 bits count: 3 groups of 2^14 x 2^17."""
    left = torch.arange(1, 4, dtype=torch.float16, device="cuda").reshape(3, 1, 1).repeat(1, 1 << 14, 8)
    right = torch.ones(8, 1 << 17, dtype=torch.float16, device="cuda")
    out = solved(
        backend, torch.empty(3, 1 << 14, 1 << 17, dtype=torch.float16, device="cuda"), left, right.expand(3, -1, -1)
    )
    for g in range(3):
        assert wrong(out[g], torch.full((1 << 17,), 8.0 * (g + 1), dtype=torch.float16, device="cuda")) == 0
