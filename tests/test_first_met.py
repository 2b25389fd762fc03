"""What was measured where it was first met: found by class and about the same size, in memory and on disk."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from multigemm.cuda.disk_cache import DiskCache
from multigemm.select import measured_cache as first_met
from multigemm.select.measured import Measured, encode
from multigemm.select.measured_cache import SAME_SIZE, SOURCE, FirstMeetings, FirstMet, near

KEY = "jagged_m g8 m* n512 k608 t4096 bfloat16/row bfloat16/col bfloat16/row ieee device-sizes"
GPU = "a GPU"


def times(flops: float, key: str = KEY, device: str = GPU, **us: float) -> FirstMet:
    every = us or {"x": 3.0, "y": 4.0}
    its = [
        Measured(name, {}, took, device, key, source=SOURCE, ran="a", groups=8, flops=flops, footprint=(64, 64, 1))
        for name, took in every.items()
    ]
    return FirstMet({m.backend: m for m in its}, {"passed": "b"})


def found(known: FirstMeetings, flops: float, key: str = KEY, device: str = GPU) -> dict[str, float]:
    """The times, or nothing."""
    met = known.find(device, key, flops)
    return {} if met is None else {name: m.us for name, m in met.times.items()}


BOTH = {"x": 3.0, "y": 4.0}
ONE = encode(times(1e9).any)


@pytest.fixture
def anew(tmp_path: Path) -> Callable[[], FirstMeetings]:
    """What each process makes for itself over one folder."""
    return lambda: FirstMeetings(DiskCache("first_met", tmp_path))


def test_sizes_are_near_within_a_fifth_of_an_octave() -> None:
    assert near(1e9, 1e9 * 2**0.19)
    assert near(1e9 * 2**0.19, 1e9)
    assert not near(1e9, 1e9 * 2**0.21)
    assert near(0.0, 0.0)
    assert not near(0.0, 1.0)
    assert not near(1.0, 0.0)


@pytest.mark.parametrize("within", [0.01, 0.1, 0.19])
def test_times_are_found_a_fifth_of_an_octave_to_either_side_wherever_they_lie_in_their_cell(
    anew: Callable[[], FirstMeetings], within: float
) -> None:
    flops, met = 2.0 ** (150 * SAME_SIZE + within), anew()
    met.keep(times(flops))
    for octaves in (-0.19, -0.1, 0.0, 0.1, 0.19):
        assert found(met, flops * 2**octaves) == BOTH
    for octaves in (-0.21, 0.21, 0.4, -0.4, 1.0):
        assert found(met, flops * 2**octaves) == {}
    assert found(met, flops, KEY.replace("g8", "g4")) == {}
    assert found(met, flops, device="another GPU") == {}


def test_the_own_cell_is_asked_before_its_neighbours(anew: Callable[[], FirstMeetings]) -> None:
    met, border = anew(), 2.0 ** (150 * SAME_SIZE)
    met.keep(times(border * 2**-0.05, x=1.0))
    met.keep(times(border * 2**0.05, x=2.0))
    assert [found(met, border * 2**by)["x"] for by in (-0.04, -0.06, 0.04, 0.06)] == [1, 1, 2, 2]


def test_another_process_finds_what_was_kept_and_all_that_was(anew: Callable[[], FirstMeetings]) -> None:
    kept = times(1e9)
    anew().keep(kept)
    anew().keep(times(4e9, y=1.0))
    assert anew().find(GPU, KEY, 1e9 * 2**0.15) == kept
    assert sorted(len(its.times) for its in anew().every()) == [1, 2]


def test_every_holds_each_once_and_also_what_no_disk_took(
    anew: Callable[[], FirstMeetings], monkeypatch: pytest.MonkeyPatch
) -> None:
    met = anew()
    met.keep(times(1e9))
    met.find(GPU, KEY, 1e9)
    met.find(GPU, KEY, 8e9)  # nothing: it is no class
    assert len(met.every()) == 1
    monkeypatch.setattr(DiskCache, "put", lambda *given: False)
    met.keep(times(8e9))
    assert len(met.every()) == 2
    assert found(met, 8e9) == BOTH
    assert len(anew().every()) == 1


def test_what_is_kept_replaces_what_was_known_of_this_size(anew: Callable[[], FirstMeetings]) -> None:
    met, flops = anew(), 2.0 ** (150 * SAME_SIZE + 0.1)
    met.keep(times(flops))
    met.keep(times(flops * 1.01, y=9.0, z=1.0))
    for its in (met, anew()):
        assert found(its, flops) == {"y": 9.0, "z": 1.0}
        assert len(its.every()) == 1


def test_classes_of_no_operations_are_classes(anew: Callable[[], FirstMeetings]) -> None:
    anew().keep(times(0.0))
    assert found(anew(), 0.0) == BOTH
    assert found(anew(), 1.0) == {}


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no json",
        "null",
        "3",
        "[]",
        "[3]",
        '{"x": 1}',
        '{"times": 3}',
        '{"times": [3]}',
        '{"times": []}',
        json.dumps({"times": [{**ONE, "schema": 1}]}),
        json.dumps({"times": [{**ONE, "us": "fast"}]}),
        json.dumps({"times": [{**ONE, "us": 0.0}]}),
        json.dumps({"times": [{**ONE, "flops": math.inf}]}),
        json.dumps({"times": [ONE, {"backend": "y"}]}),
        json.dumps({"times": [ONE], "passed": ["x"]}),
    ],
)
def test_an_entry_that_cannot_be_read_is_as_none(anew: Callable[[], FirstMeetings], tmp_path: Path, text: str) -> None:
    anew().keep(times(1e9))
    cache = DiskCache("first_met", tmp_path)
    (path,) = cache.entries()
    cache.put(path.stem, text.encode(), ".json")
    met = anew()
    assert found(met, 1e9) == {}
    assert met.every() == []
    met.keep(times(1e9))
    assert found(anew(), 1e9) == BOTH


def test_a_file_cut_short_is_as_none(anew: Callable[[], FirstMeetings], tmp_path: Path) -> None:
    anew().keep(times(1e9))
    (path,) = DiskCache("first_met", tmp_path).entries()
    path.write_bytes(path.read_bytes()[:-9])
    assert found(anew(), 1e9) == {}


def test_only_the_latest_of_others_are_read_and_any_is_found_by_its_name(
    anew: Callable[[], FirstMeetings], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(first_met, "LATEST", 2)
    for at in range(4):
        anew().keep(times(1e9 * 4**at))
    known = anew()
    assert len(known.every()) == 2
    assert found(known, 1e9) == BOTH


def test_it_tells_who_is_fastest_of_those_that_were_there_and_run_the_same_now() -> None:
    met = times(1e9)
    assert met.tells({"x": "a", "y": "a"})
    assert met.tells({"x": "a", "passed": "b"})
    assert not met.tells({"x": "a", "y": "b"})
    assert not met.tells({"x": "a", "passed": "a"})
    assert not met.tells({"x": "a", "z": "a"})


def test_threads_keep_and_list_at_once(anew: Callable[[], FirstMeetings], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own turn to measure; all of them keep in one place."""
    monkeypatch.setattr(DiskCache, "put", lambda *given: True)
    monkeypatch.setattr(DiskCache, "entries", lambda cache: [])
    met, failed = anew(), []
    one = times(1e9)

    def keep() -> None:
        for at in range(3000):
            met.keep(replace(one, times={name: replace(m, device=f"GPU {at}") for name, m in one.times.items()}))

    thread = threading.Thread(target=keep)
    thread.start()
    while thread.is_alive():
        try:
            met.every()
        except RuntimeError as error:
            failed.append(error)
    thread.join()
    assert not failed
    assert len(met.every()) == 3000
