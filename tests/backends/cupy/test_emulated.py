"""Problems through cupy's generic kernel and those for quantised operands and unaligned weights, which run on the CPU
from their own sources."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from multigemm import quantize
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy import hopper_weights, support
from multigemm.backends.cupy.config import Config
from multigemm.planning.binding import Choice, bind, caller_result
from multigemm.planning.staging import allocate
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.reference.verify import answer, judge
from multigemm.testing import DeviceCase, Subject, check, random_case
from multigemm.testing.guard_pages import GuardedBlocks
from multigemm.testing.placed_case import Arena, spec_of
from tests.backends.cupy import emulation
from tests.model_mutants.faults import QUANTISED_HUNTING
from tests.support.concurrency import in_a_forked_child

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not emulation.can_run(), reason="needs g++ on x86-64"),
]
E4M3 = torch.float8_e4m3fn
CPU = torch.device("cpu")
PROBLEMS, VARIANTS = 12, 4


@pytest.fixture(autouse=True)
def _emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulation.install(monkeypatch, tmp_path)


@pytest.mark.parametrize("seed", range(VARIANTS))
def test_any_quantised_operands(seed: int) -> None:
    """Cases of a campaign that share a compiled kernel, with their epilogues, odd layouts and guarded memory."""
    subject, kind, ran = Subject(emulation.EmulatedBackend(configs.QUANTISED)), None, 0
    for number in range(seed * 1000, seed * 1000 + 1000):
        case = random_case(number, QUANTISED_HUNTING)
        spec = spec_of(case)
        of_case = (spec.a.dtype, spec.b.packed or spec.b.dtype, spec.a.order == "col", spec.b.order == "col")
        kind = kind or of_case
        if of_case != kind:
            continue
        outcome = check(DeviceCase.from_case(case, CPU), subject)
        assert outcome.ran and outcome.ok, (case, outcome.findings)
        ran += 1
        if ran == PROBLEMS:
            break
    assert ran


def _numbers(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(rng.integers(-7, 8, shape).astype(np.float32)).to(E4M3)


def _scale(rng: np.random.Generator, shape: tuple[int, ...]) -> Tensor:
    powers = torch.from_numpy(np.ldexp(1.0, rng.integers(-3, 4, shape)).astype(np.float32))
    return powers.mT.contiguous().mT if powers.dim() > 1 and rng.integers(2) else powers


def _cut(rng: np.random.Generator, form: str, groups: int, m: int, sizes: list[int]) -> tuple[Any, dict[str, Any]]:
    """Extents of the rows of a form, and what cuts them: `sizes` for a jagged m, else up to `m` rows of each group."""
    options: dict[str, Any] = {"sizes": sizes} if form == "jagged_m" else {}
    if form == "masked":
        options["valid_rows"] = rng.integers(0, m + 1, groups).tolist()
    return (sum(sizes),) if form == "jagged_m" else (groups, m), options


def float8_problem(seed: int) -> GroupedGemmProblem:
    """Whole numbers and powers of two, judged to the last bit, as 1x128 of rows x 128x128 or 1x128 of weights."""
    rng = np.random.default_rng(seed)
    form, groups = str(rng.choice(["jagged_m", "masked", "batched"])), int(rng.integers(1, 6))
    k = 16 * int(rng.integers(9, 34))
    n, m, blocks = 8 * int(rng.integers(1, 50)), int(rng.integers(1, 300)), -(-k // 128)
    sizes = rng.choice([0, 1, 7, 8, 127, 129, 200, 257], groups).tolist()
    rows, options = _cut(rng, form, groups, m, sizes)
    return GroupedGemmProblem(
        _numbers(rng, (*rows, k)), _numbers(rng, (groups, n, k)).mT, scale_a=_scale(rng, (*rows, blocks)),
        scale_b=_scale(rng, (groups, blocks, n if rng.integers(3) == 0 else -(-n // 128))), **options,
    )  # fmt: skip


def jagged_k_problem(seed: int) -> GroupedGemmProblem:
    """The same under a jagged k whose groups begin anywhere; operands as a training step has them, or along k."""
    rng = np.random.default_rng(seed)
    groups, m, n = int(rng.integers(1, 6)), 8 * int(rng.integers(1, 40)), 8 * int(rng.integers(1, 40))
    sizes = rng.choice([0, 1, 7, 127, 128, 129, 300], groups).tolist()
    total = sum(sizes)
    a, b = _numbers(rng, (total, m)).mT, _numbers(rng, (total, n))
    if rng.integers(2):
        a = a.contiguous()
    if rng.integers(2):
        b = b.mT.contiguous().mT
    deep = total // 128 + groups
    return GroupedGemmProblem(
        a, b, jagged="k", sizes=sizes, scale_a=_scale(rng, (m, deep)), scale_b=_scale(rng, (deep, n))
    )


WEIGHTS = ("e4m3", "e5m2", "int8", "int4", "uint4", "e2m1")
SCALES = (torch.float32, torch.float8_e8m0fnu, torch.bfloat16)


def _codes(rng: np.random.Generator, name: str, shape: tuple[int, ...]) -> Tensor:
    """Small whole numbers in float8; any code elsewhere."""
    if name in ("e4m3", "e5m2"):
        small = rng.integers(-7, 8, shape) if name == "e4m3" else rng.integers(-4, 5, shape)
        return torch.from_numpy(small.astype(np.float32)).to(quantize.FLOATS[name])
    shape = shape if name == "int8" else (*shape[:-1], shape[-1] // 2)
    codes = torch.from_numpy(rng.integers(0, 256, shape).astype(np.uint8))
    return codes.view(torch.int8) if name == "int8" else codes


def weights_problem(
    seed: int, dtype: torch.dtype, name: str, scale: torch.dtype, block: int, zeros: bool = True
) -> GroupedGemmProblem:
    """Whole numbers under scales that are powers of two, some of them large; `zeros`: some with zero points."""
    rng = np.random.default_rng(seed)
    form, groups = str(rng.choice(["jagged_m", "masked", "batched"])), int(rng.integers(1, 5))
    k, n, m = 32 * int(rng.integers(1, 12)), int(rng.integers(1, 40)) * 8, int(rng.integers(1, 140))
    sizes = rng.choice([0, 1, 7, 8, 60, 129], groups).tolist()
    rows, options = _cut(rng, form, groups, m, sizes)
    if form == "jagged_m" and rng.integers(3) == 0:
        options["bias"] = torch.ones(groups, n, dtype=dtype)
    grid = (groups, -(-k // block), n) if block else (groups, 1, n)
    if block == 128 and rng.integers(2):
        grid = (groups, -(-k // 128), -(-n // 128))
    high = 4 if dtype is torch.float16 or name == "int8" else 9
    numbers = torch.from_numpy(np.ldexp(1.0, rng.integers(-3, high, grid)).astype(np.float32)).to(scale)
    numbers = numbers.mT.contiguous().mT if rng.integers(2) else numbers
    whole = name in ("int8", "int4", "uint4")
    if whole and rng.integers(2) and zeros:
        points = torch.from_numpy(rng.integers(0, 4 if name == "int8" else 16, grid).astype(np.uint8))
        options["zero_b"] = points
    x = torch.from_numpy(rng.integers(-3, 4, (*rows, k)).astype(np.float32)).to(dtype)
    packed = name if name in ("int4", "uint4", "e2m1") else None
    return GroupedGemmProblem(x, _codes(rng, name, (groups, n, k)).mT, scale_b=numbers, b_format=packed, **options)


def _is_right(problem: GroupedGemmProblem, config: Config) -> None:
    subject = Subject(emulation.EmulatedBackend(config))
    out = allocate(problem)
    if problem.given_out is None:  # what nobody writes is seen
        for x in [out] if isinstance(out, Tensor) else out:
            x.fill_(torch.nan if x.is_floating_point() else 77)
    choice = Choice("emulated", subject.recipe(problem.spec, CPU), problem.spec, "")
    bind(choice, problem, out).launch()
    verdict = judge(answer(problem), caller_result(problem, out), suspicion=False)
    assert verdict, (problem, verdict.text)


FORMS = ("jagged_m", "jagged_n", "batched", "masked", "per_group")


def words_problem(seed: int, dtype: torch.dtype, form: str, w_k: bool) -> GroupedGemmProblem:
    """Whole numbers, of which tf32 keeps every bit: rows along k, weights along k or across it, any epilogue."""
    rng = np.random.default_rng(seed)
    groups, k = int(rng.integers(1, 6)), int(rng.choice([16, 48, 144, 272]))
    n = 16 * int(rng.integers(1, 20)) + (0 if not w_k else int(rng.choice([0, 4, 7])))
    sizes = rng.choice([0, 1, 7, 8, 63, 64, 129, 200], groups).tolist()
    high = 128 if dtype is torch.int8 else 2048

    def matrix(*shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(-high + 1, high, shape) // 2 ** int(rng.integers(3))).to(dtype)

    def weights(*shape: int) -> Tensor:
        return matrix(*shape[:-2], shape[-1], shape[-2]).mT if w_k else matrix(*shape)

    options: dict[str, Any] = {"precision": "tf32"} if dtype is torch.float32 else {}
    if rng.integers(2):
        options |= {"activation": "relu", "alpha": 2.0}
        if form != "per_group":
            options["bias"] = torch.ones(n, dtype=torch.int32 if dtype is torch.int8 else dtype)
    if form == "per_group":
        return GroupedGemmProblem([matrix(size, k) for size in sizes], [weights(k, n) for _ in sizes], **options)
    if form == "jagged_n":
        total, options["bias"] = sum(sizes), None
        a = matrix(groups, n, k) if w_k else matrix(groups, k, n).mT
        options |= {"jagged": "n", "out": _by_columns(n, total, dtype)}
        return GroupedGemmProblem(a, matrix(total, k).mT, sizes=sizes, **options)
    rows = (sum(sizes),) if form == "jagged_m" else (groups, 150)
    options |= {"sizes": sizes} if form == "jagged_m" else {}
    if form == "masked":
        options["valid_rows"] = rng.integers(0, 151, groups).tolist()
    return GroupedGemmProblem(matrix(*rows, k), weights(groups, k, n), **options)


def odd_words_problem(seed: int, dtype: torch.dtype, form: str) -> GroupedGemmProblem:
    """The same, where rows lie across k, or lines begin anywhere; jagged k."""
    rng = np.random.default_rng(seed)
    groups, (k, n, m) = int(rng.integers(1, 6)), (int(extent) for extent in rng.integers(1, 250, 3))
    sizes = rng.choice([0, 1, 7, 31, 64, 129, 200], groups).tolist()
    if form == "jagged_k" and seed == 0:
        sizes = rng.choice([0, 1, 2], 70).tolist()  # more than a warp looks at at once
    options: dict[str, Any] = {"precision": "tf32"} if dtype is torch.float32 else {}

    def matrix(*shape: int) -> Tensor:
        values = torch.from_numpy(rng.integers(-100, 101, shape)).to(dtype)
        return values if rng.integers(2) else values.mT.contiguous().mT

    if form == "jagged_k":
        a, b = matrix(m, sum(sizes)), matrix(sum(sizes), n)
        offsets = np.minimum(sum(sizes), np.cumsum([min(sum(sizes), 3), *sizes]))  # the first three belong to no group
        return GroupedGemmProblem(a, b, jagged="k", offsets=torch.from_numpy(offsets), **options)
    if form == "per_group":
        return GroupedGemmProblem([matrix(s, k) for s in sizes], [matrix(k, n) for _ in sizes], **options)
    if form == "jagged_n":
        return GroupedGemmProblem(matrix(groups, m, k), matrix(k, sum(sizes)), sizes=sizes, jagged="n", **options)
    rows = (sum(sizes),) if form == "jagged_m" else (groups, m)
    options |= {"sizes": sizes} if form == "jagged_m" else {}
    return GroupedGemmProblem(matrix(*rows, k), matrix(groups, k, n), **options)


def _by_columns(rows: int, columns: int, dtype: torch.dtype) -> Tensor:
    return torch.zeros(columns, rows, dtype=torch.int32 if dtype is torch.int8 else dtype).mT


WORDS = (
    Config("hopper", rows=64, stages=3, cluster=2),
    Config("hopper", rows=64, stages=4, cluster=1, pingpong=True),
    Config("hopper", rows=128, stages=3, cluster=2, pingpong=True),
    Config("hopper", rows=192, stages=3, cluster=1, step=32),
)


@pytest.mark.parametrize(
    ("dtype", "w_k", "config"),
    [(dtype, w_k, config) for config in WORDS for dtype in (torch.float32, torch.int8) for w_k in (True, False)
     if (w_k if config.pingpong else config.rows == 64 or w_k == (dtype is torch.int8))],
    ids=str,
)  # fmt: skip
def test_words_by_wgmma(dtype: torch.dtype, w_k: bool, config: Config) -> None:
    """tf32 and int8, to the last bit: every form, results that the copy engine stores and others. Tiles in turns take
    no weights across k; both kinds of words share out the ways that weights lie in the highest ones."""
    ran, stored = 0, set[bool]()
    for seed, form in enumerate(FORMS * 2):
        problem = words_problem(seed, dtype, form, w_k)
        if configs.is_valid(config, problem.spec):
            _is_right(problem, config)
            ran += 1
            stored.add(support.sends(problem.spec))
    assert stored == ({True} if config.pingpong else {True, False}) and ran >= len(stored)


@pytest.mark.parametrize("form", ["jagged_k", "jagged_m", "jagged_n", "batched", "per_group"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["tf32", "int8"])
def test_words_after_copies(dtype: torch.dtype, form: str) -> None:
    """Operands that TMA or wgmma cannot read are copied, of a jagged k with zeros between the groups."""
    config, ran = replace(WORDS[0], kernel="packed"), 0
    for seed in range(6):
        problem = odd_words_problem(seed, dtype, form)
        if configs.is_valid(config, problem.spec):
            _is_right(problem, config)
            ran += 1
    assert ran >= 3


def doubles_problem(seed: int, form: str, x_k: bool, w_k: bool) -> GroupedGemmProblem:
    """Whole numbers of many bits, with rows and weights along k or across it."""
    rng = np.random.default_rng(seed)
    groups, k, n, m = int(rng.integers(1, 6)), *(2 * int(x) for x in rng.integers(1, 100, 3))
    sizes = rng.choice([0, 1, 7, 8, 31, 64, 129, 200], groups).tolist()

    def matrix(*shape: int, along: bool) -> Tensor:
        """Contiguous along the last dimension, or along the one before it."""
        whole = shape if along else (*shape[:-2], shape[-1], shape[-2])
        values = torch.from_numpy(rng.integers(-(2**20), 2**20, whole).astype(np.float64))
        return values if along else values.mT

    options: dict[str, Any] = {"alpha": float(rng.choice([1.0, -2.0, 0.0]))}
    if form == "per_group":
        return GroupedGemmProblem(
            [matrix(2 * s, k, along=x_k) for s in sizes], [matrix(k, n, along=not w_k) for _ in sizes], **options
        )
    if form == "jagged_k":
        return GroupedGemmProblem(
            matrix(m, sum(sizes), along=False), matrix(sum(sizes), n, along=True), sizes=sizes, jagged="k", **options
        )
    if form == "jagged_n":  # the result's rows are the weights
        a, b, total = matrix(groups, n, k, along=w_k), matrix(k, sum(sizes), along=not x_k), sum(sizes)
        out = torch.zeros(total, n, dtype=torch.float64).mT
        return GroupedGemmProblem(a, b, sizes=sizes, jagged="n", out=out, **options)
    rows = (sum(sizes) + sum(sizes) % 2,) if form == "jagged_m" else (groups, m)
    options |= {"sizes": sizes} if form == "jagged_m" else {}
    if form == "masked":
        options["valid_rows"] = rng.integers(0, m + 1, groups).tolist()
    return GroupedGemmProblem(matrix(*rows, k, along=x_k), matrix(groups, k, n, along=not w_k), **options)


DOUBLES = (
    pytest.param(True, True, Config("hopper", rows=64, stages=3, cluster=2), id="along k"),
    pytest.param(True, False, Config("hopper", rows=128, stages=3, cluster=2), id="weights across k"),
    pytest.param(False, False, Config("hopper", rows=128, stages=3, cluster=1), id="across k"),
)


@pytest.mark.parametrize(("x_k", "w_k", "config"), DOUBLES)
def test_doubles(x_k: bool, w_k: bool, config: Config) -> None:
    """Float64 in every form, to the last bit: nothing of other groups, behind k or behind the columns is added."""
    ran, forms = set[str](), FORMS if x_k or w_k else (*FORMS, "jagged_k")
    for seed, form in enumerate(forms * 2):
        problem = doubles_problem(seed, form, x_k, w_k)
        if configs.is_valid(config, problem.spec):
            _is_right(problem, config)
            ran.add(form)
    assert ran == {*forms}


@pytest.mark.parametrize(
    "config", [Config("hopper", rows=64, stages=3, cluster=2), configs.GENERIC_64], ids=["hopper", "generic"]
)
def test_rows_behind_the_masks_of_many_groups(config: Config) -> None:
    """Seventy groups, more than a warp looks at at once: of some all rows count, of others none."""
    valid = np.random.default_rng(5).choice([0, 3, 9, 9], 70).tolist()
    a, b = (torch.ones(70, *shape, dtype=torch.float64) for shape in ((9, 6), (10, 6)))
    problem = GroupedGemmProblem(a, b.mT, valid_rows=valid)
    assert problem.spec.zero_unowned
    _is_right(problem, config)


def test_tiles_of_a_short_k_among_long_ones() -> None:
    """The next tile is found before it is wanted behind short ones (`EARLY_K`), and afterwards behind long ones."""
    config, sizes = Config("hopper", rows=64, stages=3, cluster=2), [600, 30, 3, 530, 700, 0, 512, 513, 1, 40, 520]
    a, b = torch.ones(sum(sizes), 40, dtype=torch.float64).mT, torch.ones(sum(sizes), 300, dtype=torch.float64)
    problem = GroupedGemmProblem(a, b, sizes=sizes, jagged="k")
    assert configs.is_valid(config, problem.spec)
    _is_right(problem, config)


BLOCKS = (0, 32, 64, 128)
CHOSEN = {
    configs.WEIGHTS[0]: ("e4m3 0 bf16", "int4 32 bf16", "e2m1 0 fp16", "int8 32 fp16", "uint4 128 fp16", "e5m2 0 fp16"),
    configs.WEIGHTS[1]: (
        "uint4 32 bf16", "e5m2 128 fp16", "e2m1 64 bf16", "int8 32 bf16", "int8 128 bf16", "e4m3 64 fp16",
        "e5m2 64 bf16", "int4 64 bf16", "uint4 128 bf16", "e4m3 32 bf16", "int4 128 fp16", "e2m1 128 fp16",
    ),
    configs.WEIGHTS[2]: (
        "int4 64 fp16", "uint4 128 fp16", "int8 64 bf16", "e5m2 32 bf16", "uint4 32 fp16", "uint4 64 bf16",
        "e4m3 128 fp16", "e2m1 32 bf16", "e4m3 64 bf16",
    ),
    configs.WEIGHTS[3]: (
        "int4 128 bf16", "uint4 128 fp16", "int8 64 bf16", "e4m3 128 bf16", "int4 0 bf16", "int8 128 fp16",
        "uint4 0 bf16", "e5m2 64 fp16", "e2m1 128 bf16", "e2m1 0 fp16", "int8 128 bf16", "uint4 128 bf16",
        "e4m3 64 bf16", "int8 32 bf16",
    ),
}  # fmt: skip
"""Format, what a scale covers along k, and dtype: each two constants that kernels of all triples are compiled with
(those of the height, the format, the dtype, the scales, zero points, folding) meet in one of these."""


@pytest.mark.parametrize(
    ("config", "chosen"),
    [pytest.param(config, chosen, id=f"{config.rows}x{config.cluster} {chosen}")
     for config, those in CHOSEN.items() for chosen in those],
)  # fmt: skip
def test_weights_by_wgmma(config: Config, chosen: str) -> None:
    """Every format and scales of every width along k; threads and copies come in a random order."""
    name, block, half = chosen.split()
    seed = BLOCKS.index(int(block))
    dtype, scale = (torch.bfloat16, SCALES[seed % 3]) if half == "bf16" else (torch.float16, torch.float32)
    problem = weights_problem(seed + len(name), dtype, name, scale, int(block))
    assert configs.is_valid(config, problem.spec)
    _is_right(problem, config)


@pytest.mark.parametrize("config", configs.WEIGHTS, ids=lambda c: f"{c.rows}x{c.cluster}")
@pytest.mark.parametrize(("seed", "pairs"), [(6, 1), (11, 0)], ids=["pairs of scales", "single scales"])
def test_mxfp4_weights_are_multiplied_by_their_powers_of_two(seed: int, pairs: int, config: Config) -> None:
    """In bfloat16 that is exact, and sums wait for no scale: a way of its own, with another one in the lowest tile."""
    problem = weights_problem(seed, torch.bfloat16, "e2m1", torch.float8_e8m0fnu, 32)
    constants = dict(hopper_weights.source(problem.spec, config).defines)
    assert constants["FOLD"] == 1 and constants.get("PAIRS", pairs) == pairs
    _is_right(problem, config)


@pytest.mark.parametrize(("name", "block"), [("int4", 128), ("e2m1", 32), ("int8", 0), ("e4m3", 64)])
def test_low_tiles_of_every_height(name: str, block: int) -> None:
    """Eight to 32 rows, and more in pieces; stages of unlike sizes, sets of scales that end with the tile or before."""
    rng, n, sizes = np.random.default_rng(block), 200, [1, 8, 9, 16, 17, 24, 25, 32, 0, 33]
    scale = torch.float8_e8m0fnu if name == "e2m1" else torch.float32
    packed = name if name in ("int4", "e2m1") else None
    for k in (96, 1408):
        x = torch.from_numpy(rng.integers(-3, 4, (sum(sizes), k)).astype(np.float32)).bfloat16()
        numbers = np.ldexp(1.0, rng.integers(-3, 3, (len(sizes), -(-k // block) if block else 1, n))).astype(np.float32)
        problem = GroupedGemmProblem(
            x, _codes(rng, name, (len(sizes), n, k)).mT, sizes=sizes, scale_b=torch.from_numpy(numbers).to(scale),
            b_format=packed,
        )  # fmt: skip
        assert configs.is_valid(configs.WEIGHTS_LOW, problem.spec)
        _is_right(problem, configs.WEIGHTS_LOW)


@pytest.mark.parametrize(
    ("name", "point"),
    [("uint4", torch.uint8), ("uint4", torch.int8), ("int4", torch.int8), ("int4", torch.uint8), ("int8", torch.int8)],
    ids=lambda x: str(x).removeprefix("torch."),
)
def test_zero_points_of_any_size_in_the_lowest_tiles(name: str, point: torch.dtype) -> None:
    """Some join a code's offset, where both fit the 8 bits of a bfloat16; int8 and the largest of int4 do not. Of int4
    no code is negative, so that each weight is exact."""
    rng, n, k = np.random.default_rng(4), 200, 256
    codes = _codes(rng, name, (2, n, k)).mT & (0x77 if name == "int4" else 0xFF if name == "uint4" else -1)
    least, most = (0, 255) if point is torch.uint8 else (-128, 127)
    points = torch.from_numpy(rng.integers(least, most + 1, (2, n, 2))).to(point)
    points[:, ::3] = most
    points[:, ::5] = least
    x = torch.from_numpy(rng.integers(-1, 2, (10, k)).astype(np.float32)).bfloat16()
    problem = GroupedGemmProblem(
        x, codes, sizes=[3, 7], scale_b=torch.full((2, 2, n), 0.5), zero_b=points.mT,
        b_format=name if name != "int8" else None,
    )  # fmt: skip
    assert configs.is_valid(configs.WEIGHTS_LOW, problem.spec)
    _is_right(problem, configs.WEIGHTS_LOW)


def test_any_weights_in_the_lowest_tiles() -> None:
    """Cases of a campaign, with their epilogues, odd layouts and guarded memory: nothing behind a scale is read."""
    subject, ran = Subject(emulation.EmulatedBackend(configs.WEIGHTS_LOW)), set[str]()
    for number in range(20000, 23000):
        case = random_case(number, QUANTISED_HUNTING)
        b = spec_of(case).b
        kind = f"{b.packed or b.dtype} {b.scale and b.scale.order}"
        if kind in ran or not configs.is_valid(configs.WEIGHTS_LOW, spec_of(case)):
            continue
        outcome = check(DeviceCase.from_case(case, CPU), subject)
        assert outcome.ran and outcome.ok, (case, outcome.findings)
        ran.add(kind)
        if len(ran) == 6:
            break
    assert len(ran) == 6


LAYOUTS = ("along k", "16 bytes", "8 bytes", "4 bytes", "2 bytes", "1 byte", "across k", "apart")
"""How a column's numbers lie: side by side, each column's at a multiple of so many bytes; or across k; or apart."""


@pytest.mark.parametrize(
    ("name", "block", "k", "layouts"),
    [("int4", 128, 1408, (0, 2, 3, 6, 7)), ("e2m1", 32, 1312, (0, 1, 2, 3, 4, 5, 6, 7)), ("int8", 64, 448, (0, 3, 6)),
     ("uint4", 32, 288, (1, 4, 6))],
)  # fmt: skip
def test_scales_of_the_lowest_tiles(name: str, block: int, k: int, layouts: tuple[int, ...]) -> None:
    """The last set has fewer of them; what lies behind is no number. Of uint4 with zero points."""
    rng, n, blocks = np.random.default_rng(k), 136, -(-k // block)
    scale = torch.float32 if name in ("int4", "int8") else torch.float8_e8m0fnu
    x = torch.from_numpy(rng.integers(-3, 4, (20, k)).astype(np.float32)).bfloat16()
    for layout in layouts:
        numbers = torch.from_numpy(np.ldexp(1.0, rng.integers(-3, 3, (2, blocks, n))).astype(np.float32)).to(scale)
        memory = torch.full((2, n, 2 * blocks + 64), torch.nan).to(scale)
        if LAYOUTS[layout] == "across k":
            memory = torch.full((2, blocks + 3, n), torch.nan).to(scale)
            given = memory[:, :blocks]
        elif LAYOUTS[layout] == "apart":
            given = memory[:, :, : 2 * blocks : 2].mT
        elif LAYOUTS[layout] == "along k":
            memory = torch.full((2, n, blocks), torch.nan).to(scale)
            given = memory.mT
        else:
            step = max(int(LAYOUTS[layout].split()[0]) // scale.itemsize, 1)
            pitch = -(-blocks // (2 * step)) * 2 * step + step  # an odd multiple
            given = memory.flatten()[: 2 * n * pitch].view(2, n, pitch)[:, :, :blocks].mT
        given.copy_(numbers)
        points = torch.from_numpy(rng.integers(0, 16, (2, blocks, n)).astype(np.uint8))
        if LAYOUTS[layout] != "across k":
            points = points.mT.contiguous().mT
        problem = GroupedGemmProblem(
            x, _codes(rng, name, (2, n, k)).mT, sizes=[11, 9], scale_b=given,
            zero_b=points if name == "uint4" else None, b_format=name if name != "int8" else None,
        )  # fmt: skip
        assert configs.is_valid(configs.WEIGHTS_LOW, problem.spec)
        _is_right(problem, configs.WEIGHTS_LOW)


@pytest.mark.parametrize(("shape", "along_k"), [((2, 136, 9), True), ((2, 9, 136), False)])
def test_nothing_behind_the_last_scales_is_read(shape: tuple[int, ...], along_k: bool) -> None:
    """Neither for columns that do not exist nor for blocks of k: there is a page without memory."""
    arena = Arena()
    region = arena.add(torch.float8_e8m0fnu, shape)
    memory = GuardedBlocks(CPU).place(region, arena.random_bytes(1), behind=True)
    memory.view(torch.uint8).fill_(127)
    codes = torch.arange(2 * 136 * 144).view(2, 136, 144).to(torch.uint8)
    scale = memory.mT if along_k else memory
    x = torch.ones(5, 288, dtype=torch.bfloat16)
    problem = GroupedGemmProblem(x, codes.mT, sizes=[2, 3], scale_b=scale, b_format="e2m1")

    def solved() -> bool:
        _is_right(problem, configs.WEIGHTS_LOW)
        return True

    assert in_a_forked_child(solved)


@pytest.mark.parametrize("config", configs.FP8, ids=lambda c: f"{c.rows}x{c.cluster}x{c.columns}")
def test_float8_by_wgmma(config: Config) -> None:
    """Tiles of every height, halved ones, empty groups, tails of k; threads and copies come in a random order."""
    forms = set[str]()
    for seed in range(PROBLEMS):
        problem = float8_problem(seed)
        if configs.is_valid(config, problem.spec):  # columns with scales of their own have no broad tiles
            _is_right(problem, config)
            forms.add(problem.spec.form)
    assert len(forms) >= 2


@pytest.mark.parametrize(
    "config", [c for c in configs.FP8 if c.cluster == 2], ids=lambda c: f"{c.rows}x{c.cluster}x{c.columns}"
)
def test_no_block_of_a_cluster_ends_before_the_other_one_has_handed_back_its_stages(config: Config) -> None:
    """One tile whose last stages fill the ring: the emulator refuses an arrival at a block that has ended."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        rows, columns, deep = 120, 2 * config.columns, 2 * config.stages + seed
        problem = GroupedGemmProblem(
            _numbers(rng, (rows, 128 * deep)), _numbers(rng, (1, columns, 128 * deep)).mT, sizes=[rows],
            scale_a=_scale(rng, (rows, deep)), scale_b=_scale(rng, (1, deep, -(-columns // 128))),
        )  # fmt: skip
        _is_right(problem, config)


@pytest.mark.parametrize("config", [configs.FP8_ALONE, configs.FP8_MIDDLE], ids=lambda c: f"{c.rows}x{c.cluster}")
def test_float8_of_a_jagged_k(config: Config) -> None:
    """Blocks of scales that are counted from each group's start, tails of blocks, empty groups."""
    for seed in range(PROBLEMS // 2):
        _is_right(jagged_k_problem(seed), config)


def unaligned_problem(seed: int, dtype: torch.dtype) -> GroupedGemmProblem:
    """Whole numbers, N and K of any size, operands that begin at any element: in lines along k or across it. Weights of
    groups without rows are NaN."""
    rng = np.random.default_rng(seed)
    form, turned = ("jagged_m", "list", "batched", "masked")[seed % 4], bool(seed // 4 % 2)
    groups = int(rng.integers(1, 5))
    n, k = int(rng.integers(1, 300)), int(rng.choice([rng.integers(1, 200), rng.integers(200, 400)]))
    n = -(-n // 8) * 8 if seed % 3 == 0 else n
    sizes = rng.choice([0, 1, 7, 8, 60, 129, 257, 300], groups).tolist()

    def operand(*shape: int, turned: bool = False) -> Tensor:
        first = int(rng.integers(0, 4))
        rows, columns = (shape[-1], shape[-2]) if turned else shape[-2:]
        count = int(np.prod(shape[:-2])) * rows * columns
        numbers = torch.from_numpy(rng.integers(-7, 8, first + count).astype(np.float32)).to(dtype)
        matrix = numbers[first:].view(*shape[:-2], rows, columns)
        return matrix.mT if turned else matrix

    if form == "list":
        rows = [operand(size, k) for size in sizes]
        return GroupedGemmProblem(rows, [operand(k, n, turned=turned) for _ in sizes])
    b = operand(groups, k, n, turned=turned)
    if form == "jagged_m":
        sizes[1:2] = [0] * len(sizes[1:2])
        b[[size == 0 for size in sizes]] = torch.nan  # behind the last k of the group before
        return GroupedGemmProblem(operand(sum(sizes), k), b, sizes=sizes)
    m = int(rng.integers(1, 200))
    valid = {"valid_rows": rng.integers(0, m + 1, groups).tolist()} if form == "masked" else {}
    return GroupedGemmProblem(operand(groups, m, k), b, **valid)


def biased_problem(seed: int, dtype: torch.dtype) -> GroupedGemmProblem:
    """Whole numbers, a bias of each column in either dtype and with any strides; in some also a number of each row.
    Results are such as the copy engine stores, and others."""
    rng = np.random.default_rng(seed)
    form = ("jagged_m", "batched", "masked")[seed % 3]
    groups, m = int(rng.integers(1, 5)), int(rng.integers(1, 200))
    n, k = int(rng.choice([8 * rng.integers(1, 40), rng.integers(1, 300)])), 8 * int(rng.integers(1, 30))
    sizes = rng.choice([0, 1, 7, 8, 60, 129, 200], groups).tolist()

    def numbers(*shape: int) -> Tensor:
        return torch.from_numpy(rng.integers(-7, 8, shape).astype(np.float32))

    rows, options = _cut(rng, form, groups, m, sizes)
    if form != "batched" and rng.integers(2):
        options["row_scale"] = torch.exp2(numbers(*rows).clamp(-3, 0))
    bias = numbers(groups, 2 * n).to((dtype, torch.float32)[int(rng.integers(2))])
    bias = bias[:, ::2] if rng.integers(2) else bias[0, :n]
    b = numbers(groups, n, k).to(dtype).mT if rng.integers(2) else numbers(groups, k, -(-n // 8) * 8).to(dtype)[..., :n]
    return GroupedGemmProblem(numbers(*rows, k).to(dtype), b, bias=bias, alpha=float(rng.choice([1, -0.5])), **options)


HALVES = (torch.bfloat16, torch.float16)
BIASED = (
    Config("hopper", rows=64, stages=3, cluster=2),
    Config("hopper", rows=64, stages=4, cluster=1, pingpong=True),
    Config("hopper", rows=192, stages=3, cluster=1, step=32),
)


@pytest.mark.parametrize("config", BIASED, ids=lambda c: f"{c.rows}x{c.cluster}{'-turns' * c.pingpong}")
def test_a_bias_is_added_to_sums_in_registers(config: Config) -> None:
    """As an epilogue of any kind would add it: to the last bit. Both dtypes take turns."""
    stored, dtype = set[bool](), HALVES[BIASED.index(config) % 2]
    for seed in range(PROBLEMS):
        problem = biased_problem(seed, dtype)
        assert configs.is_valid(config, problem.spec) and support.is_biased(problem.spec)
        _is_right(problem, config)
        stored.add(support.sends(problem.spec))
    assert stored == {True, False}


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(configs.SHIFT_B, torch.bfloat16), (configs.SHIFT_B_MIDDLE, torch.float16),
     (configs.SHIFT_B_NARROW, torch.bfloat16)],
    ids=["256", "128", "64"],
)  # fmt: skip
def test_shifted_weights_by_wgmma(config: Config, dtype: torch.dtype) -> None:
    """One to six blocks of k, tails of them, lists, empty groups; results that the copy engine stores, and others."""
    forms, sent = set[str](), set[bool]()
    for seed in range(PROBLEMS + 4):
        problem = unaligned_problem(seed, dtype)
        if configs.is_valid(config, problem.spec):
            _is_right(problem, config)
            forms.add(f"{problem.spec.form} {problem.spec.b.order}")
            sent.add(support.sends(support.shift_b_spec(problem.spec)))
    assert {"jagged_m row", "jagged_m col", "per_group row"} <= forms and sent == {True, False}
    # Weights that are no whole number of lines apart are copied.
    b = torch.arange(6400).remainder(13).to(dtype).as_strided((3, 64, 33), (64 * 33 + 1, 33, 1))
    _is_right(GroupedGemmProblem(torch.ones(3, 16, 64, dtype=dtype), b), config)


def narrow_problem(seed: int, dtype: torch.dtype) -> GroupedGemmProblem:
    """Rows of a jagged m that begin at any element, among them groups without rows, and rows of no group; NaN between
    the lines, and a result within a larger one."""
    rng = np.random.default_rng(seed)
    groups, n, k = int(rng.integers(1, 6)), int(rng.integers(1, 300)), int(rng.choice([1, 15, 64, 70, 149, 330]))
    sizes = rng.choice([0, 1, 60, 127, 129, 257, 400], groups)
    offsets = torch.from_numpy(np.cumsum([3, *sizes]))
    turned, pad, rows = bool(rng.integers(2)), int(rng.integers(4)), int(sizes.sum()) + 5

    def lines(*shape: int, apart: int) -> Tensor:
        outer, length = shape[:-1], shape[-1] + apart
        memory = torch.full((int(np.prod(outer)) * length + 1,), torch.nan, dtype=dtype)
        x = memory[apart % 2 :][: memory.numel() - 1].view(*outer, length)[..., : shape[-1]]
        x.copy_(torch.from_numpy(rng.integers(-7, 8, shape)))
        return x

    a = lines(rows, k, apart=1)
    b = lines(groups, n, k, apart=pad).mT if turned else lines(groups, k, n, apart=pad)
    out = torch.zeros(rows, n + pad, dtype=dtype)[:, :n]
    return GroupedGemmProblem(a, b, offsets=offsets, out=out)


def _is_right_within(problem: GroupedGemmProblem, config: Config) -> None:
    """The result is right, and what lies between its rows as it was."""
    _is_right(problem, config)
    out = problem.out
    assert isinstance(out, Tensor)
    whole = torch.as_strided(out, (out.shape[0], out.stride(0)), (out.stride(0), 1))
    assert not whole[:, out.shape[1] :].any()


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(configs.SHIFT_A, torch.bfloat16), (configs.SHIFT_A_MIDDLE, torch.float16)],
    ids=["256", "128"],
)
def test_shifted_rows_by_wgmma(config: Config, dtype: torch.dtype) -> None:
    """The rows of a jagged m on the weight side: nothing outside of the result is written."""
    ran = 0
    for seed in range(2 * PROBLEMS):
        problem = narrow_problem(seed, dtype)
        if configs.is_valid(config, problem.spec):
            _is_right_within(problem, config)
            ran += 1
    assert ran > PROBLEMS


@pytest.mark.parametrize(
    ("config", "dtype"),
    [(Config("packed", rows=192, stages=4, cluster=1, step=32, pingpong=True), torch.bfloat16),
     (Config("packed", rows=64, stages=4, cluster=2, step=32, pingpong=True), torch.float16)],
    ids=["192", "64x2"],
)  # fmt: skip
def test_odd_rows_that_leave_by_128_columns(config: Config, dtype: torch.dtype) -> None:
    """Warpgroups in turns, one to three blocks of columns; nothing outside of a result is written."""
    forms = set[str]()
    for seed in range(2 * PROBLEMS):
        problem = narrow_problem(seed, dtype)
        if support.stores_anywhere(problem.spec):
            _is_right_within(problem, config)
            forms.add("within")
        problem = unaligned_problem(seed, dtype)
        if support.stores_anywhere(problem.spec):
            _is_right(problem, config)
            forms.add(problem.spec.form)
    assert forms == {"within", "jagged_m", "per_group", "batched", "masked"}


def aligned_problem(seed: int, dtype: torch.dtype, form: str, a_k: bool, b_k: bool) -> GroupedGemmProblem:
    """Whole numbers; N and K of any size, in lines that begin at multiples of 16 bytes."""
    rng = np.random.default_rng(seed)
    whole, groups = 16 // dtype.itemsize, int(rng.integers(1, 5))
    n, k, m = int(rng.integers(1, 300)), int(rng.choice([rng.integers(0, 33), rng.integers(33, 200)])), 88
    sizes = rng.choice([0, 1, 7, 60, 129, 257], groups).tolist()

    def matrix(*shape: int, along: bool) -> Tensor:
        """Of the last two extents, `along` the last one or across it."""
        rows, columns = shape[-2:] if along else (shape[-1], shape[-2])
        pitch = -(-max(columns, 1) // whole) * whole
        numbers = torch.from_numpy(rng.integers(-7, 8, (*shape[:-2], rows, pitch)).astype(np.float32)).to(dtype)
        return numbers[..., :columns] if along else numbers[..., :columns].mT

    if form == "jagged_k":
        total = sum(sizes)
        return GroupedGemmProblem(matrix(m, total, along=False), matrix(total, n, along=True), sizes=sizes, jagged="k")
    if form == "batched":
        return GroupedGemmProblem(matrix(groups, m, k, along=a_k), matrix(groups, k, n, along=not b_k))
    b = matrix(groups, k, n, along=not b_k)
    return GroupedGemmProblem(matrix(sum(sizes), k, along=True), b, sizes=sizes)


@pytest.mark.parametrize(
    ("dtype", "a_k", "b_k", "config"),
    [
        (torch.bfloat16, True, False, configs.GENERIC), (torch.float16, False, True, configs.GENERIC_64),
        (torch.bfloat16, True, True, configs.GENERIC_64), (torch.bfloat16, False, False, configs.GENERIC),
        *((dtype, True, dtype is torch.int8, config) for dtype in (torch.int8, torch.float32)
          for config in (configs.GENERIC, configs.GENERIC_64)),
        (torch.float64, True, False, configs.GENERIC), (torch.float64, False, True, configs.GENERIC_64),
    ],
    ids=["bf16 nn", "fp16 tt", "bf16 nt", "bf16 tn", "int8 nt", "int8 nt, 64", "fp32 nn", "fp32 nn, 64", "fp64 nn",
         "fp64 tt"],
)  # fmt: skip
def test_plain_products_of_aligned_lines(dtype: torch.dtype, a_k: bool, b_k: bool, config: Config) -> None:
    """Whatever comes in pieces of 16 bytes: edges of lines, tails of k, none of it, empty groups. Each size meets both
    heights of tiles, and each order of operands one of them."""
    forms = ["batched", *(["jagged_m"] if a_k else ["jagged_k"] if not b_k else [])]
    for seed in range(6):
        problem = aligned_problem(seed, dtype, forms[seed % len(forms)], a_k, b_k)
        assert not support.has_odd_lines(problem.spec)
        _is_right(problem, config)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["fp64", "fp32"])
def test_tiles_that_are_found_ahead(dtype: torch.dtype) -> None:
    """Several large tiles of a thread block, whose first k are loaded before or after the last results are stored:
    lines at any element, a c or a bias, few rows, none to many blocks of k."""
    for seed in range(16):
        rng = np.random.default_rng(seed)
        whole = seed % 2 * 16 // dtype.itemsize or 1
        groups, n, k = int(rng.integers(1, 5)), int(rng.integers(1, 300)), int(rng.choice([0, 8, 96, 160, 300, 333]))
        sizes = rng.choice([1, 60, 64, 65, 128, 150, 200, 257], groups).tolist()

        def matrix(*shape: int, whole: int = whole, rng: np.random.Generator = rng) -> Tensor:
            """In lines of a multiple of `whole` elements."""
            numbers = rng.integers(-7, 8, (*shape[:-1], -(-shape[-1] // whole) * whole)).astype(np.float32)
            return torch.from_numpy(numbers).to(dtype)[..., : shape[-1]]

        a, b = matrix(sum(sizes), max(k, 1))[:, :k], matrix(groups, max(k, 1), n)[:, :k]
        more: dict[str, Any] = {}
        if seed % 3 == 1:
            more = {"c": matrix(sum(sizes), n), "beta": 2.0, "alpha": -0.5}
        if seed % 3 == 2:
            more = {"bias": matrix(groups, n), "activation": "relu"}
        _is_right(GroupedGemmProblem(a, b, sizes=sizes, **more), configs.GENERIC)
