"""What "auto" measured by itself where it first met a problem: classes at one size, unlike the table's entries.

The table (`select.table`) binds configs for a class, which holds an octave of tokens. What several backends took
at one size can be compared there and near by only: it is kept by class and fifth of an octave of operations. It tells
which backend is fastest only for those who were measured then, or passed over since they were sure to be slower.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.select.clocks import CODE_BYTES, FLUSH_BYTES
from multigemm.select.measured import SCHEMA, Measured, decode, encode

SAME_SIZE = 0.2
"""Octaves of operations within which times were measured at the size that is asked for."""
LATEST = 500
"""Entries of other processes that forecasts learn from; a process meets any of the others again by its name."""
SOURCE = "when it was first met"


@dataclass(frozen=True)
class FirstMet:
    """What became of one problem: the times of those that were measured together, and who was passed over, with what
    each would have run."""

    times: Mapping[str, Measured]
    passed: Mapping[str, str]

    @property
    def any(self) -> Measured:
        return next(iter(self.times.values()))

    def tells(self, ran: Mapping[str, str]) -> bool:
        """Whether it tells which of these is fastest, each by what it would run."""
        then = {**self.passed, **{name: m.ran for name, m in self.times.items()}}
        return all(then.get(name) == its for name, its in ran.items())


def near(flops: float, others: float) -> bool:
    """Whether so many operations are about as many."""
    return flops == others or (flops > 0 < others and abs(math.log2(flops / others)) <= SAME_SIZE)


class FirstMeetings:
    """All that this process knows of them: what it measured, and what others left on disk."""

    def __init__(self, cache: DiskCache | None = None) -> None:
        self._cache = cache or DiskCache("first_met")
        self._known: dict[str, FirstMet | None] = {}

    @staticmethod
    def _name(device: str, key: str, cell: int) -> str:
        clock = FLUSH_BYTES, CODE_BYTES
        return fingerprint(SCHEMA, sys.modules["multigemm"].__version__, torch.__version__, clock, device, key, cell)

    @staticmethod
    def _cell(flops: float) -> int:
        return math.floor(math.log2(flops) / SAME_SIZE) if flops > 0 else 0

    def find(self, device: str, key: str, flops: float) -> FirstMet | None:
        """What was measured of a class at about this size."""
        cell = self._cell(flops)
        for name in (self._name(device, key, at) for at in (cell, cell - 1, cell + 1)):
            if name not in self._known:
                self._known[name] = self._read(name)
            found = self._known[name]
            if found is not None and near(flops, found.any.flops):
                return found
        return None

    def keep(self, met: FirstMet) -> None:
        """Keeps what became of one problem, instead of what was known of its class at its size."""
        name = self._name(met.any.device, met.any.key, self._cell(met.any.flops))
        self._known[name] = met
        entry = {"times": [encode(m) for m in met.times.values()], "passed": dict(met.passed)}
        self._cache.put(name, json.dumps(entry).encode(), ".json")

    def every(self) -> list[FirstMet]:
        """The latest on disk, and all that this process knows."""
        for name in [path.stem for path in self._cache.entries()][-LATEST:]:
            if name not in self._known:
                self._known[name] = self._read(name)
        return [met for met in list(self._known.values()) if met is not None]  # others may keep meanwhile

    def _read(self, name: str) -> FirstMet | None:
        """An entry that cannot be read is as good as none: it will be measured again."""
        raw = self._cache.get(name, ".json")
        try:
            entry = {} if raw is None else json.loads(raw)
            times = {m.backend: m for m in (decode(x, SOURCE) for x in entry.get("times", ())) if m.us > 0}
            passed = {str(backend): str(ran) for backend, ran in entry.get("passed", {}).items()}
        except (ValueError, TypeError, AttributeError):
            return None
        return FirstMet(times, passed) if times else None
