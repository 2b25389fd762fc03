"""What became of source mutants: fates, how many of each, and which need not be hunted again.

A fate outlives edits elsewhere in its file: it belongs to the change and to the text of the function that is
changed, and is kept with the commit at which it was judged.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from multigemm.cuda.disk_cache import fingerprint
from multigemm.testing.source_sites import Site, around

STATES = ("survived", "killed", "equivalent", "stillborn", "same", "failed")
DONE = ("killed", "stillborn", "same")


@dataclass(frozen=True, slots=True)
class Fate:
    """What became of a mutant: "killed", "stillborn" (does not compile), "survived", "equivalent" (it
    survived, and `text` says why no oracle could see it), "same" (no variant's machine code differs), or
    "failed" (its process could not hunt). `source` names the change and the function that it changes; `spent` are
    seconds by step; `judged` says at which commit and on which device."""

    site: Site
    state: str
    oracle: str = ""
    seconds: float = 0.0
    text: str = ""
    source: str = ""
    spent: dict[str, float] = field(default_factory=dict)
    judged: str = ""


def identity(site: Site, root: Path) -> str:
    """A name for a change that is the same as long as the text of the function is."""
    first, text = around((root / site.file).read_text(), site.line)
    return fingerprint(Path(site.file).name, site.line - first, site.operator, site.before, site.after, text)


def judged(files: Sequence[str]) -> dict[str, Fate]:
    """The mutants that earlier campaigns did away with, by identity: such a mutant need not be hunted again.
    Survivors are, for the oracles may have learnt."""
    fates = [
        Fate(**entry | {"site": Site(**entry["site"])})
        for name in files
        for entry in json.loads(Path(name).read_text())["fates"]
    ]
    return {fate.source: fate for fate in fates if fate.state in DONE and fate.source}


def write(fates: list[Fate], target: str, head: dict[str, Any]) -> None:
    """Keeps the fates so far, so that a campaign that is cut off leaves them behind; those without blame last."""
    ordered = sorted(fates, key=lambda fate: (STATES.index(fate.state), str(fate.site)))
    data = head | {"counts": counts(fates), "rate": round(rate(fates), 3), "fates": [asdict(fate) for fate in ordered]}
    Path(target).write_text(json.dumps(data, indent=1) + "\n")


def counts(fates: list[Fate]) -> dict[str, int]:
    return {state: sum(fate.state == state for fate in fates) for state in STATES}


def rate(fates: list[Fate]) -> float:
    """Killed among those that could be: what compiles, changes machine code, and has no excuse."""
    count = counts(fates)
    return count["killed"] / max(count["killed"] + count["survived"], 1)


def summary(backend: str, fates: list[Fate]) -> str:
    count = counts(fates)
    rest = f"{count['equivalent']} are equivalent, {count['stillborn']} did not compile"
    rest += f", {count['same']} change no machine code" if count["same"] else ""
    rest += f", {count['failed']} were not hunted" if count["failed"] else ""
    alive = count["killed"] + count["survived"]
    return f"{backend}: {count['killed']} of {alive} killed ({100 * rate(fates):.0f} %), {rest}"
