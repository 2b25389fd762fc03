"""Classes as points in a space, and what the measured ones around a place tell of it."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from multigemm.select import nearest
from multigemm.select.nearest import ANY_OFFSET, NOISE, Sample, Space, estimates, place_of, solved
from multigemm.select.table import spec_key
from tests.fake_backends import spec_of_rows


def _far(x: str, y: str) -> float:
    places = [place_of(x), place_of(y)]
    return -math.log(Space([Sample(x), Sample(y)], [p for p in places if p]).alike("", [0, 1])[0, 1])


def test_keys_are_points_with_distances() -> None:
    near, far = spec_key(spec_of_rows(1000)), spec_key(spec_of_rows(4000))
    place = place_of(near, groups=3, flops=2.0 * 900 * 8 * 16)
    assert place is not None
    assert list(place.extents) == [300, 8, 16, 3]
    assert place_of("jagged_m g2") is None
    assert _far(near, near) == 0.0
    assert _far(near, far) == pytest.approx(math.hypot(2 / nearest.LENGTHS[0], 2 / nearest.LENGTHS[4]))
    gradients = place_of("jagged_k g2 m300 n500 k* t1024 float32/row float32/row float32/row ieee host-sizes")
    assert gradients is not None
    assert 2 ** gradients.octaves[4] == pytest.approx(2 * 3 * 4)
    masked = near.replace("jagged_m", "masked")
    assert _far(near, masked) == pytest.approx(nearest.OTHER_FORM)
    columns = near.replace("jagged_m", "jagged_n").replace(" m* n8 ", " m8 n* ")
    assert _far(near, columns) == pytest.approx(nearest.OTHER_FORM + nearest.OTHER_JAGGED)
    ragged = "per_group g2 m* n* k* t1024 float32/row2 float32/col/shared float32/row ieee host-sizes"
    there = place_of(near)
    assert there is not None
    unknown = math.hypot(*((there.octaves[i] - nearest.TYPICAL) / nearest.LENGTHS[i] for i in (1, 2, 4)))
    marks = nearest.OTHER_FORM + nearest.OTHER_ALIGNMENT + nearest.OTHER_ORDER + nearest.OTHER_SHARING
    assert _far(near, ragged) == pytest.approx(unknown + marks + nearest.OTHER_UNKNOWN)


def test_distances_are_those_of_points_in_a_space() -> None:
    """Else the covariance has negative eigenvalues, and the guess may be anything."""
    text = "{} g{} m* n{} k{} t{} bfloat16/{} bfloat16/row bfloat16/row ieee device-sizes"
    extents = [("*", "*"), ("*", 64), (16384, "*"), (64, 64), (16384, 16384), (512, 7000), (1003, 128)]
    keys = [
        text.format(form, groups, n, k, total, order)
        for form, order in (("jagged_m", "row"), ("per_group", "col2"), ("jagged_k", "col"))
        for groups, total in ((1, 64), (256, 65536))
        for n, k in extents
    ]
    places = [place for key in keys if (place := place_of(key)) is not None]
    space = Space([Sample(key) for key in keys], places)
    assert np.linalg.eigvalsh(space.alike("", range(len(keys)))).min() > -1e-9


def test_classes_with_and_without_footprints_make_one_space() -> None:
    """Tables of an older version know none: with the same text of what ran, they are not near those that do."""
    text = "jagged_m g8 m* n{} k512 t4096 bfloat16/row bfloat16/row bfloat16/row ieee device-sizes"
    samples = [
        Sample(text.format(n), {"x": 1.0, "y": 2.0}, {"x": ran}, 8, footprints={"x": tile} if tile else {})
        for n in (512, 520)
        for ran in ("a", "b")
        for tile in ((), (64, 64, 1), (128, 256, 2))
    ]
    places = [place for s in samples if (place := place_of(s.key, s.groups)) is not None]
    assert np.linalg.eigvalsh(Space(samples, places).alike("x", range(len(samples)))).min() > -1e-9
    assert estimates(Sample(text.format(516), {}, {"x": "a"}, 8, footprints={"x": (64, 64, 1)}), samples)


def test_rounds_that_leave_processors_idle_are_counted_by_the_backends_own_tiles() -> None:
    text = "jagged_m g8 m* n512 k512 t{} bfloat16/row bfloat16/row bfloat16/row ieee device-sizes"
    place = place_of(text.format(4096), groups=6, flops=2.0 * 6 * 300 * 512 * 512)
    assert place is not None
    assert place.extents[0] == 300
    assert 2 ** place.own((128, 128, 1))[0] == pytest.approx(132 / (6 * 3 * 4))
    assert 2 ** place.own((256, 256, 2))[0] == pytest.approx(132 / (6 * 2 * 2 * 2))
    idle, rounds, *tile = place.own((64, 128, 2))
    assert 2**idle == pytest.approx(2 * 132 / (6 * 5 * 4 * 2))
    assert 2**rounds == pytest.approx(6 * 5 * 4 * 2 / 132)
    assert tile == [6, 7]
    assert place.own((1, 1, 1))[1] == nearest.MOST_ROUNDS
    assert place.own(()) == (0.0,) * 4
    unknown = place_of(text.format("*"))
    assert unknown is not None
    assert unknown.own((64, 64, 1)) == (0.0,) * 4
    gradients = place_of(text.format(4096).replace("jagged_m", "jagged_k").replace("m*", "m300"), groups=6)
    assert gradients is not None
    assert gradients.own((128, 128, 1)) == place.own((128, 128, 1))


def test_neighbours_count_more_whose_rounds_leave_as_much_idle() -> None:
    text = "jagged_m g8 m* n512 k512 t{} bfloat16/row bfloat16/row bfloat16/row ieee device-sizes"
    full, wasted = {"a": (64, 64, 1), "b": (64, 64, 1)}, {"a": (256, 256, 1), "b": (64, 64, 1)}
    known = [
        Sample(text.format(1024), {"a": 1.0, "b": 2.0}, groups=8, footprints=full),
        Sample(text.format(4096), {"a": 2.0, "b": 1.0}, groups=8, footprints=wasted),
    ]
    for footprints, faster in ((full, "a"), (wasted, "b")):
        want = Sample(text.format(2048), {}, groups=8, footprints=footprints)
        assert min(estimates(want, known), key=lambda e: e.slowness).backend == faster


def _points(times: dict[int, dict[str, float]], ran: dict[str, str] | None = None) -> list[Sample]:
    text = "jagged_m g8 m* n512 k512 t{} bfloat16/row bfloat16/row bfloat16/row ieee device-sizes"
    return [Sample(text.format(total), us, ran or {}) for total, us in times.items()]


def _guess(want: Sample, known: list[Sample]) -> dict[str, float]:
    return {e.backend: e.slowness for e in estimates(want, known)}


def test_only_the_ratios_of_a_sample_count() -> None:
    known = _points({64: {"a": 1.0, "b": 1.5}, 512: {"a": 2.0, "b": 2.2}, 8192: {"a": 9.0, "b": 5.0}})
    scaled = [replace(s, us={name: us * 7**i for name, us in s.us.items()}) for i, s in enumerate(known)]
    want = _points({1024: {}})[0]
    assert _guess(want, scaled) == pytest.approx(_guess(want, known), rel=1e-6)
    assert min(_guess(want, known).values()) == 1.0


def test_expectations_pass_through_the_samples_and_lie_between_them() -> None:
    known = _points({64: {"a": 1.0, "b": 2.0}, 65536: {"a": 2.0, "b": 1.0}})
    at = [_guess(want, known) for want in _points({total: {} for total in (64, 512, 4096, 65536)})]
    ratios = [found["b"] / found["a"] for found in at]
    assert ratios == sorted(ratios, reverse=True)
    assert ratios[0] == pytest.approx(2.0, rel=0.05)
    assert ratios[-1] == pytest.approx(0.5, rel=0.05)


def test_a_backend_that_some_samples_lack_is_compared_by_the_others() -> None:
    known = _points({64: {"a": 1.0, "b": 2.0, "c": 4.0}, 128: {"a": 3.0, "b": 6.0}, 256: {"b": 2.0, "c": 4.0}})
    assert _guess(_points({128: {}})[0], known) == pytest.approx({"a": 1.0, "b": 2.0, "c": 4.0}, rel=0.03)


def test_times_of_another_config_say_less() -> None:
    other = _points({1024: {"a": 1.0, "b": 3.0}}, {"a": "x", "b": "small"})
    known = [*other, *_points({16384: {"a": 1.0, "b": 1.2}}, {"a": "x", "b": "large"})]
    small, large = (Sample(_points({2048: {}})[0].key, {}, {"a": "x", "b": ran}) for ran in ("small", "large"))
    assert _guess(large, known)["b"] < 0.9 * _guess(small, known)["b"]


def test_equations_are_solved_as_exactly_as_their_condition_allows() -> None:
    places = np.random.default_rng(0).normal(size=(120, 4))
    apart = np.sqrt(((places[:, None] - places[None]) ** 2).sum(-1))
    matrix = np.exp(-apart / 10) + ANY_OFFSET + NOISE * np.eye(120)
    truth = np.random.default_rng(1).normal(size=120)
    assert solved(matrix, matrix @ truth) == pytest.approx(truth, abs=1e-5)
    assert solved(np.array([[4.0]]), np.array([2])) == pytest.approx([0.5])
