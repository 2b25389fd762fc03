"""Lists whose groups are the kernel's arguments: what the host works out, and the kernel in the interpreter."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import Config, lists
from multigemm.backends.triton.config import list_registers, problem_with
from multigemm.backends.triton.lists import (
    MOST_LISTED,
    SLOTS,
    few_groups,
    few_slots,
    few_values,
    list_groups,
    map_slots,
    multiples,
    values_of,
)
from multigemm.planning.operands import Operands
from multigemm.planning.staging import stage
from multigemm.problem.spec import OperandSpec
from tests.support.tile_walk import place
from tests.support.triton_kernels import hopper_list_sources

interpreted = pytest.mark.usefixtures("interpreter")
SMALL = Config(block_m=16, block_n=16, block_k=16, warps=4, stages=1, programs=0, width=2)


@pytest.fixture(autouse=True)
def emulation(setting: Callable[..., None]) -> None:
    setting(MULTIGEMM_EMULATE=1)


def listed(shapes: list[tuple[int, int, int]], turned: bool = False, dtype: torch.dtype = torch.float32,
           **options: object) -> mg.GroupedGemmProblem:  # fmt: skip
    torch.manual_seed(len(shapes))
    a = [(torch.randn(k, m).T if turned else torch.randn(m, k)).to(dtype) for m, _, k in shapes]
    b = [(torch.randn(n, k).T if turned else torch.randn(k, n)).to(dtype) for _, n, k in shapes]
    return mg.GroupedGemmProblem(a, b, **options)  # type: ignore[arg-type]


def staged(given: mg.GroupedGemmProblem) -> Operands:
    out = [torch.empty(a.shape[0], b.shape[1], dtype=given.out_dtype) for a, b in zip(given.a, given.b, strict=True)]
    return stage(given, given.spec, out).ops


@pytest.mark.parametrize("width", [1, 2, 3, 4, 8, 100, 4096])
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


def test_quotients_are_exact_whatever_is_divided_by() -> None:
    """Up to 2^15, which is more than there are tiles: then divisors of a band's tiles may be as large as they like."""
    assert MOST_LISTED <= 2**15
    x = np.arange(2**15, dtype=np.int64)
    near = [2**n + i for n in range(1, 32) for i in (-1, 0, 1)]
    for d in (*range(1, 300), *(d for d in near if 300 <= d <= 2**31)):
        assert ((2 * x * -(-(2**31) // d) >> 32) == x // d).all(), d


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


Seen = list[tuple[torch.dtype, int, tuple[int, ...], tuple[int, ...], tuple[tuple[int, ...]]]]
LARGE = Config("hopper", block_m=128, block_n=256, stages=4, warps=4, width=3)


@pytest.fixture
def encoded(monkeypatch: pytest.MonkeyPatch) -> Seen:
    """The maps that are made."""
    seen: Seen = []

    def note(*given: Any) -> bytes:
        seen.append(given)
        return bytes(128)

    monkeypatch.setattr(lists, "encode_together", note)
    return seen


def test_maps_of_a_list(encoded: Seen) -> None:
    given = listed([(520, 264, 200), (0, 8, 8), (40, 776, 1000)], dtype=torch.bfloat16)
    ops = staged(given)
    groups, tiles = list_groups(ops, LARGE)
    assert encoded == [
        (torch.bfloat16, ops.a[2].data_ptr(), (1000, 40), (2000,), ((64, 128),)),
        (torch.bfloat16, ops.b[2].data_ptr(), (776, 1000), (1552,), ((64, 64),)),
        (torch.bfloat16, ops.a[0].data_ptr(), (200, 520), (400,), ((64, 128),)),
        (torch.bfloat16, ops.b[0].data_ptr(), (264, 200), (528,), ((64, 64),)),
    ]
    assert [numbers[:4] + numbers[6:8] for _, _, numbers in groups] == [(0, 16, 1, 4, 40, 776), (4, 4, 5, 2, 520, 264)]
    assert [numbers[8:] for _, _, numbers in groups] == [(ops.out[i].data_ptr(), ops.out[i].stride(0)) for i in (2, 0)]
    assert tiles == 14
    values = values_of(groups, 4)
    assert len(values) == 4 * (2 * (1 + 4) + 10)
    assert [values[40 + 10 * slot] for slot in range(4)] == [0, 4, 2**31 - 1, 2**31 - 1]


def test_turned_operands_are_read_as_they_lie(encoded: Seen) -> None:
    list_groups(staged(listed([(136, 264, 72)], turned=True, dtype=torch.float16)), LARGE)
    assert [seen[2:] for seen in encoded] == [((136, 72), (272,), ((64, 64),)), ((72, 264), (144,), ((64, 256),))]


def test_matrices_without_elements_lend_maps_what_the_driver_takes(encoded: Seen) -> None:
    outs = [torch.empty(38, 65, dtype=torch.bfloat16)[1:, 1:]]
    given = mg.GroupedGemmProblem(
        [torch.empty(37, 0, dtype=torch.bfloat16)], [torch.empty(0, 64, dtype=torch.bfloat16)]
    )
    [(_, _, numbers)], _ = list_groups(stage(given, given.spec, outs).ops, LARGE)
    assert numbers[1] == 0
    for _, address, extents, strides, _ in encoded:
        assert address % 16 == 0 and address > 0
        assert strides[0] % 16 == 0 and strides[0] > 0
        assert min(extents) > 0


def test_results_are_stored_by_16_bytes_where_they_can_be() -> None:
    spec = staged(listed([(64, 64, 64)], dtype=torch.bfloat16)).spec
    assert multiples(spec) == (8, 1)
    assert multiples(replace(spec, out=replace(spec.out, dtype=torch.float32))) == (4, 1)
    assert multiples(replace(spec, out=replace(spec.out, align=8))) == (1,)
    assert [map_slots(replace(spec, groups=groups)) for groups in (1, 4, 5, 8, 9, 16)] == [4, 4, 8, 8, 16, 16]


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"groups": 17}, "17 groups"),
        ({"bias": torch.float32}, "bias"),
        ({"compute": torch.float32}, "16-bit"),
        ({"a": OperandSpec(torch.bfloat16, "strided")}, "unit stride"),
        ({"b": OperandSpec(torch.bfloat16, align=8)}, "aligned"),
        ({"out": OperandSpec(torch.bfloat16, "col")}, "results"),
        ({"activation": "silu"}, "silu"),
        ({"out": OperandSpec(torch.float32)}, "262144 bytes of shared memory"),
        ({"out": OperandSpec(torch.float64)}, "float64"),
    ],
)
def test_reasons_against_maps_of_lists(change: dict[str, Any], word: str) -> None:
    spec = staged(listed([(64, 64, 64)], dtype=torch.bfloat16)).spec
    assert problem_with(LARGE, spec) == ""
    assert word in problem_with(LARGE, replace(spec, **change))


def test_tiles_are_dealt_out_where_programs_are_counted() -> None:
    spec = staged(listed([(64, 64, 64)], dtype=torch.bfloat16)).spec
    for programs in (0, 1):
        config = replace(LARGE, programs=programs)
        for multiple, source in zip(multiples(spec), hopper_list_sources(spec, config).values(), strict=True):
            given = dict(source.constants)
            assert (given["MULTIPLE"], given["DEALT"]) == (multiple, programs > 0)


def test_reasons_against_tiles_of_lists() -> None:
    spec = staged(listed([(64, 64, 64)], dtype=torch.bfloat16)).spec
    assert "128x64" in problem_with(replace(LARGE, block_n=64), spec)
    assert "pack" in problem_with(replace(LARGE, pack=("a",)), spec)
    assert "shared memory" in problem_with(replace(LARGE, stages=5), spec)
    assert list_registers(LARGE) is None, "one program per multiprocessor has all registers that threads can hold"
    assert list_registers(replace(LARGE, block_m=64, block_n=128)) == 128, "two of 256 threads"
