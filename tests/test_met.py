"""What was measured where it was first met: found by class and about the same size, in memory and on disk."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from multigemm.cache import DiskCache
from multigemm.measured import Measured, encode
from multigemm.met import SAME_SIZE, SOURCE, Met, near

KEY = "jagged_m g8 m* n512 k608 t4096 bfloat16/row bfloat16/col bfloat16/row ieee device-sizes"
GPU = "a GPU"


def times(flops: float, key: str = KEY, device: str = GPU, **us: float) -> list[Measured]:
    every = us or {"x": 3.0, "y": 4.0}
    return [
        Measured(name, {}, took, device, key, source=SOURCE, ran="a", groups=8, flops=flops, footprint=(64, 64, 1))
        for name, took in every.items()
    ]


@pytest.fixture
def anew(tmp_path: Path) -> Callable[[], Met]:
    """What each process makes for itself over one folder."""
    return lambda: Met(DiskCache("met", tmp_path))


def test_sizes_are_near_within_a_fifth_of_an_octave() -> None:
    assert near(1e9, 1e9 * 2**0.19)
    assert near(1e9 * 2**0.19, 1e9)
    assert not near(1e9, 1e9 * 2**0.21)
    assert near(0.0, 0.0)
    assert not near(0.0, 1.0)
    assert not near(1.0, 0.0)


@pytest.mark.parametrize("within", [0.01, 0.1, 0.19])
def test_times_are_found_a_fifth_of_an_octave_to_either_side_wherever_they_lie_in_their_cell(
    anew: Callable[[], Met], within: float
) -> None:
    flops, met = 2.0 ** (150 * SAME_SIZE + within), anew()
    met.keep(times(flops))
    for octaves in (-0.19, -0.1, 0.0, 0.1, 0.19):
        assert met.find(GPU, KEY, flops * 2**octaves).keys() == {"x", "y"}
    for octaves in (-0.21, 0.21, 0.4, -0.4, 1.0):
        assert met.find(GPU, KEY, flops * 2**octaves) == {}
    assert met.find(GPU, KEY.replace("g8", "g4"), flops) == {}
    assert met.find("another GPU", KEY, flops) == {}


def test_the_own_cell_is_asked_before_its_neighbours(anew: Callable[[], Met]) -> None:
    met, border = anew(), 2.0 ** (150 * SAME_SIZE)
    met.keep(times(border * 2**-0.05, x=1.0))
    met.keep(times(border * 2**0.05, x=2.0))
    assert [met.find(GPU, KEY, border * 2**by)["x"].us for by in (-0.04, -0.06, 0.04, 0.06)] == [1, 1, 2, 2]


def test_another_process_finds_what_was_kept_and_all_that_was(anew: Callable[[], Met]) -> None:
    kept = times(1e9)
    anew().keep(kept)
    anew().keep(times(4e9, y=1.0))
    assert anew().find(GPU, KEY, 1e9 * 2**0.15) == {m.backend: m for m in kept}
    assert sorted(len(its) for its in anew().every()) == [1, 2]


def test_every_holds_each_once_and_also_what_no_disk_took(
    anew: Callable[[], Met], monkeypatch: pytest.MonkeyPatch
) -> None:
    met = anew()
    met.keep(times(1e9))
    met.find(GPU, KEY, 1e9)
    met.find(GPU, KEY, 8e9)  # nothing: it is no class
    assert len(met.every()) == 1
    monkeypatch.setattr(DiskCache, "put", lambda *given: False)
    met.keep(times(8e9))
    assert len(met.every()) == 2
    assert met.find(GPU, KEY, 8e9).keys() == {"x", "y"}
    assert len(anew().every()) == 1


def test_what_is_kept_replaces_what_was_known_of_this_size(anew: Callable[[], Met]) -> None:
    met, flops = anew(), 2.0 ** (150 * SAME_SIZE + 0.1)
    met.keep(times(flops))
    met.keep(times(flops * 1.01, y=9.0, z=1.0))
    for its in (met, anew()):
        assert {name: m.us for name, m in its.find(GPU, KEY, flops).items()} == {"y": 9.0, "z": 1.0}
        assert len(its.every()) == 1


def test_classes_of_no_operations_are_classes(anew: Callable[[], Met]) -> None:
    anew().keep(times(0.0))
    assert anew().find(GPU, KEY, 0.0).keys() == {"x", "y"}
    assert anew().find(GPU, KEY, 1.0) == {}


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
        json.dumps([{**encode(times(1e9)[0]), "schema": 1}]),
        json.dumps([{**encode(times(1e9)[0]), "us": "fast"}]),
        json.dumps([encode(times(1e9)[0]), {"backend": "y"}]),
    ],
)
def test_an_entry_that_cannot_be_read_is_as_none(anew: Callable[[], Met], tmp_path: Path, text: str) -> None:
    anew().keep(times(1e9))
    cache = DiskCache("met", tmp_path)
    (path,) = cache.entries()
    cache.put(path.stem, text.encode(), ".json")
    met = anew()
    assert met.find(GPU, KEY, 1e9) == {}
    assert met.every() == []
    met.keep(times(1e9))
    assert anew().find(GPU, KEY, 1e9).keys() == {"x", "y"}


def test_a_file_cut_short_is_as_none(anew: Callable[[], Met], tmp_path: Path) -> None:
    anew().keep(times(1e9))
    (path,) = DiskCache("met", tmp_path).entries()
    path.write_bytes(path.read_bytes()[:-9])
    assert anew().find(GPU, KEY, 1e9) == {}


def test_what_is_forgotten_is_gone_from_disk_too(anew: Callable[[], Met]) -> None:
    met = anew()
    met.keep(times(1e9))
    met.forget()
    assert met.find(GPU, KEY, 1e9) == {}
    assert anew().every() == []


def test_threads_keep_and_list_at_once(anew: Callable[[], Met], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each device has its own turn to measure; all of them keep in one place."""
    monkeypatch.setattr(DiskCache, "put", lambda *given: True)
    monkeypatch.setattr(DiskCache, "entries", lambda cache: [])
    met, failed = anew(), []
    one = times(1e9)

    def keep() -> None:
        for at in range(3000):
            met.keep([replace(m, device=f"GPU {at}") for m in one])

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
