"""The on-disk cache under attack."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

import multigemm as mg
from multigemm.cuda import disk_cache
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.settings import Settings, parse

KEY = fingerprint("an entry")


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


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> dict[Path, bool]:
    """No folder has been judged yet."""
    verdicts: dict[Path, bool] = {}
    monkeypatch.setattr(disk_cache, "_verdicts", verdicts)
    return verdicts


def test_a_cache_makes_its_folders_for_its_user_alone(tmp_path: Path, judged: dict[Path, bool]) -> None:
    before = os.umask(0)
    try:
        assert DiskCache("x", tmp_path / "new").put(KEY, b"value")
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in (tmp_path / "new", tmp_path / "new" / "x")] == [0o700] * 2


@pytest.mark.parametrize("mode", [0o770, 0o720, 0o702, 0o777])
@pytest.mark.parametrize("above", [False, True], ids=["folder", "above it"])
def test_a_folder_that_others_may_write_is_not_used(
    mode: int, above: bool, tmp_path: Path, judged: dict[Path, bool]
) -> None:
    cache = DiskCache("x", tmp_path / "root")
    assert cache.put(KEY, b"value")
    place = cache.folder.parent if above else cache.folder
    place.chmod(mode)
    judged.clear()
    with pytest.warns(RuntimeWarning, match=rf"{place}: .*mode {mode:o}.*MULTIGEMM_CACHE_DIR"):
        assert cache.get(KEY) is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not cache.put(fingerprint("another"), b"value") and len(cache.entries()) == 1
        assert cache.get(KEY) is None
    place.chmod(0o755)
    judged.clear()
    assert cache.get(KEY) == b"value"


def test_a_shared_folder_above_with_a_sticky_bit_is_used(tmp_path: Path, judged: dict[Path, bool]) -> None:
    """As /tmp: nobody can replace what another one has made there."""
    (tmp_path / "root").mkdir()
    (tmp_path / "root").chmod(0o1777)
    assert DiskCache("x", tmp_path / "root").put(KEY, b"value")
    assert DiskCache("x", tmp_path / "root").get(KEY) == b"value"


@pytest.mark.parametrize("above", [False, True], ids=["folder", "above it"])
def test_a_folder_of_another_user_is_not_used(
    above: bool, tmp_path: Path, judged: dict[Path, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = DiskCache("x", tmp_path / "root")
    assert cache.put(KEY, b"value") and cache.get(KEY) == b"value"
    judged.clear()
    place = cache.folder.parent if above else cache.folder
    owners = {path: os.stat(path).st_uid for path in (cache.folder, cache.folder.parent)}
    if os.geteuid() == 0:
        os.chown(place, 4321, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: owners[place] + 1)
    with pytest.warns(RuntimeWarning, match=r"belongs to user \d+, not to user \d+.*MULTIGEMM_CACHE_DIR"):
        assert cache.get(KEY) is None
    assert not cache.put(KEY, b"value")


def test_a_folder_of_root_is_used_by_all(
    tmp_path: Path, judged: dict[Path, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one with kernels that were compiled for a whole machine."""
    cache = DiskCache("x", tmp_path / "root")
    cache.put(KEY, b"value")
    judged.clear()
    true, user = os.stat, os.geteuid() + 7
    monkeypatch.setattr(os, "geteuid", lambda: user)

    def stat_of_root(path: Path) -> os.stat_result:
        found = true(path)
        return os.stat_result((*found[:4], 0, *found[5:10]))

    monkeypatch.setattr(os, "stat", stat_of_root)
    assert cache.is_safe


def test_a_folder_is_judged_once(tmp_path: Path, judged: dict[Path, bool], monkeypatch: pytest.MonkeyPatch) -> None:
    cache, asked = DiskCache("x", tmp_path / "root"), list[Path]()
    true = disk_cache.fault_of

    def asking(folder: Path) -> str:
        asked.append(folder)
        return true(folder)

    monkeypatch.setattr(disk_cache, "fault_of", asking)
    assert cache.get(KEY) is None
    asked.clear()
    cache.put(KEY, b"value")
    for _ in range(5):
        assert cache.get(KEY) == b"value"
    assert asked == [cache.folder, cache.folder.parent]


def test_an_unwritable_folder_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert not DiskCache("x", tmp_path / "file").put(KEY, b"v")


WRITER = """
import sys
import warnings
from pathlib import Path
from multigemm.cuda import disk_cache
from multigemm.cuda.disk_cache import DiskCache, fingerprint
KEY = fingerprint("k")
cache = DiskCache("x", Path(sys.argv[1]))
value = sys.argv[2].encode() * 5000
for _ in range(100):
    assert cache.put(KEY, value)
    got = cache.get(KEY)
    assert got is not None and len(set(got)) == 1 and len(got) == 5000, got
"""


@pytest.mark.slow
def test_concurrent_writers_never_show_half_an_entry(tmp_path: Path) -> None:
    jobs = [subprocess.Popen([sys.executable, "-c", WRITER, str(tmp_path), c], env=_env()) for c in "abcd"]
    assert [job.wait() for job in jobs] == [0] * 4
    assert len(DiskCache("x", tmp_path).entries()) == 1


def _env() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def test_fingerprint_separates_its_parts() -> None:
    assert fingerprint("ab", "c") != fingerprint("a", "bc")
    assert fingerprint(1) == fingerprint("1")


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
