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
from multigemm.backends.triton.choice import candidates_of, emulated, fitting
from multigemm.backends.triton.config import problem_with
from multigemm.backends.triton.generic import line_of, packed_spec
from multigemm.backends.triton.hopper import canonical, cut_of, drawn, listed, store_of
from multigemm.backends.triton.hopper_choice import hopper_candidates
from multigemm.backends.triton.lists import TILE_M, TILE_N, extents_multiple, tile_table
from multigemm.backends.triton.pointer_choice import pointer_candidates
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import TABLE
from multigemm.planning.staging import stage
from multigemm.problem.spec import Form, OperandSpec, Order, ProblemSpec, bucket
from tests.support.python_process import run_python
from tests.support.triton_kernels import every_spec, sources_of, specs

SPECS = dict(specs())


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_candidates_are_valid_distinct_and_never_none(name: str, capability: tuple[int, int]) -> None:
    found = candidates_of(SPECS[name], capability)
    assert found
    assert len(set(found)) == len(found)
    assert all(problem_with(config, SPECS[name]) == "" for config in found)
    assert any(config.kernel == "pointer" for config in found)
    assert capability == (9, 0) or all(config.kernel == "pointer" for config in found)


@pytest.mark.parametrize(("capability", "kilobytes"), [((8, 0), 163), ((8, 6), 99), ((12, 0), 99)])
def test_every_problem_finds_a_tile_that_fits(capability: tuple[int, int], kilobytes: int) -> None:
    found = {name: fitting(spec, capability, 1024 * kilobytes) for name, spec in every_spec().items()}
    assert all(found.values())
    assert capability[0] > 8 or (128, 256) in {(x.block_m, x.block_n) for x in found["jagged_m bf16"]}


@pytest.fixture
def thrifty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigemm.backends.triton.config.thrifty", lambda: True)


def spec_of(name: str, **changes: Any) -> ProblemSpec:
    """One of the shipped classes, changed; `total` is a number of rows, `b_order` the order of the weights."""
    order = changes.pop("b_order", None)
    spec = replace(SPECS[name], **{**changes, "total": bucket(changes.get("total", SPECS[name].total))})
    return spec if order is None else replace(spec, b=replace(spec.b, order=order))


BF16, UNALIGNED, TF32 = "jagged_m bf16", "jagged_m bf16 unaligned", "jagged_m tf32"
DECODING = {"groups": 32, "n": 4096, "k": 7168, "total": 32}
WEIGHT_GRADIENT = {"groups": 256, "m": 128, "n": 192, "total": 2**16}
WRITTEN = {"groups": 64, "m": 7168, "n": 2048, "total": 64 * 128}
NOT_WRITTEN: dict[str, dict[str, Any]] = {
    "but 5 rounds": {"groups": 2, "total": 256},
    "results by columns": {"out": OperandSpec(torch.bfloat16, order="col")},
    "results of 32 bits": {"out": OperandSpec(torch.float32)},
    "an activation": {"activation": "relu"},
    "copied operands": {"a": OperandSpec(torch.bfloat16, order="col", align=2)},
}
"""Why tiles of 192 x 256 do not come first."""
HOPPER_FIRST: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    **{f"{rows} rows a group": (BF16, {"groups": 64, "n": 4096, "total": 64 * rows},
                                {"block_m": block_m, "wide_tails": wide_tails})
       for rows, block_m, wide_tails in ((16, 192, False), (64, 256, False), (65, 256, True), (256, 256, True),
                                         (512, 256, True), (1024, 256, True), (2048, 192, False))},
    "64 rows a group of a long k": (BF16, {"groups": 8, "n": 14336, "k": 4096, "total": 512}, {"wide_tails": True}),
    "some 1020 rows of each of many groups": (BF16, {"groups": 257, "n": 4096, "total": 2**18},
                                         {"block_m": 128, "wide_tails": False}),
    "tails that would waste a quarter of their columns": (BF16, {"groups": 64, "n": 384, "total": 2**14},
                                                          {"block_m": 256, "wide_tails": False}),
    "tails that waste a tenth": (BF16, {"groups": 64, "n": 9 * 128, "total": 2**14}, {"wide_tails": True}),
    "jagged n": ("jagged_n bf16", {"groups": 64, "m": 4096, "total": 2**14}, {"block_m": 256, "wide_tails": True}),
    "padded groups": ("masked bf16", {"groups": 64, "m": 512, "n": 4096, "total": 2**14}, {"wide_tails": True}),
    "a stack": ("batched bf16", {"groups": 64, "m": 256, "n": 4096, "total": 2**14}, {"wide_tails": False}),
    "144 tiles of 192x256 took 161 us, 240 of 128x128 127":
        (BF16, {"groups": 48, "n": 576, "k": 7232, "total": 64}, {"block_m": 128, "block_n": 128}),
    "88 tiles took 98 us, 96 of 256x128 71":
        (BF16, {"groups": 4, "n": 272, "k": 5888, "total": 8192}, {"block_m": 256, "block_n": 128}),
    **{f"jagged k of {k} a group": ("jagged_k bf16", {**WRITTEN, "total": 64 * k}, {"block_m": block_m, "block_n": 256})
       for k, block_m in ((64, 128), (128, 192), (256, 128), (1024, 128))},
    **{f"short jagged k, {why}": ("jagged_k bf16", {**WRITTEN, **changes}, {"block_m": 128, "block_n": 256})
       for why, changes in NOT_WRITTEN.items()},
    "both operands are copied": (UNALIGNED, {"total": 2**14}, {"pack": ("a", "b")}),
    "both operands of jagged n are copied": ("jagged_n bf16 unaligned", {}, {"pack": ("a", "b")}),
    "few rows do not pay for a copy": (UNALIGNED, {"groups": 32, "total": 32 * 256},
                                       {"shift_b": True, "pack": ("a",), "block_m": 256}),
    "rows that pay for a copy": (UNALIGNED, {"groups": 32, "total": 2**16, "b_order": "col"}, {"pack": ("a", "b")}),
    "along k no elements are addressed one by one: registers for any results":
        (UNALIGNED, {"groups": 257, "total": 1024, "bias": torch.bfloat16, "b_order": "col"}, {"block_m": 256}),
    "489 us shifted, 523 copied": (UNALIGNED, {"groups": 12, "total": 10861, "n": 2993, "k": 3427}, {"shift_b": True}),
    "118 us shifted, 104 copied": (UNALIGNED, {"groups": 6, "total": 7859, "n": 2643, "k": 801},
                                   {"pack": ("a", "b"), "block_n": 256}),
    "few tall tiles leave multiprocessors idle":
        (UNALIGNED, {"groups": 8, "total": 4096, "n": 511, "k": 1533}, {"shift_b": True, "block_m": 128}),
    "one round of tall tiles, 63 us, and not two of low ones, 79":
        (UNALIGNED, {"groups": 6, "total": 2046, "n": 1141, "k": 2803}, {"shift_b": True, "block_m": 256}),
    "a copy that stays in the L2 cache": (UNALIGNED, {"groups": 2, "total": 2048, "n": 459, "k": 1245},
                                          {"pack": ("a", "b"), "block_m": 128, "block_n": 128}),
    "copied with 256 columns 250 us, with 128 columns 220": (
        UNALIGNED, {"groups": 8, "total": 17709, "n": 639, "k": 3227}, {"pack": ("a", "b"), "block_n": 128}),
    "tf32 is multiplied along memory": (TF32, {"total": 2**20}, {"block_k": 32, "pack": ("b",)}),
    "tf32 that lies along memory": (TF32, {"total": 2**20, "b_order": "col"}, {"pack": ()}),
}  # fmt: skip
"""The first config of the warp-specialised kernel, by times from an H100 or H200 (docs/notes/triton-tuning.md)."""


@pytest.mark.usefixtures("thrifty")
@pytest.mark.parametrize("why", HOPPER_FIRST)
def test_the_first_config_of_the_hopper_kernel(why: str) -> None:
    name, changes, expected = HOPPER_FIRST[why]
    best = hopper_candidates(spec_of(name, **changes))[0]
    assert {field: getattr(best, field) for field in expected} == expected


SHAPE = ("groups", "total", "n", "k")


# test_choices_in_reports.py holds the tiles of other products of 32 and 64 bits to their times.
@pytest.mark.parametrize("shape", [(8, 1704, 192, 2240), (16, 1168, 256, 1408)])
def test_few_rows_of_tf32_along_k_take_small_tiles(shape: tuple[int, int, int, int]) -> None:
    """31 and 26 us; 47 and 36 by 128 x 128."""
    best = candidates_of(spec_of(TF32, **dict(zip(SHAPE, shape, strict=True)), b_order="col"), (9, 0))[0]
    assert (best.block_m, best.block_n, best.splits) == (64, 64, 1)


@pytest.mark.parametrize(
    ("name", "changes", "kernel"),
    [
        (BF16, DECODING, "hopper"),  # many weights to read, though few rows
        (BF16, {**DECODING, "groups": 4, "n": 256, "k": 256}, "pointer"),
        ("jagged_n bf16", {"m": 4096, "k": 832, "total": 12288, "groups": 128}, "hopper"),
        ("jagged_k bf16", WEIGHT_GRADIENT, "hopper"),  # small results, but many of them and each of a long k
        ("jagged_k bf16", {**WEIGHT_GRADIENT, "groups": 4, "total": 2**9}, "pointer"),
        (TF32, {"groups": 8, "total": 2**16, "n": 4096, "k": 2048, "b_order": "col"}, "hopper"),
    ],
)
def test_the_first_kernel(name: str, changes: dict[str, Any], kernel: str) -> None:
    assert candidates_of(spec_of(name, **changes), (9, 0))[0].kernel == kernel


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("per_group bf16 unaligned", {}),
        (BF16, {"k": 0}),
        ("jagged_m torch.float64", {}),
        (TF32, {"precision": "ieee"}),
        (TF32, {"form": "jagged_k", "k": None, "m": 1024}),
    ],
)
def test_what_the_hopper_kernel_leaves_to_the_generic_one(name: str, changes: dict[str, Any]) -> None:
    assert hopper_candidates(spec_of(name, **changes)) == []


@pytest.mark.usefixtures("thrifty")
def test_which_weights_are_shifted() -> None:
    spec = spec_of(UNALIGNED, groups=32, total=32 * 256)
    assert hopper_candidates(replace(spec, a=replace(spec.a, align=16), k=1024))[0].pack == ()
    along_k = replace(spec, b=replace(spec.b, order="col"))
    assert [config.block_m for config in hopper_candidates(along_k)[:2] if config.shift_b] == [256, 128]
    none = [spec_of(f"{form} bf16 unaligned") for form in ("jagged_k", "jagged_n", "batched", "masked")]
    for other in (*none, spec_of(UNALIGNED, groups=32, total=1024, b_order="strided")):
        assert not any(config.shift_b for config in hopper_candidates(other))


def test_tall_tiles_of_shifted_weights_need_a_compiler_that_does_not_spill(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multigemm.backends.triton.config.thrifty", lambda: False)
    best = hopper_candidates(spec_of(UNALIGNED, total=8 * 200))[0]
    assert (best.shift_b, best.block_m) == (True, 128)
    assert not hopper_candidates(spec_of(UNALIGNED, total=8 * 400))[0].shift_b, "low tiles read weights too often"


def test_copies_of_tf32_run_along_k() -> None:
    spec = spec_of(TF32, total=2**20)
    assert packed_spec(spec, hopper_candidates(spec)[0]).b.order == "col"


def test_only_few_tiles_of_a_long_k_are_shared_out() -> None:
    spec = spec_of(BF16, groups=2, n=64, k=4096, total=64)
    assert all(config.splits == 1 for config in pointer_candidates(replace(spec, k=256)))
    assert all(config.splits == 1 for config in pointer_candidates(replace(spec, groups=512, total=2**14)))
    assert "splits" in problem_with(replace(pointer_candidates(spec)[0], splits=3), spec)


@pytest.mark.parametrize(
    ("shape", "turned"),
    [
        ((8, 8192, 1024, 1024), True),  # 474 us on an H200; 1346 as they lie
        ((64, 384, 384, 3136), True),  # 415; 772
        ((8, 144, 5312, 6144), True),  # 1524; 2989
        ((8, 16384, 2048, 2048), True),  # 3574; 10426
        ((32, 864, 960, 576), True),  # 114; 208
        ((12, 12, 64, 1024), False),
        ((12, 500, 192, 4224), False),  # tiles are shared
        ((1, 3, 192, 1920), False),
    ],
)
def test_float32_weights_along_k_are_turned_where_rows_repay_it(shape: tuple[int, int, int, int], turned: bool) -> None:
    spec = spec_of("jagged_m torch.float32", **dict(zip(SHAPE, shape, strict=True)), b_order="col")
    found = candidates_of(spec, (9, 0))
    assert [x.pack for x in found if x.pack] == [("b",)] * turned and bool(found[0].pack) is turned
    assert packed_spec(spec, found[0]).b.order == ("row" if turned else "col")
    for other in (replace(spec, precision="tf32"), replace(spec, b=replace(spec.b, order="row"))):
        assert "reads operands as they lie" in problem_with(Config(block_k=16, pack=("b",)), other)
    ragged = replace(spec, form="jagged_n", m=1024, n=None)
    assert not any(x.pack for x in candidates_of(ragged, (9, 0)))


def test_float32_across_keeps_its_tiles() -> None:
    for shape in ((1, 3, 192, 1920), (64, 384, 384, 3136)):
        found = candidates_of(spec_of("jagged_m torch.float32", **dict(zip(SHAPE, shape, strict=True))), (9, 0))
        assert [(config.block_m, config.block_n) for config in found] == [(64, 64), (32, 32)]


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
    first = candidates_of(spec, (9, 0))[0]
    assert (first.kernel, (first.block_m, first.block_n, first.programs)) == (kernel, tile)
    assert candidates_of(spec, (8, 0))[0].kernel == "pointer"
    wider = replace(spec, out=replace(spec.out, dtype=torch.float32))
    assert all(config.block_m == 64 for config in hopper_candidates(wider)), "results turn through shared memory"
    for other in (replace(spec, groups=17), replace(spec, bias=torch.bfloat16), replace(spec, compute=torch.float32)):
        assert hopper_candidates(other) == []
    assert {config.kernel for config in candidates_of(spec, (9, 0))} == {"pointer", "hopper"}


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
        (Config("hopper", block_m=128, block_n=256, wide_tails=True), "wide_tails with.*128x256"),
        (Config(block_m=256, wide_tails=True), "wide_tails with kernel='pointer'"),
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


def test_a_layer_needs_few_kernels_whatever_its_sizes() -> None:
    """Any number of tokens and groups, of one layer: what is compiled once serves for good."""
    found, among = set(), random.Random(1)
    layer = replace(SPECS["jagged_m bf16"], n=512, k=1024, zero_unowned=True)
    for _ in range(2000):
        groups, total = among.randint(1, 300), bucket(among.randint(1, 20000))
        config = candidates_of(replace(layer, groups=groups, total=total), (9, 0))[0]
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
    monkeypatch.setattr(support, "imported_to_compile", bool)
    reason = support._interpreter_reason()
    assert reason == "" if works else "pip install 'numpy<2.4', or 'triton>=3.7'" in reason


@pytest.mark.slow
def test_who_asks_for_the_interpreter_too_late_is_told() -> None:
    """Also if the environment asks for it by now: Triton looked when it was imported."""
    code = (
        "import os, triton; os.environ.update(TRITON_INTERPRET='1', MULTIGEMM_EMULATE='1');"
        "from multigemm.backends.triton.support import availability; print(availability().reason)"
    )
    assert "triton was imported before emulation was asked for" in run_python("-c", code).stdout


@pytest.mark.parametrize(("order", "tile"), [("row", (128, 128, 16)), ("col", (64, 64, 32))])
def test_float64_of_many_rows_and_a_long_k_takes_larger_tiles_on_hopper(
    order: Order, tile: tuple[int, int, int]
) -> None:
    for groups, total, n, k in ((8, 16384, 2048, 2048), (128, 65536, 1536, 2048), (128, 65536, 2048, 768)):
        spec = spec_of("jagged_m torch.float64", groups=groups, total=total, n=n, k=k, b_order=order)
        best, *others = pointer_candidates(spec)
        assert (best.block_m, best.block_n, best.block_k) == tile and others[0].block_k == 16
        changes: tuple[dict[str, Any], ...] = ({"total": total // 16}, {"k": 256}, {"activation": "gelu"})
        fewer = [pointer_candidates(spec, (8, 0)), *(pointer_candidates(replace(spec, **more)) for more in changes)]
        assert all(tile not in [(x.block_m, x.block_n, x.block_k) for x in found] for found in fewer)
        invariant = pointer_candidates(replace(spec, batch_invariant=True))
        assert {x.block_k for x in invariant} == {16}


def test_what_takes_registers_in_float64_gets_more_warps() -> None:
    """C and gelu spilled 350 bytes with four."""
    spec = spec_of("jagged_m torch.float64", groups=256, total=110848, n=272, k=200)
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
