"""Cupy's kernels for quantised operands: which one runs what, what they are handed, and device code that is plain C++,
compiled for the host and held to the reference."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from multigemm.backends.cupy import build, choice, hopper_fp8, hopper_weights, launch, quantised, support
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.build import SOURCES
from multigemm.cuda import tensor_map
from multigemm.cuda.arguments import Address
from multigemm.errors import InvalidSetting
from multigemm.planning.operands import view_of
from multigemm.planning.scale_grids import grid_of
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.scales import Scale
from multigemm.problem.spec import ScaleSpec
from multigemm.quantize import decode, decode_scale
from tests.support.cuda_driver import FakeDriver
from tests.support.cupy_world import GPU, bound, install
from tests.support.small_problems import blocks, float8, staged

E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu


# --- which kernel runs what -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"scale_a": torch.ones(300, 1), "scale_b": torch.ones(3, 1, 520)}, ""),
        ({"scale_a": None, "scale_b": torch.tensor(2.0)}, ""),
        ({"out_dtype": torch.float32, "activation": "silu"}, ""),
        ({"accumulate": "fast"}, ""),
        ({"scale_a": torch.ones(300, 13)}, "promotes after 128"),
        ({"scale_a": torch.ones(300, 4).to(E8M0)}, "aligned float32"),
        ({"batch_invariant": True}, None),
    ],
)
def test_hopper_takes_float8_whose_k_is_contiguous(changes: dict[str, Any], reason: str | None) -> None:
    spec = blocks(**changes).spec
    assert not support.not_supported_reasons(spec, GPU)
    chosen = choice.heuristic(spec)
    assert (chosen.kernel == "hopper_fp8") == (reason == "")
    if reason:
        assert reason in "; ".join(support.fp8_reasons(spec))
    assert choice.heuristic(spec, (8, 0)) == configs.QUANTISED
    assert set(choice.first_choices(spec, (9, 0))) <= {*configs.FP8, configs.QUANTISED}


@pytest.mark.parametrize(
    ("scales", "rows", "config"),
    [
        ("blocks", 4, configs.FP8_SINGLE),
        ("rows", 4, configs.FP8_SINGLE),
        ("blocks", 64, configs.FP8_BROAD),
        ("blocks", 1024, configs.FP8_BROAD),
        ("columns in blocks", 1024, configs.FP8_ALONE),
        ("rows", 64, configs.FP8_WIDE),
        ("rows", 1024, configs.FP8_WIDE),
    ],
)
def test_high_tiles_but_for_few_rows(scales: str, rows: int, config: configs.Config) -> None:
    """What was fastest, or within 7 % of it, on an H200."""
    changes: dict[str, dict[str, Any]] = {
        "rows": {"scale_a": torch.ones(300, 1), "scale_b": torch.ones(3, 1, 520)},
        "columns in blocks": {"scale_b": torch.ones(3, 4, 520)},
    }
    spec = replace(blocks(**changes.get(scales, {})).spec, groups=8, total=8 * rows, n=4096)
    assert choice.heuristic(spec) == config


def test_broad_tiles_only_where_they_cover_few_columns_in_vain() -> None:
    """And where the schedule of their groups leaves the shared memory for them, and the copy engine stores results."""
    spec = replace(blocks().spec, groups=8, total=8192, n=4096)
    assert choice.heuristic(replace(spec, n=512)) == configs.FP8_SINGLE
    assert choice.heuristic(replace(spec, groups=449, total=449 * 64)) == configs.FP8_SINGLE
    assert choice.heuristic(replace(spec, total=(1 << 30) + 1)).columns == configs.COLUMNS
    for config in (configs.FP8_BROAD, configs.FP8_BROAD_ALONE):
        assert configs.is_valid(config, spec)
        assert not configs.is_valid(config, blocks(scale_b=torch.ones(3, 4, 520)).spec)
        assert not configs.is_valid(config, blocks(out_dtype=torch.float32).spec)


def weights(**changes: Any) -> GroupedGemmProblem:
    """gpt-oss's experts: codes of e2m1 that lie as [G, N, K / 2], a power of two for each 32 of k in a column."""
    x, codes = torch.ones(300, 416).bfloat16(), torch.zeros(3, 520, 208, dtype=torch.uint8).mT
    scale = torch.ones(3, 520, 13).to(E8M0).mT
    return GroupedGemmProblem(x, codes, **{"sizes": [100, 0, 200], "scale_b": scale, "b_format": "e2m1", **changes})


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, ""),
        ({"scale_b": torch.ones(3, 4, 520), "b_format": "int4"}, ""),
        ({"scale_b": torch.ones(3), "bias": torch.ones(3, 520).bfloat16(), "out_dtype": torch.float32}, ""),
        (
            {
                "zero_b": torch.zeros(3, 13, 520, dtype=torch.uint8),
                "scale_b": torch.ones(3, 13, 520),
                "b_format": "uint4",
            },
            "",
        ),
        ({"batch_invariant": True}, None),
    ],
)
def test_hopper_takes_weights_whose_k_is_contiguous(changes: dict[str, Any], reason: str | None) -> None:
    spec = weights(**changes).spec
    assert not support.not_supported_reasons(spec, GPU)
    assert (choice.heuristic(spec).kernel == "hopper_weights") == (reason == "")
    assert choice.heuristic(spec, (8, 0)) == configs.QUANTISED
    assert set(choice.first_choices(spec, (9, 0))) <= {*configs.WEIGHTS, configs.QUANTISED}


def test_other_weights_run_on_the_kernel_for_any_quantised_operands() -> None:
    x, codes = torch.ones(300, 400).bfloat16(), torch.ones(3, 512, 400, dtype=torch.int8).mT
    along_n = GroupedGemmProblem(x, torch.ones(3, 400, 512, dtype=torch.int8), sizes=[300, 0, 0], scale_b=torch.ones(3))
    odd = GroupedGemmProblem(torch.ones(300, 401).bfloat16()[:, :400], codes, sizes=[300, 0, 0], scale_b=torch.ones(3))
    listed = GroupedGemmProblem([x], [codes[0]], scale_b=torch.tensor(1.0))
    jagged_n = GroupedGemmProblem(x[:64], codes[0][:, :300], sizes=[100, 200], jagged="n", scale_b=torch.tensor(1.0))
    for problem in (along_n, odd, listed, jagged_n):
        assert choice.heuristic(problem.spec) == configs.QUANTISED and support.weights_reasons(problem.spec)


@pytest.mark.parametrize(
    ("rows", "config"),
    [(4, configs.WEIGHTS_LOW), (32, configs.WEIGHTS_LOW), (64, configs.WEIGHTS_NARROW), (128, configs.WEIGHTS_MIDDLE),
     (512, configs.WEIGHTS_WIDE)],
)  # fmt: skip
def test_tiles_of_weights_are_as_high_as_groups(rows: int, config: configs.Config) -> None:
    spec = replace(weights().spec, groups=8, total=8 * rows, n=4096)
    assert choice.heuristic(spec) == config
    by_numbers = replace(weights(scale_b=torch.ones(3, 13, 520)).spec, groups=8, total=8 * rows, n=4096)
    assert choice.heuristic(by_numbers).rows == min(max(config.rows, 64), 128)  # sums of a block take registers, too


def test_the_lowest_tiles_take_weights_whose_scales_a_stage_holds() -> None:
    """Two blocks fit on a multiprocessor."""
    low, x, two = configs.WEIGHTS_LOW, torch.ones(8, 4096).bfloat16(), [4, 4]
    codes = torch.zeros(2, 256, 2048, dtype=torch.uint8).mT
    options: dict[str, Any] = {"scale_b": torch.ones(2, 32, 256), "sizes": two}
    points = torch.zeros(2, 32, 256, dtype=torch.uint8)
    kinds: list[dict[str, Any]] = [{"b_format": "int4"}, {"b_format": "uint4", "zero_b": points}]
    for more in kinds:
        spec = GroupedGemmProblem(x, codes, **options, **more).spec
        assert choice.heuristic(spec) == low and configs.is_valid(low, spec)
        for stages in (2, 8):
            assert not configs.is_valid(replace(low, stages=stages), spec)
    finer = GroupedGemmProblem(x, codes, b_format="int4", **{**options, "scale_b": torch.ones(2, 64, 256)}).spec
    assert choice.heuristic(finer) == configs.WEIGHTS_NARROW and not configs.is_valid(low, finer)
    for k in (4096, 768):
        floats = torch.ones(2, 256, k).to(E4M3).mT
        assert choice.heuristic(GroupedGemmProblem(x[:, :k], floats, scale_b=torch.ones(2), sizes=two).spec) == low
    assert 2 * (low.shared_bytes(True) + 1024) <= 228 * 1024


def test_a_mask_leaves_half_of_the_rows() -> None:
    """A group of 64 rows has 32 that count, as far as the choice knows."""
    codes, scale = torch.zeros(4, 256, 2048, dtype=torch.uint8).mT, torch.ones(4, 32, 256)
    for rows, config in ((64, configs.WEIGHTS_LOW), (65, configs.WEIGHTS_MIDDLE)):
        x = torch.ones(4, rows, 4096).bfloat16()
        masked = GroupedGemmProblem(x, codes, scale_b=scale, b_format="int4", valid_rows=[3, 0, 9, 30])
        assert choice.heuristic(masked.spec) == config
    all_count = GroupedGemmProblem(x[:, :64], codes, scale_b=scale, b_format="int4")
    assert choice.heuristic(all_count.spec) == configs.WEIGHTS_NARROW


def _set_of(scale: Tensor, zero: bool = False) -> tuple[int, ...]:
    groups, blocks, n = scale.shape
    k = 32 * blocks if scale.dtype is E8M0 else 128 * blocks
    points = torch.zeros(groups, blocks, n, dtype=torch.uint8) if zero else None
    problem = GroupedGemmProblem(
        torch.ones(8, k).bfloat16(), torch.zeros(groups, n, k // 2, dtype=torch.uint8).mT, scale_b=scale,
        sizes=[8, *[0] * (groups - 1)], zero_b=points,
        b_format="uint4" if zero else "e2m1" if scale.dtype is E8M0 else "int4",
    )  # fmt: skip
    return tuple(hopper_weights.number_set(problem.spec.b, 4))


def test_scales_of_the_lowest_tiles_come_for_as_many_stages_as_there_is_room() -> None:
    """Side by side in pieces of 16 bytes or fewer, or in the words that hold them; else one by one."""
    ones = torch.ones(2, 128, 224).to(E8M0)
    assert _set_of(ones.mT) == (4, 32, 16, 128 * 32)
    assert _set_of(torch.ones(2, 128, 90).to(E8M0).mT) == (4, 32, 2, 128 * 36), "one word more than aligned ones take"
    assert _set_of(torch.ones(2, 224, 128).to(E8M0)) == (4, 1, 16, 128 * 32), "lines of columns"
    assert _set_of(torch.ones(2, 224, 130).to(E8M0)) == (1, 1, 2, 128 * 8 * 4), "each number comes with its word"
    assert _set_of(torch.ones(2, 32, 128)) == (4, 1, 16, 128 * 8 * 4)
    assert _set_of(torch.ones(2, 128, 32).mT) == (4, 8, 16, 128 * 32)
    assert _set_of(torch.ones(2, 32, 128), zero=True) == (2, 1, 16, 128 * 4 * 5), "points need room too"
    assert _set_of(torch.ones(2, 128, 32).mT, zero=True) == (2, 1, 4, 128 * 4 * 8), "points lie otherwise"


def test_short_columns_ask_memory_for_128_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lowest tiles read them in boxes of as many bytes; others keep what they had."""
    asked = list[int]()
    encode = tensor_map.encode_together

    def noted(*given: Any, **modes: Any) -> Any:
        asked.append(modes["promotion"])
        return encode(*given, **modes)

    install(monkeypatch)
    monkeypatch.setattr(hopper_weights, "encode_together", noted)
    for k in (2048, 4096):
        problem = GroupedGemmProblem(
            torch.ones(8, k).bfloat16(), torch.zeros(2, 256, k // 2, dtype=torch.uint8).mT, sizes=[4, 4],
            scale_b=torch.ones(2), b_format="int4",
        )  # fmt: skip
        for config in (configs.WEIGHTS_LOW, configs.WEIGHTS_MIDDLE):
            bound(config, staged(problem))
    assert asked == [2, 3, 3, 3]


def test_other_float8_runs_on_the_kernel_for_any_quantised_operands() -> None:
    k_along_rows = GroupedGemmProblem(float8(300, 400), float8(3, 400, 512), sizes=[100, 0, 200])
    odd = GroupedGemmProblem(float8(300, 401)[:, :400], float8(3, 512, 400).mT, sizes=[100, 0, 200])
    listed = GroupedGemmProblem([float8(64, 128)], [float8(64, 128).mT])
    for problem in (k_along_rows, odd, listed):
        assert choice.heuristic(problem.spec) == configs.QUANTISED and support.fp8_reasons(problem.spec)


def test_float8_of_a_jagged_k_is_copied_first(fake: FakeDriver) -> None:
    """Whatever its strides; groups of the copies begin at blocks of their own, so that their extent is known."""
    scales: dict[str, Any] = {"scale_a": torch.ones(64, 300 // 128 + 3), "scale_b": torch.ones(300 // 128 + 3, 72)}
    for a, b in ((float8(64, 301)[:, 1:], float8(300, 72)), (float8(300, 64).mT, float8(72, 300).mT)):
        problem = GroupedGemmProblem(a, b, sizes=[100, 0, 200], jagged="k", **scales)
        config = choice.heuristic(problem.spec)
        assert config.kernel == "hopper_fp8" and not support.fp8_reasons(problem.spec)
        assert hopper_fp8.COPY_SOURCE in hopper_fp8.sources(problem.spec, config)
        ops = staged(problem)
        copies = hopper_fp8.KMajorCopies(view_of(ops), ops)
        assert copies.blocks == 300 // 128 + 3 and copies.view.k == copies.blocks * 128
        assert [x.numel() for x in copies.memory] == [64 * copies.view.k, 72 * copies.view.k]
        bound(config, ops)()


def test_kernels_for_plain_operands_take_no_quantised_ones() -> None:
    weights = GroupedGemmProblem(
        torch.ones(300, 400).bfloat16(), torch.ones(3, 400, 512, dtype=torch.int8), sizes=[100, 0, 200],
        scale_b=torch.ones(3, 1, 512),
    ).spec  # fmt: skip
    assert choice.ranked(weights, (9, 0)) == (configs.QUANTISED,)
    for config in configs.WEIGHTS:
        assert not configs.is_valid(config, blocks().spec)
    plain = GroupedGemmProblem(torch.ones(300, 400), torch.ones(3, 400, 512), sizes=[100, 0, 200]).spec
    for config in (configs.QUANTISED, *configs.FP8):
        assert not configs.is_valid(config, plain) and config not in choice.ranked(plain, (9, 0))
    for config in (configs.GENERIC, configs.WIDE, configs.SMALL_32, configs.SMALL_LIST):
        assert not configs.is_valid(config, weights) and not configs.is_valid(config, blocks().spec)


@pytest.mark.parametrize("batch_invariant", [False, True])
def test_a_config_for_other_operands_is_refused_with_the_reason(fake: FakeDriver, batch_invariant: bool) -> None:
    with pytest.raises(
        InvalidSetting, match="operands are quantised: quantised, hopper_fp8 and hopper_weights take them"
    ):
        launch.plan(blocks(batch_invariant=batch_invariant).spec, configs.GENERIC, GPU)
    plain = GroupedGemmProblem(torch.ones(300, 400), torch.ones(3, 400, 512), sizes=[100, 0, 200]).spec
    with pytest.raises(InvalidSetting, match="operands are not quantised"):
        launch.plan(plain, configs.QUANTISED, GPU)


def test_results_of_float8_leave_as_those_of_16_bits() -> None:
    assert support.plain_kind(blocks().spec) == 1 and support.sends(blocks().spec)
    assert support.plain_kind(blocks(out_dtype=torch.float32).spec) == 0


# --- what they are handed ---------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> FakeDriver:
    return install(monkeypatch)


def _words(raw: bytes) -> list[int]:
    return list(map(int, np.frombuffer(raw, dtype=np.int64)))


def test_a_grid_is_laid_out_as_the_struct() -> None:
    assert quantised.GRID.size == 48 and len(quantised.NO_BYTES) == 48
    problem = blocks()
    spec = problem.spec
    assert spec.a.scale is not None and spec.b.scale is not None
    grid = cast(Tensor, problem.quantisation.a.grid)  # type: ignore[union-attr]
    raw = quantised.grid_bytes(grid_of("scale_a", grid, spec.a.scale.rows, spec.a.scale.k), grid)
    assert _words(raw)[:4] == [grid.data_ptr(), 0, 4, 1]
    assert np.frombuffer(raw[32:], dtype=np.int32).tolist() == [0, 0, 7, 0]
    (slot,) = raw.slots
    assert slot.offset == 0 and slot.operand == Address(0, "scale_a").operand
    grid = cast(Tensor, problem.quantisation.b.grid)  # type: ignore[union-attr]
    raw = quantised.grid_bytes(grid_of("scale_b", grid, spec.b.scale.rows, spec.b.scale.k), grid)
    assert _words(raw)[:4] == [grid.data_ptr(), 20, 1, 5]
    assert np.frombuffer(raw[32:], dtype=np.int32).tolist() == [0, 7, 7, 0]


@pytest.mark.parametrize("config", [configs.FP8_WIDE, configs.FP8_SINGLE, configs.QUANTISED], ids=str)
def test_scales_follow_their_operands(fake: FakeDriver, config: configs.Config) -> None:
    problem = blocks()
    movable = bound(config, staged(problem))
    movable()
    scales = [cast(Tensor, x) for x in (problem.scale_a, problem.scale_b)]
    assert not movable.stays_behind([(x.data_ptr(), x.data_ptr() + x.nbytes) for x in scales])


@pytest.mark.parametrize("config", [*configs.WEIGHTS[1:], configs.QUANTISED], ids=str)
def test_scales_and_zero_points_of_weights_follow_their_operands(fake: FakeDriver, config: configs.Config) -> None:
    zeros = torch.zeros(3, 13, 520, dtype=torch.uint8)
    problem = weights(b_format="uint4", scale_b=torch.ones(3, 13, 520), zero_b=zeros)
    movable = bound(config, staged(problem))
    movable()
    grids = [cast(Tensor, x) for x in (problem.scale_b, problem.zero_b)]
    assert not movable.stays_behind([(x.data_ptr(), x.data_ptr() + x.nbytes) for x in grids])


@pytest.mark.parametrize(
    ("problem", "words"),
    [
        (weights(), "codes become numbers in registers"),
        (blocks(), "TMA and wgmma of float8"),
        (blocks(scale_a=torch.ones(300, 13)), "scale_a covers 32 of k"),
        (blocks(batch_invariant=True), "batch invariant: one accumulator, ascending k, mma.sync, 8 products at once"),
    ],
)
def test_plans_say_what_runs_and_why(fake: FakeDriver, problem: GroupedGemmProblem, words: str) -> None:
    recipe = launch.plan(problem.spec, choice.heuristic(problem.spec), GPU)
    assert words in recipe.why and recipe.kernel in ("hopper_fp8", "hopper_weights", "quantised")
    recipe.bind(staged(problem))()


def test_swapped_operands_swap_their_scales() -> None:
    problem = GroupedGemmProblem(
        float8(3, 130, 256), float8(300, 256).mT, sizes=[100, 0, 200], jagged="n",
        scale_a=torch.ones(3, 2, 2), scale_b=torch.ones(2, 300),
    )  # fmt: skip
    ops = staged(problem)
    words = _words(hopper_fp8.side_grids(ops, 130))
    assert words[0] == cast(Tensor, problem.scale_b).data_ptr() and words[6] == cast(Tensor, problem.scale_a).data_ptr()
    assert words[12] == 130
    defines = dict(hopper_fp8.source(problem.spec, configs.FP8_WIDE).defines)
    assert defines["BLOCK_SCALES"] == 1 and defines["W_LINES"] == 0


# --- device code on the host ------------------------------------------------------------------------------------------

COMMON = """
#include <cstring>
#define __device__
#define __forceinline__ inline
typedef long long i64; typedef unsigned int u32; typedef unsigned short u16; typedef unsigned char u8;
struct f16 { u16 bits; };
enum Jagged { JAG_NONE, JAG_M, JAG_N, JAG_K };
struct Problem { int jagged; };
inline void jagged_span(const Problem&, i64, i64& start, i64& end) { start = end = 0; }
inline float __uint_as_float(u32 x) { float y; memcpy(&y, &x, 4); return y; }
inline u32 __float_as_uint(float x) { u32 y; memcpy(&y, &x, 4); return y; }
inline float to_float(f16 x) { _Float16 y; memcpy(&y, &x, 2); return float(y); }
"""
CALLED = """
#include "scales.cuh"
template <int CODE> void all(float* to) { for (u32 i = 0; i < 256; ++i) to[i] = decode<CODE>(i); }
extern "C" void decode_all(int code, float* to) {
    void (*of[])(float*) = {all<3>, all<4>, all<5>, all<6>, all<7>, all<8>, all<9>, all<10>};
    of[code - 3](to);
}
extern "C" float number(const Grid* s, i64 group, i64 start_line, i64 start_k, i64 line, i64 k) {
    return number_of(grid_of_group(*s, group, start_line, start_k), line, k, -1.0f);
}
"""


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """codes.cuh and scales.cuh, compiled for the host."""
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    folder = tmp_path_factory.mktemp("host")
    for name in ("codes.cuh", "scales.cuh"):
        (folder / name).write_text((SOURCES / name).read_text())
    (folder / "common.cuh").write_text(COMMON)
    (folder / "called.cpp").write_text(CALLED)
    library = Path(folder / "called.so")
    subprocess.run(
        [compiler, "-std=c++17", "-O1", "-shared", "-fPIC", str(folder / "called.cpp"), "-o", str(library)], check=True
    )
    found = ctypes.CDLL(str(library))
    found.number.restype = ctypes.c_float
    found.number.argtypes = [ctypes.c_void_p, *[ctypes.c_int64] * 5]
    return found


def _reference(format: torch.dtype | str) -> Tensor:
    """The numbers that the 256 codes stand for."""
    codes = torch.arange(256, dtype=torch.uint8)
    if isinstance(format, str):
        return decode(codes[:, None], format).float()[::2, 0]  # the low four bits
    if format is E8M0:
        return decode_scale(codes.view(E8M0)).float()
    return codes.view(format).float()


@pytest.mark.parametrize("format", [x for x, code in quantised.CODES.items() if code > 2], ids=str)
def test_every_code_is_decoded_as_the_reference_does(host: ctypes.CDLL, format: torch.dtype | str) -> None:
    found, wanted = np.empty(256, np.float32), _reference(format).numpy()
    host.decode_all(quantised.CODES[format], found.ctypes.data_as(ctypes.c_void_p))
    np.testing.assert_array_equal(found, wanted)
    assert (np.signbit(found) == np.signbit(wanted))[~np.isnan(wanted)].all()


def _numbered(shape: tuple[int, ...]) -> Tensor:
    """A grid in which every entry is another number, and which has a gap behind each line."""
    memory = torch.arange(float(np.prod(shape, dtype=int) * 2 + 7)).float()[7:]
    return memory.reshape(-1)[: 2 * int(np.prod(shape, dtype=int))].view(*shape, 2)[..., 0]


@pytest.mark.parametrize("q", [0, 32, 64, 128])
@pytest.mark.parametrize("form", ["jagged_m", "jagged_n", "jagged_k", "batched"])
@pytest.mark.parametrize("side", ["a", "b"])
def test_every_element_finds_its_scale(host: ctypes.CDLL, side: str, form: str, q: int) -> None:
    """Whatever a grid covers: the entry of each line and k is that of `Scale.of_group`."""
    cut, m, n, k = [3, 3, 40, 41, 300], 140, 150, 290
    shapes = {"jagged_m": ((311, k), (4, k, n)), "jagged_n": ((4, m, k), (k, 311)), "jagged_k": ((m, 311), (311, n))}
    a_shape, b_shape = shapes.get(form, ((4, m, k), (4, k, n)))
    shape = a_shape if side == "a" else b_shape
    lines, depth = (shape[-2], shape[-1]) if side == "a" else (shape[-1], shape[-2])
    deep = 1 if not q else depth // q + 4 if form == "jagged_k" else -(-depth // q)
    heights = [1, lines] + [-(-lines // 128)] * (q == 128 and form != ("jagged_m" if side == "a" else "jagged_n"))
    grids = [(4,), ()] * (q == 0)
    for height in heights:
        flat = (height, deep) if side == "a" else (deep, height)
        grids.append((4, *flat) if len(shape) == 3 else flat)
    for grid_shape in grids:
        options: dict[str, Any] = {f"scale_{side}": _numbered(grid_shape)}
        if form != "batched":
            options |= {"offsets": cut, "jagged": form[-1]}
        problem = GroupedGemmProblem(float8(*a_shape), float8(*b_shape), **options)
        scale = cast(Scale, getattr(problem.quantisation, side))
        grid, covers = cast(Tensor, scale.grid), scale.spec
        place = grid_of(f"scale_{side}", grid, covers.rows, covers.k)
        raw = quantised.grid_bytes(place, grid, form == "jagged_k")
        for g in range(4):
            start = 0 if form == "batched" else cut[g]
            span = slice(cut[g], cut[g + 1])
            rows = span if form[-1] == ("m" if side == "a" else "n") and form != "batched" else slice(0, lines)
            ks = span if form == "jagged_k" else slice(0, depth)
            wanted = scale.of_group(g, rows, ks, side, form == "jagged_k")
            wanted = (wanted if side == "a" else wanted.mT).expand(rows.stop - rows.start, ks.stop - ks.start)
            starts = (start if rows is span else 0, start if form == "jagged_k" else 0)
            for line in range(0, wanted.shape[0], 13):
                for at in range(0, wanted.shape[1], 16):
                    assert host.number(raw, g, *starts, line, at) == wanted[line, at]


def test_every_matrix_of_a_list_finds_its_scale(host: ctypes.CDLL) -> None:
    """Entries of unlike matrices cover unlike blocks; a matrix may have one number for all."""
    shapes, covers = [(140, 290), (3, 128), (1, 64)], [(140, 10), (1, 1), (1, 2)]
    grids = [_numbered(cover) for cover in covers]
    a, b = [float8(*shape) for shape in shapes], [float8(k, 5) for _, k in shapes]
    ops = staged(GroupedGemmProblem(a, b, scale_a=grids))
    table = quantised._list_table(ops)
    scale = Scale(grids, grids, cast(ScaleSpec, ops.spec.a.scale))
    for g, (m, k) in enumerate(shapes):
        rows = table[3 * g : 3 * g + 3]
        assert rows[1:, 0].tolist() == [0, 0]
        wanted = scale.of_group(g, slice(0, m), slice(0, k), "a").expand(m, k)
        for line in range(0, m, 13):
            for at in range(0, k, 16):
                assert host.number(rows[0].tobytes(), 0, 0, 0, line, at) == wanted[line, at]


# --- compiled ---------------------------------------------------------------------------------------------------------


def _spilled(source: build.Source, arch: str) -> int:
    """Bytes; products that run one by one are refused."""
    pytest.importorskip("cupy")
    from tests.backends.cupy.test_kernels import report

    return report(source, arch)[1]


ANY_KINDS: list[tuple[torch.dtype, torch.dtype, Any]] = [
    (E4M3, E5M2, ""),
    (torch.bfloat16, torch.int8, ""),
    (torch.float16, torch.uint8, "uint4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("turn", "arch"), list(enumerate(["sm_80", "sm_90a", "sm_100"])))
@pytest.mark.parametrize("later", range(2))
def test_the_kernel_for_any_quantised_operands_does_not_spill(later: int, turn: int, arch: str) -> None:
    """Every kind meets both orders of operands and two architectures, every architecture two kinds."""
    kind = (turn + later) % len(ANY_KINDS)
    spec, order = blocks().spec, ("row", "col")[later]
    a, b, b_format = ANY_KINDS[kind]
    operands = {"a": replace(spec.a, dtype=a), "b": replace(spec.b, dtype=b, packed=b_format)}
    made = replace(spec, **{name: replace(x, order=order) for name, x in operands.items()})  # type: ignore[arg-type]
    assert _spilled(quantised.source(made, configs.QUANTISED), arch) == 0


FP8_KINDS = [
    pytest.param({}, id="blocks"),
    pytest.param({"scale_a": torch.ones(300, 1), "scale_b": torch.ones(3, 1, 520)}, id="rows"),
    pytest.param({"scale_b": torch.ones(3, 4, 520)}, id="columns-in-blocks"),
    pytest.param({"out_dtype": torch.float32}, id="any-epilogue"),
]


FP8_KINDS_OF = {
    (192, 2, 128): ("blocks", "columns-in-blocks"), (192, 1, 128): ("rows", "any-epilogue"),
    (128, 2, 128): ("blocks",), (128, 1, 128): ("rows",), (64, 2, 128): ("blocks", "any-epilogue"),
    (128, 2, 192): ("blocks",), (128, 1, 192): ("blocks",),
}  # fmt: skip
"""By rows, blocks of a cluster and columns."""


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["sm_90a"])
def test_copies_of_a_jagged_k_compile_without_spills(arch: str) -> None:
    assert _spilled(hopper_fp8.COPY_SOURCE, arch) == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "changes"),
    [pytest.param(config, *kind.values, id=f"{config.rows}x{config.cluster}x{config.columns}-{kind.id}")
     for config in configs.FP8 for kind in FP8_KINDS
     if kind.id in FP8_KINDS_OF[config.rows, config.cluster, config.columns]],
)  # fmt: skip
def test_the_float8_kernel_promotes_without_spills(changes: dict[str, Any], config: configs.Config) -> None:
    """No sums in memory, no product waited for by itself, and each sum of 128 of k added once in float32. Clusters of
    one and of two blocks, which differ in the load, share out the kinds of the highest tiles; lower ones meet some."""
    pytest.importorskip("cupy")
    spec = blocks(**changes).spec
    assert configs.is_valid(config, spec)
    source = hopper_fp8.source(spec, config)
    assert _spilled(source, "sm_90a") == 0
    assert source.shared <= configs.SHARED_LIMIT


WEIGHT_KINDS = [
    pytest.param({}, id="mxfp4"),
    pytest.param({"scale_b": torch.ones(3, 4, 520), "b_format": "int4"}, id="int4-blocks"),
    pytest.param({"scale_b": torch.ones(3), "b_format": None, "codes": torch.float8_e4m3fn}, id="float8-groups"),
    pytest.param({"scale_b": torch.ones(3, 4, 5), "b_format": None, "codes": torch.float8_e4m3fn}, id="float8-blocks"),
    pytest.param({"out_dtype": torch.float32}, id="any-epilogue"),
    pytest.param(
        {"scale_b": torch.ones(3, 4, 520), "zero_b": torch.zeros(3, 4, 520, dtype=torch.uint8), "b_format": "uint4"},
        id="uint4-points",
    ),
]
KINDS_OF_TILES = {
    32: ("mxfp4", "int4-blocks", "float8-groups", "any-epilogue", "uint4-points"), 64: ("mxfp4",),
    128: ("int4-blocks", "float8-blocks", "any-epilogue"), 256: ("mxfp4", "float8-groups", "any-epilogue"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "changes"),
    [pytest.param(config, *kind.values, id=f"{config.rows}x{config.cluster}-{kind.id}")
     for config in configs.WEIGHTS for kind in WEIGHT_KINDS
     if kind.id in KINDS_OF_TILES[config.rows]],
)  # fmt: skip
def test_codes_become_numbers_in_registers(changes: dict[str, Any], config: configs.Config) -> None:
    """No sums in memory, and no product waited for by itself. Tiles of 64 rows, whose sums leave most registers free,
    meet one kind. The lowest have the fewest registers. Pieces of high tiles are
    compiled in steps of 64 rows, of tiles of 64 rows in steps of 32: in a third of the time, and the highest of them,
    which need most registers, spill as much or as little as among all others."""
    given = dict(changes)
    problem = weights(**given) if "codes" not in given else GroupedGemmProblem(
        torch.ones(300, 416).bfloat16(), torch.ones(3, 520, 416).to(given["codes"]).mT, sizes=[100, 0, 200],
        scale_b=given["scale_b"],
    )  # fmt: skip
    assert configs.is_valid(config, problem.spec)
    coarse = replace(config, step={32: config.step, 64: 32}.get(config.rows, 64))
    source = hopper_weights.source(problem.spec, coarse)
    assert _spilled(source, "sm_90a") <= (0 if config is configs.WEIGHTS_LOW else 8)
    assert source.shared <= configs.SHARED_LIMIT
