"""The kernel of quantised operands in Triton's interpreter: random problems, corners, planted faults, later calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import multigemm as mg
from multigemm import quantize as q
from multigemm.backends.triton import BACKEND, Config, choice
from multigemm.backends.triton.build import KernelSource
from multigemm.backends.triton.config import foldable, problem_with
from multigemm.backends.triton.hopper_float8 import GroupCopy, pack_groups_source
from multigemm.planning.launch_cache import LAUNCHES
from multigemm.planning.operands import packed
from multigemm.planning.staging import allocate, stage
from multigemm.problem.spec import FORMS, Form, ProblemSpec
from multigemm.testing import Case, Scale, Subject, check, random_case
from multigemm.testing.placed_case import DeviceCase
from multigemm.testing.strategies import EMULATED
from tests.model_mutants.faults import examine
from tests.support.quantised_rows import GRAINS, a_nan_in_a_scale_stays_in_its_block, rows_alone_have_the_same_bits
from tests.support.subjects import Adapted
from tests.support.triton_interpreted import module_with, solved

pytestmark = pytest.mark.usefixtures("interpreter")

CPU = torch.device("cpu")
E4M3, E5M2, E8M0 = torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu
SMALL = replace(EMULATED, quantised=1, longest=140, work=1 << 13, groups=12)
KERNEL = Path(choice.__file__).parent / "kernels" / "quantised.py"


TILES = ((64, 64, 4), (16, 32, 4), (16, 128, 4), (128, 64, 8), (32, 16, 4))


def another_tile(number: int) -> Callable[[Config], Config]:
    """One of the tiles that a GPU gets, low and high ones, with steps as long as the config's or shorter."""
    rows, columns, warps = TILES[number % len(TILES)]

    def adapt(config: Config) -> Config:
        depth = 32 if number % 2 else config.block_k
        return replace(config, block_m=rows, block_n=columns, warps=warps, block_k=depth)

    return adapt


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_random_problems(form: Form) -> None:
    ran = 0
    for seed in range(4):
        case = random_case(1000 + seed, replace(SMALL, forms=(form,)))
        tile = another_tile(seed + FORMS.index(form))
        outcome = examine(case, Adapted("triton", tile), CPU, deep=seed == 0, seed=seed)
        assert outcome.ok, (case, outcome.findings)
        ran += outcome.ran
    assert ran >= 2


FAULTS = {
    "block index of a group's start": ("return (start // K + g).to(tl.int64)", "return (start // K).to(tl.int64)"),
    "a group's own start left out": ("return (start // K + g).to(tl.int64)", "return (g + 0 * start).to(tl.int64)"),
    "one block too far": ("return step // (K // BK)", "return (step + 1) // (K // BK)"),
    "code 0 of e8m0 is zero": ("tl.where(code == 0, 0x00400000, code << 23)", "code << 23"),
    "code 255 of e8m0 is infinite": ("tl.where(code == 255, 0x7FC00000, bits)", "tl.where(code == 255, bits, bits)"),
    "high four bits first": ("tl.join(pairs & 15, pairs >> 4)", "tl.join(pairs >> 4, pairs & 15)"),
    "int4 without a sign": ("(whole - ((whole & 8) << 1))", "(whole - ((whole & 8) >> 3) * 0)"),
    "int8 without a sign": ("(whole - ((whole & 0x80) << 1))", "whole"),
    "subnormal e2m1": ("(code & 7) << 9)", "(code & 6) << 9)"),
    "NaN of e4m3 is a number": ('tl.where(size == 0x7F, float("nan"), value)', "tl.where(size == 0x7F, value, value)"),
    "zero point of the first column": (
        "zb_ptrs = zb_base + sb_lines.to(tl.int64) * zb_r",
        "zb_ptrs = zb_base + 0 * sb_lines.to(tl.int64) * zb_r",
    ),
    "scales of a's first group": ("given + wide_g * group, line", "given + 0 * wide_g * group, line"),
    "scales from the tile's first row of the group": (
        "sa_lines = lines_of(skip_m + row0,",
        "sa_lines = lines_of(row0,",
    ),
    "scales of the sum of no products": ("if not BLOCKED and gk > 0:", "if not BLOCKED:"),
    "K tail of a": ("in_a = (i < rows_left)[:, None] & (kk < k_left)[None, :]", "in_a = (i < rows_left)[:, None]"),
    "scale of a left out": ("acc += part * (sa * sb)", "acc += part * sb"),
    "folded scales of the first step": ("block = step * FOLDS + fold", "block = 0 * step + fold"),
}
"""One thing wrong in the kernel's source: what it says, and what it says then."""


CORNERS = (
    Case(form="jagged_k", dtype="float8_e4m3fn", dtype_b="float8_e5m2", m=3, n=4, lengths=(70, 0, 45), head=5, tail=2,
         scale_a=Scale("1x32"), scale_b=Scale("row", "float8_e8m0fnu"), seed=1),
    Case(form="jagged_m", dtype="float8_e4m3fn", dtype_b="float8_e4m3fn", n=5, k=300, lengths=(3, 0, 18), head=2,
         scale_a=Scale("1x128"), scale_b=Scale("128x128"), seed=2),
    Case(form="batched", dtype="float8_e5m2", dtype_b="float8_e4m3fn", m=3, n=4, k=33, lengths=(0, 0),
         scale_a=Scale("row", "float8_e8m0fnu"), scale_b=Scale("1x32", "float8_e8m0fnu"), mode="edges", seed=3),
    Case(form="jagged_m", dtype="bfloat16", dtype_b="uint8", b_format="int4", n=7, k=130, lengths=(4, 9),
         scale_b=Scale("1x128"), seed=4),
    Case(form="jagged_m", dtype="bfloat16", dtype_b="uint8", b_format="uint4", n=7, k=130, lengths=(4, 9),
         scale_b=Scale("row"), zero_b="uint8", seed=5),
    Case(form="jagged_m", dtype="bfloat16", dtype_b="uint8", b_format="e2m1", n=7, k=200, lengths=(4, 9),
         scale_b=Scale("1x32", "float8_e8m0fnu"), seed=6),
    Case(form="masked", dtype="float16", dtype_b="int8", m=5, n=7, k=40, lengths=(4, 2), scale_b=Scale("row"), seed=7),
)  # fmt: skip


def corners_are_right() -> bool:
    """Whether small problems in the corners give what they should, written down or by the reference."""
    nan = Tensor.fill_(torch.empty(4, 1), torch.nan)
    empty = torch.zeros(4, 0).to(E4M3), torch.zeros(2, 0, 3).to(E4M3)
    y = mg.grouped_gemm(*empty, sizes=[1, 3], scale_a=nan, backend="triton")
    codes = torch.tensor([[0x7F, 0x01]], dtype=torch.uint8).view(E4M3)
    of_codes = mg.grouped_gemm(codes, torch.ones(2, 1).to(E4M3), backend="triton")
    code = torch.tensor(255, dtype=torch.uint8).view(E8M0)
    of_scale = mg.grouped_gemm(torch.ones(1, 2).to(E4M3), torch.ones(2, 1).to(E4M3), scale_a=code, backend="triton")
    if not ((y == 0).all() and of_codes.isnan().all() and of_scale.isnan().all()):
        return False
    return not any(check(DeviceCase.from_case(case, CPU), Subject("triton")).findings for case in CORNERS)


def test_the_corners_are_right() -> None:
    assert corners_are_right()


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_planted_faults_are_seen(fault: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigemm.backends.triton.kernels import quantised as device_code

    module = module_with(KERNEL, *FAULTS[fault], tmp_path)
    monkeypatch.setattr(device_code, "quantised_kernel", module.quantised_kernel)
    assert not corners_are_right()


def test_a_nan_in_a_scale_reaches_its_block_and_nothing_else() -> None:
    a_nan_in_a_scale_stays_in_its_block("triton")


@pytest.mark.parametrize("tile", TILES)
def test_what_no_group_owns_is_never_used(tile: tuple[int, int, int]) -> None:
    """NaN lies in rows, in K and in scales beyond every group, and in memory beside them."""
    a, b = torch.ones(5, 300).to(E4M3), torch.ones(300, 6).to(E4M3)
    a.view(torch.uint8)[:, :3] = 0x7F
    b.view(torch.uint8)[290:] = 0x7F
    used = [0, 3 // 128 + 1, 100 // 128 + 2, 131 // 128 + 3, 131 // 128 + 4]
    scale = torch.full((5, 300 // 128 + 4), torch.nan)
    scale[:, used] = 1.0
    config = Config("quantised", tile[0], tile[1], 128, warps=tile[2], stages=1)
    offsets = [3, 3, 100, 131, 290]
    y = solved(a, b, offsets=offsets, jagged="k", scale_a=scale, out_dtype=torch.float32, config=config)
    assert y[:, 0, 0].tolist() == [0, 97, 31, 159]
    masked, rows = torch.ones(2, 4, 32).to(E4M3), torch.ones(2, 4, 1)
    masked.view(torch.uint8)[0, 2:], rows[0, 2:], rows[1] = 0x7F, torch.nan, torch.nan
    y = solved(masked, torch.ones(2, 32, 3).to(E4M3), valid_rows=[2, 0], scale_a=rows, config=config)
    assert y.sum() == 2 * 3 * 32


@pytest.mark.parametrize("lies", [[90, 90], [0, 0], [100, 0], [-7, 2**40]])
def test_sizes_that_lie_stay_inside_scales(lies: list[int]) -> None:
    sizes = torch.tensor([40, 60])
    a, b = torch.ones(3, 100).to(E4M3), torch.ones(100, 4).to(E4M3)
    memory = torch.full((3, 32 + 100 // 32 + 2 + 32), torch.nan)
    memory[:, 32:-32] = 1.0
    scale = memory[:, 32:-32]
    plan = mg.plan(a, b, sizes=sizes, jagged="k", scale_a=scale, backend="triton")
    sizes.copy_(torch.tensor(lies))
    assert not plan().isnan().any()


def test_sums_beyond_and_below_float32_until_both_scales_are_there() -> None:
    """2^127 of one side and 2^-120 of the other: the product of scales comes first."""
    a, b = torch.full((1, 300), 448.0).to(E4M3), torch.full((300, 1), 448.0).to(E4M3)
    huge, tiny = torch.full((1, 3), 2.0**126), torch.full((3, 1), 2.0**-120)
    y = solved(a, b, scale_a=huge, scale_b=tiny, out_dtype=torch.float32)
    assert y.item() == 300 * 448 * 448 * 64
    y = solved(a, b, scale_a=torch.tensor(2.0**126), scale_b=tiny, out_dtype=torch.float32)
    assert y.item() == 300 * 448 * 448 * 64


def test_lists_whose_matrices_are_covered_in_ways_of_their_own() -> None:
    g = torch.Generator().manual_seed(5)
    shapes = [(5, 300, 9), (131, 130, 140), (7, 40, 3)]
    a = [torch.randint(-7, 8, (m, k), generator=g).float().to(E4M3) for m, k, _ in shapes]
    b = [torch.randint(-7, 8, (k, n), generator=g).float().to(E4M3) for _, k, n in shapes]

    def powers(*shape: int) -> Tensor:
        return torch.exp2(torch.randint(-3, 4, shape, generator=g).float())

    scale_a = [powers(5, 10), powers(2, 2), powers(7, 1)]
    scale_b = [powers(1, 9), powers(2, 2), powers(2, 3)]
    solved(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.float32)
    with pytest.raises(mg.BackendUnsupported, match="blocks of one width"):
        mg.plan(a, b, scale_a=scale_a, scale_b=scale_b, batch_invariant=True, backend="triton")


@pytest.mark.parametrize("groups", [256, 257])
def test_more_groups_than_are_counted_at_once(groups: int) -> None:
    sizes = torch.zeros(groups, dtype=torch.int64)
    sizes[[0, 5, groups - 1]] = torch.tensor([2, 1, 3])
    a = torch.randint(-7, 8, (7, 40)).float().to(E4M3)
    b = torch.randint(-7, 8, (groups, 40, 4)).float().to(E4M3)
    scale = torch.exp2(torch.arange(groups) % 7 - 3.0)
    solved(a, b, sizes=sizes, scale_b=scale, out_dtype=torch.float32)


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("format", ["e4m3", "int8", "int4", "uint4", "e2m1"])
def test_folded_and_unfolded_weights(format: Any, half: torch.dtype) -> None:
    """Steps that are longer than a block of scales, and steps inside of one; fp16 folds scales of its own alone."""
    x, w = torch.randn(9, 200).to(half), torch.randn(2, 200, 20)
    for scale_dtype in (torch.float32, E8M0, half):
        b = q.quantize(w, format, "1x32", side="b", zero=format == "uint4", scale_dtype=scale_dtype)
        packed = format if format in ("int4", "uint4", "e2m1") else None
        options: dict[str, Any] = {"scale_b": b.scale, "zero_b": b.zero, "b_format": packed, "sizes": [4, 5]}
        spec = mg.GroupedGemmProblem(x, b.data, **options).spec
        assert foldable(spec) == (half is torch.bfloat16 or scale_dtype is torch.float16)
        for deep in (32, 128) if foldable(spec) else (32,):
            config = Config("quantised", 16, 32, deep, warps=4, stages=1)
            assert problem_with(config, spec) == ""
            solved(x, b.data, config=config, **options)
        if not foldable(spec):
            assert "one number covers 32 of K" in problem_with(Config("quantised", 16, 32, 64, warps=4), spec)


@pytest.mark.parametrize("grain", GRAINS)
def test_rows_have_the_same_bits_alone_and_in_another_form(grain: Any) -> None:
    rows_alone_have_the_same_bits("triton", grain)


def test_one_tile_alone_takes_batch_invariant_problems() -> None:
    a, b = torch.ones(4, 8).to(E4M3), torch.ones(8, 3).to(E4M3)
    spec: ProblemSpec = mg.GroupedGemmProblem(a, b, batch_invariant=True).spec
    [fixed] = BACKEND.configs(spec, CPU)
    assert problem_with(fixed, spec) == ""
    for other in (replace(fixed, block_m=128, warps=8), replace(fixed, block_k=32), replace(fixed, block_n=128)):
        assert "batch_invariant=True takes 64x64x128 by 4 warps alone" in problem_with(other, spec)


def test_kernels_of_plain_operands_take_none_and_the_other_way_round() -> None:
    spec = mg.GroupedGemmProblem(torch.ones(4, 8).to(E4M3), torch.ones(8, 3).to(E4M3)).spec
    assert "quantised operands have kernels of their own" in problem_with(Config(), spec)
    plain = mg.GroupedGemmProblem(torch.ones(4, 8), torch.ones(8, 3)).spec
    assert "plain operands have kernels of their own" in problem_with(Config("quantised"), plain)


@pytest.mark.parametrize("backend", ["triton", "cpu"])
@pytest.mark.parametrize("kind", ["float8", "packed"])
def test_repeated_calls_take_the_scales_that_they_are_given(backend: str, kind: str) -> None:
    """The third call of a layout is served by what the second one kept, and reads its own scales and zero points."""
    g, served = torch.Generator().manual_seed(9), LAUNCHES.served

    def powers(*shape: int) -> Tensor:
        return torch.exp2(torch.randint(-3, 4, shape, generator=g).float())

    for call in range(4):
        sizes = torch.tensor([4, 0, 5])
        options: dict[str, Any] = {"sizes": sizes, "scale_b": powers(3, 2, 5), "out_dtype": torch.float32}
        if kind == "float8":
            a = torch.randint(-7, 8, (9, 200), generator=g).float().to(E5M2)
            b = torch.randint(-7, 8, (3, 200, 5), generator=g).float().to(E4M3)
            options["scale_a"] = powers(3) if call < 3 else powers(9, 2)  # the fourth has another layout
        else:
            a = torch.randint(-7, 8, (9, 200), generator=g).bfloat16()
            b = torch.randint(0, 256, (3, 100, 5), generator=g, dtype=torch.uint8)
            options |= {"b_format": "uint4" if call < 3 else "int4"}
            options["zero_b"] = torch.randint(0, 16, (3, 2, 5), generator=g, dtype=torch.uint8)
        problem = mg.GroupedGemmProblem(a, b, **options)
        verdict = mg.verify(problem, mg.grouped_gemm(a, b, backend=backend, **options))
        assert verdict, (call, verdict.text)
    assert LAUNCHES.served == served + 1


def test_a_given_out_that_shares_memory_with_a_scale_is_refused_on_a_hit() -> None:
    memory = torch.ones(9, 8)
    a, b = torch.ones(9, 40).to(E4M3), torch.ones(1, 40, 4).to(E4M3)
    for _ in range(4):
        mg.grouped_gemm(a, b, sizes=[9], scale_a=torch.ones(9, 8)[:, :1], out=memory[:, 1:5], backend="triton")
    with pytest.raises(mg.InvalidProblem, match="out shares memory with scale_a"):
        mg.grouped_gemm(a, b, sizes=[9], scale_a=memory[:, 1:2], out=memory[:, 1:5], backend="triton")


# --- copies of a jagged K -----------------------------------------------------------------------------


COPIED = Config("hopper", 256, 128, 128, warps=4, stages=4, pack=("a", "b"))
GROUPS = (70, 0, 299, 1, 128, 4, 0)
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "across K, in words": lambda x: x.mT.contiguous().mT,
    "across K, unaligned": lambda x: torch.cat([x.mT, x.mT[:, :1]], 1)[:, :-1].mT,
    "along K": lambda x: x,
    "strided": lambda x: x.repeat_interleave(2, 0).repeat_interleave(2, 1)[::2, ::2],
}


class Interpreted:
    """The kernel of a copy, interpreted as soon as it is bound. Addresses become tensors again."""

    def __init__(self, source: KernelSource, *tensors: Tensor | None) -> None:
        self.source, self.tensors = source, tensors

    def bound(self, values: list[Any], grid: int, keep: tuple[Tensor, ...]) -> None:
        from multigemm.backends.triton.emulate import _interpreted

        assert len(values) == len(self.source.signature)
        x, scale, ends = self.tensors
        (target,), lines, pitch = keep, values[5], values[-1]
        assert values[3] - values[2] == lines * pitch
        target.fill_(85)
        scales = target[lines * pitch :].view(torch.float32)
        given = {"source": x, "scale": scale, "target": target, "target_scales": scales, "ends": ends}
        names = [name for name, _ in self.source.signature]
        _interpreted(self.source, given, dict(zip(names[5:], values[5:], strict=True)), grid)()
        self.copy = target[: lines * pitch].view(lines, pitch)
        self.scales = scales.view(pitch // 128, -1)


COVERS = ("", "row", "1x128")


@pytest.mark.parametrize("name", ["a", "b"])
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("covers", COVERS)
def test_groups_of_a_copied_k_begin_with_blocks_of_their_own(covers: str, layout: str, name: str) -> None:
    """Behind a group's end are zeros, and blocks of no group stay as they are. A block's scales come along, one for
    each line; those of columns in slots. Offsets and sizes take turns."""
    sums = (COVERS.index(covers) + [*LAYOUTS].index(layout) + (name == "b")) % 2 == 1
    generator = torch.Generator().manual_seed(3)
    head, tail = (0, 0) if sums else (5, 150)
    tokens, lines = head + sum(GROUPS) + tail, 144
    codes = torch.randint(1, 256, (lines, tokens), dtype=torch.uint8, generator=generator)
    x = LAYOUTS[layout](codes)
    other = torch.zeros(1, tokens, dtype=torch.uint8).view(E4M3)
    entries = {"": 0, "row": 1, "1x128": tokens // 128 + len(GROUPS)}[covers]
    scale = torch.randint(0, 256, (lines, entries), dtype=torch.uint8, generator=generator)
    blocks_of_other = torch.ones(1, tokens // 128 + len(GROUPS))
    starts = torch.tensor([head, *(head + torch.tensor(GROUPS).cumsum(0)).tolist()], dtype=torch.int32)
    given: dict[str, Any] = {"sizes": torch.tensor(GROUPS, dtype=torch.int32)} if sums else {"offsets": starts}
    operands = [(x.view(E4M3), scale.view(E8M0) if covers else None), (other, blocks_of_other)]
    (a, scale_a), (b, scale_b) = operands if name == "a" else operands[::-1]
    problem = mg.GroupedGemmProblem(
        a, b.mT, jagged="k", scale_a=scale_a, scale_b=None if scale_b is None else scale_b.mT, **given
    )
    ops = stage(problem, problem.spec, allocate(problem), sums_sizes=sums).ops
    source = pack_groups_source(problem.spec, COPIED, name)
    assert not problem_with(COPIED, problem.spec)
    assert dict(source.constants)["WORDS"] == (layout == "across K, in words")
    kernel: Any = Interpreted(source, x, scale if covers else None, ops.sizes if sums else ops.ends)
    GroupCopy(name, problem.spec, kernel).bind(packed(ops), ops)

    expected = torch.full_like(kernel.copy, 85)
    numbers = torch.full((kernel.copy.shape[1] // 128, lines), torch.nan)
    for g, size in enumerate(GROUPS):
        start, blocks = int(starts[g]), -(-size // 128)
        first = start // 128 + g
        expected[:, 128 * first : 128 * (first + blocks)] = 0
        expected[:, 128 * first : 128 * first + size] = codes[:, start : start + size]
        for block in range(first, first + blocks):
            numbers[block] = scale.view(E8M0)[:, block if covers == "1x128" else 0].float() if covers else 1.0
    assert torch.equal(kernel.copy, expected)
    slot = torch.arange(256)
    line = slot // 16 * 16 + slot // 2 % 2 * 8 + slot // 4 % 4 * 2 + slot % 2 if name == "b" else slot
    made = torch.empty_like(kernel.scales)
    made[:, line] = kernel.scales
    owned = ~numbers.isnan().all(1)
    assert torch.equal(made[owned][:, :lines].nan_to_num(-1), numbers[owned].nan_to_num(-1))
    assert (kernel.scales[~owned].view(torch.uint8) == 85).all()
