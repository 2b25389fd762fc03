"""One measurement: what a backend took for one class of problems on one device, and its form in files.

The tables that ship, the user's cache and files to share all hold this form; the tuning table decides by it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from functools import lru_cache
from typing import Any

from multigemm.select.nearest import Footprint

SCHEMA = 2
ON_DEVICE = "device-sizes"
ON_HOST = "host-sizes"
EQUAL = "equal-sizes"


@dataclass(frozen=True, slots=True)
class Measured:
    """The best config of one backend for one class of problems on one device.

    `config` binds whoever runs this class; `ran` is what was measured, where that was the backend's own choice.
    `groups` and `flops` tell how large the measured problems really were, of which the class knows buckets only.
    `footprint` is the config's, as `backend.Recipe` describes it.
    """

    backend: str
    config: Mapping[str, Any]
    us: float
    device: str
    key: str
    failures: Mapping[str, str] = field(default_factory=dict)
    source: str = ""
    ran: str = ""
    groups: int = 0
    flops: float = 0.0
    footprint: Footprint = ()


def footprint_of(config: Any) -> Footprint:
    """What a config says of its tiles; nothing where it does not."""
    return tuple(getattr(config, "footprint", ()))


def config_text(config: Any, told: str = "") -> str:
    """What runs, in short: the config, and what a recipe that decides at bind tells of it, but for its counts."""
    values = config if isinstance(config, Mapping) else _fields_of(config)
    return "/".join([*map(str, values.values()), *([re.sub(r"\b\d+ ", "", told)] if told else [])])


def _fields_of(config: Any) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in fields(config)} if is_dataclass(config) else {}


def where_of(key: str) -> str:
    """Where the sizes of a class lie."""
    return key.rpartition(" ")[2]


def encode(m: Measured) -> dict[str, Any]:
    """A measurement as JSON holds it."""
    return {"schema": SCHEMA, **{k: v for k, v in asdict(m).items() if k != "source"}}


def decode(raw: Any, source: str) -> Measured:
    """A measurement out of JSON, which has no tuples; raises ValueError for a damaged one or another schema."""
    if not isinstance(raw, Mapping) or raw.get("schema", SCHEMA) != SCHEMA:
        raise ValueError(f"{str(raw)[:80]} is no measurement of schema {SCHEMA}")
    values = {"source": source, **{k: v for k, v in raw.items() if k != "schema"}}
    if isinstance(values.get("config"), Mapping):
        values["config"] = {name: tuple(v) if isinstance(v, list) else v for name, v in values["config"].items()}
    if isinstance(values.get("footprint"), list):
        values["footprint"] = tuple(values["footprint"])
    try:
        m = Measured(**values)
    except TypeError as error:
        raise ValueError(f"a measurement has other fields: {error}") from error
    texts = all(isinstance(x, str) for x in (m.backend, m.device, m.key, m.source, m.ran))
    maps = isinstance(m.config, Mapping) and isinstance(m.failures, Mapping)
    counts = all(type(x) in (int, float) and 0 <= x < math.inf for x in (m.us, m.groups, m.flops))
    tile = isinstance(m.footprint, tuple) and all(type(x) is int and x > 0 for x in m.footprint)
    if not (texts and maps and counts and tile and _is_key(m.key)):
        raise ValueError(f"{str(raw)[:200]} is no measurement")
    return m


def unfold(raw: Any, source: str) -> list[Measured]:
    """The measurements in one entry of a file: of one backend, or of several of one class."""
    if not isinstance(raw, Mapping) or not isinstance(raw.get("backends"), Mapping):
        return [decode(raw, source)]
    common = {k: v for k, v in raw.items() if k != "backends"}
    return [decode({"config": {}, **common, "backend": name, **own}, source) for name, own in raw["backends"].items()]


def fold(measurements: Iterable[Measured]) -> list[dict[str, Any]]:
    """Entries for a file, one per class; without what is said already by a class that stands in."""
    classes: dict[tuple[str, str], dict[str, Measured]] = {}
    for m in measurements:
        classes.setdefault((m.device, m.key), {})[m.backend] = m
    entries = []
    for (device, key), by_name in classes.items():
        known = classes.get((device, key.replace(where_of(key), ON_DEVICE)), {}) if where_of(key) != ON_DEVICE else {}
        own = {
            name: {k: v for k, v in asdict(m).items() if v and k in ("us", "ran", "config", "failures", "footprint")}
            for name, m in by_name.items()
            if name not in known or replace(m, key="") != replace(known[name], key="")
        }
        first = next(iter(by_name.values()))
        sizes = {k: v for k, v in (("groups", first.groups), ("flops", first.flops)) if v}
        if own:
            entries.append({"device": device, "key": key, **sizes, "backends": own})
    return entries


@lru_cache(maxsize=16384)
def _is_key(key: str) -> bool:
    """Whether the extents of a class are numbers, or "*" for any, so that classes can be compared."""
    return all(p[1:].isdecimal() or p[1:] == "*" for p in key.split()[1:6])


def from_cache(raw: bytes | None) -> Measured | None:
    """An entry that cannot be read is as good as none: it will be measured again."""
    try:
        return None if raw is None else decode(json.loads(raw), "own cache")
    except ValueError:
        return None
