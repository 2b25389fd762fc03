"""Fused problems: which kernel takes them, what is launched, what is compiled; and results, of kernels that run on the
CPU from their own sources."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm.backends.cupy import choice, hopper, launch, support
from multigemm.backends.cupy import config as configs
from multigemm.backends.cupy.config import Config
from multigemm.cuda.arguments import OPERANDS
from multigemm.planning.fused import products_spec
from multigemm.planning.operands import Operands
from multigemm.planning.staging import allocate, stage, staged_spec
from multigemm.problem.problem import GroupedGemmProblem
from multigemm.problem.spec import FusedSpec, OperandSpec, ProblemSpec
from multigemm.testing import Case, DeviceCase, Fused, Limits, Subject, check, random_case
from multigemm.testing.case import Layout
from multigemm.testing.placed_case import spec_of
from multigemm.testing.strategies import for_copy_engine
from tests.backends.cupy import emulation
from tests.model_mutants.faults import FUSED_HUNTING
from tests.support import host_kernels
from tests.support.cuda_driver import FakeDriver
from tests.support.cupy_world import BF16, GPU, SPEC, install
from tests.support.fused_cases import CPU, fused_cases

PROBLEMS, ON_HOPPER, LAYOUTS = 30, 6, 2
LAYERS = Limits(work=1 << 22, groups=8, longest=140, forms=("jagged_m", "batched", "masked", "jagged_k"),
                dtypes=("bfloat16", "float16"), fused=1)  # fmt: skip
needs_compiler = pytest.mark.skipif(not emulation.can_run(), reason="needs g++ on x86-64")


# --- which kernel takes them --------------------------------------------------------------------------


def fused(layout: Any = "halves", **change: Any) -> ProblemSpec:
    """The first product of a layer, with picked rows and a gate."""
    keywords = {"a_rows": torch.int32, "layout": layout} | change.pop("keywords", {})
    base = replace(SPEC, b=replace(BF16, order="col"), activation="swiglu" if layout else None)
    return replace(base, fused=FusedSpec(**keywords), **change)


def kernels(spec: ProblemSpec) -> set[str]:
    return {c.kernel for c in choice.ranked(spec, (9, 0))}


HOPPER = {"gathered", "hopper_gather", "generic"}


@pytest.mark.parametrize(
    ("spec", "takers"),
    [
        (fused(), HOPPER),
        (fused(layout=""), HOPPER),
        (fused(b=BF16, layout="interleaved"), HOPPER),
        (fused(keywords={"a_rows": None}), {"hopper", "generic"}),
        (fused(b=BF16, n=4096 + 8), {"generic"}),
        (fused(out=OperandSpec(torch.float32)), {"generic"}),
        (fused(a=replace(BF16, align=2)), {"gathered", "generic"}),
        (fused(a=replace(BF16, order="col")), {"gathered", "generic"}),
        (fused(compute=torch.float32, a=OperandSpec(torch.float32)), {"generic"}),
        (fused(layout="", form="jagged_k", k=None, m=4096, a=replace(BF16, order="col"), b=BF16),
         {"gathered", "hopper_gather", "generic"}),
        (fused(layout="", form="jagged_k", k=None, m=4096, a=replace(BF16, order="col"), b=BF16,
               keywords={"b_rows": torch.int32}), {"gathered", "generic"}),
    ],
    ids=["layer", "gather", "gpt-oss", "gate", "odd halves", "float32 results", "unaligned", "turned", "float32",
         "weight gradient", "both picked"],
)  # fmt: skip
def test_kernels_that_take_a_problem(spec: ProblemSpec, takers: set[str]) -> None:
    assert not support.not_supported_reasons(spec, GPU)
    assert kernels(spec) == takers
    assert all(configs.is_valid(c, spec) for c in choice.ranked(spec, (9, 0)))
    assert {c.kernel for c in choice.ranked(spec, (8, 0))} == {"generic"}
    assert set(choice.first_choices(spec, (9, 0))) <= set(choice.ranked(replace(spec, total=64), (9, 0)))


def test_what_gates_need_of_a_config() -> None:
    every = choice.ranked(fused(), (9, 0))
    assert all(c.pingpong for c in every if c.kernel != "generic")
    assert {c.rows for c in every if c.kernel == "hopper_gather"} == {64, 128, 192}
    kept = choice.ranked(fused(keywords={"preact": BF16}), (9, 0))
    assert max(c.rows for c in kept) == 128, "g and u that leave as well take registers"


def test_products_of_a_sum_are_a_problem_of_their_own() -> None:
    spec = fused(layout="", keywords={"a_rows": None, "combine": torch.int32, "terms": 2, "rows": 4096})
    products = products_spec(spec)
    assert products.fused is None and products.out.dtype == torch.bfloat16 and not products.zero_unowned
    assert choice.ranked(spec, (9, 0)) == choice.ranked(products, (9, 0))


@pytest.mark.parametrize("name", ["a_rows", "gate"])
def test_quantised_operands_take_sums_alone(name: str) -> None:
    e4m3 = OperandSpec(torch.float8_e4m3fn)
    spec = fused(layout="halves" if name == "gate" else "", a=e4m3, b=replace(e4m3, order="col"),
                 compute=torch.float8_e4m3fn, keywords={} if name == "a_rows" else {"a_rows": None})  # fmt: skip
    (reason,) = support.not_supported_reasons(spec, GPU)
    assert "beside quantised operands" in reason
    summed = replace(spec, activation=None, fused=FusedSpec(combine=torch.int32, terms=2, rows=8))
    assert not support.not_supported_reasons(summed, GPU)


# --- what is launched ---------------------------------------------------------------------------------


def layer(**keywords: Any) -> GroupedGemmProblem:
    a, b = torch.zeros(40, 64, dtype=torch.bfloat16), torch.zeros(2, 64, 64, dtype=torch.bfloat16)
    return GroupedGemmProblem(a, b, **({"sizes": [24, 16]} | keywords))


ROWS = {"a_rows": list(range(40))}
GATE = {"activation": "swiglu"}
SUM = {"combine": ([[0, 1]] * 7, None)}
PLACES = {"out_rows": [0] * 40, "rows": 3}


@pytest.mark.parametrize(
    ("keywords", "name", "launched"),
    [
        (ROWS | GATE, "hopper_gather with gather, gate", ["hopper"]),
        (SUM, "small, then sum of rows", ["small", "sum_rows"]),
        (ROWS | GATE | SUM, "hopper_gather with gather, gate, then sum of rows", ["hopper", "sum_rows"]),
        (PLACES, "sort, then small, then sum of rows", ["small", "sum_rows"]),
        ({"row_scale": torch.ones(40)}, "hopper with row_scale", ["hopper"]),
    ],
    ids=["gate", "combine", "both", "out_rows", "row_scale"],
)
def test_launches(keywords: dict[str, Any], name: str, launched: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    fake: FakeDriver = install(monkeypatch)
    problem = layer(**keywords)
    spec = staged_spec(problem)
    recipe = launch.plan(spec, choice.heuristic(spec), GPU)
    assert recipe.kernel == name
    run = recipe.bind(stage(problem, spec, allocate(problem)).ops)
    for _ in range(2):
        fake.launched.clear()
        run()
        assert [x.kernel for x in fake.launched] == launched
    if "sum_rows" in launched:
        assert fake.launched[-1].early, "it waits for the rows by itself"


def addresses_of(ops: Operands, work: int) -> tuple[int, ...]:
    """As a later call hands them to a bound launch."""
    fused = ops.fused
    assert fused is not None
    index = fused.combine or fused.out_rows
    given = {name: getattr(ops, name) for name in ("a", "b", "out", "c", "bias", "ends")}
    given |= {name: None if x is None else x.values for name, x in
              (("a_rows", fused.a_rows), ("b_rows", fused.b_rows), ("index", index))}  # fmt: skip
    given |= {"preact": fused.preact, "row_scale": fused.row_scale, "weights": fused.weights}
    at = {name: 0 if given.get(name) is None else given[name].data_ptr() for name in OPERANDS}
    return tuple((at | {"work": work}).values())


@pytest.mark.parametrize("kernel", ["generic", "hopper_gather"])
def test_a_launch_follows_its_operands(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Moved to the operands of another call, the arguments are those of a launch that was bound to it."""
    install(monkeypatch)
    ends = torch.tensor([24, 40], dtype=torch.int32)

    def bound_anew() -> tuple[Any, Operands]:
        problem = layer(**GATE, sizes=None, ends=ends.clone(), a_rows=torch.arange(40), row_scale=torch.ones(40),
                        preact_out=torch.zeros(40, 64, dtype=torch.bfloat16),
                        combine=(torch.zeros(7, 2, dtype=torch.int32), torch.ones(7, 2)))  # fmt: skip
        spec, ops = staged_spec(problem), stage(problem, staged_spec(problem), allocate(problem)).ops
        config = next(c for c in choice.ranked(spec, (9, 0)) if c.kernel == kernel)
        return launch.plan(spec, config, GPU).bind(ops), ops

    (first, _), (second, ops) = bound_anew(), bound_anew()
    lent = second._steps[-1]._lent.data_ptr()
    first.move(addresses_of(ops, lent))
    for moved, fresh in zip(first._steps, second._steps, strict=True):
        differ = (moved._block.snapshot() != fresh._block.snapshot()).sum()
        assert differ == (1 if kernel != "generic" and moved is first._steps[0] else 0), "the counter is a launch's own"
    assert not first.can_resize(40, 80), "how many rows are picked is in no word that changes"


# --- results, by emulation ----------------------------------------------------------------------------


@pytest.fixture
def emulated(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    emulation.install(monkeypatch, tmp_path)


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("dtype", "config"),
    [
        ("bfloat16", configs.GENERIC_64), ("float16", configs.GENERIC), ("float32", configs.GENERIC_32),
        ("float64", configs.GENERIC_64),
    ],
    ids=["bf16", "fp16", "fp32", "fp64"],
)  # fmt: skip
def test_random_problems(dtype: str, config: Config) -> None:
    """Of two layouts, each of which is compiled once."""
    backend, ran, layouts = emulation.EmulatedBackend(config), 0, set[Any]()
    for case in fused_cases(4000, limits=replace(FUSED_HUNTING, dtypes=(dtype,))):
        spec = spec_of(case)
        layout = spec.a.order == "col", spec.b.order == "col"
        if (len(layouts) == 2 and layout not in layouts) or backend.not_supported_reasons(spec, CPU):
            continue
        layouts.add(layout)
        outcome = check(DeviceCase.from_case(case, CPU), Subject(backend))
        assert outcome.ran and outcome.ok, (case, outcome)
        ran += 1
        if ran == PROBLEMS:
            break
    assert ran == PROBLEMS


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
def test_picked_rows_of_int8() -> None:
    rng = np.random.default_rng(0)
    a, b = (torch.from_numpy(rng.integers(-128, 128, x).astype(np.int8)) for x in ((9, 40), (2, 40, 20)))
    index = torch.tensor([8, 0, -1, 3, 3, 9, 2**31 - 1, 1], dtype=torch.int32)
    problem = GroupedGemmProblem(a, b, sizes=[5, 3], a_rows=index, activation="relu")
    spec, out = staged_spec(problem), allocate(problem)
    backend = emulation.EmulatedBackend(configs.GENERIC_64)
    backend.plan(spec, configs.GENERIC_64, CPU).bind(stage(problem, spec, out).ops)()
    verdict = mg.verify(problem, out)
    assert verdict, verdict.text


@cache
def drawn(seed: int) -> tuple[Case, ProblemSpec]:
    """A case with what Hopper's kernels take; each config looks for its own among thousands."""
    case = for_copy_engine(random_case(seed, LAYERS), LAYERS)
    return case, spec_of(case)


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        (configs.GATED[0], "gate"), (configs.GATED[3], "gate"), (configs.GATHERED[2], "gate"),
        (configs.WIDE, "row_scale"),
        (configs.GATHERED_TOGETHER[6], "jagged_m"), (configs.GATHERED_TOGETHER[4], "jagged_k"),
        (replace(configs.GATED[2], kernel="gathered"), "gate"),
        (replace(configs.MIDDLE, kernel="gathered"), "jagged_m"),
        (replace(configs.MIDDLE, kernel="gathered"), "jagged_k"),
    ],
    ids=["gate in clusters", "gate", "gate and rows", "row_scale", "rows", "weight gradient",
         "gate of copied rows", "copied rows", "weight gradient of copied rows"],
)  # fmt: skip
def test_cases_of_layers_on_hopper(
    config: Config, wanted: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Of two kernels; threads and copies come in a random order."""
    host_kernels.install(monkeypatch, tmp_path)
    sources_of = hopper.gathered_sources if config.kernel == "gathered" else lambda *given: (hopper.source(*given),)
    backend, ran, sources = emulation.EmulatedBackend(config), 0, set[Any]()
    for seed in range(4000):
        case, spec = drawn(seed)
        products = products_spec(spec)
        shown = {case.form, "gate" if case.gated else "", "row_scale" if case.fused.row_scale else ""}
        if products.fused is None or wanted not in shown:
            continue
        if backend.not_supported_reasons(spec, CPU):
            continue
        (source,) = sources_of(products, config)
        if len(sources) == LAYOUTS and source not in sources:
            continue
        sources.add(source)
        outcome = check(DeviceCase.from_case(case, CPU), Subject(backend))
        assert outcome.ran and outcome.ok, (case, outcome)
        ran += 1
        if ran == ON_HOPPER:
            break
    assert ran == ON_HOPPER


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(("order", "layout"), [("row", "interleaved"), ("col", "halves")])
def test_gates_of_rows_across_k(order: Any, layout: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Where tiles begin up to seven rows before their group, the rows of the group before stay as they are."""
    host_kernels.install(monkeypatch, tmp_path)
    case = Case(form="jagged_m", dtype="bfloat16", n=32, k=24, lengths=(9, 140, 0, 15, 44), head=5, activation="geglu",
                a=Layout("col", pad=-8), b=Layout(order), aligned=True, seed=3,
                fused=Fused(preact=True, glu_layout=layout))  # fmt: skip
    outcome = check(DeviceCase.from_case(case, CPU), Subject(emulation.EmulatedBackend(configs.GATED[2])))
    assert outcome.ran and outcome.ok, outcome


@needs_compiler
@pytest.mark.slow
@pytest.mark.usefixtures("emulated")
@pytest.mark.parametrize(
    ("config", "jagged"),
    [(configs.GATHERED_TOGETHER[5], "m"), (configs.GATHERED_TOGETHER[6], "m"), (configs.GATHERED_TOGETHER[5], "k")],
    ids=["rows", "rows in clusters", "weight gradient"],
)
def test_whole_lines_and_parts_of_lines(config: Config, jagged: str) -> None:
    """Tiles of 64 rows and more, k of two whole blocks and a part; every path of the copies of picked rows."""
    draw = torch.Generator().manual_seed(0)
    sizes = [136, 7, 64, 0, 41]
    index = torch.randint(-2, 302, (sum(sizes),), generator=draw, dtype=torch.int32)
    x = torch.randn(300, 136, generator=draw).bfloat16()
    if jagged == "m":
        b = torch.randn(5, 256, 136, generator=draw).bfloat16().transpose(1, 2)
    else:
        x, b = x.t(), torch.randn(sum(sizes), 200, generator=draw).bfloat16()
    problem = GroupedGemmProblem(x, b, sizes=sizes, jagged=jagged, a_rows=index)
    spec, out = staged_spec(problem), allocate(problem)
    assert configs.is_valid(config, spec)
    emulation.EmulatedBackend(config).plan(spec, config, CPU).bind(stage(problem, spec, out).ops)()
    verdict = mg.verify(problem, out)
    assert verdict, verdict.text
