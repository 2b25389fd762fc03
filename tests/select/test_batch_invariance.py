"""`batch_invariant=True`: who promises it, which configs are left, which backend "auto" takes; the CPU keeps it."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backend import Availability
from multigemm.backends.cublas.support import not_supported_reasons as cublas_reasons
from multigemm.backends.cupy import choice as cupy_choice
from multigemm.backends.cupy import config as cupy_config
from multigemm.backends.numba import choice as numba_choice
from multigemm.backends.numba import config as numba_config
from multigemm.backends.numba import support as numba_support
from multigemm.backends.triton import choice as triton_choice
from multigemm.backends.triton import config as triton_config
from multigemm.cuda.summation import ALIKE, INTEGERS, Summation, difference, same_bits
from multigemm.problem.spec import FORMS, ProblemSpec
from multigemm.select.ranking import plain_spec
from multigemm.testing import Case, batch_invariance
from multigemm.testing.subject import Subject, kind_of
from tests.support.fake_backends import Fake, problem

CUDA = torch.device("cuda", 0)
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int8)
SIZES = list(product((1, 8, 64, 300), (1, 16, 130, 2000), (16, 512, 4096)))


class Promising(Fake):
    """A fake that promises batch invariance."""

    batch_invariant = True


def promised(rows: int = 4, dtype: torch.dtype = torch.float32, **keywords: Any) -> mg.GroupedGemmProblem:
    a, b = torch.ones(rows, 3, dtype=dtype), torch.ones(3, 2, dtype=dtype)
    return mg.GroupedGemmProblem(a, b, offsets=[0, rows], **{"batch_invariant": True, **keywords})


# --- the keyword ------------------------------------------------------------------------------------


def test_it_is_part_of_the_spec_the_text_and_copies() -> None:
    asked = promised()
    assert asked.spec.batch_invariant
    assert not problem().spec.batch_invariant
    assert "batch_invariant=True" in repr(asked)
    assert "batch_invariant" not in repr(problem())
    assert pickle.loads(pickle.dumps(asked)).spec == asked.spec
    assert copy.deepcopy(asked).batch_invariant


@pytest.mark.parametrize("wrong", [1, "yes", 0.0])
def test_it_is_a_switch(wrong: Any) -> None:
    with pytest.raises(mg.InvalidProblem, match="batch_invariant="):
        promised(batch_invariant=wrong)


@pytest.fixture
def asked_of_all(setting: Callable[..., None]) -> None:
    setting(MULTIGEMM_BATCH_INVARIANT=1)


def test_the_setting_speaks_where_the_call_does_not(asked_of_all: None) -> None:
    assert problem().batch_invariant
    assert not promised(batch_invariant=False).batch_invariant


def test_calls_with_and_without_it_share_no_launch() -> None:
    rng = torch.Generator().manual_seed(0)
    a, b = torch.randn(64, 1000, generator=rng), torch.randn(1, 1000, 48, generator=rng)
    wanted = mg.grouped_gemm(a, b, sizes=[64], backend="cpu", batch_invariant=True)
    for _ in range(3):  # the third call of a key is served by the cache
        mg.grouped_gemm(a, b, sizes=[64], backend="cpu")
        assert torch.equal(mg.grouped_gemm(a, b, sizes=[64], backend="cpu", batch_invariant=True), wanted)


# --- who promises -------------------------------------------------------------------------------------


def test_a_backend_that_does_not_promise_is_refused(install: Callable[..., None]) -> None:
    install(Fake("able", 1), Promising("kept", 2))
    with pytest.raises(mg.BackendUnsupported, match="does not promise"):
        mg.solve(promised(), "able")
    assert mg.solve(promised(), ["able", "kept"]).eq(2).all()
    assert mg.solve(promised()).eq(2).all()
    assert "cannot: it does not promise" in str(mg.explain(promised()))


def test_auto_takes_one_backend_whatever_the_problem(install: Callable[..., None]) -> None:
    """Also where that one refuses: another one would give other bits."""

    class Choosy(Promising):
        def not_supported_reasons(self, spec: ProblemSpec, device: torch.device) -> list[str]:
            return ["at most 64 rows: split the problem"] if spec.total > 64 else []

    install(Promising("gone", here=Availability(False, "no GPU")), Choosy("choosy", 1), Promising("other", 2))
    assert mg.solve(promised(4)).eq(1).all()
    assert "the same backend for all problems of these dtypes" in mg.plan(promised(4)).why
    with pytest.raises(mg.BackendUnsupported, match=r"at most 64 rows.*other bits"):
        mg.solve(promised(100))
    assert mg.solve(promised(100), "other").eq(2).all()


def test_auto_measures_nothing_for_it(fresh: Callable[..., None], trials: list[list[str]]) -> None:
    fresh(Promising("cupy", 1), Promising("triton", 2), Promising("numba", 3))
    assert [mg.plan(promised(rows, torch.float16)).backend for rows in (1, 60, 4096)] == ["cupy"] * 3
    assert mg.plan(promised(8, torch.float64)).backend == "triton"
    assert mg.plan(promised(8)).backend == "numba"
    assert trials == []


def test_cublas_promises_whole_numbers_only() -> None:
    whole, real = promised(dtype=torch.int8).spec, promised(dtype=torch.bfloat16).spec
    assert not any("batch_invariant" in reason for reason in cublas_reasons(whole, CUDA))
    assert any("depend on its neighbours" in reason for reason in cublas_reasons(real, CUDA))


# --- which configs are left -----------------------------------------------------------------------------


def specs_of(dtype: torch.dtype, precision: str = "ieee", **changes: Any) -> Iterator[ProblemSpec]:
    """Problems of all forms and sizes."""
    plain = promised(dtype=dtype, precision=precision).spec
    for form, (groups, rows, k) in product(FORMS, SIZES):
        extents: dict[str, Any] = {"m": rows, "n": 256, "k": k} | ({form[-1]: None} if form.startswith("jag") else {})
        yield replace(plain, form=form, groups=groups, total=groups * rows, largest=rows, **extents, **changes)


ARITHMETIC = [(dtype, "ieee") for dtype in DTYPES] + [(torch.float32, "tf32")]


@pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC)
@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_configs_of_cupy_sum_alike(dtype: torch.dtype, precision: str, capability: tuple[int, int]) -> None:
    found = set()
    for spec in specs_of(dtype, precision):
        judge = cupy_choice.Judge(spec, capability)
        configs = [c for c in dict.fromkeys(cupy_choice._order(spec)) if judge.accepts(c)]
        assert configs
        found |= {cupy_config.summation_of(config, spec) for config in configs}
    assert all(same_bits(one, other, capability) for one, other in product(found, found))


@pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC)
@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0)])
def test_configs_of_numba_sum_alike(
    dtype: torch.dtype, precision: str, capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (numba_choice, numba_support):
        monkeypatch.setattr(module, "capability_of", lambda device: capability)
    found = set()
    for spec in specs_of(dtype, precision):
        configs = numba_choice.candidates(spec, CUDA)
        assert configs
        found |= {numba_config.summation_of(config, spec) for config in configs}
    assert all(same_bits(one, other, capability) for one, other in product(found, found))


@pytest.mark.parametrize(("dtype", "precision"), ARITHMETIC)
def test_configs_of_triton_sum_alike(dtype: torch.dtype, precision: str) -> None:
    found, cut = set(), 0
    for spec in specs_of(dtype, precision):
        configs = triton_choice.candidates_of(spec, (9, 0))
        assert configs
        found |= {triton_config.summation_of(config, spec) for config in configs}
        usual = triton_choice.candidates_of(replace(spec, batch_invariant=False), (9, 0))
        cut += any(config.splits > 1 for config in usual)
    assert cut or precision == "tf32", "no problem here is one whose K Triton would share out"
    assert all(same_bits(one, other, (9, 0)) for one, other in product(found, found))


def test_a_config_that_sums_otherwise_is_refused_in_words() -> None:
    spec = promised(4, torch.bfloat16).spec
    split = triton_config.Config(splits=4, programs=0)
    assert triton_config.problem_with(split, replace(spec, batch_invariant=False)) == ""
    assert "in parts whose number depends on the sizes" in triton_config.problem_with(split, spec)
    assert not triton_config.one_instruction(spec, (10, 0))
    assert triton_config.one_instruction(spec, (8, 0))


def test_the_instruction_tells_unless_it_was_measured_to_be_alike() -> None:
    one, other = Summation("mma.sync", 16), Summation("wgmma", 16)
    (measured, *_) = ALIKE
    assert same_bits(one, other, measured)
    assert not same_bits(one, other, (0, 0))
    assert not same_bits(one, Summation("wgmma", 8), measured)
    assert not same_bits(Summation("mma.sync", 16, parts=True), Summation("mma.sync", 16, parts=True), measured)
    assert same_bits(INTEGERS, INTEGERS, (0, 0))
    assert "fused multiply-add" in difference(Summation("fused multiply-add", padded=32), one, measured)


def test_the_plain_problem_of_dtypes_has_those_of_the_problem() -> None:
    spec = promised(4, torch.float16, out_dtype=torch.float32).spec
    plain = plain_spec(spec)
    assert (plain.compute, plain.out.dtype, plain.batch_invariant) == (torch.float16, torch.float32, True)
    assert kind_of(plain) == kind_of(plain_spec(replace(spec, groups=77, total=4096)))


# --- the bits ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_rows_on_the_cpu_ignore_their_neighbours(seed: int) -> None:
    device, count = torch.device("cpu"), batch_invariance.Count()
    kind = batch_invariance.draw_kind(seed, 1 << 11)
    pool = batch_invariance.Pool(kind, 24, device)
    comparer = batch_invariance.Comparer(Subject("cpu"), kind, pool, count, True)
    for _ in range(10):
        comparer.compare()
    comparer.settle()
    assert count.comparisons == 10
    assert count.differing == 0, count.examples


@pytest.mark.slow
def test_the_comparison_sees_a_backend_that_does_not_keep_it() -> None:
    """BLAS multiplies one row by another kernel than many."""
    kind = Case(dtype="float32", k=1000, n=64, mode="normal", seed=1)
    count, device = batch_invariance.Count(), torch.device("cpu")
    pool = batch_invariance.Pool(kind, 40, device)
    pool.forms = ["jagged_m"]
    comparer = batch_invariance.Comparer(Subject("cpu", "Config(kernel='blas')"), kind, pool, count, False)
    for _ in range(40):
        comparer.compare()
    comparer.settle()
    assert count.differing, "BLAS here sums alike for all sizes: the test needs another backend that does not"
    assert count.examples


@pytest.mark.parametrize("activation", [None, "gelu", "gelu_tanh", "silu"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_the_epilogue_on_the_cpu_ignores_the_place_of_an_element(dtype: torch.dtype, activation: str | None) -> None:
    rng = np.random.default_rng(1)
    a, b, c = (torch.from_numpy(rng.standard_normal(shape)).to(dtype) for shape in ((131, 20), (20, 77), (131, 77)))
    keywords: dict[str, Any] = {"activation": activation, "alpha": 1.3, "beta": -0.7, "batch_invariant": True}
    whole = mg.grouped_gemm(a, b, c=c, bias=c[0], backend="cpu", **keywords)
    turned = mg.grouped_gemm(a, b, c=c.T.contiguous().T, bias=c[0], backend="cpu", **keywords)
    assert torch.equal(whole, turned)
    for i, j in ((0, 0), (1, 76), (64, 33), (130, 76)):
        one = mg.grouped_gemm(a[i : i + 1], b[:, j:], c=c[i : i + 1, j:], bias=c[0, j:], backend="cpu", **keywords)
        assert torch.equal(one[0], whole[i, j:])


# --- on a GPU; `multigemm.testing.batch_invariance` does the same for longer -----------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["cupy", "triton", "numba", "cublas"])
def test_rows_ignore_their_neighbours(backend: str) -> None:
    count = batch_invariance.run(backend, torch.device("cuda"), 20.0, 11, True, False)
    assert count.comparisons or count.refused
    assert count.differing == 0, count.examples


@pytest.mark.gpu
def test_cublas_refuses_what_it_does_not_keep() -> None:
    a, b = torch.ones(8, 16, device="cuda"), torch.ones(1, 16, 8, device="cuda")
    with pytest.raises(mg.BackendUnsupported, match="depend on its neighbours"):
        mg.grouped_gemm(a, b, sizes=[8], backend="cublas", batch_invariant=True)


@pytest.mark.gpu
def test_a_graph_replays_the_bits_of_an_eager_call() -> None:
    torch.manual_seed(0)
    a, b = torch.randn(300, 512, device="cuda").bfloat16(), torch.randn(3, 512, 256, device="cuda").bfloat16()
    plan = mg.plan(mg.GroupedGemmProblem(a, b, sizes=[100, 0, 200], batch_invariant=True))
    plan()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = plan()
    graph.replay()
    alone = mg.grouped_gemm(a[150:151], b[2:], sizes=[1], batch_invariant=True)
    assert torch.equal(out[150:151], alone)
