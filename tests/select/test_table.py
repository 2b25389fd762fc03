"""The table of measurements: its classes, what a new process finds, and configs that come back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton.config import Config
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.select import table as tuning
from multigemm.select.problem_class import ProblemClass
from multigemm.select.table import SCHEMA, Entry, Measured, TuningTable, decoded
from tests.support.trial_cases import class_from

CPU = torch.device("cpu")
HOST = class_from("jagged_m g2 m* n8 k16 t1024 float32/row float32/row float32/row ieee host-sizes")


def entry(c: ProblemClass = HOST, config: dict[str, Any] | None = None, **us: float) -> Entry:
    return Entry("cpu", str(c), {name: Measured(took, config or {}) for name, took in us.items()})


def us_of(table: TuningTable, name: str, c: ProblemClass = HOST) -> float | None:
    found = table.find(c, CPU).get(name)
    return None if found is None else found.us


def test_a_new_process_finds_what_was_kept(tmp_path: Path) -> None:
    TuningTable(tmp_path).keep([entry(config={"kernel": "blas"}, cpu=5.0)])
    fresh = TuningTable(tmp_path)
    assert fresh.find(HOST, CPU) == {"cpu": Measured(5.0, {"kernel": "blas"}, source="own cache")}
    assert us_of(fresh, "cpu", replace(HOST, total=724)) is None
    assert us_of(fresh, "null") is None
    assert [list(e.backends) for e in fresh.own.entries()] == [["cpu"]]
    assert DiskCache("tuning", tmp_path).clear() == 1
    assert us_of(TuningTable(tmp_path), "cpu") is None


def test_backends_that_were_tuned_earlier_stay_in_the_table(tmp_path: Path) -> None:
    table = TuningTable(tmp_path)
    table.keep([entry(cpu=5.0, null=9.0)])
    table.keep([entry(cpu=4.0)])
    assert [us_of(TuningTable(tmp_path), name) for name in ("cpu", "null")] == [4.0, 9.0]


def test_where_the_disk_takes_nothing_that_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tuning").write_text("in the way")
    table = TuningTable(tmp_path)
    assert "cannot be written" in table.keep([entry(cpu=5.0)])
    assert us_of(table, "cpu") == 5.0


def test_a_config_comes_back_as_it_was(tmp_path: Path) -> None:
    """JSON turns tuples into lists, which equal no field of a config: tuned ones would be passed over."""
    config = Config(pack=("a",))
    kept = entry(config=asdict(config), triton=5.0)
    TuningTable(tmp_path).keep([kept])
    found = TuningTable(tmp_path).find(HOST, CPU)
    shared = decoded(json.loads(json.dumps(kept.encoded())), "file").backends["triton"]
    for again in (found["triton"], shared):
        assert Config(**again.config) == config


def test_a_measurement_of_a_vanished_config_is_passed_over() -> None:
    tuning.table.cache_clear()
    problem = mg.GroupedGemmProblem(torch.ones(128, 16), torch.ones(4, 16, 8), sizes=[32] * 4)
    tuning.table().keep([entry(replace(HOST, groups=4, total=128), {"kernel": "gone"}, cpu=5.0)])
    assert "heuristic" in mg.plan(problem, "cpu").why
    tuning.table.cache_clear()


@pytest.mark.parametrize(
    "wrong",
    [
        {"backends": {"x": {"us": -1.0}}},
        {"backends": {"x": {"us": "1"}}},
        {"backends": {"x": {"us": 1.0, "more": 2}}},
        {"backends": 3},
        {"key": 3},
        {"chosen": "y"},
        {"device": 3},
        {"more": 1},
    ],
)
def test_what_is_no_entry_is_refused(wrong: dict[str, Any]) -> None:
    raw = {"device": "cpu", "key": str(HOST), "backends": {"x": {"us": 1.0}}}
    assert decoded(raw, "file").backends == {"x": Measured(1.0, source="file")}
    with pytest.raises(ValueError, match="no entry of a table"):
        decoded({**raw, **wrong}, "file")


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"schema": 2}', b'{"us": 3}', b"\xff", b"null"])
def test_entries_that_this_version_cannot_read_are_as_good_as_none(tmp_path: Path, raw: bytes) -> None:
    cache = DiskCache("tuning", tmp_path)
    cache.put(fingerprint(SCHEMA, "cpu", str(HOST)), raw, ".json")
    table = TuningTable(tmp_path)
    assert us_of(table, "cpu") is None
    assert table.own.entries() == []


def test_times_with_sizes_on_the_device_stand_in_for_sizes_on_the_host(tmp_path: Path) -> None:
    table = TuningTable(tmp_path)
    device, equal = replace(HOST, where="device-sizes"), replace(HOST, where="equal-sizes")
    table.keep([entry(device, cpu=5.0, null=10.0), entry(HOST, null=2.5), entry(equal, null=1.0)])
    found = [[us_of(table, name, c) for name in ("cpu", "null")] for c in (device, HOST, equal)]
    assert found == [[5.0, 10.0], [5.0, 2.5], [5.0, 1.0]]


def test_own_entries_win_over_shipped_ones_and_other_devices_count_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(entry(replace(HOST, n=16), cpu=1.0), device="GPU")
    raws = [entry(cpu=20.0, null=10.0).encoded(), other.encoded()]
    (tmp_path / "a.json").write_text(json.dumps({"entries": raws}))
    monkeypatch.setattr(tuning, "SHIPPED", tmp_path)
    table = TuningTable(tmp_path)
    assert table.find(HOST, CPU)["null"] == Measured(10.0, source="shipped a.json")
    table.keep([entry(cpu=7.0)])
    assert [us_of(table, name) for name in ("cpu", "null")] == [7.0, 10.0]
    assert us_of(table, "cpu", replace(HOST, n=16)) is None


def test_choices_go_with_the_versions_and_the_first_one_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = replace(entry(x=1.0, y=2.0), chosen="x", date="2026-01-02", failed={"z": "why"})
    assert TuningTable(tmp_path).keep_choice(first) == first
    second = replace(entry(x=2.0, y=1.0), chosen="y")
    kept = replace(first, backends={n: replace(m, source="own cache") for n, m in first.backends.items()})
    assert TuningTable(tmp_path).keep_choice(second) == kept
    assert TuningTable(tmp_path).choices.entries() == [kept]
    assert TuningTable(tmp_path).choice(HOST, CPU, ["x", "z"]) == kept
    assert TuningTable(tmp_path).choice(HOST, CPU, ["x", "new"]) is None
    third = replace(entry(x=2.0, y=1.0, new=3.0), chosen="y")
    assert TuningTable(tmp_path).keep_choice(third) == third
    monkeypatch.setattr(mg, "__version__", "another")
    assert TuningTable(tmp_path).choice(HOST, CPU, []) is None
