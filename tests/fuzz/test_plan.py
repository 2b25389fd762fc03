"""What a campaign hands out, counts and reports, and how a failure is made small.

Each slot is begun before any goes on, nothing comes twice, nobody waits for a compiler.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from multigemm.fuzz.cli import add_arguments, options_of
from multigemm.fuzz.plan import LEAD, Batch, Failure, Options, Summary, Tally, WorkQueue
from multigemm.fuzz.report import missing, progress_line, to_dict, to_text
from multigemm.fuzz.shrink import shrink
from multigemm.fuzz.worker import Position, Worker, drawn, with_required
from multigemm.testing import EMULATED, Case, Layout, Limits, Scale, Subject, check_case, classes, corpus, random_case
from multigemm.testing.corpus import snippet
from multigemm.testing.strategies import kinds, required
from tests.model_mutants.faults import mutant
from tests.support.fused_cases import BLOCKS, fused_cases


def options(examples: int = 0) -> Options:
    return Options(("cpu",), kinds=3, turns=2, burst=4, examples=examples)


def test_dtypes_have_the_names_of_the_other_commands_too() -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    asked = parser.parse_args(["--backends", "cpu", "--device", "cpu", "--dtypes", "bf16,float64,int8"])
    assert options_of(asked).limits.dtypes == ("bfloat16", "float64", "int8")


def test_every_slot_is_begun_first() -> None:
    queue = WorkQueue(options())
    batches = [queue.next_batch() for _ in range(6)]
    assert [batch and options().slot_of(batch.first) for batch in batches] == [0, 1, 2, 3, 4, 5]
    assert queue.unbegun() == [0, 1, 2, 3, 4, 5]


def test_only_what_has_been_compiled_goes_on() -> None:
    queue = WorkQueue(options())
    first = [queue.next_batch() for _ in range(6)]
    assert first[4] is not None and first[1] is not None
    assert not queue.note_done(first[4].first) and not queue.note_done(first[1].first + 3)
    assert queue.unbegun() == [0, 2, 3, 5]
    rest = [queue.next_batch() for _ in range(8)]
    assert {options().slot_of(batch.first) for batch in rest if batch} == {1, 4}
    numbers = [n for batch in [*first, *rest] if batch for n in range(batch.first, batch.stop)]
    assert len(set(numbers)) == len(numbers) == 14 * 4


def test_what_is_compiled_comes_before_what_is_not_if_asked() -> None:
    queue = WorkQueue(options())
    assert queue.next_batch(fresh=False) == Batch(0, 4) and queue.must_compile(3)
    queue.note_done(0)
    assert queue.next_batch(fresh=False) == Batch(24, 28) and not queue.must_compile(25)
    assert queue.next_batch() == Batch(4, 8)


def test_kernels_that_a_process_has_loaded_go_on_for_some_laps() -> None:
    queue = WorkQueue(options())
    for slot in range(6):
        assert queue.next_batch() == Batch(4 * slot, 4 * slot + 4)
        queue.note_done(4 * slot)
    mine = [queue.next_batch(loaded={2, 4}) for _ in range(2 * LEAD)]
    assert {queue.options.slot_of(batch.first) for batch in mine if batch} == {2, 4}
    others = [batch for _ in range(LEAD) if (batch := queue.next_batch(loaded={2, 4}))]
    assert {queue.options.slot_of(batch.first) for batch in others} > {2, 4}, "nobody stays behind for ever"
    numbers = [batch.first for batch in [*mine, *others] if batch]
    assert len(set(numbers)) == len(numbers)


def test_as_many_as_were_asked_for() -> None:
    queue = WorkQueue(options(examples=10))
    assert [queue.next_batch() for _ in range(4)] == [Batch(0, 4), Batch(4, 8), Batch(8, 10), None]
    queue.add(3)
    assert queue.next_batch() == Batch(12, 15)


def test_the_last_slot_to_come_back_is_told() -> None:
    queue = WorkQueue(options())
    assert [queue.note_done(4 * slot) for slot in (0, 1, 2, 3, 3, 4, 5, 5)] == [False] * 6 + [True, False]
    assert not queue.unbegun()


def test_without_kinds_numbers_follow_one_another() -> None:
    queue = WorkQueue(Options(("cpu",), burst=4, examples=6))
    assert [queue.next_batch(), queue.next_batch(), queue.next_batch()] == [Batch(0, 4), Batch(4, 6), None]
    assert not queue.note_done(3) and not queue.unbegun()


def test_shrinking_keeps_only_what_matters() -> None:
    case = Case(form="jagged_m", dtype="float16", n=65, k=33, lengths=(17, 0, 40, 3), head=2, tail=9, bias="gn",
                bias_dtype="float32", activation="silu", given=True, mode="normal", a=Layout("col", 3, 1),
                out=Layout("row", 7))  # fmt: skip
    small = shrink(case, lambda c: any(n > 8 for n in c.lengths) and c.k > 4, seconds=20)
    assert small.k == 5 and sorted(small.lengths)[-1] == 9 and len(small.lengths) == 1
    assert (small.activation, small.bias, small.given, small.head, small.tail) == (None, "", False, 0, 0)
    assert small.a == Layout() and small.mode == "int"


def test_a_fault_of_scales_is_made_small_and_repeats_itself() -> None:
    faulty = mutant("block index one short in the tail")
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


def test_a_fault_of_fused_problems_is_shrunk_stored_and_replayed(tmp_path: Path) -> None:
    """What is left of a problem is what the fault needs."""
    faulty = mutant("limit lost")

    def fails(case: Case) -> bool:
        return bool(check_case(case, faulty).findings)

    small = shrink(next(case for case in fused_cases(200) if fails(case)), fails)
    assert small.gated and small.fused.glu_limit is not None
    assert not (small.bias or small.fused.row_scale or small.fused.preact or small.fused.a_rows.given)
    path = corpus.save(tmp_path, {"case": small.to_dict(), "backend": "cpu", "oracle": "value"})
    entry = corpus.load(path)
    assert entry.case == small and fails(entry.case) and check_case(entry.case, "cpu").ok
    assert "Fused" in corpus.snippet(small, "cpu", "cpu")


@pytest.mark.slow
def test_no_problem_comes_twice() -> None:
    options = Options(("cpu",), kinds=12, burst=3, turns=2, seed=9)
    cases = [drawn(options, number) for number in range(80)]
    assert len({repr(c) for c in cases}) == 80
    assert [options.kind_of(number) for number in (0, 2, 3, 35, 36, 72)] == [0, 0, 1, 11, 0, 0]
    assert [options.config_of(number) for number in (0, 3, 36, 39, 72)] == [0, 2, 1, 3, 0]
    assert drawn(options, 5) == drawn(options, 5)


def test_the_gate_names_what_was_never_drawn() -> None:
    options = Options(("cpu",))
    tally = Tally(problems=6000)
    tally.classes["form:jagged_m"] = 6000
    summary = Summary(options, tally, 1.0)
    assert "form:masked" in missing(summary) and "form:jagged_m" not in missing(summary)
    assert "NOT COVERED" in to_text(summary)
    assert not missing(Summary(Options(("cpu",), limits=Limits(forms=("masked",))), tally, 1.0))


EVERYTHING = Options(("cpu",), limits=Limits(quantised=8, fused=16), seed=5)


@pytest.mark.slow
def test_a_long_campaign_begins_with_every_required_class() -> None:
    """A class that is rare was missed by 5,000 problems now and then, and the campaign failed for it."""
    options = with_required(EVERYTHING)
    first = [drawn(options, number) for number in range(len(options.begin_with))]
    assert required(options.limits) == {name for case in first for name in classes(case)} & required(options.limits)
    assert len(first) < 40 and drawn(options, len(first)) == random_case(5 + len(first), options.limits)
    assert with_required(replace(EVERYTHING, examples=100)).begin_with == ()
    assert with_required(replace(EVERYTHING, limits=Limits(forms=("masked",)))).begin_with == ()


@pytest.mark.slow
def test_forty_kinds_show_every_required_class_and_fewer_are_not_asked_for_them() -> None:
    found = kinds(EVERYTHING.limits, 40, 5)
    assert len(found) == 40 and not required(EVERYTHING.limits) - {name for case in found for name in classes(case)}
    tally = Tally(problems=6000)
    assert missing(Summary(replace(EVERYTHING, kinds=40), tally, 1.0))
    assert not missing(Summary(replace(EVERYTHING, kinds=12), tally, 1.0))


def test_what_limits_forbid_is_not_required() -> None:
    assert "stretched:k" in required(Limits()) and "stretched:k" not in required(EMULATED)
    assert "quantised" not in required(Limits()) and "act:swiglu" in required(Limits(fused=2))


def test_the_report_counts_and_speaks() -> None:
    tally = Tally(problems=3)
    tally.checks["cpu"] = 3
    tally.refusals["cpu", "too wide"] = 2
    tally.note_rho("cpu", "float32", 3.0, 1.0)
    tally.failures.append(Failure("cpu", "value", "wrong", Case(dims=()).to_dict(), 1))
    more = Tally()
    more.add(tally)
    text = to_text(Summary(Options(("cpu",)), more, 2.0))
    assert (
        "refused 2 x cpu: too wide" in text and "check_case(case" in text and "1 failures" in progress_line(more, 2.0)
    )
    assert to_dict(Summary(Options(("cpu",)), more, 2.0))["rho"][0]["max"] == 3.0


def test_a_campaign_draws_quantised_problems_and_counts_them_by_class() -> None:
    options = Options(("cpu", "other"), limits=Limits(quantised=8))
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


def test_a_long_campaign_must_have_met_quantised_problems_where_they_are_drawn() -> None:
    tally = Tally(problems=5000)
    assert "scale_b:128x128" in missing(Summary(Options(("cpu",), limits=Limits(quantised=8)), tally, 1.0))
    assert "scale_b:128x128" not in missing(Summary(Options(("cpu",)), tally, 1.0))


def test_a_worker_counts_and_reports_fused_problems() -> None:
    told = Tally()
    options = Options(("cpu",), limits=Limits(fused=1, work=1 << 12, longest=40, groups=8), seed=3)
    worker = Worker(options, SimpleNamespace(send=told.add), Position())
    for number in range(12):
        worker.problem(number)
    worker.send()
    assert told.problems == 12 and told.fused_checks["cpu"] == told.classes["fused"] > 6
    assert not told.failures
    worker.subjects["cpu", 0] = Subject(mutant("limit lost"))
    for number in range(200):
        worker.problem(number)
        worker.send()
        if told.failures:
            break
    (failure,) = told.failures
    assert failure.oracle == "value" and failure.shrunk is not None and "fused" in failure.shrunk
