"""The rules of "auto": the table, what was measured once, measuring now, the static order; and that choices stay."""

from __future__ import annotations

import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as group
from torch.testing._internal.distributed.fake_pg import FakeStore

import multigemm as mg
from multigemm.backend import Recipe
from multigemm.backends import registry
from multigemm.select import choose, ranking
from multigemm.select import measure_once as trial
from multigemm.select import table as tuning
from multigemm.select.timing import Timing
from tests.support.concurrency import held_by_another_thread, in_a_forked_child, on_new_threads
from tests.support.fake_backends import Dawdler, Fake, Tile, problem
from tests.support.trial_cases import CPU, Install, class_from, class_in, kept, pair, tune

HALF = class_from("jagged_m g8 m* n512 k512 t4096 bfloat16/row bfloat16/row bfloat16/row ieee device-sizes")


def test_the_table_comes_first(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    tune(problem(), {"size": 32}, slow=10.0, fast=30.0)
    plan = mg.plan(problem())
    assert (plan.backend, plan.config) == ("slow", Tile(32))
    assert "the fastest in the table, 10.0 us, own cache; config measured (10.0 us, own cache)" in plan.why
    assert mg.plan(problem(), config={"size": 16}).config == Tile(16)
    assert trials == []


def test_a_table_that_holds_one_backend_compares_nothing(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    tune(problem(), slow=10.0)
    assert mg.plan(problem()).backend == "fast"
    assert trials == [["slow", "fast"]]


def test_tuning_changes_a_choice_that_was_made(fresh: Install) -> None:
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    tune(problem(), slow=1.0, fast=2.0)
    assert mg.plan(problem()).backend == "slow"


def test_a_class_is_measured_once_for_all_its_problems(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    assert [mg.plan(problem(rows)).backend for rows in (60, 64, 50, 60)] == ["fast"] * 4
    assert trials == [["slow", "fast"]]
    mg.plan(problem(32))
    mg.plan(problem(60, dtype=torch.float64))
    assert len(trials) == 3


def test_another_process_finds_the_choice_and_measures_nothing(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    mg.plan(problem())
    entry = kept()
    assert entry is not None
    assert (entry.chosen, set(entry.backends), entry.device) == ("fast", {"slow", "fast"}, "cpu")
    slow, fast = Dawdler("slow", 1), Dawdler("fast", 2, nap_s=0.003)  # the other way round by now
    fresh(slow, fast)
    assert mg.solve(problem()).eq(2).all()
    assert (slow.launches, fast.launches, len(trials)) == (0, 1, 1)
    assert f"measured on {entry.date[:10]}" in mg.explain(problem()).why


def test_clearing_the_cache_measures_anew(fresh: Install, trials: list[list[str]]) -> None:
    from multigemm.__main__ import main

    fresh(*pair())
    mg.plan(problem())
    assert main(["cache", "clear", "--what", "choices"]) == 0
    choose.forget()
    mg.plan(problem())
    assert len(trials) == 2


def test_a_new_config_of_a_kernel_does_not_change_the_choice(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    mg.plan(problem())
    slow, fast = pair()
    fast.configs = lambda spec, device: [Tile(64)]  # type: ignore[method-assign]
    fresh(slow, fast)
    assert (mg.plan(problem()).backend, len(trials)) == ("fast", 1)


def test_a_backend_that_was_not_there_is_measured(fresh: Install, trials: list[list[str]]) -> None:
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    fresh(*pair(), Dawdler("new", 3))
    assert mg.plan(problem()).backend == "new"
    assert len(trials) == 2
    fresh(*pair())  # and where it is gone again, the others' times still hold
    assert mg.plan(problem()).backend == "fast"
    assert len(trials) == 2


def test_what_another_process_wrote_meanwhile_holds(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    fresh(*pair())
    real = vars(trial)["measure"]

    def measure(*given: Any, **more: Any) -> dict[str, Timing]:
        found: dict[str, Timing] = real(*given, **more)
        times = {"slow": tuning.Measured(1.0), "fast": tuning.Measured(2.0)}
        entry = tuning.Entry("cpu", str(class_in(problem())), times)
        tuning.table().keep_choice(replace(entry, chosen="slow", date="2026-01-01"))
        return found

    monkeypatch.setattr(trial, "measure", measure)
    assert mg.plan(problem()).backend == "slow"


def test_where_measuring_is_forbidden_nothing_that_was_measured_so_counts(
    fresh: Install, setting: Callable[..., None]
) -> None:
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    setting(MULTIGEMM_MEASURE=0)
    fresh(*pair())
    plan = mg.plan(problem())
    assert plan.backend == "slow"
    assert "first of the static order; not measured: MULTIGEMM_MEASURE=0 forbids it" in plan.why


def test_ranks_of_a_process_group_choose_alike(fresh: Install, trials: list[list[str]]) -> None:
    """Neither do they measure, nor go by what one of their machines measured: only tables and the order are alike."""
    fresh(*pair())
    assert mg.plan(problem()).backend == "fast"
    group.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        plan = mg.plan(problem())
        assert plan.backend == "slow"
        assert "the 2 ranks of a process group have to choose alike" in plan.why
        fresh(*pair())
        assert mg.plan(problem()).backend == "slow"
        tune(problem(), slow=2.0, fast=1.0)
        assert mg.plan(problem()).backend == "fast"
    finally:
        group.destroy_process_group()
    assert len(trials) == 1


def test_a_choice_that_was_made_unmeasured_stays_in_its_process(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from multigemm.planning import binding as bound

    fresh(*pair())
    with monkeypatch.context() as within:
        within.setattr(bound, "capturing", lambda device: True)
        assert choose.choose(problem()).backend == "slow"
    monkeypatch.setattr(choose, "CHOICES_KEPT", 1)
    assert [mg.plan(problem(rows)).backend for rows in (4, 64, 4)] == ["slow", "fast", "slow"]
    choose.forget()
    assert mg.plan(problem()).backend == "fast"
    assert len(trials) == 2


def test_a_kept_choice_holds_in_a_capture_too(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    from multigemm.planning import binding as bound

    fresh(*pair())
    mg.plan(problem())
    fresh(*pair())
    monkeypatch.setattr(bound, "capturing", lambda device: True)
    assert choose.choose(problem()).backend == "fast"


def test_a_choice_that_was_being_made_while_tables_changed_is_not_kept(fresh: Install) -> None:
    slow, fast = pair()
    fresh(slow, fast)
    plan = slow.plan

    def tuned_meanwhile(*given: Any) -> Recipe:
        tune(problem(), slow=1.0, fast=2.0)
        return plan(*given)

    slow.plan = tuned_meanwhile  # type: ignore[method-assign,assignment]
    assert choose.choose(problem()).backend == "fast"
    assert choose.choose(problem()).backend == "slow"


def test_the_memory_of_choices_is_bounded(fresh: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of ever other sizes make ever other classes."""
    monkeypatch.setattr(tuning, "ENTRIES_READ", 2)
    fresh(*pair())
    for dtype in (torch.float32, torch.float64, torch.float16):
        mg.plan(problem(dtype=dtype))
    assert len(tuning.table().choices._read) <= 2


def test_two_threads_measure_a_class_once_and_both_are_answered(
    fresh: Install, trials: list[list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, meeting = vars(trial)["measure"], threading.Barrier(2)

    def measure(*given: Any, **more: Any) -> dict[str, Timing]:
        time.sleep(0.1)  # the other thread has come meanwhile
        found: dict[str, Timing] = real(*given, **more)
        return found

    def work() -> None:
        meeting.wait()
        assert mg.solve(problem()).eq(2).all()

    fresh(*pair())
    monkeypatch.setattr(trial, "measure", measure)
    on_new_threads(work, work)
    assert len(trials) == 1


@pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")
def test_a_forked_child_has_locks_of_its_own(fresh: Install) -> None:
    fresh(*pair())
    mg.plan(problem(), "fast")
    with held_by_another_thread(*registry._locks.values(), registry.lock_of(CPU)):
        assert in_a_forked_child(lambda: choose.choose(problem()).backend == "fast")


FEW_LONG_TILES = "jagged_m g8 m* n152 k6920 t16384 bfloat16/row bfloat16/row bfloat16/row ieee device-sizes"
LISTS = "per_group g4 m* n1072 k{k} t2896 bfloat16/row bfloat16/col bfloat16/row ieee equal-sizes"


@pytest.mark.parametrize(
    ("text", "able", "candidates"),
    [
        (str(HALF), "cupy triton numba cublas", "triton cupy"),
        (str(replace(HALF, where="host-sizes")), "triton cupy cublas numba", "triton cupy cublas"),
        (str(HALF), "cupy numba mine", "cupy mine"),
        (str(HALF), "triton numba cublas", "triton numba cublas"),  # one alone would be compared with nothing
        (str(HALF), "numba", "numba"),
        (LISTS.format(k=7520), "cupy triton numba cublas", "cublas cupy triton numba"),
        (LISTS.format(k=7520).replace("g4", "g16"), "cupy triton numba cublas", "cublas cupy triton"),
        (FEW_LONG_TILES, "cupy triton numba cublas", "cupy triton numba"),
        (FEW_LONG_TILES.replace("n152", "n1520"), "cupy triton numba cublas", "cupy triton"),
        (LISTS.format(k=128), "cupy triton numba cublas", "cublas triton cupy"),
        (str(HALF).replace("bfloat16", "float32"), "cupy triton numba cublas", "triton numba cupy"),
    ],
)
def test_the_static_order_and_third_parties_are_worth_measuring(text: str, able: str, candidates: str) -> None:
    assert ranking.candidates(class_from(text), able.split())[1] == candidates.split()
    assert set(registry.BUILTIN) > {"cupy", "triton", "numba", "cublas"}


@pytest.mark.parametrize(
    ("text", "order"),
    [
        (str(HALF), ("triton", "numba", "cupy")),
        (FEW_LONG_TILES, ("triton", "numba", "cupy")),
        (FEW_LONG_TILES.replace("ieee", "ieee+gate"), ("triton", "cupy")),
        (FEW_LONG_TILES.replace("bfloat16/row", "bfloat16/row2", 1), ("triton", "cupy")),
        (FEW_LONG_TILES.replace("bfloat16", "float64"), ("triton", "numba", "cupy")),
    ],
)
def test_without_the_kernels_for_hopper_the_portable_ones_decide(text: str, order: tuple[str, ...]) -> None:
    assert ranking.static_order(class_from(text), hopper=False)[: len(order)] == order


def test_a_gpu_is_ranked_by_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    ranked = []
    for capability in ((8, 6), (9, 0), (10, 0)):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        ranked.append(ranking.is_hopper(torch.device("cuda", 0)))
    assert ranked == [False, True, False]
    assert ranking.is_hopper(CPU)


def test_explain_shows_the_times_that_its_own_call_measured(fresh: Install) -> None:
    fresh(*pair(), Fake("bad", reasons=["why"]))
    told = mg.explain(problem())
    assert told.chosen == "fast"
    assert told.why.startswith("the fastest, ")
    assert told.problem_class == str(class_in(problem()))
    times = {c.name: (c.us or 0.0, c.source) for c in told.candidates}
    assert times["slow"][0] > times["fast"][0] >= 500
    assert times["slow"][1].startswith("measured on ")
    assert [c.name for c in told.candidates] == ["fast", "slow", "bad"]
    assert f"* fast     can, {times['fast'][0]:.1f} us (measured on " in str(told)


def test_who_asked_to_see_choices_sees_the_trial(
    fresh: Install, setting: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    fresh(*pair())
    mg.plan(problem())
    assert capsys.readouterr().err == ""
    setting(MULTIGEMM_PRINT_CONFIG=1)
    mg.plan(problem(64))
    measured, chosen = capsys.readouterr().err.splitlines()
    assert measured.startswith(f"multigemm: measured {class_in(problem(64))}: slow ")
    assert "; fast from now on (" in measured
    assert chosen.startswith("multigemm: fast fill Tile(size=16) (the fastest, ")


def test_a_trial_warns_of_nothing_where_all_goes_well(fresh: Install) -> None:
    fresh(*pair())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mg.solve(problem())


SIZES = "g8 m* n4096 k2048 t8192"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        (
            f"jagged_m {SIZES} float8_e4m3fn/row/x1x128 float8_e4m3fn/col/gx128x128 bfloat16/row ieee device-sizes",
            "cupy",
        ),
        (f"jagged_m {SIZES} float8_e4m3fn/row float8_e4m3fn/col bfloat16/row ieee device-sizes", "cupy"),
        (
            f"jagged_m {SIZES} float8_e4m3fn/row/x1x128 float8_e4m3fn/row/gx128x128 bfloat16/row ieee device-sizes",
            "triton",
        ),
        (f"jagged_m {SIZES} float8_e4m3fn/row/x1x32 float8_e4m3fn/col/gx1x32 bfloat16/row ieee device-sizes", "triton"),
        (f"jagged_m {SIZES} bfloat16/row e2m1/col/gx1x32e8m0 bfloat16/row ieee device-sizes", "cupy"),
        (f"jagged_n {SIZES} bfloat16/row e2m1/col/x1x32e8m0 bfloat16/row ieee device-sizes", "triton"),
        (f"jagged_m {SIZES} bfloat16/row int8/row/gx1x0 bfloat16/row ieee device-sizes", "triton"),
        (f"jagged_k {SIZES} float8_e4m3fn/col/x1x128 float8_e4m3fn/row/x1x128 float32/row ieee device-sizes", "triton"),
        (f"jagged_m {SIZES} bfloat16/row uint4/col/gx1x64z bfloat16/row ieee device-sizes", "cupy"),
        (f"jagged_m {SIZES} bfloat16/row bfloat16/col bfloat16/row ieee device-sizes", "cupy"),
    ],
)
def test_quantised_operands_go_to_who_multiplies_them_as_they_are(text: str, first: str) -> None:
    assert ranking.static_order(class_from(text))[0] == first
