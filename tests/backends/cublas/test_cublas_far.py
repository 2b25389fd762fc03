"""Lines and matrices further apart than cuBLAS counts: copied, never handed over; or refused in words."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas import BACKEND, grouped_mm, leading, staging
from multigemm.backends.cublas.config import Config
from multigemm.backends.cublas.leading import Leading, countable
from multigemm.errors import BackendUnsupported
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.testing import Limits, Stand, World, check
from multigemm.testing.subject import Subject
from tests.backends.cublas import test_cublas_world
from tests.support import cublas_fake
from tests.support.cublas_fake import CUDA, Fake, HostCublas, install_epilogue
from tests.support.cublas_far_cases import ARENA, DTYPES, Far, Placed, cases, limit, reserved

ROOT = Path(__file__).resolve().parents[3]


def test_what_is_counted_ends_at_elements_or_bytes() -> None:
    assert [countable(distance, 1) for distance in (2**30 - 1, 2**30)] == [True, False]
    assert [countable(distance, 2) for distance in (2**30 - 1, 2**30)] == [True, False]
    assert [countable(distance, 8) for distance in (2**28 - 1, 2**28)] == [True, False]


def test_single_lines_have_no_distance() -> None:
    far = 1 << 33
    assert leading.leading(3, 5, 1, far, 2) is None
    assert leading.leading(3, 5, far, 1, 2) is None
    assert leading.leading(1, 5, far, 1, 2) == Leading(True, 5)
    assert leading.leading(5, 1, 1, far, 2) == Leading(False, 5)
    assert leading.leading(1, far, far, 1, 2) == Leading(True, far)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("epilogue")


@pytest.fixture(scope="module")
def arena() -> torch.Tensor:
    return reserved()


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch, folder: Path) -> Fake:
    return install_epilogue(monkeypatch, folder)


def _bound(stand: Placed, config: Config) -> Any:
    spec = staged_spec(stand.problem)
    staged = stage(stand.problem, spec, allocate(stand.problem))
    return HostCublas(config.variant).plan(spec, config, torch.device("cpu")).bind(staged.ops)


def _some(dtype: torch.dtype) -> list[Far]:
    return [case for case in cases(dtype) if case.config.variant in ("loop", "batched")]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_no_call_is_told_of_a_distance_that_is_not_counted(fake: Fake, arena: torch.Tensor, dtype: torch.dtype) -> None:
    """The fake library asserts it; results are exact, and nothing beside them is written."""
    for case in _some(dtype):
        if case.form == "jagged_k" and dtype is torch.int8:
            continue
        stand = Placed(case, dtype, arena)
        _bound(stand, case.config)()
        assert stand.right(), case


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64], ids=str)
def test_what_is_counted_is_taken_as_it_lies(fake: Fake, arena: torch.Tensor, dtype: torch.dtype) -> None:
    """Only from the limit on do lines cost a copy; matrices of a stack cost none: they go by their addresses."""
    for form, operand, copied in (("jagged_m", "a", True), ("few k", "b", True), ("batched", "a", False)):
        for distance in (limit(dtype.itemsize) - 16, limit(dtype.itemsize)):
            launch = _bound(Placed(Far(form, operand, distance, Config("batched")), dtype, arena), Config("batched"))
            copies = [step for step in launch._steps if isinstance(step, staging.Copies)]
            assert bool(copies) is (copied and distance >= limit(dtype.itemsize)), (form, operand, distance)


def test_a_stack_of_distant_matrices_goes_by_addresses(fake: Fake, arena: torch.Tensor) -> None:
    for distance, name in ((2**30 - 16, "strided"), (2**30, "pointers")):
        fake.log.clear()
        _bound(Placed(Far("batched", "b", distance, Config("batched")), torch.float16, arena), Config("batched"))()
        assert [entry[1] for entry in fake.log] == [name]


@pytest.mark.parametrize("variant", ["loop", "batched"])
def test_random_problems_where_little_is_counted(monkeypatch: pytest.MonkeyPatch, fake: Fake, variant: str) -> None:
    """The library counts 32 elements, so that many an operand of a small problem lies too far apart."""
    copied: list[torch.Tensor] = []
    memory = staging._memory
    monkeypatch.setattr(test_cublas_world, "LIMITS", Limits(work=1 << 12, longest=24, groups=6))
    monkeypatch.setattr(leading, "FARTHEST_ELEMENTS", 33)
    monkeypatch.setattr(cublas_fake, "_counts", lambda distance, itemsize: distance < 33)
    monkeypatch.setattr(staging, "_memory", lambda t, device: copied.append(t) or memory(t, device))  # type: ignore[func-returns-value]
    subject = Subject(HostCublas(variant))
    for types in test_cublas_world.TYPES:
        for seed in range(24):
            case = test_cublas_world._case(seed, types)
            outcome = check(Stand.build(World.build(case), torch.device("cpu")), subject)
            assert outcome.ok, (case, [str(finding) for finding in outcome.findings])
    assert len([t for t in copied if max(t.stride()[-2:]) >= 33]) >= 5


def _as_a_gpus(stand: Placed) -> Operands:
    spec = replace(staged_spec(stand.problem), device_sizes=True)
    return replace(stage(stand.problem, spec, allocate(stand.problem)).ops, host_offsets=None)


@pytest.mark.parametrize("operand", ["a", "b", "out"])
@pytest.mark.parametrize("form", ["jagged_m", "few k", "jagged_k"])
@pytest.mark.parametrize("where", ["host", "device"])
def test_grouped_mm_sees_counted_lines(
    monkeypatch: pytest.MonkeyPatch, arena: torch.Tensor, form: str, operand: str, where: str
) -> None:
    """Copies keep order and alignment, which torch checks, and a result aside is carried over by the epilogue."""
    needs: list[Any] = []
    parts = {"before": "cut", "after": None, "ends": torch.ones(1), "first_two": torch.ones(1), "aside": None}
    bounds = type("Bounds", (), parts)
    monkeypatch.setattr(grouped_mm, "finish", lambda ops, need: needs.append(need))
    monkeypatch.setattr(grouped_mm, "Cut", lambda *_, **__: bounds())
    for distance in (2**30 - 16, 2**30, 2**31 + 16):
        needs.clear()
        if distance * 2 * (3 if form == "jagged_m" else 8) > ARENA:
            continue
        stand = Placed(Far(form, operand, distance, Config("grouped_mm")), torch.bfloat16, arena)
        ops = _as_a_gpus(stand)
        steps = grouped_mm.bind_grouped_mm(ops, None if where == "device" else _offsets(form))._steps
        call = next(step for step in steps if isinstance(step, grouped_mm.GroupedMM))
        for t, by_rows in ((call._a, form != "jagged_k"), (call._b, True), (call._out, True)):
            line, unit = t.stride()[-2:] if by_rows else t.stride()[-2:][::-1]
            assert unit == 1
            assert line % 8 == 0
            assert countable(line, 2)
        lines_far = distance >= 2**30 and not (operand == "b" and form == "jagged_m") and not (
            operand == "out" and form == "jagged_k"
        )  # fmt: skip
        assert isinstance(steps[0], staging.Copies) is (lines_far and operand != "out")
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


# --- on a GPU --------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_distance_is_right_or_refused(dtype: torch.dtype) -> None:
    """Each dtype in a process of its own, and in another one behind a case that ends it."""
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < ARENA + (2 << 30):
        pytest.skip(f"needs {(ARENA >> 30) + 2} GB of free GPU memory")
    name, start, bad, ran = str(dtype).removeprefix("torch."), 0, list[str](), 0
    while start < len(list(cases(dtype))):
        command = [sys.executable, "-m", "tests.support.cublas_far_cases", "cuda", name, str(start)]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
        said = done.stdout.splitlines()
        pairs = list(zip(said[::2], said[1::2], strict=False))
        ran += sum(answer == "right" for _, answer in pairs)
        bad += [f"{case}: {answer}" for case, answer in pairs if answer == "wrong"]
        if said and said[-1] == "all":
            break
        assert said, done.stderr[-2000:]
        bad.append(f"{said[-1]}: {done.stderr.strip().splitlines()[-1]}")
        start = int(said[-1].split()[0]) + 1
    assert bad == []
    assert ran >= 30
