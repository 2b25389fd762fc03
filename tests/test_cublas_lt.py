"""Calls that add a bias and apply relu by themselves: what cuBLASLt is told, and what comes out; no GPU needed."""

from __future__ import annotations

import ctypes
import gc
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cublas import choose, config, launch, lt, run
from multigemm.backends.cublas.config import Config
from multigemm.errors import LibraryError
from multigemm.planning.staging import allocate, outline, stage, staged_spec
from multigemm.testing import Case, Limits, Stand, World, check
from multigemm.testing.case import PLAIN, Layout, align
from multigemm.testing.strategies import legal, random_case
from multigemm.testing.subject import Subject
from tests.cublas_lt_model import ModelLt
from tests.cublas_world import HostCublas, install

LIMITS = Limits(work=1 << 14, longest=70, groups=40, dtypes=("bfloat16", "float32"))
CUDA = torch.device("cuda")


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory) -> ModelLt:
    """The model in the place of the library; streams are left out."""
    install(monkeypatch, _folder(tmp_path_factory))
    found = ModelLt()
    monkeypatch.setattr(lt, "library", lambda: found)
    monkeypatch.setattr(lt, "handle", lambda: ctypes.c_void_p(1))
    monkeypatch.setattr(lt, "_known", {})
    monkeypatch.setattr(launch, "Streamed", lambda library, batch, *rest: run.Calls(library, batch))
    lt._preference.cache_clear()
    lt._matrix.cache_clear()
    return found


def _folder(factory: pytest.TempPathFactory) -> Path:
    folder = factory.getbasetemp() / "fused"
    folder.mkdir(exist_ok=True)
    return folder


class _Host(HostCublas):
    """The backend on the host, with fused calls."""

    def __init__(self, variant: str = "fused") -> None:
        super().__init__(variant)
        self._config = Config("fused", 4) if variant == "fused" else Config("auto")

    def not_supported_reasons(self, spec: Any, device: torch.device) -> list[str]:
        return super().not_supported_reasons(spec, device) + config.fused_reasons(spec)


def _case(seed: int) -> Case:
    """A random case that one of the fused epilogues can finish."""
    case = random_case(seed, LIMITS)
    k, relu, bias = case.form == "jagged_k", "relu" if seed % 3 else None, "" if seed % 3 == 2 else "gn"
    plain = {"dtype_b": "", "out_dtype": "", "c_dtype": "", "alias": False, "beta": 0.0, "mode": "int"}
    case = replace(case, **plain, activation=relu, bias="n" if bias and case.form == "per_group" else bias)  # type: ignore[arg-type]
    order = Layout("col") if k else PLAIN if case.form == "jagged_m" else replace(case.a, zero="", step=1)
    b = PLAIN if k else replace(case.b, zero="", step=1)
    return legal(align(legal(replace(case, a=order, b=b, out=PLAIN, bias_dtype=case.dtype if bias else ""))))


def test_random_problems(model: ModelLt) -> None:
    subject, ran = Subject(_Host()), 0
    for seed in range(60):
        case = _case(seed)
        if case.form == "jagged_n":
            continue
        outcome = check(Stand.build(World.build(case), torch.device("cpu")), subject)
        assert outcome.ok, (case, [str(f) for f in outcome.findings])
        ran += outcome.ran
    assert ran >= 25
    assert max(model.calls) > 1


def _launched(problem: mg.GroupedGemmProblem, runs: int = 1) -> Any:
    out, spec = allocate(problem), staged_spec(problem)
    step = _Host().plan(spec, Config("fused", 4), torch.device("cpu")).bind(stage(problem, spec, out).ops)
    for _ in range(runs):
        step()
    return out


def _problem(sizes: list[int], n: int = 16, **more: Any) -> mg.GroupedGemmProblem:
    torch.manual_seed(sum(sizes))
    a, b = torch.randint(-4, 5, (sum(sizes), 24)).bfloat16(), torch.randint(-4, 5, (len(sizes), 24, n)).bfloat16()
    return mg.GroupedGemmProblem(a, b, sizes=sizes, activation="relu", **more)


def test_auto_leaves_bias_and_relu_to_the_library(model: ModelLt, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    problem = _problem([4, 4, 4], bias=torch.ones(3, 16).bfloat16())
    spec = staged_spec(problem)
    recipe = launch.plan(spec, Config("auto"), CUDA)
    assert "bias and apply relu" in recipe.why
    assert recipe.tell is not None
    assert "'fused', streams=4) for 3 products" in recipe.tell(replace(outline(problem, spec), device=CUDA))
    out = allocate(problem)
    _Host("auto").plan(spec, Config("auto"), torch.device("cpu")).bind(stage(problem, spec, out).ops)()
    assert mg.verify(problem, out)
    assert model.calls == [3]


def test_a_plan_claims_no_fusion_that_its_sizes_may_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it pays is known at bind; sizes that nobody reads back never fuse."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    problem = _problem(list(range(1, 40)), bias=torch.ones(39, 16).bfloat16())
    spec = staged_spec(problem)
    recipe = launch.plan(spec, Config("auto"), CUDA)
    assert recipe.tell is not None
    assert "fused" not in recipe.tell(replace(outline(problem, spec), device=CUDA))
    assert "where that pays" in recipe.why
    assert (
        "else torch.float32 result and one epilogue kernel"
        in launch.plan(replace(spec, device_sizes=True), Config("auto"), CUDA).why
    )
    shared = replace(spec, device_sizes=True, b=replace(spec.b, shared=True))
    assert "library's own" not in launch.plan(shared, Config("auto"), CUDA).why
    assert "where that pays" not in launch.plan(spec, Config("fused", 4), CUDA).why
    assert "library's own" not in launch.plan(replace(spec, alpha="zero"), Config("fused", 4), CUDA).why


def test_fusing_has_to_pay() -> None:
    """A kernel and a wide result are spared; the host describes each call."""
    lengths = np.array([4, 4, 4])
    assert choose.fused_calls(None, 5) == 5
    assert choose.fused_calls(lengths, 1) == 1
    assert [choose.fused_calls(np.array(x), 1) for x in ([4, 0, 4], [4, 5], [0, 0])] == [2, 2, 0]
    assert [choose.pays_to_fuse(calls) for calls in (1, 8, 12, 13, 40)] == [True, True, True, False, False]


def test_rows_that_only_the_device_knows_are_kept_by_an_epilogue(model: ModelLt) -> None:
    """The library would write all rows."""
    a, b, bias = torch.ones(8, 16).bfloat16(), torch.ones(2, 16, 16).bfloat16(), torch.arange(16).bfloat16()
    problem = mg.GroupedGemmProblem(a, b, sizes=[4, 4], bias=bias, activation="relu")
    staged = stage(problem, staged_spec(problem), allocate(problem)).ops
    unknown = replace(staged, host_offsets=None)
    assert launch._fuses(staged, Config("auto"), launch.Sizes(staged.host_offsets, None))
    assert not launch._fuses(unknown, Config("auto"), launch.Sizes(None, None))


def test_groups_of_one_weight_stay_one_product(model: ModelLt) -> None:
    a, b = torch.ones(8, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    one, each = torch.arange(16).bfloat16(), torch.arange(32).bfloat16().view(2, 16)
    for bias, fuses in ((one, True), (each, False)):
        problem = mg.GroupedGemmProblem(a, b, sizes=[3, 5], bias=bias, activation="relu")
        ops = stage(problem, staged_spec(problem), allocate(problem)).ops
        assert launch._fuses(ops, Config("auto"), launch.Sizes(ops.host_offsets, None)) is fuses


def test_a_batch_of_one_weight_and_one_bias_is_one_product(model: ModelLt) -> None:
    a, b, bias = torch.ones(8, 16).bfloat16(), torch.ones(16, 16).bfloat16(), torch.arange(16).bfloat16()
    for x, groups, count in ((a.view(2, 4, 16), b, 1), (a[:4], torch.ones(2, 16, 16).bfloat16(), 2)):
        model.calls.clear()
        problem = mg.GroupedGemmProblem(x.expand(2, -1, -1), groups.expand(2, -1, -1), bias=bias)
        assert mg.verify(problem, _launched(problem))
        assert model.calls == [count]


def test_equal_groups_are_one_call_and_the_heuristic_is_asked_once_for_about_as_many_rows(model: ModelLt) -> None:
    _launched(_problem([5, 5, 5]))
    assert (model.calls, model.asked) == ([3], [(16, 5, 24)])
    model.calls.clear()
    _launched(_problem([3, 8, 0, 6]))
    assert (sorted(model.calls), model.asked[1:]) == ([1, 1, 1], [(16, 8, 24)])
    _launched(_problem([65, 128, 129]))
    assert sorted(model.asked[2:]) == [(16, 128, 24), (16, 192, 24)]


def test_an_algorithm_that_does_not_run_other_rows_is_asked_for_anew(model: ModelLt) -> None:
    model.refused = {6}
    problem = _problem([3, 6])
    assert mg.verify(problem, _launched(problem))
    assert sorted(model.asked) == [(16, 6, 24), (16, 8, 24)]


def test_a_product_without_an_algorithm_is_an_error(model: ModelLt) -> None:
    model.none = True
    with pytest.raises(LibraryError, match="NOT_SUPPORTED"):
        _launched(_problem([3, 6]))


def test_a_bias_that_lies_badly_is_copied_at_each_run(model: ModelLt) -> None:
    bias = torch.arange(100).bfloat16()[1:97:2].reshape(3, 16)
    problem = _problem([3, 6, 2], bias=bias)
    out, spec = allocate(problem), staged_spec(problem)
    step = _Host().plan(spec, Config("fused", 4), torch.device("cpu")).bind(stage(problem, spec, out).ops)
    for value in (3.0, -50.0):
        bias.fill_(value)
        step()
        assert mg.verify(problem, out)


def test_copies_of_a_plan_made_in_inference_mode_are_refreshed_outside(model: ModelLt) -> None:
    bias = torch.arange(100).bfloat16()[1:97:2].reshape(3, 16)
    with torch.inference_mode():
        problem = _problem([3, 6, 2], bias=bias)
        out, spec = allocate(problem), staged_spec(problem)
        step = _Host().plan(spec, Config("fused", 4), torch.device("cpu")).bind(stage(problem, spec, out).ops)
    step()
    assert mg.verify(problem, out)


def test_descriptions_live_as_long_as_their_calls(model: ModelLt) -> None:
    problem = _problem([3, 6, 2])
    out, spec = allocate(problem), staged_spec(problem)
    step = _Host().plan(spec, Config("fused", 4), torch.device("cpu")).bind(stage(problem, spec, out).ops)
    gc.collect()
    step()
    assert len(model.alive) > 9
    del step
    lt._matrix.cache_clear()
    gc.collect()
    assert len(model.alive) == 1  # what the heuristic may answer is always the same


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"activation": "silu"}, "relu"),
        ({"out_dtype": torch.float32}, "float32 of torch.bfloat16"),
        ({"c": torch.zeros(8, 16).bfloat16(), "beta": 1.0}, "without a C"),
        ({"bias": torch.zeros(16)}, "bias of the result's type"),
        ({"activation": None}, "neither bias nor relu"),
        ({"out": torch.zeros(16, 8).bfloat16().T}, "contiguous direction"),
        ({"out": torch.zeros(8, 17).bfloat16()[:, :16]}, "multiples of 16 bytes"),
    ],
)
def test_reasons_against_fused_calls(more: dict[str, Any], reason: str) -> None:
    a, b = torch.zeros(8, 24).bfloat16(), torch.zeros(2, 24, 16).bfloat16()
    spec = mg.GroupedGemmProblem(a, b, sizes=[3, 5], **({"activation": "relu"} | more)).spec
    found = config.variant_reasons(Config("fused", 4), spec, CUDA)
    assert any(reason in text for text in found), found
