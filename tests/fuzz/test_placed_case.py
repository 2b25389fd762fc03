"""Cases in memory: poison round what nobody owns, foreign writes to the byte, lines that begin aligned."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from multigemm.planning.staging import stage, staged_spec
from multigemm.problem.spec import FORMS
from multigemm.testing import (
    Case,
    DeviceCase,
    Fused,
    Layout,
    Limits,
    PlacedCase,
    Scale,
    Subject,
    check,
    check_case,
    random_case,
)
from multigemm.testing.placed_case import Arena, foreign_writes, used_blocks
from tests.model_mutants.fused_kernel import FusedBackend
from tests.model_mutants.kernel import ModelBackend
from tests.support.fused_cases import BLOCKS

CPU = torch.device("cpu")
SMALL = Limits(work=1 << 12, groups=20, longest=40)


def test_the_same_seed_gives_the_same_bytes() -> None:
    one, two = PlacedCase.build(random_case(11)), PlacedCase.build(random_case(11))
    assert torch.equal(one.inputs, two.inputs)
    assert all(torch.equal(x, y) for x, y in zip(one.prefills, two.prefills, strict=True))


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 100_000))
def test_nobody_elses_memory_is_poison(seed: int) -> None:
    """A and B are surrounded by NaN (floats), and their elements are what was drawn."""
    placed = PlacedCase.build(random_case(seed, SMALL))
    place = placed.layout
    named = [*place.operands.values(), place.index]
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
    device_case = DeviceCase.from_case(case, CPU)
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
    outcome = check(DeviceCase.from_case(case, CPU), Subject(RunsOver()))
    assert [finding.oracle for finding in outcome.findings][:1] == seen


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


class Writes(FusedBackend):
    """The model, and then a number where it must not be: beside preact_out, or in the weights of rows."""

    where = ""

    def bind(self, ops: Any, config: Any) -> Any:
        launch, x = super().bind(ops, config), getattr(ops.fused, self.where)
        target = x if self.where == "row_scale" else x.as_strided((1,), (1,), x.storage_offset() - 1)
        return lambda: (launch(), target.fill_(3.0))


@pytest.mark.parametrize(("where", "oracle"), [("preact", "guard"), ("row_scale", "inputs")])
def test_a_write_into_weights_or_beside_preact_is_seen(where: str, oracle: str) -> None:
    backend = Writes("writes")
    backend.where = where
    case = Case(n=4, k=3, lengths=(2, 2), activation="relu", fused=Fused(row_scale="float32", preact=True))
    assert oracle in {finding.oracle for finding in check_case(case, backend).findings}
