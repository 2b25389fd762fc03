"""Measurements of problem classes: the shipped tables, the entries of `multigemm tune`, the choices of "auto". The
table also remembers the choices that followed from them, and `plan` gives a backend's recipe with a measured config.

An entry belongs to a device and a class (`problem_class`). Entries of tables compare all tuned backends; the user's
precede the shipped ones. An entry of "auto" names the chosen backend and stays until somebody clears it. It lies in the
folder `choices` and is valid for one version of multigemm and torch.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, is_dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from multigemm.backend import as_dict, completed
from multigemm.backends import registry
from multigemm.cuda.disk_cache import DiskCache, fingerprint
from multigemm.planning import launch_cache
from multigemm.planning.binding import Choice
from multigemm.select.problem_class import EQUAL, ON_DEVICE, ON_HOST, ProblemClass, Query
from multigemm.settings import settings

SCHEMA = 3
SHIPPED = Path(__file__).parents[1] / "tuned"
ENTRIES_READ = 1 << 16
OWN = "own cache"


@dataclass(frozen=True, slots=True)
class Measured:
    """One backend's times for a class in microseconds: of the device (`us`), and of the host in a warm eager call if
    that was measured. A config that is not empty is imposed on the backend. `source` is who says so; no file holds it.
    """

    us: float
    config: Mapping[str, Any] = field(default_factory=dict)
    failures: Mapping[str, str] = field(default_factory=dict)
    host_us: float = 0.0
    source: str = ""


@dataclass(frozen=True, slots=True)
class Entry:
    """The measurements of one class on one device. `chosen` is the backend that "auto" took, `date` when. `failed`
    holds why backends could not be measured."""

    device: str
    key: str
    backends: Mapping[str, Measured]
    chosen: str = ""
    date: str = ""
    failed: Mapping[str, str] = field(default_factory=dict)

    def encoded(self) -> dict[str, Any]:
        """The entry as JSON, without empty fields."""
        backends = {name: _filled(replace(measured, source="")) for name, measured in self.backends.items()}
        return _filled(self) | {"backends": backends}


def _filled(x: Measured | Entry) -> dict[str, Any]:
    return {name: value for name, value in asdict(x).items() if value}


def decoded(raw: Any, source: str) -> Entry:
    """An entry from JSON, which has no tuples. Raises ValueError for anything else."""
    try:
        backends = {str(name): _measured(source, **fields) for name, fields in raw["backends"].items()}
        entry = Entry(**{**raw, "backends": backends})
        whole = all(type(m.us) in (int, float) and 0 < m.us < math.inf for m in backends.values())
        whole &= isinstance(entry.device, str) and isinstance(entry.key, str)
        whole &= not entry.chosen or entry.chosen in backends
        if not whole:
            raise TypeError("a time, a name or the choice is none")
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{str(raw)[:200]} is no entry of a table: {error}") from error
    return entry


def _measured(source: str, us: Any, config: Any = MappingProxyType({}), **fields: Any) -> Measured:
    held = {name: tuple(v) if isinstance(v, list) else v for name, v in config.items()}
    return Measured(us, held, source=source, **fields)


class Folder:
    """Entries by device and class: on disk, where other processes write too, and a copy in this process of those read.
    `versions` are part of the file names: entries of other versions are not found."""

    def __init__(self, name: str, root: Path | None, *versions: str) -> None:
        self._disk, self._versions = DiskCache(name, root), versions
        self._read: dict[tuple[str, str], Entry | None] = {}
        self.forget = self._read.clear

    def find(self, device: str, key: str, anew: bool = False) -> Entry | None:
        """The entry of a class; None if none can be read. `anew`: reads the disk again."""
        place = device, key
        if place in self._read and not anew:
            return self._read.get(place)
        if len(self._read) >= ENTRIES_READ:  # lists of ever other sizes make ever other classes
            self._read.clear()
        found = self._read[place] = self._decoded(self._name(place))
        return found

    def keep(self, entry: Entry, on_disk: bool = True) -> bool:
        """Stores an entry in this process and on disk. False if the disk did not take it."""
        place = entry.device, entry.key
        self._read[place] = entry
        return on_disk and self._disk.put(self._name(place), json.dumps(entry.encoded()).encode(), ".json")

    def entries(self) -> list[Entry]:
        """All entries on disk that this version can read."""
        return [found for path in self._disk.entries() if (found := self._decoded(path.stem)) is not None]

    def _name(self, place: tuple[str, str]) -> str:
        return fingerprint(SCHEMA, *self._versions, *place)

    def _decoded(self, name: str) -> Entry | None:
        """Reads an entry. One that cannot be read counts as absent, so that its class is measured again."""
        raw = self._disk.get(name, ".json")
        try:
            return None if raw is None else decoded(json.loads(raw), OWN)
        except ValueError:
            return None


class TuningTable:
    """All that this process knows: the user's entries, the shipped ones, the entries of "auto", and in `remembered`
    the choices that followed from them."""

    def __init__(self, root: Path | None = None) -> None:
        self.own = Folder("tuning", root)
        self.choices = Folder("choices", root, sys.modules["multigemm"].__version__, torch.__version__)
        self.remembered: dict[Any, Choice] = {}
        tables = {path.name: json.loads(path.read_text()) for path in sorted(SHIPPED.glob("*.json"))}
        entries = [decoded(raw, f"shipped {name}") for name, table in tables.items() for raw in table["entries"]]
        self._shipped = {(entry.device, entry.key): entry for entry in entries}

    def find(self, problem_class: ProblemClass, device: torch.device) -> dict[str, Measured]:
        """The times of backends for a class, by the user's entry, else a shipped one. Kernels that read sizes on the
        device run alike wherever these lie, so their times also serve classes with sizes on the host."""
        found, order = dict[str, Measured](), (EQUAL, ON_HOST, ON_DEVICE)
        for where in order[order.index(problem_class.where) :]:
            place = device_name(device), str(replace(problem_class, where=where))
            for entry in (self.own.find(*place), self._shipped.get(place)):
                if entry is not None:
                    found = {**entry.backends, **found}
        return found

    def keep(self, found: Iterable[Entry]) -> str:
        """Adds measurements to the user's entries. Returns why the disk did not take all of them."""
        kept = True
        for entry in found:
            old = self.own.find(entry.device, entry.key)
            tuned = {name: replace(measured, source=OWN) for name, measured in entry.backends.items()}
            kept &= self.own.keep(replace(entry, backends={**(old.backends if old else {}), **tuned}))
        self.choose_anew()
        if kept:
            return ""
        return f"{settings().cache_dir} cannot be written" if settings().cache else "the cache is off (MULTIGEMM_CACHE)"

    def choose_anew(self) -> None:
        """Forgets the choices and launches of this process. A choice that is being made meanwhile is not remembered; a
        launch that a call binds meanwhile may be."""
        self.remembered = {}
        launch_cache.clear()

    def choice(self, problem_class: ProblemClass, device: torch.device, names: Iterable[str]) -> Entry | None:
        """The measured choice of "auto" for a class, by this process or an earlier one, if all these backends took
        part."""
        for anew in (False, True):
            found = self.choices.find(device_name(device), str(problem_class), anew)
            if found is not None and found.backends.keys() | found.failed.keys() >= set(names):
                return found
        return None

    def keep_choice(self, entry: Entry) -> Entry:
        """Stores a choice of "auto" on disk, unless another process has written one meanwhile; returns the one that
        holds. The reason for not measuring is kept in this process only."""
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
    """The name of a device in entries: its model, not its index."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def plan(query: Query, name: str, why: str = "") -> Choice:
    """The recipe of one backend with the given config, else a measured one that is valid, else its first guess."""
    spec, device = query.spec, query.problem.device
    valid = registry.get(name).configs(spec, device)
    config, source = valid[0] if valid else None, "heuristic"
    if query.config is not None:
        config, source = completed(query.config, valid), "given"
    elif (measured := table().find(query.problem_class, device).get(name)) is not None:
        same = [x for x in valid if is_dataclass(x) and as_dict(x) == dict(measured.config)]
        if same:
            config, source = same[0], f"measured ({measured.us:.1f} us, {measured.source})"
    return Choice(name, registry.recipe(name, spec, device, config), spec, f"{why}; config {source}")
