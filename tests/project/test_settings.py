"""Settings: read with their types, refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest

import multigemm as mg
from multigemm.settings import Settings, dump, parse, settings


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


def test_compiled_kernels_are_dumped_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for folder in ("", str(tmp_path / "kernels")):
        monkeypatch.setenv("MULTIGEMM_DUMP", folder)
        settings.cache_clear()
        dump("one", "source", "ptx", b"cubin")
    settings.cache_clear()
    kept = {path.suffix: path.read_text() for path in tmp_path.rglob("one.*")}
    assert (kept[".txt"], kept[".ptx"], kept[".cubin"]) == ("source", "ptx", "cubin")
