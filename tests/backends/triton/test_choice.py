"""What may be chosen for a spec: valid, ranked, refused with words. No GPU, no Triton."""

from __future__ import annotations

import random
import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.triton import BACKEND, Config, support
from multigemm.backends.triton.choice import candidates, emulated, hopper_candidates, pointer_candidates
from multigemm.backends.triton.config import problem_with
from multigemm.backends.triton.hopper import canonical, cut_of, drawn, line_of, listed, packed_spec, store_of
from multigemm.backends.triton.launch import sources_of
from multigemm.backends.triton.lists import TILE_M, TILE_N, extents_multiple, tile_table
from multigemm.backends.triton.shipped import specs
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import TABLE
from multigemm.planning.staging import stage
from multigemm.problem.spec import Form, OperandSpec, Order, ProblemSpec, bucket

SPECS = dict(specs())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_candidates_are_valid_distinct_and_never_none(name: str, capability: tuple[int, int]) -> None:
    found = candidates(SPECS[name], capability)
    assert found
    assert len(set(found)) == len(found)
    assert all(problem_with(config, SPECS[name]) == "" for config in found)
    assert any(config.kernel == "pointer" for config in found)
    assert capability == (9, 0) or all(config.kernel == "pointer" for config in found)


def test_the_measured_ranking() -> None:
    spec = replace(SPECS["jagged_m bf16"], groups=64, n=4096)
    sizes = {16: 192, 64: 256, 256: 256, 512: 128, 1024: 128, 2048: 192}
    for rows, block_m in sizes.items():
        best = hopper_candidates(replace(spec, total=64 * rows))[0]
        assert best.block_m == block_m, rows


def test_few_rounds_of_tiles_are_whole_ones() -> None:
    """Measured: 144 tiles of 192x256 took 161 us, 240 of 128x128 127; 88 and 96 of 256x128 98 and 71."""
    spec = SPECS["jagged_m bf16"]
    few_rows = hopper_candidates(replace(spec, groups=48, n=576, k=7232, total=64))[0]
    assert (few_rows.block_m, few_rows.block_n) == (128, 128)
    narrow = hopper_candidates(replace(spec, groups=4, n=272, k=5888, total=8192))[0]
    assert (narrow.block_m, narrow.block_n) == (256, 128)


def test_a_step_of_decoding_and_jagged_columns_take_the_ring() -> None:
    thin = replace(SPECS["jagged_m bf16"], groups=32, n=4096, k=7168, total=32)
    assert candidates(thin, (9, 0))[0].kernel == "hopper", "many weights to read, though few rows"
    assert (
        candidates(replace(SPECS["jagged_n bf16"], m=4096, k=832, total=12288, groups=128), (9, 0))[0].kernel
        == "hopper"
    )
    assert candidates(replace(thin, groups=4, n=256, k=256), (9, 0))[0].kernel == "pointer"
    many = replace(SPECS["jagged_k bf16"], groups=256, m=128, n=192, total=2**16)
    assert candidates(many, (9, 0))[0].kernel == "hopper", "small results, but many of them and each of a long k"
    assert candidates(replace(many, groups=4, total=2**9), (9, 0))[0].kernel == "pointer"


@pytest.mark.parametrize(
    ("groups", "total", "largest", "columns", "kernel", "tile"),
    [
        (4, 4 * 1024, 1024, None, "hopper", (128, 256, 0)),  # 4 x 1024^3
        (16, 16 * 1024, 1024, None, "hopper", (128, 256, 1)),  # several rounds of tiles
        (4, 4 * 1024, 2048, None, "pointer", (128, 128, 0)),  # unequal, and one round
        (16, 16 * 1024, 1024, 120, "pointer", (128, 128, 0)),  # columns for half a tile
        (4, 4 * 512, 512, None, "hopper", (64, 128, 0)),  # 4 x 512^3, or the cubes of 1024, 512, 256 and 128
        (16, 16 * 256, 256, None, "pointer", (64, 64, 0)),
        (4, 4 * 256, 256, None, "pointer", (64, 64, 0)),
        (16, 16 * 128, 128, None, "pointer", (64, 64, 0)),
        (4, 4 * 128, 128, None, "pointer", (32, 32, 0)),
    ],
)
def test_lists_by_their_sizes(
    groups: int, total: int, largest: int, columns: int | None, kernel: str, tile: tuple[int, int, int]
) -> None:
    spec = replace(SPECS["per_group bf16"], groups=groups, total=total, largest=largest, n=columns, k=None)
    first = candidates(spec, (9, 0))[0]
    assert (first.kernel, (first.block_m, first.block_n, first.programs)) == (kernel, tile)
    assert candidates(spec, (8, 0))[0].kernel == "pointer"
    wider = replace(spec, out=replace(spec.out, dtype=torch.float32))
    assert all(config.block_m == 64 for config in hopper_candidates(wider)), "results turn through shared memory"
    for other in (replace(spec, groups=17), replace(spec, bias=torch.bfloat16), replace(spec, compute=torch.float32)):
        assert hopper_candidates(other) == []
    assert {config.kernel for config in candidates(spec, (9, 0))} == {"pointer", "hopper"}


def test_unaligned_operands_are_packed_and_lists_are_not() -> None:
    many = replace(SPECS["jagged_m bf16 unaligned"], total=2**14)
    assert hopper_candidates(many)[0].pack == ("a", "b")
    assert hopper_candidates(SPECS["jagged_n bf16 unaligned"])[0].pack == ("a", "b")
    assert hopper_candidates(SPECS["per_group bf16 unaligned"]) == []


@pytest.fixture
def thrifty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigemm.backends.triton.config.thrifty", lambda: True)


@pytest.mark.usefixtures("thrifty")
def test_few_rows_do_not_pay_for_a_copy_of_unaligned_weights() -> None:
    spec = replace(SPECS["jagged_m bf16 unaligned"], groups=32, total=32 * 256)
    best = hopper_candidates(spec)[0]
    assert (best.shift_b, best.pack, best.block_m) == (True, ("a",), 256)
    assert hopper_candidates(replace(spec, a=replace(spec.a, align=16), k=1024))[0].pack == ()
    along_k = replace(spec, b=replace(spec.b, order="col"))
    assert [config.block_m for config in hopper_candidates(along_k)[:2] if config.shift_b] == [256, 128]
    assert hopper_candidates(replace(along_k, total=2**16))[0].pack == ("a", "b"), "rows that pay for the copy"
    many = replace(along_k, groups=257, total=1024, bias=torch.bfloat16)
    assert hopper_candidates(many)[0].block_m == 256, "no elements to address one by one: registers for any results"
    strided = replace(spec, b=replace(spec.b, order="strided"))
    assert not any(config.shift_b for config in hopper_candidates(replace(strided, total=1024)))
    for form in ("jagged_k", "jagged_n", "batched", "masked"):
        assert not any(config.shift_b for config in hopper_candidates(SPECS[f"{form} bf16 unaligned"]))


@pytest.mark.parametrize(
    ("changes", "heights"),
    [
        ({}, {128, 256}),
        ({"groups": 257}, {128}),
        ({"bias": torch.bfloat16}, {128}),
        ({"index": torch.int64}, {128}),
        ({"activation": "gelu"}, set()),
        ({"out": OperandSpec(torch.float32, "row", 4)}, {128, 256}),
        ({"out": OperandSpec(torch.float64, "row", 8)}, set()),
        ({"out": OperandSpec(torch.bfloat16, "col", 2)}, set()),
        ({"k": 2**30 - 1}, {128, 256}),
        ({"k": 2**30 + 1}, set()),
    ],
)
@pytest.mark.usefixtures("thrifty")
def test_weights_pass_through_registers_where_those_suffice(changes: dict[str, Any], heights: set[int]) -> None:
    found = hopper_candidates(replace(SPECS["jagged_m bf16 unaligned"], total=1024, **changes))
    assert {config.block_m for config in found if config.shift_b} == heights
    refused = Config("hopper", block_m=256, block_n=256, warps=4, stages=2, pack=("a",), shift_b=True)
    assert "64 columns each" in problem_with(refused, SPECS["jagged_m bf16 unaligned"])


@pytest.mark.usefixtures("thrifty")
def test_copied_weights_where_rows_pay_for_the_copy() -> None:
    """Measured on an H200: 489 us shifted and 523 copied (G=12, T=10861, N=2993, K=3427); 118 and 104 (G=6, T=7859,
    N=2643, K=801); copied with 256 columns 250, with 128 columns 220 (G=12, T=17709, N=639, K=3227)."""
    spec = SPECS["jagged_m bf16 unaligned"]
    shifted = replace(spec, groups=12, total=bucket(10861), n=2993, k=3427)
    assert hopper_candidates(shifted)[0].shift_b
    copied = hopper_candidates(replace(spec, groups=6, total=bucket(7859), n=2643, k=801))[0]
    assert (copied.pack, copied.block_n) == (("a", "b"), 256)
    little = hopper_candidates(replace(spec, groups=8, total=4096, n=511, k=1533))[0]
    assert (little.shift_b, little.block_m) == (True, 128), "few tall tiles leave multiprocessors idle"
    more = hopper_candidates(replace(spec, groups=6, total=bucket(2046), n=1141, k=2803))[0]
    assert (more.shift_b, more.block_m) == (True, 256), "one round of tall tiles, 63 us, and not two of low ones, 79"
    cheap = hopper_candidates(replace(spec, groups=2, total=2048, n=459, k=1245))[0]
    assert (cheap.pack, cheap.block_m, cheap.block_n) == (("a", "b"), 128, 128), "a copy that stays in the L2 cache"
    narrow = hopper_candidates(replace(spec, groups=8, total=bucket(17709), n=639, k=3227))[0]
    assert (narrow.pack, narrow.block_n) == (("a", "b"), 128)


def test_a_tall_tile_beside_four_more_warps_is_for_the_compiler_that_spills_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("multigemm.backends.triton.config.thrifty", lambda: False)
    spec = SPECS["jagged_m bf16 unaligned"]
    best = hopper_candidates(replace(spec, total=8 * 200))[0]
    assert (best.shift_b, best.block_m) == (True, 128)
    assert not hopper_candidates(replace(spec, total=8 * 400))[0].shift_b, "low tiles read weights too often"


@pytest.mark.parametrize(
    ("form", "orders", "copied"),
    [
        ("jagged_m", ("row", "row"), ("row", "row")),
        ("jagged_m", ("col", "col"), ("row", "col")),
        ("jagged_n", ("row", "row"), ("row", "col")),
        ("jagged_n", ("col", "col"), ("col", "col")),
        ("jagged_k", ("row", "col"), ("col", "row")),
        ("batched", ("strided", "strided"), ("row", "row")),
    ],
)
def test_copies_lie_as_the_kernel_takes_them(
    form: Form, orders: tuple[Order, Order], copied: tuple[Order, Order]
) -> None:
    spec = SPECS[f"{form} bf16 unaligned"]
    spec = replace(spec, a=replace(spec.a, order=orders[0]), b=replace(spec.b, order=orders[1]))
    config = hopper_candidates(spec)[0]
    seen = packed_spec(spec, config)
    assert (seen.a.order, seen.b.order) == copied
    assert problem_with(replace(config, pack=()), seen) == "", "a copied operand needs no further copy"


def test_a_heavy_epilogue_gets_a_smaller_tile() -> None:
    spec = SPECS["jagged_m bf16 C bias gelu"]
    assert all(config.block_m * config.block_n <= 128 * 128 for config in hopper_candidates(spec))
    assert all(config.block_n <= 128 and config.block_m <= 64 for config in pointer_candidates(spec))


@pytest.mark.parametrize(
    ("config", "word"),
    [
        (Config(block_m=48), "power of two"),
        (Config(block_m=256, block_n=256, block_k=128, stages=4), "shared memory"),
        (Config(block_m=128, block_n=256, block_k=32, warps=4, stages=2), "registers"),
        (Config("hopper", block_m=64, block_n=128, stages=2), "tile"),
        (Config("hopper", block_m=256, block_n=256, stages=1), "registers"),
        (Config("hopper", block_m=256, block_n=128, stages=8), "shared memory"),
        (Config("hopper", programs=0), "programs=0.*use 1"),
    ],
)
def test_bad_configs_are_refused_with_the_reason(config: Config, word: str) -> None:
    spec = SPECS["jagged_m bf16"]
    assert re.search(word, problem_with(config, spec))
    with pytest.raises(InvalidSetting, match=word):
        BACKEND.plan(spec, config, torch.device("cpu"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kernel": "ring"}, ("kernel='ring'", "'pointer', 'hopper'")),
        ({"order": "random"}, ("order='random'", "'dealt', 'drawn'")),
        ({"pack": ("c",)}, ("pack=('c',)", "('a',)")),
        ({"pack": "a"}, ("pack='a'", "('a',)")),
        ({"warps": 3}, ("warps=3", "1, 2, 4, 8, 16")),
        ({"splits": 3}, ("splits=3", "1, 2, 4, 8, 16")),
        ({"width": 0}, ("width=0", "1 to 4096", "8")),
        ({"width": 2.5}, ("width=2.5", "1 to 4096")),
        ({"programs": -1}, ("programs=-1", "0 to 64")),
        ({"stages": 0}, ("stages=0", "1 to 32")),
        ({"block_k": 0}, ("block_k=0", "16")),
        ({"pack": ("a",)}, ("pack=('a',)", "use neither")),
        ({"kernel": "hopper", "splits": 2}, ("splits=2", "use 1")),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["jagged_m bf16", "per_group bf16", "jagged_m torch.float32"])
def test_values_that_mean_nothing_are_refused(changes: dict[str, Any], words: tuple[str, ...], name: str) -> None:
    spec, config = SPECS[name], replace(Config(), **changes)
    assert all(word in problem_with(config, spec) for word in words), problem_with(config, spec)
    with pytest.raises(InvalidSetting):
        BACKEND.plan(spec, config, torch.device("cpu"))


def test_little_work_is_cut_into_small_tiles() -> None:
    spec = replace(SPECS["jagged_m bf16"], groups=4, n=128, k=256, total=1024)
    best = pointer_candidates(spec)[0]
    assert (best.block_m, best.block_n) == (32, 32), "128 tiles for 132 multiprocessors, rather than 8"
    assert pointer_candidates(replace(spec, groups=64, total=2**14))[0].block_m == 64, "256 tiles rather than 128"
    assert pointer_candidates(replace(spec, groups=128, total=2**15))[0].block_m == 128


def test_zero_extents_and_other_dtypes_stay_on_the_pointer_kernel() -> None:
    spec = SPECS["jagged_m bf16"]
    assert hopper_candidates(replace(spec, k=0)) == []
    assert hopper_candidates(SPECS["jagged_m torch.float64"]) == []


def test_jagged_columns_are_jagged_rows_of_the_transposed_problem() -> None:
    spec = SPECS["jagged_n bf16"]
    turned = canonical(spec)
    assert (turned.form, turned.m, turned.n, turned.k) == ("jagged_m", None, spec.m, spec.k)
    assert (turned.a.order, turned.b.order, turned.out.order) == ("col", "col", "col")
    assert cut_of(turned) == "rows"
    assert store_of(turned) == "col"


@pytest.mark.parametrize(("n", "how"), [(256, "tma"), (8, "tma"), (9, "row"), (2, "row"), (260, "row")])
def test_only_rows_of_whole_pieces_are_written_by_tensor_maps(n: int, how: str) -> None:
    spec = SPECS["jagged_m bf16"]
    assert store_of(replace(spec, n=n, out=replace(spec.out, align=16))) == how


def test_the_interpreter_gets_one_small_config() -> None:
    assert len(emulated()) == 1
    assert all(problem_with(emulated()[0], spec) == "" for name, spec in SPECS.items() if "float64" not in name)


@pytest.mark.parametrize(
    ("shapes", "whole"),
    [
        (((52, 448, 3392), (7, 8, 16)), True),
        (((52, 448, 3391),), False),
        (((52, 447, 3392),), False),
    ],
)
def test_only_extents_along_memory_decide_how_wide_a_list_is_read(
    shapes: tuple[tuple[int, int, int], ...], whole: bool
) -> None:
    a = [torch.empty(m, k, dtype=torch.bfloat16) for m, _, k in shapes]
    b = [torch.empty(k, n, dtype=torch.bfloat16) for _, n, k in shapes]
    problem = mg.GroupedGemmProblem(a, b)
    ops = stage(problem, problem.spec, [torch.empty(m, n, dtype=torch.bfloat16) for m, n, _ in shapes]).ops
    assert extents_multiple(ops) == (8 if whole else 1)


SHAPES = [[(128, 128, 128)] * 4, [(1, 5, 0), (0, 7, 3), (200, 333, 9), (65, 1, 40)], [(700, 90, 8), (10, 900, 64)]]


@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize("config", [Config(block_m=32, block_n=64, width=2), Config(block_m=64, block_n=32, width=8)])
def test_the_host_lists_each_tile_of_a_list_once(shapes: list[tuple[int, int, int]], config: Config) -> None:
    given = mg.GroupedGemmProblem([torch.ones(m, k) for m, _, k in shapes], [torch.ones(k, n) for _, n, k in shapes])
    rows = tile_table(stage(given, given.spec, [torch.empty(m, n) for m, n, _ in shapes]).ops, config)
    assert rows is not None
    seen = {tuple(int(row[at]) for at in (TABLE.A, TABLE.B, TABLE.OUT, TILE_M, TILE_N)) for row in rows}
    assert len(seen) == len(rows) == sum(-(-m // config.block_m) * -(-n // config.block_n) for m, n, _ in shapes)
    assert all(0 <= row[TILE_M] * config.block_m < row[TABLE.M] for row in rows)
    assert all(0 <= row[TILE_N] * config.block_n < row[TABLE.N] for row in rows)
    depths = [int(row[TABLE.K]) for row in rows]
    assert depths == sorted(depths, reverse=True), "long products first"


def test_only_many_groups_of_rows_need_a_launch_before() -> None:
    spec = SPECS["jagged_m bf16"]
    tall, large = Config("hopper", block_m=256, block_n=128), Config("hopper", block_m=192, block_n=256)
    assert [listed(replace(spec, groups=g), tall) for g in (8, 256, 257)] == [False, False, True]
    assert [listed(replace(spec, groups=g), large) for g in (8, 128, 129)] == [False, False, True]
    assert not listed(replace(SPECS["jagged_k bf16"], groups=257), tall)


def test_tiles_of_a_batch_are_dealt_out() -> None:
    config = Config("hopper", block_m=128, block_n=128, stages=5, warps=4, order="drawn")
    assert drawn(SPECS["jagged_m bf16"], config)
    assert drawn(SPECS["jagged_k bf16"], config)
    assert not drawn(SPECS["batched bf16"], config)
    assert not drawn(SPECS["jagged_m bf16"], replace(config, order="dealt"))


@pytest.mark.parametrize(("columns", "line"), [(1, 8), (100, 104), (257, 320), (4096, 4096), (4099, 4160)])
def test_copies_lie_in_whole_lines(columns: int, line: int) -> None:
    assert line_of(columns, 2) == line


def test_tf32_is_multiplied_along_memory() -> None:
    spec = replace(SPECS["jagged_m tf32"], total=2**20)
    across = hopper_candidates(spec)[0]
    assert (across.block_k, across.pack) == (32, ("b",))
    assert packed_spec(spec, across).b.order == "col"
    assert hopper_candidates(replace(spec, b=replace(spec.b, order="col")))[0].pack == ()
    assert hopper_candidates(replace(spec, precision="ieee")) == []
    assert hopper_candidates(replace(spec, form="jagged_k", k=None, m=1024)) == []


def test_few_tiles_of_a_long_k_are_shared_out() -> None:
    spec = replace(SPECS["jagged_m bf16"], groups=2, n=64, k=4096, total=64)
    shared = pointer_candidates(spec)[0]
    assert shared.splits == 4
    assert all(config.splits == 1 for config in pointer_candidates(replace(spec, k=256)))
    assert all(config.splits == 1 for config in pointer_candidates(replace(spec, groups=512, total=2**14)))
    assert "splits" in problem_with(replace(shared, splits=3), spec)


def test_a_layer_needs_few_kernels_whatever_its_sizes() -> None:
    """Any number of tokens and groups, of one layer: what is compiled once serves for good."""
    found, among = set(), random.Random(1)
    layer = replace(SPECS["jagged_m bf16"], n=512, k=1024, zero_unowned=True)
    for _ in range(2000):
        groups, total = among.randint(1, 300), bucket(among.randint(1, 20000))
        config = candidates(replace(layer, groups=groups, total=total), (9, 0))[0]
        found |= set(sources_of(replace(layer, groups=groups, total=total), config).values())
    assert len(found) <= 24


@pytest.mark.parametrize(
    ("triton", "numpy", "works"), [("3.6.0", "2.4.6", False), ("3.6.0", "2.3.5", True), ("3.7.0", "2.5.5", True)]
)
def test_an_interpreter_that_fails_with_this_numpy_is_not_offered(
    triton: str, numpy: str, works: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(support, "triton_version", lambda: triton)
    monkeypatch.setattr(np, "__version__", numpy)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    reason = support._interpreter_reason()
    assert reason == "" if works else "pip install 'numpy<2.4', or 'triton>=3.7'" in reason


def rows(name: str, groups: int, total: int, n: int, k: int, order: Order = "row") -> ProblemSpec:
    spec = SPECS[f"jagged_m {name}"]
    return replace(spec, groups=groups, total=bucket(total), n=n, k=k, b=replace(spec.b, order=order))


def tile(config: Config) -> tuple[int, int]:
    return config.block_m, config.block_n


@pytest.mark.parametrize("order", ["row", "col"])
def test_few_tiles_of_tf32_are_small(order: Order) -> None:
    """Measured, nn: 31 us by 32x32 and 127 by 128x128; 28 by 32x64 and 87; nt: 31 by 64x64 and 47; 26 and 36."""
    low = {"row": [(32, 32), (32, 64)], "col": [(64, 64), (64, 64)]}[order]
    shapes = (rows("tf32", 8, 1704, 192, 2240, order), rows("tf32", 16, 1168, 256, 1408, order))
    assert [tile(candidates(spec, (9, 0))[0]) for spec in shapes] == low


def test_many_tiles_of_tf32_are_large_and_on_the_ring() -> None:
    many = rows("tf32", 8, 2**16, 4096, 2048, "col")
    assert tile(pointer_candidates(many)[0]) == (128, 128)
    assert candidates(many, (9, 0))[0].kernel == "hopper"


def test_single_elements_keep_large_tiles_of_tf32() -> None:
    spec = rows("tf32", 8, 1704, 192, 2240)
    for changed in (
        replace(spec, a=replace(spec.a, align=4)),
        replace(spec, form="jagged_n", n=None, m=192),
        replace(spec, form="jagged_k", k=None, m=192),
    ):
        assert tile(pointer_candidates(changed)[0]) == (128, 128)


@pytest.mark.parametrize(
    ("shape", "best"),
    [
        ((32, 320, 1088, 3456), (16, 64)),
        ((48, 3408, 768, 1024), (32, 128)),
        ((256, 110848, 272, 200), (64, 64)),
        ((8, 2944, 5056, 128), (64, 64)),
        ((1, 4, 1536, 896), (32, 32)),
    ],
)
def test_tiles_of_float64_follow_rows_per_group(shape: tuple[int, int, int, int], best: tuple[int, int]) -> None:
    """Measured, nt: 353 us by 16x64 and 606 by 64x64 of 8 warps; 169 by 32x128 and 320; 389 by 64x64 and 576."""
    for order in ("row", "col"):
        found = candidates(rows("torch.float64", *shape, order), (9, 0))
        assert tile(found[0]) == best
        assert all(config.warps <= 4 for config in found)


def test_what_takes_registers_in_float64_gets_more_warps() -> None:
    """C and gelu spilled 350 bytes with four."""
    spec = rows("torch.float64", 256, 110848, 272, 200)
    assert pointer_candidates(spec)[0].warps == 4
    for changed in (
        replace(spec, c=spec.out),
        replace(spec, activation="gelu"),
        replace(spec, b=replace(spec.b, order="strided")),
        replace(spec, a=replace(spec.a, align=8)),
        replace(spec, form="jagged_n", n=None, m=272),
    ):
        assert all(config.warps >= 4 for config in pointer_candidates(changed))
        assert pointer_candidates(changed)[0].warps == 8
    assert pointer_candidates(replace(spec, activation="relu"))[0].warps == 4


def test_tiles_of_float64_share_a_long_k() -> None:
    best = pointer_candidates(rows("torch.float64", 3, 4, 512, 5120))[0]
    assert (tile(best), best.splits) == ((16, 64), 4)


@pytest.mark.parametrize(
    ("shape", "best", "splits"),
    [
        ((1, 3, 192, 1920), (16, 32), 8),
        ((12, 12, 64, 1024), (16, 32), 4),
        ((8, 144, 5312, 6144), (64, 64), 1),
        ((8, 224, 2624, 6976), (64, 64), 1),
        ((32, 864, 960, 576), (64, 64), 1),
        ((64, 384, 384, 3136), (16, 32), 1),
        ((12, 500, 192, 4224), (64, 64), 4),
        ((8, 8192, 1024, 1024), (64, 64), 1),
    ],
)
def test_float32_of_few_rows_and_weights_along_k(
    shape: tuple[int, int, int, int], best: tuple[int, int], splits: int
) -> None:
    """Measured: 196 us by 64x64, 16 by 16x32 shared by 8; 108 and 16; 772 and 779."""
    found = candidates(rows("torch.float32", *shape, "col"), (9, 0))[0]
    assert (tile(found), found.splits) == (best, splits)


def test_float32_across_keeps_its_tiles() -> None:
    for shape in ((1, 3, 192, 1920), (64, 384, 384, 3136)):
        found = candidates(rows("torch.float32", *shape), (9, 0))
        assert [tile(config) for config in found] == [(64, 64), (32, 32)]
