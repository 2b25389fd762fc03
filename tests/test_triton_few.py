"""Lists whose groups are the kernel's arguments: what the host works out, and the kernel in the interpreter."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config
from multigemm.backends.triton.launch import few_values
from multigemm.backends.triton.pointer_sources import SLOTS, few_slots
from multigemm.backends.triton.pointer_tiles import few_groups
from multigemm.layouts import Operands
from multigemm.schedule import place
from multigemm.settings import settings
from multigemm.staging import stage

LATE = "triton" in sys.modules and os.environ.get("TRITON_INTERPRET") != "1"
interpreted = pytest.mark.skipif(
    LATE or torch.cuda.is_available(), reason="the interpreter must be chosen before triton is imported, without a GPU"
)
SMALL = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=0, width=2)


@pytest.fixture(autouse=True)
def emulation(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("MULTIGEMM_EMULATE", "1")
    settings.cache_clear()
    yield
    settings.cache_clear()


def listed(shapes: list[tuple[int, int, int]], turned: bool = False, dtype: torch.dtype = torch.float32,
           **options: object) -> mg.GroupedGemmProblem:  # fmt: skip
    torch.manual_seed(len(shapes))
    a = [(torch.randn(k, m).T if turned else torch.randn(m, k)).to(dtype) for m, _, k in shapes]
    b = [(torch.randn(n, k).T if turned else torch.randn(k, n)).to(dtype) for _, n, k in shapes]
    return mg.GroupedGemmProblem(a, b, **options)  # type: ignore[arg-type]


def staged(given: mg.GroupedGemmProblem) -> Operands:
    out = [torch.empty(a.shape[0], b.shape[1], dtype=given.out_dtype) for a, b in zip(given.a, given.b, strict=True)]
    return stage(given, given.spec, out).ops


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 100])
def test_places_without_divisions(width: int) -> None:
    """quotient(x, d) is (2 * x * inverse) >> 32 there."""
    config = Config(block_m=16, block_n=16, block_k=16, width=width, programs=0)
    for down in (1, 2, 3, 4, 7, 9, 64):
        for across in (1, 2, 5, 31):
            found = few_groups(staged(listed([(16 * down, 16 * across, 16)])), config)
            assert found is not None
            [(first, steps, rows, columns, by_band, by_low, *_)], tiles = found
            assert (first, steps, rows, columns, tiles) == (0, 1, down, across, down * across)
            for tile in range(tiles):
                band = 2 * tile * by_band >> 32
                inside, height = tile - band * width * across, min(width, down - band * width)
                column = 2 * inside * (by_low if height < width else -(-(2**31) // width)) >> 32
                assert (band * width + inside - column * height, column) == place(tile, down, across, width)


def test_groups_with_a_long_k_come_first_and_empty_ones_not_at_all() -> None:
    found = few_groups(staged(listed([(16, 16, 16), (0, 16, 64), (32, 16, 0), (16, 32, 48)])), SMALL)
    assert found is not None
    groups, tiles = found
    assert [group[:4] for group in groups] == [(0, 3, 1, 2), (2, 1, 1, 1), (3, 0, 2, 1)]
    assert tiles == 5
    assert [value[0] for value in few_values(groups, 4)] == [0, 2, 3, 2**31 - 1]


@pytest.mark.parametrize("extents", [(24, 16, 16), (16, 24, 16), (16, 16, 24)])
def test_a_tile_that_is_not_whole_has_the_list_in_memory(extents: tuple[int, int, int]) -> None:
    ops = staged(listed([(16, 16, 16), extents]))
    assert few_slots(ops.spec, SMALL) == SLOTS
    assert few_groups(ops, SMALL) is None


def test_which_lists_are_arguments() -> None:
    plain = staged(listed([(16, 16, 16)] * 3)).spec
    assert few_slots(plain, SMALL) == 4
    assert few_slots(staged(listed([(16, 16, 16)] * 5)).spec, SMALL) == 0
    assert few_slots(staged(listed([(16, 16, 16)], bias=[torch.randn(16)])).spec, SMALL) == 0
    assert few_slots(staged(listed([(16, 16, 16)], c=[torch.randn(16, 16)], beta=1.0)).spec, SMALL) == 0
    assert few_slots(plain, Config(programs=2)) == 0


@interpreted
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 4])
@pytest.mark.parametrize("width", [1, 3])
def test_products(groups: int, turned: bool, width: int) -> None:
    shapes = [(16 * (1 + g * 3 % 5), 16 * (1 + g * 2 % 3), 16 * (3 - g)) for g in range(groups)]
    given = listed(shapes, turned)
    config = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=0, width=width)
    assert few_groups(staged(given), config) is not None
    assert mg.verify(given, mg.solve(given, backend="triton", config=config))


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("alpha", [0.0, 1.0, -0.5])
def test_epilogues(dtype: torch.dtype, alpha: float) -> None:
    given = listed([(32, 16, 16), (16, 16, 32)], dtype=dtype, alpha=alpha, activation="silu", out_dtype=torch.float32)
    assert few_slots(staged(given).spec, SMALL) == 4
    assert mg.verify(given, mg.solve(given, backend="triton", config=SMALL))


@interpreted
def test_results_by_columns_and_in_slices() -> None:
    operands = listed([(32, 16, 16), (16, 32, 32)])
    rows, columns = torch.full((32, 32), 7.0), torch.full((64, 16), 7.0)
    for g, out in enumerate((rows[:, 8:24], columns[16:48].T)):
        given = mg.GroupedGemmProblem([operands.a[g]], [operands.b[g]], out=[out])
        assert few_groups(stage(given, given.spec, [out]).ops, SMALL) is not None
        assert mg.verify(given, mg.solve(given, backend="triton", config=SMALL))
    assert (rows[:, :8] == 7).all() and (rows[:, 24:] == 7).all()
    assert (columns[:16] == 7).all() and (columns[48:] == 7).all()
