"""Settings, the on-disk cache under attack, and the table of measurements."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import multigemm as mg
from multigemm import tuning
from multigemm.cache import DiskCache, fingerprint
from multigemm.nearest import distance, place_of
from multigemm.settings import Settings, parse
from multigemm.staging import equal_sizes
from multigemm.tuning import Measured, TuningTable, spec_key


def test_settings_are_read_with_their_types() -> None:
    got = parse({"MULTIGEMM_EMULATE": "yes", "MULTIGEMM_BACKEND": "triton, cpu", "MULTIGEMM_DUMP": "/x", "HOME": "y"})
    assert (got.emulate, got.backend, got.dump) == (True, ("triton", "cpu"), Path("/x"))
    assert parse({"MULTIGEMM_DUMP": " "}).dump is None
    assert Settings().cache


def test_bad_settings_name_themselves() -> None:
    with pytest.raises(mg.InvalidSetting, match="did you mean MULTIGEMM_EMULATE"):
        parse({"MULTIGEMM_EMULAT": "1"})
    with pytest.raises(mg.InvalidSetting, match="MULTIGEMM_CACHE='maybe'"):
        parse({"MULTIGEMM_CACHE": "maybe"})


def test_cache_returns_what_was_put(tmp_path: Path) -> None:
    cache = DiskCache("x", tmp_path)
    assert cache.get("k") is None
    assert cache.put("k", b"value")
    assert cache.get("k") == b"value"
    assert cache.put("k", b"")
    assert cache.get("k") == b""
    assert cache.clear() == 1
    assert cache.get("k") is None


@pytest.mark.parametrize("damage", [b"", b"x", b"multigemm-cache-1\n" + bytes(40), b"multigemm-cache-0\n" + bytes(99)])
def test_a_damaged_entry_reads_as_absent(tmp_path: Path, damage: bytes) -> None:
    cache = DiskCache("x", tmp_path)
    cache.put("k", b"value")
    cache.path("k").write_bytes(damage)
    assert cache.get("k") is None
    assert cache.put("k", b"again")
    assert cache.get("k") == b"again"


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    cache = DiskCache("x", tmp_path)
    cache.put("k", b"value")
    raw = bytearray(cache.path("k").read_bytes())
    raw[-1] ^= 1
    cache.path("k").write_bytes(raw)
    assert cache.get("k") is None


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not DiskCache("x", tmp_path / "file").put("k", b"v")


WRITER = """
import sys
from pathlib import Path
from multigemm.cache import DiskCache
cache = DiskCache("x", Path(sys.argv[1]))
value = sys.argv[2].encode() * 5000
for _ in range(100):
    assert cache.put("k", value)
    got = cache.get("k")
    assert got is not None and len(set(got)) == 1 and len(got) == 5000, got
"""


def test_concurrent_writers_never_show_half_an_entry(tmp_path: Path) -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), c], env=_env()) for c in "abcd"]
    assert [job.wait() for job in jobs] == [0] * 4
    assert len(DiskCache("x", tmp_path).entries()) == 1


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def test_fingerprint_separates_its_parts() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(1) == fingerprint("1")


def _spec(rows: int, groups: int = 2, n: int = 8) -> mg.ProblemSpec:
    a, b = torch.ones(rows, 16), torch.ones(groups, 16, n)
    return mg.GroupedGemmProblem(a, b, sizes=[rows // groups] * groups).spec


def test_tuning_finds_its_own_class_across_processes(tmp_path: Path) -> None:
    cpu = torch.device("cpu")
    TuningTable(DiskCache("t", tmp_path)).record(Measured("cpu", {"kernel": "blas"}, 5.0, "cpu", spec_key(_spec(1000))))
    fresh = TuningTable(DiskCache("t", tmp_path))
    found = fresh.find("cpu", _spec(600), cpu)
    assert found is not None
    assert (found.us, dict(found.config)) == (5.0, {"kernel": "blas"})
    assert fresh.find("cpu", _spec(3000), cpu) is None
    assert fresh.find("null", _spec(600), cpu) is None
    assert [m.us for m in fresh.own()] == [5.0]
    assert fresh.clear() == 1
    assert fresh.find("cpu", _spec(600), cpu) is None


def test_a_measurement_of_a_vanished_config_is_passed_over() -> None:
    tuning.table.cache_clear()
    spec = _spec(128, 4)
    tuning.table().record(Measured("cpu", {"kernel": "gone"}, 5.0, "cpu", spec_key(spec)))
    problem = mg.GroupedGemmProblem(torch.ones(128, 16), torch.ones(4, 16, 8), sizes=[32] * 4)
    assert "heuristic" in mg.plan(problem, "cpu").why
    tuning.table.cache_clear()


def _record(table: TuningTable, key: str, **us: float) -> None:
    for name, time in us.items():
        table.record(Measured(name, {}, time, "cpu", key))


def test_a_class_that_was_not_measured_is_judged_by_those_around_it(tmp_path: Path) -> None:
    table, cpu = TuningTable(DiskCache("t", tmp_path)), torch.device("cpu")
    _record(table, spec_key(_spec(1024)), cpu=2.0, null=1.0)
    _record(table, spec_key(_spec(65536)), cpu=50.0, null=100.0)
    large, small = (
        {e.backend: e.slowness for e in table.estimates(spec, cpu)} for spec in (_spec(32768), _spec(512, 4))
    )
    assert large["cpu"] < 1.2 < 1.8 < large["null"] < 2.0
    assert small["null"] < 1.2 < 1.8 < small["cpu"] < 2.0
    other = mg.GroupedGemmProblem(torch.ones(1024, 16).double(), torch.ones(2, 16, 8).double(), sizes=[512] * 2).spec
    assert table.estimates(other, cpu) == []


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"schema": 2}', b'{"schema": 1, "us": 3}', b"\xff"])
def test_entries_that_this_version_cannot_read_are_as_good_as_none(tmp_path: Path, raw: bytes) -> None:
    cache = DiskCache("t", tmp_path)
    spec, cpu = _spec(1000), torch.device("cpu")
    cache.put(fingerprint(tuning.SCHEMA, f"cpu|{spec_key(spec)}|cpu"), raw, ".json")
    cache.put("foreign", raw, ".json")
    table = TuningTable(cache)
    assert table.find("cpu", spec, cpu) is None
    assert table.own() == []
    assert table.estimates(spec, cpu) == []


def test_times_with_sizes_on_the_device_stand_in_for_sizes_on_the_host(tmp_path: Path) -> None:
    table, cpu = TuningTable(DiskCache("t", tmp_path)), torch.device("cpu")
    host = replace(_spec(1000), device_sizes=False)
    device = replace(host, device_sizes=True)
    _record(table, spec_key(device), cpu=5.0, null=10.0)
    _record(table, spec_key(host), null=2.5)
    _record(table, spec_key(host, equal=True), null=1.0)
    kinds = ((device, False), (host, False), (host, True))
    exact = [[table.find(name, spec, cpu, equal).us for name in ("cpu", "null")] for spec, equal in kinds]  # type: ignore[union-attr]
    assert exact == [[5.0, 10.0], [5.0, 2.5], [5.0, 1.0]]
    near = [
        {e.backend: round(e.slowness, 6) for e in table.estimates(replace(spec, groups=64), cpu, equal)}
        for spec, equal in kinds
    ]
    assert near == [{"cpu": 1.0, "null": 2.0}, {"cpu": 2.0, "null": 1.0}, {"cpu": 5.0, "null": 1.0}]


def test_measured_classes_on_disk_are_found_by_a_new_process(tmp_path: Path) -> None:
    _record(TuningTable(DiskCache("t", tmp_path)), spec_key(_spec(1024)), cpu=5.0, null=6.0)
    found = TuningTable(DiskCache("t", tmp_path)).estimates(_spec(8192), torch.device("cpu"))
    assert {e.backend: round(e.slowness, 6) for e in found} == {"cpu": 1.0, "null": 1.2}


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


def test_keys_are_points_with_distances() -> None:
    near, far = place_of(spec_key(_spec(1000))), place_of(spec_key(_spec(4000)))
    assert near is not None
    assert far is not None
    assert list(near.extents) == [512, 8, 16, 2]
    assert distance(near, near) == 0.0
    assert distance(near, far) == 2.0
    assert distance(near, replace(near, precision="tf32")) is None
    assert distance(near, replace(near, form="jagged_k")) is None
    assert distance(near, replace(near, form="masked")) == 3.0
    assert place_of("jagged_m g2") is None
    ragged = place_of("per_group g3 m* n* k* t64 float32/row2 float32/col/shared float32/row ieee host-sizes")
    assert ragged is not None
    assert ragged.operands[1].shared
    assert ragged.operands[0].align == 2
    assert distance(near, ragged) == pytest.approx(
        3.0 + 3.0 + 1.0 + 1.0 + 1.0 + abs(math.log2(512 / (64 / 3))) + 0.5 * math.log2(1.5)
    )


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    cache = DiskCache("x", tmp_path)
    monkeypatch.setattr(os, "replace", full)
    assert not cache.put("k", b"value")
    assert list(cache.folder.iterdir()) == []


def test_clear_removes_what_a_broken_off_writer_left(tmp_path: Path) -> None:
    cache = DiskCache("x", tmp_path)
    cache.put("k", b"value")
    (cache.folder / ".k.half").write_bytes(b"v")
    assert cache.clear() == 1
    assert list(cache.folder.iterdir()) == []


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    root = Settings().cache_dir
    assert not DiskCache("x", root).put("k", b"v")
    assert DiskCache("x", root).get("k") is None
    with pytest.raises(mg.InvalidSetting, match="no such home"):
        parse({"MULTIGEMM_CACHE_DIR": "~nobody-of-this-name/x"})


def test_shipped_files_are_read_and_name_real_configs() -> None:
    for measured in TuningTable()._shipped.values():
        assert measured.us > 0
        assert json.dumps(dict(measured.config))
