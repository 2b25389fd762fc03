"""The static order of backends, held to the rankings of the kept reports."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from multigemm.bench.suites import UNTUNED
from multigemm.bench.workloads import geomean
from multigemm.problem.spec import bucket, half_octave
from multigemm.select.measure_once import WORTH
from multigemm.select.measure_once import fastest as fastest_of
from multigemm.select.problem_class import ON_DEVICE, ProblemClass
from multigemm.select.ranking import static_order
from tests.support.trial_cases import class_from

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
REPORTS = sorted(RESULTS.glob("*/report.json"))
MET = sorted(RESULTS.glob("*/auto-random*.json"))
BACKENDS = ("cupy", "triton", "numba", "cublas")
HOST = "[host sizes]"
HALF = ("bfloat16", "float16")


@dataclass(frozen=True)
class Ranked:
    """What each backend took for one workload of a report, with its sizes in one place."""

    report: str
    suite: str
    problem_class: ProblemClass
    us: dict[str, float]

    def regret(self, names: tuple[str, ...]) -> float:
        """How many times slower the first of `names` that ran is than the fastest of all."""
        return next(self.us[name] for name in names if name in self.us) / min(self.us.values())


@cache
def rankings() -> list[Ranked]:
    found = [r for path in REPORTS for r in _of_report(path.parent.name, json.loads(path.read_text())["rows"])]
    met = [row for path in MET for row in json.loads(path.read_text())["rows"]]
    return [*found, *(Ranked("h200", UNTUNED, class_from(row["problem_class"]), row["us"]) for row in met)]


def _of_report(report: str, rows: list[dict[str, Any]]) -> Iterator[Ranked]:
    cases: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "backend" and row.get("us"):
            cases.setdefault(row["case"], {})[row["entry"]] = row
    for found in cases.values():
        us = {name: found[name]["us"] for name in BACKENDS if name in found}
        if us:
            first = next(found[name] for name in BACKENDS if name in found)
            yield Ranked(report, first["suite"], class_from(first["spec"]), us)
        if library := found.get("cublas" + HOST):  # the kernels of the others never look at sizes on the host
            on_host = {**us, "cublas": library["us"]}
            yield Ranked(report, library["suite"], class_from(library["spec"]), on_host)


def regrets(which: Callable[[Ranked], bool]) -> list[float]:
    found = [r.regret(static_order(r.problem_class)) for r in rankings() if which(r)]
    assert len(found) >= 20
    return found


def test_the_reports_hold_enough_to_judge_by() -> None:
    assert len(rankings()) > 1000
    assert sum(r.suite == UNTUNED for r in rankings()) == 853


@pytest.mark.parametrize(
    ("dtypes", "bound"),
    [(HALF, 1.025), (("float32",), 1.06), (("float64",), 1.03), (("tf32",), 1.08), (("int8",), 1.03)],
)
def test_the_first_of_the_order_is_near_the_fastest(dtypes: tuple[str, ...], bound: float) -> None:
    assert geomean(regrets(lambda r: r.problem_class.dtype in dtypes)) <= bound


@pytest.mark.parametrize("on_device", [True, False])
def test_without_measuring_unseen_shapes_lose_a_thirtieth(on_device: bool) -> None:
    found = regrets(lambda r: r.suite == UNTUNED and (r.problem_class.where == ON_DEVICE) == on_device)
    assert geomean(found) <= 1.035


def test_the_order_names_the_fastest() -> None:
    """A trial of those that it names loses no more than may keep the first of the order."""
    for r in rankings():
        names = static_order(r.problem_class)
        assert 2 <= len(set(names)) == len(names) <= 4
        assert min(r.us[name] for name in names if name in r.us) <= WORTH * min(r.us.values()), r


def test_one_measurement_serves_a_class_however_its_groups_are_cut() -> None:
    """Sizes on the device change from call to call: what was chosen on some of them holds for others."""
    classes: dict[tuple[str, str, ProblemClass], list[Ranked]] = {}
    for r in rankings():
        classes.setdefault((r.report, r.suite, r.problem_class), []).append(r)
    stays, fastest = list[float](), list[float]()
    for (_, _, c), members in classes.items():
        for met in members if len(members) > 1 else []:
            us = {name: met.us[name] for name in static_order(c) if name in met.us}
            stays += [r.regret((fastest_of(us, static_order(c)),)) for r in members]
            fastest += [r.regret((min(us, key=lambda name: us[name]),)) for r in members]
    assert len(stays) > 500
    assert max(stays) <= 1.03
    assert max(fastest) > 1.10  # as it would be, if the first of the order did not stay while it is nearly as fast


def test_no_single_backend_does_as_well() -> None:
    """Else the order would be that backend's name."""
    own = geomean(regrets(lambda r: True))
    for name in BACKENDS:
        alone = [r.regret((name,)) for r in rankings() if name in r.us]
        assert geomean(alone) > own + 0.02


def test_weight_gradients_go_to_cupy_where_k_is_long() -> None:
    """By the best config of each: another limit of k per group takes 1.007 (512) or 1.008 (1448), not 1.003."""
    form = "jagged_k g{} m{} n{} k* t{} bfloat16/col bfloat16/row bfloat16/row ieee device-sizes"
    found, firsts = list[float](), dict[float, str]()
    for row in json.loads((RESULTS / "h200" / "weight-gradients.json").read_text())["rows"]:
        us = {name: min(row[name].values()) for name in ("cupy", "triton")}
        c = class_from(form.format(bucket(row["groups"]), row["m"], row["n"], half_octave(row["total"])))
        firsts[c.total / c.groups] = first = static_order(c)[0]
        found.append(us[first] / min(us.values()))
    assert len(found) == 59
    assert geomean(found) < 1.004
    assert {first for k, first in firsts.items() if k <= 512} == {"triton"}
    assert {first for k, first in firsts.items() if k >= 1024} == {"cupy"}


def test_products_whose_rows_are_summed_go_to_cupy_unless_k_is_short_and_rows_are_many() -> None:
    """The second product of a layer of experts with one token, with 1024 and with 4096."""
    layer = "jagged_m g128 m* n2048 k768 t{} bfloat16/row bfloat16/{} bfloat16/row {} device-sizes"
    for pairs in (8, 8192):
        assert static_order(class_from(layer.format(pairs, "col", "ieee+combine"))) == ("cupy", "triton")
        assert static_order(class_from(layer.format(pairs, "strided", "ieee+combine"))) == ("triton", "cupy")
    assert static_order(class_from(layer.format(32768, "col", "ieee+combine"))) == ("triton", "cupy")
    assert static_order(class_from(layer.format(32768, "col", "ieee+combine+epilogue"))) == ("cupy", "triton")
    assert static_order(class_from(layer.format(8192, "col", "ieee"))) == ("triton", "cupy")
