"""What a user measured lately, as forecasts go by it: it corrects them, and makes them more certain there."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from multigemm.select import forecast
from multigemm.select.forecast import Asked, Known, Lately
from multigemm.select.pair import Pair
from multigemm.select.shape import Shape, point

KEY = "jagged_m g8 m* n512 k608 t4096 bfloat16/row bfloat16/col bfloat16/row ieee device-sizes"
TILES = {"x": (128, 256, 1), "y": (64, 64, 1)}
WORDS = ("a", "b", "jagged_m")


@pytest.fixture
def model() -> Pair:
    """Two backends that were about as fast on problems of several rows."""
    points = np.array([place(Shape(8, float(m), 512.0, 2**9.0)) for m in (64, 128, 256, 512, 1024)])
    marks, logs = np.zeros((5, 3), dtype=int), np.array([0.1, 0.0, -0.1, 0.0, 0.1])
    scalars = {"marks": np.ones(3), "amplitude": np.array(0.05), "slope": np.array(0.001), "noise": np.array(1e-4)}
    vocabulary = [[word] for word in WORDS]
    empty = Pair(
        "ieee half",
        "x",
        "y",
        points,
        marks,
        vocabulary,
        np.full(points.shape[1], 3.0),
        scalars,
        logs,
        0.1 * logs,
        list("abcde"),
    )
    return replace(empty, weights=np.linalg.solve(empty.covariance() + 1e-4 * np.eye(5), logs))


def place(shape: Shape) -> list[float]:
    return point(KEY, shape, "H100", TILES["x"], TILES["y"])


def about(x: float) -> object:
    """`x` to six digits."""
    return pytest.approx(x)


def test_what_a_user_measured_makes_the_forecast_more_certain_there_and_nowhere_else(model: Pair) -> None:
    known = Known({model.names: model})
    asked = Asked(KEY, Shape(1, 1.0, 16.0, 64.0), "H100", {"x": "a", "y": "b"}, TILES)  # far from what was fitted
    close, far = replace(asked, shape=Shape(1, 1.1, 16.0, 64.0)), replace(asked, shape=Shape(8, 256.0, 512.0, 2**9.0))

    def error(*own: Asked) -> float:
        found = known.estimates(asked, Lately((one, {"x": 30.0, "y": 10.0}) for one in own))
        assert found[0].error == found[1].error
        return found[0].error

    assert error() == model.expected(place(asked.shape), WORDS)[1]
    assert f"give or take {100 * error():.0f} %" in known.estimates(asked)[0].source
    assert error(asked) <= error(close) < 0.3 * error()
    assert error(far) == about(error())
    assert error(far, close) == about(error(close))


def test_what_is_measured_later_changes_later_answers(model: Pair) -> None:
    known, lately = Known({model.names: model}), Lately()
    sizes = [Shape(8, m, 512.0, 2**9.0) for m in (64.0, 256.0, 1024.0)]
    small, asked, large = (Asked(KEY, shape, "H100", {"x": "a", "y": "b"}, TILES) for shape in sizes)

    def ratio(at: Asked) -> float:
        slowness = {e.backend: e.slowness for e in known.estimates(at, lately)}
        return slowness["x"] / slowness["y"]

    usual = ratio(asked)
    lately.add(asked, {"x": 30.0, "y": 10.0})
    assert ratio(asked) == pytest.approx(3.0, rel=0.1) != usual
    lately.add(asked, {"x": 10.0, "y": 20.0})  # it takes the place of what was measured there
    assert len(lately.of(model).every) == 1
    assert ratio(asked) == pytest.approx(0.5, rel=0.1)
    for place, us in ((small, 20.0), (large, 5.0)):  # of the same class
        lately.add(place, {"x": us, "y": 10.0})
    assert len(lately.of(model).every) == 3
    assert [ratio(at) for at in (small, asked, large)] == pytest.approx([2.0, 0.5, 0.5], rel=0.15)
    lately.add(replace(small, ran={"x": "a", "z": "c"}), {"x": 1.0, "z": 1.0})  # the two no longer met there
    assert len(lately.of(model).every) == 2


def test_what_one_thread_learns_while_another_reads_is_not_lost(model: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked(KEY, Shape(8, 256.0, 512.0, 2**9.0), "H100", {"x": "a", "y": "b"}, TILES)
    us, lately, real = {"x": 30.0, "y": 10.0}, Lately(), forecast._row
    lately.add(asked, us)
    other = threading.Thread(target=lately.add, args=(replace(asked, shape=Shape(8, 64.0, 512.0, 2**9.0)), us))

    def row(*given: Any) -> Any:
        other.start()
        other.join(0.3)
        return real(*given)

    monkeypatch.setattr(forecast, "_row", row)
    assert len(lately.of(model).every) == 1
    other.join()
    monkeypatch.undo()
    assert len(lately.of(model).every) == 2
