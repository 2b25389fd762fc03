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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.planning import launch_cache
from multigemm.select.problem_class import EQUAL, ON_DEVICE, ON_HOST, ProblemClass
from multigemm.settings import settings

SCHEMA = 3
SHIPPED = Path(__file__).parents[1] / "tuned"
ENTRIES_READ = 1 << 16
OWN = "own cache"
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

    def encoded(self) -> dict[str, Any]:
        """As JSON holds it, without what is empty."""
        fields = {name: value for name, value in asdict(self).items() if value and name != "source"}
        return fields | {"backends": {n: {k: v for k, v in asdict(m).items() if v} for n, m in self.backends.items()}}


def decoded(raw: Any, source: str) -> Entry:
    """An entry out of JSON, which has no tuples; raises ValueError for anything else."""
    try:
        backends = {str(name): _measured(**fields) for name, fields in raw["backends"].items()}
        entry = Entry(**{**raw, "backends": backends, "source": source})
        whole = all(type(m.us) in (int, float) and 0 < m.us < math.inf for m in backends.values())
        whole &= isinstance(entry.device, str) and isinstance(entry.key, str)
        whole &= not entry.chosen or entry.chosen in backends
        if not whole:
            raise TypeError("a time, a name or the choice is none")
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(raw)[:200]} is no entry of a table: {error}") from error
    return entry


def _measured(config: Any = MappingProxyType({}), **fields: Any) -> Measured:
    return Measured(config={name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}, **fields)


class Folder:
    """Entries by device and class: on disk, where other processes write too, and in this process those that it read.
    `versions` go into their names: with others, none is found."""

    def __init__(self, name: str, root: Path | None, versions: Callable[[], tuple[str, ...]] = tuple) -> None:
        self._disk, self._versions = DiskCache(name, root), versions
        self._read: dict[tuple[str, str], Entry | None] = {}
        self.forget = self._read.clear

    def find(self, device: str, key: str, anew: bool = False) -> Entry | None:
        """The entry of a class, `anew` from the disk; None where none can be read."""
        place = device, key
        if anew or place not in self._read:
            if len(self._read) >= ENTRIES_READ:  # lists of ever other sizes make ever other classes
                self._read.clear()
            self._read[place] = _read(self._disk, self._name(place))
        return self._read[place]

    def keep(self, entry: Entry, on_disk: bool = True) -> bool:
        """Whether the disk took it; it holds in this process in any case."""
        place = entry.device, entry.key
        self._read[place] = entry
        return on_disk and self._disk.put(self._name(place), json.dumps(entry.encoded()).encode(), ".json")

    def entries(self) -> list[Entry]:
        """All on disk that this version can read."""
        return [found for path in self._disk.entries() if (found := _read(self._disk, path.stem)) is not None]

    def _name(self, place: tuple[str, str]) -> str:
        return fingerprint(SCHEMA, *self._versions(), *place)


class TuningTable:
    """All entries that this process knows: of the user's table, of shipped ones, and what "auto" measured."""

    def __init__(self, root: Path | None = None) -> None:
        self.own = Folder("tuning", root)
        self.choices = Folder("choices", root, lambda: (sys.modules["multigemm"].__version__, torch.__version__))
        tables = {path.name: json.loads(path.read_text()) for path in sorted(SHIPPED.glob("*.json"))}
        entries = [decoded(raw, f"shipped {name}") for name, table in tables.items() for raw in table["entries"]]
        self._shipped = {(entry.device, entry.key): entry for entry in entries}

    def find(self, problem_class: ProblemClass, device: torch.device) -> dict[str, tuple[Measured, str]]:
        """What backends take for a class, and who says so: the user's own entry, else a shipped one.

        Kernels that read sizes on the device run alike wherever the sizes lie: their times there stand in.
        """
        others = {EQUAL: (ON_HOST, ON_DEVICE), ON_HOST: (ON_DEVICE,)}.get(problem_class.where, ())
        found = dict[str, tuple[Measured, str]]()
        for c in (problem_class, *(replace(problem_class, where=where) for where in others)):
            place = device_name(device), str(c)
            for entry in (self.own.find(*place), self._shipped.get(place)):
                if entry is not None:
                    found = {name: (measured, entry.source) for name, measured in entry.backends.items()} | found
        return found

    def keep(self, found: Iterable[Entry]) -> str:
        """Adds measurements to the user's entries; where the disk does not take them all, why."""
        kept = True
        for entry in found:
            old = self.own.find(entry.device, entry.key)
            backends = {**(old.backends if old else {}), **entry.backends}
            kept &= self.own.keep(replace(entry, backends=backends, source=OWN))
        change_generation()
        if kept:
            return ""
        return f"{settings().cache_dir} cannot be written" if settings().cache else "the cache is off (MULTIGEMM_CACHE)"

    def choice(self, problem_class: ProblemClass, device: torch.device, names: Iterable[str]) -> Entry | None:
        """What "auto" measured of a class, in this process or an earlier one, if all these backends took part."""
        for anew in (False, True):
            found = self.choices.find(device_name(device), str(problem_class), anew)
            if found is not None and found.backends.keys() | found.failed.keys() >= set(names):
                return found
        return None

    def keep_choice(self, entry: Entry) -> Entry:
        """Keeps what "auto" measured, on disk unless another process has written it meanwhile: returns what holds. Why
        it measured nothing holds in this process alone."""
        earlier = self.choices.find(entry.device, entry.key, anew=True) if entry.chosen else None
        if earlier is not None and earlier.backends.keys() >= entry.backends.keys():
            return earlier
        self.choices.keep(entry, on_disk=bool(entry.chosen))
        return entry


@lru_cache(maxsize=1)
def table() -> TuningTable:
    """The table of this process."""
    return TuningTable()


@lru_cache(maxsize=16)
def device_name(device: torch.device) -> str:
    """What entries call a device: its model, not its index."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _read(disk: DiskCache, name: str) -> Entry | None:
    """An entry that cannot be read is as good as none: its class is measured again."""
    raw = disk.get(name, ".json")
    try:
        return None if raw is None else decoded(json.loads(raw), OWN)
    except ValueError:
        return None
