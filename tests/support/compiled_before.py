"""What tests compile, kept on disk for the other processes of a run and for later runs, by all that it depends on."""

from __future__ import annotations

import pickle
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeVar, cast

from multigemm.cuda.disk_cache import DiskCache, fingerprint

ROOT = Path(__file__).parents[2]
CACHE = DiskCache("compiled", ROOT / ".test_cache")
MONTH_S = 30 * 86400.0
Made = TypeVar("Made")


@cache
def _installed() -> str:
    """Python, its packages and the C++ compiler, by their versions. What lay here for a month is made anew."""
    for path in CACHE.entries():
        if path.stat().st_mtime < time.time() - MONTH_S:
            path.unlink(missing_ok=True)
    packages = sorted(path.name for path in Path(sysconfig.get_path("purelib")).glob("*.dist-info"))
    try:
        compiler = subprocess.run(["g++", "--version"], capture_output=True, text=True, check=False).stdout
    except FileNotFoundError:
        compiler = ""
    return fingerprint(sys.version, packages, compiler)


@cache
def files_of(*places: str) -> str:
    """The contents of folders and files of the repository."""
    found = [path for place in places for path in (ROOT / place, *sorted((ROOT / place).rglob("*")))]
    texts = [path for path in found if path.is_file() and path.suffix != ".pyc"]
    return fingerprint(*(part for path in texts for part in (path.relative_to(ROOT), path.read_bytes())))


def compiled_before(make: Callable[[], Made], *depends_on: object) -> Made:
    """What `make` returns, or returned when everything that it depends on was the same."""
    key = fingerprint(_installed(), *depends_on)
    if (found := CACHE.get(key, ".pickle")) is not None:
        return cast(Made, pickle.loads(found))
    made = make()
    CACHE.put(key, pickle.dumps(made), ".pickle")
    return made
