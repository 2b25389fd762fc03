"""What tests compile is kept by all that it depends on: a change of any of it compiles anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from multigemm.cuda.disk_cache import DiskCache
from tests.support import compiled_before as kept
from tests.support.compiled_before import compiled_before, files_of


@pytest.fixture(autouse=True)
def _own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "CACHE", DiskCache("compiled", tmp_path / "cache"))
    monkeypatch.setattr(kept, "ROOT", tmp_path)


def test_the_same_is_made_once_and_anything_else_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> int:
        made.append(len(made))
        return made[-1]

    assert [compiled_before(make, "-O1", given) for given in ("a", "a", "b", "a", ["a"])] == [0, 0, 1, 0, 2]
    monkeypatch.setattr(kept, "_installed", lambda: "another compiler")
    assert compiled_before(make, "-O1", "a") == 3


def test_what_fails_is_tried_again() -> None:
    def fail() -> int:
        raise ValueError("no kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no kernel"):
            compiled_before(fail, "x")
    assert compiled_before(lambda: 1, "x") == 1


def test_files_count_by_name_and_contents(tmp_path: Path) -> None:
    seen = set()
    for name, text in (("a.py", "1"), ("a.py", "2"), ("b.py", ""), ("deep/c.cu", "")):
        (tmp_path / "kernels" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "kernels" / name).write_text(text)
        files_of.cache_clear()
        seen.add(files_of("kernels"))
    assert len(seen) == 4
    files_of.cache_clear()
