"""Layouts, packing, products and the calls that they become; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm.backends.cublas import library
from multigemm.backends.cublas.products import (
    NO_TRANSPOSE,
    TRANSPOSE,
    Bytes,
    Leading,
    Products,
    Shape,
    clamped,
    countable,
    even_steps,
    leading,
    list_products,
    packed_forms,
    packed_products,
    shape_of,
)
from multigemm.backends.cublas.staging import Copies, stage, writable
from multigemm.planning.operands import Operands, group_table, packed
from multigemm.planning.staging import stage as stage_problem
from multigemm.planning.staging import staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from tests.support.cublas_fake import Fake

CPU = torch.device("cpu")


FAR = 1 << 33


@pytest.mark.parametrize(
    ("extents", "strides", "want"),
    [
        ((3, 5), (5, 1), Leading(True, 5)),
        ((3, 5), (9, 1), Leading(True, 9)),
        ((3, 5), (1, 3), Leading(False, 3)),
        *(((3, 5), strides, None) for strides in [(5, 2), (0, 1), (4, 1), (1, 0), (1, 2), (10, 3)]),
        # strides of single rows and columns mean nothing
        ((1, 5), (0, 1), Leading(True, 5)),
        ((1, 5), (0, 7), Leading(False, 7)),
        ((3, 1), (1, 0), Leading(False, 3)),
        ((3, 1), (6, 0), Leading(True, 6)),
        ((1, 1), (0, 0), Leading(True, 1)),
        # lines that lie too far apart
        ((3, 5), (1, FAR), None),
        ((3, 5), (FAR, 1), None),
        ((1, 5), (FAR, 1), Leading(True, 5)),
        ((5, 1), (1, FAR), Leading(False, 5)),
        ((1, FAR), (FAR, 1), Leading(True, FAR)),
    ],
    ids=str,
)
def test_strides_become_leading_dimensions(
    extents: tuple[int, int], strides: tuple[int, int], want: Leading | None
) -> None:
    assert leading(*extents, *strides, 2) == want


@pytest.mark.parametrize(("itemsize", "limit"), [(1, 2**30), (2, 2**30), (8, 2**28)])
def test_what_is_counted_ends_at_elements_or_bytes(itemsize: int, limit: int) -> None:
    assert [countable(distance, itemsize) for distance in (limit - 1, limit)] == [True, False]


def test_a_result_by_rows_swaps_the_operands() -> None:
    rows, cols = Leading(True, 8), Leading(False, 8)
    assert shape_of(2, 3, 4, rows, rows, rows) == Shape(NO_TRANSPOSE, NO_TRANSPOSE, 3, 2, 4, 8, 8, 8)
    assert shape_of(2, 3, 4, cols, rows, rows)[:2] == (NO_TRANSPOSE, TRANSPOSE)
    assert shape_of(2, 3, 4, rows, cols, cols) == Shape(TRANSPOSE, NO_TRANSPOSE, 2, 3, 4, 8, 8, 8)


def test_offsets_that_lie_are_clamped() -> None:
    for offsets, starts, lengths in (([-4, 3, 2, 99], [0, 3, 2], [3, 0, 8]), ([12, 14], [10], [0])):
        found = clamped(np.array(offsets, dtype=np.int64), 10)
        assert [x.tolist() for x in found] == [starts, lengths]


def _operands(problem: GroupedGemmProblem, out: Any) -> Operands:
    return stage_problem(problem, staged_spec(problem), out).ops


def _batch(ops: Operands, variant: str, products: Products) -> library.Batch:
    fake: Any = Fake()
    t = library.types(ops.spec.compute, library.compute_type(ops.spec), ops.spec.out.dtype, ops.alpha, 0.0)
    size = ops.spec.compute.itemsize
    if variant == "grouped":
        return library.one_for_all(fake, products, t, CPU)
    if variant == "batched":
        return library.one_per_shape(fake, products, t, Bytes(size, size), CPU)
    return library.one_each(fake, products, t)


def _packed_products(ops: Operands, size: Bytes) -> Products:
    p = packed(ops)
    return packed_products(p, size, ops.host_offsets, ops.host_valid_rows, packed_forms(p, size))


def _solve(problem: GroupedGemmProblem, out: Any, variant: str) -> list[str]:
    """What a launch does, on the host: stage, cut, call."""
    ops, copies = _operands(problem, out), Copies()
    a, b = stage(ops, copies)
    copies(0)
    ops = replace(ops, a=a, b=b)
    if ops.spec.form == "per_group":
        products = list_products(group_table(ops), Bytes(ops.spec.compute.itemsize, ops.spec.compute.itemsize))
    else:
        size = ops.spec.compute.itemsize
        products = _packed_products(ops, Bytes(size, size))
    return Fake().make(_batch(ops, variant, products)) if len(products) else []


def _laid(shape: tuple[int, ...], order: str, seed: int) -> Tensor:
    gen = torch.Generator().manual_seed(seed)
    pad = {"row": 0, "padded": 3, "col": 0, "stepped": 0}[order]
    if order == "col":
        turned = (*shape[:-2], shape[-1], shape[-2])
        return torch.randint(-9, 10, turned, generator=gen).double().transpose(-1, -2)
    step = 2 if order == "stepped" else 1
    wide = torch.randint(-9, 10, (*shape[:-1], (shape[-1] + pad) * step), generator=gen).double()
    return wide[..., : shape[-1] * step : step]


def test_a_batch_of_one_weight_is_one_product() -> None:
    a, b = _laid((3, 4, 6), "row", 1), _laid((6, 5), "row", 2)
    out = torch.zeros(3, 4, 5, dtype=torch.float64)
    problem = GroupedGemmProblem(a, b.expand(3, 6, 5), out=out)
    assert _solve(problem, out, "loop") == ["cublasGemmEx"]
    assert torch.equal(out, a @ b)


def test_single_rows_of_one_weight_are_one_product() -> None:
    a, b = _laid((3, 1, 6), "row", 1), _laid((6, 5), "row", 2)
    out = torch.zeros(3, 1, 5, dtype=torch.float64)
    assert _solve(GroupedGemmProblem(a, b.expand(3, 6, 5), out=out), out, "loop") == ["cublasGemmEx"]
    assert torch.equal(out, a @ b)


def test_groups_that_share_weights_are_one_product() -> None:
    a, b, out = _laid((11, 6), "row", 1), _laid((6, 5), "row", 2), torch.zeros(11, 5, dtype=torch.float64)
    assert _solve(GroupedGemmProblem(a, b, sizes=[2, 0, 4, 5], out=out), out, "loop") == ["cublasGemmEx"]


def test_equal_groups_become_one_strided_call() -> None:
    a, b, out = _laid((12, 6), "row", 1), _laid((3, 6, 5), "row", 2), torch.zeros(12, 5, dtype=torch.float64)
    problem = GroupedGemmProblem(a, b, sizes=[4, 4, 4], out=out)
    assert _solve(problem, out, "batched") == ["cublasGemmStridedBatchedEx"]


@pytest.mark.parametrize(
    ("second", "calls"), [(8, ["cublasGemmBatchedEx"]), (9, ["cublasGemmEx"] * 3)], ids=["aligned", "unaligned"]
)
def test_scattered_equal_products_go_by_address_where_that_is_aligned(second: int, calls: list[str]) -> None:
    store = torch.zeros(100, dtype=torch.float64)
    out = [store[at : at + 4].view(2, 2) for at in (0, second, 40)]
    a = [_laid((2, 3), "row", i) for i in range(3)]
    problem = GroupedGemmProblem(a, [_laid((3, 2), "row", 9)] * 3, out=out)
    assert _solve(problem, out, "batched") == calls
    assert all(torch.equal(z, x @ _laid((3, 2), "row", 9)) for x, z in zip(a, out, strict=True))


def test_a_plan_lays_equal_results_at_even_distances() -> None:
    dims = [(3, 5, 4), (3, 5, 4), (3, 5, 4), (0, 5, 4), (70, 1, 2), (2, 2, 0)]
    a = [_laid((m, k), "row", i).float() for i, (m, _, k) in enumerate(dims)]
    b = [_laid((k, n), "row", i + 9).float() for i, (_, n, k) in enumerate(dims)]
    plan = mg.plan(mg.GroupedGemmProblem(a, b), backend="cpu")
    out = plan()
    assert [4 * t.storage_offset() for t in out] == [0, 256, 512, 768, 768, 1280]
    assert all(torch.equal(z, x @ y) for x, y, z in zip(a, b, out, strict=True))
    assert all(t.is_contiguous() for t in out)


def test_products_in_another_order_than_in_memory_are_strided() -> None:
    a, b, out = (torch.zeros(4, 2, 2, dtype=torch.float64) for _ in range(3))
    for t, seed in ((a, 1), (b, 2)):
        t.copy_(_laid((4, 2, 2), "row", seed))
    order = (2, 0, 3, 1)
    a_list, b_list, out_list = ([t[i] for i in order] for t in (a, b, out))
    problem = GroupedGemmProblem(a_list, b_list, out=out_list)
    assert _solve(problem, out_list, "batched") == ["cublasGemmStridedBatchedEx"]
    assert torch.equal(out, a @ b)


def test_a_batch_above_the_grid_limit_is_split() -> None:
    count, out = 70000, torch.zeros(70000, 1, 1, dtype=torch.float64)
    a, b = torch.ones(count, 1, 2, dtype=torch.float64), torch.ones(count, 2, 1, dtype=torch.float64)
    ops = _operands(GroupedGemmProblem(a, b, out=out), out)
    batch = _batch(ops, "batched", _packed_products(ops, Bytes(8, 8)))
    assert [args[19].value for _, args, _ in batch.calls] == [65535, 4465]


def _rows(*rows: int, extent: int = 8) -> Products:
    """Products that differ in their rows; each lies where its number says."""
    different = sorted(set(rows))
    shapes = [Shape(0, 0, extent, m, extent, extent, extent, extent) for m in different]
    return Products(shapes, np.array([different.index(m) for m in rows]), np.array([range(len(rows))] * 3))


def test_products_of_one_shape_come_together_the_largest_first() -> None:
    groups = _rows(4, 2, 4, 9, 2, 2).groups()
    assert [(shape.n, places) for shape, places in groups] == [(9, [3]), (4, [0, 2]), (2, [1, 4, 5])]


def test_long_uneven_products_of_a_grouped_call_stay_in_their_order() -> None:
    """Sorted by size, those that are bound by memory would follow those that are not."""

    def places(products: Products) -> list[list[int]]:
        return [same for _, same in library.in_groups(products)]

    assert places(_rows(4, 2, 4)) == [[0, 2], [1]]
    assert places(_rows(900, 200, 900, 100, extent=4096)) == [[0], [1], [2], [3]]
    assert places(_rows(900, 900, 900, extent=4096)) == [[0, 1, 2]]


def test_even_steps_needs_equal_and_forward_distances() -> None:
    for places, steps in (([8, 24, 40], (16, 16, 16)), ([8, 24, 48], None), ([40, 24, 8], None)):
        assert even_steps(np.array([places] * 3)) == steps
    assert even_steps(np.array([[64, 64], [0, 8], [0, 8]])) == (0, 8, 8)


def test_unusual_strides_are_packed_and_others_not() -> None:
    good, bad = _laid((3, 4, 6), "row", 1), _laid((3, 6, 5), "stepped", 2)
    ops, copies = _operands(GroupedGemmProblem(good, bad), torch.zeros(3, 4, 5, dtype=torch.float64)), Copies()
    a, b = stage(ops, copies)
    copies(0)
    assert a is ops.a
    assert torch.equal(cast(Tensor, b), bad)
    assert [source.data_ptr() for _, source in copies.pairs] == [bad.data_ptr()]
    assert not writable(bad)


def test_int8_is_padded_to_words_of_four() -> None:
    a, b = torch.randint(-128, 128, (2, 3, 7), dtype=torch.int8), torch.randint(-128, 128, (2, 7, 5), dtype=torch.int8)
    ops, copies = _operands(GroupedGemmProblem(a, b), torch.zeros(2, 3, 5, dtype=torch.int32)), Copies()
    wide_a, wide_b = (cast(Tensor, t) for t in stage(ops, copies))
    copies(0)
    assert wide_a.shape[-1] == wide_b.shape[-2] == 16
    assert wide_b.stride(-2) == 1
    assert torch.equal(wide_a.long() @ wide_b.long(), a.long() @ b.long())


def test_aligned_int8_is_taken_as_it_lies() -> None:
    a, b = torch.ones(3, 8, dtype=torch.int8), torch.ones(5, 8, dtype=torch.int8).t()
    ops, copies = _operands(GroupedGemmProblem(a, b), torch.zeros(1, 3, 5, dtype=torch.int32)), Copies()
    stage(ops, copies)
    assert copies.pairs == []


@pytest.mark.parametrize("groups", [0, 1, 3])
def test_groups_that_share_a_matrix_are_one_product_where_there_are_any(groups: int) -> None:
    a, b, offsets = torch.ones(5, 4), torch.ones(4, 3), [0, 2, 3, 5][: groups + 1]
    problem = GroupedGemmProblem(a, b, offsets=offsets)
    ops, size = stage_problem(problem, problem.spec, torch.zeros(5, 3)).ops, Bytes(4, 4)
    assert len(_packed_products(ops, size)) == min(groups, 1)


def test_arguments_that_calls_share_are_made_once() -> None:
    doubled = library.types(torch.bfloat16, library.COMPUTE_32F, torch.bfloat16, 2.0, 0.0)
    assert library.types(torch.bfloat16, library.COMPUTE_32F, torch.bfloat16, 2.0, 0.0) is doubled
    assert library.types(torch.bfloat16, library.COMPUTE_32F, torch.bfloat16, 1.0, 0.0) is not doubled
