"""From problem to result without a GPU: cuts, layouts, the kernels' own source, and lines that lie too far apart."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas import BACKEND, epilogue, grouped_mm, products, run, staging
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.products import countable
from multigemm.cuda import nvrtc
from multigemm.cuda.launch import Step
from multigemm.errors import BackendUnsupported
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.testing import Case, DeviceCase, Limits, check, random_case
from multigemm.testing.strategies import legal
from multigemm.testing.subject import Subject
from tests.support import cublas_fake
from tests.support.cublas_fake import CUDA, Fake, HostCublas, install
from tests.support.cublas_far_cases import ARENA, DTYPES, Far, Placed, cases, limit, reserved

pytestmark = pytest.mark.slow

TYPES: dict[str, dict[str, Any]] = {
    "bfloat16": {"c_dtype": "float32", "bias_dtype": "bfloat16", "out_dtype": "bfloat16", "activation": "gelu"},
    "float64": {"c_dtype": "float64", "bias_dtype": "float32", "out_dtype": "float16", "activation": None},
    "int8": {"c_dtype": "int32", "bias_dtype": "int32", "out_dtype": "", "activation": "relu"},
    "float32": {"c_dtype": "", "bias_dtype": "", "out_dtype": "", "activation": None},
    "float16": {"c_dtype": "", "bias_dtype": "float16", "out_dtype": "", "activation": None},
}
LIMITS = Limits(work=1 << 14, longest=70, groups=40)


def _case(seed: int, types: str) -> Case:
    """A random case with the types of one compiled epilogue, so that few are compiled."""
    case = random_case(seed, LIMITS)
    fixed, full = TYPES[types] | {"dtype": types, "dtype_b": "", "precision": "ieee", "mode": "int"}, types != "float32"
    bias = "" if not full else "n" if case.form in ("jagged_n", "per_group") else "gn"
    alias = case.alias and fixed["c_dtype"] == (fixed["out_dtype"] or types)
    return legal(
        replace(
            case,
            **fixed,
            alpha=2,
            beta=3 if full and fixed["c_dtype"] else 0,
            bias=bias,
            alias=alias,
            batch_invariant=False,
        )
    )


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("variant", ["loop", "batched", "streams", "grouped"])
def test_random_problems(fake: Fake, types: str, variant: str) -> None:
    """The fake library's grouped call takes any alignment and type."""
    subject, ran = Subject(HostCublas(variant)), 0
    for seed in range(24):
        case = _case(seed, types)
        outcome = check(DeviceCase.from_case(case, torch.device("cpu")), subject)
        assert outcome.ok, (case, [str(f) for f in outcome.findings])
        ran += outcome.ran
    assert ran >= 14


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_that_take_several_tiles_in_a_row(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, types: str, blocks: int
) -> None:
    """As large problems have it; here every problem of enough tiles does."""
    monkeypatch.setattr(epilogue, "MOST_BLOCKS", blocks)
    subject = Subject(HostCublas("loop"))
    for seed in range(24):
        case = _case(seed, types)
        outcome = check(DeviceCase.from_case(case, torch.device("cpu")), subject)
        assert outcome.ok, (case, [str(f) for f in outcome.findings])


def _breaks(monkeypatch: pytest.MonkeyPatch, folder: Path, types: str, old: str, new: str) -> bool:
    """Whether random problems notice a change of the epilogue's source."""
    assert old in epilogue.FINISH
    fake = install(monkeypatch, folder)
    monkeypatch.setattr(nvrtc, "loaded", lambda source, *rest: fake.loaded(source.replace(old, new), *rest))
    subject = Subject(HostCublas("loop"))
    stands = (DeviceCase.from_case(_case(seed, types), torch.device("cpu")) for seed in range(96))
    return any(not check(stand, subject).ok for stand in stands)


@pytest.mark.parametrize(
    ("types", "old", "new"),
    [
        ("float32", "head_tiles = tiles_of(head, lines, slabs);", "head_tiles = 0;"),
        ("bfloat16", "first = middle + 1", "first = middle + 2"),
        ("bfloat16", "&& k != 0, use_c", ", use_c"),
        ("bfloat16", "v[h][i] += beta * more[h][i];", ""),
        ("float16", "v[h][i] += more[h][i];", ""),
        ("float32", "            begin = last;", "            begin = last + 1;"),
        ("float32", "here.high >= end && out_step", "out_step"),
        ("bfloat16", "both[1] < last ? 2 : 1", "2"),
        ("bfloat16", "slow >= known.high", "false"),
    ],
)
def test_a_broken_epilogue_is_noticed(
    monkeypatch: pytest.MonkeyPatch, folder: Path, types: str, old: str, new: str
) -> None:
    assert _breaks(monkeypatch, folder, types, old, new)


def _launch(problem: GroupedGemmProblem, out: Any) -> None:
    """Binds and launches one call per product, with operands that live until then."""
    spec = staged_spec(problem)
    ops = stage(problem, spec, out).ops
    HostCublas("loop").plan(spec, Config("loop"), torch.device("cpu")).bind(ops)()


@pytest.mark.parametrize("value", [1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40, 1 + 2.0**-8, 3e300])
def test_float64_rounds_once(fake: Fake, value: float) -> None:
    a, b = (torch.full((1, 1, 1), v, dtype=torch.float64) for v in (value, 1.0))
    problem, out = GroupedGemmProblem(a, b, out_dtype=torch.bfloat16), torch.zeros(1, 1, 1, dtype=torch.bfloat16)
    _launch(problem, out)
    want = 1 + round((value - 1) * 128) / 128 if value < 1e300 else float("inf")
    assert out.item() == want


@pytest.mark.parametrize("n", [8192, 9007])
@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("shift", [0, 1])
def test_lines_longer_than_a_slab(fake: Fake, n: int, by_rows: bool, shift: int) -> None:
    gen = torch.Generator().manual_seed(n)
    a, b, bias = (torch.randint(-4, 5, s, generator=gen).bfloat16() for s in ((5, 2), (2, 2, n), (2, n)))
    memory = torch.full((5 * n + 2,), 7.0).bfloat16()
    out = memory[shift : shift + 5 * n].view((5, n) if by_rows else (n, 5))
    problem = GroupedGemmProblem(a, b, sizes=[3, 2], bias=bias, activation="relu", out=out if by_rows else out.t())
    _launch(problem, allocate(problem))
    want = torch.cat([a[:3].double() @ b[0].double() + bias[0], a[3:].double() @ b[1].double() + bias[1]]).relu()
    assert torch.equal(problem.given_out.double(), want)
    assert memory[:shift].eq(7).all()
    assert memory[shift + 5 * n :].eq(7).all()


@pytest.mark.parametrize("empties", [1, 3, 12])
def test_products_without_k_are_zeros(fake: Fake, empties: int) -> None:
    """Few are filled one by one, many by the epilogue."""
    sizes = [2, *[0] * empties, 3]
    x, dy = (torch.arange(5 * n).remainder(7).view(5, n).float() - 3 for n in (8, 4))
    out = torch.full((len(sizes), 8, 4), float("nan"))
    problem = GroupedGemmProblem(x.t(), dy, sizes=sizes, jagged="k", out=out)
    _launch(problem, out)
    assert torch.equal(out[0], x[:2].t() @ dy[:2])
    assert torch.equal(out[-1], x[2:].t() @ dy[2:])
    assert out[1:-1].eq(0).all()


# --- lines and matrices further apart than cuBLAS counts: copied, never handed over; or refused in words ---


@pytest.fixture(scope="module")
def arena() -> torch.Tensor:
    return reserved()


def _bound(stand: Placed, config: Config) -> tuple[Any, Operands]:
    """A launch, and the operands that have to live until it is called."""
    spec = staged_spec(stand.problem)
    ops = stage(stand.problem, spec, allocate(stand.problem)).ops
    return HostCublas(config.variant).plan(spec, config, torch.device("cpu")).bind(ops), ops


def _some(dtype: torch.dtype) -> list[Far]:
    return [case for case in cases(dtype) if case.config.variant in ("loop", "batched")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_call_is_told_of_a_distance_that_is_not_counted(fake: Fake, arena: torch.Tensor, dtype: torch.dtype) -> None:
    """The fake library asserts it; results are exact, and nothing beside them is written."""
    for case in _some(dtype):
        if case.form == "jagged_k" and dtype is torch.int8:
            continue
        stand = Placed(case, dtype, arena)
        launch, _ops = _bound(stand, case.config)
        launch()
        assert stand.right(), case


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_what_is_counted_is_taken_as_it_lies(fake: Fake, arena: torch.Tensor, dtype: torch.dtype) -> None:
    """Only from the limit on do lines cost a copy; matrices of a stack cost none: they go by their addresses."""
    for form, operand, copied in (("jagged_m", "a", True), ("few k", "b", True), ("batched", "a", False)):
        for distance in (limit(dtype.itemsize) - 16, limit(dtype.itemsize)):
            launch, _ = _bound(Placed(Far(form, operand, distance, Config("batched")), dtype, arena), Config("batched"))
            copies = [step for step in launch._steps if isinstance(step, staging.Copies)]
            assert bool(copies) is (copied and distance >= limit(dtype.itemsize)), (form, operand, distance)


def test_a_stack_of_distant_matrices_goes_by_addresses(fake: Fake, arena: torch.Tensor) -> None:
    for distance, name in ((2**30 - 16, "strided"), (2**30, "pointers")):
        fake.log.clear()
        stand = Placed(Far("batched", "b", distance, Config("batched")), torch.float16, arena)
        launch, _ops = _bound(stand, Config("batched"))
        launch()
        assert [entry[1] for entry in fake.log] == [name]


@pytest.mark.parametrize("variant", ["loop", "batched"])
def test_random_problems_where_little_is_counted(monkeypatch: pytest.MonkeyPatch, fake: Fake, variant: str) -> None:
    """The library counts 32 elements, so that many an operand of a small problem lies too far apart."""
    copied: list[torch.Tensor] = []
    memory = staging._memory
    monkeypatch.setitem(globals(), "LIMITS", Limits(work=1 << 12, longest=24, groups=6))
    monkeypatch.setattr(products, "FARTHEST_ELEMENTS", 33)
    monkeypatch.setattr(cublas_fake, "_counts", lambda distance, itemsize: distance < 33)
    monkeypatch.setattr(staging, "_memory", lambda t, device: copied.append(t) or memory(t, device))  # type: ignore[func-returns-value]
    subject = Subject(HostCublas(variant))
    for types in TYPES:
        for seed in range(32):
            case = _case(seed, types)
            outcome = check(DeviceCase.from_case(case, torch.device("cpu")), subject)
            assert outcome.ok, (case, [str(finding) for finding in outcome.findings])
    assert len([t for t in copied if max(t.stride()[-2:]) >= 33]) >= 5


def _as_a_gpus(stand: Placed) -> Operands:
    spec = replace(staged_spec(stand.problem), device_sizes=True)
    return replace(stage(stand.problem, spec, allocate(stand.problem)).ops, host_offsets=None)


@pytest.mark.parametrize("operand", ["a", "b", "out"])
@pytest.mark.parametrize("form", ["jagged_m", "few k", "jagged_k"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_grouped_mm_sees_counted_lines(
    monkeypatch: pytest.MonkeyPatch, fake: Fake, arena: torch.Tensor, form: str, operand: str, where: str
) -> None:
    """Copies keep order and alignment, which torch checks, and a result aside is carried over by the epilogue."""
    needs: list[Any] = []
    told: list[tuple[torch.Tensor, ...]] = []

    def finish(ops: Operands, need: Any) -> Step:
        needs.append(need)
        return lambda stream: None

    monkeypatch.setattr(grouped_mm, "Finish", finish)
    monkeypatch.setattr(grouped_mm, "grouped_mm_into", lambda a, b, ends, out: told.append((a, b, out)))
    for distance in (2**30 - 16, 2**30, 2**31 + 16):
        needs.clear()
        if distance * 2 * (3 if form == "jagged_m" else 8) > ARENA:
            continue
        stand = Placed(Far(form, operand, distance, Config("grouped_mm")), torch.bfloat16, arena)
        ops = _as_a_gpus(stand)
        launch: Any = grouped_mm.bind_grouped_mm(ops, None if where == "device" else _offsets(form))
        launch()
        for t, by_rows in zip(told[-1], (form != "jagged_k", True, True), strict=True):
            line, unit = t.stride()[-2:] if by_rows else t.stride()[-2:][::-1]
            assert unit == 1
            assert line % 8 == 0
            assert countable(line, 2)
        lines_far = distance >= 2**30 and not (operand == "b" and form == "jagged_m") and not (
            operand == "out" and form == "jagged_k"
        )  # fmt: skip
        copied = isinstance(launch, run.Steps) and isinstance(launch._steps[0], staging.Copies)
        assert copied is (lines_far and operand != "out")
        carried = [need for need in needs if need.acc is not None and need.owned]
        expected = (lines_far and operand == "out") or (where == "device" and form != "jagged_k")
        assert bool(carried) is expected


def _offsets(form: str) -> Any:
    return np.array({"jagged_m": [0, 2, 3], "few k": [0, 8], "jagged_k": [0, 8, 8]}[form], dtype=np.int64)


def test_lines_that_no_copy_brings_closer_are_refused() -> None:
    one = torch.ones(1, dtype=torch.float32)
    long = 2**29
    b = one.expand(1, long).as_strided((8, long), (0, 0))
    [b_reason, out_reason] = BACKEND.not_supported_reasons(
        mg.GroupedGemmProblem(one.expand(4, 8), b[None], sizes=[4]).spec, CUDA
    )
    assert "b has lines of 536870912" in b_reason
    for part in ("result", str(2**31), "split", "another backend"):
        assert part in out_reason
    along = one.expand(2**31, 8).T
    [a_reason] = BACKEND.not_supported_reasons(
        mg.GroupedGemmProblem(along[:4], along[:4].T, ends=torch.tensor([5, 2**31]), jagged="k").spec, CUDA
    )
    assert "a has lines of 1073741825 elements or more" in a_reason
    near = mg.GroupedGemmProblem(one.expand(4, 8), b[None, :, : long - 16], sizes=[4]).spec
    assert BACKEND.not_supported_reasons(near, CUDA) == []
    with pytest.raises(BackendUnsupported, match="lines of 536870912 elements or more"):
        staging.compact(b, torch.float32, torch.device("meta"))


def test_int8_of_more_than_31_bits_is_refused() -> None:
    a, b = torch.ones(1, 1, dtype=torch.int8), torch.ones(1, 8, 4, dtype=torch.int8)
    for rows, reasons in ((2**31 - 1, 0), (2**31, 1)):
        spec = mg.GroupedGemmProblem(a.expand(rows, 8), b, ends=torch.tensor([rows])).spec
        found = BACKEND.not_supported_reasons(spec, CUDA)
        assert len(found) == reasons
        assert all("int8" in text and "split" in text for text in found)
