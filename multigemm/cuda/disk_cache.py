"""Small files that outlive the process: tunings and compiled kernels.

One file per key. A writer fills a temporary file and renames it into place, so that a reader sees a
whole entry or none, however many processes write at once. A damaged or foreign entry reads as
absent. The key is the `fingerprint` of everything that the value depends on (version, source, device):
a change of any of them makes another key, never a stale hit. Whatever else lies in the folder, by its
name, is not the cache's: it is neither shown nor removed.
"""

from __future__ import annotations

import hashlib
import os
import re
import tempfile
from contextlib import suppress
from pathlib import Path

from multigemm.settings import settings

MAGIC = b"multigemm-cache-1\n"
ENTRY = re.compile(r"[0-9a-f]{32}\.\w+")
BROKEN_OFF = re.compile(r"\.[0-9a-f]{32}\.\w+")


def fingerprint(*parts: object) -> str:
    """A short name for everything that an entry depends on."""
    digest = hashlib.sha256()
    for part in parts:
        raw = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(raw).to_bytes(8, "little") + raw)
    return digest.hexdigest()[:32]


class DiskCache:
    """A folder of entries. `get` and `put` never raise for a missing, damaged or unwritable entry."""

    def __init__(self, name: str, root: Path | None = None) -> None:
        self.name, self._root = name, root

    @property
    def folder(self) -> Path:
        return (self._root or settings().cache_dir) / self.name

    def path(self, key: str, suffix: str = ".bin") -> Path:
        return self.folder / f"{key}{suffix}"

    def get(self, key: str, suffix: str = ".bin") -> bytes | None:
        """The stored value, or None; an entry that does not check out is treated as absent."""
        if not settings().cache:
            return None
        try:
            raw = self.path(key, suffix).read_bytes()
        except OSError:
            return None
        head, value = raw[: len(MAGIC) + 32], raw[len(MAGIC) + 32 :]
        return value if head == MAGIC + hashlib.sha256(value).digest() else None

    def put(self, key: str, value: bytes, suffix: str = ".bin") -> bool:
        """Stores a value; False where the folder cannot be written (a cache is a help, not a duty)."""
        if not settings().cache:
            return False
        name = ""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f".{key}.")
            with os.fdopen(handle, "wb") as file:
                file.write(MAGIC + hashlib.sha256(value).digest() + value)
            os.replace(name, self.path(key, suffix))
        except OSError:
            if name:  # a full disk must not fill up with halves as well
                Path(name).unlink(missing_ok=True)
            return False
        return True

    def entries(self) -> list[Path]:
        """All entries, oldest first; one that another process removes meanwhile is left out."""
        found = []
        for path in self._named(ENTRY):
            with suppress(FileNotFoundError):
                found.append((path.stat().st_mtime, path))
        return [path for _, path in sorted(found)]

    def clear(self) -> int:
        """Removes all entries, and what broken-off writers left; says how many entries there were."""
        found = self.entries()
        for path in (*found, *self._named(BROKEN_OFF)):
            path.unlink(missing_ok=True)
        return len(found)

    def _named(self, pattern: re.Pattern[str]) -> list[Path]:
        return [path for path in self.folder.glob("*") if pattern.fullmatch(path.name)]
