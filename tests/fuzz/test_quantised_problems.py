"""Quantised operands in random problems: all kinds drawn, the cpu backend right, planted faults seen and made small."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from multigemm.fuzz.plan import Options, Summary, Tally
from multigemm.fuzz.report import missing, to_dict, to_text
from multigemm.fuzz.shrink import shrink, simpler
from multigemm.fuzz.worker import drawn
from multigemm.problem.spec import FORMS
from multigemm.testing import Case, DeviceCase, Layout, Limits, Scale, Subject, check, check_case, classes, random_case
from multigemm.testing.corpus import snippet
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.model_mutants import QUANTISED_HUNTING, QUANTISED_MUTANTS, hunt, planted
from multigemm.testing.placed_case import used_blocks
from multigemm.testing.strategies import QUANTISED_MODES, REQUIRED_QUANTISED, RandomChooser, kinds, redrawn

CPU = torch.device("cpu")


def test_every_class_is_drawn() -> None:
    """The generator cannot quietly stop making one."""
    seen = Counter(name for seed in range(1500) for name in classes(random_case(seed, QUANTISED_HUNTING)))
    wanted = REQUIRED_QUANTISED | {f"form:{form}" for form in FORMS} | {f"mode:{mode}" for mode in QUANTISED_MODES}
    wanted |= {f"scale_a:{covers}" for covers in ("none", "tensor", "group", "row", "1x32", "1x64", "1x128", "128x128")}
    wanted |= {"scale_a:all", "scale_b:allx32", "scale_a:group's row", "scale dtype:bfloat16", "scale dtype:float16"}
    wanted |= {f"scale:{word}" for word in ("row", "col", "padded", "shifted", "stepped", "zero-r")}
    wanted |= {"beta", "alias", "bias:gn", "act:silu", "head", "tail", "aligned", "stretched:k", "groups:none"}
    assert not wanted - set(seen)


def test_one_in_so_many_is_quantised_and_the_others_stay_as_they_are() -> None:
    some = [random_case(seed, Limits(quantised=8)) for seed in range(800)]
    assert 60 < sum(case.quantised for case in some) < 140
    assert not any(random_case(seed).quantised for seed in range(800))


@pytest.mark.slow
def test_kinds_keep_the_share_and_what_kernels_are_compiled_for() -> None:
    found = kinds(Limits(quantised=8), 100)
    quantised = [kind for kind in found if kind.quantised]
    assert (len(found), len(quantised)) == (100, 12)
    assert not REQUIRED_QUANTISED - {name for kind in quantised for name in classes(kind)}
    for kind in quantised:
        other = redrawn(kind, RandomChooser(1), Limits(quantised=8))
        for name in ("form", "dtype", "dtype_b", "b_format", "scale_a", "scale_b", "zero_b", "accumulate", "a", "b"):
            assert getattr(other, name) == getattr(kind, name)
        DeviceCase.from_case(other, CPU)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["cpu", "model"])
def test_right_backends_are_accepted(backend: str) -> None:
    subject = Subject(ModelBackend() if backend == "model" else backend)
    for seed in range(300):
        outcome = check(DeviceCase.from_case(random_case(seed, QUANTISED_HUNTING), CPU), subject)
        assert outcome.ran and outcome.ok, outcome.findings


@pytest.mark.slow
@pytest.mark.parametrize("name", QUANTISED_MUTANTS)
def test_each_planted_fault_is_seen(name: str) -> None:
    kill = hunt(ModelBackend(name, planted(name)), problems=60, limits=QUANTISED_HUNTING)
    assert kill.killed


def test_a_backend_that_never_heard_of_scales_refuses() -> None:
    backend = ModelBackend("elsewhere")
    vars(backend)["takes_quantised"] = False
    outcome = check_case(random_case(0, QUANTISED_HUNTING), backend)
    assert outcome.refusals and not outcome.ran and outcome.ok


BLOCKS = Case(
    form="jagged_k", dtype="float8_e4m3fn", dtype_b="float8_e5m2", m=3, n=4, lengths=(70, 0, 45), head=5, tail=2,
    scale_a=Scale("1x32"), scale_b=Scale("row"), seed=1,
)  # fmt: skip


def test_entries_that_no_block_uses_hold_nan() -> None:
    assert used_blocks(BLOCKS, 32) == {0, 1, 2, 2 + 2, 2 + 3}
    problem = DeviceCase.from_case(BLOCKS, CPU).problem
    assert problem.quantisation is not None and problem.quantisation.a is not None
    scale: Any = problem.quantisation.a.given
    assert scale.shape == (3, 122 // 32 + 3)
    assert scale.isnan().nonzero()[:, 1].unique().tolist() == [3]


@pytest.mark.parametrize(
    ("case", "lines"),
    [
        (Case(dtype="float8_e4m3fn", n=4, k=40, lengths=(2, 3), head=1, tail=2, scale_a=Scale("1x32")), [0, 6, 7]),
        (Case(dtype="float8_e4m3fn", n=4, k=40, lengths=(2, 3), scale_a=Scale("row", layout=Layout("col"))), []),
        (Case(form="masked", dtype="float8_e4m3fn", m=5, n=4, k=9, lengths=(3,), scale_a=Scale("row")), [3, 4]),
    ],
)
def test_scales_of_rows_that_nobody_owns_hold_nan(case: Case, lines: list[int]) -> None:
    problem = DeviceCase.from_case(case, CPU).problem
    assert problem.quantisation is not None and problem.quantisation.a is not None
    scale: Any = problem.quantisation.a.given
    assert scale.isnan().nonzero()[:, -2].unique().tolist() == lines


def test_a_failure_is_made_small_and_repeats_itself() -> None:
    faulty = ModelBackend("faulty", planted("block index one short in the tail"))
    case = replace(BLOCKS, bias="n", bias_dtype="float32", activation="silu", scale_b=Scale("1x64", "float8_e8m0fnu"))

    def fails(trial: Case) -> bool:
        try:
            return bool(check_case(trial, faulty).findings)
        except ValueError:
            return False

    small = shrink(case, fails)
    assert small.quantised and not small.activation and not small.bias and small.storage < case.storage
    assert sum(bool(scale.covers) for scale in (small.scale_a, small.scale_b)) == 1
    there: dict[str, Any] = {}
    exec(snippet(small, "cpu", "cpu"), there)
    assert there["case"] == small


def test_every_simpler_case_is_another_one() -> None:
    for seed in range(40):
        case = random_case(seed, QUANTISED_HUNTING)
        others = list(simpler(case))
        assert case not in others
        assert not any(other.zero_b and not other.scale_b.covers for other in others)
        plain = [other for other in others if not other.quantised]
        assert plain and not any(other.scale_a.covers or other.scale_b.covers for other in plain)


def test_a_campaign_draws_them_and_counts_them_by_class() -> None:
    options = Options(("cpu", "other"), quantised=8)
    cases = [drawn(options, number) for number in range(400)]
    assert 25 < sum(case.quantised for case in cases) < 80
    tally = Tally(problems=400)
    for case in cases:
        tally.classes.update(classes(case))
        tally.quantised_checks["cpu"] += case.quantised
    total = Tally()
    total.add(tally)
    summary = Summary(options, total, 1.0)
    data = to_dict(summary)
    assert data["quantised_checks"] == {"cpu": data["classes"]["quantised"]}
    assert data["classes"]["format:float8"] and data["options"]["quantised"] == 8
    assert f"quantised operands in {data['classes']['quantised']} problems; checked on cpu" in to_text(summary)


def test_a_long_campaign_must_have_met_them_where_they_are_drawn() -> None:
    tally = Tally(problems=5000)
    assert "scale_b:128x128" in missing(Summary(Options(("cpu",), quantised=8), tally, 1.0))
    assert "scale_b:128x128" not in missing(Summary(Options(("cpu",)), tally, 1.0))
