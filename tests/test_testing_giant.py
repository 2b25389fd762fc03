"""More rows, columns or elements than 31 bits count: right, or refused with a reason.

No campaign can draw these: the reference would take minutes, and the result alone has 4 GB. All entries are small
whole numbers, so that every element is known, and the result is compared where it lies.
"""

from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm import registry

BACKENDS = ("cublas", "cupy", "numba", "triton")
LONG = 2**31 + 72
ROOM = 40 << 30


@pytest.fixture(autouse=True)
def room() -> Any:
    if torch.cuda.is_available() and torch.cuda.mem_get_info()[0] < ROOM:
        pytest.skip(f"needs {ROOM >> 30} GB of free GPU memory")
    yield
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


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
    one = torch.ones(1, 1, dtype=torch.float16, device="cuda")
    long = one.expand(LONG, 1) if form == "rows" else one.expand(1, LONG)
    a, b = (long, 3 * one) if form == "rows" else (3 * one, long)
    out = torch.empty((LONG, 1) if form == "rows" else (1, LONG), dtype=torch.float16, device="cuda")
    assert wrong(solved(backend, out, a, b), 3 * one) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("backend", BACKENDS)
def test_packed_rows_past_31_bits(backend: str) -> None:
    """Three groups whose ends need 64 bits."""
    one = torch.ones(1, 1, dtype=torch.float16, device="cuda")
    weights = torch.tensor([3.0, 5.0, 7.0], dtype=torch.float16, device="cuda").reshape(3, 1, 1)
    ends = torch.tensor([LONG - 80, LONG - 70, LONG], device="cuda")
    out = solved(
        backend, torch.empty(LONG, 1, dtype=torch.float16, device="cuda"), one.expand(LONG, 1), weights, ends=ends
    )
    assert wrong(out[: LONG - 80], 3 * one) == 0
    assert out[LONG - 80 :].ravel().tolist() == [5.0] * 10 + [7.0] * 70


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
