"""Stored failures: one small JSON file each, which can be replayed on any backend."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from multigemm.errors import InvalidSetting
from multigemm.testing.case import Case


@dataclass(frozen=True, slots=True)
class Entry:
    """One stored problem: the case, why it is kept, where it came from."""

    name: str
    case: Case
    why: str = ""
    source: str = ""
    backend: str = ""
    oracle: str = ""
    config: int | str = 0


def load(path: Path) -> Entry:
    """One file."""
    try:
        data = json.loads(path.read_text())
        case = Case.from_dict(data["case"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise InvalidSetting(f"{path} is no stored problem: {type(error).__name__}: {error}") from error
    known = {name: data.get(name, "") for name in ("why", "source", "backend", "oracle")}
    return Entry(path.stem, case, **known, config=data.get("config", 0))


def entries(folder: Path) -> Iterator[Entry]:
    """All stored problems of a folder, by name."""
    for path in sorted(folder.glob("*.json")):
        yield load(path)


def save(folder: Path, data: dict[str, Any]) -> Path:
    """Stores one problem. Its name is made of what failed and a digest of the case."""
    folder.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps(data["case"], sort_keys=True).encode()).hexdigest()[:8]
    words = f"{data.get('backend', 'any')}-{data.get('oracle', 'case')}".replace(" ", "-").replace(":", "")
    path = folder / f"{words}-{digest}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    return path


def snippet(case: Case, backend: str, device: str, config: int | str = 0) -> str:
    """A few lines of Python that repeat a failure."""
    extra = f", config={config!r}" if config else ""
    names = ["Case", *(["Fused"] if case.is_fused else []), "Layout", *(["RowNumbers"] if case.is_fused else []),
             *(["Scale"] if case.quantised else [])]  # fmt: skip
    return (
        f"from multigemm.testing import {', '.join(names)}, check_case\n"
        f"case = {case!r}\n"
        f'print(*check_case(case, "{backend}", "{device}"{extra}).findings, sep="\\n")'
    )
