"""What measured shapes say about others: coordinates, the model of two backends, what ships, and how it was fitted."""

from __future__ import annotations

import math
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm import api as dispatch
from multigemm.bench import fit, left_out, results
from multigemm.bench.results import Report, Row
from multigemm.bench.suites import suite
from multigemm.cuda.disk_cache import DiskCache
from multigemm.planning.staging import outline, staged_spec
from multigemm.select import candidates as contest
from multigemm.select import forecast, pair
from multigemm.select import table as tuning
from multigemm.select.forecast import Asked, Known, Lately
from multigemm.select.measured import Measured
from multigemm.select.nearest import Estimate
from multigemm.select.pair import Pair
from multigemm.select.shape import (
    MOST,
    Shape,
    coordinates,
    families_of,
    knows_sizes,
    labels,
    of_tiles,
    point,
    shape_in,
    shape_of,
)
from tests.made_up_runs import KEY, TILES, made_up, rows


def about(x: float) -> Any:
    """`x` to six digits."""
    return pytest.approx(x)


def shape(problem: mg.GroupedGemmProblem) -> Shape:
    return shape_of(outline(problem, staged_spec(problem)))


def test_shapes_are_means_over_groups_as_far_as_the_host_knows_them() -> None:
    a, b = torch.ones(30, 5), torch.ones(3, 5, 7)
    assert shape(mg.GroupedGemmProblem(a, b, sizes=torch.tensor([10, 20, 0]))) == Shape(3, 10.0, 7.0, 5.0)
    assert shape(mg.GroupedGemmProblem(a, b, sizes=[10, 20, 0])) == Shape(3, 10.0, 7.0, 5.0, 2.0, about(2 / 3))
    assert shape(mg.GroupedGemmProblem(a, b, offsets=[0, 3, 6, 9])) == Shape(3, 3.0, 7.0, 5.0)
    assert shape(mg.GroupedGemmProblem(a.T, torch.ones(30, 4), sizes=[15, 15], jagged="k")) == Shape(2, 5.0, 4.0, 15.0)
    columns = mg.GroupedGemmProblem(torch.ones(2, 6, 5), torch.ones(5, 8), sizes=[2, 6], jagged="n")
    assert shape(columns) == Shape(2, 6.0, 4.0, 5.0, 1.5, 1.0)
    assert shape(mg.GroupedGemmProblem(torch.ones(2, 9, 5), torch.ones(2, 5, 3))) == Shape(2, 9.0, 3.0, 5.0)
    lists = mg.GroupedGemmProblem([torch.ones(2, 4), torch.ones(6, 8)], [torch.ones(4, 3), torch.ones(8, 3)])
    assert shape(lists) == Shape(2, 4.0, 3.0, 6.0, about(144 / 84), 1.0)
    assert shape(mg.GroupedGemmProblem([], [])).groups == 0
    assert Shape(2, 3.0, 5.0, 7.0).flops == 420.0


def test_coordinates_tell_what_any_kernel_meets() -> None:
    m, n, k, groups, work, traffic, a, b, out, tail, *flags = coordinates(KEY, Shape(8, 512, 512, 608), "H100")
    assert (m, n, groups, work) == (9, 9, 3, about(math.log2(2 * 8 * 512 * 512 * 608)))
    assert traffic == about(math.log2(2 * 8 * (512 * 608 + 512 * 608 + 512 * 512)))
    assert (k, tail) == (about(math.log2(608)), about(math.log2(640 / 608)))
    assert (a, b, out) == (6, 6, 8)  # 608 elements of 2 bytes are 19 x 64; 512 are 4 x 256
    assert flags == [0, 1, 0, 0, 1, 0, 0]
    h200 = coordinates(KEY.replace("bfloat16/col", "bfloat16/col/shared"), Shape(8, 512, 512, 608), "an H200")
    assert (h200[12], h200[14]) == (1, 0)
    assert h200[5] < traffic
    uneven = coordinates(KEY, Shape(8, 512, 512, 608, 4.0, 0.5), "H100")
    assert uneven[-2:] == [2, -1]


def test_families_are_of_what_is_multiplied() -> None:
    assert families_of(KEY) == families_of(KEY.replace("bfloat16", "float16")) == ["ieee half"]
    assert families_of(KEY.replace("bfloat16/row ieee", "float32/row ieee")) == ["ieee half"]
    assert families_of(KEY.replace("bfloat16", "float32")) == ["ieee float32"]
    assert families_of(KEY.replace("bfloat16", "float32").replace("ieee", "tf32")) == ["tf32 float32"]
    assert families_of(KEY.replace("bfloat16/col", "bfloat16/col8")) == ["ieee half, unaligned", "ieee half"]
    assert families_of("no class") == []
    assert {family for family, _, _ in forecast.shipped().models} >= {"ieee half", "ieee float32", "ieee int8"}


def test_tiles_tell_rounds_and_waste() -> None:
    rounds, idle, empty, *tile = of_tiles(Shape(10, 130, 300, 64), (128, 256, 2))
    assert rounds == about(math.log2(10 * 4 * 2 / 132))
    assert idle == about(-rounds)
    assert empty == about(math.log2(4 * 128 * 256 / (130 * 300)))
    assert tile == [7, 8, 1]
    assert of_tiles(Shape(10, 130, 300, 64), ())[3:] == [7, 8, 0]
    assert of_tiles(Shape(0, 0, 0, 0), (128, 256, 1)) == [0.0] * 6
    assert of_tiles(Shape(10**6, 128, 128, 64), (128, 128, 1))[0] == MOST


def test_a_backend_that_decides_by_sizes_is_modelled_by_its_decision() -> None:
    host = KEY.replace("device-sizes", "host-sizes")
    assert labels("x", "64/2", KEY) == ["x"]
    assert labels("x", "auto/bound: a loop", KEY) == ["x: a loop"]
    assert labels("x", "auto/bound: a loop", host) == ["x: a loop", "x: by sizes"]
    assert not knows_sizes(KEY, ("x: a loop", "y"))
    assert knows_sizes(host, ("x: a loop", "y"))
    assert not knows_sizes(host, ("x", "y"))
    assert knows_sizes(host.replace("jagged_m", "per_group"), ("x", "y"))


@pytest.fixture(scope="module")
def model() -> Pair:
    return fit.fit(("ieee half", "x", "y"), fit.ratios(made_up()[0]), steps=25)


def test_a_model_knows_what_was_measured_and_guesses_between(model: Pair) -> None:
    its, truth = made_up()
    for index in (0, 7, 31):
        at = point(its[index][0].key, its[index][0].shape, its[index][0].device, TILES["x"], TILES["y"])
        mean, error, _ = model.expected(at, ("a", "b", "jagged_m"))
        assert mean == pytest.approx(truth[index], abs=0.05)
        assert error < 0.2
    k = 2**9.3
    between = point(KEY, Shape(8, 256.0, 512.0, k), "H100", TILES["x"], TILES["y"])
    near, sure, _ = model.expected(between, ("a", "b", "jagged_m"))
    assert near == pytest.approx(0.3 * math.sin(9.3), abs=0.1)
    far = point(KEY, Shape(1, 1.0, 65536.0, 64.0), "H100", TILES["x"], TILES["y"])
    assert model.expected(far, ("other", "b", "jagged_n"))[1] > 2 * sure


def test_errors_are_those_of_a_model_without_the_workload(model: Pair) -> None:
    its, truth = made_up()
    out = [i for i, (a, _) in enumerate(its) if a.case == "case_3"]
    assert len(out) == 2
    rest = [i for i in range(len(its)) if i not in out]
    inverse = np.linalg.inv(model.covariance() + model.scalars["noise"] * np.eye(len(its)))
    assert model.weights == pytest.approx(inverse @ truth, rel=1e-3, abs=1e-3)
    covariance = model.covariance()
    without = covariance[np.ix_(rest, rest)] + model.scalars["noise"] * np.eye(len(rest))
    guessed = covariance[np.ix_(out, rest)] @ np.linalg.solve(without, truth[rest])
    assert model.errors[out] == pytest.approx(guessed - truth[out], abs=1e-6)


def test_levels_fit_all_pairs_the_surer_ones_better() -> None:
    agreeing = [("a", "b", 0.1, 0.05), ("b", "c", 0.2, 0.01), ("a", "c", 0.3, 0.2)]
    levels = forecast.levels_of(agreeing)
    assert [levels[name] - levels["c"] for name in "ab"] == pytest.approx([0.3, 0.2], abs=1e-6)
    levels = forecast.levels_of([("a", "b", 0.5, 0.01), ("a", "b", -0.5, 0.5)])
    assert levels["a"] - levels["b"] == pytest.approx(0.5, abs=1e-2)
    assert set(forecast.levels_of([("a", "b", 0.1, 0.1), ("c", "d", 0.1, 0.1), ("e", "b", 0.0, 0.1)])) == {
        "a",
        "b",
        "e",
    }


def test_estimates_name_their_grounds(model: Pair) -> None:
    known = Known({model.names: model})
    asked = Asked(KEY, Shape(8, 256.0, 512.0, 2**9.0), "H100", {"x": "a", "y": "b", "z": "c"}, TILES)
    found = {e.backend: e for e in known.estimates(asked)}
    assert set(found) == {"x", "y"}
    assert found["y"].slowness == 1.0 or found["x"].slowness == 1.0
    assert found["x"].slowness / found["y"].slowness == pytest.approx(math.exp(0.3 * math.sin(9.0)), rel=0.1)
    assert "forecast from 40 measured ratios, give or take" in found["x"].source
    assert "case_" in found["x"].source
    assert known.estimates(replace(asked, key=KEY.replace("bfloat16", "float64"))) == []
    assert known.estimates(replace(asked, ran={"x": "a"})) == []
    odd = replace(asked, key=KEY.replace("bfloat16/row ", "bfloat16/row2 ", 1))
    assert {e.backend for e in known.estimates(odd)} == {"x", "y"}
    other = replace(model, family="ieee half, unaligned", two="z")
    both = Known({model.names: model, other.names: other})
    assert {e.backend for e in both.estimates(replace(odd, ran={"x": "a", "y": "b", "z": "b"}))} == {"x", "z"}


def test_what_a_user_measured_near_by_corrects_the_forecast(model: Pair) -> None:
    known = Known({model.names: model})
    asked = Asked(KEY, Shape(8, 256.0, 512.0, 2**9.0), "H100", {"x": "a", "y": "b"}, TILES)
    close, far = replace(asked, shape=Shape(8, 260.0, 512.0, 2**9.0)), replace(asked, shape=Shape(1, 1.0, 16.0, 64.0))

    def ratio(*own: tuple[Asked, dict[str, float]]) -> float:
        slowness = {e.backend: e.slowness for e in known.estimates(asked, Lately(own))}
        return slowness["x"] / slowness["y"]

    usual = ratio()
    assert 1.6 * usual < ratio((close, {"x": 30.0, "y": 10.0})) < 3.0
    assert usual <= ratio((far, {"x": 30.0, "y": 10.0})) < 1.5 * usual
    assert ratio((replace(close, ran={"x": "a", "z": "c"}), {"x": 30.0, "z": 1.0})) == usual


def test_own_measurements_are_read_once_and_tell_their_shape(tmp_path: Path) -> None:
    table = tuning.TuningTable(DiskCache("t", tmp_path))
    flops = 2.0 * 8 * 300 * 512 * 608
    for name, us in (("x", 3.0), ("y", 4.0)):
        table.record(Measured(name, {}, us, "cpu", KEY, ran="a", groups=8, flops=flops, footprint=(64, 64, 1)))
    table.record(Measured("x", {}, 3.0, "cpu", KEY.replace("n512", "n*"), ran="a", groups=8))
    ((asked, times),) = tuning.TuningTable(DiskCache("t", tmp_path))._lately_on("cpu").classes.values()
    assert asked.shape == Shape(8, about(300.0), 512.0, 608.0)
    assert times == {"x": 3.0, "y": 4.0}
    assert shape_in("jagged_k g2 m30 n50 k* t64 float32/row float32/row float32/row ieee host-sizes", 2, 48e3) == Shape(
        2, 30.0, 50.0, about(8.0)
    )
    assert table._lately_on("cpu") is table._lately_on("cpu")
    assert not table._lately_on("gpu").classes


def test_models_come_back_from_a_file(model: Pair, tmp_path: Path) -> None:
    pair.write(tmp_path / "f.npz", [model, replace(model, one="z")])
    (again, other) = pair.read(tmp_path / "f.npz")
    assert (again.names, other.one) == (model.names, "z")
    assert (again.points == model.points).all()
    assert (again.marks == model.marks).all()
    assert again.vocabulary == model.vocabulary
    at = [float(x) for x in model.points[3]]
    assert again.expected(at, ("a", "b", "jagged_m")) == pytest.approx(
        model.expected(at, ("a", "b", "jagged_m")), rel=1e-2
    )


def test_reports_become_pairs_and_a_file(tmp_path: Path) -> None:
    cases = [*suite("small")[:5], suite("random")[0]]
    found: list[Row] = []
    for index, case in enumerate(cases):
        found += rows(case, x=10.0 + index, y=20.0, picks=5.0, picks_host=4.0)
    found[3].ran = "auto/bound: it is chosen at each launch"
    device = {"device": "an H100", "device_type": "cuda"}
    report = Report(device, {}, {}, found)
    met = fit.pairs(fit.runs([report]))
    assert {key[1:] for key in met} == {("picks: a loop", "x"), ("picks: a loop", "y"), ("x", "y")}
    assert all(len({a.case for a, _ in its}) == 5 for its in met.values()), "random shapes are left out of every tuning"
    assert len(met["ieee half", "picks: a loop", "x"]) == 9
    both = fit.runs([report, Report(device, {}, {}, [*rows(cases[0], x=14.4)])])
    assert both["an H100", cases[0].key]["x"].us == pytest.approx(12.0)
    results.write(tmp_path / "report.json", report)
    assert fit.main([str(tmp_path / "out.npz"), str(tmp_path / "report.json"), "--steps", "2"]) == 0
    first = pair.read(tmp_path / "out.npz")
    assert len(first) == 3
    words = [str(tmp_path / "again.npz"), str(tmp_path / "report.json"), "--former", str(tmp_path / "out.npz")]
    assert fit.main([*words, "--more", "0"]) == 0
    again = pair.read(tmp_path / "again.npz")
    assert all(a.lengths == pytest.approx(b.lengths) for a, b in zip(first, again, strict=True))
    results.write(tmp_path / "none.json", replace(report, rows=found[:1]))
    with pytest.raises(mg.MultigemmError, match="no two backends"):
        fit.main([str(tmp_path / "out.npz"), str(tmp_path / "none.json")])


def test_a_backend_of_few_shapes_is_compared_with_whom_it_met_most() -> None:
    runs = made_up(64)[0]
    counts = {
        ("f", "a", "b"): 64,
        ("f", "a", "rare"): 10,
        ("f", "b", "rare"): 8,
        ("g", "a", "rare"): 8,
        ("f", "a: by sizes", "b"): 8,
        ("h", "a", "b"): 6,  # of three workloads only
    }
    met = {key: fit.ratios(runs[:count]) for key, count in counts.items()}
    assert set(fit.lean(met)) == {*met} - {("f", "b", "rare"), ("h", "a", "b")}


def test_what_ships_is_solved_and_its_errors_are_those_of_leaving_out() -> None:
    models = forecast.shipped().models
    small = [m for m in models.values() if 20 < len(m.weights) < 400][:3]
    assert small
    for m in small:
        y = m.covariance() @ m.weights + m.scalars["noise"] * m.weights
        weights, errors = fit.solved(m, y)
        assert weights == pytest.approx(m.weights, rel=1e-4, abs=1e-3)
        assert errors == pytest.approx(m.errors, rel=2e-3, abs=2e-3)


def test_choices_at_shapes_left_out_are_near_the_fastest() -> None:
    packed = [m for m in forecast.shipped().models.values() if m.family == "ieee half"]
    every = [c for c in left_out.chosen(packed) if c.kind.startswith("jagged_m") and c.sizes == "device"]
    assert len(every) > 1000
    assert sum(c.slowness[c.picked] > 1.1 for c in every) <= 0.02 * len(every)
    assert math.exp(sum(math.log(c.slowness[c.picked]) for c in every) / len(every)) < 1.01
    assert sum(c.measured > 1.1 for c in every) <= 0.002 * len(every)
    assert sum(bool(c.asked) for c in every) < 0.45 * len(every)


def test_a_place_left_out_tells_who_is_fastest_and_who_is_in_question() -> None:
    its = [left_out.Guess("cupy", "triton", 0.2, -0.1, 0.1), left_out.Guess("cupy", "numba", -0.9, -1.0, 0.1)]
    its.append(left_out.Guess("numba", "triton", 1.1, 0.9, 0.1))
    made = left_out._chosen("jagged_m, ieee half", "device", its)
    assert (made.fastest, made.picked, made.asked, made.alone) == ("triton", "cupy", ["cupy", "triton"], True)
    assert made.slowness["cupy"] == pytest.approx(math.exp(0.2), rel=0.01)
    assert made.measured == 1.0
    sure = left_out._chosen("jagged_m, ieee half", "device", [replace(g, error=0.01) for g in its])
    assert (sure.picked, sure.asked, sure.measured) == ("cupy", [], sure.slowness["cupy"])
    assert left_out.table([made, made, sure, sure])[-1] == (
        "| jagged_m, ieee 16 bits | device | 4 | 0 % | 100 % | 0 % | 0 % | 100 % | 100 % | 50 % | 50.0 % |"
    )


def test_a_class_measured_at_another_size_is_no_measurement_of_this_one() -> None:
    spec = mg.GroupedGemmProblem(torch.ones(30, 5), torch.ones(3, 5, 7), sizes=[10, 10, 10]).spec
    at = Shape(3, 10.0, 7.0, 5.0)
    assert contest.as_large(at.flops * 1.1, at, spec)
    assert not contest.as_large(at.flops * 1.3, at, spec)
    assert contest.as_large(0.0, at, spec)
    assert contest.as_large(9.0, None, spec)
    assert contest.as_large(at.flops * 9.0, at, replace(spec, form="masked"))


def test_on_the_generation_that_ships_the_forecast_is_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[Asked] = []

    class Oracle:
        def estimates(self, what: Asked, own: Lately) -> list[Estimate]:
            assert not own.classes
            asked.append(what)
            return [Estimate("x", 1.0, "said so"), Estimate("y", 2.0, "said so")]

    monkeypatch.setattr(forecast, "shipped", Oracle)
    problem = mg.GroupedGemmProblem(torch.ones(30, 5), torch.ones(3, 5, 7), sizes=[10, 10, 10])
    table = tuning.TuningTable(DiskCache("t", tmp_path))  # a user's who has measured nothing
    ask = partial(table.estimates, problem.spec, torch.device("cpu"), True, {"x": "a", "y": "b"}, TILES)
    at = shape(problem)
    assert [e.source for e in ask(at)] != ["said so", "said so"]
    monkeypatch.setattr(tuning, "capability", lambda device: forecast.CAPABILITY)
    assert [e.source for e in ask(at)] == ["said so", "said so"]
    assert [asdict(a)["shape"] for a in asked] == [at]
    ask(None)
    assert len(asked) == 1


def test_notches_divide_octaves_of_the_jagged_extent() -> None:
    def notch(rows: int) -> int:
        return dispatch.notch(mg.GroupedGemmProblem(torch.ones(rows, 3), torch.ones(3, 2), offsets=[0, rows]))

    assert notch(2048) - notch(1024) == notch(1024) - notch(512) == 16
    assert len({notch(rows) for rows in range(1024, 2048)}) == 16
    assert notch(1024) == notch(1030) < notch(1100)
    assert notch(0) < notch(1) < notch(2) < notch(3) < notch(33)
    assert dispatch.notch(mg.GroupedGemmProblem([torch.ones(2, 3)], [torch.ones(3, 2)])) == 0
