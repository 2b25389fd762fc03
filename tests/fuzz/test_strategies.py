"""What is drawn, plain, quantised and fused: every class, legal, bounded, repeatable, and what a kind keeps."""

import json
from collections import Counter
from dataclasses import replace
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, target

from multigemm.fuzz.shrink import simpler
from multigemm.problem.spec import FORMS
from multigemm.testing import (
    EMULATED,
    Case,
    DeviceCase,
    Fused,
    Layout,
    Limits,
    PlacedCase,
    RowNumbers,
    Scale,
    Subject,
    cases,
    check,
    check_case,
    classes,
    random_case,
)
from multigemm.testing.strategies import (
    QUANTISED_MODES,
    REQUIRED,
    REQUIRED_FUSED,
    REQUIRED_QUANTISED,
    kinds,
    most_new_first,
    redrawn,
)
from tests.model_mutants.faults import FUSED_HUNTING, QUANTISED_HUNTING
from tests.model_mutants.kernel import ModelBackend
from tests.support.fused_cases import CPU

SMALL = Limits(work=1 << 12, groups=20, longest=40)
DRAWN = {"plain": Limits(), "quantised": QUANTISED_HUNTING, "fused": FUSED_HUNTING}
"""Limits within which only problems of one sort are drawn."""
MORE_QUANTISED = (
    {f"form:{form}" for form in FORMS}
    | {f"mode:{mode}" for mode in QUANTISED_MODES}
    | {f"scale_a:{covers}" for covers in ("none", "tensor", "group", "row", "1x32", "1x64", "1x128", "128x128")}
    | {"scale_a:all", "scale_b:allx32", "scale_a:group's row", "scale dtype:bfloat16", "scale dtype:float16"}
    | {f"scale:{word}" for word in ("row", "col", "padded", "shifted", "stepped", "zero-r")}
    | {"beta", "alias", "bias:gn", "act:silu", "head", "tail", "aligned", "stretched:k", "groups:none"}
)
CLASSES = {
    "plain": (4000, REQUIRED, Limits()),
    "quantised": (1500, REQUIRED_QUANTISED | MORE_QUANTISED, QUANTISED_HUNTING),
    "fused": (900, REQUIRED_FUSED, FUSED_HUNTING),
    "fused and quantised": (
        60, {"quantised", "fused", "scale_b:row", "a_rows:lies", "combine:lies"}, replace(FUSED_HUNTING, quantised=1),
    ),
}  # fmt: skip
"""So many seeds, and the classes that have to come up in them."""


@pytest.mark.slow
@pytest.mark.parametrize("sort", CLASSES)
def test_every_class_is_drawn(sort: str) -> None:
    """The generator cannot quietly stop making one."""
    count, wanted, limits = CLASSES[sort]
    seen = Counter(name for seed in range(count) for name in classes(random_case(seed, limits)))
    least = 8 if sort == "plain" else 1
    assert {name: seen[name] for name in wanted if seen[name] < least} == {}


def test_one_in_so_many_is_quantised_and_the_others_stay_as_they_are() -> None:
    some = [random_case(seed, Limits(quantised=8)) for seed in range(800)]
    assert 60 < sum(case.quantised for case in some) < 140
    assert not any(random_case(seed).quantised for seed in range(800))


def test_unaligned_sizes_are_the_rule() -> None:
    drawn = [random_case(seed) for seed in range(500)]
    odd = sum(any(e % 8 for size in case.sizes() for e in size) for case in drawn)
    assert odd > 350


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("limits", [Limits(), Limits(work=30_000), Limits(work=500), EMULATED, SMALL])
def test_limits_hold(limits: Limits) -> None:
    for seed in range(800):
        case = random_case(seed, limits)
        assert case.work <= limits.work
        assert case.storage <= 2 * limits.work
        assert case.form in limits.forms and case.dtype in limits.dtypes


NAMES = {"Case": Case, "Fused": Fused, "Layout": Layout, "RowNumbers": RowNumbers, "Scale": Scale}


@pytest.mark.parametrize("sort", DRAWN)
def test_a_case_survives_json_and_its_own_repr(sort: str) -> None:
    for seed in range(60):
        case = random_case(seed, DRAWN[sort])
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
        assert eval(repr(case), NAMES) == case
    with pytest.raises(ValueError, match="no field 'colour'"):
        Case.from_dict({"colour": 1})


KEPT = {
    "plain": "form dtype out_dtype activation a b out given precision bias kind",
    "quantised": "form dtype dtype_b b_format scale_a scale_b zero_b accumulate a b",
    "fused": "activation form out_dtype",
}
KEPT_OF_FUSED = "weights row_scale preact glu_layout terms"


@pytest.mark.parametrize("sort", DRAWN)
def test_a_kind_keeps_what_kernels_are_compiled_for(sort: str) -> None:
    for seed in range(40):
        kind = random_case(seed, DRAWN[sort])
        for number in range(3):
            other = redrawn(kind, Random(number), DRAWN[sort])
            assert [getattr(other, name) for name in KEPT[sort].split()] == [
                getattr(kind, name) for name in KEPT[sort].split()
            ]
            for name in KEPT_OF_FUSED.split():
                assert getattr(other.fused, name) == getattr(kind.fused, name)
        PlacedCase.build(other)


@pytest.mark.slow
def test_kinds_keep_the_share_of_quantised_and_fused_problems() -> None:
    quantised = [kind for kind in kinds(Limits(quantised=8), 100) if kind.quantised]
    assert len(quantised) == 12 and not REQUIRED_QUANTISED - {name for kind in quantised for name in classes(kind)}
    assert sum(kind.is_fused for kind in kinds(replace(FUSED_HUNTING, fused=4), 60)) >= 15


@pytest.mark.slow
@pytest.mark.parametrize("sort", DRAWN)
def test_every_simpler_case_is_another_legal_one(sort: str) -> None:
    for seed in range(6):
        case = random_case(seed, replace(DRAWN[sort], work=4000))
        others = list(simpler(case))
        assert case not in others
        assert not any(other.zero_b and not other.scale_b.covers for other in others)
        plain = [other for other in others if not other.quantised]
        assert plain and not any(other.scale_a.covers or other.scale_b.covers for other in plain)
        for other in others[:40] if sort != "quantised" else ():  # there, a scale that is dropped may be needed
            PlacedCase.build(other)


@pytest.mark.slow
def test_kinds_cover_pairs_better_than_chance() -> None:
    def covered(found: Any) -> Any:
        return {(x, y) for case in found for x in classes(case) for y in classes(case)}

    assert len(covered(kinds(Limits(), 30))) > len(covered([random_case(seed) for seed in range(30)]))


@pytest.mark.slow
@pytest.mark.parametrize("shares", [{}, {"fused": 1}, {"quantised": 1}, {"fused": 2, "quantised": 2}], ids=str)
@pytest.mark.parametrize("count", [24, 40, 96])
def test_so_many_kinds_as_asked_for(shares: dict[str, Any], count: int) -> None:
    assert len(kinds(Limits(**shares), count)) == count


def test_items_with_most_new_traits_come_first() -> None:
    words = ["ab", "abc", "d", "dd"]
    assert list(most_new_first(words, set)) == ["abc", "d", "ab", "dd"]
    assert list(most_new_first(words, set, again=False)) == ["abc", "d"]
    assert next(most_new_first(words, set, lambda word, new: len(new) / len(word) ** 2)) == "d"


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(SMALL))
def test_the_cpu_backend_on_drawn_cases(case: Case) -> None:
    outcome = check(DeviceCase.from_case(case, CPU), Subject("cpu"))
    target(min(outcome.rho, 50.0), label="rho")
    assert outcome.ok, outcome.findings


def test_a_backend_that_never_heard_of_scales_refuses() -> None:
    backend = ModelBackend("elsewhere")
    vars(backend)["takes_quantised"] = False
    outcome = check_case(random_case(0, QUANTISED_HUNTING), backend)
    assert outcome.refusals and not outcome.ran and outcome.ok


def test_where_one_problem_in_1_has_a_feature_all_kinds_have_it() -> None:
    quantised, fused = (kinds(limits, 24) for limits in (replace(SMALL, quantised=1), replace(SMALL, fused=1)))
    assert (len(quantised), len(fused)) == (24, 24)
    assert all(case.quantised for case in quantised)
    assert all(case.is_fused for case in fused)
