"""The clock: order, statistics, failures, and (on a GPU) that it measures what it says."""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch

import multigemm as mg
from multigemm.backends import registry
from multigemm.bench.runner import flush_text
from multigemm.cuda import nvrtc
from multigemm.select import timing
from multigemm.select.timing import CODE_BYTES, CudaClock, Timing, cuda, long_code, measure, quantile
from tests.support.nvrtc_here import nvrtc_here

CPU = torch.device("cpu")
gpu = pytest.mark.gpu


def test_quantiles_interpolate_as_numpy_does() -> None:
    assert quantile([4.0, 1.0, 3.0, 2.0], 0.5) == 2.5
    assert quantile([1.0, 2.0, 3.0, 4.0], 0.2) == pytest.approx(1.6)
    assert quantile([7.0], 0.8) == 7.0
    assert math.isnan(quantile([], 0.5))


def test_a_timing_reduces_its_samples() -> None:
    taken = Timing("x", "cold", (1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 3.0))
    assert (taken.median, taken.best, taken.ok) == (2.0, 1.0, True)
    assert taken.spread == pytest.approx(1.0)
    assert not Timing("x", "cold", error="no").ok
    assert math.isnan(Timing("x", "cold", (1.0,)).spread)


def test_variants_are_interleaved_and_none_always_follows_the_same_other() -> None:
    calls: list[str] = []
    measure({name: partial(calls.append, name) for name in "abc"}, CPU, reps=30, min_reps=30, budget_ms=0.0)
    timed = calls[-90:]
    rounds = ["".join(timed[at : at + 3]) for at in range(0, 90, 3)]
    assert {"".join(sorted(each)) for each in rounds} == {"abc"}
    assert len(set(rounds)) == 6
    assert len(set(pairwise(timed))) >= 6


def test_a_clock_that_falls_half_way_does_not_decide_who_is_faster() -> None:
    draw = random.Random(3)
    truth = {"a": 700.0, "b": 707.0, "c": 900.0, "d": 1500.0, "e": 800.0}
    clocks = [1.0 if index < 5 else 1.12 for index in range(11)]
    rounds = {name: [us * clock * draw.gauss(1.0, 0.002) for clock in clocks] for name, us in truth.items()}
    rounds["a"][4] *= 1.3  # one stall more: the raw median of `a` lies behind the fall, whose neighbours' need not
    rounds["b"][6] /= 1.2
    calm = {name: statistics.median(taken) for name, taken in timing.steadied(rounds).items()}
    assert calm["b"] / calm["a"] == pytest.approx(1.01, abs=0.006)
    assert calm["c"] / calm["a"] == pytest.approx(9 / 7, rel=0.006)
    assert calm["a"] == pytest.approx(700 * statistics.median(clocks), rel=0.01)


def test_rounds_that_nothing_moved_stay_as_they_are() -> None:
    rounds = {name: [float(us)] * 7 for name, us in zip("abcd", (5, 6, 7, 8), strict=True)}
    assert timing.steadied(rounds) == {name: pytest.approx(taken) for name, taken in rounds.items()}
    assert timing.steadied({"a": [1.0, 2.0], "b": [2.0, 4.0]}) == {}
    assert timing.steadied({name: [0.0, 1.0] for name in "abcd"}) == {}


def test_what_moves_one_variant_alone_stays_in_its_samples() -> None:
    rounds = {name: [100.0 + index for index in range(9)] for name in "abcd"} | {"odd": [90.0] * 4 + [180.0] * 5}
    calm = timing.steadied(rounds)["odd"]
    assert max(calm) / min(calm) > 1.8


def test_statistics_are_of_the_steady_samples_and_the_raw_ones_are_kept() -> None:
    taken = measure({name: partial(time.sleep, 0.001) for name in "abcd"}, CPU, reps=9, min_reps=9)["a"]
    assert len(taken.samples) == len(taken.steady) == 9
    assert taken.median == statistics.median(taken.steady)
    assert taken.best == min(taken.steady)


def test_a_failing_variant_is_a_result_and_the_others_go_on() -> None:
    def fails() -> None:
        raise ValueError("first line\nsecond line")

    taken = measure({"bad": fails, "good": lambda: None}, CPU, reps=5)
    assert taken["bad"].error == "ValueError: first line"
    assert not taken["bad"].ok
    assert taken["good"].ok
    assert list(taken) == ["bad", "good"]


def test_a_variant_that_fails_later_has_no_samples() -> None:
    left = iter(range(6))
    taken = measure({"tires": lambda: next(left), "good": lambda: None}, CPU, reps=20, min_reps=20)
    assert taken["tires"].error.startswith("StopIteration")
    assert taken["tires"].samples == ()
    assert len(taken["good"].samples) == 20


@pytest.mark.parametrize("mode", ["cold", "hot", "sustained", "host", "do_bench"])
def test_cpu_times_are_near_the_truth(mode: timing.Mode) -> None:
    taken = measure({"nap": lambda: time.sleep(0.002)}, CPU, mode, reps=5, min_reps=5, budget_ms=20.0)["nap"]
    assert 2000 <= taken.best < 20000


def test_the_budget_bounds_the_rounds() -> None:
    taken = measure({"nap": lambda: time.sleep(0.002)}, CPU, reps=1000, min_reps=2, budget_ms=20.0)["nap"]
    assert 2 <= len(taken.samples) <= 12


def test_sustained_calls_are_taken_after_25_ms_of_all_in_turn() -> None:
    """What a call takes is known: none runs besides."""
    ran: list[str] = []
    calls = {name: partial(ran.append, name) for name in "ab"}
    known = {"a": 1000.0, "b": 4000.0}
    taken = measure(calls, CPU, "sustained", reps=3, min_reps=3, known_us=known)
    assert ran[:6] == ["a", "b"] * 3  # 25 ms, with the two of each that told what they take
    assert len(ran) == 6 + 2 * 3
    assert [len(taken[name].samples) for name in "ab"] == [3, 3]


def test_what_tires_in_the_warm_up_has_no_samples() -> None:
    left = iter(range(2))
    calls = {"tires": lambda: next(left), "good": lambda: None}
    taken = measure(calls, CPU, "sustained", reps=3, min_reps=3, known_us={"tires": 2000.0, "good": 2000.0})
    assert taken["tires"].error.startswith("StopIteration")
    assert len(taken["good"].samples) == 3


def test_a_machine_that_slows_down_ends_the_rounds_early() -> None:
    naps = iter([0.0] * 3)
    taken = measure({"nap": lambda: time.sleep(next(naps, 0.01))}, CPU, reps=500, min_reps=4, budget_ms=20.0)["nap"]
    assert 4 <= len(taken.samples) <= 10


def test_a_rested_device_pauses_between_bursts_and_the_first_call_behind_a_pause_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[int] = []
    pauses: list[tuple[float, int]] = []
    monkeypatch.setattr("time.sleep", lambda seconds: pauses.append((seconds, len(calls))))

    def work() -> None:
        calls.append(0)
        until = time.perf_counter() + 0.004
        while time.perf_counter() < until:
            pass

    taken = measure({"work": work}, CPU, reps=14, min_reps=14, budget_ms=500.0, rest=0.75)["work"]
    assert len(taken.samples) == 14
    assert pauses
    assert all(seconds >= 3 * timing.BURST_MS / 1e3 for seconds, _ in pauses)
    followed = [before for _, before in pauses if before < len(calls)]
    assert len(calls) == 3 + 14 + len(followed)  # 3 to warm up and to tell the cost
    calls.clear()
    measure({"work": work}, CPU, reps=14, min_reps=14, budget_ms=500.0)
    assert len(calls) == 3 + 14
    with pytest.raises(ValueError, match=r"rest=1\.0"):
        measure({"work": work}, CPU, rest=1.0)


def test_graphs_need_a_gpu_and_modes_have_names() -> None:
    assert "CUDA device" in measure({"x": lambda: None}, CPU, "graph")["x"].error
    with pytest.raises(ValueError, match="known: cold"):
        measure({"x": lambda: None}, CPU, "warm")  # type: ignore[arg-type]


def test_overhead_of_nothing_is_small() -> None:
    assert timing.overhead(CPU)["nothing"] < 100.0


def test_an_overhead_that_cannot_be_measured_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = {"nothing": Timing("nothing", "cold", error="OutOfMemoryError: no room")}
    monkeypatch.setattr(timing, "measure", lambda *_, **__: failed)
    assert timing.overhead(CPU) == {}


def least(
    call: timing.Call, modes: tuple[timing.Mode, ...], enough: Callable[[dict[str, float]], bool]
) -> dict[str, float]:
    """The best sample of each mode, of as many looks as it takes until they are `enough`; at most 12.

    Other processes on the GPU only ever lengthen a sample, so that the best says what the clock measures.
    """
    best: dict[str, float] = {}
    for _ in range(12):
        for mode in modes:
            taken = measure({"call": call}, "cuda", mode, reps=12)["call"]
            assert taken.ok, taken
            best[mode] = min(taken.best, best.get(mode, math.inf))
        if enough(best):
            break
    return best


@gpu
def test_gpu_modes_agree_with_a_kernel_of_known_length() -> None:
    def call() -> None:
        cuda._sleep(200_000)

    def agree(best: dict[str, float]) -> bool:
        return max(best.values()) / min(best.values()) < 1.15

    best = least(call, ("cold", "graph", "hot", "do_bench"), agree)
    assert agree(best), best
    assert 50 < best["cold"] < 400
    assert least(call, ("host",), lambda found: found["host"] < 50)["host"] < 50


@gpu
def test_cold_is_colder_than_hot() -> None:
    x = torch.randn(4 << 20, device="cuda")  # 16 MB: lies in the L2 when hot
    out = torch.empty_like(x)

    def colder(best: dict[str, float]) -> bool:
        return best["graph"] > 1.3 * best["hot"]

    best = least(lambda: torch.add(x, 1.0, out=out), ("graph", "hot"), colder)
    assert colder(best), best


def test_code_that_empties_caches_is_as_long_as_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler leaves out whatever has no effect."""
    library = nvrtc_here()
    monkeypatch.setattr(nvrtc, "compiler", lambda: library)
    cubin = nvrtc.compile_source(long_code(CODE_BYTES), "long_code", ("--gpu-architecture=sm_90",))
    assert CODE_BYTES < len(cubin) < 1.1 * CODE_BYTES


def test_cold_calls_find_neither_data_nor_code_and_those_of_do_bench_their_code(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Caches:
        def __init__(self, device: torch.device, code: bool) -> None:
            self.code = code

        def empty(self) -> None:
            emptied.append(self.code)

    emptied: list[bool] = []
    monkeypatch.setattr(timing, "Caches", Caches)
    modes: tuple[timing.Mode, ...] = ("cold", "graph", "do_bench", "hot", "sustained")
    for mode in modes:
        CudaClock(torch.device("cuda", 0))._emptier(mode)()
    assert emptied == [True, True, False]


def test_a_report_says_whether_code_was_emptied(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object) -> None:
        raise OSError("libnvrtc.so.13: cannot open shared object file")

    def flush(style: timing.Mode) -> str:
        timing.other_code.cache_clear()
        return flush_text(style, torch.device("cuda", 0))

    assert flush("do_bench") == "256 MB written before each call"
    monkeypatch.setattr(timing, "loaded", lambda *_: object())
    assert flush("cold") == "128 KB of other code run and 256 MB written before each call"
    monkeypatch.setattr(timing, "loaded", missing)
    assert "no NVRTC" in flush("cold")
    timing.other_code.cache_clear()


@gpu
def test_a_call_takes_as_long_alone_as_in_company() -> None:
    """Behind itself it would find its own code on the processors."""
    a, b = torch.randn(1944, 1472, device="cuda").bfloat16().t(), torch.randn(1944, 192, device="cuda").bfloat16()
    problem = mg.GroupedGemmProblem(a, b, jagged="k", sizes=torch.full((6,), 324, device="cuda"))
    here = [name for name in ("numba", "cupy", "triton") if registry.state(name).ok]
    if len(here) < 2:
        pytest.skip(f"needs two backends with kernels of their own, and {len(here)} can run here")
    plans, first = {name: mg.plan(problem, name) for name in here}, here[0]
    shares = []
    for _ in range(3):  # a shared host may disturb one of them
        together, alone = (measure(x, "cuda", "graph", reps=60)[first] for x in (plans, {first: plans[first]}))
        shares.append(alone.median / together.median)
    assert 0.93 < statistics.median(shares) < 1.07, shares


@gpu
def test_what_cannot_be_captured_says_so_and_the_device_lives_on() -> None:
    x = torch.ones(8, device="cuda")
    taken = measure({"reads": lambda: x.sum().item(), "good": lambda: x.add_(0)}, "cuda", "graph", reps=5)
    assert taken["reads"].error
    assert taken["good"].ok
