"""What is known of classes of problems: the shipped tables, what `multigemm tune` kept, what "auto" measured once.

An entry belongs to a device and a class (`problem_class`). It holds for each backend its time and, where somebody tuned
it, its best config and why other configs failed. In a table all backends that were tuned are compared, the user's own
entries before the shipped ones. What "auto" measured names the backend that was chosen, and stays for that class until
somebody clears it. It lies in a folder of its own, `choices`, and goes with the versions of multigemm and torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.planning import launch_cache
from multigemm.select.problem_class import EQUAL, ON_DEVICE, ON_HOST, ProblemClass
from multigemm.settings import settings

SCHEMA = 3
CHOICES_KEPT = 1 << 16
generation = 0
"""Changes whenever a choice that was made already may become another one."""


def change_generation() -> None:
    global generation
    generation += 1
    launch_cache.clear()


@dataclass(frozen=True, slots=True)
class Measured:
    """What one backend took for a class, in microseconds: the device (`us`), and the host in a warm eager call where
    that was measured. A config that is not empty is imposed on whoever runs it."""

    us: float
    config: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    host_us: float = 0.0


@dataclass(frozen=True, slots=True)
class Entry:
    """What is known of one class on one device. `chosen` is the backend that "auto" took, on which date; `failed` tells
    why others could not be measured, or none of them, where nothing was chosen."""

    device: str
    key: str
    backends: Mapping[str, Measured]
    source: str = ""
    chosen: str = ""
    date: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)

    def covers(self, names: Iterable[str]) -> bool:
        """Whether all these backends took part."""
        return self.backends.keys() | self.failed.keys() >= set(names)

    def encoded(self) -> dict[str, Any]:
        """As JSON holds it, without what is empty."""
        fields = {name: value for name, value in asdict(self).items() if value and name != "source"}
        return fields | {"backends": {n: {k: v for k, v in asdict(m).items() if v} for n, m in self.backends.items()}}


def decoded(raw: Any, source: str) -> Entry:
    """An entry out of JSON, which has no tuples; raises ValueError for anything else."""
    try:
        backends = {str(name): Measured(**fields) for name, fields in raw["backends"].items()}
        entry = Entry(**{**raw, "backends": {name: _with_tuples(m) for name, m in backends.items()}, "source": source})
        whole = all(type(m.us) in (int, float) and 0 < m.us < math.inf for m in backends.values())
        whole &= isinstance(entry.device, str) and isinstance(entry.key, str)
        whole &= not entry.chosen or entry.chosen in backends
        if not whole:
            raise TypeError("a time, a name or the choice is none")
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(raw)[:200]} is no entry of a table: {error}") from error
    return entry


def _with_tuples(m: Measured) -> Measured:
    return replace(m, config={name: tuple(v) if isinstance(v, list) else v for name, v in m.config.items()})


class TuningTable:
    """All entries that this process knows, by device and class."""

    def __init__(self, root: Path | None = None) -> None:
        self._cache, self._choices = DiskCache("tuning", root), DiskCache("choices", root)
        entries = [decoded(raw, f"shipped {name}") for name, table in _shipped_files() for raw in table["entries"]]
        self._shipped = {(entry.device, entry.key): entry for entry in entries}
        self._own: dict[tuple[str, str], Entry | None] = {}
        self._chosen: dict[tuple[str, str], Entry] = {}

    def find(self, backend: str, problem_class: ProblemClass, device: torch.device) -> tuple[Measured, str] | None:
        """What a backend takes for a class, and who says so: the user's own entry, else a shipped one.

        Kernels that read sizes on the device run alike wherever the sizes lie: their times there stand in.
        """
        others = {EQUAL: (ON_HOST, ON_DEVICE), ON_HOST: (ON_DEVICE,)}.get(problem_class.where, ())
        for c in (problem_class, *(replace(problem_class, where=where) for where in others)):
            place = device_name(device), str(c)
            for entry in (self._own_entry(*place), self._shipped.get(place)):
                if entry is not None and backend in entry.backends:
                    return entry.backends[backend], entry.source
        return None

    def keep(self, found: Iterable[Entry]) -> str:
        """Adds measurements to the user's entries; where the disk does not take them all, why."""
        kept = True
        for entry in found:
            place = entry.device, entry.key
            old = self._own_entry(*place)
            new = replace(entry, backends={**(old.backends if old else {}), **entry.backends}, source="own cache")
            self._own[place] = new
            kept &= self._cache.put(fingerprint(SCHEMA, *place), json.dumps(new.encoded()).encode(), ".json")
        change_generation()
        if kept:
            return ""
        return f"{settings().cache_dir} cannot be written" if settings().cache else "the cache is off (MULTIGEMM_CACHE)"

    def choice(self, problem_class: ProblemClass, device: torch.device, names: Iterable[str]) -> Entry | None:
        """What "auto" measured of a class, in this process or an earlier one, if all these backends took part."""
        place = device_name(device), str(problem_class)
        found = self._chosen.get(place)
        if found is None or not found.covers(names):
            found = _read(self._choices, _choice_name(*place))
        return self._remembered(found) if found is not None and found.covers(names) else None

    def keep_choice(self, entry: Entry) -> Entry:
        """Keeps what "auto" measured, on disk unless another process has written it meanwhile: returns what holds. Why
        it measured nothing holds in this process alone."""
        if entry.chosen:
            name = _choice_name(entry.device, entry.key)
            earlier = _read(self._choices, name)
            if earlier is not None and earlier.backends.keys() >= entry.backends.keys():
                return self._remembered(earlier)
            self._choices.put(name, json.dumps(entry.encoded()).encode(), ".json")
        return self._remembered(entry)

    def forget_choices(self) -> None:
        """Goes by what is on disk from now on, as another process would."""
        self._chosen.clear()

    def _remembered(self, entry: Entry) -> Entry:
        if len(self._chosen) >= CHOICES_KEPT:  # lists of ever other sizes make ever other classes
            self._chosen.clear()
        self._chosen[entry.device, entry.key] = entry
        return entry

    def own(self, choices: bool = False) -> list[Entry]:
        """Everything in the user's cache that this version can read: the table, or the choices."""
        cache = self._choices if choices else self._cache
        return [entry for path in cache.entries() if (entry := _read(cache, path.stem)) is not None]

    def _own_entry(self, device: str, key: str) -> Entry | None:
        place = device, key
        if place not in self._own:
            self._own[place] = _read(self._cache, fingerprint(SCHEMA, *place))
        return self._own[place]


@lru_cache(maxsize=1)
def table() -> TuningTable:
    """The table of this process."""
    return TuningTable()


@lru_cache(maxsize=16)
def device_name(device: torch.device) -> str:
    """What entries call a device: its model, not its index."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _choice_name(device: str, key: str) -> str:
    return fingerprint(SCHEMA, sys.modules["multigemm"].__version__, torch.__version__, device, key)


def _read(cache: DiskCache, name: str) -> Entry | None:
    """An entry that cannot be read is as good as none: its class is measured again."""
    raw = cache.get(name, ".json")
    try:
        return None if raw is None else decoded(json.loads(raw), "own cache")
    except ValueError:
        return None


def _shipped_files() -> Iterator[tuple[str, dict[str, Any]]]:
    folder = files("multigemm") / "tuned"
    if folder.is_dir():
        for path in sorted(folder.iterdir(), key=lambda p: p.name):
            if path.name.endswith(".json"):
                yield path.name, json.loads(path.read_text())
