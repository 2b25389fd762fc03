"""What is drawn: every class, legal, bounded, repeatable; and where it lies in memory."""

import json
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings, target
from hypothesis import strategies as st

from multigemm.planning.staging import stage, staged_spec
from multigemm.problem.spec import FORMS
from multigemm.testing import (
    EMULATED,
    Case,
    DeviceCase,
    Layout,
    Limits,
    PlacedCase,
    Subject,
    cases,
    check,
    classes,
    random_case,
)
from multigemm.testing.model_kernel import ModelBackend
from multigemm.testing.placed_case import Arena, foreign_writes
from multigemm.testing.strategies import REQUIRED, RandomChooser, kinds, most_new_first, redrawn

SMALL = Limits(work=1 << 12, groups=20, longest=40)


@pytest.mark.slow
def test_every_class_is_drawn() -> None:
    """The generator cannot quietly stop making one."""
    seen = Counter(name for seed in range(4000) for name in classes(random_case(seed)))
    assert not REQUIRED - set(seen)
    rare = {name: seen[name] for name in REQUIRED if seen[name] < 8}
    assert not rare


def test_unaligned_sizes_are_the_rule() -> None:
    drawn = [random_case(seed) for seed in range(500)]
    odd = sum(any(e % 8 for size in case.sizes() for e in size) for case in drawn)
    assert odd > 350


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize("limits", [Limits(), Limits(work=30_000), Limits(work=500), EMULATED, SMALL])
def test_limits_hold(limits: Limits) -> None:
    for seed in range(1500):
        case = random_case(seed, limits)
        assert case.work <= limits.work
        assert case.storage <= 2 * limits.work
        assert case.form in limits.forms and case.dtype in limits.dtypes


def test_a_case_survives_json_and_its_own_repr() -> None:
    for seed in range(200):
        case = random_case(seed)
        assert Case.from_dict(json.loads(json.dumps(case.to_dict()))) == case
        assert eval(repr(case), {"Case": Case, "Layout": Layout}) == case
    with pytest.raises(ValueError, match="no field 'colour'"):
        Case.from_dict({"colour": 1})


def test_a_kind_keeps_what_kernels_are_compiled_for() -> None:
    for seed in range(60):
        kind = random_case(seed)
        for number in range(4):
            other = redrawn(kind, RandomChooser(number), Limits())
            for name in (
                "form",
                "dtype",
                "out_dtype",
                "activation",
                "a",
                "b",
                "out",
                "given",
                "precision",
                "bias",
                "kind",
            ):
                assert getattr(other, name) == getattr(kind, name)


@pytest.mark.slow
def test_kinds_cover_pairs_better_than_chance() -> None:
    def covered(found: Any) -> Any:
        return {(x, y) for case in found for x in classes(case) for y in classes(case)}

    assert len(covered(kinds(Limits(), 30))) > len(covered([random_case(seed) for seed in range(30)]))


@pytest.mark.parametrize("shares", [{}, {"fused": 1}, {"quantised": 1}, {"fused": 2, "quantised": 2}], ids=str)
@pytest.mark.parametrize("count", [24, 40, 96])
def test_so_many_kinds_as_asked_for(shares: dict[str, Any], count: int) -> None:
    assert len(kinds(Limits(**shares), count)) == count


def test_items_with_most_new_traits_come_first() -> None:
    words = ["ab", "abc", "d", "dd"]
    assert list(most_new_first(words, set)) == ["abc", "d", "ab", "dd"]
    assert list(most_new_first(words, set, again=False)) == ["abc", "d"]
    assert next(most_new_first(words, set, lambda word, new: len(new) / len(word) ** 2)) == "d"


def test_the_same_seed_gives_the_same_bytes() -> None:
    one, two = PlacedCase.build(random_case(11)), PlacedCase.build(random_case(11))
    assert torch.equal(one.inputs, two.inputs)
    assert all(torch.equal(x, y) for x, y in zip(one.prefills, two.prefills, strict=True))


@pytest.mark.slow
@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(case=cases(SMALL))
def test_the_cpu_backend_on_drawn_cases(case: Case) -> None:
    outcome = check(DeviceCase.from_case(case, torch.device("cpu")), Subject("cpu"))
    target(min(outcome.rho, 50.0), label="rho")
    assert outcome.ok, outcome.findings


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_nobody_elses_memory_is_poison(seed: int) -> None:
    """A and B are surrounded by NaN (floats), and their elements are what was drawn."""
    placed = PlacedCase.build(random_case(seed, SMALL))
    place = placed.layout
    named = [place.a, place.b, place.bias, place.index, None if placed.case.alias else place.c]
    regions = [r for x in named if x is not None for r in (x if isinstance(x, list) else [x])]
    outside, clean = np.ones(placed.inputs.numel(), bool), place.inputs.poisoned()
    for region in regions:
        mark = torch.zeros_like(placed.inputs)
        expand = region.bits(mark)
        if 0 in region.strides and expand.numel():
            expand = expand.as_strided([1 if s == 0 else n for n, s in zip(region.shape, region.strides, strict=True)],
                                       region.strides, expand.storage_offset())  # fmt: skip
        expand.fill_(-1)
        outside &= (mark == 0).numpy()
    np.testing.assert_array_equal(placed.inputs.numpy()[outside], clean.numpy()[outside])


@pytest.mark.parametrize("index", ["int32", "int64"])
@pytest.mark.parametrize("kind", ["offsets", "sizes", "ends"])
@pytest.mark.parametrize("form", [f for f in FORMS if f.startswith("jagged")])
def test_the_spec_names_the_type_of_the_ends_that_kernels_get(form: Any, kind: str, index: str) -> None:
    """A kernel compiled for int32 ends once read the int64 sums of live int32 sizes."""
    case = Case(form=form, dtype="float32", m=3, n=3, k=3, lengths=(2, 0, 5), kind=kind, index=index)
    device_case = DeviceCase.from_case(case, torch.device("cpu"))
    spec = staged_spec(device_case.problem)
    ops = stage(device_case.problem, spec, device_case.out).ops
    assert ops.ends is not None
    assert ops.ends.dtype == spec.index


def test_foreign_writes_are_counted_to_the_byte() -> None:
    arena = Arena()
    region = arena.add(torch.float16, (3, 5), Layout("row", pad=2, shift=1))
    before, mask = arena.poisoned(), torch.zeros_like(arena.poisoned())
    region.bits(mask).fill_(-1)
    after = before.clone()
    region.view(after).fill_(1.0)
    assert foreign_writes(after.numpy(), before.numpy(), mask.numpy()) == 0
    after[region.offset - 1] = 7
    after[region.offset + 5 * 2] = 9
    assert foreign_writes(after.numpy(), before.numpy(), mask.numpy()) == 2


@pytest.mark.parametrize("order", ["row", "col"])
@pytest.mark.parametrize("extent", [1, 5, 15, 16, 17, 33])
def test_lines_of_whole_pieces_begin_aligned(order: str, extent: int) -> None:
    shape = (3, 7, extent) if order == "row" else (3, extent, 7)
    region = Arena().add(torch.float16, shape, Layout(order, pad=-16))
    lead = region.strides[1 if order == "row" else 2]
    assert lead % 16 == 0
    assert extent <= lead < extent + 16
    assert region.strides[0] == 7 * lead


class RunsOver(ModelBackend):
    """Stores by twos where lines begin aligned, and so one element past a line of odd length."""

    def bind(self, ops: Any, config: Any) -> Any:
        launch, out = super().bind(ops, config), ops.out

        def run() -> None:
            launch()
            if out.stride(0) % 8 == 0 and out.shape[1] % 2:
                out.as_strided((len(out), 1), out.stride(), out.storage_offset() + out.shape[1]).fill_(1.0)

        return run


@pytest.mark.parametrize(("pad", "seen"), [(0, []), (8, []), (-16, ["guard"])])
def test_a_store_that_runs_over_an_odd_line_shows_where_lines_begin_aligned(pad: int, seen: list[str]) -> None:
    """And nowhere else: lines of odd length end to end, or a fixed step apart, are all stored one by one."""
    case = Case(dtype="float16", n=5, k=3, lengths=(2, 2), given=True, out=Layout(pad=pad))
    outcome = check(DeviceCase.from_case(case, torch.device("cpu")), Subject(RunsOver()))
    assert [finding.oracle for finding in outcome.findings][:1] == seen
