"""Tiles: the order in which persistent kernels walk over them, their bounds, and their time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import multigemm as mg
from multigemm.planning.tiles import (
    TileCost,
    list_tiles,
    longest_time,
    most_packed_tiles,
    most_tiles,
    tiles_of,
    typical_extent,
)
from tests.support.tile_walk import place

SIZES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 300)), max_size=8)


@given(st.integers(1, 40), st.integers(1, 40), st.integers(1, 50))
def test_raster_is_a_bijection_and_keeps_bands_together(tiles_m: int, tiles_n: int, width: int) -> None:
    spots = [place(t, tiles_m, tiles_n, width) for t in range(tiles_m * tiles_n)]
    assert len(set(spots)) == len(spots)
    assert all(0 <= i < tiles_m and 0 <= j < tiles_n for i, j in spots)
    bands = [i // width for i, _ in spots]
    assert bands == sorted(bands)


def test_width_one_goes_along_rows_and_a_wide_band_goes_down_columns() -> None:
    assert [place(t, 2, 3, 1) for t in range(6)] == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]
    assert [place(t, 2, 3, 8) for t in range(6)] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20), st.sampled_from([1, 7, 64, 128]))
def test_bound_holds_for_every_split(sizes: list[int], block: int) -> None:
    assert sum(tiles_of(s, block) for s in sizes) <= most_tiles(sum(sizes), len(sizes), block)


@given(SIZES, st.sampled_from([16, 64]), st.sampled_from([32, 128]))
def test_the_bounds_of_packed_forms_and_lists(sizes: list[tuple[int, int]], rows: int, columns: int) -> None:
    ms, ns = [m for m, _ in sizes], [n for _, n in sizes]
    for m, n in ((100, 200), (0, 7)):
        along_m = list_tiles([(x, n) for x in ms], rows, columns)
        assert along_m <= most_packed_tiles("m", len(sizes), sum(ms), n, rows, columns)
        along_n = list_tiles([(m, x) for x in ns], rows, columns)
        assert along_n <= most_packed_tiles("n", len(sizes), m, sum(ns), rows, columns)
        alike = list_tiles([(m, n)] * len(sizes), rows, columns)
        assert alike == most_packed_tiles(None, len(sizes), m, n, rows, columns)


def test_an_ordinary_group_is_exact_the_mean_or_the_largest() -> None:
    packed = mg.GroupedGemmProblem(torch.ones(600, 5), torch.ones(4, 5, 7), offsets=[0, 1, 2, 3, 600]).spec
    assert [typical_extent(packed, d, 256) for d in ("m", "n", "k")] == [256, 7, 5]
    lists = mg.GroupedGemmProblem([torch.ones(2, 9), torch.ones(6, 8)], [torch.ones(9, 3), torch.ones(8, 3)]).spec
    assert [typical_extent(lists, d, 256) for d in ("m", "n", "k")] == [lists.largest, 3, lists.largest]


@pytest.mark.parametrize(
    ("tile", "processors", "time"),
    [
        (TileCost(64, 64), 132, 64 * 64 * 10),
        (TileCost(64, 64), 8, 2 * 64 * 64 * 10),
        (TileCost(32, 128), 8, 2 * 32 * 128 * 10),
        (TileCost(64, 64, product=1.5), 132, 64 * 64 * 15),
        (TileCost(64, 64, ends=6), 132, 64 * 64 * 16),
    ],
)
def test_the_processor_with_most_tiles_takes_longest(tile: TileCost, processors: int, time: float) -> None:
    assert longest_time(tile, 4, 100, 100, 10, processors) == time
    assert longest_time(tile, np.full(3, 4.0), 100, 100, 10, processors).tolist() == [time] * 3
