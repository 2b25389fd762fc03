"""The table of measurements: its classes, what a new process finds, and configs that come back."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import multigemm as mg
from multigemm.backends.triton.config import Config
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.planning.staging import equal_sizes
from multigemm.select import table as tuning
from multigemm.select.measured import SCHEMA, Measured, config_text, fold, unfold
from multigemm.select.table import TuningTable, spec_key
from tests.fake_backends import spec_of_rows


def test_tuning_finds_its_own_class_across_processes(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    TuningTable(DiskCache("t", tmp_path)).record(
        Measured("cpu", {"kernel": "blas"}, 5.0, "cpu", spec_key(spec_of_rows(1000)))
    )
    fresh = TuningTable(DiskCache("t", tmp_path))
    found = fresh.find("cpu", spec_of_rows(600), cpu)
    assert found is not None
    assert (found.us, dict(found.config)) == (5.0, {"kernel": "blas"})
    assert fresh.find("cpu", spec_of_rows(3000), cpu) is None
    assert fresh.find("null", spec_of_rows(600), cpu) is None
    assert [m.us for m in fresh.own()] == [5.0]
    assert DiskCache("t", tmp_path).clear() == 1
    assert TuningTable(DiskCache("t", tmp_path)).find("cpu", spec_of_rows(600), cpu) is None


def test_an_ordinary_group_is_exact_the_mean_or_the_largest_and_the_busiest_processor_follows() -> None:
    packed = mg.GroupedGemmProblem(torch.ones(600, 5), torch.ones(4, 5, 7), offsets=[0, 1, 2, 3, 600]).spec
    assert [packed.usual(d) for d in ("m", "n", "k")] == [packed.total // packed.groups, 7, 5]
    lists = mg.GroupedGemmProblem([torch.ones(2, 9), torch.ones(6, 8)], [torch.ones(9, 3), torch.ones(8, 3)]).spec
    assert [lists.usual(d) for d in ("m", "n", "k")] == [lists.largest, 3, lists.largest]
    even = replace(packed, m=100, n=100, groups=4)
    assert even.busiest(64, 64, 132) == 64 * 64
    assert even.busiest(64, 64, 8) == 2 * 64 * 64
    assert even.busiest(32, 128, 8) == 2 * 32 * 128


def test_a_config_comes_back_as_it_was(tmp_path: Path) -> None:
    """JSON turns tuples into lists, which equal no field of a config: tuned ones would be passed over."""
    config = Config(pack=("a",))
    kept = Measured("triton", asdict(config), 5.0, "cpu", spec_key(spec_of_rows(1000)))
    TuningTable(DiskCache("t", tmp_path)).record(kept)
    found = TuningTable(DiskCache("t", tmp_path)).find("triton", spec_of_rows(600), torch.device("cpu"))
    assert found is not None
    (shared,) = (m for entry in json.loads(json.dumps(fold([kept]))) for m in unfold(entry, "file"))
    for again in (found, shared):
        assert Config(**again.config) == config
        assert config_text(again.config) == config_text(config)


def test_a_measurement_of_a_vanished_config_is_passed_over() -> None:
    tuning.table.cache_clear()
    spec = spec_of_rows(128, 4)
    tuning.table().record(Measured("cpu", {"kernel": "gone"}, 5.0, "cpu", spec_key(spec)))
    problem = mg.GroupedGemmProblem(torch.ones(128, 16), torch.ones(4, 16, 8), sizes=[32] * 4)
    assert "heuristic" in mg.plan(problem, "cpu").why
    tuning.table.cache_clear()


def test_measurements_are_folded_by_class_and_come_back() -> None:
    host = "jagged_m g2 m* n8 k16 t64 float32/row float32/row float32/row ieee host-sizes"
    device = host.replace("host-sizes", "device-sizes")
    given = [
        Measured("x", {}, 3.0, "cpu", device, ran="16", groups=2, flops=512.0, footprint=(64, 128, 2)),
        Measured("y", {"size": 4}, 2.0, "cpu", device, {"Tile(8)": "wrong"}, groups=2, flops=512.0),
        Measured("y", {"size": 4}, 1.0, "cpu", host, groups=2, flops=512.0),
    ]
    copied = replace(given[0], key=host)  # what the class of the device says already is left out
    entries = fold([*given, copied])
    assert len(entries) == 2
    assert [replace(m, source="") for entry in entries for m in unfold(entry, "file")] == given
    assert unfold({"backend": "x", "config": {}, "us": 3.0, "device": "cpu", "key": device}, "")[0].us == 3.0
    for wrong in ({"us": -1.0}, {"us": 1.0, "more": 2}, {"us": 1.0, "footprint": [64, 0, 1]}):
        with pytest.raises(ValueError, match=r"no measurement|other fields"):
            unfold({"device": "cpu", "key": device, "backends": {"x": wrong}}, "")


def _record(table: TuningTable, key: str, **us: float) -> None:
    for name, time in us.items():
        table.record(Measured(name, {}, time, "cpu", key))


def test_a_class_that_was_not_measured_is_judged_by_those_around_it(tmp_path: Path) -> None:
    table, cpu = TuningTable(DiskCache("t", tmp_path)), torch.device("cpu")
    _record(table, spec_key(spec_of_rows(1024)), cpu=2.0, null=1.0)
    _record(table, spec_key(spec_of_rows(65536)), cpu=50.0, null=100.0)
    large, small = (
        {e.backend: e.slowness for e in table.estimates(spec, cpu)}
        for spec in (spec_of_rows(32768), spec_of_rows(512, 4))
    )
    assert large["cpu"] == 1.0 < 1.3 < large["null"] < 2.0
    assert small["null"] == 1.0 < 1.3 < small["cpu"] < 2.0
    other = mg.GroupedGemmProblem(torch.ones(1024, 16).double(), torch.ones(2, 16, 8).double(), sizes=[512] * 2).spec
    assert table.estimates(other, cpu) == []


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"schema": 2}', b'{"schema": 1, "us": 3}', b"\xff"])
def test_entries_that_this_version_cannot_read_are_as_good_as_none(tmp_path: Path, raw: bytes) -> None:
    cache = DiskCache("t", tmp_path)
    spec, cpu = spec_of_rows(1000), torch.device("cpu")
    cache.put(fingerprint(SCHEMA, f"cpu|{spec_key(spec)}|cpu"), raw, ".json")
    cache.put("foreign", raw, ".json")
    table = TuningTable(cache)
    assert table.find("cpu", spec, cpu) is None
    assert table.own() == []
    assert table.estimates(spec, cpu) == []


def test_times_with_sizes_on_the_device_stand_in_for_sizes_on_the_host(tmp_path: Path) -> None:
    table, cpu = TuningTable(DiskCache("t", tmp_path)), torch.device("cpu")
    host = replace(spec_of_rows(1000), device_sizes=False)
    device = replace(host, device_sizes=True)
    _record(table, spec_key(device), cpu=5.0, null=10.0)
    _record(table, spec_key(host), null=2.5)
    _record(table, spec_key(host, equal=True), null=1.0)
    kinds = ((device, False), (host, False), (host, True))
    exact = [[table.find(name, spec, cpu, equal).us for name in ("cpu", "null")] for spec, equal in kinds]  # type: ignore[union-attr]
    assert exact == [[5.0, 10.0], [5.0, 2.5], [5.0, 1.0]]
    near = [
        {e.backend: round(e.slowness, 2) for e in table.estimates(replace(spec, groups=64), cpu, equal)}
        for spec, equal in kinds
    ]
    assert near == [{"cpu": 1.0, "null": 2.0}, {"cpu": 2.0, "null": 1.0}, {"cpu": 5.0, "null": 1.0}]


def test_measured_classes_on_disk_are_found_by_a_new_process(tmp_path: Path) -> None:
    _record(TuningTable(DiskCache("t", tmp_path)), spec_key(spec_of_rows(1024)), cpu=5.0, null=6.0)
    found = TuningTable(DiskCache("t", tmp_path)).estimates(spec_of_rows(8192), torch.device("cpu"))
    assert {e.backend: round(e.slowness, 2) for e in found} == {"cpu": 1.0, "null": 1.2}


@pytest.mark.parametrize(
    ("words", "equal"),
    [
        ({"sizes": [4, 4]}, True),
        ({"sizes": [3, 5]}, False),
        ({"sizes": [2, 4]}, False),
        ({"offsets": [1, 4, 7]}, True),
        ({"sizes": [0, 0]}, True),
        ({"sizes": torch.tensor([4, 4])}, False),
    ],
)
def test_the_host_sees_whether_its_sizes_are_equal(words: dict[str, object], equal: bool) -> None:
    posed = mg.GroupedGemmProblem(torch.ones(8, 16), torch.ones(2, 16, 4), **words)  # type: ignore[arg-type]
    assert equal_sizes(posed) is equal


def test_a_gpu_without_a_table_learns_from_another_of_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, cpu = spec_of_rows(8192), torch.device("cpu")
    times = {"slow": {"us": 20.0}, "fast": {"us": 10.0}}
    entry = {"device": "GPU A", "key": spec_key(spec_of_rows(8192, n=16)), "backends": times}
    shipped = {"schema": SCHEMA, "origin": {"device": "GPU A", "capability": "9.0"}, "entries": [entry]}
    monkeypatch.setattr(tuning, "_tables", lambda: [("a.json", shipped)])
    monkeypatch.setattr(tuning, "device_name", lambda device: "GPU B")
    monkeypatch.setattr(tuning, "capability", lambda device: "8.0")
    table = TuningTable(DiskCache("t", tmp_path))
    assert table.estimates(spec, cpu) == []
    monkeypatch.setattr(tuning, "capability", lambda device: "9.0")
    found = {e.backend: e for e in table.estimates(spec, cpu)}
    assert found["slow"].slowness == pytest.approx(2.0, rel=0.1)
    assert found["fast"].source.endswith(" on GPU A")
    assert table.find("fast", spec_of_rows(8192, n=16), cpu) is None, "its times are those of another GPU"
    for name, us in (("slow", 10.0), ("fast", 30.0)):
        table.record(Measured(name, {}, us, "GPU B", spec_key(spec_of_rows(8192, n=16))))
    assert {e.backend: round(e.slowness) for e in table.estimates(spec, cpu)} == {"slow": 1, "fast": 3}


def test_shipped_files_are_read_and_name_real_configs() -> None:
    for measured in TuningTable()._shipped.values():
        assert measured.us > 0
        assert json.dumps(dict(measured.config))
