"""Files and folders that documentation and docstrings name exist."""

from __future__ import annotations

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = (".github", "backends", "benchmarks", "docs", "examples", "multigemm", "reference", "tests")
FILES = sorted(
    [x for x in ROOT.iterdir() if x.is_file()]
    + [x for folder in FOLDERS for x in (ROOT / folder).rglob("*") if x.is_file() and "__pycache__" not in x.parts]
)
PATHS = [f"/{x.relative_to(ROOT)}" for x in FILES]
PAGES = [x for x in FILES if x.suffix == ".md" and x.name != "CHANGELOG.md"]  # which tells of files that are gone
SOURCES = [x for x in FILES if x.suffix in {".py", ".cu", ".cuh"} and x != Path(__file__)]
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
QUOTED = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
FILE = re.compile(r"([\w.*/-]*\w\.(?:py|cuh?|md|json|toml|svg|yml))(?::\d+)?")
FOLDER = re.compile(r"[\w.*-]+(?:/[\w.*-]+)*/")
WRITTEN = {"multigemm-bench/"}
"""What a command writes."""


def exists(path: str) -> bool:
    """Whether files of the repository end in a path, in which * stands for anything, or lie in it if it is a folder."""
    pattern = f"*/{path}*" if path.endswith("/") else f"*/{path}"
    return path in WRITTEN or any(fnmatch(known, pattern) for known in PATHS)


def paths_in(text: str) -> list[str]:
    """What looks like a file or a folder between backticks; of a line in a file, the file."""
    files = [found[1] for x in QUOTED.findall(text) if (found := FILE.fullmatch(x))]
    return files + [x for x in QUOTED.findall(text) if FOLDER.fullmatch(x)]


def test_a_file_that_is_gone_is_found() -> None:
    text = "`backends/*/support.py` `config.py:12` `docs/` `spec.k` `gone.py:3` `docs/gone/` `cupy/kernels/gone.cu`"
    assert [x for x in paths_in(text) if not exists(x)] == ["gone.py", "cupy/kernels/gone.cu", "docs/gone/"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_pages_name_and_link_to_what_exists(page: Path) -> None:
    text = FENCE.sub("", page.read_text())
    links = [x.partition("#")[0] for x in LINK.findall(text) if "://" not in x]
    assert [x for x in links if x and not (page.parent / x).exists()] == []
    assert [x for x in paths_in(text) if not exists(x)] == []


def test_sources_name_what_exists() -> None:
    named = ((x, path) for x in SOURCES for path in paths_in(x.read_text()))
    assert [f"{x.relative_to(ROOT)}: {path}" for x, path in named if not exists(path)] == []
