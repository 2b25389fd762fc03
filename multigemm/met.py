"""What "auto" measured by itself where it first met a problem: classes at one size, unlike the table's entries.

The table (`multigemm.tuning`) binds configs for a class, which holds an octave of tokens. What several backends took
at one size can be compared there and near by only: it is kept by class and fifth of an octave of operations.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence

from multigemm.cache import DiskCache, fingerprint
from multigemm.measured import SCHEMA, Measured, decode, encode

SAME_SIZE = 0.2
"""Octaves of operations within which times were measured at the size that is asked for."""
SOURCE = "when it was first met"
Class = Mapping[str, Measured]
"""By backend, all measured together."""


def near(flops: float, others: float) -> bool:
    """Whether so many operations are about as many."""
    return flops == others or (flops > 0 < others and abs(math.log2(flops / others)) <= SAME_SIZE)


class Met:
    """All that this process knows of them: what it measured, and what others left on disk."""

    def __init__(self, cache: DiskCache | None = None) -> None:
        self._cache = cache or DiskCache("met")
        self._known: dict[str, Class] = {}

    @staticmethod
    def _name(device: str, key: str, cell: int) -> str:
        return fingerprint(SCHEMA, device, key, cell)

    @staticmethod
    def _cell(flops: float) -> int:
        return math.floor(math.log2(flops) / SAME_SIZE) if flops > 0 else 0

    def find(self, device: str, key: str, flops: float) -> Class:
        """What was measured of a class at about this size; empty if nothing was."""
        cell = self._cell(flops)
        for name in (self._name(device, key, at) for at in (cell, cell - 1, cell + 1)):
            if name not in self._known:
                self._known[name] = self._read(name)
            if any(near(flops, m.flops) for m in self._known[name].values()):
                return self._known[name]
        return {}

    def keep(self, together: Sequence[Measured]) -> None:
        """Keeps what several backends took for one problem."""
        first = together[0]
        name = self._name(first.device, first.key, self._cell(first.flops))
        self._known[name] = {m.backend: m for m in together}
        self._cache.put(name, json.dumps([encode(m) for m in together]).encode(), ".json")

    def every(self) -> list[Class]:
        """Everything on disk, and what this process measured."""
        for name in (path.stem for path in self._cache.entries()):
            if name not in self._known:
                self._known[name] = self._read(name)
        return [its for its in list(self._known.values()) if its]  # others may keep meanwhile

    def _read(self, name: str) -> Class:
        """An entry that cannot be read is as good as none: it will be measured again."""
        raw = self._cache.get(name, ".json")
        try:
            found = [] if raw is None else [decode(entry, SOURCE) for entry in json.loads(raw)]
        except (ValueError, TypeError):
            return {}
        return {m.backend: m for m in found}

    def forget(self) -> None:
        """Drops what this process knows, and what lies on disk."""
        self._known.clear()
        self._cache.clear()
