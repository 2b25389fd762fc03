"""The disk cache: tunings and compiled kernels as small files.

One file per key. A writer fills a temporary file and renames it, so that a reader sees a whole entry or none. A damaged
or foreign entry counts as absent. The key is the `fingerprint` of everything on which the value depends (version,
source, device), so that a change of any of them makes another key. Other files in the folder are neither shown nor
removed.

Entries are machine code that this process will run. So a folder that belongs to another user (root excepted), or that
group or others may write, is neither read nor written.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from multigemm.settings import settings

MAGIC = b"multigemm-cache-1\n"
ENTRY = re.compile(r"[0-9a-f]{32}\.\w+")
BROKEN_OFF = re.compile(r"\.[0-9a-f]{32}\.\w+")


_verdicts: dict[Path, bool] = {}
"""Which folders may be used, judged once in a process."""


def fault_of(folder: Path) -> str:
    """Who else could write into a folder; "" if nobody. Raises OSError if there is no such folder."""
    found, user = os.stat(folder), getattr(os, "geteuid", lambda: None)()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(folder)
    if user is not None and found.st_uid not in (user, 0):
        return f"it belongs to user {found.st_uid}, not to user {user}"
    return f"its group or others may write it (mode {stat.S_IMODE(found.st_mode):o})" if found.st_mode & 0o022 else ""


def _fault_above(folder: Path) -> str:
    """`fault_of` for a parent folder, where a sticky bit (as on /tmp) stops others from replacing its contents."""
    return "" if os.stat(folder).st_mode & stat.S_ISVTX else fault_of(folder)


def fingerprint(*parts: object) -> str:
    """A short hash of everything on which an entry depends."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


class DiskCache:
    """A folder of entries. `get` and `put` do not raise for a missing, damaged or unwritable entry."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name, self._root = name, root

    @property
    def folder(self) -> Path:
        return (self._root or settings().cache_dir) / self.name

    @property
    def is_safe(self) -> bool:
        """Whether only this user and root could have written the folder. False if it does not exist."""
        folder = self.folder
        if folder not in _verdicts:
            try:
                faults = {folder: fault_of(folder), folder.parent: _fault_above(folder.parent)}
            except OSError:
                return False
            _verdicts[folder] = not any(faults.values())
            for place in [place for place, fault in faults.items() if fault][:1]:
                warnings.warn(
                    f"multigemm: nothing is cached in {folder}. {place}: {faults[place]} and could plant code there. "
                    f"Set MULTIGEMM_CACHE_DIR to a folder of your own, or remove {place}, so that it is made anew",
                    RuntimeWarning,
                    stacklevel=3,
                )
        return _verdicts[folder]

    def path(self, key: str, suffix: str = ".bin") -> Path:
        return self.folder / f"{key}{suffix}"

    def get(self, key: str, suffix: str = ".bin") -> bytes | None:
        """The stored value; None if it is absent or damaged."""
        if not settings().cache:
            return None
        if not self.is_safe:
            return None
        try:
            raw = self.path(key, suffix).read_bytes()
        except OSError:
            return None
        head, value = raw[: len(MAGIC) + 32], raw[len(MAGIC) + 32 :]
        return value if head == MAGIC + hashlib.sha256(value).digest() else None

    def put(self, key: str, value: bytes, suffix: str = ".bin") -> bool:
        """Stores a value. False if the folder cannot be written; callers go on without."""
        if not settings().cache:
            return False
        name = ""
        try:
            for folder in (self.folder.parent, self.folder):
                folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if not self.is_safe:
                return False
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{key}.")
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(value).digest() + value)
            os.replace(name, self.path(key, suffix))
        except OSError:
            if name:  # a full disk must not fill up with halves as well
                Path(name).unlink(missing_ok=True)
            return False
        return True

    def get_code(self, key: str) -> tuple[dict[str, Any], bytes] | None:
        """Machine code and its metadata, or None."""
        stored = self.get(key, ".cubin")
        if stored is None:
            return None
        facts, _, code = stored.partition(b"\n")
        return json.loads(facts), code

    def put_code(self, key: str, facts: Mapping[str, Any], code: bytes) -> None:
        """Stores machine code after a line of metadata."""
        self.put(key, json.dumps(facts).encode() + b"\n" + code, ".cubin")

    def entries(self) -> list[Path]:
        """All entries, oldest first. An entry that another process removes meanwhile is left out."""
        found = []
        for path in self._named(ENTRY):
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def clear(self) -> int:
        """Removes all entries and leftovers of interrupted writers. Returns the number of entries."""
        found = self.entries()
        for path in (*found, *self._named(BROKEN_OFF)):
            path.unlink(missing_ok=True)
        return len(found)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        return [path for path in self.folder.glob("*") if pattern.fullmatch(path.name)]
