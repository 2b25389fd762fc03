"""Settings, the on-disk cache under attack, and the table of measurements."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest
import torch

import multigemm as mg
from multigemm import nearest, tuning
from multigemm.backends.triton.config import Config
from multigemm.cache import DiskCache, fingerprint
from multigemm.measured import SCHEMA, Measured, config_text, fold, unfold
from multigemm.nearest import ANY_OFFSET, NOISE, Sample, Space, estimates, place_of, solved
from multigemm.settings import Settings, parse
from multigemm.staging import equal_sizes
from multigemm.tuning import TuningTable, spec_key

KEY = fingerprint("an entry")


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


def test_a_setting_is_near_by_its_own_name() -> None:
    """All begin alike, which makes none of them near."""
    with pytest.raises(mg.InvalidSetting, match="unknown setting MULTIGEMM_FOO; known: MULTIGEMM_BACKEND, "):
        parse({"MULTIGEMM_FOO": "1"})
    with pytest.raises(mg.InvalidSetting, match="did you mean MULTIGEMM_CACHE_DIR"):
        parse({"MULTIGEMM_CACHEDIR": "x"})


def test_cache_returns_what_was_put(tmp_path: Path) -> None:
    cache = DiskCache("x", tmp_path)
    assert cache.get(KEY) is None
    assert cache.put(KEY, b"value")
    assert cache.get(KEY) == b"value"
    assert cache.put(KEY, b"")
    assert cache.get(KEY) == b""
    assert cache.clear() == 1
    assert cache.get(KEY) is None


@pytest.mark.parametrize("damage", [b"", b"x", b"multigemm-cache-1\n" + bytes(40), b"multigemm-cache-0\n" + bytes(99)])
def test_a_damaged_entry_reads_as_absent(tmp_path: Path, damage: bytes) -> None:
    cache = DiskCache("x", tmp_path)
    cache.put(KEY, b"value")
    cache.path(KEY).write_bytes(damage)
    assert cache.get(KEY) is None
    assert cache.put(KEY, b"again")
    assert cache.get(KEY) == b"again"


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    cache = DiskCache("x", tmp_path)
    cache.put(KEY, b"value")
    raw = bytearray(cache.path(KEY).read_bytes())
    raw[-1] ^= 1
    cache.path(KEY).write_bytes(raw)
    assert cache.get(KEY) is None


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not DiskCache("x", tmp_path / "file").put(KEY, b"v")


WRITER = """
import sys
from pathlib import Path
from multigemm.cache import DiskCache, fingerprint
KEY = fingerprint("k")
cache = DiskCache("x", Path(sys.argv[1]))
value = sys.argv[2].encode() * 5000
for _ in range(100):
    assert cache.put(KEY, value)
    got = cache.get(KEY)
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
    assert DiskCache("t", tmp_path).clear() == 1
    assert TuningTable(DiskCache("t", tmp_path)).find("cpu", _spec(600), cpu) is None


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
    kept = Measured("triton", asdict(config), 5.0, "cpu", spec_key(_spec(1000)))
    TuningTable(DiskCache("t", tmp_path)).record(kept)
    found = TuningTable(DiskCache("t", tmp_path)).find("triton", _spec(600), torch.device("cpu"))
    assert found is not None
    (shared,) = (m for entry in json.loads(json.dumps(fold([kept]))) for m in unfold(entry, "file"))
    for again in (found, shared):
        assert Config(**again.config) == config
        assert config_text(again.config) == config_text(config)


def test_a_measurement_of_a_vanished_config_is_passed_over() -> None:
    tuning.table.cache_clear()
    spec = _spec(128, 4)
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
    _record(table, spec_key(_spec(1024)), cpu=2.0, null=1.0)
    _record(table, spec_key(_spec(65536)), cpu=50.0, null=100.0)
    large, small = (
        {e.backend: e.slowness for e in table.estimates(spec, cpu)} for spec in (_spec(32768), _spec(512, 4))
    )
    assert large["cpu"] == 1.0 < 1.3 < large["null"] < 2.0
    assert small["null"] == 1.0 < 1.3 < small["cpu"] < 2.0
    other = mg.GroupedGemmProblem(torch.ones(1024, 16).double(), torch.ones(2, 16, 8).double(), sizes=[512] * 2).spec
    assert table.estimates(other, cpu) == []


@pytest.mark.parametrize("raw", [b"", b"[1]", b'{"schema": 2}', b'{"schema": 1, "us": 3}', b"\xff"])
def test_entries_that_this_version_cannot_read_are_as_good_as_none(tmp_path: Path, raw: bytes) -> None:
    cache = DiskCache("t", tmp_path)
    spec, cpu = _spec(1000), torch.device("cpu")
    cache.put(fingerprint(SCHEMA, f"cpu|{spec_key(spec)}|cpu"), raw, ".json")
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
        {e.backend: round(e.slowness, 2) for e in table.estimates(replace(spec, groups=64), cpu, equal)}
        for spec, equal in kinds
    ]
    assert near == [{"cpu": 1.0, "null": 2.0}, {"cpu": 2.0, "null": 1.0}, {"cpu": 5.0, "null": 1.0}]


def test_measured_classes_on_disk_are_found_by_a_new_process(tmp_path: Path) -> None:
    _record(TuningTable(DiskCache("t", tmp_path)), spec_key(_spec(1024)), cpu=5.0, null=6.0)
    found = TuningTable(DiskCache("t", tmp_path)).estimates(_spec(8192), torch.device("cpu"))
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


def _far(x: str, y: str) -> float:
    places = [place_of(x), place_of(y)]
    return -math.log(Space([Sample(x), Sample(y)], [p for p in places if p]).alike("", [0, 1])[0, 1])


def test_keys_are_points_with_distances() -> None:
    near, far = spec_key(_spec(1000)), spec_key(_spec(4000))
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


def test_a_failed_write_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    cache = DiskCache("x", tmp_path)
    monkeypatch.setattr(os, "replace", full)
    assert not cache.put(KEY, b"value")
    assert list(cache.folder.iterdir()) == []


def test_clear_removes_what_a_broken_off_writer_left(tmp_path: Path) -> None:
    cache = DiskCache("x", tmp_path)
    cache.put(KEY, b"value")
    (cache.folder / f".{KEY}.half").write_bytes(b"v")
    assert cache.clear() == 1
    assert list(cache.folder.iterdir()) == []


def test_clear_leaves_what_is_not_of_the_cache(tmp_path: Path) -> None:
    """The folder of the cache may be one that holds other things, by intent or by a slip."""
    cache = DiskCache("x", tmp_path)
    assert cache.put(KEY, b"value")
    others = [cache.folder / name for name in ("letter.txt", ".profile", "0" * 31 + ".bin", KEY)]
    for path in others:
        path.write_text("mine")
    (cache.folder / "folder").mkdir()
    assert [path.stem for path in cache.entries()] == [KEY]
    assert cache.clear() == 1
    assert sorted(cache.folder.iterdir()) == sorted([*others, cache.folder / "folder"])


def test_a_user_without_a_home_has_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def none() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", none)
    root = Settings().cache_dir
    assert not DiskCache("x", root).put(KEY, b"v")
    assert DiskCache("x", root).get(KEY) is None
    with pytest.raises(mg.InvalidSetting, match="no such home"):
        parse({"MULTIGEMM_CACHE_DIR": "~nobody-of-this-name/x"})


def test_a_gpu_without_a_table_learns_from_another_of_its_generation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, cpu = _spec(8192), torch.device("cpu")
    times = {"slow": {"us": 20.0}, "fast": {"us": 10.0}}
    entry = {"device": "GPU A", "key": spec_key(_spec(8192, n=16)), "backends": times}
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
    assert table.find("fast", _spec(8192, n=16), cpu) is None, "its times are those of another GPU"
    for name, us in (("slow", 10.0), ("fast", 30.0)):
        table.record(Measured(name, {}, us, "GPU B", spec_key(_spec(8192, n=16))))
    assert {e.backend: round(e.slowness) for e in table.estimates(spec, cpu)} == {"slow": 1, "fast": 3}


def test_shipped_files_are_read_and_name_real_configs() -> None:
    for measured in TuningTable()._shipped.values():
        assert measured.us > 0
        assert json.dumps(dict(measured.config))


def test_equations_are_solved_as_exactly_as_their_condition_allows() -> None:
    places = np.random.default_rng(0).normal(size=(120, 4))
    apart = np.sqrt(((places[:, None] - places[None]) ** 2).sum(-1))
    matrix = np.exp(-apart / 10) + ANY_OFFSET + NOISE * np.eye(120)
    truth = np.random.default_rng(1).normal(size=120)
    assert solved(matrix, matrix @ truth) == pytest.approx(truth, abs=1e-5)
    assert solved(np.array([[4.0]]), np.array([2])) == pytest.approx([0.5])
