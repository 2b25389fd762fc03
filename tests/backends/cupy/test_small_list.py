"""The kernel for small lists, whose tiles the host lays out; no GPU needed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import hopper, small_list, support
from multigemm.backends.cupy.config import Config, is_valid
from multigemm.cuda.tensor_map import SIZE
from multigemm.planning.operands import view_of
from tests.support.cuda_driver import FakeDriver
from tests.support.cupy_world import BF16, batch, bound, install
from tests.support.small_problems import operands, staged


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


@pytest.mark.parametrize("form", ["batched", "per_group"])
@pytest.mark.parametrize("config", configs.SMALL_LISTS)
def test_a_list_is_laid_out_by_the_host(form: str, config: Config, fake: FakeDriver) -> None:
    ops = operands(form)
    assert is_valid(config, ops.spec), support.small_list_reasons(ops.spec)
    groups = small_list.groups_of(ops, view_of(ops))
    chosen = config if config.rows else small_list.height_for(groups.shapes, 132)
    slots = small_list.SLOTS[0]
    parts, tiles, more = small_list.layout(ops, groups, chosen, slots)
    argument = b"".join(parts)
    assert tiles == sum(-(-m // chosen.rows) * -(-n // 128) for m, _, n in groups.shapes) and more is None
    maps = 2 * slots * SIZE
    shapes_at = maps + small_list.PLACE.itemsize * small_list.LISTED
    spots = np.frombuffer(argument[maps:shapes_at], small_list.PLACE)[:tiles]
    assert {(s["group"], s["blocks"]) for s in spots} == {(i, -(-k // 64)) for i, (_, k, _) in enumerate(groups.shapes)}
    shapes = list(small_list.SHAPE.iter_unpack(argument[shapes_at : -small_list.TAIL.size]))
    places = [(x.data_ptr(), 2 * x.stride(0)) for x in ops.out]
    assert shapes[: len(places)] == [(m, n, *at) for (m, _, n), at in zip(groups.shapes, places, strict=True)]
    assert len(shapes) == slots
    assert small_list.TAIL.unpack(argument[-small_list.TAIL.size :]) == (0, 1.0, 1, tiles)
    words = np.frombuffer(argument[:maps], np.uint64).reshape(2, slots, 16)
    assert words[0, : len(places), 0].tolist() == [x.data_ptr() for x in ops.b], "the weights of each group"
    assert words[1, : len(places), 0].tolist() == [x.data_ptr() for x in ops.a], "the rows of each group"
    bound(config, ops)()
    assert [launched.kernel for launched in fake.launched] == ["small_list"]


def test_tiles_beyond_the_argument_lie_in_device_memory_and_none_is_left_out(fake: FakeDriver) -> None:
    half = partial(torch.zeros, dtype=torch.bfloat16)
    problem = mg.GroupedGemmProblem([half(1000, 64), half(300, 136)], [half(64, 1304), half(136, 136)])
    ops = staged(problem)
    groups = small_list.groups_of(ops, view_of(ops))
    parts, tiles, more = small_list.layout(ops, groups, configs.SMALL_LISTS[1], small_list.SLOTS[0])
    argument = b"".join(parts)
    maps = 2 * small_list.SLOTS[0] * SIZE
    listed = np.frombuffer(argument[maps : maps + small_list.PLACE.itemsize * small_list.LISTED], small_list.PLACE)
    assert more is not None and tiles == 5 * 2 + 16 * 11 > small_list.LISTED
    places = np.concatenate([listed, more.numpy().view(small_list.PLACE)]).tolist()
    assert places[:10] == [(0, 3, d, a) for d in range(5) for a in range(2)], "the longest k first"
    assert places[10:] == [(1, 1, d, a) for d in range(16) for a in range(11)]
    assert small_list.TAIL.unpack(argument[-small_list.TAIL.size :])[0] == more.data_ptr()
    zero = replace(ops, spec=replace(ops.spec, alpha="zero"))
    argument = b"".join(small_list.layout(zero, groups, configs.SMALL_LISTS[1], small_list.SLOTS[0])[0])
    assert set(np.frombuffer(argument[maps : maps + 160], small_list.PLACE)["blocks"]) == {0}, "nothing is read"


@pytest.mark.parametrize(
    ("shapes", "rows"),
    [
        (((1024, 1024, 1024), (512, 512, 512), (256, 256, 256), (128, 128, 128)), 80),
        (((512, 512, 512),) * 4, 64),
        (((1024, 1024, 1024),) * 4, 128),
        (((1024, 4096, 512),) * 2, 64),
        (((2048, 512, 1024),) * 3, 192),
        (((384, 768, 640),) * 8, 128),
        ((), 64),
    ],
)
def test_the_height_of_tiles_is_the_one_whose_last_block_ends_first(
    shapes: tuple[tuple[int, int, int], ...], rows: int
) -> None:
    assert small_list.height_for(shapes, 132).rows == rows


def test_a_height_is_chosen_without_laying_any_tile_out() -> None:
    """Of 65,536 x 65,536 there are up to half a million tiles, 8 MB for each height; few tables are kept at all."""
    small_list.places.cache_clear()
    small_list.height_for.cache_clear()
    assert small_list.height_for(((1 << 16, 4096, 1 << 16), (64, 64, 64)), 132) in configs.SMALL_LISTS[1:]
    assert small_list.places.cache_info().currsize == 0
    for rows in range(1, 200):
        small_list.places(((rows, 64, 128),), 64)
    assert small_list.places.cache_info().currsize <= 32


def test_a_kept_table_of_tiles_cannot_be_written() -> None:
    tiles = small_list.places(((100, 64, 128),), 64)
    assert tiles is small_list.places(((100, 64, 128),), 64)
    with pytest.raises(ValueError, match="read-only"):
        tiles["group"] = 1


@pytest.mark.parametrize("config", configs.SMALL_LISTS[1:], ids=lambda c: str(c.rows))
@pytest.mark.parametrize("order", ["row", "col"])
def test_odd_results_of_a_list_are_read_within_the_staging(order: Any, config: Config) -> None:
    """In turns of 32 rows, the last of which may reach past the tile's."""
    x_k = hopper.roles(batch(a=replace(BF16, order=order))).x_k
    staged = config.rows if config.rows <= small_list.STAGED else 64
    stages = small_list.stages_of(x_k, config) * small_list.stage_bytes(x_k, config)
    read = -(-staged // 32) * 32 * 64 * 2
    assert small_list.shared_bytes(x_k, config) >= stages + 2 * read + 1023 and staged % 16 == 0


def test_odd_lists_are_copied_for_the_kernel(fake: FakeDriver) -> None:
    ops = operands("odd list")
    assert support.hopper_reasons(ops.spec) and support.small_list_reasons(ops.spec) == []
    bound(configs.SMALL_LIST, ops)()
    assert [launched.kernel for launched in fake.launched] == ["pack", "small_list"]


def test_the_longest_groups_start_first(fake: FakeDriver) -> None:
    half = partial(torch.zeros, dtype=torch.bfloat16)
    problem = mg.GroupedGemmProblem(
        [half(8, 64), half(0, 512), half(8, 256)], [half(64, 8), half(512, 8), half(256, 8)]
    )
    ops = staged(problem)
    assert [k for _, k, _ in small_list.groups_of_list(ops).shapes] == [256, 64], "a group without results has no tile"
    empty = mg.GroupedGemmProblem([half(0, 64)], [half(64, 8)])
    bound(configs.SMALL_LIST, staged(empty))()
    assert not fake.launched
